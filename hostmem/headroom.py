"""How many more bytes of memory this process can take now, and who says so.

Populating past a limit does not fail: the kernel's OOM killer ends a process, perhaps this one. So
whoever is about to populate asks first. The answer is of this moment; others take memory meanwhile,
so take a part of it and ask again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hostmem import procfs
from hostmem.cgroup import MemoryGroup, memory_groups
from hostmem.units import format_size

__all__ = ["Headroom", "HeadroomGauge", "Limit", "headroom"]

_MARGIN = 64 << 20  # for the interpreter, and for what the kernel's counters lag behind
_SMALLEST_PART = 16  # the margin is at most this part of a limit
_TABLES = 128  # a byte of page tables and of the driver's tables comes with so many, at most
_NOTHING_SAYS = 1 << 62

# A zone's part of /proc/zoneinfo, and lines of it; counts are of pages.
_ZONES = re.compile(r"^(?=Node )", re.MULTILINE)
_NODE = re.compile(r"^Node (\d+), zone")
_HIGH = re.compile(r"^\s+high +(\d+)$", re.MULTILINE)
_MANAGED = re.compile(r"^\s+managed +(\d+)$", re.MULTILINE)
_PROTECTION = re.compile(r"^\s+protection: \(([\d, ]*)\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that bounds the memory of a process."""

    name: str
    """What it is: ``MemAvailable``, ``memory.max of /sys/fs/cgroup/job``..."""
    total: int
    """Bytes that it allows in all."""
    taken: int
    """Bytes of those that are in use and that the kernel cannot get back by itself."""
    exact: bool = False
    """Whether nothing else comes out of it, so that it can be used to the last byte."""
    of_each: bool = False
    """Whether each process has it for itself; otherwise they share it."""
    why: str = ""
    """Where the figures alone do not say it."""

    @property
    def nbytes(self) -> int:
        """Bytes that may still be taken, after a margin for what comes with them."""
        left = self.total - self.taken
        if not self.exact:
            left -= min(_MARGIN, self.total // _SMALLEST_PART)
            left -= left // _TABLES
        return max(left, 0)

    @property
    def reason(self) -> str:
        """What is behind it, in words."""
        return self.why or f"{format_size(self.total)}, of which {format_size(self.taken)} in use"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Headroom:
    """What can be taken now."""

    limits: tuple[Limit, ...]
    """All that bound it; empty where nothing can be read."""

    @property
    def least(self) -> Limit | None:
        """The limit that allows the least."""
        return min(self.limits, key=lambda limit: limit.nbytes, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes that may still be taken under every limit, after a safety margin."""
        return min((limit.nbytes for limit in self.limits), default=_NOTHING_SAYS)

    @property
    def limit(self) -> str:
        """The limit that allows the least, with its figures, in words."""
        return str(self.least or "no limit that could be read")


class HeadroomGauge:
    """Reads the headroom again and again.

    What does not change (where the control groups are, what the kernel keeps for itself) is looked
    up once; a process that is moved to another group is noticed. No descriptor is kept.

    Parameters
    ----------
    nodes : sequence of int
        Memory nodes whose memory is meant.
    strict : bool
        Whether no other node's memory may be taken; otherwise the nodes are a wish and bound
        nothing.
    page_size : int, optional
        Bytes of a small page; this machine's own where omitted.
    root : Path
        Where proc and sys are mounted; another place in tests.

    Notes
    -----
    `read` takes some 0.1 ms in a control group with a limit, and more on a busy machine; it may be
    called from several threads. It never raises: what cannot be read is no limit.
    """

    def __init__(
        self,
        nodes: Sequence[int] = (),
        strict: bool = False,
        page_size: int | None = None,
        root: Path = Path("/"),
    ) -> None:
        self._root = root
        self._membership: str | None = None
        self._groups: tuple[MemoryGroup, ...] = ()
        page = page_size or os.sysconf("SC_PAGESIZE")
        self._nodes, self._whose = _bounding_nodes(tuple(nodes) if strict else (), root)
        self._kept_free = _kept_free(self._nodes, page, root)
        mode = procfs.read(root / "proc/sys/vm/overcommit_memory")
        self._strict_accounting = mode == "2"
        self._accounting_reserve = sum(
            (procfs.number(procfs.read(root / f"proc/sys/vm/{name}")) or 0) << 10
            for name in ("user_reserve_kbytes", "admin_reserve_kbytes")
        )

    def read(self) -> Headroom:
        """Read how much can be taken now; blocks for no more than the reading."""
        return Headroom((*self._of_the_machine(), *self._of_the_groups(), *self._of_the_nodes()))

    def _of_the_machine(self) -> Iterator[Limit]:
        found = procfs.fields(procfs.read(self._root / "proc/meminfo"))
        if "MemAvailable" in found:  # Linux 3.14
            total = found.get("MemTotal", found["MemAvailable"])
            yield Limit("MemAvailable", total, total - found["MemAvailable"])
        if self._strict_accounting and "CommitLimit" in found:
            taken = found.get("Committed_AS", 0) + self._accounting_reserve
            yield Limit("CommitLimit (vm.overcommit_memory=2)", found["CommitLimit"], taken)

    def _of_the_groups(self) -> Iterator[Limit]:
        membership = procfs.read(self._root / "proc/self/cgroup")
        if membership != self._membership:
            self._groups = memory_groups(self._root)
            self._membership = membership
        for group in self._groups:
            limits = list(group.limits())
            if limits:
                taken = group.taken()
                for name, nbytes in limits:
                    yield Limit(f"{name} of {group.folder}", nbytes, taken)

    def _of_the_nodes(self) -> Iterator[Limit]:
        total = taken = 0
        for node in self._nodes:
            folder = self._root / f"sys/devices/system/node/node{node}"
            found = procfs.fields(procfs.read(folder / "meminfo"))
            if "MemFree" not in found:
                return
            cache = found.get("Active(file)", 0) + found.get("Inactive(file)", 0)
            cache -= found.get("Dirty", 0) + found.get("Writeback", 0)
            size = found.get("MemTotal", found["MemFree"])
            total += size
            taken += size - found["MemFree"] - max(cache, 0)
        if self._nodes:
            names = ", ".join(map(str, self._nodes))
            plural = "s" if len(self._nodes) > 1 else ""
            name = f"free memory of node{plural} {names}{self._whose}"
            yield Limit(name, total, taken + self._kept_free)


def headroom(
    nodes: Sequence[int] = (),
    strict: bool = False,
    page_size: int | None = None,
    root: Path = Path("/"),
) -> Headroom:
    """Read once how much memory can be taken now; see `HeadroomGauge`."""
    return HeadroomGauge(nodes, strict, page_size, root).read()


def _bounding_nodes(strict: tuple[int, ...], root: Path) -> tuple[tuple[int, ...], str]:
    """Say which nodes' memory bounds this process, and why; none where all nodes together do.

    All of them together are the machine, which ``MemAvailable`` speaks for: it knows more, such as
    memory that a virtual machine is given, and a node shown with, only when it is first used.
    """
    there = procfs.numbers(procfs.read(root / "sys/devices/system/node/has_memory"))
    status = procfs.read(root / "proc/self/status")
    match = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status, re.MULTILINE)
    allowed = procfs.numbers(match[1]) if match else there
    nodes, whose = (strict, "") if strict else (allowed, " (the cpuset allows no other)")
    return ((), "") if set(there) <= set(nodes) else (nodes, whose)


def _kept_free(nodes: tuple[int, ...], page: int, root: Path) -> int:
    """Bytes of the nodes that are shown as free and that the kernel keeps for itself.

    Of each zone it keeps the high watermark, and what it protects from allocations that could be
    served by a higher zone (lowmem_reserve): of node 0's 32-bit zone easily a gigabyte.
    """
    if not nodes:
        return 0
    kept = 0
    for zone in _ZONES.split(procfs.read(root / "proc/zoneinfo")):
        node, managed, high = (field.search(zone) for field in (_NODE, _MANAGED, _HIGH))
        if node and managed and high and int(node[1]) in nodes:
            protection = _PROTECTION.search(zone)
            most = max(procfs.numbers(protection[1]), default=0) if protection else 0
            kept += min(int(managed[1]), most + int(high[1]))
    return kept * page
