"""The side file of a named file of slots: what each slot is called, for the next process."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hostmem import ResourceBusyError
from hostmem.files import lock, lock_holder, set_room_aside, unlock, write_at
from kvtier.transfer.slot_record import (
    HEADER_BYTES,
    LAYOUT_BYTES,
    RECORD_BYTES,
    Header,
    Record,
)

__all__ = ["SlotIndex"]

log = logging.getLogger("kvtier")

Ids = NDArray[np.int32]

_READ_SLOTS = 8192  # records read at once


class SlotIndex:
    """A record on disk of each slot that is whole, written behind its data.

    Who overwrites a slot calls `claim`, then `begin`, writes the data, and calls `finish`. The
    record is gone before the first byte of the slot changes, and there again after the last one
    did. So whenever the process is killed, a record names bytes that are there; should the machine
    go down and lose some of them, the checksum in it tells. May be used from any thread.

    The file is locked for this process until `close`.

    Parameters
    ----------
    path : str
        The side file; made where there is none.
    slot_size : int
        Bytes of a slot.
    layout : bytes
        What the bytes of a page mean; at most 256 bytes.
    compression : str, optional
        How pages are packed in their slots.

    Raises
    ------
    ValueError
        The file is of another slot size, layout, compression or format, or of something else; the
        layout is too long.
    ResourceBusyError
        Somebody else uses it (``path``, ``pid``: a process or None).
    OSError
        It cannot be opened, locked, read or written.
    """

    def __init__(
        self, path: str, slot_size: int, layout: bytes, compression: str | None = None
    ) -> None:
        if len(layout) > LAYOUT_BYTES:
            raise ValueError(f"layout: {len(layout)} bytes, above the bound of {LAYOUT_BYTES}")
        self.path = path
        self.torn = 0
        """Records found at the start that were not whole, or of another slot or file."""
        self._lock = threading.Lock()  # held during I/O
        self._claiming = threading.Lock()  # never held for long: claims are made by callers
        self._generation = 0
        self._slots = 0
        # Of each slot: who claimed it last, and whose record may be on disk, torn or not; 0: none.
        self._claims = np.zeros(0, np.uint64)
        self._recorded = np.zeros(0, np.uint64)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        _open.add(self)
        try:
            if not lock(self._fd):
                raise _busy(path, self._fd)
            self._identity = self._header(slot_size, layout, compression or "").identity
        except BaseException:
            self.close()
            raise

    def _header(self, slot_size: int, layout: bytes, compression: str) -> Header:
        """Read the header, or write one where there is none that could be believed."""
        data = os.pread(self._fd, HEADER_BYTES, 0)
        try:
            header = Header.unpack(data)
        except ValueError as error:
            raise ValueError(f"{self.path} {error}; remove it or use another directory") from None
        if header is None:
            if data.strip(b"\0"):
                log.error("the header of %s is damaged: none of its slots come back", self.path)
            header = Header.new(slot_size, layout, compression)
            os.ftruncate(self._fd, 0)
            write_at(self._fd, 0, header.pack())
        for what, there, wanted in (
            ("slots of", f"{header.slot_size} bytes", f"{slot_size} bytes"),
            ("layout", header.layout.hex() or "none", layout.hex() or "none"),
            ("compression", header.compression or "none", compression or "none"),
        ):
            if there != wanted:
                raise ValueError(
                    f"{self.path} is of {what} {there}, not of {what} {wanted}; remove it or use "
                    "another directory"
                )
        return header

    # ---------------------------------------------------------------------------- at the start

    def load(self, slots: int) -> list[Record]:
        """Read the records of slots below ``slots``, oldest first; forget all others.

        Of records of the same name the newest counts.
        """
        found: dict[bytes, Record] = {}
        refused: list[int] = []
        os.ftruncate(self._fd, HEADER_BYTES + slots * RECORD_BYTES)
        self._resized(slots)
        for first in range(0, slots, _READ_SLOTS):
            count = min(_READ_SLOTS, slots - first)
            data = os.pread(self._fd, count * RECORD_BYTES, HEADER_BYTES + first * RECORD_BYTES)
            table = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)
            for place in np.flatnonzero(table.any(axis=1)).tolist():
                slot = first + place
                record = Record.unpack(table[place].tobytes(), slot, self._identity)
                if record is None:
                    self.torn += 1
                    refused.append(slot)
                    continue
                self._generation = max(self._generation, record.generation)
                other = found.get(record.name)
                if other is None or other.generation < record.generation:
                    found[record.name], record = record, other
                if record is not None:
                    refused.append(record.slot)
        if self.torn:
            log.warning(
                "%d records in %s are torn or not its own: those slots do not come back",
                self.torn,
                self.path,
            )
        records = sorted(found.values(), key=lambda record: (record.generation, record.slot))
        self._recorded[[record.slot for record in records] + refused] = 1
        self._erase(np.array(sorted(refused), np.int64))
        return records

    # ------------------------------------------------------------------------------ at work

    def claim(self, ids: Ids) -> int:
        """Say that slots will be written or forgotten; only the last who did may write records.

        Of slots that are not there nothing is said. Does not wait for I/O.
        """
        with self._claiming:
            self._generation += 1
            ids = ids[ids < len(self._claims)]  # the file may have got smaller just now
            self._claims[ids] = self._generation
            return self._generation

    def begin(self, first: int, count: int) -> None:
        """Take the records of slots away, before the slots are overwritten.

        Raises
        ------
        OSError
            They are still there; the slots must stay as they are.
        """
        with self._lock:
            self._erase(first + np.flatnonzero(self._recorded[first : first + count]))

    def finish(
        self,
        first: int,
        names: Sequence[bytes],
        stored: Sequence[int],
        checksums: NDArray[np.uint32],
        claim: int,
    ) -> None:
        """Write the records of slots that are whole; of those with an empty name there is none.

        A slot that was claimed since gets no record either. ``stored`` says how many bytes of each
        slot hold something, ``checksums`` what of.

        Raises
        ------
        OSError
            Some of them do not come back.
        """
        count = len(names)
        found = zip(names, stored, checksums.tolist(), strict=True)
        records = [
            Record(slot, length, crc, claim, name).pack(self._identity) if name else _NOTHING
            for slot, (name, length, crc) in enumerate(found, first)
        ]
        with self._lock:
            # A claim made from here on is of somebody who will take the record away again.
            with self._claiming:
                lost = np.flatnonzero(self._claims[first : first + count] != claim)
            for n in lost.tolist():
                records[n] = _NOTHING
            there = [n for n, record in enumerate(records) if record is not _NOTHING]
            if there:
                self._recorded[first + np.array(there)] = claim  # also if it is written in part
                write_at(self._fd, HEADER_BYTES + first * RECORD_BYTES, b"".join(records))

    def forget(self, ids: Ids, claim: int) -> None:
        """Take the records of slots away, but for those of whoever claimed them since.

        Raises
        ------
        OSError
            Some of them are still there.
        """
        with self._lock:
            ids = ids[ids < self._slots]
            recorded = self._recorded[ids]
            self._erase(np.sort(ids[(recorded > 0) & (recorded < claim)]))

    def _erase(self, slots: NDArray[np.integer]) -> None:
        """Overwrite the records of slots, which ascend, with zeros."""
        if not len(slots):
            return
        runs = [slots]
        if int(slots[-1] - slots[0]) >= len(slots):
            runs = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
        for run in runs:
            write_at(self._fd, HEADER_BYTES + int(run[0]) * RECORD_BYTES, _NOTHING * len(run))
            self._recorded[run] = 0

    def resize(self, slots: int) -> None:
        """Have room for the records of that many slots; those of slots beyond are gone.

        Raises
        ------
        OSError
            There is no room; nothing has changed.
        """
        with self._lock:
            end, before = (HEADER_BYTES + n * RECORD_BYTES for n in (slots, self._slots))
            if slots <= self._slots:
                os.ftruncate(self._fd, end)
            else:
                try:
                    set_room_aside(self._fd, before, end - before)
                except OSError:
                    os.ftruncate(self._fd, before)
                    raise
            self._resized(slots)

    def _resized(self, slots: int) -> None:
        kept = min(slots, self._slots)
        claims, recorded = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        recorded[:kept] = self._recorded[:kept]
        with self._claiming:
            claims[:kept] = self._claims[:kept]
            self._claims = claims
        self._slots, self._recorded = slots, recorded

    # ------------------------------------------------------------------------------ at the end

    def sync(self) -> None:
        """Have the records on the disk itself; blocks for as long as that takes."""
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Let others have the file. Idempotent."""
        if self._fd >= 0:
            unlock(self._fd)  # a child that was forked just now may have it for a moment more
            self.abandon()

    def abandon(self) -> None:
        """Close the file, as a forked child does: the lock stays with the other process."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_NOTHING = bytes(RECORD_BYTES)
"""The record of a slot that holds nothing."""

_open: weakref.WeakSet[SlotIndex] = weakref.WeakSet()


def _forked() -> None:
    """Close the files in a forked child: it would hold the locks after its parent's death."""
    for index in list(_open):
        index.abandon()


os.register_at_fork(after_in_child=_forked)


def _busy(path: str, fd: int) -> ResourceBusyError:
    pid = lock_holder(fd)
    who = "another process" if pid is None else f"process {pid}"
    return ResourceBusyError(
        f"{path} is in use by {who}; wait until it ends, or use another directory",
        path=path,
        pid=pid,
    )
