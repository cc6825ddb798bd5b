"""LMCache's allocator of host memory, over a `HostMem`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import AddressManager

from hostmem import HostMem, ResourceBusyError
from kvtier.integrations.lmcache.pool import HostMemPool

if TYPE_CHECKING:
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["HostMemAllocator", "install_allocator"]


class HostMemAllocator(MixedMemoryAllocator):
    """What LMCache allocates its host memory with: usable at once, filled in the background.

    It is LMCache's mixed allocator, which its backends ask for by that type, with another memory
    below. An object is had at once where the fill has been, after a short wait where it has not,
    and is None where there is no room. Byte buffers are Python's, as LMCache has them.

    Parameters
    ----------
    memory : HostMem
        The allocator's own from now on: `close` closes it. No object is larger than its
        ``slot_size``, and none crosses a slot, so that the driver copies each in one call.
    align_bytes : int
        What places and sizes of objects are multiples of, a power of two.

    Raises
    ------
    ValueError
        A memory without slots, or an alignment that is none or that they do not have.

    Notes
    -----
    An object's bytes are never unmapped under it. After `close` nothing is allocated, and the
    memory is given back when the last object is freed; LMCache's own backend closes its allocator
    first and frees its objects then. `memory` is None from then on.
    """

    def __init__(self, memory: HostMem, align_bytes: int = AddressManager.ALIGN_BYTES) -> None:
        super().__init__(0, align_bytes=align_bytes)
        self.size = memory.size
        self.pin_allocator = HostMemPool(memory, align_bytes)
        self.host_mem_lock = nullcontext()  # the pool has its own, and waits without it

    @property
    def memory(self) -> HostMem | None:
        """The memory; None once it was given back."""
        found: HostMem | None = self.pin_allocator.memory
        return found

    def close(self) -> None:
        """Make no more objects, and give the memory back with the last one. Idempotent."""
        self.pin_allocator.close()

    def __str__(self) -> str:
        return "HostMemAllocator"


def install_allocator(
    backend: LocalCPUBackend, memory: HostMem, align_bytes: int = AddressManager.ALIGN_BYTES
) -> HostMemAllocator:
    """Give a backend of LMCache's another memory, and close the one that it had.

    Do it before the first object: who has looked at the backend's memory before, such as a
    connector that registered it with a network card, goes on looking at that.

    Parameters
    ----------
    backend : LocalCPUBackend
        A new one.
    memory : HostMem
        The backend's from now on; the caller's still, if this raises.
    align_bytes : int
        See `HostMemAllocator`.

    Raises
    ------
    ValueError
        The backend's memory is paged (peer to peer, NIXL, io_uring), which others know of; or as
        `HostMemAllocator`.
    ResourceBusyError
        Objects have been allocated.
    """
    before = backend.get_memory_allocator()
    pool = getattr(before, "pin_allocator", None)
    if not isinstance(before, MixedMemoryAllocator) or not isinstance(pool, TensorMemoryAllocator):
        raise ValueError(
            f"backend: its memory is a {type(before).__name__} of pages that others know of "
            "(enable_p2p, NIXL, io_uring): it cannot be another"
        )
    if pool.num_active_allocations:
        raise ResourceBusyError(
            f"backend: {pool.num_active_allocations} objects are in its memory already"
        )
    allocator = HostMemAllocator(memory, align_bytes)
    backend.memory_allocator = allocator
    before.close()
    return allocator
