"""A ring of page-locked buffers for pages on their way between disk and GPU."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, Device, Event, OutOfPagesError, StaticHostMem
from hostmem.describing import one_line
from hostmem.spans import span
from hostmem.units import format_size
from kvtier.transfer.jobs import all_of

__all__ = ["Loan", "StagingBuffer"]


@dataclass(slots=True)
class Loan:
    """Buffers that somebody uses, maybe later than others who still use them."""

    addresses: NDArray[np.uint64]
    """Of the buffers; shape (buffers,)."""
    fences: tuple[Event, ...]
    """Of earlier work: nobody may touch the buffers before these have finished."""
    until: Event
    """Finishes when the buffers may be reused; set by the borrower after each submission."""


class StagingBuffer:
    """Equal buffers in one `StaticHostMem`, handed out in turn and reused when their work is done.

    Two ways to get some: `acquire` waits until they are free, or raises; `lend` never waits, and
    says whose work has to finish first.

    Parameters
    ----------
    device : Device
        Who it is registered with.
    buffer_bytes : int
        Bytes of one buffer.
    count : int
        Buffers.
    """

    def __init__(self, device: Device, buffer_bytes: int, count: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.count = count
        self._memory = StaticHostMem(buffer_bytes * count, device=device)
        self._changed = threading.Condition(threading.RLock())
        self._next = 0
        # Of the buffers from `_next` on, so many are free, others given back, the rest taken.
        self._free = count
        self._given: deque[tuple[int, Event]] = deque()  # how many, until when; oldest first
        self._taken = 0
        self._closed = False

    @span("wait for staging buffers", "wait", domain="kvtier")
    def acquire(self, n: int, *, wait: bool = True) -> NDArray[np.uint64]:
        """Take ``n`` buffers.

        Parameters
        ----------
        n : int
            Buffers, at most ``count``.
        wait : bool
            Block until that many are free, or raise.

        Returns
        -------
        uint64 array, shape (n,)
            Their addresses. Give them back with `release`, in the order they were taken.

        Raises
        ------
        ValueError
            More than there are.
        OutOfPagesError
            Not that many are free, and ``wait`` is False. Nothing changed.
        ClosedError
            The ring was closed.
        """
        self._check(n)
        while True:
            with self._changed:
                self._check_open()
                while self._free < n and self._given and self._given[0][1].query():
                    self._free += self._given.popleft()[0]
                if self._free >= n:
                    self._free -= n
                    return self._take(n)
                if not wait:
                    raise self._exhausted(n, self._free)
                if not self._given:
                    self._changed.wait()
                    continue
                _, event = self._given[0]
            event.wait_finished()

    @contextlib.contextmanager
    def lend(self, n: int) -> Iterator[Loan]:
        """Let somebody submit work that uses ``n`` buffers; does not wait for work that goes on.

        Others that want buffers wait for the end of the block: the next to use these must know
        this loan's ``until``. It is the fences at first, and stays as it is when the block raises.

        Parameters
        ----------
        n : int
            Buffers, at most ``count``.

        Raises
        ------
        ValueError
            More than there are.
        OutOfPagesError
            Too many are acquired, and were not released. Nothing changed.
        ClosedError
            The ring was closed.
        """
        self._check(n)
        with self._changed:
            self._check_open()
            if n > self.count - self._taken:
                raise self._exhausted(n, self.count - self._taken)
            going = tuple(event for event in self._overtake(n) if not event.query())
            loan = Loan(self._take(n), going, all_of(going))
            try:
                yield loan
            finally:
                self.release(n, loan.until)

    def _overtake(self, n: int) -> Iterator[Event]:
        """Take buffers off those that are free, and those that were given back; whose these are."""
        self._free -= n
        while self._free < 0:
            given, event = self._given[0]
            used = min(given, -self._free)
            if used == given:
                self._given.popleft()
            else:
                self._given[0] = given - used, event
            self._free += used
            yield event

    def _check(self, n: int) -> None:
        if n > self.count:
            raise ValueError(f"n: {n} buffers of {self.count}")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the staging buffers were closed")

    def _exhausted(self, n: int, free: int) -> OutOfPagesError:
        return OutOfPagesError(
            f"{n} staging buffers wanted, {free} of {self.count} are free", wanted=n, free=free
        )

    def _take(self, n: int) -> NDArray[np.uint64]:
        ids = (self._next + np.arange(n)) % self.count
        self._next = (self._next + n) % self.count
        self._taken += n
        offsets = ids.astype(np.uint64) * np.uint64(self.buffer_bytes)
        return offsets + np.uint64(self._memory.address)

    def release(self, n: int, event: Event) -> None:
        """Give the oldest ``n`` taken buffers back; they are reused once ``event`` has finished."""
        with self._changed:
            self._given.append((n, event))
            self._taken -= n
            self._changed.notify_all()

    @one_line
    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._taken} taken"
        return f"<StagingBuffer {self.count} of {format_size(self.buffer_bytes)}, {state}>"

    def registration_index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64] | None:
        """All of it is one registration."""
        return None

    def close(self) -> None:
        """Give the memory back, once the work that uses it has finished. Idempotent."""
        with self._changed:
            self._closed = True
        for _, event in tuple(self._given):
            event.wait_finished()
        self._memory.close()
