"""The host tier as vLLM builds it, and under vLLM's own scheduler, every byte compared."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from hostmem.testing import FaultPlan
from kvtier.integrations.vllm import (
    KvtierOffloadingSpec,
    KvtierOffloadingWorker,
    ProspectCachePolicy,
)
from tests.engines.vllm_configs import BLOCK_BYTES, offloading_config
from tests.engines.vllm_engine import BLOCK, LAYERS, Engine, page_bytes

SPEC = {"spec_name": "KvtierOffloadingSpec", "spec_module_path": "kvtier.integrations.vllm"}
MIB = 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


def spec(extra: dict[str, Any], **options: Any) -> KvtierOffloadingSpec:
    made = OffloadingSpecFactory.create_spec(offloading_config({**SPEC, **extra}, **options))
    assert type(made) is KvtierOffloadingSpec
    return made


# -------------------------------------------------------------------------- by configuration


def test_it_counts_chunks_as_the_tier_of_vllm_does() -> None:
    extra = {"cpu_bytes_to_use": 10 << 20}
    ours = spec(extra, world_size=2, blocks_per_chunk=3)
    theirs = CPUOffloadingSpec(offloading_config(extra, world_size=2, blocks_per_chunk=3))
    assert ours.num_chunks == theirs.num_chunks > 0
    assert ours.cpu_info == theirs.cpu_info
    assert ours.config_info_keys(extra) == theirs.config_info_keys(extra)
    assert ours.build_metric_definitions(extra) == theirs.build_metric_definitions(extra)


def test_the_manager_is_that_of_vllm_with_our_policy() -> None:
    made = spec({"cpu_bytes_to_use": 1 << 20})
    manager = made.get_manager()
    assert type(manager) is CPUOffloadingManager
    assert type(manager._policy) is ProspectCachePolicy
    assert made.get_manager() is manager


def test_another_policy_can_be_named() -> None:
    manager = spec({"cpu_bytes_to_use": 1 << 20, "eviction_policy": "lru"}).get_manager()
    assert type(manager._policy) is LRUCachePolicy


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ({}, {"canonical": True}),
        ({"secondary_tiers": [{"type": "example"}]}, {}),
    ],
)
def test_what_needs_shared_memory_is_refused(extra: Any, options: Any) -> None:
    with pytest.raises(ValueError, match="need spec_name TieringOffloadingSpec"):
        spec({"cpu_bytes_to_use": 1 << 20, **extra}, **options)


def test_bytes_that_are_the_same_in_all_workers_are_stored_by_each() -> None:
    extra = {"cpu_bytes_to_use": 1 << 20}
    replicated = spec(extra, world_size=2, replicated=True)
    assert not replicated.replicated_layout
    assert replicated.num_chunks == spec(extra, world_size=2).num_chunks


def test_bytes_are_asked_for() -> None:
    with pytest.raises(Exception, match="cpu_bytes_to_use must be specified"):
        spec({})


# ---------------------------------------------------------------------------------- a worker


def caches(pages: torch.Tensor) -> CanonicalKVCaches:
    """Describe tensors of pages, shape (layers, blocks, bytes)."""
    tensors = [CanonicalKVCacheTensor(layer, layer.shape[1]) for layer in pages]
    refs = [CanonicalKVCacheRef(n, layer.shape[1]) for n, layer in enumerate(pages)]
    return CanonicalKVCaches(tensors, [refs])


@pytest.fixture
def pages() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(-128, 128, (3, 20, 2048), dtype=torch.int8)


@pytest.fixture
def worker(pages: torch.Tensor) -> Iterator[OffloadingWorker]:
    made = spec({"cpu_bytes_to_use": 1 << 20}, blocks_per_chunk=2).get_worker(caches(pages))
    assert type(made) is KvtierOffloadingWorker
    yield made
    made.shutdown()


def test_a_worker_is_made_once(pages: torch.Tensor) -> None:
    made = spec({"cpu_bytes_to_use": 1 << 20})
    worker = made.get_worker(caches(pages))
    assert made.get_worker(caches(pages)) is worker
    assert isinstance(worker, KvtierOffloadingWorker)
    assert worker.memory.size == made.num_chunks * BLOCK_BYTES
    worker.shutdown()
    worker.shutdown()
    assert worker.memory.closed


def test_blocks_are_stored_and_loaded(worker: OffloadingWorker, pages: torch.Tensor) -> None:
    before = pages.clone()
    stored = GPULoadStoreSpec([3, 4, 5, 9], [4], [0])
    assert worker.submit_store(1, stored, CPULoadStoreSpec([7, 2]))
    worker.wait({1})
    pages.zero_()
    loaded = GPULoadStoreSpec([10, 11, 12], [3], [1])  # from the second block on
    assert worker.submit_load(2, CPULoadStoreSpec([7, 2]), loaded, expedited=True)
    worker.wait({2})
    assert torch.equal(pages[:, [10, 11, 12]], before[:, [4, 5, 9]])
    results = worker.get_finished()
    assert [(each.job_id, each.success) for each in results] == [(1, True), (2, True)]
    assert [each.transfer_size for each in results] == [4 * BLOCK_BYTES, 3 * BLOCK_BYTES]
    assert worker.get_finished() == []


def test_an_expedited_load_overtakes_others(worker: OffloadingWorker) -> None:
    worker.submit_store(1, GPULoadStoreSpec([3, 4], [2], [0]), CPULoadStoreSpec([0]))
    worker.wait({1})
    with FaultPlan() as plan:
        copy = plan.hold("process_vm_readv")
        worker.submit_load(2, CPULoadStoreSpec([0]), GPULoadStoreSpec([5], [1], [0]))
        copy.wait_reached()
        at_once = GPULoadStoreSpec([6], [1], [0])
        worker.submit_load(3, CPULoadStoreSpec([0]), at_once, expedited=True)
        worker.wait({3})
        assert [each.job_id for each in worker.get_finished()] == [1, 3]
        copy.release()


def test_tensors_of_other_shapes_and_strides() -> None:
    torch.manual_seed(2)
    halves = torch.randn((20, 2, 16, 32), dtype=torch.float16)  # pages of 2 KiB
    within = torch.randint(-128, 128, (20, 3072), dtype=torch.int8)[:, :2048]  # 1 KiB between
    tensors = [CanonicalKVCacheTensor(each, 2048) for each in (halves, within)]
    refs = [CanonicalKVCacheRef(0, 2048), CanonicalKVCacheRef(1, 2000)]
    made = spec({"cpu_bytes_to_use": 1 << 20}).get_worker(CanonicalKVCaches(tensors, [refs]))
    before = halves.clone(), within.clone()
    made.submit_store(1, GPULoadStoreSpec([3, 9], [2], [0]), CPULoadStoreSpec([8, 1]))
    made.wait({1})
    made.submit_load(2, CPULoadStoreSpec([8, 1]), GPULoadStoreSpec([10, 4], [2], [0]))
    made.wait({2})
    for source, to in ((3, 10), (9, 4)):
        assert torch.equal(halves[to], before[0][source])
        assert torch.equal(within[to, :2000], before[1][source, :2000])
        assert torch.equal(within[to, 2000:], before[1][to, 2000:])  # padding of the page
    made.shutdown()


def test_a_transfer_that_fails_is_told_as_one(
    worker: OffloadingWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with FaultPlan() as plan:
        plan.fail("process_vm_readv", errno.EFAULT, times=None)
        worker.submit_store(1, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([0]))
        worker.wait({1})
    assert [each.success for each in worker.get_finished()] == [False]
    assert "transfer 1" in caplog.text


def test_page_mode_and_placement_reach_the_memory(pages: torch.Tensor) -> None:
    made = spec({"cpu_bytes_to_use": 1 << 20, "page_mode": "huge"}).get_worker(caches(pages))
    assert isinstance(made, KvtierOffloadingWorker)
    assert made.memory.page_mode == "huge"
    made.shutdown()
    with pytest.raises(ValueError, match="strict"):  # there is no node to insist on
        spec({"cpu_bytes_to_use": 1 << 20, "allow_remote_numa_fallback": False}).get_worker(
            caches(pages)
        )


def test_too_few_bytes_for_one_chunk_are_refused(pages: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cpu_bytes_to_use: 4096 bytes for 1 workers hold no chun"):
        spec({"cpu_bytes_to_use": 4096}).get_worker(caches(pages))


# ----------------------------------------------------------------- under vLLM's own scheduler


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*, chunks: int, blocks: int, per_chunk: int = 1, **extra: Any) -> Engine:
        nbytes = chunks * -(-per_chunk * len(LAYERS) * page_bytes() // 4096) * 4096
        config = {**SPEC, "cpu_bytes_to_use": nbytes, "blocks_per_chunk": per_chunk, **extra}
        made.append(Engine(tmp_path, config, blocks=blocks))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return [*map(int, np.random.default_rng(seed).integers(3, 1 << 15, tokens))]


def test_what_the_device_has_forgotten_comes_from_the_tier(engine: Callable[..., Engine]) -> None:
    at = engine(chunks=100, blocks=64)
    text = prompt(1, 20 * BLOCK + 5)
    assert at.run(text) == [0]
    at.forget_device()
    assert at.run(text) == [20 * BLOCK]


def test_a_prefix_that_ends_within_a_chunk(engine: Callable[..., Engine]) -> None:
    at = engine(chunks=30, blocks=64, per_chunk=4)
    text = prompt(1, 20 * BLOCK)
    at.run(text)
    at.forget_device()
    assert at.run(text[: 10 * BLOCK + 3] + prompt(2, 50)) == [8 * BLOCK]
    assert at.run(text + prompt(3, 7)) == [20 * BLOCK]  # the device has 10, the tier the rest


def test_requests_at_the_same_time(engine: Callable[..., Engine]) -> None:
    at = engine(chunks=200, blocks=100, per_chunk=2)
    texts = [prompt(1, 300), prompt(2, 200), prompt(1, 300)[:200] + prompt(3, 90)]
    at.run(*texts)
    at.forget_device()
    assert at.run(*texts) == [288, 192, 288]


def test_the_tier_is_used_while_it_is_filled(engine: Callable[..., Engine]) -> None:
    begins: list[int] = []

    def is_far(address: int, *_: int) -> bool:
        begins.append(address)
        return address >= begins[0] + 4 * MIB

    with FaultPlan() as plan:
        fill = plan.hold(POPULATE, when=is_far)
        at = engine(chunks=4000, blocks=64)
        fill.wait_reached()
        text = prompt(1, 8 * BLOCK + 1)
        assert at.run(text) == [0]
        at.forget_device()
        assert at.run(text) == [8 * BLOCK]
        assert at.tier.memory.committed < at.tier.memory.size
        fill.release()


def test_a_reset_lets_nothing_old_be_found(engine: Callable[..., Engine]) -> None:
    at = engine(chunks=100, blocks=64)
    text = prompt(1, 200)
    at.run(text)
    at.forget_device()
    at.scheduler.connector.reset_cache()
    assert at.run(text) == [0]
    at.forget_device()
    assert at.run(text) == [192]


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("policy", [None, "lru"])
def test_conversations_in_a_tier_that_is_too_small(
    engine: Callable[..., Engine], per_chunk: int, policy: str | None
) -> None:
    """More is asked for than fits into the device or the tier; every byte used is compared."""
    named = {} if policy is None else {"eviction_policy": policy}
    at = engine(chunks=60 // per_chunk, blocks=48, per_chunk=per_chunk, **named)
    chance = np.random.default_rng(5)
    texts = [prompt(seed, 60) for seed in range(6)]
    loaded = 0
    for _ in range(60):
        chosen = chance.choice(6, size=chance.integers(1, 4), replace=False)
        for which in chosen:
            texts[which] += prompt(int(chance.integers(1 << 30)), int(chance.integers(1, 40)))
            if len(texts[which]) > 400:
                texts[which] = texts[which][:48] + prompt(int(chance.integers(1 << 30)), 20)
        if chance.random() < 0.3:
            at.forget_device()
        loaded += sum(at.run(*(texts[which] for which in chosen)))
    assert loaded > 5000
