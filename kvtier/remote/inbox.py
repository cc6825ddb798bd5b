"""Blocks on their way in from a store, and what it says it has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, cast

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, Event, HostMem, OutOfPagesError
from hostmem.device import DONE
from kvtier.block import Block, Columns, Key
from kvtier.block_index import BlockIndex
from kvtier.page import Page
from kvtier.remote.client import STRAY, Refused, StoreClient, reason_of
from kvtier.remote.counts import Counts
from kvtier.remote.flights import Flight, Flights
from kvtier.remote.link import Link
from kvtier.remote.names import ObjectNames
from kvtier.remote.outbox import BATCH
from kvtier.remote.ranges import Ranges
from kvtier.remote.staging import Staging
from kvtier.remote.trailers import TRAILER_BYTES, Trailers
from kvtier.storage import TierStorage
from kvtier.transfer.jobs import all_of
from kvtier.transfer.memory import MemoryPool
from kvtier.transfer.workers import Workers

__all__ = ["Inbox"]

log = logging.getLogger("kvtier")

Mask = NDArray[np.bool_]

_AT_ONCE = 2  # one batch is verified while another one comes


class _Stop(Exception):
    """No further block comes, for the reason in the message."""


@dataclass(slots=True)
class _Batch(Generic[Key]):
    """Some blocks to fetch."""

    client: StoreClient
    ranges: Ranges
    blocks: list[Block[Key]]
    flight: Flight
    here: Mask
    """Pages that they had already, shape (groups, blocks)."""
    why: dict[Key, str]
    """Of the blocks that did not come, or not whole, the reason."""


@dataclass(slots=True)
class _Answer:
    """How many leading blocks the store has."""

    blocks: int = 0


class Inbox(Generic[Key]):
    """Fetches blocks: into new slots of host memory, or through staging to a hot level.

    A block is found in the cache once every page of it has come and is what had been stored; until
    then nobody sees it. What does not come by the deadline is a miss, though it may arrive: the
    slots belong to the store until its call returns.

    Parameters
    ----------
    storage : TierStorage
        Where the pages go.
    index : BlockIndex
        Where the blocks are found.
    link, names, counts, flights, staging
        As of an `Outbox`.
    """

    def __init__(
        self,
        storage: TierStorage,
        index: BlockIndex[Key],
        link: Link,
        names: ObjectNames,
        counts: Counts,
        flights: Flights,
        staging: Staging | None,
    ) -> None:
        self._storage = storage
        self._index = index
        self._link = link
        self._names = names
        self._counts = counts
        self._flights = flights
        self._staging = staging
        self._groups = range(len(storage.plan.groups))
        batch = BATCH if staging is None else staging.share(BATCH)
        self._each = max(batch // len(self._groups), 1)  # blocks of one call
        self._trailers: SimpleQueue[Trailers] = SimpleQueue()
        for _ in range(_AT_ONCE):
            self._trailers.put(Trailers(max(BATCH, self._each)))
        self._calling = threading.Lock()
        self._coming: dict[Key, Flight] = {}  # under the storage's lock
        self.strays: list[object] = []
        """Pages, staging slots and trailers that the store may still write to: nobody's."""
        self._closing = threading.Event()
        self._worker = Workers("kvtier-remote-in", 1)
        self._hands = ThreadPoolExecutor(_AT_ONCE, "kvtier-remote-hand")

    # --------------------------------------------------------------------------------- asking

    def fetch(self, keys: Sequence[Key], before: int) -> Event:
        """Begin to fetch the leading blocks that the store has; the storage's lock is held.

        Parameters
        ----------
        keys : sequence
            In prefix order, the first of them behind ``before`` blocks.
        before : int
            Blocks of the sequence in front of them.

        Returns
        -------
        Event
            When nothing more comes; it does not fail, and has finished by the deadline.
        """
        awaited = [self._coming[key] for key in keys if key in self._coming]
        lacking = [
            (key, before + n)
            for n, key in enumerate(dict.fromkeys(keys))
            if key not in self._coming and not all(self._here(key))
        ]
        fresh = [key for key, _ in lacking]
        if fresh:
            flight = self._begin(fresh, len(self._groups))
            if flight is not None:
                wanted = fresh[: flight.pages // len(self._groups)]
                self._coming.update(dict.fromkeys(wanted, flight))
                awaited.append(flight)
                places = np.array([place for _, place in lacking[: len(wanted)]])
                here = np.array([self._here(key) for key in wanted]).T
                self._worker.put(partial(self._fetch, wanted, places, here, flight))
        return all_of(dict.fromkeys(awaited))

    def _here(self, key: Key) -> list[bool]:
        """Tell which pages of a block the cache has; without the lock, as of just now."""
        block = self._index.blocks.get(key)
        pages = () if block is None else block.pages
        return [page is not None for page in pages] or [False] * len(self._groups)

    def lookup(self, keys: Sequence[Key], before: int, timeout: float | None) -> int:
        """Count the leading blocks that are here or in the store, behind ``before`` that are here.

        Blocks until the deadline at the most. Nothing is under way for it in memory of ours, so it
        does not count as in flight.
        """
        answer = _Answer()
        flight = self._begin(keys, 0)
        if flight is None:
            return 0
        self._worker.put(partial(self._look, keys, before, flight, answer))
        try:
            flight.synchronize(timeout)
        except TimeoutError:
            return 0
        return answer.blocks

    def _begin(self, keys: Sequence[Key], each: int) -> Flight | None:
        """Begin a flight of as many of the keys as there is room for; count the others."""
        refusal = "closed" if self._closing.is_set() else None
        if refusal is None and self._flights.overdue():
            self._link.health.doubted("an answer takes longer than the deadline")
        if refusal is None and not self._link.health.may_ask():
            refusal = "degraded"
        most = 0 if refusal else self._flights.room // each if each else len(keys)
        flight = self._flights.begin(min(most, len(keys)) * each) if most else None
        begun = 0 if flight is None else min(most, len(keys))
        self._counts.missed(refusal or "busy", len(keys) - begun)
        return flight

    # ------------------------------------------------------------------------ on the worker

    def _look(self, keys: Sequence[Key], before: int, flight: Flight, answer: _Answer) -> None:
        def ask(client: StoreClient, _: Ranges) -> None:
            there = self._exist(client, keys, flight)
            named = there.shape[1]
            for n, key in enumerate(keys[:named]):
                there[:, n] |= self._here(key)
            answer.blocks = self._leading(there, np.arange(before, before + named))

        self._run(ask, flight)
        self._flights.end(flight)

    def _fetch(self, keys: list[Key], places: NDArray[np.int_], here: Mask, flight: Flight) -> None:
        """Fetch what lacks of the leading ones of blocks, in those places of a sequence."""
        why: dict[Key, str] = {}
        came: set[Key] = set()

        def ask(client: StoreClient, ranges: Ranges) -> None:
            there = self._exist(client, keys, flight)
            blocks = self._leading(there | here[:, : there.shape[1]], places)
            wanted = there[:, :blocks] & ~here[:, :blocks]
            self._show(wanted, places[:blocks])
            brought = []
            for first in range(0, blocks, self._each):
                end = min(first + self._each, blocks)
                some = [Block(key) for key in keys[first:end]]
                got = _Batch(client, ranges, some, flight, here[:, first:end], why)
                brought.append(self._hands.submit(self._bring, got, wanted[:, first:end]))
            # Each is waited for, also behind one that failed: then nothing of it goes on.
            came.update(*(one.result() for one in brought if one.exception() is None))
            for one in brought:
                one.result()
            if blocks < len(keys):
                raise _Stop("absent" if blocks < there.shape[1] else "unnamed")

        refusal = self._run(ask, flight)
        for reason in why.values():
            self._counts.missed(reason)
        if refusal is not None:  # else no window shows the others
            self._counts.missed(refusal, len(keys) - len(came | why.keys()))
        with self._storage.lock:
            for key in keys:
                del self._coming[key]
        self._flights.end(flight)  # last: who has waited for it may ask for the keys again

    def _run(self, ask: Callable[[StoreClient, Ranges], None], flight: Flight) -> str | None:
        """Ask the store, and say what went wrong; raises nothing."""
        try:
            if self._closing.is_set():
                return "closed"
            if flight.left == 0:
                return "late"
            flight.asked = True
            client, ranges = self._link.open()
            ask(client, ranges)
        except Refused:
            return "master"
        except _Stop as reason:
            return str(reason)
        except ClosedError:
            return "closed"
        except OutOfPagesError:
            return "room"
        except Exception:
            log.exception("blocks could not be fetched from the remote store")
            return "error"
        finally:
            flight.asked = False  # what is left to do is ours
        return None

    def _exist(self, client: StoreClient, keys: Sequence[Key], flight: Flight) -> Mask:
        """Ask for all pages of blocks in one call; shape (groups, blocks that have names)."""
        names = self._names.leading(keys, 0)
        if not names:
            return np.zeros((len(self._groups), 0), np.bool_)
        keys = keys[: len(names)]
        names += [self._names.name(key, group) for group in self._groups[1:] for key in keys]
        codes = client.exist(names)
        self._link.heard(codes, late=flight.left == 0)
        if codes and all(code < 0 for code in codes):
            raise _Stop(reason_of(codes[0]))
        return np.reshape(np.array(codes) == 1, (len(self._groups), len(keys)))

    def _leading(self, there: Mask, places: NDArray[np.int_]) -> int:
        """Count the leading blocks that can be used, in those places of a sequence."""
        windows = self._index.windows
        whole: Mask = np.all(there[windows.whole], axis=0)
        count = len(whole) if whole.all() else int(np.argmin(whole))
        if windows.sliding and count:
            rows = np.ones((int(places[count - 1]) + 1, len(there)), np.bool_)
            rows[places[:count]] = there[:, :count].T  # those between are here
            count = int(np.searchsorted(places[:count], windows.usable(rows.tolist(), bool)))
        return count

    def _show(self, there: Mask, places: NDArray[np.int_]) -> None:
        """Leave out the pages that no window shows behind the blocks in those places."""
        windows = self._index.windows
        if windows.sliding and len(places):
            for group in windows.sliding:
                first, end = windows.stale(group, int(places[-1]) + 1)
                there[group, : len(places)] &= (places < first) | (places >= end)

    def _bring(self, got: _Batch[Key], wanted: Mask) -> list[Key]:
        """Fetch the wanted pages of some blocks, and let these be found; which have come."""
        if got.flight.left == 0:
            raise _Stop("late")
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
                    raise _Stop("late")
                entered = True
                return self._enter(got, columns, good, DONE)
        finally:
            if not entered:
                self._storage.discard(p for column in columns for p in column if p is not None)

    def _into(self, got: _Batch[Key], group: int, column: list[Page | None]) -> Mask:
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
            raise _Stop("late") from None
        addresses = pool.addresses(slots)
        if not got.ranges.cover(pool.memory, addresses):
            raise _Stop("unregistered")
        named = [page.content for page in pages]
        good, stray = self._read(got, group, cast(list[Key], named), addresses, pool.slot_size)
        for n in np.flatnonzero(stray).tolist():
            self.strays.append(pages[n])
            column[column.index(pages[n])] = None
        return good

    def _through(self, staging: Staging, got: _Batch[Key], wanted: Mask) -> list[Key]:
        """Fetch pages into staging, and copy those of blocks that are whole to the hot level."""
        ids = staging.take(int(wanted.sum()))
        if ids is None:
            raise _Stop("busy")
        copies: list[Event] = []
        slots = np.full(wanted.shape, -1, np.int32)
        slots[wanted] = ids
        good, stray = np.zeros_like(wanted), np.zeros_like(wanted)
        try:
            if not got.ranges.add(staging.address, staging.nbytes):
                raise _Stop("unregistered")
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
                    raise _Stop("late")
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
        got: _Batch[Key],
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
                raise _Stop("unregistered")
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
                trailers = Trailers(max(BATCH, self._each))
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
        self, got: _Batch[Key], columns: Columns, good: Mask, ready: Event | None
    ) -> list[Key]:
        """Let the blocks be found that are whole, or more so than before; the lock is held.

        What came in vain is freed.
        """
        storage, index, blocks = self._storage, self._index, got.blocks
        use = []
        for block, came in zip(blocks, good.T, strict=True):
            key = cast(Key, block.key)
            here = np.array(self._here(key))
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

    def close(self) -> None:
        """Fetch nothing more, and wait for the calls that are under way."""
        self._closing.set()
        self._worker.close()
        self._hands.shutdown()


def _wait(fence: Event, flight: Flight) -> None:
    """Wait for somebody's use of a slot, however it ends; TimeoutError at the deadline."""
    try:
        fence.synchronize(flight.left)
    except Exception:
        if not fence.query():
            raise
