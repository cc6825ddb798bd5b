"""Machines that are not here: their files of proc and sys, written below a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["V1_MOUNT", "V1_UNLIMITED", "V2_MOUNT", "in_group", "kib", "write"]

# Lines of mountinfo: id, parent, device, root in the hierarchy, mount point, ... - type, source,
# options (proc_pid_mountinfo(5)).
V2_MOUNT = "31 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "36 32 0:30 / /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory"
V1_UNLIMITED = "9223372036854771712"


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write files as the kernel shows them, each with a newline at its end."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def in_group(version: int, path: str, files: Mapping[str, object]) -> dict[str, str]:
    """Return the files of a process in a group; those given lie below the hierarchy's top."""
    line, mount, top = {
        1: ("4:memory:", V1_MOUNT, "sys/fs/cgroup/memory/"),
        2: ("0::", V2_MOUNT, "sys/fs/cgroup/"),
    }[version]
    placed = {top + name: str(text) for name, text in files.items()}
    return {"proc/self/cgroup": line + path, "proc/self/mountinfo": mount, **placed}


def kib(fields: Mapping[str, int], prefix: str = "") -> str:
    """Return a meminfo file of fields in bytes."""
    return "\n".join(f"{prefix}{name}: {n >> 10:>12} kB" for name, n in fields.items())
