"""Time the disk level against dd (and fio) on the same directory in the same run.

    python -m bench.disk [--folder build] [--size 256MiB] [--rounds 5] [--workers 1,2,4,8]

Ours writes and reads slots of 64 KiB, 256 KiB and 1 MiB in order, as an offload of neighbours does:
`SlotFile` joins them into requests of 2 to 8 MiB, has four in flight, and checks every slot. dd
moves as many bytes with direct I/O, one request after the other: of the size of a slot, and of 2
MiB. fio, where it is installed, moves slots with as many in flight as ours. Every file has its room
set aside and was written once before; all hold random bytes.

Printed are rates in GiB/s and how many times dd's ours is: the median of the rounds (with the
quartiles). The aim is 0.85 of dd with the size of a slot.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.measure import compare, in_turn, machine_line, spread, timed
from hostmem import StaticHostMem
from hostmem.units import format_size, parse_size
from kvtier.transfer import disk
from kvtier.transfer.jobs import Dependencies

GIB = 1 << 30
LARGE = 2 << 20
SLOTS = (64 << 10, 256 << 10, 1 << 20)
AIM = 0.85
Arms = dict[str, Callable[[], float]]


class Ours:
    """Slots of one size, in a file and in memory."""

    def __init__(self, folder: str, memory: StaticHostMem, slot: int, stack: ExitStack) -> None:
        count = memory.nbytes // slot
        self._file = disk.SlotFile(folder, slot, count)
        stack.callback(self._file.close)
        self.direct = self._file.direct
        self._ids = np.arange(count, dtype=np.int32)
        self._addresses = np.uint64(memory.address) + np.arange(count, dtype=np.uint64) * slot
        self._part = 16 * LARGE // slot

    def move(self, *, write: bool) -> None:
        """Move every slot, in batches as evictions make them, all submitted at once."""
        transfer = self._file.write if write else self._file.read
        events = [
            transfer(
                self._ids[at : at + self._part],
                self._addresses[at : at + self._part],
                Dependencies(),
            )
            for at in range(0, len(self._ids), self._part)
        ]
        for event in events:
            event.synchronize()


def dd(source: str, target: str, block: int, count: int, *options: str) -> float:
    """Run dd; the seconds that it says it took."""
    done = subprocess.run(
        ["dd", f"if={source}", f"of={target}", f"bs={block}", f"count={count}", *options],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    # "268435456 bytes (268 MB, 256 MiB) copied, 0.19 s, 1.4 GB/s"
    return float(done.stderr.rpartition("copied, ")[2].partition(" s")[0])


def fio(path: str, slot: int, size: int, depth: int, mode: str) -> float:
    """Run fio; the seconds that it says it took."""
    what = [f"--filename={path}", f"--rw={mode}", f"--bs={slot}", f"--size={size}"]
    how = ["--direct=1", f"--iodepth={depth}", "--ioengine=libaio", "--output-format=json"]
    done = subprocess.run(
        ["fio", "--name=peer", *what, *how],
        capture_output=True,
        text=True,
        check=True,
    )
    (job,) = json.loads(done.stdout)["jobs"]
    return float(job[mode]["runtime"]) / 1e3


def arms(ours: Ours, source: str, peer: str, slot: int, size: int, write: bool) -> Arms:
    """Give what runs in turn, for one size of slot and one direction."""

    def with_dd(block: int) -> Callable[[], float]:
        if write:
            options = ("oflag=direct", "conv=notrunc")
            return lambda: dd(source, peer, block, size // block, *options)
        return lambda: dd(peer, os.devnull, block, size // block, "iflag=direct")

    found: Arms = {"ours": timed(lambda: ours.move(write=write))}
    found["dd, a slot"] = with_dd(slot)
    found["dd, 2 MiB"] = with_dd(LARGE)
    if shutil.which("fio"):
        mode = "write" if write else "read"
        found["fio, a slot"] = lambda: fio(peer, slot, size, disk._WORKERS, mode)
    return found


def report(slot: int, write: bool, times: dict[str, list[float]], size: int) -> Iterator[str]:
    """Say how the arms of one turn compare."""
    yield f"{'write' if write else 'read'} slots of {format_size(slot)}"
    for name, seconds in times.items():
        low, middle, high = spread([size / s / GIB for s in seconds])
        line = f"  {name:14} {middle:6.2f} GiB/s ({low:.2f}-{high:.2f})"
        if name != "ours":
            pairs = compare(seconds, times["ours"])  # dd's time over ours: our rate over dd's
            low, high = pairs.ratio_quartiles
            line += f"   ours is {pairs.ratio:.2f} of it ({low:.2f}-{high:.2f})"
            if name == "dd, a slot":
                line += "" if pairs.ratio >= AIM else f"   BELOW {AIM}"
        yield line


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="build", help="where the files are")
    parser.add_argument("--size", default="256MiB", help="bytes a run moves")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default=str(disk._WORKERS), help="requests in flight: 1,2,4")
    options = parser.parse_args()
    size = parse_size(options.size, "size") // LARGE * LARGE
    Path(options.folder).mkdir(exist_ok=True)

    print(machine_line())
    print(
        f"{format_size(size)} a run in {os.path.abspath(options.folder)}, {options.rounds} rounds"
    )
    if not shutil.which("fio"):
        print("fio is not installed: dd alone")
    with ExitStack() as stack:
        memory = StaticHostMem(size, device="cpu")
        stack.callback(memory.close)
        source = os.memfd_create("random")
        stack.callback(os.close, source)
        bytes_ = np.random.default_rng(0).bytes(size)
        memory.view(0, size)[:] = np.frombuffer(bytes_, np.uint8)
        with open(source, "wb", closefd=False) as file:
            file.write(bytes_)
        peer = stack.enter_context(tempfile.NamedTemporaryFile(dir=options.folder))
        os.posix_fallocate(peer.fileno(), 0, size)
        random = f"/proc/{os.getpid()}/fd/{source}"
        for workers in map(int, options.workers.split(",")):
            disk._WORKERS = workers
            print(f"{workers} requests in flight")
            for slot in SLOTS:
                with ExitStack() as inner:
                    ours = Ours(options.folder, memory, slot, inner)
                    if not ours.direct:
                        print("the directory has no direct I/O: ours goes through the page cache")
                    for write in (True, False):
                        found = arms(ours, random, peer.name, slot, size, write)
                        times = in_turn(found, options.rounds)
                        print("\n".join(report(slot, write, times, size)), flush=True)


if __name__ == "__main__":
    main()
