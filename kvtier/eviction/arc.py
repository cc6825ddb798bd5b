"""ARC: two lists, of keys used once and of keys used again, and a share that adapts.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, islice
from math import ceil

from kvtier.eviction.policy import EvictionPolicy, Key

__all__ = ["ARC"]


class ARC(EvictionPolicy[Key]):
    """Adaptive replacement. Every operation on one key is O(1).

    T1 holds keys that were used once lately, T2 those that were used at least twice; B1 and B2
    remember what was evicted from each. T1 is to have ``target`` keys. A key of B1 that comes back
    shows that T1 was too small, one of B2 that it was too large. The four lists together hold at
    most twice the capacity, T1 and B1 at most the capacity.

    Where a cache evicts before it inserts, a victim is chosen before the key to come is known:
    the target moves afterwards, and a key of B2 does not take the place of one of T1 when T1 has
    just what it is to have. `reference` does as the paper does.
    """

    __slots__ = ("_b1", "_b2", "_t1", "_t2", "_target")

    def __init__(
        self, capacity: int | None = None, identity: Callable[[Key], Hashable] | None = None
    ) -> None:
        super().__init__(capacity, identity)
        # Least recently used first, all four.
        self._t1: OrderedDict[Key, None] = OrderedDict()
        self._t2: OrderedDict[Key, None] = OrderedDict()
        self._b1: OrderedDict[Hashable, None] = OrderedDict()
        self._b2: OrderedDict[Hashable, None] = OrderedDict()
        self._target = 0.0

    @property
    def target(self) -> float:
        """Keys that T1 is to have, learned."""
        return self._target

    def insert(self, key: Key) -> None:
        """Add a key, to T2 if it is remembered; ValueError if it is present."""
        if key in self:
            raise ValueError(f"key {key!r} is already present")
        name = self._name(key)
        self._adapt(name)
        self._place(key, name)

    def touch(self, key: Key) -> None:
        """Make a key the most recently used one of T2; KeyError if it is absent."""
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        else:
            self._t2.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget a key; KeyError if it is absent."""
        if key in self._t1:
            del self._t1[key]
        else:
            del self._t2[key]

    def victims(self) -> Iterator[Key]:
        """Iterate over all keys: those of T1 beyond its target, then T2, then the rest of T1."""
        beyond = max(ceil(len(self._t1) - self._target), 0)
        return chain(islice(self._t1, beyond), self._t2, islice(self._t1, beyond, None))

    def evict(self, n: int, evictable: Callable[[Key], bool] | None = None) -> list[Key] | None:
        """Remove the ``n`` least valuable keys, or none; see `EvictionPolicy.evict`."""
        return self._evict(n, evictable, self._demote)

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def reference(self, keys: Sequence[Key]) -> int:
        """Run one request against a cache of ``capacity`` keys; see `EvictionPolicy.reference`."""
        hits, prefix_held = 0, True
        for key in keys:
            if key in self:
                self.touch(key)
                hits += prefix_held
                continue
            prefix_held = False
            name = self._name(key)
            self._adapt(name)
            if self._capacity is not None:
                at_target = name in self._b2
                while len(self) >= self._capacity:
                    self._replace(at_target)
            self._place(key, name)
        return hits

    def _adapt(self, name: Hashable) -> None:
        """Learn from a key that comes back after its eviction."""
        once, again = len(self._b1), len(self._b2)
        if name in self._b1:
            bound = len(self) if self._capacity is None else self._capacity
            self._target = min(self._target + max(again / once, 1), bound)
        elif name in self._b2:
            self._target = max(self._target - max(once / again, 1), 0.0)

    def _replace(self, at_target: bool) -> None:
        """Evict one key; with ``at_target``, from T1 if that has just what it is to have."""
        n = len(self._t1)
        from_t1 = n > self._target or (at_target and n == self._target)
        self._demote(next(iter(self._t1 if self._t1 and (from_t1 or not self._t2) else self._t2)))

    def _demote(self, key: Key) -> None:
        """Evict a key and remember it."""
        if key in self._t1:
            del self._t1[key]
            self._b1[self._name(key)] = None
        else:
            del self._t2[key]
            self._b2[self._name(key)] = None

    def _place(self, key: Key, name: Hashable) -> None:
        """Put a key in its list, and forget what the four lists have too many."""
        if name in self._b1:
            del self._b1[name]
            self._t2[key] = None
        elif name in self._b2:
            del self._b2[name]
            self._t2[key] = None
        else:
            self._t1[key] = None
        bound = len(self) if self._capacity is None else self._capacity
        while self._b1 and len(self._t1) + len(self._b1) > bound:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * bound:
            self._b2.popitem(last=False)
