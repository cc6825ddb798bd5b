"""The watermark: how far memory is usable, and who waits for how much of it."""

from __future__ import annotations

import _thread
import heapq
import threading
from collections.abc import Callable

from hostmem.courier import callbacks
from hostmem.errors import ClosedError, HostmemError, HostOOMError, RegistrationError
from hostmem.ranges import RangeTable
from hostmem.spans import span
from hostmem.units import format_size

__all__ = ["Watermark"]

Outcome = BaseException | None
"""What a wait ends with: the error to raise, or None."""


class _Waiter:
    """One thread parked until a range is usable; its lock is released to wake it."""

    __slots__ = ("end", "lock", "outcome", "settled", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.settled = False
        self.outcome: Outcome = None
        self.lock = _thread.allocate_lock()
        self.lock.acquire()

    def settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.settled = True
        self.lock.release()


class _Callback:
    """A function to be called, on a thread of ours, when a range is usable."""

    __slots__ = ("end", "function", "settled", "start")

    def __init__(self, start: int, end: int, function: Callable[[Outcome], object]) -> None:
        self.start = start
        self.end = end
        self.function = function
        self.settled = False

    def settle(self, outcome: Outcome) -> None:
        self.settled = True
        function = self.function
        callbacks.post(lambda: function(outcome))


class Watermark:
    """How far bytes are filled, which of them were released again, and a failure, if any.

    Works like a futex with a threshold: a waiter names the range it needs and is woken once, when
    the fill passes its end or when it is settled that it will not. Below the watermark no lock is
    taken: callers compare with `usable_end` themselves.

    Attributes
    ----------
    usable_end : int
        Bytes from 0 that are usable without a hole; -1 once closed, so that every comparison fails.
    frontier : int
        Bytes from 0 that are filled, or were and are released.
    size : int
        Bytes that are meant to be filled.
    released : RangeTable
        Ranges below the frontier that are not usable until they are restored.
    failure : BaseException or None
        Why the frontier does not move any more; what is below it stays usable.
    """

    __slots__ = (
        "_heap",
        "_lock",
        "_sequence",
        "closed",
        "failure",
        "frontier",
        "released",
        "size",
        "usable_end",
    )

    def __init__(self, size: int) -> None:
        self.usable_end = 0
        self.frontier = 0
        self.size = size
        self.released = RangeTable()
        self.failure: BaseException | None = None
        self.closed = False
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._heap: list[tuple[int, int, _Waiter | _Callback]] = []
        self._sequence = 0

    @property
    def waiting(self) -> int:
        """Number of threads and callbacks that wait now."""
        with self._lock:
            return sum(not waiter.settled for _, _, waiter in self._heap)

    def is_usable(self, start: int, end: int) -> bool:
        """Tell whether bytes ``[start, end)`` are usable now."""
        if not 0 <= start <= end:
            return False
        if end <= self.usable_end:
            return True
        with self._lock:
            if self.closed or end > self.frontier:
                return False
            return not self.released.overlapping(start, end)

    # ------------------------------------------------------------------ the side of the fill

    def advance(self, end: int) -> None:
        """Move the frontier to ``end`` and wake those it reaches."""
        with self._lock:
            if not self.closed:
                self._move(min(end, self.size))

    def resize(self, size: int, filled: int) -> None:
        """Set the size, move the frontier to ``filled`` if that is further, forget the failure.

        The frontier moves back only where the size does: whoever read it may have been overtaken by
        the fill. Those who wait for an end past the new size get `ValueError`.
        """
        with self._lock:
            self.size = size
            self.failure = None
            if not self.closed:
                self._move(min(max(self.frontier, filled), size))
                self._settle_rest(lambda waiter: waiter.end > size)

    def trim(self, end: int) -> None:
        """Forget the released ranges past ``end``, and move the frontier back to it."""
        with self._lock:
            for start, _ in self.released:
                if start >= end:
                    self.released.remove(start)
            if not self.closed:
                self._move(min(self.frontier, end))

    def release(self, ranges: list[tuple[int, int]]) -> None:
        """Take (start, nbytes) ranges below the frontier from use, and tell who waits for them."""
        with self._lock:
            for start, nbytes in ranges:
                self.released.add(start, nbytes)
            if not self.closed:
                self._move(self.frontier)
                self._settle_rest(lambda waiter: True)

    def restore(self, start: int) -> None:
        """Give the released range that begins at ``start`` back to use."""
        with self._lock:
            self.released.remove(start)
            if not self.closed:
                self._move(self.frontier)

    def fail(self, cause: BaseException) -> None:
        """Record that the frontier will not move, and tell everyone who waits above it."""
        with self._lock:
            self.failure = cause
            self._settle_rest(lambda waiter: True)

    def close(self) -> None:
        """Let every wait, now and later, end with `ClosedError`."""
        with self._lock:
            self.closed = True
            self.usable_end = -1
            self._settle_rest(lambda waiter: True)

    def abandon(self) -> None:
        """Close in a forked child, whose copy of the lock may be held for ever."""
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._heap = []
        self.released.abandon()
        self.closed = True
        self.usable_end = -1

    # --------------------------------------------------------------- the side of those who wait

    @span("wait for the fill", "wait")
    def wait(self, end: int, timeout: float | None, start: int = 0) -> None:
        """Block until ``[start, end)`` is usable; see `hostmem.HostMem.wait_usable`."""
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout: {timeout!r} seconds; give None to wait, 0 to poll")
        with self._lock:
            if self._verdict(start, end):
                return
            if timeout == 0:
                raise self._timeout(end, 0)
            waiter = _Waiter(start, end)
            self._park(waiter)
        try:
            limit = -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            waiter.lock.acquire(True, limit)
        finally:
            # On a timeout or Ctrl-C it is still parked; settled now, it is never woken twice.
            with self._lock:
                settled, waiter.settled = waiter.settled, True
        if not settled:
            raise self._timeout(end, timeout)
        outcome, waiter.outcome = waiter.outcome, None
        if outcome is not None:
            try:
                raise outcome
            finally:
                del outcome  # else error and frame hold each other, and the callers' views

    def add_callback(
        self, end: int, function: Callable[[Outcome], object], start: int = 0
    ) -> _Callback:
        """Call ``function(error_or_None)`` once when a range is usable or settled not to be.

        Returns
        -------
        object
            For `forget`.
        """
        callback = _Callback(start, end, function)
        with self._lock:
            try:
                usable = self._verdict(start, end)
            except (HostmemError, OSError) as error:
                callback.settle(error)
                return callback
            if usable:
                callback.settle(None)
            else:
                self._park(callback)
        return callback

    def forget(self, callback: _Callback) -> None:
        """Do not call a callback any more, unless it is on its way."""
        with self._lock:
            callback.settled = True

    # ------------------------------------------------------------------------------ inside

    def _move(self, frontier: int) -> None:
        self.frontier = frontier
        first = self.released.first
        self.usable_end = frontier if first is None else min(frontier, first)
        while self._heap and self._heap[0][0] <= frontier:
            waiter = heapq.heappop(self._heap)[2]
            if not waiter.settled:
                waiter.settle(None)

    def _verdict(self, start: int, end: int) -> bool:
        """Tell whether a range is usable (True), still coming (False), or raise why not."""
        error = self._refusal(start, end)
        if error is not None:
            try:
                raise error
            finally:
                del error  # as in wait()
        return end <= self.frontier

    def _refusal(self, start: int, end: int) -> Outcome:
        if self.closed:
            return ClosedError("the memory was closed")
        if not 0 <= end <= self.size:
            return ValueError(f"end: {end} is outside 0..{self.size}, the present size")
        if not 0 <= start <= end:
            return ValueError(f"start: {start} is outside 0..{end}, the end")
        if end > self.usable_end and (holes := self.released.overlapping(start, end)):
            first, last = holes[0][0], sum(holes[0])
            for offset, nbytes in holes[1:]:
                last = offset + nbytes if offset == last else last
            return ValueError(
                f"bytes [{first}, {last}) of [{start}, {end}) were released; "
                "recommit() brings them back"
            )
        if end > self.frontier and self.failure is not None:
            return _told_again(self.failure, end, self.frontier)
        return None

    def _timeout(self, end: int, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"{format_size(end)} were not usable after {timeout} s; "
            f"the watermark stands at {max(self.usable_end, 0)} of {self.size} bytes"
        )

    def _park(self, waiter: _Waiter | _Callback) -> None:
        if len(self._heap) > 64 and sum(w.settled for _, _, w in self._heap) > len(self._heap) // 2:
            # Many gave up: forget them, or polling with timeouts would grow the heap for ever.
            self._heap = [entry for entry in self._heap if not entry[2].settled]
            heapq.heapify(self._heap)
        self._sequence += 1
        heapq.heappush(self._heap, (waiter.end, self._sequence, waiter))

    def _settle_rest(self, chosen: Callable[[_Waiter | _Callback], bool]) -> None:
        kept = []
        for entry in self._heap:
            waiter = entry[2]
            if waiter.settled:
                continue
            if chosen(waiter) and (error := self._refusal(waiter.start, waiter.end)) is not None:
                waiter.settle(error)
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept


def _told_again(cause: BaseException, end: int, usable_end: int) -> BaseException:
    """Make an error of the cause's type for one waiter: no two threads share a traceback."""
    message = (
        f"the fill stopped at {format_size(usable_end)} and will not reach {format_size(end)}: "
        f"{cause}; resize() to the same size retries"
    )
    error: BaseException
    if isinstance(cause, OSError):
        error = OSError(cause.errno, message)
        vars(error).update(end=end, committed=usable_end)
    else:
        kind = type(cause) if isinstance(cause, HostOOMError | RegistrationError) else HostmemError
        facts = getattr(cause, "facts", {})
        error = kind(message, **{**facts, "end": end, "committed": usable_end})
    error.__cause__ = cause  # now: a retry may have cleared the failure when the waiter wakes
    return error
