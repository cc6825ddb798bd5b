"""One line on a terminal that says how far a replay has come."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import inf
from time import perf_counter
from types import TracebackType
from typing import Self, TextIO

from hostmem.live_line import LiveLine, clock

__all__ = ["Progress"]

_PERIOD = 0.1
"""Seconds between two drawings."""


class Progress:
    """A progress line, drawn at most ten times a second and only on a terminal.

    ::

        4,210/12,031 (35%)  hit rate 21.3%  1,350 req/s  ETA 6 s  host 45% filled  gpu 812 ...

    Parts that do not fit the terminal's width are left out, the last first. Use it as a context
    manager: on the way out, also by an exception, the line is left standing and ended.

    Parameters
    ----------
    total : int
        Requests to come; 0 when there are none.
    stream : text stream, optional
        Where to draw; standard error by default. Nothing is ever written to a stream that is no
        terminal.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        # There is no standard error where it was closed.
        self._due = -inf if self._stream is not None and self._stream.isatty() else inf
        self._start = perf_counter()
        self._line = LiveLine(self._stream)

    def __enter__(self) -> Self:
        self._start = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._line.end()
        self._due = inf

    def update(
        self,
        done: int,
        *,
        block_refs: int = 0,
        hits: int = 0,
        hits_by_level: Mapping[str, int] | None = None,
        host_filled: float | None = None,
    ) -> None:
        """Draw the line if it is time to, or if this was the last request.

        Parameters
        ----------
        done : int
            Requests served so far.
        block_refs : int
            Block references so far.
        hits : int
            Those of them that hit.
        hits_by_level : mapping of str to int, optional
            Hits by the level they were found in; read only when the line is drawn.
        host_filled : float, optional
            Fraction of the host tier that is usable; None without one.

        Notes
        -----
        Costs 0.4 us when it is not time, 0.2 us on a stream that is no terminal.
        """
        if self._due == inf:
            return
        now = perf_counter()
        if now < self._due and done < self._total:
            return
        self._due = now + _PERIOD
        elapsed = now - self._start
        parts = [f"{done:,}/{self._total:,} ({done / max(self._total, 1):.0%})"]
        if block_refs:
            parts.append(f"hit rate {hits / block_refs:.1%}")
        if done and elapsed > 0:
            rate = done / elapsed
            parts += [f"{rate:,.0f} req/s", f"ETA {clock((self._total - done) / rate)}"]
        if host_filled is not None:
            parts.append(f"host {host_filled:.0%} filled")
        if hits_by_level:
            parts.append(" ".join(f"{level} {n:,}" for level, n in hits_by_level.items()))
        self._line.draw(parts)
