"""Where huge pages could come from: free blocks of the kernel's allocator, pools of hugetlb."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hostmem import procfs

__all__ = [
    "HugePool",
    "compactions",
    "default_pool_size",
    "free_bytes_by_order",
    "free_huge_bytes",
    "pools",
]

_ROOT = Path("/")
_POOL = re.compile(r"hugepages-(\d+)kB")
_NODE = re.compile(r"node(\d+)")


@dataclass(frozen=True, slots=True)
class HugePool:
    """The hugetlb pages of one size that the administrator has set aside; counted in pages."""

    total: int
    """In the pool now."""
    free: int
    """Not in use."""
    reserved: int
    """Of the free ones, promised to mappings that have not touched them yet."""
    surplus_limit: int
    """What the kernel may add to the pool while it is short, if it finds the memory."""
    by_node: dict[int, int]
    """Free ones of each node."""


def pools(root: Path = _ROOT) -> dict[int, HugePool]:
    """Read the hugetlb pools.

    Parameters
    ----------
    root : Path
        Where proc and sys are; another place in tests.

    Returns
    -------
    dict
        Bytes of a page -> pool, also where it is empty. What cannot be read is left out.
    """
    found = {}
    for folder in _folders(root / "sys/kernel/mm/hugepages"):
        match = _POOL.fullmatch(folder.name)
        names = ("nr_hugepages", "free_hugepages", "resv_hugepages", "nr_overcommit_hugepages")
        counts = [procfs.number(procfs.read(folder / name)) for name in names]
        if match is None or None in counts[:2]:
            continue
        total, free, reserved, surplus_limit = (count or 0 for count in counts)
        by_node = _free_by_node(folder.name, root)
        found[int(match[1]) * 1024] = HugePool(total, free, reserved, surplus_limit, by_node)
    return found


def _free_by_node(pool: str, root: Path) -> dict[int, int]:
    found = {}
    for folder in _folders(root / "sys/devices/system/node"):
        match = _NODE.fullmatch(folder.name)
        free = procfs.number(procfs.read(folder / "hugepages" / pool / "free_hugepages"))
        if match is not None and free is not None:
            found[int(match[1])] = free
    return found


def default_pool_size(root: Path = _ROOT) -> int | None:
    """Read how many bytes a hugetlb page has where no size is named; None without hugetlb."""
    return procfs.fields(procfs.read(root / "proc/meminfo")).get("Hugepagesize")


def free_huge_bytes(
    nodes: Iterable[int], page_size: int, huge_page_size: int, root: Path = _ROOT
) -> int:
    """Say how much memory is free in blocks that a huge page fits in.

    Parameters
    ----------
    nodes : iterable of int
        Whose memory; empty for all nodes.
    page_size, huge_page_size : int
        Bytes.
    root : Path
        Where proc and sys are; another place in tests.

    Returns
    -------
    int
        Bytes; 0 also where nothing can be read.
    """
    wanted = set(nodes)
    by_node = free_bytes_by_order(page_size, root)
    order = (huge_page_size // page_size).bit_length() - 1
    return sum(
        sum(by_order[order:]) + _in_no_list(node, sum(by_order), root)
        for node, by_order in by_node.items()
        if not wanted or node in wanted
    )


def free_bytes_by_order(page_size: int, root: Path = _ROOT) -> dict[int, list[int]]:
    """Read the free memory of each node, in bytes by the order of its blocks (/proc/buddyinfo)."""
    found: dict[int, list[int]] = {}
    for line in procfs.read(root / "proc/buddyinfo").splitlines():
        left, _, right = line.partition("zone")
        node = left.removeprefix("Node").strip(" ,")
        counts = right.split()[1:]
        if not counts or not all(word.isdecimal() for word in [node, *counts]):
            continue
        zone = [int(count) * page_size << order for order, count in enumerate(counts)]
        so_far = found.get(int(node), [0] * len(zone))
        found[int(node)] = [a + b for a, b in zip(so_far, zone, strict=False)]
    return found


def _in_no_list(node: int, listed: int, root: Path) -> int:
    """Bytes of a node that are free, in one piece, and not listed.

    A virtual machine that accepts its memory, or sets it up, when it is first needed counts it as
    free but keeps it out of the lists.
    """
    meminfo = procfs.read(root / f"sys/devices/system/node/node{node}/meminfo")
    return max(procfs.fields(meminfo).get("MemFree", 0) - listed, 0)


def compactions(root: Path = _ROOT) -> int | None:
    """Count how often a fault has had to compact or reclaim memory itself since the boot.

    Returns
    -------
    int or None
        Of the whole machine; None where the kernel does not say.
    """
    counts = [
        count
        for name, count in procfs.fields(procfs.read(root / "proc/vmstat")).items()
        if name == "compact_stall" or name.startswith("allocstall")
    ]
    return sum(counts) if counts else None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
