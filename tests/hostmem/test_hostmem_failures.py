"""What memory promises when a step fails: the prefix stays, the rest is as if never begun."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hostmem import (
    CpuDevice,
    CuError,
    CuOOMError,
    HostMem,
    HostmemError,
    HostOOMError,
    RegistrationError,
    placement_of,
)
from hostmem._sys import linux
from hostmem.courier import callbacks
from hostmem.fill_threads import fill_thread_budget
from hostmem.testing import FaultPlan

if TYPE_CHECKING:
    from tests.hostmem.conftest import Maps
    from tests.threads import Spawn, Until

PAGE = mmap.PAGESIZE
KIB, MIB = 1 << 10, 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"
DISCARD = "madvise(MADV_DONTNEED)"
REGISTER = "cuMemHostRegister"
UNREGISTER = "cuMemHostUnregister"
NO_ACCESS = 0

# With one populating thread and units of 1 MiB, each unit is one mprotect, two populates of 512 KiB
# and one registration. Failing the third unit leaves a prefix of 2 MiB.
SIZE, UNIT, PREFIX = 4 * MIB, MIB, 2 * MIB

Waiting = Callable[[HostMem], "Future[None]"]


@pytest.fixture
def plan() -> Iterator[FaultPlan]:
    with FaultPlan() as plan:
        yield plan


@pytest.fixture
def waiting(spawn: Spawn, until: Until) -> Waiting:
    """Start a wait for the whole size and return once it is parked."""

    def start(memory: HostMem) -> Future[None]:
        future = spawn(memory.wait_usable, memory.size)
        until(lambda: memory._mark.waiting)
        return future

    return start


def failing(plan: FaultPlan, policy: str = "raise") -> HostMem:
    """Fill with a plan whose failure has been reported when this returns."""
    memory = HostMem(
        SIZE, device="cpu", fill_threads=1, commit_unit=UNIT, on_register_failure=policy
    )
    with pytest.raises((HostmemError, OSError)):
        memory.wait_usable(SIZE, 20)
    return memory


def resident(memory: HostMem) -> int:
    found = placement_of(memory.address, memory.capacity)
    if found.method.startswith("not verifiable"):
        pytest.skip(found.method)
    return found.resident


STEPS = {
    "access": ("mprotect", errno.ENOMEM, 3, HostOOMError),
    "access refused": ("mprotect", errno.EACCES, 3, OSError),
    "populate": (POPULATE, errno.ENOMEM, 5, HostOOMError),
    "populate half a unit": (POPULATE, errno.ENOMEM, 6, HostOOMError),
    "populate refused": (POPULATE, errno.EFAULT, 5, OSError),
    "poisoned page": (POPULATE, 133, 5, OSError),  # EHWPOISON
    "register": (REGISTER, 1, 3, RegistrationError),
    "device tables": (REGISTER, 2, 3, RegistrationError),
    "not supported": (REGISTER, 801, 3, RegistrationError),
}


def fail_step(plan: FaultPlan, step: str) -> type[Exception]:
    """Let one step of the third unit fail until further notice."""
    name, error, at, kind = STEPS[step]
    plan.fail(name, error, at=at, times=None, when=lambda *args: args[-1] != NO_ACCESS)
    return kind


# -------------------------------------------------------------------------------- the fill


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_step_leaves_the_prefix_and_nothing_of_the_rest(
    plan: FaultPlan, step: str, cpu: CpuDevice, maps: Maps
) -> None:
    kind = fail_step(plan, step)
    with failing(plan) as memory:
        end = PREFIX + (UNIT // 2 if step == "populate half a unit" else 0)
        assert isinstance(memory.failure, kind)
        assert memory.committed == end
        assert memory.size == SIZE
        registered = [(start - memory.address, nbytes) for start, nbytes in cpu.registered]
        assert registered == memory.registrations
        assert sum(nbytes for _, nbytes in registered) == end
        memory.resize(end)  # the worker has ended
        assert resident(memory) == end
        assert maps(memory.address, SIZE) == [(0, end, "rw-p"), (end, SIZE, "---p")]


@pytest.mark.parametrize("step", STEPS)
def test_the_prefix_stays_usable_after_a_failure(plan: FaultPlan, step: str) -> None:
    fail_step(plan, step)
    with failing(plan) as memory:
        memory.wait_usable(PREFIX, 0)
        memory.view(0, PREFIX)[:] = 7
        assert int(memory.view(0, PREFIX, timeout=0).sum()) == 7 * PREFIX


@pytest.mark.parametrize("step", STEPS)
def test_resizing_to_the_same_size_retries(step: str) -> None:
    with FaultPlan() as plan:
        fail_step(plan, step)
        memory = failing(plan)
    memory.view(0, PREFIX)[:] = 7
    memory.resize(SIZE)
    memory.wait_usable(SIZE, 20)
    assert memory.failure is None
    assert memory.committed == SIZE
    assert int(memory.view().sum()) == 7 * PREFIX
    memory.close()


def test_resizing_to_a_larger_size_retries() -> None:
    with FaultPlan() as plan:
        plan.fail(POPULATE, errno.ENOMEM)
        memory = HostMem(2 * MIB, MIB, device="cpu", fill_threads=1)
        with pytest.raises(HostOOMError):
            memory.wait_usable(MIB)
    memory.resize(2 * MIB)
    memory.wait_usable(2 * MIB, 20)
    memory.close()


@pytest.mark.parametrize("size", [PREFIX, PREFIX - 5, 0])
def test_resizing_to_the_prefix_or_below_clears_the_failure(plan: FaultPlan, size: int) -> None:
    fail_step(plan, "populate")
    with failing(plan) as memory:
        memory.resize(size)
        assert memory.failure is None
        assert memory.progress.state == "filled"
        memory.wait_usable(size, 0)


def test_a_smaller_size_above_the_prefix_is_tried_too(plan: FaultPlan) -> None:
    fail_step(plan, "populate")
    with failing(plan) as memory:
        before = len(plan.calls(POPULATE))
        memory.resize(SIZE - UNIT)
        with pytest.raises(HostOOMError):
            memory.wait_usable(SIZE - UNIT, 20)
        assert len(plan.calls(POPULATE)) == before + 1


def test_each_waiter_gets_an_error_of_its_own_from_the_cause(
    plan: FaultPlan, waiting: Waiting, spawn: Spawn, until: Until
) -> None:
    hold = plan.hold(POPULATE)
    plan.fail(POPULATE, errno.ENOMEM)
    with HostMem(MIB, device="cpu", fill_threads=1) as memory:
        hold.wait_reached()
        futures = [spawn(memory.wait_usable, end) for end in (1, MIB)]
        until(lambda: memory._mark.waiting == 2)
        hold.release()
        errors = [future.exception(10) for future in futures]
        assert [type(error) for error in errors] == [HostOOMError] * 2
        assert [error.__cause__ for error in errors if error] == [memory.failure] * 2
        assert errors[0] is not errors[1]


def test_a_failure_reaches_callbacks(plan: FaultPlan) -> None:
    seen: list[BaseException | None] = []
    fail_step(plan, "register")
    with failing(plan) as memory:
        memory.add_usable_callback(SIZE, seen.append)
        memory.add_usable_callback(PREFIX, seen.append)
        assert callbacks.drain(10)
    assert isinstance(seen[0], RegistrationError)
    assert seen[1] is None


def test_the_errors_of_a_failed_fill_pickle_with_their_facts(plan: FaultPlan) -> None:
    fail_step(plan, "register")
    with failing(plan) as memory:
        cause = memory.failure
        assert isinstance(cause, RegistrationError)
        again = pickle.loads(pickle.dumps(cause))
        assert (str(again), again.offset, again.code) == (str(cause), PREFIX, 1)
        with pytest.raises(RegistrationError) as caught:
            memory.wait_usable(SIZE)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.end, again.committed) == (SIZE, PREFIX)


def test_waiting_in_the_constructor_raises_what_went_wrong_and_keeps_nothing(
    plan: FaultPlan,
) -> None:
    plan.fail(POPULATE, errno.ENOMEM)
    with pytest.raises(HostOOMError):
        HostMem(MIB, device="cpu", wait=True)
    (reserved,) = plan.calls("munmap")
    assert reserved[1] == MIB


# ------------------------------------------------------------------------------ populating


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_an_error_that_was_handled_holds_no_view(
    plan: FaultPlan, waiting: Waiting, spawn: Spawn, until: Until
) -> None:
    def use(memory: HostMem) -> int:
        view = memory.view(0, MIB)
        try:
            memory.wait_usable(SIZE, 20)
        except HostmemError:
            return view.nbytes
        pytest.fail("it was to fail")

    hold = plan.hold(POPULATE, at=3)
    plan.fail(POPULATE, errno.ENOMEM, at=3)
    memory = HostMem(SIZE, device="cpu", fill_threads=1)
    hold.wait_reached()
    parked = spawn(use, memory)
    until(lambda: memory._mark.waiting)
    hold.release()
    assert parked.result(10) == MIB  # told while it waited
    assert use(memory) == MIB  # told at once
    memory.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_where_populating_is_not_known_pages_are_touched(plan: FaultPlan, number: int) -> None:
    plan.fail(POPULATE, number, times=None)
    with HostMem(2 * MIB, device="cpu", wait=True) as memory:
        assert resident(memory) == 2 * MIB
        assert not memory.view().any()


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_populate_is_made_again(plan: FaultPlan, number: int) -> None:
    plan.fail(POPULATE, number, times=3)
    with HostMem(MIB, device="cpu", fill_threads=1, wait=True) as memory:
        assert memory.committed == MIB
    first, second, third, fourth, *rest = plan.calls(POPULATE)
    assert first == second == third == fourth
    assert len(rest) == 1


def test_an_errno_that_is_not_about_memory_surfaces_as_it_is(plan: FaultPlan) -> None:
    fail_step(plan, "populate refused")
    with failing(plan) as memory:
        assert isinstance(memory.failure, OSError)
        assert memory.failure.errno == errno.EFAULT
        with pytest.raises(OSError, match="resize") as caught:
            memory.wait_usable(SIZE)
        assert caught.value.errno == errno.EFAULT
        assert caught.value.__cause__ is memory.failure


# ----------------------------------------------------------------------------- registering


@pytest.mark.parametrize("code", [1, 2])
def test_a_refused_range_is_halved_until_the_driver_takes_it(plan: FaultPlan, code: int) -> None:
    plan.fail(REGISTER, code, times=None, when=lambda _, nbytes: nbytes > 256 * KIB)
    with HostMem(2 * MIB, device="cpu", wait=True) as memory:
        assert memory.registrations == [(n * 256 * KIB, 256 * KIB) for n in range(8)]


def test_halves_are_whole_slots(plan: FaultPlan) -> None:
    slot = 96 * KIB
    plan.fail(REGISTER, 1, times=None, when=lambda _, nbytes: nbytes > 200 * KIB)
    with HostMem(21 * slot, device="cpu", slot_size=slot, wait=True) as memory:
        found = memory.registrations
        assert {nbytes for _, nbytes in found} <= {slot, 2 * slot}
        assert sum(nbytes for _, nbytes in found) == 21 * slot


@pytest.mark.parametrize("code", [800, 801])
def test_what_is_never_permitted_is_not_tried_again_in_halves(plan: FaultPlan, code: int) -> None:
    plan.fail(REGISTER, code, times=None)
    with failing(plan):
        assert len(plan.calls(REGISTER)) == 1


def test_the_parts_that_were_registered_before_the_refusal_are_kept(plan: FaultPlan) -> None:
    # The last quarter of the first registration is refused, however small.
    first: list[int] = []

    def in_last_quarter(address: int, nbytes: int) -> bool:
        first.append(address)
        return address + nbytes > first[0] + 768 * KIB

    plan.fail(REGISTER, 1, times=None, when=in_last_quarter)
    with HostMem(MIB, device="cpu") as memory:
        with pytest.raises(RegistrationError):
            memory.wait_usable(MIB, 20)
        assert memory.committed == 768 * KIB
        assert sum(nbytes for _, nbytes in memory.registrations) == 768 * KIB


@pytest.mark.parametrize(
    ("code", "kind"), [(1, CuError), (2, CuOOMError), (801, CuError), (712, CuError)]
)
def test_a_refusal_says_what_the_driver_answered(
    plan: FaultPlan, code: int, kind: type[HostmemError]
) -> None:
    plan.fail(REGISTER, code, times=None)
    with failing(plan) as memory:
        failure = memory.failure
        assert isinstance(failure, RegistrationError)
        assert failure.code == code
        assert failure.offset == 0
        assert isinstance(failure.__cause__, kind)


@pytest.mark.parametrize(("policy", "level"), [("raise", logging.ERROR), ("stop", logging.INFO)])
def test_a_stopped_fill_is_an_error_in_the_log_unless_told_to_stop_quietly(
    plan: FaultPlan, caplog: pytest.LogCaptureFixture, policy: str, level: int
) -> None:
    fail_step(plan, "not supported")
    with caplog.at_level(logging.INFO, "hostmem"), failing(plan, policy):
        pass
    assert [record.levelno for record in caplog.records] == [logging.INFO, level]  # the route
    assert f"stopped at {PREFIX} bytes" in caplog.text


def test_a_fill_told_to_stop_keeps_its_prefix_and_tells_who_asks(plan: FaultPlan) -> None:
    fail_step(plan, "not supported")
    with failing(plan, "stop") as memory:
        assert memory.committed == PREFIX
        memory.wait_usable(PREFIX, 0)
        with pytest.raises(RegistrationError):
            memory.wait_usable(PREFIX + 1)


def test_pageable_memory_is_usable_and_listed(plan: FaultPlan, cpu: CpuDevice) -> None:
    # The second registration, of 1 MiB, is refused, and so is every part of it.
    plan.fail(REGISTER, 1, at=2, times=None)
    plan.fail(REGISTER, 0)
    with HostMem(
        4 * MIB, device="cpu", on_register_failure="pageable", commit_unit=MIB, wait=True
    ) as memory:
        assert memory.failure is None
        assert memory.quarantined == [(n * MIB, MIB) for n in (1, 2, 3)]
        assert memory.registrations == [(0, MIB)]
        assert list(cpu.registered) == [(memory.address, MIB)]
        memory.view()[:] = 5
        assert memory.boundary_after(MIB) == 2 * MIB


def test_only_what_is_refused_is_pageable(plan: FaultPlan) -> None:
    base: list[int] = []

    def touches_two_bad_pages(address: int, nbytes: int) -> bool:
        base.append(address)
        bad = base[0] + 300 * PAGE
        return address < bad + 2 * PAGE and bad < address + nbytes

    plan.fail(REGISTER, 1, times=None, when=touches_two_bad_pages)
    with HostMem(2 * MIB, device="cpu", on_register_failure="pageable", wait=True) as memory:
        assert memory.quarantined == [(300 * PAGE, 2 * PAGE)]
        registered = sum(nbytes for _, nbytes in memory.registrations)
        assert registered == 2 * MIB - 2 * PAGE
        assert memory.boundary_after(300 * PAGE) == 302 * PAGE
        assert not memory.same_registration(299 * PAGE, 300 * PAGE)


def test_a_driver_that_refuses_everything_is_not_asked_about_every_page(
    plan: FaultPlan, caplog: pytest.LogCaptureFixture
) -> None:
    plan.fail(REGISTER, 2, times=None)
    with (
        caplog.at_level(logging.WARNING, "hostmem"),
        HostMem(24 * MIB, device="cpu", on_register_failure="pageable", wait=True) as memory,
    ):
        pieces = [1, 1, 2, 4, 8, 8]
        assert [nbytes // MIB for _, nbytes in memory.quarantined] == pieces
        # Page by page, 256 of them; then piece by piece.
        assert len(plan.calls(REGISTER)) < 600
        assert len(caplog.records) == len(pieces)


def test_pageable_memory_is_given_back_like_any_other(plan: FaultPlan) -> None:
    plan.fail(REGISTER, 801, at=2)
    with HostMem(4 * MIB, device="cpu", on_register_failure="pageable", wait=True) as memory:
        memory.resize(MIB)
        assert memory.quarantined == []
        assert resident(memory) == MIB
        memory.resize(4 * MIB)
        memory.wait_usable(4 * MIB)
        assert memory.quarantined == []
    assert len(plan.calls(UNREGISTER)) == 4  # 2 MiB by the shrink; 1, 1 and 2 MiB by the close


# ------------------------------------------------------------------------ the reservation


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        ("mmap", errno.ENOMEM, HostOOMError),
        ("mmap", errno.EPERM, OSError),
        ("madvise(MADV_DONTFORK)", errno.EINVAL, OSError),
        ("madvise(MADV_NOHUGEPAGE)", errno.ENOMEM, OSError),
    ],
)
def test_a_reservation_that_fails_keeps_nothing(
    plan: FaultPlan, name: str, error: int, kind: type[Exception]
) -> None:
    plan.fail(name, error)
    with pytest.raises(kind):
        HostMem(MIB, device="cpu")
    assert len(plan.calls("munmap")) == (name != "mmap")
    assert plan.calls("mprotect") == []


def test_a_kernel_without_huge_pages_is_no_error(plan: FaultPlan) -> None:
    plan.fail("madvise(MADV_NOHUGEPAGE)", errno.EINVAL)
    with HostMem(MIB, device="cpu", wait=True) as memory:
        assert memory.committed == MIB


def test_no_placement_that_was_insisted_on_keeps_nothing(plan: FaultPlan) -> None:
    plan.fail("mbind", errno.EPERM)
    with pytest.raises(HostmemError, match="strict placement"):
        HostMem(MIB, device="cpu", numa_node=0, allow_remote_numa_fallback=False)
    assert [nbytes for _, nbytes in plan.calls("munmap")] == [MIB]


# ----------------------------------------------------------------- unregistering, giving back


@pytest.fixture
def leaked(cpu: CpuDevice) -> Iterator[None]:
    """Clean up what the test makes the library leak."""
    yield
    for start, nbytes in list(cpu.registered):
        cpu.unregister(start)
        linux.unmap(start, nbytes)


@pytest.mark.usefixtures("leaked")
def test_memory_that_the_driver_does_not_let_go_is_left_mapped_and_reported(
    cpu: CpuDevice, maps: Maps, caplog: pytest.LogCaptureFixture
) -> None:
    memory = HostMem(2 * MIB, device="cpu", wait=True)
    memory.view()[:] = 9
    address = memory.address
    with FaultPlan() as plan, caplog.at_level(logging.ERROR, "hostmem"):
        plan.fail(UNREGISTER, 1, at=2, times=None)
        memory.close()
    assert memory.closed
    assert plan.calls("munmap") == []
    assert list(cpu.registered) == [(address, MIB)]
    assert maps(address, MIB) == [(0, MIB, "rw-p")]
    assert f"{2 * MIB} bytes at {address:#x} are leaked on purpose" in caplog.text


@pytest.mark.usefixtures("leaked")
def test_closing_again_does_not_unmap_what_was_leaked(cpu: CpuDevice) -> None:
    memory = HostMem(MIB, device="cpu", wait=True)
    with FaultPlan() as plan:
        plan.fail(UNREGISTER, 1)
        memory.close()
        memory.close()
    assert plan.calls("munmap") == []
    assert len(cpu.registered) == 1


def test_a_shrink_keeps_what_the_driver_does_not_let_go(
    plan: FaultPlan, caplog: pytest.LogCaptureFixture
) -> None:
    # Registrations end at 1, 2 and 4 MiB; the one in the middle does not go.
    with HostMem(4 * MIB, device="cpu", wait=True) as memory:
        memory.view()[:] = 9
        plan.fail(UNREGISTER, 1, at=2)
        with caplog.at_level(logging.ERROR, "hostmem"):
            memory.resize(0)
        assert (memory.size, memory.committed) == (0, 0)
        assert memory.registrations == [(0, MIB), (MIB, MIB)]
        assert resident(memory) == 2 * MIB
        assert "stay registered" in caplog.text
        memory.resize(4 * MIB)
        memory.wait_usable(4 * MIB)
        assert int(memory.view(0, 2 * MIB).sum()) == 9 * 2 * MIB


@pytest.mark.parametrize(("name", "error"), [(DISCARD, errno.EINVAL), ("mprotect", errno.ENOMEM)])
def test_a_failure_is_reported_although_giving_back_fails_too(
    plan: FaultPlan, name: str, error: int
) -> None:
    fail_step(plan, "populate")
    plan.fail(
        name, error, times=None, when=lambda *args: name != "mprotect" or args[-1] == NO_ACCESS
    )
    with failing(plan) as memory:
        assert isinstance(memory.failure, HostOOMError)
        assert memory.failure.call == "madvise"


@pytest.mark.parametrize(("name", "error"), [(DISCARD, errno.EINVAL), ("mprotect", errno.ENOMEM)])
def test_a_shrink_that_cannot_give_back_is_told_and_can_be_grown_again(
    name: str, error: int
) -> None:
    with HostMem(4 * MIB, device="cpu", wait=True) as memory:
        data = np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)[: 4 * MIB]
        memory.view()[:] = data
        with FaultPlan() as plan:
            plan.fail(name, error)
            with pytest.raises((OSError, HostOOMError)):
                memory.resize(MIB)
        assert (memory.size, memory.committed) == (MIB, MIB)
        assert memory.registrations == [(0, MIB)]
        memory.resize(4 * MIB)
        memory.wait_usable(4 * MIB, 20)
        assert np.array_equal(memory.view(0, MIB), data[:MIB])


# ----------------------------------------------------------------------------------- races


def worker_is_held_while_populating_fails(plan: FaultPlan, until: Until) -> HostMem:
    """Make a memory whose first registration is held, and whose next piece could not be had."""
    hold = plan.hold(REGISTER)
    plan.fail(POPULATE, errno.ENOMEM, at=3)
    memory = HostMem(4 * MIB, device="cpu", fill_threads=1)
    hold.wait_reached()
    names = {"hostmem-populate-0"}
    until(lambda: not names & {thread.name for thread in threading.enumerate()})
    return memory


def test_a_retry_before_a_failed_populate_is_noticed_is_not_lost(
    plan: FaultPlan, until: Until
) -> None:
    with worker_is_held_while_populating_fails(plan, until) as memory:
        memory.resize(4 * MIB)
        for hold in plan._holds:
            hold.release()
        memory.wait_usable(4 * MIB, 20)
        assert memory.failure is None


def test_a_retry_is_not_failed_by_what_a_thread_of_the_fill_before_meets(
    plan: FaultPlan, until: Until
) -> None:
    if fill_thread_budget() < 2:
        pytest.skip("one thread populates at a time here")
    register = plan.hold(REGISTER)
    first, second = plan.hold(POPULATE, at=3), plan.hold(POPULATE, at=4)
    plan.fail(POPULATE, errno.ENOMEM, at=3, times=2)
    with HostMem(4 * MIB, device="cpu", fill_threads=2) as memory:
        for hold in (register, first, second):
            hold.wait_reached()
        first.release()
        until(lambda: memory._core.filler._populate_error)
        memory.resize(4 * MIB)
        second.release()  # fails after the retry began
        register.release()
        memory.wait_usable(4 * MIB, 20)
        assert memory.failure is None


def test_a_retry_before_a_failure_is_told_is_not_undone_by_it(plan: FaultPlan) -> None:
    # The worker is at giving back what it had populated; it reports after that.
    hold = plan.hold(DISCARD)
    plan.fail(REGISTER, 801)
    with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
        hold.wait_reached()
        memory.resize(4 * MIB)
        hold.release()
        memory.wait_usable(4 * MIB, 20)
        assert memory.failure is None
        assert memory.progress.state == "filled"


def test_a_failure_during_a_shrink_is_not_told_of_the_new_size(
    plan: FaultPlan, spawn: Spawn, until: Until
) -> None:
    hold = plan.hold(POPULATE, at=3)
    plan.fail(POPULATE, errno.ENOMEM, at=3)
    with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
        hold.wait_reached()
        memory.wait_usable(MIB)
        shrinking = spawn(memory.resize, MIB)
        until(lambda: memory.size == MIB)
        until(lambda: not memory._core.filler._running)
        hold.release()
        shrinking.result(10)
        assert memory.failure is None
        assert memory.progress.state == "filled"


def test_a_failure_during_close_is_not_reported(
    plan: FaultPlan, spawn: Spawn, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    hold = plan.hold(REGISTER)
    plan.fail(REGISTER, 801)
    memory = HostMem(4 * MIB, device="cpu", fill_threads=1)
    hold.wait_reached()
    with caplog.at_level(logging.INFO, "hostmem"):
        closing = spawn(memory.close)
        until(lambda: not memory._core.filler._running)
        hold.release()
        closing.result(10)
    assert caplog.records == []


# --------------------------------------------------------------------------------- threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let threads of a name not start, as where RLIMIT_NPROC is reached."""
    start = threading.Thread.start

    def refuse(prefix: str) -> None:
        def refused(thread: threading.Thread) -> None:
            if thread.name.startswith(prefix):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)

    yield refuse
    monkeypatch.undo()


@pytest.mark.parametrize("prefix", ["hostmem-fill", "hostmem-populate-0", "hostmem-populate-1"])
def test_a_fill_that_cannot_start_its_threads_fails_and_can_be_retried(
    no_threads: Callable[[str], None], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_threads(prefix)
    with HostMem(SIZE, device="cpu", fill_threads=2) as memory:
        # One thread that did start may have filled all of it before the other was missed.
        if prefix != "hostmem-populate-1":
            with pytest.raises(HostmemError, match="can't start new thread"):
                memory.wait_usable(SIZE, 20)
        monkeypatch.undo()
        memory.resize(SIZE)
        memory.wait_usable(SIZE, 20)
