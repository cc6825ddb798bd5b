"""A GPU as a device, over the fake driver: its node, its events, its end."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CudaDevice, Node, machine
from hostmem.device import DONE, CudaMemory, HostEvent, cuda
from hostmem.device.cuda import CudaEvent, CudaStream
from hostmem.errors import CuError, CuOOMError
from hostmem.testing import FakeDriver, FaultPlan
from tests.threads import Spawn, Until

MIB = 1 << 20
PAGE = mmap.PAGESIZE
Twice = Callable[[CudaStream | CudaMemory, str], FaultPlan]


class CountingLock:
    """A lock that counts who asked for it, before they wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.asked = 0

    def __enter__(self) -> None:
        self.asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.fixture
def close_twice_at_once(monkeypatch: pytest.MonkeyPatch, spawn: Spawn, until: Until) -> Twice:
    """Close something on two threads, the second one while the first is in a driver's call."""

    def close(what: CudaStream | CudaMemory, call: str) -> FaultPlan:
        lock = CountingLock()
        monkeypatch.setattr(what, "_lock", lock)
        with FaultPlan() as plan:
            held = plan.hold(call)
            first = spawn(what.close)
            held.wait_reached()
            second = spawn(what.close)
            until(lambda: lock.asked == 2 or second.done())
            held.release()
            assert first.result() is second.result() is None
        return plan

    return close


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def pages(nbytes: int) -> tuple[NDArray[np.uint8], int]:
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    return array, int(array.__array_interface__["data"][0])


# ------------------------------------------------------------------------------------ a GPU


@pytest.mark.parametrize("ordinal", [-1, 2, 99])
def test_a_device_is_one_of_those_there_are(ordinal: int) -> None:
    with pytest.raises(ValueError, match=rf"device: {ordinal} is not one of the 2 visible"):
        CudaDevice(ordinal, driver=FakeDriver(2))


def test_a_device_says_what_it_is() -> None:
    device = CudaDevice(1, driver=FakeDriver(2, name="H200", memory=8 * MIB))
    assert (device.kind, device.ordinal, device.memory_total) == ("cuda", 1, 8 * MIB)
    assert repr(device) == "<cuda:1 H200>"


# ----------------------------------------------------------------------------- its NUMA node


def nodes(monkeypatch: pytest.MonkeyPatch, sysfs: int | None, *with_memory: int) -> None:
    """Let sysfs say that the GPU is on a node, and nodes 0 and 1 be, with memory or without."""
    monkeypatch.setattr(cuda, "node_of_pci_device", lambda address: sysfs)
    there = tuple(Node(n, (), 1 << 30 if n in with_memory else 0) for n in (0, 1))
    here = dataclasses.replace(machine(), nodes=there)
    monkeypatch.setattr(cuda, "machine", lambda: here)


def test_the_node_comes_from_sysfs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, 1, 0, 1)
    device = CudaDevice(0, driver=FakeDriver(numa_node=0))
    assert device.numa_node == 1
    assert device.numa_nodes_found == {"sysfs": 1, "driver": 0}


def test_node_0_by_sysfs_is_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, 0, 0, 1)
    assert CudaDevice(0, driver=FakeDriver(numa_node=1)).numa_node == 0


def test_the_node_comes_from_the_driver_where_sysfs_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes(monkeypatch, None, 0, 1)
    assert CudaDevice(0, driver=FakeDriver(numa_node=1)).numa_node == 1


@pytest.mark.parametrize("answer", [-1, None], ids=["unknown", "older than the attribute"])
def test_an_unknown_node_is_none_and_not_0(
    monkeypatch: pytest.MonkeyPatch, answer: int | None
) -> None:
    nodes(monkeypatch, None, 0, 1)
    device = CudaDevice(0, driver=FakeDriver(numa_node=answer))
    assert device.numa_node is None
    assert device.numa_nodes_found == {"sysfs": None, "driver": None}


def test_an_unknown_node_is_the_only_one_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, None, 1)
    assert CudaDevice(0, driver=FakeDriver()).numa_node == 1


def test_sysfs_is_asked_for_the_devices_own_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    by_address = {"0000:00:00.0": 0, "0000:01:00.0": 1}
    monkeypatch.setattr(cuda, "node_of_pci_device", by_address.get)
    driver = FakeDriver(2, pci_address="0000:{:02x}:00.0")
    assert [CudaDevice(n, driver=driver).numa_node for n in range(2)] == [0, 1]


