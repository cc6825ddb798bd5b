"""Time the slot allocator against two free lists in the same run.

    python -m bench.allocator [--slots 65536] [--batch 1024] [--rounds 50]

The baselines keep nothing but free ids: a list that is cut at its end, and an array that is cut at
its head and has released ids concatenated to its tail, as host pools of engines do. Neither checks
what is released, knows fresh ids from used ones, or fences work in flight.

Each round prepares every arm anew, shuffled alike, and then times calls one by one (of a batch) or
by the thousand (of one slot). Printed are the median and the 10th and 90th percentile, in
microseconds a call. Exit status 1 when the median of a SlotAllocator's take is above 20 us for a
batch of up to 1,024 slots, or above 1.5 us for one slot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import quantiles
from time import perf_counter_ns
from typing import Any

import numpy as np

from bench.measure import machine_line
from kvtier.slots import SlotAllocator

LIMITS = {"take a batch: SlotAllocator": 20.0, "take one: SlotAllocator": 1.5}  # us a call
LIMITED_BATCH = 1024
SINGLES = 1000  # calls timed together where one is shorter than the clock resolves


class Going:
    """Work that never ends."""

    def query(self) -> bool:
        """Say that it has not ended."""
        return False


class ListFree:
    """A free list in a list."""

    def __init__(self, ids: np.ndarray) -> None:
        self.free: list[int] = ids.tolist()

    def allocate(self, n: int) -> list[int]:
        """Cut ``n`` ids off the end."""
        taken = self.free[-n:]
        del self.free[-n:]
        return taken

    def release(self, ids: list[int]) -> None:
        """Append ids."""
        self.free.extend(ids)


class ArrayFree:
    """A free list in an array."""

    def __init__(self, ids: np.ndarray) -> None:
        self.free = ids

    def allocate(self, n: int) -> np.ndarray:
        """Cut ``n`` ids off the head."""
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def release(self, ids: np.ndarray) -> None:
        """Concatenate ids to the tail."""
        self.free = np.concatenate((self.free, ids))


def recycled(ids: np.ndarray, event: Going | None = None) -> SlotAllocator:
    """Give an allocator all of whose slots were used and came back in the order of ``ids``."""
    slots = SlotAllocator(len(ids))
    slots.allocate(len(ids))
    slots.release(ids, event)
    return slots


def arms(ids: np.ndarray, batch: int) -> Iterator[tuple[str, int, list[Callable[[], Any]]]]:
    """Prepare every arm: its name, how many operations a call makes, and the calls to time."""
    times = len(ids) // batch // 2

    def takes(pool: Any) -> list[Callable[[], Any]]:
        return [partial(pool.allocate, batch)] * times

    def gives(pool: Any) -> list[Callable[[], Any]]:
        taken = [pool.allocate(batch) for _ in range(times)]
        if isinstance(pool, SlotAllocator):
            taken = [slots.ids for slots in taken]
        return [partial(pool.release, got) for got in taken]

    def singles(one: Callable[[], Any]) -> list[Callable[[], Any]]:
        def call() -> None:
            for _ in range(SINGLES):
                one()

        return [call] * min(10, len(ids) // SINGLES)

    yield "take a batch: list", 1, takes(ListFree(ids))
    yield "take a batch: array", 1, takes(ArrayFree(ids))
    yield "take a batch: SlotAllocator, ready", 1, takes(recycled(ids))
    yield "take a batch: SlotAllocator, fresh", 1, takes(SlotAllocator(len(ids)))
    yield "take a batch: SlotAllocator, in flight", 1, takes(recycled(ids, Going()))
    yield "give a batch: list", 1, gives(ListFree(ids))
    yield "give a batch: array", 1, gives(ArrayFree(ids))
    yield "give a batch: SlotAllocator", 1, gives(recycled(ids))
    yield "take one: list", SINGLES, singles(ListFree(ids).free.pop)
    yield "take one: SlotAllocator, ready", SINGLES, singles(recycled(ids).allocate_one)
    yield "take one: SlotAllocator, fresh", SINGLES, singles(SlotAllocator(len(ids)).allocate_one)
    yield (
        "take one: SlotAllocator, in flight",
        SINGLES,
        singles(recycled(ids, Going()).allocate_one),
    )


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()

    ids = np.random.default_rng(0).permutation(options.slots).astype(np.int32)
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, operations, calls in arms(ids, options.batch):
            for call in calls:
                start = perf_counter_ns()
                call()
                elapsed = perf_counter_ns() - start
                found.setdefault(name, []).append(elapsed / operations / 1e3)

    print(machine_line())
    print(f"{options.slots:,} slots, batches of {options.batch:,}; us a call: median (p10 - p90)")
    holds = True
    for name, values in found.items():
        tenths = quantiles(values, n=10)
        limit = next((most for start, most in LIMITS.items() if name.startswith(start)), None)
        verdict = ""
        if limit is not None and options.batch <= LIMITED_BATCH:
            verdict = f"  at most {limit:g}: {'holds' if tenths[4] <= limit else 'FALLS SHORT'}"
            holds &= tenths[4] <= limit
        print(f"  {name:40} {tenths[4]:8.3f}  ({tenths[0]:.3f} - {tenths[8]:.3f}){verdict}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
