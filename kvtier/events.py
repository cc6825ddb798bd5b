"""What happens to the blocks of a cache, for those who keep a picture of it elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Literal

from hostmem.describing import named, one_line
from kvtier.block import Key

__all__ = ["BlockEvent", "EventLog"]

Kind = Literal["stored", "moved", "removed"]


@dataclass(frozen=True, slots=True)
class BlockEvent(Generic[Key]):
    """One thing that happened to the pages of some blocks, all of one pool group."""

    kind: Kind
    """``"stored"``: they are found from now on. ``"moved"``: to another level. ``"removed"``."""
    keys: tuple[Key, ...]
    """Whose pages, in order."""
    group: int
    """Index of the pool group."""
    source: str | None
    """Name of the level they were in; None if stored."""
    level: str | None
    """Name of the level they are in; None if removed."""

    @one_line
    def __repr__(self) -> str:
        places = [place for place in (self.source, self.level) if place is not None]
        return (
            f"<BlockEvent {self.kind}: {named(self.keys)}; group {self.group}, "
            f"{' -> '.join(places)}>"
        )


class EventLog(Generic[Key]):
    """Holds events until somebody takes them; the oldest go when there are too many.

    Not thread-safe: the cache calls it under its lock.

    Parameters
    ----------
    most : int
        Keys that its events may name, all together; 0 for no log at all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._events: deque[tuple[Kind, deque[Key], int, str | None, str | None]] = deque()
        self._keys = 0
        self.dropped = 0
        """Keys in events that went before they were taken, so far."""

    def note(
        self, kind: Kind, keys: Iterable[Key], group: int, source: str | None, level: str | None
    ) -> None:
        """Add an event; one that is like the last is joined to it."""
        new = deque(keys)
        last = self._events[-1] if self._events else None
        if last is not None and (last[0], *last[2:]) == (kind, group, source, level):
            last[1].extend(new)
        elif new:
            self._events.append((kind, new, group, source, level))
        self._keys += len(new)
        while self._keys > self._most:
            self._drop(self._keys - self._most)

    def _drop(self, excess: int) -> None:
        """Let the oldest keys go, at least one."""
        oldest = self._events[0][1]
        gone = min(excess, len(oldest))
        if gone == len(oldest):
            self._events.popleft()
        else:
            for _ in range(gone):
                oldest.popleft()
        self._keys -= gone
        self.dropped += gone

    def take(self) -> list[BlockEvent[Key]]:
        """Give the events since the last call, in order, and forget them."""
        taken = [
            BlockEvent(kind, tuple(keys), group, source, level)
            for kind, keys, group, source, level in self._events
        ]
        self._events.clear()
        self._keys = 0
        return taken
