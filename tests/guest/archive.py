"""The archive that Linux unpacks into memory at its start (initramfs): cpio, "newc" form.

Described in the kernel's Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

__all__ = ["Archive"]

_MAGIC = b"070701"
_ELF = b"\x7fELF"


class Archive:
    """Writes an archive, each file under the path it has here; a context manager.

    Parameters
    ----------
    file : BinaryIO
        Where it is written, from the file's position on.

    Attributes
    ----------
    programs : list of Path
        The programs and shared libraries among what was added.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.programs: list[Path] = []
        self._file = file
        self._names: set[str] = {"/"}

    def add(self, path: Path) -> None:
        """Add a file, or a symbolic link with what it leads to; nothing is added twice."""
        if str(path) in self._names:
            return
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(path)
            self.add_link(str(path), target)
            self.add(Path(os.path.normpath(path.parent / target)))
            return
        data = path.read_bytes()
        if data.startswith(_ELF):
            self.programs.append(path)
        # Byte code is valid while its source has the time of change that it names.
        self.add_data(str(path), stat.S_IMODE(found.st_mode), data, int(found.st_mtime))

    def add_data(self, name: str, mode: int, data: bytes, changed: int = 0) -> None:
        """Add a regular file: its absolute name, permissions, bytes and time of change (s)."""
        self._entry(name, stat.S_IFREG | mode, data, changed)

    def add_link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        self._entry(name, stat.S_IFLNK | 0o777, os.fsencode(target), 0)

    def _entry(self, name: str, mode: int, data: bytes, changed: int) -> None:
        if name in self._names:
            return
        self._names.add(name)
        folder = str(PurePosixPath(name).parent)
        if folder not in self._names:
            self._entry(folder, stat.S_IFDIR | 0o755, b"", 0)
        self._write(name.lstrip("/"), mode, data, changed)

    def _write(self, name: str, mode: int, data: bytes, changed: int) -> None:
        encoded = os.fsencode(name) + b"\0"
        # Number of the inode (files with one link need none), mode, owner, group, links, time of
        # change, size, two numbers each of the device and of the device it would be, length of
        # the name, checksum (none in this form).
        fields = (0, mode, 0, 0, 1, changed, len(data), 0, 0, 0, 0, len(encoded), 0)
        header = _MAGIC + b"".join(b"%08X" % field for field in fields)
        self._file.write(_padded(header + encoded))
        self._file.write(_padded(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("TRAILER!!!", 0, b"", 0)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
