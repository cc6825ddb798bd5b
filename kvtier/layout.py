"""What a block is made of: pool groups, their pools, and where each buffer lies in a slot.

Layers that keep and drop blocks together (same sliding window, same sink tokens) form a *group*;
one allocation serves them all. Inside a group, buffers of equal size share one *pool*: a slot of
the pool holds all of them side by side. In a colder level a block of the group is one page, the
concatenation of its hot slots in the order of the pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.config import AttentionLayerConfig

__all__ = ["BufferPlace", "GroupLayout", "PoolLayout", "group_layouts"]


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where one buffer of one layer lies in a slot of its pool."""

    layer_id: int
    """The layer it belongs to."""
    role: str
    """Its role in the layer, such as ``"key"``."""
    offset: int
    """Bytes from the start of the slot."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One pool of a group: slots of equally large buffers."""

    slot_size: int
    """Bytes of a slot: the number of buffers times their size."""
    buffers: tuple[BufferPlace, ...]
    """The buffers of a slot, ascending by offset and without a gap."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layers that share one slot allocator, and their pools."""

    pools: tuple[PoolLayout, ...]
    """In the order in which their buffer sizes first appear."""
    layer_ids: tuple[int, ...]
    """In the order of the configuration."""
    sliding_window_size: int | None
    """Tokens that attention looks back, the present one included; None: all."""
    num_sink_tokens: int | None
    """First tokens that stay visible beyond the window."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a block of this group: in the hot level over all pools, below in one page."""
        return sum(pool.slot_size for pool in self.pools)

    def stale_blocks(self, n_tokens: int, tokens_per_block: int) -> tuple[int, int]:
        """Tell which blocks the token at position ``n_tokens``, and every later one, cannot see.

        A window of w tokens is the token itself and the w - 1 before it. A block counts as seen if
        one of its tokens is, in the window or as a sink.

        Returns
        -------
        (int, int)
            The first such block and the one behind the last; equal where there is none.
        """
        if self.sliding_window_size is None:
            return 0, 0
        first = -(-(self.num_sink_tokens or 0) // tokens_per_block)
        seen_from = n_tokens + 1 - self.sliding_window_size
        return first, max(first, seen_from // tokens_per_block)

    @property
    def pool_offsets(self) -> tuple[int, ...]:
        """Bytes from the start of a cold page to each pool's hot slot."""
        return tuple(accumulate((pool.slot_size for pool in self.pools[:-1]), initial=0))


def group_layouts(layers: Sequence[AttentionLayerConfig]) -> tuple[GroupLayout, ...]:
    """Group layers and place their buffers.

    Parameters
    ----------
    layers : sequence of AttentionLayerConfig
        Valid ones: ids are distinct, and so are the roles within a layer.

    Returns
    -------
    tuple of GroupLayout
        In the order in which their (window, sink tokens) first appear. O(buffers).
    """
    members: dict[tuple[int | None, int | None], list[AttentionLayerConfig]] = {}
    for layer in layers:
        members.setdefault((layer.sliding_window_size, layer.num_sink_tokens), []).append(layer)
    return tuple(
        GroupLayout(_pools(group), tuple(layer.layer_id for layer in group), window, sinks)
        for (window, sinks), group in members.items()
    )


def _pools(layers: Sequence[AttentionLayerConfig]) -> tuple[PoolLayout, ...]:
    places: dict[int, list[BufferPlace]] = {}
    for layer in layers:
        for buffer in layer.buffers:
            pool = places.setdefault(buffer.size, [])
            offset = len(pool) * buffer.size
            pool.append(BufferPlace(layer.layer_id, buffer.role, offset, buffer.size))
    return tuple(PoolLayout(size * len(pool), tuple(pool)) for size, pool in places.items())
