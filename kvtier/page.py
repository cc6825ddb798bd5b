"""A page: where one block's bytes of one pool group are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from hostmem.describing import one_line
from hostmem.device import DONE, Event

__all__ = ["Departure", "Page"]


class Departure:
    """Where a page was before it was moved."""

    __slots__ = ("fences", "level", "page", "ready", "slot")

    def __init__(self, page: Page, level: int, slot: int, ready: Event) -> None:
        self.page = page
        self.level = level
        self.slot = slot
        self.ready = ready
        """Of the copy that brought its bytes there."""
        self.fences = page.fences
        """Of others that use the slot, the copy that moves the page aside."""


class Page:
    """A block's bytes of one pool group, in one slot of one level.

    The storage moves it; whoever holds a lease may rely on its place.
    """

    __slots__ = (
        "fences",
        "group",
        "kept",
        "leases",
        "level",
        "origin",
        "owner",
        "priority",
        "ready",
        "slot",
        "stored",
        "unread",
    )

    def __init__(
        self,
        owner: Hashable,
        group: int,
        slot: int,
        fences: tuple[Event, ...],
        priority: int = 0,
        level: int = 0,
    ) -> None:
        self.owner = owner
        """What the page belongs to; told to whoever wants to know when it is dropped."""
        self.group = group
        """Index of its pool group."""
        self.level = level
        """Index of the level it is in."""
        self.slot = slot
        """Its slot there; -1 once it was given back."""
        self.ready: Event = DONE
        """Of the copy that brought its bytes: nobody reads it earlier."""
        self.fences = fences
        """Of others that use its slot: of a new page, those before it, and nobody writes it
        earlier; of a page in use, those that copy from it, and nobody gets the slot earlier."""
        self.leases = 0
        """How many hold it where it is."""
        self.kept = False
        """Whether it may be moved down, but not dropped."""
        self.priority = priority
        """What leaves a level first, before its policy is asked: the lowest."""
        self.origin: Departure | None = None
        """Where its last move took it from."""
        self.stored: tuple[int, ...] = ()
        """Slots of a file that outlives the process where its bytes may be, under its name."""
        self.unread = False
        """Whether it is where it was because the last attempt to read it there failed."""

    @property
    def content(self) -> Hashable:
        """What names its bytes, which may come back in another page: the key of its owner."""
        return cast(Hashable, getattr(self.owner, "key", self.owner))

    @property
    def freed(self) -> bool:
        """Whether its slot was given back: it is nowhere any more."""
        return self.slot < 0

    @property
    def lost(self) -> bool:
        """Whether the copy that was to bring its bytes failed."""
        return self.ready.query() and self.ready.error is not None

    @one_line
    def __repr__(self) -> str:
        return f"<Page of {self.owner!r}, group {self.group}, level {self.level} slot {self.slot}>"
