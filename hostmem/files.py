"""Files and memory by address: vectored I/O without the GIL, room set aside, checksums."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import linux

__all__ = ["checksums", "read_ranges", "set_room_aside", "write_ranges"]

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
            table = _rest(table, done)


def _rest(table: NDArray[np.uint64], done: int) -> NDArray[np.uint64]:
    """Return what is left of a vector after a short transfer."""
    ends = np.cumsum(table[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = table[first:].copy()
    if len(rest):
        into = np.uint64(done - (int(ends[first - 1]) if first else 0))
        rest[0, 0] += into
        rest[0, 1] -= into
    return rest
