"""Whether a remote store is worth asking: degraded when it does not answer, tried again later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Health"]

log = logging.getLogger("kvtier")

_FIRST, _LONGEST = 0.5, 30.0  # seconds between tries, doubled each time


class Health:
    """Says when a store may be asked. May be used from any thread.

    Parameters
    ----------
    clock : callable
        Gives seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = _FIRST
        self._again: float | None = None  # when to try again; None while all is well
        self._trying = False
        self._proven = False
        self.degradations = 0
        """Times that it stopped answering."""

    @property
    def state(self) -> str:
        """``"connecting"``, ``"up"`` or ``"degraded"``."""
        if self._again is not None:
            return "degraded"
        return "up" if self._proven else "connecting"

    def may_ask(self) -> bool:
        """Tell whether to ask the store; while it is degraded, one caller may once in a while."""
        with self._lock:
            if self._again is None:
                return True
            if (now := self._clock()) < self._again:
                return False
            self._again = now + self._pause  # whoever got this far tries for all
            self._trying = True
            return True

    def answered(self) -> None:
        """Note that the store answered in time."""
        with self._lock:
            if self._again is not None:
                log.warning("the remote store answers again")
            self._again, self._pause, self._proven = None, _FIRST, True
            self._trying = False

    def failed(self, why: object) -> None:
        """Note that the store did not answer, or too late.

        Calls that were under way together are one failure: the pause gets longer when a try fails.
        """
        with self._lock:
            if self._again is None:
                self.degradations += 1
                log.warning("the remote store is left alone for a while: %s", why)
            elif self._trying:
                self._pause = min(2 * self._pause, _LONGEST)
            else:
                return
            self._trying = False
            self._again = self._clock() + self._pause

    def doubted(self, why: object) -> None:
        """Note that the store has not answered yet: however often, that is one failure."""
        if self._again is None:
            self.failed(why)
