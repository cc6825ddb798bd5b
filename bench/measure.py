"""Interleaved runs: how much faster ours is than a peer on a machine that does not hold still.

The callables run in turn, so that a slow minute of the machine hits all. Each pair gives one ratio;
the median of the ratios and their quartiles are the result, not the ratio of two means.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

__all__ = ["Pairs", "compare", "in_turn", "machine_line", "pairs", "spread", "timed", "write_json"]


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


def write_json(path: Path, results: dict[str, Pairs], **facts: object) -> None:
    """Write the pairs by name, the machine and further facts (sizes, options) to a JSON file."""
    document = {
        "machine": machine_line(),
        **facts,
        "results": {name: asdict(result) for name, result in results.items()},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
