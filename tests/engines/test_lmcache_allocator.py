"""The allocator: LMCache's objects in a memory that fills, and in LMCache's own backends."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hostmem import CpuDevice, HostMem, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier.integrations.lmcache import HostMemAllocator, KvtierHostMemory, install_allocator
from kvtier.integrations.lmcache.slot_addresses import SlotAddresses
from tests.engines.lmcache_backends import (
    CHUNK_BYTES,
    DTYPE,
    FMT,
    KIB,
    MIB,
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
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

SLOT = 64 * KIB
REGISTER = "cuMemHostRegister"


def host_memory(slots: int = 4, slot_size: int = SLOT, **options: Any) -> HostMem:
    return HostMem(slots * slot_size, device="cpu", slot_size=slot_size, **options)


@pytest.fixture
def memory() -> Iterator[HostMem]:
    memory = host_memory()
    yield memory
    gc.collect()
    memory.close()


@pytest.fixture
def allocator(memory: HostMem) -> HostMemAllocator:
    return HostMemAllocator(memory)


def size(nbytes: int) -> tuple[torch.Size, torch.dtype]:
    return torch.Size((1, 1, 1, nbytes)), torch.uint8


# --------------------------------------------------------------------------------------- objects


def test_an_object_is_bytes_of_the_memory(memory: HostMem, allocator: HostMemAllocator) -> None:
    obj = allocator.allocate(SHAPE, DTYPE, FMT)
    assert isinstance(obj, TensorMemoryObj)
    assert obj.data_ptr == memory.address
    assert (obj.get_shape(), obj.get_dtype(), obj.get_memory_format()) == (SHAPE, DTYPE, FMT)
    assert (obj.get_size(), obj.get_physical_size()) == (CHUNK_BYTES, CHUNK_BYTES)
    assert (obj.get_ref_count(), obj.is_pinned, obj.parent()) == (1, False, allocator)
    fill(obj, 1)
    assert bytes(memory.view(0, CHUNK_BYTES)) == bytes(obj.byte_array)
    obj.ref_count_down()


def test_groups_of_layers_share_an_object(allocator: HostMemAllocator) -> None:
    shapes, dtypes = [SHAPE, torch.Size((1, 2, 16, 8))], [DTYPE, torch.float32]
    obj = allocator.allocate(shapes, dtypes, FMT)
    assert obj is not None
    assert [obj.get_tensor(group).shape for group in (0, 1)] == shapes
    assert obj.get_size() == CHUNK_BYTES + 1024
    assert obj.get_physical_size() == CHUNK_BYTES + 4096
    obj.ref_count_down()


def test_a_batch_comes_whole_or_not_at_all(allocator: HostMemAllocator) -> None:
    assert allocator.batched_allocate(SHAPE, DTYPE, 17) is None
    batch = allocator.batched_allocate(SHAPE, DTYPE, 16)
    assert batch is not None
    assert len({obj.data_ptr for obj in batch}) == 16
    assert allocator.allocate(*size(1)) is None
    assert allocator.memcheck()
    allocator.batched_free(batch)
    assert [obj.is_valid() for obj in batch] == [False] * 16
    assert allocator.pin_allocator.num_active_allocations == 0
    assert allocator.memcheck()


def test_what_is_free_is_given_out_again(allocator: HostMemAllocator) -> None:
    one, other = (allocator.allocate(*size(SLOT)) for _ in range(2))
    assert one is not None
    assert other is not None
    place = one.data_ptr
    one.ref_count_down()
    again = allocator.allocate(*size(SLOT))
    assert again is not None
    assert again.data_ptr == place
    for obj in (again, other):
        obj.ref_count_down()


def test_a_pinned_object_is_free_when_it_is_unpinned(allocator: HostMemAllocator) -> None:
    obj = allocator.allocate(SHAPE, DTYPE)
    assert obj is not None
    obj.pin()
    obj.ref_count_down()
    assert obj.is_valid()
    obj.unpin()
    assert not obj.is_valid()
    assert allocator.pin_allocator.num_active_allocations == 0


def test_freeing_twice_frees_once(allocator: HostMemAllocator) -> None:
    obj = allocator.allocate(SHAPE, DTYPE)
    assert obj is not None
    obj.ref_count_down()
    allocator.free(obj)
    allocator.batched_free([obj, obj])
    assert allocator.pin_allocator.num_active_allocations == 0
    assert allocator.memcheck()


def test_another_memorys_object_is_not_taken(allocator: HostMemAllocator) -> None:
    mine = allocator.allocate(SHAPE, DTYPE)
    assert mine is not None
    meta = MemoryObjMetadata(SHAPE, DTYPE, 0, CHUNK_BYTES, 1, fmt=FMT)
    foreign = TensorMemoryObj(torch.zeros(CHUNK_BYTES, dtype=torch.uint8), meta, None)
    with pytest.raises(ValueError, match="not of this memory"):
        allocator.free(foreign)
    assert foreign.is_valid()
    assert allocator.pin_allocator.num_active_allocations == 1
    mine.ref_count_down()


def test_a_batch_with_another_memorys_object_frees_the_others(allocator: HostMemAllocator) -> None:
    one, other = (allocator.allocate(SHAPE, DTYPE) for _ in range(2))
    assert one is not None
    assert other is not None
    meta = one.meta.__class__(SHAPE, DTYPE, 0, CHUNK_BYTES, 1, fmt=one.meta.fmt)
    foreign = TensorMemoryObj(torch.zeros(CHUNK_BYTES, dtype=torch.uint8), meta, None)
    with pytest.raises(ValueError, match="not of this memory"):
        allocator.batched_free([one, foreign, other])
    assert not one.is_valid()
    assert not other.is_valid()
    assert allocator.pin_allocator.num_active_allocations == 0


def test_nobody_allocates_while_the_memory_is_checked(
    allocator: HostMemAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, held = allocator.pin_allocator, []
    free = pool.address_manager.get_free_size

    def looked_at() -> Any:
        held.append(pool._lock.locked())
        return free()

    monkeypatch.setattr(pool.address_manager, "get_free_size", looked_at)
    assert allocator.memcheck()
    assert held == [True]


def test_a_dropped_object_is_free(allocator: HostMemAllocator) -> None:
    obj = allocator.allocate(SHAPE, DTYPE)
    del obj
    gc.collect()
    assert allocator.pin_allocator.num_active_allocations == 0


@pytest.mark.parametrize(("nbytes", "told"), [(SLOT + 1, "larger than a slot"), (0, "size")])
def test_what_will_never_fit_is_an_error(
    allocator: HostMemAllocator, nbytes: int, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        allocator.allocate(*size(nbytes))
    assert allocator.pin_allocator.num_active_allocations == 0


def test_what_is_larger_than_the_memory_finds_no_room(allocator: HostMemAllocator) -> None:
    assert allocator.allocate(*size(4 * SLOT + 1)) is None


def test_byte_buffers_are_pythons(allocator: HostMemAllocator) -> None:
    obj = allocator.allocate(torch.Size((5, 0, 0, 0)), torch.uint8, MemoryFormat.BINARY_BUFFER)
    assert obj is not None
    assert len(obj.byte_array) == 5
    allocator.free(obj)


def test_a_memory_without_slots_is_refused() -> None:
    with (
        HostMem(MIB, device="cpu") as memory,
        pytest.raises(ValueError, match="in slots of 1 bytes"),
    ):
        HostMemAllocator(memory)
    with (
        HostMem(MIB, 0, device="cpu", slot_size=SLOT) as memory,
        pytest.raises(ValueError, match="one slot"),
    ):
        HostMemAllocator(memory)


@pytest.mark.parametrize("align", [0, -4096, 3])
def test_an_alignment_is_a_power_of_two(memory: HostMem, align: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        HostMemAllocator(memory, align)


@given(data=st.data())
def test_blocks_neither_overlap_nor_cross_a_slot(data: Any) -> None:
    slots, slot = 3, 8 * 4096
    addresses = SlotAddresses(slots * slot, 4096, slot)
    taken: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if taken and data.draw(st.integers(0, 1)):
            addresses.free(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            nbytes = data.draw(st.integers(1, slot))
            pages = -(-nbytes // 4096)
            used = {
                page
                for start, size in taken
                for page in range(start // 4096, (start + size) // 4096)
            }
            fits = [
                page
                for page in range(slots * 8 - pages + 1)
                if page // 8 == (page + pages - 1) // 8
                and not used & set(range(page, page + pages))
            ]
            if fits:
                taken.append(addresses.allocate(nbytes))
                assert taken[-1] == (fits[0] * 4096, pages * 4096)
            else:
                with pytest.raises(RuntimeError):
                    addresses.allocate(nbytes)
        assert addresses.check_consistency()
        assert addresses.get_free_size() == slots * slot - sum(size for _, size in taken)


def test_an_inconsistent_list_is_told() -> None:
    addresses = SlotAddresses(2 * SLOT, 4096, SLOT)
    addresses.free(*addresses.allocate(4096))
    assert addresses.check_consistency()
    addresses.free(0, 4096)  # which was free
    assert not addresses.check_consistency()


# ----------------------------------------------------------------------------- while it is filled


def test_it_is_usable_before_it_is_full_and_waits_beyond(spawn: Spawn, until: Until) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(REGISTER, at=2)
        allocator = HostMemAllocator(host_memory(8, MIB))
        hold.wait_reached()
        first = allocator.allocate(*size(MIB))  # at once
        assert first is not None
        memory = allocator.memory
        assert memory is not None
        assert memory.committed == MIB
        waiting = spawn(allocator.allocate, *size(MIB))
        until(lambda: memory._mark.waiting == 1)
        first.ref_count_down()  # no lock is held meanwhile
        again = allocator.allocate(*size(MIB))  # what is usable is preferred
        assert again is not None
        assert again.data_ptr == memory.address
        assert not waiting.done()
        hold.release()
        second = waiting.result(10)
        assert second is not None
        assert second.data_ptr == memory.address + MIB
        for obj in (again, second):
            obj.ref_count_down()
        del first, again, second, obj, waiting
        allocator.close()
        assert memory.closed


def test_where_the_fill_stopped_there_is_no_room(caplog: pytest.LogCaptureFixture) -> None:
    with FaultPlan() as plan:
        plan.fail(REGISTER, 1, at=2, times=None)
        allocator = HostMemAllocator(host_memory(4, MIB, on_register_failure="stop"))
        first = allocator.allocate(*size(MIB))
        assert first is not None
        assert allocator.allocate(*size(MIB)) is None
        assert allocator.batched_allocate(*size(MIB), 2) is None
        assert caplog.text.count("ends where its fill did") == 1
        assert allocator.pin_allocator.num_active_allocations == 1
        assert allocator.memcheck()
        first.ref_count_down()
        again = allocator.allocate(*size(MIB))  # eviction helps
        assert again is not None
        again.ref_count_down()
    allocator.close()


# ----------------------------------------------------------------------------------------- closing


def test_closing_gives_the_memory_back(cpu: CpuDevice) -> None:
    memory = host_memory(wait=True)
    allocator = HostMemAllocator(memory)
    obj = allocator.allocate(SHAPE, DTYPE)
    assert obj is not None
    obj.ref_count_down()
    del obj
    allocator.close()
    allocator.close()
    assert memory.closed
    assert allocator.memory is None
    assert list(cpu.registered) == []
    assert allocator.allocate(SHAPE, DTYPE) is None
    assert allocator.batched_allocate(SHAPE, DTYPE, 2) is None


def test_a_held_object_keeps_the_memory_until_it_is_free() -> None:
    memory = host_memory()
    allocator = HostMemAllocator(memory)
    one, other = (allocator.allocate(SHAPE, DTYPE) for _ in range(2))
    assert one is not None
    assert other is not None
    fill(one, 1)
    allocator.close()
    assert not memory.closed
    assert allocator.allocate(SHAPE, DTYPE) is None
    other.ref_count_down()
    assert holds(one, 1)
    assert not memory.closed
    one.ref_count_down()  # both are still referenced here
    assert memory.closed


def test_a_tensor_keeps_the_memory_and_that_is_logged(
    until: Until, cpu: CpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = HostMemAllocator(host_memory())
    obj = allocator.allocate(SHAPE, DTYPE)
    assert obj is not None
    tensors = [fill(obj, 1).tensor]
    obj.ref_count_down()
    allocator.close()
    del obj
    assert "the last tensor over it" in caplog.text
    assert float(tensors[0].sum()) > 0
    assert list(cpu.registered)

    def given_back() -> bool:
        tensors.clear()
        return not list(cpu.registered)

    with pytest.warns(ResourceWarning, match="HostMem"):  # on a thread of hostmem's
        until(given_back)


def test_a_wait_for_memory_ends_with_the_memory(spawn: Spawn, until: Until) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(REGISTER, at=2)
        memory = host_memory(4, MIB)
        allocator = HostMemAllocator(memory)
        hold.wait_reached()
        waiting = spawn(allocator.batched_allocate, *size(MIB), 2)
        until(lambda: memory._mark.waiting == 1)
        allocator.close()  # the wait goes on: what it gives is given back
        hold.release()
        objs = waiting.result(10)
        assert objs is not None
        allocator.batched_free(objs)
        assert memory.closed


def test_a_wait_that_fails_after_the_close_is_the_last(spawn: Spawn, until: Until) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(REGISTER, at=2)
        plan.fail(REGISTER, 1, at=2, times=None)
        memory = host_memory(4, MIB, on_register_failure="stop")
        allocator = HostMemAllocator(memory)
        hold.wait_reached()
        waiting = spawn(allocator.batched_allocate, *size(MIB), 2)
        until(lambda: memory._mark.waiting == 1)
        allocator.close()
        hold.release()
        assert waiting.result(10) is None
        assert memory.closed


# ----------------------------------------------------------------------------- in LMCache's backend


def test_a_backend_gets_another_memory(cpu: CpuDevice) -> None:
    backend = local_backend()
    before = backend.get_memory_allocator()
    memory = host_memory()
    allocator = install_allocator(backend, memory)
    assert before._unregistered  # it was closed
    assert backend.get_memory_allocator() is allocator
    assert backend.memory_allocator.memcheck()
    obj = backend.allocate(SHAPE, DTYPE)
    assert obj.data_ptr == memory.address
    backend.batched_submit_put_task([key(1)], [fill(obj, 1)])
    obj.ref_count_down()
    got = backend.get_blocking(key(1))
    assert holds(got, 1)
    got.ref_count_down()
    del obj, got
    backend.close()  # it closes the allocator, and then lets go of its objects
    assert memory.closed
    assert list(cpu.registered) == []


def test_a_backend_evicts_when_the_memory_is_full() -> None:
    backend = local_backend()
    install_allocator(backend, host_memory())
    for number in range(20):
        obj = backend.allocate(SHAPE, DTYPE, busy_loop=False)
        backend.batched_submit_put_task([key(number)], [fill(obj, number)])
        obj.ref_count_down()
    assert [backend.contains(key(number)) for number in range(20)] == [False] * 4 + [True] * 16
    for number in range(4, 20):
        got = backend.get_blocking(key(number))
        assert holds(got, number)
        got.ref_count_down()
    assert backend.memory_allocator.memcheck()
    del obj, got
    backend.close()


def test_layers_are_evicted_together() -> None:
    """LMCache insists on its mixed allocator there."""
    backend = local_backend(use_layerwise=True)
    install_allocator(backend, host_memory())
    for number in range(6):
        objs = backend.batched_allocate(SHAPE, DTYPE, 4, busy_loop=False)
        assert objs is not None
        backend.batched_submit_put_task(key(number).split_layers(4), objs)
        for obj in objs:
            obj.ref_count_down()
    assert len(backend.hot_cache) == 16
    assert backend.memory_allocator.memcheck()
    del obj, objs
    backend.close()


def test_a_memory_in_use_is_not_replaced() -> None:
    backend = local_backend()
    obj = backend.allocate(SHAPE, DTYPE)
    with host_memory() as memory, pytest.raises(ResourceBusyError, match="1 objects"):
        install_allocator(backend, memory)
    assert type(backend.memory_allocator) is MixedMemoryAllocator
    obj.ref_count_down()
    backend.close()


def test_a_paged_memory_is_not_replaced() -> None:
    paged = MixedMemoryAllocator(
        16 * CHUNK_BYTES, use_paging=True, shapes=[SHAPE], dtypes=[DTYPE], fmt=FMT
    )
    backend = LocalCPUBackend(lmcache_config(), lmcache_metadata(), "cpu", None, paged)
    with host_memory() as memory, pytest.raises(ValueError, match="pages that others know of"):
        install_allocator(backend, memory)
    assert backend.memory_allocator is paged
    backend.close()


# ------------------------------------------------------------------------------- by configuration


def test_configuration_alone_gives_lmcache_its_memory(cpu: CpuDevice) -> None:
    config = lmcache_config({"KvtierHostMemory": {"size": "1MiB", "page_mode": "small"}})
    with storage_manager(config) as manager:
        allocator = manager.local_cpu_backend.get_memory_allocator()
        assert isinstance(allocator, HostMemAllocator)
        memory = allocator.memory
        assert memory is not None
        assert (memory.size, memory.slot_size) == (8 * MIB, 8 * MIB)  # one slot at least
        keys = [key(number) for number in range(3)]
        objs = manager.batched_allocate(SHAPE, DTYPE, 3)
        for number, obj in enumerate(objs):
            fill(obj, number)
        manager.batched_put(keys, objs)
        assert manager.contains(key(2)) == "LocalCPUBackend"
        assert manager.batched_contains([*keys, key(9)])[0] == 3
        got = manager.batched_get(keys, "LocalCPUBackend")
        assert [holds(obj, number) for number, obj in enumerate(got)] == [True] * 3
        assert manager.batched_get([key(9)]) == [None]
        assert manager.get(key(9)) is None
        nothing = manager.storage_backends["KvtierHostMemory"]
        assert nothing.batched_get_blocking([key(0)]) == []  # None would end LMCache's search
        assert nothing.get_blocking(key(0)) is None
        assert manager.memcheck()
        for obj in got:
            obj.ref_count_down()
        assert manager.remove(key(0)) == 1
        assert manager.clear() == 2 * 16
        del objs, obj, got
    assert memory.closed
    assert list(cpu.registered) == []


def test_slots_are_as_large_as_is_said() -> None:
    config = lmcache_config({"KvtierHostMemory": {"size": 4 * MIB, "slot_size": "64KiB"}})
    with storage_manager(config) as manager:
        memory = manager.local_cpu_backend.get_memory_allocator().memory
        assert (memory.size, memory.slot_size) == (4 * MIB, SLOT)
        assert manager.storage_backends["KvtierHostMemory"].get_allocator_backend() is (
            manager.local_cpu_backend
        )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "size is missing"),
        ({"size": "1MiB", "quota": 1}, "no option storage_plugin.KvtierHostMemory.quota"),
        ({"size": "much"}, "much"),
        ({"size": "1MiB", "slot_size": 100}, "in slots of 100 bytes"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    backend = local_backend()
    config = lmcache_config({"KvtierHostMemory": options})
    with pytest.raises(ValueError, match=told):
        KvtierHostMemory("cpu", config, lmcache_metadata(), backend)
    assert type(backend.memory_allocator) is MixedMemoryAllocator
    backend.close()


def test_without_a_backend_there_is_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    config = lmcache_config({"KvtierHostMemory": {"size": "1MiB"}}, max_local_cpu_size=0)
    with pytest.raises(ValueError, match="max_local_cpu_size must be above 0"):
        KvtierHostMemory("cpu", config, lmcache_metadata())
    logging.getLogger("lmcache").propagate = True
    assert not CreateStorageBackends(
        config, lmcache_metadata(), None
    )  # LMCache logs it, and goes on


def test_a_view_of_numpys_sees_the_same_bytes(memory: HostMem, allocator: HostMemAllocator) -> None:
    obj = allocator.allocate(*size(4096))
    assert obj is not None
    obj.tensor.fill_(7)
    assert np.asarray(memory.view(0, 4096)).sum() == 7 * 4096
    obj.ref_count_down()
