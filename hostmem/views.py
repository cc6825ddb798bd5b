"""Numpy arrays over memory of ours, and the knowledge of which of them live."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LiveViews"]


class _Export:
    """What an array of ours holds on to.

    Numpy keeps it alive as long as any array, slice, memoryview or tensor that came from it lives,
    and it keeps the owner of the memory.
    """

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class LiveViews:
    """The views of one memory that somebody still holds.

    Counted by a weak reference to what each view's arrays share, so that slices, memoryviews and
    imports into other libraries count, and dropping the last of them is enough.
    """

    def __init__(self) -> None:
        self._ranges: dict[weakref.ref[_Export], tuple[int, int]] = {}

    def make(self, owner: object, base: int, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Make a byte array over ``[start, start + nbytes)`` of the memory at ``base``."""
        export = _Export(owner, base + start, nbytes)
        if nbytes:
            # One dictionary operation each way: nothing here can be interrupted half-way.
            self._ranges[weakref.ref(export, self._forget)] = (start, start + nbytes)
        array: NDArray[np.uint8] = np.asarray(_interface(export))
        return array

    def _forget(self, reference: weakref.ref[_Export]) -> None:
        self._ranges.pop(reference, None)

    def holding(self, start: int, end: int | None = None) -> list[tuple[int, int]]:
        """Return the (start, end) of the live views that hold a byte of ``[start, end)``."""
        ranges = list(self._ranges.values())
        return sorted(r for r in ranges if r[1] > start and (end is None or r[0] < end))


def _interface(export: _Export) -> Any:
    return export
