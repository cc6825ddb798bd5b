"""How far a fill is, and telling those who asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hostmem.courier import callbacks
from hostmem.describing import one_line
from hostmem.units import format_size

__all__ = ["FillProgress", "Listener"]


@dataclass(frozen=True, slots=True)
class FillProgress:
    """How far a fill is, at one moment."""

    size: int
    """Bytes that are meant to be filled."""
    filled: int
    """Bytes from 0 that are filled, those that were released later included."""
    committed: int
    """Bytes from 0 that are usable without a hole."""
    released: int
    """Bytes that were filled and released."""
    seconds: float
    """Time spent filling, pauses included, since the first fill began."""
    rate: float
    """Bytes per second over that time; 0.0 before anything is filled."""
    eta: float | None
    """Seconds until the size is reached at that rate; None where the rate says nothing."""
    first_usable_seconds: float | None
    """From the start of the first fill to the first usable bytes."""
    filled_seconds: float | None
    """From the start of the first fill to the latest time that the size was reached."""
    threads: int
    """Populating threads."""
    registrations: int
    """Registered ranges."""
    registration_size: int
    """Bytes that the next registration will have, as the stall budget allows."""
    longest_registration_seconds: float
    """What the longest call of the driver took: as long another thread's call may have waited."""
    page_mode: str
    """Pages asked for now; ``auto`` may have given up huge ones."""
    pauses: int
    """Times the fill was paused by `HostMem.pause_fill`."""
    rests: int
    """Times the fill rested because memory was short."""
    resting: str | None
    """Why it rests now."""
    state: str
    """``idle``, ``filling``, ``paused``, ``resting``, ``suspended``, ``failed``, ``filled`` or
    ``closed``."""

    @property
    def fraction(self) -> float:
        """Filled share of the size, 0 to 1."""
        return self.filled / self.size if self.size else 1.0

    @one_line
    def __repr__(self) -> str:
        return f"<FillProgress {self}>"

    def __str__(self) -> str:
        eta = f", {self.eta:.1f} s left" if self.eta is not None and self.state == "filling" else ""
        why = f" ({self.resting})" if self.resting else ""
        return (
            f"{self.state}: {format_size(self.filled)} of {format_size(self.size)} "
            f"({self.fraction:.0%}), {format_size(int(self.rate))}/s{eta}{why}"
        )


class Listener:
    """A function that is told of the progress every now and then, on the thread of callbacks.

    Parameters
    ----------
    function : callable
        Called with a `FillProgress`; what it raises is logged.
    period : float
        Seconds between two calls, at least.
    """

    __slots__ = ("due", "function", "period")

    def __init__(self, function: Callable[[FillProgress], object], period: float) -> None:
        if not period >= 0:
            raise ValueError(f"period: {period!r} seconds; give 0 or more")
        self.function = function
        self.period = period
        self.due = 0.0
        """When the next call is due, by `time.monotonic`."""

    def tell(self, progress: FillProgress) -> None:
        """Have the function called."""
        self.due = time.monotonic() + self.period
        function = self.function
        callbacks.post(lambda: function(progress))
