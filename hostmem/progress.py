"""How far a fill is."""

from __future__ import annotations

from dataclasses import dataclass

from hostmem.units import format_size

__all__ = ["FillProgress"]


@dataclass(frozen=True, slots=True)
class FillProgress:
    """How far a fill is, at one moment."""

    size: int
    """Bytes that are meant to be usable."""
    committed: int
    """Bytes from 0 that are usable."""
    seconds: float
    """Time spent filling, pauses included, since the first fill began."""
    rate: float
    """Bytes per second over that time; 0.0 before anything is usable."""
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
    pauses: int
    """Times the fill was paused."""
    state: str
    """``idle``, ``filling``, ``paused``, ``failed`` or ``filled``."""

    @property
    def fraction(self) -> float:
        """Usable share of the size, 0 to 1."""
        return self.committed / self.size if self.size else 1.0

    def __str__(self) -> str:
        eta = f", {self.eta:.1f} s left" if self.eta is not None and self.state == "filling" else ""
        return (
            f"{self.state}: {format_size(self.committed)} of {format_size(self.size)} "
            f"({self.fraction:.0%}), {format_size(int(self.rate))}/s{eta}"
        )
