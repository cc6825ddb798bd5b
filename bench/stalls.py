"""How long other CUDA calls of a process wait while it gets host memory, and what that costs.

    python -m bench.stalls [--size 16GiB] [--rounds 5] [--device auto] [--calls attribute,launch]
        [--threads auto] [--json FILE]
    python -m bench.stalls --sweep [--units 2MiB,8MiB] [--threads 4,8] [--budgets none,2] ...

A probe (probe.c) makes each kind of call every 0.2 ms on a thread that holds no Python lock, while
in turn

- nothing is filled: what the machine alone does to the calls;
- ours fills at its default setting, and with no bound on its stalls (``stall_budget=None``), with
  small and with huge pages;
- cuMemHostAlloc allocates as much; and torch pins as much with 8 registering threads, in a
  process of its own with a probe of its own.

"Blocked" is the share of that time spent in calls of more than 0.5 ms. The same again while the
memory is given back. ``--sweep`` fills with each combination of commit units, populating threads
and stall budgets (in ms, ``none`` for no bound) instead, to find the best setting.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.fill import touched_zeros
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
from bench.probe import CALLS, Probe, ProbeError, Stalls, built, calls_of, most_blocked, worst_call
from hostmem import CudaDevice, HostMem, preflight, resolve_device
from hostmem.units import format_size, parse_size

MIB = 1 << 20
GIB = 1 << 30
PAGES = ("small", "huge")
WORST = 3e-3  # seconds of the longest call
BLOCKED = {"small": 0.15, "huge": 0.10}
RATE = 0.8  # of the unbounded fill
TORCH_THREADS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
TORCH_PATIENCE = 120.0  # seconds
TORCH = """
import dataclasses, json, sys, time, torch
from pathlib import Path
from bench.probe import Probe
library, ordinal, size, *calls = sys.argv[1:]
torch.zeros(1, device=f"cuda:{ordinal}")
with Probe(Path(library), int(ordinal), calls) as probe:
    probe.reset()
    start = time.perf_counter()
    memory = torch.empty(int(size), dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    seen = {name: dataclasses.asdict(one) for name, one in probe.read().items()}
print(json.dumps({"seconds": seconds, "seen": seen}))
"""

Seen = dict[str, Stalls]


class Arm:
    """A way to get host memory; each run notes what the probe saw meanwhile."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.filling: list[Seen] = []
        self.closing: list[Seen] = []

    def __call__(self) -> float:
        """Return the seconds until all of it is there."""
        raise NotImplementedError


class Idle(Arm):
    """Nothing: what the machine does to the calls."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(0)
        self._probe = probe

    def __call__(self) -> float:
        self._probe.reset()
        time.sleep(1)
        self.filling.append(self._probe.read())
        return 1.0


class Fill(Arm):
    """Ours, with some options."""

    def __init__(self, size: int, probe: Probe, device: CudaDevice, **options: Any) -> None:
        super().__init__(size)
        self._probe = probe
        self._options = {"device": device, **options}

    def __call__(self) -> float:
        self._probe.reset()
        start = time.perf_counter()
        with HostMem(self.size, **self._options) as memory:
            memory.wait_usable(memory.size)
            seconds = time.perf_counter() - start
            self.filling.append(self._probe.read())
            self._probe.reset()
        self.closing.append(self._probe.read())
        return seconds


class HostAlloc(Arm):
    """The driver's own allocation."""

    def __init__(self, size: int, probe: Probe, ordinal: int) -> None:
        super().__init__(size)
        self._probe = probe
        self._ordinal = ordinal

    def __call__(self) -> float:
        from cuda.bindings import driver as cu

        _, context = cu.cuDevicePrimaryCtxRetain(self._ordinal)
        cu.cuCtxPushCurrent(context)
        try:
            self._probe.reset()
            start = time.perf_counter()
            code, address = cu.cuMemHostAlloc(self.size, 0)
            seconds = time.perf_counter() - start
            self.filling.append(self._probe.read())
            if code != cu.CUresult.CUDA_SUCCESS:
                raise SystemExit(f"cuMemHostAlloc of {format_size(self.size)}: {code.name}")
            self._probe.reset()
            cu.cuMemFreeHost(address)
            self.closing.append(self._probe.read())
        finally:
            cu.cuCtxPopCurrent()
            cu.cuDevicePrimaryCtxRelease(self._ordinal)
        return seconds


class Torch(Arm):
    """torch with 8 registering threads, in a process of its own: it keeps what it has pinned."""

    def __init__(self, size: int, library: Path, ordinal: int, calls: tuple[str, ...]) -> None:
        super().__init__(size)
        arguments = [str(library), str(ordinal), str(size), *calls]
        self._command = [sys.executable, "-c", TORCH, *arguments]

    def __call__(self) -> float:
        done = subprocess.run(
            self._command,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": TORCH_THREADS},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=TORCH_PATIENCE,
        )
        found = json.loads(done.stdout)
        self.filling.append({name: Stalls(**one) for name, one in found["seen"].items()})
        return float(found["seconds"])


def rate(size: int, seconds: list[float]) -> str:
    """Show the GiB/s of some runs; nothing where nothing was filled."""
    return quartiles([size / GIB / one for one in seconds]) if size else "-"


def tables(arms: dict[str, Arm], times: dict[str, list[float]], note: str) -> list[Table]:
    """Give the longest calls and the blocked shares by kind of call, and the giving back."""
    filling = {name: arm.filling[-len(times[name]) :] for name, arm in arms.items()}
    closing = {name: arm.closing[-len(times[name]) :] for name, arm in arms.items() if arm.closing}
    calls = list(filling["nothing"][0])
    longest, blocked = [], []
    for name, runs in filling.items():
        each = {call: [seen[call] for seen in runs] for call in calls}
        worst = [quartiles([one.worst for one in each[call]], 1e3) for call in calls]
        longest.append([name, rate(arms[name].size, times[name]), *worst])
        blocked.append([name, *(quartiles([s.share for s in each[c]], 100, 1) for c in calls)])
    given_back = [
        [
            name,
            quartiles([worst_call(seen) for seen in runs], 1e3),
            quartiles([most_blocked(seen) for seen in runs], 100, 1),
        ]
        for name, runs in closing.items()
    ]
    return [
        Table("Longest call while filling, ms", ["", "GiB/s", *calls], longest, note),
        Table("Blocked while filling, % of the time", ["", *calls], blocked, NOTE),
        Table(
            "While it is given back", ["", "longest call, ms", "blocked, %"], given_back, ANY_KIND
        ),
    ]


NOTE = "Blocked: in calls of more than 0.5 ms. Median (quartiles) of the runs."
ANY_KIND = "Of the kind of call that fares worst. Median (quartiles) of the runs."


def findings(arms: dict[str, Arm], times: dict[str, list[float]]) -> list[Finding]:
    """Hold ours at the default setting against the bounds: the longest call of all runs."""
    found = []
    for pages in PAGES:
        name, unbound = f"default, {pages}", f"unbound, {pages}"
        runs = arms[name].filling[-len(times[name]) :]
        free = arms[unbound].filling[-len(times[unbound]) :]
        worst = [worst_call(seen) for seen in runs]
        blocked = [most_blocked(seen) for seen in runs]
        speed = compare(times[unbound], times[name])
        low, high = speed.ratio_quartiles
        found += [
            Finding(
                f"longest call of another thread while filling, {pages} pages, of all runs",
                f"{max(worst) * 1e3:.2f} ms (median {spread(worst)[1] * 1e3:.2f})",
                f"<= {WORST * 1e3:g} ms",
                f"unbound: {max(map(worst_call, free)) * 1e3:.2f} ms",
                f"{max(worst) / max(map(worst_call, free)):.2f}",
                max(worst) <= WORST,
            ),
            Finding(
                f"share of the fill in calls of more than 0.5 ms, {pages} pages, worst kind",
                f"{quartiles(blocked, 100, 1)} %",
                f"<= {BLOCKED[pages]:.0%}",
                f"unbound: {quartiles([most_blocked(seen) for seen in free], 100, 1)} %",
                held=spread(blocked)[1] <= BLOCKED[pages],
            ),
            Finding(
                f"rate of the fill, {pages} pages",
                f"{rate(arms[name].size, times[name])} GiB/s",
                f">= {RATE} of unbound",
                f"unbound: {rate(arms[unbound].size, times[unbound])} GiB/s",
                f"{speed.ratio:.2f} ({low:.2f}-{high:.2f})",
                speed.ratio >= RATE,
            ),
        ]
    return found


def side_by_side(
    size: int, device: CudaDevice, probe: Probe, library: Path, threads: int | str
) -> tuple[dict[str, Arm], list[str]]:
    """Give the arms by name, and a line for what is not among them and why."""
    fill = functools.partial(Fill, size, probe, device, fill_threads=threads)
    arms: dict[str, Arm] = {"nothing": Idle(probe)}
    for pages in PAGES:
        arms[f"default, {pages}"] = fill(page_mode=pages)
        arms[f"unbound, {pages}"] = fill(page_mode=pages, stall_budget=None)
    arms["cuMemHostAlloc"] = HostAlloc(size, probe, device.ordinal)
    if importlib.util.find_spec("torch") is None:
        return arms, ["torch, 8 threads: torch is not installed"]
    arms["torch, 8 threads"] = Torch(size, library, device.ordinal, probe.calls)
    return arms, []


def compare_arms(arguments: argparse.Namespace, device: CudaDevice, library: Path) -> None:
    size, rounds = arguments.size, arguments.rounds
    threads = arguments.threads[0]
    with Probe(library, device.ordinal, arguments.calls) as probe:
        arms, missing = side_by_side(size, device, probe, library, threads)
        times = in_turn(arms, rounds)
    first = worst_call(arms["default, small"].filling[0])
    note = f"The very first fill of the process, which is in no median: {first * 1e3:.2f} ms."
    shown = tables(arms, times, " ".join([note, *(f"Not measured: {line}." for line in missing)]))
    held = findings(arms, times)
    for one in shown:
        print(one)
    show(held)
    if arguments.json:
        write_tables(
            arguments.json,
            shown,
            held,
            size=size,
            device=device.name,
            threads=threads,
            not_measured=missing,
            seconds=times,
            filling=raw({name: arm.filling[-rounds:] for name, arm in arms.items()}),
            closing=raw({name: arm.closing[-rounds:] for name, arm in arms.items()}),
            first_fill_worst_seconds=first,
        )


def sweep(arguments: argparse.Namespace, device: CudaDevice, library: Path) -> None:
    size = arguments.size
    arms: dict[str, Fill] = {}
    with Probe(library, device.ordinal, arguments.calls) as probe:
        for pages, budget, threads, unit in itertools.product(
            PAGES, arguments.budgets, arguments.threads, arguments.units
        ):
            bound = "none" if budget is None else f"{budget * 1e3:g} ms"
            arms[f"{pages}, {bound}, {threads} threads, {format_size(unit)}"] = Fill(
                size,
                probe,
                device,
                page_mode=pages,
                stall_budget=budget,
                fill_threads=threads,
                commit_unit=unit,
            )
        times = in_turn(arms, arguments.rounds)
    fastest = {
        pages: min(spread(times[name])[1] for name in arms if name.startswith(pages))
        for pages in PAGES
    }
    rows = []
    for name, arm in arms.items():
        runs = arm.filling[-arguments.rounds :]
        share = fastest[name.partition(",")[0]] / spread(times[name])[1]
        worst = [worst_call(seen) for seen in runs]
        rows.append(
            [
                name,
                rate(size, times[name]),
                f"{share:.2f}",
                quartiles(worst, 1e3),
                f"{max(worst) * 1e3:.2f}",
                quartiles([most_blocked(seen) for seen in runs], 100, 1),
            ]
        )
    columns = ["pages, budget, threads, unit", "GiB/s", "of fastest", "longest ms", "of all", "%"]
    result = Table(f"Settings, filling {format_size(size)}", columns, rows, ANY_KIND)
    print(result)
    if arguments.json:
        write_tables(
            arguments.json,
            [result],
            size=size,
            device=device.name,
            seconds=times,
            filling=raw({name: arm.filling[-arguments.rounds :] for name, arm in arms.items()}),
        )


def raw(seen: dict[str, list[Seen]]) -> dict[str, list[dict[str, Any]]]:
    """Give what the probe saw as JSON can hold it."""
    return {
        name: [{call: dataclasses.asdict(one) for call, one in run.items()} for run in runs]
        for name, runs in seen.items()
    }


def show(held: list[Finding]) -> None:
    for one in held:
        answer = {True: "held", False: "NOT HELD", None: "not measured"}[one.held]
        peer = f"; {one.peer}" if one.peer else ""
        ratio = f"; ratio {one.ratio}" if one.ratio else ""
        print(f"  {answer}: {one.question}: {one.ours}, bound {one.bound}{peer}{ratio}")


def listed(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Read values that commas separate."""

    def values(text: str) -> list[Any]:
        return [one(part) for part in text.split(",")]

    return values


def budget(text: str) -> float | None:
    return None if text == "none" else float(text) / 1e3


def thread_count(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stalls", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", type=parse_size, default="16GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto", help="auto or a GPU's ordinal")
    parser.add_argument("--calls", type=calls_of, default=",".join(CALLS))
    parser.add_argument(
        "--threads", type=listed(thread_count), default="auto", help="of ours; several to sweep"
    )
    parser.add_argument("--sweep", action="store_true", help="try settings of ours only")
    parser.add_argument("--units", type=listed(parse_size), default="2MiB,4MiB,8MiB,16MiB,32MiB")
    parser.add_argument("--budgets", type=listed(budget), default="none,2", help="ms, or none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    print(machine_line())
    if not isinstance(device, CudaDevice):
        print("not measured: registering stalls nobody without a GPU")
        return 0
    size = format_size(arguments.size)
    room = preflight(arguments.size + GIB, device="cpu")
    if not room.fits:
        most = format_size(max(room.recommended - GIB, 0))
        print(f"{size} and 1 GiB to spare are not free here: give --size {most} at most")
        return 1
    bound = "settings of ours" if arguments.sweep else "ours and peers"
    print(f"stalls, {device.name}, {size}, {bound}, {arguments.rounds} rounds")
    try:
        with built() as library:
            touched_zeros(arguments.size)  # a virtual machine's memory is backed at its first use
            (sweep if arguments.sweep else compare_arms)(arguments, device, library)
    except ProbeError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
