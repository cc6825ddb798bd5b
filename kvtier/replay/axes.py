"""Axes of charts: where a value is, and round numbers to name along the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

__all__ = [
    "Axis",
    "count_axis",
    "log_axis",
    "percent_axis",
    "rate_axis",
    "seconds_axis",
    "show_seconds",
]

_STEPS = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from ``low`` to ``high`` and the values that are named on it."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False
    """Whether equal steps are equal ratios; both ends are above 0 then."""

    def place(self, value: float) -> float:
        """Say where a value is: 0 at the low end, 1 at the high end, and never beyond."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def percent_axis(most: float = 1.0, *, steps: int = 4) -> Axis:
    """Make an axis of shares from 0 to ``most`` or a little more: 0.1% to 100%."""
    return _linear(min(max(most, 0.001), 1.0), lambda x: f"{x:.3g}%", steps, 100)


def count_axis(most: float, *, steps: int = 4) -> Axis:
    """Make an axis of counts from 0 to ``most`` or a little more."""
    return _linear(max(most, 1), lambda x: f"{x:,.0f}", steps, least=1)


def rate_axis(most: float, *, steps: int = 3) -> Axis:
    """Make an axis of bytes a second from 0 to ``most`` or a little more."""
    most = max(most, 1)
    power = min(int(log2(most / 0.6)) // 10, 6) if most > 614 else 0
    unit = ("B/s", *(f"{letter}iB/s" for letter in "KMGTPE"))[power]
    return _linear(most, lambda x: f"{x:g} {unit}" if x else "0", steps, 2.0 ** (-10 * power))


def seconds_axis(most: float, *, steps: int = 5) -> Axis:
    """Make an axis of seconds that ends exactly at ``most``: a course ends where it ends."""
    unit, scale = next(
        (found for found in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if most * found[1] >= 2),
        ("ns", 1e9),
    )
    axis = _linear(max(most, 1e-9), lambda x: f"{x:g} {unit}" if x else "0", steps, scale)
    ticks = [(at, text) for at, text in axis.ticks if at <= most]
    return Axis(0.0, max(most, 1e-9), ticks)


def log_axis(low: float, high: float) -> Axis:
    """Make an axis of ratios between seconds, over whole powers of ten.

    Raises
    ------
    ValueError
        If an end is not above 0.
    """
    if not 0 < low <= high:
        raise ValueError(f"log axis: from {low!r} to {high!r}; both ends must be above 0")
    first = floor(log10(low) + 1e-9)
    last = max(ceil(log10(high) - 1e-9), first + 1)
    powers = [10.0**power for power in range(first, last + 1)]
    ticks = [
        (seconds, show_seconds(seconds).replace(".00", "").replace(".0", "")) for seconds in powers
    ]
    return Axis(10.0**first, 10.0**last, ticks, log=True)


def show_seconds(seconds: float) -> str:
    """Show a time with three significant digits: ``"12.5 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds > 0 else "0 s"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _linear(
    most: float, show: Callable[[float], str], steps: int, scale: float = 1.0, least: float = 0.0
) -> Axis:
    """Make an axis from 0 in round steps of the scaled unit, about so many of them."""
    most = most * scale
    rough = max(most / steps, least) or 1.0
    power = 10.0 ** floor(log10(rough))
    step = next((s * power for s in _STEPS if s * power >= rough * (1 - 1e-9)), 10 * power)
    count = max(ceil(most / step - 1e-9), 1)
    ticks = [(round(n * step, 9) / scale, show(round(n * step, 9))) for n in range(count + 1)]
    return Axis(0.0, ticks[-1][0], ticks)
