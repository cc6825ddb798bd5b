"""Which bytes of a memory of slots are given out: lowest first, none across two slots."""

from __future__ import annotations

from itertools import pairwise

from lmcache.v1.memory_management import AddressManager, FreeBlock

__all__ = ["SlotAddresses"]


class SlotAddresses(AddressManager):
    """LMCache's free list, cut at the boundaries of slots.

    LMCache copies an object to the GPU in one call, and the driver refuses a copy across two
    registrations. Those of a `HostMem` end where slots end, so an object inside a slot is never
    cut. The lowest bytes that fit are given out first: those that are usable longest.

    Parameters
    ----------
    size : int
        Bytes, a multiple of ``slot_size``, one slot at least.
    align_bytes : int
        What places and sizes are multiples of; a power of two that divides ``slot_size``.
    slot_size : int
        Bytes that no block reaches across a multiple of.
    """

    def __init__(self, size: int, align_bytes: int, slot_size: int) -> None:
        self.slot_size = slot_size
        super().__init__(slot_size, align_bytes)
        for _ in range(size // slot_size - 1):
            self.sbrk(slot_size)

    def _can_merge_with_prev(self, curr_block: FreeBlock, prev_block: FreeBlock) -> bool:
        return self._touch(prev_block, curr_block)

    def _can_merge_with_succ(self, curr_block: FreeBlock, succ_block: FreeBlock) -> bool:
        return self._touch(curr_block, succ_block)

    def _touch(self, one: FreeBlock, other: FreeBlock) -> bool:
        return bool(one.can_be_coalesced(other) and other.start % self.slot_size)

    def check_consistency(self) -> bool:
        """Tell whether free blocks are apart, joined inside slots, and as many bytes as counted."""
        with self._lock:
            free = list(self._explicit_list)
            allocated = self.total_allocated_size
        return (
            all(one.start + one.size <= other.start for one, other in pairwise(free))
            and not any(self._touch(one, other) for one, other in pairwise(free))
            and all(block.start % self.slot_size + block.size <= self.slot_size for block in free)
            and sum(block.size for block in free) + allocated == self.get_heap_size()
        )
