"""The CUDA driver, as methods over integers and numpy arrays.

Registration and copies, whose arguments are arrays, go through cffi and one table of entry points,
each resolved at an explicit version by ``cuGetProcAddress``. Control calls (contexts, streams,
events, attributes, virtual memory) go through ``cuda-bindings``. Only the driver API is used: a
failed runtime call would leave an error behind that surfaces in somebody else's next call.

Every call makes the device's primary context current around itself and restores what was current
before, so that no thread's state matters or changes.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import _cuda_abi, trace
from hostmem._sys.seam import intercept
from hostmem.errors import CuError, CuOOMError

log = logging.getLogger("hostmem")

__all__ = [
    "CudaDriver",
    "Driver",
    "DriverAttribute",
    "Result",
    "harmless_after_shutdown",
    "load_driver",
    "refuse",
    "stand_in",
]

ffi: Any = _cuda_abi.ffi


class Result(enum.IntEnum):
    """The driver's answers (``CUresult``) that are told apart here."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    DEINITIALIZED = 4
    """The driver was shut down, at the end of the process."""
    STUB_LIBRARY = 34
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_HANDLE = 400
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    HOST_MEMORY_ALREADY_REGISTERED = 712
    HOST_MEMORY_NOT_REGISTERED = 713
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801


trace.SYMBOLS.update({int(answer): f"CUDA_ERROR_{answer.name}" for answer in Result})

NO_LIBRARY = -1
"""What `CuError` carries for a code where there is no driver to answer."""

_REGISTER_PORTABLE, _REGISTER_DEVICEMAP = 1, 2
_ACCESS_ORDER_STREAM = 1


class DriverAttribute(NamedTuple):
    """Device attributes by the names this library uses; each a ``CUdevice_attribute``."""

    name: str
    number: int


HOST_NUMA_ID = DriverAttribute("host NUMA node", 134)
PAGEABLE_ACCESS = DriverAttribute("pageable memory access", 88)
HOST_PAGE_TABLES = DriverAttribute("uses the host's page tables", 100)
HOST_POINTERS = DriverAttribute("host pointers of registered memory are device pointers", 91)
HOST_REGISTER = DriverAttribute("host registration supported", 99)
MULTIPROCESSORS = DriverAttribute("multiprocessors", 16)


class Pointer(NamedTuple):
    """What a driver knows of an address, and of what follows it in the same mapping."""

    kind: Literal["device", "host", "managed"]
    """Whose memory it is; the host's is registered or was allocated by the driver."""
    ordinal: int
    """The device that has it, or by which it was registered."""
    reachable: bool
    """Whether the device that was asked may read and write it."""
    end: int
    """Where what this says ends."""


_POINTER = (2, 8, 9, 16, 11, 12, 18, 19)
"""CUpointer_attribute: memory type, managed, ordinal, access; start and bytes of the allocation or
reservation; bytes and start of the mapping."""
_READ_WRITE = 3


class _Entry(NamedTuple):
    """A row of the entry point table."""

    name: str
    version: int
    prototype: str


_ENTRIES = {
    "push": _Entry("cuCtxPushCurrent", 4000, "context_push_t"),
    "pop": _Entry("cuCtxPopCurrent", 4000, "context_pop_t"),
    "register": _Entry("cuMemHostRegister", 6050, "host_register_t"),
    "unregister": _Entry("cuMemHostUnregister", 4000, "host_unregister_t"),
    "device_pointer": _Entry("cuMemHostGetDevicePointer", 3020, "host_device_pointer_t"),
    "pointer": _Entry("cuPointerGetAttributes", 7000, "pointer_t"),
    "copy": _Entry("cuMemcpyAsync", 4000, "copy_async_t"),
    "launch": _Entry("cuLaunchKernel", 4000, "launch_t"),
    "batch_12080": _Entry("cuMemcpyBatchAsync", 12080, "copy_batch_12080_t"),
    "batch_13000": _Entry("cuMemcpyBatchAsync", 13000, "copy_batch_13000_t"),
}
_OPTIONAL = {"batch_12080", "batch_13000"}


