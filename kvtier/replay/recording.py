"""The course of a replay: moments spread over its time, in memory that its length does not change.

A `Recording` is given to a replay and tells a report afterwards what the totals cannot: when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import floor, inf, log10
from typing import Any, Self

from hostmem import FillProgress, Placement
from kvtier.stats import Waits

__all__ = ["Course", "Histogram", "Moment", "Recording"]

_PER_DECADE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a replay was at one moment. Counts are of everything until then."""

    seconds: float
    """On the clock of `ReplayResult.seconds`."""
    requests: int
    """Requests served."""
    block_refs: int
    """Block references in them."""
    hits: Mapping[str, int]
    """Hits by the level that the block was found in."""
    host_filled: float | None = None
    """Usable share of the host tier, 0 to 1; None without one."""
    moved: Mapping[str, int] = field(default_factory=dict)
    """Bytes by pair of levels, such as ``"gpu->host"``."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what was waited for."""


class Course:
    """Moments in order, about equally far apart.

    When it is full, every other moment is dropped and those to come are twice as far apart, so
    that between half the limit and the limit of them cover the whole time.

    Parameters
    ----------
    limit : int
        Moments to keep at most, 2 or more; `end` adds one.
    gap : float
        Seconds between two moments at first.
    """

    def __init__(self, limit: int = 160, gap: float = 0.005) -> None:
        self._limit = limit
        self._gap = gap
        self._due = 0.0
        self._moments: list[Moment] = []

    @property
    def moments(self) -> Sequence[Moment]:
        """What is kept, in order of time."""
        return tuple(self._moments)

    def due(self, seconds: float) -> bool:
        """Say whether it is time for another moment."""
        return seconds >= self._due

    def add(self, moment: Moment) -> None:
        """Keep a moment, which comes after all the others."""
        if len(self._moments) == self._limit:
            del self._moments[1::2]
            # Requests may take longer than the gap: what counts is how far apart they really are.
            span = self._moments[-1].seconds - self._moments[0].seconds
            self._gap = max(2 * self._gap, span / max(len(self._moments) - 1, 1))
        self._moments.append(moment)
        self._due = moment.seconds + self._gap

    def end(self, moment: Moment) -> None:
        """Keep the last moment, whatever the time, and no other after it."""
        self._moments.append(moment)
        self._due = inf


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often times were how long, in classes of equal ratio."""

    classes: Sequence[tuple[float, float, int]]
    """From, below (microseconds), and how many; without a gap, in rising order."""

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Self:
        """Count samples in nanoseconds, ten classes to a power of ten; less than 1 ns is 1 ns."""
        counts = Counter(floor(_PER_DECADE * log10(max(n, 1))) for n in nanoseconds)
        span = range(min(counts), max(counts) + 1) if counts else range(0)
        return cls(
            [
                (10 ** (k / _PER_DECADE - 3), 10 ** ((k + 1) / _PER_DECADE - 3), counts[k])
                for k in span
            ]
        )


class Recording:
    """What a replay leaves for a report, beside its figures.

    Notes
    -----
    `note` costs 0.3 us when no moment is due. A moment costs 20 to 50 us; 160 are taken in the
    first 0.8 s, and 80 more each time that the replay doubles in length.
    """

    def __init__(self) -> None:
        self.course = Course()
        """The whole replay."""
        self.filling = Course(gap=0.001)
        """From the start until the host tier was filled; empty without a host tier."""
        self.latencies = Histogram([])
        """Time per request."""
        self.waits: Mapping[str, Waits] = {}
        """Who waited for what."""
        self.fills: Mapping[str, FillProgress] = {}
        """How the host memory of a level was filled, by level."""
        self.placements: Mapping[str, Placement] = {}
        """Where the host memory of a level was at the end, by level."""
        self._filled = False

    def note(self, seconds: float, take: Callable[[float], Moment]) -> None:
        """Take a moment if one is due.

        Parameters
        ----------
        seconds : float
            On the clock of `ReplayResult.seconds`.
        take : callable
            Given the seconds, looks where the replay is.
        """
        whole = self.course.due(seconds)
        filling = not self._filled and self.filling.due(seconds)
        if not whole and not filling:
            return
        moment = take(seconds)
        if whole:
            self.course.add(moment)
        if filling:
            self._note_filling(moment, self.filling.add)

    def end(self, moment: Moment) -> None:
        """Take the last moment."""
        self.course.end(moment)
        if not self._filled:
            self._note_filling(moment, self.filling.end)

    def _note_filling(self, moment: Moment, add: Callable[[Moment], None]) -> None:
        if moment.host_filled is not None:
            add(moment)
        self._filled = moment.host_filled in (None, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the course as plain dictionaries and numbers, ready for `json.dump`."""
        return {
            "course": [asdict(moment) for moment in self.course.moments],
            "filling": [asdict(moment) for moment in self.filling.moments],
            "latency_us": [list(each) for each in self.latencies.classes],
            "waits": {what: asdict(waits) for what, waits in self.waits.items()},
        }
