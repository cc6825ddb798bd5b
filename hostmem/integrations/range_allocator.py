"""Parts of a `HostMem` for callers of any size: lowest first, usable, in one registration."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque

import numpy as np
from numpy.typing import NDArray

from hostmem.errors import HostOOMError
from hostmem.progressive import HostMem
from hostmem.units import align_up, format_size

__all__ = ["HeldRange", "RangeAllocator"]

_WAIT = 60.0  # seconds


class HeldRange:
    """Bytes of a memory that are somebody's until `release`. The memory cannot be closed under it.

    Its address and size are those that were asked for; what is set aside may be a little more.
    """

    __slots__ = ("_freed", "_span", "_view", "address", "nbytes")

    def __init__(
        self, view: NDArray[np.uint8], span: tuple[int, int], freed: deque[tuple[int, int]]
    ) -> None:
        self.address: int = view.__array_interface__["data"][0]
        """Of the first byte."""
        self.nbytes = view.nbytes
        """Bytes, as asked."""
        self._view: NDArray[np.uint8] | None = view
        self._span = span
        self._freed = freed

    def release(self) -> None:
        """Give the bytes back. Idempotent; takes no lock, so that a finalizer may call it."""
        if self._view is not None:
            self._view = None
            self._freed.append(self._span)


class RangeAllocator:
    """Hands out parts of one `HostMem`, each usable, in one registration, and aligned.

    The lowest free bytes that fit are taken first: those are usable longest. Neighbours that were
    given back are one range again. All methods may be called from any thread; nobody is made to
    wait but by the fill.

    Parameters
    ----------
    memory : HostMem
        What parts are made of. It may grow at any time, and shrink to where nothing is held;
        what `HostMem.release` gave back is passed over.
    alignment : int
        Bytes that addresses are multiples of: a power of two.
    timeout : float or None
        Seconds that `allocate` waits for the fill at most; None: as long as it takes.

    Raises
    ------
    ValueError
        An alignment that is no power of two, or that the memory itself does not have.
    """

    def __init__(
        self, memory: HostMem, *, alignment: int = 256, timeout: float | None = _WAIT
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1) or memory.address % alignment:
            raise ValueError(
                f"alignment: {alignment} is no power of two that divides the memory's address, "
                f"{memory.address:#x}"
            )
        self.memory = memory
        self._alignment = alignment
        self._timeout = timeout
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, none touching another
        self._end = 0  # of what has ever been free
        self._freed: deque[tuple[int, int]] = deque()  # given back, not yet among the free

    @property
    def free(self) -> list[tuple[int, int]]:
        """Ranges that nobody holds, as (offset, nbytes), ascending; usable or not yet."""
        with self._lock:
            self._gather()
            size = self.memory.size
            ranges = [(start, min(end, size) - start) for start, end in self._free]
        return [(start, nbytes) for start, nbytes in ranges if nbytes > 0]

    def allocate(self, nbytes: int) -> HeldRange:
        """Take bytes; blocks while the fill has not come so far.

        Parameters
        ----------
        nbytes : int
            Bytes, at least 1.

        Returns
        -------
        HeldRange
            Release it; one that is dropped stays taken for the memory's life.

        Raises
        ------
        ValueError
            No bytes.
        HostOOMError
            No free range is so long, or none of them that is lies in one registration, which the
            driver needs to copy it. Nothing was taken.
        TimeoutError
            The memory there was not usable in time. Nothing was taken.
        ClosedError, RegistrationError, OSError, HostmemError
            As `HostMem.wait_usable`. Nothing was taken.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes: {nbytes}; at least 1 byte can be allocated")
        self.memory.wait_usable(0)  # open; in a forked child, the lock below may be held for ever
        until = None if self._timeout is None else time.monotonic() + self._timeout
        at = 0
        while True:
            span = self._take(nbytes, at)
            found: NDArray[np.uint8] | int = at
            try:
                found = self._usable(span[0], nbytes, until)
            finally:
                if isinstance(found, int):
                    self._freed.append(span)
            if not isinstance(found, int):
                return HeldRange(found, span, self._freed)
            at = found

    def _take(self, nbytes: int, at: int) -> tuple[int, int]:
        """Take the first free range of so many bytes from ``at`` on; give what is set aside."""
        size = self.memory.size
        with self._lock:
            self._gather()
            for place, (first, end) in enumerate(self._free):
                start = align_up(max(first, at), self._alignment)
                if start + nbytes > min(end, size):
                    continue
                stop = min(align_up(start + nbytes, self._alignment), end)
                rest = [(first, start), (stop, end)]
                self._free[place : place + 1] = [(a, b) for a, b in rest if a < b]
                return start, stop
            longest = max((end - start for start, end in self._free), default=0)
        why = "consolidate() joins registrations" if at else "resize() makes room"
        raise HostOOMError(
            f"no {format_size(nbytes)} are free {'in one registration ' if at else ''}of "
            f"{self.memory!r}: the longest free range has {format_size(longest)}; {why}",
            nbytes=nbytes,
        )

    def _usable(self, start: int, nbytes: int, until: float | None) -> NDArray[np.uint8] | int:
        """Wait for a range and show it; where it cannot be one, say from where on to look."""
        memory, end = self.memory, start + nbytes
        for first, size in memory.released:
            if first < end and start < first + size:
                return first + size
        try:
            return self._waited_for(start, end, until)
        except ValueError:
            if memory.is_usable(end, start):
                raise
            return start  # a resize or a release took it meanwhile

    def _waited_for(self, start: int, end: int, until: float | None) -> NDArray[np.uint8] | int:
        memory, nbytes = self.memory, end - start
        if memory.is_usable(start + 1, start) and (cut := memory.boundary_after(start)) < end:
            return cut
        if nbytes > memory.commit_unit and not memory.is_usable(end, start):
            raise HostOOMError(
                f"no {format_size(nbytes)} are free in one registration of {memory!r}: the fill "
                f"makes none longer than {format_size(memory.commit_unit)}; give a larger "
                "commit_unit, or consolidate() when it is filled",
                nbytes=nbytes,
            )
        left = None if until is None else max(0.0, until - time.monotonic())
        memory.wait_usable(end, left, start=start)
        first, last = memory.registration_index(np.array([start, end - 1], np.uint64))
        if first != last or first < 0:
            return memory.boundary_after(start)
        view: NDArray[np.uint8] = memory.view(start, nbytes, timeout=0)
        return view

    def _gather(self) -> None:
        """Have what was given back, and what the memory has grown by, among the free."""
        size = self.memory.size
        if size > self._end:
            self._freed.append((self._end, size))
            self._end = size
        while self._freed:
            insort(self._free, self._freed.popleft())
        joined: list[tuple[int, int]] = []
        for start, end in self._free:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._free = joined
