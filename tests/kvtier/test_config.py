"""Configuration: sizes are read at once, everything else is checked as a whole."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

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

MIB, GIB = 1 << 20, 1 << 30


def layer(layer_id: int = 0, window: int | None = None, size: int = 16384) -> AttentionLayerConfig:
    return AttentionLayerConfig(
        layer_id, [BufferConfig("key", size), BufferConfig("value", size)], window
    )


def cache(
    *tiers: CacheTierConfig,
    layers: Sequence[AttentionLayerConfig] | None = None,
    tokens: int = 16,
    **options: Any,
) -> KVCacheManagerConfig:
    """Give a cache of the tiers; by default a valid one of one layer."""
    return KVCacheManagerConfig(
        tokens, tiers or (GpuCacheTierConfig("8MiB"),), layers or [layer()], **options
    )


def test_sizes_are_bytes_or_text_and_are_kept_as_integers(tmp_path: Path) -> None:
    assert GpuCacheTierConfig("64GiB").quota == 64 * GIB
    assert HostCacheTierConfig(MIB, max_quota="1.5GiB").max_quota == 3 * GIB // 2
    disk = DiskCacheTierConfig("1GiB", tmp_path)
    assert (disk.quota, disk.max_quota, disk.path) == (GIB, None, str(tmp_path))
    assert BufferConfig("key", "64KiB").size == 65536


@pytest.mark.parametrize("text", ["12 bananas", "", "0.3B"])
def test_text_that_is_no_size_is_refused_at_construction(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpu\.quota"):
        GpuCacheTierConfig(text)
    with pytest.raises(ValueError, match=r"host\.max_quota"):
        HostCacheTierConfig("1GiB", text)
    with pytest.raises(ValueError, match="size of buffer 'key'"):
        BufferConfig("key", text)


def test_the_tiers_are_named_as_in_every_output() -> None:
    assert [str(tier) for tier in CacheTier] == ["gpu", "host", "disk"]
    assert GpuCacheTierConfig.tier is CacheTier.GPU
    assert HostCacheTierConfig("1GiB").tier is CacheTier.HOST
    assert DiskCacheTierConfig("1GiB", "/").tier is CacheTier.DISK


def test_configurations_are_values(tmp_path: Path) -> None:
    disk = DiskCacheTierConfig("1GiB", tmp_path, "2GiB")
    assert disk == DiskCacheTierConfig(GIB, str(tmp_path), 2 * GIB)
    assert hash(disk) == hash(DiskCacheTierConfig(GIB, str(tmp_path), 2 * GIB))
    assert replace(disk, quota=512 * MIB).quota == GIB // 2
    whole = cache(initial_pool_ratio=[1.0])
    assert pickle.loads(pickle.dumps(whole)) == whole
    with pytest.raises(FrozenInstanceError):
        disk.quota = 1  # type: ignore[misc]


def test_a_sound_configuration_is_valid(tmp_path: Path) -> None:
    cache(
        GpuCacheTierConfig("8MiB"),
        HostCacheTierConfig("32MiB", "65MiB", page_mode="auto"),
        DiskCacheTierConfig("1GiB", tmp_path, "1GiB"),
        layers=[layer(0), layer(1, window=128)],
        initial_pool_ratio=[3, 1],
    ).validate()


@pytest.mark.parametrize("quota", [0, -1])
def test_a_quota_that_is_not_positive_is_refused(quota: int) -> None:
    with pytest.raises(ValueError, match=rf"host\.quota: {quota} B is below the minimum of 1 B"):
        HostCacheTierConfig(quota).validate()


def test_a_bound_below_the_quota_is_refused() -> None:
    wrong = HostCacheTierConfig("32MiB", "16MiB")
    with pytest.raises(ValueError, match=r"host\.max_quota: 16 MiB .* 32 MiB \(33,554,432 B\)"):
        wrong.validate()


def test_an_unknown_page_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host\.page_mode: 'giant' is none of small, huge"):
        HostCacheTierConfig("32MiB", page_mode="giant").validate()


def test_a_missing_disk_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk\.path: .* does not exist"):
        DiskCacheTierConfig("1GiB", tmp_path / "missing").validate()


def test_a_file_is_no_disk_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"disk\.path: .* is not a directory"):
        DiskCacheTierConfig("1GiB", tmp_path / "file").validate()


def test_a_directory_without_write_access_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser may write anywhere, so the answer of access(2) is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ValueError, match=r"disk\.path: .* is not writable"):
        DiskCacheTierConfig("1GiB", tmp_path).validate()


def test_a_quota_below_one_grain_a_group_is_refused_for_every_tier() -> None:
    wrong = cache(
        GpuCacheTierConfig("3MiB"),
        HostCacheTierConfig("1MiB", "2MiB"),
        layers=[layer(0), layer(1, window=128)],
    )
    with pytest.raises(ValueError, match="is below") as caught:
        wrong.validate()
    problems = str(caught.value).split("; ")
    least = r"is below the minimum of 4 MiB (4,194,304 B), 2 pool groups of one 2 MiB"
    assert len(problems) == 3
    for problem, field in zip(
        problems, ("gpu.quota: 3 MiB", "host.quota: 1 MiB", "host.max_quota: 2 MiB"), strict=True
    ):
        assert problem.startswith(field)
        assert least in problem


def test_a_share_that_holds_no_page_is_refused() -> None:
    # One group of 2 x 2 MiB pages: one grain of 2 MiB meets the minimum, but holds none.
    wrong = cache(GpuCacheTierConfig("2MiB"), layers=[layer(size=2 * MIB)])
    with pytest.raises(ValueError, match=r"gpu\.quota: .* pages of 4 MiB .* minimum .* is 4 MiB"):
        wrong.validate()


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ("h", "host"),
        ("hg", "host, gpu"),
        ("gg", "gpu, gpu"),
        ("ghh", "gpu, host, host"),
        ("gdh", "gpu, disk, host"),
    ],
)
def test_tiers_out_of_order_are_refused(tmp_path: Path, kinds: str, named: str) -> None:
    made = {
        "g": GpuCacheTierConfig("8MiB"),
        "h": HostCacheTierConfig("8MiB"),
        "d": DiskCacheTierConfig("8MiB", tmp_path),
    }
    with pytest.raises(ValueError, match=f"cache_tiers: {named} is not a valid order"):
        cache(*(made[kind] for kind in kinds)).validate()


def test_the_host_tier_may_be_left_out(tmp_path: Path) -> None:
    cache(GpuCacheTierConfig("8MiB"), DiskCacheTierConfig("8MiB", tmp_path)).validate()


def test_no_tiers_and_no_layers_are_refused_in_one_answer() -> None:
    with pytest.raises(ValueError, match=r"layers: none given.*cache_tiers: none given"):
        KVCacheManagerConfig(16, [], []).validate()


def test_equal_layer_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="layer_id 3 is given more than once"):
        cache(layers=[layer(3), layer(4), layer(3)]).validate()


def test_equal_roles_in_a_layer_are_refused() -> None:
    twice = AttentionLayerConfig(0, [BufferConfig("key", 64), BufferConfig("key", 32)])
    with pytest.raises(ValueError, match="layer 0: buffers: role 'key' is given more than once"):
        cache(layers=[twice]).validate()


def test_an_empty_buffer_and_a_layer_without_buffers_are_refused() -> None:
    layers = [AttentionLayerConfig(0, [BufferConfig("key", 0)]), AttentionLayerConfig(1, [])]
    with pytest.raises(
        ValueError, match=r"buffer 'key': size: 0 B.*minimum of 1 B; layer 1: .*minimum is 1 buffer"
    ):
        cache(layers=layers).validate()


@pytest.mark.parametrize(
    ("window", "sinks", "named"),
    [
        (0, None, "sliding_window_size: 0 is below the minimum of 1 token"),
        (-5, None, "sliding_window_size: -5"),
        (8, -1, "num_sink_tokens: -1 is below the minimum of 0 tokens"),
        (None, 4, "num_sink_tokens: 4 tokens, but no sliding_window_size"),
    ],
)
def test_a_bad_window_is_refused(window: int | None, sinks: int | None, named: str) -> None:
    wrong = AttentionLayerConfig(0, [BufferConfig("key", 64)], window, sinks)
    with pytest.raises(ValueError, match=named):
        cache(layers=[wrong]).validate()


@pytest.mark.parametrize(
    ("ratio", "named"),
    [
        ([1.0, 1.0], "2 numbers, but the layers form 1 pool groups"),
        ([], "0 numbers"),
        ([-1.0], "finite and above 0"),
        ([0.0], "finite and above 0"),
        ([float("nan")], "finite and above 0"),
    ],
)
def test_a_bad_pool_ratio_is_refused(ratio: list[float], named: str) -> None:
    with pytest.raises(ValueError, match=f"initial_pool_ratio: .*{named}"):
        cache(initial_pool_ratio=ratio).validate()


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_bad_share_for_resuming_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="max_util_for_resume"):
        cache(max_util_for_resume=share).validate()


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="tokens_per_block: 0 is below the minimum of 1 token"):
        cache(tokens=0).validate()


def test_a_plan_is_made_from_a_valid_configuration_only() -> None:
    assert cache().plan().levels[0].slots == (8 * MIB // 32768,)
    with pytest.raises(ValueError, match="tokens_per_block"):
        cache(tokens=0).plan()
