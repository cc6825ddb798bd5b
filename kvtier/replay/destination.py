"""A file that a result goes to: refused before the work, and written whole or not at all."""

from __future__ import annotations

import errno
import os
from os import PathLike
from pathlib import Path
from secrets import token_hex

__all__ = ["check_destination", "same_destination", "write_whole"]


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


def same_destination(path: str | PathLike[str], other: str | PathLike[str]) -> bool:
    """Tell whether two paths lead to one file, which need not be there yet."""
    target, second = _target(path), _target(other)
    return target == second or (
        target.exists() and second.exists() and target.samefile(second)  # two names of one file
    )


def write_whole(text: str, path: str | PathLike[str]) -> None:
    """Write a text, all or nothing.

    Parameters
    ----------
    text : str
        What to write, in UTF-8; bytes of a file's name that are none are written as escapes.
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
    content = text.encode("utf-8", "backslashreplace")
    try:
        if _is_special(target):
            target.write_bytes(content)
        else:
            _replace(target, content)
    except OSError as error:
        # By the name that was given: nobody knows of the draft.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(target: Path, content: bytes) -> None:
    """Write a draft beside a file and put it in its place."""
    draft = target.with_name(f".kvtier-{token_hex(8)}")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _target(path: str | PathLike[str]) -> Path:
    """Follow symbolic links to the file that is meant."""
    given = Path(path)
    if _is_special(given):
        return given  # where a link of /dev/stdout to a pipe leads is no path
    return Path(os.path.realpath(path))  # unlike Path.resolve, fails on no loop of links


def _is_special(target: Path) -> bool:
    """Say whether something other than a regular file is there, which must not be replaced."""
    return target.exists() and not target.is_file()
