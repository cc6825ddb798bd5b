"""Locks on a file, as functions over a descriptor that need not be writable; none of them waits.

The lock is flock(2)'s: it belongs to the open file, and the kernel releases it when that goes, with
its process at the latest. Beside it, the users of open files tell each other by shared record locks
on single bytes, which flock's know nothing of: who waits, so that others can be polite, and who is
there at all. Nobody is kept from anything by these; whether another has one can be asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

from hostmem._sys import trace
from hostmem._sys.seam import intercept

__all__ = ["is_alone", "is_awaited", "lock", "say_present", "say_waiting", "unlock"]

_FLOCK = struct.Struct("hhqqi")  # struct flock of fcntl(2): type, whence, start, length, pid
_WAITING, _PRESENT = 0, 1  # bytes of the file; it may be shorter
_OPERATIONS = {
    fcntl.LOCK_EX | fcntl.LOCK_NB: "LOCK_EX|LOCK_NB",
    fcntl.LOCK_UN: "LOCK_UN",
    fcntl.F_OFD_SETLK: "F_OFD_SETLK",
    fcntl.F_OFD_GETLK: "F_OFD_GETLK",
}
_flock = trace.call("flock", fcntl.flock, lambda _: "0", {1: _OPERATIONS})
_fcntl = trace.call("fcntl", fcntl.fcntl, lambda _: "0", {1: _OPERATIONS})


def lock(fd: int) -> bool:
    """Lock a file for this open file alone; False where another one has it.

    Raises
    ------
    OSError
        ENOLCK, EBADF, EOPNOTSUPP: this file system has no such locks, or none on a file that is
        open for reading only.
    """
    try:
        _check("flock", fd)
        _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock of `lock`."""
    _flock(fd, fcntl.LOCK_UN)


def say_waiting(fd: int, waiting: bool) -> None:
    """Let the users of other open files see that this one's waits, or no longer does."""
    with contextlib.suppress(OSError):  # a courtesy: without it they are less fair
        _mark(fd, _WAITING, fcntl.F_RDLCK if waiting else fcntl.F_UNLCK)


def is_awaited(fd: int) -> bool:
    """Tell whether another open file's user waits; False where the kernel does not know."""
    try:
        return _is_marked(fd, _WAITING)
    except OSError:
        return False


def say_present(fd: int) -> bool:
    """Let the users of other open files see this one's for as long as it is open.

    Returns False where the kernel cannot. Saying it again changes nothing.
    """
    try:
        _mark(fd, _PRESENT, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def is_alone(fd: int) -> bool:
    """Tell whether no other open file's user is present; False where the kernel does not know."""
    try:
        return not _is_marked(fd, _PRESENT)
    except OSError:
        return False


def _mark(fd: int, byte: int, kind: int) -> None:
    _check("fcntl(F_OFD_SETLK)", fd, byte)
    _fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def _is_marked(fd: int, byte: int) -> bool:
    _check("fcntl(F_OFD_GETLK)", fd, byte)
    # Shared locks are only in the way of an exclusive one. Unlike taking that, asking for it does
    # not need a file that is open for writing.
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = _FLOCK.unpack(_fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _check(name: str, fd: int, *args: int) -> None:
    """Raise the error of a test's plan for a call, if it has one."""
    number = intercept(name, fd, *args)
    if number:
        raise OSError(number, f"{name}: {os.strerror(number)}")
