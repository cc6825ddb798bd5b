"""Pages on their way out to a store."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, Event, HostMem
from hostmem.device import DONE
from kvtier.page import Page
from kvtier.remote.client import Refused, reason_of
from kvtier.remote.counts import Counts
from kvtier.remote.flights import Flight, Flights
from kvtier.remote.link import Link
from kvtier.remote.names import ObjectNames
from kvtier.remote.staging import Staging
from kvtier.remote.trailers import TRAILER_BYTES, Trailers
from kvtier.storage import TierStorage
from kvtier.transfer.memory import Ids, MemoryPool
from kvtier.transfer.workers import Workers

__all__ = ["BATCH", "Outbox"]

log = logging.getLogger("kvtier")

BATCH = 64
"""Pages of one call to the store, at most."""

_WORKERS = 2  # one makes checksums while the other is in a call


@dataclass(slots=True)
class _Letter:
    """Some pages of one group that go out in one call."""

    flight: Flight
    names: list[str]
    pages: NDArray[np.uint64]
    nbytes: int
    ready: Sequence[Event]
    memory: HostMem | None
    """Where they lie; None for staging."""
    staged: Ids | None


class Outbox:
    """Sends pages out: from their slots in host memory, or through staging from a hot level.

    Whoever wants to write to such a slot waits until the page has gone out, or for the deadline.
    Past that the slot may change while it is being read: the checksum was made before, and whoever
    fetches the page finds it wrong.

    Parameters
    ----------
    storage : TierStorage
        Where the pages are.
    link : Link
        Who takes them.
    names : ObjectNames
        What they are called.
    counts : Counts
        Told of what goes out.
    flights : Flights
        What is under way.
    staging : Staging, optional
        For pages of a hot level.
    """

    def __init__(
        self,
        storage: TierStorage,
        link: Link,
        names: ObjectNames,
        counts: Counts,
        flights: Flights,
        staging: Staging | None,
    ) -> None:
        self._storage = storage
        self._link = link
        self._names = names
        self._counts = counts
        self._flights = flights
        self._staging = staging
        self._batch = BATCH if staging is None else staging.share(BATCH)
        self._trailers: SimpleQueue[Trailers] = SimpleQueue()
        for _ in range(_WORKERS):
            self._trailers.put(Trailers(BATCH))
        self._calling = threading.Lock()
        self._closing = threading.Event()
        self._workers = Workers("kvtier-remote-out", _WORKERS)

    def offer(self, pages: Iterable[Page]) -> None:
        """Send pages out, as far as that is possible now; the caller holds the storage's lock."""
        by: dict[tuple[int, int], list[tuple[Page, str]]] = {}
        for page in pages:
            try:
                name = self._names.name(page.content, page.group)
            except (TypeError, ValueError):
                self._counts.unsent("unnamed")
                continue
            by.setdefault((page.level, page.group), []).append((page, name))
        for some in by.values():
            for first in range(0, len(some), self._batch):
                part = some[first : first + self._batch]
                if (refusal := self._send([p for p, _ in part], [n for _, n in part])) is not None:
                    self._counts.unsent(refusal, len(part))

    def _send(self, pages: list[Page], names: list[str]) -> str | None:
        """Put a letter into the queue, or say why not."""
        if self._closing.is_set():
            return "closed"
        if self._flights.overdue():
            self._link.health.doubted("a page is under way for longer than the deadline")
        if not self._link.health.may_ask():
            return "degraded"
        if (flight := self._flights.begin(len(pages))) is None:
            return "busy"
        letter: _Letter | None = None
        refusal = "busy"
        try:
            letter = self._letter(flight, pages, names)
        except ClosedError:
            refusal = "closed"
        except Exception:  # whoever computed the pages, or makes room, is not to blame
            log.exception("pages could not be made ready for the remote store")
            refusal = "error"
        finally:
            if letter is None:
                self._flights.end(flight)
        if letter is None:
            return refusal
        self._workers.put(partial(self._deliver, letter))
        return None

    def _letter(self, flight: Flight, pages: list[Page], names: list[str]) -> _Letter | None:
        level, group = pages[0].level, pages[0].group
        memory = self._storage.levels[level].groups[group].memory
        pool = memory.pools[0]
        if not memory.hot and isinstance(pool, MemoryPool) and isinstance(pool.memory, HostMem):
            ready = [page.ready for page in pages]
            for page in pages:  # nobody gets the slot before the page has gone out
                page.fences = (*(fence for fence in page.fences if not fence.query()), flight)
            slots = np.array([page.slot for page in pages], np.int32)
            addresses, size = pool.addresses(slots), pool.slot_size
            return _Letter(flight, names, addresses, size, ready, pool.memory, None)
        staging = self._staging
        if staging is None or level > 0:
            return None
        # However much waits to go out, half is left for what comes.
        if (ids := staging.take(len(pages), staging.count // 2)) is None:
            return None
        try:
            ready = self._storage.copy_out(pages, staging.memory[group], ids, DONE)
        except BaseException:
            staging.give(ids)
            raise
        cold = staging.pools[group]
        return _Letter(flight, names, cold.addresses(ids), cold.slot_size, ready, None, ids)

    def _deliver(self, letter: _Letter) -> None:
        """Send one letter, on a thread of the workers."""
        trailers = self._trailers.get()
        try:
            unsent = self._put(letter, trailers)
        except Refused:
            unsent = Counter(master=len(letter.names))
        except Exception:
            log.exception("pages could not be sent to the remote store")
            unsent = Counter(error=len(letter.names))
        letter.flight.asked = False  # what is left to do is ours
        self._trailers.put(trailers)
        for reason, pages in unsent.items():
            self._counts.unsent(reason, pages)
        if letter.staged is not None and self._staging is not None:
            for event in letter.ready:
                event.wait_finished()
            self._staging.give(letter.staged)
        self._flights.end(letter.flight)

    def _put(self, letter: _Letter, trailers: Trailers) -> Counter[str]:
        """Send pages once they are there; count those that do not go, by reason."""
        flight, total = letter.flight, len(letter.names)
        if self._closing.is_set():
            return Counter(closed=total)
        came = [n for n, event in enumerate(letter.ready) if _arrived(event, flight)]
        unsent = Counter(late=total - len(came))
        if not came:
            return unsent
        names, pages = [letter.names[n] for n in came], letter.pages[came]
        flight.asked = True
        client, ranges = self._link.open()
        held = _view(letter.memory, pages, letter.nbytes, flight)  # until the call returns
        if held is None:
            return unsent + Counter(late=len(came))
        if letter.memory is None:
            staging = self._staging
            known = staging is not None and ranges.add(staging.address, staging.nbytes)
        else:
            known = ranges.cover(letter.memory, pages)
        if not known or not ranges.add(trailers.address, trailers.nbytes):
            return unsent + Counter(unregistered=len(came))
        trailers.write(names, pages, letter.nbytes)
        if flight.left == 0:  # the slots may be others' by now, and the checksums of their bytes
            return unsent + Counter(late=len(came))
        behind = trailers.addresses(len(came))
        buffers = [list(both) for both in zip(pages.tolist(), behind, strict=True)]
        with self._calling:
            if self._closing.is_set():
                return unsent + Counter(closed=len(came))
            codes = client.put(names, buffers, [[letter.nbytes, TRAILER_BYTES]] * len(came))
        self._link.heard(codes, late=flight.left == 0)
        unsent.update(reason_of(code) for code in codes if code < 0)
        self._counts.sent(sum(code >= 0 for code in codes), letter.nbytes)
        return +unsent

    def close(self) -> None:
        """Send nothing more, and wait for the calls that are under way."""
        self._closing.set()
        self._workers.close()


def _view(
    memory: HostMem | None, pages: NDArray[np.uint64], nbytes: int, flight: Flight
) -> NDArray[np.uint8] | None:
    """Hold the memory of pages, that no shrink takes it from under the store; None: it is late."""
    if memory is None:
        return np.empty(0, np.uint8)  # staging does not shrink
    first, last = int(pages.min()) - memory.address, int(pages.max()) - memory.address
    try:
        view: NDArray[np.uint8] = memory.view(first, last + nbytes - first, timeout=flight.left)
    except (TimeoutError, ValueError):
        return None  # past the deadline the slots may have gone
    return view if flight.left else None


def _arrived(event: Event, flight: Flight) -> bool:
    """Wait for a page's bytes as long as the deadline allows; tell whether they are there."""
    if event is DONE:
        return True
    try:
        event.synchronize(flight.left)
    except Exception:
        return False
    return True
