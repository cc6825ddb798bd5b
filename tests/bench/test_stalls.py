"""The benchmark of stalls, from end to end on a driver that says yes, and what it concludes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import stalls
from bench.probe import CALLS, Stalls
from tests.bench.conftest import Stub

ROOT = Path(__file__).parents[2]
TORCH = """
import os
uint8 = "uint8"
def zeros(count, device):
    assert (count, device) == (1, "cuda:0")
def empty(size, dtype, pin_memory):
    assert (dtype, pin_memory) == (uint8, True)
    assert "pinned_num_register_threads:8" in os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    return bytearray(size)
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.stalls", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_all_arms_are_measured_and_held_against_the_bounds(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = bench("--size", "4MiB", "--rounds", "2", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    ours = ["default, small", "unbound, small", "default, huge", "unbound, huge"]
    arms = ["nothing", *ours, "cuMemHostAlloc", "torch, 8 threads"]
    longest, blocked, closing = found["tables"]
    assert [row[0] for row in longest["rows"]] == arms
    assert [row[0] for row in blocked["rows"]] == arms
    assert [row[0] for row in closing["rows"]] == [*ours, "cuMemHostAlloc"]
    assert longest["columns"] == ["", "GiB/s", *CALLS]
    assert found["not_measured"] == []
    for name in arms:
        assert [list(run) for run in found["filling"][name]] == [list(CALLS)] * 2
    assert len(found["findings"]) == 6
    assert done.stdout.count("rate of the fill") == 2


def test_settings_are_swept(tmp_path: Path, stub: Stub) -> None:
    settings = "--sweep --units 2MiB,4MiB --threads 1,auto --budgets none,1 --calls attribute"
    out = tmp_path / "out.json"
    done = bench(*settings.split(), "--size", "4MiB", "--rounds", "2", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = json.loads(out.read_text())["tables"]
    names = [row[0] for row in table["rows"]]
    assert len(set(names)) == 2 * 2 * 2 * 2
    assert "huge, 1 ms, auto threads, 4 MiB" in names
    assert "small, none, 1 threads, 2 MiB" in names
    assert sum(row[2] == "1.00" for row in table["rows"]) >= 2  # the fastest of each page size


def test_without_a_gpu_nothing_is_measured() -> None:
    done = bench("--device", "cpu")
    assert done.returncode == 0
    assert "not measured" in done.stdout


def test_more_than_there_is_is_refused_with_what_there_is(stub: Stub) -> None:
    done = bench("--size", "1024TiB")
    assert done.returncode == 1
    assert "1 PiB and 1 GiB to spare are not free here: give --size" in done.stdout


def test_without_a_compiler_it_says_what_is_missing(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-cc")
    done = bench("--size", "4MiB")
    assert done.returncode == 1
    assert "needs a C compiler" in done.stdout


def arm(worst: list[float], blocked: list[float]) -> stalls.Arm:
    made = stalls.Arm(stalls.GIB)
    for longest, share in zip(worst, blocked, strict=True):
        calm = Stalls(calls=9, long_calls=0, worst=1e-6, blocked=0.0, seconds=1.0)
        stalled = Stalls(calls=9, long_calls=1, worst=longest, blocked=share, seconds=1.0)
        made.filling.append({"attribute": calm, "launch": stalled})
    return made


def findings(small: dict[str, Any], huge: dict[str, Any]) -> list[bool | None]:
    free = arm([0.02] * 3, [0.9] * 3)
    arms = {
        "default, small": arm(small["worst"], small["blocked"]),
        "unbound, small": free,
        "default, huge": arm(huge["worst"], huge["blocked"]),
        "unbound, huge": free,
    }
    times = {
        "default, small": small["seconds"],
        "unbound, small": [1.0] * 3,
        "default, huge": huge["seconds"],
        "unbound, huge": [1.0] * 3,
    }
    return [one.held for one in stalls.findings(arms, times)]


GOOD = {"worst": [0.003] * 3, "blocked": [0.10] * 3, "seconds": [1.25] * 3}


def test_what_keeps_the_bounds_is_held() -> None:
    assert findings(GOOD, GOOD) == [True] * 6


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"worst": [0.001, 0.001, 0.0031]}, [False, True, True]),  # once is too often
        ({"blocked": [0.0, 0.16, 0.16]}, [True, False, True]),  # the median
        ({"blocked": [0.1, 0.1, 0.9]}, [True, True, True]),
        ({"seconds": [1.0, 1.3, 1.3]}, [True, True, False]),
    ],
)
def test_what_breaks_a_bound_is_not(change: dict[str, Any], broken: list[bool]) -> None:
    assert findings({**GOOD, **change}, GOOD) == [*broken, True, True, True]


def test_huge_pages_are_held_to_a_smaller_share() -> None:
    huge = {**GOOD, "blocked": [0.12] * 3}
    assert findings(huge, huge) == [True, True, True, True, False, True]


def test_the_warm_up_round_counts_for_nothing() -> None:
    slow = {**GOOD, "worst": [1.0, *GOOD["worst"]], "blocked": [1.0, *GOOD["blocked"]]}
    assert findings(slow, slow) == [True] * 6
