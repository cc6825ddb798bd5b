"""The CPU as a device: its memory is host memory, its streams are ordered worker threads."""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import linux
from hostmem._sys.driver import Result, refuse, stand_in
from hostmem.describing import one_line
from hostmem.device.base import Device, Stream
from hostmem.device.copy_threads import copy_threads
from hostmem.device.events import Event, HostEvent
from hostmem.device.pinned import PinnedRanges
from hostmem.machine import machine
from hostmem.spans import span

__all__ = ["CpuDevice", "CpuStream"]


class CpuDevice(Device):
    """Runs everything on the CPU, by the rules of the driver.

    Registering page-locks nothing, but what is registered is recorded, and a copy that crosses the
    end of a registration is refused as the driver refuses it: what works here works on a GPU.
    """

    kind = "cpu"
    stalls = False
    ordinal = None
    name = "cpu"

    def __init__(self) -> None:
        self.registered = PinnedRanges()

    @property
    def numa_node(self) -> int | None:
        return None

    @property
    def memory_total(self) -> int:
        return machine().memory_total

    def register(self, address: int, nbytes: int) -> None:
        detail = f"{nbytes} bytes at {address:#x} on the cpu device"
        stand_in("cuMemHostRegister", address, nbytes, detail=detail)
        self.registered.pin(address, nbytes, detail)

    def unregister(self, address: int) -> None:
        detail = f"{address:#x} on the cpu device"
        stand_in("cuMemHostUnregister", address, detail=detail)
        self.registered.unpin(address, detail)

    def stream(self) -> CpuStream:
        return CpuStream(self.registered)


class CpuStream(Stream):
    """A thread that works a queue off in order. It starts with the first work.

    Other threads of the process help it with large batches; the next work waits for all of them.
    An event recorded after failed work carries the error of the first that failed since the event
    before. A stream that is dropped ends after its work.

    Parameters
    ----------
    registered : PinnedRanges
        Registrations whose ends no copy may cross.
    """

    def __init__(self, registered: PinnedRanges) -> None:
        self._registered = registered
        self._worker = _Worker()
        self._dropped = weakref.finalize(self, self._worker.end)
        self._dropped.atexit = False

    @span("copy", "copy")
    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        if not len(sizes):
            return
        stand_in("cuMemcpyBatchAsync", len(sizes))
        refused = self._registered.first_refused(destinations, sources, sizes)
        # Like the driver, it may have submitted what comes before the copy that it refuses.
        n = len(sizes) if refused is None else refused[0]
        worker, arrays = (
            self._worker,
            (destinations[:n].copy(), sources[:n].copy(), sizes[:n].copy()),
        )
        if n:
            worker.submit(lambda: worker.copy(*arrays))
        if refused is not None:
            refuse(Result.INVALID_VALUE, "cuMemcpyBatchAsync", refused[1])

    def call(self, function: Callable[[], None]) -> None:
        """Submit a function of the host; it runs on the stream's thread, in order."""
        self._worker.submit(function)

    def wait(self, event: Event) -> None:
        if not event.query():
            self.call(event.wait_finished)

    def record(self) -> Event:
        worker, event = self._worker, HostEvent()
        worker.submit(lambda: worker.settle(event))
        return event

    def close(self) -> None:
        self._dropped.detach()
        self._worker.end()
        self._worker.join()

    @one_line
    def __repr__(self) -> str:
        worker = self._worker
        return f"<CpuStream, {'closed' if worker.ended else f'{worker.queued} jobs queued'}>"


class _Worker:
    """The thread of a stream, which refers to nothing the user has."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = False
        # The thread's alone:
        self._error: BaseException | None = None
        self._refused = False  # whether the kernel copies no lists

    @property
    def ended(self) -> bool:
        """Whether it takes no more work."""
        return self._ended

    @property
    def queued(self) -> int:
        """Jobs that it has not begun, about."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._ended:
                raise ValueError("the stream is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hostmem-cpu-stream", daemon=True)
                thread.start()
                self._thread = thread  # one that did not start is tried again
            self._jobs.put(job)

    def end(self) -> None:
        """Let the thread end after the jobs it has."""
        with self._lock:
            self._ended = True
            self._jobs.put(None)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        try:
            if not self._refused:
                copy_threads().copy(linux.copy, destinations, sources, sizes)
                return
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            self._refused = True
        linux.copy_one_by_one(destinations, sources, sizes)

    def settle(self, event: HostEvent) -> None:
        """Set an event, with the first error since the one before."""
        error, self._error = self._error, None
        event.set(error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # it belongs to the event recorded next
                if self._error is None:
                    self._error = error
            del job
