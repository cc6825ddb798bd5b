"""What a replay found: the figures, as JSON for a program and as a page for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal, Self

from hostmem.units import format_size
from kvtier.replay.destination import write_whole

__all__ = [
    "Latency",
    "LevelUse",
    "ReplayResult",
    "format_summary",
    "write_json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelUse:
    """One level at the end of a replay."""

    slots: int | None
    """Blocks it can hold; None when unbounded."""
    quota: int | None
    """Bytes it may use; None when no bytes were replayed."""
    used: int
    """Slots that hold a block."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of the time per request, in microseconds."""

    p50: float
    """The least sample that half of the samples do not exceed."""
    p99: float
    """The least sample that 99 in a hundred do not exceed."""

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Self:
        """Take the percentiles of samples in nanoseconds; at least one, in any order.

        Raises
        ------
        ValueError
            If there is no sample.
        """
        if not nanoseconds:
            raise ValueError("nanoseconds: no sample to take percentiles of")
        ordered = sorted(nanoseconds)
        p50, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 99))
        return cls(p50 / 1000, p99 / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The figures of one replay.

    What needs bytes is None in a replay of metadata alone; there the one level is called ``gpu``
    and its slots are the capacity.
    """

    mode: Literal["bytes", "metadata"]
    """Whether real blocks were moved and compared."""
    trace: str
    """The trace, as it was named."""
    policy: str
    """The eviction policy."""
    requests: int
    """Requests served."""
    block_refs: int
    """Block references in them."""
    hits: int
    """References before their request's first absent block."""
    hits_by_level: Mapping[str, int]
    """Hits by the level the block was found in; a level left out had none."""
    seconds: float
    """From when the tiers began to be built (metadata: the loop alone) to the last request."""
    levels: Mapping[str, LevelUse]
    """The levels that there were, by name, the hot one first."""
    device: str | None = None
    """Where level 0 lived: ``"cpu"`` or a GPU."""
    capacity_blocks: int | None = None
    """Blocks of the one level of a metadata replay; None when unbounded, and with bytes."""
    verified_blocks: int | None = None
    """Blocks compared byte for byte after they came back from a lower level."""
    corrupt_blocks: int | None = None
    """Those of them that differed."""
    lost_blocks: int | None = None
    """Blocks forgotten because a copy of them failed: misses that the tiers were to blame for."""
    bytes_moved: Mapping[str, int] | None = None
    """Bytes by pair of levels, such as ``"gpu->host"``."""
    first_request_done_seconds: float | None = None
    """On the clock of ``seconds``, when the first request had been served."""
    host_tier_filled_seconds: float | None = None
    """On the same clock, when the whole host tier was usable; None if it never was."""
    latency_us: Latency | None = None
    """Time per request."""

    @property
    def hit_rate(self) -> float:
        """Hits as a fraction of the block references; 0 when there were none."""
        return self.hits / self.block_refs if self.block_refs else 0.0

    @property
    def us_per_block_ref(self) -> float:
        """Microseconds per block reference; 0 when there were none."""
        return self.seconds * 1e6 / self.block_refs if self.block_refs else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries and numbers, ready for `json.dump`.

        ``hits_by_level`` always has ``gpu``, ``host`` and ``disk``; None stands for what does not
        apply.
        """
        moved = self.bytes_moved
        return {
            "mode": self.mode,
            "trace": self.trace,
            "policy": self.policy,
            "device": self.device,
            "capacity_blocks": self.capacity_blocks,
            "requests": self.requests,
            "block_refs": self.block_refs,
            "hits": self.hits,
            "hit_rate": self.hit_rate,
            "hits_by_level": {"gpu": 0, "host": 0, "disk": 0, **self.hits_by_level},
            "verified_blocks": self.verified_blocks,
            "corrupt_blocks": self.corrupt_blocks,
            "lost_blocks": self.lost_blocks,
            "bytes_moved": None if moved is None else dict(moved),
            "seconds": self.seconds,
            "us_per_block_ref": self.us_per_block_ref,
            "first_request_done_seconds": self.first_request_done_seconds,
            "host_tier_filled_seconds": self.host_tier_filled_seconds,
            "levels": {name: asdict(level) for name, level in self.levels.items()},
            "latency_us": None if self.latency_us is None else asdict(self.latency_us),
        }


def format_summary(result: ReplayResult) -> str:
    """Lay the figures out for a person: at most 80 columns, less than a screen, no newline last."""
    place = "metadata only" if result.device is None else f"device {result.device}"
    lines = [
        f"{_tail(result.trace, 26)}: {result.requests:,} requests,"
        f" {result.block_refs:,} block references",
        f"policy {result.policy}, {place}",
        "",
        *(f"{name:<15}{value:>10}  {note}".rstrip() for name, value, note in _facts(result)),
        "",
        f"{'level':<8}{'slots':>12}{'used':>12}{'quota':>12}{'hits':>14}{'of hits':>10}",
    ]
    for name, level in result.levels.items():
        slots = "unbounded" if level.slots is None else f"{level.slots:,}"
        quota = "-" if level.quota is None else format_size(level.quota)
        hits = result.hits_by_level.get(name, 0)
        share = hits / result.hits if result.hits else 0.0
        lines.append(f"{name:<8}{slots:>12}{level.used:>12,}{quota:>12}{hits:>14,}{share:>10.1%}")
    if result.bytes_moved:
        lines += ["", f"{'moved':<15}{'bytes':>10}{'rate':>14}"]
        for pair, nbytes in result.bytes_moved.items():
            rate = f"{format_size(round(nbytes / result.seconds))}/s" if result.seconds else "-"
            lines.append(f"{pair:<15}{format_size(nbytes):>10}{rate:>14}")
    return "\n".join(lines)


def _facts(result: ReplayResult) -> Iterator[tuple[str, str, str]]:
    """Yield name, figure and remark of every figure that applies."""
    yield "hit rate", f"{result.hit_rate:.2%}", f"{result.hits:,} hits"
    if result.verified_blocks is not None:
        corrupt = f"{result.corrupt_blocks:,} CORRUPT" if result.corrupt_blocks else "none corrupt"
        lost = f", {result.lost_blocks:,} LOST to failed copies" if result.lost_blocks else ""
        yield "verified", f"{result.verified_blocks:,}", f"blocks compared, {corrupt}{lost}"
    if result.first_request_done_seconds is not None:
        filled = result.host_tier_filled_seconds
        if filled is not None:
            note = f"host tier filled after {_duration(filled)}"
        else:
            note = "host tier never filled" if "host" in result.levels else ""
        yield "first request", _duration(result.first_request_done_seconds), note
    if result.latency_us is not None:
        p50, p99 = (_duration(us / 1e6) for us in (result.latency_us.p50, result.latency_us.p99))
        yield "per request", p50, f"median; 99 in 100 within {p99}"
    per_ref = _duration(result.us_per_block_ref / 1e6)
    yield "in all", _duration(result.seconds), f"{per_ref} a block reference"


def _tail(text: str, width: int) -> str:
    """Keep the end of a path, which tells more than its start."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _duration(seconds: float) -> str:
    """Show a time with three significant digits: ``"12.5 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return "0 s"


def write_json(result: ReplayResult, path: str | PathLike[str]) -> None:
    """Write the figures as JSON, all or nothing.

    Parameters
    ----------
    result : ReplayResult
        The figures.
    path : path
        A file to create or replace, as `write_whole` does it.

    Raises
    ------
    OSError
        If it cannot be written, as `check_destination` says it; a file that was there is then
        unchanged.
    """
    text = json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n"
    write_whole(text, path)
