"""What a driver does, asked of the fake one everywhere and of the real one where there is a GPU.

Read a failure on ``real`` as: the fake is wrong about the driver, and so is what relies on it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice
from hostmem._sys import linux
from hostmem._sys.driver import CudaDriver, load_driver
from hostmem.device import CudaMemory, Stream
from hostmem.device.cuda import CudaEvent, CudaStream
from hostmem.errors import CuError, CuOOMError, HostmemError
from hostmem.testing import FakeDriver, FaultPlan
from tests.hostmem.drivers import DRIVERS, drivers

# A thread, because a driver call that hangs takes no signal: it prints every stack and exits.
pytestmark = pytest.mark.timeout(60, method="thread")

KIB, MIB = 1 << 10, 1 << 20
PAGE = mmap.PAGESIZE

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 712, 713, 801

Bytes = NDArray[np.uint8]
Allocate = Callable[[int], CudaMemory]


@pytest.fixture(params=drivers())
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    driver = DRIVERS[request.param]()
    yield CudaDevice(0, driver=driver)
    if isinstance(driver, FakeDriver):
        assert list(driver.registered) == [], "the test left memory registered"


@pytest.fixture
def stream(device: CudaDevice) -> Iterator[CudaStream]:
    made = device.stream()
    yield made
    made.close()


@pytest.fixture
def allocate(device: CudaDevice) -> Iterator[Allocate]:
    with contextlib.ExitStack() as stack:

        def make(nbytes: int) -> CudaMemory:
            memory = CudaMemory(device, nbytes, nbytes, 2 * MIB)
            stack.callback(memory.close)
            return memory

        yield make


def pages(nbytes: int) -> Bytes:
    """Return zeroed memory of its own pages."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def numbers(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def copy(stream: Stream, destination: int, source: int, nbytes: int) -> None:
    stream.copy(u64(destination), u64(source), u64(nbytes))


@contextlib.contextmanager
def registered(device: CudaDevice, address: int, nbytes: int) -> Iterator[None]:
    device.register(address, nbytes)
    try:
        yield
    finally:
        device.unregister(address)


