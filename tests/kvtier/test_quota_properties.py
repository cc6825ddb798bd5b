"""What must hold of quotas and plans whatever the numbers are."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from kvtier.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
)
from kvtier.layout import GroupLayout
from kvtier.plan import CachePlan, LevelPlan
from kvtier.quota import exact_weights, grain_of, minimum_quota, quota_holding, split_quota
from kvtier.transfer.codec import Concatenate

MIB, GIB = 1 << 20, 1 << 30

grains = st.sampled_from([2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB])
weights = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=8)


def largest_remainder(quota: int, weights: list[int], grain: int) -> tuple[int, ...]:
    """Split as the contract has it: by fractions, and slowly."""
    rest = -(-quota // grain) - len(weights)
    ideals = [Fraction(rest * weight, sum(weights)) for weight in weights]
    parts = [int(ideal) for ideal in ideals]
    while sum(parts) < rest:
        missing = [ideal - part for ideal, part in zip(ideals, parts, strict=True)]
        parts[missing.index(max(missing))] += 1
    return tuple(grain * (1 + part) for part in parts)


# ------------------------------------------------------------------------------------- grains


@given(st.integers(1, 1 << 50))
def test_the_grain_is_a_power_of_two_of_2_to_32_mib(quota: int) -> None:
    grain = grain_of(quota)
    assert grain in (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
    if 2 * MIB < grain < 32 * MIB:
        assert 512 <= quota / grain < 1024


@given(st.integers(1, 1 << 50), st.integers(0, 1 << 50))
def test_the_grain_never_falls_when_the_quota_grows(quota: int, more: int) -> None:
    assert grain_of(quota) <= grain_of(quota + more)


@given(st.integers(1 << 30, 1 << 34))
def test_the_grain_doubles_with_the_quota_from_1_to_16_gib(quota: int) -> None:
    assert grain_of(2 * quota) == (2 * grain_of(quota) if quota < 16 * GIB else 32 * MIB)


@given(st.integers(2 * MIB, 1 << 40), st.integers(0, 1 << 40))
def test_a_larger_quota_is_never_rounded_to_a_smaller_one(quota: int, more: int) -> None:
    def rounded(nbytes: int) -> int:
        return sum(split_quota(nbytes, [1], grain_of(nbytes)))

    assert quota <= rounded(quota) <= rounded(quota + more)


# ------------------------------------------------------------------------------------- shares


@given(weights, grains, st.integers(0, 1 << 60))
def test_shares_are_those_of_largest_remainders(weights: list[int], grain: int, extra: int) -> None:
    quota = minimum_quota(len(weights), grain) + extra
    assert split_quota(quota, weights, grain) == largest_remainder(quota, weights, grain)


@given(weights, grains, st.integers(0, 1 << 45), st.integers(1, 1 << 40))
def test_only_the_proportion_of_weights_counts(
    weights: list[int], grain: int, extra: int, factor: int
) -> None:
    quota = minimum_quota(len(weights), grain) + extra
    scaled = [weight * factor for weight in weights]
    assert split_quota(quota, weights, grain) == split_quota(quota, scaled, grain)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 300))
def test_a_larger_weight_never_gets_less(weights: list[int], rest: int) -> None:
    shares = split_quota(len(weights) + rest, weights, 1)
    by_weight = sorted(zip(weights, shares, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(by_weight) if a[0] < b[0])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 50))
def test_a_rest_that_splits_evenly_is_split_exactly(weights: list[int], times: int) -> None:
    shares = split_quota(len(weights) + times * sum(weights), weights, 1)
    assert shares == tuple(1 + times * weight for weight in weights)


@given(
    st.lists(st.decimals(min_value="0.001", max_value=1000, places=3), min_size=1, max_size=6),
    st.integers(0, 1 << 40),
)
def test_ratios_split_as_the_decimals_that_were_written(ratio: list[Any], extra: int) -> None:
    quota = minimum_quota(len(ratio), 2 * MIB) + extra
    exact = [int(Fraction(part) * 1000) for part in ratio]
    found = split_quota(quota, exact_weights([float(part) for part in ratio]), 2 * MIB)
    assert found == split_quota(quota, exact, 2 * MIB)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=5))
def test_the_quota_named_as_enough_is_the_least_from_which_on_it_always_is(
    groups: list[tuple[int, int]],
) -> None:
    pages, weights = zip(*groups, strict=True)
    enough = quota_holding(pages, weights, 4)

    def hold(quota: int) -> bool:
        shares = split_quota(quota, weights, 4)
        return all(share >= page for share, page in zip(shares, pages, strict=True))

    assert all(hold(enough + 4 * more) for more in range(2 * sum(weights)))
    if len(groups) == 1 and enough > 4:
        assert not hold(enough - 4)


# -------------------------------------------------------------------------------------- plans

windows = st.sampled_from([(None, None), (64, None), (64, 4), (128, 0)])
sizes = st.sampled_from([1, 3, 512, 4096, 65536, 300_000, MIB])
buffers = st.lists(sizes, min_size=1, max_size=4)
SMALL = st.integers(1, 64 * MIB)
LARGE = st.integers(512 * MIB, 4 * GIB) | st.integers(512 * MIB, 40 * GIB)


class Codec(Concatenate):
    """Makes pages that are larger or smaller than the hot ones."""

    def __init__(self, numerator: int) -> None:
        self.numerator = numerator
        self.pages: list[int] = []

    def configure(self, groups: tuple[GroupLayout, ...]) -> None:
        self.pages = [-(-group.page_bytes * self.numerator // 2) for group in groups]

    def page_bytes(self, group: int) -> int:
        return self.pages[group]


@st.composite
def tier_lists(draw: st.DrawFn, quotas: st.SearchStrategy[int]) -> list[CacheTierConfig]:
    kinds = draw(st.sampled_from(["g", "h", "gh", "gd", "hd", "ghd"]))
    tiers: list[CacheTierConfig] = []
    for kind in kinds:
        quota = draw(quotas)
        bound = draw(st.none() | st.integers(quota, 2 * quota))
        if kind == "d":
            tiers.append(DiskCacheTierConfig(quota, "/nowhere", bound))
        else:
            tiers.append((GpuCacheTierConfig if kind == "g" else HostCacheTierConfig)(quota, bound))
    return tiers


@st.composite
def configurations(draw: st.DrawFn, quotas: st.SearchStrategy[int] = LARGE) -> KVCacheManagerConfig:
    layers = [
        AttentionLayerConfig(
            layer_id, [BufferConfig(f"b{n}", size) for n, size in enumerate(of_layer)], *window
        )
        for layer_id, (of_layer, window) in enumerate(
            draw(st.lists(st.tuples(buffers, windows), min_size=1, max_size=6))
        )
    ]
    groups = len({(layer.sliding_window_size, layer.num_sink_tokens) for layer in layers})
    parts = st.sampled_from([0.1, 0.3, 1.0, 2.5])
    return KVCacheManagerConfig(
        draw(st.integers(1, 512)),
        draw(tier_lists(quotas)),
        layers,
        initial_pool_ratio=draw(st.none() | st.lists(parts, min_size=groups, max_size=groups)),
        cold_page_codec=draw(st.none() | st.sampled_from([1, 2, 3]).map(Codec)),
    )


def plan_of(config: KVCacheManagerConfig) -> CachePlan:
    """Give the plan of a configuration that has one, as most of those with large quotas have."""
    assume(not list(config.problems()))
    return config.plan()


@given(configurations(SMALL | LARGE))
def test_a_configuration_has_a_plan_exactly_if_it_is_valid(config: KVCacheManagerConfig) -> None:
    problems = "; ".join(config.problems())
    try:
        said = str(config.plan())
    except ValueError as error:
        said = str(error)
    assert said == problems or not problems
    assert said.startswith("pool groups") == (not problems)


@given(configurations())
def test_no_byte_of_a_quota_is_lost_or_counted_twice(config: KVCacheManagerConfig) -> None:
    plan = plan_of(config)
    for level, tier in zip(plan.levels, config.cache_tiers, strict=True):
        grain = level.grain
        assert tier.quota <= level.quota < tier.quota + grain
        assert level.quota == sum(level.shares) == sum(level.slot_bytes) + sum(level.padding)
        assert level.quota <= level.max_quota
        assert level.max_quota % grain == 0
        assert all(share >= grain and share % grain == 0 for share in level.shares)
        assert all(level.slots)


@given(configurations())
def test_no_share_leaves_room_for_one_more_slot(config: KVCacheManagerConfig) -> None:
    for level in plan_of(config).levels:
        for padding, page in zip(level.padding, level.page_bytes, strict=True):
            assert 0 <= padding < page


@given(configurations())
def test_every_pool_has_room_for_all_that_the_bound_allows(config: KVCacheManagerConfig) -> None:
    for level in plan_of(config).levels:
        for group, sizes in enumerate(level.slot_sizes):
            pools = 0 if level.tier == "disk" else len(sizes)
            assert level.address_space[group] == pools * level.max_quota
            assert level.slots[group] <= level.max_slots[group]
            for pool, size in enumerate(sizes):
                assert level.max_slots[group] * size <= level.max_quota
                unit = level.unit(group, pool)
                assert unit % size == 0
                assert level.grain <= unit < level.grain + size


@given(configurations())
def test_every_buffer_has_one_place_and_no_place_two_buffers(config: KVCacheManagerConfig) -> None:
    plan = plan_of(config)
    placed = [
        (place.layer_id, place.role, place.size)
        for group in plan.groups
        for pool in group.pools
        for place in pool.buffers
    ]
    asked = [(x.layer_id, b.role, b.size) for x in config.layers for b in x.buffers]
    assert sorted(placed) == sorted(asked)
    for group in plan.groups:
        for pool in group.pools:
            end = 0
            for place in pool.buffers:
                assert place.offset == end
                end += place.size
            assert end == pool.slot_size


@given(configurations())
def test_hot_levels_have_the_pools_of_the_layout_and_cold_ones_whole_pages(
    config: KVCacheManagerConfig,
) -> None:
    plan = plan_of(config)
    hot = tuple(tuple(pool.slot_size for pool in group.pools) for group in plan.groups)
    codec = config.cold_page_codec
    cold = tuple(
        (group.page_bytes if codec is None else codec.page_bytes(index),)
        for index, group in enumerate(plan.groups)
    )
    for level in plan.levels:
        assert level.hot == (level.tier == "gpu")
        assert level.slot_sizes == (hot if level.hot else cold)


@given(configurations(), st.data())
def test_another_quota_gives_what_it_had_given_at_first(
    config: KVCacheManagerConfig, data: st.DataObject
) -> None:
    for level in plan_of(config).levels:
        one, two = (data.draw(st.integers(0, level.max_quota)) for _ in range(2))
        try:
            there = level.at(one)
        except ValueError:
            continue
        assert (there.grain, there.max_quota, there.max_slots) == (
            *(level.grain, level.max_quota),
            level.max_slots,
        )
        assert one <= there.quota < one + level.grain
        assert there.at(level.quota) == level
        assert _outcome(level, two) == _outcome(there, two)


@given(configurations(), st.data())
def test_no_group_loses_more_than_a_grain_when_a_level_grows(
    config: KVCacheManagerConfig, data: st.DataObject
) -> None:
    for level in plan_of(config).levels:
        grown = _outcome(level, data.draw(st.integers(level.quota, level.max_quota)))
        if isinstance(grown, str):  # a group lost the one grain that held its page
            assert "holds none of its pages" in grown
            continue
        assert grown.quota >= level.quota
        for before, after in zip(level.shares, grown.shares, strict=True):
            assert after >= before - level.grain
        if len(level.shares) < 3:
            assert all(a <= b for a, b in zip(level.slots, grown.slots, strict=True))


@given(configurations(), configurations())
def test_digests_are_equal_where_plans_are(
    one: KVCacheManagerConfig, two: KVCacheManagerConfig
) -> None:
    first, second = plan_of(one), plan_of(two)
    assert first.digest == one.plan().digest
    assert (first == second) == (first.digest == second.digest)


@given(configurations())
def test_every_plan_prints(config: KVCacheManagerConfig) -> None:
    plan = plan_of(config)
    lines = plan.describe().splitlines()
    assert lines[-1] == f"digest {plan.digest}"
    assert json.loads(json.dumps(plan.as_json()))["digest"] == plan.digest
    totals = plan.as_json()["totals"]
    assert sum(totals[level.tier] for level in plan.levels) + totals["padding"] == sum(
        level.quota for level in plan.levels
    )


def _outcome(level: LevelPlan, quota: int) -> LevelPlan | str:
    try:
        return level.at(quota)
    except ValueError as error:
        return str(error)
