"""Transfers of slots: neighbours together, checked, and slot by slot where that fails."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostmem import DiskOOMError
from hostmem.files import checksums
from hostmem.spans import span
from hostmem.units import format_size
from kvtier.transfer.checksums import Checksums
from kvtier.transfer.compression import CompressionStats
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import BatchEvent
from kvtier.transfer.slot_bytes import SlotBytes
from kvtier.transfer.slot_index import SlotIndex

__all__ = ["FULL", "Run", "SlotIO", "SlotIOStats", "SlotReadError", "SlotRequest", "no_room"]

log = logging.getLogger("kvtier")

Addresses = NDArray[np.uint64]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the kernel says where there is no room."""


class SlotReadError(OSError):
    """What a slot held cannot be had: not read, cut off, or (EBADMSG) not what was written."""


@dataclass(frozen=True, slots=True)
class Run:
    """Slots that are neighbours in the file, and pages of one batch."""

    first: int
    """The first slot."""
    places: list[int]
    """Place in the batch of the page that each slot holds."""
    addresses: Addresses
    """Where each slot's bytes are, or go."""
    names: Sequence[bytes] = ()
    """What each slot that is written will be called; empty where none comes back."""

    def one(self, n: int) -> Run:
        """Give one of the slots alone."""
        part = slice(n, n + 1)
        return Run(self.first + n, self.places[part], self.addresses[part], self.names[part])


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """What one thread is to move, run by run."""

    batch: BatchEvent
    """Stands for this request and others."""
    pages: int
    """Pages of the whole batch."""
    runs: list[Run]
    """The slots."""
    after: Dependencies
    """What must have happened before."""
    writes: bool
    """Whether from memory to the file."""
    claim: int = 0
    """Of the slots, by the index of the file, if they are written."""


@dataclass(frozen=True, slots=True)
class SlotIOStats:
    """What a file of slots moved so far, and what went wrong."""

    writes: int = 0
    """Requests to write slots that succeeded; neighbours are one request unless compressed."""
    bytes_written: int = 0
    """Bytes that these wrote to the file."""
    reads: int = 0
    """Requests to read slots that succeeded."""
    bytes_read: int = 0
    """Bytes that these read from the file."""
    write_failures: int = 0
    """Slots not written, or without the record that they need to come back."""
    read_failures: int = 0
    """Slots not read, corrupt ones included."""
    corrupt: int = 0
    """Slots read that are not what was written."""
    forget_failures: int = 0
    """Slots that were forgotten, and whose record could not be taken away: they may come back."""
    restored: int = 0
    """Slots that came back when the file was opened."""
    torn: int = 0
    """Records found then that were not whole, or of another slot or file; their slots are lost."""
    compression: CompressionStats | None = None
    """What compression did; None where there is none."""


