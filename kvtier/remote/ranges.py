"""Memory that a store's client reads and writes: registered with it where it is used."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from hostmem import HostMem
from kvtier.remote.client import StoreClient

__all__ = ["Ranges"]


class Ranges:
    """The ranges that are registered with one client. May be used from any thread.

    Host memory is registered a commit unit at a time, when a page in it is first sent or fetched:
    it is usable by then, whatever the fill has reached, and no page lies in two units.

    Parameters
    ----------
    client : StoreClient
        With whom.
    """

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}  # by start

    def add(self, start: int, nbytes: int) -> bool:
        """Register a range, in place of a shorter one that began there; tell whether it is."""
        with self._lock:
            end = start + nbytes
            if self._ends.get(start, 0) >= end:
                return True
            if self._ends.pop(start, None) is not None:
                self._client.unregister(start)
            if not self._client.register(start, nbytes):
                return False
            self._ends[start] = end
            return True

    def cover(self, memory: HostMem, pages: NDArray[np.uint64]) -> bool:
        """Register what lacks of the units of host memory that hold pages; tell whether all are."""
        unit, base, size = memory.commit_unit, memory.address, memory.size
        units = np.unique((pages - np.uint64(base)) // np.uint64(unit)).tolist()
        return all(self.add(base + at * unit, min(unit, size - at * unit)) for at in units)

    def close(self) -> None:
        """Unregister everything."""
        with self._lock:
            for start in self._ends:
                self._client.unregister(start)
            self._ends.clear()
