"""How much memory to hand the driver in one call, so that other calls do not wait long for it."""

from __future__ import annotations

import math
from statistics import median_low

__all__ = ["StallBudget"]

_MIB = 1 << 20
_SMALLEST = _MIB
_LARGEST = 8 * _MIB  # larger ones block the process's other calls for a larger share of the time
_LARGEST_UNBOUND = 32 * _MIB  # larger ones are no faster
_SAMPLES = 5
_SHARE = 2  # as a rule a call takes this part of the budget, since some take twice the rule


class StallBudget:
    """Chooses the size of the next registration from how long the last ones took.

    The driver keeps a lock of the whole process while it registers: another thread's call waits for
    as long as one registration takes. Sizes are powers of two, change by a factor of two at most
    from one call to the next, and follow the median of the last calls, so that a slow one, such as
    the first of a process, does not count for long.

    Parameters
    ----------
    seconds : float, optional
        What one registration should stay under; None: no bound.

    Raises
    ------
    ValueError
        Not a positive, finite number.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(
                f"stall_budget: {seconds!r}; give seconds above 0, or None for no bound"
            )
        self._seconds = seconds
        self.size = _LARGEST_UNBOUND if seconds is None else _LARGEST
        """Bytes that the next registration should have at most."""
        self.longest = 0.0
        """Seconds that the longest call took."""
        self._per_byte: tuple[float, ...] = ()

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn that a registration of ``nbytes`` took ``seconds``."""
        self.longest = max(self.longest, seconds)
        if self._seconds is None:
            return
        self._per_byte = (*self._per_byte[1 - _SAMPLES :], seconds / nbytes)
        wanted = self._seconds / _SHARE / max(median_low(self._per_byte), 1e-18)
        step = min(max(wanted, self.size / 2), self.size * 2)
        self.size = 1 << int(min(max(step, _SMALLEST), _LARGEST)).bit_length() - 1
