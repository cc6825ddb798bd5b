"""What memory of ours does with a device: the CPU, the fake driver's, a GPU where there is one.

One suite for all three, so that what holds without a GPU holds with one.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, CudaDevice, Device, HostMem, StaticHostMem, Stream
from hostmem._sys.driver import load_driver
from hostmem.device import CudaMemory
from hostmem.errors import CuError
from hostmem.testing import FakeDriver

# A thread, because a driver call that hangs takes no signal: it prints every stack and exits.
pytestmark = pytest.mark.timeout(60, method="thread")

MIB = 1 << 20
PAGE = mmap.PAGESIZE

INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED = 1, 712, 713

Bytes = NDArray[np.uint8]
Allocate = Callable[[int], int]
"""Take device memory of so many bytes; its address."""


@pytest.fixture(params=["cpu", "fake", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Iterator[Device]:
    if request.param == "cpu":
        yield cpu  # whether something stays registered is looked at after every test
        return
    driver = FakeDriver() if request.param == "fake" else load_driver()
    yield CudaDevice(0, driver=driver)
    if isinstance(driver, FakeDriver):
        assert list(driver.registered) == [], "the test left memory registered"


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


@pytest.fixture
def allocate(device: Device) -> Iterator[Allocate]:
    with contextlib.ExitStack() as stack:
        kept: list[Bytes] = []

        def make(nbytes: int) -> int:
            if isinstance(device, CudaDevice):
                memory = CudaMemory(device, nbytes, nbytes, 2 * MIB)
                stack.callback(memory.close)
                return memory.address
            kept.append(np.zeros(nbytes, np.uint8))
            return int(kept[-1].__array_interface__["data"][0])

        yield make


def numbers(nbytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def copy(stream: Stream, destination: int, source: int, nbytes: int) -> None:
    stream.copy(*(np.array([value], np.uint64) for value in (destination, source, nbytes)))


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    with pytest.raises(CuError) as caught:
        yield
    assert caught.value.code == code, str(caught.value)


def test_a_filled_memory_is_registered_range_by_range(device: Device) -> None:
    with HostMem("8MiB", device=device, commit_unit="4MiB", wait=True) as memory:
        ranges = memory.registrations
        assert sum(nbytes for _, nbytes in ranges) == 8 * MIB
        for offset, nbytes in ranges:
            with refused(ALREADY_REGISTERED):
                device.register(memory.address + offset, nbytes)


def test_a_closed_memory_is_registered_no_more(device: Device) -> None:
    with HostMem("8MiB", device=device, commit_unit="4MiB", wait=True) as memory:
        starts = [memory.address + offset for offset, _ in memory.registrations]
    for start in starts:
        with refused(NOT_REGISTERED):
            device.unregister(start)


def test_what_a_shrink_gives_back_is_registered_no_more(device: Device) -> None:
    with HostMem("8MiB", device=device, commit_unit="4MiB", wait=True) as memory:
        memory.resize("4MiB")
        assert sum(nbytes for _, nbytes in memory.registrations) == 4 * MIB
        with refused(NOT_REGISTERED):
            device.unregister(memory.address + 4 * MIB)


def test_a_view_travels_to_the_device_and_back(
    device: Device, stream: Stream, allocate: Allocate
) -> None:
    on_device = allocate(2 * MIB)
    with HostMem("4MiB", device=device, wait=True) as memory:
        nbytes = memory.boundary_after(0)
        view = memory.view(0, nbytes, one_registration=True)
        view[:] = data = numbers(nbytes)
        copy(stream, on_device, memory.address, nbytes)
        stream.synchronize()
        view[:] = 0
        copy(stream, memory.address, on_device, nbytes)
        stream.synchronize()
        assert np.array_equal(view, data)
        del view


def test_a_registration_ends_where_the_memory_says(
    device: Device, stream: Stream, allocate: Allocate
) -> None:
    on_device = allocate(2 * MIB)
    with HostMem("2MiB", device=device, commit_unit="1MiB", wait=True) as memory:
        end = memory.boundary_after(0)
        assert end < 2 * MIB
        copy(stream, on_device, memory.address + end - PAGE, PAGE)
        with refused(INVALID_VALUE):
            copy(stream, on_device, memory.address + end - PAGE, PAGE + 1)
        stream.synchronize()


def test_a_consolidated_memory_is_copied_in_one_piece_and_a_cut_one_is_not(
    device: Device, stream: Stream, allocate: Allocate
) -> None:
    on_device = allocate(16 * MIB)
    data = numbers(16 * MIB)
    with HostMem("16MiB", device=device, commit_unit="4MiB", wait=True) as memory:
        memory.view()[:] = data
        with refused(INVALID_VALUE):
            copy(stream, on_device, memory.address, 16 * MIB)
        memory.consolidate()
        copy(stream, on_device, memory.address, 16 * MIB)
        stream.synchronize()
        memory.view()[:] = 0
        copy(stream, memory.address, on_device, 16 * MIB)
        stream.synchronize()
        assert np.array_equal(memory.view(), data)
        memory.release(4 * MIB, 4 * MIB)
        assert memory.registrations == [(0, 4 * MIB), (8 * MIB, 8 * MIB)]
        assert np.array_equal(memory.view(8 * MIB), data[8 * MIB :])
        copy(stream, on_device, memory.address + 8 * MIB, 8 * MIB)
        stream.synchronize()


def test_a_released_unit_comes_back_registered(
    device: Device, stream: Stream, allocate: Allocate
) -> None:
    on_device = allocate(4 * MIB)
    data = numbers(MIB)
    unit = 4 * MIB
    with HostMem(3 * unit, device=device, commit_unit=unit, stall_budget=None, wait=True) as memory:
        memory.release(unit, unit)
        with refused(NOT_REGISTERED):
            device.unregister(memory.address + 4 * MIB)
        memory.recommit(4 * MIB, 4 * MIB)
        view = memory.view(4 * MIB, MIB, one_registration=True)
        assert not view.any()
        view[:] = data
        copy(stream, on_device, memory.address + 4 * MIB, MIB)
        stream.synchronize()
        view[:] = 0
        copy(stream, memory.address + 4 * MIB, on_device, MIB)
        stream.synchronize()
        assert np.array_equal(view, data)
        del view


def test_a_suspended_memory_keeps_its_bytes_and_is_registered_again(
    device: Device, stream: Stream, allocate: Allocate
) -> None:
    on_device = allocate(8 * MIB)
    data = numbers(8 * MIB)
    with HostMem("8MiB", device=device, wait=True) as memory:
        memory.view()[:] = data
        before = memory.registrations
        memory.suspend_registration()
        for offset, _ in before:
            with refused(NOT_REGISTERED):
                device.unregister(memory.address + offset)
        assert np.array_equal(memory.view(), data)
        memory.resume_registration()
        assert memory.registrations == before
        end = memory.boundary_after(0)
        copy(stream, on_device, memory.address, end)
        stream.synchronize()


def test_the_size_of_registrations_follows_the_time_they_take(device: Device) -> None:
    with HostMem("64MiB", device=device, stall_budget=1e-9, wait=True) as memory:
        largest = MIB if device.stalls else 8 * MIB  # the CPU keeps nobody waiting
        assert memory.progress.registration_size == largest
        assert memory.registrations[-1][1] == largest
    with HostMem("128MiB", device=device, stall_budget=None, wait=True) as memory:
        assert memory.registrations[-1] == (96 * MIB, 32 * MIB)


def test_a_static_memory_is_one_registration(
    device: Device, stream: Stream, allocate: Allocate
) -> None:
    on_device = allocate(4 * MIB)
    with StaticHostMem("3MiB", device=device) as memory:
        address = memory.address
        view = memory.view()
        view[:] = data = numbers(3 * MIB)
        copy(stream, on_device, address, 3 * MIB)
        stream.synchronize()
        view[:] = 0
        copy(stream, address, on_device, 3 * MIB)
        stream.synchronize()
        assert np.array_equal(view, data)
        del view
    with refused(NOT_REGISTERED):
        device.unregister(address)
