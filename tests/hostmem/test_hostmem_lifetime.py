"""How memory ends: closed, dropped, in a cycle, at exit, in a forked child; and what it leaves."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hostmem import ClosedError, CpuDevice, HostMem
from hostmem.courier import closings
from hostmem.testing import FaultPlan

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child, Maps
    from tests.threads import Spawn, Until

KIB, MIB = 1 << 10, 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


def filled(nbytes: int = MIB) -> HostMem:
    return HostMem(nbytes, device="cpu", wait=True)


# --------------------------------------------------------------------------------- closing


def test_closing_twice_is_closing_once() -> None:
    memory = filled()
    with FaultPlan() as plan:
        memory.close()
        memory.close()
    assert len(plan.calls("munmap")) == len(plan.calls("cuMemHostUnregister")) == 1


def test_closing_from_many_threads_at_once_is_closing_once(spawn: Spawn) -> None:
    memory = HostMem(16 * MIB, device="cpu")
    with FaultPlan() as plan:
        for future in [spawn(memory.close) for _ in range(8)]:
            future.result(20)
    assert len(plan.calls("munmap")) == 1
    assert memory.closed


def test_a_close_beside_another_returns_when_the_memory_is_given_back(
    spawn: Spawn, until: Until
) -> None:
    memory = filled()
    with FaultPlan() as plan:
        hold = plan.hold("cuMemHostUnregister")
        first = spawn(memory.close)
        hold.wait_reached()
        second = spawn(memory.close)
        assert memory.closed
        assert not second.done()
        hold.release()
        second.result(10)
        assert len(plan.calls("munmap")) == 1
        first.result(10)


def test_ranges_are_unregistered_from_the_top(cpu: CpuDevice) -> None:
    memory = filled(8 * MIB)
    starts = [start for start, _ in cpu.registered]
    assert len(starts) == 4
    with FaultPlan() as plan:
        memory.close()
    assert plan.calls("cuMemHostUnregister") == [(start,) for start in reversed(starts)]


def test_memory_is_unregistered_before_it_is_unmapped() -> None:
    memory = filled(2 * MIB)
    with FaultPlan() as plan:
        memory.close()
    names = [name for name, _ in plan.log]
    assert names == ["cuMemHostUnregister", "cuMemHostUnregister", "munmap"]


CALLS: dict[str, Any] = {
    "wait_usable": lambda memory: memory.wait_usable(0),
    "view": lambda memory: memory.view(0, 1),
    "view of everything": lambda memory: memory.view(),
    "view of nothing": lambda memory: memory.view(0, 0),
    "view outside": lambda memory: memory.view(99 * MIB, 1),
    "resize": lambda memory: memory.resize(MIB),
    "pause": lambda memory: memory.pause_fill(),
    "resume": lambda memory: memory.resume_fill(),
    "placement": lambda memory: memory.placement(),
    "boundary_after": lambda memory: memory.boundary_after(0),
    "same_registration": lambda memory: memory.same_registration(0, 1),
    "with": lambda memory: memory.__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_once_closed_every_call_says_so(call: Any) -> None:
    memory = filled()
    memory.close()
    with pytest.raises(ClosedError):
        call(memory)


def test_once_closed_nothing_is_usable_and_nothing_registered() -> None:
    memory = filled()
    memory.close()
    assert memory.closed
    assert not memory.is_usable(0)
    assert (memory.committed, memory.registrations, memory.quarantined) == (0, [], [])


def test_the_capacity_is_told_after_closing_too() -> None:
    memory = filled()
    address = memory.address
    memory.close()
    assert (memory.address, memory.capacity, memory.size) == (address, MIB, MIB)


def test_leaving_the_block_closes() -> None:
    with filled() as memory:
        assert not memory.closed
    assert memory.closed


def test_an_error_in_the_block_closes_all_the_same() -> None:
    with pytest.raises(KeyError), filled() as memory:
        raise KeyError("mine")
    assert memory.closed


def test_leaving_the_block_under_a_view_is_an_error() -> None:
    memory = filled()
    view = memory.view(0, 16)
    with pytest.raises(BufferError, match="live views"), memory:
        pass
    assert not memory.closed
    assert view.nbytes == 16
    del view
    memory.close()


def test_an_error_in_the_block_gets_a_note_when_a_view_keeps_the_memory_open() -> None:
    memory = filled()
    view = memory.view(0, 16)
    with pytest.raises(KeyError) as caught, memory:
        raise KeyError("mine")
    assert ["the memory stays open: live views" in n for n in caught.value.__notes__] == [True]
    assert not memory.closed
    del view
    memory.close()


def test_an_interrupted_close_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = filled(2 * MIB)
    registrations = memory._core.registrations
    unregister = registrations.unregister_down_to

    def interrupted(size: int) -> None:
        unregister(MIB)
        raise KeyboardInterrupt

    monkeypatch.setattr(registrations, "unregister_down_to", interrupted)
    with FaultPlan() as plan:
        with pytest.raises(KeyboardInterrupt):
            memory.close()
        assert plan.calls("munmap") == []
        monkeypatch.undo()
        memory.close()
    assert len(plan.calls("cuMemHostUnregister")) == 2
    assert len(plan.calls("munmap")) == 1


def test_an_interrupted_shrink_leaves_the_fill_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        with HostMem(8 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            filler = memory._core.filler
            worker = filler._worker
            assert worker is not None

            join, me = worker.join, threading.current_thread()

            def interrupted(timeout: float | None = None) -> None:
                if threading.current_thread() is me:  # Ctrl-C while it waits for the fill to stop
                    raise KeyboardInterrupt
                join(timeout)

            monkeypatch.setattr(worker, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                memory.resize(4 * MIB)
            monkeypatch.undo()
            hold.release()
            memory.wait_usable(4 * MIB, 20)
            memory.view()[:] = 1


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    filled().close()  # what is started and opened once per process
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with HostMem(4 * MIB, device="cpu", fill_threads=3) as memory:
            memory.view(0, MIB)[:] = 1
            memory.resize(MIB)
            memory.resize(4 * MIB)
            memory.placement()
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_filled_memory_has_no_thread(until: Until) -> None:
    with filled():
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("hostmem-fill")])


# ------------------------------------------------------------------------------- dropping


def test_one_that_is_dropped_is_closed_with_a_warning(cpu: CpuDevice) -> None:
    memory = filled()
    address = memory.address
    with FaultPlan() as plan:
        with pytest.warns(ResourceWarning, match=r"<HostMem 1 MiB at .*> was dropped without"):
            del memory
        assert closings.drain(10)
    assert list(cpu.registered) == []
    assert plan.calls("munmap") == [(address, MIB)]


def test_one_that_is_dropped_while_it_fills_is_closed(cpu: CpuDevice) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        memory = HostMem(64 * MIB, device="cpu", fill_threads=1)
        hold.wait_reached()
        with pytest.warns(ResourceWarning):
            del memory
        hold.release()
        assert closings.drain(20)
    assert len(plan.calls("munmap")) == 1


def test_one_that_is_closed_is_dropped_in_silence() -> None:
    memory = filled()
    memory.close()
    with FaultPlan() as plan:
        del memory
        gc.collect()
        assert closings.drain(10)
    assert plan.log == []


def test_one_that_was_never_built_is_dropped_in_silence() -> None:
    with pytest.raises(ValueError, match="capacity"):
        HostMem(0, device="cpu")
    gc.collect()


def test_a_garbage_cycle_is_closed_on_another_thread(cpu: CpuDevice) -> None:
    closers: list[str] = []

    def note(*_: int) -> bool:
        closers.append(threading.current_thread().name)
        return False

    class Engine:
        def __init__(self) -> None:
            self.memory = filled()
            self.me = self

    engine = Engine()
    gone = weakref.ref(engine.memory)
    with FaultPlan() as plan:
        plan.fail("munmap", 0, when=note)
        del engine
        with pytest.warns(ResourceWarning, match="dropped without close"):
            gc.collect()
        assert closings.drain(10)
    assert gone() is None
    assert closers == ["hostmem-closings"]


def test_a_warning_that_is_made_an_error_does_not_keep_the_memory(child: Child) -> None:
    done = child(
        """
        from hostmem import HostMem, resolve_device
        from hostmem.courier import closings
        memory = HostMem("1MiB", device="cpu", wait=True)
        del memory
        assert closings.drain(10)
        print(list(resolve_device("cpu").registered))
        """,
        "-Werror::ResourceWarning",
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0)


def test_a_live_view_keeps_the_memory(cpu: CpuDevice) -> None:
    memory = filled()
    gone = weakref.ref(memory)
    part = memory.view()[10:20]
    part[:] = 7
    del memory
    gc.collect()
    assert gone() is not None
    assert part.tolist() == [7] * 10
    assert len(cpu.registered) == 1
    with pytest.warns(ResourceWarning):
        del part
    assert closings.drain(10)
    assert gone() is None


def test_a_memoryview_keeps_the_memory() -> None:
    memory = filled()
    gone = weakref.ref(memory)
    array = np.frombuffer(memory.view(), np.uint8)
    del memory
    gc.collect()
    assert gone() is not None
    array.sum()
    with pytest.warns(ResourceWarning):
        del array
    assert closings.drain(10)
    assert gone() is None


def test_the_fill_does_not_keep_the_memory() -> None:
    memory = HostMem(MIB, 0, device="cpu")
    memory.pause_fill()
    memory.resize(MIB)  # the worker waits, and holds on to nothing that the user has
    gone = weakref.ref(memory)
    with pytest.warns(ResourceWarning):
        del memory
    assert gone() is None
    assert closings.drain(10)


def test_a_callback_does_not_keep_what_it_was_given_for_after_it_ran() -> None:
    class Waiting:
        def __call__(self, error: BaseException | None) -> None: ...

    with filled() as memory:
        waiting = Waiting()
        gone = weakref.ref(waiting)
        future: Future[None] = Future()
        memory.add_usable_callback(MIB, waiting)
        memory.add_usable_callback(MIB, lambda error: future.set_result(None))
        del waiting
        future.result(10)
        assert gone() is None


# ------------------------------------------------------------------------------------ exit


@pytest.mark.parametrize("calls", [0, 1, 5, 40])
def test_the_interpreter_exits_quietly_while_memory_fills(child: Child, calls: int) -> None:
    done = child(
        f"""
        import os
        from hostmem import HostMem
        from hostmem.testing import FaultPlan
        plan = FaultPlan().__enter__()
        memory = HostMem("1GiB", device="cpu", fill_threads=2)
        while len(plan.log) < {calls}:
            os.sched_yield()
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


