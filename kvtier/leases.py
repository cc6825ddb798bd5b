"""What users hold of a cache: blocks that were found, and room for blocks to be computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from hostmem import Event
from hostmem.closing import Closable
from hostmem.describing import one_line
from hostmem.device import DONE
from hostmem.spans import span
from kvtier.arguments import check_event
from kvtier.block import Block, Columns, Key
from kvtier.page import Page

if TYPE_CHECKING:
    from kvtier.blocks import BlockCache

__all__ = ["BlockLease", "BlockReservation"]


class _Held(Closable, Generic[Key]):
    """Blocks whose pages are in the first level and stay there. Not thread-safe."""

    _what: str

    def __init__(self, cache: BlockCache[Key], blocks: list[Block[Key]], columns: Columns) -> None:
        self._cache = cache
        self._blocks = blocks
        self._columns = columns
        self._open = True

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def keys(self) -> list[Key]:
        """The blocks' keys, in order; those that were reserved without one are left out."""
        return [block.key for block in self._blocks if block.key is not None]

    def slots(self, group: int = 0) -> NDArray[np.int32]:
        """Give the slots of the blocks' pages of one pool group, which are theirs while held.

        Returns
        -------
        int32 array, shape (blocks,)
            -1 where a window does not show the block.

        Raises
        ------
        ValueError
            They are held no more: the slots may be others' by now.
        """
        self._check_open()
        column = self._columns[group]
        return np.array([-1 if page is None else page.slot for page in column], np.int32)

    def _pages(self) -> list[Page]:
        if len(self._columns) == 1:
            return [page for page in self._columns[0] if page is not None]
        return [p for row in zip(*self._columns, strict=True) for p in row if p is not None]

    @one_line
    def __repr__(self) -> str:
        state = "" if self._open else ", which it does not hold any more"
        return f"<{type(self).__name__} of {len(self)} blocks{state}>"

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"the {self._what}")

    def _take_over(self, other: _Held[Key]) -> None:
        """Hold another's blocks behind the own ones; the other holds none any more."""
        if type(other) is not type(self):
            raise TypeError(f"other: a {type(self).__name__} is needed, not {type(other).__name__}")
        self._check_open()
        other._check_open()
        if other._cache is not self._cache or other is self:
            raise ValueError("other: it is the same, or of another cache")
        self._blocks += other._blocks
        for column, others in zip(self._columns, other._columns, strict=True):
            column += others
        other._empty()

    def _empty(self) -> None:
        self._open = False
        self._blocks = []
        self._columns = [[] for _ in self._columns]


class BlockLease(_Held[Key]):
    """Blocks that were found; they neither move nor go until `release`."""

    _what = "lease was released, or another one took it over"

    def __init__(
        self,
        cache: BlockCache[Key],
        blocks: list[Block[Key]],
        columns: Columns,
        found: list[int],
    ) -> None:
        super().__init__(cache, blocks, columns)
        self.found = found
        """Index of the level each block was found in: of its coldest page."""

    @property
    def events(self) -> tuple[Event, ...]:
        """What brings the blocks: nobody may read them before these have finished.

        Those that have finished well are left out.
        """
        return _distinct(page.ready for page in self._pages() if not _arrived(page))

    @span("wait for blocks", "wait", domain="kvtier")
    def wait(self) -> None:
        """Block until the bytes of every block are in the first level.

        Raises
        ------
        OSError, CuError
            A copy failed; after `release`, the blocks it was to bring are where they were, or no
            longer in the cache.
        """
        if events := self.events:
            with self._cache._waiting("blocks"):
                for event in events:
                    event.synchronize()

    def extend(self, other: BlockLease[Key]) -> None:
        """Hold the blocks of another lease, too, behind the own ones; the other is released.

        Raises
        ------
        ValueError
            It is of another cache, or one of the two was released; nothing has changed.
        """
        found = other.found
        self._take_over(other)
        self.found += found
        other.found = []

    def forget(self, group: int, blocks: int, after: Event = DONE) -> None:
        """Let go of pages that a sliding window does not show any more.

        They stay in the cache, and may leave the level. `slots` has -1 in their places.

        Parameters
        ----------
        group : int
            Index of a pool group with a window.
        blocks : int
            The first blocks of the lease, which starts at a sequence's first; those that hold
            sink tokens are kept.
        after : Event
            Of work that still reads the pages: nobody gets their slots earlier.

        Raises
        ------
        ValueError
            The group has no window, ``blocks`` is below 0, or the lease was released.
        """
        self._check_open()
        check_event(after, "after")
        first = self._cache._sinks(group)
        if blocks < 0:
            raise ValueError(f"blocks: {blocks} is below 0")
        column = self._columns[group]
        gone = [page for page in column[first:blocks] if page is not None]
        column[first:blocks] = [None] * len(column[first:blocks])
        self._cache._let_go(gone, after)

    def close(self) -> None:
        """Let the blocks go, as `release` does."""
        self.release()

    def release(self, after: Event = DONE) -> None:
        """Let the blocks go; they stay in the cache. Idempotent.

        Parameters
        ----------
        after : Event
            Of work that still reads the pages: nobody gets their slots earlier.
        """
        check_event(after, "after")
        if self._open:
            self._open = False
            self._cache._let_go(self._pages(), after)


