"""How pages move: what leaves a level to make room, where it goes, and who waits for which copy."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, islice
from operator import attrgetter
from typing import cast

import numpy as np

from hostmem import Event, OutOfPagesError
from hostmem.device import DONE
from hostmem.spans import span
from hostmem.units import format_size
from kvtier.latch import Latch
from kvtier.levels import Level
from kvtier.page import Departure, Page
from kvtier.records import Records
from kvtier.stats import Meter
from kvtier.transfer.copier import PageCopier
from kvtier.transfer.jobs import Dependencies, all_of
from kvtier.transfer.memory import Ids, PageMemory
from kvtier.transfer.page_events import PageEvents, gathered, whole
from kvtier.transfer.slot_io import SlotReadError

__all__ = ["Mover"]

log = logging.getLogger("kvtier")


@dataclass(slots=True)
class _Eviction:
    """What an eviction will do."""

    levels: list[tuple[Level, int, list[Page]]]
    """From the hot end: how many pages leave the level, and which ones come to stay."""
    dropped: list[Page]
    """Pages that go for good."""


@dataclass(slots=True, eq=False)
class _Moving:
    """Pages whose copy was submitted and is not known to have finished."""

    event: PageEvents
    pages: int
    nbytes: int
    pair: str
    brought: Sequence[Page] = ()
    """Pages whose bytes it brings; none where it takes them to others' memory."""
    gone: Sequence[Departure] = ()
    """Where they were; nothing where it brings them from others' memory."""


_SPARE_SLOTS, _SPARE_SHARE = 64, 32  # at most so many, and one in so many, of a level
_PRIORITY = attrgetter("priority")


def _may_move(page: Page) -> bool:
    return page.leases == 0


def _may_be_dropped(page: Page) -> bool:
    return page.leases == 0 and not page.kept


def _pending(event: Event) -> tuple[Event, ...]:
    """Give what is to be waited for of an event: nothing once it has finished well."""
    return () if event.query() and event.error is None else (event,)


