"""The CPU as a device: its memory is host memory, its streams are ordered worker threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import linux
from hostmem._sys.driver import raise_cu_error
from hostmem._sys.seam import intercept
from hostmem.device.base import Device, Stream
from hostmem.device.events import Event, HostEvent
from hostmem.machine import machine
from hostmem.ranges import RangeTable

__all__ = ["CpuDevice"]

_INVALID_VALUE, _ALREADY_REGISTERED, _NOT_REGISTERED = 1, 712, 713


class CpuDevice(Device):
    """Runs everything on the CPU, by the rules of the driver.

    Registering page-locks nothing, but what is registered is recorded, and a copy that crosses the
    end of a registration is refused as the driver refuses it: what works here works on a GPU.
    """

    kind = "cpu"
    ordinal = None
    name = "cpu"

    def __init__(self) -> None:
        self.registered = RangeTable()

    @property
    def numa_node(self) -> int | None:
        return None

    @property
    def memory_total(self) -> int:
        return machine().memory_total

    def register(self, address: int, nbytes: int) -> None:
        code = intercept("cuMemHostRegister", address, nbytes)
        text = f"{nbytes} bytes at {address:#x} on the cpu device"
        if code:
            raise_cu_error(code, f"CUresult {code}", "cuMemHostRegister", text)
        try:
            self.registered.add(address, nbytes)
        except ValueError as error:
            raise_cu_error(
                _ALREADY_REGISTERED,
                "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
                "cuMemHostRegister",
                f"{text}: {error}",
            )

    def unregister(self, address: int) -> None:
        code = intercept("cuMemHostUnregister", address)
        text = f"{address:#x} on the cpu device"
        if code:
            raise_cu_error(code, f"CUresult {code}", "cuMemHostUnregister", text)
        try:
            self.registered.remove(address)
        except KeyError:
            raise_cu_error(
                _NOT_REGISTERED,
                "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
                "cuMemHostUnregister",
                text,
            )

    def stream(self) -> CpuStream:
        return CpuStream(self)


class CpuStream(Stream):
    """A thread that works a queue off in order. It starts with the first work.

    An event recorded after failed work carries the error of the first that failed since the event
    before.
    """

    def __init__(self, device: CpuDevice) -> None:
        self._device = device
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None  # the worker's alone
        self._copy = linux.copy

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        if not len(sizes):
            return
        for name, addresses in (("destination", destinations), ("source", sources)):
            at = self._device.registered.first_spanning(addresses, sizes)
            if at is not None:
                raise_cu_error(
                    _INVALID_VALUE,
                    "CUDA_ERROR_INVALID_VALUE",
                    "cuMemcpyBatchAsync",
                    f"copy {at} of {len(sizes)}: the {name}, {int(sizes[at])} bytes at "
                    f"{int(addresses[at]):#x}, crosses the end of a registration",
                )
        arrays = destinations.copy(), sources.copy(), sizes.copy()
        self.call(lambda: self._copy_now(*arrays))

    def _copy_now(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        try:
            self._copy(destinations, sources, sizes)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            self._copy = linux.copy_one_by_one
            self._copy(destinations, sources, sizes)

    def call(self, function: Callable[[], None]) -> None:
        """Submit a function of the host; it runs on the stream's thread, in order."""
        with self._lock:
            if self._closed:
                raise ValueError("the stream is closed")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="hostmem-cpu-stream", daemon=True
                )
                self._thread.start()
            self._jobs.put(function)

    def wait(self, event: Event) -> None:
        if not event.query():
            self.call(event.wait_finished)

    def record(self) -> Event:
        event = HostEvent()
        self.call(lambda: self._settle(event))
        return event

    def _settle(self, event: HostEvent) -> None:
        error, self._error = self._error, None
        event.set(error)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # it belongs to the event recorded next
                if self._error is None:
                    self._error = error
            del job
