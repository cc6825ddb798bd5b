"""Levels of named files: what the configuration asks for is what the files are."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from hostmem import CpuDevice, ResourceBusyError, StaticHostMem
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    KVCacheManagerConfig,
)
from kvtier.keys import layout_fingerprint
from kvtier.levels import Level, build_level, default_max_quota
from kvtier.plan import make_plan
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.memory import DiskPool

PAGE = 64 << 10
MIB = 1 << 20


def config(
    folder: Path, *, quota: str = "8MiB", page: int = PAGE, **options: object
) -> KVCacheManagerConfig:
    """Describe two pool groups on disk."""
    buffers = [BufferConfig("kv", page)]
    layers = [
        AttentionLayerConfig(0, buffers),
        AttentionLayerConfig(1, buffers, sliding_window_size=64),
    ]
    disk = DiskCacheTierConfig(quota, folder, **options)  # type: ignore[arg-type]
    return KVCacheManagerConfig(16, [GpuCacheTierConfig("4MiB"), disk], layers)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def build(what: KVCacheManagerConfig, cpu: CpuDevice, stack: contextlib.ExitStack) -> Level:
    plan = make_plan(what, default_max_quota=lambda tier: default_max_quota(tier, cpu))
    level = build_level(
        1, plan.levels[1], what.cache_tiers[1], cpu, "lru", layout=layout_fingerprint(what)
    )
    stack.callback(level.close)
    return level


def files(level: Level) -> list[SlotFile]:
    return [cast(DiskPool, group.memory.pools[0]).file for group in level.groups]


def test_a_level_that_persists_has_a_file_a_group_and_finds_it_again(
    tmp_path: Path, cpu: CpuDevice, stack: contextlib.ExitStack
) -> None:
    level = build(config(tmp_path, persist=True), cpu, stack)
    memory = StaticHostMem(PAGE, device=cpu)
    stack.callback(memory.close)
    memory.view(0, PAGE)[:] = 7
    at = np.array([memory.address], np.uint64)
    for n, file in enumerate(files(level)):
        slot = np.array([3 + n], np.int32)
        file.write(slot, at, Dependencies(), [b"group %d" % n]).synchronize()
    with pytest.raises(ResourceBusyError):
        build(config(tmp_path, persist=True), cpu, stack)
    level.close()
    names = [f"kvtier-g{n}.slots{end}" for n in (0, 1) for end in ("", ".index")]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    again = build(config(tmp_path, persist=True, quota="16MiB"), cpu, stack)
    assert [file.restored for file in files(again)] == [((3, b"group 0"),), ((4, b"group 1"),)]


def test_a_level_that_does_not_persist_leaves_nothing(
    tmp_path: Path, cpu: CpuDevice, stack: contextlib.ExitStack
) -> None:
    build(config(tmp_path), cpu, stack).close()
    assert os.listdir(tmp_path) == []


def test_another_layout_of_pages_is_refused(
    tmp_path: Path, cpu: CpuDevice, stack: contextlib.ExitStack
) -> None:
    first = config(tmp_path, persist=True)
    build(first, cpu, stack).close()
    window = AttentionLayerConfig(1, [BufferConfig("kv", PAGE)], sliding_window_size=128)
    other = KVCacheManagerConfig(16, first.cache_tiers, [first.layers[0], window])
    both = (
        f"layout {layout_fingerprint(first).hex()}, not of layout {layout_fingerprint(other).hex()}"
    )
    with pytest.raises(ValueError, match=both):
        build(other, cpu, stack)
    build(first, cpu, stack)


def test_a_level_compresses_what_it_is_told_to(
    tmp_path: Path, cpu: CpuDevice, stack: contextlib.ExitStack
) -> None:
    pytest.importorskip("blosc2", reason="the extra is not installed")
    plain = build(config(tmp_path), cpu, stack)
    packed = build(config(tmp_path, compression="blosc2"), cpu, stack)
    assert [file.stats().compression is None for file in files(plain)] == [True, True]
    assert [file.stats().compression is None for file in files(packed)] == [False, False]


def test_what_an_earlier_process_left_is_room_for_the_next_one(
    tmp_path: Path, cpu: CpuDevice, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a disk that is full of pages could not be used again."""
    first = config(tmp_path, persist=True)
    build(first, cpu, stack).close()
    taken = sum((tmp_path / f"kvtier-g{n}.slots").stat().st_blocks * 512 for n in (0, 1))
    assert taken >= 8 * MIB
    found = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: found._replace(free=MIB))
    kept, forgotten = first.cache_tiers[1], config(tmp_path).cache_tiers[1]
    assert default_max_quota(kept, cpu) == MIB + taken
    assert default_max_quota(forgotten, cpu) == MIB
    build(first, cpu, stack)
