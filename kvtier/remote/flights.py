"""What is under way to a remote store, or waits for it: bounded, and not waited for for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hostmem import Event

__all__ = ["Flight", "Flights"]


class Flight(Event):
    """Some pages under way. It has finished at its deadline at the latest, and never fails.

    What becomes of the pages is told elsewhere: to whoever waits, a store that does not answer is
    as one that does not have them.
    """

    __slots__ = ("_clock", "_landed", "asked", "end", "pages")

    def __init__(self, pages: int, end: float, clock: Callable[[], float]) -> None:
        self._landed = threading.Event()
        self._clock = clock
        self.pages = pages
        """How many."""
        self.end = end
        """When nobody waits any more, on the clock."""
        self.asked = False
        """Whether it is the store that is waited for, and not something here."""

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 when it is over."""
        return max(self.end - self._clock(), 0.0)

    def query(self) -> bool:
        """Tell whether they have landed or the deadline is over."""
        return self._landed.is_set() or self.left == 0

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until they have landed or the deadline is over."""
        left = self.left
        landed = self._landed.wait(left if timeout is None else min(timeout, left))
        if not landed and timeout is not None and timeout < left:
            raise TimeoutError(f"the pages were still under way after {timeout} s")

    @property
    def error(self) -> BaseException | None:
        """None: see the head of this class."""
        return None

    def land(self) -> None:
        """Let nobody wait any more."""
        self._landed.set()


class Flights:
    """The flights of one direction. May be used from any thread.

    Parameters
    ----------
    limit : int
        Pages that may be under way.
    seconds : float
        After which nobody waits for a flight.
    clock : callable
        Gives seconds that never go back.
    """

    def __init__(
        self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[Flight, None] = {}
        self._pages = 0

    @property
    def room(self) -> int:
        """Pages that may still begin."""
        return self._limit - self._pages

    def begin(self, pages: int) -> Flight | None:
        """Begin a flight; None where there is no room for so many pages."""
        with self._lock:
            if pages > self._limit - self._pages:
                return None
            flight = Flight(pages, self._clock() + self._seconds, self._clock)
            self._under_way[flight] = None
            self._pages += pages
            return flight

    def end(self, flight: Flight) -> None:
        """End a flight: nothing touches its memory any more."""
        flight.land()
        with self._lock:
            del self._under_way[flight]
            self._pages -= flight.pages

    def overdue(self) -> bool:
        """Tell whether the store has a flight that is past its deadline."""
        with self._lock:
            return any(flight.asked and flight.left == 0 for flight in self._under_way)