class Mover:
    """Takes slots, makes room for them, and moves pages between slots.

    The bookkeeping moves at once, the bytes follow. A page whose copy fails is put back where it
    was while nobody else has got that slot; otherwise it is dropped. Not thread-safe: callers hold
    the storage's lock.

    Parameters
    ----------
    levels : sequence of Level
        Hot to cold.
    copier : PageCopier
        Who moves the bytes.
    latch : Latch
        Guards what must not be left half done.
    meter : Meter
        Told of what moves.
    records : Records, optional
        Of a last level whose files outlive the process.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        copier: PageCopier,
        latch: Latch,
        meter: Meter,
        records: Records | None = None,
    ) -> None:
        self._levels = levels
        self._copier = copier
        self._latch = latch
        self._meter = meter
        self._records = records
        self.on_drop: Callable[[Page], None] | None = None
        """Told of each page that is dropped."""
        self.on_move: Callable[[Sequence[Page], int, int], None] | None = None
        """Told of pages, the level they leave and the one they go to."""
        self.on_leave: Callable[[Sequence[Page]], None] | None = None
        """Told of pages of one group that make room, while they are where they were."""
        self.pages_dropped = 0
        """Pages that left the last level, or were lost on the way, so far."""
        self.deferred: set[Page] = set()
        """Pages that somebody waits for, who will see to them if their copy fails."""
        self._moving: dict[str, deque[_Moving]] = {}  # by pair of levels, oldest first
        # By slots whose copy is not settled and that nobody has got since: who left them last.
        self._left = [[dict[int, Departure]() for _ in level.groups] for level in levels]

    # ------------------------------------------------------------------------------------ slots

    def take(self, level: int, group: int, n: int) -> tuple[Ids, tuple[Event, ...]]:
        """Take ``n`` slots of a level, once others moved down or went; all or nothing."""
        self.settle()
        missing = n - self._levels[level].groups[group].slots.available
        if missing > 0:
            self.evict(level, group, missing)
        return self._allocate(level, group, n)

    def make_spare(self, level: int, group: int) -> None:
        """Evict a little more, so that slots are free of copies by the time they are wanted."""
        if self._levels[level] is self._levels[-1]:
            return
        slots = self._levels[level].groups[group].slots
        spare = min(_SPARE_SLOTS, slots.n_slots // _SPARE_SHARE)
        if (missing := spare - slots.available) > 0 and slots.in_use > missing:
            with contextlib.suppress(OutOfPagesError):  # nobody asked for them yet
                self.evict(level, group, missing)

    def _allocate(self, level: int, group: int, n: int) -> tuple[Ids, tuple[Event, ...]]:
        at = self._levels[level]
        where = at.groups[group]
        taken = where.slots.allocate(n)
        if left := self._left[level][group]:
            for slot in taken.ids.tolist():
                left.pop(slot, None)
        if n:
            self._meter.occupied(at.name, n, n * where.memory.page_bytes)
        return taken.ids, cast(tuple[Event, ...], taken.fences)

    def give_back(self, level: int, group: int, ids: Ids, fences: tuple[Event, ...]) -> None:
        """Undo `take`: nothing has used the slots since."""
        at = self._levels[level]
        at.groups[group].slots.release(ids, all_of(fences))
        self._meter.occupied(at.name, -len(ids), -len(ids) * at.groups[group].memory.page_bytes)

    def free(self, pages: list[Page], level: int, group: int) -> None:
        """Give the slots of pages back, each fenced by what may still use it."""
        at = self._levels[level]
        slots = at.groups[group].slots
        by_use: dict[tuple[Event, ...], list[int]] = {}
        for page in pages:
            by_use.setdefault((whole(page.ready), *page.fences), []).append(page.slot)
            page.origin = None  # nothing is to be put back any more
            page.slot = -1
        for events, ids in by_use.items():
            slots.release(np.array(ids, np.int32), all_of(events))
        nbytes = len(pages) * at.groups[group].memory.page_bytes
        self._meter.occupied(at.name, -len(pages), -nbytes)

    def adopt(self, level: int, group: int, slots: Sequence[int]) -> bool:
        """Take slots of a level by name; False, and nothing changed, if one is not free."""
        at = self._levels[level]
        where = at.groups[group]
        if max(slots, default=0) >= where.slots.n_slots or not where.slots.reclaim(slots):
            return False
        for slot in slots:
            self._left[level][group].pop(slot, None)
        self._meter.occupied(at.name, len(slots), len(slots) * where.memory.page_bytes)
        return True

    def forget_left(self, level: int, group: int, n_slots: int) -> None:
        """Let no page return to slots from ``n_slots`` on, whose memory is given back."""
        left = self._left[level][group]
        for slot in [slot for slot in left if slot >= n_slots]:
            del left[slot]

    def check_room(self, wanted: Mapping[int, int]) -> None:
        """Raise OutOfPagesError unless so many new pages of each pool group fit, all together."""
        for group, n in wanted.items():
            if n > (most := self._levels[0].groups[group].slots.n_slots):
                raise self._no_room(0, group, n, n - most)
        if len(wanted) < 2:
            return  # taking them is all or nothing itself
        for group, n in wanted.items():
            missing = n - self._levels[0].groups[group].slots.available
            if missing > 0:
                self.plan_eviction(0, group, missing)

    def _no_room(self, level: int, group: int, n: int, short: int) -> OutOfPagesError:
        stats = self._levels[level].groups[group].slots.statistics()
        why = (
            f"it has {stats.n_slots}"
            if n > stats.n_slots
            else f"too few of the {stats.in_use} pages in its {stats.n_slots} slots may go"
        )
        return OutOfPagesError(
            f"level {self._levels[level].name}, group {group}: {n} more slots wanted, {short} more "
            f"than can be freed: {why}; ask for fewer, release leases, or raise the quota "
            f"({format_size(self._levels[level].quota)})",
            level=level,
            group=group,
            wanted=n,
            short=short,
        )

    # --------------------------------------------------------------------------------- eviction

    def plan_eviction(self, level: int, group: int, n: int, *, anywhere: bool = False) -> _Eviction:
        """Choose what leaves a level and those below so that ``n`` slots get free; changes nothing.

        Its least valuable pages go to the next level, where as many must make room as find none;
        the last level drops them. Who arrives at a level may have to leave it at once, if nobody
        there is of a lower or of the same priority. A page whose bytes a failed copy lost does not
        arrive anywhere. While a level is about to shrink,
        only slots that stay count, unless it is for the shrink: then pages leave from ``anywhere``.
        """
        plan = _Eviction([], [])
        arriving: list[Page] = []
        missing = n
        for at in self._levels[level:]:
            last = at is self._levels[-1]
            arriving.sort(key=_PRIORITY)
            candidates = merge(at.policies[group].victims(), arriving, key=_PRIORITY)
            may_leave = self._leaver(at, group, anywhere and at.index == level)
            leaving = list(islice(filter(may_leave, candidates), missing))
            if len(leaving) < missing:
                raise self._no_room(at.index, group, missing, missing - len(leaving))
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

    def _leaver(self, at: Level, group: int, anywhere: bool) -> Callable[[Page], bool]:
        """Give a function that tells whether a page may leave a level, to make room there."""
        may_leave = _may_be_dropped if at is self._levels[-1] else _may_move
        slots, index, deferred = at.groups[group].slots, at.index, self.deferred
        limit = slots.n_slots if anywhere else slots.limit
        if limit == slots.n_slots and not deferred:
            return may_leave

        def leaves(page: Page) -> bool:
            if page.level == index and page.slot >= limit:
                return False
            # While somebody waits for it, a kept page is not known to have bytes that can be moved.
            return may_leave(page) and not (page.kept and page in deferred)

        return leaves

    @span("make room", "move", domain="kvtier")
    def evict(self, level: int, group: int, n: int, *, anywhere: bool = False) -> list[Departure]:
        """Free ``n`` slots of a level, or change nothing; see `plan_eviction`.

        Kept pages are waited for, because they must not be lost: this blocks while they move.

        Returns
        -------
        list of Departure
            Pages that moved from the level; its slots are free, fenced by their copies.

        Raises
        ------
        OutOfPagesError
            Leased or kept pages leave no room, or a kept page could not be moved and is where it
            was; no page went that would not have gone before it.
        """
        plan = self.plan_eviction(level, group, n, anywhere=anywhere)
        departures: list[Departure] = []
        trouble: BaseException | None = None
        with self._latch:
            for at, own, _ in plan.levels:
                may_leave = self._leaver(at, group, anywhere and at.index == level)
                at.policies[group].evict(own, may_leave)
            if self.on_leave is not None:
                self.on_leave([*plan.dropped, *(p for *_, come in plan.levels for p in come)])
            for source, some in groupby(plan.dropped, attrgetter("level")):
                self.free(list(some), source, group)
            for at, _, arrivals in reversed(plan.levels):  # whose slots have become free below
                if trouble is not None:
                    for page in arrivals:
                        self._levels[page.level].policies[group].insert(page)
                    continue
                gone = self._bring(arrivals, at, group)
                departures += (one for one in gone if one.level == level)
                trouble = self._secure([one for one in gone if one.page.kept])
            self._tell_dropped(plan.dropped)
        if isinstance(trouble, Exception):
            raise OutOfPagesError(
                f"level {self._levels[level].name}, group {group}: kept pages had to make room "
                f"and could not be moved: {trouble}",
                level=level,
                group=group,
                wanted=n,
                short=n,
            ) from trouble
        if trouble is not None:
            raise trouble
        return departures

    def _bring(self, arrivals: list[Page], at: Level, group: int) -> list[Departure]:
        """Move evicted pages to a level that has room for them."""
        ids, fences = self._allocate(at.index, group, len(arrivals))
        above = [self._levels[page.level].policies[group] for page in arrivals]
        departures: list[Departure] = []
        first = 0
        for source, some in groupby(arrivals, attrgetter("level")):
            pages = list(some)
            departures += self.move(
                pages, source, at.index, ids[first : first + len(pages)], fences
            )
            first += len(pages)
        for page, policy in zip(arrivals, above, strict=True):
            at.policies[group].insert_evicted(page, policy)
        return departures

    def _secure(self, kept: list[Departure]) -> BaseException | None:
        """Wait until kept pages have arrived; put back those that have not, and say why."""
        trouble: BaseException | None = None
        for gone in kept:
            try:
                gone.page.ready.wait_finished()
            except BaseException as error:
                return error
            if (failure := gone.page.ready.error) is not None:
                trouble = trouble or failure
                slots = self._levels[gone.level].groups[gone.page.group].slots
                if gone.slot >= slots.limit:
                    slots.cancel_shrink()  # the page gets its slot back, so there will be none
                self.resolve([gone.page])
        return trouble

    def _tell_dropped(self, pages: Sequence[Page]) -> None:
        self.pages_dropped += len(pages)
        if self.on_drop is not None:
            for page in pages:
                self.on_drop(page)

    # -------------------------------------------------------------------------------- movements

    @span("move pages", "move", domain="kvtier")
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
        target = self._levels[to].groups[group].memory
        names = None
        if self._records is not None and to == self._records.level:
            names = self._records.note(pages, ids)
        if to == source:
            events = self._copier.relocate(target, old, ids, after, names=names)
        else:
            events = self._copier.copy(
                source_group.memory, old, target, ids, after, up=to < source, names=names
            )
        pair = f"{self._levels[source].name}->{self._levels[to].name}"
        page_bytes = source_group.memory.page_bytes
        departures = [Departure(page, source, page.slot, page.ready) for page in pages]
        slots = ids.tolist()
        first = 0
        for count, event in events:
            last = first + count
            gone = departures[first:last]
            self._release_left(gone, old[first:last], event)
            for at in range(first, last):
                page = pages[at]
                page.level, page.slot, page.ready = to, slots[at], event.page(at - first)
                page.origin = departures[at]
                page.unread = False
            self._note(_Moving(event, count, count * page_bytes, pair, pages[first:last], gone))
            first = last
        self._left[source][group].update((one.slot, one) for one in departures)
        self._meter.occupied(self._levels[source].name, -len(pages), -len(pages) * page_bytes)
        if self.on_move is not None and to != source:
            self.on_move(pages, source, to)
        return departures

    def _release_left(self, gone: list[Departure], ids: Ids, event: Event) -> None:
        """Give back slots that pages leave, fenced by the copy and by others that read them."""
        slots = self._levels[gone[0].level].groups[gone[0].page.group].slots
        if not any(one.page.fences for one in gone):
            slots.release(ids, event)
            return
        by_use: dict[tuple[Event, ...], list[int]] = {}
        for one in gone:
            by_use.setdefault(one.page.fences, []).append(one.slot)
            one.page.fences = ()
        for fences, some in by_use.items():
            slots.release(np.array(some, np.int32), all_of((event, *fences)))

    def _note(self, moving: _Moving) -> None:
        self._meter.moved(moving.pair, moving.pages, moving.nbytes)
        queue = self._moving.get(moving.pair)
        if queue is None:
            queue = self._moving[moving.pair] = deque()
        queue.append(moving)

    def copy_in(self, pages: list[Page], source: PageMemory, ids: Ids, ready: Event) -> None:
        """Fill new pages of the first level from memory that somebody else owns."""
        at = self._levels[0]
        where = at.groups[pages[0].group]
        slots = np.array([page.slot for page in pages], np.int32)
        fences = {id(event): event for page in pages for event in page.fences}
        # As the event of each page: the places in an event of several are not those of these.
        after = Dependencies(gathered([ready] * len(pages)), tuple(fences.values()))
        hot = where.memory.hot  # then the other memory is no engine's, and has whole pages
        events = self._copier.copy(source, ids, where.memory, slots, after, up=hot)
        owner = "remote" if hot else "engine"
        first = 0
        for count, event in events:
            part = pages[first : first + count]
            for index, page in enumerate(part):
                page.ready, page.fences = event.page(index), ()
            nbytes = count * where.memory.page_bytes
            self._note(_Moving(event, count, nbytes, f"{owner}->{at.name}", part))
            first += count

    def copy_out(
        self, pages: list[Page], target: PageMemory, ids: Ids, ready: Event
    ) -> list[Event]:
        """Copy pages of the first level to memory that somebody else owns; an event of each."""
        at = self._levels[0]
        where = at.groups[pages[0].group]
        slots = np.array([page.slot for page in pages], np.int32)
        after = Dependencies(gathered([page.ready for page in pages]), _pending(ready))
        hot = where.memory.hot
        copies = self._copier.copy(where.memory, slots, target, ids, after, up=not hot)
        owner = "remote" if hot else "engine"
        events: list[Event] = []
        for count, event in copies:
            first = len(events)
            for page in pages[first : first + count]:
                page.fences = (*(e for e in page.fences if not e.query()), event)
            nbytes = count * where.memory.page_bytes
            self._note(_Moving(event, count, nbytes, f"{at.name}->{owner}"))
            events += map(event.page, range(count))
        return events

    def relocate(self, pages: list[Page], level: int, group: int) -> list[Departure]:
        """Move pages to other slots of their level; what they are worth does not change."""
        ids, fences = self._allocate(level, group, len(pages))
        return self.move(pages, level, level, ids, fences)

    # --------------------------------------------------------------------------------- settling

    def settle(self) -> None:
        """Learn how finished copies ended; see to the pages of those that failed."""
        with self._latch:
            for queue in self._moving.values():
                while queue and queue[0].event.query():
                    self._settled(queue.popleft())

    def _settled(self, moving: _Moving) -> None:
        failures = moving.event.failures
        self._meter.arrived(moving.pair, moving.pages, moving.nbytes, len(failures))
        failed = []
        for n, page in enumerate(moving.brought):
            if whole(page.ready) is not moving.event:
                continue  # it went on, or its slot was given back
            if n not in failures:
                page.ready = DONE
                page.origin = None
            elif not page.leases:  # otherwise who waits for the copy sees to it
                failed.append(page)
        for n, one in enumerate(moving.gone):
            left = self._left[one.level][one.page.group]
            if n not in failures and left.get(one.slot) is one:
                del left[one.slot]
        self.resolve(failed)

    def resolve(self, pages: Iterable[Page]) -> None:
        """Put pages that a failed copy has lost back where they were, or drop them."""
        dropped = []
        for page in pages:
            if page.freed or page in self.deferred or not page.lost:
                continue
            policy = self._levels[page.level].policies[page.group]
            if page in policy:
                policy.remove(page)
            gone = page.origin
            if gone is not None and self.is_whole(gone) and self._return(gone):
                continue
            self.free([page], page.level, page.group)
            dropped.append(page)
        self.forget(dropped)
        self._tell_dropped(dropped)

    def forget(self, pages: Iterable[Page]) -> None:
        """Let pages that are gone for good not come back when their file is opened again."""
        if self._records is not None:
            self._records.forget(pages)

    def is_whole(self, gone: Departure) -> bool:
        """Tell whether a page whose copy failed can be as it was, where it was."""
        error = gone.page.ready.error
        left = self._left[gone.level][gone.page.group]
        if gone.ready.error is not None or left.get(gone.slot) is not gone:
            return False
        if isinstance(error, SlotReadError):
            return error.errno != errno.EBADMSG and gone.level != gone.page.level
        return True

    def _return(self, gone: Departure) -> bool:
        page = gone.page
        if not self.adopt(gone.level, page.group, [gone.slot]):
            return False
        source, to = self._levels[gone.level], self._levels[page.level]
        log.error("%r stays in level %s: %s", page, source.name, page.ready.error)
        self.free([page], page.level, page.group)
        if self.on_move is not None and source is not to:
            self.on_move([page], to.index, source.index)
        page.unread = source.index > to.index
        page.level, page.slot, page.ready = gone.level, gone.slot, gone.ready
        page.fences = gone.fences
        page.origin = None
        source.policies[page.group].insert(page)
        return True

    def check(self, level: int, group: int, in_use: set[int]) -> None:
        """Verify what is remembered of the slots of a level that are free."""
        for slot, gone in self._left[level][group].items():
            assert slot not in in_use, f"slot {slot} of level {level} was left and is in use"
            assert (gone.level, gone.slot, gone.page.group) == (level, slot, group)
