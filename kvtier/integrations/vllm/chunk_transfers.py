"""Transfers between an engine's tensors and chunks of host memory, by number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hostmem import CudaDevice, Device, Event, Stream
from hostmem.device import DONE
from hostmem.device.loans import Loan
from kvtier.integrations.vllm.chunk_memory import ChunkMemory, Places
from kvtier.transfer.jobs import Dependencies, TransferEvent
from kvtier.transfer.lane import Lane, Which

__all__ = ["ChunkTransfers", "Finished", "behind_torch"]

log = logging.getLogger("kvtier")


@dataclass(frozen=True, slots=True)
class Finished:
    """A transfer that has ended."""

    job: int
    """Its number."""
    error: BaseException | None
    """Why it failed, if it did."""
    nbytes: int
    """Bytes it was to move."""
    seconds: float
    """From when its copies were submitted to when it was seen to have ended."""


class _Job:
    """A transfer under way."""

    __slots__ = ("began", "event", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.began = perf_counter()
        """When its copies were submitted: what it waits for before is no transfer."""
        self.event: TransferEvent


class ChunkTransfers:
    """Copies blocks to chunks and back, each direction in the order it was asked for.

    Every call returns at once but `wait` and `close`. Copies wait, on threads of their own, for
    what the engine's stream has been given by then, and for memory that is not committed yet.
    Loads that cannot wait have a queue for themselves. Not thread-safe.

    Parameters
    ----------
    memory : ChunkMemory
        The chunks; closed with this.
    device : Device
        Who copies.
    computed : callable
        Gives an event of all that the engine's stream has been given.
    lent : iterable of (start, nbytes)
        The tensors' memory, which small pages then reach by the copy kernel; see `Device.borrow`.
    """

    def __init__(
        self,
        memory: ChunkMemory,
        device: Device,
        computed: Callable[[], Event],
        lent: Iterable[tuple[int, int]] = (),
    ) -> None:
        self._memory = memory
        self._computed = computed
        self._jobs: dict[int, _Job] = {}
        self._lanes: list[Lane] = []
        self._loan = Loan()
        try:
            self._loan = device.borrow(lent)
            for name in ("store", "load", "expedited"):
                self._lanes.append(Lane(device, f"kvtier-vllm-{name}"))
        except BaseException:
            self.close()
            raise
        self._store, self._load, self._expedited = self._lanes

    def store(self, job: int, places: Sequence[Places]) -> None:
        """Start copying blocks to chunks."""
        self._submit(job, self._store, places, to_host=True)

    def load(self, job: int, places: Sequence[Places], *, expedited: bool = False) -> None:
        """Start copying chunks to blocks."""
        self._submit(job, self._expedited if expedited else self._load, places, to_host=False)

    def _submit(self, number: int, lane: Lane, places: Sequence[Places], *, to_host: bool) -> None:
        job = _Job(self._memory.nbytes(places))

        def copy(which: Which, stream: Stream) -> None:
            plan = self._memory.plan(places, to_host=to_host)
            job.began = perf_counter()
            if plan is not None:
                stream.copy(plan.destinations, plan.sources, plan.sizes)

        job.event = lane.submit(copy, 1, Dependencies((self._computed(),)))
        self._jobs[number] = job

    def finished(self) -> list[Finished]:
        """Give the transfers that have ended since the last call, in the order of submission."""
        ended = [number for number, job in self._jobs.items() if job.event.query()]
        now = perf_counter()
        results = []
        for number in ended:
            job = self._jobs.pop(number)
            error = job.event.error
            if error is not None:
                log.error("transfer %d of %d bytes failed: %s", number, job.nbytes, error)
            results.append(Finished(number, error, job.nbytes, now - job.began))
        return results

    def wait(self, jobs: Iterable[int]) -> None:
        """Block until transfers have ended, well or not; unknown ones have."""
        for job in [self._jobs[number] for number in jobs if number in self._jobs]:
            job.event.wait_finished()

    def close(self) -> None:
        """Finish what was submitted, and give threads and memory back. Idempotent."""
        for lane in self._lanes:
            lane.close()
        self._loan.close()
        self._jobs.clear()
        self._memory.close()


def behind_torch(device: Device, place: Any) -> Callable[[], Event]:
    """Make what gives events of torch's current stream.

    Parameters
    ----------
    device : Device
        Whose events they are; on the cpu device there is nothing to wait for.
    place : torch.device
        The same device, as torch calls it.
    """
    if not isinstance(device, CudaDevice):
        return lambda: DONE
    import torch

    return lambda: device.event(torch.cuda.current_stream(place).cuda_stream)
