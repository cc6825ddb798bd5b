"""What a GPU calls registered host memory, where that is not what the CPU calls it."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["Aliases"]

_Arrays = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


class Aliases:
    """Device addresses of ranges of host memory. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._known: dict[int, tuple[int, int]] = {}  # by address: bytes, and the device address
        self._snapshot: _Arrays | None = None

    def add(self, address: int, nbytes: int, alias: int) -> None:
        """Note that a range is at another address for the device."""
        with self._lock:
            self._known[address] = nbytes, alias
            self._snapshot = None

    def remove(self, address: int) -> None:
        """Forget the range that begins at an address, if it is known."""
        with self._lock:
            self._known.pop(address, None)
            self._snapshot = None

    def of(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Give device addresses: those outside all ranges are what they were."""
        starts, ends, shifts = self._arrays()
        if not len(starts):
            return addresses
        at = starts.searchsorted(addresses, side="right") - 1
        inside = (at >= 0) & (addresses < ends[at])
        return np.where(inside, addresses + shifts[at], addresses)

    def _arrays(self) -> _Arrays:
        snapshot = self._snapshot
        if snapshot is None:
            with self._lock:
                known = sorted(self._known.items())
                starts = np.array([start for start, _ in known], np.uint64)
                sizes = np.array([nbytes for _, (nbytes, _) in known], np.uint64)
                aliases = np.array([alias for _, (_, alias) in known], np.uint64)
                snapshot = starts, starts + sizes, aliases - starts  # modulo 2**64
                self._snapshot = snapshot
        return snapshot
