"""Pages in a file: each of several pieces, moved together, and there only if all of them are."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd

from kvtier.integrations.sglang.direct_memory import DirectMemory
from kvtier.integrations.slot_directory import Entry
from kvtier.integrations.slot_store import SlotStore
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.page_events import PageEvents
from kvtier.transfer.slot_io import SlotIOStats

__all__ = ["PageShape", "PageStore"]

_DIGEST = 24  # bytes
_MOST_PIECES = 1024
_WINDOW = 64 << 20  # bytes on their way at a time, for one caller


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a page is in memory: parts that lie apart, of these sizes."""

    parts: tuple[int, ...]
    """Bytes of each part, in an order that never changes."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return sum(self.parts)

    @property
    def piece(self) -> int:
        """Bytes of a slot: the largest that every part is a multiple of."""
        return gcd(*self.parts)

    @property
    def pieces(self) -> int:
        """Slots of a page."""
        return self.nbytes // self.piece

    def places(self, parts: Sequence[int]) -> list[int]:
        """Give the address of every piece of a page from those of its parts."""
        return [
            address + start
            for address, nbytes in zip(parts, self.parts, strict=True)
            for start in range(0, nbytes, self.piece)
        ]

    def check(self, what: str) -> None:
        """Raise ValueError for pages that a file of slots cannot hold."""
        if not self.parts or min(self.parts) < 1 or self.pieces > _MOST_PIECES:
            raise ValueError(
                f"{what}: its pages have parts of {self.parts[:8]}... bytes, {len(self.parts)} in "
                f"all; at least one part is needed, and at most {_MOST_PIECES} equal pieces that "
                "fit all parts: another memory layout may have them"
            )


class PageStore:
    """A file of pages, read into and written from where they are in memory.

    A page is as many slots as it has pieces. What is written stays until it must give way. A page
    of which a piece cannot be read, or is not what was written, is forgotten. All methods may be
    called from any thread. `read` and `write` block until it is done, and have 64 MiB on their way
    at a time.

    Parameters
    ----------
    folder : str
        An existing directory.
    shape : PageShape
        Of the pages.
    quota : int
        Bytes of the file.
    scope : bytes
        Whose pages: those of another scope are never found. It is part of the layout of the file.
    name : str, optional
        Of the file; without one it does not outlive the store.
    compression, policy
        See `kvtier.transfer.disk.SlotFile` and `kvtier.eviction.POLICIES`.

    Raises
    ------
    ValueError
        A quota that holds no page; a file there of another scope, and whatever else
        `kvtier.transfer.disk.SlotFile` says.
    DiskOOMError, ResourceBusyError, OSError
        As `kvtier.transfer.disk.SlotFile` says.
    """

    def __init__(
        self,
        folder: str,
        shape: PageShape,
        quota: int,
        *,
        scope: bytes,
        name: str | None = None,
        compression: str | None = None,
        policy: str = "prospect",
    ) -> None:
        pages = quota // shape.nbytes
        if not pages:
            raise ValueError(f"quota: {quota} B hold no page, which takes {shape.nbytes} B")
        self.shape = shape
        layout = scope + repr(shape.parts).encode()
        self._key = blake2b(layout, digest_size=_DIGEST)
        file = SlotFile(
            folder,
            shape.piece,
            pages * shape.pieces,
            name=name,
            layout=b"sglang " + self._key.hexdigest().encode(),
            compression=compression,
        )
        self._slots: SlotStore[bytes] = SlotStore(file, policy, file.restored)
        self._pieces = {name for _, name in file.restored}  # those in the file, or on their way
        self._changed = threading.Condition()
        self._closed = False

    def _names(self, key: str) -> list[bytes]:
        digest = self._key.copy()
        digest.update(key.encode())
        page = digest.digest()
        return [page + n.to_bytes(2, "big") for n in range(self.shape.pieces)]

    def leading(self, keys: Sequence[str]) -> int:
        """Count the pages that can be read before the first that cannot."""
        with self._changed:
            for found, key in enumerate(keys):
                if not self._there(self._names(key)):
                    return found
        return len(keys)

    def _there(self, names: Sequence[bytes]) -> bool:
        return not self._closed and all(self._slots.ready(name) for name in names)

    def write(self, keys: Sequence[str], pages: Sequence[Sequence[int]]) -> list[bool]:
        """Have pages in the file; those that are there are not written again.

        Parameters
        ----------
        keys : sequence of str
            Of the pages.
        pages : sequence of sequence of int
            Address of each part of each page; the bytes stay as they are until this returns.

        Returns
        -------
        list of bool
            Which pages are there now. The others found no room, or could not be written.
        """
        there: list[bool] = []
        for part in self._windows(len(keys)):
            there += self._write(keys[part], pages[part])
        return there

    def _write(self, keys: Sequence[str], pages: Sequence[Sequence[int]]) -> list[bool]:
        wanted = [self._names(key) for key in keys]
        places = {
            name: place
            for names, parts in zip(wanted, pages, strict=True)
            for name, place in zip(names, self.shape.places(parts), strict=True)
        }
        with self._changed:
            if self._closed:
                return [False] * len(keys)
            taken = self._slots.take(list(places))
            names = [entry.key for entry in taken.entries]
            self._pieces.difference_update(taken.evicted)
            self._pieces.update(names)
            try:
                memory = DirectMemory([places[name] for name in names], self.shape.piece)
                memory.fill()
                events = self._slots.write(taken.entries, memory.places, names)
            except BaseException:  # no memory for a copy: nobody must wait for these
                self._slots.lose(taken.entries)
                self._pieces.difference_update(names)
                self._changed.notify_all()
                raise
        events.wait_finished()
        with self._changed:
            self._settle(taken.entries, events)
            # Pieces that somebody else was writing already: not ours to wait for before.
            self._changed.wait_for(lambda: not self._any_pending(places))
            return [self._there(names) for names in wanted]

    def _settle(self, entries: Sequence[Entry[bytes]], events: PageEvents) -> None:
        lost = self._slots.settle(entries, events)
        self._pieces.difference_update(entry.key for entry in lost)
        self._changed.notify_all()

    def _any_pending(self, names: Iterable[bytes]) -> bool:
        return any(self._slots.ready(name) is False for name in names)

    def read(self, keys: Sequence[str], pages: Sequence[Sequence[int]]) -> list[bool]:
        """Read pages into memory.

        Parameters
        ----------
        keys : sequence of str
            Of the pages.
        pages : sequence of sequence of int
            Address of each part of each page.

        Returns
        -------
        list of bool
            Which pages were read, and are what was written. The memory of the others may hold
            anything.
        """
        read: list[bool] = []
        for part in self._windows(len(keys)):
            read += self._read(keys[part], pages[part])
        return read

    def _read(self, keys: Sequence[str], pages: Sequence[Sequence[int]]) -> list[bool]:
        wanted = [self._names(key) for key in keys]
        with self._changed:
            found = [self._there(names) for names in wanted]
            places = [
                (name, place)
                for there, names, parts in zip(found, wanted, pages, strict=True)
                if there
                for name, place in zip(names, self.shape.places(parts), strict=True)
            ]
            if not places:
                return found
            memory = DirectMemory([place for _, place in places], self.shape.piece)
            entries = self._slots.hold([name for name, _ in places])
            events = self._slots.read(entries, memory.places)
        events.wait_finished()
        memory.empty()
        bad = {entries[place].key[:_DIGEST] for place in events.failures}
        with self._changed:
            self._settle(entries, events)
        return [
            there and names[0][:_DIGEST] not in bad
            for there, names in zip(found, wanted, strict=True)
        ]

    def _windows(self, pages: int) -> list[slice]:
        step = max(_WINDOW // self.shape.nbytes, 1)
        return [slice(first, first + step) for first in range(0, pages, step)]

    def clear(self) -> None:
        """Forget every page; blocks while some are being written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._any_pending(self._pieces))
            if not self._closed:
                self._slots.lose(self._slots.hold(self._pieces))
                self._pieces.clear()

    @property
    def used(self) -> int:
        """Slots that hold a piece, or are about to."""
        with self._changed:
            return len(self._pieces)

    def stats(self) -> SlotIOStats:
        """Say what was moved and what went wrong so far; also of a closed store."""
        return self._slots.stats()

    def close(self) -> None:
        """Finish what was begun and close the file. Idempotent."""
        with self._changed:
            self._closed = True
        self._slots.close()