class Driver(Protocol):
    """What a device needs of a driver: the real one, or a fake that follows its rules.

    Addresses, handles and sizes (bytes) are integers; `ordinal` is the device. Calls raise
    `CuError` (`CuOOMError` where memory ran out) and nothing else.
    """

    def version(self) -> int: ...
    def device_count(self) -> int: ...
    def device_name(self, ordinal: int) -> str: ...
    def pci_address(self, ordinal: int) -> str: ...
    def attribute(self, ordinal: int, attribute: DriverAttribute) -> int: ...
    def memory_info(self, ordinal: int) -> tuple[int, int]: ...

    def host_register(self, ordinal: int, address: int, nbytes: int) -> None: ...
    def host_unregister(self, ordinal: int, address: int) -> None: ...
    def host_device_pointer(self, ordinal: int, address: int) -> int: ...

    def pointer(self, ordinal: int, address: int) -> Pointer | None: ...

    def copy_batch(
        self,
        ordinal: int,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        stream: int,
    ) -> None: ...

    def kernel(self, ordinal: int, program: str, name: str) -> int: ...
    def launch(
        self,
        ordinal: int,
        kernel: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        stream: int,
    ) -> None: ...

    def stream_create(self, ordinal: int) -> int: ...
    def stream_destroy(self, ordinal: int, stream: int) -> None: ...
    def stream_synchronize(self, ordinal: int, stream: int) -> None: ...
    def stream_wait_event(self, ordinal: int, stream: int, event: int) -> None: ...
    def event_create(self, ordinal: int) -> int: ...
    def event_destroy(self, ordinal: int, event: int) -> None: ...
    def event_record(self, ordinal: int, event: int, stream: int) -> None: ...
    def event_query(self, ordinal: int, event: int) -> bool: ...
    def event_synchronize(self, ordinal: int, event: int) -> None: ...

    def memory_granularity(self, ordinal: int) -> int: ...
    def memory_reserve(self, ordinal: int, nbytes: int) -> int: ...
    def memory_release(self, ordinal: int, address: int, nbytes: int) -> None: ...
    def memory_map(self, ordinal: int, address: int, nbytes: int) -> None: ...
    def memory_unmap(self, ordinal: int, address: int, nbytes: int) -> None: ...


def raise_cu_error(code: int, symbol: str, call: str, detail: str = "") -> NoReturn:
    """Raise the exception for a ``CUresult`` that is no success; the one raiser."""
    kind = CuOOMError if code == Result.OUT_OF_MEMORY else CuError
    text = f"{call}: {symbol} ({code})"
    raise kind(f"{text}; {detail}" if detail else text, code=code, symbol=symbol, call=call)


def refuse(code: int, call: str, detail: str = "") -> NoReturn:
    """Raise what the driver would have answered, for those that play it."""
    names = {int(result): f"CUDA_ERROR_{result.name}" for result in Result}
    raise_cu_error(int(code), names.get(code, "UNKNOWN"), call, detail)


@contextlib.contextmanager
def harmless_after_shutdown() -> Iterator[None]:
    """Give something back to a driver that, once it has shut down, did that itself."""
    try:
        yield
    except CuError as error:
        if error.code != Result.DEINITIALIZED:
            raise


@trace.played
def stand_in(call: str, *args: int, detail: str = "") -> None:
    """Begin a call that something plays for the driver: a test's plan may refuse it here too."""
    code = intercept(call, *args)
    if code:
        refuse(code, call, detail)


@lru_cache(maxsize=1)
def load_driver() -> CudaDriver:
    """Load and initialise the CUDA driver of this process, once.

    With ``HOSTMEM_BATCH_COPY=0`` in the environment, every batch is a loop of single copies.

    Raises
    ------
    CuError
        If there is no driver library, or it refuses to initialise.
    """
    return CudaDriver(0 if os.environ.get("HOSTMEM_BATCH_COPY") == "0" else 13000)


