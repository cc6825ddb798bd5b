"""The threads that populate: one budget for all objects of a process."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable

import pytest

from hostmem import CudaDevice, HostMem, HostOOMError, filler
from hostmem import fill_threads as module
from hostmem.fill_threads import Populating, bind_to, fill_thread_budget
from hostmem.testing import FakeDriver, FaultPlan, Hold
from tests.threads import Spawn, Until

MIB = 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


def inside(memory: HostMem) -> Callable[..., bool]:
    return lambda address, *_: memory.address <= address < memory.address + memory.capacity


def test_a_memory_closes_while_another_keeps_the_whole_budget_busy(spawn: Spawn) -> None:
    budget = fill_thread_budget()
    with (
        FaultPlan() as plan,
        HostMem(64 * MIB, 0, device="cpu", fill_threads=budget) as stuck,
    ):
        holds: list[Hold] = [
            plan.hold(POPULATE, at=number + 1, when=inside(stuck)) for number in range(budget)
        ]
        stuck.resize(64 * MIB)
        for hold in holds:
            hold.wait_reached()
        other = HostMem(8 * MIB, device="cpu")
        waiting = spawn(other.wait_usable, 1)
        other.close()  # its threads have no share of the budget, and want none any more
        assert waiting.exception() is not None
        for hold in holds:
            hold.release()
        stuck.wait_usable(64 * MIB)


def test_a_share_is_given_back_also_after_an_error() -> None:
    def fails() -> None:
        with Populating(lambda: False) as allowed:
            raise RuntimeError(str(allowed))

    for _ in range(2 * fill_thread_budget()):
        with pytest.raises(RuntimeError, match="True"):
            fails()


def test_cpus_that_are_refused_are_named(caplog: pytest.LogCaptureFixture, spawn: Spawn) -> None:
    caplog.set_level(logging.WARNING, "hostmem")
    spawn(bind_to, ()).result()
    assert not caplog.records
    spawn(bind_to, (100_000,)).result()
    assert "CPUs (100000,) are refused" in caplog.text


def test_threads_run_where_they_are_bound(spawn: Spawn) -> None:
    cpu = max(os.sched_getaffinity(0))

    def bound() -> set[int]:
        bind_to((cpu,))
        return os.sched_getaffinity(0)

    assert spawn(bound).result() == {cpu}


def test_slots_may_be_larger_than_what_is_populated_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filler, "_AHEAD", 4 * MIB)
    slot = 12 * MIB
    with HostMem(6 * slot, device="cpu", slot_size=slot) as memory:
        memory.wait_usable(6 * slot, 20)
        assert memory.registrations == [(n * slot, slot) for n in range(6)]


def populating() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hostmem-populate")]


def test_a_failure_is_reported_once_the_pieces_in_flight_are_done(until: Until) -> None:
    with FaultPlan() as plan, HostMem(4 * MIB, 0, device="cpu", fill_threads=2) as memory:

        def starts(address: int, *_: int) -> bool:
            return address == memory.address

        def follows(address: int, *_: int) -> bool:
            return address > memory.address

        first, second = plan.hold(POPULATE, when=starts), plan.hold(POPULATE, when=follows)
        plan.fail(POPULATE, errno.ENOMEM, when=starts)
        memory.resize(4 * MIB)
        first.wait_reached()
        second.wait_reached()
        first.release()
        until(lambda: len(populating()) == 1)
        assert memory.failure is None
        second.release()
        with pytest.raises(HostOOMError):
            memory.wait_usable(MIB, 20)


def test_fewer_threads_populate_by_default_where_one_thread_registers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for budget, before_a_driver in ((12, 8), (8, 8), (2, 2)):
        monkeypatch.setattr(module, "fill_thread_budget", lambda n=budget: n)
        with HostMem(8 * MIB, device="cpu") as memory:
            assert memory.progress.threads == budget
        with HostMem(8 * MIB, device=CudaDevice(0, driver=FakeDriver())) as memory:
            assert memory.progress.threads == before_a_driver
        with HostMem(8 * MIB, device="cpu", fill_threads=3) as memory:
            assert memory.progress.threads == 3