@contextlib.contextmanager
def refused(code: int, kind: type[HostmemError] = CuError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == code, str(caught.value)


def assert_not_registrable(device: CudaDevice, address: int, nbytes: int, code: int) -> None:
    with contextlib.ExitStack() as undo, refused(code):
        device.register(address, nbytes)
        undo.callback(device.unregister, address)  # or later tests would meet it


# ---------------------------------------------------------------------------- registrations


def test_unregistering_needs_a_registration_that_began_there(device: CudaDevice) -> None:
    memory = pages(4 * PAGE)
    address = address_of(memory)
    with registered(device, address, 4 * PAGE), refused(INVALID_VALUE):
        device.unregister(address + PAGE)
    with refused(NOT_REGISTERED):
        device.unregister(address)


@pytest.mark.parametrize(
    ("first", "count"),
    [(2, 2), (1, 2), (3, 2), (1, 4), (2, 1), (3, 1)],
    ids=["the same", "over its start", "over its end", "around it", "its head", "its tail"],
)
def test_no_byte_is_registered_twice(device: CudaDevice, first: int, count: int) -> None:
    memory = pages(6 * PAGE)
    address = address_of(memory)
    with registered(device, address + 2 * PAGE, 2 * PAGE):
        start = address + first * PAGE
        assert_not_registrable(device, start, count * PAGE, ALREADY_REGISTERED)


def test_neighbours_may_share_a_page(device: CudaDevice, stream: Stream) -> None:
    memory = pages(2 * PAGE)
    address, middle = address_of(memory), PAGE + PAGE // 2
    memory[:] = numbers(2 * PAGE)
    with (
        contextlib.ExitStack() as first,
        registered(device, address + middle, PAGE // 2),
    ):
        first.enter_context(registered(device, address, middle))
        first.close()  # the other one holds the page they share
        result = pages(PAGE)
        copy(stream, address_of(result), address + middle, PAGE // 2)
        stream.synchronize()
    assert np.array_equal(result[: PAGE // 2], memory[middle:])


def test_ranges_of_one_page_are_registrations_of_their_own(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    host, on_device = pages(PAGE), allocate(2 * MIB).address
    host[:] = before = numbers(PAGE)
    address = address_of(host)
    with contextlib.ExitStack() as first, registered(device, address + 2001, 99):
        first.enter_context(registered(device, address + 100, 300))
        assert_not_registrable(device, address + 399, 1601, ALREADY_REGISTERED)
        copy(stream, on_device, address + 100, 300)
        stream.synchronize()
        first.close()
        copy(stream, address + 2001, on_device + 50, 99)
        stream.synchronize()
    expected = before.copy()
    expected[2001:2100] = before[150:249]
    assert np.array_equal(host, expected)


def test_touching_neighbours_are_two_registrations(device: CudaDevice) -> None:
    memory = pages(2 * PAGE)
    address = address_of(memory)
    with registered(device, address, PAGE), registered(device, address + PAGE, PAGE):
        pass


def test_inaccessible_memory_is_not_registered(device: CudaDevice) -> None:
    address = linux.reserve(4 * PAGE, PAGE)
    try:
        assert_not_registrable(device, address, 4 * PAGE, INVALID_VALUE)
    finally:
        linux.unmap(address, 4 * PAGE)


def test_memory_that_is_accessible_in_part_is_not_registered(device: CudaDevice) -> None:
    address = linux.reserve(4 * PAGE, PAGE)
    try:
        linux.allow(address, 3 * PAGE)
        assert_not_registrable(device, address, 4 * PAGE, INVALID_VALUE)
        with registered(device, address, 3 * PAGE):
            pass
    finally:
        linux.unmap(address, 4 * PAGE)


def test_unmapped_memory_is_not_registered(device: CudaDevice) -> None:
    address = linux.reserve(4 * PAGE, PAGE)
    linux.unmap(address, 4 * PAGE)
    assert_not_registrable(device, address, 4 * PAGE, INVALID_VALUE)


def test_no_bytes_are_not_registered(device: CudaDevice) -> None:
    memory = pages(PAGE)
    assert_not_registrable(device, address_of(memory), 0, INVALID_VALUE)


def test_an_error_names_the_call_and_the_range(device: CudaDevice) -> None:
    with pytest.raises(CuError, match=r"cuMemHostUnregister: CUDA_ERROR_\w+ \(713\); 0x10000"):
        device.unregister(0x10000)


def test_a_thread_of_no_context_registers_and_copies(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    source, result = pages(PAGE), pages(PAGE)
    source[:] = numbers(PAGE)
    memory = allocate(2 * MIB)

    def work() -> None:
        with registered(device, address_of(source), PAGE):
            copy(stream, memory.address, address_of(source), PAGE)
            copy(stream, address_of(result), memory.address, PAGE)
            stream.synchronize()

    in_thread(work)
    assert np.array_equal(result, source)


def in_thread(function: Callable[[], None]) -> None:
    """Run a function in a new thread and raise here what it raises there."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the thread hangs"
    if raised:
        raise raised[0]


@pytest.mark.gpu
def test_no_context_is_current_after_a_call() -> None:
    cuda: Any = pytest.importorskip("cuda.bindings.driver")
    device = CudaDevice(0, driver=load_driver())
    memory = pages(PAGE)

    def work() -> None:
        with registered(device, address_of(memory), PAGE):
            device.stream().close()
        _, context = cuda.cuCtxGetCurrent()
        assert int(context) == 0

    in_thread(work)


# ------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("count", [1, 2, 65_536])
@pytest.mark.parametrize("pinned", [True, False], ids=["registered", "unregistered"])
def test_a_batch_moves_every_range_there_and_back(
    device: CudaDevice, stream: Stream, allocate: Allocate, count: int, pinned: bool
) -> None:
    # Ranges of 48 bytes at a stride of 64, in reverse order: nothing merges them.
    nbytes = 64 * count
    there, back = pages(nbytes), pages(nbytes)
    there[:] = numbers(nbytes)
    memory = allocate(nbytes)
    offsets = np.arange(0, nbytes, 64, dtype=np.uint64)
    sizes = np.full(count, 48, np.uint64)
    on_device = np.uint64(memory.address) + offsets[::-1]
    with contextlib.ExitStack() as stack:
        if pinned:
            stack.enter_context(registered(device, address_of(there), nbytes))
            stack.enter_context(registered(device, address_of(back), nbytes))
        stream.copy(on_device.copy(), np.uint64(address_of(there)) + offsets, sizes)
        stream.copy(np.uint64(address_of(back)) + offsets, on_device.copy(), sizes)
        stream.synchronize()
    expected = there.reshape(count, 64).copy()
    expected[:, 48:] = 0
    assert np.array_equal(back.reshape(count, 64), expected)


def test_a_range_is_put_where_its_descriptor_says(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    memory, source, result = allocate(2 * MIB), pages(PAGE), pages(PAGE)
    source[:4] = [1, 2, 3, 4]
    start = address_of(source)
    stream.copy(
        u64(memory.address + 1, memory.address), u64(start, start + 1), u64(1, 1)
    )  # the first two bytes, exchanged
    copy(stream, address_of(result), memory.address, 2)
    stream.synchronize()
    assert result[:3].tolist() == [2, 1, 0]


def test_an_empty_batch_is_nothing(device: CudaDevice, stream: Stream) -> None:
    stream.copy(u64(), u64(), u64())
    stream.synchronize()


def test_the_legacy_stream_takes_no_batch(device: CudaDevice, allocate: Allocate) -> None:
    memory, source = allocate(2 * MIB), pages(PAGE)
    with refused(INVALID_VALUE):
        device.driver.copy_batch(0, u64(memory.address), u64(address_of(source)), u64(PAGE), 0)


def test_a_batch_that_the_driver_refuses_says_so(
    device: CudaDevice, stream: CudaStream, allocate: Allocate
) -> None:
    memory, source = allocate(2 * MIB), pages(PAGE)
    with FaultPlan() as plan, refused(NOT_SUPPORTED):
        plan.fail("cuMemcpyBatchAsync", NOT_SUPPORTED)
        device.driver.copy_batch(
            0, u64(memory.address), u64(address_of(source)), u64(PAGE), stream.handle
        )


SPANS = {
    "over the boundary of two": (PAGE, 2 * PAGE),
    "out of the last": (2 * PAGE, 2 * PAGE),
}


@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to device"])
@pytest.mark.parametrize("span", SPANS)
def test_a_copy_across_the_end_of_a_registration_is_refused(
    device: CudaDevice, stream: Stream, allocate: Allocate, span: str, to_host: bool
) -> None:
    # Pages 1 and 2 of four are registered, each by itself.
    host, memory = pages(4 * PAGE), allocate(2 * MIB)
    address = address_of(host)
    offset, nbytes = SPANS[span]
    ends = (address + offset, memory.address)
    with registered(device, address + PAGE, PAGE), registered(device, address + 2 * PAGE, PAGE):
        destination, source = ends if to_host else ends[::-1]
        with refused(INVALID_VALUE):
            copy(stream, destination, source, nbytes)
        copy(stream, memory.address, address + PAGE, PAGE)  # up to the boundary: fine
        stream.synchronize()


def test_a_copy_from_unregistered_memory_into_a_registration_is_accepted(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    host, memory, result = pages(2 * PAGE), allocate(2 * MIB), pages(2 * PAGE)
    host[:] = numbers(2 * PAGE)
    address = address_of(host)
    with registered(device, address + PAGE, PAGE):
        copy(stream, memory.address, address, 2 * PAGE)
        stream.synchronize()
    copy(stream, address_of(result), memory.address, 2 * PAGE)
    stream.synchronize()
    assert np.array_equal(result, host)


def test_after_a_refused_batch_the_stream_works_and_its_events_stand_for_what_was_submitted(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    host, memory, result = pages(3 * PAGE), allocate(2 * MIB), pages(PAGE)
    host[:] = 7
    address = address_of(host)
    copy(stream, memory.address, address_of(result), PAGE)  # zeros
    with registered(device, address, PAGE), registered(device, address + PAGE, PAGE):
        with refused(INVALID_VALUE):
            stream.copy(
                u64(memory.address, memory.address + PAGE),
                u64(address, address + PAGE // 2),
                u64(PAGE, PAGE),
            )
        stream.record().synchronize()
        copy(stream, address_of(result), memory.address, PAGE)
        stream.synchronize()
    # The first copy of the batch came before the refused one: moved or not, never a part of it.
    assert (result == 7).all() or not result.any()


def test_the_descriptors_may_be_reused_at_once(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    memory, source, result = allocate(2 * MIB), pages(PAGE), pages(PAGE)
    source[:] = numbers(PAGE)
    arrays = u64(memory.address), u64(address_of(source)), u64(PAGE)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")  # by which the fake copies
        stream.copy(*arrays)
        for array in arrays:
            array[:] = 0
        del arrays
        held.release()
        stream.synchronize()
    copy(stream, address_of(result), memory.address, PAGE)
    stream.synchronize()
    assert np.array_equal(result, source)


# --------------------------------------------------------------------------- streams, events


def test_a_stream_works_in_the_order_of_submission(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    # Each copy needs the one before.
    nbytes = 16 * MIB
    source, result = pages(nbytes), pages(nbytes)
    source[:] = numbers(nbytes)
    stations = [allocate(nbytes).address for _ in range(4)]
    route = [address_of(source), *stations, address_of(result)]
    with (
        registered(device, address_of(source), nbytes),
        registered(device, address_of(result), nbytes),
    ):
        for here, there in itertools.pairwise(route):
            copy(stream, there, here, nbytes)
        stream.synchronize()
    assert np.array_equal(result, source)


def test_an_event_has_finished_once_it_was_waited_for(device: CudaDevice, stream: Stream) -> None:
    source, result = pages(PAGE), pages(PAGE)
    copy(stream, address_of(result), address_of(source), PAGE)
    event = stream.record()
    event.synchronize()
    assert event.query()
    assert event.error is None


def test_an_event_of_a_stream_without_work_finishes(device: CudaDevice, stream: Stream) -> None:
    stream.record().synchronize()


@pytest.mark.parametrize("by_handle", [False, True])
def test_a_stream_waits_for_the_event_of_another(
    device: CudaDevice, stream: Stream, allocate: Allocate, by_handle: bool
) -> None:
    nbytes = 16 * MIB
    source, result = pages(nbytes), pages(nbytes)
    source[:] = numbers(nbytes)
    memory, between = allocate(nbytes), allocate(nbytes)
    other = device.stream()
    with (
        registered(device, address_of(source), nbytes),
        registered(device, address_of(result), nbytes),
        FaultPlan() as plan,
    ):
        held = plan.hold("process_vm_readv")  # the fake's first copy
        copy(stream, memory.address, address_of(source), nbytes)
        if by_handle:  # as for a stream that an engine has made
            device.wait(other.handle, stream.record())
        else:
            other.wait(stream.record())
        copy(other, between.address, memory.address, nbytes)
        copy(other, address_of(result), between.address, nbytes)
        held.release()
        other.synchronize()
    other.close()
    assert np.array_equal(result, source)


def test_waiting_for_a_finished_event_is_nothing(device: CudaDevice, stream: Stream) -> None:
    event = stream.record()
    event.synchronize()
    stream.wait(event)
    stream.synchronize()


def driver_event(stream: Stream) -> CudaEvent:
    event = stream.record()
    assert isinstance(event, CudaEvent)
    return event


def test_an_event_that_finished_is_used_again(device: CudaDevice, stream: Stream) -> None:
    first = driver_event(stream)
    handle = first.handle
    first.synchronize()
    assert first.handle is None
    assert driver_event(stream).handle == handle


def test_an_event_that_was_dropped_is_used_again(device: CudaDevice, stream: Stream) -> None:
    event = driver_event(stream)
    handle = event.handle
    del event
    again = driver_event(stream)
    assert again.handle == handle
    again.synchronize()


def test_an_event_in_use_is_not_used_again(device: CudaDevice, stream: Stream) -> None:
    first, second = driver_event(stream), driver_event(stream)
    assert first.handle != second.handle
    first.synchronize()
    second.synchronize()


def test_dropping_a_recorded_event_does_not_disturb_who_waits(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    nbytes = 4 * MIB
    source, result, memory = pages(nbytes), pages(nbytes), allocate(nbytes)
    source[:] = numbers(nbytes)
    other, idle = device.stream(), device.stream()
    with registered(device, address_of(source), nbytes), FaultPlan() as plan:
        held = plan.hold("process_vm_readv")  # the fake's first copy
        copy(stream, memory.address, address_of(source), nbytes)
        event = driver_event(stream)
        other.wait(event)
        del event
        idle.record().synchronize()  # takes the same driver event, and finishes
        copy(other, address_of(result), memory.address, nbytes)
        held.release()
        other.synchronize()
    other.close()
    idle.close()
    assert np.array_equal(result, source)


def test_a_closed_stream_has_finished_its_work(device: CudaDevice) -> None:
    source, result = pages(4 * MIB), pages(4 * MIB)
    source[:] = numbers(4 * MIB)
    stream = device.stream()
    copy(stream, address_of(result), address_of(source), 4 * MIB)
    stream.close()
    stream.close()
    assert np.array_equal(result, source)


# ---------------------------------------------------------------------------- device memory


def read(stream: Stream, address: int, nbytes: int) -> Bytes:
    result = pages(nbytes)
    copy(stream, address_of(result), address, nbytes)
    stream.synchronize()
    return result


def write(stream: Stream, address: int, data: Bytes) -> None:
    copy(stream, address, address_of(data), len(data))
    stream.synchronize()


def test_growing_and_shrinking_keep_the_address_and_the_bytes_below(
    device: CudaDevice, stream: Stream
) -> None:
    unit = 2 * MIB
    memory = CudaMemory(device, 4 * unit, unit, unit)
    address = memory.address
    data = numbers(2 * unit)
    write(stream, address, data[:unit])
    memory.resize(3 * unit)
    write(stream, address + unit, data[unit:])
    memory.resize(2 * unit)
    assert memory.address == address
    assert np.array_equal(read(stream, address, 2 * unit), data)
    memory.close()


def test_memory_that_was_given_back_comes_again(device: CudaDevice, stream: Stream) -> None:
    unit = 2 * MIB
    with contextlib.closing(CudaMemory(device, 2 * unit, 2 * unit, unit)) as memory:
        memory.resize(0)
        memory.resize(2 * unit)
        data = numbers(2 * unit)
        write(stream, memory.address, data)
        assert np.array_equal(read(stream, memory.address, 2 * unit), data)


def test_a_copy_may_cross_the_units_of_device_memory(
    device: CudaDevice, stream: Stream, allocate: Allocate
) -> None:
    memory = allocate(4 * MIB)  # in two units
    data = numbers(MIB)
    write(stream, memory.address + 2 * MIB - MIB // 2, data)
    assert np.array_equal(read(stream, memory.address + 2 * MIB - MIB // 2, MIB), data)


def test_device_memory_is_taken_and_given_back(device: CudaDevice) -> None:
    tables = 4 * MIB  # what the real driver may take beside it, and keep
    before, total = device.driver.memory_info(0)
    memory = CudaMemory(device, 64 * MIB, 64 * MIB, 32 * MIB)
    free, total_then = device.driver.memory_info(0)
    assert 64 * MIB <= before - free <= 64 * MIB + tables
    assert total_then == total == device.memory_total
    memory.close()
    memory.close()
    assert before - tables <= device.driver.memory_info(0)[0] <= before


def test_more_than_the_device_has_is_refused_and_takes_nothing(device: CudaDevice) -> None:
    before = device.driver.memory_info(0)
    with refused(OUT_OF_MEMORY, CuOOMError):
        CudaMemory(device, 1 << 40, 1 << 40, 1 << 40)
    free, total = device.driver.memory_info(0)
    assert total == before[1]
    if isinstance(device.driver, FakeDriver):
        assert free == before[0]
    assert free >= before[0]  # what tests before dropped may come back meanwhile on a real GPU


def test_a_size_is_backed_by_whole_granules(device: CudaDevice, stream: Stream) -> None:
    with contextlib.closing(CudaMemory(device, 5 * MIB, 1, 1)) as memory:
        granularity = device.driver.memory_granularity(0)
        assert memory.capacity % granularity == 0
        assert memory.capacity >= 5 * MIB
        data = numbers(granularity)
        write(stream, memory.address, data)
        assert np.array_equal(read(stream, memory.address, granularity), data)


@pytest.fixture
def reserved(device: CudaDevice) -> Iterator[tuple[int, int]]:
    """Two granules of device address space with memory in the first: (address, granule)."""
    driver = device.driver
    granule = driver.memory_granularity(0)
    address = driver.memory_reserve(0, 2 * granule)
    driver.memory_map(0, address, granule)
    yield address, granule
    driver.memory_unmap(0, address, granule)
    driver.memory_release(0, address, 2 * granule)


def test_device_memory_is_mapped_once(device: CudaDevice, reserved: tuple[int, int]) -> None:
    address, granule = reserved
    with refused(INVALID_VALUE):
        device.driver.memory_map(0, address, granule)


def test_device_memory_is_mapped_in_granules(device: CudaDevice, reserved: tuple[int, int]) -> None:
    address, granule = reserved
    with refused(INVALID_VALUE):
        device.driver.memory_map(0, address + granule, granule // 2)


def test_a_mapping_is_unmapped_as_a_whole(device: CudaDevice, reserved: tuple[int, int]) -> None:
    address, granule = reserved
    with refused(INVALID_VALUE):
        device.driver.memory_unmap(0, address, granule // 2)


# ---------------------------------------------------------------- the real driver's own paths


@pytest.mark.gpu
@pytest.mark.parametrize("version", [13000, 12080, 0])
def test_every_shape_of_the_batch_call_moves_the_same_bytes(version: int) -> None:
    driver = CudaDriver(batch_version=version)
    assert driver._batch_version == version, "this driver lacks that shape"
    device = CudaDevice(0, driver=driver)
    stream = device.stream()
    memory = CudaMemory(device, 2 * MIB, 2 * MIB, 2 * MIB)
    there, back = pages(MIB), pages(MIB)
    there[:] = numbers(MIB)
    offsets = np.arange(0, MIB, 4 * KIB, dtype=np.uint64)
    sizes = np.full(len(offsets), 4 * KIB, np.uint64)
    on_device = np.uint64(memory.address) + offsets
    with registered(device, address_of(there), MIB), registered(device, address_of(back), MIB):
        stream.copy(on_device, np.uint64(address_of(there)) + offsets, sizes)
        stream.copy(np.uint64(address_of(back)) + offsets, on_device, sizes)
        stream.synchronize()
    stream.close()
    memory.close()
    assert np.array_equal(back, there)


@pytest.mark.gpu
@pytest.mark.parametrize("answer", [0, 801], ids=["moves nothing", "is refused"])
def test_a_batch_call_that_does_not_work_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: int
) -> None:
    driver = CudaDriver()
    monkeypatch.setattr(driver, "_submit_batch", lambda *arguments: answer)
    device = CudaDevice(0, driver=driver)
    stream = device.stream()
    memory = CudaMemory(device, 2 * MIB, 2 * MIB, 2 * MIB)
    there, back = numbers(8 * KIB), pages(8 * KIB)
    for _ in range(2):
        copy(stream, memory.address, address_of(there), 8 * KIB)
        copy(stream, address_of(back), memory.address, 8 * KIB)
        stream.synchronize()
    stream.close()
    memory.close()
    assert np.array_equal(back, there)
    assert caplog.text.count("cuMemcpyBatchAsync does not work on device 0") == 1


@pytest.mark.gpu
def test_the_batch_call_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_BATCH_COPY", "0")
    assert load_driver.__wrapped__()._batch_version == 0
    monkeypatch.setenv("HOSTMEM_BATCH_COPY", "1")
    assert load_driver.__wrapped__()._batch_version > 0
