"""One GPU, through the driver."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hostmem._sys.driver import (
    HOST_NUMA_ID,
    HOST_POINTERS,
    Driver,
    harmless_after_shutdown,
    load_driver,
)
from hostmem.describing import one_line
from hostmem.device.aliases import Aliases
from hostmem.device.base import Device, Stream
from hostmem.device.copy_choice import CopyChoice
from hostmem.device.copy_kernel import CopyQueue
from hostmem.device.events import Event
from hostmem.device.loans import Loan, Loans
from hostmem.device.pinned import PinnedRanges
from hostmem.errors import CuError
from hostmem.machine import machine, node_of_pci_device
from hostmem.ranges import RangeTable
from hostmem.spans import span
from hostmem.turns import NO_TURNS, driver_library, turns_for
from hostmem.units import parse_size

_POLL = 0.0005  # seconds
_LONGEST_HOLD_UP = 1.0  # seconds
_FIRST_PART = 1024  # copies
_BLOCKS = 32  # with more, the copy kernel is no faster

__all__ = ["CudaDevice", "CudaEvent", "CudaStream"]

_Batch = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
"""Destinations, sources and sizes of copies."""


class CudaDevice(Device):
    """A GPU by its ordinal; no call depends on what is current on the calling thread.

    Parameters
    ----------
    ordinal : int
        As the driver numbers the visible devices.
    driver : optional
        The driver to use; the process's own where omitted.
    copy_kernel : int or str, optional
        Bytes (or a size such as ``"64KiB"``) of the largest copies that go through the copy
        kernel, 0 for none. By default the environment variable ``HOSTMEM_COPY_KERNEL``, and where
        that is not set, the sizes at which it is faster than the copy engines: they are measured
        when the first batch of small copies comes, which takes a few tenths of a second.
    copy_blocks : int, optional
        Blocks of 256 threads that the kernel takes at most; by
        default the environment variable ``HOSTMEM_COPY_BLOCKS``, or 32.

    Raises
    ------
    CuError
        No driver.
    ValueError
        No such device, no such size, no blocks.

    Attributes
    ----------
    registered : RangeTable
        Host memory that is registered through this object.
    memory : RangeTable
        Memory of the GPU that this library has mapped.
    lent_memory, lent_registered : Loans
        Memory of the GPU's and page-locked memory of others, see `borrow`.
    copies : CopyChoice
        What goes through the copy kernel: ``copies.describe()`` says it.
    """

    kind = "cuda"
    stalls = True

    def __init__(
        self,
        ordinal: int,
        driver: Driver | None = None,
        *,
        copy_kernel: int | str | None = None,
        copy_blocks: int | None = None,
    ) -> None:
        largest, blocks = _largest(copy_kernel), _blocks(copy_blocks)
        self.driver: Driver = load_driver() if driver is None else driver
        count = self.driver.device_count()
        if not 0 <= ordinal < count:
            raise ValueError(f"device: {ordinal} is not one of the {count} visible devices")
        self.ordinal: int = ordinal
        self.name = f"cuda:{ordinal} {self.driver.device_name(ordinal)}"
        self.turns = turns_for(driver_library()) if driver is None else NO_TURNS
        self._idle_events: list[int] = []
        self.registered: RangeTable = PinnedRanges()  # which a forked child has none of
        self._may_register = threading.Event()
        self._may_register.set()
        self.memory: RangeTable = PinnedRanges()
        self.lent_memory, self.lent_registered = Loans(), Loans()
        self.aliases = None if self._has_one_name() else Aliases()
        self.copies = CopyChoice(self, largest if self.aliases is None else 0, blocks)

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

    def _has_one_name(self) -> bool:
        """Tell whether registered host memory has the same address here."""
        try:
            return bool(self.driver.attribute(self.ordinal, HOST_POINTERS))
        except CuError:
            return True  # the driver is older than the attribute

    def register(self, address: int, nbytes: int) -> None:
        self._may_register.wait(_LONGEST_HOLD_UP)
        self.driver.host_register(self.ordinal, address, nbytes)
        try:
            if self.aliases is not None:
                alias = self.driver.host_device_pointer(self.ordinal, address)
                self.aliases.add(address, nbytes, alias)
            self.registered.add(address, nbytes)
        except BaseException:
            self.registered.discard(address)
            if self.aliases is not None:
                self.aliases.remove(address)
            self.driver.host_unregister(self.ordinal, address)
            raise

    @contextlib.contextmanager
    def registrations_held_up(self) -> Iterator[None]:
        """Let those who would register wait, while calls are timed which would wait for them.

        For a second at most: who times may itself be interrupted by what registers.
        """
        self._may_register.clear()
        try:
            yield
        finally:
            self._may_register.set()

    def unregister(self, address: int) -> None:
        self.registered.discard(address)
        with harmless_after_shutdown():
            self.driver.host_unregister(self.ordinal, address)
        if self.aliases is not None:
            self.aliases.remove(address)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    def borrow(self, ranges: Iterable[tuple[int, int]]) -> Loan:
        found: dict[str, list[tuple[int, int]]] = {"device": [], "host": [], "managed": []}
        for start, nbytes in ranges:
            at, end = start, start + nbytes
            while at < end:
                pointer = self.driver.pointer(self.ordinal, at)
                if pointer is None:
                    raise ValueError(
                        f"ranges: the driver knows no memory at {at:#x}, which is in "
                        f"[{start:#x}, {end:#x})"
                    )
                stop = min(pointer.end, end)
                near = pointer.kind == "host" or pointer.ordinal == self.ordinal
                if pointer.reachable and near:  # others go through a copy engine
                    found[pointer.kind].append((at, stop - at))
                at = stop
        return Loan(self.lent_memory.add(found["device"]), self.lent_registered.add(found["host"]))

    def event(self, stream: int) -> CudaEvent:
        """Record an event on a stream of the driver's, such as an engine's own.

        Parameters
        ----------
        stream : int
            The driver's handle, as ``torch.cuda.current_stream().cuda_stream`` gives it.
        """
        return CudaEvent(self, stream)

    def wait(self, stream: int, event: Event) -> None:
        """Make work submitted later to a stream of the driver's wait; see `Stream.wait`.

        Parameters
        ----------
        stream : int
            The driver's handle.
        event : Event
            Of a job, for example: the GPU then waits for the copies, and the caller does not.
        """
        if isinstance(event, CudaEvent):
            handle = event.handle
            if handle is not None and not event.query():
                self.driver.stream_wait_event(self.ordinal, stream, handle)
        else:
            event.wait_finished()

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

    @one_line
    def __repr__(self) -> str:
        # As far as it is known: to ask takes a call of the driver.
        state = "done" if self._handle is None else "not known to be done"
        return f"<CudaEvent of {self._device.name}, {state}>"

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._finish()  # recording an event again does not disturb who waits for the last time


class CudaStream(Stream):
    """A non-blocking stream of ours."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.handle = device.driver.stream_create(device.ordinal)
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._queues: list[CopyQueue] = []  # of the copy kernel: none before it is needed, then one
        self._close = weakref.finalize(
            self, _destroy, device, self.handle, self._queues, os.getpid()
        )
        self._close.atexit = False

    @span("copy", "copy")
    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        device = self._device
        if device.aliases is not None:
            destinations, sources = device.aliases.of(destinations), device.aliases.of(sources)
        batch = destinations, sources, sizes
        if device.copies.may_take(sizes):
            batch = self._by_kernel(batch)
        device.driver.copy_batch(device.ordinal, *batch, self.handle)

    def _by_kernel(self, batch: _Batch) -> _Batch:
        """Submit what is for the copy kernel of a batch; give what is for a copy engine."""
        copies = self._device.copies
        rest: list[_Batch] = []
        count = len(batch[0])
        for start, stop in _parts(count):
            part = _of(batch, slice(start, stop))
            chosen = copies.by_kernel(*part)
            if chosen is False:
                rest.append(part)
                continue
            if (queue := self._queue(copies)) is None:
                rest.append(_of(batch, slice(start, count)))
                break
            if chosen is True:
                queue.submit(*part)
            else:
                queue.submit(*_of(part, chosen))
                rest.append(_of(part, ~chosen))
        if len(rest) == 1:
            return rest[0]
        if not rest:
            return _of(batch, slice(0))
        to, source, sizes = (np.concatenate(columns) for columns in zip(*rest, strict=True))
        return to, source, sizes

    def _queue(self, copies: CopyChoice) -> CopyQueue | None:
        """Return what feeds the copy kernel here; None where there is no memory for it."""
        with self._lock:
            if not self._close.alive:
                raise ValueError("the stream is closed")
            if not self._queues:
                queue = copies.queue(self.handle)
                if queue is None:
                    return None
                self._queues.append(queue)
            return self._queues[0]

    def wait(self, event: Event) -> None:
        self._device.wait(self.handle, event)

    def record(self) -> Event:
        return CudaEvent(self._device, self.handle)

    def close(self) -> None:
        with self._lock:
            if self._close.alive:
                with harmless_after_shutdown():
                    self._device.driver.stream_synchronize(self._device.ordinal, self.handle)
                self._close()

    @one_line
    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        return f"<CudaStream {self.handle:#x} of {self._device.name}{state}>"


