"""Scattered pages from one place of host memory to another: a stream of the CPU against numpy.

Pages of one size, in random order, are copied between two areas that no cache holds. The peer is a
loop of numpy copies; beside it, ours with one thread and with as many as the process may have.
Each ratio is the median over the pairs of one run: below 1, ours is faster.

    python -m bench.copy [--bytes 32MiB] [--area 256MiB] [--threads 1,8] [--pairs 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from bench.measure import compare, in_turn, machine_line, write_json
from hostmem import CpuDevice, StaticHostMem
from hostmem.device import copy_threads as module
from hostmem.device.copy_threads import CopyThreads
from hostmem.units import format_size, parse_size

PAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


class Copies:
    """Batches of pages of one size, from random places of one area to random ones of another."""

    def __init__(self, memory: StaticHostMem, page: int, nbytes: int) -> None:
        self.pages = memory.view(shape=(2, -1, page))
        self.count = nbytes // page
        self.bases = np.uint64(memory.address) + np.array([0, memory.view().nbytes // 2], np.uint64)
        self.sizes = np.full(self.count, page, np.uint64)
        self.random = np.random.default_rng(page)

    def places(self) -> NDArray[np.intp]:
        """Choose pages of both areas; shape (2, pages)."""
        total = self.pages.shape[1]
        return np.stack([self.random.permutation(total)[: self.count] for _ in range(2)])

    def by_numpy(self) -> float:
        """Copy a batch page by page."""
        to, source = self.places().tolist()
        start = perf_counter()
        for a, b in zip(to, source, strict=True):
            self.pages[0, a] = self.pages[1, b]
        return perf_counter() - start

    def by_stream(self, team: CopyThreads) -> float:
        """Copy a batch as a tier does on the CPU: submit, and wait for the event."""
        module._shared = team
        places = self.places().astype(np.uint64) * self.sizes[0]
        to, source = places + self.bases[:, None]
        start = perf_counter()
        stream.copy(to, source, self.sizes)
        stream.synchronize()
        return perf_counter() - start


stream = CpuDevice().stream()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.copy", description=__doc__)
    parser.add_argument("--bytes", metavar="SIZE", type=parse_size, default=32 << 20)
    parser.add_argument("--area", metavar="SIZE", type=parse_size, default=256 << 20)
    parser.add_argument("--threads", metavar="N[,N]", help="default: 1 and all there may be")
    parser.add_argument("--pairs", metavar="N", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    counts = arguments.threads or f"1,{CopyThreads().most}"
    teams = {int(n): CopyThreads(int(n)) for n in counts.split(",")}
    nbytes, results = arguments.bytes, {}

    print(machine_line())
    print(f"batches of {format_size(nbytes)} between areas of {format_size(arguments.area)}; GB/s,")
    print("and time as a ratio to numpy's (quartiles)")
    print(f"{'page':>9}{'numpy':>8}" + "".join(f"{f'{n} threads':>30}" for n in teams))
    with StaticHostMem(2 * arguments.area) as memory:
        memory.view()[:] = 1
        for page in PAGES:
            copies = Copies(memory, page, nbytes)
            ours = {str(n): partial(copies.by_stream, team) for n, team in teams.items()}
            times = in_turn({"numpy": copies.by_numpy, **ours}, arguments.pairs)
            del copies, ours  # views of the memory
            found = {name: compare(times[name], times["numpy"]) for name in map(str, teams)}
            row = f"{format_size(page):>9}{nbytes / np.median(times['numpy']) / 1e9:8.2f}"
            for name, result in found.items():
                low, high = result.ratio_quartiles
                rate = nbytes / result.ours_median / 1e9
                row += f"{f'{rate:.2f}  {result.ratio:.2f} ({low:.2f}-{high:.2f})':>30}"
                results[f"{page}_bytes_{name}_threads"] = result
            print(row, flush=True)
    stream.close()
    if arguments.json:
        write_json(arguments.json, results, batch=nbytes, area=arguments.area)
    return 0


if __name__ == "__main__":
    sys.exit(main())
