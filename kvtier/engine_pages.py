"""Pages that an engine owns: buffers of its layers, from and to which blocks are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostmem.describing import one_line
from hostmem.units import format_size
from kvtier.layout import GroupLayout
from kvtier.plan import CachePlan
from kvtier.storage import TierStorage
from kvtier.transfer.memory import Ids, PageMemory

__all__ = ["EnginePages"]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer of one layer in every page: a pool whose memory is somebody else's."""

    address: int
    stride: int
    slot_size: int
    slots: int

    def addresses(self, ids: Ids) -> NDArray[np.uint64]:
        return ids.astype(np.uint64) * np.uint64(self.stride) + np.uint64(self.address)

    def extent(self) -> tuple[int, int]:
        return self.address, self.stride * (self.slots - 1) + self.slot_size

    def registration_index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64] | None:
        return None  # a buffer is one allocation

    def wait_usable(self, ids: Ids) -> None:
        pass  # the engine's own memory is there

    def usable_slots(self) -> int:
        return self.slots

    def resize(self, slots: int) -> None:
        raise NotImplementedError("the engine's pages are as many as it said")

    def close(self) -> None:
        pass  # it is the engine's


class EnginePages:
    """The pages of an engine that has its own hot memory.

    Page i of a buffer is at ``base + i * stride``. The library copies between these addresses and
    its first level and never frees them: they must stay valid until every job on them is done.

    Parameters
    ----------
    storage : TierStorage or CachePlan
        What a block is made of.
    buffers : mapping of (layer_id, role) to (base, stride)
        Where each buffer of the configuration lies: address of page 0, and bytes from one page to
        the next. GPU memory, or host memory that is registered with the driver.
    n_pages : int or sequence of int
        Pages, of every pool group or of each.

    Raises
    ------
    ValueError
        Not the buffers of the configuration; a stride below the size of the buffer; no pages.

    Examples
    --------
    >>> import kvtier
    >>> layer = kvtier.AttentionLayerConfig(0, [kvtier.BufferConfig("kv", 4096)])
    >>> config = kvtier.KVCacheManagerConfig(16, [kvtier.HostCacheTierConfig("4MiB")], [layer])
    >>> EnginePages(config.plan(), {(0, "kv"): (0x7F00_0000_0000, 4096)}, 100)
    <EnginePages: 100 pages of 4 KiB>
    """

    def __init__(
        self,
        storage: TierStorage | CachePlan,
        buffers: Mapping[tuple[int, str], tuple[int, int]],
        n_pages: int | Sequence[int],
    ) -> None:
        plan = storage.plan if isinstance(storage, TierStorage) else storage
        groups = plan.groups
        counts = (n_pages,) * len(groups) if isinstance(n_pages, int) else tuple(n_pages)
        if len(counts) != len(groups):
            raise ValueError(f"n_pages: {len(counts)} numbers for {len(groups)} pool groups")
        if min(counts) < 1:
            raise ValueError(f"n_pages: {min(counts)} is below the minimum of 1 page")
        planned = {
            (place.layer_id, place.role)
            for layout in groups
            for pool in layout.pools
            for place in pool.buffers
        }
        if odd := planned ^ buffers.keys():
            raise ValueError(
                f"buffers: {sorted(odd)} are in the configuration or given, but not both"
            )
        self.groups = groups
        """What a block is made of."""
        self.n_pages = counts
        """Pages of each pool group."""
        self.memory = tuple(
            _memory(group, layout, buffers, count)
            for group, (layout, count) in enumerate(zip(groups, counts, strict=True))
        )
        """Where the pages are, by pool group."""

    def ranges(self) -> list[tuple[int, int]]:
        """Give the (start, nbytes) of every buffer, from its first page to the end of its last."""
        pools = [pool for memory in self.memory for pool in memory.pools]
        return [pool.extent() for pool in pools if isinstance(pool, _Buffer)]

    def homes(self, blocks: int, pages: ArrayLike) -> NDArray[np.int32]:
        """Check the pages given for some blocks.

        Parameters
        ----------
        blocks : int
            How many blocks.
        pages : integer array, shape (blocks,) or (groups, blocks)
            The page of each block, the same of every pool group or one of each; -1 for none.

        Returns
        -------
        int32 array, shape (groups, blocks)

        Raises
        ------
        ValueError, TypeError
            Another shape, no integers, a page that there is not, or one that is named twice.
        """
        given = np.asarray(pages)
        if given.dtype.kind not in "iu" and given.size:
            raise TypeError(f"pages: integers are needed, not {given.dtype}")
        shape = (len(self.groups), blocks)
        if given.shape not in ((blocks,), shape):
            raise ValueError(f"pages: the shape is {given.shape}, not ({blocks},) or {shape}")
        homes = np.broadcast_to(given, shape).astype(np.int64)
        for group, count in enumerate(self.n_pages):
            some = homes[group]
            if some.size and not (some.min() >= -1 and some.max() < count):
                odd = some[(some < -1) | (some >= count)][0]
                raise ValueError(f"pages: {odd} of pool group {group} is not in 0..{count - 1}")
            named = np.sort(some[some >= 0])
            if (twice := named[1:][named[1:] == named[:-1]]).size:
                raise ValueError(f"pages: {twice[0]} of pool group {group} is named twice")
        return homes.astype(np.int32)

    @one_line
    def __repr__(self) -> str:
        kinds = [
            f"{count:,} pages of {format_size(memory.page_bytes)}"
            for count, memory in zip(self.n_pages, self.memory, strict=True)
        ]
        return f"<EnginePages: {', '.join(kinds)}>"


def _memory(
    group: int,
    layout: GroupLayout,
    buffers: Mapping[tuple[int, str], tuple[int, int]],
    count: int,
) -> PageMemory:
    """Take the buffers of a group as the pools of its pages, in the order of a whole page."""
    pools = []
    for place in (place for pool in layout.pools for place in pool.buffers):
        name = place.layer_id, place.role
        base, stride = buffers[name]
        if stride < place.size:
            raise ValueError(f"buffers: {name} has a stride of {stride} B, below {place.size} B")
        if base <= 0:
            raise ValueError(f"buffers: {name} has the base {base}, which is no address")
        pools.append(_Buffer(base, stride, place.size, count))
    return PageMemory(pools, group, hot=True)
