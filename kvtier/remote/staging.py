"""Slots for pages on their way between a hot level and a store, which does not reach that one."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from hostmem import Device, StaticHostMem
from kvtier.transfer.memory import Ids, PageMemory

__all__ = ["Staging"]

_BYTES, _LEAST = 64 << 20, 8  # as many slots as so many bytes hold, but no fewer


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots as a pool of pages of one size."""

    base: int
    stride: int
    slot_size: int
    slots: int

    def addresses(self, ids: Ids) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        return ids.astype(np.uint64) * np.uint64(self.stride) + np.uint64(self.base)

    def registration_index(self, addresses: object) -> None:
        return None  # it is one registration

    def wait_usable(self, ids: Ids) -> None:
        pass

    def usable_slots(self) -> int:
        return self.slots

    def resize(self, slots: int) -> None:
        raise NotImplementedError("as many as there are")

    def close(self) -> None:
        pass  # with all of them


class Staging:
    """Slots of whole pages in page-locked memory. May be used from any thread.

    Parameters
    ----------
    device : Device
        Who copies between them and the hot level.
    page_bytes : sequence of int
        Bytes of a page of each pool group.
    most : int
        Slots that can be of use.
    """

    def __init__(self, device: Device, page_bytes: tuple[int, ...], most: int) -> None:
        stride = -(-max(page_bytes) // 4096) * 4096
        self.count = min(most, max(_BYTES // stride, _LEAST, 4 * len(page_bytes)))
        """Slots that there are."""
        self._memory = StaticHostMem(stride * self.count, device=device)
        self.address, self.nbytes = self._memory.address, self._memory.nbytes
        self.pools = tuple(
            _Slots(self._memory.address, stride, size, self.count) for size in page_bytes
        )
        """The slots as those of each pool group."""
        self.memory = tuple(PageMemory([pool], group) for group, pool in enumerate(self.pools))
        """The same, for copies."""
        self._lock = threading.Lock()
        self._free = list(range(self.count))

    def share(self, most: int) -> int:
        """Say how many slots one call should use, that two each way can go on at once."""
        return max(min(most, self.count // 4), 1)

    def take(self, n: int, leave: int = 0) -> Ids | None:
        """Take slots; None where not so many are free, beside those to ``leave``."""
        with self._lock:
            if n + leave > len(self._free):
                return None
            taken, self._free[-n:] = self._free[-n:], []
            return np.array(taken, np.int32)

    def give(self, ids: Ids) -> None:
        """Give slots back, which nothing uses any more."""
        with self._lock:
            self._free += ids.tolist()

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
