"""Turns of processes and threads, taken by a lock on a file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hostmem
from hostmem._sys import file_lock
from hostmem.testing import FaultPlan
from hostmem.turns import NO_TURNS, FileTurns, driver_library, turns_for
from tests.threads import Spawn, Until

AGES = 60.0  # seconds of patience that no test ever waits
SOON = 0.001


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "lib.so").touch()
    return str(tmp_path / "lib.so")


Open = Callable[..., FileTurns]


@pytest.fixture
def lonely(path: str) -> Iterator[Open]:
    """Make turns by the file; each is an open file of its own, as another process would have."""
    made = []

    def make(patience: float = AGES, look_interval: float = 0.0) -> FileTurns:
        made.append(FileTurns(path, patience=patience, look_interval=look_interval))
        return made[-1]

    yield make
    for turns in made:
        turns.close()


@contextlib.contextmanager
def somebody(path: str) -> Iterator[None]:
    """Somebody is there and never wants a turn: nobody is alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        assert file_lock.say_present(fd)
        yield
    finally:
        os.close(fd)


@pytest.fixture
def company(path: str) -> Iterator[None]:
    with somebody(path):
        yield


@pytest.fixture
def opened(lonely: Open, company: None) -> Open:
    """As `lonely`, in company."""
    return lonely


