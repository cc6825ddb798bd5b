"""Memory of a whole slot for a memory object: its own, or a copy where that is too short."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["SlotMemory"]

_PAGE = 4096


class SlotMemory:
    """Where a slot of an object is written from, or read to.

    Slots are moved whole. That of a full chunk is the object itself. A shorter object, such as the
    end of a prompt, or one that does not begin on a page, is copied.

    Parameters
    ----------
    obj : MemoryObj
        With at most ``slot_size`` bytes.
    slot_size : int
        Bytes.
    """

    __slots__ = ("_copy", "_obj", "address")

    def __init__(self, obj: MemoryObj, slot_size: int) -> None:
        self._obj = obj
        self._copy: NDArray[np.uint8] | None = None
        self.address: int = obj.data_ptr
        """Of ``slot_size`` bytes."""
        if obj.get_physical_size() < slot_size or self.address % _PAGE:
            room = np.empty(slot_size + _PAGE, np.uint8)
            start = -room.__array_interface__["data"][0] % _PAGE
            self._copy = room[start : start + slot_size]
            self.address = self._copy.__array_interface__["data"][0]

    def fill(self) -> None:
        """Have the object's bytes there, and zeros behind."""
        if self._copy is not None:
            bytes_of = np.asarray(self._obj.byte_array)
            self._copy[: len(bytes_of)] = bytes_of
            self._copy[len(bytes_of) :] = 0

    def empty(self) -> None:
        """Have the object's bytes in the object."""
        if self._copy is not None:
            bytes_of = np.asarray(self._obj.byte_array)
            bytes_of[:] = self._copy[: len(bytes_of)]
