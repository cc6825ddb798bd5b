"""A driver without a GPU: it keeps the real one's rules, and its copies move real bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import copy_pages, linux
from hostmem._sys.driver import (
    HOST_NUMA_ID,
    HOST_PAGE_TABLES,
    HOST_POINTERS,
    HOST_REGISTER,
    MULTIPROCESSORS,
    PAGEABLE_ACCESS,
    DriverAttribute,
    Pointer,
    Result,
    refuse,
    stand_in,
)
from hostmem.device.cpu import CpuStream
from hostmem.device.events import DONE, Event
from hostmem.device.pinned import PinnedRanges
from hostmem.errors import HostOOMError
from hostmem.ranges import RangeTable

__all__ = ["FakeDriver"]

_GRANULARITY = 2 << 20
_ALIAS_SHIFT = 1 << 46  # where the device has host memory, if it does not have it where it is
_ATTRIBUTES = {
    PAGEABLE_ACCESS: 0,
    HOST_PAGE_TABLES: 0,
    HOST_POINTERS: 1,
    HOST_REGISTER: 1,
    MULTIPROCESSORS: 132,
}


class FakeDriver:
    """A `hostmem._sys.driver.Driver` in plain Python, for ``CudaDevice(0, driver=FakeDriver())``.

    It answers as the real one was seen to answer. Device memory is host memory, streams are threads
    that work in order, and copies are asynchronous. Every call goes past the `FaultPlan` under the
    name that it has with the real driver, for example ``cuMemHostRegister``.

    Parameters
    ----------
    device_count : int
        Visible devices, all alike.
    name, pci_address : str
        Of each device; ``{}`` stands for its ordinal.
    numa_node : int, optional
        What the attribute says: -1 for unknown; None for a driver without the attribute.
    attributes : mapping
        Further answers, or other ones than a discrete GPU's.
    memory : int
        Bytes of each device. Registering takes 2 MiB a GiB of device 0.
    ceiling, refusal : int
        A registration of ``ceiling`` bytes or more is answered with the ``CUresult`` ``refusal``.
        The real driver's tables end at 512 GiB; Linux 6.11 to 6.13 say INVALID_VALUE at 2 GiB; a
        ceiling of 0 refuses every one.
    kernels : bool
        Whether it plays the copy kernel, which it knows by its name; otherwise programs are
        answered with NOT_SUPPORTED, and all copies go through the copy engines.

    Attributes
    ----------
    registered : PinnedRanges
        Registered host memory.
    """

    def __init__(
        self,
        device_count: int = 1,
        *,
        name: str = "Fake GPU {}",
        pci_address: str = "ffff:{:02x}:00.0",
        numa_node: int | None = -1,
        attributes: Mapping[DriverAttribute, int] | None = None,
        memory: int = 16 << 30,
        ceiling: int = 512 << 30,
        refusal: int = Result.OUT_OF_MEMORY,
        kernels: bool = False,
    ) -> None:
        self.registered = PinnedRanges()
        self._count = device_count
        self._name = name
        self._pci_address = pci_address
        self._attributes = {**_ATTRIBUTES, **(attributes or {})}
        if numa_node is not None:
            self._attributes[HOST_NUMA_ID] = numa_node
        self._memory = memory
        self._ceiling = ceiling
        self._refusal = refusal
        self._kernels = kernels
        self._handles = itertools.count(0x1000, 0x10)
        self._streams: dict[int, CpuStream] = {}
        self._events: dict[int, Event] = {}  # what each stands for since it was last recorded
        self._reserved = RangeTable()
        self._mapped = RangeTable()
        self._taken = [0] * device_count
        self._shut_down = False
        self._lost = False  # to a kernel that read or wrote what is not there

    def deinitialize(self) -> None:
        """Shut down as at the end of a process: every later call answers DEINITIALIZED."""
        self._shut_down = True
        self._streams.clear()

    def _begin(self, call: str, *args: int, ordinal: int | None = None, detail: str = "") -> None:
        stand_in(call, *args, detail=detail)
        self._check(call, ordinal)

    def _check(self, call: str, ordinal: int | None) -> None:
        if self._shut_down:
            refuse(Result.DEINITIALIZED, call)
        if self._lost:
            refuse(Result.ILLEGAL_ADDRESS, call, "a kernel failed before")
        if ordinal is not None and not 0 <= ordinal < self._count:
            refuse(Result.INVALID_DEVICE, call, f"device {ordinal} of {self._count}")

    # ------------------------------------------------------------------ the machine

    def version(self) -> int:
        """CUDA 13.0."""
        self._begin("cuDriverGetVersion")
        return 13000

    def device_count(self) -> int:
        """Count the devices."""
        self._begin("cuDeviceGetCount")
        return self._count

    def device_name(self, ordinal: int) -> str:
        """Name of a device."""
        self._begin("cuDeviceGetName", ordinal=ordinal)
        return self._name.format(ordinal)

    def pci_address(self, ordinal: int) -> str:
        """PCI address; no machine has the default one."""
        self._begin("cuDeviceGetPCIBusId", ordinal=ordinal)
        return self._pci_address.format(ordinal)

    def attribute(self, ordinal: int, attribute: DriverAttribute) -> int:
        """Device attribute; INVALID_VALUE for one that is not known."""
        self._begin("cuDeviceGetAttribute", ordinal=ordinal)
        if attribute not in self._attributes:
            refuse(Result.INVALID_VALUE, "cuDeviceGetAttribute", attribute.name)
        return self._attributes[attribute]

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes: mapped memory and the tables for registered memory are taken."""
        self._begin("cuMemGetInfo", ordinal=ordinal)
        return self._free(ordinal), self._memory

    def _free(self, ordinal: int) -> int:
        tables = sum(nbytes for _, nbytes in self.registered) // 512 if ordinal == 0 else 0
        return self._memory - self._taken[ordinal] - tables

    # ------------------------------------------------------------- host memory, copies

    def host_register(self, ordinal: int, address: int, nbytes: int) -> None:
        """Register accessible memory below the ceiling, of which no byte is registered."""
        call, detail = "cuMemHostRegister", f"{nbytes} bytes at {address:#x} on device {ordinal}"
        self._begin(call, address, nbytes, ordinal=ordinal, detail=detail)
        if nbytes >= self._ceiling:
            refuse(self._refusal, call, detail)
        if not _accessible(address, nbytes):
            refuse(Result.INVALID_VALUE, call, detail)
        self.registered.pin(address, nbytes, detail)

    def host_unregister(self, ordinal: int, address: int) -> None:
        """Undo `host_register` of the range that starts at ``address``."""
        call, detail = "cuMemHostUnregister", f"{address:#x} on device {ordinal}"
        self._begin(call, address, ordinal=ordinal, detail=detail)
        self.registered.unpin(address, detail)

    def host_device_pointer(self, ordinal: int, address: int) -> int:
        """Address of registered memory for a device: another one where HOST_POINTERS is 0."""
        call = "cuMemHostGetDevicePointer"
        self._begin(call, address, ordinal=ordinal)
        if self.registered.at(address) is None:
            refuse(Result.INVALID_VALUE, call, f"{address:#x} is not registered")
        return address + self._shift

    def pointer(self, ordinal: int, address: int) -> Pointer | None:
        """Tell what is at an address: a mapping of the first device's, or registered memory."""
        self._begin("cuPointerGetAttributes", address, ordinal=ordinal)
        if (found := self._mapped.at(address)) is not None:
            return Pointer("device", 0, True, sum(found))
        if (found := self.registered.at(address)) is not None:
            return Pointer("host", 0, True, sum(found))
        return None

    @property
    def _shift(self) -> int:
        """Bytes from an address of the host to the device's."""
        return 0 if self._attributes[HOST_POINTERS] else _ALIAS_SHIFT

    def _host_addresses(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Give the host's addresses for the device's; refuse what the device does not know."""
        if not self._shift:
            return addresses
        if (self.registered.index_of(addresses) >= 0).any():
            detail = "an address of the host, which this device calls otherwise"
            refuse(Result.ILLEGAL_ADDRESS, "cuMemcpyBatchAsync", detail)
        shifted = addresses - np.uint64(self._shift)
        return np.where(self.registered.index_of(shifted) >= 0, shifted, addresses)

    def copy_batch(
        self,
        ordinal: int,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Submit copies on a stream that is not the legacy one."""
        call = "cuMemcpyBatchAsync"
        self._check(call, ordinal)
        if not len(sizes):
            return
        if stream == 0:
            refuse(Result.INVALID_VALUE, call, "the legacy stream takes no batch")
        destinations, sources = self._host_addresses(destinations), self._host_addresses(sources)
        self._stream(call, stream).copy(destinations, sources, sizes)  # past the plan there

    # ------------------------------------------------------------------------ kernels

    def kernel(self, ordinal: int, program: str, name: str) -> int:
        """Load the copy kernel, if the fake plays it."""
        self._begin("cuModuleLoadData", ordinal=ordinal)
        if not self._kernels or (program, name) != (copy_pages.PROGRAM, copy_pages.NAME):
            refuse(Result.NOT_SUPPORTED, "cuModuleLoadData", "the fake driver runs no programs")
        self._begin("cuModuleGetFunction", ordinal=ordinal)
        return next(self._handles)

    def launch(
        self,
        ordinal: int,
        kernel: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        stream: int,
    ) -> None:
        """Submit a run of the copy kernel; one that leaves the memory there is loses the device."""
        self._begin("cuLaunchKernel", blocks, ordinal=ordinal)
        if blocks < 1 or threads != copy_pages.THREADS:
            refuse(Result.INVALID_VALUE, "cuLaunchKernel", f"{blocks} blocks of {threads} threads")
        table, rows, pieces, share = arguments
        if not 1 <= share <= copy_pages.WARP:
            refuse(Result.INVALID_VALUE, "cuLaunchKernel", f"{share} pieces for a warp")
        run = partial(self._copy_pages, table, rows, pieces)
        self._stream("cuLaunchKernel", stream).call(run)

    def _copy_pages(self, table: int, rows: int, pieces: int) -> None:
        row, nbytes = np.array([table], np.uint64), np.array([rows * copy_pages.ROW], np.uint64)
        self._check_reach(row, nbytes)
        read = np.frombuffer(linux.buffer(table, rows * copy_pages.ROW), np.uint64)
        to, source, sizes, _ = read.reshape(rows, -1).T.copy()
        sizes = np.minimum(sizes, np.uint64(pieces * copy_pages.PIECE))  # as far as it reads
        for addresses in (to, source):
            self._check_reach(addresses, sizes)
        linux.copy_one_by_one(to, source, sizes)

    def _check_reach(self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> None:
        """Refuse what is neither the device's memory nor registered, or not aligned."""
        there = self.registered.covers(addresses, sizes) | self._mapped.covers(addresses, sizes)
        if not there.all() or ((addresses | sizes) % np.uint64(copy_pages.GRAIN)).any():
            self._lost = True
            refuse(Result.ILLEGAL_ADDRESS, "cuLaunchKernel", "the copy kernel")

    # ---------------------------------------------------------------- streams, events

    def _stream(self, call: str, handle: int) -> CpuStream:
        if handle not in self._streams:
            refuse(Result.INVALID_HANDLE, call, f"there is no stream {handle:#x}")
        return self._streams[handle]

    def _event(self, call: str, handle: int) -> Event:
        if handle not in self._events:
            refuse(Result.INVALID_HANDLE, call, f"there is no event {handle:#x}")
        return self._events[handle]

    def stream_create(self, ordinal: int) -> int:
        """Create a stream; its thread starts with the first work."""
        self._begin("cuStreamCreate", ordinal=ordinal)
        handle = next(self._handles)
        self._streams[handle] = CpuStream(self.registered)
        return handle

    def stream_destroy(self, ordinal: int, stream: int) -> None:
        """Destroy a stream; queued work still finishes."""
        self._begin("cuStreamDestroy", ordinal=ordinal)
        self._stream("cuStreamDestroy", stream)
        del self._streams[stream]

    def stream_synchronize(self, ordinal: int, stream: int) -> None:
        """Wait for a stream's work."""
        self._begin("cuStreamSynchronize", ordinal=ordinal)
        self._finish("cuStreamSynchronize", self._stream("cuStreamSynchronize", stream).record())

    def stream_wait_event(self, ordinal: int, stream: int, event: int) -> None:
        """Make later work of a stream wait for what an event stands for now."""
        self._begin("cuStreamWaitEvent", ordinal=ordinal)
        call = "cuStreamWaitEvent"
        self._stream(call, stream).wait(self._event(call, event))

    def event_create(self, ordinal: int) -> int:
        """Create an event that stands for nothing, which has finished."""
        self._begin("cuEventCreate", ordinal=ordinal)
        handle = next(self._handles)
        self._events[handle] = DONE
        return handle

    def event_destroy(self, ordinal: int, event: int) -> None:
        """Destroy an event; those that wait for what it stands for go on waiting."""
        self._begin("cuEventDestroy", ordinal=ordinal)
        self._event("cuEventDestroy", event)
        del self._events[event]

    def event_record(self, ordinal: int, event: int, stream: int) -> None:
        """Let an event stand for all work queued on a stream so far."""
        self._begin("cuEventRecord", ordinal=ordinal)
        self._event("cuEventRecord", event)
        self._events[event] = self._stream("cuEventRecord", stream).record()

    def event_query(self, ordinal: int, event: int) -> bool:
        """Tell whether an event's work has finished."""
        self._begin("cuEventQuery", ordinal=ordinal)
        work = self._event("cuEventQuery", event)
        if work.query():
            self._finish("cuEventQuery", work)
            return True
        return False

    def event_synchronize(self, ordinal: int, event: int) -> None:
        """Wait for an event."""
        self._begin("cuEventSynchronize", ordinal=ordinal)
        self._finish("cuEventSynchronize", self._event("cuEventSynchronize", event))

    def _finish(self, call: str, event: Event) -> None:
        try:
            event.synchronize()
        except OSError as error:
            refuse(Result.ILLEGAL_ADDRESS, call, str(error))
        self._check(call, None)  # a kernel may have failed in the meantime

    # ------------------------------------------------- device memory: virtual memory management

    def memory_granularity(self, ordinal: int) -> int:
        """2 MiB."""
        self._begin("cuMemGetAllocationGranularity", ordinal=ordinal)
        return _GRANULARITY

    def memory_reserve(self, ordinal: int, nbytes: int) -> int:
        """Reserve whole granules of address space; takes no memory."""
        self._begin("cuMemAddressReserve", ordinal=ordinal)
        _whole_granules("cuMemAddressReserve", 0, nbytes)
        try:
            address = linux.reserve(nbytes, _GRANULARITY)
        except HostOOMError as error:
            refuse(Result.OUT_OF_MEMORY, "cuMemAddressReserve", str(error))
        self._reserved.add(address, nbytes)
        return address

    def memory_release(self, ordinal: int, address: int, nbytes: int) -> None:
        """Give a whole reservation back, in which nothing is mapped."""
        self._begin("cuMemAddressFree", ordinal=ordinal)
        whole = self._reserved.at(address) == (address, nbytes)
        if not whole or self._mapped.overlapping(address, address + nbytes):
            refuse(Result.INVALID_VALUE, "cuMemAddressFree", f"{nbytes} bytes at {address:#x}")
        self._reserved.remove(address)
        linux.unmap(address, nbytes)

    def memory_map(self, ordinal: int, address: int, nbytes: int) -> None:
        """Back whole granules inside a reservation that hold nothing; all or nothing."""
        self._begin("cuMemCreate", ordinal=ordinal)
        _whole_granules("cuMemCreate", 0, nbytes)
        if nbytes > self._free(ordinal):
            refuse(Result.OUT_OF_MEMORY, "cuMemCreate", f"{nbytes} bytes on device {ordinal}")
        self._begin("cuMemMap", ordinal=ordinal)
        _whole_granules("cuMemMap", address, nbytes)
        start, reserved = self._reserved.at(address) or (0, 0)
        end = address + nbytes
        if end > start + reserved or self._mapped.overlapping(address, end):
            refuse(Result.INVALID_VALUE, "cuMemMap", f"{nbytes} bytes at {address:#x}")
        self._begin("cuMemSetAccess", ordinal=ordinal)
        linux.allow(address, nbytes)
        self._mapped.add(address, nbytes)
        self._taken[ordinal] += nbytes

    def memory_unmap(self, ordinal: int, address: int, nbytes: int) -> None:
        """Take the memory of a `memory_map` of the same range away again."""
        self._begin("cuMemUnmap", ordinal=ordinal)
        if self._mapped.at(address) != (address, nbytes):
            refuse(Result.INVALID_VALUE, "cuMemUnmap", f"{nbytes} bytes at {address:#x}")
        linux.discard(address, nbytes)
        linux.deny(address, nbytes)
        self._mapped.remove(address)
        self._taken[ordinal] -= nbytes


def _whole_granules(call: str, address: int, nbytes: int) -> None:
    if nbytes < 1 or nbytes % _GRANULARITY or address % _GRANULARITY:
        refuse(Result.INVALID_VALUE, call, f"{nbytes} bytes at {address:#x}; granules are 2 MiB")


def _accessible(address: int, nbytes: int) -> bool:
    """Tell whether all of a range may be read and written, which pinning it needs."""
    end = address + nbytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access = line.split()[:2]
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < last and access.startswith("rw"):
            address = min(last, end)
    return address == end
