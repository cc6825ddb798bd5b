"""What an eviction policy is: an order of worth over keys, and how a request changes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from hostmem.describing import one_line

__all__ = ["EvictionPolicy"]

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(ABC, Generic[Key]):
    """Orders the keys of a cache by how little would be lost with each.

    A policy knows keys and nothing else: the cache decides when to insert, and whether a victim
    may go at all. It is used in two ways. A cache with real blocks makes room itself, by `evict`,
    before it inserts; what one request uses and adds it tells by `touch_many` and `insert_many`,
    so that a policy may learn from a key's depth in its prefix and from what was asked together. A
    replay of metadata calls `reference` with the keys of one whole request.

    Parameters
    ----------
    capacity : int, optional
        Keys that the cache holds; None: unbounded.
    identity : callable, optional
        Gives what a key stands for, hashable: policies that remember evicted keys know by it
        which new key is an old one. By default the key itself, which serves where the same
        content always has an equal key.

    Raises
    ------
    ValueError
        If the capacity is below 1.

    Notes
    -----
    Not thread-safe: callers hold the lock of the level.
    """

    __slots__ = ("_capacity", "_identity")

    _capacity: int | None

    def __init__(
        self, capacity: int | None = None, identity: Callable[[Key], Hashable] | None = None
    ) -> None:
        self.capacity = capacity
        self._identity = identity

    @property
    def capacity(self) -> int | None:
        """Keys that the cache holds; None: unbounded.

        Set it when a level's size changes. Keys beyond a smaller one stay until the cache evicts
        them, or until the next `reference` that needs room.
        """
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int | None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity: {capacity} is below the minimum of 1 key")
        self._capacity = capacity

    @one_line
    def __repr__(self) -> str:
        most = "" if self._capacity is None else f" of at most {self._capacity:,}"
        return f"<{type(self).__name__}: {len(self):,} keys{most}>"

    @abstractmethod
    def insert(self, key: Key) -> None:
        """Add a key as the most recently used; ValueError if it is present."""

    def insert_many(self, keys: Iterable[Key]) -> None:
        """Add what a request adds, in the order of its prefix; ValueError at the first present one.

        A policy may tell from the keys together which it would rather not have been given: these
        are its next victims. By default it is an `insert` of each.
        """
        for key in keys:
            self.insert(key)

    def insert_evicted(self, key: Key, above: EvictionPolicy[Key]) -> None:
        """Add a key that the policy of the level above gave at its last eviction.

        A policy that learns may take over what that one knows; by default it is an `insert`.
        """
        self.insert(key)

    @abstractmethod
    def touch(self, key: Key) -> None:
        """Note a use of a key; KeyError if it is absent."""

    def touch_many(self, keys: Iterable[Key]) -> None:
        """Note that a request uses keys, in the order of its prefix; KeyError at an absent one."""
        for key in keys:
            self.touch(key)

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Forget a key for a reason other than its worth; KeyError if it is absent."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Iterate over all keys, least valuable first; the order is not to change meanwhile."""

    @abstractmethod
    def __len__(self) -> int:
        """Give the number of keys present."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Say whether a key is present."""

    def evict(self, n: int, evictable: Callable[[Key], bool] | None = None) -> list[Key] | None:
        """Remove the ``n`` least valuable keys, or none.

        A policy that remembers what it evicted, unlike what was removed, overrides this.

        Parameters
        ----------
        n : int
            Keys to remove.
        evictable : callable, optional
            Says whether a key may go; by default all may. It must not change the policy.

        Returns
        -------
        list or None
            The keys, least valuable first; None, and nothing changed, if too few may go.

        Notes
        -----
        Asks about keys only until ``n`` were found.
        """
        return self._evict(n, evictable, self.remove)

    def _evict(
        self, n: int, evictable: Callable[[Key], bool] | None, remove: Callable[[Key], None]
    ) -> list[Key] | None:
        """Do what `evict` says, and take each key out with ``remove``."""
        chosen = self._choose(n, evictable, self.victims())
        for key in chosen or ():
            remove(key)
        return chosen

    @staticmethod
    def _choose(
        n: int, evictable: Callable[[Key], bool] | None, candidates: Iterator[Key]
    ) -> list[Key] | None:
        """Give the first ``n`` candidates that may go; None if there are fewer."""
        if n < 0:
            raise ValueError(f"n: {n} keys; cannot evict less than 0")
        if evictable is not None:
            candidates = filter(evictable, candidates)
        chosen = list(islice(candidates, n))
        return chosen if len(chosen) == n else None

    def _name(self, key: Key) -> Hashable:
        """Give what a key is remembered by."""
        return key if self._identity is None else self._identity(key)

    def reference(self, keys: Sequence[Key]) -> int:
        """Run one request against a cache of ``capacity`` keys.

        Each key in turn is touched if it is present; otherwise it is inserted, after as many
        evictions as that takes.

        Parameters
        ----------
        keys : sequence
            The keys of one request, in the order of its prefix.

        Returns
        -------
        int
            Hits: keys present before the first absent one. A key that is present behind a miss
            is touched, but no hit, because its prefix has to be computed anew.
        """
        hits, prefix_held = 0, True
        for key in keys:
            if key in self:
                self.touch(key)
                hits += prefix_held
            else:
                prefix_held = False
                if self._capacity is not None and len(self) >= self._capacity:
                    self.evict(len(self) - self._capacity + 1)
                self.insert(key)
        return hits
