"""Block caches under every order of their operations, beside what is known of each key's bytes.

A few seconds a machine; ``KVTIER_MACHINE_EXAMPLES=2000`` makes it many more examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from hostmem import OutOfPagesError, ResourceBusyError
from kvtier import BlockLease, Page
from tests.kvtier.block_model import (
    CHAIN,
    CHAINS,
    COUNT,
    EXAMPLES,
    FIRST,
    MIB,
    PICK,
    BlockModel,
    Step,
    StepError,
    check,
)

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers


class BlockMachine(BlockModel):
    """Everything that may be done to a cache but what needs an engine with pages of its own."""

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
        shift=CHAINS,
    )
    def commit(self, pick: int, how: str, leased: int, stay: bool, shift: int = 0) -> None:
        """Write the leading blocks, or all, under the keys that were meant or those of a chain."""
        if not self.reservations:
            return
        fresh, keys = self.reservations.pop(pick % len(self.reservations))
        keys = [(key + shift * CHAIN) % (3 * CHAIN) for key in keys]
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


@pytest.mark.timeout(max(EXAMPLES * 3, 120))
def test_what_is_found_has_the_bytes_of_its_key(tiers: Tiers) -> None:
    check(BlockMachine, tiers)
