"""`HostMem` as the pinned memory of the real CuPy; what needs no driver runs without one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
pinned = pytest.importorskip("hostmem.integrations.cupy")

from hostmem import HostMem, HostOOMError  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def memory() -> Iterator[HostMem]:
    with HostMem(MIB, device="cpu") as memory:
        yield memory


@pytest.fixture
def allocator(memory: HostMem) -> Iterator[Any]:
    """The allocator that CuPy uses; the earlier one, which cannot be asked for, is its pool."""
    allocator = pinned.HostMemPinnedAllocator(memory)
    cupy.cuda.set_pinned_memory_allocator(allocator)
    yield allocator
    cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)


def test_cupy_takes_its_pinned_memory_here(memory: HostMem, allocator: Any) -> None:
    pointer = cupy.cuda.alloc_pinned_memory(1000)
    assert isinstance(pointer, cupy.cuda.PinnedMemoryPointer)
    assert (pointer.ptr, pointer.size()) == (memory.address, 1000)
    assert allocator.free == [(KIB, MIB - KIB)]
    del pointer
    assert allocator.free == [(0, MIB)]


def test_an_array_over_it_keeps_it(memory: HostMem, allocator: Any) -> None:
    pointer = cupy.cuda.alloc_pinned_memory(KIB)
    array = np.frombuffer(pointer, np.uint8)
    del pointer
    gc.collect()
    array[:] = 3
    assert memory.view(0, KIB).sum() == 3 * KIB
    part = array[:10]
    del array
    with pytest.raises(BufferError):
        memory.close()
    del part
    assert allocator.free == [(0, MIB)]


def test_a_pool_keeps_what_it_took_and_uses_it_again(memory: HostMem) -> None:
    allocator = pinned.HostMemPinnedAllocator(memory)
    pool = cupy.cuda.PinnedMemoryPool(allocator)
    pointer = pool.malloc(1000)
    assert pointer.size() == KIB  # the pool rounds up, to 512 bytes and more
    del pointer
    assert pool.n_free_blocks() == 1
    assert allocator.free == [(KIB, MIB - KIB)]
    again = pool.malloc(600)
    assert again.ptr == memory.address
    del again
    pool.free_all_blocks()
    assert allocator.free == [(0, MIB)]


def test_no_bytes_are_a_pointer_to_nothing(allocator: Any) -> None:
    pointer = cupy.cuda.alloc_pinned_memory(0)
    assert (pointer.ptr, pointer.size()) == (0, 0)
    assert allocator.free == [(0, MIB)]


def test_no_room_is_an_error_through_cupy_and_its_pool(memory: HostMem, allocator: Any) -> None:
    pool = cupy.cuda.PinnedMemoryPool(allocator)
    for allocate in (cupy.cuda.alloc_pinned_memory, pool.malloc):
        with pytest.raises(HostOOMError):
            allocate(2 * MIB)
    assert allocator.free == [(0, MIB)]


# ----------------------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
def test_copies_through_it_are_of_pinned_memory_and_right() -> None:
    with HostMem("64MiB", device=0) as memory:
        allocator = pinned.HostMemPinnedAllocator(memory)
        cupy.cuda.set_pinned_memory_allocator(allocator)
        try:
            host = cupyx_empty(MIB)
            assert cupy.cuda.pinned_memory.is_memory_pinned(host.ctypes.data)
            assert memory.address <= host.ctypes.data < memory.address + memory.size
            host[:] = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
            stream = cupy.cuda.Stream(non_blocking=True)
            there = cupy.empty(MIB, np.uint8)
            there.set(host, stream=stream)
            back = cupyx_empty(MIB)
            there.get(out=back, stream=stream)
            stream.synchronize()
            assert (back == host).all()
            from_pageable = cupy.asarray(np.arange(MIB, dtype=np.uint8))  # staged by CuPy
            assert int(from_pageable[300]) == 300 % 256
            del host, back
        finally:
            cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)
            cupy.cuda.Device().synchronize()
            cupy.cuda.alloc_pinned_memory(1)  # lets go of what finished copies had used
        gc.collect()


def cupyx_empty(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Pinned memory as CuPy's users take it."""
    import cupyx

    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = cupyx.empty_pinned(nbytes, np.uint8)
    return array
