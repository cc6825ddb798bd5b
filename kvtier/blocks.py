"""The block cache: blocks by key, found in any level and handed out in the hot one."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hostmem import Event, ResourceBusyError
from hostmem.closing import Closable
from hostmem.device import DONE
from kvtier.page import Page
from kvtier.storage import TierStorage

__all__ = ["BlockCache", "BlockLease", "BlockReservation"]

log = logging.getLogger("kvtier")

Key = TypeVar("Key", bound=Hashable)


class _Block(Generic[Key]):
    """A key and its pages, one of each pool group."""

    __slots__ = ("key", "pages")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.pages: tuple[Page, ...] = ()

    def __repr__(self) -> str:
        return f"block {self.key!r}"


class _Held(Closable, Generic[Key]):
    """Blocks whose pages are in the hot level and stay there."""

    def __init__(self, cache: BlockCache[Key], blocks: list[_Block[Key]]) -> None:
        self._cache = cache
        self._blocks = blocks
        self._open = True

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def keys(self) -> list[Key]:
        """The blocks' keys, in order."""
        return [block.key for block in self._blocks]

    def slots(self, group: int = 0) -> NDArray[np.int32]:
        """Give the hot slots of the blocks' pages of one pool group; int32, shape (blocks,)."""
        return np.array([block.pages[group].slot for block in self._blocks], np.int32)

    def _pages(self) -> list[Page]:
        return [page for block in self._blocks for page in block.pages]


class BlockLease(_Held[Key]):
    """Blocks that were found; they neither move nor go until `release`."""

    def __init__(self, cache: BlockCache[Key], blocks: list[_Block[Key]], found: list[int]) -> None:
        super().__init__(cache, blocks)
        self.found = found
        """Index of the level each block was found in: of its coldest page."""

    @property
    def events(self) -> tuple[Event, ...]:
        """What brings the blocks: nobody may read them before these have finished."""
        return tuple({id(p.ready): p.ready for p in self._pages() if p.ready is not DONE}.values())

    def wait(self) -> None:
        """Block until the bytes of every block are in the hot level.

        Raises
        ------
        OSError, CuError
            A copy failed; after `release`, the blocks it was to bring are no longer in the cache.
        """
        for event in self.events:
            event.synchronize()

    def close(self) -> None:
        """Let the blocks go, as `release` does."""
        self.release()

    def release(self) -> None:
        """Let the blocks go; they stay in the cache. Idempotent."""
        if self._open:
            self._open = False
            self._cache._release(self._blocks)


class BlockReservation(_Held[Key]):
    """Hot pages for blocks that are about to be computed; nobody finds them before `commit`."""

    @property
    def fences(self) -> tuple[Event, ...]:
        """What may still use the slots: nobody may write them before these have finished.

        Where the first level is host memory, that must have been filled so far, too: see `wait`.
        """
        return tuple({id(e): e for page in self._pages() for e in page.fences}.values())

    def wait(self) -> None:
        """Block until the slots may be written.

        Raises
        ------
        HostOOMError, RegistrationError
            A first level of host memory could not be filled that far.
        """
        for event in self.fences:
            event.wait_finished()
        self._cache._storage.wait_usable(self._pages())

    def commit(self, ready: Event = DONE) -> None:
        """Put the blocks in the cache; ``ready`` is of the work that writes their bytes.

        Raises
        ------
        ValueError
            Committed or cancelled already.
        """
        if not self._open:
            raise ValueError("the reservation was committed or cancelled")
        self._open = False
        self._cache._commit(self._blocks, ready)

    def close(self) -> None:
        """Give the pages back unless they were committed, as `cancel` does."""
        self.cancel()

    def cancel(self) -> None:
        """Give the pages back, unless they were committed. Idempotent."""
        if self._open:
            self._open = False
            self._cache._cancel(self._blocks)


