"""Processes that get memory by order, on a driver that the test leads."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.probe import CALLS
from bench.rank import ARMS, DEFAULT, LEAVES, Rank, RankFailedError, together
from hostmem import CudaDevice, HostMem
from hostmem.testing import FakeDriver
from hostmem.turns import Turns
from tests.bench.conftest import Stub

SIZE = 40 << 20  # bytes: two units, one of them short
CALL_OF = {
    **dict.fromkeys([name for name in ARMS if name.startswith(DEFAULT)], "cuMemHostRegister"),
    "cuMemCreate(HOST_NUMA)": "cuMemCreate",
    "cuMemHostAlloc": "cuMemHostAlloc",
}
CLOSES = [way for way in LEAVES if way != "SIGKILL"]


@pytest.fixture
def rank(probe_library: Path, stub: Stub) -> Iterator[Rank]:
    with together(1, probe_library, 0, CALLS) as (one,):
        yield one


def fill(rank: Rank, arm: str = DEFAULT, **options: Any) -> None:
    rank.tell("fill", arm=arm, size=SIZE, at=time.monotonic(), options=options)


@pytest.mark.parametrize("arm", ARMS)
def test_a_rank_gets_memory_by_the_call_of_the_arm_and_gives_it_back(
    rank: Rank, stub: Stub, arm: str
) -> None:
    stub.hold(CALL_OF[arm])
    before = time.monotonic()
    fill(rank, arm)
    stub.wait_held(CALL_OF[arm])
    stub.release(CALL_OF[arm])
    filled = rank.hear()
    assert before < filled["finish"] <= time.monotonic()
    assert list(filled["seen"]) == list(CALLS)
    rank.tell("free")
    assert list(rank.hear()["seen"]) == list(CALLS)


@pytest.mark.parametrize(
    ("arm", "turns", "largest"),
    [
        (DEFAULT, "the default's", 8 << 20),
        ("registered, no turns", "not needed", 8 << 20),
        ("registered, no turns, unbound", "not needed", 32 << 20),
    ],
)
def test_the_arms_that_register_differ_in_turns_and_bounds(
    arm: str, turns: str, largest: int
) -> None:
    device = CudaDevice(0, FakeDriver())
    device.turns = Turns("the default's")
    memory = ARMS[arm](device, 96 << 20, page_mode="huge", fill_threads=1)
    assert isinstance(memory, HostMem)
    with memory:
        assert isinstance(memory.device, CudaDevice)
        assert memory.device.turns.state == turns
        assert memory.page_mode == "huge"
        assert memory.progress.threads == 1
        assert max(size for _, size in memory.registrations) <= largest
        if "unbound" in arm:
            assert max(size for _, size in memory.registrations) == largest


def test_no_memory_is_had_before_the_common_start(rank: Rank) -> None:
    start = time.monotonic() + 0.2
    rank.tell("fill", arm="cuMemHostAlloc", size=SIZE, at=start, options={})
    assert rank.hear()["finish"] > start


def test_the_probe_sees_a_registration_that_lasts(rank: Rank, stub: Stub) -> None:
    stub.hold("cuMemHostRegister")
    rank.tell("fill_slowly", size=SIZE, rate=1e12, options={})
    rank.hear()
    stub.wait_held("cuMemHostRegister")
    rank.tell("reset")
    rank.hear()
    while True:
        rank.tell("read")
        answer = rank.hear()
        if all(one.long_calls == 1 for one in answer["seen"].values()):
            break
    assert answer["filling"]
    stub.release("cuMemHostRegister")
    while answer["filling"]:
        rank.tell("read")
        answer = rank.hear()


def test_a_peer_that_the_driver_refuses_is_an_answer_and_the_rank_goes_on(
    rank: Rank, stub: Stub
) -> None:
    stub.refuse("cuMemCreate", 801)
    fill(rank, "cuMemCreate(HOST_NUMA)")
    assert rank.hear() == {"refused": "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"}
    rank.tell("free")
    rank.hear()
    fill(rank)
    assert "finish" in rank.hear()


def test_turns_are_those_of_the_default(rank: Rank, stub_driver: Path) -> None:
    fill(rank)
    rank.hear()
    rank.tell("turns")
    assert str(stub_driver) in rank.hear()["turns"]


@pytest.mark.parametrize("way", CLOSES)
def test_each_way_to_leave_unregisters_first(probe_library: Path, stub: Stub, way: str) -> None:
    with Rank("one", probe_library, 0, ()) as one:
        one.hear()
        fill(one)
        one.hear()
        stub.hold("cuMemHostUnregister")
        one.leave(way)
        stub.wait_held("cuMemHostUnregister")
        with pytest.raises(RankFailedError, match="still runs"):
            one.reap(0)
        stub.release("cuMemHostUnregister")
        assert one.reap() == LEAVES[way]


def test_one_that_is_killed_unregisters_nothing(probe_library: Path, stub: Stub) -> None:
    with Rank("one", probe_library, 0, ()) as one:
        one.hear()
        fill(one)
        one.hear()
        stub.hold("cuMemHostUnregister")
        one.leave("SIGKILL")
        assert one.reap() == LEAVES["SIGKILL"] == -signal.SIGKILL
        assert not stub.is_held("cuMemHostUnregister")


def test_a_rank_that_does_not_answer_in_time_is_named_and_reaped(
    probe_library: Path, stub: Stub
) -> None:
    stub.hold("cuMemHostAlloc")
    with pytest.raises(RankFailedError, match="rank 0 of 2: no answer to fill in 0 s") as caught:
        in_vain(probe_library)
    ranks: list[Rank] = caught.value.ranks  # type: ignore[attr-defined]
    assert [rank.reap(0) for rank in ranks] == [-signal.SIGKILL] * 2


def in_vain(library: Path) -> None:
    with together(2, library, 0, ()) as ranks:
        fill(ranks[0], "cuMemHostAlloc")
        try:
            ranks[0].hear(0)
        except RankFailedError as error:
            error.ranks = ranks  # type: ignore[attr-defined]
            raise


def test_a_rank_that_ends_is_named_with_its_status(
    probe_library: Path, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    stub.refuse("cuMemHostRegister", 1)
    with pytest.raises(RankFailedError, match="rank 0 of 1: ended with status 1 during fill"):
        fill_in_vain(probe_library)
    assert "the driver refused to register" in capfd.readouterr().err


def fill_in_vain(library: Path) -> None:
    with together(1, library, 0, CALLS) as (one,):
        fill(one)
        one.hear()


def test_an_order_to_one_that_has_gone_is_an_error(rank: Rank) -> None:
    rank.leave("SIGKILL")
    rank.reap()
    with pytest.raises(RankFailedError, match="status -9 during read"):
        rank.tell("read")


def test_one_that_does_not_come_up_is_an_error(
    probe_library: Path, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    stub.refuse("cuInit", 100)
    with pytest.raises(RankFailedError, match="status 1 during start"):
        start_in_vain(probe_library)
    assert "cuInit" in capfd.readouterr().err


def start_in_vain(library: Path) -> None:
    with together(1, library, 0, CALLS):
        pass


def test_a_failure_at_the_very_end_is_an_error_too(
    probe_library: Path, stub: Stub, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailedError, match="status 1 at last"):
        end_in_vain(probe_library, stub)
    assert "cuMemFreeHost" in capfd.readouterr().err


def end_in_vain(library: Path, stub: Stub) -> None:
    with together(1, library, 0, ()) as (one,):
        fill(one, "cuMemHostAlloc")
        one.hear()
        stub.refuse("cuMemFreeHost", 1)


def test_a_rank_ends_with_its_parent(probe_library: Path, stub: Stub) -> None:
    one = Rank("one", probe_library, 0, CALLS)
    one.hear()
    fill(one)
    one.hear()
    assert isinstance(one._process, subprocess.Popen)
    with one._process as process:
        process.communicate(timeout=20)  # closes its standard input, as the end of a parent does
    assert one.reap() == 0
