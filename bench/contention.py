"""Processes that get host memory on one GPU at the same time, and processes that leave.

    python -m bench.contention [--ranks 1,2,4,8] [--size 6GiB] [--rounds 3] [--peer-rounds 1]
        [--pages small] [--threads share] [--calls attribute] [--leave-size 12GiB]
        [--leave-rounds 1] [--device 0] [--parts filling,leaving] [--json FILE]

**Filling.** So many processes get the same amount at the same moment, each way in turn, and hold it
until the last one has it: ours at its default setting; without the turns that processes take inside
the driver; without turns and bound on the stalls; ``cuMemCreate`` of the node's host memory in
32 MiB units, mapped for the GPU and the CPUs; and ``cuMemHostAlloc``. In each process a probe
(probe.c) makes driver calls every 0.2 ms. The total counts from the common start to the last end;
"blocked" is the share of a process's own time in calls of more than 0.5 ms, of the process that
fares worst. Each process fills once before, at the default setting, which is shown apart: a server
starts only once. ``--threads share`` gives all populating threads together half of the CPUs.

**Leaving.** Three processes hold memory and end in various ways at the same time, while a fourth
fills at a moderate rate and a fifth only makes calls (bench.leaving).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.leaving import HOLDERS, leave_in_turn, leaving_findings, leaving_table, shown
from bench.measure import Finding, Table, compare, machine_line, quartiles, spread, write_tables
from bench.probe import ProbeError, built, calls_of, most_blocked, worst_call
from bench.rank import ARMS, DEFAULT, Rank, RankFailedError, together
from bench.stalls import show
from hostmem import CudaDevice, preflight, resolve_device
from hostmem.units import align_down, format_size, parse_size

GIB = 1 << 30
GRAIN = 32 << 20  # bytes that sizes are multiples of
OURS = [name for name in ARMS if name.startswith(DEFAULT)]
PEERS = [name for name in ARMS if name not in OURS]
FIRST, UNBOUND = "registered, first fill", OURS[-1]
SETTLE = 0.2  # seconds from an order to the common start
MANY = 8  # processes, at least, that these bounds are for
WORST, BLOCKED, RATE = 10e-3, 0.03, 0.72


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What became of one arm, once, in all the ranks."""

    seconds: float
    """From the common start to the last end."""
    worst: float
    """Seconds of the longest call of any rank."""
    blocked: float
    """Share of the rank that was blocked most."""
    closing_worst: float
    """Seconds of the longest call while all gave the memory back."""


Runs = dict[str, list[Run]]


def run(ranks: Sequence[Rank], arm: str, size: int, options: dict[str, Any]) -> Run | str:
    """Have all ranks get memory, and then all give it back; or say why that was refused."""
    start = time.monotonic() + SETTLE
    for rank in ranks:
        rank.tell("fill", arm=arm, size=size, at=start, options=options)
    filled = [rank.hear() for rank in ranks]
    for rank in ranks:
        rank.tell("free")
    freed = [rank.hear() for rank in ranks]
    refused = [one["refused"] for one in filled if "refused" in one]
    if refused:
        return f"{arm} in {len(ranks)} processes: {refused[0]}"
    return Run(
        max(one["finish"] for one in filled) - start,
        max(worst_call(one["seen"]) for one in filled),
        max(most_blocked(one["seen"]) for one in filled),
        max(worst_call(one["seen"]) for one in freed),
    )


def fill_together(
    count: int, library: Path, ordinal: int, arguments: argparse.Namespace
) -> tuple[Runs, list[str], list[str]]:
    """Run all arms in so many processes.

    Returns
    -------
    dict of str to list of Run
        By arm, in the order of the table.
    list of str
        How each process's turns with the others went.
    list of str
        Peers that the driver refused, and why.
    """
    pages = arguments.pages
    threads = thread_count(arguments.threads, count)
    options = {one: {"page_mode": one, "fill_threads": threads} for one in pages}
    arms: dict[str, tuple[str, dict[str, Any]]] = {FIRST: (DEFAULT, options[pages[0]])}
    arms |= {f"{name}, {one}": (name, options[one]) for one in pages for name in OURS}
    arms |= {name: (name, {}) for name in PEERS}
    runs: Runs = {label: [] for label in arms}
    refused: list[str] = []
    with together(count, library, ordinal, arguments.calls) as ranks:
        for rank in ranks:
            rank.tell("touch", size=arguments.size)
        for rank in ranks:
            rank.hear()
        for turn in range(-1, arguments.rounds):
            labels = [one for one in arms if is_due(one, turn, arguments.peer_rounds)]
            for label in labels if turn % 2 == 0 else reversed(labels):
                arm, of_ours = arms[label]
                done = run(ranks, arm, arguments.size, of_ours)
                if isinstance(done, Run):
                    runs[label].append(done)
                else:
                    refused.append(done)
        for rank in ranks:
            rank.tell("turns")
        turns = [rank.hear()["turns"] for rank in ranks]
    return {label: ones for label, ones in runs.items() if ones}, turns, refused


