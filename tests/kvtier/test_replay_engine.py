"""The replay with real bytes: its counts against a model, and that wrong bytes do not pass."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hostmem import CudaDevice
from hostmem.testing import FakeDriver, FaultPlan
from kvtier import TierStorage
from kvtier.__main__ import main
from kvtier.replay import Progress, ReplayOptions, ReplayResult, Request
from kvtier.replay.engine import replay_bytes
from kvtier.replay.trace import read_trace
from kvtier.transfer.memory import DiskPool, MemoryPool

MIB = 1 << 20
TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "conversation_trace.jsonl"
NAMES = ("gpu", "host", "disk")


def requests(*ids: Sequence[int]) -> list[Request]:
    return [Request(n, 512 * len(row), 1, list(row)) for n, row in enumerate(ids)]


@pytest.fixture
def replay(tmp_path: Path) -> Callable[..., ReplayResult]:
    """Replay requests over tiers of so many MiB."""

    def run(
        rows: Sequence[Request],
        gpu: int = 2,
        host: int | None = 2,
        disk: int | None = 2,
        *,
        block: int = MIB // 4,
        device: Any = "cpu",
    ) -> ReplayResult:
        options = ReplayOptions(
            trace="made up",
            gpu_quota=gpu * MIB,
            host_quota=None if host is None else host * MIB,
            disk_quota=None if disk is None else disk * MIB,
            disk_path=None if disk is None else str(tmp_path),
            block_bytes=block,
            device=device,
        )
        return replay_bytes(rows, options, Progress(len(rows)))

    return run


# --------------------------------------------------------------------------------- the model


class Model:
    """Exclusive levels in least recently used order, as plain lists, the least recent first.

    A request's blocks are looked up in parts of half the hot level. The blocks of a part that are
    there are held together while they come up: they keep their slots below until the hot level has
    made room, and none of them goes down meanwhile.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.most = max(sizes[0] // 2, 1)
        self.levels: list[list[int]] = [[] for _ in sizes]
        self.held: set[int] = set()
        self.found_in: Counter[str] = Counter()
        self.hits = 0
        self.came_up = 0

    def serve(self, ids: Sequence[int]) -> None:
        at = 0
        while at < len(ids):
            part = ids[at : at + self.most]
            hits = self.use(part)
            at += hits
            if hits < len(part):
                break
        self.hits += at
        for key in ids[at:]:
            level = self.level_of(key)
            if level is None:
                if len(self.levels[0]) == self.sizes[0]:
                    self.push_out(0)
                self.levels[0].append(key)
            else:
                self.levels[level].remove(key)
                self.levels[level].append(key)

    def use(self, part: Sequence[int]) -> int:
        """Bring the leading blocks of a part that are there up; count them."""
        found: dict[int, int] = {}
        hits = 0
        for key in part:
            level = self.level_of(key)
            if level is None:
                break
            # Named again, it is in the hot level by then.
            self.found_in[NAMES[0 if key in found else level]] += 1
            found.setdefault(key, level)
            hits += 1
        self.held = set(found)
        coming = [key for key, level in found.items() if level]
        for _ in range(len(coming) - (self.sizes[0] - len(self.levels[0]))):
            self.push_out(0)
        for key, level in found.items():
            self.levels[level].remove(key)
            self.levels[0].append(key)
        self.came_up += len(coming)
        self.held = set()
        return hits

    def level_of(self, key: int) -> int | None:
        return next((n for n, level in enumerate(self.levels) if key in level), None)

    def push_out(self, level: int) -> None:
        victim = next(key for key in self.levels[level] if key not in self.held)
        self.levels[level].remove(victim)
        self.take_in(level + 1, victim)

    def take_in(self, level: int, key: int) -> None:
        if level == len(self.sizes):
            return  # dropped
        if len(self.levels[level]) == self.sizes[level]:
            if self.held.issuperset(self.levels[level]):
                self.take_in(level + 1, key)  # nobody here can make room
                return
            self.push_out(level)
        self.levels[level].append(key)


def conversations(seed: int, n: int, *, keys: int, longest: int) -> list[Request]:
    """Make requests that share prefixes, as turns of conversations do, and some that repeat ids."""
    chance = random.Random(seed)
    chains = [[chance.randrange(keys) for _ in range(longest)] for _ in range(keys // 4)]
    rows = []
    for _ in range(n):
        chain = chance.choice(chains)[: chance.randint(1, longest)]
        if chance.random() < 0.2:
            chain = chain + [chance.randrange(keys) for _ in range(3)]
        rows.append(chain)
    return requests(*rows)


TIERS = {
    "three": (2, 2, 4),
    "small-host": (4, 2, 4),
    "small-disk": (4, 4, 2),
    "no-disk": (2, 4, None),
    "no-host": (2, None, 4),
    "gpu-only": (2, None, None),
}


@pytest.mark.parametrize("sizes", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_counts_are_those_of_a_model(
    replay: Callable[..., ReplayResult], sizes: tuple[int, int | None, int | None], seed: int
) -> None:
    rows = conversations(seed, 150, keys=60, longest=24)
    result = replay(rows, *sizes)
    model = Model([mib * 4 for mib in sizes if mib])
    for row in rows:
        model.serve(row.hash_ids)
    by_name = {
        name: model.found_in[NAMES[n]] for n, name in enumerate(result.levels)
    }  # the model numbers the levels that there are
    assert result.hits == model.hits
    assert {name: result.hits_by_level.get(name, 0) for name in result.levels} == by_name
    assert result.verified_blocks == model.came_up
    assert (result.corrupt_blocks, result.lost_blocks) == (0, 0)
    assert result.block_refs == sum(len(row.hash_ids) for row in rows)
    assert [level.used for level in result.levels.values()] == [len(at) for at in model.levels]


def test_single_blocks_are_counted_as_one_list_of_all_levels_would(
    replay: Callable[..., ReplayResult],
) -> None:
    """The levels are a recency list cut in pieces: the place of a block in it is its level."""
    chance = random.Random(5)
    rows = requests(*([chance.randrange(20)] for _ in range(400)))
    result = replay(rows, 2, 4, None)  # 8 and 16 blocks: all 20 fit, the host is never full
    recent: list[int] = []
    found = Counter[str]()
    for row in rows:
        (key,) = row.hash_ids
        if key in recent:
            found["gpu" if recent.index(key) < 8 else "host"] += 1
            recent.remove(key)
        recent.insert(0, key)
    assert dict(result.hits_by_level) == dict(found)
    assert result.hits == 400 - 20


# ----------------------------------------------------------------------------- hand-worked


def test_a_hit_counts_only_before_the_first_absent_block(
    replay: Callable[..., ReplayResult],
) -> None:
    # 1 2 3 are stored. Of 1 9 2, the 1 hits; 9 is absent; 2 is there but no hit. Then 9 hits.
    result = replay(requests([1, 2, 3], [1, 9, 2], [9]))
    assert (result.block_refs, result.hits) == (7, 2)
    assert result.levels["gpu"].used == 4


def test_a_block_that_is_named_twice_is_stored_once_and_hits_twice(
    replay: Callable[..., ReplayResult],
) -> None:
    result = replay(requests([1, 1, 2], [1, 1, 2, 2]))
    assert (result.block_refs, result.hits) == (7, 4)
    assert result.levels["gpu"].used == 2


def test_a_block_that_is_named_twice_is_found_below_once(
    replay: Callable[..., ReplayResult],
) -> None:
    # Eight hot blocks: 0 and 1 have gone to the host level when 9 is there.
    result = replay(requests(*([key] for key in range(10)), [0, 0]))
    assert dict(result.hits_by_level) == {"host": 1, "gpu": 1}
    assert result.verified_blocks == 1


def test_a_request_may_be_larger_than_the_hot_level(replay: Callable[..., ReplayResult]) -> None:
    # 24 blocks over 8 hot ones and 24 in the host level: all of them come back.
    result = replay(requests(range(24), range(24)), 2, 6, None)
    assert (result.hits, result.corrupt_blocks) == (24, 0)
    assert [level.used for level in result.levels.values()] == [8, 16]


def test_a_request_may_be_larger_than_all_levels(replay: Callable[..., ReplayResult]) -> None:
    # The first of 40 is dropped before the last is stored: nothing of it can hit.
    result = replay(requests(range(40), range(40)), 2, 2, 2)
    assert (result.hits, result.block_refs) == (0, 80)
    assert [level.used for level in result.levels.values()] == [8, 8, 8]


def test_an_empty_request_is_served(replay: Callable[..., ReplayResult]) -> None:
    result = replay(requests([], [1], []))
    assert (result.requests, result.block_refs, result.hits) == (3, 1, 0)


def test_no_requests_are_a_result(replay: Callable[..., ReplayResult]) -> None:
    result = replay([])
    assert (result.requests, result.hits, result.latency_us) == (0, 0, None)
    assert result.first_request_done_seconds is None


def test_the_bytes_moved_are_told_by_pair_of_levels(replay: Callable[..., ReplayResult]) -> None:
    # 8 hot, 8 in the host level. 18 blocks push 10 down and 2 of those to disk; the first comes
    # back: that takes another hot block down, and the oldest of the host level with it.
    result = replay(requests(*([key] for key in range(18)), [0]))
    assert {pair: moved // (MIB // 4) for pair, moved in (result.bytes_moved or {}).items()} == {
        "gpu->host": 11,
        "host->disk": 3,
        "disk->gpu": 1,
    }
    assert dict(result.hits_by_level) == {"disk": 1}


@pytest.mark.parametrize("block", [5000, 4096, 65536, 65544, MIB // 4 + 1])
def test_blocks_of_any_size_come_back(replay: Callable[..., ReplayResult], block: int) -> None:
    each = 2 * MIB // block
    n = 2 * each + each // 2
    result = replay(requests(range(n), range(n)), 2, 2, 2, block=block)
    assert (result.levels["gpu"].slots, result.levels["disk"].slots) == (each, each)
    assert result.hits == n
    assert result.corrupt_blocks == 0
    assert result.verified_blocks is not None
    assert result.verified_blocks >= each


def test_a_gpu_serves_the_same_requests(replay: Callable[..., ReplayResult]) -> None:
    rows = conversations(1, 60, keys=60, longest=24)
    device = CudaDevice(0, driver=FakeDriver())
    there, here = replay(rows, device=device), replay(rows)
    assert (there.hits, there.hits_by_level) == (here.hits, here.hits_by_level)
    assert there.corrupt_blocks == 0
    assert there.verified_blocks == here.verified_blocks
    assert there.device == "cuda:0 Fake GPU 0"


# --------------------------------------------------------------------------------- filling


def test_the_first_request_is_served_before_the_host_level_is_filled() -> None:
    served: list[tuple[int, float | None]] = []

    class Noted(Progress):
        def update(self, done: int, *args: Any, **figures: Any) -> None:
            if done == 1:
                held.release()
            served.append((done, figures["host_filled"]))

    with FaultPlan() as plan:
        # 2 MiB of the hot level are registered in two calls; the third is the host level's first.
        held = plan.hold("cuMemHostRegister", at=3)
        options = ReplayOptions(
            trace="made up", gpu_quota=2 * MIB, host_quota=64 * MIB, device="cpu"
        )
        rows = requests(range(32), *([key] for key in range(32, 1000)))
        result = replay_bytes(rows, options, Noted(len(rows)))
    assert served[0] == (1, 0.0)
    assert result.first_request_done_seconds is not None
    assert result.host_tier_filled_seconds is not None
    assert result.first_request_done_seconds < result.host_tier_filled_seconds
    assert result.hits == 0


def test_a_host_level_that_is_never_filled_is_told_as_such(
    replay: Callable[..., ReplayResult],
) -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 801, at=3, when=lambda at, n: n <= MIB)
        result = replay(requests([1, 2], [1, 2]), 2, 2, None)
    assert result.host_tier_filled_seconds is None
    assert result.hits == 2


# ------------------------------------------------------------------------------ corruption


def flip(monkeypatch: pytest.MonkeyPatch, level: str, tiers: Any) -> None:
    """Flip one bit of block 0 in a lower level, once it has been brought there."""
    real = TierStorage.onboard
    done: list[int] = []

    def onboard(storage: TierStorage, pages: Any) -> Any:
        for page in pages:
            if storage.levels[page.level].name != level or page.owner.key != 0 or done:
                continue
            page.ready.synchronize()
            (pool,) = storage.levels[page.level].groups[0].memory.pools
            at = page.slot * pool.slot_size + 1234
            if isinstance(pool, DiskPool):
                with open(f"/proc/self/fd/{pool.file._fd}", "r+b", buffering=0) as file:
                    old = os.pread(file.fileno(), 1, at)
                    os.pwrite(file.fileno(), bytes([old[0] ^ 4]), at)
            else:
                assert isinstance(pool, MemoryPool)
                tiers.raw(pool.memory.address + at, 1)[0] ^= 4
            done.append(page.slot)
        return real(storage, pages)

    monkeypatch.setattr(TierStorage, "onboard", onboard)


def test_one_wrong_bit_in_memory_is_one_corrupt_block(
    replay: Callable[..., ReplayResult], monkeypatch: pytest.MonkeyPatch, tiers: Any
) -> None:
    flip(monkeypatch, "host", tiers)
    result = replay(requests(*([key] for key in range(10)), [0, 1]))
    assert dict(result.hits_by_level) == {"host": 2}
    assert (result.verified_blocks, result.corrupt_blocks) == (2, 1)


def test_one_wrong_bit_on_the_disk_is_found_before_it_is_served(
    replay: Callable[..., ReplayResult], monkeypatch: pytest.MonkeyPatch, tiers: Any
) -> None:
    flip(monkeypatch, "disk", tiers)
    result = replay(requests(*([key] for key in range(20)), [0, 1]))
    assert dict(result.hits_by_level) == {}  # none of what was asked for with it
    assert (result.verified_blocks, result.corrupt_blocks) == (0, 1)


def test_a_block_in_the_wrong_place_is_corrupt(
    replay: Callable[..., ReplayResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks that change places have no wrong byte of their own."""
    real = TierStorage.onboard

    def onboard(storage: TierStorage, pages: Any) -> Any:
        if len(pages) == 2 and {page.level for page in pages} == {1}:
            for page in pages:
                page.ready.synchronize()
            pages[0].slot, pages[1].slot = pages[1].slot, pages[0].slot
        return real(storage, pages)

    monkeypatch.setattr(TierStorage, "onboard", onboard)
    result = replay(requests(*([key] for key in range(10)), [0, 1]))
    assert (result.verified_blocks, result.corrupt_blocks) == (2, 2)


def test_a_copy_that_does_nothing_is_corrupt(
    replay: Callable[..., ReplayResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hostmem.device.cpu import CpuStream

    copies: list[int] = []
    real = CpuStream.copy

    def copy(stream: CpuStream, *arrays: Any) -> None:
        copies.append(len(copies))
        if len(copies) != 4:  # two blocks go down, another makes room, and then one comes up
            real(stream, *arrays)

    monkeypatch.setattr(CpuStream, "copy", copy)
    result = replay(requests(*([key] for key in range(10)), [0]))
    assert (result.verified_blocks, result.corrupt_blocks) == (1, 1)


# --------------------------------------------------------------------------- command line


def write(path: Path, rows: Sequence[Request]) -> str:
    with path.open("w") as file:
        for row in rows:
            line = {
                "timestamp": row.timestamp,
                "input_length": row.input_length,
                "output_length": row.output_length,
                "hash_ids": list(row.hash_ids),
            }
            file.write(json.dumps(line) + "\n")
    return str(path)


def test_the_json_has_every_figure_that_was_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "trace.jsonl", requests(range(70), range(70)))
    out, folder = tmp_path / "out.json", tmp_path / "disk"
    folder.mkdir()
    # fmt: off
    status = main([
        "replay", trace, "--gpu-quota", "2MiB", "--host-quota", "2MiB", "--disk-quota", "4MiB",
        "--disk-path", str(folder), "--block-bytes", "64KiB", "--device", "cpu",
        "--json", str(out),
    ])
    # fmt: on
    assert (status, capsys.readouterr().err) == (0, "")
    found = json.loads(out.read_text())
    promised = {
        "requests", "block_refs", "hits", "hit_rate", "hits_by_level", "verified_blocks",
        "corrupt_blocks", "bytes_moved", "seconds", "us_per_block_ref",
        "first_request_done_seconds", "host_tier_filled_seconds", "policy", "levels", "latency_us",
    }  # fmt: skip
    assert promised <= found.keys()
    assert (found["requests"], found["block_refs"], found["hits"]) == (2, 140, 70)
    assert found["hit_rate"] == 0.5
    assert sum(found["hits_by_level"].values()) == 70
    assert list(found["hits_by_level"]) == ["gpu", "host", "disk"]
    assert found["levels"]["gpu"] == {"slots": 32, "quota": 2 * MIB, "used": 32}
    assert list(found["levels"]) == ["gpu", "host", "disk"]
    assert found["levels"]["disk"]["slots"] == 64
    assert {"gpu->host", "host->disk", "disk->gpu"} <= found["bytes_moved"].keys()
    assert all(moved % 65536 == 0 for moved in found["bytes_moved"].values())
    assert found["corrupt_blocks"] == 0
    assert found["verified_blocks"] == 70 - found["hits_by_level"]["gpu"]
    assert 0 < found["first_request_done_seconds"] < found["seconds"]
    assert 0 < found["latency_us"]["p50"] <= found["latency_us"]["p99"]
    assert os.listdir(folder) == []


def test_wrong_bytes_are_exit_status_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiers: Any,
) -> None:
    trace = write(tmp_path / "trace.jsonl", requests(*([key] for key in range(10)), [0, 1]))
    flip(monkeypatch, "host", tiers)
    # fmt: off
    status = main([
        "replay", trace, "--gpu-quota", "2MiB", "--host-quota", "2MiB", "--block-bytes", "256KiB",
        "--device", "cpu", "--json", str(tmp_path / "out.json"),
    ])
    # fmt: on
    assert status == 1
    assert "1 of 2 blocks came back with bytes other than those stored" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text())["corrupt_blocks"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-quota", "8EiB"], "host.quota: 8 EiB"),
        (["--disk-quota", "2EiB", "--disk-path", "."], "disk.quota: 2 EiB"),
        (["--gpu-quota", "1EiB"], "gpu.quota: 1 EiB"),
    ],
    ids=["host", "disk", "gpu"],
)
def test_quotas_that_cannot_be_had_are_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    trace = write(tmp_path / "trace.jsonl", requests([1]))
    with FaultPlan() as plan:
        assert main(["replay", trace, "--device", "cpu", *options]) == 2
        assert plan.log == []
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert message in errors


def test_an_engine_that_is_stopped_leaves_the_levels_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that fails ends the replay with one line, and nothing is left."""
    trace = write(tmp_path / "trace.jsonl", requests(*([key] for key in range(9)), [0]))
    with FaultPlan() as plan:
        plan.fail("preadv", 5)
        # fmt: off
        status = main([
            "replay", trace, "--gpu-quota", "2MiB", "--host-quota", "none", "--disk-quota", "2MiB",
            "--disk-path", str(tmp_path), "--block-bytes", "256KiB", "--device", "cpu",
        ])
        # fmt: on
    assert status == 2
    assert "preadv of 262144 bytes" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["trace.jsonl"]


# ----------------------------------------------------------------------------- a real trace


def test_a_part_of_the_conversation_trace_is_served_without_a_wrong_byte(
    replay: Callable[..., ReplayResult],
) -> None:
    if not TRACE.exists():
        pytest.skip(f"{TRACE.name} is not there")
    rows = read_trace(TRACE)[:400]
    result = replay(rows, 2, 8, 16, block=4096)
    model = Model([level.slots or 0 for level in result.levels.values()])
    for row in rows:
        model.serve(row.hash_ids)
    assert (result.hits, result.corrupt_blocks) == (model.hits, 0)
    assert result.verified_blocks == model.came_up > 0
