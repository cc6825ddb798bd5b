"""Control groups: how much memory this process may have, by v1 or v2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hostmem import procfs

__all__ = ["MemoryGroup", "hugetlb_limits", "memory_groups", "memory_limit", "pressure_file"]

_UNLIMITED = 1 << 62  # v1 writes "no limit" as the largest page-aligned integer
# What the kernel can drop without asking anybody. The lists of file pages, unlike the sums called
# "cache" and "file", hold no tmpfs and no shared memory; of their pages dirty ones come back late.
_DROPPED = {
    1: (("total_active_file", "total_inactive_file"), ("total_dirty", "total_writeback")),
    2: (("active_file", "inactive_file", "slab_reclaimable"), ("file_dirty", "file_writeback")),
}


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory control group that counts this process's memory: its own, or an ancestor."""

    version: int
    """Of the control group interface: 1 or 2."""
    folder: str
    """Where its files are."""
    orphan: bool
    """Whether it has ancestors and none of them can be seen from here."""

    def limits(self) -> Iterator[tuple[str, int]]:
        """Yield the name of the file and the bytes of each limit that is set."""
        if self.version == 2:
            for name in ("memory.max", "memory.high"):
                nbytes = procfs.number(procfs.read(f"{self.folder}/{name}"))
                if nbytes is not None:
                    yield name, nbytes
            return
        nbytes = procfs.number(procfs.read(f"{self.folder}/memory.limit_in_bytes"))
        if nbytes is None:
            nbytes = _UNLIMITED
        if nbytes < _UNLIMITED:
            yield "memory.limit_in_bytes", nbytes
        if self.orphan:  # ancestors outside the container limit it, too
            least = self._statistics().get("hierarchical_memory_limit", _UNLIMITED)
            if least < min(nbytes, _UNLIMITED):
                yield "hierarchical_memory_limit", least

    def taken(self) -> int:
        """Bytes in use that the kernel cannot drop: usage without clean page cache."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        used = procfs.number(procfs.read(f"{self.folder}/{name}")) or 0
        statistics = self._statistics()
        dropped, kept = (
            sum(statistics.get(name, 0) for name in names) for names in _DROPPED[self.version]
        )
        return max(used - max(dropped - kept, 0), 0)

    def hits(self) -> dict[str, int]:
        """Count how often each limit was met since the group was made, by the limit's name."""
        if self.version == 2:
            events = procfs.fields(procfs.read(f"{self.folder}/memory.events"))
            return {f"memory.{name}": events[name] for name in ("max", "high") if name in events}
        count = procfs.number(procfs.read(f"{self.folder}/memory.failcnt"))
        return {} if count is None else {"memory.limit_in_bytes": count}

    def _statistics(self) -> dict[str, int]:
        return procfs.fields(procfs.read(f"{self.folder}/memory.stat"))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the least memory limit over this process's control groups and their ancestors.

    Parameters
    ----------
    root : Path
        Where proc and sys are mounted; another place in tests.

    Returns
    -------
    int or None
        Bytes, the least of ``memory.limit_in_bytes`` (v1), ``memory.max`` and ``memory.high`` (v2);
        None where no group limits it.
    """
    limits = (nbytes for group in memory_groups(root) for _, nbytes in group.limits())
    return min(limits, default=None)


def memory_groups(root: Path = Path("/")) -> tuple[MemoryGroup, ...]:
    """Return the control groups that count this process's memory, ancestors first.

    Those of the second version are among them where it has no memory controller: such groups have
    no limits.
    """
    found: dict[str, MemoryGroup] = {}
    for version, top, inside in _mounted("memory", root):
        orphan = not (top / "release_agent").exists()  # which only the root of a hierarchy has
        found.setdefault(str(top), MemoryGroup(version, str(top), orphan))
        for part in _downward(inside):
            folder = str(top / part)
            found.setdefault(folder, MemoryGroup(version, folder, orphan=False))
    return tuple(found.values())


def pressure_file(root: Path = Path("/")) -> str | None:
    """Return the file with the stall figures of this process's own group, if it has such a group.

    They are kept in the second version's hierarchy, whoever has the memory controller. Its root,
    which stands for the whole machine, is no group of anybody's own.
    """
    for version, top, inside in _mounted("memory", root):
        folder = top / inside
        if version == 2 and (folder / "cgroup.type").exists():  # the root has no type
            return str(folder / "memory.pressure")
    return None


def hugetlb_limits(page_size: int, root: Path = Path("/")) -> Iterator[tuple[str, int, int]]:
    """Yield name, bytes and bytes in use of each limit on huge pages of one size."""
    unit, letter = next((1 << n, c) for n, c in ((30, "G"), (20, "M"), (10, "K")) if page_size >> n)
    prefix = f"hugetlb.{page_size // unit}{letter}B"
    for version, top, inside in _mounted("hugetlb", root):
        limit, usage = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        for folder in (top, *(top / part for part in _downward(inside))):
            nbytes = procfs.number(procfs.read(folder / f"{prefix}.{limit}"))
            if nbytes is not None and nbytes < _UNLIMITED:
                used = procfs.number(procfs.read(folder / f"{prefix}.{usage}")) or 0
                yield f"{prefix}.{limit} of {folder}", nbytes, used


def _mounted(controller: str, root: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield version, mount point and this process's group below it, of the hierarchies that count.

    That is the one of the controller in the first version, and the second version's.
    """
    paths = {}
    for line in procfs.read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    for line in procfs.read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, filesystem = left.split(), right.split()
        if len(mount) < 5 or len(filesystem) < 3 or filesystem[0] not in paths:
            continue
        kind, options = filesystem[0], filesystem[2]
        if kind == "cgroup" and controller not in options.split(","):
            continue
        mounted_root, mount_point = map(_unescape, mount[3:5])
        top = root / mount_point.lstrip("/")
        yield 2 if kind == "cgroup2" else 1, top, _below(paths[kind], mounted_root)


def _downward(inside: Path) -> list[Path]:
    """Return a path and its parents, the uppermost first."""
    return [*reversed(inside.parents), inside][1:]


def _below(path: str, mounted_root: str) -> Path:
    """Return a group's path below the part of the hierarchy that is mounted here."""
    full, base = Path(path), Path(mounted_root)
    inside = full.relative_to(base) if full.is_relative_to(base) else Path()
    return Path() if ".." in inside.parts else inside  # a group outside this one's namespace


def _unescape(text: str) -> str:
    r"""Undo how mountinfo writes blanks and backslashes: ``\134``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