class Other:
    """Another process with its turns by the same file; it evaluates what it is given."""

    CODE = """
import os, signal, sys
from hostmem.turns import FileTurns
turns = FileTurns(sys.argv[1], patience=float(sys.argv[2]), look_interval=0)
for line in sys.stdin:
    print(eval(line), flush=True)
"""

    def __init__(self, path: str, patience: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, path, str(patience)],
            env={**os.environ, "PYTHONPATH": str(Path(hostmem.__file__).parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, expression: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def enter(self) -> None:
        assert self("turns.__enter__().state").startswith("by ")

    def exit(self) -> None:
        assert self("turns.__exit__(None, None, None)") == "None"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def another(path: str) -> Iterator[Callable[..., Other]]:
    made = []

    def make(patience: float = AGES) -> Other:
        made.append(Other(path, patience))
        return made[-1]

    yield make
    for process in made:
        process.end()


@pytest.fixture
def other(another: Callable[..., Other], company: None) -> Callable[..., Other]:
    """As `another`, in company."""
    return another


def is_free(path: str) -> bool:
    """Tell whether nobody has the turn."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return file_lock.lock(fd)
    finally:
        os.close(fd)


def is_awaited(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return file_lock.is_awaited(fd)
    finally:
        os.close(fd)


def is_alone(path: str) -> bool:
    """Tell whether nobody is there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return file_lock.is_alone(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------ one at a time


ROUNDS = """
[[turns.__enter__(), os.close(os.open({inside!r}, os.O_CREAT | os.O_EXCL)), os.sched_yield(),
  os.unlink({inside!r}), turns.__exit__(None, None, None)] for _ in range(50)] and turns.state
"""


def test_one_process_is_inside_at_a_time(
    another: Callable[..., Other], spawn: Spawn, path: str, tmp_path: Path
) -> None:
    processes = [another() for _ in range(3)]
    for process in processes:  # each is there, and is seen at the others' next look
        process("turns.__enter__().__exit__(None, None, None)")
    # Fails where somebody else is inside.
    rounds = " ".join(ROUNDS.format(inside=str(tmp_path / "inside")).split())
    racing = [spawn(process, rounds) for process in processes]
    states = [answer.result(AGES) for answer in racing]
    assert all(state.startswith(f"by {path}") for state in states)
    assert not any("gave up" in state for state in states)


def test_one_thread_is_inside_at_a_time(opened: Open, spawn: Spawn) -> None:
    turns, inside, most = opened(), [0], [0]

    def work() -> None:
        for _ in range(100):
            with turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                os.sched_yield()  # lets go of the interpreter
                inside[0] -= 1

    for done in [spawn(work) for _ in range(4)]:
        done.result(AGES)
    assert most == [1]
    assert "gave up" not in turns.state


def test_who_comes_second_waits_for_the_first(
    opened: Open, other: Callable[..., Other], spawn: Spawn, until: Until, path: str
) -> None:
    first, turns = other(), opened()
    first.enter()
    second = spawn(turns.__enter__)
    until(lambda: is_awaited(path))
    assert not second.done()
    first.exit()
    second.result(AGES)
    assert turns.state == f"by {path}; waited once"
    assert not is_awaited(path)


def test_nobody_overtakes_who_waits(opened: Open, path: str) -> None:
    waiting = os.open(path, os.O_RDONLY)
    file_lock.say_waiting(waiting, True)
    turns = opened()
    with turns:
        assert turns.state == f"by {path}; waited once"  # though it was free
        assert not is_free(path)
    os.close(waiting)
    with turns:
        assert turns.state == f"by {path}; waited once"


def test_a_kernel_that_does_not_tell_who_waits_is_served_as_it_comes(
    opened: Open, path: str
) -> None:
    waiting = os.open(path, os.O_RDONLY)
    file_lock.say_waiting(waiting, True)
    turns = opened()
    with FaultPlan() as plan:
        plan.fail("fcntl(F_OFD_GETLK)", errno.EINVAL, times=None)
        with turns:
            assert turns.state == f"by {path}"
    os.close(waiting)


def test_it_is_given_back(opened: Open, path: str) -> None:
    turns = opened()
    assert is_free(path)
    with turns:
        assert not is_free(path)
    assert is_free(path)
    with pytest.raises(ZeroDivisionError), turns:
        _ = 1 // 0
    assert is_free(path)


# ---------------------------------------------------------------------------------------- alone


def test_who_is_alone_makes_no_system_call_between_two_looks(lonely: Open, path: str) -> None:
    turns = lonely(look_interval=AGES)
    assert is_alone(path)  # as long as it has not entered
    with FaultPlan() as plan:
        for _ in range(3):
            with turns:
                assert turns.state == f"alone, else by {path}"
    assert [name for name, _ in plan.log] == ["fcntl(F_OFD_SETLK)", "fcntl(F_OFD_GETLK)"]
    assert not is_alone(path)


def test_the_threads_of_who_is_alone_do_not_wait_for_each_other(
    lonely: Open, spawn: Spawn, path: str
) -> None:
    turns, both = lonely(), threading.Barrier(2)

    def work() -> None:
        with turns:
            both.wait(AGES)

    for done in [spawn(work), spawn(work)]:
        done.result(AGES)
    assert turns.state == f"alone, else by {path}"


def test_both_see_at_their_next_look_that_a_second_one_came_and_went(
    lonely: Open, another: Callable[..., Other], path: str
) -> None:
    turns, second = lonely(), another()
    with turns:
        assert is_free(path)  # the second has not entered yet
    second.enter()
    assert not is_free(path)
    second.exit()
    with turns:
        assert not is_free(path)
        assert turns.state == f"by {path}"
    second.signal(signal.SIGKILL)
    second.process.wait()
    with turns:
        assert is_free(path)
        assert turns.state == f"alone, else by {path}"


def test_who_was_alone_waits_for_the_second_one(
    lonely: Open, another: Callable[..., Other], spawn: Spawn, until: Until, path: str
) -> None:
    turns, second = lonely(), another()
    with turns:
        assert turns.state == f"alone, else by {path}"
    second.enter()
    entering = spawn(turns.__enter__)
    until(lambda: is_awaited(path))
    assert not entering.done()
    second.exit()
    entering.result(AGES)
    assert turns.state == f"by {path}; waited once"


def test_who_only_serves_is_there_until_it_closes(lonely: Open, path: str) -> None:
    serving, turns = lonely(), lonely()
    with serving:
        pass
    with turns:
        assert turns.state == f"by {path}"
    serving.close()
    assert serving.state == f"by {path}"
    with turns:
        assert turns.state == f"alone, else by {path}"
    with serving:  # there again, with its first turn
        assert not is_free(path)
    with turns:
        assert turns.state == f"by {path}"


def test_an_answer_is_good_for_fifty_milliseconds(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("hostmem.turns.time.monotonic", lambda: now[0])
    turns = FileTurns(path)
    with turns:
        assert turns.state == f"alone, else by {path}"
    with somebody(path):
        now[0] = 100.0 + 0.049
        with turns:
            assert is_free(path)
        now[0] = 100.0 + 0.05
        with turns:
            assert not is_free(path)
    now[0] += 0.049
    with turns:
        assert not is_free(path)
    now[0] += 0.001
    with turns:
        assert is_free(path)
    turns.close()


def test_one_thread_looks_and_the_others_go_by_the_last_answer(
    lonely: Open, spawn: Spawn, path: str
) -> None:
    turns = lonely(look_interval=AGES)
    with FaultPlan() as plan:
        answer = plan.hold("fcntl(F_OFD_GETLK)", when=lambda fd, byte: byte == 1)
        looking = spawn(turns.__enter__)
        answer.wait_reached()
        with turns:  # not yet known to be alone
            assert not is_free(path)
        assert [byte for _, byte in plan.calls("fcntl(F_OFD_GETLK)")].count(1) == 1
        answer.release()
        assert looking.result(AGES).state == f"alone, else by {path}"


def test_a_late_answer_does_not_replace_a_newer_one(lonely: Open, spawn: Spawn, path: str) -> None:
    turns = lonely()
    with FaultPlan() as plan:
        plan.fail("fcntl(F_OFD_GETLK)", errno.EINVAL)  # as if somebody were there
        late = plan.hold("fcntl(F_OFD_GETLK)")
        looking = spawn(turns.__enter__)
        late.wait_reached()
        with turns:
            assert turns.state == f"alone, else by {path}"
        late.release()
        assert looking.result(AGES).state == f"alone, else by {path}"


@pytest.mark.parametrize("call", ["fcntl(F_OFD_SETLK)", "fcntl(F_OFD_GETLK)"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOLCK])
def test_a_kernel_that_does_not_tell_who_is_there_leaves_nobody_alone(
    lonely: Open, path: str, call: str, number: int
) -> None:
    turns = lonely()
    with FaultPlan() as plan:
        plan.fail(call, number, times=None)
        for _ in range(2):
            with turns:
                assert turns.state == f"by {path}"
                assert not is_free(path)
            assert is_free(path)


def test_what_was_taken_in_company_is_given_back_by_who_is_alone(lonely: Open, path: str) -> None:
    turns = lonely()
    with contextlib.ExitStack() as company:
        company.enter_context(somebody(path))
        with turns:
            company.close()
            turns.__enter__()  # a signal handler inside; its look is the newest
            assert turns.state == f"alone, else by {path}"
            assert not is_free(path)
        assert is_free(path)


def test_who_entered_alone_gives_back_nothing_of_another_thread(
    lonely: Open, spawn: Spawn, path: str
) -> None:
    turns = lonely()
    with contextlib.ExitStack() as company:
        with turns:
            company.enter_context(somebody(path))
            spawn(turns.__enter__).result(AGES)
        assert not is_free(path)


def test_threads_are_not_confused_by_company_that_comes_and_goes(
    lonely: Open, spawn: Spawn, path: str
) -> None:
    turns, over = lonely(), threading.Event()

    def work() -> None:
        while not over.is_set():
            with turns:
                os.sched_yield()

    working = [spawn(work) for _ in range(4)]
    for _ in range(50):
        with somebody(path):
            os.sched_yield()
    over.set()
    for done in working:
        done.result(AGES)
    assert is_free(path)
    with somebody(path), turns:
        assert not is_free(path)
    assert "gave up" not in turns.state


# ------------------------------------------------------------------------ nobody waits for ever


def test_a_holder_that_is_killed_gives_its_turn_back(
    opened: Open, other: Callable[..., Other], spawn: Spawn, until: Until, path: str
) -> None:
    holder, turns = other(), opened()
    holder.enter()
    entering = spawn(turns.__enter__)
    until(lambda: is_awaited(path))
    holder.signal(signal.SIGKILL)
    entering.result(AGES)
    assert turns.state == f"by {path}; waited once"


def test_a_holder_that_is_stopped_is_not_waited_for(
    opened: Open, other: Callable[..., Other], path: str
) -> None:
    holder, turns = other(), opened(0.008)
    holder.enter()
    holder.signal(signal.SIGSTOP)
    with turns:
        assert turns.state == f"by {path}; waited once, gave up once"
    assert not is_awaited(path)
    assert turns.patience == 0.001
    for _ in range(5):
        with turns:
            pass
    assert turns.patience == 0.0002  # never none: two looks each time
    assert turns.state == f"by {path}; waited 6 times, gave up 6 times"
    assert not is_free(path)  # the holder's, whatever our exits did
    holder.signal(signal.SIGCONT)
    holder.exit()
    with turns:
        assert not is_free(path)
    assert turns.patience == 0.008
    assert turns.state == f"by {path}; waited 6 times, gave up 6 times"


def test_no_patience_grows_by_waiting_in_vain(opened: Open) -> None:
    with opened(), opened(0.0) as turns:
        assert turns.patience == 0.0


def test_a_thread_does_not_wait_for_ever_for_another(opened: Open, spawn: Spawn, path: str) -> None:
    turns = opened(SOON)
    leave = threading.Event()

    def stay() -> None:
        with turns:
            entered.set()
            leave.wait(AGES)

    entered = threading.Event()
    staying = spawn(stay)
    assert entered.wait(AGES)
    with turns:
        assert turns.state == f"by {path}, gave up once"
    assert not is_free(path)  # our exit took nothing from the other thread
    leave.set()
    staying.result(AGES)
    assert is_free(path)


def test_a_signal_handler_may_enter_inside(opened: Open, path: str) -> None:
    turns = opened()
    with turns:
        with turns:
            assert not is_free(path)
        assert "gave up" not in turns.state
    assert is_free(path)


def test_an_exit_that_was_cut_short_is_made_up_for(opened: Open, path: str) -> None:
    turns = opened()
    turns.__enter__()  # and Ctrl-C comes as the first thing inside __exit__
    with turns:
        pass
    assert is_free(path)
    assert turns.state == f"by {path}"


def test_ctrl_c_while_waiting_leaves_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch, path: str, spawn: Spawn
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    turns = opened()
    with opened():
        with monkeypatch.context() as patch:
            patch.setattr("hostmem.turns.time.sleep", interrupt)
            with pytest.raises(KeyboardInterrupt):
                turns.__enter__()
        assert not is_awaited(path)
    spawn(turns.__enter__).result(AGES)
    assert turns.state == f"by {path}; waited once"


# ------------------------------------------------------------------------------ forked children


def answer_of_child(process: Other, what: str) -> str:
    """Fork another process; its child enters, evaluates, and ends before it goes on."""
    child = f"[turns.__enter__(), print({what}, flush=True), os._exit(0)]"
    answer = process(f"(lambda pid: os.waitpid(pid, 0)[1] if pid else {child})(os.fork())")
    assert process.process.stdout is not None
    assert process.process.stdout.readline() == "0\n"
    return answer


def test_a_forked_child_has_turns_of_its_own(other: Callable[..., Other], path: str) -> None:
    parent = other(SOON)
    parent.enter()
    assert answer_of_child(parent, "turns.state") == f"by {path}; waited once, gave up once"
    assert not is_free(path)  # the parent's, also after the child has ended
    parent.exit()
    assert is_free(path)
    assert answer_of_child(parent, "turns.state") == f"by {path}"


def test_a_forked_child_keeps_no_turn_of_its_parent(
    other: Callable[..., Other], path: str, until: Until
) -> None:
    parent = other()
    parent.enter()
    # The child reads to the end of its standard input, which outlives its parent.
    child = int(parent("os.fork() or sys.stdin.buffer.raw.read()"))
    parent.process.kill()
    parent.process.wait()
    try:
        until(lambda: is_free(path))
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_there_from_its_first_turn_on(
    another: Callable[..., Other], path: str
) -> None:
    parent = another()
    parent("turns.__enter__()")
    turn = "turns.__enter__(), turns.__exit__(None, None, None)"
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    child = int(parent(f"(child := os.fork()) or [{stop}, {turn}, {stop}]"))
    try:
        parent("os.waitpid(child, os.WUNTRACED)")
        assert parent("turns.__enter__().state") == f"alone, else by {path}"
        os.kill(child, signal.SIGCONT)
        parent("os.waitpid(child, os.WUNTRACED)")
        assert parent("turns.__enter__().state") == f"by {path}"
    finally:
        os.kill(child, signal.SIGKILL)
    parent("os.waitpid(child, 0)")
    assert parent("turns.__enter__().state") == f"alone, else by {path}"


@pytest.mark.parametrize(
    "start",
    [
        "os.fork() or os.kill(os.getpid(), signal.SIGSTOP)",
        "os.posix_spawn('/bin/sh', ['sh', '-c', 'kill -STOP $$'], os.environ)",
    ],
)
def test_who_has_ended_is_not_there_for_its_children(
    another: Callable[..., Other], path: str, until: Until, start: str
) -> None:
    parent = another()
    parent("turns.__enter__()")
    child = int(parent(f"(child := {start})"))
    try:
        parent("os.waitpid(child, os.WUNTRACED)")
        assert not is_alone(path)
        parent.process.kill()
        parent.process.wait()
        until(lambda: is_alone(path))
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_cannot_open_the_file_goes_on_without(
    other: Callable[..., Other], path: str
) -> None:
    parent = other()
    assert parent("turns.state") == f"by {path}"
    os.unlink(path)
    state = answer_of_child(parent, "turns.state")
    assert state == f"none: {path} failed (No such file or directory)"


# ------------------------------------------------------------------------------- files and locks


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder of things that no turn is taken by."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    return tmp_path


ODD = pytest.mark.parametrize(
    ("name", "number"),
    [
        ("folder", errno.EINVAL),
        ("pipe", errno.EINVAL),
        ("link", errno.ELOOP),
        ("dangling", errno.ELOOP),
        ("file/below", errno.ENOTDIR),
        ("none/below", errno.ENOENT),
    ],
)


@ODD
def test_what_is_no_file_is_refused(odd: Path, name: str, number: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=name) as refused:
        FileTurns(str(odd / name), create=True)
    assert refused.value.errno == number
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (odd / "made").exists()


def test_a_library_that_is_gone_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileTurns(str(tmp_path / "libcuda.so.1"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_its_own_is_for_everybody_to_read_and_nobody_to_write(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        turns = FileTurns(str(tmp_path / "turns"), create=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "turns").stat().st_mode) == 0o444
    again = FileTurns(str(tmp_path / "turns"), create=True)  # there already
    turns.close()
    again.close()


def test_a_file_that_another_process_makes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, real_open = tmp_path / "turns", os.open

    def late(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            os.close(real_open(path, os.O_CREAT | os.O_WRONLY, 0o640))
        return real_open(path, flags, mode)

    monkeypatch.setattr("hostmem.turns.os.open", late)
    FileTurns(str(wanted), create=True).close()
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o640  # theirs, as they want it


def test_a_file_system_without_locks_is_refused(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with FaultPlan() as plan:
        plan.fail("flock", errno.ENOLCK)
        with pytest.raises(OSError, match="No locks") as refused:
            FileTurns(path)
    assert refused.value.errno == errno.ENOLCK
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_locked_just_then_is_taken(opened: Open) -> None:
    with opened():
        assert opened().state.startswith("by ")


def test_locks_that_fail_later_fail_no_driver_call(
    opened: Open, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    turns = opened()
    with FaultPlan() as plan, caplog.at_level(logging.WARNING, "hostmem"):
        plan.fail("flock", errno.ESTALE)
        for _ in range(3):
            with turns:
                assert turns.state == f"none: {path} failed (flock: Stale file handle)"
        assert len(plan.calls("flock")) == 1
        looks = [args for args in plan.calls("fcntl(F_OFD_GETLK)") if args[1] == 1]
        assert len(looks) == 1  # nor is the descriptor touched again
    assert len(caplog.records) == 1


@pytest.mark.parametrize("alone", [False, True])
def test_a_descriptor_that_somebody_closed_fails_no_driver_call(
    lonely: Open, path: str, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    turns = lonely()
    assert turns._fd is not None
    with contextlib.nullcontext() if alone else somebody(path), turns:
        os.close(turns._fd)  # as a process that turns into a daemon does
    with turns:
        turns._fd = None
        assert turns.state == f"none: {path} failed (Bad file descriptor)"
    assert "Bad file descriptor" in caplog.text


# ---------------------------------------------------------------------------- which file it is


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host of our own: no setting, and its shared folder is the test's."""
    monkeypatch.delenv("HOSTMEM_TURNS", raising=False)
    monkeypatch.setattr("hostmem.turns._SHARED", str(tmp_path / "shared"))
    turns_for.cache_clear()
    yield tmp_path
    turns_for.cache_clear()


def test_the_library_is_the_first_choice(path: str, here: Path) -> None:
    assert turns_for(path).state == f"by {path}"
    assert turns_for(path) is turns_for(path)
    assert not (here / "shared").exists()


@pytest.mark.parametrize("library", [None, "/nowhere/libcuda.so.1", "/usr"])
def test_the_shared_folder_is_the_second(library: str | None, here: Path) -> None:
    assert turns_for(library).state == f"by {here / 'shared'}"


def test_a_library_that_cannot_be_locked_is_passed_over(path: str, here: Path) -> None:
    with FaultPlan() as plan:
        plan.fail("flock", errno.EBADF)
        assert turns_for(path).state == f"by {here / 'shared'}"


def test_without_a_file_there_are_no_turns(here: Path) -> None:
    (here / "shared").symlink_to(here / "trap")
    turns = turns_for(None)
    assert turns.state.startswith("none: no lockable file (")
    with turns:
        pass
    assert not (here / "trap").exists()


def test_they_can_be_switched_off(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_TURNS", "0")
    turns = turns_for(path)
    with turns:
        assert turns.state == "off: HOSTMEM_TURNS=0"
        assert is_free(path)


def test_another_file_can_be_named(path: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_TURNS", str(here / "named"))
    assert turns_for(path).state == f"by {here / 'named'}"


@pytest.mark.parametrize("setting", ["", "1", "yes", "turns", "./turns"])
def test_another_setting_is_refused_by_its_name(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTMEM_TURNS", setting)
    with pytest.raises(ValueError, match=f"HOSTMEM_TURNS: '{setting}'; give 0 or the absolute"):
        turns_for(None)


@ODD
def test_a_file_that_is_named_must_be_one(
    odd: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTMEM_TURNS", str(odd / name))
    with pytest.raises(ValueError, match=rf"HOSTMEM_TURNS: '{odd / name}'.*Errno {number}"):
        turns_for(None)


def test_a_device_that_stalls_nobody_has_no_turns() -> None:
    with NO_TURNS:
        assert NO_TURNS.state == "not needed"


MAPS = """\
55d0a0000000-55d0a0001000 r--p 00000000 fe:00 1234                       /usr/bin/python3.11
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0000001000-7f0000002000 r--p 00000000 fe:00 99                         /opt/libcuda.so.d/libx.so
7f0000003000-7f0000004000 r--p 00000000 fe:00 77                         {path}
7f0000005000-7f0000006000 rw-p 00000000 00:00 0                          [stack]
"""


@pytest.mark.parametrize(
    "path", ["/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03", "/a b/libcuda.so.1 (deleted)"]
)
def test_the_library_is_found_where_it_is_mapped(tmp_path: Path, path: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(MAPS.format(path=path))
    assert driver_library(tmp_path) == path


def test_a_process_without_the_driver_has_no_library(tmp_path: Path) -> None:
    assert driver_library(tmp_path) is None
