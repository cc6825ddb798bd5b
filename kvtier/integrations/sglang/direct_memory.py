"""Memory that transfers past the page cache can use: the caller's, or a copy of it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hostmem.files import memory_at
from kvtier.transfer.unnamed_file import DIRECT_GRAIN

__all__ = ["DirectMemory"]


class DirectMemory:
    """Where pieces are written from, or read to.

    That is where they are, unless a piece that could go past the page cache does not begin where
    such a transfer must: then all of them go through a copy.

    Parameters
    ----------
    places : sequence of int
        Addresses.
    nbytes : int
        Bytes of each piece.
    """

    __slots__ = ("_own", "_theirs", "places")

    def __init__(self, places: Sequence[int], nbytes: int) -> None:
        self.places = list(places)
        """Addresses to use."""
        self._own: list[NDArray[np.uint8]] = []
        self._theirs: list[NDArray[np.uint8]] = []
        if nbytes % DIRECT_GRAIN == 0 and any(place % DIRECT_GRAIN for place in places):
            room = np.frombuffer(mmap.mmap(-1, len(places) * nbytes), np.uint8)
            self._own = list(room.reshape(len(places), nbytes))
            self._theirs = [memory_at(place, nbytes) for place in places]
            base: int = room.__array_interface__["data"][0]
            self.places = [base + n * nbytes for n in range(len(places))]

    def fill(self) -> None:
        """Have the caller's bytes where they are written from."""
        for own, theirs in zip(self._own, self._theirs, strict=True):
            own[:] = theirs

    def empty(self) -> None:
        """Have what was read where the caller wants it."""
        for own, theirs in zip(self._own, self._theirs, strict=True):
            theirs[:] = own
