"""Interleaved pairs: how much faster ours is than a peer on a machine that does not hold still.

Two callables run in turn, so that a slow minute of the machine hits both. Each pair gives one
ratio; the median of the ratios and their quartiles are the result, not the ratio of two means.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

__all__ = ["Pairs", "machine_line", "pairs", "timed", "write_json"]


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
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: quartiles need at least 2 pairs")
    times: list[tuple[float, float]] = []
    for turn in range(-warmup, rounds):
        gc.collect()  # neither pays for the other's garbage
        if turn % 2 == 0:
            a = ours()
            gc.collect()
            b = peer()
        else:
            b = peer()
            gc.collect()
            a = ours()
        if turn >= 0:
            times.append((a, b))
    ratios = tuple(a / b for a, b in times)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Pairs(
        ours=tuple(a for a, _ in times),
        peer=tuple(b for _, b in times),
        ratios=ratios,
        ours_median=statistics.median(a for a, _ in times),
        peer_median=statistics.median(b for _, b in times),
        ratio=middle,
        ratio_quartiles=(low, high),
    )


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


def write_json(path: Path, results: dict[str, Pairs], **facts: object) -> None:
    """Write the pairs by name, the machine and further facts (sizes, options) to a JSON file."""
    document = {
        "machine": machine_line(),
        **facts,
        "results": {name: asdict(result) for name, result in results.items()},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
