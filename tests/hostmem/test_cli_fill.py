"""``python -m hostmem fill``: a line that lives, lines for a file, JSON, and a clean Ctrl-C."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import tty
from collections.abc import Iterator

import pytest

from hostmem import __main__ as module
from hostmem.__main__ import main
from hostmem.live_line import LiveLine, clock
from hostmem.testing import FaultPlan
from tests.hostmem.conftest import Child
from tests.threads import Spawn, Until

Capture = pytest.CaptureFixture[str]

MIB = 1 << 20
FILL = ["fill", "--size", "4MiB", "--device", "cpu", "--threads", "1"]
POPULATE = "madvise(MADV_POPULATE_WRITE)"
DONE = "4 MiB of 4 MiB (100%)"


class Terminal:
    """A pseudo-terminal in the place of standard error."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        tty.setraw(slave)
        self.stream = open(slave, "w")  # noqa: SIM115 - closed by the fixture
        os.set_blocking(self._master, False)
        self.text = ""

    def shown(self) -> str:
        """Give all that was drawn so far."""
        try:
            while part := os.read(self._master, 1 << 16):
                self.text += part.decode()
        except BlockingIOError:
            pass
        return self.text

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_a_terminal_has_one_line_that_is_drawn_again(
    terminal: Terminal,
    spawn: Spawn,
    until: Until,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        status = spawn(main, FILL)
        hold.wait_reached()
        # Two pieces of 512 KiB are one registration.
        until(lambda: re.search(r"\r1 MiB of 4 MiB \(25%\)  [^\r]+/s  ETA ", terminal.shown()))
        hold.release()
        assert status.result(20) == 0
    until(lambda: terminal.shown().endswith("\n"))
    assert terminal.text.count("\n") == 1
    assert terminal.text.rpartition("\r")[2].startswith(f"{DONE}  ")
    assert "filled" in terminal.text.rpartition("\r")[2]
    out, _ = capfd.readouterr()
    assert out.startswith("4 MiB filled in ")
    assert "\r" not in out


def test_a_failed_fill_ends_the_line_first(
    terminal: Terminal, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with FaultPlan() as plan:
        plan.fail(POPULATE, errno.ENOMEM, at=3)
        assert main(FILL) == 2
    line, error = terminal.shown().rpartition("\r")[2].splitlines()
    assert line.startswith("1 MiB of 4 MiB (25%)")
    assert error.startswith("hostmem fill: error: the fill stopped at 1 MiB")
    assert capfd.readouterr().out == ""


def test_what_is_no_terminal_has_whole_lines(capsys: Capture) -> None:
    assert main(FILL) == 0
    _, err = capsys.readouterr()
    assert "\r" not in err
    *_, last = err.splitlines()
    assert last.startswith(f"filled: {DONE}, ")


def test_whole_lines_come_every_now_and_then(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, spawn: Spawn, until: Until
) -> None:
    assert module._SAID_EVERY == 5.0
    monkeypatch.setattr(module, "_SAID_EVERY", 0.001)
    lines: list[str] = []

    def said() -> list[str]:
        lines.extend(capsys.readouterr().err.splitlines())
        return lines

    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        status = spawn(main, FILL)
        hold.wait_reached()
        until(lambda: sum("filling: 1 MiB of 4 MiB (25%), " in line for line in said()) > 3)
        hold.release()
        assert status.result(20) == 0
    assert said()[-1].startswith(f"filled: {DONE}, ")


def test_json_has_a_line_each_time_and_the_placement_last(capsys: Capture) -> None:
    assert main([*FILL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *progress, last = map(json.loads, out.splitlines())
    assert progress[-1]["state"] == last["state"] == "filled"
    assert (last["filled"], last["fraction"], last["eta"]) == (4 * MIB, 1.0, 0.0)
    assert sum(last["placement"]["bytes_by_node"].values()) == 4 * MIB
    assert last["constructed_seconds"] > 0
    assert all("placement" not in line for line in progress)


def test_json_says_what_failed(capsys: Capture) -> None:
    with FaultPlan() as plan:
        plan.fail(POPULATE, errno.ENOMEM, at=3)
        assert main([*FILL, "--json"]) == 2
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert (last["state"], last["error"], last["filled"]) == ("failed", "HostOOMError", MIB)
    assert err.startswith("hostmem fill: error: ")


INTERRUPTED = """
    import os, signal, threading
    from hostmem import lifetime
    from hostmem.__main__ import main
    from hostmem.testing import FaultPlan

    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = FaultPlan()
    hold = plan.hold("madvise(MADV_POPULATE_WRITE)", at=3)

    def interrupt():
        hold.wait_reached()
        (core,) = lifetime._live
        while core.watermark.frontier < 1 << 20:  # the pieces before are being registered
            os.sched_yield()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not core.watermark.closed:  # the piece is not over before that
            os.sched_yield()
        hold.release()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with plan:
        status = main({arguments})
        thread.join()
    raise SystemExit(status)
"""


def test_an_interrupt_gives_the_memory_back_and_says_what_was_reached(child: Child) -> None:
    done = child(INTERRUPTED.replace("{arguments}", repr(FILL)))
    assert (done.returncode, done.stdout) == (130, "")
    *_, last = done.stderr.splitlines()
    assert re.fullmatch(
        r"hostmem fill: interrupted; 1 MiB of 4 MiB \(25%\) was filled, at .*/s", last
    ), done.stderr


def test_an_interrupt_is_the_last_line_of_json(child: Child) -> None:
    done = child(INTERRUPTED.replace("{arguments}", repr([*FILL, "--json"])))
    assert done.returncode == 130
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["filled"], last["error"]) == (MIB, "KeyboardInterrupt")


def test_a_line_of_json_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Ctrl-C cannot come between a line and its end."""
    written: list[str] = []

    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Lines())
    assert main([*FILL, "--json"]) == 0
    lines = [text for text in written if text]
    assert lines
    for line in lines:
        assert line.endswith("\n")
        json.loads(line)


def test_warnings_of_the_library_are_said(child: Child) -> None:
    done = child(
        f"""
        from hostmem.__main__ import main
        from hostmem.testing import FaultPlan
        with FaultPlan() as plan:
            plan.fail("cuMemHostRegister", 801)
            raise SystemExit(main({FILL!r}))
        """
    )
    assert done.returncode == 2
    assert "hostmem: the fill stopped at 0 bytes: the driver refused to register" in done.stderr


def test_a_line_that_does_not_fit_loses_its_last_parts(terminal: Terminal) -> None:
    line = LiveLine(terminal.stream)
    line.draw(["x" * 40, "y" * 30, "z" * 30])
    line.draw(["short"])
    line.end()
    line.end()
    first, second = terminal.shown().split("\r")[1:]
    assert first == "x" * 40 + "  " + "y" * 30
    assert second == f"{'short':<72}\n"


def test_a_terminal_that_became_narrower_is_not_wrapped(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LiveLine(terminal.stream)
    line.draw(["x" * 60])
    for columns in (20, 2, 1):
        monkeypatch.setattr(os, "get_terminal_size", lambda _, n=columns: os.terminal_size((n, 1)))
        line.draw(["short", "y" * 60])
    assert terminal.shown().split("\r")[2:] == [f"{'short':<19}", "s", ""]


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_that_is_closed_is_no_error(child: Child, closed: int) -> None:
    done = child(
        f"""
        import os, sys
        os.close({closed})
        os.execv(sys.executable, [sys.executable, "-m", "hostmem", *{FILL}])
        """
    )
    assert done.returncode == 0
    assert ("filled:" in done.stderr) == (closed == 1)
    assert done.stdout.startswith("4 MiB filled in ") == (closed == 2)


@pytest.mark.parametrize(("seconds", "text"), [(5.6, "6 s"), (125, "2:05"), (3725, "1:02:05")])
def test_a_clock_shows_durations(seconds: float, text: str) -> None:
    assert clock(seconds) == text
