"""The CPU in a GPU's place: the driver's rules, ordered streams, and who hears of an error."""

from __future__ import annotations

import errno
import gc
import mmap
import threading
import weakref

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, machine
from hostmem.device import HostEvent
from hostmem.errors import CuError, CuOOMError
from hostmem.testing import FaultPlan

PAGE = mmap.PAGESIZE
Bytes = NDArray[np.uint8]


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def numbers(nbytes: int) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)


# ---------------------------------------------------------------------------- registrations


def test_it_is_next_to_no_node_and_has_the_machines_memory() -> None:
    device = CpuDevice()
    assert device.numa_node is None
    assert device.memory_total == machine().memory_total
    assert repr(device) == "<cpu>"


def test_it_remembers_what_is_registered() -> None:
    device = CpuDevice()
    device.register(4 * PAGE, PAGE)
    device.register(PAGE, 2 * PAGE)
    assert list(device.registered) == [(PAGE, 2 * PAGE), (4 * PAGE, PAGE)]
    device.unregister(PAGE)
    assert list(device.registered) == [(4 * PAGE, PAGE)]


@pytest.mark.parametrize(("start", "nbytes"), [(100, 50), (149, 1), (50, 51), (0, 400)])
def test_no_byte_is_registered_twice(start: int, nbytes: int) -> None:
    device = CpuDevice()
    device.register(100, 50)
    with pytest.raises(CuError, match=r"HOST_MEMORY_ALREADY_REGISTERED.*overlaps \[0x64, 0x96\)"):
        device.register(start, nbytes)


def test_neighbours_on_one_page_are_registered() -> None:
    device = CpuDevice()
    device.register(100, 50)
    device.register(150, 50)
    device.register(50, 50)
    assert len(device.registered) == 3


def test_no_bytes_are_not_registered() -> None:
    with pytest.raises(CuError, match="INVALID_VALUE") as caught:
        CpuDevice().register(PAGE, 0)
    assert (caught.value.code, caught.value.call) == (1, "cuMemHostRegister")


@pytest.mark.parametrize(
    ("address", "answer", "code"),
    [
        (0, "HOST_MEMORY_NOT_REGISTERED", 713),
        (150, "HOST_MEMORY_NOT_REGISTERED", 713),
        (101, "INVALID_VALUE", 1),
    ],
    ids=["before it", "after it", "inside it"],
)
def test_unregistering_needs_a_registration_that_began_there(
    address: int, answer: str, code: int
) -> None:
    device = CpuDevice()
    device.register(100, 50)
    with pytest.raises(CuError, match=f"{answer}.*{address:#x}") as caught:
        device.unregister(address)
    assert caught.value.code == code
    assert list(device.registered) == [(100, 50)]


def test_a_plan_refuses_registering_with_the_drivers_answer() -> None:
    device = CpuDevice()
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 2)
        with pytest.raises(CuOOMError, match=r"CUDA_ERROR_OUT_OF_MEMORY \(2\); 5 bytes at 0x64"):
            device.register(100, 5)
    assert list(device.registered) == []


def test_a_plan_refuses_unregistering() -> None:
    device = CpuDevice()
    device.register(100, 5)
    with FaultPlan() as plan:
        plan.fail("cuMemHostUnregister", 999)
        with pytest.raises(CuError, match=r"\(999\)"):
            device.unregister(100)
    assert list(device.registered) == [(100, 5)]


# ------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(8, 8), (8, 16), (12, 9)], ids=["over two", "out of two", "out of one"]
)
def test_a_copy_across_the_end_of_a_registration_is_refused(
    side: str, offset: int, nbytes: int
) -> None:
    device = CpuDevice()
    memory, other = numbers(64), numbers(64)
    device.register(address_of(memory) + 4, 8)
    device.register(address_of(memory) + 12, 8)
    ends = u64(address_of(memory) + offset), u64(address_of(other))
    stream = device.stream()
    with pytest.raises(CuError, match=f"copy 0 of 1: the {side}, {nbytes} bytes") as caught:
        stream.copy(*(ends[::-1] if side == "source" else ends), u64(nbytes))
    assert (caught.value.code, caught.value.symbol) == (1, "CUDA_ERROR_INVALID_VALUE")
    stream.close()


def test_a_copy_up_to_the_end_of_a_registration_is_made() -> None:
    device = CpuDevice()
    source, result = numbers(16), np.zeros(16, np.uint8)
    device.register(address_of(source), 8)
    device.register(address_of(source) + 8, 8)
    stream = device.stream()
    start, there = address_of(source), address_of(result)
    stream.copy(u64(there, there + 8), u64(start, start + 8), u64(8, 8))
    stream.close()
    assert np.array_equal(result, source)


