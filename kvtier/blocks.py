"""The block cache: blocks by key, found in any level and handed out in the first one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Generic

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostmem import Event, ResourceBusyError
from hostmem.describing import one_line
from hostmem.device import DONE
from kvtier.arguments import check_event, whole_number
from kvtier.block import Block, Columns, Key, is_there
from kvtier.block_index import BlockIndex
from kvtier.block_job import BlockJob
from kvtier.engine_pages import EnginePages
from kvtier.events import BlockEvent
from kvtier.keys import encode_key
from kvtier.leases import BlockLease, BlockReservation
from kvtier.page import Page
from kvtier.remote.client import Connect, check_installed
from kvtier.remote.level import RemoteLevel
from kvtier.storage import TierStorage

__all__ = ["BlockCache"]


class BlockCache(Generic[Key]):
    """Finds blocks by key in the levels of a storage.

    Keys are hashable and name a block's content with all that precedes it, as those of `chain_keys`
    do. A block is in one level at a time, or has none of its pages. Of a pool group with a sliding
    window it may lack the page: leading blocks are found as far as the window of the token behind
    them, and its sink tokens, are there.

    Parameters
    ----------
    storage : TierStorage
        Where the pages are. One cache a storage.
    engine : EnginePages, optional
        The engine's own pages, for `store` and `load`. The first level is host memory then.
    max_events : int
        Keys that `take_events` can name at most; 0 for no events.
    connect : callable, optional
        Makes a client of another store than Mooncake's, where the storage has a remote tier.

    Raises
    ------
    ImportError
        The storage has a remote tier, and Mooncake's package is not installed.
    ValueError
        The storage has a cache already; or ``engine`` is of another configuration, or given where
        the storage has a gpu tier of its own, or the driver knows no memory at some of its pages.

    Notes
    -----
    Every method may be called from any thread and returns without waiting for copies, but for those
    of kept blocks that have to make room: see `keep`.

    Examples
    --------
    >>> import kvtier
    >>> layer = kvtier.AttentionLayerConfig(0, [kvtier.BufferConfig("kv", 4096)])
    >>> tiers = [kvtier.GpuCacheTierConfig("2MiB"), kvtier.HostCacheTierConfig("4MiB")]
    >>> config = kvtier.KVCacheManagerConfig(16, tiers, [layer])
    >>> with kvtier.TierStorage(config, device="cpu") as storage:
    ...     cache = kvtier.BlockCache(storage)
    ...     with cache.reserve(["a", "b"]) as fresh:
    ...         fresh.wait()  # then compute into fresh.slots()
    ...         fresh.commit()
    ...     with cache.acquire(["a", "b", "c"]) as lease:
    ...         lease.wait()  # then read lease.slots()
    ...         len(lease)
    2
    """

    def __init__(
        self,
        storage: TierStorage,
        *,
        engine: EnginePages | None = None,
        max_events: int = 0,
        connect: Connect | None = None,
    ) -> None:
        if storage.config.remote is not None and connect is None:
            check_installed()
        plan = storage.plan
        if engine is not None and engine.groups != plan.groups:
            raise ValueError("engine: its pages are of another configuration than the storage")
        if engine is not None and plan.levels[0].hot:
            raise ValueError(
                "engine: the storage has a gpu tier, whose slots are the hot pages; leave the tier "
                "out where the engine owns them"
            )
        if max_events < 0:
            raise ValueError(f"max_events: {max_events} is below 0")
        if engine is not None:
            storage.borrow(engine.ranges())
        self._storage = storage
        self._engine = engine
        self._groups = range(len(plan.groups))
        self._index: BlockIndex[Key] = BlockIndex(storage, max_events)
        self._reserved: set[Key] = set()
        self._remote: RemoteLevel[Key] | None = None
        if (tier := storage.config.remote) is not None:
            self._remote = RemoteLevel(storage, self._index, tier, connect)

    # --------------------------------------------------------------------------------- finding

    @property
    def lost(self) -> int:
        """Blocks forgotten so far because a copy of them failed."""
        return self._index.lost

    def __len__(self) -> int:
        return len(self._index.blocks)

    def __contains__(self, key: object) -> bool:
        """Tell whether a block is in any level."""
        return key in self._index.blocks

    def __iter__(self) -> Iterator[Key]:
        """Give the keys of all blocks, as they are now."""
        with self._storage.lock:
            return iter(list(self._index.blocks))

    def match(self, keys: Sequence[Key]) -> int:
        """Count the leading keys whose blocks are there, without touching them; takes no lock.

        A block whose copy is failing at this moment still counts.
        """
        return self._index.match(keys)

    def lookup(self, keys: Sequence[Key], timeout: float | None = None) -> int:
        """Count the leading keys whose blocks are there or in the remote store; touches nothing.

        Parameters
        ----------
        keys : sequence
            In prefix order, of a sequence.
        timeout : float, optional
            Seconds to wait for the store, which is not asked while it is degraded; by default, and
            at most, the tier's ``deadline``. When it is over, what is there counts alone.

        Raises
        ------
        ValueError
            ``timeout`` is below 0, or no number.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout: {timeout!r} seconds; give None for the tier's deadline")
        here = self.match(keys)
        if self._remote is None or here == len(keys):
            return here
        return here + self._remote.lookup(keys[here:], here, timeout)

    def acquire(self, keys: Sequence[Key]) -> BlockLease[Key]:
        """Lease the leading blocks that are there, and start bringing them to the first level.

        They become the most recently used, in prefix order. Of a pool group with a sliding window
        only pages come that the token behind the blocks sees.

        Parameters
        ----------
        keys : sequence
            In prefix order, from a sequence's first block; it ends at the first that is absent.

        Raises
        ------
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed. Ask for fewer, by
            as many as the error's ``short``.
        """
        storage, keys = self._storage, list(keys)
        with storage.lock:
            storage.settle()
            blocks = self._index.leading(keys)
            lease = self._hold(blocks, self._index.shown(blocks))
            storage.count(lease.found, len(keys) - len(blocks))
            return lease

    def _hold(self, blocks: list[Block[Key]], columns: Columns) -> BlockLease[Key]:
        """Lease pages and bring them to the first level, or change nothing."""
        found = [0] * len(blocks)
        for column in columns:
            for n, page in enumerate(column):
                if page is not None and page.level > found[n]:
                    found[n] = page.level
        lease = BlockLease(self, blocks, columns, found)
        pages = lease._pages()
        self._storage.lease(pages)
        try:
            self._storage.onboard(pages)
        except BaseException:
            self._storage.release(pages)
            raise
        return lease

    def prefetch(self, keys: Sequence[Key]) -> BlockJob[Key]:
        """Start bringing the leading blocks that are there to the first level, and hold none.

        Those behind that a remote store has are fetched from it: they are there when the job is
        done, by the tier's ``deadline`` at the latest. What does not come is not there, no failure.

        Raises
        ------
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed. Ask for fewer.
        """
        with self._storage.lock:
            self._storage.settle()
            blocks = self._index.leading(keys)
            with self._hold(blocks, self._index.shown(blocks)) as lease:
                events = [
                    [page.ready for page in row if page is not None]
                    for row in zip(*lease._columns, strict=True)
                ]
                behind = DONE
                if self._remote is not None:
                    behind = self._remote.fetch(keys[len(blocks) :], len(blocks))
                return BlockJob(lease.keys, events, self._waiting, behind)

    def visible(self, blocks: int) -> NDArray[np.bool_]:
        """Tell which pages of so many leading blocks the token behind them sees.

        Returns
        -------
        bool array, shape (groups, blocks)
            False where a sliding window does not show a block: its page need not be there.
        """
        seen = np.ones((len(self._groups), blocks), np.bool_)
        for group in self._groups:
            first, end = self._index.windows.stale(group, blocks)
            seen[group, first:end] = False
        return seen

    def room_for(self, keys: Sequence[Key]) -> list[int]:
        """Count the pages that `acquire` would lease and nobody leases now, by pool group."""
        with self._storage.lock:
            columns = self._index.shown(self._index.leading(keys))
            return [sum(p is not None and not p.leases for p in column) for column in columns]

    # ----------------------------------------------------------------------------- what stays

    def touch(self, keys: Iterable[Key]) -> None:
        """Note a use of blocks, wherever they are; KeyError at the first that is absent."""
        with self._storage.lock:
            self._storage.touch(page for key in keys for page in self._index.pages(key))

    def keep(self, keys: Iterable[Key], kept: bool = True) -> None:
        """Let blocks be moved down but never dropped, or let them be dropped again.

        Making room by moving kept blocks blocks until they have arrived.

        Parameters
        ----------
        keys : iterable
            Present, in any level.
        kept : bool
            False undoes it.

        Raises
        ------
        KeyError
            A key is absent; nothing has changed.
        """
        with self._storage.lock:
            self._storage.keep([page for key in keys for page in self._index.pages(key)], kept)

    def set_priority(self, keys: Iterable[Key], priority: int) -> None:
        """Change when blocks leave a level: those of a lower priority go first.

        Among blocks of one priority the policy decides, to which these are new.

        Raises
        ------
        KeyError
            A key is absent; nothing has changed.
        """
        priority = whole_number(priority, "priority")
        with self._storage.lock:
            pages = [page for key in keys for page in self._index.pages(key)]
            self._storage.set_priority(pages, priority)

    def drop(self, keys: Iterable[Key]) -> int:
        """Take blocks out of the cache, kept ones too; absent keys are passed over.

        Returns
        -------
        int
            How many went.

        Raises
        ------
        ResourceBusyError
            A block is leased (``keys`` names some); nothing has changed.
        """
        with self._storage.lock:
            blocks = [
                self._index.blocks[key] for key in dict.fromkeys(keys) if key in self._index.blocks
            ]
            self._check_free(blocks)
            self._storage.forget(page for block in blocks for page in block.pages if page)
            for block in blocks:
                self._index.remove(block)
            return len(blocks)

    def _check_free(self, blocks: Sequence[Block[Key]]) -> None:
        busy = [b.key for b in blocks if any(p is not None and p.leases for p in b.pages)]
        if busy:
            raise ResourceBusyError(
                f"keys: {len(busy)} of {len(blocks)} blocks are leased, such as {busy[0]!r}; "
                "release the leases first",
                keys=busy[:8],
            )

    # -------------------------------------------------------------------------------- computing

    def reserve(self, keys: Sequence[Key | None], *, priority: int = 0) -> BlockReservation[Key]:
        """Take pages of the first level for blocks to be computed, moving others down as needed.

        Parameters
        ----------
        keys : sequence
            Distinct, and absent, or of blocks that could not be read when they were last asked for:
            these are dropped. None for a block that gets its key when it is committed.
        priority : int
            Blocks of a lower one leave a level first.

        Raises
        ------
        ValueError
            A key is there already, or reserved; nothing has changed.
        TypeError
            A priority that is no whole number; nothing has changed.
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed.
        """
        keys = list(keys)
        priority = whole_number(priority, "priority")
        with self._storage.lock:
            named = [key for key in keys if key is not None]
            self._check_keys(named)
            self._storage.settle()
            there = [key for key in named if self._index.readable(key) is not None]
            unread = [self._index.blocks[key] for key in there if self._index.is_unread(key)]
            taken = self._reserved.intersection(named) or {
                k for k in there if not self._index.is_unread(k)
            }
            if taken:
                raise ValueError(
                    f"keys: {next(iter(taken))!r} is there already or reserved; where that may be, "
                    "reserve None and give the key to commit"
                )
            self._storage.check_room(dict.fromkeys(self._groups, len(keys)))
            blocks = [Block[Key](key) for key in keys]
            wanted = np.ones((len(self._groups), len(blocks)), bool)
            columns = self._new_pages(blocks, wanted, priority)
            for old in unread:
                if old.pages:  # it has not been dropped to make room
                    self._index.remove(old)
            for block, pages in zip(blocks, zip(*columns, strict=True), strict=True):
                block.pages = pages
            self._reserved.update(named)
            return BlockReservation(self, blocks, columns)

    def _new_pages(
        self, blocks: Sequence[Block[Key]], wanted: NDArray[np.bool_], priority: int
    ) -> Columns:
        """Make pages for blocks where they are wanted, shape (groups, blocks); all or none."""
        columns: Columns = []
        try:
            for group, mask in enumerate(wanted):
                owners = [block for block, want in zip(blocks, mask, strict=True) if want]
                made = iter(self._storage.new_pages(owners, group, priority=priority))
                columns.append([next(made) if want else None for want in mask])
        except BaseException:
            self._storage.discard(p for column in columns for p in column if p is not None)
            raise
        return columns

    def withdraw(self, keys: Sequence[Key]) -> BlockReservation[Key]:
        """Take blocks out of the cache to write to them again, such as one that is partly filled.

        They are brought to the first level and nobody finds them any more; commit them under other
        keys. Whether they are kept is forgotten.

        Raises
        ------
        KeyError
            A key is absent, or its block was lost; nothing has changed.
        ValueError
            A key occurs twice; nothing has changed.
        ResourceBusyError
            A block is leased; nothing has changed.
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed.
        """
        self._check_keys(keys)
        with self._storage.lock:
            self._storage.settle()
            blocks = []
            for key in keys:
                block = self._index.readable(key)
                if block is None or not all(map(is_there, block.pages)):
                    raise KeyError(key)
                blocks.append(block)
            self._check_free(blocks)
            columns: Columns = [[block.pages[group] for block in blocks] for group in self._groups]
            lease = self._hold(blocks, columns)
            pages = lease._pages()
            self._storage.take_out(pages)
            fresh = []
            for block in blocks:
                fresh.append(new := Block[Key](None))
                new.pages = self._index.forget(block)
                for page in new.pages:
                    if page is not None:
                        page.owner = new
            lease._open = False
            return BlockReservation(self, fresh, columns)

    def _check_keys(self, keys: Sequence[Key]) -> None:
        """Raise ValueError if a key occurs twice, or TypeError if one cannot be stored."""
        if len(set(keys)) < len(keys):
            twice = next(key for n, key in enumerate(keys) if key in keys[:n])
            raise ValueError(f"keys: {twice!r} occurs twice")
        if self._storage.persistent:
            for key in keys:
                encode_key(key)

    # --------------------------------------------------------------------- an engine's own pages

    def store(
        self, keys: Sequence[Key], pages: ArrayLike, *, ready: Event = DONE, priority: int = 0
    ) -> BlockJob[Key]:
        """Start copying blocks from the engine's pages, moving others down as needed.

        They are found from now on; who acquires or loads one waits for its copy. Blocks that are
        there are not copied, but touched.

        Parameters
        ----------
        keys : sequence
            Distinct.
        pages : integer array, shape (blocks,) or (groups, blocks)
            The engine's page of each block, the same of every pool group or one of each; -1 for
            none, where a window does not show the block any more.
        ready : Event
            Of the work that writes the pages.
        priority : int
            Blocks of a lower one leave a level first.

        Returns
        -------
        BlockJob
            Of the blocks that are copied: until it is done the engine must not change their pages.
            Blocks that another job is still copying are not among them.

        Raises
        ------
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed.
        ValueError, TypeError
            A key twice; pages of another shape, that there are not, or twice; none where there is
            no window; the cache has no engine. Nothing has changed.
        """
        check_event(ready, "ready")
        priority = whole_number(priority, "priority")
        engine = self._owner()
        self._check_keys(keys)
        homes = engine.homes(len(keys), pages)
        storage = self._storage
        with storage.lock:
            storage.settle()
            wanted = homes >= 0
            used: list[Page] = []
            completed: list[Page] = []  # of blocks that get others beside these
            for n, key in enumerate(keys):
                old = self._index.blocks.get(key)
                if old is not None and not self._index.is_unread(key):
                    wanted[:, n] &= [not is_there(page) for page in old.pages]
                    used += (pages_there := self._index.pages(key))
                    if wanted[:, n].any():
                        completed += pages_there
                elif gap := [group for group in self._index.windows.whole if not wanted[group, n]]:
                    raise ValueError(f"pages: block {key!r} has none of pool group {gap[0]}")
            copied = np.flatnonzero(wanted.any(axis=0)).tolist()
            named = [keys[n] for n in copied]
            storage.lease(completed)
            try:
                storage.check_room(dict(enumerate(wanted.sum(axis=1).tolist())))
                storage.touch(used)
                return self._copy_in(named, homes[:, copied], wanted[:, copied], ready, priority)
            finally:
                self._let_go(completed, DONE)

    def _copy_in(
        self,
        keys: list[Key],
        homes: NDArray[np.int32],
        wanted: NDArray[np.bool_],
        ready: Event,
        priority: int,
    ) -> BlockJob[Key]:
        """Copy the wanted ones of the engine's pages, shapes (groups, blocks), and enter them."""
        engine, storage = self._owner(), self._storage
        blocks = [Block(key) for key in keys]
        columns = self._new_pages(blocks, wanted, priority)
        try:
            for group, column in enumerate(columns):
                some = [page for page in column if page is not None]
                storage.copy_in(some, engine.memory[group], homes[group][wanted[group]], ready)
        except BaseException:
            storage.discard(page for column in columns for page in column if page is not None)
            raise
        rows = list(zip(*columns, strict=True))
        events = [[page.ready for page in row if page is not None] for row in rows]
        for key in keys:
            if self._index.is_unread(key):
                self._index.remove(self._index.blocks[key])
        self._index.enter(blocks, columns, keys, self._index.find(keys), None)
        self._share(columns)
        storage.release(page for row in rows for page in row if page is not None)
        return BlockJob(keys, events, self._waiting)

    def load(self, keys: Sequence[Key], pages: ArrayLike, *, ready: Event = DONE) -> BlockJob[Key]:
        """Start copying blocks to the engine's pages, through the first level.

        Parameters
        ----------
        keys : sequence
            Of blocks that are there: as many leading ones as `match` says.
        pages : integer array, shape (blocks,) or (groups, blocks)
            The engine's page for each block, the same of every pool group or one of each; -1 for
            none.
        ready : Event
            Of others that still use the pages.

        Returns
        -------
        BlockJob
            Until it is done the engine must not use the pages.

        Raises
        ------
        KeyError
            A block, or a page of it that is asked for, is not there; nothing has changed. It may
            have gone since it was matched: match again.
        OutOfPagesError
            They do not all fit into the first level beside what is leased; nothing has changed.
            Load fewer at a time.
        ValueError, TypeError
            Pages of another shape, that there are not, or twice; the cache has no engine. Nothing
            has changed.
        """
        check_event(ready, "ready")
        engine = self._owner()
        homes = engine.homes(len(keys), pages)
        storage = self._storage
        with storage.lock:
            storage.settle()
            blocks = []
            for key, home in zip(keys, homes.T, strict=True):
                block = self._index.readable(key)
                if block is None or any(
                    to >= 0 and not is_there(page)
                    for page, to in zip(block.pages, home.tolist(), strict=True)
                ):
                    raise KeyError(
                        f"block {key!r} is not here, or not any more: match again"
                        if block is None
                        else _lacks(block, home)
                    )
                blocks.append(block)
            columns: Columns = [
                [b.pages[group] if to >= 0 else None for b, to in zip(blocks, home, strict=True)]
                for group, home in enumerate(homes.tolist())
            ]
            with self._hold(blocks, columns) as lease:
                storage.count(lease.found, 0)
                events: list[list[Event]] = [[] for _ in keys]
                for group, (column, home) in enumerate(zip(columns, homes, strict=True)):
                    which = [n for n, page in enumerate(column) if page is not None]
                    some = [page for page in column if page is not None]
                    copies = storage.copy_out(some, engine.memory[group], home[which], ready)
                    for n, event in zip(which, copies, strict=True):
                        events[n].append(event)
            return BlockJob(keys, events, self._waiting)

    def _owner(self) -> EnginePages:
        if self._engine is None:
            raise ValueError("the cache has no engine: give it its pages (engine=EnginePages(...))")
        return self._engine

    # ------------------------------------------------------------------------- what has happened

    def take_events(self) -> list[BlockEvent[Key]]:
        """Give what happened to blocks since the last call, in order; needs ``max_events``."""
        events = self._index.events
        if events is None:
            return []
        with self._storage.lock:
            return events.take()

    @property
    def events_dropped(self) -> int:
        """Keys in events that were forgotten before `take_events`, so far; the oldest go."""
        events = self._index.events
        return 0 if events is None else events.dropped

    # ------------------------------------------------------- what leases and reservations call

    def _check(self) -> None:
        """Verify every invariant of cache and storage; AssertionError where one is broken."""
        with self._storage.lock:
            self._index.check()
            self._storage._check()

    @one_line
    def __repr__(self) -> str:
        lost = f", {self.lost} lost" if self.lost else ""
        return f"<BlockCache of {len(self)} blocks{lost} over {self._storage!r}>"

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        """Count the time of a ``with`` block as waiting for something."""
        return self._storage.waiting(what)

    def _wait_usable(self, pages: Iterable[Page]) -> None:
        """Block until the memory of pages in the first level is committed."""
        self._storage.wait_usable(pages)

    def _sinks(self, group: int) -> int:
        """Count the first blocks of a sequence that a group's window never leaves behind."""
        return self._index.windows.sinks(group)

    def _let_go(self, pages: Sequence[Page], after: Event) -> None:
        with self._storage.lock:
            self._storage.release(pages, after)
            stray = [p for p in pages if not p.leases and not p.freed and _is_stray(p)]
            self._storage.discard(stray)

    def _commit(
        self, room: BlockReservation[Key], keys: list[Key], ready: Event, *, last: bool
    ) -> BlockLease[Key]:
        """Enter the leading blocks of a reservation; after the last ones it is closed."""
        with self._storage.lock:
            found = self._index.find(keys)
            with self._storage.latch:
                blocks, columns = room._take(len(keys), last)
                self._reserved.difference_update(b.key for b in blocks if b.key is not None)
                held, pages = self._index.enter(blocks, columns, keys, found, ready)
                self._share(pages)
                return BlockLease(self, held, pages, [0] * len(held))

    def _share(self, columns: Columns) -> None:
        """Let others have pages that were computed."""
        if self._remote is not None:
            self._remote.stored(page for column in columns for page in column)

    def _cancel(self, blocks: list[Block[Key]], pages: list[Page], after: Event) -> None:
        with self._storage.lock:
            self._storage.discard(pages, after)
            self._reserved.difference_update(b.key for b in blocks if b.key is not None)


def _lacks(block: Block[Key], home: NDArray[np.int32]) -> str:
    """Say which page that was asked for is not there."""
    wanted = enumerate(zip(block.pages, home.tolist(), strict=True))
    group = next(n for n, (page, to) in wanted if to >= 0 and not is_there(page))
    return (
        f"{block} has no page of pool group {group}: give -1 where no window shows it, as "
        "BlockCache.visible says"
    )


def _is_stray(page: Page) -> bool:
    """Tell whether a page is not its block's any more: another one took its place."""
    return not (isinstance(page.owner, Block) and page.owner.holds(page))
