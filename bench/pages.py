"""How fast pages move between host and GPU, by their size and beside what contiguous memory does.

    python -m bench.pages [--device auto] [--span 2GiB] [--rounds 5] [--json FILE]

Batches of random pages of filled host memory, as it was registered by the fill, and of GPU memory,
submitted one behind the other until as many bytes are on their way as in the contiguous copy,
512 MiB. In turn within each round: ours (`Stream.copy`, which takes the copy kernel or
the copy engines), the driver's batch call with the same arrays, and one contiguous copy out of one
registration, which is the limit. Rates are wall clock from the first submission to the end of the
last copy; every round compares in itself. The bytes that arrived are compared before.

Then submissions to an idle stream, one at a time: how long ours takes, how much of that is outside
the driver's functions that copy and launch ("Python": with it what contexts and events cost), and
what that is beside the time that the driver's batch call spends on the same batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from hostmem import CudaDevice, HostMem, StaticHostMem, resolve_device
from hostmem.device import CudaMemory
from hostmem.units import format_size, parse_size

SIZES = tuple(4096 << shift for shift in (0, 1, 2, 3, 4, 6, 8))
MOST, MOST_BYTES = 16384, 256 << 20  # of a batch
CONTIGUOUS = 512 << 20
ARMS = ("ours", "batch call")
SUBMISSIONS = 30  # of each batch
OF_DRIVER = 0.10

Batch = tuple[NDArray[np.uint64], ...]


def bound(size: int) -> float:
    """Return what share of the contiguous rate pages of a size are held against."""
    return 0.92 if size == 256 << 10 else 0.9 if size >= 64 << 10 else 0.88


class Pages:
    """Host and GPU memory with pages in random order.

    Parameters
    ----------
    device : CudaDevice
        The GPU.
    span : int
        Bytes on each side that the pages are spread over.
    """

    def __init__(self, device: CudaDevice, span: int) -> None:
        self.device, self.span = device, span
        self.host = HostMem(span, device=device, wait=True)
        self.gpu = CudaMemory(device, span, span, span)
        self.block = StaticHostMem(CONTIGUOUS, device=device)
        self.stream = device.stream()
        self.words = self.host.view(dtype=np.uint64)
        self.random = np.random.default_rng(1)

    def close(self) -> None:
        self.stream.close()
        self.gpu.close()
        self.block.close()

    def batch(self, size: int, up: bool) -> Batch:
        pages = self.span // size
        count = min(pages, MOST, MOST_BYTES // size)
        here, there = (
            self.random.permutation(pages)[:count].astype(np.uint64) * np.uint64(size)
            for _ in range(2)
        )
        host, gpu = here + np.uint64(self.host.address), there + np.uint64(self.gpu.address)
        return (gpu, host, sizes(size, count)) if up else (host, gpu, sizes(size, count))

    def contiguous(self, up: bool) -> Batch:
        ends = [self.gpu.address, self.block.address]
        to, source = ends if up else ends[::-1]
        return np.array([to], np.uint64), np.array([source], np.uint64), sizes(CONTIGUOUS, 1)

    def check(self, size: int) -> None:
        """Move pages up and back to other places, and compare."""
        to, source, lengths = self.batch(size, up=True)
        half = len(to) // 2
        read, written = source[:half], source[half : 2 * half]
        self.words[:] = np.arange(len(self.words), dtype=np.uint64)
        self.stream.copy(to[:half], read, lengths[:half])
        self.stream.copy(written, to[:half], lengths[:half])
        self.stream.record().synchronize()
        for a, b in zip(read, written, strict=True):
            first, second = ((int(x) - self.host.address) // 8 for x in (a, b))
            n = size // 8
            if not np.array_equal(self.words[first : first + n], self.words[second : second + n]):
                raise SystemExit(f"wrong bytes in a page of {format_size(size)}")

    def submission(self, name: str, batch: Batch) -> Callable[[], None]:
        to, source, lengths = batch
        if name == "batch call":
            driver, ordinal, handle = self.device.driver, self.device.ordinal, self.stream.handle
            return lambda: driver.copy_batch(ordinal, to, source, lengths, handle)
        return lambda: self.stream.copy(to, source, lengths)

    def arm(self, name: str, batch: Batch, submitted: list[float]) -> Callable[[], float]:
        """Give a run that returns the seconds a byte takes, and notes those of a submission."""
        submit = self.submission(name, batch)
        times = CONTIGUOUS // int(batch[2].sum())

        def run() -> float:
            start = time.perf_counter()
            submit()
            first = time.perf_counter() - start
            for _ in range(times - 1):
                submit()
            self.stream.record().synchronize()
            submitted.append(first)
            return (time.perf_counter() - start) / (times * int(batch[2].sum()))

        return run


class Entered:
    """Functions of the driver in place of themselves, and the seconds spent inside them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*arguments: Any) -> Any:
            start = time.perf_counter()
            answer = function(*arguments)
            self.seconds += time.perf_counter() - start
            return answer

        return enter

    @contextmanager
    def watching(self, device: CudaDevice) -> Iterator[None]:
        entries: dict[str, Any] = device.driver._entry  # type: ignore[attr-defined]
        kept = dict(entries)
        for name in kept:
            if name in ("copy", "launch") or name.startswith("batch_"):
                entries[name] = self.around(kept[name])
        try:
            yield
        finally:
            entries.update(kept)


