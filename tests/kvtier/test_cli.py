"""The command line as a user meets it: output, exit status, and what is left on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hostmem.errors import CorruptedError, HostOOMError
from hostmem.testing import FaultPlan
from kvtier.__main__ import main
from kvtier.config_file import load_config
from kvtier.replay import (
    Latency,
    LevelUse,
    Progress,
    Recording,
    ReplayOptions,
    ReplayResult,
    Request,
)

KVTIER = [sys.executable, "-W", "error", "-m", "kvtier"]


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVTIER, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def line(ids: list[int]) -> str:
    return json.dumps(
        {
            "timestamp": 0,
            "input_length": 512 * len(ids),
            "output_length": 1,
            "hash_ids": ids,
        }
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(line, ([1, 2], [1, 3], [1, 2]))))
    return path


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    """Check for status 2 and one line on standard error that holds the message."""
    assert done.returncode == 2
    assert done.stdout == ""
    (only,) = done.stderr.splitlines()
    assert only.startswith("kvtier ")
    assert ": error: " in only
    assert message in only


# ------------------------------------------------------------------------------- metadata


def test_a_metadata_replay_counts_hits_of_an_unbounded_cache(trace: Path) -> None:
    done = run("replay", trace, "--metadata-only", "--json", "out.json", cwd=trace.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hit rate" in done.stdout
    found = json.loads((trace.parent / "out.json").read_text())
    # Only 1, 2 and 3 are ever absent: of six references, the 1 of the second request and both of
    # the third hit.
    assert (found["requests"], found["block_refs"], found["hits"]) == (3, 6, 3)
    assert found["hit_rate"] == 0.5
    assert found["hits_by_level"] == {"gpu": 3, "host": 0, "disk": 0}
    assert found["levels"] == {"gpu": {"slots": None, "quota": None, "used": 3}}
    assert (found["mode"], found["policy"], found["trace"]) == ("metadata", "lru", str(trace))
    assert found["seconds"] > 0


def test_a_metadata_replay_evicts_at_its_capacity(trace: Path) -> None:
    run("replay", trace, "--metadata-only", "--capacity-blocks", 2, "--json", "out.json",
        cwd=trace.parent)  # fmt: skip
    found = json.loads((trace.parent / "out.json").read_text())
    # {1, 2}; 1 hits, 3 drops 2; 1 hits, 2 drops 3.
    assert found["hits"] == 2
    assert found["capacity_blocks"] == 2
    assert found["levels"] == {"gpu": {"slots": 2, "quota": None, "used": 2}}


def test_the_limit_takes_the_first_requests(trace: Path) -> None:
    run("replay", trace, "--metadata-only", "--limit", 2, "--json", "out.json", cwd=trace.parent)
    found = json.loads((trace.parent / "out.json").read_text())
    assert (found["requests"], found["block_refs"], found["hits"]) == (2, 4, 1)


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "bad.jsonl:2: not JSON"),
        ("[]", "bad.jsonl:2: expected an object"),
        (line([1]).replace("512", "-512"), "bad.jsonl:2: input_length: -512 is negative"),
        (line([1]).replace("[1]", "[1.0]"), "bad.jsonl:2: hash_ids: expected integers, found 1.0"),
        (
            line([1]).replace("[1]", "[true]"),
            "bad.jsonl:2: hash_ids: expected integers, found true",
        ),
        (line([1]).replace('"timestamp"', '"time"'), "bad.jsonl:2: field 'timestamp' is missing"),
    ],
    ids=["not-json", "not-an-object", "negative", "float-id", "bool-id", "missing-field"],
)
@pytest.mark.parametrize("mode", [["--metadata-only"], ["--device", "cpu"]])
def test_a_malformed_line_is_refused_by_its_number(
    tmp_path: Path, text: str, message: str, mode: list[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text(f"{line([1])}\n{text}\n")
    done = run("replay", "bad.jsonl", *mode, "--json", "out.json", cwd=tmp_path)
    refused(done, f"kvtier replay: error: {message}")
    assert os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND"),
        ("serve", "invalid choice: 'serve'"),
        ("replay", "required: TRACE"),
        ("replay missing.jsonl", "missing.jsonl: No such file or directory"),
        ("replay .", ".: Is a directory"),
        ("replay trace.jsonl --gpu-quota 0", "gpu.quota: 0 B"),
        ("replay trace.jsonl --gpu-quota=-1MiB", "gpu.quota: -1 MiB"),
        ("replay trace.jsonl --gpu-quota 1MiB", "gpu.quota: 1 MiB"),  # below one grain of 2 MiB
        ("replay trace.jsonl --gpu-quota bananas", "--gpu-quota: 'bananas' is no size"),
        ("replay trace.jsonl --gpu-quota none", "--gpu-quota: 'none' is no size"),
        ("replay trace.jsonl --host-quota 0", "host.quota: 0 B"),
        ("replay trace.jsonl --disk-quota 0 --disk-path .", "disk.quota: 0 B"),
        ("replay trace.jsonl --disk-quota 4MiB", "both a quota and a path"),
        ("replay trace.jsonl --disk-path .", "both a quota and a path"),
        ("replay trace.jsonl --disk-quota 4MiB --disk-path missing", "disk.path: 'missing'"),
        ("replay trace.jsonl --disk-quota 4MiB --disk-path trace.jsonl", "not a directory"),
        ("replay trace.jsonl --block-bytes 0", "size: 0 B"),
        ("replay trace.jsonl --block-bytes 65MiB", "which holds none of its pages"),
        ("replay trace.jsonl --tokens-per-block 0", "--tokens-per-block: expected a whole number"),
        ("replay trace.jsonl --device tpu", "--device: expected cpu, auto or a GPU ordinal"),
        ("replay trace.jsonl --device -1", "--device"),
        ("replay trace.jsonl --policy best", "--policy: invalid choice: 'best'"),
        ("replay trace.jsonl --limit 0", "--limit: expected a whole number from 1, not '0'"),
        ("replay trace.jsonl --capacity-blocks 4", "--capacity-blocks needs --metadata-only"),
        ("replay trace.jsonl --metadata-only --capacity-blocks 0", "from 1, not '0'"),
        ("replay trace.jsonl --metadata-only --capacity-blocks -5", "from 1, not '-5'"),
        ("replay trace.jsonl --metadata-only --capacity-blocks 1.5", "from 1, not '1.5'"),
        ("replay trace.jsonl --metadata-only --gpu-quota 4MiB", "--gpu-quota: without meaning"),
        ("replay trace.jsonl --metadata-only --host-quota none", "--host-quota: without meaning"),
        ("replay trace.jsonl --metadata-only --disk-path .", "--disk-path: without meaning"),
        ("replay trace.jsonl --metadata-only --json missing/a.json", "no such directory"),
        ("replay trace.jsonl --metadata-only --json .", "is a directory, not a file"),
        ("replay trace.jsonl --metadata-only --json trace.jsonl", "would replace the trace"),
        ("replay trace.jsonl --metadata-only --html missing/a.html", "no such directory"),
        ("replay trace.jsonl --metadata-only --html trace.jsonl", "would replace the trace"),
        ("replay trace.jsonl --metadata-only --html a --json a", "name the same file"),
        ("replay trace.jsonl --metadata-only --html a --json ./a", "name the same file"),
        ("replay trace.jsonl --meta", "unrecognized arguments: --meta"),
        ("plan", "required: CONFIG"),
        ("plan missing.toml", "missing.toml: No such file or directory"),
        ("plan trace.jsonl", "trace.jsonl: the name must end in .toml or .json"),
        ("plan trace.jsonl --device cpu", "--device needs --check"),
        ("plan trace.jsonl --check --device tpu", "--device: expected cpu, auto or a GPU ordinal"),
        ("trace --requests 0", "--requests: expected a whole number from 1, not '0'"),
        ("trace --seed x", "--seed: invalid int value: 'x'"),
        ("trace --out missing/trace.jsonl", "missing/trace.jsonl: No such file or directory"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused(
    trace: Path, arguments: str, message: str
) -> None:
    before = trace.read_bytes()
    done = run(*arguments.split(), cwd=trace.parent)
    if arguments.startswith(("replay", "trace", "plan")):
        refused(done, message)
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("kvtier: error: ")
        assert message in done.stderr
    assert os.listdir(trace.parent) == ["trace.jsonl"]
    assert trace.read_bytes() == before


def test_a_file_that_cannot_be_written_costs_nobody_the_figures(trace: Path) -> None:
    done = run("replay", trace, "--metadata-only", "--html", "/dev/full", cwd=trace.parent)
    assert (done.returncode, done.stderr) == (
        2,
        "kvtier replay: error: /dev/full: No space left on device\n",
    )
    assert "hit rate           50.00%" in done.stdout


def test_a_trace_may_have_a_name_that_is_no_text(trace: Path) -> None:
    odd = trace.rename(os.fsdecode(os.fsencode(trace.parent) + b"/t\xff<b>.jsonl"))
    done = run("replay", odd, "--metadata-only", "--html", "page", cwd=trace.parent)
    assert (done.returncode, done.stderr) == (0, "")
    page = (trace.parent / "page").read_text()
    assert "<title>Replay of t\\udcff&lt;b&gt;.jsonl</title>" in page


def test_the_directory_of_the_json_is_checked_before_the_replay(trace: Path) -> None:
    trace.write_text("not a trace")  # would be refused too, but later
    done = run("replay", trace, "--metadata-only", "--json", "missing/a.json", cwd=trace.parent)
    refused(done, "missing: there is no such directory")


# ---------------------------------------------------------------------------------- trace


def test_a_trace_goes_to_standard_output_or_a_file(tmp_path: Path) -> None:
    shown = run("trace", "--seed", 7, "--requests", 30, cwd=tmp_path)
    saved = run("trace", "--seed", 7, "--requests", 30, "--out", "t.jsonl", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert (saved.returncode, saved.stdout, saved.stderr) == (0, "", "")
    assert shown.stdout == (tmp_path / "t.jsonl").read_text()
    assert len(shown.stdout.splitlines()) == 30


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a trace that outlives the test, and wait for its first line.

    SIGINT is given its usual meaning first: a child of a background job inherits it ignored.
    """
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('kvtier', run_name='__main__', alter_sys=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "trace", "--requests", str(10**9)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().startswith('{"timestamp": 0, ')
            yield child
        finally:
            child.kill()  # where a test failed


def test_an_interrupt_ends_it_without_a_traceback(endless: subprocess.Popen[str]) -> None:
    endless.send_signal(signal.SIGINT)
    _, errors = endless.communicate(timeout=30)
    assert (endless.returncode, errors) == (130, "kvtier trace: interrupted\n")


def test_a_reader_that_goes_away_ends_it_in_silence(endless: subprocess.Popen[str]) -> None:
    assert endless.stdout is not None
    assert endless.stderr is not None
    endless.stdout.close()
    errors = endless.stderr.read()
    assert (endless.wait(timeout=30), errors) == (141, "")


# ----------------------------------------------------------------------------------- plan

CONFIG = """
tokens_per_block = 16
[[cache_tiers]]
tier = "gpu"
quota = "8MiB"
[[cache_tiers]]
tier = "host"
quota = "1PiB"
page_mode = "hugetlb-12KiB"
[[cache_tiers]]
tier = "disk"
quota = "4TiB"
path = "/a/machine/that/is/not/here"
[[layers]]
count = 40
buffers = { key = "16KiB", value = "16KiB" }
[[layers]]
count = 40
sliding_window_size = 1024
buffers = { key = "16KiB", value = "16KiB" }
"""


def test_a_plan_for_another_machine_is_printed(tmp_path: Path) -> None:
    (tmp_path / "cache.toml").write_text(CONFIG)
    done = run("plan", "cache.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{load_config(tmp_path / 'cache.toml').plan()}\n"


def test_a_plan_is_printed_for_programs(tmp_path: Path) -> None:
    (tmp_path / "cache.toml").write_text(CONFIG)
    done = run("plan", "cache.toml", "--json", cwd=tmp_path)
    plan = load_config(tmp_path / "cache.toml").plan()
    assert json.loads(done.stdout) == json.loads(json.dumps(plan.as_json()))


def test_a_plan_can_be_checked_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cache.toml"
    path.write_text(CONFIG)
    assert main(["plan", str(path), "--check", "--device", "cpu"]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert "host.page_mode: 'hugetlb-12KiB'" in errors
    assert "disk.path: '/a/machine/that/is/not/here' does not exist" in errors

    here = CONFIG.replace("hugetlb-12KiB", "small").replace("/a/machine/that/is/not/here", "/")
    path.write_text(here)
    assert main(["plan", str(path), "--check", "--device", "cpu"]) == 2
    assert "host.quota: 1 PiB (1,125,899,906,842,624 B) is above the" in capsys.readouterr().err

    path.write_text(here.replace("1PiB", "8MiB").replace("4TiB", "8MiB"))
    assert main(["plan", str(path), "--check", "--device", "cpu"]) == 0
    assert capsys.readouterr() == (f"{load_config(path).plan()}\n", "")


def test_a_plan_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache.toml").write_text(CONFIG)
    with FaultPlan() as plan:
        assert main(["plan", str(tmp_path / "cache.toml")]) == 0
    assert plan.log == []


def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache.toml").write_text(CONFIG.replace('"8MiB"', '"1MiB"'))
    refused(run("plan", "cache.toml", cwd=tmp_path), "gpu.quota: 1 MiB")


def test_a_slip_in_a_configuration_is_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "cache.toml").write_text(CONFIG.replace("path =", "folder ="))
    refused(run("plan", "cache.toml", cwd=tmp_path), "cache.toml: cache_tiers[2].path: missing")


# -------------------------------------------------------------------------- with real bytes

Engine = Callable[[list[Request], ReplayOptions, Progress, Recording | None], ReplayResult]

RESULT = ReplayResult(
    mode="bytes",
    trace="trace.jsonl",
    policy="lru",
    device="cpu",
    requests=3,
    block_refs=6,
    hits=3,
    hits_by_level={"gpu": 3},
    verified_blocks=9,
    corrupt_blocks=0,
    bytes_moved={},
    seconds=1.0,
    levels={"gpu": LevelUse(slots=1_024, quota=64 << 20, used=3)},
    latency_us=Latency(1.0, 2.0),
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    """Give a function that puts another engine in the place of the real one."""

    def install(replay_bytes: Engine) -> None:
        module = ModuleType("kvtier.replay.engine")
        module.__dict__["replay_bytes"] = replay_bytes
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_the_engine_gets_the_defaults(trace: Path, engine: Callable[[Engine], None]) -> None:
    seen: list[ReplayOptions] = []

    def replay(
        requests: list[Request], options: ReplayOptions, _: Progress, recording: Recording | None
    ) -> ReplayResult:
        assert recording is None  # costs nothing where it is not asked for
        assert [request.hash_ids for request in requests] == [[1, 2], [1, 3], [1, 2]]
        seen.append(options)
        return RESULT

    engine(replay)
    assert main(["replay", str(trace)]) == 0
    assert seen == [
        ReplayOptions(
            trace=str(trace),
            gpu_quota=67_108_864,
            host_quota=536_870_912,
            disk_quota=None,
            disk_path=None,
            block_bytes=65_536,
            tokens_per_block=512,
            device="auto",
            policy="lru",
        )
    ]


def test_the_engine_gets_what_was_asked(trace: Path, engine: Callable[[Engine], None]) -> None:
    seen: list[ReplayOptions] = []

    def replay(_: list[Request], options: ReplayOptions, *__: object) -> ReplayResult:
        seen.append(options)
        return RESULT

    engine(replay)
    folder = str(trace.parent)
    # fmt: off
    options = [
        "--gpu-quota", "4MiB", "--host-quota", "none", "--disk-quota", "8MiB",
        "--block-bytes", "4KiB", "--tokens-per-block", "16", "--device", "0",
    ]
    # fmt: on
    assert main(["replay", str(trace), *options, "--disk-path", folder]) == 0
    assert seen == [
        ReplayOptions(
            trace=str(trace),
            gpu_quota=4 << 20,
            host_quota=None,
            disk_quota=8 << 20,
            disk_path=folder,
            block_bytes=4_096,
            tokens_per_block=16,
            device=0,
            policy="lru",
        )
    ]
    config = seen[0].config()
    assert [(tier.tier, tier.quota) for tier in config.cache_tiers] == [
        ("gpu", 4 << 20),
        ("disk", 8 << 20),
    ]
    assert config.tokens_per_block == 16
    (layer,) = config.layers
    assert [(buffer.role, buffer.size) for buffer in layer.buffers] == [("kv", 4_096)]


def test_corrupt_blocks_are_status_1_after_all_is_written(
    trace: Path, engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(lambda *_: replace(RESULT, corrupt_blocks=2))
    path = trace.parent / "out.json"
    assert main(["replay", str(trace), "--json", str(path)]) == 1
    out, errors = capsys.readouterr()
    assert "2 CORRUPT" in out
    assert errors == (
        "kvtier replay: error: 2 of 9 blocks came back with bytes other than those stored\n"
    )
    assert json.loads(path.read_text())["corrupt_blocks"] == 2


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CorruptedError("slot 4 is in two places"), 1, "slot 4 is in two places"),
        (HostOOMError("node 0 has 1 GiB free"), 2, "node 0 has 1 GiB free"),
        (ValueError("device: there is no GPU 7"), 2, "device: there is no GPU 7"),
        (OSError(28, "No space left on device", "/disk/pool"), 2,
         "/disk/pool: No space left on device"),
    ],
    ids=["corrupted", "memory", "device", "disk"],
)  # fmt: skip
def test_what_stops_the_engine_is_one_line(
    trace: Path,
    engine: Callable[[Engine], None],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    message: str,
) -> None:
    def fail(*_: object) -> ReplayResult:
        raise error

    engine(fail)
    assert main(["replay", str(trace)]) == status
    assert capsys.readouterr() == ("", f"kvtier replay: error: {message}\n")