class CudaDriver:
    """The real driver (``libcuda.so.1``).

    Parameters
    ----------
    batch_version : int
        The newest shape of ``cuMemcpyBatchAsync`` to ask for: 13000, 12080, or 0 for none, in which
        case (and on drivers without it) a batch is a loop of single copies.
    """

    def __init__(self, batch_version: int = 13000) -> None:
        try:
            library = ffi.dlopen("libcuda.so.1")
        except OSError as error:
            raise CuError(
                f"no CUDA driver: {error}; use device='cpu' on machines without a GPU",
                code=NO_LIBRARY,
                symbol="LIBRARY_NOT_FOUND",
                call="dlopen",
            ) from error
        from cuda.bindings import driver as bindings

        self._cu: Any = trace.bindings(bindings)
        self._library = library  # keeps the entry points loaded
        (code,) = self._cu.cuInit(0)
        self._check(int(code), "cuInit")
        found = {key: self._resolve(entry) for key, entry in _ENTRIES.items()}
        missing = [_ENTRIES[k].name for k, f in found.items() if f is None and k not in _OPTIONAL]
        if missing:
            raise_cu_error(
                Result.NOT_FOUND,
                "CUDA_ERROR_NOT_FOUND",
                "cuGetProcAddress",
                f"the driver lacks {', '.join(missing)}; a newer one has them",
            )
        names = {key: entry.name for key, entry in _ENTRIES.items()}
        self._entry: dict[str, Any] = trace.entries(found, names)
        newest = [v for v in (13000, 12080) if v <= batch_version and found[f"batch_{v}"]]
        self._batch_version = newest[0] if newest else 0
        self._contexts: dict[int, Any] = {}
        self._mapped: dict[int, Any] = {}
        self._batches: dict[int, bool] = {}  # by device, whether the batch call moves bytes there
        self._lock = threading.Lock()

    def _resolve(self, entry: _Entry) -> Any:
        pointer = ffi.new("void **")
        status = ffi.new("int *")
        ask = trace.c_call("cuGetProcAddress", self._library.cuGetProcAddress_v2, ffi)
        code = ask(entry.name.encode(), pointer, entry.version, 0, status)
        if code != Result.SUCCESS or not pointer[0]:
            return None
        return ffi.cast(entry.prototype, pointer[0])

    def _check(self, code: int, call: str, detail: str = "") -> None:
        if code == Result.SUCCESS:
            return
        _, name = self._cu.cuGetErrorName(self._cu.CUresult(code))
        raise_cu_error(code, name.decode() if name else "UNKNOWN", call, detail)

    def _ask(self, call: str, *args: Any) -> Any:
        """Make a control call by name; returns its single result, a tuple of several, or None."""
        number = intercept(call)
        if number:
            self._check(number, call)
        code, *results = getattr(self._cu, call)(*args)
        self._check(int(code), call)
        return results[0] if len(results) == 1 else tuple(results) if results else None

    @contextlib.contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make the device's primary context current for the calls inside, and then the old one."""
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal)
                if context is None:
                    handle = self._ask("cuDevicePrimaryCtxRetain", self._device(ordinal))
                    context = self._contexts[ordinal] = ffi.cast("CUcontext", int(handle))
        self._check(self._entry["push"](context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._entry["pop"](ffi.new("CUcontext *"))

    def _device(self, ordinal: int) -> Any:
        return self._ask("cuDeviceGet", ordinal)

    # ------------------------------------------------------------------ the machine

    def version(self) -> int:
        """CUDA version of the driver: 1000 x major + 10 x minor."""
        return int(self._ask("cuDriverGetVersion"))

    def device_count(self) -> int:
        """Count the visible devices."""
        return int(self._ask("cuDeviceGetCount"))

    def device_name(self, ordinal: int) -> str:
        """Name of a device."""
        name: bytes = self._ask("cuDeviceGetName", 256, self._device(ordinal))
        return name.split(b"\0")[0].decode()

    def pci_address(self, ordinal: int) -> str:
        """PCI address as sysfs spells it: ``0000:1b:00.0``."""
        text: bytes = self._ask("cuDeviceGetPCIBusId", 32, self._device(ordinal))
        return text.split(b"\0")[0].decode().lower()

    def attribute(self, ordinal: int, attribute: DriverAttribute) -> int:
        """Read a device attribute."""
        kind = self._cu.CUdevice_attribute(attribute.number)
        return int(self._ask("cuDeviceGetAttribute", kind, self._device(ordinal)))

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""
        with self._current(ordinal):
            free, total = self._ask("cuMemGetInfo")
        return int(free), int(total)

    # ------------------------------------------------------------- host memory, copies

    def host_register(self, ordinal: int, address: int, nbytes: int) -> None:
        """Page-lock a range and map it for all contexts; blocks, without the GIL."""
        detail = f"{nbytes} bytes at {address:#x} on device {ordinal}"
        code = intercept("cuMemHostRegister", address, nbytes)
        if not code:
            with self._current(ordinal):
                flags = _REGISTER_PORTABLE | _REGISTER_DEVICEMAP
                code = self._entry["register"](ffi.cast("void *", address), nbytes, flags)
        self._check(code, "cuMemHostRegister", detail)

    def host_unregister(self, ordinal: int, address: int) -> None:
        """Undo `host_register` of the range that starts at ``address``."""
        code = intercept("cuMemHostUnregister", address)
        if not code:
            with self._current(ordinal):
                code = self._entry["unregister"](ffi.cast("void *", address))
        self._check(code, "cuMemHostUnregister", f"{address:#x} on device {ordinal}")

    def host_device_pointer(self, ordinal: int, address: int) -> int:
        """Give the address that a device has for registered memory."""
        detail = f"{address:#x} on device {ordinal}"
        pointer = ffi.new("CUdeviceptr *")
        code = intercept("cuMemHostGetDevicePointer", address)
        if not code:
            with self._current(ordinal):
                code = self._entry["device_pointer"](pointer, ffi.cast("void *", address), 0)
        self._check(code, "cuMemHostGetDevicePointer", detail)
        return int(pointer[0])

    def pointer(self, ordinal: int, address: int) -> Pointer | None:
        """Tell what is at an address; None where the driver has nothing."""
        count = len(_POINTER)
        values = ffi.new("uint64_t[]", count)
        places = ffi.new("void *[]", [values + i for i in range(count)])
        code = intercept("cuPointerGetAttributes", address)
        if not code:
            with self._current(ordinal):
                code = self._entry["pointer"](count, ffi.new("int[]", _POINTER), places, address)
        self._check(code, "cuPointerGetAttributes", f"{address:#x} on device {ordinal}")
        kind, managed, owner, access, start, nbytes, mapped, base = values
        if kind not in (1, 2):
            return None
        return Pointer(
            "managed" if managed else "host" if kind == 1 else "device",
            owner,
            access == _READ_WRITE,
            min(start + nbytes, base + mapped) if mapped else start + nbytes,
        )

    def copy_batch(
        self,
        ordinal: int,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Submit copies on a stream; returns when they are queued.

        The arrays, shape (copies,), contiguous, may be dropped at once. Order inside a batch is
        undefined. Source access order is STREAM: sources may be rewritten by later work of the
        stream.
        """
        count = len(sizes)
        if count == 0:
            return
        batch = True
        code = intercept("cuMemcpyBatchAsync", count)
        if not stream:
            code = Result.INVALID_VALUE  # the legacy stream, which single copies would take
        if not code:
            with self._current(ordinal):
                queue = ffi.cast("CUstream", stream)
                batch = self._batches_work(ordinal)
                submit = self._submit_batch if batch else self._submit_single
                code = submit(destinations, sources, sizes, queue)
        if code:
            detail = f"{count} copies, {int(sizes.sum())} bytes, on device {ordinal}"
            self._check(code, "cuMemcpyBatchAsync" if batch else "cuMemcpyAsync", detail)

    def _batches_work(self, ordinal: int) -> bool:
        """Tell whether the batch call can be used on the current device; tried out once."""
        works = self._batches.get(ordinal)
        if works is None:
            works = bool(self._batch_version) and self._try_batches(ordinal)
            self._batches[ordinal] = works
        return works

    def _try_batches(self, ordinal: int) -> bool:
        """Move some pieces to the device and back in another order, and compare every byte."""
        piece = 512
        there, back = np.arange(16 * piece, dtype=np.uint16), np.zeros(16 * piece, np.uint16)
        places = np.arange(16, dtype=np.uint64) * np.uint64(there.nbytes // 16)
        sizes = np.full(16, there.nbytes // 16, np.uint64)
        try:
            memory = int(self._ask("cuMemAlloc", there.nbytes))
        except CuOOMError:
            return True  # there is nothing to try it in; the call itself will tell
        stream = self.stream_create(ordinal)
        try:
            queue = ffi.cast("CUstream", stream)
            host = [places + np.uint64(a.__array_interface__["data"][0]) for a in (there, back)]
            device = np.uint64(memory) + np.ascontiguousarray(places[::-1])
            codes = []
            for to, source in ((device, host[0]), (host[1], device)):
                codes.append(self._submit_batch(to, source, sizes, queue))
                self.stream_synchronize(ordinal, stream)
        finally:
            self._ask("cuMemFree", memory)
            self.stream_destroy(ordinal, stream)
        if any(codes) or not np.array_equal(there, back):
            log.warning(
                "cuMemcpyBatchAsync does not work on device %d (codes %s): copying one by one",
                ordinal,
                codes,
            )
            return False
        return True

    def _submit_batch(self, destinations: Any, sources: Any, sizes: Any, stream: Any) -> int:
        attributes = ffi.new("batch_attributes_t *")
        attributes.srcAccessOrder = _ACCESS_ORDER_STREAM
        arguments = [
            ffi.from_buffer("CUdeviceptr[]", destinations),
            ffi.from_buffer("CUdeviceptr[]", sources),
            ffi.from_buffer("size_t[]", sizes),
            len(sizes),
            attributes,
            ffi.new("size_t[1]"),
            1,
        ]
        if self._batch_version == 12080:
            arguments.append(ffi.new("size_t *"))
        return int(self._entry[f"batch_{self._batch_version}"](*arguments, stream))

    def _submit_single(self, destinations: Any, sources: Any, sizes: Any, stream: Any) -> int:
        copy = self._entry["copy"]
        for destination, source, size in zip(
            destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            code = int(copy(destination, source, size, stream))
            if code:
                return code
        return Result.SUCCESS

    # ------------------------------------------------------------------------ kernels

    def kernel(self, ordinal: int, program: str, name: str) -> int:
        """Load a kernel of a program in PTX, which the driver compiles; it stays loaded."""
        with self._current(ordinal):
            module = self._ask("cuModuleLoadData", program.encode())
            return int(self._ask("cuModuleGetFunction", module, name.encode()))

    def launch(
        self,
        ordinal: int,
        kernel: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        stream: int,
    ) -> None:
        """Submit a run of a kernel, all of whose parameters are 64-bit integers."""
        values = ffi.new("uint64_t[]", list(arguments))
        pointers = ffi.new("void *[]", [values + at for at in range(len(arguments))])
        function, queue = ffi.cast("CUfunction", kernel), ffi.cast("CUstream", stream)
        code = intercept("cuLaunchKernel", blocks)
        if not code:
            with self._current(ordinal):
                code = self._entry["launch"](
                    function, blocks, 1, 1, threads, 1, 1, 0, queue, pointers, ffi.NULL
                )
        self._check(code, "cuLaunchKernel", f"{blocks} blocks on device {ordinal}")

    # ---------------------------------------------------------------- streams, events

    def stream_create(self, ordinal: int) -> int:
        """Create a stream that does not synchronise with the legacy stream."""
        with self._current(ordinal):
            flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            return int(self._ask("cuStreamCreate", flags))

    def stream_destroy(self, ordinal: int, stream: int) -> None:
        """Destroy a stream; queued work still finishes."""
        with self._current(ordinal):
            self._ask("cuStreamDestroy", stream)

    def stream_synchronize(self, ordinal: int, stream: int) -> None:
        """Wait for a stream's work, without the GIL."""
        with self._current(ordinal):
            self._ask("cuStreamSynchronize", stream)

    def stream_wait_event(self, ordinal: int, stream: int, event: int) -> None:
        """Make later work of a stream wait for an event; returns at once."""
        with self._current(ordinal):
            self._ask("cuStreamWaitEvent", stream, event, 0)

    def event_create(self, ordinal: int) -> int:
        """Create an event without timing."""
        with self._current(ordinal):
            flags = self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            return int(self._ask("cuEventCreate", flags))

    def event_destroy(self, ordinal: int, event: int) -> None:
        """Destroy an event."""
        with self._current(ordinal):
            self._ask("cuEventDestroy", event)

    def event_record(self, ordinal: int, event: int, stream: int) -> None:
        """Let an event stand for all work queued on a stream so far."""
        with self._current(ordinal):
            self._ask("cuEventRecord", event, stream)

    def event_query(self, ordinal: int, event: int) -> bool:
        """Tell whether an event's work has finished; returns at once."""
        code = intercept("cuEventQuery")
        if not code:
            with self._current(ordinal):
                (answer,) = self._cu.cuEventQuery(event)
            code = int(answer)
        if code == Result.NOT_READY:
            return False
        self._check(code, "cuEventQuery")
        return True

    def event_synchronize(self, ordinal: int, event: int) -> None:
        """Wait for an event, without the GIL."""
        with self._current(ordinal):
            self._ask("cuEventSynchronize", event)

    # ------------------------------------------------- device memory: virtual memory management

    def _physical(self, ordinal: int) -> Any:
        cu = self._cu
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        return properties

    def memory_granularity(self, ordinal: int) -> int:
        """Bytes that device memory is mapped in."""
        flag = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._ask("cuMemGetAllocationGranularity", self._physical(ordinal), flag))

    def memory_reserve(self, ordinal: int, nbytes: int) -> int:
        """Reserve device address space; takes no memory."""
        with self._current(ordinal):
            return int(self._ask("cuMemAddressReserve", nbytes, 0, 0, 0))

    def memory_release(self, ordinal: int, address: int, nbytes: int) -> None:
        """Give reserved address space back; nothing may be mapped in it."""
        with self._current(ordinal):
            self._ask("cuMemAddressFree", address, nbytes)

    def memory_map(self, ordinal: int, address: int, nbytes: int) -> None:
        """Back a range of reserved address space with device memory; all or nothing."""
        cu = self._cu
        with self._current(ordinal), contextlib.ExitStack() as undo:
            handle = self._ask("cuMemCreate", nbytes, self._physical(ordinal), 0)
            undo.callback(self._ask, "cuMemRelease", handle)
            self._ask("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(self._ask, "cuMemUnmap", address, nbytes)
            access = cu.CUmemAccessDesc()
            access.location = self._physical(ordinal).location
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._ask("cuMemSetAccess", address, nbytes, [access], 1)
            self._mapped[address] = handle
            undo.pop_all()

    def memory_unmap(self, ordinal: int, address: int, nbytes: int) -> None:
        """Take the memory of a `memory_map` of the same range away again."""
        with self._current(ordinal):
            self._ask("cuMemUnmap", address, nbytes)
            self._ask("cuMemRelease", self._mapped.pop(address))
