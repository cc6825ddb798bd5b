"""A latch for broken invariants: what breaks one is remembered, and ends all further use."""

from __future__ import annotations

import logging
from types import TracebackType

from hostmem import CorruptedError

__all__ = ["Latch"]

log = logging.getLogger("kvtier")


class Latch:
    """Guards what must be done as a whole or not at all.

    Each ``with`` block is such a part: whatever is raised inside it has left the bookkeeping
    between two states. The first is remembered, and `check` raises from then on. An `Exception` is
    raised as `CorruptedError` with it as the cause; an interrupt is raised as it is.
    """

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: BaseException | None = None
        """What broke the first invariant; None while all hold."""

    def check(self) -> None:
        """Raise CorruptedError with the first reason, if there is one."""
        if self.reason is not None:
            raise self._error() from self.reason

    def close(self, reason: BaseException) -> None:
        """Remember the first reason, and log it."""
        if self.reason is None:
            self.reason = reason
            log.critical("the bookkeeping of a storage is broken", exc_info=reason)

    def _error(self) -> CorruptedError:
        reason = self.reason
        return CorruptedError(
            f"the bookkeeping broke with {type(reason).__name__}: {reason}; close this storage, "
            "which leaks its memory on purpose, and build another one",
            reason=f"{type(reason).__name__}: {reason}",
        )

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        self.close(error)
        if isinstance(error, Exception) and not isinstance(error, CorruptedError):
            raise self._error() from error
