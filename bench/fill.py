"""How fast a fill is: our threads on shared pieces against one thread doing the same.

    python -m bench.fill [--size 4GiB] [--rounds 7] [--json FILE]

Memory of a virtual machine is often backed only at its first use, so all of it is touched once
before anything is timed. The two then run in turn, and each pair gives a ratio. Beside it: the time
to the first usable slot for several sizes, which should not depend on them, and what users do
without a library: numpy zeros, touched (numpy asks for huge pages, so ours does in that pair).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from bench.measure import Pairs, machine_line, pairs, timed, write_json
from hostmem import HostMem
from hostmem.units import format_size, parse_size


def filled(size: int, threads: int | str, pages: str = "small") -> float:
    """Return the seconds until all bytes are usable, construction included."""
    start = time.perf_counter()
    memory = HostMem(size, device="cpu", fill_threads=threads, page_mode=pages)
    memory.wait_usable(size)
    seconds = time.perf_counter() - start
    memory.close()
    return seconds


def first_slot(size: int, slot_size: int) -> float:
    """Return the seconds until the first slot is usable, construction included."""
    start = time.perf_counter()
    memory = HostMem(size, device="cpu", slot_size=slot_size)
    memory.wait_usable(slot_size)
    seconds = time.perf_counter() - start
    memory.close()
    return seconds


def touched_zeros(size: int) -> None:
    array = np.zeros(size, np.uint8)
    array[::4096] = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=parse_size, default="4GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size: int = arguments.size
    touched_zeros(size + (1 << 30))

    results: dict[str, Pairs] = {}
    results["all threads / one thread"] = pairs(
        lambda: filled(size, "auto"), lambda: filled(size, 1), arguments.rounds
    )
    results["huge pages / numpy zeros touched"] = pairs(
        lambda: filled(size, "auto", "auto"), timed(lambda: touched_zeros(size)), arguments.rounds
    )
    print(machine_line())
    print(f"fill of {format_size(size)}")
    for name, result in results.items():
        print(f"  {name:<36} {result}")

    slot = 1 << 20
    first = {}
    for capacity in (1 << 30, 4 << 30, 16 << 30, 1 << 40):
        times = [first_slot(capacity, slot) for _ in range(arguments.rounds)]
        first[format_size(capacity)] = times
        low, middle, high = statistics.quantiles(times, n=4)
        print(
            f"  first MiB of {format_size(capacity):<8} {middle * 1e3:8.2f} ms "
            f"(quartiles {low * 1e3:.2f}-{high * 1e3:.2f})"
        )
    if arguments.json:
        write_json(arguments.json, results, size=size, first_slot_seconds=first)


if __name__ == "__main__":
    main()
