"""Who waits is woken once, for the right reason, whatever happens meanwhile."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from hostmem.courier import callbacks
from hostmem.errors import ClosedError, HostmemError, HostOOMError, RegistrationError
from hostmem.watermark import Watermark

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child
    from tests.threads import Spawn, Until

Parked = Callable[..., Future[None]]


@pytest.fixture
def mark() -> Watermark:
    callbacks.start()
    return Watermark(100)


@pytest.fixture
def parked(mark: Watermark, spawn: Spawn, until: Until) -> Parked:
    """Start a thread that waits for an end, and return once it is parked."""

    def wait(end: int, timeout: float | None = None) -> Future[None]:
        before = mark.waiting
        future = spawn(mark.wait, end, timeout)
        until(lambda: mark.waiting == before + 1)
        return future

    return wait


class Calls(list[BaseException | None]):
    """A callback that records what it was called with."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __call__(self, error: BaseException | None) -> None:
        self.threads.append(threading.current_thread().name)
        self.append(error)


# --------------------------------------------------------------------------------- waiting


def test_what_is_usable_is_not_waited_for(mark: Watermark) -> None:
    mark.advance(40)
    mark.wait(40, None)
    mark.wait(0, 0)


def test_a_waiter_sleeps_until_its_own_end_is_reached(mark: Watermark, parked: Parked) -> None:
    waiting = parked(40)
    mark.advance(39)
    assert mark.waiting == 1
    mark.advance(40)
    assert waiting.result(10) is None
    assert mark.waiting == 0


def test_each_waiter_is_woken_by_the_advance_that_reaches_it(
    mark: Watermark, parked: Parked
) -> None:
    last, first, second, also_first = (parked(end) for end in (30, 10, 20, 10))
    mark.advance(10)
    assert (first.result(10), also_first.result(10)) == (None, None)
    assert mark.waiting == 2
    mark.advance(25)
    assert second.result(10) is None
    assert mark.waiting == 1
    mark.advance(100)
    assert last.result(10) is None


def test_the_prefix_never_passes_the_size(mark: Watermark) -> None:
    mark.advance(120)
    assert mark.usable_end == 100


def test_a_timeout_of_zero_polls(mark: Watermark) -> None:
    with pytest.raises(TimeoutError, match="watermark stands at 0 of 100"):
        mark.wait(1, 0)
    assert mark.waiting == 0


def test_a_wait_ends_after_its_timeout(mark: Watermark) -> None:
    with pytest.raises(TimeoutError, match=r"after 0\.01 s"):
        mark.wait(1, 0.01)


def test_who_gave_up_is_not_woken_later(mark: Watermark) -> None:
    with pytest.raises(TimeoutError):
        mark.wait(1, 0.001)
    assert mark.waiting == 0
    mark.advance(1)  # would release a lock that nobody holds


def test_an_infinite_timeout_waits(mark: Watermark, parked: Parked) -> None:
    waiting = parked(5, float("inf"))
    mark.advance(5)
    assert waiting.result(10) is None


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan")])
def test_a_timeout_that_makes_no_sense_is_refused(mark: Watermark, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        mark.wait(1, timeout)


@pytest.mark.parametrize("end", [-1, 101])
def test_an_end_outside_the_size_is_refused(mark: Watermark, end: int) -> None:
    with pytest.raises(ValueError, match=f"end: {end} is outside 0..100"):
        mark.wait(end, None)


# -------------------------------------------------------------------- resizing, failing, closing


def test_a_resize_that_makes_a_wait_invalid_ends_it(mark: Watermark, parked: Parked) -> None:
    beyond, within = parked(60), parked(50)
    mark.resize(50, 0)
    with pytest.raises(ValueError, match=r"end: 60 is outside 0\.\.50"):
        beyond.result(10)
    assert mark.waiting == 1
    mark.advance(50)
    assert within.result(10) is None


def test_a_resize_wakes_those_whose_bytes_are_there_already(
    mark: Watermark, parked: Parked
) -> None:
    mark.resize(200, 0)
    waiting = parked(150)
    mark.resize(300, 150)
    assert waiting.result(10) is None


def test_growing_never_moves_the_prefix_back(mark: Watermark) -> None:
    # The caller read the prefix before the fill moved it on.
    mark.advance(80)
    mark.resize(200, 70)
    assert mark.usable_end == 80


def test_shrinking_moves_the_prefix_back(mark: Watermark) -> None:
    mark.advance(80)
    mark.resize(70, 80)
    assert (mark.size, mark.usable_end) == (70, 70)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (HostOOMError("no memory"), HostOOMError),
        (RegistrationError("refused", code=1), RegistrationError),
        (OSError(14, "bad address"), OSError),
        (RuntimeError("a bug"), HostmemError),
    ],
    ids=["memory", "driver", "errno", "other"],
)
def test_a_failure_reaches_each_waiter_as_an_error_of_its_own(
    mark: Watermark, parked: Parked, cause: Exception, kind: type[Exception]
) -> None:
    mark.advance(10)
    waiting = [parked(end) for end in (20, 20, 90)]
    mark.fail(cause)
    errors = [future.exception(10) for future in waiting]
    assert [type(error) for error in errors] == [kind] * 3
    assert [error.__cause__ for error in errors if error] == [cause] * 3
    assert len({id(error) for error in (*errors, cause)}) == 4
    assert [getattr(error, "end", None) for error in errors] == [20, 20, 90]
    assert {getattr(error, "committed", None) for error in errors} == {10}


