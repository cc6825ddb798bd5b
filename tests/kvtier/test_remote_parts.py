"""What the remote level is made of: names, checksums, deadlines, back-off, ranges, staging."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, HostMem
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    Concatenate,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
    load_config,
)
from kvtier.__main__ import main
from kvtier.remote.client import MooncakeClient, Refused, reason_of
from kvtier.remote.flights import Flights
from kvtier.remote.health import Health
from kvtier.remote.link import Link
from kvtier.remote.names import ObjectNames
from kvtier.remote.ranges import Ranges
from kvtier.remote.staging import Staging
from kvtier.remote.trailers import Trailers
from tests.kvtier.remote_store import Store
from tests.threads import Spawn

MIB = 1 << 20
REMOTE = RemoteCacheTierConfig("nowhere:1", namespace="m", deadline=20.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# ------------------------------------------------------------------------------------- names


def config(**changes: Any) -> KVCacheManagerConfig:
    layers = [AttentionLayerConfig(0, [BufferConfig("kv", 4096)])]
    tiers = [GpuCacheTierConfig("2MiB"), HostCacheTierConfig("2MiB"), REMOTE]
    return dataclasses.replace(KVCacheManagerConfig(16, tiers, layers), **changes)


class Other(Concatenate):
    """Another way to make pages, of the same size."""


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_block": 32},
        {"layers": [AttentionLayerConfig(0, [BufferConfig("kv", 8192)])]},
        {"layers": [AttentionLayerConfig(1, [BufferConfig("kv", 4096)])]},
        {"layers": [AttentionLayerConfig(0, [BufferConfig("kv", 4096)], sliding_window_size=32)]},
        {"cold_page_codec": Other()},
        {"remote": RemoteCacheTierConfig("nowhere:1", namespace="n")},
    ],
)
def test_what_decides_the_bytes_is_in_the_name(changes: dict[str, Any]) -> None:
    assert ObjectNames(config()).name(b"k", 0) != ObjectNames(config(**changes)).name(b"k", 0)


def test_what_does_not_decide_the_bytes_is_not() -> None:
    other = config(
        cache_tiers=[GpuCacheTierConfig("8MiB")],
        remote=RemoteCacheTierConfig("other:2", mode="read-only", namespace="m", replicas=2),
    )
    assert ObjectNames(config()).name(b"k", 0) == ObjectNames(other).name(b"k", 0)


def test_keys_and_groups_have_names_of_their_own() -> None:
    names = ObjectNames(config())
    keys: list[tuple[object, int]] = [(b"k", 0), (b"k", 1), ("k", 0), (107, 0), (b"", 0)]
    assert len({names.name(key, group) for key, group in keys}) == len(keys)
    with pytest.raises(TypeError):
        names.name((1, 2), 0)


def test_the_names_stay_the_same_in_every_release() -> None:
    assert ObjectNames(config()).name(b"k", 0) == ("kvtier-d1c72986f572ec5052fbf57580a444a2-0-626b")


def test_a_file_describes_the_tier(tmp_path: Any) -> None:
    path = tmp_path / "cache.toml"
    path.write_text(
        "tokens_per_block = 16\nlayers = [{buffers = {kv = 4096}}]\n"
        'cache_tiers = [{tier = "gpu", quota = "2MiB"}, {tier = "remote", master = "m:1", '
        'metadata = "http://m:2/metadata", protocol = "rdma", local_segment = "3GiB", '
        'replicas = 2, mode = "read-only", deadline = 0.5, in_flight = 7, namespace = "x", '
        'host = "h", devices = "mlx5_0"}]\n'
    )
    assert load_config(path).remote == RemoteCacheTierConfig(
        "m:1",
        "http://m:2/metadata",
        "rdma",
        "3GiB",
        2,
        mode="read-only",
        deadline=0.5,
        in_flight=7,
        namespace="x",
        host="h",
        devices="mlx5_0",
    )
    path.write_text(path.read_text().replace("replicas", "copies"))
    with pytest.raises(ValueError, match=r"cache_tiers\[1\].copies: unknown key"):
        load_config(path)


# --------------------------------------------------------------------------------- checksums


@pytest.fixture
def pages() -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    bytes_ = (np.arange(3 * 4096) % 251).astype(np.uint8)
    start = np.uint64(bytes_.__array_interface__["data"][0])
    return start + np.arange(3, dtype=np.uint64) * np.uint64(4096), bytes_


def test_a_page_is_believed_under_its_name_alone(
    pages: tuple[NDArray[np.uint64], NDArray[np.uint8]],
) -> None:
    addresses, _ = pages
    trailers = Trailers(4)
    names = ["a", "b", "c"]
    trailers.write(names, addresses, 4096)
    assert trailers.believed(names, addresses, 4096).all()
    assert trailers.believed(["a", "x", "c"], addresses, 4096).tolist() == [True, False, True]
    assert not trailers.believed(names, addresses, 4095).any()


def test_every_bit_of_page_and_trailer_counts(
    pages: tuple[NDArray[np.uint64], NDArray[np.uint8]],
) -> None:
    addresses, bytes_ = pages
    trailers = Trailers(3)
    names = ["a", "b", "c"]
    trailers.write(names, addresses, 4096)
    for at in (4096, 6000, 8191):
        bytes_[at] ^= 16
        assert trailers.believed(names, addresses, 4096).tolist() == [True, False, True]
        bytes_[at] ^= 16
    raw = trailers._rows.view(np.uint8)
    for at in range(24):  # the rest of a trailer says nothing yet
        raw[32 + at] ^= 1
        assert trailers.believed(names, addresses, 4096).tolist() == [True, False, True]
        raw[32 + at] ^= 1
    assert trailers.believed(names, addresses, 4096).all()


def test_a_page_of_zeros_is_not_believed_without_a_trailer(
    pages: tuple[NDArray[np.uint64], NDArray[np.uint8]],
) -> None:
    addresses, bytes_ = pages
    bytes_[:] = 0
    assert not Trailers(3).believed(["a", "b", "c"], addresses, 4096).any()


# ------------------------------------------------------------------------------- health, flights


def test_the_pauses_get_longer_up_to_a_bound(clock: Clock) -> None:
    health = Health(clock)
    assert health.state == "connecting"
    assert health.may_ask()
    pauses = []
    for _ in range(10):
        health.failed("no answer")
        assert health.state == "degraded"
        began = clock.now
        while not health.may_ask():
            clock.now += 0.25
        pauses.append(clock.now - began)
    assert all(one <= other for one, other in pairwise(pauses))
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == 30.0
    assert health.degradations == 1


def test_one_tries_for_all(clock: Clock) -> None:
    health = Health(clock)
    health.failed("no answer")
    clock.now += 0.5
    assert [health.may_ask() for _ in range(3)] == [True, False, False]
    health.answered()
    assert [health.may_ask() for _ in range(3)] == [True, True, True]
    assert health.state == "up"
    health.failed("again")
    clock.now += 0.5
    assert health.may_ask()  # the pause is short again
    assert health.degradations == 2


def test_an_answer_that_is_missing_is_one_failure(clock: Clock) -> None:
    health = Health(clock)
    for _ in range(5):
        health.doubted("no answer yet")
    assert health.state == "degraded"
    assert health.degradations == 1
    clock.now += 0.5
    assert health.may_ask()


def test_a_flight_is_over_at_its_deadline(clock: Clock, spawn: Spawn) -> None:
    flights = Flights(10, 2.0, clock)
    flight = flights.begin(4)
    assert flight is not None
    assert not flight.query()
    assert not flights.overdue()
    with pytest.raises(TimeoutError):
        flight.synchronize(0)
    clock.now += 2.0
    assert flight.query()
    assert flight.error is None
    flight.synchronize()
    assert not flights.overdue()  # what is waited for is here
    flight.asked = True
    assert flights.overdue()
    assert flights.room == 6  # it still uses the memory
    flights.end(flight)
    assert flights.room == 10
    assert not flights.overdue()


def test_a_flight_that_lands_wakes_who_waits(clock: Clock, spawn: Spawn) -> None:
    flights = Flights(1, 1000.0, clock)
    flight = flights.begin(1)
    assert flight is not None
    waiting = spawn(flight.synchronize)
    assert not flight.query()
    flights.end(flight)
    waiting.result(20)
    assert flight.query()


def test_no_more_than_the_limit_is_under_way(clock: Clock) -> None:
    flights = Flights(3, 1.0, clock)
    one = flights.begin(2)
    assert one is not None
    assert flights.begin(2) is None
    assert flights.begin(1) is not None
    assert flights.begin(1) is None
    assert flights.begin(0) is not None  # what uses no memory may always begin
    flights.end(one)
    assert flights.begin(2) is not None


@pytest.mark.parametrize(
    ("code", "reason"),
    [(-704, "absent"), (-703, "absent"), (-200, "full"), (-900, "master"), (-901, "master")],
)
def test_codes_have_names(code: int, reason: str) -> None:
    assert reason_of(code) == reason


def test_one_silent_answer_among_others_is_no_silence() -> None:
    link = Link(REMOTE, Store().connect)
    link.heard([-900, 0])
    assert link.health.state == "up"
    link.heard([-900, -901])
    assert link.health.state == "degraded"


def test_a_link_that_cannot_be_made_says_why_and_is_made_later() -> None:
    store = Store()
    store.refuses = True
    link = Link(REMOTE, store.connect)
    with pytest.raises(Refused, match="does not answer"):
        link.open()
    assert link.health.state == "degraded"
    store.refuses = False
    assert link.open()[0] is store
    store.up = False
    with pytest.raises(Refused, match="nowhere:1"):
        link.open()
    link.close()
    assert store.closed == 0


def test_no_master_is_told_before_the_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules,
        "mooncake.store",
        type("engine", (), {"MooncakeDistributedStore": None, "ReplicateConfig": None}),
    )
    for name in ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS", "MC_STORE_CLIENT_SETUP_RETRIES"):
        monkeypatch.setenv(name, "5")
    with pytest.raises(Refused, match=r"the master 127.0.0.1:1 does not answer"):
        MooncakeClient(RemoteCacheTierConfig("127.0.0.1:1"))


# --------------------------------------------------------------------------- ranges, staging


def test_units_are_registered_when_they_are_used() -> None:
    store = Store()
    ranges = Ranges(store)
    with HostMem(64 * MIB, 64 * MIB, device="cpu", slot_size=MIB, wait=True) as memory:
        unit = memory.commit_unit
        slots = [0, MIB, unit, unit + MIB]
        pages = np.uint64(memory.address) + np.array(slots, np.uint64)
        assert ranges.cover(memory, pages[:2])
        assert store.ranges == {memory.address: unit}
        assert ranges.cover(memory, pages)
        assert store.ranges == {memory.address: unit, memory.address + unit: unit}
        ranges.close()
        assert store.ranges == {}


def test_a_unit_that_has_grown_is_registered_again() -> None:
    store = Store()
    ranges = Ranges(store)
    with HostMem(64 * MIB, MIB, device="cpu", slot_size=MIB, wait=True) as memory:
        page = np.array([memory.address], np.uint64)
        assert ranges.cover(memory, page)
        assert store.ranges == {memory.address: MIB}
        memory.resize(4 * MIB)
        assert ranges.cover(memory, page + np.uint64(3 * MIB))
        assert store.ranges == {memory.address: 4 * MIB}
        memory.resize(MIB)
        assert ranges.cover(memory, page)  # what is longer is as good
        assert store.ranges == {memory.address: 4 * MIB}
        store.registers = False
        memory.resize(8 * MIB)
        assert not ranges.cover(memory, page + np.uint64(7 * MIB))
        assert store.ranges == {}


def test_staging_is_taken_and_given_back(cpu: CpuDevice) -> None:
    staging = Staging(cpu, (4096, 5000), 10)
    try:
        assert staging.count == 10
        assert staging.share(64) == 2
        first, second = staging.take(6), staging.take(4)
        assert first is not None
        assert second is not None
        assert len({*first.tolist(), *second.tolist()}) == 10
        assert staging.take(1) is None
        staging.give(first)
        assert staging.take(7) is None
        assert staging.take(6) is not None
        places = staging.pools[1].addresses(np.arange(10, dtype=np.int32))
        assert (np.diff(places) == 8192).all()
        assert int(places[-1]) + 5000 <= staging.address + staging.nbytes
    finally:
        staging.close()


# --------------------------------------------------------------------------------- the replay


def test_a_replay_that_shares_says_what_it_lacks(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace.jsonl")
    assert main(["trace", "--requests", "3", "--out", trace]) == 0
    capsys.readouterr()
    monkeypatch.setattr("kvtier.remote.client.find_spec", lambda name: None)
    assert main(["replay", trace, "--remote", "nowhere:1", "--device", "cpu"]) == 2
    assert "pip install hostmem[remote]" in capsys.readouterr().err
    monkeypatch.setattr("kvtier.remote.client.find_spec", lambda name: name)
    html = str(tmp_path / "page.html")
    assert main(["replay", trace, "--remote", "nowhere:1", "--html", html]) == 2
    assert "with --remote there are two" in capsys.readouterr().err
    assert main(["replay", trace, "--remote", "nowhere"]) == 2
    assert "remote.master: 'nowhere' is not host:port" in capsys.readouterr().err
