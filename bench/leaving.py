"""Processes that end while others serve: what the others' calls of the driver wait for.

Three processes hold memory and end in the same way at the same time, while a fourth fills at a
moderate rate and a fifth only makes calls. `bench.contention` runs it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import Finding, Table, quartiles
from bench.probe import Stalls, most_blocked, worst_call
from bench.rank import DEFAULT, LEAVES, Rank, RankFailedError, together
from hostmem.units import format_size

__all__ = ["HOLDERS", "Left", "leave_in_turn", "leaving_findings", "leaving_table", "shown"]

HOLDERS = 3
SERVER_CALLS = ("memory", "memset")
NOBODY = "nobody ends"
NOBODY_FOR = 2.0  # seconds
SLOW_FILL = 8.0  # seconds that the fill takes beside which others leave
SETTLE = 0.2  # seconds until a fill is under way, and until the kernel has done what is left to do
WORST = 40e-3  # seconds

Seen = dict[str, Stalls]


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
        time.sleep(SETTLE)
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
        time.sleep(SETTLE)
        seen = []
        for other in (filler, server):
            other.tell("read")
            seen.append(other.hear())
        filler.tell("free")
        filler.hear()
    return Left(seen[0]["seen"], seen[1]["seen"], seconds, seen[0]["filling"])


def leave_in_turn(
    size: int, rounds: int, library: Path, ordinal: int, calls: Sequence[str]
) -> dict[str, list[Left]]:
    """Have holders of ``size`` bytes each leave in every way, so many times.

    Parameters
    ----------
    size, rounds, ordinal
        As above; the device.
    library : Path
        The probe, as `bench.probe.built` yields it.
    calls : sequence of str
        Kinds of calls that the one who fills makes.

    Raises
    ------
    RankFailedError
        A process ended otherwise than it was told to.
    """
    with (
        together(1, library, ordinal, calls, "filler") as (filler,),
        together(1, library, ordinal, SERVER_CALLS, "server") as (server,),
    ):
        found: dict[str, list[Left]] = {way: [] for way in (NOBODY, *LEAVES)}
        for _ in range(rounds):
            for way, ones in found.items():
                ones.append(leave(way, size, library, ordinal, filler, server))
        return found


def shown(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Show the median and the quartiles, or the one value there is."""
    if len(values) == 1:
        return f"{values[0] * scale:.{digits}f}"
    return quartiles(values, scale, digits)


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


def longest(ones: Sequence[Left]) -> float:
    """Return the seconds of the longest call of anybody."""
    return max(max(worst_call(one.filler), worst_call(one.server)) for one in ones)


def leaving_findings(found: dict[str, list[Left]]) -> list[Finding]:
    """Hold the ways in which ours gives its memory back against the bound."""
    result = []
    for way, ones in found.items():
        if way in (NOBODY, "SIGKILL"):
            continue
        worst, killed = longest(ones), longest(found["SIGKILL"])
        result.append(
            Finding(
                f"longest call of others while {HOLDERS} processes leave by {way}",
                f"{worst * 1e3:.1f} ms",
                f"< {WORST * 1e3:g} ms",
                f"SIGKILL: {killed * 1e3:.1f} ms",
                f"{worst / killed:.3f}",
                worst < WORST,
            )
        )
    return result
