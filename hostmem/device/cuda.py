"""One GPU, through the driver."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hostmem._sys.driver import HOST_NUMA_ID, HOST_POINTERS, Driver, Result, load_driver
from hostmem.device.aliases import Aliases
from hostmem.device.base import Device, Stream
from hostmem.device.events import Event
from hostmem.errors import CuError
from hostmem.machine import machine, node_of_pci_device
from hostmem.turns import NO_TURNS, driver_library, turns_for

_POLL = 0.0005  # seconds

__all__ = ["CudaDevice", "CudaEvent", "CudaStream", "harmless_after_shutdown"]


@contextlib.contextmanager
def harmless_after_shutdown() -> Iterator[None]:
    """Give something back to a driver that, once it has shut down, did that itself."""
    try:
        yield
    except CuError as error:
        if error.code != Result.DEINITIALIZED:
            raise


class CudaDevice(Device):
    """A GPU by its ordinal; no call depends on what is current on the calling thread.

    Parameters
    ----------
    ordinal : int
        As the driver numbers the visible devices.
    driver : optional
        The driver to use; the process's own where omitted.

    Raises
    ------
    CuError
        No driver.
    ValueError
        No such device.
    """

    kind = "cuda"
    stalls = True

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        self.driver: Driver = load_driver() if driver is None else driver
        count = self.driver.device_count()
        if not 0 <= ordinal < count:
            raise ValueError(f"device: {ordinal} is not one of the {count} visible devices")
        self.ordinal: int = ordinal
        self.name = f"cuda:{ordinal} {self.driver.device_name(ordinal)}"
        self.turns = turns_for(driver_library()) if driver is None else NO_TURNS
        self._idle_events: list[int] = []

    @cached_property
    def numa_nodes_found(self) -> dict[str, int | None]:
        """What each source says: ``sysfs`` (the PCI device) and ``driver`` (HOST_NUMA_ID)."""
        try:
            answer = self.driver.attribute(self.ordinal, HOST_NUMA_ID)
        except CuError:
            answer = -1  # the driver is older than the attribute
        return {
            "sysfs": node_of_pci_device(self.driver.pci_address(self.ordinal)),
            "driver": answer if answer >= 0 else None,
        }

    @property
    def numa_node(self) -> int | None:
        found = self.numa_nodes_found
        for node in (found["sysfs"], found["driver"]):
            if node is not None:
                return node
        nodes = [node.number for node in machine().nodes if node.memory_total]
        return nodes[0] if len(nodes) == 1 else None

    @property
    def memory_total(self) -> int:
        return self.driver.memory_info(self.ordinal)[1]

    @cached_property
    def aliases(self) -> Aliases | None:
        """What registered host memory is called by this device; None where it has one name."""
        try:
            one_name = self.driver.attribute(self.ordinal, HOST_POINTERS)
        except CuError:
            one_name = 1  # the driver is older than the attribute
        return None if one_name else Aliases()

    def register(self, address: int, nbytes: int) -> None:
        self.driver.host_register(self.ordinal, address, nbytes)
        if self.aliases is not None:
            try:
                alias = self.driver.host_device_pointer(self.ordinal, address)
            except BaseException:
                self.driver.host_unregister(self.ordinal, address)
                raise
            self.aliases.add(address, nbytes, alias)

    def unregister(self, address: int) -> None:
        with harmless_after_shutdown():
            self.driver.host_unregister(self.ordinal, address)
        if self.aliases is not None:
            self.aliases.remove(address)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    def take_event(self) -> int:
        """Take a driver event from the pool of idle ones, or make one."""
        try:
            return self._idle_events.pop()
        except IndexError:
            return self.driver.event_create(self.ordinal)

    def return_event(self, handle: int) -> None:
        """Give an event whose work has finished back to the pool."""
        self._idle_events.append(handle)


class CudaEvent(Event):
    """A recorded driver event; goes back to the device's pool when finished or dropped."""

    __slots__ = ("__weakref__", "_device", "_handle", "_lock", "_waiting")

    def __init__(self, device: CudaDevice, stream: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waiting = 0  # threads inside synchronize(), which still need the driver's event
        self._handle: int | None = device.take_event()
        device.driver.event_record(device.ordinal, self._handle, stream)

    @property
    def handle(self) -> int | None:
        """The driver's event, or None once it is known to have finished."""
        return self._handle

    def query(self) -> bool:
        with self._lock:
            if self._handle is None:
                return True
            if not self._device.driver.event_query(self._device.ordinal, self._handle):
                return False
            self._finish()
            return True

    def synchronize(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self._poll(time.monotonic() + timeout, timeout)
            return
        with self._lock:
            handle = self._handle
            if handle is None:
                return
            self._waiting += 1
        try:
            self._device.driver.event_synchronize(self._device.ordinal, handle)
        finally:
            with self._lock:
                self._waiting -= 1
        with self._lock:
            self._finish()

    def _poll(self, deadline: float, timeout: float) -> None:
        """Wait with a limit, which the driver's own wait does not have."""
        while not self.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the work had not finished after {timeout} s")
            time.sleep(_POLL)

    @property
    def error(self) -> BaseException | None:
        return None  # the driver reports a failed copy from the wait itself

    def _finish(self) -> None:
        if self._handle is not None and not self._waiting:
            self._device.return_event(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._finish()  # recording an event again does not disturb who waits for the last time


class CudaStream(Stream):
    """A non-blocking stream of ours."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.handle = device.driver.stream_create(device.ordinal)
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._close = weakref.finalize(self, _destroy, device.driver, device.ordinal, self.handle)
        self._close.atexit = False

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        device = self._device
        if device.aliases is not None:
            destinations, sources = device.aliases.of(destinations), device.aliases.of(sources)
        device.driver.copy_batch(device.ordinal, destinations, sources, sizes, self.handle)

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            handle = event.handle
            if handle is not None and not event.query():
                self._device.driver.stream_wait_event(self._device.ordinal, self.handle, handle)
        else:
            event.wait_finished()

    def record(self) -> Event:
        return CudaEvent(self._device, self.handle)

    def close(self) -> None:
        with self._lock:
            if self._close.alive:
                with harmless_after_shutdown():
                    self._device.driver.stream_synchronize(self._device.ordinal, self.handle)
                self._close()


def _destroy(driver: Driver, ordinal: int, stream: int) -> None:
    with harmless_after_shutdown():
        driver.stream_destroy(ordinal, stream)
