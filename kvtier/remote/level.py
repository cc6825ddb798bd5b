"""The remote level: what a cache has of a store that hosts share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Generic

from hostmem import Event
from kvtier.block import Key
from kvtier.block_index import BlockIndex
from kvtier.config import CacheTier, RemoteCacheTierConfig
from kvtier.page import Page
from kvtier.plan import cold_page_bytes
from kvtier.remote.client import Connect, MooncakeClient
from kvtier.remote.counts import Counts
from kvtier.remote.flights import Flights
from kvtier.remote.inbox import Inbox
from kvtier.remote.link import Link
from kvtier.remote.names import ObjectNames
from kvtier.remote.outbox import Outbox
from kvtier.remote.staging import Staging
from kvtier.stats import RemoteStats
from kvtier.storage import TierStorage

__all__ = ["RemoteLevel"]


class RemoteLevel(Generic[Key]):
    """Sends blocks of one cache to a store, and fetches others. It ends with the storage.

    Nothing here waits for the store, but `lookup` and `close`; nothing fails because of it.

    Parameters
    ----------
    storage : TierStorage
        Built from a configuration with a remote tier.
    index : BlockIndex
        The blocks of its cache.
    config : RemoteCacheTierConfig
        The tier.
    connect : callable, optional
        Makes the client of another store than Mooncake's.
    """

    def __init__(
        self,
        storage: TierStorage,
        index: BlockIndex[Key],
        config: RemoteCacheTierConfig,
        connect: Connect | None = None,
    ) -> None:
        self._storage = storage
        self._pid = os.getpid()
        self._closed = False
        self._mode = config.mode
        names = ObjectNames(storage.config)
        self._counts = Counts()
        self._link = Link(config, MooncakeClient if connect is None else connect)
        self._coming = Flights(config.in_flight, config.deadline)
        self._going = Flights(config.in_flight, config.deadline)
        tiers = [level.tier for level in storage.plan.levels]
        self._host = tiers.index(CacheTier.HOST) if CacheTier.HOST in tiers else None
        self._staging: Staging | None = None
        if storage.plan.levels[0].hot:
            sizes = cold_page_bytes(storage.config.cold_page_codec, storage.plan.groups)
            self._staging = Staging(storage.device, sizes, 2 * config.in_flight)
        args = (self._link, names, self._counts)
        self._in = Inbox(storage, index, *args, self._coming, self._staging)
        self._out = Outbox(storage, *args, self._going, self._staging)
        try:
            storage.attach_remote(self._left, self.stats, self.close)
        except BaseException:
            self.close()
            raise

    def stored(self, pages: Iterable[Page | None]) -> None:
        """Note that pages were computed; the caller holds the storage's lock."""
        if self._mode == "write-through" and self._pid == os.getpid():
            self._out.offer([page for page in pages if page is not None])

    def _left(self, pages: Sequence[Page]) -> None:
        """Note that pages are about to leave a level."""
        if self._mode == "write-back":
            self._out.offer([page for page in pages if page.level == self._host])

    def fetch(self, keys: Sequence[Key], before: int) -> Event:
        """Begin to fetch blocks; see `Inbox.fetch`."""
        return self._in.fetch(keys, before)

    def lookup(self, keys: Sequence[Key], before: int, timeout: float | None = None) -> int:
        """Count the leading blocks that the store has; see `Inbox.lookup`.

        A forked child has neither the threads nor the connection, and finds none.
        """
        return self._in.lookup(keys, before, timeout) if self._pid == os.getpid() else 0

    def stats(self) -> RemoteStats:
        """Give the figures of this moment."""
        health = self._link.health
        state = "closed" if self._closed else health.state
        return self._counts.stats(state, health.degradations)

    def close(self) -> None:
        """Wait for the calls that are under way, and leave the store. Idempotent."""
        if self._closed:
            return
        self._in.close()
        self._out.close()
        ended = self._link.close()
        self._closed = True
        if self._in.strays and not ended:  # what may still be written to must stay mapped
            self._storage.latch.close(RuntimeError("a store that was left may write to its slots"))
            _left_to_it.append(self._staging)
        elif self._staging is not None:
            self._staging.close()


_left_to_it: list[Staging | None] = []
"""Memory that is never given back."""
