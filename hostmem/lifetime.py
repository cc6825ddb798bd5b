"""What becomes of memory that nobody closed: at the end of the process, and in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Protocol

from hostmem.courier import Courier, closings

__all__ = ["Held", "close_on_signal", "watch"]

log = logging.getLogger("hostmem")

Handler = Callable[[int, FrameType | None], Any] | int
"""A function, ``SIG_DFL`` or ``SIG_IGN``."""

_REFUSED = {
    *(signal.SIGKILL, signal.SIGSTOP),  # nobody is asked
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),  # the thread cannot go on
}

_SENT_AGAIN_AFTER = 0.05  # seconds, doubled each time
_SENT_AGAIN_AT_MOST = 1.0


class Held(Protocol):
    """The inside of an object that holds memory; it refers to nothing the user has."""

    def close(self) -> None:
        """Give everything back."""

    def shut_down(self) -> None:
        """Stop and unregister at the end of the process; the memory stays mapped."""

    def abandon(self) -> None:
        """Forget everything without touching it: it belongs to the parent process."""


class _Live:
    """Those who hold memory now, not kept by being listed.

    Unlike a `weakref.WeakSet` it can be iterated while other threads add to it and the garbage
    collector takes from it: each change, and the copy that is iterated, is one step.
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[Held]] = set()

    def add(self, held: Held) -> None:
        self._refs.add(weakref.ref(held, self._refs.discard))

    def clear(self) -> None:
        self._refs.clear()

    def __iter__(self) -> Iterator[Held]:
        return (held for ref in self._refs.copy() if (held := ref()) is not None)

    def __bool__(self) -> bool:
        return bool(self._refs)


_live = _Live()


def watch(owner: object, held: Held) -> weakref.finalize[[Held, str, int], object]:
    """Close ``held`` when ``owner`` is dropped without closing, and see to exit and fork.

    Returns
    -------
    weakref.finalize
        Call its ``detach()`` once closed.
    """
    closings.start()  # not from the finalizer, which may run where no thread can be started
    _live.add(held)
    finalizer = weakref.finalize(owner, _dropped, held, _name(owner), os.getpid())
    finalizer.atexit = False
    return finalizer


def _name(owner: object) -> str:
    try:
        return repr(owner)
    except Exception:  # a subclass whose own attributes come later
        return object.__repr__(owner)


def _dropped(held: Held, name: str, pid: int) -> None:
    if pid != os.getpid():
        return
    # The garbage collector runs this on any thread, within any lock: closing is for another.
    closings.post(held.close)  # first: the warning may be turned into an error
    warnings.warn(f"{name} was dropped without close()", ResourceWarning, stacklevel=2)


def _shut_down() -> None:
    for held in _live:
        try:
            held.shut_down()
        except Exception:
            log.exception("shutting down at the end of the process")


@atexit.register
def _exit() -> None:
    if _arrivals.owed and _arrivals.here:
        # A wait that the signal's shutdown ended led here: the signal is what ends the process.
        _shutdowns.drain()
    _shut_down()


def _forked() -> None:
    for held in _live:
        held.abandon()
    _live.clear()


os.register_at_fork(after_in_child=_forked)


# --------------------------------------------------------------------------------- signals

_shutdowns = Courier("hostmem-signals")  # not `closings`, where a close may be stuck


