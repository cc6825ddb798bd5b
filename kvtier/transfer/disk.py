"""Slots in a file: preallocated, past the page cache where that works, and never in the way.

Reads and writes run on threads that live as long as the file does.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError, DiskOOMError, HostEvent
from hostmem.files import read_ranges, write_ranges
from hostmem.units import format_size
from kvtier.transfer.jobs import Dependencies

__all__ = ["SlotFile"]

Ids = NDArray[np.int32]
Addresses = NDArray[np.uint64]
_Transfer = Callable[[int, int, Addresses, int], None]

_DIRECT_GRAIN = 4096  # block sizes of disks divide it
_LARGEST_REQUEST = 2 << 20
_WORKERS = 4


@dataclass(slots=True)
class _Batch:
    """Requests that one event stands for."""

    event: HostEvent
    left: int
    lock: threading.Lock
    error: BaseException | None = None

    def done(self, error: BaseException | None) -> None:
        """Count one request as finished; the last one sets the event."""
        with self.lock:
            self.error = self.error or error
            self.left -= 1
            last = self.left == 0
        if last:
            self.event.set(self.error)


_Job = tuple[_Batch, _Transfer, int, Addresses, Dependencies]


class SlotFile:
    """A file without a name that holds slots, and the threads that read and write it.

    Parameters
    ----------
    folder : str
        An existing directory. The file vanishes with its last descriptor, also after a crash;
        where the file system has no unnamed files, a name is made and removed at once.
    slot_size : int
        Bytes of a slot; multiples of 4 KiB bypass the page cache where the directory allows it.
    slots : int
        Slots to allocate room for.

    Raises
    ------
    DiskOOMError
        The file system has no room; nothing was kept.
    OSError
        The directory cannot be used.
    """

    def __init__(self, folder: str, slot_size: int, slots: int) -> None:
        self.folder = folder
        self.slot_size = slot_size
        self.slots = 0
        self.direct = False
        """Whether transfers bypass the page cache."""
        self._fd = self._open()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        try:
            self.resize(slots)
            for number in range(_WORKERS):
                name = f"kvtier-disk-{number}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        if self.slot_size % _DIRECT_GRAIN == 0:
            try:
                fd = _open_unnamed(self.folder, os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                self.direct = True
                return fd
        return _open_unnamed(self.folder, 0)

    def resize(self, slots: int) -> None:
        """Allocate room for more slots, or cut the file; slots below stay as they are."""
        size = slots * self.slot_size
        if slots < self.slots:
            os.ftruncate(self._fd, size)
        elif slots > self.slots:
            start = self.slots * self.slot_size
            try:
                os.posix_fallocate(self._fd, start, size - start)
            except OSError as error:
                os.ftruncate(self._fd, start)
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise DiskOOMError(
                        f"no room for {format_size(size)} in {self.folder}: {error.strerror}; "
                        "lower the quota or free space",
                        path=self.folder,
                        nbytes=size,
                    ) from error
                raise
        self.slots = slots

    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> HostEvent:
        """Write slots from memory; returns at once.

        Parameters
        ----------
        ids : int32 array, shape (slots,)
            Distinct slots of the file.
        addresses : uint64 array, shape (slots,)
            Where each slot's bytes are; they must stay until the event.
        after : Dependencies
            What must have happened before.

        Raises
        ------
        ClosedError
            The file was closed.
        """
        return self._submit(write_ranges, ids, addresses, after)

    def read(self, ids: Ids, addresses: Addresses, after: Dependencies) -> HostEvent:
        """Read slots into memory; returns at once. See `write`."""
        return self._submit(read_ranges, ids, addresses, after)

    def _submit(
        self, transfer: _Transfer, ids: Ids, addresses: Addresses, after: Dependencies
    ) -> HostEvent:
        if self._closed:
            raise ClosedError(f"the slots in {self.folder} were closed")
        requests = list(self._requests(ids, addresses))
        batch = _Batch(HostEvent(), len(requests), threading.Lock())
        if not requests:
            batch.event.set()
        for offset, places in requests:
            self._jobs.put((batch, transfer, offset, places, after))
        return batch.event

    def _requests(self, ids: Ids, addresses: Addresses) -> Iterator[tuple[int, Addresses]]:
        """Join slots that are neighbours in the file, up to the largest request."""
        order = np.argsort(ids, kind="stable")
        slots, places = ids[order], addresses[order]
        most = max(_LARGEST_REQUEST // self.slot_size, 1)
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        for run in np.split(np.arange(len(slots)), breaks):
            for first in range(0, len(run), most):
                part = run[first : first + most]
                yield int(slots[part[0]]) * self.slot_size, places[part]

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, transfer, offset, places, after = job
            try:
                after.wait()
                transfer(self._fd, offset, places, self.slot_size)
            except BaseException as error:  # it belongs to whoever needs the transfer
                batch.done(error)
            else:
                batch.done(None)
            del job, batch, places, after
        self._jobs.put(None)  # for the next thread, whether or not anybody knows of it

    def close(self) -> None:
        """Finish what was submitted, end the threads and give the room back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)  # goes from thread to thread
        for thread in self._threads:  # also after an earlier close was interrupted here
            thread.join()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _open_unnamed(folder: str, flags: int) -> int:
    """Open a new file that has no name."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise  # the file system has unnamed files, or the directory is at fault
    plain, name = tempfile.mkstemp(prefix="kvtier-", dir=folder)
    try:
        return os.open(name, flags)
    finally:
        os.close(plain)
        os.unlink(name)
