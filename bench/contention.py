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
fills at a moderate rate and a fifth only makes calls.
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

from bench.measure import Finding, Table, compare, machine_line, quartiles, spread, write_tables
from bench.probe import ProbeError, Stalls, built, calls_of, most_blocked, worst_call
from bench.rank import ARMS, LEAVES, Rank, RankFailedError, together
from bench.stalls import show
from hostmem import CudaDevice, preflight, resolve_device
from hostmem.units import align_down, format_size, parse_size

GIB = 1 << 30
GRAIN = 32 << 20  # bytes that sizes are multiples of
LEAST = GRAIN  # bytes each, below which nothing is measured
OURS = [name for name in ARMS if name.startswith("registered")]
FIRST, DEFAULT, UNBOUND = "registered, first fill", OURS[0], OURS[-1]
SETTLE = 0.2  # seconds from an order to the common start, and after an end
MANY = 8  # processes, at least, that these bounds are for
WORST, BLOCKED, RATE = 10e-3, 0.03, 0.72
LEAVING_WORST = 40e-3  # seconds
HOLDERS = 3
SERVER_CALLS = ("memory", "memset")
NOBODY = "nobody ends"
NOBODY_FOR = 2.0  # seconds
SLOW_FILL = 8.0  # seconds that the fill takes beside which others leave

Seen = dict[str, Stalls]


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


# ------------------------------------------------------------------------------------------ filling


def run(ranks: Sequence[Rank], arm: str, size: int, options: dict[str, Any]) -> Run:
    """Have all ranks get memory, and then all give it back."""
    start = time.monotonic() + SETTLE
    for rank in ranks:
        rank.tell("fill", arm=arm, size=size, at=start, options=options)
    filled = [rank.hear() for rank in ranks]
    for rank in ranks:
        rank.tell("free")
    freed = [rank.hear() for rank in ranks]
    return Run(
        max(one["finish"] for one in filled) - start,
        max(worst_call(one["seen"]) for one in filled),
        max(most_blocked(one["seen"]) for one in filled),
        max(worst_call(one["seen"]) for one in freed),
    )


def fill_together(
    count: int, library: Path, ordinal: int, arguments: argparse.Namespace
) -> tuple[Runs, list[str]]:
    """Run all arms in so many processes; say what came of them, and of each process's turns."""
    threads = thread_count(arguments.threads, count)
    runs: Runs = {}
    with together(count, library, ordinal, arguments.calls) as ranks:
        for rank in ranks:
            rank.tell("touch", size=arguments.size)
        for rank in ranks:
            rank.hear()
        pages = arguments.pages
        options = {one: {"page_mode": one, "fill_threads": threads} for one in pages}
        runs[FIRST] = [run(ranks, DEFAULT, arguments.size, options[pages[0]])]
        for turn in range(arguments.rounds):
            arms = {f"{name}, {one}": (name, options[one]) for name in OURS for one in pages}
            if turn < arguments.peer_rounds:
                arms |= {name: (name, {}) for name in ARMS if name not in OURS}
            order = list(arms.items())
            for label, (arm, of_ours) in order if turn % 2 == 0 else reversed(order):
                runs.setdefault(label, []).append(run(ranks, arm, arguments.size, of_ours))
        for rank in ranks:
            rank.tell("turns")
        return runs, [rank.hear()["turns"] for rank in ranks]


