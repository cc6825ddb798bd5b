"""Events of submitted transfers, and what a transfer waits for before it begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hostmem import Event
from hostmem.device import DONE, fresh

__all__ = ["Dependencies", "TransferEvent", "all_of", "unfinished"]


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What must have happened before a transfer may begin.

    Every event is of work submitted earlier. Queues work in the order of submission, so the oldest
    unfinished transfer can always begin, and no two wait for each other.
    """

    data: tuple[Event, ...] = ()
    """Of the bytes it reads; where one failed, so does the transfer."""
    fences: tuple[Event, ...] = ()
    """Of others that use the memory it writes; whether they succeeded does not matter."""
    usable: Callable[[], None] | None = None
    """Blocks until its memory is committed, or raises why it will not be."""

    def wait(self) -> None:
        """Block until all has finished; raise what made the data fail."""
        self.wait_finished()
        for event in self.data:
            event.synchronize()
        if self.usable is not None:
            self.usable()

    def wait_finished(self) -> None:
        """Block until every event has finished.

        A transfer that fails must not finish sooner: its slots are free when it has.
        """
        for event in (*self.fences, *self.data):
            event.wait_finished()


def unfinished(events: Iterable[Event | None]) -> tuple[Event, ...]:
    """Return the distinct events whose outcome still matters: not finished, or failed."""
    seen = {id(event): event for event in events if event is not None}
    return tuple(e for e in seen.values() if not e.query() or e.error is not None)


class TransferEvent(Event):
    """An event for work that a thread of ours submits to a device later.

    Until then it is unfinished; then it is as the event that the device recorded.
    """

    __slots__ = ("_error", "_inner", "_submitted")

    def __init__(self) -> None:
        self._submitted = threading.Event()
        self._inner: Event | None = None
        self._error: BaseException | None = None

    def submitted(self, event: Event) -> None:
        """Note what the device recorded."""
        self._inner = event
        self._submitted.set()

    def failed(self, error: BaseException) -> None:
        """Note that it was never submitted."""
        self._error = error
        self._submitted.set()

    def wait_submitted(self) -> Event | None:
        """Block until it was submitted; the device's event, or None if it failed before that."""
        self._submitted.wait()
        return self._inner

    def query(self) -> bool:
        """Tell whether the work has finished, without blocking."""
        inner = self._inner
        return inner.query() if inner is not None else self._error is not None

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the work has finished; raise what made it fail."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._submitted.wait(timeout):
            raise TimeoutError(f"the transfer was not submitted after {timeout} s")
        if self._error is not None:
            raise fresh(self._error) from self._error
        if self._inner is not None:
            self._inner.synchronize(_left(end))

    @property
    def error(self) -> BaseException | None:
        """What made finished work fail, or None."""
        return self._error if self._inner is None else self._inner.error


def all_of(events: Iterable[Event]) -> Event:
    """Return an event that has finished when all of these have."""
    going = tuple(event for event in events if not event.query())
    if len(going) > 1:
        return _AllOf(going)
    return going[0] if going else DONE


class _AllOf(Event):
    """Several events as one fence; their failures belong to others."""

    __slots__ = ("_events",)

    def __init__(self, events: tuple[Event, ...]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        for event in self._events:
            try:
                event.synchronize(_left(end))
            except Exception:
                if not event.query():
                    raise

    @property
    def error(self) -> BaseException | None:
        return None


def _left(end: float | None) -> float | None:
    """Seconds until a moment of the monotonic clock."""
    return None if end is None else max(end - time.monotonic(), 0.0)
