"""A host tier at work: how fast blocks leave an engine and come back, and what that costs it.

    python -m bench.tier [--device auto] [--segments 256KiB,16KiB] [--layers 32] [--blocks N]
                         [--requests 200] [--rounds 5] [--json FILE]

The engine has a buffer of its own for each layer, so a block is as many segments as there are
layers, each somewhere else; the tier is one of page-locked memory, filled before anything is timed.
Three questions, for each size of a segment:

- *Rates* of storing (offload) and loading (onboard) random pages of the engine, from the first
  call to the end of the last copy, beside contiguous copies of as many bytes, in turn. Batches are
  submitted one behind the other until 512 MiB are on their way, eight at most.
- *Serving*: requests of a synthetic trace, one after the other. What is found is loaded, the rest
  is computed (a matrix product a block) and stored, and the computing stream waits for the copies
  that it needs. Beside it the same with everything computed. The share of the time in which the
  stream waits is measured by its own events.
- *Overlap*: how much slower products become while blocks are stored or loaded all the time, beside
  contiguous copies of the same bytes all the time.

On a GPU the products are torch's. The bytes that come back are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.measure import (
    Table,
    compare,
    in_turn,
    machine_line,
    quartiles,
    spread,
    write_tables,
)
from bench.product import Product, product
from hostmem import CudaDevice, Device, Event, StaticHostMem, resolve_device
from hostmem.device import DONE, CudaMemory
from hostmem.units import format_size, parse_size
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockJob,
    BufferConfig,
    EnginePages,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
)
from kvtier.replay.generator import generate
from kvtier.testing import FakeEngine

AT_ONCE = 64  # blocks: of a batch, and at most of a request
IN_FLIGHT = 2  # batches, where copies go on all the time
MOST_BATCHES, ON_THEIR_WAY = 8, 512 << 20  # of a rate; bytes
LEAST_BLOCKS = (IN_FLIGHT + 2) * AT_ONCE
REQUESTS_AT_ONCE = 4  # that the engine has pages for
TOKENS = 16  # of a block
TRACE_TOKENS = 512  # that a block of the trace stands for
WAYS = ("offload", "onboard")
COMPARED = 8  # blocks


class Engine:
    """An engine's pages, the tier behind them, and contiguous memory of a batch's size.

    Parameters
    ----------
    device : Device
        A GPU, or the CPU in its place.
    segment, layers : int
        Bytes of a block in one layer's buffer, and how many of those there are.
    blocks : int
        Blocks of the host tier.
    """

    def __init__(self, device: Device, segment: int, layers: int, blocks: int) -> None:
        self.device = device
        self.blocks = blocks
        self.block_bytes = segment * layers
        config = KVCacheManagerConfig(
            TOKENS,
            [HostCacheTierConfig(self.block_bytes * blocks)],
            [AttentionLayerConfig(n, [BufferConfig("kv", segment)]) for n in range(layers)],
        )
        self.storage = TierStorage(config, device=device)
        self.n_pages = REQUESTS_AT_ONCE * AT_ONCE
        self.pages = FakeEngine.with_pages(config.plan(), self.n_pages, device=device)
        engine = EnginePages(self.storage, self.pages.buffers, self.n_pages)
        self.cache: BlockCache[int] = BlockCache(self.storage, engine=engine)
        nbytes = self.block_bytes * AT_ONCE
        self.near = StaticHostMem(nbytes, device=device)
        self.far = (
            CudaMemory(device, nbytes, nbytes, nbytes)
            if isinstance(device, CudaDevice)
            else StaticHostMem(nbytes, device=device)
        )
        self.stream = device.stream()
        self.random = np.random.default_rng(1)
        self.keys = itertools.count(1 << 40)  # those of a trace are smaller

    def close(self) -> None:
        self.stream.close()
        self.storage.close()
        self.pages.close()
        self.near.close()
        self.far.close()

    def some_pages(self, count: int = AT_ONCE) -> NDArray[np.int64]:
        return self.random.permutation(self.n_pages)[:count]

    def fresh(self, count: int = AT_ONCE) -> list[int]:
        return list(itertools.islice(self.keys, count))

    def contiguous(self, way: str) -> Event:
        """Submit a contiguous copy of a batch's bytes."""
        ends = [self.near.address, self.far.address]
        to, source = ends if way == "offload" else ends[::-1]
        size = np.array([self.block_bytes * AT_ONCE], np.uint64)
        self.stream.copy(np.array([to], np.uint64), np.array([source], np.uint64), size)
        return self.stream.record()

    def check(self) -> None:
        """Bring blocks down and up, to other pages, and compare every byte."""
        tokens = [number % 1000 for number in range(COMPARED * TOKENS)]
        there, back = (self.some_pages(COMPARED) for _ in range(2))
        keys = self.fresh(COMPARED)
        self.pages.write(tokens, there).synchronize()
        self.cache.store(keys, there).wait()
        self.pages.scrub(np.arange(self.n_pages))
        self.cache.load(keys, back).wait()
        self.pages.verify(tokens, back)
        self.cache.drop(keys)


