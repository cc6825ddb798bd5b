"""Compression of the disk level: what a slot of a file holds when its page was made smaller.

A page keeps its slot, so compression saves the disk's time and not its space. What is stored begins
with a header that says how long the rest is and what its checksum is; a page that does not get
smaller is stored as it is, and known by its length. Lengths are multiples of 4 KiB, for direct I/O.
"""

from __future__ import annotations

import errno
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from time import thread_time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hostmem.units import align_up
from kvtier.transfer.unnamed_file import DIRECT_GRAIN

__all__ = ["COMPRESSIONS", "Blosc2", "Compression", "CompressionStats", "SlotPacker", "compression"]

Bytes = NDArray[np.uint8]

# Magic with a version, bytes of the page, bytes behind the header, their CRC-32, and the CRC-32 of
# what is before it.
_HEADER = struct.Struct("<8sQQII")
_MAGIC = b"kvtpage\1"


class Compression(Protocol):
    """Makes bytes fewer. Called by several threads at once."""

    def compress(self, data: Bytes) -> bytes:
        """Give the bytes in a shorter form; a longer one is taken for a page that stays as it is.

        Releases the interpreter's lock for most of the time, or the disk waits for it.

        Raises
        ------
        Exception
            Any: the page stays where it was.
        """

    def decompress(self, data: Bytes, out: Bytes) -> None:
        """Undo `compress` into memory of the original size.

        Raises
        ------
        Exception
            Any: it was not made by `compress`, or of a page of another size.
        """


class Blosc2:
    """Zstandard over bytes sorted by their place in an item, by the ``blosc2`` module.

    Numbers of two bytes differ in their low bytes and resemble each other in the high ones: only
    apart do these compress. See `docs/codecs.md` for what it gains and costs.

    Parameters
    ----------
    item_bytes : int
        Bytes of a number, such as 2 for bfloat16.

    Raises
    ------
    ModuleNotFoundError
        There is no such module; ``pip install hostmem[blosc2]``.
    """

    def __init__(self, item_bytes: int = 2) -> None:
        blosc2: Any = import_module("blosc2")
        self._compress, self._decompress = blosc2.compress2, blosc2.decompress2
        self._how = {
            "codec": blosc2.Codec.ZSTD,
            "clevel": 1,
            "typesize": item_bytes,
            "filters": [blosc2.Filter.SHUFFLE],
            "filters_meta": [0],
            "nthreads": 1,  # there is a thread for each request already
        }

    def compress(self, data: Bytes) -> bytes:
        """Give the bytes in a shorter form."""
        made: bytes = self._compress(data, **self._how)
        return made

    def decompress(self, data: Bytes, out: Bytes) -> None:
        """Undo `compress`."""
        self._decompress(data, out, nthreads=1)


COMPRESSIONS: Mapping[str, Callable[[], Compression]] = {"blosc2": Blosc2}
"""By the names that a configuration gives them: those of the modules, and of our extras."""


def compression(name: str) -> Compression:
    """Make a compression.

    Raises
    ------
    ValueError
        There is none of that name, or its module is not installed.
    """
    if name not in COMPRESSIONS:
        raise ValueError(f"compression: {name!r} is none of {', '.join(map(repr, COMPRESSIONS))}")
    try:
        return COMPRESSIONS[name]()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"compression: {name!r} needs a module that is not there ({error}); "
            f"pip install hostmem[{name}]"
        ) from error


@dataclass(frozen=True, slots=True)
class CompressionStats:
    """What compression did so far."""

    packed_pages: int = 0
    """Pages on their way to the file, those that stayed as they are included."""
    raw_pages: int = 0
    """Pages of these that did not get smaller."""
    packed_bytes: int = 0
    """Bytes of the pages."""
    stored_bytes: int = 0
    """Bytes of what is stored for them: header and rounding included."""
    packing_seconds: float = 0.0
    """Processor time, of all threads together."""
    unpacked_bytes: int = 0
    """Bytes of pages on their way back."""
    unpacking_seconds: float = 0.0
    """Processor time, of all threads together."""

    @property
    def ratio(self) -> float:
        """Bytes of the pages for one that is stored; 1.0 while there are none."""
        return self.packed_bytes / self.stored_bytes if self.stored_bytes else 1.0

    @property
    def packing_rate(self) -> float:
        """Bytes of pages that one core packs in a second; 0.0 while there are none."""
        return self.packed_bytes / self.packing_seconds if self.packing_seconds else 0.0

    @property
    def unpacking_rate(self) -> float:
        """Bytes of pages that one core unpacks in a second; 0.0 while there are none."""
        return self.unpacked_bytes / self.unpacking_seconds if self.unpacking_seconds else 0.0


