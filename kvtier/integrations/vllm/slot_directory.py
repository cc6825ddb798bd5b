"""Which slot of a file has which key: found, used, and given up when there is no room."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.eviction import make_policy

__all__ = ["SlotDirectory", "Taken"]

Key = TypeVar("Key", bound=Hashable)


class _Entry:
    __slots__ = ("readers", "ready", "slot")

    def __init__(self, slot: int, *, ready: bool) -> None:
        self.slot = slot
        self.ready = ready
        self.readers = 0


@dataclass(frozen=True, slots=True)
class Taken(Generic[Key]):
    """Slots for new keys."""

    keys: list[Key]
    """Those that are to be written, in the order asked."""
    slots: list[int]
    """Where."""
    evicted: list[Key]
    """Those that gave way."""
    complete: bool
    """Whether all that was asked for is there, on its way, or among the keys."""


class SlotDirectory(Generic[Key]):
    """Keys by slot. A key is written once, may be read by several at a time, and goes when idle.

    Not thread-safe.

    Parameters
    ----------
    slots : int
        How many there are.
    policy : str
        Who gives way, a name in `kvtier.eviction.POLICIES`.
    """

    def __init__(self, slots: int, policy: str) -> None:
        self._policy = make_policy(policy, slots)
        self._entries: dict[Key, _Entry] = {}
        self._free = list(reversed(range(slots)))

    def __len__(self) -> int:
        return len(self._entries)

    def restore(self, key: Key, slot: int) -> None:
        """Note a key that was in a slot before."""
        self._free.remove(slot)
        self._entries[key] = _Entry(slot, ready=True)
        self._policy.insert(key)

    def ready(self, key: Key) -> bool | None:
        """Tell whether a key can be read; None where it is absent."""
        entry = self._entries.get(key)
        return None if entry is None else entry.ready

    def touch(self, keys: Iterable[Key]) -> None:
        """Note a use of keys, in the order of a prefix; absent ones are passed over."""
        self._policy.touch_many([key for key in keys if key in self._policy])

    def take(self, keys: Sequence[Key]) -> Taken[Key]:
        """Take slots for the keys that are absent; for the leading ones, if there is no more room.

        They are not ready before `release`. Those that are there are used.
        """
        self.touch(keys)
        wanted = set(keys)
        new = [key for key in dict.fromkeys(keys) if key not in self._entries]
        evicted = self._make_room(len(new), wanted)
        written = new[: len(self._free)]
        slots = [self._free.pop() for _ in written]
        for key, slot in zip(written, slots, strict=True):
            self._entries[key] = _Entry(slot, ready=False)
        return Taken(written, slots, evicted, len(written) == len(new))

    def _make_room(self, slots: int, wanted: Collection[Key]) -> list[Key]:
        """Evict until so many slots are free, or as far as that goes."""

        def idle(key: Key) -> bool:
            return not self._entries[key].readers and key not in wanted

        short = slots - len(self._free)
        if short <= 0:
            return []
        gone = self._policy.evict(short, idle)
        if gone is None:
            gone = self._policy.evict(sum(map(idle, self._policy.victims())), idle) or []
        self._free += reversed([self._entries.pop(key).slot for key in gone])
        return gone

    def hold(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Give the slots of the keys that can be read, and keep them until `release`."""
        held = {}
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.ready:
                entry.readers += 1
                held[key] = entry.slot
        self._policy.touch_many(held)
        return held

    def release(self, keys: Sequence[Key]) -> None:
        """Note that keys were written, all at once, or that somebody has read them."""
        written = []
        for key in keys:
            entry = self._entries.get(key)
            ...

    def lose(self, keys: Iterable[Key]) -> list[int]:
        ...