def test_a_batch_is_submitted_up_to_the_copy_that_is_refused() -> None:
    device = CpuDevice()
    source, result = numbers(16), np.zeros(16, np.uint8)
    device.register(address_of(source) + 8, 4)
    stream = device.stream()
    start, there = address_of(source), address_of(result)
    with pytest.raises(CuError, match="copy 1 of 2"):
        stream.copy(u64(there, there + 8), u64(start, start + 8), u64(8, 8))
    stream.close()
    assert np.array_equal(result[:8], source[:8])
    assert not result[8:].any()


def scattered(count: int) -> tuple[Bytes, Bytes, NDArray[np.uint64]]:
    """Return source and result of ``count`` ranges of 3 bytes at a stride of 4, and offsets."""
    return numbers(4 * count), np.zeros(4 * count, np.uint8), np.arange(count, dtype=np.uint64) * 4


@pytest.mark.parametrize("count", [1, 1024, 1025, 5000])
@pytest.mark.parametrize("refusal", [None, errno.EPERM, errno.ENOSYS])
def test_every_range_arrives_and_nothing_beside_it(count: int, refusal: int | None) -> None:
    # 1,024 ranges go in one system call; where that is refused they are copied one by one.
    source, result, offsets = scattered(count)
    with FaultPlan() as plan:
        if refusal is not None:
            plan.fail("process_vm_readv", refusal, times=None)
        stream = CpuDevice().stream()
        stream.copy(
            np.uint64(address_of(result)) + offsets[::-1],
            np.uint64(address_of(source)) + offsets[::-1],
            np.full(count, 3, np.uint64),
        )
        stream.synchronize()
        stream.close()
    expected = source.reshape(count, 4).copy()
    expected[:, 3] = 0
    assert np.array_equal(result.reshape(count, 4), expected)


def test_a_refused_system_call_is_not_tried_again() -> None:
    source, result = numbers(8), np.zeros(8, np.uint8)
    with FaultPlan() as plan:
        plan.fail("process_vm_readv", errno.EPERM)
        stream = CpuDevice().stream()
        for _ in range(3):
            stream.copy(u64(address_of(result)), u64(address_of(source)), u64(8))
        stream.close()
        assert len(plan.calls("process_vm_readv")) == 1


def test_an_empty_batch_starts_nothing() -> None:
    before = threading.active_count()
    stream = CpuDevice().stream()
    stream.copy(u64(), u64(), u64())
    assert threading.active_count() == before
    stream.close()


def test_a_plan_refuses_a_batch() -> None:
    source, result = numbers(8), np.zeros(8, np.uint8)
    stream = CpuDevice().stream()
    with FaultPlan() as plan:
        plan.fail("cuMemcpyBatchAsync", 999)
        with pytest.raises(CuError, match=r"cuMemcpyBatchAsync.*\(999\)"):
            stream.copy(u64(address_of(result)), u64(address_of(source)), u64(8))
        assert plan.calls("cuMemcpyBatchAsync") == [(1,)]
    stream.close()
    assert not result.any()


def test_the_descriptors_may_be_reused_at_once() -> None:
    source, result = numbers(8), np.zeros(8, np.uint8)
    stream = CpuDevice().stream()
    arrays = u64(address_of(result)), u64(address_of(source)), u64(8)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        stream.copy(*arrays)
        for array in arrays:
            array[:] = 0
        held.release()
        stream.close()
    assert np.array_equal(result, source)


# --------------------------------------------------------------------------- streams, events


def test_a_stream_works_in_the_order_of_submission() -> None:
    stream = CpuDevice().stream()
    seen: list[int] = []
    for number in range(100):
        stream.call(lambda number=number: seen.append(number))  # type: ignore[misc]
    stream.synchronize()
    assert seen == list(range(100))
    stream.close()


def test_submitting_does_not_wait_for_the_work() -> None:
    stream, gate = CpuDevice().stream(), threading.Event()
    stream.call(lambda: void(gate.wait(30)))
    event = stream.record()
    assert not event.query()
    gate.set()
    event.synchronize(30)
    assert event.query()
    stream.close()


def void(_: object) -> None:
    pass


