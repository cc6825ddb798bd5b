"""Bytes that are not what was computed: which are the first, and whose they are instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.testing.contents import Words, mix
from kvtier.testing.hot_pages import Buffers, Part

__all__ = ["Search", "WrongBytes"]

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WrongBytes:
    """The first byte that is not what was computed, and how much else is wrong.

    The first: in the lowest block; there in the first layer and role, by pool groups and as
    configured; and there the lowest.
    """

    block: int
    """Number of the block in the sequence."""
    group: int
    """Pool group."""
    page: int
    """The block's hot page."""
    layer_id: int
    """Layer."""
    role: str
    """Role of the buffer."""
    token: int
    """Number of the token in the sequence."""
    offset: int
    """Bytes from the start of the block in that buffer."""
    expected: int
    """The byte that was computed."""
    found: int
    """The byte that is there."""
    nbytes: int
    """Wrong bytes altogether."""
    blocks: tuple[int, ...]
    """Blocks with wrong bytes, by their numbers in the sequence."""
    origin: str
    """What the token's bytes are instead, where that can be told; otherwise empty."""

    def __str__(self) -> str:
        some = ", ".join(map(str, self.blocks[:8])) + ", ..." * (len(self.blocks) > 8)
        return (
            f"block {self.block} (page {self.page} of group {self.group}), layer {self.layer_id} "
            f"{self.role!r}, token {self.token}: byte {self.offset} is {self.found:#04x}, not "
            f"{self.expected:#04x}{self.origin and f' ({self.origin})'}; {self.nbytes:,} bytes "
            f"are wrong, in {len(self.blocks)} blocks: {some}"
        )


@dataclass(frozen=True, slots=True)
class _Finding:
    """The first wrong byte of one block in one buffer."""

    rank: tuple[int, int]
    """Block, and place of its buffer: the lowest comes first."""
    buffers: Buffers
    name: tuple[int, str]
    page: int
    offset: int
    expected: Bytes
    found: Bytes


class Search:
    """Compares parts, in whatever order they come, and keeps the first wrong byte.

    Parameters
    ----------
    first_block : int
        Number in the sequence of the block that parts count from.
    """

    def __init__(self, first_block: int) -> None:
        self._first_block = first_block
        self._nbytes = 0
        self._blocks: set[int] = set()
        self._first: _Finding | None = None

    def compare(self, part: Part, expected: Bytes, found: Bytes) -> None:
        """Compare two arrays of shape (blocks, bytes) of a part."""
        if np.array_equal(_widest(expected), _widest(found)):
            return
        differs = expected != found
        self._nbytes += int(np.count_nonzero(differs))
        for n in np.flatnonzero(differs.any(axis=1)).tolist():
            block, which = int(part.blocks[n]), int(part.which[n])
            self._blocks.add(self._first_block + block)
            rank = block, part.buffers.ranks[which]
            if self._first is None or rank < self._first.rank:
                self._first = _Finding(
                    rank,
                    part.buffers,
                    part.buffers.names[which],
                    int(part.pages[n]),
                    int(np.argmax(differs[n])),
                    expected[n].copy(),
                    found[n].copy(),
                )

    def result(self, states: Words, kinds: Sequence[Buffers]) -> WrongBytes | None:
        """Say what was found.

        Parameters
        ----------
        states : uint64 array, shape (blocks, tokens)
            Of the whole sequence, in which the wrong bytes' origin is looked for.
        kinds : sequence of Buffers
            All there are.
        """
        first = self._first
        if first is None:
            return None
        contents = first.buffers.contents
        block = self._first_block + first.rank[0]
        token = contents.token_at(first.offset)
        layer_id, role = first.name
        begin, end = int(contents.begins(token)), int(contents.begins(token + 1))
        return WrongBytes(
            block=block,
            group=first.buffers.group,
            page=first.page,
            layer_id=layer_id,
            role=role,
            token=block * contents.tokens + token,
            offset=first.offset,
            expected=int(first.expected[first.offset]),
            found=int(first.found[first.offset]),
            nbytes=self._nbytes,
            blocks=tuple(sorted(self._blocks)),
            origin=_origin(first.found[begin:end], first.buffers, states, kinds),
        )


def _origin(found: Bytes, where: Buffers, states: Words, kinds: Sequence[Buffers]) -> str:
    """Say what the bytes of a token are, if they are another's of the same sequence, or nothing."""
    if len(found) > 1 and (found == found[0]).all():
        return f"each byte of the token is {int(found[0]):#04x}"
    seed = where.contents.seed_of(found)
    for kind in kinds if seed is not None else ():
        candidates = mix(states.ravel() ^ kind.seeds[:, np.newaxis])
        for which, token in np.argwhere(candidates == seed).tolist():
            layer_id, role = kind.names[which]
            return f"that is token {token} of layer {layer_id} {role!r}"
    return ""


def _widest(array: Bytes) -> NDArray[np.uint8] | Words:
    """See an array as 64-bit words, where it is a whole number of them."""
    return array.view(np.uint64) if array.shape[-1] % 8 == 0 else array
