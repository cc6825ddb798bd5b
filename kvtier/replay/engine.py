"""Replay with real bytes: a trace served from tiers that are still filling."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter, perf_counter_ns

from hostmem import HostMem, Placement, placement_of
from kvtier.blocks import BlockCache
from kvtier.leases import BlockLease
from kvtier.replay.options import ReplayOptions
from kvtier.replay.pattern import PatternEngine, pattern_engine
from kvtier.replay.progress import Progress
from kvtier.replay.recording import Histogram, Moment, Recording
from kvtier.replay.shared import CROSS_HOST, OWN
from kvtier.replay.summary import Latency, LevelUse, ReplayResult
from kvtier.replay.trace import Request
from kvtier.storage import TierStorage
from kvtier.transfer.memory import MemoryPool
from kvtier.transfer.slot_io import SlotReadError

__all__ = ["replay_bytes"]

_MOST_AT_ONCE = 256
_PAGES_ASKED = 1 << 17
"""Pages of a level whose memory node is asked for, at most; some 20 ms."""


def replay_bytes(
    requests: Sequence[Request],
    options: ReplayOptions,
    progress: Progress,
    recording: Recording | None = None,
) -> ReplayResult:
    """Serve requests from tiers of real memory and files.

    Each block of a request is found in a level, or absent. The leading ones that are found are
    hits: they are leased, brought to the hot level and compared byte for byte if they come from a
    lower one. Behind the first absent block, those that are there are touched, and the absent ones
    are "computed" into hot pages and stored.

    Parameters
    ----------
    requests : sequence of Request
        In order.
    options : ReplayOptions
        The tiers.
    progress : Progress
        Told after every request.
    recording : Recording, optional
        Given the course of the replay, and where host memory was at its end: that takes up to
        a tenth of a second a level, outside of the time that is measured.

    Raises
    ------
    ValueError
        A quota that cannot be had here; nothing was built.
    HostOOMError, DiskOOMError, CuOOMError, OSError
        Building or moving failed.
    """
    config = options.config()
    start = perf_counter()
    with TierStorage(config, device=options.device, policy=options.policy) as storage:
        filled: list[float] = []
        _note_filled(storage, start, filled)
        most = min(max(storage.levels[0].groups[0].slots.n_slots // 2, 1), _MOST_AT_ONCE)
        with pattern_engine(storage, most) as engine:
            run = _Run(storage, engine, most)
            first_done: float | None = None
            for done, request in enumerate(requests, 1):
                run.serve(request.hash_ids)
                if first_done is None:
                    first_done = perf_counter() - start
                progress.update(
                    done,
                    block_refs=run.block_refs,
                    hits=run.hits,
                    hits_by_level=run.hits_by_level,
                    host_filled=_host_filled(storage),
                )
                if recording is not None:
                    recording.note(perf_counter() - start, run.moment)
        seconds = perf_counter() - start
        stats = storage.stats()
        if recording is not None:
            recording.end(run.moment(seconds))
            recording.latencies = Histogram.of(run.nanoseconds)
            recording.waits = stats.activity.waits
            memories = dict(_host_memories(storage))
            recording.fills = {name: each.progress for name, each in memories.items()}
            recording.placements = {name: _placement(each) for name, each in memories.items()}
        return ReplayResult(
            mode="bytes",
            trace=options.trace,
            policy=options.policy,
            device=storage.device.name,
            requests=len(requests),
            block_refs=run.block_refs,
            hits=run.hits,
            hits_by_level=dict(run.hits_by_level),
            seconds=seconds,
            levels={
                name: LevelUse(slots=level.slots, quota=level.quota, used=level.used)
                for name, level in stats.levels.items()
            },
            verified_blocks=run.verified,
            corrupt_blocks=run.corrupt,
            lost_blocks=run.lost,
            bytes_moved=stats.bytes_moved,
            first_request_done_seconds=first_done,
            host_tier_filled_seconds=filled[0] if filled else None,
            latency_us=Latency.of(run.nanoseconds) if run.nanoseconds else None,
        )


class _Run:
    """Serves requests and counts."""

    def __init__(self, storage: TierStorage, engine: PatternEngine, most: int) -> None:
        self._storage = storage
        self._names = [level.name for level in storage.levels]
        self._cache: BlockCache[int] = BlockCache(storage)
        self._engine = engine
        self._most = most
        self._shares = storage.config.remote is not None
        self._computed: set[int] = set()
        self.block_refs = 0
        self.hits = 0
        self.hits_by_level: Counter[str] = Counter()
        self.verified = 0
        self.corrupt = 0
        self.nanoseconds: list[int] = []

    @property
    def lost(self) -> int:
        """Blocks that a failed copy cost."""
        return self._cache.lost

    def moment(self, seconds: float) -> Moment:
        """Look where the replay is."""
        activity = self._storage.stats().activity
        return Moment(
            seconds=seconds,
            requests=len(self.nanoseconds),
            block_refs=self.block_refs,
            hits=dict(self.hits_by_level),
            host_filled=_host_filled(self._storage),
            moved={pair: traffic.total_bytes for pair, traffic in activity.pairs.items()},
            waited={what: waits.seconds for what, waits in activity.waits.items()},
        )

    def serve(self, ids: Sequence[int]) -> None:
        """Serve one request."""
        began = perf_counter_ns()
        self.block_refs += len(ids)
        hits = self._use_prefix(ids)
        self.hits += hits
        self._store_rest(ids, hits)
        self.nanoseconds.append(perf_counter_ns() - began)

    def _use_prefix(self, ids: Sequence[int]) -> int:
        """Bring the leading blocks that are there to the hot level, a part at a time."""
        at = 0
        while at < len(ids):
            wanted = ids[at : at + self._most]
            fetched = self._fetch(_distinct(wanted)) if self._shares else set()
            with self._cache.acquire(_distinct(wanted)) as lease:
                try:
                    lease.wait()
                except SlotReadError as error:
                    if error.errno != errno.EBADMSG:
                        raise  # the disk fails
                    self.corrupt += 1  # found out before it was served: from here on it is a miss
                    return at
                self._compare(lease, fetched)
                found = dict(zip(lease.keys, lease.found, strict=True))
            hits = next((n for n, key in enumerate(wanted) if key not in found), len(wanted))
            for key in wanted[:hits]:
                # Asked for a second time in one request, it is where the first time brought it.
                name = self._names[found[key]]
                if key in fetched:
                    name = OWN if key in self._computed else CROSS_HOST
                    fetched.discard(key)
                self.hits_by_level[name] += 1
                found[key] = 0
            at += hits
            if hits < len(wanted):
                break
        return at

    def _fetch(self, ids: Sequence[int]) -> set[int]:
        """Fetch what is not here from the store; which blocks have come."""
        cache = self._cache
        if (here := cache.match(ids)) == len(ids):
            return set()
        cache.prefetch(ids).wait()
        return set(ids[here : cache.match(ids)])

    def _compare(self, lease: BlockLease[int], fetched: set[int]) -> None:
        """Compare the blocks that came back from a lower level or a store byte for byte."""
        keys = lease.keys
        came_back = [n for n, level in enumerate(lease.found) if level > 0 or keys[n] in fetched]
        if came_back:
            self.verified += len(came_back)
            self.corrupt += self._engine.count_corrupt(
                lease.slots()[came_back], [keys[n] for n in came_back]
            )

    def _store_rest(self, ids: Sequence[int], at: int) -> None:
        """Touch what is there behind the first absent block, and compute and store the rest."""
        cache = self._cache
        while at < len(ids):
            end = at
            if ids[at] in cache:
                while end < len(ids) and ids[end] in cache:
                    end += 1
                cache.touch(ids[at:end])
            else:
                fresh: dict[int, None] = {}
                while end < len(ids) and len(fresh) < self._most:
                    if ids[end] in cache or ids[end] in fresh:
                        break
                    fresh[ids[end]] = None
                    end += 1
                keys = list(fresh)
                with cache.reserve(keys) as reservation:
                    reservation.wait()
                    self._engine.write(reservation.slots(), keys)
                    self._computed.update(keys if self._shares else ())
                    reservation.commit()
            at = end


def _distinct(ids: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def _host_memories(storage: TierStorage) -> Iterator[tuple[str, HostMem]]:
    """Yield the host memory that there is, by level: on the cpu device, the hot level's as well."""
    for level in storage.levels:
        for pool in level.groups[0].memory.pools:
            if isinstance(pool, MemoryPool) and isinstance(pool.memory, HostMem):
                yield level.name, pool.memory


def _placement(memory: HostMem) -> Placement:
    """Look where memory is; the map is of what is used, which may be a small part of its range."""
    used = placement_of(memory.address, memory.size, sample=_PAGES_ASKED)
    return replace(memory.placement(sample=_PAGES_ASKED), stretches=used.stretches)


def _host_memory(storage: TierStorage) -> HostMem | None:
    return next((memory for name, memory in _host_memories(storage) if name == "host"), None)


def _note_filled(storage: TierStorage, start: float, filled: list[float]) -> None:
    """Append the seconds from ``start`` once the whole host tier is usable."""
    memory = _host_memory(storage)

    def note(error: BaseException | None) -> None:
        if error is None:
            filled.append(perf_counter() - start)

    if memory is not None:
        memory.add_usable_callback(memory.size, note)


def _host_filled(storage: TierStorage) -> float | None:
    memory = _host_memory(storage)
    return None if memory is None else memory.committed / memory.size
