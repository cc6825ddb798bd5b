"""Copy lanes: in order, not before their fences, and through failures."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CpuDevice, CudaDevice, Device, Event, HostEvent, Stream
from hostmem.testing import FakeDriver, FaultPlan
from kvtier.transfer.jobs import Dependencies, TransferEvent
from kvtier.transfer.lane import Lane, Which, Work
from kvtier.transfer.page_events import BatchEvent

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate
    from tests.threads import Spawn

Bytes = NDArray[np.uint8]
NOTHING = Dependencies()


@pytest.fixture(params=["cpu", "gpu-like"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return cpu if request.param == "cpu" else CudaDevice(0, driver=FakeDriver())


@pytest.fixture
def lane(device: Device) -> Iterator[Lane]:
    lane = Lane(device, "kvtier-lane")
    yield lane
    lane.close()


def address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def copying(*pairs: tuple[Bytes, Bytes]) -> Work:
    """Copy the second buffer of each pair to the first."""

    def work(which: Which, stream: Stream) -> None:
        chosen = [pairs[n] for n in np.arange(len(pairs))[which].tolist()]
        to, source = (np.array([address(p[k]) for p in chosen], np.uint64) for k in (0, 1))
        stream.copy(to, source, np.full(len(chosen), 4096, np.uint64))

    return work


_KEPT: list[Bytes] = []


def buffer(value: int = 0) -> Bytes:
    """Make a buffer that outlives every copy of the test."""
    _KEPT.append(np.full(4096, value, np.uint8))
    return _KEPT[-1]


@pytest.fixture(autouse=True)
def buffers() -> Iterator[None]:
    yield
    _KEPT.clear()


def test_a_copy_is_there_when_its_event_has_finished(lane: Lane) -> None:
    to = buffer()
    lane.submit(copying((to, buffer(7))), 1, NOTHING).synchronize()
    assert (to == 7).all()


def test_copies_run_in_the_order_they_were_submitted(lane: Lane) -> None:
    first, second, source = buffer(), buffer(), buffer(7)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        one = lane.submit(copying((first, source)), 1, NOTHING)
        # What the first brings is what the second carries on.
        two = lane.submit(copying((second, first)), 1, NOTHING)
        held.wait_reached()
        assert not one.query()
        assert not two.query()
        held.release()
        two.synchronize()
        assert one.query()
    assert (second == 7).all()


def test_submitting_never_blocks(lane: Lane, gate: Callable[[], Gate]) -> None:
    shut = gate()
    events = [
        lane.submit(copying((buffer(), buffer())), 1, Dependencies(fences=(shut,)))
        for _ in range(100)
    ]
    assert not any(event.query() for event in events)
    shut.set()
    events[-1].synchronize()


def test_nothing_is_planned_before_the_fences_have_finished(
    lane: Lane, gate: Callable[[], Gate]
) -> None:
    fence, planned = gate(), []

    def work(_which: Which, _stream: Stream) -> None:
        planned.append(fence.query())

    event = lane.submit(work, 1, Dependencies(fences=(fence,)))
    fence.wait_asked()
    assert planned == []
    fence.set(OSError(5, "a fence that failed has finished, too"))
    event.synchronize()
    assert planned == [True]


def test_failed_data_fails_the_copy_and_later_ones_still_run(lane: Lane) -> None:
    data = HostEvent()
    data.set(OSError(errno.EIO, "the disk is gone"))
    to, other = buffer(), buffer()
    event = lane.submit(copying((to, buffer(7))), 1, Dependencies((data,)))
    later = lane.submit(copying((other, buffer(8))), 1, NOTHING)
    with pytest.raises(OSError, match="the disk is gone"):
        event.synchronize()
    assert repr(event.error) == repr(data.error)
    later.synchronize()
    assert (to == 0).all()
    assert (other == 8).all()


def test_pages_whose_data_failed_are_not_copied_and_the_others_are(lane: Lane) -> None:
    to, source = [buffer() for _ in range(4)], [buffer(n + 1) for n in range(4)]
    read = BatchEvent(1)
    read.part_done({1: OSError(errno.EIO, "the disk is gone"), 2: OSError(errno.EIO, "gone, too")})

    event = lane.submit(copying(*zip(to, source, strict=True)), 4, Dependencies((read,)))
    with pytest.raises(OSError, match="the disk is gone"):
        event.synchronize()
    assert [int(page[0]) for page in to] == [1, 0, 0, 4]
    assert [event.page(n).error for n in range(4)] == [None, *read.failures.values(), None]
    event.page(3).synchronize()
    with pytest.raises(OSError, match="gone, too"):
        event.page(2).synchronize()


class Foreign(Event):
    """An event of somebody else, whose work failed."""

    def query(self) -> bool:
        return True

    def synchronize(self, timeout: float | None = None) -> None:
        raise self.error

    @property
    def error(self) -> OSError:
        return OSError(errno.EIO, "the engine failed")


def test_the_failure_of_an_event_of_another_kind_is_noticed(lane: Lane) -> None:
    to = buffer()
    event = lane.submit(copying((to, buffer(7))), 1, Dependencies((Foreign(),)))
    with pytest.raises(OSError, match="the engine failed"):
        event.synchronize()
    assert (to == 0).all()
    lane.submit(copying((to, buffer(8))), 1, Dependencies(fences=(Foreign(),))).synchronize()
    assert (to == 8).all()


def test_a_copy_that_fails_early_still_finishes_after_all_it_depends_on(
    lane: Lane, gate: Callable[[], Gate]
) -> None:
    """Its event fences both sides: others may read or write those slots until then."""
    data, other = HostEvent(), gate()
    data.set(OSError(errno.EIO, "the disk is gone"))
    event = lane.submit(copying((buffer(), buffer())), 1, Dependencies((data, other)))
    other.wait_asked()
    assert not event.query()
    other.set()
    with pytest.raises(OSError, match="the disk is gone"):
        event.synchronize()


def test_pages_that_had_failed_before_the_work_did_keep_their_own_reason(lane: Lane) -> None:
    read, gone = BatchEvent(1), OSError(errno.EIO, "the disk is gone")
    read.part_done({2: gone})

    def refuse(_which: Which, _stream: Stream) -> None:
        raise ValueError("not this one")

    event = lane.submit(refuse, 3, Dependencies((read,)))
    event.wait_finished()
    assert event.failures[2] is gone
    assert [str(event.failures[n]) for n in (0, 1)] == ["not this one"] * 2


def test_work_that_is_submitted_in_part_and_fails_finishes_after_that_part(lane: Lane) -> None:
    to = buffer()

    def work(which: Which, stream: Stream) -> None:
        copying((to, buffer(7)))(which, stream)
        raise ValueError("the rest is not possible")

    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        event = lane.submit(work, 1, NOTHING)
        held.wait_reached()
        assert not event.query()
        held.release()
        with pytest.raises(ValueError, match="the rest"):
            event.synchronize()
    assert (to == 7).all()


def test_a_plan_that_cannot_be_made_fails_its_copy_only(lane: Lane) -> None:
    def never(_which: Which, _stream: Stream) -> None:
        raise MemoryError("the node is full")

    to = buffer()
    event = lane.submit(never, 1, NOTHING)
    later = lane.submit(copying((to, buffer(8))), 1, NOTHING)
    with pytest.raises(MemoryError, match="the node is full"):
        event.synchronize()
    later.synchronize()
    assert (to == 8).all()


def test_a_copy_that_the_driver_refuses_fails_alone(lane: Lane) -> None:
    to = buffer()
    with FaultPlan() as plan:
        plan.fail("cuMemcpyBatchAsync", 1)
        event = lane.submit(copying((buffer(), buffer())), 1, NOTHING)
        with pytest.raises(Exception, match="cuMemcpyBatchAsync"):
            event.synchronize()
    later = lane.submit(copying((to, buffer(8))), 1, NOTHING)
    later.synchronize()
    assert (to == 8).all()


def test_the_copy_of_another_lane_is_waited_for(lane: Lane, device: Device) -> None:
    middle, to = buffer(), buffer()
    other = Lane(device, "kvtier-other")
    try:
        with FaultPlan() as plan:
            held = plan.hold("process_vm_readv")
            one = other.submit(copying((middle, buffer(7))), 1, NOTHING)
            two = lane.submit(copying((to, middle)), 1, Dependencies((one,)))
            held.wait_reached()
            assert not two.query()
            held.release()
            two.synchronize()
    finally:
        other.close()
    assert (to == 7).all()


def test_a_gpu_waits_for_its_own_copies_itself() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    lanes = Lane(device, "kvtier-one"), Lane(device, "kvtier-two")
    try:
        with FaultPlan() as plan:
            held = plan.hold("process_vm_readv")
            one = lanes[0].submit(copying((buffer(), buffer())), 1, NOTHING)
            held.wait_reached()
            two = lanes[1].submit(copying((buffer(), buffer())), 1, Dependencies(fences=(one,)))
            # Submitted although the first copy is not over: no thread of ours waits for it.
            two.wait_submitted()
            assert not one.query()
            assert len(plan.calls("cuStreamWaitEvent")) == 1
            held.release()
            two.synchronize()
    finally:
        for lane in lanes:
            lane.close()


def test_closing_finishes_what_was_submitted(device: Device, spawn: Spawn) -> None:
    lane, to = Lane(device, "kvtier-lane"), buffer()
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        events: list[TransferEvent] = [
            lane.submit(copying((buffer(), buffer())), 1, NOTHING),
            lane.submit(copying((to, buffer(7))), 1, NOTHING),
        ]
        held.wait_reached()
        closing = spawn(lane.close)
        assert not closing.done()
        held.release()
        closing.result(20)
    assert all(event.query() for event in events)
    assert (to == 7).all()
    lane.close()


def test_a_closed_lane_refuses_work_that_nobody_would_do(device: Device) -> None:
    lane = Lane(device, "kvtier-lane")
    lane.close()
    with pytest.raises(ClosedError):
        lane.submit(copying((buffer(), buffer())), 1, NOTHING)
