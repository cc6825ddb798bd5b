"""Where blocks lie in hot pages, and which of their bytes hold which tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.plan import CachePlan
from kvtier.testing.contents import BlockContents, Words, buffer_seed

__all__ = ["Buffers", "HotPages", "Part"]

Places = Mapping[tuple[int, str], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of one size in one pool group; arrays have one entry a buffer."""

    group: int
    """The pool group."""
    names: tuple[tuple[int, str], ...]
    """Layer and role of each."""
    ranks: tuple[int, ...]
    """Place of each among all buffers: by pool group, then layer as configured, then role."""
    bases: Words
    """Where page 0 begins."""
    strides: Words
    """Bytes from a page to the next."""
    seeds: Words
    """What makes the bytes of each differ."""
    contents: BlockContents
    """What a block is made of."""


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks in buffers of one size, as many as fit somewhere; arrays have one entry for each."""

    buffers: Buffers
    """The buffers."""
    which: NDArray[np.intp]
    """Which of them it is."""
    blocks: NDArray[np.intp]
    """Which block, counted from the first that was asked for."""
    pages: NDArray[np.int64]
    """Its page."""
    addresses: Words
    """Where it begins."""
    first: NDArray[np.int64]
    """Its first byte that is meant."""
    stop: NDArray[np.int64]
    """Its first byte that is not meant any more."""

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in these buffers, whether they are meant or not."""
        return len(self.which) * self.buffers.contents.size

    def states_of(self, states: Words) -> Words:
        """Give the seeds of the tokens, from the states of all tokens of each block."""
        return states[self.blocks] ^ self.buffers.seeds[self.which][:, np.newaxis]


class HotPages:
    """The hot pages of an engine.

    Parameters
    ----------
    plan : CachePlan
        What a block is made of.
    places : mapping of (layer_id, role) to (base, stride)
        Where page i of a buffer begins: at ``base + i * stride``.
    n_pages : sequence of int
        How many there are of each pool group.

    Raises
    ------
    ValueError
        Not the buffers of the plan, or pages that overlap.
    """

    def __init__(self, plan: CachePlan, places: Places, n_pages: tuple[int, ...]) -> None:
        self.tokens_per_block = plan.tokens_per_block
        """Tokens of a block."""
        self._n_pages = n_pages
        self.kinds = tuple(_kinds(plan, places))
        """The buffers, by pool group and size."""

    def parts(
        self, pages: ArrayLike, first_block: int, start: int, stop: int, room: int
    ) -> Iterator[Part]:
        """Say which bytes of which buffers hold tokens of a sequence.

        Parameters
        ----------
        pages : int array, shape (blocks,) or (groups, blocks)
            The page of each block; -1 for none.
        first_block : int
            Number in the sequence of the first of them.
        start, stop : int
            The tokens meant, by their numbers in the sequence.
        room : int
            Bytes that a part may have, where a block has not more.

        Raises
        ------
        ValueError
            A page that there is not, or one for a block that has none of the tokens up to
            ``stop``; before anything is yielded.
        """
        homes = np.asarray(pages, np.int64)
        homes = np.broadcast_to(homes, (len(self._n_pages), homes.shape[-1]))
        for group, n_pages in enumerate(self._n_pages):
            if (odd := homes[group][(homes[group] < -1) | (homes[group] >= n_pages)]).size:
                raise ValueError(f"pages: {odd[0]} of pool group {group}, which has {n_pages}")
        tokens = self.tokens_per_block
        begins = (first_block + np.arange(homes.shape[1])) * tokens
        if ((homes >= 0) & (begins >= stop)).any():
            raise ValueError(f"pages: one is for a block behind the last of {stop} tokens")
        low, high = np.clip(start - begins, 0, tokens), np.clip(stop - begins, 0, tokens)
        return (
            part
            for kind in self.kinds
            for part in _parts_of(kind, homes[kind.group], low, high, room)
        )


def _parts_of(
    kind: Buffers,
    homes: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    room: int,
) -> Iterator[Part]:
    first, stop = kind.contents.begins(low), kind.contents.begins(high)
    meant = np.flatnonzero((homes >= 0) & (stop > first))
    which = np.repeat(np.arange(len(kind.names)), len(meant))
    blocks = np.tile(meant, len(kind.names))
    most = max(room // kind.contents.size, 1)
    for at in range(0, len(which), most):
        buffers, some = which[at : at + most], blocks[at : at + most]
        pages = homes[some]
        addresses = kind.bases[buffers] + pages.astype(np.uint64) * kind.strides[buffers]
        yield Part(kind, buffers, some, pages, addresses, first[some], stop[some])


def _kinds(plan: CachePlan, places: Places) -> Iterator[Buffers]:
    wanted = {
        (place.layer_id, place.role): (place.size, index, layout.layer_ids.index(place.layer_id))
        for index, layout in enumerate(plan.groups)
        for pool in layout.pools
        for place in pool.buffers
    }
    if odd := wanted.keys() ^ places.keys():
        raise ValueError(f"buffers: {sorted(odd)} are not both planned and given")
    for name, (size, *_) in wanted.items():
        if places[name][1] < size:
            raise ValueError(f"buffers: {name} has a stride of {places[name][1]} B, below {size} B")
    ranks = {name: n for n, name in enumerate(sorted(wanted, key=lambda name: wanted[name][1:]))}
    for group, layout in enumerate(plan.groups):
        for pool in layout.pools:
            names = tuple((place.layer_id, place.role) for place in pool.buffers)
            yield Buffers(
                group,
                names,
                tuple(ranks[name] for name in names),
                np.array([places[name][0] for name in names], np.uint64),
                np.array([places[name][1] for name in names], np.uint64),
                np.array([buffer_seed(*name) for name in names], np.uint64),
                BlockContents(pool.buffers[0].size, plan.tokens_per_block),
            )
