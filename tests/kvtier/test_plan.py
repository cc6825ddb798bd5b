"""Plans: what quotas amount to, level by level."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from kvtier.layout import GroupLayout
from kvtier.plan import make_plan
from kvtier.transfer.codec import Concatenate

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


def test_a_level_can_be_worked_out_at_another_quota() -> None:
    (level,) = cache(GpuCacheTierConfig("8MiB", "32MiB"), key=65 * KIB).plan().levels
    grown = level.at(15 * MIB)
    assert (grown.quota, grown.shares, grown.slots) == (16 * MIB, (8 * MIB, 8 * MIB), (126, 126))
    assert replace(grown, quota=level.quota, shares=level.shares, slots=level.slots) == level
    assert grown.at(8 * MIB) == level


def test_the_grain_is_kept_at_every_quota() -> None:
    (level,) = cache(HostCacheTierConfig("32MiB", "64GiB"), key=64 * KIB).plan().levels
    assert level.at(64 * GIB).grain == 2 * MIB


def test_the_bound_is_rounded_up_as_quotas_are() -> None:
    (level,) = cache(GpuCacheTierConfig("8MiB", 9 * MIB), key=64 * KIB).plan().levels
    assert level.at(10 * MIB).quota == 10 * MIB
    with pytest.raises(ValueError, match=r"gpu\.quota: .*10,485,761 B.* above max_quota, 10 MiB"):
        level.at(10 * MIB + 1)


@pytest.mark.parametrize("quota", [-1, 0, 4 * MIB - 1])
def test_another_quota_below_the_minimum_is_refused(quota: int) -> None:
    (level,) = cache(GpuCacheTierConfig("8MiB"), key=64 * KIB).plan().levels
    with pytest.raises(ValueError, match=r"^gpu\.quota: .* below the minimum of 4 MiB"):
        level.at(quota)


def test_a_share_of_exactly_one_page_holds_it() -> None:
    (level,) = cache(GpuCacheTierConfig("8MiB"), key=4 * MIB).plan().levels
    assert (level.slots, level.padding) == ((1, 1), (0, 0))


def test_another_quota_that_holds_no_page_is_refused() -> None:
    (level,) = cache(GpuCacheTierConfig("12MiB"), key=5 * MIB).plan().levels
    with pytest.raises(ValueError, match=r"gpu\.quota: .* pool group 1 .* is 12 MiB"):
        level.at(10 * MIB)


# ------------------------------------------------------------------------------- hot and cold


class Packed(Concatenate):
    """A codec that needs a header of so many bytes a page, whatever is in it."""

    def __init__(self, header: int) -> None:
        self.header = header
        self.groups: tuple[GroupLayout, ...] = ()

    def configure(self, groups: tuple[GroupLayout, ...]) -> None:
        assert self.groups in ((), groups)
        self.groups = groups

    def page_bytes(self, group: int) -> int:
        return self.header + self.groups[group].page_bytes


def test_without_a_gpu_tier_no_level_is_hot() -> None:
    config = cache(HostCacheTierConfig("32MiB"), key=64 * KIB, scale=KIB)
    (level,) = config.plan().levels
    assert (level.hot, level.slot_sizes) == (False, ((65 * KIB,),) * 2)
    hot, cold = cache(GpuCacheTierConfig("8MiB"), *config.cache_tiers, key=64).plan().levels
    assert (hot.hot, cold.hot) == (True, False)


def test_pages_of_cold_levels_are_as_large_as_the_codec_says(tmp_path: Path) -> None:
    tiers = (
        GpuCacheTierConfig("8MiB"),
        HostCacheTierConfig("32MiB"),
        DiskCacheTierConfig("32MiB", tmp_path),
    )
    config = replace(cache(*tiers, key=64 * KIB, scale=KIB), cold_page_codec=Packed(4 * KIB))
    hot, *cold = config.plan().levels
    assert hot.slot_sizes == ((64 * KIB, KIB),) * 2
    assert [level.slot_sizes for level in cold] == [((69 * KIB,),) * 2] * 2
    assert cold[0].slots == (16 * MIB // (69 * KIB),) * 2
    engines = replace(config, cache_tiers=tiers[1:]).plan()
    assert engines.levels == tuple(cold)


def test_a_cold_level_is_split_by_the_bytes_of_its_own_pages() -> None:
    # Hot pages of 1 and 3 KiB, cold ones of 3 and 5: 16 grains beyond the minimum, then 3 to 5.
    layers = [layer(0, key=KIB), layer(1, 64, key=3 * KIB)]
    tiers = [GpuCacheTierConfig("20MiB"), HostCacheTierConfig("36MiB")]
    config = KVCacheManagerConfig(16, tiers, layers, cold_page_codec=Packed(2 * KIB))
    hot, cold = config.plan().levels
    assert (hot.weights, cold.weights) == ((KIB, 3 * KIB), (3 * KIB, 5 * KIB))
    assert hot.shares == (6 * MIB, 14 * MIB)
    assert cold.shares == (14 * MIB, 22 * MIB)
    by_ratio = replace(config, initial_pool_ratio=[0.25, 0.75]).plan().levels
    assert [level.weights for level in by_ratio] == [(1, 3)] * 2


def test_a_codec_without_bytes_is_refused() -> None:
    config = cache(HostCacheTierConfig("32MiB"), key=KIB)
    with pytest.raises(ValueError, match=r"cold_page_codec: Packed.page_bytes\(0\) is 0, the min"):
        replace(config, cold_page_codec=Packed(-KIB)).validate()


def test_a_codec_whose_pages_no_share_holds_is_refused() -> None:
    config = cache(GpuCacheTierConfig("8MiB"), HostCacheTierConfig("8MiB"), key=KIB)
    with pytest.raises(ValueError, match=r"^host\.quota: .* none of its pages of 5 MiB"):
        replace(config, cold_page_codec=Packed(5 * MIB - KIB)).validate()


# ------------------------------------------------------------------------------------- printing


def whole(tmp_path: Path) -> KVCacheManagerConfig:
    return cache(
        GpuCacheTierConfig("8MiB"),
        HostCacheTierConfig("32MiB", "1GiB"),
        DiskCacheTierConfig("64MiB", tmp_path),
        key=65 * KIB,
        value=KIB,
    )


def test_a_plan_prints_as_tables(tmp_path: Path) -> None:
    plan = whole(tmp_path).plan()
    assert str(plan) == plan.describe()
    lines = [line.split() for line in str(plan).splitlines()]
    assert ["pool", "groups,", "blocks", "of", "16", "tokens"] in lines
    # Page bytes of the groups; then share, slots, max slots, memory, padding and address space.
    assert ["1", "1", "2", "67,584", "64", "0"] in lines
    for row in (
        "0 66,560 + 1,024 4 MiB 62 124 4 MiB 4 KiB 16 MiB",
        "0 67,584 16 MiB 248 15,887 16 MiB 16 KiB 1 GiB",
        "0 67,584 32 MiB 496 992 32 MiB 32 KiB 0 B",
        # Everything together: slots, bytes, padding and address space.
        "gpu 124 7.99 MiB 8 KiB 32 MiB",
        "host 496 32 MiB 32 KiB 2 GiB",
        "disk 992 63.9 MiB 64 KiB 0 B",
        f"digest {plan.digest}",
    ):
        assert row.split() in lines
    assert "host: quota 32 MiB, at most 1 GiB, in grains of 2 MiB" in str(plan)


def test_a_plan_can_be_read_by_programs(tmp_path: Path) -> None:
    plan = whole(tmp_path).plan()
    found = json.loads(json.dumps(plan.as_json()))
    assert list(found) == ["digest", "totals", "tokens_per_block", "groups", "levels"]
    assert found["digest"] == plan.digest
    assert found["tokens_per_block"] == 16
    assert found["totals"] == {
        "gpu": 124 * 67_584,
        "host": 496 * 67_584,
        "disk": 992 * 67_584,
        "padding": (8 + 32 + 64) * KIB,
        "address_space": 32 * MIB + 2 * GIB,
    }
    hot = found["levels"][0]
    assert (hot["tier"], hot["hot"], hot["grain"]) == ("gpu", True, 2 * MIB)
    assert (hot["slots"], hot["slot_sizes"]) == ([62, 62], [[66_560, 1_024]] * 2)
    assert (hot["page_bytes"], hot["slot_bytes"]) == ([67_584] * 2, [62 * 67_584] * 2)
    assert (hot["padding"], hot["address_space"]) == ([4 * KIB] * 2, [16 * MIB] * 2)
    group = found["groups"][1]
    assert (group["layer_ids"], group["sliding_window_size"]) == ([1], 64)
    buffer = {"layer_id": 1, "role": "value", "offset": 0, "size": KIB}
    assert group["pools"][1] == {"slot_size": KIB, "buffers": [buffer]}


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    # Written down: a change of it is a change of what ranks of two versions can agree on.
    assert whole(tmp_path).plan().digest == "32f542d3345554925b22fbdc1f28ccdd"


def test_what_only_one_machine_knows_is_not_in_the_digest(tmp_path: Path) -> None:
    here, there = whole(tmp_path), whole(tmp_path / "elsewhere")
    assert here != there
    assert here.plan().digest == there.plan().digest


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_block": 32},
        {"initial_pool_ratio": [1, 2]},
        {"cold_page_codec": Packed(1)},
        {"layers": [layer(0, key=65 * KIB, value=KIB), layer(1, 65, key=65 * KIB, value=KIB)]},
        {"layers": [layer(0, key=65 * KIB, value=KIB), layer(2, 64, key=65 * KIB, value=KIB)]},
        {"layers": [layer(0, k=65 * KIB, value=KIB), layer(1, 64, key=65 * KIB, value=KIB)]},
        {"layers": [layer(0, value=KIB, key=65 * KIB), layer(1, 64, key=65 * KIB, value=KIB)]},
    ],
)
def test_whatever_decides_where_bytes_lie_is_in_the_digest(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    config = whole(tmp_path)
    assert replace(config, **change).plan().digest != config.plan().digest


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("field", ["quota", "max_quota"])
def test_every_quota_is_in_the_digest(tmp_path: Path, level: int, field: str) -> None:
    config = whole(tmp_path)
    tiers: list[Any] = [*config.cache_tiers]
    tiers[level] = replace(tiers[level], **{field: "2GiB", "max_quota": "2GiB"})
    assert replace(config, cache_tiers=tiers).plan().digest != config.plan().digest
