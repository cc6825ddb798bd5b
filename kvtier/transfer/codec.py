"""What a page is made of in the levels that are not hot: codecs, and the one that is the default.

In the hot level a block's bytes lie where attention reads them, in a slot of each pool. On their
way to another level they become one page, and a codec says how: it may reorder, quantise, compress
to a size that is known beforehand, or add a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np

from hostmem import Stream
from hostmem.describing import one_line
from hostmem.units import format_size
from kvtier.transfer.plan import Addresses, CopyPlan

if TYPE_CHECKING:
    from kvtier.layout import GroupLayout

__all__ = [
    "ColdPageCodec",
    "Concatenate",
    "check_codec",
    "concatenation",
    "configured",
    "piece_sizes",
]

_METHODS = ("configure", "page_bytes", "encode", "decode")


class ColdPageCodec(Protocol):
    """Makes cold pages of hot ones, and hot ones of cold ones again.

    Batches are given as addresses. A hot page is several pieces, and ``hot[k, i]`` is the address
    of piece k of page i. The pieces are the slots of the group's pools, ``groups[group].pools``;
    where the engine owns the hot pages they are its buffers, pool by pool: there are then as many
    rows as buffers (`piece_sizes` tells the cases apart). ``cold[i]`` is the address of
    page i, `page_bytes` of it in one piece.

    Every piece and every page lies within one registration, so that one copy may move it. What
    continues another may lie in the next registration: copies must not span two of them.
    """

    def configure(self, groups: tuple[GroupLayout, ...]) -> None:
        """Learn the pool groups; called whenever a plan is made, with the same ones each time."""

    def page_bytes(self, group: int) -> int:
        """Give the bytes of a page of a group in every level that is not hot: always the same."""

    def encode(self, group: int, hot: Addresses, cold: Addresses, stream: Stream) -> None:
        """Submit work that makes cold pages of hot ones, and return.

        Parameters
        ----------
        group : int
            Index of the pool group.
        hot : uint64 array, shape (pieces, pages)
            Where the pieces are. The hot pages must stay as they are, also where this fails.
        cold : uint64 array, shape (pages,)
            Where each page goes. Until it is there, or after a failure, it may hold anything.
        stream : Stream
            Runs the work, in order. On a GPU, launch kernels on ``stream.handle``; on the cpu
            device, let ``stream.call`` run a function. It belongs to the copier: do not wait for
            it here, and do not close it. Called on a thread of the copier, with no context current.

        Raises
        ------
        Exception
            Any: the pages of this batch stay where they were. So they do if the work itself fails.
        """

    def decode(self, group: int, cold: Addresses, hot: Addresses, stream: Stream) -> None:
        """Submit work that makes hot pages of cold ones, and return; see `encode`."""


class Concatenate:
    """The default codec: the pieces of a hot page, one behind the other.

    A copier that has it joins the copies of neighbours where a page is one piece, since it knows
    where registrations end. Pieces have neighbours on one side only.
    """

    def __init__(self) -> None:
        self._groups: tuple[GroupLayout, ...] = ()

    @one_line
    def __repr__(self) -> str:
        sizes = ", ".join(format_size(group.page_bytes) for group in self._groups)
        return f"<Concatenate: pages of {sizes}>" if sizes else "<Concatenate, not configured>"

    def configure(self, groups: tuple[GroupLayout, ...]) -> None:
        """Learn the pool groups."""
        self._groups = groups

    def page_bytes(self, group: int) -> int:
        """Give the bytes of a page, which are those of its pieces."""
        return self._groups[group].page_bytes

    def encode(self, group: int, hot: Addresses, cold: Addresses, stream: Stream) -> None:
        """Submit a copy of each piece of each page, in one batch."""
        self._submit(group, hot, cold, stream, up=False)

    def decode(self, group: int, cold: Addresses, hot: Addresses, stream: Stream) -> None:
        """Submit a copy of each piece of each page, in one batch."""
        self._submit(group, hot, cold, stream, up=True)

    def _submit(
        self, group: int, hot: Addresses, cold: Addresses, stream: Stream, *, up: bool
    ) -> None:
        sizes = piece_sizes(self._groups[group], len(hot))
        plan = concatenation(hot, cold, sizes, up=up)
        stream.copy(plan.destinations, plan.sources, plan.sizes)


def concatenation(hot: Addresses, cold: Addresses, sizes: Sequence[int], *, up: bool) -> CopyPlan:
    """Plan the copies between pieces and whole pages, piece by piece; see `Concatenate`."""
    nbytes = np.array(sizes, np.uint64)[:, np.newaxis]
    # One allocation: several that are freed at once go back to the kernel, and come back as zeros.
    plan = np.empty((3, *hot.shape), np.uint64)
    pieces, places = (plan[0], plan[1]) if up else (plan[1], plan[0])
    pieces[:] = hot
    np.add(cold, nbytes.cumsum(axis=0) - nbytes, out=places)
    plan[2] = nbytes
    return CopyPlan(*plan.reshape(3, -1))


def piece_sizes(layout: GroupLayout, pieces: int) -> tuple[int, ...]:
    """Give the bytes of each piece of a hot page.

    Parameters
    ----------
    layout : GroupLayout
        Of the pool group.
    pieces : int
        How many a page has: as many as pools, or, where the engine owns the hot pages, as buffers.

    Raises
    ------
    ValueError
        It has neither number.
    """
    pools = tuple(pool.slot_size for pool in layout.pools)
    buffers = tuple(place.size for pool in layout.pools for place in pool.buffers)
    for sizes in (pools, buffers):
        if len(sizes) == pieces:
            return sizes
    raise ValueError(
        f"hot: {pieces} pieces a page, but the group has {len(pools)} pools of {len(buffers)} "
        "buffers"
    )


def check_codec(codec: ColdPageCodec) -> None:
    """Raise TypeError if a codec lacks a method, naming it."""
    missing = [name for name in _METHODS if not callable(getattr(codec, name, None))]
    if missing:
        raise TypeError(
            f"cold_page_codec: {type(codec).__name__} is no ColdPageCodec, it has no "
            f"{', '.join(missing)}"
        )


def configured(codec: ColdPageCodec, groups: tuple[GroupLayout, ...]) -> tuple[int, ...]:
    """Configure a codec, and check it; give the bytes of a cold page of each group.

    Raises
    ------
    TypeError
        It lacks a method, or gives a size that is no whole number.
    ValueError
        It gives a size below 1.
    """
    check_codec(codec)
    codec.configure(groups)
    sizes = []
    for group in range(len(groups)):
        given = codec.page_bytes(group)
        what = f"cold_page_codec: {type(codec).__name__}.page_bytes({group}) is {given!r}"
        if isinstance(given, bool) or not isinstance(given, SupportsIndex):
            raise TypeError(f"{what}, which is no whole number of bytes")
        if index(given) < 1:
            raise ValueError(f"{what}, the minimum is 1 B")
        sizes.append(index(given))
    return tuple(sizes)
