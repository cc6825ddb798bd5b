"""Memory of a GPU that grows and shrinks at a fixed address."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from hostmem._sys.driver import harmless_after_shutdown
from hostmem.describing import one_line
from hostmem.errors import ClosedError
from hostmem.units import align_up, format_size

if TYPE_CHECKING:
    from hostmem.device.cuda import CudaDevice

__all__ = ["CudaMemory"]


class CudaMemory:
    """Device memory whose address range is reserved once and backed as far as its size.

    Parameters
    ----------
    device : CudaDevice
        Where.
    capacity, size : int
        Bytes; both are rounded up to what the driver maps in (2 MiB or more).
    unit : int
        Bytes mapped by one physical allocation: the grain of giving memory back.

    Raises
    ------
    CuOOMError
        The device has not that much memory free; nothing was taken.

    Notes
    -----
    `resize` and `close` may be called from any thread; they take turns.
    """

    def __init__(self, device: CudaDevice, capacity: int, size: int, unit: int) -> None:
        driver, ordinal = device.driver, device.ordinal
        granularity = driver.memory_granularity(ordinal)
        self._device = device
        self._unit = align_up(unit, granularity)
        self.capacity = align_up(capacity, self._unit)
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._mapped = 0
        self.address = driver.memory_reserve(ordinal, self.capacity)
        self.size = 0
        self._closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.resize(size)
            undo.pop_all()

    def resize(self, size: int) -> None:
        """Back the range up to ``size`` bytes, or give back whole units past it.

        Growing takes all or nothing. Work in flight on what is given back must be over.

        Raises
        ------
        CuOOMError
            The device has not that much memory free; nothing changed.
        ValueError
            Negative or above the capacity.
        ClosedError
            Closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the device memory was closed")
            if not 0 <= size <= self.capacity:
                raise ValueError(f"size: {size} is not within 0..{self.capacity}, the capacity")
            self._back(size)

    def _back(self, size: int) -> None:
        driver, ordinal = self._device.driver, self._device.ordinal
        target = align_up(size, self._unit)
        with contextlib.ExitStack() as undo:
            for offset in range(self._mapped, target, self._unit):
                address = self.address + offset
                driver.memory_map(ordinal, address, self._unit)
                undo.callback(self._unmap, address)
                self._device.memory.add(address, self._unit)
            undo.pop_all()
        self._mapped = max(self._mapped, target)
        while self._mapped > target:
            last = self._mapped - self._unit
            self._unmap(self.address + last)
            self._mapped = last
        self.size = size

    def _unmap(self, address: int) -> None:
        self._device.memory.discard(address)
        self._device.driver.memory_unmap(self._device.ordinal, address, self._unit)

    def close(self) -> None:
        """Give all memory and the address range back. Idempotent; work in flight must be over."""
        with self._lock:
            if self._closed:
                return
            with harmless_after_shutdown():
                self._back(0)
                driver = self._device.driver
                driver.memory_release(self._device.ordinal, self.address, self.capacity)
            self._closed = True

    @one_line
    def __repr__(self) -> str:
        name = self._device.name
        if self._closed:
            return f"<CudaMemory of {format_size(self.capacity)} on {name}, closed>"
        return (
            f"<CudaMemory {format_size(self.size)} of {format_size(self.capacity)} at "
            f"{self.address:#x} on {name}>"
        )
