"""Priorities over a policy: the lowest goes first, and among equals the policy decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from kvtier.eviction.policy import EvictionPolicy, Key

__all__ = ["ByPriority"]


class ByPriority(EvictionPolicy[Key]):
    """One policy for each priority that is in use.

    Parameters
    ----------
    make : callable
        Makes a policy, given its capacity.
    priority_of : callable
        Gives the priority of a key, an int; it stays the same while the key is present.
    capacity : int, optional
        Keys that the cache holds, whatever their priorities.

    Notes
    -----
    While all keys have one priority, everything is left to its policy.
    """

    __slots__ = ("_by", "_make", "_priority_of")

    def __init__(
        self,
        make: Callable[[int | None], EvictionPolicy[Key]],
        priority_of: Callable[[Key], int],
        capacity: int | None = None,
    ) -> None:
        self._by: dict[int, EvictionPolicy[Key]] = {}  # ascending
        self._make = make
        self._priority_of = priority_of
        super().__init__(capacity)

    @property
    def capacity(self) -> int | None:
        """Keys that the cache holds; None: unbounded."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int | None) -> None:
        EvictionPolicy.capacity.__set__(self, capacity)  # type: ignore[attr-defined]
        for policy in self._by.values():
            policy.capacity = capacity

    def _of(self, priority: int) -> EvictionPolicy[Key]:
        policy = self._by.get(priority)
        if policy is None:
            policy = self._by[priority] = self._make(self._capacity)
            self._by = dict(sorted(self._by.items()))
        return policy

    def insert(self, key: Key) -> None:
        """Add a key as the most recently used of its priority; ValueError if it is present."""
        self._of(self._priority_of(key)).insert(key)

    def insert_many(self, keys: Iterable[Key]) -> None:
        """Add what a request adds, those of each priority together."""
        for priority, some in self._by_priority(keys):
            self._of(priority).insert_many(some)

    def insert_evicted(self, key: Key, above: EvictionPolicy[Key]) -> None:
        """Add a key with what the level above knows of it."""
        priority = self._priority_of(key)
        policy = self._of(priority)
        source = above._by.get(priority) if isinstance(above, ByPriority) else above
        if source is None:
            policy.insert(key)
        else:
            policy.insert_evicted(key, source)

    def touch(self, key: Key) -> None:
        """Note a use of a key; KeyError if it is absent."""
        self._by[self._priority_of(key)].touch(key)

    def touch_many(self, keys: Iterable[Key]) -> None:
        """Note that a request uses keys, those of each priority together."""
        for priority, some in self._by_priority(keys):
            self._by[priority].touch_many(some)

    def _by_priority(self, keys: Iterable[Key]) -> Iterable[tuple[int, list[Key]]]:
        by: dict[int, list[Key]] = {}
        for key in keys:
            by.setdefault(self._priority_of(key), []).append(key)
        return by.items()

    def remove(self, key: Key) -> None:
        """Forget a key; KeyError if it is absent."""
        self._by[self._priority_of(key)].remove(key)

    def victims(self) -> Iterator[Key]:
        """Iterate over all keys, lowest priority first."""
        return chain.from_iterable(policy.victims() for policy in self._by.values())

    def evict(self, n: int, evictable: Callable[[Key], bool] | None = None) -> list[Key] | None:
        """Remove the ``n`` least valuable keys, or none; see `EvictionPolicy.evict`."""
        if len(self._by) == 1:
            return next(iter(self._by.values())).evict(n, evictable)
        chosen = self._choose(n, evictable, self.victims())
        if chosen is None:
            return None
        shares = Counter(map(self._priority_of, chosen))
        for priority, policy in self._by.items():
            # also of none: a policy that remembers its last eviction forgets the one before
            policy.evict(shares[priority], evictable)
        return chosen

    def __len__(self) -> int:
        return sum(map(len, self._by.values()))

    def __contains__(self, key: object) -> bool:
        return any(key in policy for policy in self._by.values())
