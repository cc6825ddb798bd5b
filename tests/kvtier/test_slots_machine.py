"""The slot allocator beside a plain model, under every order of its operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostmem.errors import OutOfPagesError, ResourceBusyError
from kvtier.slots import SlotAllocator

CAPACITY = 16


class Work:
    """Work whose end the test decides."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Machine(RuleBasedStateMachine):
    """Keeps plain sets and lists, and obeys the documented order of preference."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = 6
        self.slots = SlotAllocator(12, max_slots=CAPACITY, usable=lambda: self.mark)
        self.size = self.limit = 12
        self.fresh = 0
        self.live: set[int] = set()
        self.ready: set[int] = set()
        self.flying: list[tuple[int, Work]] = []  # oldest first
        self.works: list[Work] = []
        self.peak = self.released = 0

    # ------------------------------------------------------------------------------ the model

    def note_finished(self) -> None:
        self.ready |= {slot for slot, work in self.flying if work.done}
        self.flying = [(slot, work) for slot, work in self.flying if not work.done]

    def use(self, ids: list[int]) -> None:
        self.ready -= set(ids)
        self.flying = [(slot, work) for slot, work in self.flying if slot not in ids]
        self.live |= set(ids)
        self.peak = max(self.peak, len(self.live))

    def expect(self, n: int, ids: list[int], fences: tuple[Work, ...]) -> None:
        """Compare an allocation with the order of preference, and carry it out."""
        self.note_finished()
        ready = {slot for slot in self.ready if slot < self.limit}
        flying = [(slot, work) for slot, work in self.flying if slot < self.limit]
        n_ready = min(n, len(ready))
        assert len(set(ids)) == len(ids) == n
        assert set(ids[:n_ready]) <= ready
        below = list(range(self.fresh, max(self.fresh, min(self.mark, self.limit))))
        above = list(range(self.fresh + len(below), self.limit))
        rest = n - n_ready
        boarded = flying[: max(0, rest - len(below))]
        order = below + [slot for slot, _ in boarded] + above
        assert ids[n_ready:] == order[:rest]
        assert fences == tuple(dict.fromkeys(work for _, work in boarded))
        self.fresh = max([self.fresh, *(slot + 1 for slot in ids)])
        self.use(ids)

    @property
    def free(self) -> int:
        recycled = [*self.ready, *(slot for slot, _ in self.flying)]
        return sum(slot < self.limit for slot in recycled) + max(0, self.limit - self.fresh)

    def refused(self, call: Callable[[], object], error: type[Exception], match: str) -> Exception:
        """Expect an error that changes nothing; what follows would find out."""
        before = self.slots.statistics()
        with pytest.raises(error, match=match) as caught:
            call()
        assert self.slots.statistics() == before
        return caught.value

    # ------------------------------------------------------------------------------- in and out

    @rule(n=st.integers(0, 8))
    def allocate(self, n: int) -> None:
        if n > self.free:
            error = self.refused(lambda: self.slots.allocate(n), OutOfPagesError, f"{n} slots")
            assert isinstance(error, OutOfPagesError)
            assert (error.wanted, error.free) == (n, self.free)
            return
        got = self.slots.allocate(n)
        assert got.ids.dtype == np.int32
        self.expect(n, got.ids.tolist(), got.fences)  # type: ignore[arg-type]

    @rule()
    def allocate_one(self) -> None:
        if not self.free:
            self.refused(self.slots.allocate_one, OutOfPagesError, "1 slots wanted, 0 of")
            return
        slot, fence = self.slots.allocate_one()
        self.expect(1, [slot], () if fence is None else (fence,))  # type: ignore[arg-type]

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        most=st.sampled_from([1, 2, 4, CAPACITY]),
        how=st.sampled_from(["no event", "new", "earlier", "finished"]),
    )
    def release(self, data: st.DataObject, most: int, how: str) -> None:
        ids = data.draw(st.permutations(sorted(self.live)))[:most]
        work = None
        if how == "earlier" and self.works:
            work = data.draw(st.sampled_from(self.works[-3:]))
        elif how != "no event":
            work = Work()
            work.done = how == "finished"
            self.works.append(work)
        in_flight = self.slots.statistics().in_flight
        self.slots.release(ids, work)
        self.live -= set(ids)
        self.released += len(ids)
        if work is None or work.done:
            self.ready |= set(ids)
            assert self.slots.statistics().in_flight == in_flight
        else:
            self.flying += [(slot, work) for slot in ids]

    @rule(data=st.data(), wrong=st.integers(-2, CAPACITY + 1))
    def release_what_is_not_in_use(self, data: st.DataObject, wrong: int) -> None:
        if wrong in self.live:
            ids, match = [wrong, wrong], "more than once"
        else:
            ids = [wrong, *data.draw(st.permutations(sorted(self.live)))[:2]]
            known = 0 <= wrong < self.fresh
            match = "are not in use" if known else "never handed out"
        ids = data.draw(st.permutations(ids))
        self.refused(lambda: self.slots.release(ids, Work()), ValueError, match)

    @rule(data=st.data(), most=st.integers(0, 5), of=st.sampled_from(["all", "free", "flying"]))
    def reclaim(self, data: st.DataObject, most: int, of: str) -> None:
        slots = {
            "all": range(CAPACITY),
            "free": sorted(set(range(self.limit)) - self.live),
            "flying": [slot for slot, _ in self.flying],
        }[of]
        ids = data.draw(st.permutations(slots))[:most]
        if any(slot >= self.size for slot in ids):
            self.refused(lambda: self.slots.reclaim(ids), ValueError, "are not all in")
            return
        taken = self.slots.reclaim(ids)
        assert taken == (not self.live & set(ids) and all(slot < self.limit for slot in ids))
        if taken:
            passed = set(range(self.fresh, max([self.fresh, *(slot + 1 for slot in ids)])))
            self.fresh += len(passed)
            self.ready |= passed - set(ids)
            self.use(ids)

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.works)).done = True

    @rule(mark=st.integers(0, CAPACITY))
    def move_the_mark(self, mark: int) -> None:
        self.mark = mark

    # ------------------------------------------------------------------------------------- size

    @precondition(lambda self: self.limit == self.size)
    @rule(data=st.data())
    def begin_shrink(self, data: st.DataObject) -> None:
        self.limit = data.draw(st.integers(1, self.size))
        self.slots.begin_shrink(self.limit)

    @rule(wrong=st.sampled_from([-1, 0, CAPACITY + 1]))
    def ask_for_what_cannot_be(self, wrong: int) -> None:
        twice = [self.size - 1, 0, self.size - 1]
        self.refused(lambda: self.slots.reclaim(twice), ValueError, "more than once")
        self.refused(lambda: self.slots.begin_shrink(wrong), ValueError, "limit")
        self.refused(lambda: self.slots.resize(wrong), ValueError, "n_slots")
        if self.limit < self.size:
            self.refused(lambda: self.slots.begin_shrink(1), ResourceBusyError, "being prepared")

    @precondition(lambda self: self.limit < self.size)
    @rule()
    def cancel_shrink(self) -> None:
        self.slots.cancel_shrink()
        beyond = [(slot, work) for slot, work in self.flying if slot >= self.limit]
        below = [(slot, work) for slot, work in self.flying if slot < self.limit]
        self.flying = below + beyond
        self.limit = self.size

    @rule(size=st.integers(1, CAPACITY), as_prepared=st.booleans())
    def resize(self, size: int, as_prepared: bool) -> None:
        if self.limit < self.size and as_prepared:
            size = self.limit
        if self.limit < self.size and size != self.limit:
            self.refused(lambda: self.slots.resize(size), ResourceBusyError, "being prepared")
            return
        beyond = sorted(slot for slot in self.live if slot >= size)
        if beyond:
            error = self.refused(lambda: self.slots.resize(size), ResourceBusyError, "in use")
            assert error.slots == beyond[:8]  # type: ignore[attr-defined]
            return
        unfinished = {work for slot, work in self.flying if slot >= size and not work.done}
        fences = self.slots.resize(size)
        assert len(fences) == len(unfinished)
        assert set(fences) == unfinished
        self.ready = {slot for slot in self.ready if slot < size}
        self.flying = [(slot, work) for slot, work in self.flying if slot < size]
        self.fresh = min(self.fresh, size)
        self.size = self.limit = size

    # -------------------------------------------------------------------------------- invariants

    @invariant()
    def agrees(self) -> None:
        self.slots._check()
        assert self.slots.available == self.free
        assert self.slots.live_above(3).tolist() == sorted(s for s in self.live if s >= 3)
        found = self.slots.statistics()
        assert (found.n_slots, found.capacity) == (self.size, CAPACITY)
        assert (found.in_use, found.fresh) == (len(self.live), self.size - self.fresh)
        assert found.ready + found.in_flight + found.held == len(self.ready) + len(self.flying)
        assert (found.peak_in_use, found.released) == (self.peak, self.released)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=250, stateful_step_count=60)
