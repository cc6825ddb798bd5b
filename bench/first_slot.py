"""How long after construction the first slot of a large tier can be used.

    python -m bench.first_slot [--rounds 5] [--peer-size 4GiB] [--peer-rounds 3] [--device auto]
                               [--json FILE]

Each sample is of a process of its own, which imports the library, is brought into one of three
states, starts the clock, constructs memory of so much capacity with slots of 1 MiB, and waits for
the first slot; then it closes the memory, of which little is filled by then.

- nothing: CUDA has not been used. On the cpu device, where there is nothing to start, the only
  state beside the last.
- context: the device's primary context is there.
- warm: so is that, and 2 MiB were registered and closed again.

The peers block until all bytes are there, so they are measured at a size of their own (a power of
two: torch rounds up to one). They have a context, and the clock starts after their imports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

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
from hostmem import CudaDevice, Device, HostMem, StaticHostMem, resolve_device
from hostmem.units import format_size, parse_size

GIB = 1 << 30
SLOT = 1 << 20
CAPACITIES = (1 * GIB, 4 * GIB, 16 * GIB, 64 * GIB, 96 * GIB)
NOTHING, CONTEXT, WARM = "nothing", "context", "warm"
COLUMNS = (("small", NOTHING), ("small", CONTEXT), ("small", WARM), ("huge", WARM))
HELD_AT = 64 * GIB
LIMIT = 10e-3  # seconds
FLAT = 1.25

Sample = tuple[int, str, str]  # capacity, pages, state
_CHILD = "import sys; from bench.first_slot import sample; print(sample(*sys.argv[1:]))"


def sample(state: str, capacity: str, pages: str, device: str) -> float:
    """Return the seconds to the first slot, in a process that has done nothing else yet."""
    who: int | str = int(device) if device.isdigit() else device
    if state != NOTHING and isinstance(who, int):
        _start_context(who)
    if state == WARM:
        StaticHostMem("2MiB", device=who).close()
    start = time.perf_counter()
    memory = HostMem(int(capacity), device=who, slot_size=SLOT, page_mode=pages)
    memory.wait_usable(SLOT)
    seconds = time.perf_counter() - start
    memory.close()
    return seconds


def _start_context(ordinal: int) -> None:
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    code, _ = cu.cuDevicePrimaryCtxRetain(ordinal)
    if code != cu.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"cuDevicePrimaryCtxRetain: {code.name}")


def in_child(capacity: int, pages: str, state: str, device: str) -> float:
    words = [state, str(capacity), pages, device]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def measure(device: Device, rounds: int) -> dict[Sample, list[float]]:
    """Return the seconds of each capacity, kind of pages and state that the device has."""
    on_gpu = isinstance(device, CudaDevice)
    name = str(device.ordinal) if isinstance(device, CudaDevice) else "cpu"
    columns = [column for column in COLUMNS if on_gpu or column[1] != CONTEXT]
    cells = [(capacity, *column) for capacity in CAPACITIES for column in columns]
    arms: dict[str, Callable[[], float]] = {
        str(cell): partial(in_child, *cell, name) for cell in cells
    }
    times = in_turn(arms, rounds, warmup=0)
    return {cell: times[str(cell)] for cell in cells}


def table_of(times: Mapping[Sample, list[float]], device: Device, missing: list[str]) -> Table:
    columns = list(dict.fromkeys(cell[1:] for cell in times))
    rows = [
        [
            format_size(capacity),
            *(quartiles(times[capacity, *column], 1e3) for column in columns),
        ]
        for capacity in CAPACITIES
    ]
    return Table(
        f"ms from construction to the first usable MiB, by capacity, {device.name}",
        ["capacity", *(f"{pages} pages, {state}" for pages, state in columns)],
        rows,
        " ".join(
            [
                "Medians and quartiles of processes of their own, in the state that is named.",
                *(f"Not measured: {line}." for line in missing),
            ]
        ),
    )


def findings_of(times: Mapping[Sample, list[float]]) -> list[Finding]:
    found = []
    least, most = min(CAPACITIES), max(CAPACITIES)
    for pages in ("small", "huge"):
        middle = spread(times[HELD_AT, pages, WARM])[1]
        found.append(
            Finding(
                f"first slot of {format_size(HELD_AT)}, {pages} pages, warm process",
                f"{middle * 1e3:.2f} ms",
                f"<= {LIMIT * 1e3:.0f} ms",
                held=middle <= LIMIT,
            )
        )
        flat = compare(times[most, pages, WARM], times[least, pages, WARM])
        found.append(
            Finding(
                f"first slot of {format_size(most)} beside {format_size(least)}, {pages} pages",
                "{:.2f} x ({:.2f}-{:.2f})".format(flat.ratio, *flat.ratio_quartiles),
                f"<= {FLAT} x",
                held=flat.ratio <= FLAT,
            )
        )
    return found


def beside_peers(times: Mapping[str, list[float]], ours: float, size: int) -> tuple[Table, Finding]:
    """Show the seconds of each peer, and our first slot beside the fastest."""
    table = Table(
        f"ms until {format_size(size)} can be used at all, by peer",
        ["peer", "ms"],
        [[name, quartiles(seconds, 1e3, 0)] for name, seconds in times.items()],
        "They block until all is there: the time grows with the size.",
    )
    middle = {name: spread(seconds)[1] for name, seconds in times.items()}
    fastest = min(middle, key=lambda name: middle[name])
    return table, Finding(
        f"first slot of {format_size(HELD_AT)} beside a peer's {format_size(size)}",
        f"{ours * 1e3:.2f} ms",
        "< the fastest peer",
        f"{fastest}: {middle[fastest] * 1e3:.0f} ms",
        f"{ours / middle[fastest]:.4f}",
        ours < middle[fastest],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_slot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-size", type=parse_size, default="4GiB")
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--device", default="auto", help="auto, cpu or a GPU's ordinal")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    size: int = arguments.peer_size
    # Memory of a virtual machine is often backed only at its first use.
    np.zeros(GIB, np.uint8)[::4096] = 1

    times = measure(device, arguments.rounds)
    peers, missing = pinned_peers(size, device)
    by_peer = in_turn(peers, arguments.peer_rounds, warmup=0)
    tables, findings = [table_of(times, device, missing)], findings_of(times)
    if by_peer:
        table, beside = beside_peers(by_peer, spread(times[HELD_AT, "small", WARM])[1], size)
        tables.append(table)
        findings.append(beside)

    print(machine_line())
    for part in (*tables, *findings):
        print(part)
    if arguments.json:
        seconds = {
            f"{format_size(capacity)}, {pages} pages, {state}": samples
            for (capacity, pages, state), samples in times.items()
        }
        write_tables(arguments.json, tables, findings, seconds=seconds, peer_seconds=by_peer)


if __name__ == "__main__":
    main()
