"""Slots in a file: room set aside, past the page cache where that works, and never in the way."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError
from hostmem.files import set_room_aside
from kvtier.transfer.checksums import Checksums
from kvtier.transfer.compression import SlotPacker
from kvtier.transfer.compression import compression as make_compression
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.named_file import open_named
from kvtier.transfer.page_events import BatchEvent, PageEvents
from kvtier.transfer.slot_bytes import PackedSlots, PlainSlots, SlotBytes
from kvtier.transfer.slot_index import SlotIndex
from kvtier.transfer.slot_io import FULL, Run, SlotIO, SlotIOStats, SlotRequest, no_room
from kvtier.transfer.slot_record import NAME_BYTES
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
    """A file that holds slots, and the threads that read and write it.

    Every slot is checked when it is read: one that is not what was written fails, as one that
    cannot be read does, and others of the same call do not.

    Without a name the file vanishes with its last descriptor, also after a crash. With one it
    stays, and so do the slots that were written under names of their own: whoever opens the file
    next finds them in `restored`. A slot that was being written when the process was killed is not
    among them. `docs/disk.md` says what holds after which failure.

    Parameters
    ----------
    folder : str
        An existing directory.
    slot_size : int
        Bytes of a slot; multiples of 4 KiB bypass the page cache where the directory allows it.
    slots : int
        Slots to set room aside for. Those that a named file has beyond are gone.
    name : str, optional
        Of the file in the directory; ``name.index`` is beside it.
    layout : bytes
        What the bytes of a page mean, at most 256 bytes; a named file keeps it.
    compression : {"blosc2"}, optional
        Pack pages on their way to the file, on its threads. A slot keeps its size.

    Raises
    ------
    DiskOOMError
        The file system has no room (``path``, ``nbytes`` wanted, ``free``); nothing was kept, and
        a named file is as it was.
    ResourceBusyError
        The named file is in use, by ``pid`` if that can be told.
    ValueError
        The named file is of another slot size, layout, compression or format; the name is a path;
        the layout is too long; there is no such compression here.
    OSError
        The directory cannot be used, or locks no files.
    """

    def __init__(
        self,
        folder: str,
        slot_size: int,
        slots: int,
        *,
        name: str | None = None,
        layout: bytes = b"",
        compression: str | None = None,
    ) -> None:
        if name is not None and (name != os.path.basename(name) or name in ("", ".", "..")):
            raise ValueError(f"name: {name!r} is not a file name")
        self.folder = folder
        self.slot_size = slot_size
        self.slots = 0
        self.reserved = True
        """Whether the file system has set the room aside; if not, a full disk shows in writes."""
        self.restored: tuple[tuple[int, bytes], ...] = ()
        """Slots that came back when the file was opened, and their names: who was written first."""
        self._fd = -1
        self._index: SlotIndex | None = None
        self._workers: Workers | None = None
        self._closed = False
        self._submitting, self._closing = threading.RLock(), threading.RLock()
        self._sums = Checksums(slot_size)
        self._packer: SlotPacker | None = None
        if compression is not None:
            self._packer = SlotPacker(make_compression(compression), slot_size)
        direct = slot_size % DIRECT_GRAIN == 0
        try:
            if name is None:
                self._fd, self.direct = open_unnamed(folder, direct=direct)
            else:
                path = os.path.join(folder, name)
                self._index = SlotIndex(f"{path}.index", slot_size, layout, compression)
                self._fd, self.direct = open_named(path, direct=direct)
            self._data: SlotBytes = (
                PackedSlots(self._fd, slot_size, self._packer)
                if self._packer is not None
                else PlainSlots(self._fd, slot_size)
            )
            if self._index is not None:
                self._restore(self._index, slots)
            self.resize(slots)
            self._io = SlotIO(self._data, folder, slot_size, self._sums, self._index)
            self._workers = Workers("kvtier-disk", _WORKERS)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno in FULL:
                raise no_room(folder, slots * slot_size, error) from error
            raise

    def _restore(self, index: SlotIndex, slots: int) -> None:
        """Take over the slots that are whole in the file, of those that are wanted."""
        there = os.fstat(self._fd).st_size // self.slot_size
        os.ftruncate(self._fd, there * self.slot_size)  # a part of a slot is none
        if kept := min(there, slots):  # a copy of the file may have holes
            self._set_room_aside(0, kept * self.slot_size)
        self.slots = there
        self._sums.resize(there)
        self._data.resize(there)
        records = index.load(kept)
        for record in records:
            self._sums.note(record.slot, np.array([record.checksum], np.uint32))
            self._data.restore(record.slot, record.stored)
        self.restored = tuple((record.slot, record.name) for record in records)

    def resize(self, slots: int) -> None:
        """Set room aside for more slots, or cut the file; slots below stay as they are.

        Raises
        ------
        DiskOOMError
            There is no room; nothing has changed.
        """
        size, before = slots * self.slot_size, self.slots * self.slot_size
        try:
            if slots < self.slots:
                os.ftruncate(self._fd, size)
            elif slots > self.slots:
                self._set_room_aside(before, size - before)
            if self._index is not None:  # records of slots that are not there are not believed
                self._index.resize(slots)
        except OSError as error:
            if slots > self.slots:
                os.ftruncate(self._fd, before)
            if error.errno in FULL:
                raise no_room(self.folder, size, error) from error
            raise
        self._sums.resize(slots)
        self._data.resize(slots)
        self.slots = slots

    def _set_room_aside(self, start: int, nbytes: int) -> None:
        reserved = set_room_aside(self._fd, start, nbytes)
        if self.reserved and not reserved:
            log.warning(
                "the file system of %s cannot set room aside: a full disk will fail writes",
                self.folder,
            )
        self.reserved = reserved

    def stats(self) -> SlotIOStats:
        """Say what was moved and what went wrong so far; also of a closed file."""
        return SlotIOStats(
            **self._io.counts(),
            restored=len(self.restored),
            torn=self._index.torn if self._index is not None else 0,
            compression=self._packer.stats() if self._packer is not None else None,
        )

    def write(
        self,
        ids: Ids,
        addresses: Addresses,
        after: Dependencies,
        names: Sequence[bytes] | None = None,
    ) -> PageEvents:
        """Write slots from memory; returns at once.

        Parameters
        ----------
        ids : int32 array, shape (slots,)
            Distinct slots of the file.
        addresses : uint64 array, shape (slots,)
            Where each slot's bytes are; they must stay until the event.
        after : Dependencies
            What must have happened before.
        names : sequence of bytes, optional
            What each slot is called when a named file is opened again, at most 64 bytes; an empty
            name, or none at all: the slot does not come back. A file without a name has no use
            for them.

        Returns
        -------
        PageEvents
            Of slot ``ids[i]`` in place i. Where no room is left, it fails with `DiskOOMError`;
            so does a slot whose record could not be written. What a slot that failed holds is not
            served as anything else; the memory still holds the page.

        Raises
        ------
        ClosedError
            The file was closed.
        ValueError
            Names that are too long, or not as many as slots.
        """
        if self._index is None:
            names = None
        if names is not None:
            _check_names(names, len(ids))
        return self._submit(ids, addresses, after, names, writes=True)

    def read(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        """Read slots into memory; returns at once. See `write`.

        The memory of a slot that failed may hold anything.
        """
        return self._submit(ids, addresses, after, None, writes=False)

    def forget(self, ids: Ids) -> None:
        """Let slots not come back; returns at once. What they hold can still be read.

        It is done by the file's threads: after a crash at once, a slot may come back all the same,
        with the bytes that its name stands for. A file without a name has nothing to forget.

        Raises
        ------
        ClosedError
            The named file was closed.
        """
        index = self._index
        if index is None:
            return
        with self._submitting:
            workers = self._open_workers()
            ids = ids[ids < self.slots]  # a copy, for the caller's array may change
            if len(ids):
                workers.put(partial(self._io.forget, ids, index.claim(ids)))

    def _open_workers(self) -> Workers:
        if self._closed or self._workers is None:
            raise ClosedError(f"the slots in {self.folder} were closed")
        return self._workers

    def _submit(
        self,
        ids: Ids,
        addresses: Addresses,
        after: Dependencies,
        names: Sequence[bytes] | None,
        *,
        writes: bool,
    ) -> PageEvents:
        jobs = []
        for runs in self._jobs(ids):
            job = []
            for run in runs:
                places: list[int] = run.tolist()
                called = [names[place] for place in places] if names is not None else ()
                job.append(Run(int(ids[run[0]]), places, addresses[run], called))
            jobs.append(job)
        batch = BatchEvent(len(jobs))
        with self._submitting:  # not behind the end of the queue, which no thread would reach
            workers = self._open_workers()
            claim = self._index.claim(ids) if writes and self._index is not None else 0
            for job in jobs:
                request = SlotRequest(batch, len(ids), job, after, writes, claim)
                workers.put(partial(self._io.perform, request))
        return batch

    def _jobs(self, ids: Ids) -> Iterator[list[NDArray[np.intp]]]:
        """Share a batch among the workers, in runs of neighbours that stay together."""
        share = -(-len(ids) // _WORKERS)
        job: list[NDArray[np.intp]] = []
        size = 0
        for run in self._runs(ids):
            if job and size + len(run) > share:
                yield job
                job, size = [], 0
            job.append(run)
            size += len(run)
        if job:
            yield job

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
        """Finish what was submitted, end the threads and give the room back. Idempotent.

        A named file stays, and is brought to the disk itself: this blocks for as long as that
        takes.
        """
        with self._submitting:
            self._closed = True
        with self._closing:
            if self._workers is not None:
                self._workers.close()
            if self._fd >= 0:
                if self._index is not None:
                    self._sync(self._index)
                fd, self._fd = self._fd, -1
                os.close(fd)
            if self._index is not None:
                self._index.close()

    def _sync(self, index: SlotIndex) -> None:
        try:
            os.fdatasync(self._fd)
            index.sync()
        except OSError as error:  # what a power failure takes then is told by its checksums
            log.error("what is in %s may not outlive a power failure: %s", self.folder, error)


def _check_names(names: Sequence[bytes], slots: int) -> None:
    if len(names) != slots:
        raise ValueError(f"names: {len(names)} for {slots} slots")
    for name in names:
        if not isinstance(name, bytes):
            raise TypeError(f"names: bytes are needed, not {type(name).__name__}")
        if len(name) > NAME_BYTES:
            raise ValueError(
                f"names: {name!r} has {len(name)} bytes, above the bound of {NAME_BYTES}"
            )
