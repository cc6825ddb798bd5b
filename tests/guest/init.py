"""The guest's first process: mounts what programs expect, runs the command, powers off.

It stands alone: in the guest it is ``/init``, and the kernel starts it. What it or the command
prints is on the first serial port; the command's exit status, and nothing else, on the second. If
it fails, the kernel panics, which ends the guest without a status.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import termios
import time
from pathlib import Path

_RB_POWER_OFF = 0x4321FEDC  # reboot(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_SCRATCH = "/scratch"  # on a disk: with page cache, and not in memory
_MOUNTS = (
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/dev/shm"),
    ("cgroup2", "/sys/fs/cgroup"),
)
_DISKS = ("/dev/nvme0n1", "/dev/vda")
_PATIENCE = 30.0  # seconds


def main() -> None:
    for kind, where in _MOUNTS:
        mount(kind, where, kind)
    mount("ext4", _SCRATCH, disk())
    groups = Path("/sys/fs/cgroup")
    for controller in (groups / "cgroup.controllers").read_text().split():
        (groups / "cgroup.subtree_control").write_text(f"+{controller}")

    folder, *command = json.loads(Path("/command.json").read_text())
    environment = {
        "CI": "1",
        "COLUMNS": "100",
        "HOME": _SCRATCH,
        "OPENBLAS_NUM_THREADS": "1",  # its buffers, for each thread, are no small part of a node
        "PATH": "/usr/bin:/bin",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": _SCRATCH,
    }
    report_status(wait_for(subprocess.Popen(command, cwd=folder, env=environment).pid))
    os.sync()
    _LIBC.reboot(_RB_POWER_OFF)


def mount(kind: str, where: str, source: str) -> None:
    os.makedirs(where, exist_ok=True)
    if _LIBC.mount(source.encode(), where.encode(), kind.encode(), 0, None):
        raise OSError(ctypes.get_errno(), f"mount of {source} ({kind}) on {where}")


def disk() -> str:
    """Return the disk's name, once the kernel has found it, which it does in the background."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        for name in _DISKS:
            if os.path.exists(name):
                return name
        time.sleep(0.05)
    raise FileNotFoundError(f"none of {', '.join(_DISKS)}")


def wait_for(child: int) -> int:
    """Wait until the child ends, and for the orphans that end before it; its exit status."""
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def report_status(status: int) -> None:
    port = os.open("/dev/ttyS1", os.O_WRONLY | os.O_NOCTTY)
    os.write(port, b"%d\n" % status)
    termios.tcdrain(port)


if __name__ == "__main__":
    main()
