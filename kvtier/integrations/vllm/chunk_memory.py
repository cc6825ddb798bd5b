"""Host memory of chunks, and which copies move blocks of an engine's tensors to and from it.

Knows nothing of vLLM but its words: a *block* is the engine's unit of device memory, and has a
page in every tensor; a *chunk* is the unit of the host tier, of one block or several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostmem import Device, HostMem
from kvtier.transfer.memory import MemoryPool
from kvtier.transfer.plan import Addresses, CopyPlan

__all__ = ["BlockTensor", "ChunkMemory", "Places"]


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor of the engine's: one page of every block."""

    base: int
    """Address of the page of block 0."""
    stride: int
    """Bytes from one block's page to the next."""
    page_bytes: int
    """Bytes of a page."""

    def extent(self, blocks: int) -> tuple[int, int]:
        """Where so many blocks' pages are: (start, nbytes)."""
        return self.base, self.stride * (blocks - 1) + self.page_bytes

    def registration_index(self, addresses: Addresses) -> NDArray[np.int64] | None:
        """Say that copies may go from one page to the next."""
        return None


@dataclass(frozen=True, slots=True)
class Places:
    """Blocks of one group of layers, and where they are in chunks; shape (blocks,) each."""

    group: int
    """Which group of layers."""
    blocks: NDArray[np.int64]
    """The engine's numbers of the blocks."""
    chunks: NDArray[np.int64]
    """The chunk of each block."""
    parts: NDArray[np.int64]
    """Which block of its chunk each is, from 0."""


