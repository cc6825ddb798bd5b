"""Packages of the distribution, Debian or Ubuntu, downloaded and unpacked into folders.

Nothing is installed, so any user may do it, and nothing of the system changes.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Apt", "Packages", "Unavailable", "library_path"]


class Unavailable(Exception):
    """What is wanted cannot be had here; the message names it."""


class Packages:
    """Packages that are unpacked in folders of a cache.

    Parameters
    ----------
    cache : Path
        Folder that is kept between runs: what is in it is not downloaded again.
    """

    def __init__(self, cache: Path) -> None:
        system = platform.freedesktop_os_release()
        # A folder that is shared with another system holds libraries for that one.
        self.folder = cache / f"{system['ID']}-{system.get('VERSION_ID', 'rolling')}"
        self._apt = Apt(self.folder / "apt")

    def with_needed(self, packages: Sequence[str]) -> Path:
        """Return a folder with packages and those they need, but for what is installed.

        Raises
        ------
        Unavailable
            No apt here, no network, or no such package.
        """
        return self.unpacked("-".join(packages), lambda apt: _with_needed(apt, packages))

    def unpacked(self, name: str, packages: Callable[[Apt], list[str]]) -> Path:
        """Return the folder of that name with packages in it, whole: fetched where it is not."""
        folder = self.folder / name
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            downloads, root = Path(scratch, "downloads"), Path(scratch, "root")
            downloads.mkdir()
            try:
                self._download(packages, downloads)
            except Unavailable:
                # Lists that are missing or that name packages which have been replaced since.
                if not self._apt.fetch_lists():
                    raise
                self._download(packages, downloads)
            for package in sorted(downloads.glob("*.deb")):
                subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
            os.rename(root, folder)
        return folder

    def _download(self, packages: Callable[[Apt], list[str]], into: Path) -> None:
        names = packages(self._apt)
        print(f"fetching {len(names)} packages: {' '.join(names)}", flush=True)
        self._apt("apt-get", "download", *names, cwd=into)


def library_path(root: Path) -> str:
    """Give the ``LD_LIBRARY_PATH`` that shows programs the libraries unpacked in a folder.

    Some keep what they share in a folder below, and look for it where they would be installed.
    """
    tops = [root / top / "lib" / f"{platform.machine()}-linux-gnu" for top in ("", "usr")]
    below = {library.parent for top in tops for library in top.glob("*/*.so*")}
    return ":".join(map(str, [*tops, *sorted(below)]))


class Apt:
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


def _with_needed(apt: Apt, packages: Sequence[str]) -> list[str]:
    """Return packages and those they need, but for what is installed."""
    said = apt("apt-get", "install", "--simulate", "--no-install-recommends", *packages)
    return re.findall(r"^Inst (\S+)", said, re.MULTILINE)
