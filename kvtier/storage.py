"""The tier storage: levels of slots, and pages that move between them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from types import TracebackType
from typing import Self, cast

import numpy as np

from hostmem import ClosedError, Event, OutOfPagesError, ResourceBusyError, resolve_device
from hostmem.device import DONE, DeviceLike
from hostmem.units import Size, align_up, format_size, parse_size
from kvtier.config import KVCacheManagerConfig
from kvtier.eviction import make_policy
from kvtier.levels import Level, build_level, default_max_quota
from kvtier.page import Page
from kvtier.plan import CachePlan, group_weights, make_plan
from kvtier.quota import exact_size, slots_in, split_quota
from kvtier.stats import LevelStats, StorageStats
from kvtier.transfer.copier import PageCopier
from kvtier.transfer.jobs import Dependencies, all_of, unfinished
from kvtier.transfer.memory import Ids

__all__ = ["TierStorage"]


class TierStorage:
    """Levels of memory, from hot to cold, and the pages in them.

    A page is in one level at a time. New pages are made in the hot level; when a level has no slot
    left, its least valuable pages move to the next one, and those of the last level are dropped.
    Moves are asynchronous: a page knows the event of the copy that brings it, and a slot is fenced
    by the copy that still reads it.

    Parameters
    ----------
    config : KVCacheManagerConfig
        Quotas and layers; checked as a whole before anything is built.
    device : int, Device or str
        Whose memory the hot level is in; see `hostmem.HostMem`.
    policy : str
        Eviction policy, a name in `kvtier.eviction.POLICIES`.

    Raises
    ------
    ValueError
        The configuration, or a quota that cannot be had here.
    HostOOMError, DiskOOMError, CuOOMError
        A level could not be built; nothing was kept.

    Notes
    -----
    Every method may be called from any thread; one lock orders them. They submit work and return:
    where they block is said.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        *,
        device: DeviceLike = "auto",
        policy: str = "lru",
    ) -> None:
        config.validate()
        make_policy(policy)
        self.device = resolve_device(device)
        """Whose memory the hot level is in."""
        self.plan: CachePlan = make_plan(
            config, default_max_quota=lambda tier: default_max_quota(tier, self.device)
        )
        """What the configuration amounts to."""
        self._weights = group_weights(config, self.plan.groups)
        self._on_drop: Callable[[Page], None] | None = None
        self.lock = threading.RLock()
        """Orders everything; a cache over this storage shares it."""
        self._closing = threading.Lock()
        self._closed = False
        self._moved: Counter[str] = Counter()
        self._dropped = 0
        levels: list[Level] = []
        with contextlib.ExitStack() as undo:
            for index, (plan, tier) in enumerate(
                zip(self.plan.levels, config.cache_tiers, strict=True)
            ):
                level = build_level(index, plan, tier, self.device, policy)
                undo.callback(level.close)
                levels.append(level)
            largest = max(group.page_bytes for group in self.plan.groups)
            on_disk = any(level.name == "disk" for level in levels)
            self._copier = PageCopier(self.device, largest, staged=on_disk)
            undo.pop_all()
        self.levels = tuple(levels)
        """The levels, hot to cold."""

    def attach(self, on_drop: Callable[[Page], None]) -> None:
        """Let ``on_drop`` be called, under the lock, with each page that is dropped.

        Raises
        ------
        ValueError
            Something is attached already.
        """
        with self.lock:
            if self._on_drop is not None:
                raise ValueError("the storage has a cache already")
            self._on_drop = on_drop

    # ---------------------------------------------------------------------------------- pages

    def new_pages(self, owners: Sequence[Hashable], group: int) -> list[Page]:
        """Make pages in the hot level, leased once, moving others down as needed.

        Before their bytes are written, each page's ``fences`` must have finished, or the stream
        that writes must wait for them. Then call `commit`.

        Parameters
        ----------
        owners : sequence of hashable
            What each page belongs to.
        group : int
            Pool group.

        Raises
        ------
        OutOfPagesError
            Leased or kept pages leave no room; nothing has changed.
        ClosedError
            The storage was closed.
        """
        with self.lock:
            self._check_open()
            ids, fences = self._take(0, group, len(owners))
            pages = [
                Page(owner, group, slot, fences)
                for owner, slot in zip(owners, ids.tolist(), strict=True)
            ]
            for page in pages:
                page.leases = 1
            return pages

    def commit(self, pages: Iterable[Page], ready: Event = DONE) -> None:
        """Let new pages take part in eviction, their bytes there when ``ready`` has finished."""
        with self.lock:
            for page in pages:
                page.ready = ready
                page.fences = ()
                self.levels[0].policies[page.group].insert(page)

    def touch(self, pages: Iterable[Page]) -> None:
        """Note a use of pages, wherever they are."""
        with self.lock:
            for page in pages:
                self.levels[page.level].policies[page.group].touch(page)

    def lease(self, pages: Iterable[Page]) -> None:
        """Hold pages where they are until as many calls of `release`."""
        with self.lock:
            for page in pages:
                page.leases += 1

    def release(self, pages: Iterable[Page]) -> None:
        """Undo one `lease` of each page."""
        with self.lock:
            for page in pages:
                if page.leases == 0:
                    raise ValueError(f"{page} is not leased")
                page.leases -= 1

    def onboard(self, pages: Sequence[Page]) -> list[Page]:
        """Bring leased pages to the hot level; each one's ``ready`` says when its bytes are there.

        They become the most recently used, in the order given.

        Returns
        -------
        list of Page
            Those that were moved.

        Raises
        ------
        OutOfPagesError
            Other leased or kept pages leave no room; nothing has changed.
        ValueError
            A page is not leased; nothing has changed.
        ClosedError
            The storage was closed.
        """
        with self.lock:
            self._check_open()
            if loose := [page for page in pages if not page.leases]:
                raise ValueError(f"{loose[0]} is not leased")
            moved = list(dict.fromkeys(page for page in pages if page.level > 0))
            batches: dict[tuple[int, int], list[Page]] = {}
            for page in moved:
                batches.setdefault((page.level, page.group), []).append(page)
            by_group = Counter(page.group for page in moved)
            self.check_room(by_group)
            taken = {group: self._take(0, group, count) for group, count in by_group.items()}
            used: Counter[int] = Counter()
            for (level, group), batch in batches.items():
                ids, fences = taken[group]
                first = used[group]
                used[group] += len(batch)
                for page in batch:
                    self.levels[level].policies[group].remove(page)
                self._move(batch, level, 0, ids[first : first + len(batch)], fences)
            brought = set(map(id, moved))
            for page in pages:
                policy = self.levels[0].policies[page.group]
                if id(page) in brought:
                    policy.insert(page)
                    brought.discard(id(page))
                else:
                    policy.touch(page)
            return moved

    def discard(self, pages: Iterable[Page]) -> None:
        """Free pages that nobody leases but the caller, once; they are gone."""
        with self.lock:
            for page in pages:
                level = self.levels[page.level]
                if page in level.policies[page.group]:
                    level.policies[page.group].remove(page)
                self._free([page], page.level, page.group)

    # ---------------------------------------------------------------------------------- room

    def _take(self, level: int, group: int, n: int) -> tuple[Ids, tuple[Event, ...]]:
        """Take ``n`` slots of a level, once others moved down or went; all or nothing."""
        slots = self.levels[level].groups[group].slots
        missing = n - slots.available
        if missing > 0:
            self._evict(level, group, missing)
        taken = slots.allocate(n)
        return taken.ids, cast(tuple[Event, ...], taken.fences)

    def check_room(self, wanted: Mapping[int, int]) -> None:
        """Raise OutOfPagesError unless so many new pages of each pool group fit, all together."""
        with self.lock:
            if len(wanted) < 2:
                return  # taking them is all or nothing itself
            for group, n in wanted.items():
                missing = n - self.levels[0].groups[group].slots.available
                if missing > 0:
                    self._plan_eviction(0, group, missing)

    def _plan_eviction(self, level: int, group: int, n: int) -> _Eviction:
        """Choose what leaves a level and those below so that ``n`` slots get free; changes nothing.

        Its least valuable pages go to the next level, where as many must make room as find none;
        the last level drops them. Who arrives at a level may have to leave it at once. A page
        whose bytes a failed copy lost does not arrive anywhere.
        """
        plan = _Eviction([], [])
        arriving: list[Page] = []
        missing = n
        for at in self.levels[level:]:
            last = at is self.levels[-1]
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
            room = self.levels[at.index + 1].groups[group].slots.available
            missing = max(len(arriving) - room, 0)
        return plan

    def _evict(self, level: int, group: int, n: int) -> None:
        """Free ``n`` slots of a level, or change nothing; see `_plan_eviction`."""
        plan = self._plan_eviction(level, group, n)
        for at, own, _ in plan.levels:
            at.policies[group].evict(own, _may_leave(at is self.levels[-1]))
        for source, some in groupby(plan.dropped, attrgetter("level")):
            self._free(list(some), source, group)
        for at, _, arrivals in reversed(plan.levels):  # whose slots have become free below
            ids, fences = self._take(at.index, group, len(arrivals))
            first = 0
            for source, some in groupby(arrivals, attrgetter("level")):
                pages = list(some)
                self._move(pages, source, at.index, ids[first : first + len(pages)], fences)
                first += len(pages)
            for page in arrivals:
                at.policies[group].insert(page)
        self._dropped += len(plan.dropped)
        if self._on_drop is not None:
            for page in plan.dropped:
                self._on_drop(page)

    def _move(
        self, pages: list[Page], source: int, to: int, ids: Ids, fences: tuple[Event, ...]
    ) -> None:
        """Submit the copies of pages to other slots, and let them be there."""
        if not pages:
            return
        group = pages[0].group
        old = np.array([page.slot for page in pages], np.int32)
        after = Dependencies(unfinished(page.ready for page in pages), fences)
        source_group = self.levels[source].groups[group]
        if to == source:
            events = self._copier.relocate(source_group.memory, old, ids, after)
        else:
            destination = self.levels[to].groups[group].memory
            events = self._copier.copy(
                source_group.memory, old, destination, ids, after, up=to < source
            )
        pair = f"{self.levels[source].name}->{self.levels[to].name}"
        self._moved[pair] += len(pages) * source_group.memory.page_bytes
        first = 0
        slots = ids.tolist()
        for count, event in events:
            source_group.slots.release(old[first : first + count], event)
            for at in range(first, first + count):
                page = pages[at]
                page.level, page.slot, page.ready = to, slots[at], event
            first += count

    def _free(self, pages: list[Page], level: int, group: int) -> None:
        """Give the slots of pages back, each fenced by what may still use it."""
        slots = self.levels[level].groups[group].slots
        by_use: dict[tuple[Event, ...], list[int]] = {}
        for page in pages:
            by_use.setdefault((page.ready, *page.fences), []).append(page.slot)
        for events, ids in by_use.items():
            slots.release(np.array(ids, np.int32), all_of(events))

    def _no_room(self, level: int, group: int, n: int) -> OutOfPagesError:
        stats = self.levels[level].groups[group].slots.statistics()
        return OutOfPagesError(
            f"level {self.levels[level].name}, group {group}: {n} more slots wanted, and too few "
            f"of its {stats.in_use} pages may go; release leases, or raise the quota "
            f"({format_size(self.levels[level].quota)})",
            level=level,
            group=group,
            wanted=n,
        )

    # ---------------------------------------------------------------------------------- quota

    def adjust_cache_level(self, level: int, quota: Size) -> None:
        """Change a level's quota while it is in use; refused means unchanged.

        Growing host memory is filled in the background. Shrinking moves the least valuable pages
        down (or drops them, from the last level) and the rest into the slots that stay; it blocks
        until the copies out of the slots that go have finished.

        Parameters
        ----------
        level : int
            0 is the hot one.
        quota : int or str
            Bytes; rounded up to the level's grain.

        Raises
        ------
        ValueError
            Below the minimum, or above ``max_quota``.
        ResourceBusyError
            Leased pages are in slots that would go.
        OutOfPagesError
            Leased or kept pages leave no room for those that would have to go.
        HostOOMError, DiskOOMError, CuOOMError
            The memory for a growth is not there.
        BufferError
            A live view holds memory that would go.
        """
        with self.lock:
            self._check_open()
            changed = self.levels[level]
            old = [group.slots.n_slots for group in changed.groups]
            new = self._slots_for(changed, parse_size(quota, "quota"))
            shrinking = [g for g in range(len(new)) if new[g] < old[g]]
            growing = [g for g in range(len(new)) if new[g] > old[g]]
            for group in shrinking:
                self._check_shrink(level, group, new[group])
            with contextlib.ExitStack() as undo:
                for group in shrinking:
                    self._shrink(level, group, new[group])
                    undo.callback(self._grow, level, group, old[group])
                for group in growing:
                    self._grow(level, group, new[group])
                    undo.callback(self._shrink, level, group, old[group])
                undo.pop_all()
            changed.quota = align_up(parse_size(quota), changed.plan.grain)

    def _slots_for(self, level: Level, quota: int) -> list[int]:
        """Work out the slots of each group at a quota, or say why it cannot be."""
        grain, bound = level.plan.grain, level.plan.max_quota
        shares = split_quota(quota, self._weights, grain)
        if sum(shares) > bound:
            raise ValueError(
                f"{level.name}.quota: {exact_size(quota)} is above max_quota, {exact_size(bound)}"
            )
        pages = [group.memory.page_bytes for group in level.groups]
        slots = [slots_in(share, page) for share, page in zip(shares, pages, strict=True)]
        if 0 in slots:
            group = slots.index(0)
            raise ValueError(
                f"{level.name}.quota: of {exact_size(quota)} pool group {group} gets "
                f"{exact_size(shares[group])}, less than one of its pages, {pages[group]} B"
            )
        return slots

    def _check_shrink(self, level: int, group: int, n_slots: int) -> None:
        """Refuse a shrink that leases, or the levels below, do not allow."""
        slots = self.levels[level].groups[group].slots
        movable = {p.slot for p in self.levels[level].policies[group].victims() if not p.leases}
        held = [s for s in slots.live_above(n_slots).tolist() if s not in movable]
        if held:
            raise ResourceBusyError(
                f"level {self.levels[level].name}, group {group}: slots {held[:8]} are leased and "
                f"would go with {n_slots} slots; release them first",
                level=level,
                group=group,
                slots=held,
            )
        excess = slots.in_use - n_slots
        if excess > 0 and not self._can_evict(level, group, excess):
            raise self._no_room(level, group, excess)

    def _can_evict(self, level: int, group: int, n: int) -> bool:
        """Tell whether ``n`` pages of a level could go, all the way down."""
        last = level + 1 == len(self.levels)
        may_go = _may_be_dropped if last else _may_move
        if sum(map(may_go, self.levels[level].policies[group].victims())) < n:
            return False
        if last:
            return True
        below = self.levels[level + 1].groups[group].slots
        return n <= below.available or self._can_evict(level + 1, group, n - below.available)

    def _shrink(self, level: int, group: int, n_slots: int) -> None:
        """Empty the slots from ``n_slots`` on, and give their memory back."""
        where = self.levels[level].groups[group]
        policy = self.levels[level].policies[group]
        before = where.slots.n_slots
        where.slots.begin_shrink(n_slots)
        try:
            if (excess := where.slots.in_use - n_slots) > 0:
                self._evict(level, group, excess)
            self._relocate([p for p in policy.victims() if p.slot >= n_slots], level, group)
        except BaseException:
            where.slots.cancel_shrink()
            raise
        for event in cast(tuple[Event, ...], where.slots.resize(n_slots)):
            event.wait_finished()
        try:
            where.memory.resize(n_slots)
        except BaseException:
            where.slots.resize(before)
            raise
        policy.capacity = n_slots

    def _grow(self, level: int, group: int, n_slots: int) -> None:
        where = self.levels[level].groups[group]
        where.memory.resize(n_slots)
        where.slots.resize(n_slots)
        self.levels[level].policies[group].capacity = n_slots

    def _relocate(self, pages: list[Page], level: int, group: int) -> None:
        """Move pages to other slots of their level; what they are worth does not change."""
        where = self.levels[level].groups[group]
        taken = where.slots.allocate(len(pages))
        self._move(pages, level, level, taken.ids, cast(tuple[Event, ...], taken.fences))

    # ------------------------------------------------------------------------------ inspection

    def quota(self, level: int) -> int:
        """Bytes a level may use: the last accepted quota, rounded up to the level's grain."""
        return self.levels[level].quota

    def stats(self) -> StorageStats:
        """Take the figures of this moment."""
        with self.lock:
            return StorageStats(
                levels={
                    level.name: LevelStats(
                        slots=sum(group.slots.n_slots for group in level.groups),
                        used=sum(group.slots.in_use for group in level.groups),
                        quota=level.quota,
                    )
                    for level in self.levels
                },
                bytes_moved=dict(self._moved),
                pages_dropped=self._dropped,
            )

    def describe(self) -> str:
        """Say how full the levels are, for a person."""
        lines = [f"{'level':<8}{'slots':>12}{'used':>12}{'quota':>12}"]
        for name, level in self.stats().levels.items():
            lines.append(
                f"{name:<8}{level.slots:>12,}{level.used:>12,}{format_size(level.quota):>12}"
            )
        return "\n".join(lines)

    def _check(self) -> None:
        """Verify every invariant of the bookkeeping; AssertionError where one is broken."""
        with self.lock:
            for level in self.levels:
                for index, (group, policy) in enumerate(
                    zip(level.groups, level.policies, strict=True)
                ):
                    group.slots._check()
                    pages = list(policy.victims())
                    held = {page.slot for page in pages}
                    assert len(held) == len(pages), f"{level.name}: two pages in one slot"
                    assert len(held) <= group.slots.in_use, f"{level.name}: pages without slots"
                    for page in pages:
                        assert (page.level, page.group) == (level.index, index), f"{page} is lost"

    def __repr__(self) -> str:
        levels = ", ".join(f"{level.name} {format_size(level.quota)}" for level in self.levels)
        return f"<TierStorage on {self.device.name}: {levels}{', closed' if self._closed else ''}>"

    # -------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Finish the moves that were submitted and give all memory back. Idempotent; blocks.

        Raises
        ------
        BufferError
            A live view holds the memory of a level; the others are closed. Close again without it.
        """
        with self.lock:
            self._closed = True
        with self._closing, contextlib.ExitStack() as stack:
            for level in self.levels:
                stack.callback(level.close)
            stack.callback(self._copier.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BufferError as held:
            if error is None:
                raise
            error.add_note(f"and a level stays open: {held}")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the storage was closed")


@dataclass(slots=True)
class _Eviction:
    """What an eviction will do."""

    levels: list[tuple[Level, int, list[Page]]]
    """From the hot end: how many pages leave the level, and which ones come to stay."""
    dropped: list[Page]
    """Pages that go for good."""


def _may_leave(last: bool) -> Callable[[Page], bool]:
    return _may_be_dropped if last else _may_move


def _may_move(page: Page) -> bool:
    return page.leases == 0


def _may_be_dropped(page: Page) -> bool:
    return page.leases == 0 and not page.kept
