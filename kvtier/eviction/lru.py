"""Least recently used: the key whose last use lies furthest back goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain

from kvtier.eviction.policy import EvictionPolicy, Key

__all__ = ["LRU"]


class LRU(EvictionPolicy[Key]):
    """Least recently used. Every operation on one key is O(1)."""

    __slots__ = ("_order",)

    def __init__(
        self, capacity: int | None = None, identity: Callable[[Key], Hashable] | None = None
    ) -> None:
        super().__init__(capacity, identity)
        self._order: OrderedDict[Key, None] = OrderedDict()  # least recently used first

    def insert(self, key: Key) -> None:
        """Add a key as the most recently used; ValueError if it is present."""
        if key in self._order:
            raise ValueError(f"key {key!r} is already present")
        self._order[key] = None

    def touch(self, key: Key) -> None:
        """Make a key the most recently used; KeyError if it is absent."""
        self._order.move_to_end(key)

    def touch_many(self, keys: Iterable[Key]) -> None:
        """Make each key in turn the most recently used; KeyError at the first absent one."""
        move_to_end = self._order.move_to_end
        for key in keys:
            move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget a key; KeyError if it is absent."""
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        """Iterate over all keys, least recently used first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def reference(self, keys: Sequence[Key]) -> int:
        """Run one request against a cache of ``capacity`` keys; see `EvictionPolicy.reference`."""
        order, move_to_end = self._order, self._order.move_to_end
        hits = 0
        rest = iter(keys)
        for missed in rest:
            if missed not in order:
                break
            move_to_end(missed)
            hits += 1
        else:
            return hits
        bound = len(order) + len(keys) if self._capacity is None else self._capacity
        for key in chain((missed,), rest):
            if key in order:
                move_to_end(key)
            else:
                while len(order) >= bound:
                    order.popitem(last=False)
                order[key] = None
        return hits
