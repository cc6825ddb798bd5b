"""The figures of a replay, for programs and for people."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.replay import (
    Latency,
    LevelUse,
    ReplayResult,
    check_destination,
    format_summary,
    write_json,
)
from kvtier.replay.destination import same_destination

BYTES = ReplayResult(
    mode="bytes",
    trace="/data/trace.jsonl",
    policy="lru",
    device="cpu",
    requests=40,
    block_refs=1_000,
    hits=250,
    hits_by_level={"gpu": 150, "host": 100},
    verified_blocks=120,
    corrupt_blocks=0,
    bytes_moved={"gpu->host": 3 << 20, "host->gpu": 1 << 20},
    seconds=2.0,
    first_request_done_seconds=0.0125,
    host_tier_filled_seconds=1.5,
    levels={
        "gpu": LevelUse(slots=1_024, quota=64 << 20, used=1_024),
        "host": LevelUse(slots=8_192, quota=512 << 20, used=700),
    },
    latency_us=Latency(p50=800.0, p99=12_500.0),
)

METADATA = ReplayResult(
    mode="metadata",
    trace="trace.jsonl",
    policy="lru",
    requests=40,
    block_refs=1_000,
    hits=250,
    hits_by_level={"gpu": 250},
    seconds=0.001,
    levels={"gpu": LevelUse(slots=None, quota=None, used=750)},
)


def test_the_json_of_a_replay_with_bytes_has_every_figure() -> None:
    assert BYTES.to_json() == {
        "mode": "bytes",
        "trace": "/data/trace.jsonl",
        "policy": "lru",
        "device": "cpu",
        "capacity_blocks": None,
        "requests": 40,
        "block_refs": 1_000,
        "hits": 250,
        "hit_rate": 0.25,
        "hits_by_level": {"gpu": 150, "host": 100, "disk": 0},
        "verified_blocks": 120,
        "corrupt_blocks": 0,
        "lost_blocks": None,
        "bytes_moved": {"gpu->host": 3_145_728, "host->gpu": 1_048_576},
        "seconds": 2.0,
        "us_per_block_ref": 2_000.0,  # 2 s over 1,000 references
        "first_request_done_seconds": 0.0125,
        "host_tier_filled_seconds": 1.5,
        "levels": {
            "gpu": {"slots": 1_024, "quota": 67_108_864, "used": 1_024},
            "host": {"slots": 8_192, "quota": 536_870_912, "used": 700},
        },
        "latency_us": {"p50": 800.0, "p99": 12_500.0},
    }


def test_the_json_without_bytes_has_the_same_keys_and_null_for_what_needs_bytes() -> None:
    found = METADATA.to_json()
    assert list(found) == list(BYTES.to_json())
    assert {name for name, value in found.items() if value is None} == {
        "device",
        "capacity_blocks",
        "verified_blocks",
        "corrupt_blocks",
        "lost_blocks",
        "bytes_moved",
        "first_request_done_seconds",
        "host_tier_filled_seconds",
        "latency_us",
    }
    assert found["levels"] == {"gpu": {"slots": None, "quota": None, "used": 750}}


def test_without_references_rates_are_zero() -> None:
    empty = replace(METADATA, block_refs=0, hits=0)
    assert (empty.hit_rate, empty.us_per_block_ref) == (0.0, 0.0)
    assert "hit rate" in format_summary(empty)


@pytest.mark.parametrize(
    ("samples", "p50", "p99"),
    [
        ([7_000], 7.0, 7.0),
        ([2_000, 1_000], 1.0, 2.0),
        ([3_000, 1_000, 2_000], 2.0, 3.0),
        ([1_000 * n for n in range(100, 0, -1)], 50.0, 99.0),
        ([1_000 * n for n in range(1, 1_001)], 500.0, 990.0),
    ],
    ids=["one", "two", "three", "hundred", "thousand"],
)
def test_a_percentile_is_the_least_sample_that_covers_its_share(
    samples: list[int], p50: float, p99: float
) -> None:
    assert Latency.of(samples) == Latency(p50, p99)


def test_percentiles_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no sample"):
        Latency.of([])


def test_the_summary_of_a_replay_with_bytes() -> None:
    assert format_summary(BYTES).splitlines() == [
        "/data/trace.jsonl: 40 requests, 1,000 block references",
        "policy lru, device cpu",
        "",
        "hit rate           25.00%  250 hits",
        "verified              120  blocks compared, none corrupt",
        "first request     12.5 ms  host tier filled after 1.50 s",
        "per request        800 us  median; 99 in 100 within 12.5 ms",
        "in all             2.00 s  2.00 ms a block reference",
        "",
        "level          slots        used       quota          hits   of hits",
        "gpu            1,024       1,024      64 MiB           150     60.0%",
        "host           8,192         700     512 MiB           100     40.0%",
        "",
        "moved               bytes          rate",
        "gpu->host           3 MiB     1.5 MiB/s",
        "host->gpu           1 MiB     512 KiB/s",
    ]


def test_the_summary_without_bytes_has_no_empty_parts() -> None:
    assert format_summary(METADATA).splitlines() == [
        "trace.jsonl: 40 requests, 1,000 block references",
        "policy lru, metadata only",
        "",
        "hit rate           25.00%  250 hits",
        "in all            1.00 ms  1.00 us a block reference",
        "",
        "level          slots        used       quota          hits   of hits",
        "gpu        unbounded         750           -           250    100.0%",
    ]


def test_a_corrupt_block_stands_out() -> None:
    text = format_summary(replace(BYTES, corrupt_blocks=2))
    assert "blocks compared, 2 CORRUPT" in text


def test_a_host_tier_that_never_filled_is_said_to() -> None:
    assert "host tier never filled" in format_summary(replace(BYTES, host_tier_filled_seconds=None))


def test_the_summary_of_the_largest_replay_fits_a_screen() -> None:
    levels = ("gpu", "host", "disk")
    huge = replace(
        BYTES,
        trace="/a/very/long/path" * 20,
        requests=10**8 - 1,
        block_refs=10**11 - 1,
        hits=10**11 - 2,
        hits_by_level=dict.fromkeys(levels, 10**11 - 1),
        verified_blocks=10**9 - 1,
        seconds=99_999.0,
        levels=dict.fromkeys(
            levels, LevelUse(slots=10**9 - 1, quota=(1 << 60) - 1, used=10**9 - 1)
        ),
        bytes_moved={f"{a}->{b}": 10**18 for a in levels for b in levels if a != b},
    )
    lines = format_summary(huge).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24


def test_the_file_is_created_and_replaced_with_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(BYTES, path)
    assert json.loads(path.read_text()) == BYTES.to_json()
    write_json(METADATA, path)
    assert json.loads(path.read_text()) == METADATA.to_json()
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_reader_that_has_the_old_file_open_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with path.open() as reader:
        write_json(BYTES, path)
        assert reader.read() == "old"


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("result.json")
    write_json(BYTES, link)
    assert link.is_symlink()
    assert json.loads((tmp_path / "result.json").read_text())["requests"] == 40


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(METADATA, pipe)
        assert json.loads(os.read(reader, 1 << 16)) == METADATA.to_json()
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_figure_that_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        write_json(replace(BYTES, seconds=float("nan")), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_draft_that_cannot_take_its_place_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full", "a draft")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"the disk is full: '.*/result\.json'$"):
        write_json(BYTES, tmp_path / "result.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("act", [check_destination, lambda path: write_json(BYTES, path)])
def test_a_missing_directory_and_a_directory_are_refused(tmp_path: Path, act: object) -> None:
    assert callable(act)
    with pytest.raises(FileNotFoundError, match="no such directory") as caught:
        act(tmp_path / "missing" / "result.json")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match="not a file"):
        act(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="cannot be written"):
        check_destination(tmp_path / "result.json")


def test_the_check_creates_nothing(tmp_path: Path) -> None:
    check_destination(tmp_path / "result.json")
    assert os.listdir(tmp_path) == []


def test_a_name_that_just_fits_is_written(tmp_path: Path) -> None:
    path = tmp_path / f"a.{'b' * 253}"
    write_json(BYTES, path)
    assert path.stat().st_size > 0


def test_a_full_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="'/dev/full'") as caught:
        write_json(BYTES, "/dev/full")
    assert caught.value.errno == errno.ENOSPC


def test_a_pipe_is_written_in_place_also_through_a_link_that_is_no_path() -> None:
    reading, writing = os.pipe()
    write_json(BYTES, f"/proc/self/fd/{writing}")
    os.close(writing)
    with open(reading) as file:
        assert json.load(file) == BYTES.to_json()


def test_one_file_by_two_names_is_the_same_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("later")
    assert same_destination("./later", "link")
    assert not same_destination("later", "other")
    Path("later").touch()
    Path("hard").hardlink_to("later")
    Path("other").touch()
    assert same_destination("hard", tmp_path / "link")
    assert not same_destination("hard", "other")
