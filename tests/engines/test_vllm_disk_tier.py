"""The disk tier: as vLLM's factory builds it, behind vLLM's own host tier, every byte compared."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hostmem import DiskOOMError, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier.integrations.vllm import KvtierDiskTier
from tests.engines.vllm_configs import key, keys, offloading_config, request
from tests.engines.vllm_engine import BLOCK, LAYERS, Engine, page_bytes

ROW = 8192
ROWS = 12
ANY = ReqContext("any")
TIER = {"type": "KvtierDiskTier", "module_path": "kvtier.integrations.vllm"}


class Disk:
    """A tier over rows of memory that a test can see."""

    def __init__(
        self,
        folder: Path,
        slots: int = 6,
        model: str = "a/model",
        events: bool = True,
        **options: Any,
    ) -> None:
        raw = np.zeros(ROWS * ROW + 4096, np.uint8)  # past the page cache only pages move
        start = -raw.__array_interface__["data"][0] % 4096
        self.rows: NDArray[np.uint8] = raw[start : start + ROWS * ROW].reshape(ROWS, ROW)
        spec = TieringOffloadingSpec(
            offloading_config({"cpu_bytes_to_use": ROWS * ROW}, model=model, events=events)
        )
        config = {**TIER, "path": str(folder), "quota": slots * ROW, **options}
        self.tier = SecondaryTierFactory.create_secondary_tier(config, self.rows.data, spec)
        self.jobs = count()

    def job(self, some: Sequence[OffloadKey], rows: Sequence[int], *, load: bool) -> TransferJob:
        return TransferJob(next(self.jobs), some, np.array(rows, np.int32), load, ANY)

    def finish(self) -> list[JobResult]:
        self.tier.drain_jobs()
        return list(self.tier.get_finished_jobs())

    def store(self, *numbers: int) -> JobResult:
        """Store chunks whose bytes follow from their numbers."""
        for row, number in enumerate(numbers):
            self.rows[row] = content(number)
        self.tier.submit_store(self.job(keys(*numbers), range(len(numbers)), load=False))
        (result,) = self.finish()
        return result

    def load(self, *numbers: int) -> JobResult:
        """Load chunks into the last rows, and compare those that are said to have come."""
        rows = range(ROWS - len(numbers), ROWS)
        self.rows[:] = 0xEE
        self.tier.submit_load(self.job(keys(*numbers), rows, load=True))
        (result,) = self.finish()
        good = set(keys(*numbers)) if result.success else set(result.successful_keys or ())
        for row, number in zip(rows, numbers, strict=True):
            if key(number) in good:
                assert (self.rows[row] == content(number)).all()
        assert (self.rows[: ROWS - len(numbers)] == 0xEE).all()
        return result

    def there(self, *numbers: int) -> list[bool]:
        return [self.tier.lookup(key(n), ANY) is LookupResult.HIT for n in numbers]


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, ROW, np.uint8)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[Disk] = []

    def make(**options: Any) -> Disk:
        made.append(Disk(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.tier.shutdown()


# ---------------------------------------------------------------------------- store and load


def test_it_is_found_by_configuration_alone(disk: Callable[..., Disk]) -> None:
    at = disk()
    assert type(at.tier) is KvtierDiskTier
    assert at.tier.tier_type == "KvtierDiskTier"
    assert at.tier.medium is Medium.STORAGE


def test_what_was_stored_is_loaded(disk: Callable[..., Disk]) -> None:
    at = disk()
    assert at.there(1, 2) == [False, False]
    stored = at.store(1, 2, 3)
    assert (stored.success, stored.transfer_bytes) == (True, 3 * ROW)
    assert at.there(1, 2, 3, 4) == [True, True, True, False]
    assert at.load(3, 1).success
    assert at.load(2).success


def test_a_chunk_is_not_read_before_it_is_written(disk: Callable[..., Disk]) -> None:
    at = disk()
    with FaultPlan() as plan:
        write = plan.hold("pwritev")
        at.tier.submit_store(at.job(keys(1), [0], load=False))
        write.wait_reached()
        assert at.tier.lookup(key(1), ANY) is LookupResult.RETRY
        assert list(at.tier.get_finished_jobs()) == []
        write.release()
        at.finish()
    assert at.there(1) == [True]


def test_no_call_waits_for_the_disk(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1)
    with FaultPlan() as plan:
        holds = [plan.hold("preadv"), plan.hold("pwritev")]
        at.tier.submit_load(at.job(keys(1), [5], load=True))
        at.tier.submit_store(at.job(keys(2), [0], load=False))
        for hold in holds:
            hold.wait_reached()
        assert list(at.tier.get_finished_jobs()) == []
        at.tier.touch(keys(1, 2, 3), ANY)
        assert at.there(1) == [True]
        for hold in holds:
            hold.release()
        assert [each.success for each in at.finish()] == [True, True]


def test_what_is_there_is_not_written_again(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 2)
    at.rows[:] = 0  # would be the wrong bytes
    at.tier.submit_store(at.job(keys(1, 2), [0, 1], load=False))
    (again,) = at.finish()
    assert (again.success, again.transfer_bytes) == (True, 0)
    assert at.load(1, 2).success


# --------------------------------------------------------------------------------- a full file


def test_a_full_file_gives_up_what_was_used_longest_ago(disk: Callable[..., Disk]) -> None:
    at = disk(slots=3, eviction_policy="lru")
    at.store(1, 2, 3)
    at.load(1)
    at.tier.touch(keys(2), ANY)
    assert at.store(4).success
    assert at.there(1, 2, 3, 4) == [True, True, False, True]


def test_what_is_being_read_stays_and_the_leading_chunks_are_stored(
    disk: Callable[..., Disk],
) -> None:
    at = disk(slots=2)
    at.store(1, 2)
    with FaultPlan() as plan:
        read = plan.hold("preadv")
        at.rows[:] = 0xEE
        at.tier.submit_load(at.job(keys(1), [11], load=True))
        read.wait_reached()
        at.rows[0], at.rows[1] = content(3), content(4)
        at.tier.submit_store(at.job(keys(3, 4), [0, 1], load=False))
        read.release()
        loaded, stored = at.finish()
    assert loaded.success
    assert (at.rows[11] == content(1)).all()
    assert (stored.success, stored.transfer_bytes) == (False, ROW)
    assert at.there(1, 2, 3, 4) == [True, False, True, False]


# -------------------------------------------------------------------------------------- faults


def test_a_load_of_what_has_gone_fails_and_the_others_come(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 2)
    result = at.load(1, 9, 2)
    assert not result.success
    assert result.successful_keys == tuple(keys(1, 2))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_chunk_that_cannot_be_written_was_never_there(
    disk: Callable[..., Disk], error: int
) -> None:
    at = disk(slots=2)
    with FaultPlan() as plan:
        plan.fail("pwritev", error, times=None)
        assert not at.store(1, 2).success
    assert at.there(1, 2) == [False, False]
    assert at.store(3, 4).success  # the slots are free


def test_a_chunk_that_cannot_be_read_is_forgotten(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1)
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        result = at.load(1)
    assert (result.success, result.successful_keys) == (False, ())
    assert at.there(1) == [False]
    assert at.store(1).success
    assert at.load(1).success


def test_bytes_that_were_changed_on_the_disk_are_never_loaded(
    disk: Callable[..., Disk], tmp_path: Path
) -> None:
    at = disk(persist=True)
    at.store(1, 2, 3)
    with (tmp_path / "vllm-0.slots").open("r+b") as file:
        file.seek(ROW + 100)
        byte = file.read(1)[0]
        file.seek(ROW + 100)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    result = at.load(1, 2, 3)
    assert not result.success
    assert len(result.successful_keys or ()) == 2
    assert sum(at.there(1, 2, 3)) == 2


# -------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"slots": 0}, ValueError, f"quota: 0 B hold no chunk, which takes {ROW} B"),
        ({"eviction_policy": "best"}, ValueError, "there is no 'best'"),
        ({"compression": "zip"}, ValueError, "zip"),
        ({"quota": "4 elephants"}, ValueError, "quota"),
        ({"quota": "100TiB"}, DiskOOMError, "no room"),
        ({"locality": "HERE"}, ValueError, "HERE"),
        ({"size": 1}, TypeError, "size"),
        ({"path": "/nowhere/at/all"}, OSError, "/nowhere"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    disk: Callable[..., Disk], options: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        disk(**options)


def test_a_path_and_a_quota_are_asked_for(tmp_path: Path) -> None:
    spec = TieringOffloadingSpec(offloading_config({"cpu_bytes_to_use": ROWS * ROW}))
    view = np.zeros((ROWS, ROW), np.uint8).data
    for missing in ("path", "quota"):
        config = {**TIER, "path": str(tmp_path), "quota": ROW}
        del config[missing]
        with pytest.raises(TypeError, match=missing):
            SecondaryTierFactory.create_secondary_tier(config, view, spec)


def test_chunks_are_found_again_after_a_restart(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    first.store(1, 2, 3)
    first.tier.shutdown()
    second = Disk(tmp_path, persist=True)
    assert second.there(1, 2, 3, 4) == [True, True, True, False]
    assert second.load(3, 2, 1).success
    assert second.store(4, 5, 6).success  # in the slots that are left
    assert second.there(1, 2, 3, 4, 5, 6) == [True] * 6
    second.tier.shutdown()


def test_what_could_not_be_read_does_not_come_back(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    first.store(1, 2)
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        first.load(1)
    first.tier.shutdown()
    second = Disk(tmp_path, persist=True)
    assert second.there(1, 2) == [False, True]
    second.tier.shutdown()


def test_a_file_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    first.store(1)
    first.tier.shutdown()
    with pytest.raises(ValueError, match="layout"):
        Disk(tmp_path, persist=True, model="another/model")
    again = Disk(tmp_path, persist=True)
    assert again.load(1).success
    again.tier.shutdown()


def test_a_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    with pytest.raises(ResourceBusyError):
        Disk(tmp_path, persist=True)
    first.tier.shutdown()


def test_packed_chunks_come_back_whole(disk: Callable[..., Disk]) -> None:
    at = disk(compression="blosc2")
    at.store(1, 2)
    assert at.load(2, 1).success


# -------------------------------------------------------------------------------------- events


def test_events_tell_what_came_and_went(disk: Callable[..., Disk]) -> None:
    at = disk(slots=2, enable_kv_events=True, locality="LOCAL", eviction_policy="lru")
    at.store(1, 2)
    at.store(3)
    told = [(event.keys, event.removed) for event in at.tier.take_events()]
    assert told == [(keys(1, 2), False), (keys(1), True), (keys(3), False)]
    at.store(3)
    assert list(at.tier.take_events()) == []
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        at.load(3)
    (event,) = at.tier.take_events()
    assert (event.keys, event.removed, event.medium) == (keys(3), True, Medium.STORAGE)
    assert event.locality is not None
    assert event.locality.value == "LOCAL"


@pytest.mark.parametrize("wanted", [{"events": False, "enable_kv_events": True}, {"events": True}])
def test_nobody_is_told_who_did_not_ask(disk: Callable[..., Disk], wanted: Any) -> None:
    at = disk(**wanted)
    at.store(1)
    assert list(at.tier.take_events()) == []


# ------------------------------------------------------------------- behind vLLM's host tier


class RowWorker(OffloadingWorker):
    """Copies blocks to rows of the shared region with torch, where vLLM's own needs a GPU."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self.region = region
        self.blocks = [cache.tensor for cache in caches.tensors]
        self.rows = [
            region.create_next_worker_view(cache.page_size_bytes) for cache in caches.tensors
        ]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for rows, blocks in zip(self.rows, self.blocks, strict=True):
            rows[dst_spec.block_ids] = blocks[src_spec.block_ids]
        self.done.append(TransferResult(job_id, True))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        for rows, blocks in zip(self.rows, self.blocks, strict=True):
            blocks[dst_spec.block_ids] = rows[src_spec.block_ids]
        self.done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self.rows.clear()
        self.region.cleanup()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    def create_worker(spec: TieringOffloadingSpec, caches: Any) -> RowWorker:
        region = SharedOffloadRegion(
            spec._engine_id, spec.num_chunks, 0, spec.kv_bytes_per_chunk,
            spec.cpu_page_size_per_worker,
        )  # fmt: skip
        return RowWorker(caches, region)

    monkeypatch.setattr(TieringOffloadingSpec, "create_worker", create_worker)
    monkeypatch.setattr(
        TieringOffloadingSpec, "get_worker", lambda spec, caches: spec.create_worker(caches)
    )
    made: list[Engine] = []
    (tmp_path / "disk").mkdir()

    def make(*, chunks: int, slots: int, blocks: int, **options: Any) -> Engine:
        row = -(-len(LAYERS) * page_bytes() // 4096) * 4096
        tier = {**TIER, "path": str(tmp_path / "disk"), "quota": slots * row, **options}
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * row,
            "secondary_tiers": [tier],
        }
        made.append(Engine(tmp_path, extra, blocks=blocks))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return [*map(int, np.random.default_rng(seed).integers(3, 1 << 15, tokens))]


