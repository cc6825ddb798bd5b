"""A model that computes: what it writes for a token depends on every token before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hostmem import Event
from hostmem.device import DONE
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
)
from kvtier.manager import KVCacheManager
from kvtier.sequence import KVSequence
from kvtier.transfer.memory import MemoryPool

__all__ = ["PAGE", "Engine", "T", "config_of"]

T = 4  # tokens per block
PAGE = 128 << 10  # bytes: 16 pages in the least quota


def config_of(
    gpu: int = 2,
    host: int = 0,
    disk: tuple[int, Any] | None = None,
    *,
    gpu_max: int | None = None,
    windows: Sequence[tuple[int | None, int | None]] = ((None, None),),
    **options: Any,
) -> KVCacheManagerConfig:
    """Describe a cache whose quotas are MiB, with a pool group of equal pages for each window."""
    tiers: list[Any] = [GpuCacheTierConfig(f"{gpu}MiB", f"{gpu_max or gpu}MiB")]
    if host:
        tiers.append(HostCacheTierConfig(f"{host}MiB", f"{host}MiB"))
    if disk:
        tiers.append(DiskCacheTierConfig(f"{disk[0]}MiB", disk[1], f"{disk[0]}MiB"))
    layers = [
        AttentionLayerConfig(n, [BufferConfig("kv", PAGE)], window, sinks)
        for n, (window, sinks) in enumerate(windows)
    ]
    return KVCacheManagerConfig(T, tiers, layers, **options)


class _Range:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _mark(before: int, token: int) -> int:
    """Work out what stands for a token in the pages, from what stands for the one before it."""
    return hash((before, token)) & 0x7FFF_FFFF_FFFF_FFFF


class Engine:
    """Drives sequences of a manager; reads and writes their pages in the hot memory itself."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.groups = manager.storage.plan.groups
        self.memory = [self._memory_of(group) for group in range(len(self.groups))]

    def _memory_of(self, group: int) -> NDArray[np.uint64]:
        """Give all slots there can be: shape (slots, tokens, words of a token)."""
        level = self.manager.storage.levels[0]
        (pool,) = level.groups[group].memory.pools
        address = cast(MemoryPool, pool).memory.address
        interface: Any = _Range(address, level.plan.max_slots[group] * PAGE)
        return np.asarray(interface).view(np.uint64).reshape(-1, T, PAGE // T // 8)

    @staticmethod
    def marks(tokens: Iterable[int]) -> list[int]:
        found, mark = [], 0
        for token in tokens:
            mark = _mark(mark, token)
            found.append(mark)
        return found

    def write(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Write the pages of all tokens behind those committed; ``tokens`` are from the first."""
        marks = self.marks(tokens)
        for group, memory in enumerate(self.memory):
            table = sequence.page_table(group)
            for at in range(sequence.num_tokens, len(tokens)):
                slot = int(table[at // T])
                assert slot >= 0, f"no page to write token {at}"
                memory[slot, at % T] = marks[at] + group

    def verify(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Compare every byte that the next token sees."""
        count = sequence.num_tokens
        marks = self.marks(tokens[:count])
        for group, memory in enumerate(self.memory):
            layout, table = self.groups[group], sequence.page_table(group)
            assert len(table) * T == sequence.capacity
            for at in range(count):
                window, sinks = layout.sliding_window_size, layout.num_sink_tokens or 0
                if window is not None and sinks <= at <= count - window:
                    continue
                slot = int(table[at // T])
                assert slot >= 0, f"group {group} has no page of token {at} of {count}"
                assert (memory[slot, at % T] == marks[at] + group).all(), (
                    f"group {group}, token {at} of {count}: wrong bytes in slot {slot}"
                )

    def step(
        self, sequence: KVSequence, tokens: Sequence[int], ready: Event = DONE, most: int = 1 << 30
    ) -> None:
        """Compute the tokens behind those committed, ``most`` at a time."""
        while (count := sequence.num_tokens) < len(tokens):
            part = tokens[: count + most]
            sequence.grow(len(part) - count)
            sequence.wait()
            self.verify(sequence, tokens)
            self.write(sequence, part)
            sequence.commit(part[count:], ready)

    def start(self, tokens: Sequence[int], **options: Any) -> KVSequence:
        """Create a sequence for a prompt and compute what was not found."""
        sequence = self.manager.create_sequence(tokens, **options)
        self.step(sequence, tokens)
        sequence.wait()  # a block that got full may be another's by now, still on its way
        self.verify(sequence, tokens)
        return sequence

    def run(self, tokens: Sequence[int], **options: Any) -> int:
        """Compute a prompt and end its sequence; the tokens of it that were found."""
        with self.start(tokens, **options) as sequence:
            return sequence.num_cached_tokens

    def held(self) -> list[int]:
        """Give the hot pages that are in use, by group."""
        return [self.manager.storage.leased(group) for group in range(len(self.groups))]
