"""What a guest is made with, from the distribution's packages: an emulator, a kernel, mke2fs."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.debian import Apt, Packages, Unavailable, library_path

__all__ = ["Virtual", "virtual_machine"]

_EMULATOR, _MKE2FS = "qemu-system-x86_64", "mke2fs"
_PACKAGES = {_EMULATOR: "qemu-system-x86", _MKE2FS: "e2fsprogs"}  # by program
_KERNEL_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual")  # of Debian, of Ubuntu


@dataclass(frozen=True, slots=True)
class Virtual:
    """What a guest is made with."""

    emulator: tuple[str, ...]
    """The command, with the options that show it its firmware."""
    mke2fs: str
    """The program that makes a file system."""
    environment: dict[str, str]
    """Of both; it shows them libraries that are not installed."""
    kernel: Path
    """A bootable kernel image."""


def virtual_machine(cache: Path) -> Virtual:
    """Find or fetch what a guest is made with.

    Parameters
    ----------
    cache : Path
        Folder that is kept between runs: what is in it is not downloaded again.

    Raises
    ------
    Unavailable
        No apt here, no network, or no such package.

    Notes
    -----
    The first run downloads about 45 MB and unpacks 190 MB; blocks for some seconds, or as long as
    the network takes.
    """
    if platform.machine() != "x86_64":
        raise Unavailable(
            f"the guest runs the programs of an x86_64 host, not {platform.machine()}"
        )
    packages = Packages(cache)
    (kernel,) = (packages.unpacked("kernel", _kernel_packages) / "boot").glob("vmlinuz-*")
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path}
    options: list[str] = []
    missing = [package for name, package in _PACKAGES.items() if not shutil.which(name, path=path)]
    if missing:
        root = packages.with_needed(missing)
        folders = [f"{root}/{top}{name}" for top in ("", "usr/") for name in ("sbin", "bin")]
        environment["PATH"] = ":".join([path, *folders])
        environment["LD_LIBRARY_PATH"] = library_path(root)
        for firmware in ("qemu", "seabios"):
            options += ["-L", f"{root}/usr/share/{firmware}"]
    emulator, mke2fs = (_program(name, environment["PATH"]) for name in _PACKAGES)
    return Virtual((emulator, *options), mke2fs, environment, kernel)


def _program(name: str, path: str) -> str:
    found = shutil.which(name, path=path)
    if found is None:
        raise Unavailable(f"the package {_PACKAGES[name]} has no program {name}")
    return found


def _kernel_packages(apt: Apt) -> list[str]:
    """Return the package that the newest kernel for virtual machines is in."""
    known = apt("apt-cache", "pkgnames", "linux-image-").split()
    name = next((name for name in _KERNEL_PACKAGES if name in known), None)
    if name is None:
        raise Unavailable(f"apt knows none of the packages {', '.join(_KERNEL_PACKAGES)}")
    found = re.findall(r"Depends: (linux-image-\d\S*)", apt("apt-cache", "depends", name))
    if not found:
        raise Unavailable(f"the package {name} names no kernel")
    return found[:1]
