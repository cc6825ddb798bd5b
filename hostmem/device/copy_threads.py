"""Threads that help with large copies of host memory; all streams of the process share them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from hostmem.machine import machine

__all__ = ["CopyThreads", "copy_threads"]

Addresses = NDArray[np.uint64]
Copy = Callable[[Addresses, Addresses, Addresses], None]
_Part = tuple[Addresses, Addresses, Addresses]

_MOST_THREADS = 8  # memory is no faster past this
# A range costs what so many bytes more would. Below the least batch, handing a part over costs as
# much as it saves: the helper has to be woken, and to get at the interpreter.
_RANGE, _PART, _LEAST_BATCH = 8 << 10, 2 << 20, 6 << 20


class CopyThreads:
    """Threads that take parts of batches; they start when first needed and stay.

    Who submits a batch works on it, too, and waits only for parts that others have begun: it
    finishes with no helper at all. May be used from any thread.

    Parameters
    ----------
    count : int, optional
        Threads that work on one batch at once, with the one that submits it; by default the
        CPUs of the process, at most 8.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._batches: SimpleQueue[_Batch] = SimpleQueue()

    def copy(
        self, copy: Copy, destinations: Addresses, sources: Addresses, sizes: Addresses
    ) -> None:
        """Copy ranges; blocks until they are copied, or until all parts have ended where one fails.

        Parameters
        ----------
        copy : callable
            Copies some of them, without the GIL.
        destinations, sources, sizes : uint64 arrays, shape (ranges,)
            See `Stream.copy`.

        Raises
        ------
        OSError
            What ``copy`` raised for the first part that failed; others may have been copied.
        """
        work = int(sizes.sum()) + len(sizes) * _RANGE
        if work < _LEAST_BATCH or self.most < 2:
            copy(destinations, sources, sizes)
            return
        batch = _Batch(copy, _cut(destinations, sources, sizes, work // _PART))
        for _ in range(self._helpers_for(batch)):
            self._batches.put(batch)
        batch.finish()

    @property
    def most(self) -> int:
        """Threads that work on one batch at once."""
        if self._count is None:
            self._count = max(1, min(len(machine().allowed_cpus), _MOST_THREADS))
        return self._count

    def _helpers_for(self, batch: _Batch) -> int:
        """Say how many helpers have something to do in a batch; start those that are missing."""
        wanted = min(self.most, len(batch)) - 1
        with self._lock:
            while len(self._helpers) < wanted:
                name = f"hostmem-copy-{len(self._helpers)}"
                thread = threading.Thread(
                    target=_help, args=(self._batches,), name=name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the process may not have more threads now
                    return len(self._helpers)
                self._helpers.append(thread)
        return wanted


def _help(batches: SimpleQueue[_Batch]) -> None:
    while True:
        batch = batches.get()
        batch.work()
        del batch  # its arrays, and what it failed of


class _Batch:
    """Ranges in parts, each copied by whoever takes it first."""

    def __init__(self, copy: Copy, parts: Iterable[_Part]) -> None:
        self._copy = copy
        self._parts = deque(enumerate(parts))
        self._left = len(self._parts)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failures: dict[int, BaseException] = {}

    def __len__(self) -> int:
        """Parts that nobody has taken."""
        return len(self._parts)

    def work(self) -> None:
        """Copy parts until all have been taken."""
        while True:
            try:
                number, part = self._parts.popleft()
            except IndexError:
                return
            try:
                self._copy(*part)
            except BaseException as error:  # it belongs to whoever submitted the batch
                self._failures[number] = error
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._over.set()

    def finish(self) -> None:
        """Help, wait for the parts that others have taken, and raise what failed first."""
        self.work()
        self._over.wait()
        if self._failures:
            raise self._failures[min(self._failures)]


def _cut(
    destinations: Addresses, sources: Addresses, sizes: Addresses, parts: int
) -> Iterable[_Part]:
    """Cut ranges into so many parts that take about as long; one large range, too."""
    pieces = (sizes + np.uint64(_PART - 1)) // np.uint64(_PART)
    if len(sizes) and pieces.max() > 1:
        counts = pieces.astype(np.intp)
        of = np.repeat(np.arange(len(sizes)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        offsets = (np.arange(len(of)) - before).astype(np.uint64) * np.uint64(_PART)
        destinations, sources = destinations[of] + offsets, sources[of] + offsets
        sizes = np.minimum(sizes[of] - offsets, np.uint64(_PART))
    work = np.cumsum(sizes + np.uint64(_RANGE))
    shares = np.arange(1, parts, dtype=np.uint64) * work[-1] // np.uint64(parts)
    bounds = [0, *np.unique(np.searchsorted(work, shares, side="right")).tolist(), len(sizes)]
    return ((destinations[a:b], sources[a:b], sizes[a:b]) for a, b in pairwise(bounds) if b > a)


_shared = CopyThreads()


def copy_threads() -> CopyThreads:
    """Give the threads that this process shares."""
    return _shared


def _forked() -> None:
    global _shared
    _shared = CopyThreads()  # the parent's threads are not in the child, its locks may be held


os.register_at_fork(after_in_child=_forked)
