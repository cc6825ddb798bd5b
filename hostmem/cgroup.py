"""Control groups: how much memory this process may have, by v1 or v2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_limit"]

_LIMIT_FILES = {"cgroup": ("memory.limit_in_bytes",), "cgroup2": ("memory.max", "memory.high")}
_UNLIMITED = 1 << 62  # v1 writes "no limit" as the largest page-aligned integer


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
    limits = []
    for kind, folder in _groups(root):
        for name in _LIMIT_FILES[kind]:
            text = _read(folder / name)
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append(int(text))
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (kind, folder) of each memory control group this process is in, and its ancestors."""
    paths = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mounted_root, mount_point = left.split()[3:5]
        inside = _below(paths[kind], mounted_root)
        top = root / mount_point.lstrip("/")
        yield kind, top
        for part in reversed([inside, *inside.parents][:-1]):
            yield kind, top / part


def _below(path: str, mounted_root: str) -> Path:
    """Return a group's path below the part of the hierarchy that is mounted here."""
    full, base = Path(path), Path(mounted_root)
    return full.relative_to(base) if full.is_relative_to(base) else Path()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not mounted, or not in this version
