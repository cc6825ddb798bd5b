"""A file that a result goes to: refused before the work, and written whole or not at all."""

from __future__ import annotations

import errno
import os
from os import PathLike
from pathlib import Path
from secrets import token_hex

__all__ = ["check_destination", "write_whole"]


def check_destination(path: str | PathLike[str]) -> None:
    """Refuse a file that `write_whole` could not write, before the work whose result it takes.

    Nothing is created. The answer can be overtaken by what happens later.

    Raises
    ------
    IsADirectoryError
        If the path is a directory.
    FileNotFoundError
        If the directory it would be in does not exist.
    PermissionError
        If that directory, or the device or pipe at the path, cannot be written.
    """
    target = _target(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", str(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(target.parent))
    if _is_special(target):
        writable, place = os.access(target, os.W_OK), target
    else:
        writable, place = os.access(target.parent, os.W_OK | os.X_OK), target.parent
    if not writable:
        raise PermissionError(errno.EACCES, "cannot be written", str(place))


def write_whole(text: str, path: str | PathLike[str]) -> None:
    """Write a text, all or nothing.

    Parameters
    ----------
    text : str
        What to write, in UTF-8.
    path : path
        A file to create or replace: a reader sees the old text or the whole new one. A symbolic
        link is followed; a device or pipe is written in place.

    Raises
    ------
    OSError
        If it cannot be written, as `check_destination` says it; a file that was there is then
        unchanged.
    """
    check_destination(path)
    target = _target(path)
    if _is_special(target):
        target.write_text(text, encoding="utf-8")
        return
    draft = target.with_name(f".kvtier-{token_hex(8)}{target.suffix}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _target(path: str | PathLike[str]) -> Path:
    """Follow symbolic links to the file that is meant."""
    return Path(os.path.realpath(path))  # unlike Path.resolve, fails on no loop of links


def _is_special(target: Path) -> bool:
    """Say whether something other than a regular file is there, which must not be replaced."""
    return target.exists() and not target.is_file()
