"""Fault plans: which call fails, which one waits, and what is seen of them."""

from __future__ import annotations

import threading

import pytest

from hostmem._sys import seam
from hostmem._sys.seam import intercept
from hostmem.testing import FaultPlan, Hold


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
