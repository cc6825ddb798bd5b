"""The disk backend: as LMCache loads it, behind LMCache's own host memory, every byte compared."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hostmem import DiskOOMError, HostMem, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier.integrations.lmcache import HostMemAllocator, KvtierDiskBackend, install_allocator
from tests.engines.lmcache_backends import (
    CHUNK_BYTES,
    DTYPE,
    FMT,
    KIB,
    SHAPE,
    fill,
    holds,
    key,
    lmcache_config,
    lmcache_metadata,
    local_backend,
    storage_manager,
)
from tests.threads import Spawn, Until

# isort: split
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend import CreateStorageBackends

SLOTS = 6
NAME = "KvtierDiskBackend"


class Disk:
    """A backend over host memory that a test can count, and a loop as LMCache has one."""

    def __init__(self, folder: Path, *, slots: int = SLOTS, model: str = "a/model", **options: Any):
        settings = {"path": str(folder), "quota": slots * CHUNK_BYTES, **options}
        config = lmcache_config({NAME: settings})
        self.loop = asyncio.new_event_loop()
        self.local = local_backend()
        self.allocator = install_allocator(
            self.local, HostMem(1 << 20, device="cpu", slot_size=64 * KIB)
        )
        try:
            self.backend = KvtierDiskBackend(
                "cpu", config, lmcache_metadata(model), self.local, self.loop
            )
        except BaseException:
            self.close()
            raise

    @property
    def objects(self) -> int:
        """Objects of host memory that are not free."""
        active: int = self.allocator.pin_allocator.num_active_allocations
        return active

    def put(self, *numbers: int, shape: Any = SHAPE, **options: Any) -> None:
        objs = [fill(self.local.allocate(shape, DTYPE, FMT), number) for number in numbers]
        keys = [key(number) for number in numbers]
        self.backend.batched_submit_put_task(keys, objs, **options)
        for obj in objs:
            obj.ref_count_down()

    def written(self) -> None:
        """Wait until nothing is being written, in the order of the thread that sees to it."""
        done = threading.Event()
        self.backend._writers.put(done.set)
        assert done.wait(20)

    def store(self, *numbers: int, **options: Any) -> None:
        self.put(*numbers, **options)
        self.written()

    def there(self, *numbers: int) -> list[bool]:
        return [self.backend.contains(key(number)) for number in numbers]

    def got(self, *numbers: int) -> list[bool | None]:
        """Load objects: whether each has its bytes, None for one that is missed."""
        objs = self.backend.batched_get_blocking([key(number) for number in numbers])
        return self.seen(objs, numbers)

    @staticmethod
    def seen(objs: Any, numbers: Any) -> list[bool | None]:
        found = [
            None if obj is None else holds(obj, n) for obj, n in zip(objs, numbers, strict=True)
        ]
        for obj in objs:
            if obj is not None:
                obj.ref_count_down()
        return found

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        self.local.close()
        self.loop.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[Disk] = []

    def make(**options: Any) -> Disk:
        made.append(Disk(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert each.allocator.memory is None  # so nothing is held any more


# ----------------------------------------------------------------------------------- put and get


def test_what_was_put_is_got(disk: Callable[..., Disk]) -> None:
    at = disk()
    assert at.there(1) == [False]
    at.store(1, 2, 3)
    assert at.there(1, 2, 3, 4) == [True, True, True, False]
    assert at.objects == 0
    assert at.got(3, 4, 1) == [True, None, True]
    obj = at.backend.get_blocking(key(2))
    assert obj is not None
    assert (obj.get_shape(), obj.get_dtype(), obj.get_memory_format()) == (SHAPE, DTYPE, FMT)
    assert at.seen([obj], [2]) == [True]
    assert at.backend.get_blocking(key(4)) is None
    assert at.objects == 0
    assert at.backend.stats().bytes_read == 3 * CHUNK_BYTES


def test_nothing_is_put_and_got(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store()
    assert at.got() == []
    assert at.backend.batched_contains([]) == 0
    assert at.run(at.backend.batched_get_non_blocking("a", [])) == []


def test_what_is_there_is_not_written_again(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1)
    at.store(1, 2)
    assert at.backend.stats().bytes_written == 2 * CHUNK_BYTES
    assert at.got(1, 2) == [True, True]


def test_keys_differ_in_tags_and_layers(disk: Callable[..., Disk]) -> None:
    at = disk()
    layers = key(1).split_layers(2)
    keys = [key(1), key(1, user="a"), *layers]
    objs = [fill(at.local.allocate(SHAPE, DTYPE, FMT), number) for number in range(4)]
    at.backend.batched_submit_put_task(keys, objs)
    for obj in objs:
        obj.ref_count_down()
    at.written()
    assert at.seen(at.backend.batched_get_blocking(keys), range(4)) == [True] * 4
    assert not at.backend.contains(key(1, user="b"))
    del objs, obj


def test_tags_that_look_like_others_are_others(disk: Callable[..., Disk]) -> None:
    at = disk()
    mine, theirs = key(1, user="a", team="b"), key(1, user="a@team%b")
    assert mine.to_string() == theirs.to_string()
    obj = fill(at.local.allocate(SHAPE, DTYPE, FMT), 1)
    at.backend.batched_submit_put_task([mine], [obj])
    obj.ref_count_down()
    at.written()
    assert at.backend.contains(mine)
    assert not at.backend.contains(theirs)


def test_the_same_key_twice_is_one_object(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 1)
    assert at.got(1, 1) == [True, None]
    assert at.objects == 0


def test_an_object_is_held_and_not_found_until_it_is_written(disk: Callable[..., Disk]) -> None:
    at = disk()
    with FaultPlan() as plan:
        write = plan.hold("pwritev")
        at.put(1)
        write.wait_reached()
        assert at.there(1) == [False]
        assert at.backend.exists_in_put_tasks(key(1))
        assert not at.backend.exists_in_put_tasks(key(2))
        assert at.objects == 1
        assert at.backend.get_blocking(key(1)) is None
        assert not at.backend.remove(key(1))
        assert at.backend.clear() == 0
        at.put(1)  # which is on its way
        write.release()
        at.written()
    assert not at.backend.exists_in_put_tasks(key(1))
    assert at.objects == 0
    assert at.got(1) == [True]


def test_shorter_objects_come_back_with_their_shape(disk: Callable[..., Disk]) -> None:
    at = disk()
    short = torch.Size((2, 4, 5, 64))
    at.store(1, shape=short)
    obj = at.backend.get_blocking(key(1))
    assert obj is not None
    assert obj.get_shape() == short
    assert at.seen([obj], [1]) == [True]


def test_groups_of_layers_come_back_as_they_were(disk: Callable[..., Disk]) -> None:
    at = disk(chunk_bytes=2 * CHUNK_BYTES, slots=12)
    shapes, dtypes = [SHAPE, torch.Size((1, 2, 16, 8))], [DTYPE, torch.float32]
    obj = at.local.allocate(shapes, dtypes, FMT)
    obj.get_tensor(0).fill_(1)
    obj.get_tensor(1).fill_(2)
    at.backend.batched_submit_put_task([key(1)], [obj])
    obj.ref_count_down()
    at.written()
    again = at.backend.get_blocking(key(1))
    assert again is not None
    assert (again.get_shapes(), again.get_dtypes()) == (shapes, dtypes)
    assert [float(again.get_tensor(n).sum()) for n in (0, 1)] == [SHAPE.numel(), 2 * 256]
    again.ref_count_down()


def test_objects_that_their_bytes_do_not_make_again_are_not_stored(
    disk: Callable[..., Disk],
) -> None:
    at = disk()
    buffer = at.local.memory_allocator.allocate(
        torch.Size((5, 0, 0, 0)), torch.uint8, MemoryFormat.BINARY_BUFFER
    )
    positions, narrowed, complex_ = (
        at.local.allocate(torch.Size((1, 1, 1, 8)), dtype, FMT)
        for dtype in (DTYPE, DTYPE, torch.complex64)
    )
    positions.metadata.cached_positions = torch.zeros(1)
    narrowed.set_used_size(3)
    objs = [buffer, positions, narrowed, complex_]
    at.backend.batched_submit_put_task([key(number) for number in range(4)], objs)
    at.written()
    assert at.there(0, 1, 2, 3) == [False] * 4
    for obj in objs:
        obj.ref_count_down()


def test_an_object_larger_than_a_slot_is_not_stored_and_that_is_told_once(
    disk: Callable[..., Disk], caplog: pytest.LogCaptureFixture
) -> None:
    at = disk()
    at.store(1, 2, shape=torch.Size((2, 4, 17, 64)))
    assert at.there(1, 2) == [False, False]
    assert caplog.text.count("chunk_bytes must be as large") == 1


def test_objects_of_other_memory_are_stored(disk: Callable[..., Disk]) -> None:
    at = disk()
    obj = fill(AdHocMemoryAllocator("cpu").allocate(SHAPE, DTYPE, FMT), 1)
    at.backend.batched_submit_put_task([key(1)], [obj])
    at.written()
    assert at.got(1) == [True]


def test_callbacks_are_called_for_what_was_written(
    disk: Callable[..., Disk], caplog: pytest.LogCaptureFixture
) -> None:
    at = disk()
    told: list[Any] = []

    def tell(which: Any) -> None:
        told.append(which)
        raise RuntimeError("it was not my day")

    at.store(1, 2, on_complete_callback=tell)
    assert told == [key(1), key(2)]
    assert caplog.text.count("it was not my day") >= 2
    at.store(1, on_complete_callback=tell)
    assert len(told) == 2


def test_what_waits_to_be_written_is_bounded(disk: Callable[..., Disk]) -> None:
    at = disk(max_pending=2 * CHUNK_BYTES)
    with FaultPlan() as plan:
        write = plan.hold("pwritev")
        at.put(1)
        write.wait_reached()
        at.put(2, 3, 4)
        at.put(5)
        assert at.objects == 2
        assert at.backend.dropped == 3
        write.release()
        at.written()
    assert at.there(1, 2, 3, 4, 5) == [True, True, False, False, False]
    at.store(3)
    assert at.got(1, 2, 3) == [True] * 3


def test_without_room_in_host_memory_a_get_misses(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 2)
    taken = [at.allocator.allocate(torch.Size((1, 1, 1, 64 * KIB)), torch.uint8) for _ in range(16)]
    assert at.got(1, 2) == [None, None]
    taken.pop().ref_count_down()
    assert at.got(1, 2) == [True, True]
    for obj in taken:
        obj.ref_count_down()
    assert at.objects == 0


def test_a_failing_allocation_holds_nothing(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = disk(slots=2)
    at.store(1, 2)
    allocate, calls = at.local.allocate, []

    def second_fails(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no")
        return allocate(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(at.local, "allocate", second_fails)
        with pytest.raises(RuntimeError, match="no"):
            at.got(1, 2)
    assert at.objects == 0
    at.store(3, 4)  # the old ones can give way
    assert at.there(1, 2, 3, 4) == [False, False, True, True]


def test_a_put_without_memory_for_a_copy_holds_nothing(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = disk(slots=1, max_pending=CHUNK_BYTES)
    short = torch.Size((2, 4, 5, 64))
    obj = fill(at.local.allocate(short, DTYPE, FMT), 1)
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.integrations.lmcache.slot_memory.np.empty", _no_memory)
        with pytest.raises(MemoryError):
            at.backend.batched_submit_put_task([key(1)], [obj])
    obj.ref_count_down()
    assert at.objects == 0
    assert not at.backend.exists_in_put_tasks(key(1))
    at.store(1, shape=short)
    assert at.got(1) == [True]


def _no_memory(*_: Any) -> None:
    raise MemoryError("no")


def test_a_backend_that_cannot_be_made_leaves_its_file(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.integrations.lmcache.disk_backend.Workers", _no_memory)
        with pytest.raises(MemoryError):
            disk(persist=True)
    at = disk(persist=True)
    at.store(1)
    assert at.got(1) == [True]


# ------------------------------------------------------------------------------------ non-blocking


def test_the_leading_objects_are_got_without_blocking(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 2, 4)
    keys = [key(number) for number in (1, 2, 3, 4)]
    assert at.run(at.backend.batched_async_contains("a", keys)) == 2
    objs = at.run(at.backend.batched_get_non_blocking("a", keys))
    assert at.seen(objs, [1, 2]) == [True, True]
    assert at.objects == 0  # that of 4 was let go
    assert at.run(at.backend.batched_get_non_blocking("a", [key(9)])) == []


def test_a_get_that_is_cancelled_lets_go_when_it_has_come(
    disk: Callable[..., Disk], until: Until
) -> None:
    at = disk()
    at.store(1)
    with FaultPlan() as plan:
        read = plan.hold("preadv")

        async def give_up() -> None:
            task = asyncio.ensure_future(at.backend.batched_get_non_blocking("a", [key(1)]))
            await asyncio.sleep(0)
            read.wait_reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert at.objects == 1
            read.release()
            while at.objects:
                await asyncio.sleep(0)

        at.run(asyncio.wait_for(give_up(), 20))
    assert at.got(1) == [True]


def test_a_get_whose_loop_has_gone_lets_go(disk: Callable[..., Disk], until: Until) -> None:
    at = disk()
    at.store(1)
    loop = asyncio.new_event_loop()
    with FaultPlan() as plan:
        read = plan.hold("preadv")
        get = at.backend.batched_get_non_blocking("a", [key(1)])
        task = loop.create_task(get)
        loop.run_until_complete(asyncio.sleep(0))
        read.wait_reached()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        read.release()
        until(lambda: at.objects == 0)


def test_a_single_get_gives_a_future(tmp_path: Path) -> None:
    config = lmcache_config({NAME: {"path": str(tmp_path), "quota": "1MiB"}}, local_cpu=False)
    with storage_manager(config) as manager:
        (obj,) = manager.batched_allocate(SHAPE, DTYPE, 1)
        manager.batched_put([key(1)], [fill(obj, 1)])
        backend = manager.storage_backends[NAME]
        done = threading.Event()
        backend._writers.put(done.set)
        assert done.wait(20)
        future = manager.get_non_blocking(key(1), NAME)
        assert Disk.seen([future.result(20)], [1]) == [True]
        assert backend.get_non_blocking(key(2)) is None


# ------------------------------------------------------------------------- eviction, pins, removal


def test_a_full_file_gives_up_what_was_used_longest_ago(disk: Callable[..., Disk]) -> None:
    at = disk(eviction_policy="lru", slots=3)
    at.store(1, 2, 3)
    assert at.got(1) == [True]
    at.store(4)
    assert at.there(1, 2, 3, 4) == [True, False, True, True]
    assert at.got(1, 3, 4) == [True] * 3


def test_a_pinned_object_stays(disk: Callable[..., Disk]) -> None:
    at = disk(slots=2)
    at.store(1, 2)
    assert at.backend.contains(key(1), pin=True)
    assert at.backend.pin(key(1))
    assert not at.backend.pin(key(9))
    at.store(3)
    at.store(4)
    assert at.there(1, 2, 3, 4) == [True, False, False, True]
    assert at.backend.unpin(key(1))
    at.store(5)
    assert at.there(1, 5) == [True, True]
    assert at.backend.unpin(key(1))
    assert not at.backend.unpin(key(1))
    at.store(6, 7)
    assert at.there(1, 6, 7) == [False, True, True]


def test_a_run_is_pinned_up_to_its_first_gap(disk: Callable[..., Disk]) -> None:
    at = disk(slots=3)
    at.store(1, 2, 4)
    assert at.backend.batched_contains([key(n) for n in (1, 2, 3, 4)], pin=True) == 2
    at.store(5, 6)
    assert at.there(1, 2, 4) == [True, True, False]
    assert [at.backend.unpin(key(n)) for n in (1, 2, 4)] == [True, True, False]


def test_what_is_removed_is_gone(disk: Callable[..., Disk]) -> None:
    at = disk(slots=2)
    at.store(1, 2)
    assert at.backend.remove(key(1))
    assert not at.backend.remove(key(1))
    assert at.got(1, 2) == [None, True]
    at.store(3)
    assert at.there(2, 3) == [True, True]


def test_a_pinned_object_is_removed_by_force_alone(disk: Callable[..., Disk]) -> None:
    at = disk(slots=1)
    at.store(1)
    at.backend.pin(key(1))
    assert not at.backend.remove(key(1), force=False)
    assert at.backend.remove(key(1))
    assert not at.backend.unpin(key(1))
    at.store(2)  # its slot is free
    assert at.got(2) == [True]


def test_an_object_is_read_to_the_end_while_it_is_removed(
    disk: Callable[..., Disk], spawn: Spawn
) -> None:
    at = disk(slots=1)
    at.store(1)
    with FaultPlan() as plan:
        read = plan.hold("preadv")
        getting = spawn(at.got, 1)
        read.wait_reached()
        assert at.backend.remove(key(1))
        at.store(2)  # no room: the slot is being read
        assert at.there(1, 2) == [False, False]
        read.release()
        assert getting.result(20) == [True]
    at.store(2)
    assert at.got(2) == [True]


def test_clearing_spares_what_is_pinned(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 2, 3)
    at.backend.pin(key(2))
    assert at.backend.clear() == 2 * 16
    assert at.there(1, 2, 3) == [False, True, False]


# ---------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_what_could_not_be_written_is_as_if_never_put(
    disk: Callable[..., Disk], error: int
) -> None:
    at = disk()
    told: list[Any] = []
    with FaultPlan() as plan:
        plan.fail("pwritev", error, times=None)
        at.store(1, 2, on_complete_callback=told.append)
    assert told == []
    assert at.objects == 0
    assert at.there(1, 2) == [False, False]
    at.store(*range(SLOTS))  # all slots are free
    assert at.got(*range(SLOTS)) == [True] * SLOTS


def test_what_cannot_be_read_is_a_miss_and_forgotten(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1, 2)
    at.backend.pin(key(1))
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        assert at.got(1) == [None]
    assert at.objects == 0
    assert at.there(1, 2) == [False, True]
    at.store(*range(3, 3 + SLOTS - 1))
    assert all(at.there(2, *range(3, 3 + SLOTS - 1)))  # the pin of the lost one holds no slot


def spoil(folder: Path, slot: int) -> None:
    with (folder / "lmcache-0.slots").open("r+b") as file:
        file.seek(slot * CHUNK_BYTES + 100)
        file.write(b"something else")


def test_wrong_bytes_are_a_miss(disk: Callable[..., Disk], tmp_path: Path) -> None:
    at = disk(persist=True)
    at.store(1, 2)  # in slots 0 and 1
    spoil(tmp_path, 0)
    assert at.got(1, 2) == [None, True]
    assert at.there(1, 2) == [False, True]
    assert at.backend.stats().corrupt == 1
    assert at.objects == 0


def test_wrong_bytes_end_a_run(disk: Callable[..., Disk], tmp_path: Path) -> None:
    at = disk(persist=True)
    at.store(1, 2, 3)
    spoil(tmp_path, 1)
    objs = at.run(at.backend.batched_get_non_blocking("a", [key(n) for n in (1, 2, 3)]))
    assert at.seen(objs, [1]) == [True]
    assert at.objects == 0
    assert at.there(1, 2, 3) == [True, False, True]


# --------------------------------------------------------------------------------------- restarts


def test_objects_are_found_again_after_a_restart(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    first.store(1, 2)
    first.store(3, shape=torch.Size((2, 4, 5, 64)))
    first.backend.remove(key(2))
    first.close()
    second = Disk(tmp_path, persist=True)
    assert second.there(1, 2, 3) == [True, False, True]
    obj = second.backend.get_blocking(key(3))
    assert obj is not None
    assert obj.get_shape() == (2, 4, 5, 64)
    assert second.seen([obj], [3]) == [True]
    assert second.got(1) == [True]
    second.store(4, 5, 6, 7)
    assert second.there(1, 3, 4, 5, 6, 7) == [True] * 6
    second.close()


def test_without_persist_nothing_comes_back(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    first.store(1)
    first.close()
    assert list(tmp_path.iterdir()) == []
    second = Disk(tmp_path)
    assert second.there(1) == [False]
    second.close()


def test_a_form_too_long_for_a_name_does_not_come_back(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    shapes = [torch.Size((1, 1, 16, 8))] * 3
    obj = first.local.allocate(shapes, [DTYPE] * 3, FMT)
    first.backend.batched_submit_put_task([key(1)], [obj])
    obj.ref_count_down()
    first.written()
    assert first.there(1) == [True]
    first.close()
    second = Disk(tmp_path, persist=True)
    assert second.there(1) == [False]
    second.close()


def test_a_file_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    first.store(1)
    first.close()
    with pytest.raises(ValueError, match="layout"):
        Disk(tmp_path, persist=True, model="another/model")
    again = Disk(tmp_path, persist=True)
    assert again.got(1) == [True]
    again.close()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    first = Disk(tmp_path, persist=True)
    with pytest.raises(ResourceBusyError):
        Disk(tmp_path, persist=True)
    first.close()


# ----------------------------------------------------------------------------------------- closing


def test_after_closing_nothing_is_put_or_found(disk: Callable[..., Disk]) -> None:
    at = disk()
    at.store(1)
    at.backend.close()
    at.backend.close()
    at.put(2)
    assert at.objects == 0
    assert at.there(1) == [False]
    assert at.got(1) == [None]
    assert at.run(at.backend.batched_get_non_blocking("a", [key(1)])) == []
    assert not at.backend.remove(key(1))
    assert at.backend.stats() is not None


def test_host_memory_is_closed_when_nothing_is_written_from_it(
    disk: Callable[..., Disk], spawn: Spawn
) -> None:
    """LMCache closes its host memory first, whatever is under way."""
    at = disk(persist=True)
    order: list[str] = []
    close = at.local.memory_allocator.close

    def closing_memory() -> None:
        order.append("memory")
        close()

    at.local.memory_allocator.close = closing_memory
    with FaultPlan() as plan:
        write = plan.hold("pwritev")
        at.put(1, on_complete_callback=lambda _: order.append("written"))
        write.wait_reached()
        closing = spawn(at.local.close)
        assert not closing.done()
        write.release()
        closing.result(20)
    assert order == ["written", "memory"]


def test_a_put_that_meets_the_close_lets_go(
    disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = disk()
    monkeypatch.setattr(
        "kvtier.integrations.lmcache.disk_backend.SlotMemory.fill", lambda _: at.backend.close()
    )
    at.put(1)
    assert at.objects == 0


# ----------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"quota": 0}, ValueError, f"quota: 0 B hold no object, which takes {CHUNK_BYTES} B"),
        ({"eviction_policy": "best"}, ValueError, "there is no 'best'"),
        ({"compression": "zip"}, ValueError, "zip"),
        ({"quota": "4 elephants"}, ValueError, "quota"),
        ({"max_pending": "some"}, ValueError, "max_pending"),
        ({"quota": "100TiB"}, DiskOOMError, "no room"),
        ({"size": 1}, ValueError, "no option storage_plugin.KvtierDiskBackend.size"),
        ({"path": "/nowhere/at/all"}, OSError, "/nowhere"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    tmp_path: Path, options: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        Disk(tmp_path, **options)


@pytest.mark.parametrize("missing", ["path", "quota"])
def test_a_path_and_a_quota_are_asked_for(tmp_path: Path, missing: str) -> None:
    settings = {"path": str(tmp_path), "quota": "1MiB"}
    del settings[missing]
    backend = local_backend()
    with pytest.raises(ValueError, match=f"the option {missing} is missing"):
        KvtierDiskBackend("cpu", lmcache_config({NAME: settings}), lmcache_metadata(), backend)
    backend.close()


def test_without_host_memory_there_is_no_backend(tmp_path: Path) -> None:
    config = lmcache_config({NAME: {"path": str(tmp_path), "quota": "1MiB"}}, max_local_cpu_size=0)
    with pytest.raises(ValueError, match="max_local_cpu_size must be above 0"):
        KvtierDiskBackend("cpu", config, lmcache_metadata())
    scheduler = lmcache_metadata(role="scheduler")
    assert not CreateStorageBackends(config, scheduler, None)


# ---------------------------------------------------------------------- in LMCache's own manager


def test_objects_fall_from_our_memory_to_our_disk_and_come_back(tmp_path: Path) -> None:
    """Both plugins by configuration alone; LMCache's host memory is too small for all."""
    config = lmcache_config(
        {
            "KvtierHostMemory": {"size": 8 * CHUNK_BYTES, "slot_size": 8 * CHUNK_BYTES},
            NAME: {"path": str(tmp_path), "quota": "1MiB", "persist": True},
        }
    )
    with storage_manager(config) as manager:
        assert isinstance(manager.local_cpu_backend.get_memory_allocator(), HostMemAllocator)
        disk = manager.storage_backends[NAME]
        for number in range(24):
            obj = manager.allocate(SHAPE, DTYPE, FMT)
            manager.batched_put([key(number)], [fill(obj, number)])
        done = threading.Event()
        disk._writers.put(done.set)
        assert done.wait(20)
        assert manager.contains(key(23)) == "LocalCPUBackend"
        assert manager.contains(key(0)) == NAME
        for number in range(24):
            got = manager.get(key(number))
            assert Disk.seen([got], [number]) == [True]
            assert manager.contains(key(number)) == "LocalCPUBackend"
        assert manager.memcheck()
        del obj, got
    gc.collect()
    with storage_manager(config) as manager:
        assert manager.contains(key(7)) == NAME
        assert Disk.seen(manager.batched_get([key(7), key(8)], NAME), [7, 8]) == [True, True]
        assert manager.get_block_mapping([(key(7), 0, 16)]) != {}
