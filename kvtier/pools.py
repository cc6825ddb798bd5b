"""Pool groups: memory for pages, and who has which of them."""

from __future__ import annotations

from kvtier.slots import SlotAllocator
from kvtier.transfer.memory import PageMemory

__all__ = ["PoolGroup"]


class PoolGroup:
    """One pool group of one level.

    Parameters
    ----------
    memory : PageMemory
        Where its pages are.
    n_slots, max_slots : int
        Pages at first, and what that may grow to.
    """

    def __init__(self, memory: PageMemory, n_slots: int, max_slots: int) -> None:
        self.memory = memory
        self.slots = SlotAllocator(n_slots, max_slots=max_slots, usable=memory.usable_pages)
        """Which pages are in use."""

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()
