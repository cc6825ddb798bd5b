"""Fault plans: which call fails, which one waits, and what is seen of them."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import HostMem
from hostmem._sys import linux, seam
from hostmem._sys.seam import intercept
from hostmem.testing import FaultPlan, Hold

PAGE = mmap.PAGESIZE


def answers(*calls: tuple[str, int]) -> list[int]:
    return [intercept(name, argument) for name, argument in calls]


def test_without_a_plan_every_call_is_made() -> None:
    assert intercept("mmap", 1, 2) == 0


def test_a_planned_call_fails_once() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5)
        assert answers(("a", 1), ("a", 2), ("b", 3)) == [5, 0, 0]


def test_a_later_call_fails() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, at=3)
        assert answers(*[("a", n) for n in range(5)]) == [0, 0, 5, 0, 0]


def test_several_calls_fail() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, at=2, times=2)
        assert answers(*[("a", n) for n in range(5)]) == [0, 5, 5, 0, 0]


def test_all_calls_from_one_on_fail() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, at=2, times=None)
        assert answers(*[("a", n) for n in range(4)]) == [0, 5, 5, 5]


def test_only_calls_with_certain_arguments_are_counted() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, at=2, when=lambda argument: argument >= 10)
        assert answers(("a", 1), ("a", 10), ("a", 2), ("a", 11), ("a", 12)) == [0, 0, 0, 5, 0]


def test_other_calls_in_between_are_not_counted() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, at=2)
        assert answers(("a", 1), ("b", 1), ("b", 2), ("a", 2)) == [0, 0, 0, 5]


def test_rules_of_one_call_are_independent() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, at=1).fail("a", 6, at=3)
        assert answers(*[("a", n) for n in range(4)]) == [5, 0, 6, 0]


def test_of_two_rules_that_apply_the_first_answers() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5).fail("a", 6)
        assert answers(("a", 1)) == [5]


def test_every_call_is_logged_with_its_arguments() -> None:
    with FaultPlan() as plan:
        plan.fail("b", 5)
        answers(("a", 1), ("b", 2), ("a", 3))
        assert plan.calls("a") == [(1,), (3,)]
        assert plan.log == [("a", (1,)), ("b", (2,)), ("a", (3,))]


def test_a_plan_ends_with_its_block() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5, times=None)
    assert intercept("a") == 0
    assert plan.log == []


def test_a_plan_ends_with_its_block_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), FaultPlan():
        raise ZeroDivisionError
    assert seam._plan is None


def test_an_inner_plan_hides_the_outer_one_for_its_time() -> None:
    with FaultPlan() as outer:
        outer.fail("a", 5, times=None)
        with FaultPlan() as inner:
            inner.fail("a", 6, times=None)
            assert intercept("a") == 6
        assert intercept("a") == 5
    assert len(outer.calls("a")) == 1


# ------------------------------------------------------------------------------------- holds


class Caller(threading.Thread):
    """Makes one call of the seam and keeps the answer."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.answer: int | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = intercept("a", 1)
        except BaseException as error:
            self.answer = error


def test_a_held_call_waits_until_it_is_let_go() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("a")
        caller = Caller()
        hold.wait_reached()
        assert caller.answer is None
        hold.release()
        caller.join(30)
        assert caller.answer == 0


def test_a_held_call_is_in_the_log() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("a")
        Caller()
        hold.wait_reached()
        assert plan.calls("a") == [(1,)]


def test_other_calls_pass_a_held_one() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("a")
        Caller()
        hold.wait_reached()
        assert answers(("a", 2), ("b", 1)) == [0, 0]


def test_a_held_call_may_fail_in_the_end() -> None:
    with FaultPlan() as plan:
        plan.fail("a", 5)
        hold = plan.hold("a")
        caller = Caller()
        hold.wait_reached()
        hold.release()
        caller.join(30)
        assert caller.answer == 5


def test_a_later_call_is_held() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("a", at=2)
        assert intercept("a") == 0
        assert not hold.reached
        Caller()
        hold.wait_reached()


def test_a_call_with_certain_arguments_is_held() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("a", when=lambda argument: argument == 1)
        assert intercept("a", 2) == 0
        assert not hold.reached
        Caller()
        hold.wait_reached()


def test_the_end_of_the_plan_lets_go() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("a")
        caller = Caller()
        hold.wait_reached()
    caller.join(30)
    assert caller.answer == 0


def test_waiting_for_a_call_that_does_not_come_is_told() -> None:
    with pytest.raises(TimeoutError, match="never made"):
        Hold().wait_reached(timeout=0)


def test_a_call_that_is_never_let_go_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostmem.testing.faults._PATIENCE", 0.0)
    with FaultPlan() as plan:
        plan.hold("a")
        caller = Caller()
        caller.join(30)
        assert isinstance(caller.answer, TimeoutError)


# ---------------------------------------------------------------------------- short counts


def test_a_planned_call_moves_only_so_many_bytes(tmp_path: Path) -> None:
    data, back = np.arange(12, dtype=np.uint8), np.zeros(12, np.uint8)
    with open(tmp_path / "file", "w+b", buffering=0) as file, FaultPlan() as plan:
        plan.short("pwritev", 7).short("preadv", 4, at=2)
        # Two pieces of six bytes.
        assert linux.pwritev(file.fileno(), table(data), 0) == 7
        assert os.fstat(file.fileno()).st_size == 7
        assert linux.pwritev(file.fileno(), table(data), 0) == 12
        assert linux.preadv(file.fileno(), table(back), 0) == 12
        back[:] = 0
        assert linux.preadv(file.fileno(), table(back), 0) == 4
    assert back.tolist() == [0, 1, 2, 3] + [0] * 8


def table(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    base = int(data.__array_interface__["data"][0])
    return linux.iovecs(np.array([base, base + 6], np.uint64), 6)


def test_a_count_beyond_the_call_changes_nothing(tmp_path: Path) -> None:
    data = np.arange(12, dtype=np.uint8)
    with open(tmp_path / "file", "w+b", buffering=0) as file, FaultPlan() as plan:
        plan.short("pwritev", 100)
        assert linux.pwritev(file.fileno(), table(data), 0) == 12


@pytest.mark.parametrize(("name", "nbytes"), [("mmap", 4096), ("preadv", 0)])
def test_calls_that_move_no_bytes_cannot_be_short(name: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match="only preadv and pwritev"):
        FaultPlan().short(name, nbytes)


def test_single_pages_answer_what_the_plan_says() -> None:
    with HostMem(64 * PAGE, device="cpu", wait=True) as memory:
        odd = {memory.address + n * PAGE for n in (3, 5, 7)}
        with FaultPlan() as plan:
            plan.answer_for_pages(-errno.EBUSY, when=odd.__contains__)
            plan.answer_for_pages(1, when=lambda address: address == memory.address)
            found = memory.placement()
            assert found.bytes_without_node == {"EBUSY": 3 * PAGE}
            assert found.bytes_by_node[1] == PAGE
            assert found.resident == 61 * PAGE
        assert memory.placement().resident == 64 * PAGE
