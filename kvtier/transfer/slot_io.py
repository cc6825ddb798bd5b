"""Transfers of consecutive slots: in one request, checked, and slot by slot where that fails."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostmem import DiskOOMError
from hostmem.files import checksums, read_ranges, write_ranges
from hostmem.units import format_size
from kvtier.transfer.checksums import Checksums
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import BatchEvent

__all__ = ["FULL", "SlotIO", "SlotIOStats", "SlotReadError", "SlotRequest", "no_room"]

log = logging.getLogger("kvtier")

Addresses = NDArray[np.uint64]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the kernel says where there is no room."""


class SlotReadError(OSError):
    """What a slot held cannot be had: not read, cut off, or (EBADMSG) not what was written."""


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Slots that are neighbours in the file, to be moved together."""

    batch: BatchEvent
    """Stands for this request and others."""
    pages: int
    """Pages of the whole batch."""
    first: int
    """The first slot."""
    places: list[int]
    """Place in the batch of the page that each slot holds."""
    addresses: Addresses
    """Where each slot's bytes are, or go."""
    after: Dependencies
    """What must have happened before."""
    writes: bool
    """Whether from memory to the file."""


@dataclass(slots=True)
class SlotIOStats:
    """What went wrong so far, in slots."""

    write_failures: int = 0
    """Not written."""
    read_failures: int = 0
    """Not read, corrupt ones included."""
    corrupt: int = 0
    """Read, but not what was written."""


class SlotIO:
    """Performs requests on a file, on the caller's thread.

    Parameters
    ----------
    fd : int
        The file.
    folder : str
        Its directory, for messages.
    slot_size : int
        Bytes of a slot.
    sums : Checksums
        What its slots hold; kept up to date by writes.
    """

    def __init__(self, fd: int, folder: str, slot_size: int, sums: Checksums) -> None:
        self._fd = fd
        self._folder = folder
        self._slot_size = slot_size
        self._sums = sums
        self._lock = threading.Lock()
        self._stats = SlotIOStats()

    def stats(self) -> SlotIOStats:
        """Take the figures of this moment."""
        with self._lock:
            s = self._stats
            return SlotIOStats(s.write_failures, s.read_failures, s.corrupt)

    def perform(self, request: SlotRequest) -> None:
        """Wait for what must have happened, move the slots and tell the batch; raises nothing."""
        try:
            failures = self._perform(request)
        except BaseException as error:  # it belongs to whoever needs the pages
            failures = dict.fromkeys(request.places, error)
        request.batch.part_done(failures)

    def _perform(self, request: SlotRequest) -> Mapping[int, BaseException]:
        missing = request.after.wait(request.pages)
        failures = {place: missing[place] for place in request.places if place in missing}
        transfer = self._write if request.writes else self._read
        cause: OSError | None = None
        if not failures:
            try:
                transfer(request.first, request.addresses)
            except OSError as error:
                cause = error
            else:
                return failures
        failed: dict[int, OSError] = {}
        for n, place in enumerate(request.places):
            if place in failures:
                continue
            if cause is None or len(request.places) > 1:
                try:
                    transfer(request.first + n, request.addresses[n : n + 1])
                except OSError as error:
                    cause = error
                else:
                    continue
            failed[n] = cause
        if failed:
            self._note(request, failed)
        told = self._write_error if request.writes else _read_error
        return failures | {request.places[n]: told(error) for n, error in failed.items()}

    def _write(self, first: int, addresses: Addresses) -> None:
        # Noted before: a slot that is written in part is neither what it was nor what it should be.
        self._sums.note(first, checksums(addresses, self._slot_size))
        write_ranges(self._fd, first * self._slot_size, addresses, self._slot_size)

    def _read(self, first: int, addresses: Addresses) -> None:
        read_ranges(self._fd, first * self._slot_size, addresses, self._slot_size)
        differing = self._sums.differing(first, checksums(addresses, self._slot_size))
        if len(differing):
            slot = first + int(differing[0])
            raise OSError(
                errno.EBADMSG,
                f"slot {slot} at file offset {slot * self._slot_size} of a file in {self._folder} "
                f"is corrupt: its {self._slot_size} bytes are not those that were written",
            )

    def _note(self, request: SlotRequest, failed: Mapping[int, OSError]) -> None:
        """Count failed slots and log them, in one line a request."""
        corrupt = sum(error.errno == errno.EBADMSG for error in failed.values())
        with self._lock:
            if request.writes:
                self._stats.write_failures += len(failed)
            else:
                self._stats.read_failures += len(failed)
                self._stats.corrupt += corrupt
        log.error(
            "%d of %d slots in %s were not %s, %d of them corrupt, at file offsets %s: %s",
            len(failed),
            len(request.places),
            self._folder,
            "written" if request.writes else "read",
            corrupt,
            [(request.first + n) * self._slot_size for n in failed],
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
