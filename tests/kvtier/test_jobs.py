"""Events of transfers, and what a transfer waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hostmem import HostEvent
from hostmem.device import DONE
from kvtier.transfer.jobs import Dependencies, TransferEvent, all_of, unfinished

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate
    from tests.threads import Spawn


def failed(text: str = "the disk is gone") -> HostEvent:
    event = HostEvent()
    event.set(OSError(5, text))
    return event


# -------------------------------------------------------------------------- transfer events


def test_a_transfer_is_unfinished_until_it_was_submitted() -> None:
    event = TransferEvent()
    assert not event.query()
    assert event.error is None
    with pytest.raises(TimeoutError, match="not submitted"):
        event.synchronize(timeout=0)


def test_a_submitted_transfer_is_as_the_event_of_the_device() -> None:
    event, inner = TransferEvent(), HostEvent()
    event.submitted(inner)
    assert event.wait_submitted() is inner
    assert not event.query()
    inner.set(OSError(5, "gone"))
    assert event.query()
    assert event.error is inner.error
    with pytest.raises(OSError, match="gone"):
        event.synchronize()


def test_a_transfer_that_was_never_submitted_is_finished_with_its_error() -> None:
    event = TransferEvent()
    event.failed(OSError(5, "gone"))
    assert event.query()
    assert event.wait_submitted() is None
    assert isinstance(event.error, OSError)
    with pytest.raises(OSError, match="gone"):
        event.synchronize()


def test_the_timeout_counts_for_the_work_and_not_for_its_submission_alone() -> None:
    event = TransferEvent()
    event.submitted(HostEvent())
    with pytest.raises(TimeoutError):
        event.synchronize(timeout=0)


def test_a_wait_goes_on_when_the_transfer_is_submitted_later(spawn: Spawn) -> None:
    event = TransferEvent()
    waits = spawn(event.synchronize)
    assert not waits.done()
    event.submitted(DONE)
    assert waits.result(20) is None


# ----------------------------------------------------------------------------- dependencies


def test_failed_data_makes_the_wait_raise_what_failed() -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        Dependencies(data=(DONE, failed())).wait()


def test_a_failed_fence_does_not_matter() -> None:
    Dependencies(fences=(failed(), DONE)).wait()


def test_the_wait_lasts_until_every_event_has_finished(
    spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    fence, data = gate(), gate()
    waits = spawn(Dependencies((data,), (fence,)).wait)
    fence.wait_asked()
    fence.set()
    data.wait_asked()
    assert not waits.done()
    data.set()
    assert waits.result(20) is None


def test_failed_data_is_told_only_when_the_rest_has_finished(
    spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    """The slots of a transfer that fails are free then: nobody else may still use them."""
    other = gate()
    waits = spawn(Dependencies((failed(), other)).wait)
    other.wait_asked()
    assert not waits.done()
    other.set()
    with pytest.raises(OSError, match="the disk is gone"):
        waits.result(20)


def test_memory_is_waited_for_after_the_events() -> None:
    order: list[str] = []

    class Noted(HostEvent):
        def synchronize(self, timeout: float | None = None) -> None:
            order.append("event")

    Dependencies((Noted(),), usable=lambda: order.append("memory")).wait()
    assert order[-1] == "memory"
    assert order.count("memory") == 1


def test_memory_that_will_not_be_usable_makes_the_wait_raise() -> None:
    def never() -> None:
        raise MemoryError("the node is full")

    with pytest.raises(MemoryError, match="the node is full"):
        Dependencies(usable=never).wait()


# ------------------------------------------------------------------------ which still matter


def test_only_events_that_are_unfinished_or_failed_still_matter() -> None:
    going, bad, good = HostEvent(), failed(), HostEvent()
    good.set()
    assert unfinished([going, good, None, bad, DONE, going]) == (going, bad)


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
