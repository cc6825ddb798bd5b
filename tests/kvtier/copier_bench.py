"""Memories of one pool group with pages of their own, and a copier between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hostmem import CudaDevice, CudaMemory, Device, Event, HostMem
from kvtier import PageCopier
from kvtier.transfer.codec import ColdPageCodec
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.memory import DiskPool, MemoryPool, PageMemory

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

__all__ = ["PAGES", "Bench", "finish", "ids"]

PAGES = 16
Bytes = NDArray[np.uint8]


class Bench:
    """Memories of one pool group, and a copier between them."""

    def __init__(self, device: Device, folder: Path, tiers: Tiers, stack: ExitStack) -> None:
        self.device = device
        self._folder = folder
        self._tiers = tiers
        self._stack = stack

    def copier(
        self, page: int, *, staged: bool = True, codec: ColdPageCodec | None = None
    ) -> PageCopier:
        copier = PageCopier(self.device, page, staged=staged, codec=codec)
        self._stack.callback(copier.close)
        return copier

    def host(self, *sizes: int, pages: int = PAGES, hot: bool = False) -> PageMemory:
        """Make pools in host memory, in several registrations."""
        pools = []
        for size in sizes:
            unit = size * 4
            memory = HostMem(
                pages * size, device=self.device, slot_size=size, commit_unit=unit, wait=True
            )
            self._stack.callback(memory.close)
            pools.append(MemoryPool(memory, size))
        return PageMemory(pools, hot=hot)

    def gpu(self, *sizes: int) -> PageMemory:
        """Make pools in the memory of a GPU."""
        pools = []
        for size in sizes:
            assert isinstance(self.device, CudaDevice)
            memory = CudaMemory(self.device, PAGES * size, PAGES * size, PAGES * size)
            self._stack.callback(memory.close)
            pools.append(MemoryPool(memory, size))
        return PageMemory(pools, hot=True)

    def hot(self, *sizes: int) -> PageMemory:
        return self.gpu(*sizes) if self.device.kind == "cuda" else self.host(*sizes, hot=True)

    def disk(self, size: int) -> PageMemory:
        file = SlotFile(str(self._folder), size, PAGES)
        self._stack.callback(file.close)
        return PageMemory([DiskPool(file)])

    def slot(self, pool: Any, slot: int) -> Bytes:
        assert isinstance(pool, MemoryPool)
        return self._tiers.raw(pool.memory.address + slot * pool.slot_size, pool.slot_size)

    def content(self, slot: int, nbytes: int = 12288) -> Bytes:
        """Say what `put` writes into a slot."""
        return self._tiers.content(slot + 1, nbytes)

    def put(self, memory: PageMemory, *slots: int) -> list[Bytes]:
        """Write something of its own into each page; give the pages."""
        pages = [self.content(slot, memory.page_bytes) for slot in slots]
        for slot, page in zip(slots, pages, strict=True):
            for pool, offset in zip(memory.pools, memory.offsets, strict=True):
                self.slot(pool, slot)[:] = page[offset : offset + pool.slot_size]
        return pages

    def get(self, memory: PageMemory, slot: int) -> Bytes:
        return np.concatenate([self.slot(pool, slot) for pool in memory.pools])


def ids(*slots: int) -> NDArray[np.int32]:
    return np.array(slots, np.int32)


def finish(events: Sequence[tuple[int, Event]]) -> list[int]:
    """Wait for a copy; give how many pages each of its events stands for."""
    for _, event in events:
        event.synchronize()
    return [count for count, _ in events]
