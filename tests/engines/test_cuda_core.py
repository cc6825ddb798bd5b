"""`HostMem` as the memory resource of the real cuda.core; what needs no driver runs without one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

core = pytest.importorskip("cuda.core")
resources = pytest.importorskip("hostmem.integrations.cuda_core")

from hostmem import HostMem, HostOOMError  # noqa: E402
from hostmem.testing import FaultPlan  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def memory() -> Iterator[HostMem]:
    with HostMem(MIB, device="cpu") as memory:
        yield memory


def test_it_is_a_memory_resource_of_host_memory(memory: HostMem) -> None:
    resource = resources.HostMemResource(memory)
    assert isinstance(resource, core.MemoryResource)
    assert resource.is_host_accessible
    assert not resource.is_device_accessible  # of the cpu device
    assert not resource.is_managed
    assert resource.device_id == -1


def test_a_buffer_is_a_part_of_the_memory_and_gives_it_back(memory: HostMem) -> None:
    resource = resources.HostMemResource(memory, alignment=512)
    first, second = resource.allocate(1000), resource.allocate(2000)
    assert [int(first.handle), int(second.handle)] == [memory.address, memory.address + KIB]
    assert (first.size, first.memory_resource) == (1000, resource)
    assert memory.is_usable(3 * KIB)
    first.close()
    assert resource.free == [(0, KIB), (3 * KIB, MIB - 3 * KIB)]
    second.close()
    assert resource.free == [(0, MIB)]


def test_a_buffer_that_is_dropped_gives_its_bytes_back(memory: HostMem) -> None:
    resource = resources.HostMemResource(memory)
    buffer = resource.allocate(KIB)
    del buffer
    gc.collect()
    assert resource.free == [(0, MIB)]


def test_dlpack_shows_the_bytes_and_keeps_the_buffer(memory: HostMem) -> None:
    resource = resources.HostMemResource(memory)
    buffer = resource.allocate(KIB)
    assert buffer.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(buffer)
    del buffer
    gc.collect()
    assert resource.free == [(KIB, MIB - KIB)]
    array[:] = 7
    assert memory.view(0, KIB).sum() == 7 * KIB
    del array
    gc.collect()
    assert resource.free == [(0, MIB)]


def test_a_buffer_keeps_the_memory_open_and_the_resource_alive() -> None:
    memory = HostMem(MIB, device="cpu")
    buffer = resources.HostMemResource(memory).allocate(KIB)
    gc.collect()
    with pytest.raises(BufferError):
        memory.close()
    buffer.close()
    memory.close()


def test_no_bytes_are_a_buffer_at_no_address(memory: HostMem) -> None:
    resource = resources.HostMemResource(memory)
    buffer = resource.allocate(0)
    assert (int(buffer.handle), buffer.size) == (0, 0)
    buffer.close()
    assert resource.free == [(0, MIB)]


def test_no_room_and_no_time_are_errors_that_take_nothing() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("madvise(MADV_POPULATE_WRITE)")
        with HostMem(MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            resource = resources.HostMemResource(memory, timeout=0)
            with pytest.raises(TimeoutError):
                resource.allocate(KIB)
            with pytest.raises(HostOOMError):
                resource.allocate(2 * MIB)
            assert resource.free == [(0, MIB)]
            hold.release()


# ----------------------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
def test_a_gpu_copies_from_and_to_buffers() -> None:
    device: Any = core.Device()
    device.set_current()
    stream = device.create_stream()
    with HostMem("64MiB", device=0) as memory:
        resource = resources.HostMemResource(memory)
        assert resource.is_device_accessible
        source, target = (resource.allocate(MIB, stream=stream) for _ in range(2))
        assert source.__dlpack_device__() == (3, 0)
        start = int(source.handle) - memory.address
        there = device.allocate(MIB, stream=stream)
        data = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
        memory.view(start, MIB)[:] = data
        source.copy_to(there, stream=stream)
        there.copy_to(target, stream=stream)
        target.close(stream)  # waits for the copies
        back = int(target_offset(resource, memory))
        assert (memory.view(back, MIB) == data).all()
        source.close(stream)
        there.close(stream)
        stream.close()


def target_offset(resource: Any, memory: HostMem) -> int:
    """Where the second buffer was: the lowest bytes that are free."""
    offset: int = resource.free[0][0]
    return offset
