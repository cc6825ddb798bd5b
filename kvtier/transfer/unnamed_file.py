"""Files without a name, gone with their last descriptor; and direct I/O, where a file has it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Callable

from hostmem.units import align_up

__all__ = ["DIRECT_GRAIN", "open_direct", "open_unnamed"]

DIRECT_GRAIN = 4096
"""Bytes that offsets, addresses and sizes of direct I/O are multiples of: blocks divide it."""

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def open_unnamed(folder: str, *, direct: bool) -> tuple[int, bool]:
    """Open a new file that has no name: gone with its last descriptor, also after a crash.

    Parameters
    ----------
    folder : str
        An existing directory. Where its file system has no unnamed files, a name is made and
        removed at once.
    direct : bool
        Bypass the page cache if the file system can, which a block that is written tells: some
        refuse only that.

    Returns
    -------
    fd : int
        The file, empty.
    direct : bool
        Whether it bypasses the page cache.

    Raises
    ------
    OSError
        The directory cannot be used.
    """
    return open_direct(lambda flags: _open_unnamed(folder, flags), direct=direct)


def open_direct(opens: Callable[[int], int], *, direct: bool) -> tuple[int, bool]:
    """Open a file, past the page cache if that is wanted and works there; see `open_unnamed`.

    Parameters
    ----------
    opens : callable
        Opens it with the flags it is given, as often as it is called.
    direct : bool
        Whether to bypass the page cache.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    if direct:
        try:
            fd = opens(flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
        else:
            if _takes_a_block(fd):
                return fd, True
            os.close(fd)
    return opens(flags), False


def _open_unnamed(folder: str, flags: int) -> int:
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise  # the file system has unnamed files, or the directory is at fault
    plain, name = tempfile.mkstemp(prefix="kvtier-", dir=folder)
    try:
        return os.open(name, flags)
    finally:
        os.close(plain)
        os.unlink(name)


def _takes_a_block(fd: int) -> bool:
    """Try direct I/O with a block behind the end of the file, which is cut off again."""
    size = os.fstat(fd).st_size
    try:
        with mmap.mmap(-1, DIRECT_GRAIN) as page:  # an address that direct I/O takes
            os.pwrite(fd, page, align_up(size, DIRECT_GRAIN))
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            return False
        # Whatever else is wrong, setting room aside will say it better.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, size)
    return True
