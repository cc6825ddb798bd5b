"""What a device is to this library: a place of memory with ordered, asynchronous streams."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hostmem.describing import one_line
from hostmem.device.events import Event
from hostmem.device.loans import Loan
from hostmem.turns import NO_TURNS, Turns

__all__ = ["Device", "Stream"]


class Stream(abc.ABC):
    """A queue of work that runs in the order it was submitted. Any thread may submit."""

    @abc.abstractmethod
    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        """Submit copies, all in one batch; returns before they have run.

        Parameters
        ----------
        destinations, sources : uint64 arrays, shape (copies,), contiguous
            Addresses, of the device or of the host, registered or not.
        sizes : uint64 array, shape (copies,), contiguous
            Bytes, each at least 1. Order inside a batch is undefined; destinations must not
            overlap each other or a source. The three arrays may be reused at once.

        Raises
        ------
        CuError
            INVALID_VALUE: a range begins in a registration and crosses its end. Part of the batch
            may have been submitted: what is recorded next stands for that part, too.
        """

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Make work submitted later wait for an event.

        Never blocks where the event and the stream are of one device; a CUDA stream blocks the
        caller for an event that the host sets, because the GPU cannot wait for it.
        """

    @abc.abstractmethod
    def record(self) -> Event:
        """Return an event that stands for everything submitted so far."""

    def synchronize(self) -> None:
        """Block until everything submitted so far has finished; raise what made it fail."""
        self.record().synchronize()

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what was submitted and end the stream. Idempotent."""


class Device(abc.ABC):
    """A GPU, or the CPU in its place: who page-locks memory and who copies it."""

    kind: str
    """``"cuda"`` or ``"cpu"``."""
    ordinal: int | None
    """The driver's number of the GPU; None on the CPU."""
    name: str
    """For a person."""
    stalls: bool
    """Whether other calls to the device wait while it registers."""
    turns: Turns = NO_TURNS
    """Entered around each `register` and `unregister`, so that processes take turns."""

    @property
    @abc.abstractmethod
    def numa_node(self) -> int | None:
        """The memory node next to the device, or None where nobody knows."""

    @property
    @abc.abstractmethod
    def memory_total(self) -> int:
        """Bytes of the device's own memory."""

    @abc.abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range for the device; blocks for about 30 us a MiB, without the GIL.

        Raises
        ------
        CuError
            The driver's answer: HOST_MEMORY_ALREADY_REGISTERED, INVALID_VALUE, NOT_SUPPORTED...
        CuOOMError
            OUT_OF_MEMORY: the driver's tables or the page-locked limit are full.
        """

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """Undo the `register` that began at ``address``; harmless after the driver shut down."""

    @abc.abstractmethod
    def stream(self) -> Stream:
        """Make a stream."""

    def borrow(self, ranges: Iterable[tuple[int, int]]) -> Loan:
        """Let copies reach memory that somebody else owns, by whichever way is the fastest.

        A device copies what it is told to; but only memory that is known to be there is copied by
        a kernel, for which an address without memory is the end of all work on the GPU. Until the
        loan is closed, and every copy to or from the memory is done, the owner must neither free
        nor unmap it.

        Parameters
        ----------
        ranges : iterable of (start, nbytes)
            Memory of the GPU, or of the host and page-locked. Loans may overlap.

        Raises
        ------
        ValueError
            The driver knows no memory at some address of them. On the CPU nothing is checked.
        """
        return Loan()

    @one_line
    def __repr__(self) -> str:
        return f"<{self.name}>"
