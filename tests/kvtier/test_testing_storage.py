"""The fake engine over real tiers: every byte of every layer, down to the disk and up again.

Its pages are the hot slots of a storage, or its own, which are stored and loaded.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, CudaDevice, Device
from hostmem.testing import FakeDriver, FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    OutOfPagesError,
    TierStorage,
)
from kvtier.keys import chain_keys
from kvtier.testing import FakeEngine, SimulatedClock, prompts

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

TOKENS = 16
PAGES = 300  # of an engine that has its own
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


class Served:
    """Sequences served from a cache by an engine that checks every byte."""

    def __init__(self, storage: TierStorage, engine: FakeEngine) -> None:
        self.storage = storage
        self.cache: BlockCache[bytes] = BlockCache(storage)
        self.engine = engine

    def slots(self, held: Any) -> NDArray[np.int32]:
        return np.stack([held.slots(group) for group in range(len(self.storage.plan.groups))])

    def serve(self, tokens: NDArray[Any], salt: bytes = b"") -> int:
        """Reuse what is there, verify it, and compute the rest; say how many blocks were there."""
        keys = chain_keys(tokens, TOKENS, salt=salt)
        whole = tokens[: len(keys) * TOKENS]
        with self.cache.acquire(keys) as lease:
            found = len(lease)
            if found:
                self.engine.verify(
                    whole[: found * TOKENS], self.slots(lease), salt=salt, after=lease.events
                )
            # Behind a block that is gone there may be others that are not.
            missing = [n for n in range(found, len(keys)) if keys[n] not in self.cache]
            with self.cache.reserve([keys[n] for n in missing]) as fresh:
                pages = np.full((len(self.storage.plan.groups), len(keys)), -1)
                pages[:, missing] = self.slots(fresh)
                fresh.commit(self.engine.write(whole, pages, salt=salt, after=fresh.fences))
        return found


@pytest.fixture
def served(tiers: Tiers, device: Device) -> Iterator[Served]:
    """Give tiers of 2, 2 and 4 MiB for each group: about 400, 400 and 800 blocks."""
    storage = tiers.build(4, 4, 8, layers=LAYERS, device=device)
    with FakeEngine.over(storage, staging="256KiB") as engine:
        yield Served(storage, engine)


def test_prompts_are_served_from_every_level_and_every_byte_is_right(served: Served) -> None:
    hits = 0
    for tokens in prompts(1, 120, users=8, document_percent=0):
        hits += served.serve(tokens)
    assert hits > 5000
    moved = served.storage.stats().bytes_moved
    assert min(moved[p] for p in ("gpu->host", "host->disk", "host->gpu", "disk->gpu")) > 4 << 20
    served.storage._check()


def test_tenants_with_equal_prompts_have_blocks_of_their_own(served: Served) -> None:
    workload = list(prompts(2, 40, users=3, document_percent=0, context_tokens=2000))
    for tokens in workload:
        for salt in (b"a", b"b", b"c"):
            served.serve(tokens, salt)
    assert served.storage.stats().bytes_moved["host->gpu"] > 0


def test_bytes_that_come_after_the_commit_are_waited_for(tiers: Tiers, cpu: CpuDevice) -> None:
    """Blocks are moved down before they are computed; the copy waits for the engine."""
    clock = SimulatedClock()
    storage = tiers.build(4, 4, layers=LAYERS, device=cpu)
    with FakeEngine.over(storage, staging="4MiB") as engine:
        served = Served(storage, engine)
        late, others = np.arange(20 * TOKENS), np.arange(405 * TOKENS) + 10**6
        keys = chain_keys(late, TOKENS)
        with served.cache.reserve(keys) as fresh:
            ready = engine.write(late, served.slots(fresh), after=[clock.event(1)])
            fresh.commit(ready)
        with served.cache.reserve(chain_keys(others, TOKENS)) as crowd:  # the 20 go down
            assert not ready.query()
            assert any(not fence.query() for fence in crowd.fences)
            clock.advance(1)
            crowd.wait()
            crowd.cancel()
        with served.cache.acquire(keys) as lease:
            assert {storage.levels[level].name for level in lease.found} >= {"host"}
            engine.verify(late, served.slots(lease), after=lease.events)


def test_what_a_failed_disk_took_is_never_served(served: Served) -> None:
    with FaultPlan() as faults:
        faults.fail("pwritev", errno.EIO, at=2, times=None, when=lambda fd, n, at: at % 3 == 0)
        faults.fail("preadv", errno.EIO, at=2, times=None, when=lambda fd, n, at: at % 5 == 0)
        for tokens in prompts(3, 120, users=8, document_percent=0):
            try:
                served.serve(tokens)
            except OSError as error:
                assert error.errno == errno.EIO  # noqa: PT017 - the block is a miss from here on
            except OutOfPagesError:
                pass
    served.storage._check()


def test_a_storage_whose_hot_pages_are_the_engines_is_refused() -> None:
    tiers = [HostCacheTierConfig("4MiB", "4MiB")]
    config = KVCacheManagerConfig(TOKENS, tiers, LAYERS[:2])
    with (
        TierStorage(config, device="cpu") as storage,
        pytest.raises(ValueError, match="with_pages"),
    ):
        FakeEngine.over(storage)


def test_a_hot_level_that_grows_has_pages_that_can_be_used(tiers: Tiers) -> None:
    config = tiers.config(4)
    growing = replace(config, cache_tiers=[GpuCacheTierConfig("2MiB", "4MiB")])
    with TierStorage(growing, device="cpu") as storage, FakeEngine.over(storage) as engine:
        storage.adjust_cache_level(0, "4MiB")
        tokens = np.arange(8 * TOKENS)
        engine.write(tokens, range(8)).synchronize()
        engine.verify(tokens, range(8))
        storage.adjust_cache_level(0, "2MiB")  # the engine keeps no view of it


# ------------------------------------------------------------------------- pages of its own


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
