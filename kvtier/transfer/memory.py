"""Where pages are: pools of slots in memory or in a file, and the pools that make up a page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, CudaMemory, Event, HostMem
from hostmem.device import DONE
from kvtier.transfer.disk import SlotFile

__all__ = ["AddressedPool", "DiskPool", "Ids", "MemoryPool", "PageMemory", "Pool"]

Ids = NDArray[np.int32]


class Pool(Protocol):
    """Slots of one size over one memory."""

    @property
    def slot_size(self) -> int:
        """Bytes of a slot."""

    def usable_slots(self) -> int:
        """Say how many slots, from 0, can be used without waiting."""

    def resize(self, slots: int) -> None:
        """Have memory for that many slots."""

    def close(self) -> None:
        """Give the memory back."""


class AddressedPool(Pool, Protocol):
    """A pool that copies reach by address."""

    @property
    def address(self) -> int:
        """Where slot 0 is."""

    @property
    def stride(self) -> int:
        """Bytes from a slot to the next."""

    def addresses(self, ids: Ids) -> NDArray[np.uint64]:
        """Give the addresses of slots; shape (slots,)."""

    def registration_index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64] | None:
        """Give the number of the registration that holds each address; None: copies may span."""

    def wait_usable(self, ids: Ids) -> None:
        """Block until slots are usable."""


class _Filled(Event):
    """The fill of host memory up to an offset."""

    __slots__ = ("_end", "_memory")

    def __init__(self, memory: HostMem, end: int) -> None:
        self._memory = memory
        self._end = end

    def query(self) -> bool:
        return self._memory.is_usable(self._end) or self.error is not None

    def synchronize(self, timeout: float | None = None) -> None:
        self._memory.wait_usable(self._end, timeout)

    @property
    def error(self) -> BaseException | None:
        memory = self._memory
        if memory.is_usable(self._end):
            return None
        return ClosedError("the memory was closed") if memory.closed else memory.failure


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Slots in memory that copies reach by address."""

    memory: HostMem | CudaMemory
    """The memory; slot 0 is at its address."""
    slot_size: int
    """Bytes of a slot."""

    @property
    def address(self) -> int:
        """Where slot 0 is."""
        return self.memory.address

    @property
    def stride(self) -> int:
        """Bytes from a slot to the next."""
        return self.slot_size

    def addresses(self, ids: Ids) -> NDArray[np.uint64]:
        """Give the addresses of slots; shape (slots,)."""
        return ids.astype(np.uint64) * np.uint64(self.stride) + np.uint64(self.address)

    def registration_index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64] | None:
        """Give the number of the registration that holds each address; None: copies may span."""
        if isinstance(self.memory, CudaMemory):
            return None
        return self.memory.registration_index(addresses - np.uint64(self.memory.address))

    def usable_slots(self) -> int:
        """Say how many slots, from 0, can be used without waiting."""
        if isinstance(self.memory, CudaMemory):
            return self.memory.size // self.slot_size
        return self.memory.committed // self.slot_size

    def wait_usable(self, ids: Ids) -> None:
        """Block until slots are usable: until the registration that holds the last one is done."""
        if isinstance(self.memory, HostMem) and len(ids):
            self.memory.wait_usable((int(ids.max()) + 1) * self.slot_size)

    def filled(self, ids: Ids) -> Event:
        """Give an event of the fill that makes slots usable; it fails if they will not be."""
        if isinstance(self.memory, HostMem) and len(ids):
            filled = _Filled(self.memory, (int(ids.max()) + 1) * self.slot_size)
            if not filled.query() or filled.error is not None:
                return filled
        return DONE

    def resize(self, slots: int) -> None:
        """Have memory for that many slots; growing host memory is filled in the background."""
        self.memory.resize(slots * self.slot_size)

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()


@dataclass(frozen=True, slots=True)
class DiskPool:
    """Slots in a file."""

    file: SlotFile
    """The file."""

    @property
    def slot_size(self) -> int:
        """Bytes of a slot."""
        return self.file.slot_size

    def usable_slots(self) -> int:
        """Say how many slots, from 0, can be used without waiting."""
        return self.file.slots

    def resize(self, slots: int) -> None:
        """Have room for that many slots, or give room back."""
        self.file.resize(slots)

    def close(self) -> None:
        """Finish what was submitted and give the room back."""
        self.file.close()


class PageMemory:
    """The pools of one pool group in one level: slot i of each makes up page i.

    Parameters
    ----------
    pools : sequence of Pool
        In the order in which their slots make up a page.
    group : int
        Index of the pool group.
    hot : bool
        Whether pages are in the layout that attention reads, even in a single pool, and become
        whole pages on their way to other levels; several pools always are.
    """

    def __init__(self, pools: Sequence[Pool], group: int = 0, *, hot: bool = False) -> None:
        self.pools = tuple(pools)
        self.group = group
        self.hot = hot or len(self.pools) > 1
        self.offsets = tuple(accumulate((p.slot_size for p in self.pools[:-1]), initial=0))
        """Bytes from the start of a page to each pool's slot."""
        self.page_bytes = sum(pool.slot_size for pool in self.pools)
        """Bytes of a page."""

    def addresses(self, ids: Ids) -> NDArray[np.uint64]:
        """Give the addresses of pages, where copies reach them: shape (pools, pages)."""
        bases, strides = self._places
        found = np.multiply(ids.astype(np.uint64), strides)
        found += bases
        return found

    @cached_property
    def _places(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Where each pool's slot 0 is and the bytes to its next; both of shape (pools, 1)."""
        pools = [cast(AddressedPool, pool) for pool in self.pools]
        bases, strides = ([pool.address for pool in pools], [pool.stride for pool in pools])
        return np.array(bases, np.uint64)[:, np.newaxis], np.array(strides, np.uint64)[
            :, np.newaxis
        ]

    def usable_pages(self) -> int:
        """Say how many pages, from 0, can be used without waiting."""
        return min(pool.usable_slots() for pool in self.pools)

    def wait_usable(self) -> None:
        """Block until all of it is usable; raise why it will not be."""
        for pool in self.pools:
            if isinstance(pool, MemoryPool) and isinstance(pool.memory, HostMem):
                pool.memory.wait_usable(pool.memory.size)

    def resize(self, pages: int) -> None:
        """Have memory for that many pages."""
        for pool in self.pools:
            pool.resize(pages)

    def close(self) -> None:
        """Give the memory of every pool back."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            for pool in self.pools:
                stack.callback(pool.close)