def submissions(pages: Pages) -> tuple[Table, list[Finding], dict[str, dict[str, list[float]]]]:
    """Submit every kind of batch to an idle stream, ours and the driver's call in turn."""
    rows, findings, raw = [], [], {}
    for size in SIZES:
        for up in (True, False):
            batch = pages.batch(size, up)
            label = f"{format_size(size)} {'up' if up else 'down'}"
            took: dict[str, list[float]] = {"ours": [], "in the driver": [], "batch call": []}
            for turn in range(-2, SUBMISSIONS):
                for name in ARMS:
                    submit, entered = pages.submission(name, batch), Entered()
                    with entered.watching(pages.device):
                        start = time.perf_counter()
                        submit()
                        seconds = time.perf_counter() - start
                    pages.stream.record().synchronize()
                    if turn < 0:
                        continue
                    if name == "ours":
                        took["ours"].append(seconds)
                        took["in the driver"].append(entered.seconds)
                    else:
                        took["batch call"].append(entered.seconds)
            raw[label] = took
            own = [a - b for a, b in zip(took["ours"], took["in the driver"], strict=True)]
            share = compare(own, took["batch call"])
            low, high = share.ratio_quartiles
            rows.append(
                [
                    label,
                    f"{len(batch[2]):,}",
                    quartiles(took["ours"], 1e3, 3),
                    quartiles(own, 1e3, 3),
                    quartiles(took["batch call"], 1e3, 3),
                    f"{share.ratio:.3f} ({low:.3f}-{high:.3f})",
                ]
            )
            findings.append(
                Finding(
                    f"pages of {label}: Python of a submission",
                    f"{spread(own)[1] * 1e3:.3f} ms",
                    f"<= {OF_DRIVER:g} of the driver's",
                    f"its batch call: {share.peer_median * 1e3:.3f} ms",
                    f"{share.ratio:.3f}",
                    share.ratio <= OF_DRIVER,
                )
            )
    columns = ["page", "a batch", "ours ms", "Python ms", "batch call ms", "Python to batch call"]
    return Table("Submissions to an idle stream", columns, rows), findings, raw


def sizes(size: int, count: int) -> NDArray[np.uint64]:
    return np.full(count, size, np.uint64)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="auto", help="auto or a GPU's ordinal")
    parser.add_argument("--span", type=parse_size, default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    name: str = arguments.device
    device = resolve_device(int(name) if name.isdigit() else name)
    if not isinstance(device, CudaDevice):
        raise SystemExit("bench.pages needs a GPU")
    print(machine_line())
    pages = Pages(device, arguments.span)
    rows, findings, raw = [], [], {}
    for size in SIZES:
        pages.check(size)
        for up in (True, False):
            batch = pages.batch(size, up)
            submitted: dict[str, list[float]] = {arm: [] for arm in (*ARMS, "contiguous")}
            arms = {arm: pages.arm(arm, batch, submitted[arm]) for arm in ARMS}
            arms["contiguous"] = pages.arm("contiguous", pages.contiguous(up), [])
            times = in_turn(arms, arguments.rounds)
            shares = {arm: compare(times["contiguous"], times[arm]) for arm in ARMS}
            way = "up" if up else "down"
            label = f"{format_size(size)} {way}"
            raw[label] = {"seconds_per_byte": times, "submission_seconds": submitted}
            ours = shares["ours"]
            row = [label, f"{len(batch[2]):,}"]
            for arm in ARMS:
                low, high = shares[arm].ratio_quartiles
                milliseconds = spread(submitted[arm][-arguments.rounds :])[1] * 1e3
                row += [
                    f"{1e-9 / spread(times[arm])[1]:.1f}",
                    f"{shares[arm].ratio:.3f} ({low:.3f}-{high:.3f})",
                    f"{milliseconds:.2f}",
                ]
            row.append(f"{1e-9 / spread(times['contiguous'])[1]:.1f}")
            rows.append(row)
            print("  " + "  ".join(row), flush=True)
            findings.append(
                Finding(
                    f"pages of {format_size(size)} {way}: share of contiguous",
                    f"{ours.ratio:.3f}",
                    f">= {bound(size)}",
                    "batch call",
                    f"{shares['batch call'].ratio:.3f}",
                    ours.ratio >= bound(size),
                )
            )
    columns = ["page", "a batch"]
    for arm in ARMS:
        columns += [f"{arm} GB/s", "of contiguous", "submission ms"]
    table = Table(
        f"Random pages over {format_size(pages.span)}, {format_size(CONTIGUOUS)} on their way",
        [*columns, "contiguous GB/s"],
        rows,
        device.copies.describe().splitlines()[0],
    )
    print(table)
    submitted_table, more, seconds = submissions(pages)
    print(submitted_table)
    findings += more
    for finding in findings:
        print(finding)
    if arguments.json:
        write_tables(
            arguments.json,
            [table, submitted_table],
            findings,
            device=device.name,
            rounds=arguments.rounds,
            raw=raw,
            submission_seconds=seconds,
        )
    pages.close()


if __name__ == "__main__":
    main()
