"""Block caches under every order of their operations, beside what is known of each key's bytes.

A few seconds a machine; ``KVTIER_MACHINE_EXAMPLES=2000`` makes it many more examples.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from hostmem import (
    DiskOOMError,
    Event,
    HostEvent,
    OutOfPagesError,
    ResourceBusyError,
    StaticHostMem,
)
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockJob,
    BlockLease,
    BlockReservation,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)
from kvtier.block import failed
from kvtier.transfer.memory import MemoryPool

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

EXAMPLES = int(os.environ.get("KVTIER_MACHINE_EXAMPLES", "30"))
STEPS = 40
KIB, MIB = 1 << 10, 1 << 20
QUOTAS = (4, 10)  # MiB that each level may have
TOKENS = 16
CHAIN = 8  # blocks of a sequence
HOMES = 24  # pages of the engine
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("kv", 512 * KIB)]),
    AttentionLayerConfig(
        1,
        [BufferConfig("key", 192 * KIB), BufferConfig("value", 64 * KIB)],
        sliding_window_size=2 * TOKENS,
        num_sink_tokens=TOKENS,
    ),
]
COPY = "process_vm_readv"
Bytes = NDArray[np.uint8]
State = tuple[object, ...]

CHAINS, FIRST, COUNT = st.integers(0, 2), st.integers(0, 3), st.integers(1, 8)
PICK, GROUP = st.integers(0, 63), st.sampled_from([0, 1])


class StepError(Exception):
    """A step of the model that failed: its blocks never held what they should."""


@dataclass(eq=False)
class Step:
    """Work of the engine that was submitted and is not done."""

    run: Callable[[bool], None]
    fences: Sequence[Event] = ()
    ready: HostEvent = field(default_factory=HostEvent)
    may_fail: bool = False


class BlockMachine(RuleBasedStateMachine):
    """What is found has the bytes of its key, and nothing is lost but by eviction.

    Steps that are submitted and not done keep all copies behind them in flight.
    """

    tiers: Tiers
    hot = True
    """Whether the first level is the hot one; otherwise the engine has pages of its own."""

    def __init__(self) -> None:
        super().__init__()
        least, most = (quota * MIB for quota in QUOTAS)
        levels = [
            GpuCacheTierConfig(least, most),
            HostCacheTierConfig(least, most),
            DiskCacheTierConfig(least, str(self.tiers.folder), most),
        ]
        config = KVCacheManagerConfig(TOKENS, levels[not self.hot :], LAYERS)
        self.stack = contextlib.ExitStack()
        self.storage = self.stack.enter_context(TierStorage(config, device="cpu"))
        self.cache: BlockCache[int] = BlockCache(
            self.storage, engine=self.engine(), max_events=100_000
        )
        self.layouts = self.storage.plan.groups
        self.contents: dict[tuple[int, int], Bytes] = {}
        self.leases: list[BlockLease[int]] = []
        self.reservations: list[tuple[BlockReservation[int], list[int]]] = []
        self.jobs: list[tuple[BlockJob[int], Callable[[], None]]] = []
        self.steps: list[Step] = []
        self.spoilt: set[Page] = set()
        """Pages that a failed step was to write."""
        self.kept: set[int] = set()
        self.picture: dict[tuple[int, int], str] = {}
        """The level of each page of each key, as events tell it."""
        self.failing = False
        """Whether copies fail now, or have since nothing was in flight."""

    def engine(self) -> EnginePages | None:
        return None

    # ------------------------------------------------------------------------------ the model

    def keys(self, chain: int, first: int, count: int) -> list[int]:
        return list(range(chain * CHAIN, (chain + 1) * CHAIN))[first : first + count]

    def content(self, key: int, group: int) -> Bytes:
        if (key, group) not in self.contents:
            nbytes = self.layouts[group].page_bytes
            self.contents[key, group] = self.tiers.content(key * 2 + group, nbytes)
        return self.contents[key, group]

    def slot(self, group: int, slot: int) -> list[tuple[int, Bytes]]:
        """Give the pieces of a slot of the first level, each with its place in the page."""
        memory = self.storage.levels[0].groups[group].memory
        return [
            (offset, self.tiers._slot(cast(MemoryPool, pool), slot))
            for pool, offset in zip(memory.pools, memory.offsets, strict=True)
        ]

    def write(self, key: int, page: Page, slot: int) -> None:
        content = self.content(key, page.group)
        for offset, piece in self.slot(page.group, slot):
            piece[:] = content[offset : offset + len(piece)]

    def scribble(self, group: int, slot: int) -> None:
        for _, piece in self.slot(group, slot):
            piece[:] = 0xEE

    def assert_holds(self, key: int, group: int, slot: int) -> None:
        content = self.content(key, group)
        for offset, piece in self.slot(group, slot):
            same = np.array_equal(piece, content[offset : offset + len(piece)])
            assert same, f"block {key}, group {group}: wrong bytes"

    def usable(self, keys: Sequence[int]) -> int:
        """Count the leading blocks that can be used, the long way."""
        rows = []
        for key in keys:
            block = self.cache._index.blocks.get(key)
            if block is None:
                break
            rows.append([page is not None and not failed(page) for page in block.pages])
        count = len(rows)
        while count and not all(
            rows[n][group] or n in self.hidden(group, count)
            for group in range(len(self.layouts))
            for n in range(count)
        ):
            count -= 1
        return count

    def hidden(self, group: int, count: int) -> range:
        return range(*self.layouts[group].stale_blocks(count * TOKENS, TOKENS))

    def state(self) -> State:
        """Everything that a refusal must leave as it was."""
        return (
            {key: self.places(block.pages) for key, block in self.cache._index.blocks.items()},
            set(self.cache._reserved),
            [
                (level.quota, self.places(policy.victims()), group.slots.in_use)
                for level in self.storage.levels
                for group, policy in zip(level.groups, level.policies, strict=True)
            ],
        )

    def places(self, pages: Iterable[Page | None]) -> list[object]:
        return [p and (p, p.level, p.slot, p.leases, p.kept, p.priority) for p in pages]

    @property
    def certain(self) -> bool:
        """Whether nothing is known to fail, or may still."""
        return not (self.failing or self.steps or any(p.lost for p in self.spoilt if not p.freed))

    @contextlib.contextmanager
    def refusing(self, *errors: type[Exception]) -> Iterator[None]:
        """Let a call be refused, with nothing changed."""
        certain = self.certain
        before = self.state() if certain else ()
        try:
            yield
        except errors:
            assert not certain or self.state() == before, "a refusal changed something"
        except (OSError, DiskOOMError):
            if not self.failing:
                raise

    # ------------------------------------------------------------------------- what is in flight

    def later(self, run: Callable[[bool], None], fences: Sequence[Event] = ()) -> Step:
        self.steps.append(Step(run, fences))
        return self.steps[-1]

    def do(self, step: Step, *, fails: bool = False) -> None:
        """Do a step, once nothing uses what it writes."""
        for fence in step.fences:
            fence.wait_finished()
        fails &= step.may_fail
        step.run(fails)
        step.ready.set(StepError("a step failed") if fails else None)

    def unblock(self) -> None:
        """Let everything go on that waits for the engine."""
        while self.steps:
            self.do(self.steps.pop(0))

    def quiesce(self) -> None:
        """Wait until nothing is in flight, and let the cache know."""
        self.unblock()
        for job, done in self.jobs:
            with contextlib.suppress(StepError, OSError, DiskOOMError):
                job.wait(20)
            assert job.done
            done()
        self.jobs.clear()
        for queue in self.storage._mover._moving.values():
            for moving in queue:
                moving.event.wait_finished()
        self.storage.settle()
        for key in list(self.cache):
            with self.storage.lock:
                self.cache._index.readable(key)
        self.spoilt = {page for page in self.spoilt if not page.freed}

    def came(self, held: BlockLease[int] | BlockReservation[int]) -> bool:
        """Wait for pages; tell whether they came, as they must unless something may have failed."""
        try:
            held.wait()
        except (StepError, OSError, DiskOOMError):
            if not (self.failing or self.spoilt.intersection(held._pages())):
                raise
            return False
        return True

    def verify(self, lease: BlockLease[int]) -> None:
        """Compare every byte of blocks that are held."""
        self.unblock()
        pages = lease._pages()
        if not self.came(lease):
            return
        assert not self.spoilt.intersection(pages), "a block was served that was never computed"
        for group in range(len(self.layouts)):
            for key, slot in zip(lease.keys, lease.slots(group).tolist(), strict=True):
                if slot >= 0:
                    self.assert_holds(key, group, slot)

    # ---------------------------------------------------------------------------------- rules

    @initialize(chains=st.lists(CHAINS, unique=True), count=COUNT)
    def begin(self, chains: list[int], count: int) -> None:
        """Begin with some blocks."""
        for chain in chains:
            for key in self.keys(chain, 0, count):
                self.reservations.append((self.cache.reserve([key]), [key]))
                self.commit(0, "now", 0, False)

    @rule(
        chain=CHAINS, first=FIRST, count=COUNT, unnamed=st.booleans(), priority=st.integers(-1, 1)
    )
    def reserve(self, chain: int, first: int, count: int, unnamed: bool, priority: int) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, first, count)
        named: list[int | None] = [None] * len(keys) if unnamed else [*keys]
        taken = not unnamed and any(
            key in self.cache._reserved
            or (key in self.cache and not self.cache._index.is_unread(key))
            for key in keys
        )
        with self.refusing(ValueError if taken else OutOfPagesError):
            fresh = self.cache.reserve(named, priority=priority)
            assert not taken or not self.certain
            self.reservations.append((fresh, keys))

    @rule(
        pick=PICK,
        how=st.sampled_from(["now", "now", "later", "failed"]),
        leased=st.sampled_from([0, 0, 1, 2]),
        stay=st.booleans(),
    )
    def commit(self, pick: int, how: str, leased: int, stay: bool) -> None:
        """Write the leading blocks, or all, under the keys that were meant."""
        if not self.reservations:
            return
        fresh, keys = self.reservations.pop(pick % len(self.reservations))
        some = keys[: leased or None]
        pages = [page for column in fresh._columns for page in column[: len(some)]]
        parts = [
            (key, cast(Page, page), cast(Page, page).slot)
            for column in fresh._columns
            for key, page in zip(some, column, strict=False)
        ]
        assert None not in pages

        def run(fails: bool) -> None:
            for key, page, slot in parts:
                if fails:
                    self.spoilt.add(page)
                    self.scribble(page.group, slot)
                else:
                    self.write(key, page, slot)

        if how == "now":
            if not all(fence.query() for fence in fresh.fences):
                self.unblock()
            if not self.came(fresh):
                fresh.cancel()
                return
        step = self.later(run, fresh.fences)
        step.may_fail = how == "failed"
        if how == "now":
            self.do(self.steps.pop())
        if not leased:
            fresh.commit(step.ready, keys)
            return
        lease = fresh.commit_leased(step.ready, some)
        assert lease.keys == some
        self.reservations.append((fresh, keys[len(some) :]))
        self.leases.append(lease)
        if not stay:
            self.release(-1, False)

    @rule(pick=PICK, still_writing=st.booleans())
    def cancel(self, pick: int, still_writing: bool) -> None:
        if not self.reservations:
            return
        fresh, _ = self.reservations.pop(pick % len(self.reservations))
        if not still_writing:
            fresh.cancel()
            return
        slots = [(page.group, page.slot) for page in fresh._pages()]

        def run(_: bool) -> None:
            for group, slot in slots:
                self.scribble(group, slot)

        fresh.cancel(self.later(run, fresh.fences).ready)

    @rule(pick=PICK, other=PICK)
    def extend(self, pick: int, other: int) -> None:
        if len(self.leases) > 1:
            mine = self.leases.pop(pick % len(self.leases))
            mine.extend(self.leases.pop(other % len(self.leases)))
            self.leases.append(mine)
        if len(self.reservations) > 1:
            fresh, keys = self.reservations.pop(pick % len(self.reservations))
            more, others = self.reservations.pop(other % len(self.reservations))
            if set(keys).isdisjoint(others):
                fresh.extend(more)
                self.reservations.append((fresh, keys + others))
            else:
                self.reservations += [(more, others), (fresh, keys)]

    @rule(pick=PICK, fails=st.booleans())
    def go_on(self, pick: int, fails: bool) -> None:
        """Do a step, of any stream: the oldest, or one that has nothing to wait for."""
        if self.steps:
            may = [s for s in self.steps if all(fence.query() for fence in s.fences)]
            step = may[pick % len(may)] if may else self.steps[0]
            self.steps.remove(step)
            self.do(step, fails=fails)

    @rule()
    def quiet(self) -> None:
        self.quiesce()

    @rule(chain=CHAINS, count=COUNT, stay=st.booleans(), read=st.booleans())
    def acquire(self, chain: int, count: int, stay: bool, read: bool) -> None:
        if self.kept or read:
            self.unblock()
        keys = self.keys(chain, 0, count)
        with self.refusing(OutOfPagesError):
            certain, room = self.certain, self.cache.room_for(keys)
            before = [self.storage.leased(group) for group in range(len(self.layouts))]
            lease = self.cache.acquire(keys)
            self.leases.append(lease)
            found = len(lease)
            assert lease.keys == keys[:found]
            if certain:
                assert found == self.usable(keys) == self.cache.match(keys)
                after = [self.storage.leased(group) for group in range(len(self.layouts))]
                assert after == [a + b for a, b in zip(before, room, strict=True)]
            for group in range(len(self.layouts)):
                shown = [n for n, slot in enumerate(lease.slots(group).tolist()) if slot >= 0]
                assert shown == [n for n in range(found) if n not in self.hidden(group, found)]
            if read:
                self.verify(lease)
            if not stay:
                self.release(-1, False)

    @rule(pick=PICK, reading=st.booleans())
    def release(self, pick: int, reading: bool) -> None:
        """Let a lease go, maybe while a step still reads its pages."""
        if not self.leases:
            return
        lease = self.leases.pop(pick % len(self.leases) if pick >= 0 else -1)
        if not reading:
            lease.release()
            return
        lease.release(self.reader(lease, range(len(self.layouts)), len(lease)).ready)

    def reader(self, lease: BlockLease[int], groups: Iterable[int], blocks: int) -> Step:
        """Submit a step that reads pages of a lease."""
        parts = [
            (key, page, page.slot)
            for group in groups
            for key, page in zip(lease.keys[:blocks], lease._columns[group], strict=False)
            if page is not None
        ]
        failing = self.failing
        events = [page.ready for _, page, _ in parts]

        def run(_: bool) -> None:
            for (key, page, slot), event in zip(parts, events, strict=True):
                if event.error is None and not failing:
                    self.assert_holds(key, page.group, slot)

        return self.later(run, events)

    @rule(pick=PICK, blocks=COUNT, reading=st.booleans())
    def forget(self, pick: int, blocks: int, reading: bool) -> None:
        if self.leases:
            lease = self.leases[pick % len(self.leases)]
            if reading:
                lease.forget(1, blocks, self.reader(lease, [1], blocks).ready)
            else:
                lease.forget(1, blocks)
            shown = lease.slots(1).tolist()
            assert set(shown[1:blocks]) <= {-1}

    @rule(chain=CHAINS, count=COUNT)
    def prefetch(self, chain: int, count: int) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, 0, count)
        with self.refusing(OutOfPagesError):
            job = self.cache.prefetch(keys)
            assert job.keys == keys[: len(job.keys)]
            if self.certain:
                assert len(job.keys) == self.usable(keys)
            self.jobs.append((job, lambda: None))

    @rule(chain=CHAINS, first=FIRST, count=COUNT)
    def touch(self, chain: int, first: int, count: int) -> None:
        with contextlib.suppress(KeyError):
            self.cache.touch(self.keys(chain, first, count))

    @rule(chain=CHAINS, first=FIRST, count=st.integers(1, 3), kept=st.booleans())
    def keep(self, chain: int, first: int, count: int, kept: bool) -> None:
        keys = self.keys(chain, first, count)
        with self.refusing(KeyError):
            self.cache.keep(keys, kept)
            self.kept = self.kept.union(keys) if kept else self.kept.difference(keys)

    @rule(chain=CHAINS, first=FIRST, count=COUNT, priority=st.integers(-1, 1))
    def set_priority(self, chain: int, first: int, count: int, priority: int) -> None:
        with self.refusing(KeyError):
            self.cache.set_priority(self.keys(chain, first, count), priority)

    def leased(self, keys: Sequence[int]) -> bool:
        return any(
            page.leases
            for key in keys
            if key in self.cache
            for page in self.cache._index.pages(key)
        )

    @rule(chain=CHAINS, first=FIRST, count=COUNT)
    def drop(self, chain: int, first: int, count: int) -> None:
        keys = self.keys(chain, first, count)
        busy, there = self.leased(keys), sum(key in self.cache for key in keys)
        with self.refusing(ResourceBusyError):
            assert self.cache.drop(keys) == there
            assert not busy
            self.kept.difference_update(keys)
            assert not any(key in self.cache for key in keys)

    @rule(chain=CHAINS, first=FIRST, count=st.integers(1, 3))
    def withdraw(self, chain: int, first: int, count: int) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, first, count)
        whole = all(self.usable([key]) or False for key in keys) and all(
            len(self.cache._index.pages(key)) == len(self.layouts) for key in keys
        )
        errors = (ResourceBusyError, OutOfPagesError) if whole else (KeyError,)
        with self.refusing(*(errors if self.certain else (KeyError, *errors))):
            fresh = self.cache.withdraw(keys)
            assert whole or not self.certain
            self.kept.difference_update(keys)
            assert not any(key in self.cache for key in keys)
            if self.certain:  # the bytes are still there, once they have come
                fresh.wait()
                for group in range(len(self.layouts)):
                    for key, slot in zip(keys, fresh.slots(group).tolist(), strict=True):
                        self.assert_holds(key, group, slot)
            self.reservations.append((fresh, keys))

    @rule(level=st.integers(0, 2), quota=st.sampled_from([4, 4, 6, 8, 10]))
    def adjust(self, level: int, quota: int) -> None:
        self.unblock()
        with self.refusing(ResourceBusyError, OutOfPagesError, StepError):
            self.storage.adjust_cache_level(level % len(self.storage.levels), quota * MIB)

    # ------------------------------------------------------------------------------- invariants

    @invariant()
    def books_balance(self) -> None:
        storage, blocks = self.storage, self.cache._index.blocks
        storage._check()
        assert storage._latch.reason is None
        held = {page for lease in self.leases for page in lease._pages()}
        held.update(page for fresh, _ in self.reservations for page in fresh._pages())
        for group in range(len(self.layouts)):
            assert storage.leased(group) == sum(page.group == group for page in held)
        found = {page for block in blocks.values() for page in block.pages if page is not None}
        assert all(page.leases for page in held)
        assert not any(page.leases for page in found - held)
        for level in storage.levels:
            for group, at in enumerate(level.groups):
                live = [p.slot for p in found | held if (p.level, p.group) == (level.index, group)]
                assert sorted(live) == sorted(at.slots.live_above(0).tolist()), "slots leaked"

    @invariant()
    def blocks_are_whole(self) -> None:
        for key, block in self.cache._index.blocks.items():
            assert block.key == key
            assert block.pages[0] is not None, f"{block} lacks what no window lets it lack"
            for page in block.pages:
                assert page is None or page.owner is block
        names = {key for fresh, _ in self.reservations for key in fresh.keys}
        assert self.cache._reserved == names

    @invariant()
    def kept_blocks_stay(self) -> None:
        if self.failing or self.spoilt:
            self.kept.intersection_update(self.cache)  # they may have been lost
        else:
            assert self.kept <= self.cache._index.blocks.keys()

    @invariant()
    def events_tell_what_happened(self) -> None:
        for event in self.cache.take_events():
            for key in event.keys:
                place = key, event.group
                if event.kind == "removed":
                    assert self.picture.pop(place) == event.source
                    continue
                assert self.picture.get(place) == event.source, f"{event} of {place}"
                assert event.level is not None
                self.picture[place] = event.level
        assert self.picture == {
            (key, page.group): self.storage.levels[page.level].name
            for key, block in self.cache._index.blocks.items()
            for page in block.pages
            if page is not None
        }

    def teardown(self) -> None:
        try:
            self.quiesce()
            for lease in self.leases:
                self.verify(lease)
                lease.release()
            for fresh, _ in self.reservations:
                fresh.cancel()
            self.leases.clear()
            self.reservations.clear()
            self.quiesce()
            self.books_balance()
            self.events_tell_what_happened()
            if not self.failing:
                for key, block in self.cache._index.blocks.items():
                    for page in block.pages:
                        if page is not None:
                            word = key * 2 + page.group
                            assert self.tiers.intact(self.storage, page, word), page
            self.cache.drop(list(self.cache))
            assert [level.used for level in self.storage.stats().levels.values()] == [0] * len(
                self.storage.levels
            )
            self.events_tell_what_happened()
        finally:
            with contextlib.suppress(Exception):
                self.unblock()
            self.stack.close()


class EngineMachine(BlockMachine):
    """The same with an engine that has pages of its own, over host memory and a disk."""

    hot = False

    def engine(self) -> EnginePages:
        self.arrays: dict[tuple[int, str], NDArray[np.uint8]] = {}
        buffers = {}
        for layer in LAYERS:
            for buffer in layer.buffers:
                name, stride = (layer.layer_id, buffer.role), buffer.size + 4 * KIB
                memory = self.stack.enter_context(StaticHostMem(HOMES * stride, device="cpu"))
                buffers[name] = memory.address, stride
                rows = self.tiers.raw(memory.address, HOMES * stride).reshape(HOMES, stride)
                rows[:] = 0x77
                self.arrays[name] = rows
        self.free = list(range(HOMES))
        return EnginePages(self.storage, buffers, HOMES)

    def pieces(self, group: int, home: int) -> Iterator[tuple[int, Bytes]]:
        offset = 0
        for pool in self.layouts[group].pools:
            for place in pool.buffers:
                row = self.arrays[place.layer_id, place.role][home]
                assert (row[place.size :] == 0x77).all(), "bytes between the pages were written"
                yield offset, row[: place.size]
                offset += place.size

    def fill(self, key: int | None, home: int) -> None:
        for group in range(len(self.layouts)):
            for offset, piece in self.pieces(group, home):
                piece[:] = (
                    0xEE if key is None else self.content(key, group)[offset : offset + len(piece)]
                )

    @rule(
        chain=CHAINS,
        first=FIRST,
        count=COUNT,
        how=st.sampled_from(["now", "now", "later", "failed"]),
        shown=st.integers(0, 255),
        priority=st.integers(-1, 1),
    )
    def store(
        self, chain: int, first: int, count: int, how: str, shown: int, priority: int
    ) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, first, count)
        if len(self.free) < len(keys):
            self.quiesce()
        homes, self.free = self.free[: len(keys)], self.free[len(keys) :]
        pages = np.array([homes, homes])
        pages[1, [not shown >> n & 1 for n in range(len(keys))]] = -1
        missing = [
            key
            for n, key in enumerate(keys)
            if key not in self.cache
            or self.cache._index.is_unread(key)
            or (self.cache._index.blocks[key].pages[1] is None and pages[1, n] >= 0)
        ]
        copied: list[Page] = []

        def run(fails: bool) -> None:
            for key, home in zip(keys, homes, strict=True):
                self.fill(None if fails else key, home)
            if fails:
                self.spoilt.update(copied)

        step = self.later(run)
        step.may_fail = how == "failed"
        if how == "now":
            self.unblock()
        certain, accepted = self.certain, False
        with self.refusing(OutOfPagesError):
            before = {p for b in self.cache._index.blocks.values() for p in b.pages}
            job = self.cache.store(keys, pages, ready=step.ready, priority=priority)
            after = {p for b in self.cache._index.blocks.values() for p in b.pages}
            copied.extend(page for page in after - before if page is not None)
            if certain:
                assert job.keys == missing
            assert all(key in self.cache for key in keys if key in missing)

            def done() -> None:
                for home in homes:
                    self.fill(None, home)
                self.free.extend(homes)

            self.jobs.append((job, done))
            accepted = True
        if not accepted:
            self.unblock()
            self.free.extend(homes)

    @rule(chain=CHAINS, count=COUNT, some=st.integers(0, 255), reading=st.booleans())
    def load(self, chain: int, count: int, some: int, reading: bool) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, 0, count)
        keys = keys[: self.cache.match(keys)]
        if len(self.free) < len(keys):
            self.quiesce()
        homes, self.free = self.free[: len(keys)], self.free[len(keys) :]
        pages = np.array([homes, homes])
        for n, key in enumerate(keys):
            if n in self.hidden(1, len(keys)) or not self.cache._index.blocks.get(key):
                pages[1, n] = -1
            elif some >> n & 1:
                pages[n & 2 and 1, n] = -1
        for home in homes:
            self.fill(None, home)
        step = self.later(lambda _: None)
        if not reading:
            self.unblock()
        certain, accepted = self.certain, False
        with self.refusing(*([OutOfPagesError] if certain else [OutOfPagesError, KeyError])):
            job = self.cache.load(keys, pages, ready=step.ready)

            def done() -> None:
                wrong = dict(job.failed)
                assert certain <= (not wrong), wrong
                for n, (key, home) in enumerate(zip(keys, homes, strict=True)):
                    for group in range(len(self.layouts)):
                        content = self.content(key, group)
                        for offset, piece in self.pieces(group, home):
                            if pages[group, n] < 0:
                                assert (piece == 0xEE).all()
                            elif key not in wrong:
                                part = content[offset : offset + len(piece)]
                                assert np.array_equal(piece, part), f"{key} was loaded wrong"
                self.free.extend(homes)

            self.jobs.append((job, done))
            accepted = True
        if not accepted:
            self.unblock()
            self.free.extend(homes)


def _faulty(machine: type[BlockMachine]) -> type[BlockMachine]:
    class Faulty(machine):  # type: ignore[valid-type,misc]
        """The same while copies fail: blocks may be lost; bytes are right, and no slot is lost."""

        def __init__(self) -> None:
            self.plan = FaultPlan().__enter__()
            self.armed: dict[str, int] = {}
            try:
                super().__init__()
                for call in ("preadv", "pwritev", COPY):
                    self.plan.fail(
                        call, errno.EIO, times=None, when=lambda *_, call=call: self.strikes(call)
                    )
            except BaseException:
                self.plan.__exit__(None, None, None)
                raise

        def strikes(self, call: str) -> bool:
            left = self.armed.get(call, 0)
            if left > 0:
                self.armed[call] = left - 1
            return left > 0

        @rule(call=st.sampled_from(["preadv", "pwritev", COPY]), times=st.integers(1, 6))
        def arm(self, call: str, times: int) -> None:
            self.armed[call] = times
            self.failing = True

        @rule()
        def disarm(self) -> None:
            self.armed.clear()
            self.quiesce()
            self.failing = any(
                page.lost
                for level in self.storage.levels
                for policy in level.policies
                for page in policy.victims()
            )

        def teardown(self) -> None:
            self.armed.clear()
            try:
                super().teardown()
            finally:
                self.plan.__exit__(None, None, None)

    return Faulty


def check(machine: type[BlockMachine], tiers: Tiers) -> None:
    run_state_machine_as_test(
        type(machine.__name__, (machine,), {"tiers": tiers}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(max(EXAMPLES * 3, 120))
@pytest.mark.parametrize("machine", [BlockMachine, EngineMachine], ids=["hot", "engine"])
def test_what_is_found_has_the_bytes_of_its_key(machine: type[BlockMachine], tiers: Tiers) -> None:
    check(machine, tiers)


@pytest.mark.timeout(max(EXAMPLES * 3, 120))
@pytest.mark.parametrize("machine", [BlockMachine, EngineMachine], ids=["hot", "engine"])
def test_failed_copies_cost_blocks_and_never_give_wrong_bytes(
    machine: type[BlockMachine], tiers: Tiers
) -> None:
    check(_faulty(machine), tiers)
