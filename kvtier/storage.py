"""The tier storage: levels of slots, and pages that move between them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from time import perf_counter
from typing import cast

import numpy as np

from hostmem import ClosedError, Event, resolve_device
from hostmem.closing import Closable
from hostmem.describing import html_of, notebook, one_line
from hostmem.device import DONE, DeviceLike
from hostmem.units import Size, format_size, parse_size
from kvtier.config import DiskCacheTierConfig, KVCacheManagerConfig
from kvtier.eviction import make_policy
from kvtier.keys import layout_fingerprint
from kvtier.latch import Latch
from kvtier.levels import Level, build_level, default_max_quota
from kvtier.mover import Mover
from kvtier.page import Page
from kvtier.plan import CachePlan, make_plan
from kvtier.records import Records
from kvtier.resizer import Resizer
from kvtier.stats import LevelStats, Meter, RemoteStats, Scope, StorageStats, Usage
from kvtier.transfer.codec import ColdPageCodec
from kvtier.transfer.copier import PageCopier, reachable
from kvtier.transfer.memory import DiskPool, Ids, MemoryPool, PageMemory
from kvtier.transfer.page_events import gathered

__all__ = ["TierStorage"]


class TierStorage(Closable):
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
        self.config = config
        """What it was built from."""
        self.device = resolve_device(device)
        """Whose memory the hot level is in."""
        self.plan: CachePlan = make_plan(
            config, default_max_quota=lambda tier: default_max_quota(tier, self.device)
        )
        """What the configuration amounts to."""
        self.lock = threading.RLock()
        """Orders everything; a cache over this storage shares it."""
        self._closing = threading.Lock()
        self.latch = Latch()
        """Guards what must be done as a whole; a cache over this storage shares it."""
        self._meter = Meter(self.lock)
        self._closed = False
        self._loans = contextlib.ExitStack()
        self._remote: Callable[[], RemoteStats] | None = None
        self._close_remote: Callable[[], None] | None = None
        levels: list[Level] = []
        layout = layout_fingerprint(config) + _name_of(config.cold_page_codec)
        with contextlib.ExitStack() as undo:
            for index, (plan, tier) in enumerate(
                zip(self.plan.levels, config.cache_tiers, strict=True)
            ):
                level = build_level(index, plan, tier, self.device, policy, layout=layout)
                undo.callback(level.close)
                levels.append(level)
            largest = max(max(level.page_bytes) for level in self.plan.levels)
            codec = config.cold_page_codec
            staged = _needs_staging(levels, codec)
            self._copier = PageCopier(self.device, largest, staged=staged, codec=codec)
            undo.pop_all()
        self.levels = tuple(levels)
        """The levels, hot to cold."""
        self._leased = [0] * len(self.plan.groups)  # pages of each group that have leases
        self._new = [0] * len(self.plan.groups)  # of these, pages that take no part in eviction
        last = config.cache_tiers[-1]
        persistent = isinstance(last, DiskCacheTierConfig) and last.persist
        self._records = Records(self.levels[-1]) if persistent else None
        self._mover = Mover(self.levels, self._copier, self.latch, self._meter, self._records)
        self._resizer = Resizer(self._mover, self.latch, self.lock)
        self._pid = os.getpid()
        _storages.add(self)

    def attach(
        self,
        on_drop: Callable[[Page], None],
        on_move: Callable[[Sequence[Page], int, int], None] | None = None,
    ) -> None:
        """Let functions be called, under the lock, when pages go or move.

        Parameters
        ----------
        on_drop : callable
            Given each page that is dropped.
        on_move : callable, optional
            Given pages of one group, and the levels they leave and go to.

        Raises
        ------
        ValueError
            Something is attached already.
        """
        with self.lock:
            if self._mover.on_drop is not None:
                raise ValueError("the storage has a cache already")
            self._mover.on_drop, self._mover.on_move = on_drop, on_move

    def borrow(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Let copies reach memory of an engine's until `close`; see `Device.borrow`."""
        with self.lock:
            self._check_open()
            self._loans.enter_context(self.device.borrow(ranges))

    def attach_remote(
        self,
        on_leave: Callable[[Sequence[Page]], None],
        stats: Callable[[], RemoteStats],
        close: Callable[[], None],
    ) -> None:
        """Let a remote store know of pages that make room, be asked, and end with the storage.

        Parameters
        ----------
        on_leave : callable
            Called under the lock with pages of one group that are about to leave their levels; who
            reads a slot adds an event to its page's ``fences``.
        stats : callable
            Gives the figures.
        close : callable
            Called when the moves have finished and the memory is still there; again, where a call
            was interrupted.
        """
        with self.lock:
            self._check_open()
            self._mover.on_leave, self._remote = on_leave, stats
            self._close_remote = close

    # ---------------------------------------------------------------------------------- pages

    def new_pages(self, owners: Sequence[Hashable], group: int, *, priority: int = 0) -> list[Page]:
        """Make pages in the hot level, leased once, moving others down as needed.

        Before their bytes are written, each page's ``fences`` must have finished, well where the
        first level is host memory that is still being filled, or the stream
        that writes must wait for them. Then call `commit`.

        Parameters
        ----------
        owners : sequence of hashable
            What each page belongs to.
        group : int
            Pool group.
        priority : int
            Pages of a lower one leave a level first.

        Raises
        ------
        OutOfPagesError
            Leased or kept pages leave no room; nothing has changed.
        ClosedError
            The storage was closed.
        """
        with self.lock:
            self._check_open()
            ids, fences = self._mover.take(0, group, len(owners))
            try:
                self._mover.make_spare(0, group)
            except BaseException:
                self._mover.give_back(0, group, ids, fences)
                raise
            fences = (*fences, *self._unfilled(group, ids))
            pages = [
                Page(owner, group, slot, fences, priority)
                for owner, slot in zip(owners, ids.tolist(), strict=True)
            ]
            for page in pages:
                page.leases = 1
            self._leased[group] += len(pages)
            self._new[group] += len(pages)
            return pages

    def _unfilled(self, group: int, ids: Ids) -> list[Event]:
        """Give events of the fill of slots of a first level in host memory, where it goes on."""
        if self.plan.levels[0].hot:
            return []  # it is filled before it is used
        pools = self.levels[0].groups[group].memory.pools
        fills = [pool.filled(ids) for pool in pools if isinstance(pool, MemoryPool)]
        return [fill for fill in fills if fill is not DONE]

    def wait_usable(self, pages: Iterable[Page]) -> None:
        """Block until the memory of pages in the first level is committed; takes no lock.

        Raises
        ------
        HostOOMError, RegistrationError
            It will not be.
        """
        highest: dict[int, int] = {}
        for page in pages:
            highest[page.group] = max(page.slot, highest.get(page.group, 0))
        for group, slot in highest.items():
            for pool in self.levels[0].groups[group].memory.pools:
                if isinstance(pool, MemoryPool):
                    pool.wait_usable(np.array([slot], np.int32))

    def commit(self, pages: Iterable[Page], ready: Event | None = DONE) -> None:
        """Let new pages take part in eviction, their bytes there when ``ready`` has finished.

        Parameters
        ----------
        pages : iterable of Page
            Made by `new_pages`, or taken out.
        ready : Event, optional
            Of the work that writes them; None where `copy_in` does.
        """
        with self.lock, self.latch:
            new: dict[int, list[Page]] = {}
            for page in pages:
                if ready is not None:
                    # What is written into bytes that never came is no good either.
                    page.ready = ready if page.ready is DONE else _both(page.ready, ready)
                # Of a page that was taken out, the slot may still be read by others.
                if page.fences:
                    page.fences = tuple(fence for fence in page.fences if not fence.query())
                page.origin = None
                new.setdefault(page.group, []).append(page)
            for group, some in new.items():
                self.levels[0].policies[group].insert_many(some)
                self._new[group] -= len(some)

    def take_out(self, pages: Iterable[Page]) -> None:
        """Undo `commit` for leased pages of the first level, which may be written again."""
        with self.lock, self.latch:
            for page in pages:
                self.levels[0].policies[page.group].remove(page)
                self._new[page.group] += 1
                page.kept = False
                page.origin = None

    def copy_in(self, pages: list[Page], source: PageMemory, ids: Ids, ready: Event) -> None:
        """Submit copies of somebody else's memory into new pages; `commit` them without ``ready``.

        Parameters
        ----------
        pages : list of Page
            Of one group, made by `new_pages`.
        source : PageMemory
            The memory.
        ids : int32 array, shape (pages,)
            Which of its pages.
        ready : Event
            Of the work that writes them.

        Raises
        ------
        ClosedError
            The storage was closed.
        """
        if pages:
            with self.lock:
                self._check_open()
                self._mover.copy_in(pages, source, ids, ready)

    def copy_out(
        self, pages: list[Page], target: PageMemory, ids: Ids, ready: Event
    ) -> list[Event]:
        """Submit copies of leased pages of the first level into somebody else's memory.

        Parameters
        ----------
        pages : list of Page
            Of one group; they may be released at once.
        target : PageMemory
            The memory.
        ids : int32 array, shape (pages,)
            Which of its pages.
        ready : Event
            Of others that use them.

        Returns
        -------
        list of Event
            One of each page, which fails if its bytes could not be brought or copied.

        Raises
        ------
        ClosedError
            The storage was closed.
        """
        if not pages:
            return []
        with self.lock:
            self._check_open()
            return self._mover.copy_out(pages, target, ids, ready)

    def touch(self, pages: Iterable[Page]) -> None:
        """Note a use of pages, wherever they are."""
        with self.lock:
            used: dict[tuple[int, int], list[Page]] = {}
            for page in pages:
                used.setdefault((page.level, page.group), []).append(page)
            for (level, group), some in used.items():
                self.levels[level].policies[group].touch_many(some)

    def lease(self, pages: Iterable[Page]) -> None:
        """Hold pages where they are until as many calls of `release`."""
        with self.lock:
            for page in pages:
                if not page.leases:
                    self._leased[page.group] += 1
                page.leases += 1

    def leased(self, group: int) -> int:
        """Count the pages of a pool group that are leased, new ones included."""
        return self._leased[group]

    def release(self, pages: Iterable[Page], after: Event = DONE) -> None:
        """Undo one `lease` of each page; nobody gets their slots before ``after`` has finished."""
        with self.lock:
            failed = []
            pending = not after.query()
            for page in pages:
                if page.leases == 0:
                    raise ValueError(f"{page} is not leased")
                page.leases -= 1
                if pending:
                    page.fences = _added(page.fences, after)
                if not page.leases:
                    self._leased[page.group] -= 1
                    if page.ready is not DONE and page.lost:
                        failed.append(page)
            if failed:
                with self.latch:
                    self._mover.resolve(failed)

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
            self._mover.check_room(by_group)
            taken: dict[int, tuple[Ids, tuple[Event, ...]]] = {}
            try:
                for group, count in by_group.items():
                    taken[group] = self._mover.take(0, group, count)
            except BaseException:
                for group, (ids, fences) in taken.items():
                    self._mover.give_back(0, group, ids, fences)
                raise
            with self.latch:
                used: Counter[int] = Counter()
                for (level, group), batch in batches.items():
                    ids, fences = taken[group]
                    first = used[group]
                    used[group] += len(batch)
                    for page in batch:
                        self.levels[level].policies[group].remove(page)
                    self._mover.move(batch, level, 0, ids[first : first + len(batch)], fences)
                brought = set(moved)
                by: dict[int, list[Page]] = {}
                for page in dict.fromkeys(pages):
                    by.setdefault(page.group, []).append(page)
                for group, some in by.items():
                    policy = self.levels[0].policies[group]
                    for new, stretch in groupby(some, brought.__contains__):
                        if new:
                            for page in stretch:
                                policy.insert(page)
                        else:
                            policy.touch_many(stretch)
            return moved

    def check_room(self, wanted: Mapping[int, int]) -> None:
        """Raise OutOfPagesError unless so many new pages of each pool group fit, all together."""
        with self.lock:
            self._mover.check_room(wanted)

    @property
    def persistent(self) -> bool:
        """Whether pages of the last level come back when another storage is built on its files."""
        return self._records is not None

    def restored(self, group: int) -> list[tuple[int, bytes]]:
        """Give the slots of the last level that came back with its files, and what is in them.

        They are in the order in which they were written. Whoever has a use for them calls `adopt`
        before the first page is made; to the others they are free slots.
        """
        return [] if self._records is None else list(self._records.restored(group))

    def adopt(self, owners: Sequence[Hashable], group: int, slots: Sequence[int]) -> list[Page]:
        """Make pages of slots of the last level that were `restored`.

        Parameters
        ----------
        owners : sequence of hashable
            What each page belongs to.
        group : int
            Pool group.
        slots : sequence of int
            Their slots.

        Raises
        ------
        ValueError
            One is in use, or was not restored; nothing has changed.
        """
        with self.lock:
            self._check_open()
            level = self.levels[-1]
            known = {slot for slot, _ in self.restored(group)}
            if not known.issuperset(slots) or not self._mover.adopt(level.index, group, slots):
                raise ValueError(f"slots: {slots!r} are not all restored and free")
            pages = []
            with self.latch:
                for owner, slot in zip(owners, slots, strict=True):
                    page = Page(owner, group, slot, (), level=level.index)
                    cast(Records, self._records).adopt(page)
                    level.policies[group].insert(page)
                    pages.append(page)
            return pages

    def keep(self, pages: Iterable[Page], kept: bool = True) -> None:
        """Let pages be moved down but never dropped, or let them be dropped again.

        One whose bytes can no longer be read is lost all the same.
        """
        with self.lock:
            for page in pages:
                page.kept = kept

    def set_priority(self, pages: Iterable[Page], priority: int) -> None:
        """Change what leaves a level first: pages of a lower priority."""
        with self.lock, self.latch:
            for page in pages:
                policy = self.levels[page.level].policies[page.group]
                if present := page in policy:
                    policy.remove(page)
                page.priority = priority
                if present:
                    policy.insert(page)

    def resolve(self, pages: Iterable[Page]) -> None:
        """Put unleased pages that a failed copy has lost back where they were, or drop them."""
        with self.lock, self.latch:
            self._mover.resolve(pages)

    def settle(self) -> None:
        """Learn how finished copies ended: put back, or drop, what failed copies were to bring."""
        with self.lock:
            self._mover.settle()

    def discard(self, pages: Iterable[Page], after: Event = DONE) -> None:
        """Free pages that nobody leases but the caller, once; they are gone.

        Nobody gets their slots before ``after`` has finished.
        """
        with self.lock, self.latch:
            pending = not after.query()
            gone: dict[tuple[int, int], list[Page]] = {}
            for page in dict.fromkeys(pages):
                if page.freed:
                    continue  # with another page of its block
                if page.leases:
                    page.leases = 0
                    self._leased[page.group] -= 1
                if pending:
                    page.fences = _added(page.fences, after)
                policy = self.levels[page.level].policies[page.group]
                if page in policy:
                    policy.remove(page)
                else:
                    self._new[page.group] -= 1
                gone.setdefault((page.level, page.group), []).append(page)
            for (level, group), some in gone.items():
                self._mover.free(some, level, group)

    def replace(self, old: Page, new: Page) -> None:
        """Drop a page that nobody leases for another one of the same bytes."""
        with self.lock:
            if self._records is not None:
                self._records.replace(old, new)
            self.discard([old])

    def forget(self, pages: Iterable[Page]) -> None:
        """Let pages not come back from files that outlive the process; else nothing changes."""
        with self.lock, self.latch:
            self._mover.forget(pages)

    # ---------------------------------------------------------------------------------- quota

    def adjust_cache_level(self, level: int | str, quota: Size) -> None:
        """Change a level's quota while it is in use; refused means unchanged.

        A growth of the hot level blocks until its memory is usable; host memory is filled in the
        background. Shrinking moves the least valuable pages down (or drops them, from the last
        level) and the rest into the slots that stay; it blocks until the copies out of the slots
        that go have finished. The same quota tries again what could not be filled. Others go on
        meanwhile, unless the caller holds `lock`. Changes of
        several threads take turns.

        Parameters
        ----------
        level : int or str
            Its index, 0 is the hot one; or its name, such as ``"host"``.
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
            The memory for a growth is not there, or the room for what a shrink moves down.
        OSError, CuError
            Pages could not be moved out of slots that would go; they are where they were.
        BufferError
            A live view holds memory that would go.
        """
        with self.lock:
            self._check_open()
            changed = self._level(level)
            plan = changed.plan.at(parse_size(quota, "quota"))
        self._resizer.change(changed, plan)

    def _level(self, level: int | str) -> Level:
        names = [at.name for at in self.levels]
        index = names.index(level) if level in names else level
        if not isinstance(index, int) or not 0 <= index < len(names):
            raise ValueError(
                f"level: {level!r} is none of 0..{len(names) - 1} ({', '.join(names)})"
            )
        return self.levels[index]

    # ------------------------------------------------------------------------------ inspection

    def quota(self, level: int | str) -> int:
        """Bytes a level may use: the last accepted quota, rounded up to the level's grain."""
        return self._level(level).quota

    def hot_buffers(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Say where the hot slots are, for those who compute into them.

        Returns
        -------
        dict of (layer_id, role) to (base, stride)
            Slot i of a buffer begins at address ``base + i * stride``, whatever the quota, until
            the storage is closed.

        Raises
        ------
        ValueError
            The first level is not hot: the engine owns the hot pages.
        """
        if not self.plan.levels[0].hot:
            raise ValueError("the first level is host memory: the engine owns the hot pages")
        buffers = {}
        for layout, group in zip(self.plan.groups, self.levels[0].groups, strict=True):
            for places, pool in zip(layout.pools, group.memory.pools, strict=True):
                base = cast(MemoryPool, pool).memory.address
                for place in places.buffers:
                    buffers[place.layer_id, place.role] = base + place.offset, pool.slot_size
        return buffers

    def count(self, found: Iterable[int], missed: int) -> None:
        """Count blocks that were asked for: found in which levels, and not found."""
        with self.lock:
            for level, blocks in Counter(found).items():
                self._meter.found(self.levels[level].name, blocks)
            if missed:
                self._meter.missed(missed)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the time of a ``with`` block, outside the lock, as waiting for something."""
        began = perf_counter()
        try:
            yield
        finally:
            with self.lock:
                self._meter.waited(what, perf_counter() - began)

    def scope(self) -> Scope:
        """Count separately, with peaks of its own, what happens in a ``with`` block."""
        return self._meter.scope()

    def stats(self) -> StorageStats:
        """Take the figures of this moment."""
        with self.lock:
            self._mover.settle()
            activity = self._meter.activity()
            held = activity.levels
            activity.levels = {at.name: held[at.name] for at in self.levels if at.name in held}
            return StorageStats(
                levels={
                    level.name: LevelStats(
                        slots=sum(group.slots.n_slots for group in level.groups),
                        used=sum(group.slots.in_use for group in level.groups),
                        quota=level.quota,
                    )
                    for level in self.levels
                },
                bytes_moved={pair: t.total_bytes for pair, t in activity.pairs.items()},
                pages_dropped=self._mover.pages_dropped,
                activity=activity,
                files=tuple(
                    pool.file.stats()
                    for group in self.levels[-1].groups
                    for pool in group.memory.pools
                    if isinstance(pool, DiskPool)
                ),
                remote=None if self._remote is None else self._remote(),
            )

    def describe(self) -> str:
        """Show what `stats` says as tables, for a person."""
        return self.stats().describe()

    def _check(self) -> None:
        """Verify every invariant of the bookkeeping; AssertionError where one is broken."""
        with self.lock:
            leased = [0] * len(self._leased)
            for level in self.levels:
                used = 0
                for index, (group, policy) in enumerate(
                    zip(level.groups, level.policies, strict=True)
                ):
                    where = f"{level.name}, group {index}"
                    group.slots._check()
                    in_use = set(group.slots.live_above(0).tolist())
                    pages = list(policy.victims())
                    places = {page.slot for page in pages}
                    assert len(places) == len(pages), f"{where}: two pages in one slot"
                    assert places <= in_use, f"{where}: pages in slots that are free"
                    new = self._new[index] if level.index == 0 else 0
                    assert len(in_use) == len(pages) + new, f"{where}: slots in use without a page"
                    assert policy.capacity == group.slots.n_slots, f"{where}: {policy.capacity}"
                    for page in pages:
                        assert (page.level, page.group) == (level.index, index), f"{page} is lost"
                    leased[index] += sum(page.leases > 0 for page in pages) + new
                    used += len(in_use)
                    self._mover.check(level.index, index, in_use)
                held = self._meter.activity().levels.get(level.name, Usage()).pages
                assert held == used, f"{level.name}: {held} pages are counted, {used} are there"
            assert leased == self._leased, f"{leased} pages are leased, {self._leased} counted"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), self.stats()._parts())

    @one_line
    def __repr__(self) -> str:
        levels = ", ".join(f"{level.name} {format_size(level.quota)}" for level in self.levels)
        if (remote := self.config.remote) is not None:
            levels += f", remote at {remote.master}"
        state = ", closed" if self._closed else ""
        if (reason := self.latch.reason) is not None:
            state += f", corrupted: {type(reason).__name__}"
        return f"<TierStorage on {self.device.name}: {levels}{state}>"

    # -------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Finish the moves that were submitted and give all memory back. Idempotent; blocks.

        Raises
        ------
        BufferError
            A live view holds the memory of a level; the others are closed. Close again without it.
        """
        if self._pid != os.getpid():
            return
        with self.lock:
            self._closed = True
        held: BufferError | None = None
        with self._closing:
            # In this order, and no further where one is interrupted: no memory goes under a copy.
            self._copier.close()
            if self._close_remote is not None:
                self._close_remote()
            self._loans.close()
            for level in reversed(self.levels):
                try:
                    if self.latch.reason is None:
                        level.close()
                    else:
                        level.leak()
                except BufferError as error:
                    held = held or error
        if held is not None:
            raise held

    def _abandon(self) -> None:
        """Close in a forked child, which has neither the memory nor the threads."""
        self.lock = threading.RLock()
        self._meter.lock = self.lock
        self._remote = None
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the storage was closed, or belongs to the parent of this process")
        self.latch.check()


def _needs_staging(levels: Sequence[Level], codec: ColdPageCodec | None) -> bool:
    """Tell whether a file of the last level cannot be read into, or written from, the others."""
    if levels[-1].name != "disk":
        return False
    beside = (levels[0], levels[-2])  # where its pages go, and where they come from
    return not all(reachable(group.memory, codec) for level in beside for group in level.groups)


def _name_of(codec: object | None) -> bytes:
    """Name what makes cold pages: to another codec the same bytes mean something else."""
    return b"" if codec is None else f"{type(codec).__module__}.{type(codec).__qualname__}".encode()


def _both(first: Event, second: Event) -> Event:
    """Give an event that has finished when both have, and failed if one has."""
    return next(iter(gathered([first, second])), DONE)


def _added(fences: tuple[Event, ...], after: Event) -> tuple[Event, ...]:
    return (*(event for event in fences if event is not after and not event.query()), after)


_storages: weakref.WeakSet[TierStorage] = weakref.WeakSet()


def _forked() -> None:
    for storage in list(_storages):
        storage._abandon()


os.register_at_fork(after_in_child=_forked)
