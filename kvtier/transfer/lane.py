"""Copy lanes: a stream of the device, and a thread that waits for what the device cannot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

from hostmem import ClosedError, Device, Event
from hostmem.device.cuda import CudaEvent
from kvtier.transfer.jobs import Dependencies, TransferEvent
from kvtier.transfer.plan import CopyPlan

__all__ = ["Lane"]

_Job = tuple[Callable[[], CopyPlan], Dependencies, TransferEvent]


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

    def submit(self, plan: Callable[[], CopyPlan], after: Dependencies) -> TransferEvent:
        """Queue a batch of copies; returns at once.

        Parameters
        ----------
        plan : callable
            Makes the plan, on the lane's thread, when the destination may be written; it may block
            until memory is usable.
        after : Dependencies
            What must have happened before.

        Raises
        ------
        ClosedError
            The lane was closed: nobody would ever copy.
        """
        if self._closed:
            raise ClosedError("the copy lane was closed")
        event = TransferEvent()
        self._jobs.put((plan, after, event))
        return event

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            plan, after, event = job
            try:
                self._wait(after)
                copies = plan()
                self._stream.copy(copies.destinations, copies.sources, copies.sizes)
                event.submitted(self._stream.record())
            except BaseException as error:  # it belongs to whoever needs the copy
                with contextlib.suppress(Exception):  # a GPU that fails ends all waits like this
                    after.wait_finished()
                with contextlib.suppress(Exception):
                    self._stream.synchronize()  # a refused batch may have been submitted in part
                event.failed(error)
            del job, plan, after, event

    def _wait(self, after: Dependencies) -> None:
        """Order the stream after what the device itself does; wait here for the rest."""
        for event in after.fences:
            if (recorded := _recorded(event)) is not None:
                self._stream.wait(recorded)
            else:
                event.wait_finished()
        for event in after.data:
            if (recorded := _recorded(event)) is not None:
                self._stream.wait(recorded)
            else:
                event.synchronize()

    def close(self) -> None:
        """Finish what was submitted and end the thread and the stream. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()  # also after an earlier close was interrupted here
        self._stream.close()


def _recorded(event: Event) -> CudaEvent | None:
    """Return what a GPU recorded for an event, once it has; None where it recorded nothing.

    A stream that waits for anything else would not learn that it failed.
    """
    recorded = event.wait_submitted() if isinstance(event, TransferEvent) else event
    return recorded if isinstance(recorded, CudaEvent) else None
