"""What becomes of memory that nobody closed: at the end of the process, and in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from typing import Protocol

from hostmem.courier import closings

__all__ = ["Held", "watch"]

log = logging.getLogger("hostmem")


class Held(Protocol):
    """The inside of an object that holds memory; it refers to nothing the user has."""

    def close(self) -> None:
        """Give everything back."""

    def shut_down(self) -> None:
        """Stop and unregister at the end of the process; the memory stays mapped."""

    def abandon(self) -> None:
        """Forget everything without touching it: it belongs to the parent process."""


_live: weakref.WeakSet[Held] = weakref.WeakSet()


def watch(owner: object, held: Held) -> weakref.finalize[[Held, str, int], object]:
    """Close ``held`` when ``owner`` is dropped without closing, and see to exit and fork.

    Returns
    -------
    weakref.finalize
        Call its ``detach()`` once closed.
    """
    closings.start()  # not from the finalizer, which may run where no thread can be started
    _live.add(held)
    finalizer = weakref.finalize(owner, _dropped, held, repr(owner), os.getpid())
    finalizer.atexit = False
    return finalizer


def _dropped(held: Held, name: str, pid: int) -> None:
    if pid != os.getpid():
        return
    # The garbage collector runs this on any thread, within any lock: closing is for another.
    closings.post(held.close)  # first: the warning may be turned into an error
    warnings.warn(f"{name} was dropped without close()", ResourceWarning, stacklevel=2)


@atexit.register
def _exit() -> None:
    for held in list(_live):
        try:
            held.shut_down()
        except Exception:
            log.exception("shutting down at exit")


def _forked() -> None:
    for held in list(_live):
        held.abandon()
    _live.clear()


os.register_at_fork(after_in_child=_forked)
