"""Quotas: exact grains, shares and slots."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.quota import (
    exact_size,
    exact_weights,
    grain_of,
    minimum_quota,
    quota_holding,
    slots_in,
    split_quota,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

grains = st.sampled_from([2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB])
weights = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("quota", "grain"),
    [
        (1, 2 * MIB),
        (2 * GIB - 1, 2 * MIB),
        (2 * GIB, 4 * MIB),
        (4 * GIB - 1, 4 * MIB),
        (4 * GIB, 8 * MIB),
        (8 * GIB - 1, 8 * MIB),
        (8 * GIB, 16 * MIB),
        (16 * GIB - 1, 16 * MIB),
        (16 * GIB, 32 * MIB),
        (1 << 50, 32 * MIB),
    ],
)
def test_the_grain_steps_with_the_quota(quota: int, grain: int) -> None:
    assert grain_of(quota) == grain


def test_the_minimum_is_one_grain_a_group() -> None:
    assert minimum_quota(3, 4 * MIB) == 12 * MIB


def test_the_rest_goes_by_weight_after_one_grain_for_each() -> None:
    # 10 grains: one each leaves 8, split 3 to 1 as 6 and 2.
    assert split_quota(20 * MIB, [3, 1], 2 * MIB) == (14 * MIB, 6 * MIB)


def test_the_grains_left_over_go_to_the_largest_remainders() -> None:
    # 8 grains leave 5 for weights 5:3:2, ideally 2.5, 1.5 and 1.0; the one left over goes to the
    # first of the two equal remainders.
    assert split_quota(8, [5, 3, 2], 1) == (1 + 3, 1 + 1, 1 + 1)
    # 7 grains leave 4: ideally 2.0, 1.2 and 0.8; the one left over goes to the last.
    assert split_quota(7, [5, 3, 2], 1) == (1 + 2, 1 + 1, 1 + 1)


def test_ties_go_to_the_lowest_index() -> None:
    assert split_quota(5, [1, 1, 1], 1) == (2, 2, 1)


def test_the_quota_is_rounded_up_to_the_grain() -> None:
    assert split_quota(3 * MIB + 1, [1], 2 * MIB) == (4 * MIB,)


@pytest.mark.parametrize("quota", [-1, 0, 1, 4 * MIB - 1])
def test_a_quota_below_the_minimum_is_refused_as_given(quota: int) -> None:
    with pytest.raises(ValueError, match=r"minimum of 4 MiB \(4,194,304 B\), 2 pool groups"):
        split_quota(quota, [1, 1], 2 * MIB)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_weight_that_is_not_positive_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        split_quota(20 * MIB, [3, bad], 2 * MIB)


@given(weights, grains, st.integers(0, 1 << 45))
def test_shares_are_whole_grains_that_add_up_to_the_rounded_quota(
    weights: list[int], grain: int, extra: int
) -> None:
    quota = minimum_quota(len(weights), grain) + extra
    shares = split_quota(quota, weights, grain)
    assert all(share >= grain and share % grain == 0 for share in shares)
    assert sum(shares) == -(-quota // grain) * grain


@given(weights, grains, st.integers(0, 1 << 45))
def test_each_share_is_within_a_grain_of_its_ideal(
    weights: list[int], grain: int, extra: int
) -> None:
    shares = split_quota(minimum_quota(len(weights), grain) + extra, weights, grain)
    rest = sum(shares) // grain - len(weights)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share // grain - 1 - Fraction(rest * weight, sum(weights))) < 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=2), st.integers(0, 500))
def test_shares_of_one_or_two_groups_never_fall_when_the_quota_grows(
    weights: list[int], rest: int
) -> None:
    before = split_quota(len(weights) + rest, weights, 1)
    after = split_quota(len(weights) + rest + 1, weights, 1)
    assert all(old <= new for old, new in zip(before, after, strict=True))


@given(weights, st.integers(0, 10_000), st.integers(1, 1000))
def test_no_share_ever_falls_by_more_than_a_grain_when_the_quota_grows(
    weights: list[int], rest: int, more: int
) -> None:
    before = split_quota(len(weights) + rest, weights, 1)
    after = split_quota(len(weights) + rest + more, weights, 1)
    assert all(new >= old - 1 for old, new in zip(before, after, strict=True))


def test_three_groups_show_the_alabama_paradox() -> None:
    # Weights 6:6:2. Ten grains of rest: ideally 4.29, 4.29 and 1.43; the last remainder wins.
    assert split_quota(3 + 10, [6, 6, 2], 1) == (1 + 4, 1 + 4, 1 + 2)
    # Eleven: 4.71, 4.71 and 1.57; the first two win, and the last has one grain less than before.
    assert split_quota(3 + 11, [6, 6, 2], 1) == (1 + 5, 1 + 5, 1 + 1)


def test_a_ratio_becomes_integers_in_the_proportion_that_was_written() -> None:
    assert exact_weights([0.7, 0.3]) == (7, 3)
    assert exact_weights([0.5, 0.25, 1]) == (2, 1, 4)
    assert exact_weights([3]) == (3,)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_decimal_ratios_keep_their_proportion_exactly(thousandths: list[int]) -> None:
    found = exact_weights([part / 1000 for part in thousandths])
    assert all(a * thousandths[0] == b * found[0] for a, b in zip(found, thousandths, strict=True))


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf")])
def test_a_ratio_that_is_not_positive_and_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite numbers above 0"):
        exact_weights([1.0, bad])


def test_a_quota_that_holds_one_page_of_each_group_is_found() -> None:
    # Pages of 3 and 1 grains, equal weights: the first wants 2 grains of the rest, so it takes 4.
    assert quota_holding([5 * MIB, 2 * MIB], [1, 1], 2 * MIB) == 2 * MIB * (2 + 4)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 100)), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_every_quota_from_there_on_holds_one_page_of_each_group(
    groups: list[tuple[int, int]], more: int
) -> None:
    pages, weights = zip(*groups, strict=True)
    shares = split_quota(quota_holding(pages, weights, 4) + 4 * more, weights, 4)
    assert all(slots_in(share, page) for share, page in zip(shares, pages, strict=True))


def test_slots_are_the_whole_pages_of_a_share() -> None:
    assert slots_in(10 * MIB, 3 * MIB) == 3
    assert slots_in(2 * MIB, 3 * MIB) == 0


def test_sizes_are_shown_to_the_byte() -> None:
    assert exact_size(1000) == "1000 B"
    assert exact_size(3 * MIB // 2) == "1.5 MiB (1,572,864 B)"
