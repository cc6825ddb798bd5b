"""How fast a fill is, by threads, pages and commit unit, and beside what users do without it.

    python -m bench.fill [--size 512MiB] [--rounds 5] [--device auto] [--threads 1,2] [--json FILE]

Memory of a virtual machine is often backed only at its first use, so all of it is touched once
before anything is timed. Then everything runs in turn, and each pair gives a ratio:

- ours with all threads and with one;
- ours for each number of threads, page mode and commit unit, with the time to the first usable
  MiB; the ratio is to the bare system call (MADV_POPULATE_WRITE) on as many threads and the same
  pages, which neither registers nor wakes anybody;
- ours beside peers that block until all is there: numpy zeros, touched (numpy asks for huge pages,
  so ours does in that pair); mmap with MAP_POPULATE; on a GPU also cuMemHostAlloc, CuPy's
  pinned memory and torch's, without and with 8 registering threads.

Last, the time to the first usable MiB of several capacities, which should not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Pairs, compare, in_turn, machine_line, pairs, spread, write_json
from bench.peers import pinned_peers
from hostmem import Device, HostMem, machine, resolve_device
from hostmem._sys import linux
from hostmem.units import format_size, parse_size

MIB = 1 << 20
PAGES = ("small", "huge")
UNITS = (2 * MIB, 8 * MIB, 32 * MIB)
PIECE = 2 * MIB  # of the bare system call, as ours
SLOT = MIB

Arm = Callable[[], float]


class Fill:
    """One way to fill; each run adds the seconds to the first usable slot to ``first``."""

    def __init__(
        self, size: int, device: Device, threads: int | str, pages: str, unit: int | None = None
    ) -> None:
        self.size = size
        self.options: dict[str, Any] = {
            "device": device,
            "fill_threads": threads,
            "page_mode": pages,
            "commit_unit": unit,
            "slot_size": SLOT,
        }
        self.first: list[float] = []

    def __call__(self) -> float:
        """Return the seconds until all bytes are usable, construction included."""
        start = time.perf_counter()
        with HostMem(self.size, **self.options) as memory:
            memory.wait_usable(SLOT)
            self.first.append(time.perf_counter() - start)
            memory.wait_usable(memory.size)
            return time.perf_counter() - start

    def first_slot(self) -> float:
        """Return the seconds until the first slot is usable, and fill no further."""
        start = time.perf_counter()
        with HostMem(self.size, **self.options) as memory:
            memory.wait_usable(SLOT)
            return time.perf_counter() - start


def bare(size: int, threads: int, pages: str) -> float:
    """Return the seconds that populating takes threads that do nothing else."""
    alignment = machine().huge_page_size or PIECE
    pieces = itertools.count(0, PIECE)
    start = time.perf_counter()
    address = linux.reserve(size, alignment)
    (linux.advise_huge if pages == "huge" else linux.advise_small)(address, size)
    linux.allow(address, size)

    def work() -> None:
        while (offset := next(pieces)) < size:
            piece = address + offset, min(PIECE, size - offset)
            if not linux.populate(*piece):  # a kernel before 5.14, gVisor
                linux.touch(*piece)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    linux.unmap(address, size)
    return seconds


def touched_zeros(size: int) -> float:
    start = time.perf_counter()
    array = np.zeros(size, np.uint8)
    array[:: mmap.PAGESIZE] = 1
    return time.perf_counter() - start


def map_populate(size: int) -> float:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    start = time.perf_counter()
    with mmap.mmap(-1, size, flags=flags):
        return time.perf_counter() - start


def peers(size: int, device: Device) -> tuple[dict[str, tuple[str, Arm]], list[str]]:
    """Give the peers by name, each with the page mode of ours beside it, and what is missing."""
    pinned, missing = pinned_peers(size, device)
    return {
        "numpy zeros touched": ("huge", lambda: touched_zeros(size)),
        "mmap MAP_POPULATE": ("small", lambda: map_populate(size)),
        **{name: ("small", arm) for name, arm in pinned.items()},
    }, missing


def thread_counts(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def matrix(
    size: int, device: Device, threads: list[int], rounds: int
) -> tuple[dict[str, Pairs], dict[str, list[float]]]:
    """Time every cell and the bare system call beside it; print them; return the pairs."""
    cells = {
        (n, pages, unit): Fill(size, device, n, pages, unit)
        for n in threads
        for pages in PAGES
        for unit in UNITS
    }
    names = {cell: f"{cell[0]} threads, {cell[1]}, {format_size(cell[2])}" for cell in cells}
    arms: dict[str, Arm] = {names[cell]: fill for cell, fill in cells.items()}
    for n, pages in itertools.product(threads, PAGES):
        arms[f"bare {n} {pages}"] = lambda n=n, pages=pages: bare(size, n, pages)  # type: ignore[misc]
    times = in_turn(arms, rounds)
    results: dict[str, Pairs] = {}
    first: dict[str, list[float]] = {}
    print(
        "  threads pages   unit        GiB/s (quartiles)      first MiB ms    time / bare populate"
    )
    for (n, pages, unit), fill in cells.items():
        name = names[n, pages, unit]
        result = results[f"{name} / bare populate"] = compare(
            times[name], times[f"bare {n} {pages}"]
        )
        first[name] = fill.first[-rounds:]
        slow, middle, fast = (size / (1 << 30) / seconds for seconds in spread(times[name])[::-1])
        low, high = result.ratio_quartiles
        print(
            f"  {n:7} {pages:7} {format_size(unit):8} {middle:8.2f} ({slow:.2f}-{fast:.2f})"
            f"{spread(first[name])[1] * 1e3:15.2f}    {result.ratio:10.2f} ({low:.2f}-{high:.2f})"
        )
    return results, first


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fill", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", type=parse_size, default="512MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto", help="auto, cpu or a GPU's ordinal")
    parser.add_argument("--threads", type=thread_counts, help="such as 1,8; default: 1 and all")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size: int = arguments.size
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    everything = min(len(machine().allowed_cpus), 12)
    threads: list[int] = arguments.threads or sorted({1, everything})
    touched_zeros(size + (1 << 30))

    print(machine_line())
    print(f"fill of {format_size(size)}, {device.name}, {arguments.rounds} rounds")
    results: dict[str, Pairs] = {
        "all threads / one thread": pairs(
            Fill(size, device, "auto", "small"), Fill(size, device, 1, "small"), arguments.rounds
        )
    }
    others, missing = peers(size, device)
    arms: dict[str, Arm] = {pages: Fill(size, device, "auto", pages) for pages in PAGES}
    times = in_turn(arms | {peer: arm for peer, (_, arm) in others.items()}, arguments.rounds)
    for peer, (pages, _) in others.items():
        results[f"{pages} pages / {peer}"] = compare(times[pages], times[peer])
    for name, result in results.items():
        print(f"  {name:<44} {result}")
    for line in missing:
        print(f"  not measured: {line}")
    cells, first = matrix(size, device, threads, arguments.rounds)

    slot: dict[str, list[float]] = {}
    for capacity in (1 << 30, 4 << 30, 16 << 30, 1 << 40):
        fill = Fill(capacity, device, "auto", "small")
        slot[format_size(capacity)] = [fill.first_slot() for _ in range(arguments.rounds)]
        low, middle, high = spread(slot[format_size(capacity)])
        print(
            f"  first MiB of {format_size(capacity):<8} {middle * 1e3:8.2f} ms "
            f"(quartiles {low * 1e3:.2f}-{high * 1e3:.2f})"
        )
    if arguments.json:
        write_json(
            arguments.json,
            results | cells,
            size=size,
            device=device.name,
            not_measured=missing,
            first_slot_seconds=slot,
            first_slot_seconds_by_cell=first,
        )


if __name__ == "__main__":
    main()
