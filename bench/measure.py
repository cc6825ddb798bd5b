"""Interleaved runs: how much faster ours is than a peer on a machine that does not hold still.

The callables run in turn, so that a slow minute of the machine hits all. Each pair gives one ratio;
the median of the ratios and their quartiles are the result, not the ratio of two means.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

__all__ = [
    "Finding",
    "Pairs",
    "Table",
    "compare",
    "driver_line",
    "in_turn",
    "machine_line",
    "pairs",
    "quartiles",
    "spread",
    "timed",
    "write_json",
    "write_tables",
]

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Times of the pairs in seconds, in the order they ran, and what follows from them."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]
    ratios: tuple[float, ...]
    """``ours / peer`` of each pair: below 1, ours is faster."""
    ours_median: float
    peer_median: float
    ratio: float
    """Median of ``ratios``."""
    ratio_quartiles: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.ratio_quartiles
        return (
            f"ours {self.ours_median:.4g} s, peer {self.peer_median:.4g} s, "
            f"ratio {self.ratio:.3f} (quartiles {low:.3f}-{high:.3f}, {len(self.ratios)} pairs)"
        )


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """Wrap a callable so that it returns the seconds that it took."""

    def run() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return run


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown, on the terminal and on the page of benchmarks alike."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """A text a column; the first column names the row."""
    note: str = ""
    """What to know about it, such as what was not measured; may be empty."""

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                [
                    f"  {name:<{widths[0]}}",
                    *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)),
                ]
            ).rstrip()
            for name, *cells in lines
        ]
        return "\n".join([self.title, *shown, *([f"  {self.note}"] if self.note else [])])


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to a question that has a bound."""

    question: str
    ours: str
    """Our figure, with its unit."""
    bound: str
    """What it is held against, such as ``"<= 10 ms"``."""
    peer: str = ""
    """Who else was measured, with the figure; empty: nobody."""
    ratio: str = ""
    """Ours to the peer's."""
    held: bool | None = None
    """Whether the bound was kept; None: what it takes was not measured."""

    @property
    def verdict(self) -> str:
        """``"held"``, ``"missed"`` or ``"not measured"``."""
        return "not measured" if self.held is None else "held" if self.held else "missed"

    def __str__(self) -> str:
        beside = f"; {self.peer}" if self.peer else ""
        ratio = f"; ratio {self.ratio}" if self.ratio else ""
        return f"  {self.verdict}: {self.question}: {self.ours}, bound {self.bound}{beside}{ratio}"


def pairs(
    ours: Callable[[], float], peer: Callable[[], float], rounds: int = 7, *, warmup: int = 1
) -> Pairs:
    """Run the two in turn and compare them pair by pair.

    Parameters
    ----------
    ours, peer : callable
        Do the work once and return the seconds that count: `timed` wraps a plain function, while
        a function with work to set up or undo measures the middle itself.
    rounds : int
        Pairs to measure, at least 2. The one that goes first alternates.
    warmup : int
        Pairs run before those and thrown away.
    """
    times = in_turn({"ours": ours, "peer": peer}, rounds, warmup=warmup)
    return compare(times["ours"], times["peer"])


def in_turn(
    arms: Mapping[str, Callable[[], float]], rounds: int = 7, *, warmup: int = 1
) -> dict[str, list[float]]:
    """Run every arm once a round and return their times, in seconds, by name.

    Parameters
    ----------
    arms : mapping
        Callables as `pairs` takes them.
    rounds : int
        Rounds to measure, at least 2. Every other one runs backwards.
    warmup : int
        Rounds run before those and thrown away.
    """
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: quartiles need at least 2 pairs")
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-warmup, rounds):
        order = list(arms.items())
        for name, arm in order if turn % 2 == 0 else reversed(order):
            gc.collect()  # nobody pays for another's garbage
            seconds = arm()
            if turn >= 0:
                times[name].append(seconds)
    return times


def compare(ours: Sequence[float], peer: Sequence[float]) -> Pairs:
    """Compare the times of two arms of one `in_turn`, round by round."""
    ratios = tuple(a / b for a, b in zip(ours, peer, strict=True))
    low, middle, high = spread(ratios)
    return Pairs(
        ours=tuple(ours),
        peer=tuple(peer),
        ratios=ratios,
        ours_median=statistics.median(ours),
        peer_median=statistics.median(peer),
        ratio=middle,
        ratio_quartiles=(low, high),
    )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine_line() -> str:
    """Describe the machine and the interpreter in one line, for the head of a result."""
    model = platform.machine()  # some architectures name no model in cpuinfo
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return (
        f"{model}, {len(os.sched_getaffinity(0))} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}"
    )


def driver_line() -> str | None:
    """Name the NVIDIA driver that the kernel has loaded; None where there is none."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        return None
    return f"NVIDIA driver {found[0]}" if found else None


def quartiles(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Show a median and its quartiles, each times ``scale``: ``"5.31 (5.20-5.77)"``."""
    low, middle, high = (f"{value * scale:.{digits}f}" for value in spread(values))
    return f"{middle} ({low}-{high})"


def write_json(path: Path, results: Mapping[str, Pairs], **facts: object) -> None:
    """Write the pairs by name, the machine and further facts (sizes, options) to a JSON file."""
    _write(path, facts, results={name: asdict(result) for name, result in results.items()})


def write_tables(
    path: Path, tables: Sequence[Table], findings: Sequence[Finding] = (), **facts: object
) -> None:
    """Write tables, findings, the machine and further facts to a JSON file.

    `docs.build_benchmarks` prints the tables as they are, and `bench.gpu` the findings. Raw times
    belong into the facts: there, a mapping of names to numbers is kept and not shown.
    """
    _write(
        path,
        facts,
        tables=[asdict(table) for table in tables],
        findings=[asdict(finding) for finding in findings],
    )


def _write(path: Path, facts: Mapping[str, object], **parts: object) -> None:
    head = {"machine": machine_line(), "driver": driver_line(), "command": _command_line()}
    path.write_text(json.dumps({**head, **facts, **parts}, indent=2) + "\n")


def _command_line() -> str:
    """Give the command that runs this, without the place its result goes to."""
    words = ["python", *sys.orig_argv[1:]]
    while "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(words)
