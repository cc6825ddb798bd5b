"""Files and memory by address: vectored I/O without the GIL, room set aside, checksums, locks."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hostmem import procfs
from hostmem._sys import file_lock, linux

__all__ = [
    "checksums",
    "lock",
    "lock_holder",
    "memory_at",
    "read_ranges",
    "set_room_aside",
    "unlock",
    "write_at",
    "write_ranges",
]

Addresses = NDArray[np.uint64]


def read_ranges(fd: int, offset: int, addresses: Addresses, nbytes: int) -> None:
    """Read consecutive pieces of a file into memory ranges of ``nbytes`` each.

    Parameters
    ----------
    fd : int
        An open file; with O_DIRECT, offset, addresses and sizes are multiples of its block.
    offset : int
        Where the first piece begins in the file.
    addresses : uint64 array, shape (pieces,)
        Where each piece goes.
    nbytes : int
        Bytes of a piece.

    Raises
    ------
    OSError
        EIO for a file that ends too early, and whatever the kernel says. Memory may hold a part.
    """
    _transfer(linux.preadv, fd, offset, addresses, nbytes)


def write_ranges(fd: int, offset: int, addresses: Addresses, nbytes: int) -> None:
    """Write memory ranges of ``nbytes`` each to consecutive places of a file; see `read_ranges`.

    Raises
    ------
    OSError
        ENOSPC, EIO... The file may hold a part.
    """
    _transfer(linux.pwritev, fd, offset, addresses, nbytes)


def write_at(fd: int, offset: int, data: bytes) -> None:
    """Write bytes to a place of a file, all of them; see `write_ranges`."""
    interface = np.frombuffer(data, np.uint8).__array_interface__
    write_ranges(fd, offset, np.array([interface["data"][0]], np.uint64), len(data))


def set_room_aside(fd: int, offset: int, nbytes: int) -> bool:
    """Make a file hold a range, with room for it on the disk if the file system can.

    Returns
    -------
    bool
        Whether the room is set aside. If not, the file has the size all the same, and a full disk
        shows when the range is written.

    Raises
    ------
    OSError
        ENOSPC, EDQUOT, EFBIG: no room. Part of it may have been set aside.
    """
    try:
        linux.fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.ftruncate(fd, max(offset + nbytes, os.fstat(fd).st_size))
        return False
    return True


def lock(fd: int) -> bool:
    """Lock a file for this open file alone, until it is closed (flock); never blocks.

    Returns
    -------
    bool
        Whether it did; if not, another open file has the lock.

    Raises
    ------
    OSError
        The file system has no locks.
    """
    try:
        return file_lock.lock(fd)
    except OSError as error:
        raise OSError(error.errno, f"flock: {linux.meaning(error.errno)}") from error


def unlock(fd: int) -> None:
    """Release the lock of `lock`, also where another process has inherited the open file."""
    file_lock.unlock(fd)


def lock_holder(fd: int) -> int | None:
    """Say which process took the lock of a file; None where the kernel does not show it."""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    # "2: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF"; who waits has an arrow behind the number.
    for line in procfs.read("/proc/locks").splitlines():
        parts = line.split()
        if parts[1] == "FLOCK" and parts[5] == f"{device}:{found.st_ino}":
            return int(parts[4]) if int(parts[4]) > 0 else None
    return None


def memory_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Show a memory range as an array. The caller sees to it that the range stays."""
    return np.frombuffer(linux.buffer(address, nbytes), np.uint8)


def checksums(addresses: Addresses, nbytes: int) -> NDArray[np.uint32]:
    """Compute the CRC-32 of memory ranges of ``nbytes`` each; shape (ranges,)."""
    found = [zlib.crc32(linux.buffer(address, nbytes)) for address in addresses.tolist()]
    return np.array(found, np.uint32)


def _transfer(
    call: Callable[[int, NDArray[np.uint64], int], int],
    fd: int,
    offset: int,
    addresses: Addresses,
    nbytes: int,
) -> None:
    for first in range(0, len(addresses), linux.IOV_MAX):
        part = addresses[first : first + linux.IOV_MAX]
        table = linux.iovecs(part, nbytes)
        at = offset + first * nbytes
        end = at + len(part) * nbytes
        while at < end:
            done = call(fd, table, at)
            if done == 0:
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: the file ends at {at}")
            at += done
            if at < end:
                table = _rest(table, done)


def _rest(table: NDArray[np.uint64], done: int) -> NDArray[np.uint64]:
    """Return what is left of a vector after a short transfer."""
    ends = np.cumsum(table[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = table[first:].copy()
    into = np.uint64(done - (int(ends[first - 1]) if first else 0))
    rest[0, 0] += into
    rest[0, 1] -= into
    return rest
