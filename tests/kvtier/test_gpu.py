"""A server's work over the memory of a GPU: every byte, while levels change and sequences pause.

On the fake driver everywhere, on the real one where there is a GPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, CudaMemory, Device, OutOfPagesError, ResourceBusyError
from hostmem._sys.driver import HOST_POINTERS, load_driver
from hostmem.testing import FakeDriver
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    TierStorage,
)
from kvtier.__main__ import main
from kvtier.keys import chain_keys
from kvtier.replay import Progress, ReplayOptions, Request
from kvtier.replay.engine import replay_bytes
from kvtier.testing import FakeEngine

# A thread, because a driver call that hangs takes no signal: it prints every stack and exits.
pytestmark = pytest.mark.timeout(240, method="thread")

MIB = 1 << 20
TOKENS = 16
# Two pool groups: pages of 80 KiB in two pools, and of 32 KiB.
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", 32 << 10), BufferConfig("value", 32 << 10)]),
    AttentionLayerConfig(1, [BufferConfig("state", 16 << 10)]),
    AttentionLayerConfig(2, [BufferConfig("kv", 32 << 10)], sliding_window_size=10_000),
]


@pytest.fixture(
    params=[
        "fake",
        "fake, another name for host memory",
        pytest.param("real", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    if request.param == "real":
        yield CudaDevice(0, driver=load_driver())
        return
    driver = FakeDriver(attributes={HOST_POINTERS: int(request.param == "fake")})
    yield CudaDevice(0, driver=driver)
    assert list(driver.registered) == [], "the test left memory registered"


def config(folder: Path, *, gpu: int = 8) -> KVCacheManagerConfig:
    """Describe tiers of MiB, the first and second of which may become twice as large."""
    return KVCacheManagerConfig(
        TOKENS,
        [
            GpuCacheTierConfig(gpu * MIB, 2 * gpu * MIB),
            HostCacheTierConfig(8 * MIB, 16 * MIB),
            DiskCacheTierConfig(32 * MIB, folder, 32 * MIB),
        ],
        LAYERS,
    )


def tables(held: Any) -> NDArray[np.int32]:
    return np.stack([held.slots(group) for group in range(2)])


def serve(cache: BlockCache[bytes], engine: FakeEngine, tokens: NDArray[Any]) -> int:
    """Verify the blocks that are there, and compute the others; say how many were there."""
    keys = chain_keys(tokens, TOKENS)
    whole = tokens[: len(keys) * TOKENS]
    with cache.acquire(keys) as lease:
        found = len(lease)
        if found:
            engine.verify(whole[: found * TOKENS], tables(lease), after=lease.events)
        missing = [n for n in range(found, len(keys)) if keys[n] not in cache]
        with cache.reserve([keys[n] for n in missing]) as fresh:
            pages = np.full((2, len(keys)), -1)
            pages[:, missing] = tables(fresh)
            fresh.commit(engine.write(whole, pages, after=fresh.fences))
    return found


def texts(seed: int, requests: int) -> Iterator[NDArray[np.int64]]:
    """Give texts that come again and again, some longer than before; they fill all levels."""
    chance = np.random.default_rng(seed)
    for which, length in zip(chance.integers(14, size=requests), itertools.count(), strict=False):
        yield np.arange((12 + length % 9) * TOKENS + 5) + int(which) * 1_000_003


def test_levels_of_a_gpu_change_while_it_serves(tmp_path: Path, device: Device) -> None:
    """Each change begins while the copies of the request before it are under way."""
    changes = itertools.cycle([(0, 16), (1, 16), (0, 8), (1, 8), (0, 10), (0, 8)])
    with (
        TierStorage(config(tmp_path), device=device) as storage,
        FakeEngine.over(storage) as engine,
    ):
        cache: BlockCache[bytes] = BlockCache(storage)
        hits = 0
        for tokens in texts(1, 120):
            hits += serve(cache, engine, tokens)
            level, quota = next(changes)
            storage.adjust_cache_level(level, quota * MIB)
            assert storage.quota(level) == quota * MIB
            storage._check()
        assert hits > 100
        moved = storage.stats().bytes_moved
        assert min(moved[p] for p in ("gpu->host", "host->disk", "host->gpu", "disk->gpu")) > MIB


def test_a_change_that_leases_forbid_leaves_the_gpu_as_it_was(
    tmp_path: Path, device: Device
) -> None:
    with (
        TierStorage(config(tmp_path, gpu=4), device=device) as storage,
        FakeEngine.over(storage) as engine,
    ):
        cache: BlockCache[bytes] = BlockCache(storage)
        storage.adjust_cache_level(0, 8 * MIB)
        slots = min(group.slots.n_slots for group in storage.levels[0].groups)
        tokens = np.arange(slots * TOKENS)
        serve(cache, engine, tokens)
        keys = chain_keys(tokens, TOKENS)
        with cache.acquire(keys) as lease:
            with pytest.raises((ResourceBusyError, OutOfPagesError)):
                storage.adjust_cache_level(0, 4 * MIB)
            assert storage.quota(0) == 8 * MIB
            engine.verify(tokens, tables(lease), after=lease.events)
        storage.adjust_cache_level(0, 4 * MIB)
        with cache.acquire(keys[: slots // 4]) as lease:
            engine.verify(tokens[: len(lease) * TOKENS], tables(lease), after=lease.events)
        storage._check()


def test_sequences_grow_pause_and_go_on_in_the_memory_of_a_gpu(
    tmp_path: Path, device: Device
) -> None:
    with (
        KVCacheManager(config(tmp_path), device=device) as manager,
        FakeEngine.over(manager.storage) as engine,
    ):
        reused = 0
        for tokens in texts(2, 60):
            with manager.create_sequence(tokens) as sequence:
                reused += sequence.num_cached_tokens
                while (count := sequence.num_tokens) < len(tokens):
                    part = tokens[: count + 10 * TOKENS - 3]
                    sequence.grow(len(part) - count)
                    sequence.wait()
                    pages = np.stack([sequence.page_table(group) for group in range(2)])
                    engine.verify(tokens[:count], pages[:, : -(-count // TOKENS)])
                    sequence.commit(part[count:], engine.write(part, pages, start=count))
                    sequence.suspend()  # others are brought up meanwhile, or take the room
                    sequence.resume()
                    assert sequence.num_tokens == len(part)
        assert reused > 1000
        moved = manager.storage.stats().bytes_moved
        assert min(moved["gpu->host"], moved["host->gpu"]) > MIB
        manager.storage._check()


def test_blocks_of_an_engine_on_a_gpu_go_to_the_disk_and_come_back(
    tmp_path: Path, device: CudaDevice
) -> None:
    """Its pages are one allocation of ours, at strides of its own."""
    tiers = [
        HostCacheTierConfig(4 * MIB, 4 * MIB),
        DiskCacheTierConfig(16 * MIB, tmp_path, 16 * MIB),
    ]
    plan_of = KVCacheManagerConfig(TOKENS, tiers, LAYERS)
    names = [(layer.layer_id, b.role, b.size) for layer in LAYERS for b in layer.buffers]
    homes, gap = 24, 512
    strides = [size + gap for _, _, size in names]
    memory = CudaMemory(device, homes * sum(strides), homes * sum(strides), 2 * MIB)
    bases = itertools.accumulate((homes * stride for stride in strides), initial=memory.address)
    buffers = {
        (layer, role): (base, stride)
        for (layer, role, _), base, stride in zip(names, bases, strides, strict=False)
    }
    with (
        TierStorage(plan_of, device=device) as storage,
        FakeEngine(storage.plan, buffers, homes, device=device) as engine,
    ):
        pages = EnginePages(storage, buffers, homes)
        cache: BlockCache[bytes] = BlockCache(storage, engine=pages)
        several = [np.arange(12 * TOKENS) + 10**6 * n for n in range(9)]
        for tokens in several:
            job = cache.store(
                chain_keys(tokens, TOKENS), range(12), ready=engine.write(tokens, range(12))
            )
            job.wait(60)
        rows = np.arange(12)[::-1] + 12
        for tokens in several[1:]:
            keys = chain_keys(tokens, TOKENS)
            engine.scrub(rows)
            cache.load(keys, rows).wait(60)
            engine.verify(tokens, rows)
        moved = storage.stats().bytes_moved
        assert min(moved["host->disk"], moved["disk->host"]) > 4 * MIB
        cache._check()
    memory.close()


@pytest.mark.parametrize(("block", "count"), [(16 << 10, 120), (256 << 10, 10)])
def test_a_trace_is_replayed_and_every_hit_is_verified(
    tmp_path: Path, device: Any, block: int, count: int
) -> None:
    # Texts of six blocks, together nearly twice what the GPU and the host hold.
    chosen = np.random.default_rng(3).integers(count, size=12 * count)
    rows = [
        Request(n, 512 * 6, 1, [int(text) * 100 + at for at in range(6)])
        for n, text in enumerate(chosen)
    ]
    options = ReplayOptions(
        trace="made up",
        gpu_quota=2 * MIB,
        host_quota=4 * MIB,
        disk_quota=16 * MIB,
        disk_path=str(tmp_path),
        block_bytes=block,
        device=device,
    )
    result = replay_bytes(rows, options, Progress(len(rows)))
    assert (result.verified_blocks or 0) > 100
    assert (result.corrupt_blocks, result.lost_blocks) == (0, 0)
    assert result.hits == sum(result.hits_by_level.values()) > 400
    assert set(result.hits_by_level) == {"gpu", "host", "disk"}


@pytest.mark.gpu
def test_the_command_replays_a_trace_on_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "result.json"
    assert main(["trace", "--seed", "5", "--requests", "60", "--out", str(trace)]) == 0
    capsys.readouterr()
    quotas = ["--gpu-quota", "8MiB", "--host-quota", "16MiB", "--block-bytes", "64KiB"]
    disk = ["--disk-quota", "64MiB", "--disk-path", str(tmp_path)]
    assert main(["replay", str(trace), "--device", "0", *quotas, *disk, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["device"].startswith("cuda:0")
    assert result["verified_blocks"] > 0
    assert (result["corrupt_blocks"], result["lost_blocks"]) == (0, 0)
