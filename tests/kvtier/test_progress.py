"""The progress line: on a terminal only, seldom, and ended properly."""

from __future__ import annotations

import io
import os
import sys
import termios
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import pytest

from kvtier.replay import Progress
from kvtier.replay import progress as module


@dataclass
class Terminal:
    """The two ends of a pseudo-terminal of 100 columns that changes no character."""

    master: int
    slave: TextIO

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.slave.fileno(), (24, columns))

    def shown(self) -> str:
        """Take what was written since the last call.

        A pseudo-terminal hands bytes on when it gets round to it; a mark behind them says that
        all have come.
        """
        self.slave.write("\0")
        self.slave.flush()
        taken = b""
        while not taken.endswith(b"\0"):
            taken += os.read(self.master, 1 << 16)
        return taken[:-1].decode()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    master, slave = os.openpty()
    tty.setraw(slave)
    with open(slave, "w") as stream:
        terminal = Terminal(master, stream)
        terminal.resize(100)
        yield terminal
    os.close(master)


@dataclass
class Clock:
    """A clock that stands still until it is told otherwise."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def test_the_line_says_done_rate_and_time_left(terminal: Terminal, clock: Clock) -> None:
    with Progress(400, terminal.slave) as progress:
        clock.now = 2.0
        progress.update(
            100,
            block_refs=1_000,
            hits=250,
            hits_by_level={"gpu": 200, "host": 50},
            host_filled=0.5,
        )
        # 100 requests in 2 s are 50 a second; the other 300 take 6 s.
        assert terminal.shown() == (
            "\r100/400 (25%)  hit rate 25.0%  50 req/s  ETA 6 s  host 50% filled  gpu 200 host 50"
        )


def test_what_is_not_known_is_left_out(terminal: Terminal, clock: Clock) -> None:
    with Progress(400, terminal.slave) as progress:
        progress.update(0)
        assert terminal.shown() == "\r0/400 (0%)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "59 s"), (60, "1:00"), (3_599, "59:59"), (3_725, "1:02:05")]
)
def test_a_long_time_left_is_shown_as_a_clock(
    terminal: Terminal, clock: Clock, seconds: int, text: str
) -> None:
    with Progress(1 + seconds, terminal.slave) as progress:
        clock.now = 1.0
        progress.update(1)
        assert terminal.shown().endswith(f"1 req/s  ETA {text}")


def test_it_draws_at_most_ten_times_a_second(terminal: Terminal, clock: Clock) -> None:
    with Progress(2_000, terminal.slave) as progress:
        for done in range(1_000):  # a millisecond each: 0.000 to 0.999 s
            clock.now = done / 1_000
            progress.update(done)
        assert terminal.shown().count("\r") == 10


def test_the_last_request_is_drawn_at_once(terminal: Terminal, clock: Clock) -> None:
    with Progress(2, terminal.slave) as progress:
        progress.update(1)
        progress.update(2)
    assert terminal.shown() == "\r1/2 (50%)\r2/2 (100%)\n"


def test_a_shorter_line_wipes_out_the_longer_one(terminal: Terminal, clock: Clock) -> None:
    with Progress(9, terminal.slave) as progress:
        progress.update(1, host_filled=0.25)
        long = "1/9 (11%)  host 25% filled"
        progress.update(9)
    assert terminal.shown() == f"\r{long}\r{'9/9 (100%)':<{len(long)}}\n"


def test_parts_that_do_not_fit_are_left_out_whole(terminal: Terminal, clock: Clock) -> None:
    terminal.resize(26)  # 25 to use, and "100/400 (25%)  hit rate 25.0%" takes 29
    with Progress(400, terminal.slave) as progress:
        progress.update(100, block_refs=4, hits=1)
        assert terminal.shown() == "\r100/400 (25%)"


def test_a_terminal_that_does_not_say_its_width_has_80_columns(
    terminal: Terminal, clock: Clock
) -> None:
    terminal.resize(0)
    with Progress(400, terminal.slave) as progress:
        progress.update(100, hits_by_level={"gpu": 10**80}, host_filled=1.0)
        assert terminal.shown() == "\r100/400 (25%)  host 100% filled"


def test_an_exception_leaves_the_line_ended(terminal: Terminal, clock: Clock) -> None:
    def replay() -> None:
        with Progress(2, terminal.slave) as progress:
            progress.update(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay()
    assert terminal.shown() == "\r1/2 (50%)\n"


def test_nothing_is_ended_that_was_never_drawn(terminal: Terminal) -> None:
    with Progress(2, terminal.slave):
        pass
    assert terminal.shown() == ""


def test_after_the_end_nothing_is_drawn(terminal: Terminal) -> None:
    with Progress(2, terminal.slave) as progress:
        pass
    progress.update(2)
    assert terminal.shown() == ""


def test_it_is_silent_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(2, stream) as progress:
        progress.update(1)
        progress.update(2)
    assert stream.getvalue() == ""


def test_it_draws_on_standard_error_unless_told_otherwise(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal.slave)
    with Progress(1) as progress:
        progress.update(0)
    assert terminal.shown().startswith("\r0/1 (0%)")


def test_without_a_standard_error_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # it was closed
    with Progress(1) as progress:
        progress.update(1)