def route(device: Device) -> str:
    """Say which copies the kernel takes, on a GPU."""
    return device.copies.describe().splitlines()[0] if isinstance(device, CudaDevice) else ""


# ----------------------------------------------------------------------------------------- rates


def rates(engine: Engine, rounds: int) -> tuple[list[list[str]], dict[str, list[float]]]:
    """Time batches of blocks and contiguous copies in turn, in both directions."""
    nbytes = engine.block_bytes * AT_ONCE
    room = engine.blocks // AT_ONCE - 1
    count = min(max(ON_THEIR_WAY // nbytes, 1), MOST_BATCHES, room)
    kept = engine.fresh()
    engine.cache.store(kept, engine.some_pages()).wait()
    submitted: dict[str, list[float]] = {way: [] for way in WAYS}

    def blocks(way: str) -> Callable[[], float]:
        submit = engine.cache.store if way == "offload" else engine.cache.load

        def run() -> float:
            batches = [
                (engine.fresh() if way == "offload" else kept, engine.some_pages())
                for _ in range(count)
            ]
            start = time.perf_counter()
            jobs = [submit(*batch) for batch in batches]
            submitted[way].append((time.perf_counter() - start) / count)
            for job in jobs:
                job.wait()
            seconds = time.perf_counter() - start
            if way == "offload":
                engine.cache.drop([key for keys, _ in batches for key in keys])
            return seconds

        return run

    def contiguous(way: str) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            for event in [engine.contiguous(way) for _ in range(count)]:
                event.synchronize()
            return time.perf_counter() - start

        return run

    arms = {way: blocks(way) for way in WAYS}
    arms |= {f"contiguous {way}": contiguous(way) for way in WAYS}
    times = in_turn(arms, rounds)
    engine.cache.drop(kept)
    rows = []
    for way in WAYS:
        share = compare(times[f"contiguous {way}"], times[way])
        low, high = share.ratio_quartiles
        gigabytes = count * nbytes / 1e9
        rows.append(
            [
                way,
                f"{gigabytes / spread(times[way])[1]:.2f}",
                f"{gigabytes / spread(times[f'contiguous {way}'])[1]:.2f}",
                f"{share.ratio:.3f} ({low:.3f}-{high:.3f})",
                quartiles(submitted[way][-rounds:], 1e3),
            ]
        )
    return rows, times


# --------------------------------------------------------------------------------------- serving


@dataclass
class Place:
    """Pages of one request, and who still uses them."""

    pages: NDArray[np.int64]
    computed: Event = DONE
    stored: BlockJob[int] | None = None


@dataclass
class Served:
    """What serving the requests took; seconds and blocks."""

    seconds: float = 0.0
    computed: float = 0.0
    waited: float = 0.0
    blocks: int = 0
    loaded: int = 0
    stored: int = 0


@dataclass
class Server:
    """Serves requests one after the other; several are under way."""

    engine: Engine
    work: Product
    tier: bool
    """Whether blocks are kept; else everything is computed."""
    places: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        pages = np.arange(self.engine.n_pages).reshape(REQUESTS_AT_ONCE, AT_ONCE)
        self.places = [Place(row) for row in pages]

    def serve(self, requests: Sequence[Sequence[int]]) -> Served:
        served = Served()
        self.work.take()
        start = time.perf_counter()
        for place, keys in zip(itertools.cycle(self.places), requests, strict=False):
            self._serve(place, keys, served)
        for place in self.places:
            if place.stored is not None:
                place.stored.wait()
        served.computed, served.waited = self.work.take()
        served.seconds = time.perf_counter() - start
        return served

    def _serve(self, place: Place, keys: Sequence[int], served: Served) -> None:
        cache = self.engine.cache
        if place.stored is not None:
            place.stored.wait()
        place.computed.synchronize()
        hits = cache.match(keys) if self.tier else 0
        if hits:
            self.work.wait(cache.load(keys[:hits], place.pages[:hits]).event)
        place.computed = self.work.run(len(keys) - hits + 1)  # and one for the last token
        served.blocks += len(keys)
        served.loaded += hits
        if self.tier and hits < len(keys):
            rest = place.pages[hits : len(keys)]
            place.stored = cache.store(keys[hits:], rest, ready=place.computed)
            served.stored += len(place.stored.keys)


def trace(requests: int, seed: int) -> list[list[int]]:
    """Give the blocks of each request, as many as the engine has pages for."""
    made = generate(
        seed, requests, block_tokens=TRACE_TOKENS, context_tokens=AT_ONCE * TRACE_TOKENS
    )
    return [list(dict.fromkeys(one.hash_ids))[:AT_ONCE] for one in made]


def serving(
    engine: Engine, work: Product, requests: int, rounds: int
) -> tuple[list[list[str]], dict[str, list[float]]]:
    """Serve a trace a round, with the tier and without it."""
    arms: dict[str, list[Served]] = {"tier": [], "everything computed": []}
    for turn in range(rounds):
        blocks = trace(requests, turn)
        for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
            arms[name].append(Server(engine, work, name == "tier").serve(blocks))
        engine.cache.drop(list(engine.cache))
    size = engine.block_bytes / 1e9
    rows = []
    for name, runs in arms.items():
        saved = [
            beside.seconds / run.seconds
            for beside, run in zip(arms["everything computed"], runs, strict=True)
        ]
        rows.append(
            [
                name,
                quartiles([run.seconds for run in runs]),
                quartiles(saved),
                f"{np.mean([run.loaded / run.blocks for run in runs]):.1%}",
                quartiles([run.loaded * size / run.seconds for run in runs]),
                quartiles([run.stored * size / run.seconds for run in runs]),
                quartiles([run.waited / run.seconds for run in runs], 100) + " %",
            ]
        )
    return rows, {name: [run.seconds for run in runs] for name, runs in arms.items()}


# --------------------------------------------------------------------------------------- overlap


class Copies:
    """Copies that go on all the time on a thread of their own, while it is entered."""

    def __init__(self, submit: Callable[[], Event], nbytes: int) -> None:
        self._submit, self._nbytes = submit, nbytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None
        self.rate = 0.0
        """Bytes a second, once it has ended."""

    def _run(self) -> None:
        start, done = time.perf_counter(), 0
        under_way: deque[Event] = deque()
        try:
            while not self._stop.is_set():
                under_way.append(self._submit())
                if len(under_way) == IN_FLIGHT:
                    under_way.popleft().synchronize()
                    done += 1
            for event in under_way:
                event.synchronize()
        except BaseException as error:
            self._error = error
        self.rate = done * self._nbytes / (time.perf_counter() - start)

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def overlap(
    engine: Engine, work: Product, products: int, rounds: int
) -> tuple[list[list[str]], dict[str, list[float]]]:
    """Time products alone and beside copies, in turn."""
    batches = [engine.fresh() for _ in range(IN_FLIGHT)]  # under way; the one after, dropped
    homes = engine.some_pages(IN_FLIGHT * AT_ONCE).reshape(IN_FLIGHT, AT_ONCE)
    turns = itertools.cycle(range(IN_FLIGHT))
    kept = engine.fresh()
    engine.cache.store(kept, engine.some_pages()).wait()

    def blocks(way: str) -> Event:
        turn = next(turns)
        if way == "onboard":
            return engine.cache.load(kept, homes[turn]).event
        engine.cache.drop(batches[turn])  # its copy is done
        batches[turn] = engine.fresh()
        return engine.cache.store(batches[turn], homes[turn]).event

    copies: dict[str, list[float]] = {}

    def alone() -> float:
        work.run(products)
        return work.take()[0] / products

    def beside(name: str, submit: Callable[[], Event]) -> Callable[[], float]:
        copies[name] = []

        def run() -> float:
            with Copies(submit, engine.block_bytes * AT_ONCE) as others:
                seconds = alone()
            copies[name].append(others.rate)
            return seconds

        return run

    arms = {"alone": alone}
    for way in WAYS:
        arms[way] = beside(way, lambda way=way: blocks(way))  # type: ignore[misc]
        name = f"contiguous {way}"
        arms[name] = beside(name, lambda way=way: engine.contiguous(way))  # type: ignore[misc]
    times = in_turn(arms, rounds)
    engine.cache.drop([key for key in (*kept, *itertools.chain(*batches)) if key in engine.cache])
    rows = []
    for name, seconds in times.items():
        slower = compare(seconds, times["alone"])
        low, high = slower.ratio_quartiles
        rate = quartiles(copies[name][-rounds:], 1e-9) if name in copies else ""
        row = [name, quartiles(seconds, 1e3, 3), f"{slower.ratio:.3f} ({low:.3f}-{high:.3f})", rate]
        rows.append(row)
    return rows, times


# ------------------------------------------------------------------------------------------ main


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tier", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="auto", help="auto, cpu or a GPU's ordinal")
    parser.add_argument("--segments", default="256KiB,16KiB")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=1024, help="of the host tier")
    parser.add_argument("--rows", type=int, help="of the matrices; default: 8192, 512 on the CPU")
    parser.add_argument("--products", type=int, default=100, help="of the overlap")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.blocks < LEAST_BLOCKS:
        parser.error(f"--blocks: at least {LEAST_BLOCKS}, so that none is evicted under way")
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    rows_of = arguments.rows or (8192 if isinstance(device, CudaDevice) else 512)
    work = product(device, rows_of)
    work.run(3)
    work.take()
    print(f"{machine_line()}\n{device.name}")
    columns = {
        "Blocks of {block}, {count} at once, between an engine's pages and the host tier": [
            *("", "GB/s", "contiguous GB/s", "of contiguous", "a batch's submission, ms"),
        ],
        "Serving {requests} requests, blocks of {block}": [
            *("", "seconds", "times faster", "found"),
            *("onboard GB/s", "offload GB/s", "the stream waits"),
        ],
        "Products of {rows} x {rows} beside copies, blocks of {block}": [
            *("", "a product, ms", "to alone", "copied GB/s"),
        ],
    }
    tables, raw = [], {}
    for segment in (parse_size(size) for size in arguments.segments.split(",")):
        engine = Engine(device, segment, arguments.layers, arguments.blocks)
        engine.check()
        found = [
            rates(engine, arguments.rounds),
            serving(engine, work, arguments.requests, arguments.rounds),
            overlap(engine, work, arguments.products, arguments.rounds),
        ]
        label = f"{arguments.layers} segments of {format_size(segment)}"
        for (title, heads), (rows, times) in zip(columns.items(), found, strict=True):
            shown = title.format(
                block=label, count=AT_ONCE, requests=arguments.requests, rows=rows_of
            )
            tables.append(Table(shown, heads, rows, route(device)))
            raw[shown] = times
            print(f"\n{tables[-1]}", flush=True)
        engine.close()
    if arguments.json:
        write_tables(
            arguments.json, tables, device=device.name, rounds=arguments.rounds, seconds=raw
        )


if __name__ == "__main__":
    main()