def test_what_the_host_tier_has_given_up_comes_from_the_disk(
    engine: Callable[..., Engine],
) -> None:
    at = engine(chunks=12, slots=100, blocks=64)
    at.run(prompt(1, 10 * BLOCK))
    at.run(prompt(2, 10 * BLOCK))  # takes the place of the first in host memory
    at.forget_device()
    assert at.run(prompt(1, 10 * BLOCK) + prompt(3, 5)) == [10 * BLOCK]
    (tier,) = at.manager.secondary_tiers
    assert type(tier) is KvtierDiskTier


def test_a_chunk_lost_on_the_disk_is_computed_anew(engine: Callable[..., Engine]) -> None:
    at = engine(chunks=12, slots=100, blocks=64)
    at.run(prompt(1, 10 * BLOCK))
    at.run(prompt(2, 10 * BLOCK))
    at.forget_device()
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        at.run(prompt(1, 10 * BLOCK) + prompt(3, 5))
    at.forget_device()
    assert at.run(prompt(1, 10 * BLOCK) + prompt(3, 5)) == [10 * BLOCK]


def test_conversations_in_tiers_that_are_too_small(engine: Callable[..., Engine]) -> None:
    at = engine(chunks=30, slots=70, blocks=48)
    chance = np.random.default_rng(5)
    texts = [prompt(seed, 60) for seed in range(6)]
    loaded = 0
    for _ in range(50):
        which = int(chance.integers(6))
        texts[which] += prompt(int(chance.integers(1 << 30)), int(chance.integers(1, 40)))
        if len(texts[which]) > 300:
            texts[which] = texts[which][:48] + prompt(int(chance.integers(1 << 30)), 20)
        if chance.random() < 0.5:
            at.forget_device()
        loaded += sum(at.run(texts[which]))
    assert loaded > 3000


def test_the_manager_of_vllm_ends_with_the_tier(tmp_path: Path) -> None:
    """Its shutdown releases the view of the shared memory, which nobody may hold any more."""
    tier = {**TIER, "path": str(tmp_path), "quota": "1MiB"}
    spec = TieringOffloadingSpec(
        offloading_config(
            {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}, engine=f"test-{os.getpid()}"
        )
    )
    manager = spec.get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    context = request("a", keys(1))
    manager.on_new_request(context)
    manager.prepare_store(keys(1), context)
    manager.complete_store(keys(1), context)
    manager.on_request_finished(context)
    manager.on_schedule_end(ScheduleEndContext([], []))
    manager.reset_cache()
    manager.shutdown()
    assert manager.secondary_tiers[0].lookup(key(1), ANY) is LookupResult.HIT
