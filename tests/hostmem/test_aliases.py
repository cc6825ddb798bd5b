"""Devices that call registered host memory otherwise than the CPU does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, CudaMemory, CuError, HostMem, RegistrationError, StaticHostMem
from hostmem._sys.driver import HOST_POINTERS, Result
from hostmem.device.aliases import Aliases
from hostmem.testing import FakeDriver, FaultPlan

MIB = 1 << 20


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0, driver=FakeDriver(attributes={HOST_POINTERS: 0}))


@pytest.fixture
def gpu(device: CudaDevice) -> Iterator[CudaMemory]:
    memory = CudaMemory(device, 4 * MIB, 4 * MIB, 2 * MIB)
    yield memory
    memory.close()


def test_addresses_are_given_by_range() -> None:
    aliases = Aliases()
    assert aliases.of(u64(5, 10)).tolist() == [5, 10]
    aliases.add(100, 10, 5000)
    aliases.add(50, 10, 20)  # may be below as well
    assert aliases.of(u64(49, 50, 59, 60, 99, 100, 109, 110)).tolist() == [
        *(49, 20, 29, 60),
        *(99, 5000, 5009, 110),
    ]
    aliases.remove(50)
    aliases.remove(70)  # never known
    assert aliases.of(u64(50, 101)).tolist() == [50, 5001]


def test_most_devices_have_one_name_for_it() -> None:
    assert CudaDevice(0, driver=FakeDriver()).aliases is None


def test_memory_is_copied_under_the_names_that_the_device_has(
    device: CudaDevice, gpu: CudaMemory
) -> None:
    stream = device.stream()
    with HostMem(4 * MIB, 4 * MIB, device=device, wait=True) as memory:
        assert len(memory.registrations) > 1
        view = memory.view()
        view[:] = np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)[: 4 * MIB]
        expected = view.copy()
        offsets = np.arange(0, 4 * MIB, 64 << 10, dtype=np.uint64)
        there, here = np.uint64(gpu.address) + offsets, np.uint64(memory.address) + offsets
        sizes = np.full(len(offsets), 64 << 10, np.uint64)
        stream.copy(there, here, sizes)
        stream.synchronize()
        view[:] = 0
        stream.copy(here, there, sizes)
        stream.synchronize()
        assert np.array_equal(view, expected)
        del view
    assert device.aliases is not None
    assert device.aliases.of(here).tolist() == here.tolist()  # forgotten with the registrations
    stream.close()


def test_the_host_names_would_be_refused(device: CudaDevice, gpu: CudaMemory) -> None:
    stream = device.stream()
    with StaticHostMem(4096, device=device) as memory:
        addresses = u64(gpu.address), u64(memory.address)
        with pytest.raises(CuError) as caught:
            device.driver.copy_batch(0, *addresses, u64(4096), stream.handle)
    assert caught.value.code == Result.ILLEGAL_ADDRESS
    stream.close()


def test_a_range_whose_name_cannot_be_had_is_not_registered(device: CudaDevice) -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemHostGetDevicePointer", Result.OUT_OF_MEMORY)
        with pytest.raises(RegistrationError, match="cuMemHostGetDevicePointer"):
            StaticHostMem(4096, device=device)
    assert isinstance(device.driver, FakeDriver)
    assert list(device.driver.registered) == []
    StaticHostMem(4096, device=device).close()


@pytest.mark.gpu
def test_a_real_driver_gives_the_name_of_registered_memory() -> None:
    device = CudaDevice(0)
    with StaticHostMem(4096, device=device) as memory:
        alias = device.driver.host_device_pointer(0, memory.address)
        assert device.aliases is not None or alias == memory.address