def test_below_the_prefix_a_failure_is_not_noticed(mark: Watermark) -> None:
    mark.advance(10)
    mark.fail(HostOOMError("no memory"))
    mark.wait(10, 0)
    with pytest.raises(HostOOMError) as caught:
        mark.wait(11, None)
    assert caught.value.__cause__ is mark.failure


def test_an_end_that_makes_no_sense_is_no_failure_of_the_fill(mark: Watermark) -> None:
    mark.fail(HostOOMError("no memory"))
    with pytest.raises(ValueError, match="outside") as caught:
        mark.wait(101, None)
    assert caught.value.__cause__ is None


def test_an_error_keeps_its_cause_when_a_retry_clears_the_failure_first(
    mark: Watermark, parked: Parked
) -> None:
    cause = HostOOMError("no memory")
    waiting = parked(50)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the waiter stays asleep until both calls are made
    try:
        mark.fail(cause)
        mark.resize(100, 0)
    finally:
        sys.setswitchinterval(interval)
    error = waiting.exception(10)
    assert isinstance(error, HostOOMError)
    assert error.__cause__ is cause


def test_a_resize_forgets_the_failure(mark: Watermark, parked: Parked) -> None:
    mark.fail(HostOOMError("no memory"))
    mark.resize(100, 0)
    assert mark.failure is None
    waiting = parked(50)
    mark.advance(50)
    assert waiting.result(10) is None


def test_closing_ends_every_wait(mark: Watermark, parked: Parked) -> None:
    mark.advance(10)
    waiting = [parked(20), parked(100)]
    mark.close()
    assert [type(future.exception(10)) for future in waiting] == [ClosedError] * 2


@pytest.mark.parametrize("end", [0, 10, 11, 101, -1])
def test_once_closed_no_wait_begins(mark: Watermark, end: int) -> None:
    mark.advance(10)
    mark.close()
    with pytest.raises(ClosedError):
        mark.wait(end, None)


def test_once_closed_nothing_opens_it_again(mark: Watermark) -> None:
    mark.close()
    mark.advance(50)
    mark.resize(60, 50)
    assert mark.usable_end == -1


# ------------------------------------------------------------------------------- callbacks


def test_a_callback_is_called_once_on_a_thread_of_ours(mark: Watermark) -> None:
    calls = Calls()
    mark.add_callback(40, calls)
    mark.advance(39)
    callbacks.drain(10)
    assert calls == []
    mark.advance(40)
    mark.advance(100)
    mark.fail(HostOOMError("no memory"))
    mark.close()
    assert callbacks.drain(10)
    assert calls == [None]
    assert calls.threads == ["hostmem-callbacks"]


def test_a_callback_for_what_is_usable_comes_at_once_and_not_on_the_callers_thread(
    mark: Watermark,
) -> None:
    mark.advance(40)
    calls = Calls()
    mark.add_callback(40, calls)
    assert callbacks.drain(10)
    assert calls == [None]
    assert calls.threads == ["hostmem-callbacks"]


@pytest.mark.parametrize(
    ("settle", "kind"),
    [
        (lambda mark: mark.fail(HostOOMError("no memory")), HostOOMError),
        (lambda mark: mark.close(), ClosedError),
        (lambda mark: mark.resize(30, 0), ValueError),
    ],
    ids=["failed", "closed", "shrunk"],
)
def test_a_callback_is_told_why_its_bytes_will_not_come(
    mark: Watermark, settle: Callable[[Watermark], None], kind: type[Exception]
) -> None:
    calls = Calls()
    mark.add_callback(40, calls)
    settle(mark)
    mark.close()
    assert callbacks.drain(10)
    assert [type(error) for error in calls] == [kind]


