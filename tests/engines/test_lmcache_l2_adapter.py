"""The L2 adapter: as LMCache's factory makes it, its descriptors, locks and listeners."""

from __future__ import annotations

import errno
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hostmem import ClosedError, DiskOOMError, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier.integrations.lmcache import KvtierL2Adapter
from tests.engines.lmcache_backends import CHUNK_BYTES, DTYPE, FMT, SHAPE, fill, holds

# isort: split
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
    PluginL2AdapterConfig,
    _create_plugin_adapter,
)
from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.platform import consume_fd


class Listener(L2AdapterListener):
    def __init__(self) -> None:
        self.log: list[tuple[str, list[int]]] = []

    def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
        assert sizes == [CHUNK_BYTES] * len(keys)
        self.log.append(("stored", numbers_of(keys)))

    def on_l2_keys_accessed(self, keys: Any) -> None:
        self.log.append(("accessed", numbers_of(keys)))

    def on_l2_keys_deleted(self, keys: Any) -> None:
        self.log.append(("deleted", numbers_of(keys)))


def key(number: int, salt: str = "") -> Any:
    return ObjectKey(ObjectKey.IntHash2Bytes(number), "a/model", 0, 0, salt)


def keys(*numbers: int) -> list[Any]:
    return [key(number) for number in numbers]


def numbers_of(some: Any) -> list[int]:
    return [int.from_bytes(each.chunk_hash, "big") for each in some]


