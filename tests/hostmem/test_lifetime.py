"""Memory at the end of a process: signals, the interpreter's exit, and what is listed as alive."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from hostmem import lifetime
from hostmem.errors import ResourceBusyError
from hostmem.lifetime import close_on_signal

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child
    from tests.threads import Spawn


# Prints every unregistering straight to the descriptor, since a signal's death flushes nothing.
START = """
    import os, signal, sys, threading, time
    from hostmem import ClosedError, HostMem, StaticHostMem, lifetime, resolve_device
    from hostmem.lifetime import close_on_signal
    from hostmem.testing import FaultPlan

    for number in (signal.SIGINT, signal.SIGTERM):  # whatever was inherited
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGWINCH, lambda *_: None)

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

    def registered():
        return len(resolve_device("cpu").registered)

    def send(number=signal.SIGTERM):
        os.kill(os.getpid(), number)

    def settle():  # until every signal so far had its effect
        while lifetime._arrivals.owed or lifetime._arrivals.closing:
            os.sched_yield()

    def send_from_thread():
        send()
        # A main thread that was about to block does so, and runs no handler before it wakes.
        while not lifetime._arrivals.closing:
            send(signal.SIGWINCH)
            os.sched_yield()

    def end_of_process():  # not blocked, so that handlers run
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            os.sched_yield()
        os._exit(99)

    signal.alarm(50)  # whoever started it may be gone
    plan = FaultPlan().__enter__()
"""
MEMORY = '    memory = HostMem("4MiB", device="cpu", wait=True)\n'
TELL = """
    def tell(name, args):
        if name == "cuMemHostUnregister":
            say("unregister")
        return 0

    from hostmem._sys import seam
    seam.install(tell)