class BlockReservation(_Held[Key]):
    """Pages for blocks that are about to be computed; nobody finds them before `commit`."""

    _what = "reservation was committed or cancelled, or another one took it over"

    @property
    def fences(self) -> tuple[Event, ...]:
        """What may still use the slots: nobody may write them before these have finished.

        Of a block that was withdrawn, also what brings its bytes; and where the first level is
        host memory, its fill, unless that has come so far already.
        """
        fences = [fence for page in self._pages() for fence in page.fences]
        return _distinct([*fences, *(p.ready for p in self._pages() if not _arrived(p))])

    @span("wait for slots", "wait", domain="kvtier")
    def wait(self) -> None:
        """Block until the slots may be written.

        Raises
        ------
        HostOOMError, RegistrationError
            A first level of host memory could not be filled that far.
        OSError, CuError
            The bytes of a block that was withdrawn could not be brought.
        """
        pages = self._pages()
        pending = [page.ready for page in pages if not _arrived(page)]
        fences = [fence for page in pages for fence in page.fences if not fence.query()]
        if fences or pending:
            with self._cache._waiting("slots"):
                for event in _distinct(fences):
                    event.wait_finished()
                for event in _distinct(pending):
                    event.synchronize()
        self._cache._wait_usable(pages)

    def extend(self, other: BlockReservation[Key]) -> None:
        """Hold the blocks of another reservation behind the own ones; the other is closed.

        Raises
        ------
        ValueError
            It is of another cache, or one of the two is closed; nothing has changed.
        """
        self._take_over(other)

    def commit(self, ready: Event = DONE, keys: Sequence[Key] | None = None) -> None:
        """Put the blocks in the cache; ``ready`` is of the work that writes their bytes.

        Where a key is there by now, the block's pages in the first level stay, and those here are
        given back; pages that are colder give way to these.

        Parameters
        ----------
        ready : Event
            If it fails, the blocks are lost.
        keys : sequence, optional
            Other keys than those reserved, of all blocks.

        Raises
        ------
        ValueError
            Committed or cancelled already; a block without a key; a key that occurs twice, or
            another number of keys than blocks. Nothing has changed.
        """
        self._check_open()
        check_event(ready, "ready")
        named = self._named(keys)
        if len(named) != len(self._blocks):
            raise ValueError(f"keys: {len(named)} for {len(self._blocks)} blocks")
        self._cache._commit(self, named, ready, last=True).release()

    def commit_leased(
        self, ready: Event = DONE, keys: Sequence[Key] | None = None
    ) -> BlockLease[Key]:
        """Put the leading blocks in the cache and go on holding them.

        Parameters
        ----------
        ready : Event
            Of the work that writes their bytes; if it fails, they are lost.
        keys : sequence, optional
            Of the leading blocks; the reservation stays open with those behind. By default as
            reserved, of all blocks, and it is closed.

        Returns
        -------
        BlockLease
            Where a key is there already in the first level, of that page, and the one here was
            given back: take its slots, not those of the reservation.

        Raises
        ------
        ValueError
            As in `commit`; more keys than blocks. Nothing has changed.
        """
        self._check_open()
        check_event(ready, "ready")
        named = self._named(keys)
        count = len(named)
        if count > len(self._blocks):
            raise ValueError(f"keys: {count} for {len(self._blocks)} blocks")
        return self._cache._commit(self, named, ready, last=keys is None)

    def _take(self, count: int, last: bool) -> tuple[list[Block[Key]], Columns]:
        """Give the leading blocks away; after the last ones the reservation is closed."""
        blocks, columns = self._blocks[:count], [column[:count] for column in self._columns]
        self._open = not last
        if not last:  # who has committed all may still ask what these were
            del self._blocks[:count]
            for column in self._columns:
                del column[:count]
        return blocks, columns

    def _named(self, keys: Sequence[Key] | None) -> list[Key]:
        """Give the keys to commit under, checked."""
        given = [block.key for block in self._blocks] if keys is None else list(keys)
        named = [key for key in given if key is not None]
        if len(named) < len(given):
            raise ValueError(
                f"keys: block {[key is None for key in given].index(True)} has none; give the keys"
            )
        self._cache._check_keys(named)
        return named

    def close(self) -> None:
        """Give the pages back unless they were committed, as `cancel` does."""
        self.cancel()

    def cancel(self, after: Event = DONE) -> None:
        """Give the pages back, unless they were committed. Idempotent.

        Parameters
        ----------
        after : Event
            Of work that still uses the pages: nobody gets their slots earlier.
        """
        check_event(after, "after")
        if self._open:
            self._open = False
            self._cache._cancel(self._blocks, self._pages(), after)


def _arrived(page: Page) -> bool:
    """Tell whether a page's bytes are there."""
    ready = page.ready
    return ready is DONE or (ready.query() and ready.error is None)


def _distinct(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple({id(event): event for event in events}.values())
