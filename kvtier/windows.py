"""Which blocks of a sequence each pool group still needs: all, or those a sliding window shows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtier.layout import GroupLayout

__all__ = ["Windows"]

P = TypeVar("P")


class Windows:
    """The pool groups, and what their windows show of leading blocks of a sequence.

    Parameters
    ----------
    groups : sequence of GroupLayout
        The pool groups.
    tokens_per_block : int
        Tokens of a block.
    """

    def __init__(self, groups: Sequence[GroupLayout], tokens_per_block: int) -> None:
        self._groups = groups
        self._tokens = tokens_per_block
        everything = range(len(groups))
        self.whole = [g for g in everything if groups[g].sliding_window_size is None]
        """Groups that need every block."""
        self.sliding = [g for g in everything if groups[g].sliding_window_size is not None]
        """Groups with a window."""

    def stale(self, group: int, blocks: int) -> tuple[int, int]:
        """Tell which of so many full blocks the token behind them does not see: first and end."""
        first, end = self._groups[group].stale_blocks(blocks * self._tokens, self._tokens)
        return min(first, blocks), min(end, blocks)

    def sinks(self, group: int) -> int:
        """Count the blocks that are seen for ever; ValueError where a group has no window."""
        if group not in self.sliding:
            raise ValueError(f"group: {group} is not one of those with a window, {self.sliding}")
        return -(-(self._groups[group].num_sink_tokens or 0) // self._tokens)

    def usable(self, rows: Sequence[Sequence[P]], there: Callable[[P], bool]) -> int:
        """Say how many leading blocks can be used, where groups with a window may lack some.

        Parameters
        ----------
        rows : sequence of sequence
            Of each block, what stands for its page of each group.
        there : callable
            Tells whether that is a page.
        """
        gaps = {g: [n for n, row in enumerate(rows) if not there(row[g])] for g in self.sliding}
        count, before = len(rows), -1
        while count != before:  # where one window ends earlier, the others look elsewhere
            before = count
            for group, missing in gaps.items():
                while (gap := self._seen(group, missing, count)) is not None:
                    count = gap  # for with fewer blocks, too, it is seen as long as it is there
        return count

    def _seen(self, group: int, missing: Sequence[int], blocks: int) -> int | None:
        """Give the first of the missing, ascending, that the token behind so many blocks sees."""
        first, end = self.stale(group, blocks)
        at = 0 if missing and missing[0] < first else bisect_left(missing, end)
        return missing[at] if at < len(missing) and missing[at] < blocks else None

    def hide(self, columns: Sequence[list[P | None]]) -> None:
        """Put None where a window does not show a block; columns are by group, of all blocks."""
        for group in self.sliding:
            first, end = self.stale(group, len(columns[group]))
            columns[group][first:end] = [None] * (end - first)