def is_due(label: str, turn: int, peer_rounds: int) -> bool:
    """Tell whether an arm runs in a round: round -1 is the first fill, and no more."""
    if label == FIRST or turn < 0:
        return label == FIRST and turn < 0
    return label not in PEERS or turn < peer_rounds


def thread_count(asked: str, ranks: int) -> int | str:
    """Give the populating threads of each rank."""
    if asked == "share":
        return max(len(os.sched_getaffinity(0)) // 2 // ranks, 1)
    return asked if asked == "auto" else int(asked)


def filling_table(
    found: dict[int, Runs], refused: list[str], arguments: argparse.Namespace
) -> Table:
    rows = []
    for count, runs in found.items():
        for name, ones in runs.items():
            total = count * arguments.size / GIB
            rows.append(
                [
                    f"{count} x {name}",
                    shown([total / one.seconds for one in ones]),
                    shown([one.seconds for one in ones]),
                    shown([one.worst for one in ones], 1e3),
                    shown([one.blocked for one in ones], 100, 1),
                    shown([one.closing_worst for one in ones], 1e3),
                ]
            )
    columns = ["", "total GiB/s", "slowest, s", "longest call, ms", "blocked, %", "closing, ms"]
    each = {count: thread_count(arguments.threads, count) for count in found}
    threads = ", ".join(f"{count}: {number}" for count, number in each.items())
    note = (
        "Median (quartiles) of the runs; of the process and the kind of call that fare worst; "
        f"calls: {', '.join(arguments.calls)}; populating threads of each by processes: {threads}."
        f"{''.join(f' Refused: {one}.' for one in refused)}"
    )
    return Table(f"Processes that get {format_size(arguments.size)} each", columns, rows, note)


def filling_findings(found: dict[int, Runs], pages: str, size: int) -> list[Finding]:
    """Hold the largest number of processes against the bounds."""
    count = max(found)
    total = count * size / GIB
    runs, free = found[count][f"{DEFAULT}, {pages}"], found[count][f"{UNBOUND}, {pages}"]
    worst, free_worst = max(one.worst for one in runs), max(one.worst for one in free)
    blocked = [one.blocked for one in runs]
    rate = compare([one.seconds for one in free], [one.seconds for one in runs])
    low, high = rate.ratio_quartiles
    who = f"{count} processes, {pages} pages"
    enough = count >= MANY
    return [
        Finding(
            f"longest call while filling, {who}, of all runs",
            f"{worst * 1e3:.2f} ms",
            f"< {WORST * 1e3:g} ms",
            f"unbound, no turns: {free_worst * 1e3:.2f} ms",
            f"{worst / free_worst:.2f}",
            worst < WORST if enough else None,
        ),
        Finding(
            f"share of the fill in calls of more than 0.5 ms, {who}, worst process",
            f"{quartiles(blocked, 100, 1)} %",
            f"<= {BLOCKED:.0%}",
            f"unbound, no turns: {quartiles([one.blocked for one in free], 100, 1)} %",
            held=spread(blocked)[1] <= BLOCKED if enough else None,
        ),
        Finding(
            f"total rate, {who}",
            f"{quartiles([total / one.seconds for one in runs])} GiB/s",
            f">= {RATE} of unbound, no turns",
            f"unbound, no turns: {quartiles([total / one.seconds for one in free])} GiB/s",
            f"{rate.ratio:.2f} ({low:.2f}-{high:.2f})",
            rate.ratio >= RATE if enough else None,
        ),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.contention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of processes")
    parser.add_argument("--size", type=parse_size, default="6GiB", help="of each process")
    parser.add_argument("--rounds", type=int, default=3, help="of ours, at least 2")
    parser.add_argument("--peer-rounds", type=int, default=1, help="of the others, which take long")
    parser.add_argument("--pages", default="small", help="small, huge, or both with a comma")
    parser.add_argument("--threads", default="share", help="populating: share, auto, or a number")
    parser.add_argument("--calls", type=calls_of, default="attribute", help="of the probes")
    parser.add_argument("--leave-size", type=parse_size, default="12GiB", help="of each holder")
    parser.add_argument("--leave-rounds", type=int, default=1)
    parser.add_argument("--device", default="auto", help="auto or a GPU's ordinal")
    parser.add_argument("--parts", default="filling,leaving", help="one of the two, or both")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.pages = arguments.pages.split(",")
    arguments.parts = arguments.parts.split(",")
    if unknown := set(arguments.parts) - {"filling", "leaving"}:
        parser.error(f"--parts: there is no {', '.join(unknown)}")
    arguments.ranks = sorted({int(part) for part in arguments.ranks.split(",")})
    if arguments.rounds < 2:
        parser.error("--rounds: give at least 2, or there are no quartiles")
    return arguments


def main() -> int:
    arguments = parse()
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    print(machine_line())
    if not isinstance(device, CudaDevice):
        print("not measured: registering stalls nobody without a GPU")
        return 0
    try:
        with built() as library:
            measure(arguments, device, library)
    except (ProbeError, RankFailedError) as error:
        print(error)
        return 1
    return 0


def measure(arguments: argparse.Namespace, device: CudaDevice, library: Path) -> None:
    """Measure the parts; what is done is printed and written before the next part begins."""
    began = time.monotonic()
    print(f"contention, {device.name}")
    tables: list[Table] = []
    held: list[Finding] = []
    facts: dict[str, Any] = {"device": device.name, "calls": arguments.calls}
    for part in arguments.parts:
        if part == "filling":
            table, found = filling(arguments, device.ordinal, library, facts)
        else:
            table, found = leaving(arguments, device.ordinal, library, facts)
        tables.append(table)
        held += found
        print(table)
        show(found)
        print(f"  {time.monotonic() - began:.0f} s so far")
        if arguments.json:
            write_tables(arguments.json, tables, held, **facts)


def filling(
    arguments: argparse.Namespace, ordinal: int, library: Path, facts: dict[str, Any]
) -> tuple[Table, list[Finding]]:
    """Measure the filling, for each number of processes."""
    arguments.size = fitting(arguments.size, max(arguments.ranks))
    found: dict[int, Runs] = {}
    facts |= {"size": arguments.size, "turns": {}}
    refused: list[str] = []
    for count in arguments.ranks:
        found[count], facts["turns"][count], said = fill_together(
            count, library, ordinal, arguments
        )
        refused += said
    facts["filling"] = {
        count: {name: [dataclasses.asdict(one) for one in ones] for name, ones in runs.items()}
        for count, runs in found.items()
    }
    findings = [
        one for pages in arguments.pages for one in filling_findings(found, pages, arguments.size)
    ]
    return filling_table(found, refused, arguments), findings


def leaving(
    arguments: argparse.Namespace, ordinal: int, library: Path, facts: dict[str, Any]
) -> tuple[Table, list[Finding]]:
    """Measure the leaving, in each way."""
    size = fitting(arguments.leave_size, HOLDERS + 1)
    left = leave_in_turn(size, arguments.leave_rounds, library, ordinal, arguments.calls)
    facts["leave_size"] = size
    facts["leaving"] = {way: [dataclasses.asdict(o) for o in ones] for way, ones in left.items()}
    return leaving_table(left, size), leaving_findings(left)


def fitting(size: int, processes: int) -> int:
    """Return the size, or the most that so many processes can have here, in whole units.

    Raises
    ------
    SystemExit
        That is next to nothing.
    """
    each = size * 9 // 8  # page tables, and what an interpreter and a context take
    room = preflight(each, device="cpu", ranks=processes)
    fits = size if room.fits else align_down(room.recommended * 8 // 9, GRAIN)
    if not fits:
        raise SystemExit(
            f"{processes} processes can have {format_size(room.recommended)} each, which is too "
            f"little to measure anything with: free memory, or name fewer processes"
        )
    if fits < size:
        print(f"{format_size(fits)} each: {processes} x {format_size(size)} are not free here")
    return fits


if __name__ == "__main__":
    sys.exit(main())
