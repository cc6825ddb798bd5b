"""The benchmark of contention, from end to end on a driver that says yes, and its conclusions."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import contention, leaving
from bench.contention import Run
from bench.leaving import Left
from bench.probe import Stalls
from bench.rank import ARMS, LEAVES, Rank, RankFailedError, together
from tests.bench.conftest import Stub

ROOT = Path(__file__).parents[2]
SIZE = 8 << 20


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.contention", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


FILLING = [
    *("--parts", "filling", "--ranks", "1,2", "--size", "8MiB"),
    *("--rounds", "2", "--pages", "small,huge"),
]


def test_every_number_of_processes_runs_every_arm(tmp_path: Path, stub: Stub) -> None:
    out = tmp_path / "out.json"
    done = bench(*FILLING, "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    ours = [f"{name}, {pages}" for pages in ("small", "huge") for name in contention.OURS]
    arms = [contention.FIRST, *ours, *contention.PEERS]
    assert len(arms) == len(ARMS) + 1 + len(contention.OURS)
    (table,) = found["tables"]
    assert [row[0] for row in table["rows"]] == [f"{n} x {arm}" for n in (1, 2) for arm in arms]
    assert {len(found["filling"]["2"][name]) for name in ours} == {2}
    assert {len(found["filling"]["2"][name]) for name in contention.PEERS} == {1}
    assert len(found["filling"]["2"][contention.FIRST]) == 1
    assert [len(found["turns"][count]) for count in ("1", "2")] == [1, 2]
    assert len(found["findings"]) == 6


def test_a_peer_that_is_refused_is_said_and_the_rest_is_measured(
    tmp_path: Path, stub: Stub
) -> None:
    stub.refuse("cuMemCreate", 801)
    out = tmp_path / "out.json"
    done = bench("--parts", "filling", "--ranks", "2", "--size", "8MiB", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in 2 processes: cuMemCreate: CUDA_ERROR_NOT_SUPPORTED" in done.stdout
    found = json.loads(out.read_text())
    assert "cuMemCreate(HOST_NUMA)" not in found["filling"]["2"]
    assert "cuMemHostAlloc" in found["filling"]["2"]


def test_a_rank_that_fails_is_said_and_so_is_the_status(stub: Stub) -> None:
    stub.refuse("cuMemHostRegister", 1)
    done = bench(*FILLING)
    assert done.returncode == 1
    assert "rank 0 of 1: ended with status 1 during fill" in done.stdout


def test_without_a_gpu_nothing_is_measured() -> None:
    done = bench("--device", "cpu")
    assert done.returncode == 0
    assert "not measured" in done.stdout


@pytest.mark.parametrize("arguments", ["--rounds 1", "--parts filling,sleeping"])
def test_options_that_make_no_sense_are_refused(arguments: str) -> None:
    assert bench(*arguments.split()).returncode == 2


def test_others_are_watched_while_holders_leave(
    probe_library: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "NOBODY_FOR", 0.0)
    monkeypatch.setattr(leaving, "SETTLE", 0.0)
    found = leaving.leave_in_turn(SIZE, 1, probe_library, 0, ["attribute"])
    assert list(found) == ["nobody ends", *LEAVES]
    for (one,) in found.values():
        assert list(one.filler) == ["attribute"]
        assert list(one.server) == ["memory", "memset"]
    assert [row[0] for row in leaving.leaving_table(found, SIZE).rows] == list(found)


def test_the_watch_ends_when_the_last_holder_has(
    probe_library: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "SETTLE", 0.0)
    with (
        together(1, probe_library, 0, ["attribute"]) as (filler,),
        together(1, probe_library, 0, leaving.SERVER_CALLS) as (server,),
    ):
        one = leaving.leave("exit", SIZE, probe_library, 0, filler, server)
    for seen in (one.filler["attribute"], one.server["memory"]):
        assert seen.seconds > one.seconds


def test_a_holder_that_ends_otherwise_is_an_error(
    probe_library: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "SETTLE", 0.0)
    monkeypatch.setitem(LEAVES, "exit", 7)
    with (
        together(1, probe_library, 0, ["attribute"]) as (filler,),
        together(1, probe_library, 0, leaving.SERVER_CALLS) as (server,),
        pytest.raises(RankFailedError, match="holder 0 of 3: ended by exit with status 0"),
    ):
        leaving.leave("exit", SIZE, probe_library, 0, filler, server)


class FakeRank(Rank):
    """One that answers at once: filled so many seconds after the start, with such stalls."""

    def __init__(self, took: float, worst: float, blocked: float, closing: float) -> None:
        self.took = took
        self.stalls = Stalls(9, 1, worst, blocked, 1.0)
        self.closing = Stalls(9, 1, closing, closing, 1.0)
        self.orders: list[str] = []
        self.start = 0.0

    def tell(self, what: str, **arguments: Any) -> None:
        self.orders.append(what)
        self.start = arguments.get("at", self.start)

    def hear(self, patience: float = 0) -> dict[str, Any]:
        if self.orders[-1] == "free":
            return {"seen": {"attribute": self.closing}}
        return {"finish": self.start + self.took, "seen": {"attribute": self.stalls}}


def test_a_run_is_as_slow_as_its_slowest_rank_and_as_bad_as_its_worst() -> None:
    ranks = [FakeRank(1.0, 0.02, 0.5, 0.001), FakeRank(2.0, 0.01, 0.6, 0.003)]
    done = contention.run(ranks, "registered", SIZE, {})
    assert isinstance(done, Run)
    assert done.seconds == pytest.approx(2.0)
    assert (done.worst, done.blocked, done.closing_worst) == (0.02, 0.6, 0.003)
    assert ranks[0].start == ranks[1].start
    assert [rank.orders for rank in ranks] == [["fill", "free"]] * 2


# ------------------------------------------------------------------------------- the conclusions


def runs(
    seconds: float = 1.0, worst: float = 0.009, blocked: float = 0.03, first: float = 0.0
) -> list[Run]:
    return [Run(seconds, max(worst, first), blocked, 0.0)] + [Run(seconds, worst, blocked, 0.0)] * 2


def conclude(count: int, ours: list[Run]) -> list[bool | None]:
    free = runs(0.75, 0.02, 0.5)
    found: dict[int, contention.Runs] = {
        1: {"registered, small": [], contention.UNBOUND + ", small": []},
        count: {"registered, small": ours, contention.UNBOUND + ", small": free},
    }
    return [one.held for one in contention.filling_findings(found, "small", SIZE)]


@pytest.mark.parametrize(
    ("ours", "held"),
    [
        (runs(), [True, True, True]),
        (runs(first=0.01), [False, True, True]),
        (runs(blocked=0.031), [True, False, True]),
        (runs(seconds=0.75 / 0.71), [True, True, False]),
    ],
)
def test_eight_processes_are_held_against_the_bounds(
    ours: list[Run], held: list[bool | None]
) -> None:
    assert conclude(8, ours) == held


def test_fewer_processes_say_nothing_about_the_bounds() -> None:
    assert conclude(4, runs()) == [None, None, None]


def left(filler: float, server: float) -> list[Left]:
    seen = [Stalls(9, 1, worst, worst, 1.0) for worst in (filler, server)]
    return [Left({"attribute": seen[0]}, {"memory": seen[1], "memset": seen[1]}, 1.0, True)]


def test_every_way_to_leave_but_being_killed_is_held_against_the_bound() -> None:
    found = {way: left(0.03, 0.03) for way in ("nobody ends", *LEAVES)}
    found["SIGTERM"] = left(0.03, 0.041)
    found["close()"] = left(0.041, 0.03)
    found["SIGKILL"] = left(1.0, 1.0)
    answers = leaving.leaving_findings(found)
    assert [one.held for one in answers] == [True, True, False, False]
    assert [one.question.rpartition(" by ")[2] for one in answers] == [
        "exit",
        "an exception",
        "SIGTERM",
        "close()",
    ]


def test_a_fill_that_ended_too_soon_is_said() -> None:
    found = {"exit": left(0.1, 0.1), "SIGTERM": left(0.1, 0.1)}
    assert leaving.leaving_table(found, SIZE).note == ""
    found["exit"] = [dataclasses.replace(one, filling=False) for one in found["exit"]]
    assert "ended before the watch did: exit." in leaving.leaving_table(found, SIZE).note


def test_peers_run_in_some_rounds_and_the_first_fill_once() -> None:
    def rounds(label: str) -> list[int]:
        return [turn for turn in range(-1, 3) if contention.is_due(label, turn, 1)]

    assert rounds(contention.FIRST) == [-1]
    assert rounds("registered, small") == [0, 1, 2]
    assert rounds("cuMemHostAlloc") == [0]


def test_cpus_are_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [contention.thread_count("share", ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert contention.thread_count("auto", 8) == "auto"
    assert contention.thread_count("3", 8) == 3


def test_sizes_that_are_not_free_are_reduced_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert contention.fitting(1 << 20, 2) == 1 << 20
    assert capsys.readouterr().out == ""
    most = contention.fitting(1 << 60, 2)
    assert 0 < most < 1 << 50
    assert most % contention.GRAIN == 0
    assert "2 x 1 EiB are not free here" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="too little to measure anything with"):
        contention.fitting(1 << 60, 1_000_000)
