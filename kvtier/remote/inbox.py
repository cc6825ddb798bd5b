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
from kvtier.remote.client import Refused, StoreClient, reason_of
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
    why: dict[Key, str]
    """Of the blocks that did not come, the reason."""


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
            for n, key in enumerate(keys)
            if key not in self._coming and key not in self._index.blocks
        ]
        fresh = [key for key, _ in lacking]
        if fresh:
            flight = self._begin(fresh, len(self._groups))
            if flight is not None:
                wanted = fresh[: flight.pages // len(self._groups)]
                self._coming.update(dict.fromkeys(wanted, flight))
                awaited.append(flight)
                places = np.array([place for _, place in lacking[: len(wanted)]])
                self._worker.put(partial(self._fetch, wanted, places, flight))
        return all_of(dict.fromkeys(awaited))

    def lookup(self, keys: Sequence[Key], timeout: float | None) -> int:
        """Count the leading blocks that the store has; blocks until the deadline at the most.

        Nothing is under way for it in memory of ours, so it does not count as in flight.
        """
        answer = _Answer()
        flight = self._begin(keys, 0)
        if flight is None:
            return 0
        self._worker.put(partial(self._look, keys, flight, answer))
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

    def _look(self, keys: Sequence[Key], flight: Flight, answer: _Answer) -> None:
        def ask(client: StoreClient, _: Ranges) -> None:
            answer.blocks = self._leading(self._exist(client, keys))

        self._run(ask, flight)

    def _fetch(self, keys: list[Key], places: NDArray[np.int_], flight: Flight) -> None:
        """Fetch the leading ones of blocks, which are in those places of a sequence."""
        why: dict[Key, str] = {}
        came = 0

        def ask(client: StoreClient, ranges: Ranges) -> None:
            nonlocal came
            there = self._exist(client, keys)
            blocks = self._leading(there)
            self._show(there, places[:blocks])
            brought = []
            for first in range(0, blocks, self._each):
                end = min(first + self._each, blocks)
                got = _Batch(client, ranges, [Block(key) for key in keys[first:end]], flight, why)
                brought.append(self._hands.submit(self._bring, got, there[:, first:end]))
            # Each is waited for, also behind one that failed: then nothing of it goes on.
            came = sum(one.result() for one in brought if one.exception() is None)
            for one in brought:
                one.result()
            if blocks < len(keys):
                raise _Stop("absent")

        refusal = self._run(ask, flight)
        for reason in why.values():
            self._counts.missed(reason)
        self._counts.missed(refusal or "here", len(keys) - came - len(why))
        with self._storage.lock:
            for key in keys:
                del self._coming[key]

    def _run(self, ask: Callable[[StoreClient, Ranges], None], flight: Flight) -> str | None:
        """Ask the store, and say what went wrong; the flight is over."""
        try:
            if self._closing.is_set():
                return "closed"
            if flight.left == 0:
                return "late"
            client, ranges = self._link.open()
            ask(client, ranges)
            if flight.left == 0:
                self._link.health.failed("an answer came later than the deadline")
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
            self._flights.end(flight)
        return None

    def _exist(self, client: StoreClient, keys: Sequence[Key]) -> Mask:
        """Ask for all pages of blocks in one call; shape (groups, blocks)."""
        names = [self._names.name(key, group) for group in self._groups for key in keys]
        codes = client.exist(names)
        self._link.heard(codes)
        if codes and all(code < 0 for code in codes):
            raise _Stop(reason_of(codes[0]))
        return np.reshape(np.array(codes) == 1, (len(self._groups), len(keys)))

    def _leading(self, there: Mask) -> int:
        """Count the leading blocks of which no page is lacking that every sequence needs."""
        whole: Mask = np.all(there[self._index.windows.whole], axis=0)
        return len(whole) if whole.all() else int(np.argmin(whole))

    def _show(self, there: Mask, places: NDArray[np.int_]) -> None:
        """Leave out the pages that no window shows behind the blocks in those places."""
        windows = self._index.windows
        if windows.sliding and len(places):
            for group in windows.sliding:
                first, end = windows.stale(group, int(places[-1]) + 1)
                there[group, : len(places)] &= (places < first) | (places >= end)

    def _bring(self, got: _Batch[Key], wanted: Mask) -> int:
        """Fetch the wanted pages of some blocks, and let these be found; how many have come."""
        if got.flight.left == 0:
            raise _Stop("late")
        if self._staging is not None:
            return self._through(self._staging, got, wanted)
        columns = self._new_pages(got.blocks, wanted)
        entered = False
        try:
            good = np.zeros_like(wanted)
            for group, column in enumerate(columns):
                pages = [page for page in column if page is not None]
                good[group, wanted[group]] = self._into(got, group, pages)
            with self._storage.lock:
                if got.flight.left == 0:
                    raise _Stop("late")
                entered = True
                return self._enter(got.blocks, columns, good, DONE)
        finally:
            if not entered:
                self._storage.discard(p for column in columns for p in column if p is not None)

    def _into(self, got: _Batch[Key], group: int, pages: list[Page]) -> Mask:
        """Read pages of one group into their slots of host memory, once these may be written."""
        pool = self._storage.levels[0].groups[group].memory.pools[0]
        assert isinstance(pool, MemoryPool)  # as the first level is host memory
        assert isinstance(pool.memory, HostMem)
        for page in pages:
            for fence in page.fences:
                fence.wait_finished()
        self._storage.wait_usable(pages)
        addresses = pool.addresses(np.array([page.slot for page in pages], np.int32))
        if pages and not got.ranges.cover(pool.memory, addresses):
            raise _Stop("unregistered")
        named = [page.content for page in pages]
        return self._read(got, group, cast(list[Key], named), addresses, pool.slot_size)

    def _through(self, staging: Staging, got: _Batch[Key], wanted: Mask) -> int:
        """Fetch pages into staging, and copy those of blocks that are whole to the hot level."""
        ids = staging.take(int(wanted.sum()))
        if ids is None:
            raise _Stop("busy")
        copies: list[Event] = []
        try:
            if not got.ranges.add(staging.address, staging.nbytes):
                raise _Stop("unregistered")
            slots = np.full(wanted.shape, -1, np.int32)
            slots[wanted] = ids
            good = np.zeros_like(wanted)
            for group, mask in enumerate(wanted):
                pool = staging.pools[group]
                named = [b.key for b, want in zip(got.blocks, mask, strict=True) if want]
                pages = pool.addresses(slots[group, mask])
                keys = cast(list[Key], named)
                good[group, mask] = self._read(got, group, keys, pages, pool.slot_size)
            good &= good[self._index.windows.whole].all(axis=0)
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
                return self._enter(got.blocks, columns, good, None)
        finally:
            for event in copies:
                event.wait_finished()
            staging.give(ids)

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
    ) -> Mask:
        """Read pages of one group, and verify them; tell which are what had been stored."""
        if not keys:
            return np.zeros(0, np.bool_)
        names = [self._names.name(key, group) for key in keys]
        trailers = self._trailers.get()
        try:
            if not got.ranges.add(trailers.address, trailers.nbytes):
                raise _Stop("unregistered")
            behind = trailers.addresses(len(names))
            buffers = [list(both) for both in zip(pages.tolist(), behind, strict=True)]
            with self._calling:
                codes = got.client.get(names, buffers, [[nbytes, TRAILER_BYTES]] * len(names))
            self._link.heard(codes)
            came = np.array(codes) == nbytes + TRAILER_BYTES
            good: Mask = came & trailers.believed(names, pages, nbytes)
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
        return good

    def _enter(
        self, blocks: Sequence[Block[Key]], columns: Columns, good: Mask, ready: Event | None
    ) -> int:
        """Let the blocks be found that are whole, and free what came in vain; the lock is held."""
        storage, index = self._storage, self._index
        whole: Mask = np.all(good[index.windows.whole], axis=0) & np.any(good, axis=0)
        use = [
            fine and block.key not in index.blocks
            for fine, block in zip(whole, blocks, strict=True)
        ]
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
        return int(whole.sum())

    def close(self) -> None:
        """Fetch nothing more, and wait for the calls that are under way."""
        self._closing.set()
        self._worker.close()
        self._hands.shutdown()
