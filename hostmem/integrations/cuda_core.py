"""`HostMem` as a ``MemoryResource`` of cuda.core.

Importing this module imports cuda.core; `docs/cuda-core-and-cupy.md` shows its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostmem.integrations.known import import_known
from hostmem.integrations.range_allocator import HeldRange, RangeAllocator
from hostmem.progressive import HostMem

__all__ = ["KNOWN_VERSIONS", "HostMemResource"]

KNOWN_VERSIONS = ("1.2",)
"""Leading parts of the versions of cuda.core whose ``MemoryResource`` this is made for."""

import_known(__name__, "cuda.core", KNOWN_VERSIONS)

from cuda.core import Buffer, MemoryResource  # noqa: E402  (of the version just looked at)

if TYPE_CHECKING:
    from cuda.core import GraphBuilder, Stream


class HostMemResource(MemoryResource):
    """Buffers of host memory that both sides reach, as parts of one `HostMem`.

    They are usable when they are handed out: where the fill has not come so far, `allocate` waits.
    Each lies in one registration, so that the driver copies it in one call. Buffers know what
    cuda.core asks of them: DLPack calls them pinned memory (kDLCUDAHost) where the `HostMem` is a
    GPU's, and plain memory where it is of the cpu device, which needs no driver.

    Parameters
    ----------
    memory : HostMem
        Closed by the caller, when no buffer is left: before, that is a `BufferError`.
    alignment : int
        Bytes that addresses are multiples of, a power of two.
    timeout : float or None
        Seconds that `allocate` waits for the fill at most; None: as long as it takes.

    Raises
    ------
    ValueError
        As `hostmem.integrations.range_allocator.RangeAllocator` says.
    """

    def __init__(
        self, memory: HostMem, *, alignment: int = 256, timeout: float | None = 60.0
    ) -> None:
        self._ranges = RangeAllocator(memory, alignment=alignment, timeout=timeout)
        self._held: dict[int, HeldRange] = {}
        self._device = memory.device.kind == "cuda"

    @property
    def free(self) -> list[tuple[int, int]]:
        """Ranges that no buffer has, as (offset, nbytes), ascending."""
        return self._ranges.free

    def allocate(self, size: int, *, stream: Stream | GraphBuilder | None = None) -> Buffer:
        """Take a buffer; blocks while the fill has not come so far, and not for the stream.

        Parameters
        ----------
        size : int
            Bytes. A buffer of none has the address 0, as those of cuda.core have.
        stream : Stream or GraphBuilder, optional
            The buffer's end is ordered behind it, unless its ``close`` names another.

        Returns
        -------
        Buffer
            Its bytes hold anything.

        Raises
        ------
        HostOOMError, TimeoutError, ClosedError, RegistrationError, OSError, HostmemError
            As `RangeAllocator.allocate` says; nothing was taken.
        """
        if not size:
            return Buffer.from_handle(0, 0, mr=self, stream=stream)
        held = self._ranges.allocate(size)
        self._held[held.address] = held
        try:
            return Buffer.from_handle(held.address, size, mr=self, stream=stream)
        except BaseException:
            self._held.pop(held.address).release()
            raise

    def deallocate(
        self, ptr: Any, size: int, *, stream: Stream | GraphBuilder | None = None
    ) -> None:
        """Give a buffer's bytes back once the stream has done what it was given; cuda.core's call.

        Parameters
        ----------
        ptr : int
            Address of the buffer.
        size : int
            Bytes.
        stream : Stream or GraphBuilder, optional
            Waited for. None: the caller knows that nobody uses the buffer.
        """
        if self._device and stream is not None:  # else a default one, which asks for a driver
            stream.sync()
        held = self._held.pop(int(ptr), None)
        if held is not None:  # not one of no bytes
            held.release()

    @property
    def is_device_accessible(self) -> bool:
        """Whether a GPU reaches the buffers: the memory is registered with one."""
        return self._device

    @property
    def is_host_accessible(self) -> bool:
        """Whether the CPU reaches the buffers: always."""
        return True

    @property
    def is_managed(self) -> bool:
        """Whether the buffers move between host and GPU by themselves: never."""
        return False

    @property
    def device_id(self) -> int:
        """No GPU's: page-locked memory is every GPU's alike."""
        return -1
