"""Slots in a file: room set aside, past the page cache where that works, and never in the way."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError
from hostmem.files import set_room_aside
from kvtier.transfer.checksums import Checksums
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import BatchEvent, PageEvents
from kvtier.transfer.slot_io import FULL, SlotIO, SlotIOStats, SlotRequest, no_room
from kvtier.transfer.unnamed_file import DIRECT_GRAIN, open_unnamed
from kvtier.transfer.workers import Workers

__all__ = ["SlotFile"]

log = logging.getLogger("kvtier")

Ids = NDArray[np.int32]
Addresses = NDArray[np.uint64]

_WORKERS = 4
# A request keeps one worker busy, and costs it a few turns at the interpreter: a small batch is
# spread over the workers, a large one is cut into fewer and larger requests.
_FULL_REQUEST, _LARGEST_REQUEST = 2 << 20, 8 << 20


class SlotFile:
    """A file without a name that holds slots, and the threads that read and write it.

    Every slot is checked when it is read: one that is not what was written fails, as one that
    cannot be read does, and others of the same call do not.

    Parameters
    ----------
    folder : str
        An existing directory. The file vanishes with its last descriptor, also after a crash.
    slot_size : int
        Bytes of a slot; multiples of 4 KiB bypass the page cache where the directory allows it.
    slots : int
        Slots to set room aside for.

    Raises
    ------
    DiskOOMError
        The file system has no room (``path``, ``nbytes`` wanted, ``free``); nothing was kept.
    OSError
        The directory cannot be used.
    """

    def __init__(self, folder: str, slot_size: int, slots: int) -> None:
        self.folder = folder
        self.slot_size = slot_size
        self.slots = 0
        self.reserved = True
        """Whether the file system has set the room aside; if not, a full disk shows in writes."""
        wanted = slot_size % DIRECT_GRAIN == 0
        self._fd, self.direct = open_unnamed(folder, direct=wanted)
        self._sums = Checksums(slot_size)
        self._io = SlotIO(self._fd, folder, slot_size, self._sums)
        self._workers: Workers | None = None
        self._closed = False
        try:
            self.resize(slots)
            self._workers = Workers("kvtier-disk", _WORKERS)
        except BaseException:
            self.close()
            raise

    def resize(self, slots: int) -> None:
        """Set room aside for more slots, or cut the file; slots below stay as they are.

        Raises
        ------
        DiskOOMError
            There is no room; nothing has changed.
        """
        size = slots * self.slot_size
        if slots < self.slots:
            os.ftruncate(self._fd, size)
        elif slots > self.slots:
            start = self.slots * self.slot_size
            try:
                reserved = set_room_aside(self._fd, start, size - start)
            except OSError as error:
                os.ftruncate(self._fd, start)
                if error.errno in FULL:
                    raise no_room(self.folder, size, error) from error
                raise
            if self.reserved and not reserved:
                log.warning(
                    "the file system of %s cannot set room aside: a full disk will fail writes",
                    self.folder,
                )
            self.reserved = reserved
        self._sums.resize(slots)
        self.slots = slots

    def stats(self) -> SlotIOStats:
        """Say what went wrong so far."""
        return self._io.stats()

    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        """Write slots from memory; returns at once.

        Parameters
        ----------
        ids : int32 array, shape (slots,)
            Distinct slots of the file.
        addresses : uint64 array, shape (slots,)
            Where each slot's bytes are; they must stay until the event.
        after : Dependencies
            What must have happened before.

        Returns
        -------
        PageEvents
            Of slot ``ids[i]`` in place i. Where no room is left, it fails with `DiskOOMError`;
            a slot that failed holds nothing that could be read, and the memory still does.

        Raises
        ------
        ClosedError
            The file was closed.
        """
        return self._submit(ids, addresses, after, writes=True)

    def read(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        """Read slots into memory; returns at once. See `write`.

        The memory of a slot that failed may hold anything.
        """
        return self._submit(ids, addresses, after, writes=False)

    def _submit(
        self, ids: Ids, addresses: Addresses, after: Dependencies, *, writes: bool
    ) -> PageEvents:
        if self._closed or self._workers is None:
            raise ClosedError(f"the slots in {self.folder} were closed")
        runs = list(self._runs(ids))
        batch = BatchEvent(len(runs))
        for places in runs:
            first = int(ids[places[0]])
            request = SlotRequest(
                batch, len(ids), first, places.tolist(), addresses[places], after, writes
            )
            self._workers.put(partial(self._io.perform, request))
        return batch

    def _runs(self, ids: Ids) -> Iterator[NDArray[np.intp]]:
        """Join slots that are neighbours in the file, up to a size that suits the batch."""
        order = np.argsort(ids, kind="stable")
        share = len(ids) * self.slot_size // _WORKERS
        size = min(max(share, _FULL_REQUEST), _LARGEST_REQUEST)
        most = max(size // self.slot_size, 1)
        breaks = np.flatnonzero(np.diff(ids[order]) != 1) + 1
        for run in np.split(order, breaks):
            for first in range(0, len(run), most):
                yield run[first : first + most]

    def close(self) -> None:
        """Finish what was submitted, end the threads and give the room back. Idempotent."""
        self._closed = True
        if self._workers is not None:
            self._workers.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