EXIT = """
    import atexit

    def check():  # hooks run last in, first out: this one after the library's
        print(calls.count("cuMemHostUnregister"), calls.count("munmap"), views and views[0][5])

    atexit.register(check)
    from hostmem import HostMem
    from hostmem._sys import seam
    calls = []
    memory = HostMem("4MiB", device="cpu", wait=True)
    views = [memory.view()]
    seam.install(lambda name, args: calls.append(name) or 0)
"""


def test_at_exit_everything_is_unregistered_and_left_mapped(child: Child) -> None:
    done = child(EXIT, "-Wdefault::ResourceWarning")
    assert (done.stdout, done.stderr, done.returncode) == ("3 0 0\n", "", 0)


def test_what_was_dropped_just_before_the_exit_is_unregistered_once(child: Child) -> None:
    # By the thread that closes what was dropped or by the exit hook, whoever is first.
    done = child(EXIT + "    views.clear()\n    del memory\n")
    assert done.stdout.startswith("3 ")
    assert (done.stderr, done.returncode) == ("", 0)


def test_an_error_at_exit_is_logged_and_the_others_are_unregistered(child: Child) -> None:
    done = child(
        """
        import atexit
        atexit.register(lambda: print(len(resolve_device("cpu").registered)))
        import logging
        import hostmem.lifetime
        from hostmem import HostMem, resolve_device
        logging.basicConfig()
        memories = [HostMem("1MiB", device="cpu", wait=True) for _ in range(3)]

        def broken():
            raise ValueError("broken")

        for core in list(hostmem.lifetime._live)[:-1]:
            core.filler.stop = broken
        """
    )
    assert (done.stdout, done.returncode) == ("2\n", 0)
    assert done.stderr.count("ValueError: broken") == 2


