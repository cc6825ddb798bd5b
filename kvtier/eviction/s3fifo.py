"""S3-FIFO: three queues, of which a small one lets through only what is used again soon.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator

from kvtier.eviction.policy import EvictionPolicy, Key

__all__ = ["S3FIFO"]

_MOST_USES = 3
"""Uses counted; two bits in the paper."""


class S3FIFO(EvictionPolicy[Key]):
    """Queues S, of a tenth of the capacity, M, and G, of keys evicted from S. All are FIFO.

    A new key goes to S, or to M if G remembers it. Room is made in S while that has its tenth, else
    in M: the oldest key of S goes to M if it was used more than once since it came, and out, to G,
    if not; the oldest key of M goes round again, with one use less, if it was used, and out if not.

    Notes
    -----
    A key costs O(1) amortised: one that stays when its turn comes has been used before.
    """

    __slots__ = ("_ghosts", "_main", "_small")

    def __init__(
        self, capacity: int | None = None, identity: Callable[[Key], Hashable] | None = None
    ) -> None:
        super().__init__(capacity, identity)
        # Uses by key, oldest first.
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        """Add a key; ValueError if it is present."""
        if key in self:
            raise ValueError(f"key {key!r} is already present")
        name = self._name(key)
        if name in self._ghosts:
            del self._ghosts[name]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def touch(self, key: Key) -> None:
        """Count a use of a key; KeyError if it is absent."""
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, _MOST_USES)

    def remove(self, key: Key) -> None:
        """Forget a key; KeyError if it is absent."""
        if key in self._small:
            del self._small[key]
        else:
            del self._main[key]

    def victims(self) -> Iterator[Key]:
        """Iterate over all keys in the order in which they would be evicted."""
        return self._turns([])

    def evict(self, n: int, evictable: Callable[[Key], bool] | None = None) -> list[Key] | None:
        """Remove the next ``n`` keys, or none; see `EvictionPolicy.evict`.

        Keys that are passed over stay where they are in their queue.
        """
        stayed: list[tuple[Key, int]] = []
        chosen = self._choose(n, evictable, self._turns(stayed))
        if chosen is None:
            return None
        for key, uses in stayed:
            self._small.pop(key, None)
            self._main[key] = uses
            self._main.move_to_end(key)
        most = self._main_share()
        for key in chosen:
            if key in self._small:
                del self._small[key]
                self._ghosts[self._name(key)] = None
            else:
                del self._main[key]
        while len(self._ghosts) > most:
            self._ghosts.popitem(last=False)
        return chosen

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def _bound(self) -> int:
        return len(self) if self._capacity is None else self._capacity

    def _main_share(self) -> int:
        """Keys that M is to have at most, and G may have."""
        return max(self._bound() - self._small_share(), 0)

    def _small_share(self) -> int:
        return max(self._bound() // 10, 1)

    def _turns(self, stayed: list[tuple[Key, int]]) -> Iterator[Key]:
        """Yield keys in the order of their eviction; note whose turn came and who stayed, in M."""
        small, main = iter(self._small.items()), iter(self._main.items())
        again: deque[tuple[Key, int]] = deque()  # behind those that are in M now
        n_small, n_main = len(self._small), len(self._main)
        small_share, main_share = self._small_share(), self._main_share()
        while n_small or n_main:
            if n_small and (n_small >= small_share or not n_main) and n_main <= main_share:
                key, uses = next(small)
                n_small -= 1
                if uses <= 1:
                    yield key
                    continue
                n_main += 1
                uses = 0
            else:
                key, uses = next(main, None) or again.popleft()
                if not uses:
                    n_main -= 1
                    yield key
                    continue
                uses -= 1
            again.append((key, uses))
            stayed.append((key, uses))
