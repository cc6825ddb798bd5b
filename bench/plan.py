"""How long it takes to make a batch of copies from slot numbers.

    python -m bench.plan [--rounds 31] [--json FILE]

Pages of an engine, whose layers have a buffer each, and whole pages in filled host memory of
several registrations: 16,384 pages of one segment, and 256 of 160. The slots are in random order,
new ones each round, or consecutive, where the copies of neighbours become one. In turn: ours (what
`PageCopier` does from slot numbers to the arrays that it submits), numpy a buffer at a time, and a
Python loop over pages and buffers; only ours joins neighbours. Nothing is copied.

An array of 16 MiB is freed first, so that the C library keeps what is freed later, as it does in a
process that has been at work for a while. Each ratio is ours to the peer's: below 1 ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from bench.measure import Finding, Table, compare, in_turn, machine_line, quartiles, write_tables
from hostmem import HostMem
from kvtier import AttentionLayerConfig, BufferConfig, EnginePages, KVCacheManagerConfig
from kvtier.config import HostCacheTierConfig
from kvtier.transfer.copier import plan_pages
from kvtier.transfer.memory import Ids, MemoryPool
from kvtier.transfer.plan import CopyPlan

SHAPES = ((16_384, 1), (256, 160))  # pages, segments of each
SEGMENT = 4096
SPREAD = 4  # times as many slots as pages
UNIT = 8 << 20
MOST = 0.5e-3  # seconds
FREED = 16 << 20


@dataclass
class Places:
    """Pages of an engine, and of host memory, with slots chosen among them."""

    count: int
    segments: int
    scattered: bool
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def __post_init__(self) -> None:
        page, slots = SEGMENT * self.segments, SPREAD * self.count
        layers = [
            AttentionLayerConfig(n, [BufferConfig("kv", SEGMENT)]) for n in range(self.segments)
        ]
        config = KVCacheManagerConfig(16, [HostCacheTierConfig(page * slots)], layers)
        # Addresses that nobody follows, far from each other.
        places = {(n, "kv"): ((1 << 46) + (n << 36), SEGMENT) for n in range(self.segments)}
        (self.engine,) = EnginePages(config.plan(), places, slots).memory
        unit = max(UNIT // page, 1) * page
        self.memory = HostMem(
            page * slots, device="cpu", slot_size=page, commit_unit=unit, wait=True
        )
        self.pool = MemoryPool(self.memory, page)
        self.bases = [base for base, _ in places.values()]

    def slots(self) -> tuple[Ids, Ids]:
        if not self.scattered:
            return (np.arange(self.count, dtype=np.int32),) * 2
        hot, cold = (self.random.permutation(SPREAD * self.count)[: self.count] for _ in range(2))
        return hot.astype(np.int32), cold.astype(np.int32)

    def ours(self, hot: Ids, cold: Ids) -> CopyPlan:
        addresses = self.engine.addresses(hot)
        pages = self.pool.addresses(cold)
        return plan_pages(self.engine.pools, addresses, pages, self.pool, up=True)  # type: ignore[arg-type]

    def by_buffer(self, hot: Ids, cold: Ids) -> CopyPlan:
        plans = []
        page = SEGMENT * self.segments
        for n, base in enumerate(self.bases):
            to = hot.astype(np.uint64) * np.uint64(SEGMENT) + np.uint64(base)
            source = cold.astype(np.uint64) * np.uint64(page)
            source += np.uint64(self.memory.address + n * SEGMENT)
            plans.append(CopyPlan.of(to, source, SEGMENT))
        return CopyPlan.joined(plans)

    def by_page(self, hot: Ids, cold: Ids) -> CopyPlan:
        to, source, sizes = [], [], []
        page = SEGMENT * self.segments
        for a, b in zip(hot.tolist(), cold.tolist(), strict=True):
            for n, base in enumerate(self.bases):
                to.append(base + a * SEGMENT)
                source.append(self.memory.address + b * page + n * SEGMENT)
                sizes.append(SEGMENT)
        columns: list[NDArray[np.uint64]] = [np.array(c, np.uint64) for c in (to, source, sizes)]
        return CopyPlan(*columns)


Plan = Callable[[Ids, Ids], CopyPlan]


def moved(plan: CopyPlan) -> dict[int, int]:
    """Give where each segment comes from, by where it goes."""
    return {
        to + at: source + at
        for to, source, size in zip(*map(np.ndarray.tolist, _columns(plan)), strict=True)
        for at in range(0, size, SEGMENT)
    }


def _columns(plan: CopyPlan) -> tuple[NDArray[np.uint64], ...]:
    return plan.destinations, plan.sources, plan.sizes


def measure(places: Places, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Time all arms; return their seconds, and how many copies ours are."""
    arms: dict[str, Plan] = {
        "ours": places.ours,
        "numpy, by buffer": places.by_buffer,
        "Python loop": places.by_page,
    }
    slots = places.slots()
    plans = {name: arm(*slots) for name, arm in arms.items()}
    if len({tuple(sorted(moved(plan).items())) for plan in plans.values()}) != 1:
        raise SystemExit("the plans do not move the same bytes")

    def timed(arm: Plan) -> Callable[[], float]:
        def run() -> float:
            slots = places.slots()
            start = perf_counter()
            arm(*slots)
            return perf_counter() - start

        return run

    return in_turn({name: timed(arm) for name, arm in arms.items()}, rounds), len(
        plans["ours"].sizes
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(machine_line())
    np.ones(FREED // 8).sum()
    rows, findings, raw = [], [], {}
    for count, segments in SHAPES:
        for scattered in (True, False):
            places = Places(count, segments, scattered)
            times, copies = measure(places, arguments.rounds)
            places.memory.close()
            order = "random" if scattered else "consecutive"
            name = f"{count:,} pages of {segments}, {order}"
            raw[name] = times
            peers = [peer for peer in times if peer != "ours"]
            row = [name, f"{copies:,}", quartiles(times["ours"], 1e3, 3)]
            for peer in peers:
                ratio = compare(times["ours"], times[peer])
                row += [quartiles(times[peer], 1e3, 3), f"{ratio.ratio:.3f}"]
            rows.append(row)
            middle = float(np.median(times["ours"]))
            findings.append(
                Finding(
                    f"plan of {name}", f"{middle * 1e3:.3f} ms", "<= 0.5 ms", held=middle <= MOST
                )
            )
    columns = [
        "pages of segments",
        "copies",
        "ours, ms",
        *(w for p in peers for w in (f"{p}, ms", "ratio")),
    ]
    table = Table("From slot numbers to a batch of copies", columns, rows)
    print(table)
    for finding in findings:
        print(finding)
    if arguments.json:
        write_tables(arguments.json, [table], findings, rounds=arguments.rounds, seconds=raw)


if __name__ == "__main__":
    main()