class ChunkMemory:
    """Memory for chunks, usable from the first one on and filled in the background.

    A chunk holds, tensor by tensor, the pages of its blocks.

    Parameters
    ----------
    tensors : sequence of BlockTensor
        The engine's; they must stay as long as anything is copied.
    groups : sequence of sequence of (int, int)
        Of each group of layers, the tensors that hold its blocks, and the bytes of a page that are
        worth copying.
    blocks_per_chunk : int
        Blocks of a chunk, at least 1.
    chunks : int
        How many chunks, at least 1.
    device : Device
        Who copies.
    page_mode, allow_remote_numa_fallback
        See `hostmem.HostMem`.

    Raises
    ------
    ValueError
        No tensor, no chunk, or a reference to a tensor that there is not, or beyond its page.
    HostOOMError, PlacementRefusedError, CuError
        As `hostmem.HostMem` says.
    """

    def __init__(
        self,
        tensors: Sequence[BlockTensor],
        groups: Sequence[Sequence[tuple[int, int]]],
        blocks_per_chunk: int,
        chunks: int,
        *,
        device: Device,
        page_mode: str | None = None,
        allow_remote_numa_fallback: bool = True,
    ) -> None:
        if not tensors or chunks < 1 or blocks_per_chunk < 1:
            raise ValueError(
                f"{len(tensors)} tensors, {chunks} chunks of {blocks_per_chunk} blocks: at least "
                "one of each is needed"
            )
        for index, nbytes in (ref for refs in groups for ref in refs):
            if not (0 <= index < len(tensors) and 0 < nbytes <= tensors[index].page_bytes):
                raise ValueError(f"groups: there is no page of {nbytes} bytes in tensor {index}")
        self.blocks_per_chunk = blocks_per_chunk
        self.chunks = chunks
        sizes = [tensor.page_bytes * blocks_per_chunk for tensor in tensors]
        self.chunk_bytes = sum(sizes)
        """Bytes of a chunk."""
        self._tensors = tuple(tensors)
        self._groups = tuple(map(tuple, groups))
        self._offsets = tuple(accumulate(sizes[:-1], initial=0))
        self.memory = HostMem(
            chunks * self.chunk_bytes,
            device=device,
            slot_size=self.chunk_bytes,
            page_mode=page_mode,
            allow_remote_numa_fallback=allow_remote_numa_fallback,
            on_register_failure="pageable",  # slower, where the alternative is no server
        )
        self._pool = MemoryPool(self.memory, self.chunk_bytes)

    def places(
        self,
        blocks: ArrayLike,
        group_sizes: Sequence[int],
        first_indices: Sequence[int],
        chunks: ArrayLike,
    ) -> list[Places]:
        """Say where blocks are in chunks.

        Parameters
        ----------
        blocks : integers
            The engine's numbers of blocks, those of one group behind those of another.
        group_sizes : sequence of int
            How many of each group.
        first_indices : sequence of int
            Of each group, the index of its first block in the request: it need not begin a chunk.
        chunks : integers
            The chunks that these blocks touch, in the same order.

        Raises
        ------
        ValueError
            More groups or fewer, or not the chunks that the blocks need.
        """
        numbers, ids = np.asarray(blocks, np.int64), np.asarray(chunks, np.int64)
        if not len(self._groups) == len(group_sizes) == len(first_indices):
            raise ValueError(
                f"blocks: of {len(group_sizes)} groups, beginning at {len(first_indices)} places; "
                f"there are {len(self._groups)} groups"
            )
        found = []
        block = chunk = 0
        for group, (size, first) in enumerate(zip(group_sizes, first_indices, strict=True)):
            if not size:
                continue
            index = np.arange(size) + first % self.blocks_per_chunk
            there, parts = np.divmod(index, self.blocks_per_chunk)
            touched = int(there[-1]) + 1
            mine = ids[chunk : chunk + touched]
            if len(mine) == touched:
                found.append(Places(group, numbers[block : block + size], mine[there], parts))
            block, chunk = block + size, chunk + touched
        if block != len(numbers) or chunk != len(ids):
            raise ValueError(
                f"{len(numbers)} blocks and {len(ids)} chunks were given, of groups that have "
                f"{block} blocks in {chunk} chunks"
            )
        if len(ids) and (ids.min() < 0 or ids.max() >= self.chunks):
            raise ValueError(f"chunks: {ids.min()}..{ids.max()}, of 0..{self.chunks - 1}")
        return found

    def nbytes(self, places: Iterable[Places]) -> int:
        """Bytes that are copied for blocks."""
        return sum(
            len(at.blocks) * sum(size for _, size in self._groups[at.group]) for at in places
        )

    def plan(self, places: Iterable[Places], *, to_host: bool) -> CopyPlan | None:
        """Work out the copies for blocks, and wait until the memory of their chunks is there.

        Parameters
        ----------
        places : iterable of Places
            Which blocks.
        to_host : bool
            Whether they go to the chunks, or come from there.

        Returns
        -------
        CopyPlan or None
            None for no blocks.

        Raises
        ------
        HostOOMError, ClosedError
            The memory will not be there.
        """
        plans = []
        for at in places:
            self._pool.wait_usable(at.chunks.astype(np.int32))
            chunks = self._pool.addresses(at.chunks.astype(np.int32))
            for index, size in self._groups[at.group]:
                tensor = self._tensors[index]
                pages = _at(tensor.base, at.blocks, tensor.stride)
                hosts = chunks + _at(self._offsets[index], at.parts, tensor.page_bytes)
                if to_host:
                    plan = CopyPlan.of(hosts, pages, size)
                else:
                    plan = CopyPlan.of(pages, hosts, size)
                if self.blocks_per_chunk > 1:  # otherwise no copy continues another
                    plan = plan.merged(*((self._pool, tensor) if to_host else (tensor, self._pool)))
                plans.append(plan)
        return CopyPlan.joined(plans) if plans else None

    def close(self) -> None:
        """Give the memory back; nothing may be copying any more. Idempotent."""
        self.memory.close()


def _at(base: int, numbers: NDArray[np.int64], stride: int) -> Addresses:
    return numbers.astype(np.uint64) * np.uint64(stride) + np.uint64(base)
