"""The fake driver's knobs, and what a real one could not be made to show."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, HostMem
from hostmem._sys import linux
from hostmem._sys.driver import HOST_NUMA_ID, HOST_PAGE_TABLES, PAGEABLE_ACCESS
from hostmem.errors import CuError, CuOOMError, HostmemError
from hostmem.testing import FakeDriver, FaultPlan

MIB, GIB = 1 << 20, 1 << 30
PAGE = mmap.PAGESIZE


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


@contextlib.contextmanager
def refused(code: int, kind: type[HostmemError] = CuError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code, str(caught.value)


@pytest.fixture
def memory() -> Iterator[int]:
    """Sixteen accessible pages: the address."""
    address = linux.reserve(16 * PAGE, PAGE)
    linux.allow(address, 16 * PAGE)
    yield address
    linux.unmap(address, 16 * PAGE)


# ------------------------------------------------------------------------------------- knobs


def test_devices_differ_by_name_and_pci_address() -> None:
    driver = FakeDriver(2, name="H{}", pci_address="0000:{:02x}:00.0")
    assert [driver.device_name(n) for n in range(driver.device_count())] == ["H0", "H1"]
    assert [driver.pci_address(n) for n in range(2)] == ["0000:00:00.0", "0000:01:00.0"]


def test_a_driver_may_see_no_device() -> None:
    assert FakeDriver(0).device_count() == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    with refused(101):
        FakeDriver(2).device_name(2)


def test_the_node_is_unknown_unless_given() -> None:
    assert FakeDriver().attribute(0, HOST_NUMA_ID) == -1
    assert FakeDriver(numa_node=1).attribute(0, HOST_NUMA_ID) == 1


def test_a_driver_may_be_older_than_an_attribute() -> None:
    with refused(1):
        FakeDriver(numa_node=None).attribute(0, HOST_NUMA_ID)


def test_attributes_are_a_discrete_gpus_unless_given() -> None:
    driver = FakeDriver(attributes={PAGEABLE_ACCESS: 1})
    assert driver.attribute(0, PAGEABLE_ACCESS) == 1
    assert driver.attribute(0, HOST_PAGE_TABLES) == 0


def test_a_registration_of_512_gib_does_not_fit_the_tables() -> None:
    address = linux.reserve(512 * GIB, PAGE)
    try:
        with refused(2, CuOOMError):
            FakeDriver().host_register(0, address, 512 * GIB)
        with refused(1):  # a byte less gets as far as the pages, which are inaccessible
            FakeDriver().host_register(0, address, 512 * GIB - 1)
    finally:
        linux.unmap(address, 512 * GIB)


def test_a_ceiling_refuses_registrations_of_its_size(memory: int) -> None:
    driver = FakeDriver(ceiling=4 * PAGE, refusal=1)
    with refused(1):
        driver.host_register(0, memory, 4 * PAGE)
    driver.host_register(0, memory, 4 * PAGE - 1)


def test_a_ceiling_of_zero_refuses_every_registration(memory: int) -> None:
    with refused(801):
        FakeDriver(ceiling=0, refusal=801).host_register(0, memory, PAGE)


def test_a_memory_under_a_ceiling_is_registered_in_pieces_below_it() -> None:
    driver = FakeDriver(ceiling=MIB, refusal=1)
    with HostMem("4MiB", device=CudaDevice(0, driver=driver), wait=True) as mem:
        sizes = [nbytes for _, nbytes in mem.registrations]
        assert sum(sizes) == 4 * MIB
        assert max(sizes) < MIB


def test_registering_takes_2_mib_of_the_gpu_a_gib() -> None:
    driver = FakeDriver(memory=GIB)
    address = linux.reserve(GIB, PAGE)
    linux.allow(address, GIB)
    try:
        driver.host_register(0, address, GIB // 2)
        assert driver.memory_info(0) == (GIB - MIB, GIB)
        driver.host_unregister(0, address)
        assert driver.memory_info(0) == (GIB, GIB)
    finally:
        linux.unmap(address, GIB)


def test_a_read_only_mapping_is_not_registered() -> None:
    with mmap.mmap(-1, PAGE, prot=mmap.PROT_READ) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        with refused(1):
            FakeDriver().host_register(0, array.__array_interface__["data"][0], PAGE)
        del array


def test_a_range_over_two_mappings_is_registered() -> None:
    driver = FakeDriver()
    address = linux.reserve(4 * PAGE, PAGE)
    linux.allow(address, 4 * PAGE)
    linux.advise_no_fork(address, 2 * PAGE)  # which splits the mapping
    driver.host_register(0, address, 4 * PAGE)
    linux.unmap(address, 4 * PAGE)


def test_registrations_are_the_processs_not_a_devices(memory: int) -> None:
    driver = FakeDriver(2)
    driver.host_register(0, memory, PAGE)
    with refused(712):
        driver.host_register(1, memory, PAGE)


def test_the_refusal_of_an_overlap_names_the_owner(memory: int) -> None:
    driver = FakeDriver()
    driver.host_register(0, memory, 2 * PAGE)
    with pytest.raises(CuError, match=rf"overlaps \[{memory:#x}, {memory + 2 * PAGE:#x}\)"):
        driver.host_register(0, memory + PAGE, 2 * PAGE)


# --------------------------------------------------------------------------- streams, events

CALLS_ON_A_STREAM: dict[str, Callable[[FakeDriver, int, int], object]] = {
    "destroy": lambda driver, stream, event: driver.stream_destroy(0, stream),
    "synchronize": lambda driver, stream, event: driver.stream_synchronize(0, stream),
    "wait": lambda driver, stream, event: driver.stream_wait_event(0, stream, event),
    "record": lambda driver, stream, event: driver.event_record(0, event, stream),
    "copy": lambda driver, stream, event: driver.copy_batch(0, u64(1), u64(2), u64(1), stream),
}
CALLS_ON_AN_EVENT: dict[str, Callable[[FakeDriver, int, int], object]] = {
    "destroy": lambda driver, stream, event: driver.event_destroy(0, event),
    "query": lambda driver, stream, event: driver.event_query(0, event),
    "synchronize": lambda driver, stream, event: driver.event_synchronize(0, event),
    "wait": lambda driver, stream, event: driver.stream_wait_event(0, stream, event),
    "record": lambda driver, stream, event: driver.event_record(0, event, stream),
}


@pytest.mark.parametrize("call", CALLS_ON_A_STREAM)
def test_a_destroyed_stream_is_an_invalid_handle(call: str) -> None:
    driver = FakeDriver()
    stream, event = driver.stream_create(0), driver.event_create(0)
    driver.stream_destroy(0, stream)
    with refused(400):
        CALLS_ON_A_STREAM[call](driver, stream, event)


@pytest.mark.parametrize("call", CALLS_ON_AN_EVENT)
def test_a_destroyed_event_is_an_invalid_handle(call: str) -> None:
    driver = FakeDriver()
    stream, event = driver.stream_create(0), driver.event_create(0)
    driver.event_destroy(0, event)
    with refused(400):
        CALLS_ON_AN_EVENT[call](driver, stream, event)


def test_an_event_that_was_never_recorded_has_finished() -> None:
    driver = FakeDriver()
    event = driver.event_create(0)
    assert driver.event_query(0, event)


def test_an_event_has_not_finished_while_its_copy_runs(memory: int) -> None:
    driver = FakeDriver()
    stream, event = driver.stream_create(0), driver.event_create(0)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        driver.copy_batch(0, u64(memory), u64(memory + PAGE), u64(PAGE), stream)
        driver.event_record(0, event, stream)
        held.wait_reached()
        assert not driver.event_query(0, event)
        held.release()
        driver.event_synchronize(0, event)
        assert driver.event_query(0, event)


def test_destroying_a_stream_lets_its_work_finish(memory: int) -> None:
    driver = FakeDriver()
    stream, event = driver.stream_create(0), driver.event_create(0)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        driver.copy_batch(0, u64(memory), u64(memory + PAGE), u64(PAGE), stream)
        driver.event_record(0, event, stream)
        driver.stream_destroy(0, stream)
        held.release()
        driver.event_synchronize(0, event)


def test_a_copy_from_nowhere_fails_the_event_after_it(memory: int) -> None:
    driver = FakeDriver()
    stream, event = driver.stream_create(0), driver.event_create(0)
    driver.copy_batch(0, u64(memory), u64(PAGE), u64(PAGE), stream)  # page 1: never mapped
    driver.event_record(0, event, stream)
    with refused(700):
        driver.event_synchronize(0, event)
    with refused(700):
        driver.event_query(0, event)


# ---------------------------------------------------------------------------- device memory


def test_reserved_address_space_takes_no_memory() -> None:
    driver = FakeDriver(memory=16 * MIB)
    address = driver.memory_reserve(0, 64 * GIB)
    assert driver.memory_info(0) == (16 * MIB, 16 * MIB)
    driver.memory_release(0, address, 64 * GIB)


def test_each_device_has_its_own_memory() -> None:
    driver = FakeDriver(2, memory=16 * MIB)
    address = driver.memory_reserve(1, 4 * MIB)
    driver.memory_map(1, address, 4 * MIB)
    assert [driver.memory_info(n)[0] for n in range(2)] == [16 * MIB, 12 * MIB]


def test_unmapped_device_memory_takes_no_host_memory() -> None:
    driver = FakeDriver()
    address = driver.memory_reserve(0, 2 * MIB)
    driver.memory_map(0, address, 2 * MIB)
    linux.touch(address, 2 * MIB)
    driver.memory_unmap(0, address, 2 * MIB)
    assert int(linux.node_of_pages(u64(address))[0]) < 0
    driver.memory_release(0, address, 2 * MIB)


def test_a_reservation_is_not_released_while_memory_is_mapped_in_it() -> None:
    driver = FakeDriver()
    address = driver.memory_reserve(0, 4 * MIB)
    driver.memory_map(0, address + 2 * MIB, 2 * MIB)
    with refused(1):
        driver.memory_release(0, address, 4 * MIB)
    driver.memory_unmap(0, address + 2 * MIB, 2 * MIB)
    driver.memory_release(0, address, 4 * MIB)


def test_memory_is_mapped_inside_a_reservation() -> None:
    # Stricter than the driver, which was seen to accept a mapping past the end of one.
    driver = FakeDriver()
    address = driver.memory_reserve(0, 4 * MIB)
    with refused(1):
        driver.memory_map(0, address + 2 * MIB, 4 * MIB)
    driver.memory_release(0, address, 4 * MIB)


def test_a_reservation_is_released_as_a_whole() -> None:
    driver = FakeDriver()
    address = driver.memory_reserve(0, 4 * MIB)
    with refused(1):
        driver.memory_release(0, address, 2 * MIB)


@pytest.mark.parametrize("nbytes", [0, MIB, 3 * MIB])
def test_address_space_is_reserved_in_granules(nbytes: int) -> None:
    with refused(1):
        FakeDriver().memory_reserve(0, nbytes)


# ------------------------------------------------------------------------ plans, the shutdown

CALLS: dict[str, Callable[[FakeDriver, int, int, int], object]] = {
    "cuDriverGetVersion": lambda d, s, e, m: d.version(),
    "cuDeviceGetCount": lambda d, s, e, m: d.device_count(),
    "cuDeviceGetName": lambda d, s, e, m: d.device_name(0),
    "cuDeviceGetPCIBusId": lambda d, s, e, m: d.pci_address(0),
    "cuDeviceGetAttribute": lambda d, s, e, m: d.attribute(0, HOST_NUMA_ID),
    "cuMemGetInfo": lambda d, s, e, m: d.memory_info(0),
    "cuMemHostRegister": lambda d, s, e, m: d.host_register(0, 2 * m, PAGE),
    "cuMemHostUnregister": lambda d, s, e, m: d.host_unregister(0, 2 * m),
    "cuMemcpyBatchAsync": lambda d, s, e, m: d.copy_batch(0, u64(m), u64(m), u64(1), s),
    "cuStreamCreate": lambda d, s, e, m: d.stream_create(0),
    "cuStreamDestroy": lambda d, s, e, m: d.stream_destroy(0, s),
    "cuStreamSynchronize": lambda d, s, e, m: d.stream_synchronize(0, s),
    "cuStreamWaitEvent": lambda d, s, e, m: d.stream_wait_event(0, s, e),
    "cuEventCreate": lambda d, s, e, m: d.event_create(0),
    "cuEventDestroy": lambda d, s, e, m: d.event_destroy(0, e),
    "cuEventRecord": lambda d, s, e, m: d.event_record(0, e, s),
    "cuEventQuery": lambda d, s, e, m: d.event_query(0, e),
    "cuEventSynchronize": lambda d, s, e, m: d.event_synchronize(0, e),
    "cuMemGetAllocationGranularity": lambda d, s, e, m: d.memory_granularity(0),
    "cuMemAddressReserve": lambda d, s, e, m: d.memory_reserve(0, 2 * MIB),
    "cuMemAddressFree": lambda d, s, e, m: d.memory_release(0, m, 4 * MIB),
    "cuMemCreate": lambda d, s, e, m: d.memory_map(0, m + 2 * MIB, 2 * MIB),
    "cuMemMap": lambda d, s, e, m: d.memory_map(0, m + 2 * MIB, 2 * MIB),
    "cuMemSetAccess": lambda d, s, e, m: d.memory_map(0, m + 2 * MIB, 2 * MIB),
    "cuMemUnmap": lambda d, s, e, m: d.memory_unmap(0, m, 2 * MIB),
}


@pytest.fixture
def prepared() -> tuple[FakeDriver, int, int, int]:
    """A driver, a stream, an event, and a granule of device memory in a reservation of two."""
    driver = FakeDriver()
    address = driver.memory_reserve(0, 4 * MIB)
    driver.memory_map(0, address, 2 * MIB)
    return driver, driver.stream_create(0), driver.event_create(0), address


@pytest.mark.parametrize("call", CALLS)
def test_a_plan_can_refuse(call: str, prepared: tuple[FakeDriver, int, int, int]) -> None:
    with FaultPlan() as plan, refused(999):
        plan.fail(call, 999)
        CALLS[call](*prepared)


@pytest.mark.parametrize("call", CALLS)
def test_the_end_of_the_driver_answers(
    call: str, prepared: tuple[FakeDriver, int, int, int]
) -> None:
    prepared[0].deinitialize()
    with refused(4):
        CALLS[call](*prepared)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_refused_step_of_mapping_takes_nothing(
    call: str, prepared: tuple[FakeDriver, int, int, int]
) -> None:
    driver, _, _, address = prepared
    before = driver.memory_info(0)
    with FaultPlan() as plan, refused(999):
        plan.fail(call, 999)
        driver.memory_map(0, address + 2 * MIB, 2 * MIB)
    assert driver.memory_info(0) == before
    driver.memory_map(0, address + 2 * MIB, 2 * MIB)
