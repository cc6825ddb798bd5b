"""How the size of registrations follows the time they take."""

from __future__ import annotations

import math

import pytest

from hostmem.stall_budget import StallBudget

MIB = 1 << 20


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_a_budget_is_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="stall_budget"):
        StallBudget(seconds)


def test_fast_calls_keep_the_largest_size() -> None:
    budget = StallBudget(2e-3)
    for _ in range(10):
        assert budget.size == 8 * MIB
        budget.note(8 * MIB, 0.3e-3)
    assert budget.longest == 0.3e-3


def test_slow_calls_halve_the_size_until_they_keep_the_budget() -> None:
    budget = StallBudget(2e-3)
    per_mib = 0.8e-3  # 8 MiB: 6.4 ms
    sizes = []
    for _ in range(8):
        sizes.append(budget.size // MIB)
        budget.note(budget.size, budget.size / MIB * per_mib)
    assert sizes == [8, 4, 2, 1, 1, 1, 1, 1]
    assert budget.size / MIB * per_mib <= 2e-3 / 2


def test_a_smallest_size_remains() -> None:
    budget = StallBudget(1e-6)
    for _ in range(20):
        budget.note(budget.size, 1.0)
    assert budget.size == MIB


def test_one_slow_call_counts_for_one() -> None:
    budget = StallBudget(2e-3)
    budget.note(MIB, 20e-3)  # the first of a process
    assert budget.size == 4 * MIB
    for _ in range(2):
        budget.note(4 * MIB, 0.2e-3)
    assert budget.size == 8 * MIB
    budget.note(8 * MIB, 20e-3)
    assert budget.size == 8 * MIB
    assert budget.longest == 20e-3


def test_without_a_budget_calls_are_large_however_long_they_take() -> None:
    budget = StallBudget(None)
    budget.note(32 * MIB, 1.0)
    assert budget.size == 32 * MIB
    assert budget.longest == 1.0


def test_a_call_that_takes_no_time_is_no_error() -> None:
    budget = StallBudget(2e-3)
    budget.note(MIB, 0.0)
    assert budget.size == 8 * MIB
