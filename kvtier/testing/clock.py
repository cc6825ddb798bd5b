"""Time that passes when a test says so."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from hostmem import Event, HostEvent

__all__ = ["SimulatedClock"]


class SimulatedClock:
    """A monotonic clock that tests advance, and events that finish at moments of it.

    It is called as `time.monotonic` is, so that it can be given to whatever takes a clock. Its
    events stand for work that takes time, such as a kernel or a copy: given as ``ready``, as a
    fence or as a slot's event, they finish in the order of their moments, one after another, while
    the clock advances. Nothing ever happens by itself.

    Parameters
    ----------
    now : float
        Seconds at first.

    Examples
    --------
    >>> clock = SimulatedClock()
    >>> slow, quick = clock.event(2.0), clock.event(0.5)
    >>> clock.advance(1.0)
    >>> clock(), slow.query(), quick.query()
    (1.0, False, True)
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # A moment, what orders equal ones, and what happens then.
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def __call__(self) -> float:
        """Seconds now."""
        return self._now

    def event(self, after: float, error: BaseException | None = None) -> Event:
        """Make an event that finishes when so many seconds have passed.

        Parameters
        ----------
        after : float
            Seconds from now; with 0 it finishes at the next `advance`.
        error : BaseException, optional
            What makes the work fail then.
        """
        event = HostEvent()
        self.call(after, lambda: event.set(error))
        return event

    def call(self, after: float, function: Callable[[], object]) -> None:
        """Let the thread that advances the clock call a function when so many seconds have passed.

        The clock shows that moment while it runs, and it may ask for more.
        """
        with self._lock:
            if after < 0:
                raise ValueError(f"after: {after} s have passed already")
            heapq.heappush(self._due, (self._now + after, next(self._numbers), function))

    def sleep(self, seconds: float) -> None:
        """Block until others have let so many seconds pass."""
        self.event(seconds).synchronize()

    @property
    def pending(self) -> int:
        """How many events, calls and sleepers are still to come."""
        with self._lock:
            return len(self._due)

    def advance(self, seconds: float) -> None:
        """Let time pass, and happen what is due, in its order; equal moments as they were asked."""
        if seconds < 0:
            raise ValueError(f"seconds: {seconds} is negative, and time goes on")
        end = self._now + seconds
        while (function := self._next(end)) is not None:
            function()
        self._now = end

    def advance_to_next(self) -> bool:
        """Let time pass until something is due, and let that alone happen; False if nothing is."""
        function = self._next(float("inf"))
        if function is None:
            return False
        function()
        return True

    def _next(self, end: float) -> Callable[[], object] | None:
        with self._lock:
            if not self._due or self._due[0][0] > end:
                return None
            self._now, _, function = heapq.heappop(self._due)
            return function
