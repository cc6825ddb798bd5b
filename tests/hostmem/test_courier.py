"""The thread that carries what must not run where it was caused."""

from __future__ import annotations

import logging
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hostmem.courier import Courier

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child
    from tests.threads import Until


@pytest.fixture
def courier() -> Courier:
    courier = Courier("hostmem-test")
    courier.start()
    return courier


def test_jobs_run_in_order_on_its_own_thread(courier: Courier) -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    for number in range(100):
        courier.post(partial(note, number))
    assert courier.drain(10)
    assert seen == [(number, "hostmem-test") for number in range(100)]


def test_starting_twice_makes_one_thread(courier: Courier) -> None:
    seen: list[int] = []
    courier.post(lambda: seen.append(threading.get_ident()))
    courier.drain(10)
    courier.start()
    courier.post(lambda: seen.append(threading.get_ident()))
    courier.drain(10)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_job_that_raises_is_logged_and_the_next_one_runs(
    courier: Courier, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise error

    seen: list[str] = []
    with caplog.at_level(logging.ERROR, "hostmem"):
        courier.post(fails)
        courier.post(lambda: seen.append("next"))
        assert courier.drain(10)
    assert seen == ["next"]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


def test_a_drain_that_takes_too_long_says_so(courier: Courier) -> None:
    go = threading.Event()
    courier.post(go.wait)
    assert courier.drain(0) is False
    go.set()
    assert courier.drain(10) is True


def test_a_job_is_forgotten_once_it_has_run(courier: Courier, until: Until) -> None:
    class Job:
        def __call__(self) -> None: ...

    job = Job()
    gone = weakref.ref(job)
    courier.post(job)
    del job
    until(lambda: gone() is None)  # although no job comes after it


def test_a_forked_child_has_a_thread_of_its_own(child: Child) -> None:
    done = child(
        """
        import os
        from hostmem.courier import callbacks
        callbacks.start()
        assert callbacks.drain(10)
        pid = os.fork()
        if pid == 0:
            callbacks.start()
            os._exit(0 if callbacks.drain(10) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert callbacks.drain(10)
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
