"""The index of a cache: blocks by key, and how they come into it and go."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Generic, cast

from hostmem import Event
from hostmem.device import DONE
from kvtier.block import Block, Columns, Key, failed, is_there
from kvtier.events import EventLog
from kvtier.keys import decode_key
from kvtier.page import Page
from kvtier.storage import TierStorage
from kvtier.windows import Windows

__all__ = ["BlockIndex"]

log = logging.getLogger("kvtier")


class BlockIndex(Generic[Key]):
    """Finds blocks, adds and removes them. Not thread-safe: callers hold the storage's lock.

    Parameters
    ----------
    storage : TierStorage
        Where the pages are; it tells the index of those it drops and moves.
    max_events : int
        See `BlockCache`.
    """

    def __init__(self, storage: TierStorage, max_events: int) -> None:
        self.blocks: dict[Key, Block[Key]] = {}
        """Those that can be found."""
        self.windows = Windows(storage.plan.groups, storage.plan.tokens_per_block)
        """What each pool group needs of a sequence."""
        self.events: EventLog[Key] | None = EventLog(max_events) if max_events else None
        """What happens to blocks, if anybody wants to know."""
        self.lost = 0
        """Blocks removed because a copy of them failed."""
        self._storage = storage
        self._groups = range(len(storage.plan.groups))
        storage.attach(self._dropped, self._moved if max_events else None)
        if storage.persistent:
            with storage.lock:
                self._restore()

    def _restore(self) -> None:
        """Find again what the files of the last level hold; a block that lacks a page is none."""
        found: dict[Key, dict[int, int]] = {}
        for group in self._groups:
            for slot, name in self._storage.restored(group):
                with contextlib.suppress(ValueError):  # something else wrote there
                    found.setdefault(cast(Key, decode_key(name)), {})[group] = slot
        whole = set(self.windows.whole)
        wanted = {key: slots for key, slots in found.items() if whole <= slots.keys()}
        self.blocks = {key: Block(key) for key in wanted}
        for block in self.blocks.values():
            block.pages = (None,) * len(self._groups)
        for group in self._groups:
            some = [
                (self.blocks[key], slots[group]) for key, slots in wanted.items() if group in slots
            ]
            blocks, places = [block for block, _ in some], [slot for _, slot in some]
            for block, page in zip(blocks, self._storage.adopt(blocks, group, places), strict=True):
                block.put(group, page)
                if self.events is not None:
                    self.events.note("stored", _keys([page]), group, None, self._name(page.level))

    # --------------------------------------------------------------------------------- finding

    def readable(self, key: Key) -> Block[Key] | None:
        """Find a block, once the storage has seen to pages of it whose copy failed."""
        block = self.blocks.get(key)
        for page in () if block is None else block.pages:
            if page is not None and failed(page):
                self._storage.resolve([p for p in self.pages(key) if not p.leases])
                return self.blocks.get(key)
        return block

    def leading(self, keys: Sequence[Key]) -> list[Block[Key]]:
        """Give the leading blocks that can be read, as far as windows show what they need."""
        windows = self.windows
        blocks = []
        for key in keys:
            block = self.readable(key)
            if block is None or not all(is_there(block.pages[group]) for group in windows.whole):
                break
            blocks.append(block)
        if windows.sliding:
            del blocks[windows.usable([block.pages for block in blocks], is_there) :]
        return blocks

    def match(self, keys: Sequence[Key]) -> int:
        """Count the leading blocks that are there; needs no lock."""
        windows = self.windows
        rows = []
        for key in keys:
            block = self.blocks.get(key)
            pages = () if block is None else block.pages
            if not pages or any(pages[group] is None for group in windows.whole):
                break
            rows.append(pages)
        return windows.usable(rows, _is_page) if windows.sliding else len(rows)

    def shown(self, blocks: Sequence[Block[Key]]) -> Columns:
        """Give the pages of leading blocks, without those that a window does not show."""
        columns: Columns = [[block.pages[group] for block in blocks] for group in self._groups]
        self.windows.hide(columns)
        return columns

    def pages(self, key: Key) -> list[Page]:
        """Give the pages of a block; KeyError where it is absent."""
        return [page for page in self.blocks[key].pages if page is not None]

    def is_unread(self, key: Key) -> bool:
        """Tell whether a block could not be read the last time, and nobody is trying now."""
        block = self.blocks.get(key)
        return block is not None and any(
            p is not None and p.unread and not p.leases for p in block.pages
        )

    # ---------------------------------------------------------------------------------- coming

    def find(self, keys: Sequence[Key]) -> list[Block[Key] | None]:
        """Look keys up, which runs code of theirs, before anything is changed."""
        return [self.blocks.get(key) for key in keys]

    def enter(
        self,
        blocks: Sequence[Block[Key]],
        columns: Columns,
        keys: Sequence[Key],
        found: Sequence[Block[Key] | None],
        ready: Event | None,
    ) -> tuple[list[Block[Key]], Columns]:
        """Let blocks be found under keys, and go on holding their pages.

        Where a key is there, its block stays, with its own pages in the first level, and with the
        new ones in place of colder ones.

        Parameters
        ----------
        blocks : sequence of Block
            New ones.
        columns : list of list of Page
            Their pages, leased; by group, None where there is none.
        keys : sequence
            Their keys.
        found : sequence of Block
            What `find` gives for the keys.
        ready : Event, optional
            Of the work that writes the pages; None if each says so itself.

        Returns
        -------
        (list of Block, list of list of Page)
            What is found from now on, its pages leased.
        """
        held, rows = [], []
        new: list[Page] = []
        old: list[Page] = []
        for block, pages, key, there in zip(
            blocks, zip(*columns, strict=True), keys, found, strict=True
        ):
            row = pages
            if there is None:
                block.key, block.pages = key, pages
                self.blocks[key] = block
                held.append(block)
            else:
                block.pages = ()
                row = tuple([self._better(there, *mine) for mine in enumerate(pages)])
                held.append(there)
            for mine, best in zip(pages, row, strict=True):
                if mine is not None:
                    (new if mine is best else old).append(mine)
            rows.append(row)
        self._storage.discard(old, DONE if ready is None else ready)
        self._storage.commit(new, ready)
        if self.events is not None:
            for page in sorted(new, key=attrgetter("group")):
                self.events.note("stored", _keys([page]), page.group, None, self._name(page.level))
        return held, [[row[group] for row in rows] for group in self._groups]

    def _better(self, block: Block[Key], group: int, mine: Page | None) -> Page | None:
        """Choose between a block's page and a new one, and hold it."""
        if mine is None:
            return None
        page = block.pages[group]
        if page is not None and page.level == 0 and not failed(page):
            self._storage.lease([page])
            return page
        mine.owner = block
        mine.kept = any(other is not None and other.kept for other in block.pages)
        if page is not None:
            self._note_removed(page)
            if not page.leases:  # otherwise it goes when it is let go
                self._storage.replace(page, mine)
        block.put(group, mine)
        return mine

    # ----------------------------------------------------------------------------------- going

    def forget(self, block: Block[Key]) -> tuple[Page | None, ...]:
        """Let a block not be found any more; its pages belong to nobody."""
        if self.events is not None:
            for page in block.pages:
                if page is not None:
                    self._note_removed(page)
        del self.blocks[cast(Key, block.key)]
        pages, block.pages = block.pages, ()
        return pages

    def remove(self, block: Block[Key]) -> None:
        """Take a block out of the cache; pages that are leased go when they are let go."""
        pages = self.forget(block)
        self._storage.discard(page for page in pages if page is not None and not page.leases)

    def _dropped(self, page: Page) -> None:
        """Forget a page that the storage dropped, and its block if it cannot be used without."""
        block = page.owner
        if not isinstance(block, Block) or not block.holds(page):
            return
        if page.lost:
            log.error("%r is lost: a copy of it failed: %s", block, page.ready.error)
        others = [other for other in block.pages if other is not None and other is not page]
        if others and page.group in self.windows.sliding:
            if self.events is not None:
                self._note_removed(page)
            block.put(page.group, None)
        elif self.blocks.get(cast(Key, block.key)) is block:
            self.lost += page.lost
            self.remove(block)

    def check(self) -> None:
        """Verify every invariant of the index; AssertionError where one is broken."""
        for key, block in self.blocks.items():
            pages = [page for page in block.pages if page is not None]
            assert block.key == key, f"{block} is found as {key!r}"
            assert pages, f"{block} has no page"
            assert all(block.pages[group] is not None for group in self.windows.whole), f"{block}"
            for page in pages:
                assert page.owner is block, f"{page} belongs to {page.owner}, not to {block}"
                policy = self._storage.levels[page.level].policies[page.group]
                assert page in policy, f"{page} is not where it should be"

    # ---------------------------------------------------------------------------------- events

    def _moved(self, pages: Sequence[Page], source: int, to: int) -> None:
        if self.events is not None:
            known = [p for p in pages if isinstance(p.owner, Block) and p.owner.holds(p)]
            names = self._name(source), self._name(to)
            self.events.note("moved", _keys(known), pages[0].group, *names)

    def _note_removed(self, page: Page) -> None:
        if self.events is not None:
            self.events.note("removed", _keys([page]), page.group, self._name(page.level), None)

    def _name(self, level: int) -> str:
        return self._storage.levels[level].name


def _is_page(page: Page | None) -> bool:
    return page is not None


def _keys(pages: Iterable[Page]) -> list[Key]:
    return [cast(Block[Key], page.owner).key for page in pages]  # type: ignore[misc]
