"""Blocks on their way in from a store, and what it says it has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, Event, OutOfPagesError
from kvtier.block import Block, Key
from kvtier.block_index import BlockIndex
from kvtier.remote.client import Refused, StoreClient, reason_of
from kvtier.remote.counts import Counts
from kvtier.remote.flights import Flight, Flights
from kvtier.remote.landing import Batch, Landing, Mask, Stopped
from kvtier.remote.link import Link
from kvtier.remote.names import ObjectNames
from kvtier.remote.ranges import Ranges
from kvtier.remote.staging import Staging
from kvtier.storage import TierStorage
from kvtier.transfer.jobs import all_of
from kvtier.transfer.workers import Workers

__all__ = ["Inbox"]

log = logging.getLogger("kvtier")

_AT_ONCE = 2  # one batch is verified while another one comes


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
        self._landing: Landing[Key] = Landing(
            storage, index, link, names, counts, staging, _AT_ONCE
        )
        self._groups = range(len(storage.plan.groups))
        self._coming: dict[Key, Flight] = {}  # under the storage's lock
        self._closing = threading.Event()
        self._worker = Workers("kvtier-remote-in", 1)
        self._hands = ThreadPoolExecutor(_AT_ONCE, "kvtier-remote-hand")

    @property
    def strays(self) -> list[object]:
        """Pages, staging slots and trailers that the store may still write to."""
        return self._landing.strays

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
            if key not in self._coming and not all(self._landing.here(key))
        ]
        fresh = [key for key, _ in lacking]
        if fresh:
            flight = self._begin(fresh, len(self._groups))
            if flight is not None:
                wanted = fresh[: flight.pages // len(self._groups)]
                self._coming.update(dict.fromkeys(wanted, flight))
                awaited.append(flight)
                places = np.array([place for _, place in lacking[: len(wanted)]])
                here = np.array([self._landing.here(key) for key in wanted]).T
                self._worker.put(partial(self._fetch, wanted, places, here, flight))
        return all_of(dict.fromkeys(awaited))

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
                if key in self._index.blocks:
                    there[:, n] |= self._landing.here(key)
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
            for first in range(0, blocks, self._landing.most):
                end = min(first + self._landing.most, blocks)
                some = [Block(key) for key in keys[first:end]]
                got = Batch(client, ranges, some, flight, here[:, first:end], why)
                brought.append(self._hands.submit(self._landing.bring, got, wanted[:, first:end]))
            # Each is waited for, also behind one that failed: then nothing of it goes on.
            came.update(*(one.result() for one in brought if one.exception() is None))
            for one in brought:
                one.result()
            if blocks < len(keys):
                raise Stopped("absent" if blocks < there.shape[1] else "unnamed")

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
        except Stopped as reason:
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
            raise Stopped(reason_of(codes[0]))
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

    def close(self) -> None:
        """Fetch nothing more, and wait for the calls that are under way."""
        self._closing.set()
        self._worker.close()
        self._hands.shutdown()
