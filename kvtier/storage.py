"""The tier storage: levels of slots, and pages that move between them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self, cast

import numpy as np

from hostmem import Event, OutOfPagesError, resolve_device
from hostmem.device import DONE, DeviceLike
from hostmem.units import format_size
from kvtier.config import KVCacheManagerConfig
from kvtier.levels import Level, build_level, default_max_quota
from kvtier.page import Page
from kvtier.plan import CachePlan, make_plan
from kvtier.transfer.copier import PageCopier
from kvtier.transfer.jobs import Dependencies, unfinished
from kvtier.transfer.memory import Ids

__all__ = ["LevelStats", "StorageStats", "TierStorage"]


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level at one moment."""

    slots: int
    """Pages it can hold, over all pool groups."""
    used: int
    """Pages it holds."""
    quota: int
    """Bytes it may use."""


@dataclass(frozen=True, slots=True)
class StorageStats:
    """A storage at one moment."""

    levels: dict[str, LevelStats]
    """By name of the level, the hot one first."""
    bytes_moved: dict[str, int]
    """Bytes submitted to be moved so far, by pair of levels such as ``gpu->host``."""
    pages_dropped: int
    """Pages evicted from the last level so far."""


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
        self.device = resolve_device(device)
        """Whose memory the hot level is in."""
        self.plan: CachePlan = make_plan(
            config, default_max_quota=lambda tier: default_max_quota(tier, self.device)
        )
        """What the configuration amounts to."""
        self._on_drop: Callable[[Page], None] | None = None
        self.lock = threading.RLock()
        """Orders everything; a cache over this storage shares it."""
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

        Before their bytes are written, each page's ``fences`` must have finished, or the stream that
        writes must wait for them. Then call `commit`.

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
        """
        with self.lock:
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
        """
        with self.lock:
            moved = [page for page in pages if page.level > 0]
            batches: dict[tuple[int, int], list[Page]] = {}
            for page in moved:
                batches.setdefault((page.level, page.group), []).append(page)
            by_group = Counter(page.group for page in moved)
            taken = {}
            for group, count in by_group.items():
                try:
                    taken[group] = self._take(0, group, count)
                except OutOfPagesError:
                    for other, (ids, _) in taken.items():
                        self.levels[0].groups[other].slots.release(ids)
                    raise
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
        """Take ``n`` slots of a level, after moving others down or dropping them; all or nothing."""
        slots = self.levels[level].groups[group].slots
        missing = n - slots.available
        if missing > 0:
            self._evict(level, group, missing)
        taken = slots.allocate(n)
        return taken.ids, cast(tuple[Event, ...], taken.fences)

    def _evict(self, level: int, group: int, n: int) -> None:
        """Free ``n`` slots of a level: its least valuable pages move down, or are dropped."""
        policy = self.levels[level].policies[group]
        last = level + 1 == len(self.levels)
        may_go = _may_be_dropped if last else _may_move
        if len(list(islice(filter(may_go, policy.victims()), n))) < n:
            raise self._no_room(level, group, n)
        if last:
            self._drop(policy.evict(n, may_go) or [], level, group)
            return
        below = self.levels[level + 1]
        # A level below that is smaller than what comes passes the earlier part on.
        step = max(below.groups[group].slots.n_slots // 2, 1)
        for count in [step] * (n // step) + [n % step] * (n % step > 0):
            ids, fences = self._take(level + 1, group, count)
            victims = policy.evict(count, may_go) or []
            self._move(victims, level, level + 1, ids, fences)
            for page in victims:
                below.policies[group].insert(page)

    def _drop(self, pages: list[Page], level: int, group: int) -> None:
        self._free(pages, level, group)
        self._dropped += len(pages)
        if self._on_drop is not None:
            for page in pages:
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
        events = self._copier.copy(
            source_group.memory,
            old,
            self.levels[to].groups[group].memory,
            ids,
            after,
            up=to < source,
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
        """Give the slots of pages back, each fenced by the copy that may still write it."""
        slots = self.levels[level].groups[group].slots
        by_event: dict[int, tuple[Event, list[int]]] = {}
        for page in pages:
            by_event.setdefault(id(page.ready), (page.ready, []))[1].append(page.slot)
        for event, ids in by_event.values():
            slots.release(np.array(ids, np.int32), event)

    def _no_room(self, level: int, group: int, n: int) -> OutOfPagesError:
        stats = self.levels[level].groups[group].slots.statistics()
        return OutOfPagesError(
            f"level {self.levels[level].name}, group {group}: {n} more slots wanted, and too few of "
            f"its {stats.in_use} pages may go; release leases, or raise the quota "
            f"({format_size(self.levels[level].quota)})",
            level=level,
            group=group,
            wanted=n,
        )

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
            A live view holds the memory of a level; the others are closed.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as stack:
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
        self.close()


def _may_move(page: Page) -> bool:
    return page.leases == 0


def _may_be_dropped(page: Page) -> bool:
    return page.leases == 0 and not page.kept
