"""What a transfer waits for before it begins, and its event as a lane's thread submits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from hostmem import Event
from hostmem.device import DONE, fresh
from kvtier.transfer.page_events import PageEvents, left, part_of, whole

__all__ = ["Dependencies", "TransferEvent", "all_of"]


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What must have happened before a transfer of pages may begin.

    Every event is of a job that was put into its queue earlier, and queues are worked off in
    order. So the oldest unfinished job of all has nothing in front of it and nothing to wait for:
    it can always go on, and no circle of jobs waits for each other. Staging buffers make none
    either. They are handed out when jobs are put, without waiting, and the jobs that use them wait
    for the event of the transfer that had them before, which is one more event of earlier jobs:
    transfers of both directions may share a ring. What waits for somebody else's event holds up
    the jobs behind it, and never the caller.
    """

    data: tuple[Event, ...] = ()
    """Of the bytes it reads. Where `PageEvents` failed for a page, so does the transfer of the page
    in that place; where another event failed, all of it does."""
    fences: tuple[Event, ...] = ()
    """Of others that use the memory it writes; whether they succeeded does not matter."""
    usable: Callable[[], None] | None = None
    """Blocks until its memory is committed, or raises why it will not be."""

    def wait(self, pages: int) -> Mapping[int, BaseException]:
        """Block until all has finished; the pages whose data failed, by their place."""
        self.wait_finished()
        failures = self.failures(pages)
        if self.usable is not None and len(failures) < pages:
            self.usable()
        return failures

    def wait_finished(self) -> None:
        """Block until every event has finished.

        A transfer that fails must not finish sooner: its slots are free when it has.
        """
        for event in (*self.fences, *self.data):
            event.wait_finished()

    def failures(self, pages: int) -> Mapping[int, BaseException]:
        """Say which of ``pages`` have data that failed, by their place, and why."""
        failures: dict[int, BaseException] = {}
        for event in self.data:
            if isinstance(event, PageEvents):
                failures.update(event.failures)
            elif (error := event.error) is not None:
                failures.update(dict.fromkeys(range(pages), error))
        return failures

    def part(self, first: int, stop: int) -> Self:
        """Give the dependencies of some of the pages."""
        return replace(self, data=tuple(part_of(event, first, stop) for event in self.data))


class TransferEvent(PageEvents):
    """An event for pages that a thread of ours submits to a device later.

    Until then it is unfinished; then it is as the event that the device recorded.
    """

    __slots__ = ("_error", "_failures", "_inner", "_pages", "_submitted")

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._submitted = threading.Event()
        self._inner: Event | None = None
        self._error: BaseException | None = None
        self._failures: Mapping[int, BaseException] = {}

    def submitted(self, event: Event, failures: Mapping[int, BaseException]) -> None:
        """Note what the device recorded, and the pages that were not submitted."""
        self._failures = failures
        self._inner = event
        self._submitted.set()

    def failed(self, error: BaseException, failures: Mapping[int, BaseException]) -> None:
        """Note that it was never submitted, and pages that had failed before."""
        self._failures = failures
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
        """Block until the work has finished; raise what made the first page fail that did."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._submitted.wait(timeout):
            raise TimeoutError(f"the transfer was not submitted after {timeout} s")
        if self._inner is not None:
            self._inner.synchronize(left(end))
        if (error := self.error) is not None:
            raise fresh(error) from error

    @property
    def error(self) -> BaseException | None:
        """What made the first page of finished work fail that did, or None."""
        if (error := self._whole_error()) is not None:
            return error
        return next(iter(self._failures.values()), None)

    @property
    def failures(self) -> Mapping[int, BaseException]:
        """The pages that failed, by their place, and why."""
        if (error := self._whole_error()) is not None:
            return {**dict.fromkeys(range(self._pages), error), **self._failures}
        return self._failures

    def failure(self, index: int) -> BaseException | None:
        """Say what made one page fail, or None."""
        return self._failures.get(index) or self._whole_error()

    def _whole_error(self) -> BaseException | None:
        return self._error if self._inner is None else self._inner.error


def all_of(events: Iterable[Event]) -> Event:
    """Return an event that has finished when all of these have."""
    going = tuple(whole(event) for event in events if not event.query())
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
                event.synchronize(left(end))
            except Exception:
                if not event.query():
                    raise

    @property
    def error(self) -> BaseException | None:
        return None
