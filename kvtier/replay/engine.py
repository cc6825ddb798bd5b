"""Replay with real bytes: a trace served from tiers that are still filling."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence
from time import perf_counter, perf_counter_ns
from typing import cast

from hostmem import HostMem
from kvtier.blocks import BlockCache
from kvtier.leases import BlockLease
from kvtier.replay.options import ReplayOptions
from kvtier.replay.pattern import PatternEngine, pattern_engine
from kvtier.replay.progress import Progress
from kvtier.replay.summary import Latency, LevelUse, ReplayResult
from kvtier.replay.trace import Request
from kvtier.storage import TierStorage
from kvtier.transfer.memory import MemoryPool
from kvtier.transfer.slot_io import SlotReadError

__all__ = ["replay_bytes"]

_MOST_AT_ONCE = 256


def replay_bytes(
    requests: Sequence[Request], options: ReplayOptions, progress: Progress
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
        seconds = perf_counter() - start
        stats = storage.stats()
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
        self._names = [level.name for level in storage.levels]
        self._cache: BlockCache[int] = BlockCache(storage)
        self._engine = engine
        self._most = most
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
            with self._cache.acquire(_distinct(wanted)) as lease:
                try:
                    lease.wait()
                except SlotReadError as error:
                    if error.errno != errno.EBADMSG:
                        raise  # the disk fails
                    self.corrupt += 1  # found out before it was served: from here on it is a miss
                    return at
                self._compare(lease)
                found = dict(zip(lease.keys, lease.found, strict=True))
            hits = next((n for n, key in enumerate(wanted) if key not in found), len(wanted))
            for key in wanted[:hits]:
                # Asked for a second time in one request, it is where the first time brought it.
                self.hits_by_level[self._names[found[key]]] += 1
                found[key] = 0
            at += hits
            if hits < len(wanted):
                break
        return at

    def _compare(self, lease: BlockLease[int]) -> None:
        """Compare the blocks that came back from a lower level byte for byte."""
        came_back = [n for n, level in enumerate(lease.found) if level > 0]
        if came_back:
            keys = lease.keys
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
                    reservation.commit()
            at = end


def _distinct(ids: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def _host_memory(storage: TierStorage) -> HostMem | None:
    for level in storage.levels:
        if level.name == "host":
            return cast(HostMem, cast(MemoryPool, level.groups[0].memory.pools[0]).memory)
    return None


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
