"""Which hot slot each block of a sequence is in: per pool group, an array ready for a kernel."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageTables"]

Table = NDArray[np.int32]


class _Blocks(Protocol):
    def __len__(self) -> int: ...

    def slots(self, group: int = 0) -> Table: ...


class PageTables:
    """One table a pool group, all of the same length, which grow and are changed in place.

    Not thread-safe, except that a view may be looked up at any time.
    """

    __slots__ = ("_tables", "blocks", "views")

    def __init__(self, groups: int) -> None:
        self._tables = [np.empty(0, np.int32) for _ in range(groups)]  # as long as they ever were
        self.blocks = 0
        """Entries of each."""
        self.views: list[Table | None] = [None] * groups
        """What `view` gave since the table last changed."""

    def view(self, group: int) -> Table:
        """Give a table, read-only; the same object as long as no entry changes or is added."""
        view = self.views[group]
        if view is None:
            view = self._tables[group][: self.blocks]
            view.flags.writeable = False
            self.views[group] = view
        return view

    def put(self, first: int, held: _Blocks) -> None:
        """Write the slots of blocks from entry ``first`` on, which is at most the next one."""
        end = first + len(held)
        for group, table in enumerate(self._tables):
            slots = held.slots(group)
            if end <= self.blocks and np.array_equal(table[first:end], slots):
                continue
            if end > len(table):
                longer = np.empty(max(2 * len(table), end), np.int32)
                longer[:first] = table[:first]
                self._tables[group] = table = longer
            table[first:end] = slots
            self.views[group] = None
        self.blocks = max(self.blocks, end)

    def hide(self, group: int, first: int, end: int) -> None:
        """Write -1 where pages were let go."""
        self._tables[group][first:end] = -1
        self.views[group] = None

    def clear(self) -> None:
        """Leave no entry; arrays that were given stay as they are until the next `put`."""
        self.blocks = 0
        self.views = [None] * len(self.views)
