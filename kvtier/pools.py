"""Pool groups: memory for pages, and who has which of them."""

from __future__ import annotations

from hostmem import HostMem
from kvtier.slots import SlotAllocator
from kvtier.transfer.memory import MemoryPool, PageMemory

__all__ = ["PoolGroup"]


class PoolGroup:
    """One pool group of one level.

    Parameters
    ----------
    memory : PageMemory
        Where its pages are.
    n_slots, max_slots : int
        Pages at first, and what that may grow to.

    Notes
    -----
    While the fill of its memory has failed, pages that have none are not available. They are again
    once a resize tries anew, or gives up what failed.
    """

    def __init__(self, memory: PageMemory, n_slots: int, max_slots: int) -> None:
        self.memory = memory
        self._filled = [
            pool.memory
            for pool in memory.pools
            if isinstance(pool, MemoryPool) and isinstance(pool.memory, HostMem)
        ]
        self.slots = SlotAllocator(
            n_slots, max_slots=max_slots, usable=memory.usable_pages, failed=self.failed
        )
        """Which pages are in use."""

    def failed(self) -> bool:
        """Say whether the fill of its memory stopped short."""
        return any(memory.failure is not None for memory in self._filled)

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()
