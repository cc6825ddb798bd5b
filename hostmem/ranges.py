"""Disjoint ranges of integers, looked up one at a time or by the array."""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RangeTable"]

_FEW = 6  # ranges: looking at each is faster than a search


class _Snapshot(NamedTuple):
    """Where ranges begin and end, in ascending order."""

    each: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    joined: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    """Those that touch are one."""


class RangeTable:
    """A sorted set of disjoint ranges ``[start, start + nbytes)``.

    Many readers, writers under a lock of its own: a fill adds ranges while others look ranges up.
    Lookups of one value cost O(log n); lookups of arrays are vectorised over a snapshot that is
    made anew after a change.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._ranges: list[tuple[int, int]] = []  # (start, end), sorted
        self._snapshot: _Snapshot | None = None

    def abandon(self) -> None:
        """Empty the table in a forked child, where whoever held the lock does not exist."""
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._ranges, self._snapshot = [], None

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def first(self) -> int | None:
        """Where the first range begins; None for an empty table."""
        with self._lock:
            return self._ranges[0][0] if self._ranges else None

    @property
    def total(self) -> int:
        """Bytes in all ranges."""
        return sum(nbytes for _, nbytes in self)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over (start, nbytes), ascending, of the table as it is now."""
        with self._lock:
            ranges = list(self._ranges)
        return ((start, end - start) for start, end in ranges)

    def add(self, start: int, nbytes: int) -> None:
        """Add a range.

        Raises
        ------
        ValueError
            If it overlaps one that is there; the message names that one.
        """
        end = start + nbytes
        with self._lock:
            at = bisect_left(self._ranges, (start, 0))
            for other, other_end in self._ranges[max(at - 1, 0) : at + 1]:
                if other < end and start < other_end:
                    raise ValueError(
                        f"[{start:#x}, {end:#x}) overlaps [{other:#x}, {other_end:#x})"
                    )
            insort(self._ranges, (start, end))
            self._snapshot = None

    def remove(self, start: int) -> int:
        """Remove the range that begins at ``start`` and return its bytes; KeyError if none does."""
        with self._lock:
            at = bisect_left(self._ranges, (start, 0))
            if at == len(self._ranges) or self._ranges[at][0] != start:
                raise KeyError(start)
            _, end = self._ranges.pop(at)
            self._snapshot = None
        return end - start

    def discard(self, start: int) -> None:
        """Remove the range that begins at ``start``, if one does."""
        with contextlib.suppress(KeyError):
            self.remove(start)

    def at(self, value: int) -> tuple[int, int] | None:
        """Return the (start, nbytes) of the range that holds ``value``, or None."""
        with self._lock:
            at = bisect_right(self._ranges, (value, 1 << 64)) - 1
            if at >= 0 and value < self._ranges[at][1]:
                start, end = self._ranges[at]
                return start, end - start
        return None

    def overlapping(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the (start, nbytes) of the ranges that share a byte with ``[start, end)``."""
        with self._lock:
            first = max(bisect_left(self._ranges, (start, 0)) - 1, 0)
            last = bisect_left(self._ranges, (end, 0))
            return [(s, e - s) for s, e in self._ranges[first:last] if e > start]

    def index_of(self, values: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Give the index in the sorted table of the range that holds each value, or -1."""
        return _index(values, *self._arrays().each)

    def first_leaving(self, starts: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> int | None:
        """Find the first of the given ranges that begins in a range of the table and leaves it.

        Ending in the next range of the table is leaving, too. Sizes are at least 1.
        """
        firsts, ends = self._arrays().each
        index = _index(starts, firsts, ends)
        inside = index >= 0
        if not inside.any():
            return None
        # Ranges do not overlap: what ends in the one that it begins in ends before that does.
        leaves = inside & (starts + sizes > ends[index])
        return int(leaves.argmax()) if leaves.any() else None

    def covers(self, starts: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell of each given range whether all of it is in the table; ranges there may touch."""
        firsts, ends = self._arrays().joined
        stops, inside = starts + sizes, np.zeros(len(starts), np.bool_)
        if len(firsts) <= _FEW:
            for first, end in zip(firsts, ends, strict=True):
                inside |= (starts >= first) & (stops <= end)
            return inside
        index = _index(starts, firsts, ends)
        return (index >= 0) & (stops <= ends[index])

    def encloses(self, start: int, end: int) -> bool:
        """Tell whether all of ``[start, end)`` is in the table; ranges there may touch."""
        firsts, ends = self._arrays().joined
        at = int(firsts.searchsorted(np.uint64(start), side="right")) - 1
        return at >= 0 and end <= int(ends[at])

    def _arrays(self) -> _Snapshot:
        snapshot = self._snapshot
        if snapshot is None:
            with self._lock:
                pairs = np.array(self._ranges, np.uint64).reshape(-1, 2)
                firsts, ends = pairs.T.copy()
                apart = np.ones(len(pairs), np.bool_)  # from the one before
                apart[1:] = firsts[1:] != ends[:-1]
                joined = firsts[apart], ends[np.roll(apart, -1)]
                snapshot = self._snapshot = _Snapshot((firsts, ends), joined)
        return snapshot


def _index(
    values: NDArray[np.uint64], starts: NDArray[np.uint64], ends: NDArray[np.uint64]
) -> NDArray[np.int64]:
    if not len(starts):
        return np.full(len(values), -1, np.int64)
    at = starts.searchsorted(values, side="right") - 1
    at[values >= ends[at]] = -1  # before the first one it is -1 already
    return at
