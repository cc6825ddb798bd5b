"""What is on disk beside the slots of a named file: a header, and a record of each slot.

All numbers are little-endian. A record is found by its slot and believed by its checksum: one that
was written in part, that belongs to another slot or to a file that was here before, is not.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

__all__ = ["HEADER_BYTES", "LAYOUT_BYTES", "NAME_BYTES", "RECORD_BYTES", "Header", "Record"]

HEADER_BYTES = 4096
"""Length of the header, with zeros at its end: records begin on a page."""

RECORD_BYTES = 128
"""Length of a record: one never lies in two sectors."""

NAME_BYTES = 64
"""Length that no name of a slot exceeds."""

LAYOUT_BYTES = 256
"""Length that no layout exceeds."""

_MAGIC = b"kvtslots"
_VERSION = 1
# Magic, checksum of what follows it in the header, version; size of a slot, identity, compression,
# length of the layout, which comes next. Of another version only the first three are known.
_PREFIX = struct.Struct("<8sII")
_HEADER = struct.Struct("<Q8s32sH")
# Checksum of the rest; slot, bytes stored, checksum of the page, generation, identity, length of
# the name, name.
_CHECKSUM = struct.Struct("<I")
_RECORD = struct.Struct("<IIIQ8sH64s30x")


@dataclass(frozen=True, slots=True)
class Header:
    """What all slots of a file have in common."""

    slot_size: int
    """Bytes of a slot."""
    layout: bytes
    """What the bytes of a page mean."""
    compression: str
    """How pages are packed in their slots; empty where they lie there as they are."""
    identity: bytes
    """Eight random bytes, which are in each record too."""

    @classmethod
    def new(cls, slot_size: int, layout: bytes, compression: str) -> Header:
        """Make the header of a new file."""
        return cls(slot_size, layout, compression, os.urandom(8))

    def pack(self) -> bytes:
        """Write it, as `HEADER_BYTES` bytes."""
        how = self.compression.encode("ascii")
        body = _HEADER.pack(self.slot_size, self.identity, how, len(self.layout)) + self.layout
        body = body.ljust(HEADER_BYTES - _PREFIX.size, b"\0")
        return _PREFIX.pack(_MAGIC, zlib.crc32(body, _VERSION), _VERSION) + body

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """Read it; None for a file that is empty, all zero here or damaged.

        Raises
        ------
        ValueError
            It is no such file, or of another version; the message lacks the path.
        """
        if not data.strip(b"\0"):
            return None
        if len(data) < _PREFIX.size or data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("is a file of something else: no records of slots are in it")
        _, checksum, version = _PREFIX.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"has format {version}, and this release reads format {_VERSION}")
        body = data[_PREFIX.size :]
        if len(data) != HEADER_BYTES or zlib.crc32(body, _VERSION) != checksum:
            return None
        slot_size, identity, how, length = _HEADER.unpack_from(body)
        layout = body[_HEADER.size : _HEADER.size + length]
        return cls(slot_size, layout, how.rstrip(b"\0").decode("ascii"), identity)


@dataclass(frozen=True, slots=True)
class Record:
    """What one slot holds."""

    slot: int
    """Where."""
    stored: int
    """Bytes of it that hold something; 0: all of them."""
    checksum: int
    """CRC-32 of its page."""
    generation: int
    """Higher than that of any record written before."""
    name: bytes
    """What it is called; at most `NAME_BYTES`."""

    def pack(self, identity: bytes) -> bytes:
        """Write it, as `RECORD_BYTES` bytes, for the file of that identity."""
        body = _RECORD.pack(
            self.slot,
            self.stored,
            self.checksum,
            self.generation,
            identity,
            len(self.name),
            self.name,
        )
        return _CHECKSUM.pack(zlib.crc32(body)) + body

    @classmethod
    def unpack(cls, data: bytes, slot: int, identity: bytes) -> Record | None:
        """Read the record of a slot; None for what is not whole, or of another slot or file."""
        body = data[_CHECKSUM.size :]
        if _CHECKSUM.unpack_from(data)[0] != zlib.crc32(body):
            return None
        found, stored, checksum, generation, owner, length, name = _RECORD.unpack(body)
        if found != slot or owner != identity:
            return None
        return cls(slot, stored, checksum, generation, name[:length])
