"""What the slots of a file should hold, to tell when they do not."""

from __future__ import annotations

import threading
import zlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["Checksums"]


class Checksums:
    """The CRC-32 of every slot of a file, in memory: 4 bytes a slot.

    A CRC finds every changed bit, every burst of up to 32 and, but for one in four thousand
    million, a slot that holds another's bytes, older ones, or zeros. A slot that was never written
    holds zeros, and is known to. May be used from any thread.

    Parameters
    ----------
    slot_size : int
        Bytes of a slot.
    """

    def __init__(self, slot_size: int) -> None:
        self._empty = zlib.crc32(bytes(slot_size))
        self._sums = np.empty(0, np.uint32)
        self._lock = threading.Lock()  # a resize moves the array

    def resize(self, slots: int) -> None:
        """Know so many slots; new ones hold zeros."""
        sums = np.full(slots, self._empty, np.uint32)
        with self._lock:
            kept = min(slots, len(self._sums))
            sums[:kept] = self._sums[:kept]
            self._sums = sums

    def note(self, first: int, sums: NDArray[np.uint32]) -> None:
        """Say what slots from ``first`` on are about to hold."""
        with self._lock:
            self._sums[first : first + len(sums)] = sums

    def differing(self, first: int, sums: NDArray[np.uint32]) -> NDArray[np.intp]:
        """Give the places among ``sums``, of slots from ``first`` on, that are not as they were."""
        with self._lock:
            return np.flatnonzero(self._sums[first : first + len(sums)] != sums)