def thread_count(asked: str, ranks: int) -> int | str:
    """Give the populating threads of each rank."""
    if asked == "share":
        return max(len(os.sched_getaffinity(0)) // 2 // ranks, 1)
    return asked if asked == "auto" else int(asked)


def shown(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Show the median and the quartiles, or the one value there is."""
    if len(values) == 1:
        return f"{values[0] * scale:.{digits}f}"
    return quartiles(values, scale, digits)


def filling_table(found: dict[int, Runs], arguments: argparse.Namespace) -> Table:
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


# ------------------------------------------------------------------------------------------ leaving


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """What others saw while some left."""

    filler: Seen
    server: Seen
    seconds: float
    """From the order to the end of the last."""
    filling: bool
    """Whether the fill beside them ran to the end of the watch."""


def leave(how: str, size: int, library: Path, ordinal: int, filler: Rank, server: Rank) -> Left:
    """Have holders fill and then leave, or nobody, beside a filler and a server."""
    with together(HOLDERS, library, ordinal, (), "holder") as holders:
        start = time.monotonic()
        for holder in holders:
            holder.tell("fill", arm=DEFAULT, size=size, at=start, options={})
        for holder in holders:
            holder.hear()
        filler.tell("fill_slowly", size=size, rate=size / SLOW_FILL, options={"fill_threads": 1})
        filler.hear()
        time.sleep(SETTLE)  # until it is under way
        for other in (filler, server):
            other.tell("reset")
            other.hear()
        start = time.monotonic()
        if how == NOBODY:
            time.sleep(NOBODY_FOR)
        else:
            for holder in holders:
                holder.leave(how)
            for holder in holders:
                status = holder.reap()
                if status != LEAVES[how]:
                    raise RankFailedError(f"{holder.name}: ended by {how} with status {status}")
        seconds = time.monotonic() - start
        time.sleep(SETTLE)  # the kernel may have more to do
        seen = []
        for other in (filler, server):
            other.tell("read")
            seen.append(other.hear())
        filler.tell("free")
        filler.hear()
    return Left(seen[0]["seen"], seen[1]["seen"], seconds, seen[0]["filling"])


def leave_in_turn(
    ways: Sequence[str], library: Path, ordinal: int, arguments: argparse.Namespace
) -> dict[str, list[Left]]:
    """Try each way so many times."""
    with (
        together(1, library, ordinal, arguments.calls, "filler") as (filler,),
        together(1, library, ordinal, SERVER_CALLS, "server") as (server,),
    ):
        found: dict[str, list[Left]] = {way: [] for way in ways}
        for _ in range(arguments.leave_rounds):
            for way in ways:
                one = leave(way, arguments.leave_size, library, ordinal, filler, server)
                found[way].append(one)
        return found


def leaving_table(found: dict[str, list[Left]], size: int) -> Table:
    rows = []
    for way, ones in found.items():
        rows.append(
            [
                way,
                shown([one.seconds for one in ones]),
                shown([worst_call(one.filler) for one in ones], 1e3),
                shown([most_blocked(one.filler) for one in ones], 100, 1),
                *(shown([one.server[call].worst for one in ones], 1e3) for call in SERVER_CALLS),
            ]
        )
    columns = [
        f"{HOLDERS} end by",
        "in, s",
        "filler: longest, ms",
        "blocked, %",
        *(f"server: {call}, ms" for call in SERVER_CALLS),
    ]
    ended = [way for way, ones in found.items() if not all(one.filling for one in ones)]
    note = f"The fill beside them ended before the watch did: {', '.join(ended)}." if ended else ""
    return Table(f"Processes that leave, holding {format_size(size)} each", columns, rows, note)


def leaving_findings(found: dict[str, list[Left]]) -> list[Finding]:
    result = []
    for way, ones in found.items():
        if way in (NOBODY, "SIGKILL"):
            continue
        worst = max(max(worst_call(one.filler), worst_call(one.server)) for one in ones)
        killed = found.get("SIGKILL", [])
        peer = max((max(worst_call(k.filler), worst_call(k.server)) for k in killed), default=None)
        result.append(
            Finding(
                f"longest call of others while {HOLDERS} processes leave by {way}",
                f"{worst * 1e3:.1f} ms",
                f"< {LEAVING_WORST * 1e3:g} ms",
                "" if peer is None else f"SIGKILL: {peer * 1e3:.1f} ms",
                "" if peer is None else f"{worst / peer:.3f}",
                worst < LEAVING_WORST,
            )
        )
    return result


# --------------------------------------------------------------------------------------------------


def fitting(size: int, processes: int) -> int:
    """Return the size, or the most that so many processes can have here, rounded down.

    Raises
    ------
    SystemExit
        That is next to nothing.
    """
    each = size * 9 // 8  # page tables, and what an interpreter and a context take
    room = preflight(each, device="cpu", ranks=processes)
    fits = size if room.fits else align_down(room.recommended * 8 // 9, GRAIN)
    if fits < LEAST:
        raise SystemExit(
            f"{processes} processes can have {format_size(room.recommended)} each, which is too "
            f"little to measure anything with; free memory, or give fewer --ranks"
        )
    if fits < size:
        print(
            f"{processes} processes cannot have {format_size(size)} each: "
            f"{format_size(fits)} instead"
        )
    return fits


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
    began = time.monotonic()
    print(f"contention, {device.name}")
    tables: list[Table] = []
    held: list[Finding] = []
    facts: dict[str, Any] = {}
    if "filling" in arguments.parts:
        arguments.size = fitting(arguments.size, max(arguments.ranks))
        found: dict[int, Runs] = {}
        facts["turns"] = {}
        for count in arguments.ranks:
            found[count], facts["turns"][count] = fill_together(
                count, library, device.ordinal, arguments
            )
        tables.append(filling_table(found, arguments))
        for pages in arguments.pages:
            held += filling_findings(found, pages, arguments.size)
        print(tables[-1])
        facts["filling"] = {
            count: {name: [dataclasses.asdict(one) for one in ones] for name, ones in runs.items()}
            for count, runs in found.items()
        }
    if "leaving" in arguments.parts:
        arguments.leave_size = fitting(arguments.leave_size, HOLDERS + 1)
        left = leave_in_turn([NOBODY, *LEAVES], library, device.ordinal, arguments)
        tables.append(leaving_table(left, arguments.leave_size))
        held += leaving_findings(left)
        print(tables[-1])
        facts["leaving"] = {
            way: [dataclasses.asdict(o) for o in ones] for way, ones in left.items()
        }
    show(held)
    print(f"  took {time.monotonic() - began:.0f} s")
    if arguments.json:
        write_tables(
            arguments.json,
            tables,
            held,
            device=device.name,
            size=arguments.size,
            leave_size=arguments.leave_size,
            calls=arguments.calls,
            **facts,
        )


if __name__ == "__main__":
    sys.exit(main())