class SlotIO:
    """Reads and writes slots of one file, for worker threads.

    Parameters
    ----------
    data : SlotBytes
        Moves what the slots hold.
    folder : str
        Where the file is, for messages.
    slot_size : int
        Bytes of a slot.
    sums : Checksums
        What its slots hold; kept up to date by writes.
    index : SlotIndex, optional
        What its slots are called; kept up to date by writes.
    """

    def __init__(
        self,
        data: SlotBytes,
        folder: str,
        slot_size: int,
        sums: Checksums,
        index: SlotIndex | None = None,
    ) -> None:
        self._data = data
        self._folder = folder
        self._slot_size = slot_size
        self._sums = sums
        self._index = index
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Take the figures of this moment, as fields of `SlotIOStats`."""
        with self._lock:
            return dict(self._counts)

    @span("read or write slots", "disk", domain="kvtier")
    def perform(self, request: SlotRequest) -> None:
        """Wait for what must have happened, move the slots and tell the batch; raises nothing."""
        failures: dict[int, BaseException] = {}
        rest = request.runs
        try:
            missing = request.after.wait(request.pages)
            while rest:
                failures.update(self._move(rest[0], missing, request))
                rest = rest[1:]
        except BaseException as error:  # it belongs to whoever needs the pages
            for run in rest:
                failures.update(dict.fromkeys(run.places, error))
        request.batch.part_done(failures)

    def _move(
        self, run: Run, missing: Mapping[int, BaseException], request: SlotRequest
    ) -> Mapping[int, BaseException]:
        """Move a run but for pages that are missing; the pages that failed, by their place."""
        failures = {place: missing[place] for place in run.places if place in missing}
        cause: OSError | None = None
        if not failures:
            try:
                self._transfer(run, request)
            except OSError as error:
                cause = error
            else:
                return failures
        failed: dict[int, OSError] = {}
        for n, place in enumerate(run.places):
            if place in failures:
                continue
            if cause is None or len(run.places) > 1:
                try:
                    self._transfer(run.one(n), request)
                except OSError as error:
                    cause = error
                else:
                    continue
            failed[n] = cause
        if failed:
            self._note(run, request.writes, failed)
        told = self._write_error if request.writes else _read_error
        return failures | {run.places[n]: told(error) for n, error in failed.items()}

    def _transfer(self, run: Run, request: SlotRequest) -> None:
        if request.writes:
            self._write(run, request.claim)
        else:
            self._read(run.first, run.addresses)

    def _write(self, run: Run, claim: int) -> None:
        # Noted before: a slot that is written in part is neither what it was nor what it should be.
        sums = checksums(run.addresses, self._slot_size)
        self._sums.note(run.first, sums)
        if self._index is not None:
            self._index.begin(run.first, len(run.places))
        moved = self._data.write(run.first, run.addresses)
        if self._index is not None and any(run.names):
            stored = self._data.stored(run.first, len(run.places))
            self._index.finish(run.first, run.names, stored, sums, claim)
        self._count(writes=moved.requests, bytes_written=moved.nbytes)

    def _read(self, first: int, addresses: Addresses) -> None:
        moved = self._data.read(first, addresses)
        sums = checksums(addresses, self._slot_size)
        for n in self._sums.differing(first, sums).tolist():
            at = (first + n) * self._slot_size
            raise OSError(
                errno.EBADMSG,
                f"slot {first + n} at file offset {at} of a file in {self._folder} "
                f"is corrupt: its {self._slot_size} bytes are not those that were written",
            )
        self._count(reads=moved.requests, bytes_read=moved.nbytes)

    def forget(self, ids: NDArray[np.int32], claim: int) -> None:
        """Take the records of slots away, where there is an index; raises nothing."""
        if self._index is None:
            return
        try:
            self._index.forget(ids, claim)
        except OSError as error:
            self._count(forget_failures=len(ids))
            log.error(
                "%d slots in %s may come back, though forgotten: %s", len(ids), self._folder, error
            )

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _note(self, run: Run, writes: bool, failed: Mapping[int, OSError]) -> None:
        """Count failed slots and log them, in one line a run."""
        corrupt = sum(error.errno == errno.EBADMSG for error in failed.values())
        if writes:
            self._count(write_failures=len(failed))
        else:
            self._count(read_failures=len(failed), corrupt=corrupt)
        log.error(
            "%d of %d slots in %s were not %s, %d of them corrupt, at file offsets %s: %s",
            len(failed),
            len(run.places),
            self._folder,
            "written" if writes else "read",
            corrupt,
            [(run.first + n) * self._slot_size for n in failed],
            next(iter(failed.values())),
        )

    def _write_error(self, error: OSError) -> BaseException:
        if error.errno not in FULL:
            return error
        told = no_room(self._folder, self._slot_size, error)
        told.__cause__ = error
        return told


def _read_error(error: OSError) -> SlotReadError:
    told = SlotReadError(error.errno, error.strerror)
    told.__cause__ = error
    return told


def no_room(folder: str, nbytes: int, error: OSError) -> DiskOOMError:
    """Say that a directory had no room for so many bytes."""
    try:
        found = os.statvfs(folder)
        free = found.f_bavail * found.f_frsize
    except OSError:
        free = 0  # the directory is gone too
    return DiskOOMError(
        f"no room for {format_size(nbytes)} in {folder}, where {format_size(free)} are free: "
        f"{error.strerror}; lower the quota or free space",
        path=folder,
        nbytes=nbytes,
        free=free,
    )
