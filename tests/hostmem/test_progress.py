"""Following a fill: at a glance, by iteration, by callback."""

from __future__ import annotations

import errno
import logging
from queue import Queue

import pytest

from hostmem import ClosedError, FillProgress, HostMem
from hostmem.testing import FaultPlan
from tests.threads import DEADLINE

MIB = 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


def test_the_progress_of_a_filled_memory_tells_all() -> None:
    with HostMem(16 * MIB, device="cpu", commit_unit=4 * MIB, wait=True) as memory:
        memory.release(4 * MIB, 4 * MIB)
        memory.pause_fill()
        progress = memory.progress
        assert progress.state == "filled"
        assert (progress.size, progress.filled, progress.committed) == (16 * MIB, 16 * MIB, 4 * MIB)
        assert progress.released == 4 * MIB
        assert progress.registrations == len(memory.registrations)
        assert progress.registration_size == 8 * MIB
        assert (progress.page_mode, progress.pauses, progress.rests) == ("small", 1, 0)
        assert progress.eta == 0
        assert progress.fraction == 1
    assert memory.progress.state == "closed"


def test_the_iteration_ends_with_the_fill() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=4)
        with HostMem(8 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            states = memory.iter_progress(1e-3)
            assert next(states).state == "filling"
            assert next(states).state == "filling"
            hold.release()
            *_, last = states
            assert (last.state, last.filled) == ("filled", 8 * MIB)
            assert [p.state for p in memory.iter_progress()] == ["filled"]


def test_the_iteration_ends_with_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "hostmem")
    with FaultPlan() as plan:
        plan.fail(POPULATE, errno.ENOMEM, at=4)
        with HostMem(8 * MIB, device="cpu", fill_threads=1) as memory:
            *_, last = memory.iter_progress(1e-3)
            assert last.state == "failed"


def test_the_iteration_ends_with_the_memory() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=4)
        memory = HostMem(8 * MIB, device="cpu", fill_threads=1)
        hold.wait_reached()
        states = memory.iter_progress(1e-3)
        next(states)
        hold.release()
        memory.close()
        *_, last = states
        assert last.state == "closed"


def test_released_memory_does_not_hold_up_the_iteration() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=24)
        with HostMem(32 * MIB, device="cpu", commit_unit=4 * MIB, fill_threads=1) as memory:
            hold.wait_reached()
            memory.wait_usable(4 * MIB)
            memory.release(0, 4 * MIB)
            states = memory.iter_progress(1e-3)
            next(states)
            hold.release()
            *_, last = states
            assert (last.state, last.committed) == ("filled", 0)


def test_a_callback_is_told_at_once_now_and_then_and_at_the_end() -> None:
    told: Queue[FillProgress] = Queue()
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=4)
        with HostMem(64 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.add_progress_callback(told.put, period=0)
            assert told.get(timeout=DEADLINE).filled <= 2 * MIB
            hold.release()
            seen = [told.get(timeout=DEADLINE)]
            while seen[-1].state != "filled":
                seen.append(told.get(timeout=DEADLINE))
            assert [p.filled for p in seen] == sorted(p.filled for p in seen)
            assert len(seen) >= 8


def test_a_callback_with_a_long_period_is_told_at_once_and_at_the_end() -> None:
    told: Queue[FillProgress] = Queue()
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=4)
        with HostMem(64 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.add_progress_callback(told.put, period=1e6)
            hold.release()
            assert told.get(timeout=DEADLINE).state == "filling"
            assert told.get(timeout=DEADLINE).state == "filled"


def test_a_callback_that_is_taken_back_is_told_no_more() -> None:
    told: list[FillProgress] = []
    last: Queue[FillProgress] = Queue()
    with HostMem(8 * MIB, 4 * MIB, device="cpu", wait=True) as memory:
        forget = memory.add_progress_callback(told.append)
        forget()
        forget()
        memory.add_progress_callback(last.put)
        memory.resize(8 * MIB)
        while last.get(timeout=DEADLINE).filled < 8 * MIB:
            pass
        assert len(told) == 1


def test_a_failure_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "hostmem")
    told: Queue[FillProgress] = Queue()
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=4)
        plan.fail(POPULATE, errno.ENOMEM, at=4)
        with HostMem(8 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.add_progress_callback(told.put, period=1e6)
            hold.release()
            while told.get(timeout=DEADLINE).state != "failed":
                pass


def test_a_callback_that_raises_is_logged_and_harms_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "hostmem")

    def bad(_: FillProgress) -> None:
        raise RuntimeError

    told: Queue[FillProgress] = Queue()
    with HostMem(MIB, device="cpu") as memory:
        memory.add_progress_callback(bad)
        memory.add_progress_callback(told.put)
        while told.get(timeout=DEADLINE).state != "filled":
            pass


def test_a_period_is_a_time_and_a_closed_memory_tells_nothing() -> None:
    memory = HostMem(MIB, device="cpu", wait=True)
    with pytest.raises(ValueError, match="period"):
        memory.add_progress_callback(print, -1)
    memory.close()
    with pytest.raises(ClosedError):
        memory.add_progress_callback(print)
