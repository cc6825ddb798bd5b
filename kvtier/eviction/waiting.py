"""Runs that wait for their next use: how old they are, and which is worth least."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import Generic, TypeVar

from kvtier.eviction.outlook import AGES, BUCKETS, CELLS, Outlook, class_of
from kvtier.eviction.runs import Cohort, Run

__all__ = ["Waiting"]

Key = TypeVar("Key", bound=Hashable)

_OLDEST_FIRST = sorted(range(CELLS), key=lambda cell: -(cell % BUCKETS))
_LEAST_PAUSE, _MOST_PAUSE = 256, 8192
"""References between two rankings: an eighth of those seen so far, within these bounds."""


class Waiting(Generic[Key]):
    """Runs by class and age, in cohorts, and the cells of leaves in order of their worth.

    Runs grow old by the cohort, and cells are ordered anew once in a while, so that a run costs
    O(1) amortised whatever becomes of it.

    Parameters
    ----------
    epoch_refs : int
        References that count as one moment, an epoch; at least 1.
    """

    __slots__ = (
        "_aging", "_cells", "_cohorts", "_epoch", "_epoch_refs", "_followed", "_mask",
        "_next_epoch", "_next_ranking", "_order", "_outlook", "_place", "_refused", "_worth",
        "clock",
    )  # fmt: skip

    def __init__(self, epoch_refs: int) -> None:
        self.clock = 0
        """References so far."""
        self._epoch_refs = epoch_refs
        self._epoch = 0
        self._next_epoch = epoch_refs
        self._cohorts: dict[tuple[int, int], Cohort[Key]] = {}
        self._aging: list[deque[Cohort[Key]]] = [deque() for _ in AGES]
        self._outlook = Outlook()
        self._followed: Waiting[Key] | None = None
        self._cells: list[OrderedDict[Cohort[Key], None]] = [OrderedDict() for _ in range(CELLS)]
        self._order: list[int] = []  # cells, worth least first
        self._place = [0] * CELLS  # where a cell is in that order
        self._refused: OrderedDict[Run[Key], None] = OrderedDict()  # leaves that go first
        self._mask = 0  # bit of each place that has leaves
        self._worth: list[float] = []
        self._next_ranking = 0
        self._rank()

    def follow(self, above: Waiting[Key]) -> None:
        """Keep the time of another level, and value runs as that does."""
        if self._followed is None:
            self._followed, self._epoch_refs = above, above._epoch_refs
            self._next_epoch = self._next_ranking = 0
        self.tick(max(above.clock - self.clock, 0))

    @property
    def learns(self) -> bool:
        """Whether runs are valued by what was seen here."""
        return self._followed is None

    def tick(self, references: int) -> None:
        """Let time pass, in references."""
        self.clock += references
        if self.clock >= self._next_epoch:
            self._epoch = self.clock // self._epoch_refs
            self._next_epoch = (self._epoch + 1) * self._epoch_refs
            self._age()
        if self.clock >= self._next_ranking:
            self._rank()

    def note_return(self, run: Run[Key], keys: int) -> None:
        """Learn that keys of a run were asked for again."""
        assert run.cohort is not None
        self._outlook.note_return(run.cohort.cell, keys)

    def _age(self) -> None:
        """Move cohorts that have become old enough to the cells of the next age."""
        waited = self._outlook.waited
        for limit, aging, older in zip(AGES, self._aging, [*self._aging[1:], None], strict=True):
            born = self._epoch - limit
            while aging and aging[0].epoch <= born:
                cohort = aging.popleft()
                if not cohort.weight:
                    continue
                if cohort.leaves:
                    self._leave_cell(cohort)
                    cohort.cell += 1
                    self._enter_cell(cohort)
                else:
                    cohort.cell += 1
                waited[cohort.cell] += cohort.weight
                if older is not None:
                    older.append(cohort)

    def join(self, run: Run[Key], weight: int, like: Cohort[Key] | None = None) -> None:
        """Let a run age, from now on or as old as ``like``."""
        of = class_of(run.kind, run.turns)
        epoch, bucket = (self._epoch, 0) if like is None else (like.epoch, like.cell % BUCKETS)
        cohort = self._cohorts.get((of, epoch))
        if cohort is None:
            cohort = self._cohorts[of, epoch] = Cohort(of * BUCKETS + bucket, epoch)
            if bucket < len(AGES):
                self._aging[bucket].append(cohort)
        cohort.weight += weight
        self._outlook.waited[cohort.cell] += weight
        run.weight, run.cohort = weight, cohort
        if run.keys and not run.kids:
            self.lay(run)

    def part(self, run: Run[Key]) -> None:
        """Let a run age no longer."""
        cohort = run.cohort
        assert cohort is not None
        self.lift(run)
        run.cohort = None
        cohort.weight -= run.weight
        if not cohort.weight:
            del self._cohorts[cohort.cell // BUCKETS, cohort.epoch]

    def lay(self, run: Run[Key]) -> None:
        """Note that a run may lose keys."""
        if run.refused:
            self._refused[run] = None
            return
        cohort = run.cohort
        assert cohort is not None
        if not cohort.leaves:
            self._enter_cell(cohort)
        cohort.leaves[run] = None

    def lift(self, run: Run[Key]) -> None:
        """Note that a run may not lose keys."""
        if run.refused:
            self._refused.pop(run, None)
            return
        cohort = run.cohort
        assert cohort is not None
        if run in cohort.leaves:
            del cohort.leaves[run]
            if not cohort.leaves:
                self._leave_cell(cohort)

    def _enter_cell(self, cohort: Cohort[Key]) -> None:
        self._cells[cohort.cell][cohort] = None
        self._mask |= 1 << self._place[cohort.cell]

    def _leave_cell(self, cohort: Cohort[Key]) -> None:
        cell = self._cells[cohort.cell]
        del cell[cohort]
        if not cell:
            self._mask &= ~(1 << self._place[cohort.cell])

    def _rank(self) -> None:
        """Order the cells by what their keys are worth."""
        self._worth = self._outlook.worth() if self._followed is None else self._followed._worth
        self._order = sorted(_OLDEST_FIRST, key=self._worth.__getitem__)
        for place, cell in enumerate(self._order):
            self._place[cell] = place
        self._mask = sum(1 << self._place[cell] for cell in range(CELLS) if self._cells[cell])
        pause = min(max(self.clock // 8, _LEAST_PAUSE), _MOST_PAUSE)
        self._next_ranking = self.clock + pause

    # ------------------------------------------------------------------------- who goes

    def worth_of_new(self, run: Run[Key]) -> float:
        """Give what a key of a run is worth that is used now."""
        return self._worth[class_of(run.kind, run.turns) * BUCKETS]

    def worth_of(self, run: Run[Key]) -> float:
        """Give what a key of a run that waits is worth now; less than any other if refused."""
        assert run.cohort is not None
        return -inf if run.refused else self._worth[run.cohort.cell]

    def least(self, at_most: float) -> Run[Key] | None:
        """Give the leaf that is worth least, unless it is worth more than ``at_most``."""
        if self._refused:
            return next(iter(self._refused))
        if not self._mask:
            return None
        cell = self._order[(self._mask & -self._mask).bit_length() - 1]
        if self._worth[cell] > at_most:
            return None
        return next(iter(next(iter(self._cells[cell])).leaves))

    def in_order(self) -> Iterator[Run[Key]]:
        """Iterate over all runs with keys, worth least first, but each behind its children."""
        mask, first = self._mask, list(self._refused)
        left: dict[Run[Key], int] = {}  # children that are still to come
        freed: list[tuple[int, int, Run[Key]]] = []  # whose children have come, by place
        number = count()
        while mask or freed or first:
            place = (mask & -mask).bit_length() - 1 if mask else CELLS
            runs: Iterable[Run[Key]]
            if first:
                runs, first = first, []
            elif freed and freed[0][0] <= place:
                runs = (heappop(freed)[2],)
            else:
                mask &= mask - 1
                runs = chain.from_iterable(c.leaves for c in self._cells[self._order[place]])
            for run in runs:
                yield run
                parent = run.parent
                if parent is None or not parent.keys:
                    continue
                left[parent] = left.get(parent, parent.kids) - 1
                if not left[parent]:
                    assert parent.cohort is not None
                    heappush(freed, (self._place[parent.cohort.cell], next(number), parent))