class L2:
    """An adapter, and memory as the server has it."""

    def __init__(self, folder: Path, slots: int = 4, **options: Any) -> None:
        params = {
            "path": str(folder),
            "quota": slots * CHUNK_BYTES,
            "chunk_bytes": CHUNK_BYTES,
            **options,
        }
        config = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "kvtier.integrations.lmcache",
                "class_name": "KvtierL2Adapter",
                "adapter_params": params,
            }
        )
        self.adapter = _create_plugin_adapter(config)
        self.memory = MixedMemoryAllocator(32 * CHUNK_BYTES)
        self.listener = Listener()
        self.adapter.register_listener(self.listener)

    def objects(self, count: int, shape: Any = SHAPE) -> list[Any]:
        return [self.memory.allocate(shape, DTYPE, FMT) for _ in range(count)]

    @staticmethod
    def wait(descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(20_000)
        consume_fd(descriptor)

    def submit(self, *numbers: int) -> int:
        self.stored = [
            fill(obj, number)
            for obj, number in zip(self.objects(len(numbers)), numbers, strict=True)
        ]
        task: int = self.adapter.submit_store_task(keys(*numbers), self.stored)
        return task

    def finish(self, task: int) -> Any:
        self.wait(self.adapter.get_store_event_fd())
        results = self.adapter.pop_completed_store_tasks()
        assert list(results) == [task]
        assert self.adapter.pop_completed_store_tasks() == {}
        for obj in self.stored:
            obj.ref_count_down()
        return results[task]

    def store(self, *numbers: int) -> Any:
        return self.finish(self.submit(*numbers))

    def lock(self, *numbers: int) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys(*numbers), {})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return [found.test(place) for place in range(len(numbers))]

    def there(self, *numbers: int) -> list[bool]:
        found = self.lock(*numbers)
        self.adapter.submit_unlock(
            [key(n) for n, is_there in zip(numbers, found, strict=True) if is_there]
        )
        return found

    def load(self, *numbers: int, shape: Any = SHAPE) -> list[bool]:
        """Load objects, and compare those that are said to have come."""
        objs = self.objects(len(numbers), shape)
        task = self.adapter.submit_load_task(keys(*numbers), objs)
        self.wait(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        came = [found.test(place) for place in range(len(numbers))]
        for obj, number, good in zip(objs, numbers, came, strict=True):
            assert not good or holds(obj, number)
            obj.ref_count_down()
        return came

    def close(self) -> None:
        self.adapter.close()
        self.memory.close()


@pytest.fixture
def l2(tmp_path: Path) -> Iterator[Callable[..., L2]]:
    made: list[L2] = []

    def make(**options: Any) -> L2:
        made.append(L2(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_was_stored_is_found_and_loaded(l2: Callable[..., L2]) -> None:
    at = l2()
    assert type(at.adapter) is KvtierL2Adapter
    result = at.store(1, 2)
    assert (result.is_successful(), result.bytes_transferred()) == (True, 2 * CHUNK_BYTES)
    assert at.lock(1, 3, 2) == [True, False, True]
    assert at.load(2, 3, 1) == [True, False, True]
    at.adapter.submit_unlock(keys(1, 2, 3))
    assert at.listener.log == [("stored", [1, 2]), ("accessed", [2, 1])]
    again = at.store(1, 2)
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)


def test_its_three_descriptors_are_three(l2: Callable[..., L2]) -> None:
    a, b = l2().adapter, l2().adapter
    fds = [
        get()
        for each in (a, b)
        for get in (
            each.get_store_event_fd,
            each.get_lookup_and_lock_event_fd,
            each.get_load_event_fd,
        )
    ]
    assert len(set(fds)) == 6


def test_an_object_is_not_found_before_it_is_written(l2: Callable[..., L2]) -> None:
    at = l2()
    with FaultPlan() as plan:
        write = plan.hold("pwritev")
        task = at.submit(1)
        write.wait_reached()
        assert at.there(1) == [False]
        assert at.adapter.pop_completed_store_tasks() == {}
        write.release()
        assert at.finish(task).is_successful()
    assert at.there(1) == [True]


def test_what_is_not_locked_gives_way_and_that_is_told(l2: Callable[..., L2]) -> None:
    at = l2(slots=2, eviction_policy="lru")
    at.store(1, 2)
    assert at.lock(1) == [True]
    assert at.store(3).is_successful()
    assert at.there(1, 2, 3) == [True, False, True]
    assert at.listener.log[1:] == [("deleted", [2]), ("stored", [3])]
    usage = at.adapter.get_usage()
    assert (usage.total_bytes_used, usage.usage_fraction) == (2 * CHUNK_BYTES, 1.0)
    at.adapter.submit_unlock(keys(1))
    assert at.store(4, 5).is_successful()
    assert at.there(1, 3, 4, 5) == [False, False, True, True]


def test_a_store_that_finds_no_room_fails_and_keeps_what_fits(l2: Callable[..., L2]) -> None:
    at = l2(slots=2)
    assert not at.store(1, 2, 3).is_successful()
    assert at.there(1, 2, 3) == [True, True, False]


def test_an_object_larger_than_a_slot_is_not_stored_or_loaded(l2: Callable[..., L2]) -> None:
    at = l2()
    (large,) = at.objects(1, torch.Size((2, 4, 17, 64)))
    at.stored = [large]
    assert not at.finish(at.adapter.submit_store_task(keys(1), at.stored)).is_successful()
    at.store(1)
    assert at.load(1, shape=torch.Size((2, 4, 17, 64))) == [False]
    assert at.load(1, shape=torch.Size((2, 4, 15, 64))) == [False]  # it has more bytes
    assert at.load(1) == [True]


def test_shorter_objects_of_any_memory_are_stored(l2: Callable[..., L2]) -> None:
    at = l2()
    short = torch.Size((2, 4, 5, 64))
    at.stored = [fill(AdHocMemoryAllocator("cpu").allocate(short, DTYPE, FMT), 1)]
    size = at.stored[0].get_size()
    task = at.adapter.submit_store_task(keys(1), at.stored)
    at.adapter._listeners.clear()
    at.wait(at.adapter.get_store_event_fd())
    assert at.adapter.pop_completed_store_tasks()[task].bytes_transferred() == size
    assert at.load(1, shape=short) == [True]


def test_what_is_deleted_is_gone_with_its_locks(l2: Callable[..., L2]) -> None:
    at = l2(slots=2)
    at.store(1, 2)
    at.lock(1)
    at.adapter.delete(keys(1, 9))
    assert at.there(1, 2) == [False, True]
    assert at.listener.log[1:] == [("deleted", [1])]
    at.adapter.submit_unlock(keys(1))
    assert at.store(3).is_successful()
    assert at.adapter.get_usage().total_bytes_used == 2 * CHUNK_BYTES


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_store_that_cannot_be_written_fails(l2: Callable[..., L2], error: int) -> None:
    at = l2()
    with FaultPlan() as plan:
        plan.fail("pwritev", error, times=None)
        assert not at.store(1, 2).is_successful()
    assert at.there(1, 2) == [False, False]
    assert at.listener.log == []
    assert at.store(1, 2, 3, 4).is_successful()


def test_what_cannot_be_read_is_forgotten_and_that_is_told(l2: Callable[..., L2]) -> None:
    at = l2()
    at.store(1)
    at.lock(1)
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        assert at.load(1) == [False]
    assert at.there(1) == [False]
    assert at.listener.log[1:] == [("deleted", [1])]
    assert at.adapter.report_status()["read_failures"] == 1
    assert at.store(1, 2, 3, 4).is_successful()


def test_without_memory_for_a_copy_nothing_is_held(
    l2: Callable[..., L2], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = l2(slots=1)
    at.adapter._listeners.clear()  # which know no shorter objects
    short = torch.Size((2, 4, 5, 64))

    def no_memory(*_: Any) -> None:
        raise MemoryError("no")

    at.stored = [fill(obj, 1) for obj in at.objects(1, short)]
    for submit in (at.adapter.submit_store_task, at.adapter.submit_load_task):
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.integrations.lmcache.slot_memory.np.empty", no_memory)
            with pytest.raises(MemoryError):
                submit(keys(1), at.stored)
        if submit == at.adapter.submit_store_task:
            assert at.finish(submit(keys(1), at.stored)).is_successful()
            at.stored = at.objects(1, short)
    at.stored.pop().ref_count_down()
    assert at.load(1, shape=short) == [True]
    assert at.store(2).is_successful()  # in the only slot: nobody reads the other


def test_a_listener_that_raises_stops_no_task(
    l2: Callable[..., L2], caplog: pytest.LogCaptureFixture
) -> None:
    at = l2()

    class Raises(Listener):
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            raise RuntimeError("it was not my day")

        def on_l2_keys_accessed(self, keys: Any) -> None:
            raise RuntimeError("nor mine")

    at.adapter.register_listener(Raises())
    assert at.store(1).is_successful()
    assert at.load(1) == [True]
    assert "it was not my day" in caplog.text
    assert "nor mine" in caplog.text


def test_a_lookup_that_is_overtaken_by_the_close_says_nothing(tmp_path: Path) -> None:
    first = L2(tmp_path, persist=True)
    first.store(1)
    first.close()
    at = L2(tmp_path, persist=True)

    class Closes(Listener):
        def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
            at.adapter.close()

    at.adapter.register_listener(Closes())
    at.adapter.submit_lookup_and_lock_task(keys(1), {})
    at.close()


def test_salts_are_counted_apart(l2: Callable[..., L2]) -> None:
    at = l2()
    at.stored = at.objects(2)
    at.finish(at.adapter.submit_store_task([key(1), key(1, "someone")], at.stored))
    assert at.adapter.get_usage().bytes_by_cache_salt == {"": CHUNK_BYTES, "someone": CHUNK_BYTES}


def test_objects_are_found_again_after_a_restart(tmp_path: Path) -> None:
    first = L2(tmp_path, persist=True)
    first.store(1, 2)
    with pytest.raises(ResourceBusyError):
        L2(tmp_path, persist=True)
    first.close()
    second = L2(tmp_path, persist=True)
    assert second.there(1, 2, 3) == [True, True, False]
    assert second.load(1, 2) == [True, True]
    assert second.adapter.get_usage().total_bytes_used == 2 * CHUNK_BYTES
    second.adapter.delete(keys(1))
    assert second.adapter.get_usage().total_bytes_used == CHUNK_BYTES
    second.close()


def test_after_closing_it_says_so(l2: Callable[..., L2]) -> None:
    at = l2()
    at.store(1)
    at.adapter.close()
    at.adapter.close()
    calls: list[Callable[[], Any]] = [
        lambda: at.adapter.submit_store_task([], []),
        lambda: at.adapter.submit_lookup_and_lock_task([], {}),
        lambda: at.adapter.submit_load_task([], []),
        lambda: at.adapter.delete([]),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    at.adapter.submit_unlock(keys(1))
    assert not at.adapter.report_status()["is_healthy"]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"quota": 0}, ValueError, f"quota: 0 B hold no object, which takes {CHUNK_BYTES} B"),
        ({"chunk_bytes": 0}, ValueError, "hold no object"),
        ({"eviction_policy": "best"}, ValueError, "there is no 'best'"),
        ({"size": 1}, ValueError, "there is no option size"),
        ({"quota": "100TiB"}, DiskOOMError, "no room"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    tmp_path: Path, options: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        L2(tmp_path, **options)


@pytest.mark.parametrize("missing", ["path", "quota", "chunk_bytes"])
def test_what_must_be_said_is_asked_for(tmp_path: Path, missing: str) -> None:
    params = {"path": str(tmp_path), "quota": "1MiB", "chunk_bytes": CHUNK_BYTES}
    del params[missing]
    with pytest.raises(ValueError, match=f"the option {missing} is missing"):
        KvtierL2Adapter(params)