def _destroy(device: CudaDevice, stream: int, queues: list[CopyQueue], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child's copy of what the parent has
    driver = device.driver
    with harmless_after_shutdown():
        if queues:  # the GPU may still read what they hold
            driver.stream_synchronize(device.ordinal, stream)
        for queue in queues:
            queue.close()
        driver.stream_destroy(device.ordinal, stream)


def _of(batch: _Batch, which: slice | NDArray[np.bool_]) -> _Batch:
    destinations, sources, sizes = batch
    return destinations[which], sources[which], sizes[which]


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """Cut a batch in parts that grow: the first runs while the others are prepared."""
    start, size = 0, _FIRST_PART
    while count - start > 2 * size:
        yield start, start + size
        start, size = start + size, size * 4
    yield start, count


def _largest(given: int | str | None) -> int | None:
    setting = os.environ.get("HOSTMEM_COPY_KERNEL") if given is None else given
    name = "HOSTMEM_COPY_KERNEL" if given is None else "copy_kernel"
    if setting is None:
        return None
    nbytes = 0 if setting == "0" else parse_size(setting, name)
    if nbytes < 0:
        raise ValueError(f"{name}: {setting!r} is negative")
    return nbytes


def _blocks(given: int | None) -> int:
    setting = os.environ.get("HOSTMEM_COPY_BLOCKS", _BLOCKS) if given is None else given
    name = "HOSTMEM_COPY_BLOCKS" if given is None else "copy_blocks"
    try:
        blocks = int(setting)
    except ValueError:
        blocks = 0
    if blocks < 1:
        raise ValueError(f"{name}: {setting!r}; give the number of blocks, 1 or more")
    return blocks
