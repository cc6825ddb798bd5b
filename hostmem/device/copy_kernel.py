"""The copy kernel on one GPU: what runs it, and the queue that feeds it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import linux
from hostmem._sys.copy_pages import GRAIN, NAME, PIECE, PROGRAM, ROW, THREADS, WARP
from hostmem.units import align_up

if TYPE_CHECKING:
    from hostmem.device.cuda import CudaDevice
    from hostmem.device.events import Event

__all__ = ["GRAIN", "CopyKernel", "CopyQueue"]

Addresses = NDArray[np.uint64]

_ROWS = 1 << 16  # of a queue's table
_MOST = 1 << 14  # copies of one submission
_WORDS = ROW // 8
_BOUNDS = PIECE * 4 ** np.arange(24, dtype=np.uint64)  # of magnitudes


class CopyKernel:
    """The kernel, compiled by the driver and loaded for one device.

    Parameters
    ----------
    device : CudaDevice
        Where.
    blocks : int
        Blocks of 256 threads that a run takes at most.

    Raises
    ------
    CuError
        The driver does not take the program.
    """

    def __init__(self, device: CudaDevice, blocks: int) -> None:
        self.device = device
        self.blocks = blocks
        self._handle = device.driver.kernel(device.ordinal, PROGRAM, NAME)

    def run(self, table: int, rows: int, longest: int, stream: int) -> None:
        """Submit the copies of a table's rows, none over ``longest`` bytes."""
        pieces = -(-longest // PIECE)
        items = rows * pieces
        blocks = min(self.blocks, -(-items * WARP // THREADS))
        warps = blocks * THREADS // WARP
        turns = -(-items // (warps * WARP))
        share = -(-items // (warps * turns))  # all warps are done after as many turns
        arguments = table, rows, pieces, share
        device = self.device
        device.driver.launch(device.ordinal, self._handle, blocks, THREADS, arguments, stream)


class CopyQueue:
    """Submits batches of copies to one stream as runs of the kernel.

    What to copy goes into a table of registered host memory, used as a ring, where the kernel reads
    it.

    Parameters
    ----------
    kernel : CopyKernel
        Loaded on the stream's device.
    stream : int
        The driver's.

    Raises
    ------
    HostOOMError
        There is no memory for the table: 2 MiB of the host's.
    CuError
        The driver does not register it.
    """

    def __init__(self, kernel: CopyKernel, stream: int) -> None:
        self._kernel = kernel
        self._device = device = kernel.device
        self._stream = stream
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._next = 0
        self._closed = False
        self._busy: deque[_Busy] = deque()
        nbytes = _ROWS * ROW
        with contextlib.ExitStack() as undo:
            self._address = linux.reserve(nbytes, PIECE)
            undo.callback(linux.unmap, self._address, nbytes)
            linux.advise_no_fork(self._address, nbytes)
            linux.allow(self._address, nbytes)
            undo.callback(self._unregister)  # known before, for an interrupt behind the call
            with device.turns:
                device.register(self._address, nbytes)
            undo.pop_all()
        table = np.frombuffer(linux.buffer(self._address, nbytes), np.uint64)
        self._table = table.reshape(_ROWS, _WORDS)

    def submit(self, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Submit copies between the GPU's memory and registered memory, or within the former.

        Blocks while about 49,000 copies of earlier calls have not run.

        Parameters
        ----------
        destinations, sources, sizes : uint64 arrays, shape (copies,)
            As of `Stream.copy`; each entry a multiple of `GRAIN`. The GPU fails for good at an
            address that is neither its own nor registered: the caller has made sure.
        """
        ends: list[int] = []  # of copies of about a size, which share a run
        if _magnitude(int(sizes.min())) != _magnitude(int(sizes.max())):
            magnitudes = _magnitudes(sizes)
            order = magnitudes.argsort(kind="stable")
            destinations, sources, sizes = destinations[order], sources[order], sizes[order]
            magnitudes = magnitudes[order]
            ends = ((magnitudes[1:] != magnitudes[:-1]).nonzero()[0] + 1).tolist()
        with self._lock:
            if self._closed:
                raise ValueError("the stream is closed")
            for first in range(0, len(sizes), _MOST):
                last = min(first + _MOST, len(sizes))
                part = slice(first, last)
                inside = [end - first for end in ends if first < end < last]
                self._submit(destinations[part], sources[part], sizes[part], inside)

    def _submit(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses, ends: list[int]
    ) -> None:
        count = len(sizes)
        busy = self._room_for(count)
        at = busy.first % _ROWS
        table = self._table[at : at + count]
        table[:, 0], table[:, 1], table[:, 2] = destinations, sources, sizes
        for start, end in pairwise([0, *ends, count]):
            address, longest = self._address + (at + start) * ROW, int(sizes[start:end].max())
            self._kernel.run(address, end - start, longest, self._stream)
        busy.event = self._device.event(self._stream)

    def _room_for(self, rows: int) -> _Busy:
        """Take rows that nothing reads any more; wait for them if need be."""
        while True:
            first = self._next
            if first % _ROWS + rows > _ROWS:
                first = align_up(first, _ROWS)  # not cut in two by the end of the table
            oldest = self._busy[0] if self._busy else None
            if oldest is None or first + rows - oldest.first <= _ROWS:
                # Noted before anything reads the rows: an interrupt lets nobody overwrite them.
                busy = _Busy(first)
                self._busy.append(busy)
                self._next = first + rows
                return busy
            self._wait_for(oldest)  # where a signal or the collector may submit, too
            if self._busy and self._busy[0] is oldest:
                self._busy.popleft()

    def _wait_for(self, busy: _Busy) -> None:
        if busy.event is not None:
            busy.event.synchronize()
        else:  # its submission was interrupted or refused half-way
            self._device.driver.stream_synchronize(self._device.ordinal, self._stream)

    def close(self) -> None:
        """Give the table back. What was submitted must be over."""
        with self._lock, contextlib.ExitStack() as stack:
            self._closed = True
            self._busy.clear()
            stack.callback(linux.unmap, self._address, _ROWS * ROW)
            self._unregister()

    def _unregister(self) -> None:
        if self._device.registered.at(self._address) is not None:
            with self._device.turns:
                self._device.unregister(self._address)


class _Busy:
    """Rows that the GPU may still read, until an event.

    Parameters
    ----------
    first : int
        The first of them, counted from the beginning of the queue's life.
    """

    __slots__ = ("event", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.event: Event | None = None


def _magnitude(nbytes: int) -> int:
    """Give the magnitude of a size: up to a piece 0, up to four 1, up to sixteen 2..."""
    return (((nbytes - 1) // PIECE).bit_length() + 1) // 2


def _magnitudes(sizes: Addresses) -> NDArray[np.intp]:
    """Give the magnitude of each."""
    return _BOUNDS.searchsorted(sizes)