class BlockCache(Generic[Key]):
    """Finds blocks by key in the levels of a storage.

    Keys are hashable and name a block's content with all that precedes it, as a hash chained over
    the prefix does. A block is in one level at a time, or has none of its pages.

    Parameters
    ----------
    storage : TierStorage
        Where the pages are. One cache a storage.

    Raises
    ------
    ValueError
        The storage has a cache already.

    Notes
    -----
    Every method may be called from any thread and returns without waiting for copies.

    Examples
    --------
    >>> import kvtier
    >>> layer = kvtier.AttentionLayerConfig(0, [kvtier.BufferConfig("kv", 4096)])
    >>> tiers = [kvtier.GpuCacheTierConfig("2MiB"), kvtier.HostCacheTierConfig("4MiB")]
    >>> config = kvtier.KVCacheManagerConfig(16, tiers, [layer])
    >>> with kvtier.TierStorage(config, device="cpu") as storage:
    ...     cache = kvtier.BlockCache(storage)
    ...     with cache.reserve(["a", "b"]) as fresh:
    ...         fresh.wait()  # then compute into fresh.slots()
    ...         fresh.commit()
    ...     with cache.acquire(["a", "b", "c"]) as lease:
    ...         lease.wait()  # then read lease.slots()
    ...         len(lease)
    2
    """

    def __init__(self, storage: TierStorage) -> None:
        self._storage = storage
        self._groups = range(len(storage.plan.groups))
        self._blocks: dict[Key, _Block[Key]] = {}
        self._reserved: set[Key] = set()
        self.lost = 0
        """Blocks forgotten so far because a copy of them failed."""
        storage.attach(self._dropped)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        """Tell whether a block is in any level."""
        return key in self._blocks

    def match(self, keys: Sequence[Key]) -> int:
        """Count the leading keys whose blocks are there, without touching them."""
        return next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))

    def acquire(self, keys: Sequence[Key]) -> BlockLease[Key]:
        """Lease the leading blocks that are there, and start bringing them to the hot level.

        They become the most recently used, in prefix order.

        Parameters
        ----------
        keys : sequence
            In prefix order; it ends at the first that is absent.

        Raises
        ------
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed. Ask for fewer.
        """
        with self._storage.lock:
            self._storage.settle()
            blocks = self._leading(keys)
            pages = [page for block in blocks for page in block.pages]
            found = [max(page.level for page in block.pages) for block in blocks]
            self._storage.count(found, len(keys) - len(blocks))
            self._storage.lease(pages)
            try:
                self._storage.onboard(pages)
            except BaseException:
                self._storage.release(pages)
                raise
            return BlockLease(self, blocks, found)

    def _leading(self, keys: Sequence[Key]) -> list[_Block[Key]]:
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            if any(_failed(page) for page in block.pages):
                self._forget(block)
                break
            blocks.append(block)
        return blocks

    def touch(self, keys: Iterable[Key]) -> None:
        """Note a use of blocks, wherever they are; KeyError at the first that is absent."""
        with self._storage.lock:
            self._storage.touch(page for key in keys for page in self._blocks[key].pages)

    def keep(self, keys: Iterable[Key], kept: bool = True) -> None:
        """Let blocks be moved down but never dropped, or let them be dropped again.

        Making room by moving kept blocks blocks until they have arrived.

        Parameters
        ----------
        keys : iterable
            Present, in any level.
        kept : bool
            False undoes it.

        Raises
        ------
        KeyError
            A key is absent; nothing has changed.
        """
        with self._storage.lock:
            self._storage.keep([p for key in keys for p in self._blocks[key].pages], kept)

    def set_priority(self, keys: Iterable[Key], priority: int) -> None:
        """Change when blocks leave a level: those of a lower priority go first.

        Among blocks of one priority the policy decides, to which these are new.

        Raises
        ------
        KeyError
            A key is absent; nothing has changed.
        """
        with self._storage.lock:
            pages = [page for key in keys for page in self._blocks[key].pages]
            self._storage.set_priority(pages, priority)

    def drop(self, keys: Iterable[Key]) -> int:
        """Take blocks out of the cache, kept ones too; absent keys are passed over.

        Returns
        -------
        int
            How many went.

        Raises
        ------
        ResourceBusyError
            A block is leased (``keys`` names some); nothing has changed.
        """
        with self._storage.lock:
            blocks = [self._blocks[key] for key in dict.fromkeys(keys) if key in self._blocks]
            busy = [block.key for block in blocks if any(page.leases for page in block.pages)]
            if busy:
                raise ResourceBusyError(
                    f"keys: {len(busy)} of {len(blocks)} blocks are leased, such as {busy[0]!r}; "
                    "release the leases first",
                    keys=busy[:8],
                )
            for block in blocks:
                self._remove(block)
            return len(blocks)

    def reserve(self, keys: Sequence[Key], *, priority: int = 0) -> BlockReservation[Key]:
        """Take hot pages for blocks to be computed, moving others down as needed.

        Parameters
        ----------
        keys : sequence
            Distinct, and absent, or of blocks that could not be read when they were last asked for:
            these are dropped.
        priority : int
            Blocks of a lower one leave a level first.

        Raises
        ------
        ValueError
            A key is there already, or reserved; nothing has changed.
        OutOfPagesError
            They do not all fit beside what is leased; nothing has changed.
        """
        with self._storage.lock:
            wanted = set(keys)
            unread = [self._blocks[k] for k in wanted if k in self._blocks and self._is_unread(k)]
            taken = wanted & self._reserved or {
                key for key in wanted if key in self._blocks and not self._is_unread(key)
            }
            if taken or len(wanted) < len(keys):
                raise ValueError(
                    f"keys: {next(iter(taken))!r} is there already or reserved"
                    if taken
                    else "keys: one occurs twice"
                )
            blocks = [_Block(key) for key in keys]
            self._storage.check_room(dict.fromkeys(self._groups, len(blocks)))
            for old in unread:
                self._remove(old)
            made: list[list[Page]] = []
            try:
                for group in self._groups:
                    made.append(self._storage.new_pages(blocks, group, priority=priority))
            except BaseException:
                for some in made:
                    self._storage.discard(some)
                raise
            for block, pages_of in zip(blocks, zip(*made, strict=True), strict=True):
                block.pages = pages_of
            self._reserved |= wanted
            return BlockReservation(self, blocks)

    # ------------------------------------------------------- what leases and reservations call

    def _release(self, blocks: list[_Block[Key]]) -> None:
        with self._storage.lock:
            self._storage.release(page for block in blocks for page in block.pages)
            for block in blocks:
                if any(_failed(page) for page in block.pages):
                    self._forget(block)

    def _commit(self, blocks: list[_Block[Key]], ready: Event) -> None:
        with self._storage.lock:
            pages = [page for block in blocks for page in block.pages]
            self._storage.commit(pages, ready)
            for block in blocks:
                self._reserved.discard(block.key)
                self._blocks[block.key] = block
            self._storage.release(pages)  # those that failed already are dropped now

    def _cancel(self, blocks: list[_Block[Key]]) -> None:
        with self._storage.lock:
            self._storage.discard(page for block in blocks for page in block.pages)
            self._reserved.difference_update(block.key for block in blocks)

    def _dropped(self, page: Page) -> None:
        """Forget the block of a page that the storage dropped, and drop its other pages."""
        block = page.owner
        if isinstance(block, _Block) and self._blocks.get(block.key) is block:
            if page.lost:
                self._note_loss(block)
            del self._blocks[block.key]
            others = [other for other in block.pages if other is not page]
            block.pages = ()  # a page knows its block: nothing is left for the garbage collector
            self._storage.discard(others)

    def _forget(self, block: _Block[Key]) -> None:
        """Take a block whose bytes were lost out of the cache, unless somebody holds it."""
        if self._blocks.get(block.key) is block and not any(p.leases for p in block.pages):
            self._note_loss(block)
            self._remove(block)

    def _remove(self, block: _Block[Key]) -> None:
        """Take a block that nobody leases out of the cache."""
        del self._blocks[block.key]
        pages, block.pages = block.pages, ()
        self._storage.discard(pages)

    def _is_unread(self, key: Key) -> bool:
        """Tell whether a block could not be read the last time, and nobody is trying now."""
        return any(page.unread and not page.leases for page in self._blocks[key].pages)

    def _note_loss(self, block: _Block[Key]) -> None:
        cause = next(page.ready.error for page in block.pages if page.lost)
        log.error("%r is lost: a copy of it failed: %s", block, cause)
        self.lost += 1


def _failed(page: Page) -> bool:
    """Tell whether the copy that was to bring a page's bytes failed; forget it if it did not."""
    if page.ready is DONE or not page.ready.query():
        return False
    if page.ready.error is not None:
        return True
    page.ready = DONE
    return False
