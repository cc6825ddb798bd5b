"""One line on a terminal that says how far a replay has come."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from math import inf
from time import perf_counter
from types import TracebackType
from typing import Self, TextIO

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
        self._due = -inf if self._stream.isatty() else inf
        self._start = perf_counter()
        self._width = 0  # columns that the last drawing took

    def __enter__(self) -> Self:
        self._start = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0
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
            parts += [f"{rate:,.0f} req/s", f"ETA {_clock((self._total - done) / rate)}"]
        if host_filled is not None:
            parts.append(f"host {host_filled:.0%} filled")
        if hits_by_level:
            parts.append(" ".join(f"{level} {n:,}" for level, n in hits_by_level.items()))
        self._draw(parts)

    def _draw(self, parts: list[str]) -> None:
        """Replace the line by as many of the parts as fit."""
        room = _columns(self._stream) - 1  # the last column would wrap on some terminals
        line = parts[0]
        for part in parts[1:]:
            if len(line) + 2 + len(part) > room:
                break
            line += "  " + part
        line = line[:room]
        self._stream.write(f"\r{line:<{self._width}}")
        self._stream.flush()
        self._width = len(line)


def _columns(stream: TextIO) -> int:
    """Return the terminal's width, 80 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _clock(seconds: float) -> str:
    """Show a duration for a person: ``"6 s"``, ``"2:05"``, ``"1:02:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
