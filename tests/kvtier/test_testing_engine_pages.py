"""The fake engine with pages of its own: what is stored and loaded again, every byte of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from hostmem import CpuDevice, CudaDevice, Device
from hostmem.testing import FakeDriver
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
    chain_keys,
)
from kvtier.testing import FakeEngine, prompts

TOKENS = 16
PAGES = 300
# Two pool groups, the first with two pools; 5,096 and 2,048 bytes a block.
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", 1024), BufferConfig("value", 1024)]),
    AttentionLayerConfig(1, [BufferConfig("key", 1024), BufferConfig("value", 1024)]),
    AttentionLayerConfig(2, [BufferConfig("state", 1000)]),
    AttentionLayerConfig(3, [BufferConfig("key", 2048)], sliding_window_size=10_000),
]


@pytest.fixture(params=["cpu", "gpu-like", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    if request.param == "cpu":
        return cpu
    return CudaDevice(0, driver=FakeDriver()) if request.param == "gpu-like" else CudaDevice(0)


@pytest.mark.parametrize("padding", [0, 4096])
def test_blocks_are_stored_and_loaded_into_other_pages(
    tmp_path: Path, device: Device, padding: int
) -> None:
    tiers = [HostCacheTierConfig("4MiB", "4MiB"), DiskCacheTierConfig("8MiB", tmp_path, "8MiB")]
    config = KVCacheManagerConfig(TOKENS, tiers, LAYERS)
    with (
        TierStorage(config, device=device) as storage,
        FakeEngine.with_pages(storage.plan, PAGES, device=device, padding=padding) as engine,
    ):
        pages_of_engine = EnginePages(storage, engine.buffers, PAGES)
        cache: BlockCache[bytes] = BlockCache(storage, engine=pages_of_engine)
        homes = itertools.cycle(range(PAGES))
        hits = 0
        for tokens in prompts(1, 120, users=8, document_percent=0):
            keys = chain_keys(tokens, TOKENS)
            whole = tokens[: len(keys) * TOKENS]
            pages = np.array([next(homes) for _ in keys], np.int32)
            engine.scrub(pages)  # what is verified was brought here
            found = cache.match(keys)
            hits += found
            job = cache.load(keys[:found], pages[:found])
            if found:
                engine.verify(whole[: found * TOKENS], pages[:found], after=[job.event])
            ready = engine.write(whole, pages, start=found * TOKENS, after=[job.event])
            cache.store(keys[found:], pages[found:], ready=ready).wait(30)
        assert hits > 3000
        moved = storage.stats().bytes_moved
        pairs = ("engine->host", "host->disk", "disk->host", "host->engine")
        assert min(moved[pair] for pair in pairs) > 4 << 20
        cache._check()
