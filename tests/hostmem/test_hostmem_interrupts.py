"""Ctrl-C, other threads and the limits of the process, in the middle of what is done to memory."""

from __future__ import annotations

import copy
import errno
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest

from hostmem import CpuDevice, HostMem, HostOOMError, StaticHostMem, procfs
from hostmem.core import Core
from hostmem.testing import FaultPlan
from tests.hostmem.conftest import Child, Maps
from tests.threads import Spawn, Until

MIB = 1 << 20
UNIT = 4 * MIB
POPULATE = "madvise(MADV_POPULATE_WRITE)"

Action = Callable[[HostMem], object]


class Interrupted(CpuDevice):
    """A device whose call number ``at`` is made, and then interrupted by Ctrl-C."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.at = 0

    def _made(self, call: str) -> None:
        if call == self.call and self.at:
            self.at -= 1
            if not self.at:
                raise KeyboardInterrupt

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        self._made("register")

    def unregister(self, address: int) -> None:
        super().unregister(address)
        self._made("unregister")


def resume(memory: HostMem) -> None:
    memory.resume_registration()


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    ("call", "before", "action"),
    [
        ("register", lambda m: m.release(0, 2 * UNIT), lambda m: m.recommit(0, 2 * UNIT)),
        ("register", lambda m: m.suspend_registration(), resume),
        ("register", lambda m: None, lambda m: m.consolidate()),
        ("unregister", lambda m: None, lambda m: m.consolidate()),
        ("unregister", lambda m: None, lambda m: m.release(0, 2 * UNIT)),
        ("unregister", lambda m: None, lambda m: m.suspend_registration()),
        ("unregister", lambda m: None, lambda m: m.resize(UNIT)),
    ],
    ids=["recommit", "resume", "consolidate", "consolidate-", "release", "suspend", "shrink"],
)
def test_ctrl_c_after_a_call_of_the_driver_loses_no_registration(
    call: str, before: Action, action: Action, at: int, maps: Maps
) -> None:
    device = Interrupted(call)
    memory = HostMem(4 * UNIT, device=device, commit_unit=UNIT, wait=True)
    memory.view(3 * UNIT, UNIT)[:] = 9
    before(memory)
    device.at = at
    try:
        action(memory)
    except KeyboardInterrupt:
        assert not device.at
    device.at = 0
    known = {(memory.address + start, n) for start, n in memory.registrations}
    assert {(start, n) for start, n in device.registered} <= known  # none that nobody knows of
    if memory.is_usable(4 * UNIT, 3 * UNIT):
        assert memory.view(3 * UNIT, UNIT).min() == 9
    memory.resume_registration()
    for offset, nbytes in memory.released:
        memory.recommit(offset, nbytes)
    memory.wait_usable(memory.size, 20)
    address = memory.address
    memory.close()
    assert list(device.registered) == []
    assert maps(address, 4 * UNIT) == []


def test_ctrl_c_while_closing_takes_two_calls(maps: Maps) -> None:
    device = Interrupted("unregister")
    memory = HostMem(4 * UNIT, device=device, commit_unit=UNIT, wait=True)
    address, device.at = memory.address, 2
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    memory.close()
    assert list(device.registered) == []
    assert maps(address, 4 * UNIT) == []


def test_a_mapping_that_is_not_given_back_is_tried_again(maps: Maps) -> None:
    memory = HostMem(UNIT, device="cpu", wait=True)
    with FaultPlan() as plan:
        plan.fail("munmap", errno.ENOMEM)
        with pytest.raises(OSError, match="munmap"):
            memory.close()
        assert maps(memory.address, UNIT)
        memory.close()
    assert maps(memory.address, UNIT) == []


@pytest.mark.parametrize("call", ["mprotect", "madvise(MADV_DONTNEED)"])
def test_a_shrink_that_failed_is_finished_by_the_next_resize(call: str) -> None:
    with HostMem(4 * UNIT, device="cpu", commit_unit=UNIT, wait=True) as memory:
        with FaultPlan() as plan:
            plan.fail(call, errno.ENOMEM)
            with pytest.raises((OSError, HostOOMError)):
                memory.resize(UNIT)
        assert memory.size == UNIT
        memory.resize(UNIT)
        assert memory.placement().resident == UNIT


# ------------------------------------------------------------------------------ other threads


def test_usable_bytes_are_viewed_while_the_rest_is_busy(spawn: Spawn) -> None:
    with FaultPlan() as plan, HostMem(4 * UNIT, device="cpu", commit_unit=UNIT, wait=True) as m:
        hold = plan.hold("cuMemHostUnregister")
        busy = spawn(m.suspend_registration)
        hold.wait_reached()
        assert m.view(0, UNIT, timeout=0).nbytes == UNIT
        hold.release()
        busy.result()


def test_a_worker_that_cannot_start_is_not_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn, until: Until
) -> None:
    """The one before it is still giving back what it had taken when the next one starts."""
    with FaultPlan() as plan:
        hold = plan.hold("madvise(MADV_DONTNEED)")
        plan.fail(POPULATE, errno.ENOMEM, at=8)
        with HostMem(16 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()  # the first worker failed and takes back

            def refuse(self: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                memory.resize(16 * MIB)  # no thread for the second
            memory.resize(16 * MIB)  # the third waits for the first
            assert not memory.is_usable(16 * MIB)
            hold.release()
            memory.wait_usable(16 * MIB, 20)
            memory.view()[:] = 7


def test_whatever_ends_a_populating_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise MemoryError("no room for a Python object")

    monkeypatch.setattr("hostmem.admission.Admission.grant", fails)
    with (
        HostMem(16 * MIB, device="cpu", fill_threads=1) as memory,
        pytest.raises(Exception, match="no room for a Python object"),
    ):
        memory.wait_usable(16 * MIB, 20)


def test_a_rate_of_next_to_nothing_is_a_rate(until: Until) -> None:
    with (
        FaultPlan() as plan,
        HostMem(16 * MIB, device="cpu", fill_threads=1, fill_rate=1e-5) as memory,
    ):
        until(lambda: plan.calls(POPULATE))
        memory.pause_fill()
        memory.resume_fill()
        assert memory.progress.state == "filling"  # for the next 1,600 years


def test_recommit_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with HostMem(128 * MIB, device="cpu", fill_threads=2, wait=True) as memory:
        memory.release(0, 128 * MIB)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        memory.recommit(0, 128 * MIB)
        monkeypatch.undo()
        memory.view()[:] = 1


# ------------------------------------------------------------------------- limits and owners


def test_without_descriptors_there_is_no_grant(child: Child) -> None:
    """A limit that cannot be read just now is no reason to take memory without end."""
    done = child(
        """
        import os, resource
        from hostmem import HostMem
        memory = HostMem("256MiB", 0, device="cpu", fill_threads=1)
        memory.resize(1)
        memory.wait_usable(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        memory.resize("256MiB")
        try:
            memory.wait_usable(256 << 20)
        except OSError as error:
            print(type(error).__name__, error.errno)
        for fd in taken:
            os.close(fd)
        memory.resize("256MiB")
        memory.wait_usable(256 << 20)
        memory.close()
        """
    )
    assert done.stderr.splitlines()[1:] == [], done.stderr
    assert done.stdout.split() == ["OSError", str(errno.EMFILE)]


def test_a_file_that_is_not_there_is_no_error_and_one_that_cannot_be_opened_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert procfs.read("/proc/self/nothing") == ""

    def exhausted(*_: object) -> int:
        raise OSError(errno.ENFILE, "no more")

    monkeypatch.setattr("hostmem.procfs.os.open", exhausted)
    with pytest.raises(OSError, match="no more"):
        procfs.read("/proc/self/status")


def test_memory_is_neither_copied_nor_pickled() -> None:
    with HostMem(MIB, device="cpu") as memory, StaticHostMem(4096, device="cpu") as static:
        for owner in (memory, static):
            for way in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="owns what it holds"):
                    way(owner)


def test_a_view_keeps_memory_that_was_shut_down() -> None:
    memory = HostMem(MIB, device="cpu", wait=True)
    view = memory.view()
    core: Core = memory._core
    core.shut_down()  # as a signal does
    with pytest.raises(BufferError):
        memory.close()
    view[:] = 1
    del view
    memory.close()


def test_numbers_may_be_numpys() -> None:
    with HostMem(2 * UNIT, device="cpu", commit_unit=UNIT, wait=True) as memory:
        for kind in (np.int32, np.int64, np.uint64):
            assert memory.view(kind(UNIT), kind(8)).nbytes == 8
            memory.release(kind(UNIT), kind(UNIT))
            memory.recommit(kind(UNIT), kind(UNIT))
        with pytest.raises(TypeError):
            memory.release(1.5, UNIT)  # type: ignore[arg-type]


def test_a_subclass_may_have_a_repr_of_what_it_has_not_yet() -> None:
    class Pool(HostMem):
        def __init__(self) -> None:
            super().__init__(MIB, device="cpu")
            self.label = "a pool"

        def __repr__(self) -> str:
            return self.label

    with Pool() as pool:
        assert repr(pool) == "a pool"


def test_a_callback_is_called_with_an_errno_that_was_before_it(
    caplog: pytest.LogCaptureFixture, until: Until
) -> None:
    told: list[BaseException | None] = []
    with FaultPlan() as plan:
        plan.fail(POPULATE, errno.EFAULT, times=None)
        with HostMem(MIB, device="cpu") as memory:
            until(lambda: memory.failure)
            memory.add_usable_callback(MIB, told.append)
            until(lambda: told)
            assert isinstance(told[0], OSError)
