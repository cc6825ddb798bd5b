"""Staging buffers: a ring that is reused when its work is done, and never sooner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from hostmem import ClosedError, CpuDevice, Event, HostEvent, OutOfPagesError
from hostmem.device import DONE
from hostmem.testing import FaultPlan
from kvtier import StagingBuffer

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate
    from tests.threads import Spawn


@pytest.fixture
def ring(cpu: CpuDevice) -> Iterator[StagingBuffer]:
    ring = StagingBuffer(cpu, 4096, 4)
    yield ring
    ring.close()


def taken(ring: StagingBuffer, n: int, *, wait: bool = True) -> list[int]:
    """Take buffers; give their numbers in the ring."""
    return [
        (address - ring._memory.address) // ring.buffer_bytes
        for address in ring.acquire(n, wait=wait).tolist()
    ]


def test_the_buffers_are_one_registration(cpu: CpuDevice, ring: StagingBuffer) -> None:
    assert [nbytes for _, nbytes in cpu.registered] == [4 * 4096]


def test_buffers_are_handed_out_in_turn(ring: StagingBuffer) -> None:
    assert taken(ring, 3) == [0, 1, 2]
    ring.release(3, DONE)
    assert taken(ring, 3) == [3, 0, 1]


def test_a_buffer_is_not_reused_before_its_work_has_finished(ring: StagingBuffer) -> None:
    work = HostEvent()
    taken(ring, 4)
    ring.release(4, work)
    with pytest.raises(OutOfPagesError):
        ring.acquire(1, wait=False)
    work.set()
    assert taken(ring, 1, wait=False) == [0]
    ring.release(1, DONE)


def test_work_that_failed_has_finished(ring: StagingBuffer) -> None:
    work = HostEvent()
    work.set(OSError(5, "the disk is gone"))
    taken(ring, 4)
    ring.release(4, work)
    assert taken(ring, 4, wait=False) == [0, 1, 2, 3]
    ring.release(4, DONE)


def test_exhaustion_raises_if_asked_and_changes_nothing(ring: StagingBuffer) -> None:
    taken(ring, 3)
    with pytest.raises(OutOfPagesError, match="2 staging buffers wanted, 1 of 4 are free") as told:
        ring.acquire(2, wait=False)
    assert told.value.facts == {"wanted": 2, "free": 1}
    assert taken(ring, 1, wait=False) == [3]
    ring.release(4, DONE)


def test_exhaustion_waits_for_the_oldest_work(
    ring: StagingBuffer, spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    first, second = gate(), gate()
    taken(ring, 2)
    ring.release(2, first)
    taken(ring, 2)
    ring.release(2, second)
    later = spawn(taken, ring, 1)
    first.wait_asked()
    assert not later.done()
    first.set()
    assert later.result(20) == [0]
    assert not second.query()
    second.set()
    ring.release(1, DONE)


def test_exhaustion_waits_for_a_release_if_nothing_was_given_back(
    ring: StagingBuffer, spawn: Spawn
) -> None:
    taken(ring, 4)
    later = spawn(taken, ring, 2)
    assert not later.done()
    ring.release(4, DONE)
    assert later.result(20) == [0, 1]
    ring.release(2, DONE)


def test_a_wait_that_is_interrupted_loses_no_buffer(ring: StagingBuffer) -> None:
    class Interrupted(HostEvent):
        def wait_finished(self) -> None:
            raise KeyboardInterrupt

    work = Interrupted()
    taken(ring, 4)
    ring.release(4, work)
    with pytest.raises(KeyboardInterrupt):
        ring.acquire(1)
    work.set()
    assert taken(ring, 4) == [0, 1, 2, 3]
    ring.release(4, DONE)


def lent(ring: StagingBuffer, n: int, until: Event | None = None) -> tuple[list[int], list[Event]]:
    """Borrow buffers; give their numbers in the ring and what has to finish first."""
    with ring.lend(n) as loan:
        if until is not None:
            loan.until = until
        numbers = [
            (at - ring._memory.address) // ring.buffer_bytes for at in loan.addresses.tolist()
        ]
        return numbers, list(loan.fences)


def test_buffers_in_use_are_lent_with_what_has_to_finish_first(ring: StagingBuffer) -> None:
    first, second = HostEvent(), HostEvent()
    assert lent(ring, 2, first) == ([0, 1], [])
    assert lent(ring, 1, second) == ([2], [])
    # One is free, and one of the two oldest follows: nobody asks who has the others.
    assert lent(ring, 2, DONE) == ([3, 0], [first])
    assert lent(ring, 2, DONE) == ([1, 2], [first, second])
    first.set()
    second.set()
    assert lent(ring, 4, DONE) == ([3, 0, 1, 2], [])


def test_work_that_has_finished_is_no_fence(ring: StagingBuffer) -> None:
    work = HostEvent()
    lent(ring, 4, work)
    work.set(OSError(5, "the disk is gone"))
    assert lent(ring, 4, DONE) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize("submitted", [False, True])
def test_a_loan_that_fails_leaves_what_goes_on_in_its_buffers(
    ring: StagingBuffer, submitted: bool
) -> None:
    earlier, begun = HostEvent(), HostEvent()
    lent(ring, 2, earlier)

    def fail() -> None:
        with ring.lend(4) as loan:
            if submitted:
                loan.until = begun
            raise OSError(5, "the second half")

    with pytest.raises(OSError, match="the second half"):
        fail()
    assert lent(ring, 4, DONE) == ([2, 3, 0, 1], [begun] if submitted else [earlier])
    earlier.set()
    begun.set()


def test_lent_buffers_are_acquired_when_their_work_has_finished(ring: StagingBuffer) -> None:
    work = HostEvent()
    lent(ring, 3, work)
    with pytest.raises(OutOfPagesError, match="2 staging buffers wanted, 1 of 4 are free"):
        ring.acquire(2, wait=False)
    work.set()
    assert taken(ring, 2) == [3, 0]
    ring.release(2, DONE)


def test_what_is_acquired_is_not_lent(ring: StagingBuffer) -> None:
    taken(ring, 2)
    with (
        pytest.raises(OutOfPagesError, match="3 staging buffers wanted, 2 of 4 are free"),
        ring.lend(3),
    ):
        pass
    assert lent(ring, 2, DONE) == ([2, 3], [])
    ring.release(2, DONE)


def test_a_wait_for_buffers_is_in_nobodys_way(
    ring: StagingBuffer, spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    first = gate()
    taken(ring, 3)
    ring.release(3, first)
    later = spawn(taken, ring, 4)
    first.wait_asked()
    assert lent(ring, 1, DONE) == ([3], [])
    first.set()
    assert later.result(20) == [0, 1, 2, 3]
    ring.release(4, DONE)


def test_a_closed_ring_gives_nothing(cpu: CpuDevice) -> None:
    ring = StagingBuffer(cpu, 4096, 2)
    ring.close()
    with pytest.raises(ClosedError):
        ring.acquire(1)
    with pytest.raises(ClosedError), ring.lend(1):
        pass
    ring.close()


def test_more_buffers_than_there_are_is_refused(ring: StagingBuffer) -> None:
    with pytest.raises(ValueError, match="5 buffers of 4"):
        ring.acquire(5)
    with pytest.raises(ValueError, match="5 buffers of 4"), ring.lend(5):
        pass


def test_closing_waits_for_the_work_that_uses_the_memory(
    cpu: CpuDevice, spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    ring, work = StagingBuffer(cpu, 4096, 2), gate()
    ring.acquire(1)
    ring.release(1, work)
    closing = spawn(ring.close)
    work.wait_asked()
    assert list(cpu.registered) != []
    work.set()
    closing.result(20)
    assert list(cpu.registered) == []


def test_a_ring_that_cannot_be_registered_keeps_nothing(cpu: CpuDevice) -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 2)
        with pytest.raises(Exception, match="refused to register"):
            StagingBuffer(cpu, 4096, 2)
        assert len(plan.calls("munmap")) == 1
