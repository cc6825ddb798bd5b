"""Which slot of a file has which key: found, used, and given up when there is no room."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.eviction import make_policy

__all__ = ["Entry", "SlotDirectory", "Taken"]

Key = TypeVar("Key", bound=Hashable)


class Entry(Generic[Key]):
    """A key in a slot."""

    __slots__ = ("gone", "key", "ready", "slot", "users")

    def __init__(self, key: Key, slot: int, *, ready: bool) -> None:
        self.key = key
        self.slot = slot
        self.ready = ready
        """Whether it can be read."""
        self.users = int(not ready)
        """How many write or read it now."""
        self.gone = False
        """Whether nobody finds it any more; its slot is free when the last user is done."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[Key]):
    """Slots for new keys."""

    entries: list[Entry[Key]]
    """Those to be written, in the order asked."""
    evicted: list[Key]
    """Those that gave way."""
    complete: bool
    """Whether all that was asked for is there, on its way, or among the entries."""


class SlotDirectory(Generic[Key]):
    """Keys in slots. A key is written once and read any number of times; idle ones give way.

    Not thread-safe.

    Parameters
    ----------
    slots : int
        How many there are.
    policy : str
        Who gives way, a name in `kvtier.eviction.POLICIES`.
    restored : iterable of (int, key)
        Slots that hold keys already, oldest first.
    """

    def __init__(self, slots: int, policy: str, restored: Iterable[tuple[int, Key]] = ()) -> None:
        self._policy = make_policy(policy, slots)
        there = {key: slot for slot, key in restored}  # the younger of two of one key
        self._entries = {key: Entry(key, slot, ready=True) for key, slot in there.items()}
        for key in there:
            self._policy.insert(key)
        used = set(there.values())
        self._free = [slot for slot in reversed(range(slots)) if slot not in used]

    def __len__(self) -> int:
        return len(self._entries)

    def ready(self, key: Key) -> bool | None:
        """Tell whether a key can be read by now; None where it is absent."""
        entry = self._entries.get(key)
        return None if entry is None else entry.ready

    def touch(self, keys: Iterable[Key]) -> None:
        """Note a use of keys, in the order of a prefix; absent ones are passed over."""
        self._policy.touch_many([key for key in keys if key in self._policy])

    def take(self, keys: Sequence[Key]) -> Taken[Key]:
        """Take slots for the keys that are absent: for the leading ones, if not all find room.

        Each is the caller's to write until `release` or `lose`. Keys that are there are used.
        """
        self.touch(keys)
        new = [key for key in dict.fromkeys(keys) if key not in self._entries]
        evicted = self._make_room(len(new), set(keys))
        fitting = new[: len(self._free)]
        entries = [Entry(key, self._free.pop(), ready=False) for key in fitting]
        self._entries.update(zip(fitting, entries, strict=True))
        return Taken(entries, evicted, len(fitting) == len(new))

    def _make_room(self, slots: int, wanted: Collection[Key]) -> list[Key]:
        """Evict until so many slots are free, or as far as that goes."""

        def idle(key: Key) -> bool:
            return not self._entries[key].users and key not in wanted

        short = slots - len(self._free)
        if short <= 0:
            return []
        gone = self._policy.evict(short, idle)
        if gone is None:
            gone = self._policy.evict(sum(map(idle, self._policy.victims())), idle) or []
        self._free += [self._entries.pop(key).slot for key in gone]
        return gone

    def hold(self, keys: Iterable[Key]) -> list[Entry[Key]]:
        """Find the keys that can be read; each stays in its slot until `release` or `lose`."""
        found = (self._entries.get(key) for key in keys)
        held = [entry for entry in found if entry is not None and entry.ready]
        for entry in held:
            entry.users += 1
        self._policy.touch_many([entry.key for entry in held])
        return held

    def release(self, entries: Iterable[Entry[Key]]) -> None:
        """Note that keys were written, and can be read now, or that somebody has read them."""
        written = []
        for entry in entries:
            if not entry.ready:
                entry.ready = True
                written.append(entry.key)
            self._let_go(entry)
        self._policy.insert_many(written)

    def lose(self, entries: Iterable[Entry[Key]]) -> list[Entry[Key]]:
        """Note that keys could not be written or read: they are gone; give those newly so."""
        lost = []
        for entry in entries:
            if not entry.gone:
                entry.gone = True
                lost.append(entry)
                del self._entries[entry.key]
                if entry.ready:
                    self._policy.remove(entry.key)
            self._let_go(entry)
        return lost

    def _let_go(self, entry: Entry[Key]) -> None:
        entry.users -= 1
        if entry.gone and not entry.users:
            self._free.append(entry.slot)
