"""Events of work on many pages, of which some may fail alone."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Mapping, Sequence

from hostmem import Event
from hostmem.device import fresh

__all__ = ["BatchEvent", "PageEvents", "behind", "gathered", "left", "part_of", "whole"]


class PageEvents(Event):
    """An event of work on several pages, each in its place from 0.

    It finishes once, when nothing of the work goes on; it has failed if any page has.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def failures(self) -> Mapping[int, BaseException]:
        """The pages of finished work that failed, by their place, and why."""

    @property
    def error(self) -> BaseException | None:
        """What made the first page of finished work fail that did, or None."""
        return next(iter(self.failures.values()), None)

    def failure(self, index: int) -> BaseException | None:
        """Say what made one page of finished work fail, or None."""
        return self.failures.get(index)

    def page(self, index: int) -> Event:
        """Give the event of one page: it finishes with the others, and fails alone."""
        return _PageEvent(self, index)


class _PageEvent(Event):
    """One page's share in work on several."""

    __slots__ = ("index", "whole")

    def __init__(self, whole: PageEvents, index: int) -> None:
        self.whole = whole
        self.index = index

    def query(self) -> bool:
        return self.whole.query()

    def synchronize(self, timeout: float | None = None) -> None:
        try:
            self.whole.synchronize(timeout)
        except Exception:
            if not self.whole.query():
                raise
            if (error := self.error) is not None:
                raise fresh(error) from error

    @property
    def error(self) -> BaseException | None:
        return self.whole.failure(self.index)


class BatchEvent(PageEvents):
    """Pages that threads work on in parts.

    Parameters
    ----------
    parts : int
        How many; without any it has finished.
    """

    __slots__ = ("_failures", "_flag", "_left", "_lock")

    def __init__(self, parts: int) -> None:
        self._flag = threading.Event()
        self._lock = threading.Lock()
        self._left = parts
        self._failures: dict[int, BaseException] = {}
        if not parts:
            self._flag.set()

    def part_done(self, failures: Mapping[int, BaseException]) -> None:
        """Count one part as finished, some of its pages failed; the last one finishes the event."""
        with self._lock:
            self._failures.update(failures)
            self._left -= 1
            last = not self._left
        if last:
            self._flag.set()

    def query(self) -> bool:
        """Tell whether the work has finished, without blocking."""
        return self._flag.is_set()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the work has finished; raise what made the first page fail that did."""
        if not self._flag.wait(timeout):
            raise TimeoutError(f"the pages had not all been moved after {timeout} s")
        if (error := self.error) is not None:
            raise fresh(error) from error

    @property
    def failures(self) -> Mapping[int, BaseException]:
        """The pages that failed, by their place, and why; all of them once it has finished."""
        return self._failures


class _Gathered(PageEvents):
    """Pages that other work brings, each with an event of its own."""

    __slots__ = ("_events", "_failures", "wholes")

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._failures: Mapping[int, BaseException] | None = None
        self.wholes = tuple({id(w): w for w in map(whole, events)}.values())
        """The distinct events behind those of the pages."""

    def query(self) -> bool:
        return all(event.query() for event in self.wholes)

    def synchronize(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        for event in self.wholes:
            try:
                event.synchronize(left(end))
            except Exception:
                if not event.query():
                    raise
        if (error := self.error) is not None:
            raise fresh(error) from error

    def part(self, first: int, stop: int) -> _Gathered:
        """Give the pages of a range."""
        return _Gathered(self._events[first:stop])

    @property
    def failures(self) -> Mapping[int, BaseException]:
        if self._failures is not None:
            return self._failures
        finished = self.query()
        failures: dict[int, BaseException] = {}
        if any(event.error is not None for event in self.wholes):
            found = ((n, event.error) for n, event in enumerate(self._events))
            failures = {n: error for n, error in found if error is not None}
        if finished:
            self._failures = failures
        return failures


def gathered(events: Sequence[Event]) -> tuple[Event, ...]:
    """Gather the events that bring pages, one a page, into one; none if all pages are there."""
    together = _Gathered(events)
    return () if together.query() and not together.failures else (together,)


def part_of(event: Event, first: int, stop: int) -> Event:
    """Give an event for the pages of a range alone; of whom it does not know, it stands for all."""
    if isinstance(event, _Gathered):
        return event.part(first, stop)
    if isinstance(event, PageEvents):
        return _Gathered([event.page(index) for index in range(first, stop)])
    return event


def whole(event: Event) -> Event:
    """Give the event that a page shares with others, where it does."""
    return event.whole if isinstance(event, _PageEvent) else event


def behind(event: Event) -> tuple[Event, ...]:
    """Give the distinct events that finish with an event."""
    return event.wholes if isinstance(event, _Gathered) else (whole(event),)


def left(end: float | None) -> float | None:
    """Seconds until a moment of the monotonic clock."""
    return None if end is None else max(end - time.monotonic(), 0.0)
