"""Turns that the processes of a host take inside the driver's registration.

While one process registers memory, the driver keeps its other calls waiting, and the longer the
more processes register at the same time. Only one at a time then stalls next to none. The turn is a
lock on a file that they all see; it is never waited for for long, so that nobody who stops while
having it stops the others. A process that is alone takes no turns: it would pay for them by the
interpreter lock, which each system call lets go and has to wait for again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import random
import stat
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from hostmem import procfs
from hostmem._sys import file_lock

__all__ = ["NO_TURNS", "FileTurns", "Turns", "driver_library", "turns_for"]

log = logging.getLogger("hostmem")

_SHARED = "/dev/shm/hostmem-turns"
_PATIENCE = 0.025  # seconds; a registration of 8 MiB takes 0.0005
_LEAST_PATIENCE = 0.0002
_LESS = 8  # times less patience after each wait in vain
_LOOK_INTERVAL = 0.05  # seconds
_NAPS = 50e-6, 150e-6  # seconds between two looks at the lock, at random


class Turns:
    """Turns that nobody waits for: there is nobody to take turns with, or nothing to agree by."""

    def __init__(self, state: str) -> None:
        self._state = state

    @property
    def state(self) -> str:
        """By what turns are taken, or why not, in words."""
        return self._state

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


NO_TURNS = Turns("not needed")
"""For a device that stalls nobody."""


class FileTurns(Turns):
    """Turns by a lock on a file. Enter it around a driver call; threads take turns as well.

    Entering waits until the turn is ours, or for ``patience`` seconds, and then goes on without it:
    whoever has it may be paused, or just slow. Each wait in vain leaves an eighth of the patience,
    0.2 ms at the least, until the turn is had again. Nobody overtakes those who wait already. A
    process that ends gives its turn back. A forked child opens the file anew, not to share the turn
    of its parent.

    A process that is alone with the file takes no turns, and its threads take none either. It is
    present from the first time it enters until it ends, also while it registers nothing: one that
    filled once and only serves since makes the others take turns. Who was alone notices within
    ``look_interval``. Where the kernel has no open file description locks, nobody is ever alone.

    Parameters
    ----------
    path : str
        A regular file; it is only ever opened for reading.
    create : bool
        Make it where it does not exist, empty and for everybody to read.
    patience : float
        Seconds.
    look_interval : float
        Seconds between two looks at whether other processes are there.

    Raises
    ------
    OSError
        It cannot be opened, is a link or no regular file, or its file system has no such locks.
    """

    def __init__(
        self,
        path: str,
        *,
        create: bool = False,
        patience: float = _PATIENCE,
        look_interval: float = _LOOK_INTERVAL,
    ) -> None:
        self._path = path
        self._create = create
        self._full_patience = patience
        self.patience = patience
        """Seconds that the next wait may take."""
        self._failure: OSError | None = None
        self._lock = threading.Lock()  # of the threads of this process
        self._owner: int | None = None  # thread that has both locks
        self._waits = self._gave_up = 0
        self._look_interval = look_interval
        self._look_at = 0.0  # of time.monotonic
        self._alone = False  # as of the last look
        self._fd: int | None = _open(path, create)
        try:
            if file_lock.lock(self._fd):
                file_lock.unlock(self._fd)
        except BaseException:
            self.close()
            raise
        _all.add(self)

    @property
    def state(self) -> str:
        """By what turns are taken, and how that went, in words."""
        if self._failure is not None:
            return f"none: {self._path} failed ({self._failure.strerror})"
        waited = f"; waited {_times(self._waits)}" if self._waits else ""
        gave_up = f", gave up {_times(self._gave_up)}" if self._gave_up else ""
        alone = "alone, else " if self._alone else ""
        return f"{alone}by {self._path}{waited}{gave_up}"

    def __enter__(self) -> Self:
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)
        if self._alone:
            return self
        me = threading.get_ident()
        # Ours already: in a signal handler, or because Ctrl-C came before the release.
        if self._owner == me or self._failure is not None:
            return self
        deadline = now + self.patience
        if not self._lock.acquire(timeout=self.patience):
            self._wait_was_in_vain()
            return self
        try:
            if self._take(deadline):
                self.patience = self._full_patience
                self._owner = me
            else:
                self._wait_was_in_vain()
        except OSError as error:
            self._fail(error)
        finally:
            if self._owner != me:
                self._release()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # By what was taken, not by whether we are alone, which may be another answer by now.
        if self._owner is not None and self._owner == threading.get_ident():
            self._owner = None
            self._release()

    def close(self) -> None:
        """Close the file, and give the turn back; entering opens it again."""
        self._look_at, self._alone = 0.0, False
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _look(self, now: float) -> None:
        """See whether others are there, and be seen; meanwhile threads go by the last answer."""
        next_look = self._look_at = now + self._look_interval
        fd = self._fd
        # Present before asking: of two that come at the same time at least one sees the other.
        alone = fd is not None and file_lock.say_present(fd) and file_lock.is_alone(fd)
        if self._look_at == next_look:  # else this answer is late, and a newer one counts
            self._alone = alone

    def _take(self, deadline: float) -> bool:
        """Lock the file, at the latest some naps after the deadline, or not at all."""
        if self._fd is None:
            self._fd = _open(self._path, self._create)
            file_lock.say_present(self._fd)
        fd = self._fd
        if not file_lock.is_awaited(fd) and file_lock.lock(fd):
            return True
        self._waits += 1
        file_lock.say_waiting(fd, True)
        try:
            while True:
                # At random, not less and less often: all who wait fare alike, however long.
                time.sleep(random.uniform(*_NAPS))
                if file_lock.lock(fd):
                    return True
                if time.monotonic() >= deadline:
                    return False
        finally:
            file_lock.say_waiting(fd, False)

    def _release(self) -> None:
        try:
            if self._fd is not None:
                file_lock.unlock(self._fd)
        except OSError as error:
            self._fail(error)
        finally:
            self._lock.release()

    def _wait_was_in_vain(self) -> None:
        self._gave_up += 1
        self.patience = max(self.patience / _LESS, min(_LEAST_PATIENCE, self._full_patience))

    def _fail(self, error: OSError) -> None:
        """Go on without turns: no driver call fails for want of one."""
        self._failure = error
        self._look_at = math.inf  # the descriptor may be somebody else's by now
        log.warning("processes take no more turns by %s: %s", self._path, error)

    def _forget(self) -> None:
        """In a forked child: nothing of this is held by one of its threads."""
        self.close()
        self._lock = threading.Lock()
        self._owner = None
        self.patience = self._full_patience
        self._waits = self._gave_up = 0


_all: weakref.WeakSet[FileTurns] = weakref.WeakSet()


def _forked() -> None:
    for turns in list(_all):
        turns._forget()


os.register_at_fork(after_in_child=_forked)


@functools.cache
def turns_for(library_path: str | None) -> Turns:
    """Return the turns of this process, the same each time.

    They are taken by the driver's library itself, which containers share because it is mounted
    into them from the host; where it cannot be locked by a file in /dev/shm, else not at all. The
    environment variable ``HOSTMEM_TURNS`` names another file, or switches them off (0).

    Parameters
    ----------
    library_path : str, optional
        The driver's library, see `driver_library`.

    Raises
    ------
    ValueError
        ``HOSTMEM_TURNS`` is neither 0 nor the path of a file that can be locked.
    """
    setting = os.environ.get("HOSTMEM_TURNS")
    if setting == "0":
        return Turns("off: HOSTMEM_TURNS=0")
    if setting is not None:
        try:
            if not os.path.isabs(setting):
                raise OSError("no absolute path")
            return FileTurns(setting, create=True)
        except OSError as error:
            raise ValueError(
                f"HOSTMEM_TURNS: {setting!r}; give 0 or the absolute path of a file that can be "
                f"locked: {error}"
            ) from error
    if library_path is not None:
        with contextlib.suppress(OSError):
            return FileTurns(library_path)
    try:
        return FileTurns(_SHARED, create=True)
    except OSError as error:
        return Turns(f"none: no lockable file ({error})")


def driver_library(root: Path = Path("/")) -> str | None:
    """Return the path of the driver's library in this process, or None before it is loaded."""
    for line in procfs.read(root / "proc/self/maps").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcuda.so"):
            return f"/{path}"
    return None


def _open(path: str, create: bool) -> int:
    # Others may write where this is: not through a link, nor into somebody's pipe or device.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        if not create:
            raise
        fd = _make(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", path)
    return fd


def _make(path: str, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444)
    except FileExistsError:  # another process was faster
        return os.open(path, flags)
    os.fchmod(fd, 0o444)  # whatever the umask: other users' processes take part
    return fd


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
