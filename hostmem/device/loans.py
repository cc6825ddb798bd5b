"""Memory that others own and that copies on a device may reach while it is lent."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from hostmem.closing import Closable
from hostmem.describing import one_line
from hostmem.device.pinned import PinnedRanges

__all__ = ["Loan", "Loans"]

Ranges = Iterable[tuple[int, int]]


class Loan(Closable):
    """Memory lent to a device, until `close`.

    Parameters
    ----------
    give_back : callables
        End it; called once.
    """

    __slots__ = ("_give_back",)

    def __init__(self, *give_back: Callable[[], None]) -> None:
        self._give_back = list(give_back)

    @one_line
    def __repr__(self) -> str:
        return f"<Loan, {'open' if self._give_back else 'closed'}>"

    def close(self) -> None:
        """Let no later copy reach the memory by way of this loan. Idempotent."""
        while self._give_back:
            self._give_back.pop()()


class Loans:
    """The ranges of some loans, which may overlap.

    Attributes
    ----------
    table : RangeTable
        What is in any of them. A change makes a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._numbers = itertools.count()
        self._lent: dict[int, list[tuple[int, int]]] = {}
        self.table = PinnedRanges()
        _all.add(self)

    def abandon(self) -> None:
        """Forget everything in a forked child: it was lent to the parent."""
        self._lock = threading.RLock()  # a thread that does not exist here may have held it
        self._lent = {}
        self.table = PinnedRanges()

    def add(self, ranges: Ranges) -> Callable[[], None]:
        """Add the (start, nbytes) of a loan; return what removes them."""
        with self._lock:
            number = next(self._numbers)
            self._lent[number] = list(ranges)
            self._refresh()
        return partial(self._remove, number)

    def _remove(self, number: int) -> None:
        with self._lock:
            self._lent.pop(number, None)
            self._refresh()

    def _refresh(self) -> None:
        table = PinnedRanges()
        spans = sorted((a, a + n) for ranges in self._lent.values() for a, n in ranges)
        reached = 0
        for start, end in spans:
            start = max(start, reached)
            if start < end:
                table.add(start, end - start)
            reached = max(reached, end)
        self.table = table


_all: weakref.WeakSet[Loans] = weakref.WeakSet()


def _forked() -> None:
    for loans in list(_all):
        loans.abandon()


os.register_at_fork(after_in_child=_forked)
