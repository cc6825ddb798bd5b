"""Plans: what quotas amount to, level by level."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTier,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
)
from kvtier.plan import make_plan

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def layer(layer_id: int, window: int | None = None, **sizes: int) -> AttentionLayerConfig:
    buffers = [BufferConfig(role, size) for role, size in sizes.items()]
    return AttentionLayerConfig(layer_id, buffers, window)


def cache(
    *tiers: CacheTierConfig, ratio: list[float] | None = None, **sizes: int
) -> KVCacheManagerConfig:
    """Give a cache of two groups, the second with windowed attention and equal buffers."""
    layers = [layer(0, **sizes), layer(1, 64, **sizes)]
    return KVCacheManagerConfig(16, tiers, layers, initial_pool_ratio=ratio)


def test_the_hot_level_has_pools_and_a_colder_one_pages() -> None:
    plan = cache(
        GpuCacheTierConfig("8MiB"), HostCacheTierConfig("32MiB"), key=64 * KIB, scale=KIB
    ).plan()
    hot, cold = plan.levels
    assert (hot.tier, cold.tier) == (CacheTier.GPU, CacheTier.HOST)
    assert hot.slot_sizes == ((64 * KIB, KIB),) * 2
    assert cold.slot_sizes == ((65 * KIB,),) * 2
    assert [group.page_bytes for group in plan.groups] == [65 * KIB] * 2


def test_slots_are_what_fits_in_each_share_and_the_rest_is_padding() -> None:
    (level,) = cache(GpuCacheTierConfig("8MiB"), key=65 * KIB).plan().levels
    # 4 grains of 2 MiB, 2 for each group: 4 MiB hold 63 slots of 65 KiB and leave 1 KiB.
    assert level.shares == (4 * MIB, 4 * MIB)
    assert level.slots == (63, 63)
    assert level.padding == (KIB, KIB)


def test_shares_follow_page_bytes_unless_a_ratio_is_given() -> None:
    layers = [layer(0, key=96 * KIB), layer(1, 64, key=32 * KIB)]
    tiers = [GpuCacheTierConfig("20MiB")]
    by_bytes = KVCacheManagerConfig(16, tiers, layers).plan().levels[0]
    assert by_bytes.shares == (14 * MIB, 6 * MIB)  # 8 grains beyond the minimum, 3 to 1
    by_ratio = KVCacheManagerConfig(16, tiers, layers, initial_pool_ratio=[0.25, 0.75])
    assert by_ratio.plan().levels[0].shares == (6 * MIB, 14 * MIB)


def test_quota_and_bound_are_rounded_up_to_the_grain_of_the_initial_quota() -> None:
    (level,) = cache(GpuCacheTierConfig("7MiB", "5GiB"), key=64 * KIB).plan().levels
    assert (level.grain, level.quota) == (2 * MIB, 8 * MIB)
    (level,) = cache(GpuCacheTierConfig("7MiB", 65 * MIB + 1), key=64 * KIB).plan().levels
    assert level.max_quota == 66 * MIB


def test_every_pool_reserves_the_whole_bound() -> None:
    (level,) = cache(GpuCacheTierConfig("8MiB", "66MiB"), key=64 * KIB, scale=KIB).plan().levels
    assert level.max_slots == (66 * MIB // (65 * KIB),) * 2
    assert level.address_space == (2 * 66 * MIB, 2 * 66 * MIB)


def test_without_a_bound_the_quota_is_the_bound() -> None:
    (level,) = cache(GpuCacheTierConfig("7MiB"), key=64 * KIB).plan().levels
    assert level.max_quota == level.quota == 8 * MIB


def test_a_default_bound_is_asked_for_where_none_is_given(tmp_path: Path) -> None:
    config = cache(
        GpuCacheTierConfig("8MiB", "16MiB"),
        HostCacheTierConfig("8MiB"),
        DiskCacheTierConfig("8MiB", tmp_path),
        key=64 * KIB,
    )
    found = {CacheTier.HOST: GIB, CacheTier.DISK: 3 * MIB + 5 * MIB}
    plan = make_plan(config, default_max_quota=lambda tier: found[tier.tier])
    assert [level.max_quota for level in plan.levels] == [16 * MIB, GIB, 8 * MIB]


def test_a_quota_above_the_default_bound_is_refused() -> None:
    config = cache(GpuCacheTierConfig("8MiB"), key=64 * KIB)
    with pytest.raises(ValueError, match=r"gpu\.quota: 8 MiB .* above the 7 MiB .*gpu\.max_quota"):
        make_plan(config, default_max_quota=lambda tier: 7 * MIB)


def test_the_commit_unit_is_the_grain_rounded_up_to_whole_slots() -> None:
    hot, cold = (
        cache(GpuCacheTierConfig("32MiB"), HostCacheTierConfig("32MiB"), key=768 * KIB, scale=KIB)
        .plan()
        .levels
    )
    assert hot.unit(0, 0) == 3 * 768 * KIB
    assert hot.unit(1, 1) == 2 * MIB
    assert cold.unit(1) == 3 * 769 * KIB


def test_a_share_without_a_slot_names_the_quota_that_has_one() -> None:
    # Pages of 5 MiB take 3 grains; of equal weight, both groups have them from 6 grains on.
    config = cache(GpuCacheTierConfig("12MiB"), HostCacheTierConfig("10MiB"), key=5 * MIB)
    with pytest.raises(ValueError, match=r"host\.quota: .* pool group 1 .* is 12 MiB"):
        make_plan(config)


@given(
    st.integers(1, 8 * MIB),
    st.integers(1, 8 * MIB),
    st.integers(128 * MIB, 64 * GIB),
    st.sampled_from([None, [1.0, 1.0], [0.4, 0.6]]),
)
def test_slots_and_padding_make_up_the_rounded_quota(
    first: int, second: int, quota: int, ratio: list[float] | None
) -> None:
    layers = [layer(0, key=first), layer(1, 64, key=second)]
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig(quota)], layers, initial_pool_ratio=ratio)
    (level,) = config.plan().levels
    used = level.slots[0] * first + level.slots[1] * second
    assert used + sum(level.padding) == level.quota
    assert quota <= level.quota < quota + level.grain
    assert all(0 <= left < page for left, page in zip(level.padding, (first, second), strict=True))


def test_a_plan_prints_as_tables() -> None:
    config = cache(
        GpuCacheTierConfig("8MiB"), HostCacheTierConfig("32MiB", "1GiB"), key=65 * KIB, value=KIB
    )
    lines = [line.split() for line in str(config.plan()).splitlines()]
    # Page bytes of the groups; share, slots, max slots, padding and address space of the levels.
    assert ["1", "1", "2", "67,584", "64", "0"] in lines
    hot = "0 66,560 + 1,024 4 MiB 62 124 4 KiB 16 MiB"
    cold = "0 67,584 16 MiB 248 15,887 16 KiB 1 GiB"
    assert hot.split() in lines
    assert cold.split() in lines
    assert "host: quota 32 MiB, at most 1 GiB, in grains of 2 MiB" in str(config.plan())
