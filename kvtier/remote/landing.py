"""Pages of a store on their way into the first level, from the call to where they are found."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, cast

import numpy as np
from numpy.typing import NDArray

from hostmem import Event, HostMem
from hostmem.device import DONE
from kvtier.block import Block, Columns, Key
from kvtier.block_index import BlockIndex
from kvtier.page import Page
from kvtier.remote.client import STRAY, StoreClient, reason_of
from kvtier.remote.counts import Counts
from kvtier.remote.flights import Flight
from kvtier.remote.link import Link
from kvtier.remote.names import ObjectNames
from kvtier.remote.outbox import BATCH
from kvtier.remote.ranges import Ranges
from kvtier.remote.staging import Staging
from kvtier.remote.trailers import TRAILER_BYTES, Trailers
from kvtier.storage import TierStorage
from kvtier.transfer.memory import MemoryPool

__all__ = ["Batch", "Landing", "Mask", "Stopped"]

log = logging.getLogger("kvtier")

Mask = NDArray[np.bool_]


class Stopped(Exception):
    """No further block comes, for the reason in the message."""


@dataclass(slots=True)
class Batch(Generic[Key]):
    """Some blocks to fetch."""

    client: StoreClient
    ranges: Ranges
    blocks: list[Block[Key]]
    flight: Flight
    here: Mask
    """Pages that they had already, shape (groups, blocks)."""
    why: dict[Key, str]
    """Of the blocks that did not come, or not whole, the reason."""


class Landing(Generic[Key]):
    """Brings pages of some blocks into the first level, and lets those be found that are whole.

    Into new slots of host memory, or through staging to a hot level. May be called by several
    threads; their calls of the store take turns.

    Parameters
    ----------
    storage, index, link, names, counts, staging
        As of an `Inbox`.
    threads : int
        Threads that may bring batches at a time.
    """

    def __init__(
        self,
        storage: TierStorage,
        index: BlockIndex[Key],
        link: Link,
        names: ObjectNames,
        counts: Counts,
        staging: Staging | None,
        threads: int,
    ) -> None:
        self._storage = storage
        self._index = index
        self._link = link
        self._names = names
        self._counts = counts
        self._staging = staging
        self._groups = len(storage.plan.groups)
        batch = BATCH if staging is None else staging.share(BATCH)
        self.most = max(batch // self._groups, 1)
        """Blocks of one batch."""
        self._trailers: SimpleQueue[Trailers] = SimpleQueue()
        for _ in range(threads):
            self._trailers.put(Trailers(max(BATCH, self.most)))
        self._calling = threading.Lock()
        self.strays: list[object] = []
        """Pages, staging slots and trailers that the store may still write to: nobody's."""

    def here(self, key: Key) -> list[bool]:
        """Tell which pages of a block the cache has; without the lock, as of just now."""
        block = self._index.blocks.get(key)
        pages = () if block is None else block.pages
        return [page is not None for page in pages] or [False] * self._groups

    def bring(self, got: Batch[Key], wanted: Mask) -> list[Key]:
        """Fetch the wanted pages of some blocks, and let these be found; which have come."""
        if got.flight.left == 0:
            raise Stopped("late")
        if self._staging is not None:
            return self._through(self._staging, got, wanted)
        columns = self._new_pages(got.blocks, wanted)
        entered = False
        try:
            good = np.zeros_like(wanted)
            for group, column in enumerate(columns):
                good[group, wanted[group]] = self._into(got, group, column)
            with self._storage.lock:
                if got.flight.left == 0:
                    raise Stopped("late")
                entered = True
                return self._enter(got, columns, good, DONE)
        finally:
            if not entered:
                self._storage.discard(p for column in columns for p in column if p is not None)

    def _into(self, got: Batch[Key], group: int, column: list[Page | None]) -> Mask:
        """Read pages of one group into their slots of host memory, once these may be written.

        Those that the store may still write to later are taken out of the column.
        """
        pages = [page for page in column if page is not None]
        if not pages:
            return np.zeros(0, np.bool_)
        pool = self._storage.levels[0].groups[group].memory.pools[0]
        assert isinstance(pool, MemoryPool)  # as the first level is host memory
        assert isinstance(pool.memory, HostMem)
        slots = np.array([page.slot for page in pages], np.int32)
        try:
            for page in pages:
                for fence in page.fences:
                    _wait(fence, got.flight)
            pool.memory.wait_usable((int(slots.max()) + 1) * pool.slot_size, got.flight.left)
        except TimeoutError:
            raise Stopped("late") from None
        addresses = pool.addresses(slots)
        if not got.ranges.cover(pool.memory, addresses):
            raise Stopped("unregistered")
        named = [page.content for page in pages]
        good, stray = self._read(got, group, cast(list[Key], named), addresses, pool.slot_size)
        for n in np.flatnonzero(stray).tolist():
            self.strays.append(pages[n])
            column[column.index(pages[n])] = None
        return good

    def _through(self, staging: Staging, got: Batch[Key], wanted: Mask) -> list[Key]:
        """Fetch pages into staging, and copy those of blocks that are whole to the hot level."""
        ids = staging.take(int(wanted.sum()))
        if ids is None:
            raise Stopped("busy")
        copies: list[Event] = []
        slots = np.full(wanted.shape, -1, np.int32)
        slots[wanted] = ids
        good, stray = np.zeros_like(wanted), np.zeros_like(wanted)
        try:
            if not got.ranges.add(staging.address, staging.nbytes):
                raise Stopped("unregistered")
            for group, mask in enumerate(wanted):
                pool = staging.pools[group]
                named = [b.key for b, want in zip(got.blocks, mask, strict=True) if want]
                pages = pool.addresses(slots[group, mask])
                keys = cast(list[Key], named)
                good[group, mask], stray[group, mask] = self._read(
                    got, group, keys, pages, pool.slot_size
                )
            good &= (good | got.here)[self._index.windows.whole].all(axis=0)
            with self._storage.lock:
                if got.flight.left == 0:
                    raise Stopped("late")
                columns = self._new_pages(got.blocks, good)
                try:
                    for group, column in enumerate(columns):
                        some = [page for page in column if page is not None]
                        held = slots[group, good[group]]
                        self._storage.copy_in(some, staging.memory[group], held, DONE)
                        copies += (page.ready for page in some)
                except BaseException:
                    self._storage.discard(p for c in columns for p in c if p is not None)
                    raise
                return self._enter(got, columns, good, None)
        finally:
            for event in copies:
                event.wait_finished()
            staging.give(slots[wanted & ~stray])
            self.strays += slots[stray].tolist()

    def _new_pages(self, blocks: Sequence[Block[Key]], wanted: Mask) -> Columns:
        """Make pages of the first level for blocks where they are wanted; all or none."""
        columns: Columns = []
        with self._storage.lock:
            try:
                for group, mask in enumerate(wanted):
                    owners = [block for block, want in zip(blocks, mask, strict=True) if want]
                    made = iter(self._storage.new_pages(owners, group))
                    columns.append([next(made) if want else None for want in mask])
            except BaseException:
                self._storage.discard(p for column in columns for p in column if p is not None)
                raise
        return columns

    def _read(
        self,
        got: Batch[Key],
        group: int,
        keys: Sequence[Key],
        pages: NDArray[np.uint64],
        nbytes: int,
    ) -> tuple[Mask, Mask]:
        """Read pages of one group, and verify them.

        Returns
        -------
        (bool array, bool array), shape (pages,)
            Which are what had been stored; and which may still be written to.
        """
        if not keys:
            return np.zeros(0, np.bool_), np.zeros(0, np.bool_)
        names = [self._names.name(key, group) for key in keys]
        trailers = self._trailers.get()
        try:
            if not got.ranges.add(trailers.address, trailers.nbytes):
                raise Stopped("unregistered")
            behind = trailers.addresses(len(names))
            buffers = [list(both) for both in zip(pages.tolist(), behind, strict=True)]
            with self._calling:
                codes = got.client.get(names, buffers, [[nbytes, TRAILER_BYTES]] * len(names))
            self._link.heard(codes, late=got.flight.left == 0)
            came = np.array(codes) == nbytes + TRAILER_BYTES
            good: Mask = came & trailers.believed(names, pages, nbytes)
            stray: Mask = np.array(codes) == STRAY
            if stray.any():
                log.error("%d pages may still come: their slots are not used again", stray.sum())
                self.strays.append(trailers)
                trailers = Trailers(max(BATCH, self.most))
        finally:
            self._trailers.put(trailers)
        for key, code in zip(keys, codes, strict=True):
            if code < 0:
                got.why.setdefault(key, reason_of(code))
        wrong = np.flatnonzero(~good & (np.array(codes) >= 0)).tolist()
        if wrong:
            log.error("%d pages of the remote store are not what had been stored", len(wrong))
            got.client.remove([names[n] for n in wrong])
            for n in wrong:
                got.why.setdefault(keys[n], "corrupt")
        self._counts.fetched(int(good.sum()), nbytes)
        return good, stray

    def _enter(
        self, got: Batch[Key], columns: Columns, good: Mask, ready: Event | None
    ) -> list[Key]:
        """Let the blocks be found that are whole, or more so than before; the lock is held.

        What came in vain is freed.
        """
        storage, index, blocks = self._storage, self._index, got.blocks
        use = []
        for block, came in zip(blocks, good.T, strict=True):
            key = cast(Key, block.key)
            here = np.array(self.here(key))
            whole = bool((came | here)[index.windows.whole].all())
            use.append(whole and bool((came & ~here).any()))
            if came.any() and whole and not use[-1]:
                got.why.setdefault(key, "here")
        vain: list[Page] = []
        kept: Columns = [[] for _ in columns]
        for column, row, mine in zip(columns, good, kept, strict=True):
            for page, fine, used in zip(column, row, use, strict=True):
                if used:
                    mine.append(page if fine else None)
                if page is not None and not (used and fine):
                    vain.append(page)
        storage.discard(vain)
        some = [block for block, used in zip(blocks, use, strict=True) if used]
        keys = [block.key for block in some if block.key is not None]
        with storage.latch:
            _, held = index.enter(some, kept, keys, index.find(keys), ready)
        storage.release(page for column in held for page in column if page is not None)
        return keys


def _wait(fence: Event, flight: Flight) -> None:
    """Wait for somebody's use of a slot, however it ends; TimeoutError at the deadline."""
    try:
        fence.synchronize(flight.left)
    except Exception:
        if not fence.query():
            raise
