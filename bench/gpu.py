"""Every benchmark that wants a GPU, one after the other, and what came of it.

    python -m bench.gpu [--only first_slot,fill] [--out build/gpu] [--device N] [--limit 900]

Says first what is missing on this machine. Each benchmark runs in a process of its own with its
default arguments, prints its tables, and leaves a JSON file in the folder; one that fails, or takes
longer than the limit in seconds, does not stop the others. Last come the findings of all. Exit
status 1 when a benchmark failed or measured nothing; a bound that was missed is an answer.

Copied to ``bench/results``, the files are shown by ``python -m docs.build_benchmarks``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.measure import Finding, Table, driver_line, machine_line
from hostmem import CudaDevice, Device, HostmemError, resolve_device
from hostmem.headroom import headroom
from hostmem.units import format_size

BENCHES = ("first_slot", "fill", "stalls", "contention", "pages", "tier")
WANTED = 64 << 30  # bytes that the default sizes want: contention's eight processes the most
COMPILERS = ("cc", "gcc", "clang")
MODULES = {"torch": "peers of fill and stalls", "cupy": "a peer of fill"}


def missing(device: Device | None) -> Iterator[str]:
    """Yield a line for each thing that the benchmarks want and do not find here."""
    if not isinstance(device, CudaDevice):
        yield "a GPU: only first_slot and fill measure something, on the CPU"
    chosen = shlex.split(os.environ.get("CC", ""))[:1]
    if not any(map(shutil.which, chosen or COMPILERS)):
        yield "a C compiler: stalls and contention need one for their probe"
    for module, use in MODULES.items():
        if importlib.util.find_spec(module) is None:
            yield f"{module}: {use}"
    free = headroom()
    if free.nbytes < WANTED:
        yield (
            f"memory: {format_size(free.nbytes)} can be taken and the default sizes want "
            f"{format_size(WANTED)}; {free.limit}"
        )


def found_device(ordinal: str | None) -> Device | None:
    try:
        return resolve_device("auto" if ordinal is None else int(ordinal))
    except (HostmemError, ValueError) as error:
        print(f"device: {error}")
        return None


def suffix(device: Device | None) -> str:
    """Say where results come from, for the names of their files: ``"h200-16cpu"``."""
    kind = device.name.split(" ", 1)[1] if isinstance(device, CudaDevice) else "none"
    words = re.findall(r"[a-z0-9]+", kind.lower().replace("nvidia", ""))
    return f"{'-'.join(words)}-{len(os.sched_getaffinity(0))}cpu"


def run(name: str, path: Path, device: str | None, limit: float) -> str:
    """Run one benchmark; return what went wrong, or nothing."""
    path.unlink(missing_ok=True)  # an old result is none
    words = [sys.executable, "-m", f"bench.{name}", "--json", str(path)]
    if device is not None:
        words += ["--device", device]
    try:
        status = subprocess.run(words, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"took longer than {limit:g} s"
    if status:
        return f"exit status {status}"
    return "" if path.exists() else "measured nothing"


def summary(results: dict[str, Path]) -> Table:
    """Show the findings of the files that are there."""
    rows = []
    for name, path in results.items():
        if path.exists():
            for fields in json.loads(path.read_text()).get("findings", []):
                one = Finding(**fields)
                beside = "; ".join(filter(None, [one.peer, one.ratio and f"ratio {one.ratio}"]))
                rows.append([one.verdict, name, one.question, one.ours, one.bound, beside])
    rows.sort(key=lambda row: row[0])  # held, missed, not measured
    columns = ["", "bench", "question", "ours", "bound", "beside"]
    return Table("findings", columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default=",".join(BENCHES), help="names of benchmarks")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="a folder")
    parser.add_argument("--device", help="a GPU's ordinal; default: the only one")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of each")
    arguments = parser.parse_args(argv)
    names: list[str] = arguments.only.split(",")

    device = found_device(arguments.device)
    print(machine_line())
    print(f"{device.name if device else 'no device'}, {driver_line() or 'no NVIDIA driver'}")
    for line in missing(device):
        print(f"missing: {line}")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    results = {name: out / f"{name}-{suffix(device)}.json" for name in names}
    failed: dict[str, str] = {}
    for name, path in results.items():
        print(f"\n== bench.{name}", flush=True)
        start = time.monotonic()
        if why := run(name, path, arguments.device, arguments.limit):
            failed[name] = why
        print(f"   {time.monotonic() - start:.0f} s {why}")
    print(f"\n{summary(results)}")
    for name, why in failed.items():
        print(f"  failed        {name}: {why}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
