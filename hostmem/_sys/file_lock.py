"""Locks on a file, as functions over a descriptor that need not be writable; none of them waits.

The lock is flock(2)'s: it belongs to the open file, and the kernel releases it when that goes, with
its process at the latest. Who waits for it says so by a shared record lock, which flock's know
nothing of, so that others can be polite.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from hostmem._sys.seam import intercept

__all__ = ["is_awaited", "lock", "say_waiting", "unlock"]

_FLOCK = struct.Struct("hhqqi")  # struct flock of fcntl(2): type, whence, start, length, pid
_WANTED, _SHARED, _NONE = (
    _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0)
    for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK, fcntl.F_UNLCK)
)


def lock(fd: int) -> bool:
    """Lock a file for this open file alone; False where another one has it.

    Raises
    ------
    OSError
        ENOLCK, EBADF, EOPNOTSUPP: this file system has no such locks, or none on a file that is
        open for reading only.
    """
    number = intercept("flock", fd)
    try:
        if number:
            raise OSError(number, f"flock: {os.strerror(number)}")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock of `lock`."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def say_waiting(fd: int, waiting: bool) -> None:
    """Let the users of other open files see that this one's waits, or no longer does."""
    with contextlib.suppress(OSError):  # a courtesy: without it they are less fair
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _SHARED if waiting else _NONE)


def is_awaited(fd: int) -> bool:
    """Tell whether another open file's user waits; False where the kernel does not know."""
    number = intercept("fcntl(F_OFD_GETLK)", fd)
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WANTED)
    except OSError:
        return False
    kind: int = _FLOCK.unpack(found)[0]
    return kind != fcntl.F_UNLCK
