"""Configuration: sizes are read at once, everything else is checked as a whole."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from hostmem import huge_pages, machine
from hostmem.page_mode import resolve_page_mode
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
    assert [str(tier) for tier in CacheTier] == ["gpu", "host", "disk", "remote"]
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


@pytest.mark.parametrize("mode", ["giant", "hugetlb-12KiB", "hugetlb-many"])
def test_page_modes_are_those_of_the_host_memory_on_this_machine(mode: str) -> None:
    with pytest.raises(ValueError, match="page_mode") as hostmems:
        resolve_page_mode(mode, machine())
    with pytest.raises(ValueError, match=r"host\.page_mode") as ours:
        HostCacheTierConfig("32MiB", page_mode=mode).validate()
    assert str(ours.value) == f"host.{hostmems.value}"


def test_a_pool_of_huge_pages_is_a_page_mode_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huge_pages, "pools", lambda root: {2 * MIB: None, GIB: None})
    HostCacheTierConfig("32MiB", page_mode="hugetlb-1GiB").validate()


def test_a_bad_environment_is_named_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_THP", "yes")
    with pytest.raises(ValueError, match=r"^HOSTMEM_THP: 'yes'"):
        HostCacheTierConfig("32MiB").validate()
    HostCacheTierConfig("32MiB", page_mode="small").validate()


def test_what_only_this_machine_knows_can_be_left_out(tmp_path: Path) -> None:
    elsewhere = cache(
        HostCacheTierConfig("32MiB", page_mode="hugetlb-12KiB"),
        DiskCacheTierConfig("32MiB", tmp_path / "missing"),
    )
    elsewhere.validate(here=False)
    assert len(elsewhere.plan().levels) == 2
    with pytest.raises(ValueError, match=r"host\.page_mode: .*disk\.path: .* does not exist"):
        elsewhere.validate()


def test_an_unknown_compression_is_refused_on_any_machine(tmp_path: Path) -> None:
    wrong = DiskCacheTierConfig("32MiB", tmp_path, compression="zip")
    with pytest.raises(ValueError, match=r"disk\.compression: 'zip' is not known; give 'blosc2'"):
        wrong.validate(here=False)


def test_a_compression_that_is_not_installed_is_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    wrong = DiskCacheTierConfig("32MiB", tmp_path, compression="blosc2")
    wrong.validate(here=False)
    with pytest.raises(ValueError, match=r"pip install hostmem\[blosc2\]"):
        wrong.validate()


def test_a_disk_tier_may_persist_and_compress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("blosc2")
    module.__spec__ = ModuleSpec("blosc2", None)
    monkeypatch.setitem(sys.modules, "blosc2", module)
    DiskCacheTierConfig("32MiB", tmp_path, compression="blosc2", persist=True).validate()


def test_a_disk_tier_forgets_and_does_not_compress_unless_told(tmp_path: Path) -> None:
    plain = DiskCacheTierConfig("1GiB", tmp_path)
    assert (plain.persist, plain.compression) == (False, None)
    assert replace(plain, persist=True).persist
    assert replace(plain, persist=True) != plain


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
        ("hg", "host, gpu"),
        ("gg", "gpu, gpu"),
        ("ghh", "gpu, host, host"),
        ("gdh", "gpu, disk, host"),
        ("dh", "disk, host"),
        ("dd", "disk, disk"),
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


@pytest.mark.parametrize("kinds", ["h", "hd"])
def test_the_gpu_tier_may_be_left_out(tmp_path: Path, kinds: str) -> None:
    made = {"h": HostCacheTierConfig("8MiB"), "d": DiskCacheTierConfig("8MiB", tmp_path)}
    config = cache(*(made[kind] for kind in kinds))
    config.validate()
    assert not any(level.hot for level in config.plan().levels)


def test_a_disk_tier_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk alone; it needs a gpu or a host tier above it"):
        cache(DiskCacheTierConfig("8MiB", tmp_path)).validate()


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


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (KVCacheManagerConfig, (16.5, [], []), r"tokens_per_block: .*whole number, not 16\.5"),
        (KVCacheManagerConfig, ("16", [], []), "tokens_per_block: .*whole number, not '16'"),
        (KVCacheManagerConfig, (True, [], []), "tokens_per_block: .*whole number, not True"),
        (KVCacheManagerConfig, (16, ["gpu"], []), "cache_tiers: expected CacheTierCon.*not 'gpu'"),
        (KVCacheManagerConfig, (16, [], [0]), "layers: expected AttentionLayerConfig, not 0"),
        (KVCacheManagerConfig, (16, [], [], "1"), "max_util_for_resume: expected Real, not '1'"),
        (KVCacheManagerConfig, (16, [], [], 1, ["3"]), "initial_pool_ratio: .* Real, not '3'"),
        (KVCacheManagerConfig, (16, [], [], 1, [True]), "initial_pool_ratio: .* Real, not True"),
        (AttentionLayerConfig, (7, ["key"]), "layer 7: buffers: expected BufferConf.*not 'key'"),
        (AttentionLayerConfig, ("0", []), "layer_id: expected a whole number, not '0'"),
        (AttentionLayerConfig, (7, [], 2.5), r"layer 7: sliding_window_size: .*not 2\.5"),
        (AttentionLayerConfig, (7, [], 8, "4"), "layer 7: num_sink_tokens: .*not '4'"),
        (BufferConfig, (3, 64), "role of a buffer: expected text, not 3"),
        (BufferConfig, ("key", 1.5), r"size of buffer 'key': .*float 1\.5"),
        (HostCacheTierConfig, (8, None, "no"), "host.allow_remote_numa_fallback: .*not 'no'"),
        (GpuCacheTierConfig, (None,), "gpu.quota: .*NoneType None"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_at_construction(
    kind: Any, arguments: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(TypeError, match=named):
        kind(*arguments)


def test_whether_a_disk_tier_persists_is_true_or_false() -> None:
    with pytest.raises(TypeError, match=r"disk\.persist: expected True or False, not 1"):
        DiskCacheTierConfig(8, "/", persist=cast(bool, 1))


def test_numbers_of_other_libraries_become_integers() -> None:
    tokens, layer_id, window = cast(tuple[int, ...], np.array([16, 3, 64], np.int16))
    config = cache(tokens=tokens, layers=[layer(layer_id, window)])
    assert type(config.tokens_per_block) is int
    assert type(config.layers[0].layer_id) is int
    assert type(config.layers[0].sliding_window_size) is int


def test_a_plan_is_made_from_a_valid_configuration_only() -> None:
    assert cache().plan().levels[0].slots == (8 * MIB // 32768,)
    with pytest.raises(ValueError, match="tokens_per_block"):
        cache(tokens=0).plan()
