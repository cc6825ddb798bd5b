"""`HostMem` as the page-locked memory of CuPy.

Importing this module imports CuPy; `docs/cuda-core-and-cupy.md` shows its use.
"""

from __future__ import annotations

import weakref

from hostmem.integrations.known import import_known
from hostmem.integrations.range_allocator import HeldRange, RangeAllocator
from hostmem.progressive import HostMem

__all__ = ["KNOWN_VERSIONS", "HostMemPinnedAllocator"]

KNOWN_VERSIONS = ("14",)
"""Leading parts of the versions of CuPy whose pinned memory this is made for."""

import_known(__name__, "cupy", KNOWN_VERSIONS)

from cupy.cuda import PinnedMemoryPointer  # noqa: E402  (of the version just looked at)


class _Part:
    """What a ``PinnedMemoryPointer`` keeps: it knows these two names, and drops it when done."""

    __slots__ = ("__weakref__", "ptr", "size")

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size


class HostMemPinnedAllocator:
    """Page-locked memory for CuPy, as parts of one `HostMem`: call it with a size.

    ``cupy.cuda.set_pinned_memory_allocator(allocator)`` makes CuPy take its pinned memory here; a
    ``cupy.cuda.PinnedMemoryPool(allocator)`` takes what it has none of, and keeps what it took.
    Parts are usable when they are handed out: where the fill has not come so far, the call waits.
    A part is given back when the last pointer to it is dropped, arrays over it included. As with
    CuPy's own pool, that is not ordered behind any stream: CuPy keeps what its copies still use.

    Parameters
    ----------
    memory : HostMem
        Closed by the caller, when no part is left: before, that is a `BufferError`.
    alignment : int
        Bytes that addresses are multiples of, a power of two.
    timeout : float or None
        Seconds that a call waits for the fill at most; None: as long as it takes.

    Raises
    ------
    ValueError
        As `hostmem.integrations.range_allocator.RangeAllocator` says.
    """

    def __init__(
        self, memory: HostMem, *, alignment: int = 512, timeout: float | None = 60.0
    ) -> None:
        self._ranges = RangeAllocator(memory, alignment=alignment, timeout=timeout)

    @property
    def free(self) -> list[tuple[int, int]]:
        """Ranges that no pointer has, as (offset, nbytes), ascending."""
        return self._ranges.free

    def __call__(self, size: int) -> PinnedMemoryPointer:
        """Take memory; blocks while the fill has not come so far.

        Parameters
        ----------
        size : int
            Bytes; none: a pointer to nothing.

        Returns
        -------
        PinnedMemoryPointer
            To exactly so many bytes, which hold anything.

        Raises
        ------
        HostOOMError, TimeoutError, ClosedError, RegistrationError, OSError, HostmemError
            As `RangeAllocator.allocate` says; nothing was taken.
        """
        if not size:
            return PinnedMemoryPointer(_Part(0, 0), 0)
        return PinnedMemoryPointer(_part_of(self._ranges.allocate(size)), 0)


def _part_of(held: HeldRange) -> _Part:
    part = _Part(held.address, held.nbytes)
    weakref.finalize(part, held.release).atexit = False
    return part