class _Arrivals:
    """Signals between their arrival and their effect. Only GIL-atomic steps: handlers use it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.closing = False
        self.owed: set[int] = set()
        """Those that were answered with a shutdown and not yet passed on."""
        self.passing: set[int] = set()
        """Those whose earlier handler runs now."""

    @property
    def here(self) -> bool:
        """Whether this is the process that asked, and not a child forked from it."""
        return self.pid == os.getpid()

    def is_first(self, number: int) -> bool:
        """Tell whether a signal is answered with a shutdown, and note that it is then owed.

        Not the one that the shutdown sent again, nor any that comes while it runs: the user
        insists. And not one that comes by way of a handler installed on top of ours.
        """
        if not self.here or not _live or self.closing or number in self.owed | self.passing:
            self.owed.discard(number)
            return False
        self.closing = True
        self.owed.add(number)
        return True


_arrivals = _Arrivals()


class _Relay:
    """Handler of a signal: everything is shut down, then the handler before has the signal.

    It interrupts the main thread anywhere, perhaps in a lock that the shutdown needs, so it takes
    none and waits for nothing: another thread does the work. Handlers are only called and changed
    on the main thread, so the other one sends the signal again when it is done.
    """

    def __init__(self, previous: Handler) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _arrivals.is_first(number):
            _shutdowns.post(partial(_shut_down_and_resend, number))
            return
        _arrivals.passing.add(number)
        try:
            self._pass_on(number, frame)
        finally:
            _arrivals.passing.discard(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            signal.signal(number, self)  # it was one that does not end the process


def _shut_down_and_resend(number: int) -> None:
    _shut_down()
    _arrivals.closing = False
    _resend(number, _SENT_AGAIN_AFTER)


def _resend(number: int, pause: float) -> None:
    """Send a signal that is owed, and again after a pause, in seconds, for as long as it is."""
    if number not in _arrivals.owed:
        return
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, number)  # this thread, so that its system call is interrupted
    if not isinstance(signal.getsignal(number), _Relay):
        return  # a handler of somebody else, who may count them
    # One that arrives just before a system call notes the signal and does not interrupt the
    # call, which may last for ever: until the handler has run, the next one may. In turn with
    # other signals: the main thread may block this one for long.
    time.sleep(pause)
    _shutdowns.post(partial(_resend, number, min(2 * pause, _SENT_AGAIN_AT_MOST)))


def close_on_signal(*signals: int) -> Callable[[], None]:
    """Shut down all memory when a signal comes, before it has the effect that it has now.

    A process that dies with registered memory leaves the unpinning to the kernel, which holds the
    driver for about a second, and every other process on the GPU with it; unregistering first, unit
    by unit, costs them milliseconds. The end of the interpreter does so by itself, death by a
    signal does not.

    When one of the signals arrives, every fill is stopped and everything unregistered, on a thread
    of ours, while the main thread goes on. As after `HostMem.close`, waits end with `ClosedError`;
    unlike after it, the memory stays mapped. Then the handler that was there before is called on
    the main thread; with ``SIG_DFL`` the process dies by the signal, with ``SIG_IGN`` it goes on.
    A signal that arrives during the shutdown takes effect at once.

    Parameters
    ----------
    *signals : int
        For example ``signal.SIGTERM``. For one that is taken care of already, nothing changes.

    Returns
    -------
    callable
        Puts back the handlers that this call replaced, except where another one was installed
        since. Call it on the main thread.

    Raises
    ------
    ValueError
        No signal, or one that cannot be handled, or whose handler was not installed by Python and
        cannot be called from it; or this is not the main thread. Nothing was changed.
    ResourceBusyError
        The thread cannot be started. Nothing was changed.

    Notes
    -----
    - Python runs handlers on its main thread between two instructions: while that is in a long call
      of C code, nothing happens.
    - A forked child has the handlers, but they pass signals on at once; call this in the child for
      the memory that it builds.
    - ``loop.add_signal_handler`` of asyncio does not go through handlers: it replaces ours where
      it comes later, and does not wait for ours where it came before. Close from its callback.
    - What still copies from or to the memory is not waited for.

    Examples
    --------
    >>> import signal
    >>> undo = close_on_signal(signal.SIGTERM)
    >>> undo()
    """
    global _arrivals
    if not signals:
        raise ValueError("signals: none given; name at least one, such as signal.SIGTERM")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("close_on_signal: only the main thread may install signal handlers")
    relays: dict[int, _Relay] = {}
    for number in signals:
        if number not in signal.valid_signals() or number in _REFUSED:
            raise ValueError(f"signals: {number!r} cannot be handled")
        previous = signal.getsignal(number)
        if previous is None:
            raise ValueError(
                f"signals: the handler of {number!r} was not installed by Python, which cannot "
                "call it; install it after this"
            )
        if not isinstance(previous, _Relay):
            relays[number] = _Relay(previous)
    if not _arrivals.here:
        _arrivals = _Arrivals()
    _shutdowns.start()
    for number, relay in relays.items():
        _arrivals.owed.discard(number)
        signal.signal(number, relay)

    def undo() -> None:
        for number, relay in relays.items():
            previous = relay.previous
            if signal.getsignal(number) is relay:
                signal.signal(number, previous)

    return undo
