"""What a remote level counts."""

from __future__ import annotations

import threading
from collections import Counter

from kvtier.stats import RemoteStats

__all__ = ["Counts"]


class Counts:
    """Counts pages and blocks, and why they did not come. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = self._sent_bytes = self._fetched = self._fetched_bytes = 0
        self._unsent: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()

    def sent(self, pages: int, page_bytes: int) -> None:
        """Count pages that the store has."""
        with self._lock:
            self._sent += pages
            self._sent_bytes += pages * page_bytes

    def fetched(self, pages: int, page_bytes: int) -> None:
        """Count pages that came."""
        with self._lock:
            self._fetched += pages
            self._fetched_bytes += pages * page_bytes

    def unsent(self, reason: str, pages: int = 1) -> None:
        """Count pages that did not go out."""
        with self._lock:
            self._unsent[reason] += pages

    def missed(self, reason: str, blocks: int = 1) -> None:
        """Count blocks that did not come; none are not counted."""
        if blocks:
            with self._lock:
                self._misses[reason] += blocks

    def stats(self, state: str, degradations: int) -> RemoteStats:
        """Give the figures of this moment."""
        with self._lock:
            return RemoteStats(
                state=state,
                sent_pages=self._sent,
                sent_bytes=self._sent_bytes,
                fetched_pages=self._fetched,
                fetched_bytes=self._fetched_bytes,
                unsent=dict(self._unsent),
                misses=dict(self._misses),
                degradations=degradations,
            )