# ---------------------------------------------------------------------------------- its end


def test_unregistering_after_the_driver_shut_down_is_harmless() -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver=driver)
    _, address = pages(PAGE)
    device.register(address, PAGE)
    driver.deinitialize()
    device.unregister(address)


def test_unregistering_with_another_answer_raises() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    with pytest.raises(CuError, match="NOT_REGISTERED"):
        device.unregister(0x10000)


def test_a_stream_closes_after_the_driver_shut_down() -> None:
    driver = FakeDriver()
    stream = CudaDevice(0, driver=driver).stream()
    driver.deinitialize()
    stream.close()


def test_device_memory_closes_after_the_driver_shut_down() -> None:
    driver = FakeDriver()
    memory = CudaMemory(CudaDevice(0, driver=driver), 4 * MIB, 2 * MIB, 2 * MIB)
    driver.deinitialize()
    memory.close()


def test_a_dropped_stream_is_destroyed() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    with FaultPlan() as plan:
        stream = device.stream()
        del stream
        gc.collect()
        assert len(plan.calls("cuStreamDestroy")) == 1


def test_a_closed_stream_is_destroyed_once() -> None:
    stream = CudaDevice(0, driver=FakeDriver()).stream()
    with FaultPlan() as plan:
        stream.close()
        assert len(plan.calls("cuStreamDestroy")) == 1
        stream.close()
        del stream
        gc.collect()
        assert len(plan.calls("cuStreamDestroy")) == 1


def test_a_stream_closes_from_two_threads_at_once(close_twice_at_once: Twice) -> None:
    plan = close_twice_at_once(CudaDevice(0, driver=FakeDriver()).stream(), "cuStreamSynchronize")
    assert len(plan.calls("cuStreamDestroy")) == 1


# ------------------------------------------------------------------------------- its events


def test_asking_about_an_event_does_not_wait_for_who_waits() -> None:
    stream = CudaDevice(0, driver=FakeDriver()).stream()
    _, address = pages(2 * PAGE)
    with FaultPlan() as plan:
        copying = plan.hold("process_vm_readv")
        waiting = plan.hold("cuEventSynchronize")
        stream.copy(u64(address), u64(address + PAGE), u64(PAGE))
        event = stream.record()
        waiter = threading.Thread(target=event.synchronize)
        waiter.start()
        waiting.wait_reached()
        answers: list[bool] = []
        asker = threading.Thread(target=lambda: answers.append(event.query()))
        asker.start()
        asker.join(10)
        assert answers == [False]
        copying.release()
        waiting.release()
        waiter.join()
    assert event.query()
    stream.close()


def test_an_event_that_is_waited_for_is_not_used_again() -> None:
    # One thread waits and another one finds the event finished: it goes back when both are done.
    device = CudaDevice(0, driver=FakeDriver())
    stream = device.stream()
    event = stream.record()
    assert isinstance(event, CudaEvent)
    handle = event.handle
    with FaultPlan() as plan:
        waiting = plan.hold("cuEventSynchronize")
        waiter = threading.Thread(target=event.synchronize)
        waiter.start()
        waiting.wait_reached()
        stream.synchronize()
        assert event.query()
        other = stream.record()
        assert isinstance(other, CudaEvent)
        assert other.handle != handle
        waiting.release()
        waiter.join()
    assert event.handle is None
    stream.close()


def test_a_wait_for_an_event_ends_with_its_timeout_and_the_event_stays() -> None:
    stream = CudaDevice(0, driver=FakeDriver()).stream()
    source, destination = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    to, start = (
        np.array([array.__array_interface__["data"][0]], np.uint64)
        for array in (destination, source)
    )
    with FaultPlan() as plan:
        copying = plan.hold("process_vm_readv")
        stream.copy(to, start, np.array([8], np.uint64))
        event = stream.record()
        with pytest.raises(TimeoutError):
            event.synchronize(timeout=0.002)
        assert not event.query()
        copying.release()
        event.synchronize(timeout=10.0)
    assert event.query()
    assert (destination == 1).all()
    stream.close()


def test_an_event_that_could_not_be_recorded_is_used_again() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    stream = device.stream()
    with FaultPlan() as plan:
        plan.fail("cuEventRecord", 999)
        with pytest.raises(CuError):
            stream.record()
        stream.record().synchronize()
        assert len(plan.calls("cuEventCreate")) == 1
    stream.close()


