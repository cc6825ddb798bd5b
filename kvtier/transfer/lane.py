"""Copy lanes: a stream of the device, and a thread that waits for what the device cannot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, Device, Event, Stream
from hostmem.device import fresh
from hostmem.device.cuda import CudaEvent
from kvtier.transfer.jobs import Dependencies, TransferEvent
from kvtier.transfer.page_events import behind

__all__ = ["Lane", "Which", "Work"]

Which = NDArray[np.intp] | slice
"""Places of pages in a batch; indexes an array of the batch."""
Work = Callable[[Which, Stream], None]
"""Submits the copies of pages of a batch to a stream."""
_Job = tuple[Work, int, Dependencies, TransferEvent]


class Lane:
    """Copies of one direction, in the order they were submitted.

    A GPU's stream can wait for the GPU's own events but not for a disk, nor for memory that is
    still being committed. The lane's thread waits for those, and submits; the caller never blocks.

    Parameters
    ----------
    device : Device
        Who copies.
    name : str
        Of the thread.
    """

    def __init__(self, device: Device, name: str) -> None:
        self._stream = device.stream()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        try:
            self._thread.start()
        except BaseException:
            self._jobs.put(None)  # it may run all the same
            self._stream.close()
            raise

    def submit(self, work: Work, pages: int, after: Dependencies) -> TransferEvent:
        """Queue a batch of copies; returns at once.

        Parameters
        ----------
        work : callable
            Submits them, on the lane's thread, when the destination may be written; it may block
            until memory is usable. Given the pages to copy, those whose data did not fail, and the
            stream. What it raises is why the pages failed.
        pages : int
            How many there are.
        after : Dependencies
            What must have happened before.

        Raises
        ------
        ClosedError
            The lane was closed: nobody would ever copy.
        """
        if self._closed:
            raise ClosedError("the copy lane was closed")
        event = TransferEvent(pages)
        self._jobs.put((work, pages, after, event))
        return event

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, pages, after, event = job
            failures: Mapping[int, BaseException] = {}
            try:
                self._wait(after)
                failures = after.failures(pages)
                if failures and len(failures) == pages:
                    error = next(iter(failures.values()))
                    raise fresh(error) from error
                work(_without(failures, pages) if failures else slice(None), self._stream)
                event.submitted(self._stream.record(), failures)
            except BaseException as error:  # it belongs to whoever needs the copy
                with contextlib.suppress(Exception):  # a GPU that fails ends all waits like this
                    after.wait_finished()
                with contextlib.suppress(Exception):
                    self._stream.synchronize()  # what failed may have been submitted in part
                event.failed(error, failures)
            del job, work, after, event, failures

    def _wait(self, after: Dependencies) -> None:
        """Order the stream after what the device itself does; wait here for the rest."""
        for event in (*after.fences, *after.data):
            for work in behind(event):
                if (recorded := _recorded(work)) is not None:
                    self._stream.wait(recorded)
                else:
                    work.wait_finished()

    def close(self) -> None:
        """Finish what was submitted and end the thread and the stream. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()  # also after an earlier close was interrupted here
        self._stream.close()


def _without(failures: Collection[int], pages: int) -> NDArray[np.intp]:
    kept = np.ones(pages, np.bool_)
    kept[list(failures)] = False
    return np.flatnonzero(kept)


def _recorded(event: Event) -> CudaEvent | None:
    """Return what a GPU recorded for an event, once it has; None where it recorded nothing.

    A stream that waits for anything else would not learn that it failed.
    """
    recorded = event.wait_submitted() if isinstance(event, TransferEvent) else event
    return recorded if isinstance(recorded, CudaEvent) else None
