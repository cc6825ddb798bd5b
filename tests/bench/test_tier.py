"""The benchmark of a tier at work, from end to end on the CPU and on a fake GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import tier
from bench.measure import Table
from bench.product import product
from bench.tier import AT_ONCE, Copies, Engine, Server, overlap, rates, serving, trace
from hostmem import CudaDevice, Device, HostEvent
from hostmem.device import DONE, Stream
from hostmem.testing import FakeDriver

SEGMENT, LAYERS, BLOCKS = 4096, 2, 300


def fake_torch(device: CudaDevice, streams: list[Stream]) -> Any:
    """What the products need of torch; a product takes a second, and nothing waits."""
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at = now

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at) * 1e3

    def make_stream(where: str) -> Any:
        assert where == "cuda:0"
        stream = device.stream()
        streams.append(stream)
        return SimpleNamespace(cuda_stream=stream.handle, synchronize=stream.synchronize)

    def mm(left: Any, right: Any, *, out: Any) -> None:
        nonlocal now
        now += 1

    cuda = SimpleNamespace(Event=Event, Stream=make_stream, stream=lambda _: nullcontext())
    return SimpleNamespace(cuda=cuda, mm=mm, ones=lambda *_, **__: None, bfloat16=None)


@pytest.fixture(params=["cpu", "fake GPU"])
def device(
    request: pytest.FixtureRequest, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    if request.param == "cpu":
        yield cpu
        return
    gpu, streams = CudaDevice(0, driver=FakeDriver()), list[Stream]()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpu, streams))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    yield gpu
    for stream in streams:
        stream.close()


@pytest.fixture
def engine(device: Device) -> Iterator[Engine]:
    engine = Engine(device, SEGMENT, LAYERS, BLOCKS)
    yield engine
    engine.close()


def test_the_bytes_are_compared_and_every_question_has_rows(engine: Engine) -> None:
    engine.check()
    work = product(engine.device, 8)
    for rows, times in (
        rates(engine, 2),
        serving(engine, work, requests=5, rounds=2),
        overlap(engine, work, products=2, rounds=2),
    ):
        assert len(rows) >= 2
        assert len({len(row) for row in rows}) == 1
        assert {len(seconds) for seconds in times.values()} == {2}
    assert not list(engine.cache)  # one question leaves nothing behind for the next


def test_wrong_bytes_end_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine.cache.load
    monkeypatch.setattr(engine.cache, "load", lambda keys, pages: load(keys[::-1], pages))
    with pytest.raises(AssertionError, match="that is"):
        engine.check()


def test_what_was_served_before_is_found_and_loaded(engine: Engine) -> None:
    work = product(engine.device, 8)
    requests = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
    served = Server(engine, work, tier=True).serve(requests)
    assert (served.blocks, served.loaded, served.stored) == (9, 2 + 3, 3 + 1)
    served = Server(engine, work, tier=False).serve(requests)
    assert (served.blocks, served.loaded, served.stored) == (9, 0, 0)
    if engine.device.kind == "cuda":
        assert served.computed == 9 + 3  # of the fake's seconds: a block each, and a last token


def test_a_request_is_cut_to_the_pages_there_are() -> None:
    made = trace(200, 0)
    assert max(map(len, made)) == AT_ONCE
    assert all(len(set(keys)) == len(keys) for keys in made)


def test_a_copy_that_fails_in_the_background_is_raised() -> None:
    failed = HostEvent()
    failed.set(OSError("lost"))
    with pytest.raises(OSError, match="lost"), Copies(lambda: failed, 1) as copies:
        copies._thread.join()  # it ends by itself
    with Copies(lambda: DONE, 1):
        pass


def test_on_the_cpu_it_writes_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "tier.json"
    words = f"--device cpu --segments 8KiB --layers 2 --blocks {BLOCKS} --rows 8 --products 1"
    tier.main([*words.split(), "--requests", "3", "--rounds", "2", "--json", str(result)])
    tables = [Table(**fields) for fields in json.loads(result.read_text())["tables"]]
    assert len(tables) == 3
    shown = capsys.readouterr().out
    assert all(str(table) in shown for table in tables)


def test_too_small_a_tier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tier.main(["--device", "cpu", "--blocks", "10"])
    assert "--blocks: at least" in capsys.readouterr().err


def test_a_gpu_without_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="torch"):
        product(CudaDevice(0, driver=FakeDriver()), 8)
