"""A ring of page-locked buffers for pages on their way between disk and GPU."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

from hostmem import Device, Event, OutOfPagesError, StaticHostMem

__all__ = ["StagingBuffer"]


class StagingBuffer:
    """Equal buffers in one `StaticHostMem`, handed out in turn and reused when their work is done.

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
        self._changed = threading.Condition()
        self._free = count
        self._next = 0
        self._given: deque[tuple[int, Event]] = deque()  # how many, until when; oldest first

    def acquire(self, n: int, *, wait: bool = True) -> NDArray[np.uint64]:
        """Take ``n`` buffers.

        Parameters
        ----------
        n : int
            Buffers, at most `count`.
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
        """
        if n > self.count:
            raise ValueError(f"n: {n} buffers of {self.count}")
        with self._changed:
            while self._free < n:
                if self._given and (wait or self._given[0][1].query()):
                    taken, event = self._given[0]
                    event.wait_finished()
                    self._given.popleft()  # only now: the wait can be interrupted
                    self._free += taken
                elif wait:
                    self._changed.wait()
                else:
                    raise OutOfPagesError(
                        f"{n} staging buffers wanted, {self._free} of {self.count} are free",
                        wanted=n,
                        free=self._free,
                    )
            ids = (self._next + np.arange(n)) % self.count
            self._next = (self._next + n) % self.count
            self._free -= n
        offsets = ids.astype(np.uint64) * np.uint64(self.buffer_bytes)
        return offsets + np.uint64(self._memory.address)

    def release(self, n: int, event: Event) -> None:
        """Give the oldest ``n`` taken buffers back; they are reused once ``event`` has finished."""
        with self._changed:
            self._given.append((n, event))
            self._changed.notify_all()

    def registration_index(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64] | None:
        """All of it is one registration."""
        return None

    def close(self) -> None:
        """Give the memory back, once the work that uses it has finished."""
        for _, event in self._given:
            event.wait_finished()
        self._memory.close()
