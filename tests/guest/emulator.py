"""A machine with two memory nodes, a third that has memory and no CPU, and a disk, emulated."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.guest.packages import Virtual

__all__ = ["run_guest"]

_DISK = 3 << 30  # bytes
_NODES = ((768, 0), (768, 1), (256, None))  # MiB, CPU
_KERNEL_OPTIONS = (
    "console=ttyS0 loglevel=4 panic=-1 rdinit=/init mitigations=off psi=1 "
    "transparent_hugepage=madvise"
)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def run_guest(virtual: Virtual, image: Path, folder: Path, limit: float) -> int | None:
    """Start the guest and show what it prints until it powers off.

    Parameters
    ----------
    virtual : Virtual
        What it is made with.
    image : Path
        The file system that it starts from, see `write_image`.
    folder : Path
        Where its disk, and what comes out of its second serial port, are kept.
    limit : float
        Seconds after which it is killed.

    Returns
    -------
    int or None
        Exit status of the guest's command; None where the guest ended, or was killed, before.

    Notes
    -----
    Blocks. The emulator does not outlive this process, however that ends.
    """
    _make_disk(virtual, folder / "disk")
    status = folder / "status"
    status.write_bytes(b"")
    libc = ctypes.CDLL(None)
    guest = subprocess.Popen(
        [*virtual.emulator, *_options(virtual.kernel, image)],
        cwd=folder,
        env=virtual.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    timer = threading.Timer(limit, guest.kill)
    timer.start()
    try:
        assert guest.stdout is not None
        while output := os.read(guest.stdout.fileno(), 65536):
            sys.stdout.buffer.write(output.replace(b"\r\n", b"\n"))
            sys.stdout.buffer.flush()
        guest.wait()
    finally:
        timer.cancel()
        guest.kill()
        guest.wait()
    text = status.read_text().strip()
    return int(text) if text else None


def _make_disk(virtual: Virtual, disk: Path) -> None:
    """Make a disk with an empty file system; it takes the space of what is written to it."""
    disk.unlink(missing_ok=True)
    with disk.open("wb") as file:
        file.truncate(_DISK)
    command = [virtual.mke2fs, "-q", "-F", "-t", "ext4", str(disk)]
    subprocess.run(command, env=virtual.environment, stdin=subprocess.DEVNULL, check=True)


# The disk is there twice: which of the two drivers is part of the kernel, and no module that would
# have to be loaded, depends on the distribution. Without the fast string instructions, which are
# slow when emulated, the guest clears and copies pages by others.
def _options(kernel: Path, image: Path) -> list[str]:
    cpus = sum(cpu is not None for _, cpu in _NODES)
    options = f"""
        -accel tcg,thread=multi -machine pc -cpu max,erms=off,fsrm=off -smp {cpus},sockets={cpus}
        -m {sum(mebibytes for mebibytes, _ in _NODES)}M
        -nodefaults -no-user-config -display none -no-reboot
        -serial stdio -serial file:status
        -blockdev driver=file,node-name=disk,filename=disk,cache.no-flush=on
        -device nvme,drive=disk,serial=disk,share-rw=on
        -device virtio-blk-pci,drive=disk,share-rw=on
    """.split()
    for number, (mebibytes, cpu) in enumerate(_NODES):
        here = f"node,nodeid={number},memdev=node{number}"
        options += ["-object", f"memory-backend-ram,id=node{number},size={mebibytes}M"]
        options += ["-numa", here if cpu is None else f"{here},cpus={cpu}"]
    return [*options, "-kernel", f"{kernel}", "-initrd", f"{image}", "-append", _KERNEL_OPTIONS]