def test_a_stream_blocks_for_an_event_of_the_host() -> None:
    stream = CudaDevice(0, driver=FakeDriver()).stream()
    event = HostEvent()
    waiter = threading.Thread(target=stream.wait, args=(event,))
    waiter.start()
    event.set()
    waiter.join(10)
    assert not waiter.is_alive()
    stream.wait(DONE)
    stream.close()


# ------------------------------------------------------------------------------- its memory


def device_with(nbytes: int) -> CudaDevice:
    return CudaDevice(0, driver=FakeDriver(memory=nbytes))


def test_growth_that_does_not_fit_takes_nothing() -> None:
    device = device_with(8 * MIB)
    memory = CudaMemory(device, 16 * MIB, 4 * MIB, 2 * MIB)
    with pytest.raises(CuOOMError):
        memory.resize(10 * MIB)
    assert memory.size == 4 * MIB
    assert device.driver.memory_info(0)[0] == 4 * MIB
    memory.resize(8 * MIB)
    memory.close()
    assert device.driver.memory_info(0)[0] == 8 * MIB


def test_construction_that_does_not_fit_takes_nothing() -> None:
    device = device_with(8 * MIB)
    with FaultPlan() as plan:
        with pytest.raises(CuOOMError):
            CudaMemory(device, 16 * MIB, 10 * MIB, 2 * MIB)
        assert len(plan.calls("cuMemAddressFree")) == 1
    assert device.driver.memory_info(0)[0] == 8 * MIB


def test_capacity_and_units_are_whole_granules() -> None:
    memory = CudaMemory(device_with(16 * MIB), 5 * MIB, 3 * MIB, 3 * MIB)
    # A unit is two granules of 2 MiB; two units hold 5 MiB, one holds 3.
    assert memory.capacity == 8 * MIB
    assert memory.size == 3 * MIB
    memory.close()


@pytest.mark.parametrize("size", [-1, 4 * MIB + 1])
def test_a_size_outside_the_capacity_is_refused(size: int) -> None:
    memory = CudaMemory(device_with(16 * MIB), 4 * MIB, 0, 2 * MIB)
    with pytest.raises(ValueError, match=f"size: {size}"):
        memory.resize(size)
    memory.close()


def test_a_shrink_that_fails_half_way_goes_on_the_next_time() -> None:
    device = device_with(16 * MIB)
    memory = CudaMemory(device, 8 * MIB, 8 * MIB, 2 * MIB)
    with FaultPlan() as plan:
        plan.fail("cuMemUnmap", 999, at=2)
        with pytest.raises(CuError):
            memory.resize(2 * MIB)
    assert device.driver.memory_info(0)[0] == 10 * MIB
    memory.resize(2 * MIB)
    assert device.driver.memory_info(0)[0] == 14 * MIB
    memory.close()


def test_device_memory_closes_from_two_threads_at_once(close_twice_at_once: Twice) -> None:
    device = device_with(16 * MIB)
    plan = close_twice_at_once(CudaMemory(device, 8 * MIB, 8 * MIB, 2 * MIB), "cuMemUnmap")
    assert len(plan.calls("cuMemUnmap")) == 4
    assert len(plan.calls("cuMemAddressFree")) == 1
    assert device.driver.memory_info(0)[0] == 16 * MIB


def test_device_memory_that_is_closed_while_it_grows_gives_all_back(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn, until: Until
) -> None:
    device = device_with(16 * MIB)
    memory = CudaMemory(device, 8 * MIB, 2 * MIB, 2 * MIB)
    lock = CountingLock()
    monkeypatch.setattr(memory, "_lock", lock)
    with FaultPlan() as plan:
        mapping = plan.hold("cuMemMap", at=2)
        growing = spawn(memory.resize, 8 * MIB)
        mapping.wait_reached()
        closing = spawn(memory.close)
        until(lambda: lock.asked == 2 or closing.done())
        mapping.release()
        assert growing.result() is closing.result() is None
    assert device.driver.memory_info(0)[0] == 16 * MIB
    with pytest.raises(ClosedError):
        memory.resize(2 * MIB)


def test_closed_memory_does_not_grow() -> None:
    memory = CudaMemory(device_with(16 * MIB), 4 * MIB, 0, 2 * MIB)
    memory.close()
    with pytest.raises(ClosedError):
        memory.resize(2 * MIB)
