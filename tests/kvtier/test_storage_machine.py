"""Storages under every order of their operations, beside a model that knows each page's bytes.

A few seconds a machine; ``KVTIER_MACHINE_EXAMPLES=2000`` makes it many more examples.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

from hostmem import DiskOOMError, Event, HostEvent, OutOfPagesError, ResourceBusyError
from hostmem.device import DONE
from hostmem.testing.faults import Hold
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)
from kvtier.transfer.memory import DiskPool, MemoryPool

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

EXAMPLES = int(os.environ.get("KVTIER_MACHINE_EXAMPLES", "30"))
STEPS = 40
KIB, MIB = 1 << 10, 1 << 20
QUOTAS = (4, 8)  # MiB that each level may have: 4 to 8 pages of group 0, and 8 to 16 of group 1
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("kv", 512 * KIB)]),
    AttentionLayerConfig(
        1, [BufferConfig("key", 192 * KIB), BufferConfig("value", 64 * KIB)], sliding_window_size=64
    ),
]
DISK = 2
_WORDS = np.arange(64 * KIB, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
Bytes = NDArray[np.uint8]

# Draws do not depend on what the storage does: threads may be faster or slower in the next run.
PICKS = st.lists(st.integers(0, 63), min_size=1, max_size=6)
GROUP, LEVEL = st.sampled_from([0, 1]), st.sampled_from([0, 1, 2])


def content(key: int, nbytes: int) -> Bytes:
    """Say what a page holds: every word depends on the key and the position."""
    return (_WORDS[: nbytes // 8] + np.uint64(key * 1_000_003)).view(np.uint8)


class StepError(Exception):
    """A step of the model that failed: its pages never held what they should."""


@dataclass(eq=False)
class Entry:
    """What is known of a page."""

    key: int
    page: Page
    leases: int = 1
    kept: bool = False
    committed: bool = False
    spoilt: bool = False
    """Whether the step that was to write it failed, or the slot it was in was damaged."""
    doubtful: bool = False
    """Whether a copy of it failed, and it goes back or gets lost when it is let go."""
    level: int = 0
    """Where it is, as was told."""
    place: tuple[int, int] = (0, 0)
    """Level and slot when it was leased."""


@dataclass(eq=False)
class Step:
    """Work that writes pages, or reads them, submitted and not done; waits for fences."""

    entries: list[Entry]
    fences: list[Event]
    parts: list[tuple[Bytes, Bytes]]
    reads: bool = False
    done: HostEvent = field(default_factory=HostEvent)

    def run(self, *, fails: bool) -> None:
        for fence in self.fences:
            fence.wait_finished()
        for memory, wanted in self.parts:
            if self.reads:
                assert fails or np.array_equal(memory, wanted), "it changed under a step"
            else:
                memory[:] = 0xEE if fails else wanted
        for entry in self.entries:
            entry.spoilt |= fails and not self.reads
        self.done.set(StepError("a step failed") if fails else None)


class StorageMachine(RuleBasedStateMachine):
    """Pages are where they may be, hold what was written, and a refusal changes nothing.

    Steps that are submitted and not done keep all copies behind them in flight.
    """

    tiers: Tiers

    def __init__(self) -> None:
        super().__init__()
        least, most = (quota * MIB for quota in QUOTAS)
        config = KVCacheManagerConfig(
            16,
            [
                GpuCacheTierConfig(least, most),
                HostCacheTierConfig(least, most),
                DiskCacheTierConfig(least, str(self.tiers.folder), most),
            ],
            LAYERS,
        )
        self.storage = TierStorage(config, device="cpu")
        self.storage.attach(self.on_drop, self.on_move)
        self.live: dict[Page, Entry] = {}
        self.dropped = 0
        self.next = 0
        self.steps: list[Step] = []
        self.holds: list[Hold] = []
        self.quotas = [least] * 3
        self.certain = True
        """Whether it is known where pages go: no copy is known to fail that is not settled."""

    # ------------------------------------------------------------------------------ the model

    def on_drop(self, page: Page) -> None:
        entry = self.live.pop(page)
        assert entry.page.freed
        assert not entry.leases, f"{page} was dropped under a lease"
        assert not entry.kept or self.may_lose(entry), f"{page} was dropped though kept"
        assert not page.lost or self.may_lose(entry), f"{page} was lost: {page.ready.error}"
        self.dropped += 1

    def on_move(self, pages: Sequence[Page], source: int, to: int) -> None:
        for page in pages:
            entry = self.live[page]
            assert entry.level == source, f"{page} leaves level {source}, where it is not"
            entry.level = to

    def may_lose(self, entry: Entry) -> bool:
        """Tell whether a page may be lost because a copy of it fails."""
        return entry.spoilt

    def some(
        self,
        picks: Sequence[int],
        *,
        committed: bool = True,
        leased: bool | None = None,
        level: int = 0,
    ) -> list[Entry]:
        """Choose pages, from a level on, by what does not depend on how many there are."""
        found = [
            entry
            for entry in self.live.values()
            if entry.committed == committed
            and leased in (None, entry.leases > 0)
            and entry.page.level >= level
        ]
        return list(dict.fromkeys(found[n % len(found)] for n in picks)) if found else []

    def at(self, level: int, group: int) -> list[Entry]:
        return [e for e in self.live.values() if (e.page.level, e.page.group) == (level, group)]

    def room(self, level: int, group: int) -> int:
        n_slots = self.storage.levels[level].groups[group].slots.n_slots
        return n_slots - len(self.at(level, group))

    def expect(self, level: int, group: int, missing: int) -> dict[Page, int] | None:
        """Say where pages go so that slots of a level get free (3: dropped); None: a refusal."""
        went: dict[Page, int] = {}
        coming: list[Page] = []
        while missing > 0:
            own = self.storage.levels[level].policies[group].victims()
            may = [
                page
                for page in sorted((*own, *coming), key=lambda page: page.priority)
                if not self.live[page].leases and not (level == DISK and self.live[page].kept)
            ]
            if len(may) < missing:
                return None
            went |= {page: 3 if page.lost else level + 1 for page in may[:missing]}
            coming = [page for page in may[:missing] if not page.lost]
            level += 1
            missing = len(coming) - self.room(level, group) if level <= DISK else 0
        return went

    def assert_went(self, went: Iterable[tuple[Page, int]]) -> None:
        for page, level in went:
            if level == 3:
                assert page.freed, f"{page} is still there"
            else:
                assert page.level == level, f"{page} is not in level {level}"

    def state(self) -> object:
        """Everything that a refusal must leave as it was."""
        return [
            (
                level.quota,
                [
                    (
                        group.slots.n_slots,
                        group.slots.in_use,
                        policy.capacity,
                        [(page, page.level, page.slot) for page in policy.victims()],
                    )
                    for group, policy in zip(level.groups, level.policies, strict=True)
                ],
                self.memory(level.index),
            )
            for level in self.storage.levels
        ]

    def memory(self, level: int) -> list[int]:
        """Give the bytes of memory, or of the files, that a level has."""
        return [
            pool.memory.size if isinstance(pool, MemoryPool) else pool.file.slots * pool.slot_size
            for group in self.storage.levels[level].groups
            for pool in cast(Iterable[MemoryPool | DiskPool], group.memory.pools)
        ]

    @contextlib.contextmanager
    def refusing(self, expected: tuple[type[Exception], ...] | None) -> Iterator[None]:
        """Expect one of some errors, and no change; None: it is not known what comes."""
        before = self.state()
        if expected:
            with pytest.raises(expected):
                yield
            assert self.state() == before, "a refusal changed something"
            return
        try:
            yield
        except Exception as error:
            if expected is not None:
                raise
            self.tolerate(error)

    def tolerate(self, error: Exception) -> None:
        """Let an error pass that need not come."""
        if not isinstance(error, OutOfPagesError | ResourceBusyError):
            raise error

    # ------------------------------------------------------------------------- what is in flight

    def unblock(self) -> None:
        """Let everything go on that waits for the test."""
        for hold in self.holds:
            hold.release()
        self.holds.clear()
        self.run_steps(len(self.steps), 0)

    def run_steps(self, n: int, failing: int) -> None:
        for index in range(n):
            step = self.steps.pop(0)
            fails = bool(failing >> index & 1)
            if step.reads:
                fails = any(map(self.may_lose, step.entries))
            step.run(fails=fails)
            self.certain &= not fails

    def quiesce(self) -> None:
        """Wait until nothing is in flight, and let the storage know."""
        self.unblock()
        for queue in self.storage._mover._moving.values():
            for moving in queue:
                moving.event.wait_finished()
        self.storage.settle()
        self.certain = True

    def would_block(self) -> bool:
        """Tell whether making room might wait for what waits for the test."""
        return any(entry.kept for entry in self.live.values())

    def parts(self, entry: Entry) -> list[tuple[Bytes, Bytes]]:
        """Give the pieces of a page's hot memory, and what they should hold."""
        memory = self.storage.levels[0].groups[entry.page.group].memory
        wanted = content(entry.key, memory.page_bytes)
        return [
            (
                self.tiers._slot(cast(MemoryPool, pool), entry.page.slot),
                wanted[offset : offset + pool.slot_size],
            )
            for pool, offset in zip(memory.pools, memory.offsets, strict=True)
        ]

    def write(self, entries: list[Entry], *, later: bool) -> None:
        """Let new pages be written, and commit them."""
        pages = [entry.page for entry in entries]
        self.storage.wait_usable(pages)
        fences = [fence for page in pages for fence in (page.ready, *page.fences)]
        parts = [part for entry in entries for part in self.parts(entry)]
        step = Step(entries, fences, parts)
        self.steps.append(step)
        if not later and len(self.steps) == 1 and not self.holds:
            self.run_steps(1, 0)
        self.storage.commit(pages, step.done)
        for entry in entries:
            entry.committed = True

    def unlease(self, entries: list[Entry], after: Event = DONE) -> None:
        for entry in entries:
            entry.leases -= 1
        self.storage.release([entry.page for entry in entries], after)

    def hold_on(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.leases += 1
        self.storage.lease([entry.page for entry in entries])
        self.note_places(entries)

    def note_places(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.place = entry.page.level, entry.page.slot

    # ---------------------------------------------------------------------------------- rules

    @initialize(batches=st.sampled_from([0, 4, 7, 7]))
    def fill(self, batches: int) -> None:
        """Begin with some pages, mostly so many that levels are full."""
        for group in (0, 1) * batches:
            self.make(group, 2, 0, "now")

    @rule(group=GROUP, n=st.integers(1, 4), how=st.sampled_from(["now", "now", "leased"]))
    def new(self, group: int, n: int, how: str) -> None:
        self.make(group, n, 0, how)

    @rule(group=GROUP, n=st.integers(1, 4), priority=st.sampled_from([0, 0, 1, -1]))
    def new_later(self, group: int, n: int, priority: int) -> None:
        self.make(group, n, priority, "later")

    @rule(group=GROUP, n=st.integers(1, 2))
    def reserve(self, group: int, n: int) -> None:
        self.make(group, n, 0, "reserved")

    def make(self, group: int, n: int, priority: int, how: str) -> None:
        if self.would_block():
            self.unblock()
        n *= 1 + group  # which has twice as many slots
        went = self.expect(0, group, n - self.room(0, group))
        keys = range(self.next, self.next + n)
        pages: list[Page] = []
        with self.refusing(self.outcome(went)):
            pages = self.storage.new_pages(keys, group, priority=priority)
        if not pages:
            return
        if self.certain and went is not None:
            self.assert_went(went.items())
        self.next += n
        entries = [Entry(key, page) for key, page in zip(keys, pages, strict=True)]
        self.live.update(zip(pages, entries, strict=True))
        self.note_places(entries)
        if how != "reserved":
            self.write(entries, later=how == "later")
            if how != "leased":
                self.unlease(entries)

    def outcome(self, went: object | None) -> tuple[type[Exception], ...] | None:
        if not self.certain:
            return None
        return (OutOfPagesError,) if went is None else ()

    @rule(picks=PICKS, how=st.sampled_from(["now", "later", "leased", "cancel"]))
    def use_reserved(self, picks: list[int], how: str) -> None:
        entries = self.some(picks, committed=False)
        if how == "cancel":
            self.drop(entries)
        elif entries:
            self.write(entries, later=how == "later")
            if how != "leased":
                self.unlease(entries)

    @rule(n=st.integers(0, 4), failing=st.sampled_from([0, 1, 1, 3, 5]))
    def go_on(self, n: int, failing: int) -> None:
        """Let the oldest steps be done, some of which fail."""
        self.run_steps(min(n, len(self.steps)), failing)
        self.storage.settle()
        if not self.steps and not self.holds:
            self.quiesce()

    @rule(picks=PICKS)
    def lease(self, picks: list[int]) -> None:
        self.hold_on(self.some(picks))

    @rule(picks=PICKS, read=st.booleans())
    def release(self, picks: list[int], read: bool) -> None:
        """Let pages go, hot ones perhaps while a step is still to read them."""
        entries = self.some(picks, leased=True)
        hot = [entry for entry in entries if read and entry.page.level == 0]
        self.unlease([entry for entry in entries if entry not in hot])
        if hot:
            self.unlease(hot, self.reading(hot).done)

    def reading(self, entries: list[Entry]) -> Step:
        """Submit a step that reads hot pages."""
        parts = [part for entry in entries for part in self.parts(entry)]
        step = Step(entries, [entry.page.ready for entry in entries], parts, reads=True)
        self.steps.append(step)
        return step

    @rule(picks=PICKS)
    def take_out(self, picks: list[int]) -> None:
        """Let hot pages be written again."""
        entries = [
            entry
            for entry in self.some(picks, leased=True)
            if entry.page.level == 0 and entry.leases == 1
        ]
        self.storage.take_out([entry.page for entry in entries])
        for entry in entries:
            entry.committed = entry.kept = False

    @rule(picks=PICKS, level=LEVEL, stay=st.booleans())
    def onboard(self, picks: list[int], level: int, stay: bool) -> None:
        if self.would_block():
            self.unblock()
        self.bring(self.some(picks, level=level), stay=stay)

    @rule(picks=PICKS, level=LEVEL)
    def read(self, picks: list[int], level: int) -> None:
        self.unblock()
        self.bring(self.some(picks, level=level), read=True)

    def bring(self, entries: list[Entry], *, read: bool = False, stay: bool = False) -> None:
        """Bring pages to the hot level, and look at them."""
        pages = [entry.page for entry in entries]
        self.hold_on(entries)
        coming = Counter(page.group for page in pages if page.level)
        came = False
        wents = [self.expect(0, g, n - self.room(0, g)) for g, n in coming.items()]
        with self.refusing(self.outcome(None if None in wents else 1)):
            self.storage.onboard(pages)
            came = True
        if came:
            assert {page.level for page in pages} <= {0}
            self.note_places(entries)
            if self.certain:
                self.assert_went(item for went in wents if went for item in went.items())
            if read:
                self.look_at(entries)
        if not stay or not came:
            self.unlease(entries)

    def look_at(self, entries: list[Entry]) -> None:
        """Compare hot pages, whose copies may have failed."""
        for entry in entries:
            try:
                entry.page.ready.synchronize()
            except (StepError, OSError, DiskOOMError) as error:
                if not self.may_lose(entry):
                    raise AssertionError(f"{entry.page} cannot be read") from error
                continue
            assert not entry.spoilt, f"{entry.page} was served though it is spoilt"
            for memory, wanted in self.parts(entry):
                assert np.array_equal(memory, wanted), f"{entry.page} holds wrong bytes"

    @rule(picks=PICKS, priority=st.sampled_from([None, None, -1, 0, 1]))
    def touch(self, picks: list[int], priority: int | None) -> None:
        """Change what leaves a level first."""
        pages = [entry.page for entry in self.some(picks)]
        if priority is None:
            self.storage.touch(pages)
        else:
            self.storage.set_priority(pages, priority)

    @rule(picks=PICKS, level=LEVEL)
    def keep(self, picks: list[int], level: int) -> None:
        self.set_kept(self.some(picks, level=level), True)

    @rule()
    def keep_none(self) -> None:
        self.set_kept(self.live.values(), False)

    def set_kept(self, entries: Iterable[Entry], kept: bool) -> None:
        self.storage.keep([entry.page for entry in entries], kept)
        for entry in entries:
            entry.kept = kept

    @rule(picks=PICKS)
    def discard(self, picks: list[int]) -> None:
        self.drop(self.some(picks, leased=False))

    def drop(self, entries: list[Entry]) -> None:
        self.storage.discard([entry.page for entry in entries] * 2)
        for entry in entries:
            del self.live[entry.page]

    @rule(level=LEVEL, quota=st.sampled_from([1, 4, 4, 4, 5, 6, 6, 7, 8, 9]))
    def adjust(self, level: int, quota: int) -> None:
        if quota * MIB < self.quotas[level]:
            self.quiesce()
        expected, went = self.expect_adjust(level, quota)
        done = False
        with self.refusing(expected):
            self.storage.adjust_cache_level(level, f"{quota}MiB")
            done = True
        if done:
            self.quotas[level] = quota * MIB + quota % 2 * MIB
            self.assert_went(went.items() if self.certain else ())

    def slots(self, level: int, quota: int) -> tuple[int, ...]:
        return self.storage.levels[level].plan.at(quota).slots

    def expect_adjust(
        self, level: int, quota: int
    ) -> tuple[tuple[type[Exception], ...] | None, dict[Page, int]]:
        """Say which error a change brings, if any, and else where pages go."""
        went: dict[Page, int] = {}
        if not QUOTAS[0] <= quota <= QUOTAS[1]:
            return (ValueError,), went
        errors: list[type[Exception]] = []
        for group, n_slots in enumerate(self.slots(level, quota * MIB)):
            here = self.at(level, group)
            if any(entry.leases and entry.page.slot >= n_slots for entry in here):
                errors.append(ResourceBusyError)
                continue
            some = self.expect(level, group, len(here) - n_slots)
            if some is None:
                errors.append(OutOfPagesError)
            else:
                went |= some
        return tuple(errors) if self.certain else None, went

    # ------------------------------------------------------------------------------- invariants

    @invariant()
    def books_balance(self) -> None:
        storage = self.storage
        storage._check()
        assert storage.latch.reason is None
        assert storage._mover.pages_dropped == self.dropped
        assert [level.quota for level in storage.levels] == self.quotas
        held = {name: use.pages for name, use in storage._meter.activity().levels.items()}
        leased = Counter(e.page.group for e in self.live.values() if e.leases)
        assert [storage.leased(n) for n in range(len(LAYERS))] == [leased[0], leased[1]]
        for level in storage.levels:
            assert held.get(level.name, 0) == sum(g.slots.in_use for g in level.groups)
            sizes = iter(self.memory(level.index))
            for index, (group, policy) in enumerate(zip(level.groups, level.policies, strict=True)):
                here = self.at(level.index, index)
                slots = {entry.page.slot for entry in here}
                assert len(slots) == len(here), f"{level.name}: two pages in one slot"
                assert slots == set(group.slots.live_above(0).tolist()), f"{level.name}: leaked"
                order = list(policy.victims())
                assert {e.page for e in here if e.committed} == set(order)
                priorities = [page.priority for page in order]
                assert priorities == sorted(priorities)
                assert policy.capacity == group.slots.n_slots
                assert group.slots.n_slots == self.slots(level.index, level.quota)[index]
                for pool in group.memory.pools:
                    assert next(sizes) == group.slots.n_slots * pool.slot_size
                for slot, gone in storage._mover._left[level.index][index].items():
                    assert slot == gone.slot < group.slots.n_slots
                    assert slot not in slots, "a page may return to a slot that is in use"

    @invariant()
    def pages_are_as_they_were_left(self) -> None:
        for entry in self.live.values():
            page = entry.page
            assert (page.leases, page.kept, page.freed) == (entry.leases, entry.kept, False)
            assert page.level == entry.level, f"{page} moved and nobody was told"
            if entry.leases:
                assert (page.level, page.slot) == entry.place, f"{page} moved under a lease"

    def teardown(self) -> None:
        try:
            self.quiesce()
            for entry in list(self.live.values()):
                if entry.committed:
                    leases, entry.leases = entry.leases, 0
                    self.storage.release([entry.page] * leases)
            self.storage.settle()
            self.books_balance()
            for entry in self.live.values():
                if entry.committed and not entry.spoilt:
                    found = self.tiers.read(self.storage, entry.page)
                    assert np.array_equal(found, content(entry.key, len(found))), entry.page
            self.storage.discard(self.live)
            self.live.clear()
            self.books_balance()
            assert not any(map(len, self.storage._mover._moving.values()))
        finally:
            with contextlib.suppress(Exception):
                self.unblock()
            self.storage.close()


def check(machine: type[StorageMachine], tiers: Tiers) -> None:
    run_state_machine_as_test(
        type(machine.__name__, (machine,), {"tiers": tiers}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(EXAMPLES * 4)
def test_pages_are_where_they_may_be_and_hold_what_was_written(tiers: Tiers) -> None:
    check(StorageMachine, tiers)


# ------------------------------------------------------------- what the machine led to, as tests


def test_a_page_does_not_push_out_pages_of_a_higher_priority_below(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)

    def make(keys: range, priority: int) -> list[Page]:
        pages = storage.new_pages(keys, 0, priority=priority)
        storage.commit(pages)
        storage.release(pages)
        return pages

    dear = make(range(4), 1)
    cheap = make(range(4, 8), -1)
    assert [page.level for page in dear] == [1] * 4
    make(range(8, 9), 0)
    assert [page.freed for page in dear] == [False] * 4
    assert [page.freed for page in cheap] == [True, False, False, False]