def test_waiting_for_an_event_gives_up_after_its_timeout() -> None:
    stream, gate = CpuDevice().stream(), threading.Event()
    stream.call(lambda: void(gate.wait(30)))
    with pytest.raises(TimeoutError, match=r"after 0\.0 s"):
        stream.record().synchronize(0.0)
    gate.set()
    stream.close()


def test_a_stream_waits_for_the_event_of_another() -> None:
    device, gate, seen = CpuDevice(), threading.Event(), list[str]()
    first, second = device.stream(), device.stream()
    first.call(lambda: void(gate.wait(30)))
    first.call(lambda: seen.append("first"))
    second.wait(first.record())
    second.call(lambda: seen.append("second"))
    gate.set()
    second.synchronize()
    assert seen == ["first", "second"]
    first.close()
    second.close()


def test_a_stream_does_not_wait_for_work_after_the_event() -> None:
    device, gate = CpuDevice(), threading.Event()
    first, second = device.stream(), device.stream()
    event = first.record()
    first.call(lambda: void(gate.wait(30)))
    second.wait(event)
    second.record().synchronize(30)
    gate.set()
    first.close()
    second.close()


def fail(message: str) -> None:
    raise RuntimeError(message)


def test_an_error_is_carried_by_the_event_recorded_next() -> None:
    stream = CpuDevice().stream()
    before = stream.record()
    stream.call(lambda: fail("one"))
    after, later = stream.record(), stream.record()
    with pytest.raises(RuntimeError, match="one"):
        after.synchronize()
    assert after.query()
    assert str(after.error) == "one"
    for other in (before, later):
        other.synchronize()
        assert other.error is None
    stream.close()


def test_the_first_of_several_errors_is_carried() -> None:
    stream = CpuDevice().stream()
    stream.call(lambda: fail("one"))
    stream.call(lambda: fail("two"))
    with pytest.raises(RuntimeError, match="one"):
        stream.synchronize()
    stream.close()


def test_work_after_an_error_is_done() -> None:
    stream, seen = CpuDevice().stream(), list[int]()
    stream.call(lambda: fail("one"))
    stream.call(lambda: seen.append(1))
    stream.close()
    assert seen == [1]


def test_a_copy_from_nowhere_is_an_error_and_not_a_signal() -> None:
    result = np.zeros(PAGE, np.uint8)
    stream = CpuDevice().stream()
    stream.copy(u64(address_of(result)), u64(PAGE), u64(PAGE))  # page 1: never mapped
    with pytest.raises(OSError, match="process_vm_readv") as caught:
        stream.synchronize()
    assert caught.value.errno == errno.EFAULT
    stream.close()


def test_the_failure_of_an_event_is_not_that_of_who_waits_for_it() -> None:
    device = CpuDevice()
    first, second = device.stream(), device.stream()
    gate = threading.Event()
    first.call(lambda: void(gate.wait(30)))
    first.call(lambda: fail("one"))
    second.wait(first.record())
    gate.set()
    second.synchronize()
    first.close()
    second.close()


def test_waiting_until_an_event_has_finished_leaves_its_error_alone() -> None:
    event = HostEvent()
    event.set(RuntimeError("one"))
    event.wait_finished()


def test_a_closed_stream_has_finished_its_work_and_its_thread() -> None:
    before, seen = threading.active_count(), list[int]()
    stream = CpuDevice().stream()
    stream.call(lambda: seen.append(1))
    stream.close()
    stream.close()
    assert seen == [1]
    assert threading.active_count() == before


def test_a_closed_stream_takes_no_work() -> None:
    stream = CpuDevice().stream()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.record()


def test_a_dropped_stream_finishes_its_work_and_ends() -> None:
    stream, gate = CpuDevice().stream(), threading.Event()
    workers: list[threading.Thread] = []
    stream.call(lambda: workers.append(threading.current_thread()))
    stream.call(lambda: void(gate.wait(30)))
    event = stream.record()
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    gate.set()
    event.synchronize(30)
    workers[0].join(30)
    assert not workers[0].is_alive()


def test_each_wait_for_failed_work_raises_an_error_of_its_own() -> None:
    event = HostEvent()
    event.set(OSError(5, "broken"))
    seen = []
    for _ in range(2):
        with pytest.raises(OSError, match="broken") as caught:
            event.synchronize()
        seen.append(caught.value)
    assert seen[0] is not seen[1]
    assert seen[0].errno == seen[1].errno == 5
    assert seen[0].__cause__ is seen[1].__cause__ is event.error
    assert event.error is not None
    assert event.error.__traceback__ is None  # no waiter's frames stay with it
