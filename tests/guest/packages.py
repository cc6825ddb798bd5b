"""What a guest is made with, from the distribution's packages: an emulator, a kernel, mke2fs.

Nothing is installed: packages are downloaded and unpacked into a folder, which any user may do.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Unavailable", "Virtual", "virtual_machine"]

_EMULATOR, _MKE2FS = "qemu-system-x86_64", "mke2fs"
_PACKAGES = {_EMULATOR: "qemu-system-x86", _MKE2FS: "e2fsprogs"}  # by program
_KERNEL_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual")  # of Debian, of Ubuntu


class Unavailable(Exception):
    """What the guest is made of cannot be had here; the message names it."""


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
    system = platform.freedesktop_os_release()
    # A folder that is shared with another system holds libraries for that one.
    cache = cache / f"{system['ID']}-{system.get('VERSION_ID', 'rolling')}"
    apt = _Apt(cache / "apt")
    (kernel,) = (_unpacked(cache / "kernel", apt, _kernel_packages) / "boot").glob("vmlinuz-*")
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path}
    options: list[str] = []
    missing = [package for name, package in _PACKAGES.items() if not shutil.which(name, path=path)]
    if missing:
        root = _unpacked(cache / "-".join(missing), apt, lambda apt: _with_needed(apt, missing))
        folders = [f"{root}/{top}{name}" for top in ("", "usr/") for name in ("sbin", "bin")]
        environment["PATH"] = ":".join([path, *folders])
        libraries = [f"{root}/{top}lib/x86_64-linux-gnu" for top in ("", "usr/")]
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
        for firmware in ("qemu", "seabios"):
            options += ["-L", f"{root}/usr/share/{firmware}"]
    emulator, mke2fs = (_program(name, environment["PATH"]) for name in _PACKAGES)
    return Virtual((emulator, *options), mke2fs, environment, kernel)


def _program(name: str, path: str) -> str:
    found = shutil.which(name, path=path)
    if found is None:
        raise Unavailable(f"the package {_PACKAGES[name]} has no program {name}")
    return found


class _Apt:
    """apt, with the system's package lists; with lists of our own once those are of no use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._options: list[str] = []

    def __call__(self, program: str, *words: str, cwd: Path | None = None) -> str:
        command = [program, *self._options, *words]
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env={**os.environ, "LC_ALL": "C"},  # its answers are read
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise Unavailable(f"there is no {program}: this is neither Debian nor Ubuntu") from None
        if done.returncode:
            raise Unavailable(f"{' '.join(command)}:\n{done.stderr.strip()}")
        return done.stdout

    def fetch_lists(self) -> bool:
        """Fetch package lists into our folder and use them; False where that was done before."""
        if self._options:
            return False
        for name in ("lists/partial", "cache/archives/partial"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._options = [
            f"-oDir::State::lists={self._folder}/lists",
            f"-oDir::Cache={self._folder}/cache",
        ]
        self("apt-get", "update", "-oAPT::Update::Error-Mode=any")
        return True


def _with_needed(apt: _Apt, packages: list[str]) -> list[str]:
    """Return packages and those they need, but for what is installed."""
    said = apt("apt-get", "install", "--simulate", "--no-install-recommends", *packages)
    return re.findall(r"^Inst (\S+)", said, re.MULTILINE)


def _kernel_packages(apt: _Apt) -> list[str]:
    """Return the package that the newest kernel for virtual machines is in."""
    known = apt("apt-cache", "pkgnames", "linux-image-").split()
    name = next((name for name in _KERNEL_PACKAGES if name in known), None)
    if name is None:
        raise Unavailable(f"apt knows none of the packages {', '.join(_KERNEL_PACKAGES)}")
    found = re.findall(r"Depends: (linux-image-\d\S*)", apt("apt-cache", "depends", name))
    if not found:
        raise Unavailable(f"the package {name} names no kernel")
    return found[:1]


def _unpacked(folder: Path, apt: _Apt, packages: Callable[[_Apt], list[str]]) -> Path:
    """Return the folder with packages unpacked in it, whole: they are fetched where it is not."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        downloads, root = Path(scratch, "downloads"), Path(scratch, "root")
        downloads.mkdir()
        try:
            _download(apt, packages, downloads)
        except Unavailable:
            # Lists that are missing or that name packages which have been replaced since.
            if not apt.fetch_lists():
                raise
            _download(apt, packages, downloads)
        for package in sorted(downloads.glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
        os.rename(root, folder)
    return folder


def _download(apt: _Apt, packages: Callable[[_Apt], list[str]], into: Path) -> None:
    names = packages(apt)
    print(f"fetching {len(names)} packages: {' '.join(names)}", flush=True)
    apt("apt-get", "download", *names, cwd=into)
