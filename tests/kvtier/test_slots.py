"""Slots: the order of allocation, fences, and what may not happen."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostmem.errors import OutOfPagesError, ResourceBusyError
from kvtier.slots import SlotAllocator


class Work:
    """Work whose end the test decides."""

    def __init__(self, done: bool = False) -> None:
        self.done = done
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


def taken(slots: SlotAllocator, n: int) -> list[int]:
    """Allocate ``n`` slots that need no fence."""
    got = slots.allocate(n)
    assert got.fences == ()
    return [int(slot) for slot in got.ids]


def unchanged(slots: SlotAllocator, call: Any, error: type[Exception], match: str) -> Exception:
    """Expect an error that leaves every count as it was."""
    before = slots.statistics()
    with pytest.raises(error, match=match) as caught:
        call()
    assert slots.statistics() == before
    slots._check()
    return caught.value


def test_fresh_ids_ascend_from_zero() -> None:
    slots = SlotAllocator(8)
    assert taken(slots, 3) == [0, 1, 2]
    assert slots.allocate_one() == (3, None)
    assert taken(slots, 2) == [4, 5]


def test_ids_are_32_bit_integers() -> None:
    slots = SlotAllocator(4)
    assert slots.allocate(2).ids.dtype == np.int32
    slots.release([0, 1])
    assert slots.allocate(3).ids.dtype == np.int32


def test_finished_slots_are_reused_before_fresh_ids() -> None:
    slots = SlotAllocator(8)
    slots.allocate(3)
    slots.release([1])
    assert taken(slots, 2) == [1, 3]


def test_slots_in_flight_are_used_after_fresh_ids_below_the_mark_and_before_those_above() -> None:
    slots = SlotAllocator(8, usable=lambda: 5)
    slots.allocate(4)
    work = Work()
    slots.release([2, 0], work)
    slots.release([3])
    got = slots.allocate(6)
    assert got.ids.tolist() == [3, 4, 2, 0, 5, 6]
    assert got.fences == (work,)


def test_one_slot_at_a_time_comes_in_the_same_order() -> None:
    slots = SlotAllocator(8, usable=lambda: 5)
    slots.allocate(4)
    first, second = Work(), Work()
    slots.release([2], first)
    slots.release([0], second)
    slots.release([3])
    order = [slots.allocate_one() for _ in range(6)]
    assert order == [(3, None), (4, None), (2, first), (0, second), (5, None), (6, None)]


def test_a_slot_whose_work_finished_meanwhile_needs_no_fence() -> None:
    slots = SlotAllocator(2)
    slots.allocate(2)
    work = Work()
    slots.release([1], work)
    work.done = True
    assert taken(slots, 1) == [1]


def test_work_that_finished_out_of_order_is_found_behind_work_that_goes_on() -> None:
    slots = SlotAllocator(6, usable=lambda: 0)
    slots.allocate(5)
    oldest, middle, newest = Work(), Work(), Work()
    slots.release([0], oldest)
    slots.release([1, 2], middle)
    slots.release([3], newest)
    middle.done = True
    got = slots.allocate(4)
    assert got.ids.tolist() == [1, 2, 0, 3]
    assert got.fences == (oldest, newest)


def test_finished_work_fences_nothing_at_release() -> None:
    slots = SlotAllocator(2)
    slots.allocate(2)
    slots.release([0], Work(done=True))
    assert slots.statistics().ready == 1


def test_each_fence_is_named_once() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    one, other = Work(), Work()
    for slot, work in enumerate((one, other, one)):
        slots.release([slot], work)
    assert slots.allocate(3).fences == (one, other)


def test_part_of_a_release_in_flight_may_be_taken() -> None:
    slots = SlotAllocator(3)
    slots.allocate(3)
    work = Work()
    slots.release([2, 0, 1], work)
    assert slots.allocate(2).ids.tolist() == [2, 0]
    assert slots.statistics().in_flight == 1
    slots._check()
    assert slots.allocate_one() == (1, work)


def test_no_event_is_asked_while_finished_slots_suffice() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    work = Work()
    slots.release([0], work)
    slots.release([1, 2])
    asked = work.asked
    slots.allocate(2)
    assert work.asked == asked


def test_too_many_slots_are_refused_as_a_whole() -> None:
    slots = SlotAllocator(4)
    slots.allocate(2)
    slots.release([0], Work())
    error = unchanged(slots, lambda: slots.allocate(4), OutOfPagesError, "4 slots wanted, 3 of 4")
    assert isinstance(error, OutOfPagesError)
    assert (error.wanted, error.free) == (4, 3)
    slots.allocate(3)
    unchanged(slots, slots.allocate_one, OutOfPagesError, "1 slots wanted, 0 of 4 are free")


def test_none_is_a_number_of_slots_and_less_is_not() -> None:
    slots = SlotAllocator(1)
    assert taken(slots, 0) == []
    unchanged(slots, lambda: slots.allocate(-1), ValueError, "less than 0")
    slots.release([])


def test_a_double_release_is_refused() -> None:
    slots = SlotAllocator(4)
    slots.allocate(3)
    slots.release([1])
    unchanged(slots, lambda: slots.release([0, 1]), ValueError, r"\[1\] are not in use")
    slots.release([0], Work())
    unchanged(slots, lambda: slots.release([0], Work()), ValueError, r"\[0\] are not in use")


@pytest.mark.parametrize("foreign", [-1, 2, 4, 2**31, 2**32, -(2**63), 2**63, 2**80])
def test_a_slot_that_was_never_handed_out_is_refused(foreign: int) -> None:
    slots = SlotAllocator(4)
    slots.allocate(2)
    unchanged(slots, lambda: slots.release([0, foreign]), ValueError, "ids: ")


def test_a_slot_that_occurs_twice_is_refused() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    unchanged(slots, lambda: slots.release([3, 1, 3]), ValueError, r"\[3\] occur more than once")


@pytest.mark.parametrize("wrong", [[0.0], ["0"], [True], [[0]], 0])
def test_ids_that_are_no_row_of_whole_numbers_are_refused(wrong: Any) -> None:
    slots = SlotAllocator(4)
    slots.allocate(1)
    unchanged(slots, lambda: slots.release(wrong), ValueError, "whole numbers in one row")


def test_the_ids_handed_out_are_the_callers_own() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    mine = np.array([2, 1], np.int32)
    slots.release(mine)
    mine[:] = 0
    got = slots.allocate(2).ids
    assert got.tolist() == [2, 1]
    got[:] = 0
    slots._check()


def test_growing_makes_fresh_ids() -> None:
    slots = SlotAllocator(2, max_slots=4)
    slots.allocate(2)
    slots.release([1], Work())
    assert slots.resize(4) == ()
    assert (slots.n_slots, slots.capacity, slots.available) == (4, 4, 3)
    assert taken(slots, 2) == [2, 3]


@pytest.mark.parametrize("size", [0, -1, 5])
def test_a_size_out_of_bounds_is_refused(size: int) -> None:
    slots = SlotAllocator(2, max_slots=4)
    unchanged(slots, lambda: slots.resize(size), ValueError, r"not in 1\.\.4")


@pytest.mark.parametrize(("n", "most"), [(0, 4), (5, 4), (-1, None), (1, 2**31)])
def test_an_allocator_out_of_bounds_is_refused(n: int, most: int | None) -> None:
    with pytest.raises(ValueError, match="n_slots"):
        SlotAllocator(n, max_slots=most)


def test_a_shrink_under_slots_in_use_is_refused_and_names_eight() -> None:
    slots = SlotAllocator(20)
    slots.allocate(16)
    slots.release([5])
    assert slots.live_above(4).tolist() == [4, *range(6, 16)]
    error = unchanged(
        slots, lambda: slots.resize(4), ResourceBusyError, "to 4 slots: 11 beyond them"
    )
    assert isinstance(error, ResourceBusyError)
    assert error.slots == [4, 6, 7, 8, 9, 10, 11, 12]


def test_a_shrink_returns_the_unfinished_work_beyond_it() -> None:
    slots = SlotAllocator(6)
    slots.allocate(6)
    below, across, above, done = Work(), Work(), Work(), Work()
    slots.release([0], below)
    slots.release([1, 4], across)
    slots.release([3], above)
    slots.release([5], done)
    done.done = True
    assert slots.resize(3) == (across, above)
    slots._check()
    got = slots.allocate(2)
    assert got.ids.tolist() == [0, 1]
    assert got.fences == (below, across)


def test_ids_beyond_a_shrunken_size_are_fresh_when_it_grows_again() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    slots.release([2, 3])
    slots.resize(2)
    assert slots.available == 0
    slots.resize(4)
    assert taken(slots, 2) == [2, 3]


def test_no_id_beyond_the_limit_is_handed_out_while_a_shrink_is_prepared() -> None:
    slots = SlotAllocator(6)
    slots.allocate(5)
    slots.release([1, 3])
    slots.release([2], Work())
    slots.begin_shrink(2)
    assert slots.available == 1
    slots.release([4])
    assert slots.available == 1
    assert taken(slots, 1) == [1]
    unchanged(slots, slots.allocate_one, OutOfPagesError, "0 of 2 are free")
    assert slots.statistics().held == 3


def test_fresh_ids_beyond_the_limit_are_withheld_even_below_the_mark() -> None:
    slots = SlotAllocator(8, usable=lambda: 8)
    slots.allocate(2)
    work = Work()
    slots.release([0], work)
    slots.begin_shrink(4)
    got = slots.allocate(3)
    assert got.ids.tolist() == [2, 3, 0]
    assert got.fences == (work,)


def test_a_prepared_shrink_can_be_cancelled() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    work = Work()
    slots.release([2], work)
    slots.begin_shrink(2)
    slots.release([3])
    slots.cancel_shrink()
    slots._check()
    assert slots.available == 2
    assert slots.allocate(2).fences == (work,)


def test_a_prepared_shrink_is_completed_once_nothing_stands_against_it() -> None:
    slots = SlotAllocator(4)
    slots.allocate(4)
    slots.begin_shrink(2)
    unchanged(slots, lambda: slots.resize(2), ResourceBusyError, r"such as \[2, 3\]")
    work = Work()
    slots.release([2, 3], work)
    assert slots.resize(2) == (work,)
    assert (slots.n_slots, slots.in_use, slots.available) == (2, 2, 0)


def test_one_shrink_is_prepared_at_a_time() -> None:
    slots = SlotAllocator(6)
    slots.begin_shrink(4)
    for other in (lambda: slots.begin_shrink(3), lambda: slots.resize(3), lambda: slots.resize(6)):
        unchanged(slots, other, ResourceBusyError, "from 6 to 4 slots is being prepared")
    unchanged(slots, lambda: slots.begin_shrink(0), ValueError, r"limit: 0 is not in 1\.\.6")


def test_statistics_count_every_slot_once() -> None:
    slots = SlotAllocator(10, max_slots=20)
    slots.allocate(7)
    slots.release([0, 1], Work())
    slots.release([2])
    found = slots.statistics()
    assert (found.n_slots, found.capacity) == (10, 20)
    assert (found.in_use, found.ready, found.in_flight, found.fresh, found.held) == (4, 1, 2, 3, 0)
    assert (found.peak_in_use, found.released) == (7, 3)


@pytest.mark.parametrize("n", [3, 257, 65_536, 65_537, 140_000])
def test_an_id_given_back_twice_is_named_however_many_there_are(n: int) -> None:
    slots = SlotAllocator(n)
    ids = slots.allocate(n).ids
    for first, second in ((0, n - 1), (0, 256), (1, 65_537), (n - 2, n - 1)):
        if second < n:
            wrong = ids.copy()
            wrong[second] = wrong[first]
            match = rf"slots \[{ids[first]}\] occur more than once"
            unchanged(slots, lambda wrong=wrong: slots.release(wrong), ValueError, match)
    slots.release(ids[::-1])
    assert slots.available == n


def test_while_memory_has_failed_no_slot_without_any_is_handed_out() -> None:
    failed = True
    slots = SlotAllocator(8, usable=lambda: 5, failed=lambda: failed)
    assert slots.available == 5
    error = unchanged(slots, lambda: slots.allocate(6), OutOfPagesError, "6 slots wanted, 5 of 5")
    assert isinstance(error, OutOfPagesError)
    assert error.free == 5
    assert taken(slots, 4) == [0, 1, 2, 3]
    assert slots.allocate_one() == (4, None)
    unchanged(slots, slots.allocate_one, OutOfPagesError, "1 slots wanted, 0 of 5")
    assert not slots.reclaim([5])
    failed = False
    assert taken(slots, 3) == [5, 6, 7]


def test_slots_that_come_back_from_failed_memory_wait_until_it_is_tried_again() -> None:
    failed = False
    slots = SlotAllocator(4, usable=lambda: 2, failed=lambda: failed)
    slots.allocate(4)
    failed = True
    work = Work()
    slots.release([3, 0])
    slots.release([2, 1], work)
    assert slots.available == 2
    assert slots.allocate(2).ids.tolist() == [0, 1]
    assert slots.statistics().held == 2
    unchanged(slots, slots.allocate_one, OutOfPagesError, "0 of 2")
    failed = False
    got = slots.allocate(2)
    assert got.ids.tolist() == [3, 2]
    assert got.fences == (work,)


def test_a_level_shrinks_and_grows_while_its_memory_has_failed() -> None:
    failed, usable = False, 3
    slots = SlotAllocator(8, max_slots=12, usable=lambda: usable, failed=lambda: failed)
    slots.allocate(8)
    failed = True
    work = Work()
    slots.release([7, 5, 4], work)
    slots.release([6, 3])
    assert slots.available == 0
    slots.begin_shrink(5)
    slots.cancel_shrink()
    assert slots.available == 0
    assert slots.resize(5) == (work,)
    assert slots.available == 0
    failed = False  # a smaller size was tried
    assert slots.available == 2
    assert slots.allocate(2).ids.tolist() == [3, 4]
    slots.release([4])
    failed = True
    assert slots.resize(12) == ()
    assert slots.available == 0
    usable = 6
    assert sorted(taken(slots, 2)) == [4, 5]


def test_a_broken_invariant_is_reported_with_the_state() -> None:
    slots = SlotAllocator(4)
    slots.allocate(2)
    slots._used[1] = False
    with pytest.raises(AssertionError, match=r"SlotStatistics.*in_use=2"):
        slots._check()


def test_bookkeeping_stays_below_24_bytes_a_free_slot() -> None:
    n = 20_000
    works = [Work() for _ in range(n)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        slots = SlotAllocator(n)
        slots.allocate(n)
        for slot, work in enumerate(works):  # the worst case: an event of its own for each slot
            slots.release((slot,), work)
        spent = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert slots.available == n
    assert spent <= 24 * n


class Machine(RuleBasedStateMachine):
    """The allocator beside a model that keeps plain lists and obeys the order of allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = 6
        self.failed = False  # no memory will come above the mark
        self.slots = SlotAllocator(
            12, max_slots=16, usable=lambda: self.mark, failed=lambda: self.failed
        )
        self.size = self.goal = self.limit = 12
        self.fresh = 0
        self.live: set[int] = set()
        self.ready: set[int] = set()
        self.flying: list[tuple[int, Work]] = []
        self.works: list[Work] = []

    def expect(self, n: int, ids: list[int], fences: tuple[Work, ...]) -> None:
        """Compare an allocation with the order, and carry it out in the model."""
        self.ready |= {slot for slot, work in self.flying if work.done}
        self.flying = [(slot, work) for slot, work in self.flying if not work.done]
        ready = {slot for slot in self.ready if slot < self.limit}
        flying = [(slot, work) for slot, work in self.flying if slot < self.limit]
        n_ready = min(n, len(ready))
        assert set(ids[:n_ready]) <= ready
        assert len(set(ids)) == len(ids) == n
        below = list(range(self.fresh, max(self.fresh, min(self.mark, self.limit))))
        above = list(range(self.fresh + len(below), self.limit))
        rest = n - n_ready
        boarded = flying[: max(0, rest - len(below))]
        order = below + [slot for slot, _ in boarded] + above
        assert ids[n_ready:] == order[:rest]
        assert fences == tuple(dict.fromkeys(work for _, work in boarded))
        self.ready -= set(ids)
        self.flying = [(slot, work) for slot, work in self.flying if slot not in ids]
        self.fresh = max([self.fresh, *(slot + 1 for slot in ids)])
        self.live |= set(ids)

    @property
    def free(self) -> int:
        recycled = [*self.ready, *(slot for slot, _ in self.flying)]
        return sum(slot < self.limit for slot in recycled) + max(0, self.limit - self.fresh)

    @rule(n=st.integers(0, 8))
    def allocate(self, n: int) -> None:
        if n > self.free:
            with pytest.raises(OutOfPagesError):
                self.slots.allocate(n)
        else:
            got = self.slots.allocate(n)
            self.expect(n, got.ids.tolist(), got.fences)  # type: ignore[arg-type]

    @rule()
    def allocate_one(self) -> None:
        if self.free:
            slot, fence = self.slots.allocate_one()
            self.expect(1, [slot], () if fence is None else (fence,))  # type: ignore[arg-type]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["no event", "new event", "last event"]))
    def release(self, data: st.DataObject, how: str) -> None:
        ids = data.draw(st.permutations(sorted(self.live)))
        ids = ids[: data.draw(st.integers(1, len(ids)))]
        work = None
        if how == "last event" and self.works:
            work = self.works[-1]
        elif how != "no event":
            work = Work()
            self.works.append(work)
        self.slots.release(ids, work)
        self.live -= set(ids)
        if work is None or work.done:
            self.ready |= set(ids)
        else:
            self.flying += [(slot, work) for slot in ids]

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.works)).done = True

    def follow(self) -> None:
        """Let the limit be where it belongs; what is withheld no longer goes to the end."""
        old, self.limit = self.limit, min(self.goal, self.mark if self.failed else self.goal)
        low, high = sorted((old, self.limit))
        self.flying.sort(key=lambda one: (one[0] >= low) + (one[0] >= high))

    @rule(mark=st.integers(0, 16))
    def move_the_mark(self, mark: int) -> None:
        self.mark = mark
        self.follow()

    @rule(failed=st.booleans())
    def fail_or_try_again(self, failed: bool) -> None:
        self.failed = failed
        self.follow()

    @precondition(lambda self: self.goal == self.size)
    @rule(data=st.data())
    def begin_shrink(self, data: st.DataObject) -> None:
        self.goal = data.draw(st.integers(1, self.size))
        self.slots.begin_shrink(self.goal)
        self.follow()

    @precondition(lambda self: self.goal < self.size)
    @rule()
    def cancel_shrink(self) -> None:
        self.slots.cancel_shrink()
        self.goal = self.size
        self.follow()

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        prepared = self.goal < self.size
        size = self.goal if prepared else data.draw(st.integers(1, 16))
        if any(slot >= size for slot in self.live):
            with pytest.raises(ResourceBusyError):
                self.slots.resize(size)
            return
        beyond = {work for slot, work in self.flying if slot >= size and not work.done}
        fences = self.slots.resize(size)
        assert len(fences) == len(beyond)
        assert set(fences) == beyond
        self.ready = {slot for slot in self.ready if slot < size}
        self.flying = [(slot, work) for slot, work in self.flying if slot < size]
        self.fresh = min(self.fresh, size)
        self.size = self.goal = size
        self.limit = min(self.limit, size)
        self.follow()

    @invariant()
    def agrees(self) -> None:
        self.slots._check()
        assert self.slots.available == self.free
        assert self.slots.in_use == len(self.live)
        assert self.slots.n_slots == self.size
        assert self.slots.live_above(3).tolist() == sorted(s for s in self.live if s >= 3)


TestMachine = Machine.TestCase
TestMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