def test_an_exit_beside_a_close_unregisters_once(child: Child) -> None:
    done = child(
        """
        import threading
        from hostmem import HostMem
        from hostmem.testing import FaultPlan
        plan = FaultPlan().__enter__()
        memory = HostMem("8MiB", device="cpu", wait=True)
        hold = plan.hold("cuMemHostUnregister", at=2)
        threading.Thread(target=memory.close, daemon=True).start()
        hold.wait_reached()
        threading.Timer(0.2, hold.release).start()
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# ------------------------------------------------------------------------------------ fork

FORK = """
    import ctypes, os, resource, signal, sys
    from hostmem import ClosedError, HostMem, resolve_device
    from hostmem.testing import FaultPlan
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def fork(function):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                function()
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_in_a_forked_child_every_call_says_that_it_is_closed(child: Child) -> None:
    done = child(
        FORK
        + """
    memory = HostMem("1MiB", device="cpu", wait=True)
    calls = [
        lambda: memory.wait_usable(0), lambda: memory.view(0, 1), lambda: memory.resize(1),
        memory.pause_fill, memory.resume_fill, memory.placement,
        lambda: memory.boundary_after(0), memory.__enter__,
    ]

    def ask():
        assert memory.closed and not memory.is_usable(0)
        for call in calls:
            try:
                call()
            except ClosedError:
                continue
            raise AssertionError(call)
        memory.close()
        assert memory.registrations == []
        memory.progress, repr(memory), memory.describe()

    assert fork(ask) == 0
    memory.view()[:] = 1
    memory.close()
    """,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_touching_a_view_in_a_forked_child_is_a_segmentation_fault(child: Child) -> None:
    done = child(
        FORK
        + """
    memory = HostMem("1MiB", device="cpu", wait=True)
    view = memory.view()
    view[:] = 7
    assert fork(lambda: view[5]) == -signal.SIGSEGV
    assert fork(lambda: view.fill(1)) == -signal.SIGSEGV
    assert int(view.sum()) == 7 << 20
    del view
    memory.close()
    """,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_forked_child_that_drops_and_exits_touches_nothing_of_the_parents(
    child: Child,
) -> None:
    # It leaves by the interpreter's own way, with exit hooks and finalizers.
    done = child(
        """
        import os, sys
        from hostmem import HostMem, resolve_device
        from hostmem._sys import seam
        from hostmem.courier import closings
        memory = HostMem("4MiB", device="cpu", wait=True)
        other = HostMem("1MiB", device="cpu", wait=True)
        pid = os.fork()
        if pid == 0:
            seam.install(lambda name, args: print("child:", name, flush=True) or 0)
            memory.close()
            del other
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(resolve_device("cpu").registered) == 4
        memory.view()[:] = 1
        assert int(memory.view().sum()) == 4 << 20
        memory.close()
        other.close()
        """,
        "-Wdefault::ResourceWarning",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_forked_child_can_have_memory_of_its_own_while_the_parent_fills(child: Child) -> None:
    # The parent's fill is inside its calls: what it locks and takes is no longer given back in
    # the child, whose new memory may well get the very addresses that are free there.
    done = child(
        FORK
        + """
    from hostmem.fill_threads import fill_thread_budget
    budget = fill_thread_budget()
    plan = FaultPlan().__enter__()
    held = [plan.hold("madvise(MADV_POPULATE_WRITE)", at=4 + n) for n in range(budget)]
    memory = HostMem("64MiB", device="cpu", fill_threads=budget)
    for hold in held:
        hold.wait_reached()
    memory.wait_usable(1 << 20)

    def use():
        for hold in held:
            hold.release()
        mine = [HostMem("64MiB", "8MiB", device="cpu") for _ in range(3)]
        for own in mine:
            own.wait_usable(8 << 20, 10)
            own.view()[:] = 3
        assert len(resolve_device("cpu").registered) == sum(len(m.registrations) for m in mine)
        for own in mine:
            own.close()

    assert fork(use) == 0
    for hold in held:
        hold.release()
    memory.wait_usable(64 << 20)
    memory.view()[:] = 1
    memory.close()
    """,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_fork_in_the_middle_of_every_lock_leaves_a_child_that_answers(child: Child) -> None:
    done = child(
        FORK
        + """
    memory = HostMem("1MiB", device="cpu", wait=True)
    device = resolve_device("cpu")
    core = memory._core

    def ask():
        memory.progress, memory.registrations, memory.quarantined, memory.closed
        try:
            memory.wait_usable(1)
        except ClosedError:
            memory.close()
        with HostMem("1MiB", device="cpu", wait=True) as own:
            own.view()[:] = 1

    locks = [
        core.lock, core.filler._lock, core.watermark._lock, core.registrations.registered._lock,
        core.registrations.quarantined._lock, device.registered._lock,
    ]
    for lock in locks:
        # As if another thread held it: this one is not in the child.
        lock.acquire()
        try:
            assert fork(ask) == 0, lock
        finally:
            lock.release()
    memory.close()
    """,
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_the_whole_reservation_is_kept_out_of_children_once_and_for_all() -> None:
    with FaultPlan() as plan, HostMem(4 * MIB, MIB, device="cpu", wait=True) as memory:
        memory.resize(4 * MIB)
        memory.resize(MIB)
        assert plan.calls("madvise(MADV_DONTFORK)") == [(memory.address, 4 * MIB)]


# ------------------------------------------------------------------------------- the log


def test_a_clean_life_logs_its_route_alone(caplog: pytest.LogCaptureFixture, maps: Maps) -> None:
    with caplog.at_level(logging.INFO, "hostmem"):
        memory = HostMem(8 * MIB, device="cpu")
        memory.resize(2 * MIB)
        memory.resize(8 * MIB)
        memory.close()
    assert [record.levelno for record in caplog.records] == [logging.INFO]
