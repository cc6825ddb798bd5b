"""How pages move: what leaves a level to make room, where it goes, and who waits for which copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import cast

import numpy as np

from hostmem import Event, OutOfPagesError
from hostmem.units import format_size
from kvtier.levels import Level
from kvtier.page import Page
from kvtier.transfer.copier import PageCopier
from kvtier.transfer.jobs import Dependencies, all_of
from kvtier.transfer.memory import Ids
from kvtier.transfer.page_events import gathered, whole
from kvtier.transfer.slot_io import SlotReadError

__all__ = ["Departure", "Mover"]


@dataclass(slots=True)
class _Eviction:
    """What an eviction will do."""

    levels: list[tuple[Level, int, list[Page]]]
    """From the hot end: how many pages leave the level, and which ones come to stay."""
    dropped: list[Page]
    """Pages that go for good."""


@dataclass(slots=True)
class Departure:
    """Where a page was before it was moved."""

    page: Page
    level: int
    slot: int
    ready: Event
    """Of the copy that brought its bytes there."""


def _may_leave(last: bool) -> Callable[[Page], bool]:
    return _may_be_dropped if last else _may_move


def _may_move(page: Page) -> bool:
    return page.leases == 0


def _may_be_dropped(page: Page) -> bool:
    return page.leases == 0 and not page.kept


class Mover:
    """Takes slots, makes room for them, and moves pages between slots.

    The bookkeeping moves at once, the bytes follow. Not thread-safe: callers hold the storage's
    lock.

    Parameters
    ----------
    levels : sequence of Level
        Hot to cold.
    copier : PageCopier
        Who moves the bytes.
    """

    def __init__(self, levels: Sequence[Level], copier: PageCopier) -> None:
        self._levels = levels
        self._copier = copier
        self.on_drop: Callable[[Page], None] | None = None
        """Told of each page that is dropped."""
        self.bytes_moved: Counter[str] = Counter()
        """Bytes submitted so far, by pair of levels such as ``gpu->host``."""
        self.pages_dropped = 0
        """Pages that left the last level, or were lost on the way, so far."""

    def take(self, level: int, group: int, n: int) -> tuple[Ids, tuple[Event, ...]]:
        """Take ``n`` slots of a level, once others moved down or went; all or nothing."""
        slots = self._levels[level].groups[group].slots
        missing = n - slots.available
        if missing > 0:
            self.evict(level, group, missing)
        taken = slots.allocate(n)
        return taken.ids, cast(tuple[Event, ...], taken.fences)

    def check_room(self, wanted: Mapping[int, int]) -> None:
        """Raise OutOfPagesError unless so many new pages of each pool group fit, all together."""
        if len(wanted) < 2:
            return  # taking them is all or nothing itself
        for group, n in wanted.items():
            missing = n - self._levels[0].groups[group].slots.available
            if missing > 0:
                self.plan_eviction(0, group, missing)

    def plan_eviction(self, level: int, group: int, n: int) -> _Eviction:
        """Choose what leaves a level and those below so that ``n`` slots get free; changes nothing.

        Its least valuable pages go to the next level, where as many must make room as find none;
        the last level drops them. Who arrives at a level may have to leave it at once. A page
        whose bytes a failed copy lost does not arrive anywhere.
        """
        plan = _Eviction([], [])
        arriving: list[Page] = []
        missing = n
        for at in self._levels[level:]:
            last = at is self._levels[-1]
            candidates = chain(at.policies[group].victims(), arriving)
            leaving = list(islice(filter(_may_leave(last), candidates), missing))
            if len(leaving) < missing:
                raise self._no_room(at.index, group, missing)
            gone = set(leaving)
            own = sum(page.level == at.index for page in leaving)
            plan.levels.append((at, own, [page for page in arriving if page not in gone]))
            arriving = []
            for page in leaving:
                (plan.dropped if last or page.lost else arriving).append(page)
            if not arriving:
                break
            room = self._levels[at.index + 1].groups[group].slots.available
            missing = max(len(arriving) - room, 0)
        return plan

    def evict(self, level: int, group: int, n: int) -> list[Departure]:
        """Free ``n`` slots of a level, or change nothing; see `plan_eviction`.

        Returns the pages that moved from the level. Its slots are free, fenced by their copies: a
        page whose copy fails is lost if its slot was taken; until then `put_back` saves it.
        """
        plan = self.plan_eviction(level, group, n)
        for at, own, _ in plan.levels:
            at.policies[group].evict(own, _may_leave(at is self._levels[-1]))
        for source, some in groupby(plan.dropped, attrgetter("level")):
            self.free(list(some), source, group)
        departures: list[Departure] = []
        for at, _, arrivals in reversed(plan.levels):  # whose slots have become free below
            ids, fences = self.take(at.index, group, len(arrivals))
            first = 0
            above = [self._levels[page.level].policies[group] for page in arrivals]
            for source, some in groupby(arrivals, attrgetter("level")):
                pages = list(some)
                gone = self.move(pages, source, at.index, ids[first : first + len(pages)], fences)
                if source == level:
                    departures += gone
                first += len(pages)
            for page, policy in zip(arrivals, above, strict=True):
                at.policies[group].insert_evicted(page, policy)
        self.pages_dropped += len(plan.dropped)
        if self.on_drop is not None:
            for page in plan.dropped:
                self.on_drop(page)
        return departures

    def move(
        self, pages: list[Page], source: int, to: int, ids: Ids, fences: tuple[Event, ...]
    ) -> list[Departure]:
        """Submit the copies of pages to other slots, and let them be there; say where they were."""
        if not pages:
            return []
        group = pages[0].group
        old = np.array([page.slot for page in pages], np.int32)
        after = Dependencies(gathered([page.ready for page in pages]), fences)
        source_group = self._levels[source].groups[group]
        if to == source:
            events = self._copier.relocate(source_group.memory, old, ids, after)
        else:
            destination = self._levels[to].groups[group].memory
            events = self._copier.copy(
                source_group.memory, old, destination, ids, after, up=to < source
            )
        pair = f"{self._levels[source].name}->{self._levels[to].name}"
        self.bytes_moved[pair] += len(pages) * source_group.memory.page_bytes
        departures = [Departure(page, source, page.slot, page.ready) for page in pages]
        first = 0
        slots = ids.tolist()
        for count, event in events:
            source_group.slots.release(old[first : first + count], event)
            for at in range(first, first + count):
                page = pages[at]
                page.level, page.slot, page.ready = to, slots[at], event.page(at - first)
            first += count
        return departures

    def failed(self, departures: Sequence[Departure]) -> list[Departure]:
        """Wait for moves; give those that failed although the page is whole where it was."""
        for gone in departures:
            gone.page.ready.wait_finished()
        return [
            gone
            for gone in departures
            if gone.page.lost
            and gone.ready.error is None
            and not isinstance(gone.page.ready.error, SlotReadError)
        ]

    def put_back(self, failed: Sequence[Departure]) -> None:
        """Undo failed moves; nobody may have taken the slots that the pages had."""
        for (level, group), some in groupby(failed, lambda gone: (gone.level, gone.page.group)):
            returning = list(some)
            slots = self._levels[level].groups[group].slots
            wanted = np.array([gone.slot for gone in returning], np.int32)
            taken = slots.allocate(slots.available)  # an allocator gives no slot by name
            fences = cast(tuple[Event, ...], taken.fences)
            slots.release(np.setdiff1d(taken.ids, wanted), all_of(fences))
            for gone in returning:
                page = gone.page
                if page.level != level:
                    self._levels[page.level].policies[group].remove(page)
                    self._levels[level].policies[group].insert(page)
                self.free([page], page.level, group)
                page.level, page.slot, page.ready = level, gone.slot, gone.ready

    def free(self, pages: list[Page], level: int, group: int) -> None:
        """Give the slots of pages back, each fenced by what may still use it."""
        slots = self._levels[level].groups[group].slots
        by_use: dict[tuple[Event, ...], list[int]] = {}
        for page in pages:
            by_use.setdefault((whole(page.ready), *page.fences), []).append(page.slot)
        for events, ids in by_use.items():
            slots.release(np.array(ids, np.int32), all_of(events))

    def _no_room(self, level: int, group: int, n: int) -> OutOfPagesError:
        stats = self._levels[level].groups[group].slots.statistics()
        return OutOfPagesError(
            f"level {self._levels[level].name}, group {group}: {n} more slots wanted, and too few "
            f"of its {stats.in_use} pages may go; release leases, or raise the quota "
            f"({format_size(self._levels[level].quota)})",
            level=level,
            group=group,
            wanted=n,
        )

    def relocate(self, pages: list[Page], level: int, group: int) -> list[Departure]:
        """Move pages to other slots of their level; what they are worth does not change."""
        where = self._levels[level].groups[group]
        taken = where.slots.allocate(len(pages))
        return self.move(pages, level, level, taken.ids, cast(tuple[Event, ...], taken.fences))
