"""Block contents that follow from key and position, written to hot pages and compared there."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hostmem import HostMem, StaticHostMem
from hostmem.closing import Closable
from kvtier.storage import TierStorage
from kvtier.transfer.memory import Ids, MemoryPool

__all__ = ["PatternEngine", "Words", "mix", "pattern_engine"]

Words = NDArray[np.uint64]


def mix(values: Words) -> Words:
    """Scramble 64-bit numbers (the finaliser of SplitMix64), so that neighbours differ all over."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class PatternEngine(Closable):
    """Stands for a model: it "computes" blocks, and knows what each must hold.

    Word i of a block is the scrambled position xor the scrambled key. Every byte depends on both,
    so that a block in the wrong place, a shifted one and a torn one are all told apart.

    Parameters
    ----------
    block_bytes : int
        Bytes of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._positions = mix(np.arange(-(-block_bytes // 8), dtype=np.uint64))
        self._expected = np.empty_like(self._positions)

    def _seeds(self, keys: Sequence[int]) -> Words:
        return mix(np.array(keys, np.int64).view(np.uint64) ^ np.uint64(0x5851F42D4C957F2D))

    def _content(self, seed: np.uint64) -> NDArray[np.uint8]:
        """Make what a block holds; valid until the next call."""
        np.bitwise_xor(self._positions, seed, out=self._expected)
        return self._expected.view(np.uint8)[: self._block_bytes]

    @abc.abstractmethod
    def write(self, slots: Ids, keys: Sequence[int]) -> None:
        """Fill hot pages; returns when they are filled."""

    @abc.abstractmethod
    def count_corrupt(self, slots: Ids, keys: Sequence[int]) -> int:
        """Compare hot pages byte for byte with what their keys say; count those that differ."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the hot pages."""


class _HostPattern(PatternEngine):
    """Hot pages in host memory: written and read in place."""

    def __init__(self, pool: MemoryPool, memory: HostMem) -> None:
        super().__init__(pool.slot_size)
        size = memory.size // pool.slot_size * pool.slot_size
        self._pages: NDArray[np.uint8] | None = memory.view(0, size, shape=(-1, pool.slot_size))

    def _hot(self) -> NDArray[np.uint8]:
        if self._pages is None:
            raise ValueError("the pattern engine is closed")
        return self._pages

    def write(self, slots: Ids, keys: Sequence[int]) -> None:
        pages = self._hot()
        for slot, seed in zip(slots.tolist(), self._seeds(keys), strict=True):
            pages[slot] = self._content(seed)

    def count_corrupt(self, slots: Ids, keys: Sequence[int]) -> int:
        pages = self._hot()
        return sum(
            not np.array_equal(pages[slot], self._content(seed))
            for slot, seed in zip(slots.tolist(), self._seeds(keys), strict=True)
        )

    def close(self) -> None:
        self._pages = None


class _DevicePattern(PatternEngine):
    """Hot pages in GPU memory: through a page-locked buffer."""

    def __init__(self, storage: TierStorage, pool: MemoryPool, most: int) -> None:
        super().__init__(pool.slot_size)
        self._pool = pool
        self._stream = storage.device.stream()
        self._memory = StaticHostMem(most * pool.slot_size, device=storage.device)
        self._buffers: NDArray[np.uint8] | None = self._memory.view(shape=(-1, pool.slot_size))

    def write(self, slots: Ids, keys: Sequence[int]) -> None:
        for buffer, seed in zip(self._staged(keys), self._seeds(keys), strict=True):
            buffer[:] = self._content(seed)
        self._copy(slots, to_device=True)

    def count_corrupt(self, slots: Ids, keys: Sequence[int]) -> int:
        buffers = self._staged(keys)
        buffers[:] = 0xA5  # a copy that does not happen is no match
        self._copy(slots, to_device=False)
        return sum(
            not np.array_equal(buffer, self._content(seed))
            for buffer, seed in zip(buffers, self._seeds(keys), strict=True)
        )

    def _staged(self, keys: Sequence[int]) -> NDArray[np.uint8]:
        if self._buffers is None:
            raise ValueError("the pattern engine is closed")
        return self._buffers[: len(keys)]

    def _copy(self, slots: Ids, *, to_device: bool) -> None:
        size = self._pool.slot_size
        near = self._memory.address + np.arange(len(slots), dtype=np.uint64) * np.uint64(size)
        far = self._pool.addresses(slots)
        to, source = (far, near) if to_device else (near, far)
        self._stream.copy(to, source, np.full(len(slots), size, np.uint64))
        self._stream.synchronize()

    def close(self) -> None:
        self._buffers = None
        self._stream.close()
        self._memory.close()


def pattern_engine(storage: TierStorage, most: int) -> PatternEngine:
    """Make an engine over the hot level's only pool, for batches of at most ``most`` blocks."""
    pool = cast(MemoryPool, storage.levels[0].groups[0].memory.pools[0])
    if isinstance(pool.memory, HostMem):
        return _HostPattern(pool, pool.memory)
    return _DevicePattern(storage, pool, most)
