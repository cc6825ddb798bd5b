"""How fast a fill is, by threads and pages, beside bare population and what users do without it.

    python -m bench.fill [--size SIZE] [--rounds 5] [--device auto] [--threads 1,8] [--json FILE]

Memory of a virtual machine is often backed only at its first use, so more than is needed is touched
once before anything is timed. Then everything runs in turn, and each round gives a ratio:

- ours for each number of threads and each kind of pages, at the default setting and unthrottled
  (``stall_budget=None``), with the time to the first usable MiB. Beside it the bare system call
  (MADV_POPULATE_WRITE) on as many threads and the same pages, which neither registers nor wakes
  anybody. A process populates with 12 threads at most, however many it is asked for.
- ours with the default number of threads beside peers that block until all is there: numpy zeros,
  touched; mmap with MAP_POPULATE; on a GPU also cuMemHostAlloc, CuPy's pinned memory and torch's,
  without and with 8 registering threads.

The size is 4 GiB on a GPU and 512 MiB on the cpu device unless it is given; let it be a power of
two, since torch takes the next one.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import (
    Finding,
    Table,
    compare,
    in_turn,
    machine_line,
    quartiles,
    spread,
    write_tables,
)
from bench.peers import pinned_peers
from hostmem import CudaDevice, Device, HostMem, machine, resolve_device
from hostmem._sys import linux
from hostmem.fill_threads import default_fill_threads
from hostmem.units import format_size, parse_size

MIB, GIB = 1 << 20, 1 << 30
PAGES = ("small", "huge")
SETTINGS: dict[str, dict[str, Any]] = {"default": {}, "unthrottled": {"stall_budget": None}}
THREADS = (1, 4, 8, 12, 16)
PIECE = 2 * MIB  # of the bare system call, as ours
SLOT = MIB
OF_BARE = 0.85
# peer, our pages, our setting, how many times as fast ours is to be
TIMES_AS_FAST = (
    ("torch, 8 threads", "small", "default", 1.8),
    ("torch, 8 threads", "small", "unthrottled", 2.0),
    ("torch pin_memory", "small", "default", 5.0),
    ("torch pin_memory", "huge", "default", 10.0),
)

Arm = Callable[[], float]
Times = Mapping[str, list[float]]


class Fill:
    """One way to fill; each run adds the seconds to the first usable slot to ``first``."""

    def __init__(
        self, size: int, device: Device, threads: int, pages: str, setting: str = "default"
    ) -> None:
        self.size = size
        self.options: dict[str, Any] = {
            "device": device,
            "fill_threads": threads,
            "page_mode": pages,
            "slot_size": SLOT,
            **SETTINGS[setting],
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


def ours(pages: str, setting: str) -> str:
    return f"{pages} pages, {setting}"


def rate(size: int, seconds: list[float], digits: int = 1) -> str:
    """Show GiB/s with quartiles."""
    return quartiles([size / GIB / one for one in seconds], digits=digits)


def times_as_fast(slow: list[float], fast: list[float]) -> str:
    """Show how many times as fast the second is, with quartiles."""
    found = compare(slow, fast)
    return "{:.2f} ({:.2f}-{:.2f})".format(found.ratio, *found.ratio_quartiles)


# -------------------------------------------------------------------------- threads and pages


def by_threads(
    size: int, device: Device, threads: list[int], rounds: int
) -> tuple[dict[str, list[float]], Table, list[Finding]]:
    fills = {
        f"{n} threads, {ours(pages, setting)}": Fill(size, device, n, pages, setting)
        for n in threads
        for pages in PAGES
        for setting in SETTINGS
    }
    bares: dict[str, Arm] = {
        f"{n} threads, {pages} pages, bare": partial(bare, size, n, pages)
        for n in threads
        for pages in PAGES
    }
    times = in_turn({**fills, **bares}, rounds)
    rows, findings, default = [], [], default_fill_threads(device.stalls)
    for pages, n in itertools.product(PAGES, threads):
        alone = times[f"{n} threads, {pages} pages, bare"]
        row = [f"{n}, {pages}", rate(size, alone)]
        for setting in SETTINGS:
            name = f"{n} threads, {ours(pages, setting)}"
            row += [rate(size, times[name]), times_as_fast(alone, times[name])]
            if n == default:
                findings.append(_beside_bare(name, size, times[name], alone))
        first = fills[f"{n} threads, {ours(pages, 'default')}"].first[-rounds:]
        rows.append([*row, quartiles(first, 1e3)])
    columns = ["threads, pages", "bare GiB/s"]
    for setting in SETTINGS:
        columns += [f"{setting} GiB/s", "of bare"]
    table = Table(
        f"Fill of {format_size(size)} beside bare population, {device.name}",
        [*columns, "first MiB, ms"],
        rows,
        f"The default number of threads is {default} here. Medians and quartiles.",
    )
    return times, table, findings


def _beside_bare(name: str, size: int, seconds: list[float], alone: list[float]) -> Finding:
    return Finding(
        f"fill beside bare population: {name}",
        f"{rate(size, seconds)} GiB/s",
        f">= {OF_BARE} of bare",
        f"bare: {rate(size, alone)} GiB/s",
        times_as_fast(alone, seconds),
        compare(alone, seconds).ratio >= OF_BARE,
    )


# -------------------------------------------------------------------------------------- peers


def by_peer(
    size: int, device: Device, rounds: int
) -> tuple[dict[str, list[float]], Table, list[Finding]]:
    threads = default_fill_threads(device.stalls)
    fills = {
        ours(pages, setting): Fill(size, device, threads, pages, setting)
        for pages in PAGES
        for setting in SETTINGS
    }
    pinned, missing = pinned_peers(size, device)
    peers: dict[str, Arm] = {
        "numpy zeros, touched": partial(touched_zeros, size),
        "mmap MAP_POPULATE": partial(map_populate, size),
        **pinned,
    }
    times = in_turn({**fills, **peers}, rounds)
    rows = [
        [
            name,
            quartiles(seconds),
            *(times_as_fast(seconds, times[fill]) if name in peers else "" for fill in fills),
        ]
        for name, seconds in times.items()
    ]
    table = Table(
        f"Seconds until all of {format_size(size)} can be used, {device.name}, and how many times "
        "as fast ours is",
        ["", "seconds", *fills],
        rows,
        " ".join(
            [
                f"Ours with {threads} threads. Medians and quartiles.",
                *(f"Not measured: {line}." for line in missing),
            ]
        ),
    )
    return times, table, [_beside_peer(times, *wanted) for wanted in TIMES_AS_FAST]


def _beside_peer(times: Times, peer: str, pages: str, setting: str, bound: float) -> Finding:
    seconds = times[ours(pages, setting)]
    question = f"fill beside {peer}: {ours(pages, setting)}"
    own, wanted = f"{spread(seconds)[1]:.2f} s", f">= {bound:g} x"
    if peer not in times:
        return Finding(question, own, wanted)
    return Finding(
        question,
        own,
        wanted,
        f"{peer}: {spread(times[peer])[1]:.2f} s",
        times_as_fast(times[peer], seconds),
        compare(times[peer], seconds).ratio >= bound,
    )


def thread_counts(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fill", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", type=parse_size)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto", help="auto, cpu or a GPU's ordinal")
    parser.add_argument("--threads", type=thread_counts, help="such as 1,8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    size: int = arguments.size or (4 * GIB if isinstance(device, CudaDevice) else 512 * MIB)
    cpus = len(machine().allowed_cpus)
    threads: list[int] = arguments.threads or sorted(
        {*(n for n in THREADS if n <= cpus), default_fill_threads(device.stalls)}
    )
    touched_zeros(2 * size + GIB)

    beside_peers, peers, others = by_peer(size, device, arguments.rounds)
    beside_bare, matrix, findings = by_threads(size, device, threads, arguments.rounds)
    print(machine_line())
    for part in (matrix, peers, *findings, *others):
        print(part)
    if arguments.json:
        write_tables(
            arguments.json,
            [matrix, peers],
            findings + others,
            size=size,
            seconds_by_threads=beside_bare,
            seconds_beside_peers=beside_peers,
        )


if __name__ == "__main__":
    main()
