"""Whether memory is so short just now that the fill should rest."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from hostmem import procfs
from hostmem.cgroup import MemoryGroup, memory_groups, pressure_file
from hostmem.units import format_size

__all__ = ["PressureGauge"]

_PERIOD = 0.1  # seconds between two readings
# Share of the time in which no task got on for want of memory. A fill that drives clean page cache
# out, into a full control group, makes 0.02 to 0.04 by itself; thrashing makes most of 1.
_STALLED = 0.2
_TIGHT = 8  # memory is tight where less than this part is left

_FULL = re.compile(r"^full .*\btotal=(\d+)$", re.MULTILINE)


class PressureGauge:
    """Tells from the kernel's stall figures and counters whether memory is short.

    Two signs count. Tasks are *stalled*: in this process's control group (version 2) for a fifth of
    the time; or, where it has none, on the whole machine while less than an eighth of the memory is
    available (with more, it is some other group that thrashes inside its own limit). And a limit of
    a control group was *met* again while less than an eighth of it is left: with more left there is
    page cache to drop, and a group full of page cache meets its limit thousands of times a second
    without harm.

    Parameters
    ----------
    root : Path
        Where proc and sys are mounted; another place in tests.
    clock : callable
        Seconds; another one in tests.

    Notes
    -----
    For one thread at a time. Never raises: what cannot be read is no pressure.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._groups = memory_groups(root)
        own = pressure_file(root)
        self._own = own if own and _FULL.search(procfs.read(own)) else None
        self._read_at = clock()
        self._stalled = self._total_stalled()
        self._hits = self._total_hits()
        self._verdict: str | None = None

    def pressed(self) -> str | None:
        """Say in words why the fill should rest now, or None.

        Cheap: the files are read when 0.1 s have passed since the reading before (some 0.1 ms);
        until then the answer stays. It is about the time between the last two readings, so it turns
        to None once a rest has helped.
        """
        now = self._clock()
        if now - self._read_at >= _PERIOD:
            seconds, self._read_at = now - self._read_at, now
            stalled, hit = self._new_stall(seconds), self._new_hit()
            self._verdict = stalled or hit
        return self._verdict

    def _new_stall(self, seconds: float) -> str | None:
        before, self._stalled = self._stalled, self._total_stalled()
        if before is None or self._stalled is None:
            return None
        share = (self._stalled - before) / seconds
        if share < _STALLED or not (self._own or self._machine_is_tight()):
            return None
        whose = "this control group" if self._own else "the machine"
        return (
            f"memory pressure: tasks of {whose} stalled {min(share, 1):.0%} "
            f"of the last {seconds:.1f} s"
        )

    def _new_hit(self) -> str | None:
        before, self._hits = self._hits, self._total_hits()
        for (group, name), count in self._hits.items():
            times = count - before.get((group, name), count)
            limit = dict(group.limits()).get(name) if times > 0 else None
            if limit is None:
                continue
            left = limit - group.taken()
            if left < limit // _TIGHT:
                return (
                    f"{name} of {group.folder} was hit {times} time{'s' * (times > 1)} "
                    f"with {format_size(max(left, 0))} left"
                )
        return None

    def _total_stalled(self) -> float | None:
        """Seconds in which no task got on, since the group or the machine started."""
        path = self._own or self._root / "proc/pressure/memory"
        match = _FULL.search(procfs.read(path))
        return int(match[1]) / 1e6 if match else None

    def _total_hits(self) -> dict[tuple[MemoryGroup, str], int]:
        return {(group, name): n for group in self._groups for name, n in group.hits().items()}

    def _machine_is_tight(self) -> bool:
        found = procfs.fields(procfs.read(self._root / "proc/meminfo"))
        total = found.get("MemTotal", 0)
        return found.get("MemAvailable", total) < total // _TIGHT
