"""What machine this is: pages, memory nodes, CPUs, limits; read from proc and sys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hostmem import cgroup, procfs
from hostmem.describing import html_of, notebook, one_line
from hostmem.units import format_size

__all__ = ["Machine", "Node", "machine", "node_of_pci_device", "read_machine"]

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Node:
    """One memory node."""

    number: int
    """The kernel's number of it."""
    cpus: tuple[int, ...]
    """CPUs on it, empty for memory without processors."""
    memory_total: int
    """Bytes of memory, 0 for processors without memory."""

    @one_line
    def __repr__(self) -> str:
        return f"<Node {self.number}: {format_size(self.memory_total)}, {len(self.cpus)} cpus>"


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about this machine that placement and sizes depend on."""

    kernel: str
    """Release of the running kernel."""
    page_size: int
    """Bytes of a small page."""
    huge_page_size: int | None
    """Bytes of a transparent huge page; None where the kernel has none."""
    thp_enabled: str
    """``always``, ``madvise`` or ``never``; empty where the kernel has none."""
    thp_defrag: str
    """When a huge page fault may compact memory: ``always``, ``defer``, ``madvise``..."""
    memory_total: int
    """Bytes of physical memory."""
    memory_limit: int | None
    """Bytes this process's control groups allow; None for no limit."""
    nodes: tuple[Node, ...]
    """Online memory nodes, by number."""
    allowed_cpus: tuple[int, ...]
    """CPUs this process may run on."""

    @property
    def memory_for_process(self) -> int:
        """Bytes this process can have at most: the least of the machine's memory and its limit."""
        limit = self.memory_limit
        return self.memory_total if limit is None else min(self.memory_total, limit)

    def node(self, number: int) -> Node | None:
        """Return the node of that number, or None."""
        return next((node for node in self.nodes if node.number == number), None)

    def fill_cpus(self, node: int | None) -> tuple[int, ...]:
        """CPUs of a node that this process may use; empty where there are none."""
        found = self.node(node) if node is not None else None
        return tuple(c for c in found.cpus if c in self.allowed_cpus) if found else ()

    @one_line
    def __repr__(self) -> str:
        nodes, cpus = len(self.nodes), len(self.allowed_cpus)
        return (
            f"<Machine Linux {self.kernel}, {format_size(self.memory_total)} on {nodes} "
            f"node{'s' * (nodes != 1)}, {cpus} cpus allowed, {format_size(self.page_size)} pages>"
        )

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [str(self)])

    def __str__(self) -> str:
        huge = format_size(self.huge_page_size) if self.huge_page_size else "none"
        limit = format_size(self.memory_limit) if self.memory_limit is not None else "none"
        lines = [
            f"kernel       {self.kernel}",
            f"memory       {format_size(self.memory_total)}, control group limit {limit}",
            f"pages        {format_size(self.page_size)}, huge {huge} "
            f"(enabled={self.thp_enabled or '-'}, defrag={self.thp_defrag or '-'})",
            f"cpus         {len(self.allowed_cpus)} allowed",
        ]
        lines += [
            f"node {n.number:<8}{format_size(n.memory_total)}, {len(n.cpus)} cpus"
            for n in self.nodes
        ]
        return "\n".join(lines)


@lru_cache(maxsize=1)
def machine() -> Machine:
    """Return the facts about this machine, read once per process."""
    return read_machine()


def read_machine(root: Path = _ROOT, page_size: int | None = None) -> Machine:
    """Read the facts about a machine.

    Parameters
    ----------
    root : Path
        Where its proc and sys are; another place in tests.
    page_size : int, optional
        Bytes of a small page; this machine's own where omitted.
    """
    thp = root / "sys/kernel/mm/transparent_hugepage"
    return Machine(
        kernel=procfs.read(root / "proc/sys/kernel/osrelease"),
        page_size=page_size or os.sysconf("SC_PAGESIZE"),
        huge_page_size=procfs.number(procfs.read(thp / "hpage_pmd_size")),
        thp_enabled=_chosen(procfs.read(thp / "enabled")),
        thp_defrag=_chosen(procfs.read(thp / "defrag")),
        memory_total=_memory_total(root / "proc/meminfo"),
        memory_limit=cgroup.memory_limit(root),
        nodes=_nodes(root / "sys/devices/system/node"),
        allowed_cpus=_allowed_cpus(root),
    )


def node_of_pci_device(address: str, root: Path = _ROOT) -> int | None:
    """Return the memory node of a PCI device by sysfs, or None where it is unknown (-1)."""
    return procfs.number(procfs.read(root / "sys/bus/pci/devices" / address / "numa_node"))


def _nodes(folder: Path) -> tuple[Node, ...]:
    nodes = []
    for number in procfs.numbers(procfs.read(folder / "online")):
        entry = folder / f"node{number}"
        cpus = procfs.numbers(procfs.read(entry / "cpulist"))
        nodes.append(Node(number, cpus, _memory_total(entry / "meminfo")))
    return tuple(nodes)


def _allowed_cpus(root: Path) -> tuple[int, ...]:
    if root == _ROOT:
        return tuple(sorted(os.sched_getaffinity(0)))
    return procfs.numbers(procfs.read(root / "sys/devices/system/cpu/online"))


def _memory_total(path: Path) -> int:
    """Read MemTotal, in bytes, from /proc/meminfo or a node's meminfo; 0 where it is not there."""
    return procfs.fields(procfs.read(path)).get("MemTotal", 0)


def _chosen(text: str) -> str:
    """Read which of the words is in brackets: ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]
