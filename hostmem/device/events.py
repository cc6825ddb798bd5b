"""Events: points of asynchronous work that can be asked about and waited for."""

from __future__ import annotations

import abc
import copy
import threading

from hostmem.describing import one_line

__all__ = ["DONE", "Event", "HostEvent"]


class Event(abc.ABC):
    """Stands for work that was submitted; finished also when it failed."""

    __slots__ = ()

    @abc.abstractmethod
    def query(self) -> bool:
        """Tell whether the work has finished, without blocking."""

    @abc.abstractmethod
    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the work has finished.

        Parameters
        ----------
        timeout : float, optional
            Seconds.

        Raises
        ------
        TimeoutError
            If it has not finished in time.
        Exception
            What made the work fail, if it did.
        """

    def wait_finished(self) -> None:
        """Block until the work has finished; its failure is left to whoever needs the work."""
        try:
            self.synchronize()
        except Exception:
            if not self.query():
                raise

    @property
    @abc.abstractmethod
    def error(self) -> BaseException | None:
        """What made finished work fail, or None."""

    @one_line
    def __repr__(self) -> str:
        state = "under way"
        if self.query():
            state = "done" if self.error is None else f"failed: {self.error}"
        return f"<{type(self).__name__}, {state}>"


class HostEvent(Event):
    """An event that a thread of this process sets."""

    __slots__ = ("_error", "_flag")

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None = None) -> None:
        """Mark the work finished, successfully or with the error that stopped it."""
        self._error = error
        self._flag.set()

    def query(self) -> bool:
        return self._flag.is_set()

    def synchronize(self, timeout: float | None = None) -> None:
        if not self._flag.wait(timeout):
            raise TimeoutError(f"the work had not finished after {timeout} s")
        if self._error is not None:
            raise fresh(self._error) from self._error

    @property
    def error(self) -> BaseException | None:
        return self._error


def fresh(error: BaseException) -> BaseException:
    """Copy an error for one who waits.

    An error that is raised collects the frames it passes, and keeps what they hold alive: those of
    one waiter must not stay with the event, nor meet another's.
    """
    try:
        return copy.copy(error)
    except Exception:
        return error  # it cannot be copied


def _done() -> HostEvent:
    event = HostEvent()
    event.set()
    return event


DONE: Event = _done()
"""The event of work that finished long ago."""
