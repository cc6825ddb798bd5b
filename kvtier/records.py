"""What pages are called in files that outlive the process, and which of them may come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from hostmem import ClosedError
from kvtier.keys import encode_key
from kvtier.levels import Level
from kvtier.page import Page
from kvtier.transfer.memory import DiskPool, Ids

__all__ = ["Records"]


class Records:
    """Of each slot of a persistent level, the page that was last written there.

    A page that moves up leaves its bytes behind, under its name, until somebody else gets the slot:
    it comes back all the same. One that is dropped by hand must not come back, wherever it is by
    then. Not thread-safe: callers hold the storage's lock.

    Parameters
    ----------
    level : Level
        Whose files have names.
    """

    def __init__(self, level: Level) -> None:
        self.level = level.index
        """Index of the level."""
        self._files = [cast(DiskPool, group.memory.pools[0]).file for group in level.groups]
        self._last = [dict[int, Page]() for _ in level.groups]

    def restored(self, group: int) -> tuple[tuple[int, bytes], ...]:
        """Give the slots that were there when the file was opened, and their names."""
        return self._files[group].restored

    def note(self, pages: Sequence[Page], slots: Ids) -> list[bytes]:
        """Note that pages of one group are about to be written to slots; give their names.

        Of several slots that hold the same page the file believes the last one written. A page of
        something without a key that can be stored has an empty name.
        """
        last = self._last[pages[0].group]
        for page, slot in zip(pages, slots.tolist(), strict=True):
            page.stored = (*self._slots(page), slot)
            last[slot] = page
        return [_name(page) for page in pages]

    def adopt(self, page: Page) -> None:
        """Note that a page came back where it is."""
        self._last[page.group][page.slot] = page
        page.stored = (page.slot,)

    def replace(self, old: Page, new: Page) -> None:
        """Note that a page holds what another one held, which is dropped for it."""
        slots = self._slots(old)
        self._last[new.group].update(dict.fromkeys(slots, new))
        new.stored = (*self._slots(new), *slots)
        old.stored = ()

    def forget(self, pages: Iterable[Page]) -> None:
        """Let pages not come back, wherever they were written."""
        gone: dict[int, list[int]] = {}
        for page in pages:
            for slot in self._slots(page):
                del self._last[page.group][slot]
                gone.setdefault(page.group, []).append(slot)
            page.stored = ()
        for group, slots in gone.items():
            with contextlib.suppress(ClosedError):  # what is in a closed file stays as it is
                self._files[group].forget(np.array(slots, np.int32))

    def _slots(self, page: Page) -> list[int]:
        """Give the slots where a page was written and nobody else since."""
        last = self._last[page.group]
        return [slot for slot in page.stored if last.get(slot) is page]


def _name(page: Page) -> bytes:
    key = page.content
    if isinstance(key, (bytes, str, int)):
        with contextlib.suppress(ValueError):  # too long
            return encode_key(key)
    return b""
