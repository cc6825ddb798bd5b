"""What reading a placement costs beside the system call that it cannot do without.

    python -m bench.placement [--size 4GiB] [--rounds 7] [--json FILE]

- Every page: `placement_of` beside one bare move_pages call over an array of addresses that is
  there already. Exit status 1 when ours takes more than 1.5 times that.
- In detail (1,024 stretches), and by a sample of 4,096 pages, beside the same.
- Small pages and, where the machine has them, transparent huge pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.measure import Pairs, compare, in_turn, machine_line, timed, write_json
from hostmem import machine, placement_of
from hostmem._sys import linux
from hostmem.units import align_up, format_size, parse_size

LIMIT = 1.5
SAMPLE = 4096


@contextmanager
def filled(nbytes: int, advise: Callable[[int, int], bool], alignment: int) -> Iterator[int]:
    """Yield the address of populated memory."""
    address = linux.reserve(nbytes, alignment)
    try:
        linux.allow(address, nbytes)
        advise(address, nbytes)
        if not linux.populate(address, nbytes):
            linux.touch(address, nbytes)
        yield address
    finally:
        linux.unmap(address, nbytes)


def costs(address: int, nbytes: int, rounds: int) -> dict[str, Pairs]:
    addresses = np.arange(address, address + nbytes, machine().page_size, dtype=np.uint64)
    status = np.empty(len(addresses), np.int32)
    times = in_turn(
        {
            "every page": timed(lambda: placement_of(address, nbytes)),
            "in detail": timed(lambda: placement_of(address, nbytes, detail=True)),
            "a sample": timed(lambda: placement_of(address, nbytes, sample=SAMPLE)),
            "bare": timed(lambda: linux.node_of_pages(addresses, status)),
        },
        rounds,
    )
    bare = times.pop("bare")
    return {name: compare(arm, bare) for name, arm in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", type=parse_size, default="4GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    here = machine()
    alignment = here.huge_page_size or here.page_size
    size = align_up(arguments.size, alignment)

    kinds = {"small pages": linux.advise_small}
    if here.huge_page_size and here.thp_enabled != "never":
        kinds["huge pages"] = linux.advise_huge
    results: dict[str, Pairs] = {}
    for kind, advise in kinds.items():
        with filled(size, advise, alignment) as address:
            found = placement_of(address, size)
            print(f"{kind}: {', '.join(map(format_size, found.bytes_by_page_size))} found")
            for name, pairs in costs(address, size, arguments.rounds).items():
                results[f"{kind}: {name} / move_pages"] = pairs

    print(machine_line())
    print(f"milliseconds for {size // here.page_size:,} pages, {format_size(size)} (medians)")
    for name, result in results.items():
        low, high = result.ratio_quartiles
        print(
            f"  {name:<40} {result.ours_median * 1e3:9.2f} {result.peer_median * 1e3:9.2f}"
            f"   ratio {result.ratio:.3f} ({low:.3f}-{high:.3f})"
        )
    if arguments.json:
        write_json(arguments.json, results, size=size, sample=SAMPLE, limit=LIMIT)
    return int(results["small pages: every page / move_pages"].ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
