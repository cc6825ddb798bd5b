"""A page: where one block's bytes of one pool group are."""

from __future__ import annotations

from collections.abc import Hashable

from hostmem.device import DONE, Event

__all__ = ["Page"]


class Page:
    """A block's bytes of one pool group, in one slot of one level.

    The storage moves it; whoever holds a lease may rely on its place.
    """

    __slots__ = ("fences", "group", "kept", "leases", "level", "owner", "ready", "slot")

    def __init__(self, owner: Hashable, group: int, slot: int, fences: tuple[Event, ...]) -> None:
        self.owner = owner
        """What the page belongs to; told to whoever wants to know when it is dropped."""
        self.group = group
        """Index of its pool group."""
        self.level = 0
        """Index of the level it is in."""
        self.slot = slot
        """Its slot there."""
        self.ready: Event = DONE
        """Of the copy that brought its bytes: nobody reads it earlier."""
        self.fences = fences
        """Of others that may still use a new page's slot: nobody writes it earlier."""
        self.leases = 0
        """How many hold it where it is."""
        self.kept = False
        """Whether it may be moved down, but not dropped."""

    @property
    def lost(self) -> bool:
        """Whether the copy that was to bring its bytes failed."""
        return self.ready.query() and self.ready.error is not None

    def __repr__(self) -> str:
        return f"<Page of {self.owner!r}, group {self.group}, level {self.level} slot {self.slot}>"
