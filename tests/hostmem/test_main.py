"""The command line: what is printed, and what the exit status says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostmem.__main__ import main

Capture = pytest.CaptureFixture[str]


def test_doctor_says_what_would_become_of_a_memory(capsys: Capture) -> None:
    assert main(["doctor", "--size", "1MiB", "--ranks", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kernel")
    assert "populate_write" in out
    assert "1 MiB for each of 2 processes on cpu" in out


def test_doctor_is_no_error_where_nothing_fits(capsys: Capture) -> None:
    assert main(["doctor", "--size", "1EiB", "--device", "cpu"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_fill_shows_where_the_memory_is(capsys: Capture) -> None:
    assert main(["fill", "--size", "4MiB", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "4 MiB filled" in out
    assert "method    move_pages, every page" in out
    assert "\n\n0 B |" in out
    assert "each 64 KiB" in out


@pytest.mark.parametrize("process", ["self", str(os.getpid())])
def test_placement_shows_the_largest_mappings(capsys: Capture, process: str) -> None:
    assert main(["placement", process, "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("address")
    assert " more with " in lines[4]
    assert any(line.startswith("on nodes ") for line in lines)


def test_placement_for_programs(capsys: Capture) -> None:
    assert main(["placement", "self", "--json", "--limit", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["process"] == "self"
    assert len(found["mappings"]) == 2
    assert found["mapping_count"] > 2


def free_number() -> int:
    """Return a number that no process has: the child that had it is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize("process", ["sel", "1.5", "²", "-5", ""])
def test_what_is_no_process_is_one_line(capsys: Capture, process: str) -> None:
    assert main(["placement", process]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"hostmem placement: error: {process!r} is no number of a process and not 'self'\n"
    )


def test_a_process_that_is_not_there_is_one_line(capsys: Capture) -> None:
    number = free_number()
    assert main(["placement", str(number)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"hostmem placement: error: there is no process {number}\n")


def test_a_number_that_no_process_can_have_is_one_line(capsys: Capture) -> None:
    assert main(["placement", "9" * 40]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_process_that_may_not_be_looked_into_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main(["placement", "1"]) == 2
    err = capsys.readouterr().err
    assert "CAP_SYS_PTRACE" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["placement"],
        ["placement", "self", "--limit", "0"],
        ["placement", "self", "--limit", "x"],
        ["doctor", "--ranks", "0"],
        ["doctor", "--size", "much"],
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        child = subprocess.run(
            [sys.executable, "-m", "hostmem", "placement", "self"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (child.returncode, child.stderr) == (0, "")