"""


# --------------------------------------------------------------------- the effect it had before


def test_the_process_dies_by_the_signal_with_nothing_registered(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + TELL
        + """
    buffer = StaticHostMem("64KiB", device="cpu")
    close_on_signal(signal.SIGTERM)
    say(registered())
    send()
    end_of_process()
    """
    )
    said = done.stdout.split()
    assert (said[1:], done.stderr) == (["unregister"] * int(said[0]), "")
    assert done.returncode == -signal.SIGTERM


def test_a_fill_is_stopped_first(child: Child) -> None:
    done = child(
        START
        + TELL
        + """
    memory = HostMem("1GiB", device="cpu", fill_threads=1)
    memory.wait_usable(1)
    close_on_signal(signal.SIGTERM)
    send()
    end_of_process()
    """
    )
    assert "unregister" in done.stdout
    assert (done.stderr, done.returncode) == ("", -signal.SIGTERM)


def test_without_it_the_process_dies_with_everything_registered(child: Child) -> None:
    done = child(START + MEMORY + TELL + "    send()\n    end_of_process()\n")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -signal.SIGTERM)


def test_the_handler_before_is_called_once_afterwards_on_the_main_thread(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    called = threading.Event()

    def before(number, frame):
        say(number == signal.SIGTERM, frame is not None, registered(), memory.closed)
        say(threading.current_thread() is threading.main_thread())
        called.set()

    signal.signal(signal.SIGTERM, before)
    close_on_signal(signal.SIGTERM)
    send()
    while not called.is_set():
        os.sched_yield()
    memory.close()  # and it may still be closed
    say("goes on")
    """
    )
    assert done.stdout.split("\n") == ["True True 0 True", "True", "goes on", ""]
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_handler_that_exits_does_so(child: Child) -> None:
    done = child(
        START
        + """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with HostMem("4MiB", device="cpu", wait=True) as memory:
        close_on_signal(signal.SIGTERM)
        send()
        end_of_process()
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 7)


def test_an_ignored_signal_shuts_down_and_the_process_goes_on(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close_on_signal(signal.SIGTERM)
    while not memory.closed:
        send()
    memory.close()
    say(registered())
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_a_signal_that_does_nothing_by_default_is_handled_again_the_next_time(
    child: Child,
) -> None:
    done = child(
        START
        + """
    close_on_signal(signal.SIGURG)
    for _ in range(2):
        memory = HostMem("1MiB", device="cpu", wait=True)
        send(signal.SIGURG)
        while not memory.closed:
            os.sched_yield()
        memory.close()
        say(registered())
        settle()
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n0\n", "", 0)


def test_with_no_memory_alive_the_signal_passes_at_once(child: Child) -> None:
    done = child(
        START
        + """
    signal.signal(signal.SIGTERM, lambda *_: say("before"))
    close_on_signal(signal.SIGTERM)
    send()
    say("after")
    """
    )
    assert done.stdout == "before\nafter\n"


# -------------------------------------------------------------- whatever the main thread does


def test_a_wait_of_the_main_thread_ends_closed_and_the_process_dies_by_the_signal(
    child: Child,
) -> None:
    done = child(
        START
        + """
    hold = plan.hold("madvise(MADV_POPULATE_WRITE)")
    memory = HostMem("4MiB", device="cpu", fill_threads=1)
    close_on_signal(signal.SIGTERM)
    hold.wait_reached()

    def interrupt():
        while not memory._mark.waiting:
            os.sched_yield()
        send_from_thread()
        ended.wait(20)
        hold.release()  # only now can the fill stop

    ended = threading.Event()
    threading.Thread(target=interrupt).start()
    try:
        memory.wait_usable(4 << 20)
    except ClosedError:
        say("closed")
        ended.set()
    # and off the end of the program, whose exit gives way to the signal
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("closed\n", "", -signal.SIGTERM)


@pytest.mark.parametrize("call", ["memory.resize(1 << 20)", "memory.close()"])
def test_a_main_thread_that_is_inside_our_locks_finishes_first(child: Child, call: str) -> None:
    done = child(
        START
        + f"""
    memory = HostMem("16MiB", device="cpu", wait=True)
    signal.signal(signal.SIGTERM, lambda *_: say("passed on", registered()))
    close_on_signal(signal.SIGTERM)
    hold = plan.hold("cuMemHostUnregister", at=2)

    def interrupt():
        hold.wait_reached()  # the main thread has the memory's lock
        send_from_thread()
        hold.release()

    threading.Thread(target=interrupt).start()
    {call}
    say("returned")
    settle()
    """
    )
    # In either order: the shutdown may well be done before the main thread says so.
    assert sorted(done.stdout.splitlines()) == ["passed on 0", "returned"]
    assert (done.stderr, done.returncode) == ("", 0)


def test_the_handler_takes_no_lock_that_the_main_thread_holds(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    from hostmem.courier import closings
    signal.signal(signal.SIGTERM, lambda *_: say("passed on", registered()))
    close_on_signal(signal.SIGTERM)
    core = memory._core
    locks = [core.lock, core.watermark._lock, closings._lock, lifetime._shutdowns._lock]
    for lock in locks:
        lock.acquire()
    send()
    say("goes on", registered() > 0)
    for lock in locks:
        lock.release()
    settle()
    """
    )
    assert done.stdout == "goes on True\npassed on 0\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_close_that_is_stuck_on_another_thread_does_not_stop_the_others(child: Child) -> None:
    # The courier that closes what was dropped hangs; the shutdown has a thread of its own.
    done = child(
        START
        + MEMORY
        + TELL
        + """
    from hostmem.courier import closings
    never = threading.Event()
    closings.post(never.wait)
    close_on_signal(signal.SIGTERM)
    send()
    end_of_process()
    """
    )
    assert "unregister" in done.stdout
    assert done.returncode == -signal.SIGTERM


def test_an_error_in_one_shutdown_is_logged_and_the_others_follow(child: Child) -> None:
    done = child(
        START
        + """
    import logging
    logging.basicConfig()
    memories = [HostMem("1MiB", device="cpu", wait=True) for _ in range(3)]

    def broken():
        raise ValueError("broken")

    memories[0]._core.filler.stop = broken
    signal.signal(signal.SIGTERM, lambda *_: (say(registered()), os._exit(0)))
    close_on_signal(signal.SIGTERM)
    send()
    end_of_process()
    """
    )
    assert done.stdout == "1\n"
    assert done.stderr.count("ValueError: broken") == 1


# ------------------------------------------------------------------------------- two signals

STUCK = (
    START
    + """
    memory = HostMem("16MiB", device="cpu", wait=True)
    hold = plan.hold("cuMemHostUnregister", at=2)
"""
)


def test_a_second_signal_during_the_shutdown_takes_effect_at_once(child: Child) -> None:
    done = child(
        STUCK
        + """
    close_on_signal(signal.SIGTERM)
    send()
    hold.wait_reached()
    say(registered() > 0)
    send()
    end_of_process()
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", -signal.SIGTERM)


def test_a_signal_that_came_just_before_a_system_call_is_sent_until_it_is_seen(
    child: Child,
) -> None:
    done = child(
        START
        + MEMORY
        + """
    def pthread_kill(ident, number, real=signal.pthread_kill, sent=[]):
        sent.append(number)
        if len(sent) == 3:  # the first two came where they did not interrupt the call
            real(ident, number)

    signal.pthread_kill = pthread_kill
    close_on_signal(signal.SIGTERM)
    send()
    reading, _writing = os.pipe()
    os.read(reading, 1)
    """
    )
    assert (done.stderr, done.returncode) == ("", -signal.SIGTERM)


def test_a_signal_that_is_blocked_does_not_keep_others_from_their_effect(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    signal.signal(signal.SIGHUP, lambda *_: say("never"))
    close_on_signal(signal.SIGHUP, signal.SIGTERM)
    send(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    while not memory.closed or lifetime._arrivals.closing:
        os.sched_yield()
    other = HostMem("1MiB", device="cpu", wait=True)
    send()
    end_of_process()
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -signal.SIGTERM)


def test_a_signal_that_is_blocked_does_not_keep_the_process_from_its_end(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    signal.signal(signal.SIGHUP, lambda *_: say("never"))
    close_on_signal(signal.SIGHUP)
    send(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_handler_on_top_of_ours_is_sent_the_signal_once(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    def pthread_kill(ident, number, sent=[]):
        sent.append(number)
        say(len(sent))

    signal.pthread_kill = pthread_kill
    close_on_signal(signal.SIGTERM)
    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: ours(*args))
    send()
    lifetime._shutdowns.drain()
    os._exit(0)
    """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_one_who_insists_has_the_effect_once(child: Child) -> None:
    done = child(
        STUCK
        + """
    signal.signal(signal.SIGTERM, lambda *_: say("before", registered() > 0))
    close_on_signal(signal.SIGTERM)
    send()
    hold.wait_reached()
    send()
    hold.release()
    lifetime._shutdowns.drain()
    say("after", registered())
    send()
    settle()
    """
    )
    assert done.stdout == "before True\nafter 0\nbefore False\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_another_signal_during_the_shutdown_has_its_own_effect_and_the_first_its_too(
    child: Child,
) -> None:
    done = child(
        STUCK
        + """
    signal.signal(signal.SIGTERM, lambda *_: say("term", registered()))
    signal.signal(signal.SIGINT, lambda *_: say("int", registered() > 0))
    close_on_signal(signal.SIGTERM, signal.SIGINT)
    send()
    hold.wait_reached()
    send(signal.SIGINT)
    hold.release()
    settle()
    """
    )
    assert done.stdout == "int True\nterm 0\n"
    assert (done.stderr, done.returncode) == ("", 0)


# -------------------------------------------------------------------------------- the process


def test_a_forked_child_passes_the_signal_on_and_leaves_the_parents_memory(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    close_on_signal(signal.SIGTERM)
    before = registered()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        own = HostMem("1MiB", device="cpu", wait=True)
        os.write(write, b"x")
        end_of_process()
    os.read(read, 1)
    os.kill(pid, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    say(registered() == before, memory.closed)
    memory.close()
    """,
    )
    assert done.stdout == f"{-signal.SIGTERM}\nTrue False\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_forked_child_asks_anew_for_its_own_memory(child: Child) -> None:
    done = child(
        START
        + TELL
        + """
    close_on_signal(signal.SIGTERM)
    if (pid := os.fork()) == 0:
        own = HostMem("1MiB", device="cpu", wait=True)
        close_on_signal(signal.SIGTERM)
        send()
        end_of_process()
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """,
    )
    assert done.stdout == f"unregister\n{-signal.SIGTERM}\n"


def test_a_child_that_is_forked_during_the_shutdown_is_not_sent_the_signal(child: Child) -> None:
    done = child(
        STUCK
        + """
    signal.signal(signal.SIGTERM, lambda *_: say("before", os.getpid() == parent))
    parent = os.getpid()
    close_on_signal(signal.SIGTERM)
    send()
    hold.wait_reached()
    if (pid := os.fork()) == 0:
        send()
        os._exit(0)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    hold.release()
    settle()
    """,
    )
    assert done.stdout == "before False\n0\nbefore True\n"


def test_a_child_that_is_forked_during_the_shutdown_exits_without_waiting_for_it(
    child: Child,
) -> None:
    done = child(
        STUCK
        + """
    close_on_signal(signal.SIGTERM)
    send()
    hold.wait_reached()
    if (pid := os.fork()) == 0:
        sys.exit(0)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    hold.release()
    end_of_process()
    """,
    )
    assert (done.stdout, done.returncode) == ("0\n", -signal.SIGTERM)


# ------------------------------------------------------------------- installing and undoing


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_undoing_puts_back_what_was_there(sigterm: None, before: Callable[..., None]) -> None:
    signal.signal(signal.SIGTERM, before)
    undo = close_on_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) != before
    undo()
    assert signal.getsignal(signal.SIGTERM) == before
    undo()
    assert signal.getsignal(signal.SIGTERM) == before


def test_asking_twice_is_asking_once(sigterm: None) -> None:
    undo = close_on_signal(signal.SIGTERM)
    installed = signal.getsignal(signal.SIGTERM)
    again = close_on_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is installed
    again()  # that one installed nothing
    assert signal.getsignal(signal.SIGTERM) is installed
    undo()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_undoing_leaves_a_handler_that_was_installed_since(sigterm: None) -> None:
    undo = close_on_signal(signal.SIGTERM)

    def later(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, later)
    undo()
    assert signal.getsignal(signal.SIGTERM) is later


def test_a_handler_between_two_of_ours_is_called_once(child: Child) -> None:
    done = child(
        START
        + MEMORY
        + """
    signal.signal(signal.SIGTERM, lambda *_: say("first"))
    close_on_signal(signal.SIGTERM)
    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: (say("second", registered()), ours(*args)))
    close_on_signal(signal.SIGTERM)
    send()
    settle()
    """
    )
    assert done.stdout == "second 0\nfirst\n"
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    "signals", [(), (0,), (4711,), (signal.SIGKILL,), (signal.SIGSTOP,), (signal.SIGSEGV,)]
)
def test_what_cannot_be_handled_is_refused(signals: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="signals"):
        close_on_signal(*signals)


def test_one_refusal_installs_none(sigterm: None) -> None:
    with pytest.raises(ValueError, match="cannot be handled"):
        close_on_signal(signal.SIGTERM, signal.SIGKILL)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_thread_is_refused(spawn: Spawn) -> None:
    with pytest.raises(ValueError, match="main thread"):
        spawn(close_on_signal, signal.SIGTERM).result(10)


def test_a_handler_that_python_did_not_install_is_refused(
    sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a program that had its handlers before it embedded the interpreter.
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(ValueError, match="was not installed by Python"):
        close_on_signal(signal.SIGTERM)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_where_no_thread_can_be_started_nothing_is_installed(
    sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lifetime._shutdowns, "_pid", 0)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(ResourceBusyError):
        close_on_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ------------------------------------------------------------------------ who is listed alive


class Nothing:
    """Holds no memory."""

    def close(self) -> None: ...

    def shut_down(self) -> None: ...

    def abandon(self) -> None: ...


def test_being_listed_keeps_nobody_alive() -> None:
    live = lifetime._Live()
    held = Nothing()
    live.add(held)
    assert (list(live), bool(live)) == ([held], True)
    del held
    gc.collect()
    assert (list(live), bool(live)) == ([], False)


def test_those_alive_are_listed_while_others_come_and_go(spawn: Spawn) -> None:
    live = lifetime._Live()
    kept = [Nothing() for _ in range(100)]
    for held in kept:
        live.add(held)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            some = [Nothing() for _ in range(200)]
            for held in some:
                live.add(held)

    churning: list[Future[None]] = [spawn(churn) for _ in range(2)]
    try:
        for _ in range(300):
            assert set(kept) <= set(live)
    finally:
        stop.set()
    for future in churning:
        future.result(10)


def test_one_that_goes_during_the_listing_is_not_missed() -> None:
    live = lifetime._Live()
    held = [Nothing() for _ in range(10)]
    for one in held:
        live.add(one)
    seen = 0
    for _ in live:
        seen += 1
        live.add(Nothing())  # comes and goes
    assert seen == 10


# ------------------------------------------------------------------------------------ exit

DROPS = {
    "kept": "pass",
    "storage first": "del storage; del memory; del buffer",
    "memory first": "del memory; del buffer; del storage",
    "in a cycle": "ring = [storage, memory, buffer]; ring.append(ring); "
    "del ring, storage, memory, buffer",
    "by a daemon thread": "threading.Thread(target=lambda *_: never.wait(), "
    "args=(storage, memory, buffer), daemon=True).start(); del storage, memory, buffer",
}


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS.keys())
def test_whatever_is_left_at_exit_is_unregistered_in_silence(child: Child, drop: str) -> None:
    done = child(
        f"""
        import atexit
        atexit.register(lambda: print(len(resolve_device("cpu").registered)))
        import threading
        import kvtier
        from hostmem import HostMem, StaticHostMem, resolve_device

        never = threading.Event()
        layer = kvtier.AttentionLayerConfig(0, [kvtier.BufferConfig("kv", "64KiB")])
        tiers = [
            kvtier.GpuCacheTierConfig("2MiB", "2MiB"), kvtier.HostCacheTierConfig("64MiB", "64MiB")
        ]
        config = kvtier.KVCacheManagerConfig(16, tiers, [layer])
        storage = kvtier.TierStorage(config, device="cpu")
        memory = HostMem("256MiB", device="cpu", fill_threads=1)
        buffer = StaticHostMem("64KiB", device="cpu")
        {drop}
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_an_exit_that_overtakes_the_shutdown_gives_way_to_the_signal(child: Child) -> None:
    done = child(
        START
        + """
    class Slow:
        def shut_down(self):
            if threading.current_thread() is not threading.main_thread():
                release.wait(20)

    def let_go():
        while not lifetime._shutdowns._jobs.qsize():  # until the exit waits behind it
            os.sched_yield()
        release.set()

    release, slow = threading.Event(), Slow()
    lifetime._live.add(slow)
    close_on_signal(signal.SIGTERM)
    threading.Thread(target=let_go, daemon=True).start()
    send()
    """
    )
    assert (done.stderr, done.returncode) == ("", -signal.SIGTERM)


def test_an_exit_by_an_exception_unregisters_too(child: Child) -> None:
    done = child(
        """
        import atexit
        atexit.register(lambda: print(len(resolve_device("cpu").registered)))
        from hostmem import HostMem, resolve_device
        memory = HostMem("256MiB", device="cpu")
        view = memory.view(0, 1)
        raise KeyError("mine")
        """
    )
    assert (done.stdout, done.returncode) == ("0\n", 1)
    assert done.stderr.strip().endswith("KeyError: 'mine'")


def test_memory_that_a_daemon_thread_builds_during_the_exit_does_no_harm(child: Child) -> None:
    done = child(
        """
        import threading
        from hostmem import HostMem
        built = threading.Event()

        def build():
            while True:
                with HostMem("1MiB", device="cpu", wait=True):
                    built.set()

        threading.Thread(target=build, daemon=True).start()
        built.wait(20)
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
