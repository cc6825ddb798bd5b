"""A file of slots with the directory of what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hostmem import ClosedError
from hostmem.device import DONE
from kvtier.integrations.slot_directory import Entry, SlotDirectory
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import PageEvents
from kvtier.transfer.slot_io import SlotIOStats

__all__ = ["SlotStore"]

Key = TypeVar("Key", bound=bytes)
Ids = NDArray[np.int32]
Addresses = NDArray[np.uint64]


class SlotStore(SlotDirectory[Key]):
    """Keys in the slots of a file: what is written, read and lost is noted in one place.

    Not thread-safe. No call waits for the disk but `close`.

    Parameters
    ----------
    file : SlotFile
        The store's own from now on: `close` closes it.
    policy : str
        Who gives way, a name in `kvtier.eviction.POLICIES`.
    restored : iterable of (int, key)
        Slots that hold keys already, oldest first.
    """

    def __init__(
        self, file: SlotFile, policy: str, restored: Iterable[tuple[int, Key]] = ()
    ) -> None:
        super().__init__(file.slots, policy, restored)
        self._file = file

    def write(
        self, entries: Sequence[Entry[Key]], addresses: Sequence[int], names: Sequence[bytes]
    ) -> PageEvents:
        """Start writing entries that were taken; `settle` them when the events have finished.

        Parameters
        ----------
        entries : sequence of Entry
            To be written.
        addresses : sequence of int
            Where each one's bytes are, those of a whole slot.
        names : sequence of bytes
            What each is called when the file is opened again.

        Raises
        ------
        ClosedError
            The file was closed.
        """
        return self._file.write(*_places(entries, addresses), _AT_ONCE, names)

    def read(self, entries: Sequence[Entry[Key]], addresses: Sequence[int]) -> PageEvents:
        """Start reading entries that are held; `settle` them when the events have finished.

        Raises
        ------
        ClosedError
            The file was closed.
        """
        return self._file.read(*_places(entries, addresses), _AT_ONCE)

    def settle(self, entries: Sequence[Entry[Key]], events: PageEvents) -> list[Entry[Key]]:
        """Let go of entries that were written or read; give those that are newly lost."""
        failures = events.failures
        self.release(entry for place, entry in enumerate(entries) if place not in failures)
        return self.lose(entries[place] for place in failures)

    def lose(self, entries: Iterable[Entry[Key]]) -> list[Entry[Key]]:
        """Let entries be gone, also when the file is opened again; give those newly so."""
        lost = super().lose(entries)
        if lost:
            with contextlib.suppress(ClosedError):  # what comes back is checked when it is read
                self._file.forget(np.array([entry.slot for entry in lost], np.int32))
        return lost

    def stats(self) -> SlotIOStats:
        """Say what was moved and what went wrong so far; also of a closed file."""
        return self._file.stats()

    def close(self) -> None:
        """Finish what was submitted and close the file. Idempotent; may be called beside others."""
        self._file.close()


_AT_ONCE = Dependencies((DONE,))


def _places(entries: Sequence[Entry[Key]], addresses: Sequence[int]) -> tuple[Ids, Addresses]:
    return np.array([entry.slot for entry in entries], np.int32), np.array(addresses, np.uint64)
