"""Events of transfers, and what a transfer waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hostmem import HostEvent
from hostmem.device import DONE
from kvtier.transfer.jobs import Dependencies, TransferEvent, all_of
from kvtier.transfer.page_events import BatchEvent, PageEvents, behind, gathered

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate
    from tests.threads import Spawn


def failed(text: str = "the disk is gone") -> HostEvent:
    event = HostEvent()
    event.set(OSError(5, text))
    return event


# -------------------------------------------------------------------------- transfer events


def test_a_transfer_is_unfinished_until_it_was_submitted() -> None:
    event = TransferEvent(1)
    assert not event.query()
    assert event.error is None
    with pytest.raises(TimeoutError, match="not submitted"):
        event.synchronize(timeout=0)


def test_a_submitted_transfer_is_as_the_event_of_the_device() -> None:
    event, inner = TransferEvent(1), HostEvent()
    event.submitted(inner, {})
    assert event.wait_submitted() is inner
    assert not event.query()
    inner.set(OSError(5, "gone"))
    assert event.query()
    assert event.error is inner.error
    with pytest.raises(OSError, match="gone"):
        event.synchronize()


def test_a_transfer_that_was_never_submitted_is_finished_with_its_error() -> None:
    event = TransferEvent(1)
    event.failed(OSError(5, "gone"), {})
    assert event.query()
    assert event.wait_submitted() is None
    assert isinstance(event.error, OSError)
    with pytest.raises(OSError, match="gone"):
        event.synchronize()


def test_the_timeout_counts_for_the_work_and_not_for_its_submission_alone() -> None:
    event = TransferEvent(1)
    event.submitted(HostEvent(), {})
    with pytest.raises(TimeoutError):
        event.synchronize(timeout=0)


def test_a_wait_goes_on_when_the_transfer_is_submitted_later(spawn: Spawn) -> None:
    event = TransferEvent(1)
    waits = spawn(event.synchronize)
    assert not waits.done()
    event.submitted(DONE, {})
    assert waits.result(20) is None


def test_pages_that_were_not_submitted_fail_alone() -> None:
    event, bad = TransferEvent(3), OSError(5, "gone")
    event.submitted(DONE, {1: bad})
    assert [event.page(n).error for n in range(3)] == [None, bad, None]
    event.page(0).synchronize()
    for part in (event, event.page(1)):
        with pytest.raises(OSError, match="gone"):
            part.synchronize()


def test_a_transfer_that_the_device_fails_fails_for_every_page() -> None:
    event, inner, bad = TransferEvent(2), HostEvent(), OSError(5, "not submitted")
    event.submitted(inner, {1: bad})
    inner.set(OSError(5, "gone"))
    assert dict(event.failures) == {0: inner.error, 1: bad}
    assert [event.page(n).error for n in range(2)] == [inner.error, bad]


# ----------------------------------------------------------------------------- dependencies


def test_failed_data_of_no_page_in_particular_fails_all() -> None:
    bad = failed()
    assert Dependencies(data=(DONE, bad)).wait(2) == {0: bad.error, 1: bad.error}


def test_failed_data_of_a_page_fails_the_page_in_that_place() -> None:
    bad, read = OSError(5, "gone"), BatchEvent(1)
    read.part_done({2: bad})
    after = Dependencies((read,))
    assert after.wait(4) == {2: bad}
    assert after.part(1, 4).wait(3) == {1: bad}
    assert after.part(0, 2).wait(2) == {}


def test_pages_that_several_transfers_bring_are_waited_for_and_fail_alone(
    spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    bad, read, copied = OSError(5, "gone"), BatchEvent(1), TransferEvent(2)
    events = [read.page(1), DONE, copied.page(1), copied.page(0), read.page(0)]
    (gathered_,) = gathered(events)
    assert behind(gathered_) == (read, DONE, copied)
    assert not gathered_.query()
    with pytest.raises(TimeoutError):
        gathered_.synchronize(timeout=0)
    after = Dependencies((gathered_,))
    waits = spawn(after.part(1, 5).wait, 4)
    copied.submitted(DONE, {0: bad})
    assert not waits.done()
    assert after.failures(5) == {3: bad}  # so far
    read.part_done({1: bad})
    assert waits.result(20) == {2: bad}
    assert after.wait(5) == {0: bad, 3: bad}
    with pytest.raises(OSError, match="gone"):
        gathered_.synchronize()
    assert gathered(events[1:3]) == ()


def test_memory_is_not_waited_for_where_no_page_is_left() -> None:
    order: list[str] = []
    Dependencies((failed(),), usable=lambda: order.append("memory")).wait(2)
    assert order == []


def test_a_failed_fence_does_not_matter() -> None:
    assert Dependencies(fences=(failed(), DONE)).wait(2) == {}


def test_the_wait_lasts_until_every_event_has_finished(
    spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    fence, data = gate(), gate()
    waits = spawn(Dependencies((data,), (fence,)).wait, 1)
    fence.wait_asked()
    fence.set()
    data.wait_asked()
    assert not waits.done()
    data.set()
    assert waits.result(20) == {}


def test_failed_data_is_told_only_when_the_rest_has_finished(
    spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    """The slots of a transfer that fails are free then: nobody else may still use them."""
    other = gate()
    waits = spawn(Dependencies((failed(), other)).wait, 1)
    other.wait_asked()
    assert not waits.done()
    other.set()
    assert list(waits.result(20)) == [0]


def test_memory_is_waited_for_after_the_events() -> None:
    order: list[str] = []

    class Noted(HostEvent):
        def synchronize(self, timeout: float | None = None) -> None:
            order.append("event")

    Dependencies((Noted(),), usable=lambda: order.append("memory")).wait(1)
    assert order[-1] == "memory"
    assert order.count("memory") == 1


def test_memory_that_will_not_be_usable_makes_the_wait_raise() -> None:
    def never() -> None:
        raise MemoryError("the node is full")

    with pytest.raises(MemoryError, match="the node is full"):
        Dependencies(usable=never).wait(1)


# --------------------------------------------------------------------------- several as one


def test_several_events_as_one_have_finished_when_the_last_has() -> None:
    first, second = HostEvent(), HostEvent()
    both = all_of([first, DONE, second])
    first.set(OSError(5, "not its business"))
    assert not both.query()
    with pytest.raises(TimeoutError):
        both.synchronize(timeout=0)
    second.set()
    assert both.query()
    both.synchronize()
    assert both.error is None


def test_one_unfinished_event_stands_for_itself_and_none_for_done() -> None:
    going = HostEvent()
    assert all_of([DONE, going, failed()]) is going
    assert all_of([DONE, failed()]) is DONE


class _Asked(BatchEvent):
    """Counts how often it is asked."""

    __slots__ = ("asked",)

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return super().query()

    def failure(self, index: int) -> BaseException | None:
        self.asked += 1
        return super().failure(index)


def test_work_that_brings_many_pages_is_asked_once_for_all_of_them() -> None:
    read = _Asked(0)
    assert gathered([read.page(n) for n in range(100)]) == ()
    assert read.asked <= 2


def test_pages_are_there_where_only_others_of_the_same_work_failed() -> None:
    read = BatchEvent(1)
    read.part_done({1: OSError("page 1")})
    assert gathered([read.page(0), read.page(2)]) == ()
    (event,) = gathered([read.page(0), read.page(1)])
    assert isinstance(event, PageEvents)
    assert list(event.failures) == [1]
