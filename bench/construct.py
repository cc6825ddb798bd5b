"""How long construction and the first usable slot take, which should not depend on the capacity.

    python -m bench.construct [--rounds 21] [--slot 1MiB] [--device auto] [--json FILE]

Every round builds memory of each capacity in turn, waits for the first slot and closes it again.
The ratios are to the smallest capacity. Beside it, what has to be touched before it is usable:
numpy zeros, up to 1 GiB. Exit status 1 when the median construction or first slot of one capacity
takes more than twice as long as of another.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.measure import Pairs, compare, in_turn, machine_line, spread, write_json
from hostmem import Device, HostMem, resolve_device
from hostmem.units import format_size, parse_size

LIMIT = 2.0
CAPACITIES = (1 << 30, 64 << 30, 1 << 40)
ZEROS = (64 << 20, 256 << 20, 1 << 30)


class Build:
    """Build memory, wait for a slot, close; the time of construction alone is kept beside."""

    def __init__(self, capacity: int, slot: int, device: Device) -> None:
        self.capacity = capacity
        self.slot = slot
        self.device = device
        self.construction: list[float] = []

    def __call__(self) -> float:
        """Return the seconds until the first slot is usable."""
        start = time.perf_counter()
        with HostMem(self.capacity, device=self.device, slot_size=self.slot) as memory:
            self.construction.append(time.perf_counter() - start)
            memory.wait_usable(self.slot)
            return time.perf_counter() - start


def touched(size: int) -> float:
    """Return the seconds until numpy zeros of a size are all there."""
    start = time.perf_counter()
    array = np.zeros(size, np.uint8)
    array[::4096] = 1
    return time.perf_counter() - start


def show(what: str, times: dict[int, list[float]]) -> tuple[dict[str, Pairs], float]:
    """Print a line a size; return the pairs with the smallest, and the widest ratio of medians."""
    least = min(times)
    results: dict[str, Pairs] = {}
    print(f"  {what}")
    for size, seconds in times.items():
        low, middle, high = spread(seconds)
        line = (
            f"    {format_size(size):>8} {middle * 1e3:9.3f} ms ({low * 1e3:.3f}-{high * 1e3:.3f})"
        )
        if size != least:
            name = f"{what}: {format_size(size)} / {format_size(least)}"
            result = results[name] = compare(seconds, times[least])
            quartiles = "{:.2f}-{:.2f}".format(*result.ratio_quartiles)
            line += f"   {result.ratio:6.2f} x {format_size(least)} ({quartiles})"
        print(line)
    medians = [spread(seconds)[1] for seconds in times.values()]
    return results, max(medians) / min(medians)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.construct", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--slot", type=parse_size, default="1MiB")
    parser.add_argument("--device", default="auto", help="auto, cpu or a GPU's ordinal")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    rounds: int = arguments.rounds

    builds = {capacity: Build(capacity, arguments.slot, device) for capacity in CAPACITIES}
    arms: dict[str, Callable[[], float]] = {str(size): build for size, build in builds.items()}
    times = in_turn(arms, rounds)
    zeros = in_turn({str(size): lambda size=size: touched(size) for size in ZEROS}, 3)  # type: ignore[misc]

    print(machine_line())
    print(f"{device.name}, slots of {format_size(arguments.slot)}, {rounds} rounds")
    construction, a = show(
        "construction", {size: build.construction[-rounds:] for size, build in builds.items()}
    )
    first, b = show("first slot usable", {size: times[str(size)] for size in CAPACITIES})
    peer, _ = show("numpy zeros touched", {size: zeros[str(size)] for size in ZEROS})
    print(f"  widest ratio of medians: construction {a:.2f}, first slot {b:.2f}; limit {LIMIT}")
    if arguments.json:
        write_json(
            arguments.json,
            construction | first | peer,
            device=device.name,
            slot=arguments.slot,
            widest_ratio={"construction": a, "first slot": b},
        )
    return int(max(a, b) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
