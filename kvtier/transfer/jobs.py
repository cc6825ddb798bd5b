"""Events of submitted transfers, and what a transfer waits for before it begins."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from hostmem import Event

__all__ = ["Dependencies", "TransferEvent", "unfinished"]


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

    def wait(self) -> None:
        """Block until all has finished; raise what made the data fail."""
        for event in self.fences:
            event.wait_finished()
        for event in self.data:
            event.synchronize()


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
        if not self._submitted.wait(timeout):
            raise TimeoutError(f"the transfer was not submitted after {timeout} s")
        if self._error is not None:
            raise self._error
        if self._inner is not None:
            self._inner.synchronize()

    @property
    def error(self) -> BaseException | None:
        """What made finished work fail, or None."""
        return self._error if self._inner is None else self._inner.error
