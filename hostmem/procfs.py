"""Files of proc and sys: read whole; one that cannot be read, or says something odd, is empty."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

__all__ = ["fields", "number", "numbers", "read"]

_CHUNK = 1 << 16
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# A line of meminfo, of a node's meminfo ("Node 0 MemFree:  17 kB"), of memory.stat ("cache 17").
_FIELD = re.compile(r"^(?:Node \d+ )?([\w()]+):?[ \t]+(\d+)( kB)?$", re.MULTILINE)

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def read(path: str | Path) -> str:
    """Return a file's text, stripped; empty where the kernel or the container has no such file.

    Costs about 10 us, a third of what `Path.read_text` takes.

    Raises
    ------
    OSError
        EMFILE, ENFILE, ENOMEM: this process cannot open anything just now, which says nothing
        about the file.
    """
    chunks = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while chunk := os.read(descriptor, _CHUNK):
                chunks.append(chunk)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _OURS:
            raise
        return ""
    return b"".join(chunks).decode(errors="replace").strip()


def number(text: str) -> int | None:
    """Read a file that holds one number; None for ``max``, ``-1`` and what is no number."""
    return int(text) if text.isascii() and text.isdigit() else None


def fields(text: str) -> dict[str, int]:
    """Read lines of a name and a number; kB become bytes, other lines are passed over."""
    return {name: int(n) << 10 if kb else int(n) for name, n, kb in _FIELD.findall(text)}


def numbers(text: str) -> tuple[int, ...]:
    """Read the kernel's list format: ``0-3,8``; empty text is the empty list."""
    found: list[int] = []
    for first, last in _RANGE.findall(text):
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