def test_a_callback_gets_the_cause(mark: Watermark) -> None:
    cause = HostOOMError("no memory")
    before, after = Calls(), Calls()
    mark.add_callback(40, before)
    mark.fail(cause)
    mark.add_callback(40, after)
    assert callbacks.drain(10)
    assert [error.__cause__ for error in (*before, *after) if error] == [cause] * 2


def test_a_callback_for_an_end_outside_is_refused_at_once(mark: Watermark) -> None:
    calls = Calls()
    with pytest.raises(ValueError, match="outside"):
        mark.add_callback(101, calls)
    callbacks.drain(10)
    assert calls == []


def test_a_callback_after_closing_is_told_so(mark: Watermark) -> None:
    mark.close()
    calls = Calls()
    mark.add_callback(1, calls)
    assert callbacks.drain(10)
    assert [type(error) for error in calls] == [ClosedError]


def test_a_forgotten_callback_is_not_called(mark: Watermark) -> None:
    calls = Calls()
    for _ in range(2):
        mark.forget(mark.add_callback(40, calls))
    assert mark.waiting == 0
    mark.fail(HostOOMError("no memory"))
    mark.resize(100, 0)
    mark.forget(mark.add_callback(40, calls))
    mark.advance(100)
    mark.close()
    callbacks.drain(10)
    assert calls == []


def test_a_callback_may_use_the_watermark(mark: Watermark) -> None:
    calls = Calls()
    mark.add_callback(10, lambda error: mark.add_callback(20, calls))
    mark.advance(20)
    callbacks.drain(10)
    callbacks.drain(10)  # the second was posted by the first
    assert calls == [None]


def test_what_a_callback_raises_is_logged(
    mark: Watermark, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(error: BaseException | None) -> None:
        raise LookupError("mine")

    calls = Calls()
    with caplog.at_level(logging.ERROR, "hostmem"):
        mark.add_callback(10, fails)
        mark.add_callback(10, calls)
        mark.advance(10)
        assert callbacks.drain(10)
    assert calls == [None]
    assert ["LookupError: mine" in (record.exc_text or "") for record in caplog.records] == [True]


# -------------------------------------------------------------------------- many, and signals


def test_polling_with_timeouts_does_not_grow_the_heap(mark: Watermark) -> None:
    for _ in range(2000):
        with pytest.raises(TimeoutError):
            mark.wait(50, 1e-9)
    assert len(mark._heap) < 200


def test_polling_forgets_nobody_who_still_waits(mark: Watermark, parked: Parked) -> None:
    waiting = [parked(end) for end in (10, 90)]
    for _ in range(500):
        with pytest.raises(TimeoutError):
            mark.wait(50, 1e-9)
    assert mark.waiting == 2
    mark.advance(90)
    assert [future.result(10) for future in waiting] == [None, None]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads be switched as often as they can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_no_wake_up_is_lost_among_many_threads(spawn: Spawn) -> None:
    mark = Watermark(400)

    def follow(step: int) -> int:
        for end in range(0, 401, step):
            mark.wait(end, 20)
            assert mark.usable_end >= end
        return step

    steps = [1, 1, 2, 3, 5, 7, 11, 50] * 2
    followers = [spawn(follow, step) for step in steps]
    for end in range(1, 401):
        mark.advance(end)
    assert [future.result(30) for future in followers] == steps
    assert mark.waiting == 0


@pytest.mark.usefixtures("hasty")
def test_an_advance_and_a_timeout_at_once_settle_a_waiter_once(spawn: Spawn) -> None:
    # Releasing a waiter's lock twice would raise in advance().
    for _ in range(200):
        mark = Watermark(1)

        def wait(mark: Watermark = mark) -> bool:
            try:
                mark.wait(1, 1e-5)
            except TimeoutError:
                return False
            return True

        waiting = spawn(wait)
        mark.advance(1)
        assert waiting.result(10) in (True, False)
        assert mark.waiting == 0


def test_ctrl_c_ends_a_wait_and_leaves_nothing_parked(child: Child) -> None:
    done = child(
        """
        import os, signal, threading
        from hostmem.watermark import Watermark

        # A background job's children inherit SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mark = Watermark(100)

        def interrupt():
            while mark.waiting == 0:
                os.sched_yield()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            mark.wait(50, None)
        except KeyboardInterrupt:
            print("interrupted", mark.waiting)
        mark.advance(100)
        mark.wait(100, 0)
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted 0\n", "", 0)
