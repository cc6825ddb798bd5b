"""A line on a terminal that is drawn again and again, and ended properly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

__all__ = ["LiveLine", "clock"]


class LiveLine:
    """A line of parts, as many as fit the terminal.

    Parameters
    ----------
    stream : text stream
        A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._width = 0  # columns that the last drawing took

    def draw(self, parts: Sequence[str]) -> None:
        """Replace the line; parts that do not fit are left out, the last first."""
        room = _columns(self._stream) - 1  # the last column would wrap on some terminals
        line = parts[0]
        for part in parts[1:]:
            if len(line) + 2 + len(part) > room:
                break
            line += "  " + part
        line = line[:room]
        over = min(self._width, room)  # a terminal that became narrower has wrapped the rest
        self._stream.write(f"\r{line:<{over}}")
        self._stream.flush()
        self._width = len(line)

    def end(self) -> None:
        """Leave the line standing, if there is one, and go to the next."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0


def _columns(stream: TextIO) -> int:
    """Return the terminal's width, 80 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def clock(seconds: float) -> str:
    """Show a duration for a person: ``"6 s"``, ``"2:05"``, ``"1:02:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