class SlotPacker:
    """Turns pages into what is stored in the slots of one file, and back. For any thread.

    Parameters
    ----------
    compression : Compression
        Makes the bytes fewer.
    slot_size : int
        Bytes of a page and of its slot.
    """

    def __init__(self, compression: Compression, slot_size: int) -> None:
        self._compression = compression
        self._slot_size = slot_size
        self._lock = threading.Lock()
        self._stats = CompressionStats()

    def stats(self) -> CompressionStats:
        """Take the figures of this moment."""
        return self._stats

    def pack(self, page: Bytes, room: Bytes) -> Bytes:
        """Give what to store for a page.

        Parameters
        ----------
        page : uint8 array, shape (slot_size,)
            The page, which stays as it is.
        room : uint8 array, shape (slot_size,)
            Memory to use.

        Returns
        -------
        uint8 array
            The beginning of ``room``, in a multiple of 4 KiB that is less than a slot; or the
            page, where that would not be less.

        Raises
        ------
        OSError
            EIO: the compression failed.
        """
        began = thread_time()
        stored = self._pack(page, room)
        self._count(
            packed_pages=1,
            raw_pages=int(stored is page),
            packed_bytes=len(page),
            stored_bytes=len(stored),
            packing_seconds=thread_time() - began,
        )
        return stored

    def _pack(self, page: Bytes, room: Bytes) -> Bytes:
        if self._slot_size > DIRECT_GRAIN:
            try:
                made = self._compression.compress(page)
            except Exception as error:
                raise OSError(errno.EIO, f"a page cannot be compressed: {error}") from error
            end = _HEADER.size + len(made)
            length = align_up(end, DIRECT_GRAIN)
            if length < self._slot_size:
                head = _MAGIC, self._slot_size, len(made), zlib.crc32(made)
                room[: _HEADER.size] = np.frombuffer(_sealed(*head), np.uint8)
                room[_HEADER.size : end] = np.frombuffer(made, np.uint8)
                room[end:length] = 0
                return room[:length]
        return page

    def unpack(self, stored: Bytes, page: Bytes) -> None:
        """Turn what is stored into the page again.

        Parameters
        ----------
        stored : uint8 array
            What `pack` gave.
        page : uint8 array, shape (slot_size,)
            Where the page goes.

        Raises
        ------
        OSError
            EBADMSG: it is not what `pack` made, or of a page of another size. The memory may hold
            anything.
        """
        began = thread_time()
        self._unpack(stored, page)
        self._count(unpacked_bytes=len(page), unpacking_seconds=thread_time() - began)

    def _unpack(self, stored: Bytes, page: Bytes) -> None:
        if len(stored) == len(page):
            page[:] = stored
            return
        size, length, crc = _header(stored)
        body = stored[_HEADER.size : _HEADER.size + length]
        if size != len(page):
            raise _corrupt(f"it is of a page of {size} bytes, not of {len(page)}")
        if len(body) != length or zlib.crc32(body.data) != crc:
            raise _corrupt("its checksum is another")
        try:
            self._compression.decompress(body, page)
        except Exception as error:
            raise _corrupt(str(error)) from error

    def _count(self, **more: float) -> None:
        with self._lock:
            sums = {name: getattr(self._stats, name) + value for name, value in more.items()}
            self._stats = replace(self._stats, **sums)


def _sealed(magic: bytes, size: int, length: int, crc: int) -> bytes:
    head = _HEADER.pack(magic, size, length, crc, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def _header(stored: Bytes) -> tuple[int, int, int]:
    """Give bytes of the page, bytes behind the header and their CRC; OSError without a header."""
    head = stored[: _HEADER.size].tobytes()
    if len(head) == _HEADER.size:
        magic, size, length, crc, _ = _HEADER.unpack(head)
        if magic == _MAGIC and head == _sealed(magic, size, length, crc):
            return size, length, crc
    raise _corrupt(f"{len(stored)} bytes without a header")


def _corrupt(why: str) -> OSError:
    return OSError(errno.EBADMSG, f"what is stored in the slot is no packed page: {why}")
