"""What a sequence holds of a cache: blocks, room for more, and the work that uses them."""

from __future__ import annotations

import contextlib
import os

from hostmem import Event
from hostmem.device import DONE
from kvtier.blocks import BlockCache
from kvtier.leases import BlockLease, BlockReservation
from kvtier.transfer.jobs import all_of
from kvtier.transfer.page_events import gathered

__all__ = ["Holding", "unproven"]


class Holding:
    """The blocks of one sequence. Not thread-safe; it does not refer to the sequence.

    Parameters
    ----------
    cache : BlockCache
        Where the blocks are.
    lease : BlockLease
        Those that the sequence begins with.
    """

    __slots__ = ("_cache", "_private", "arrivals", "lease", "room", "steps")

    def __init__(self, cache: BlockCache[bytes], lease: BlockLease[bytes]) -> None:
        self._cache = cache
        self._private: bytes | None = None  # while put away, the key of the partly filled block
        self.lease = lease
        """The full blocks, from the first token on."""
        self.arrivals: list[Event] = list(lease.events)
        """Of copies that bring blocks, or others' work on them, not known to have ended well."""
        self.room: BlockReservation[bytes] | None = None
        """The blocks behind those leased, of which the first may be partly filled."""
        self.steps: list[Event] = []
        """Of the sequence's own work on the pages, not known to have ended well."""

    def add(self, room: BlockReservation[bytes]) -> None:
        """Hold more room, behind what there is."""
        if self.room is None:
            self.room = room
        else:
            self.room.extend(room)

    def commit(self, keys: list[bytes]) -> BlockLease[bytes]:
        """Commit the leading blocks of the room; the lease of those, for a call of `extend`."""
        assert self.room is not None  # for there is something in it
        ready = self._computed()
        full = self.room.commit_leased(ready, keys)
        self.arrivals += (event for event in full.events if event is not ready)
        return full

    def _computed(self) -> Event:
        """Give the event of all that what was computed so far depends on."""
        self.steps = unproven(self.steps)
        self.arrivals = unproven(self.arrivals)
        needed = [*self.arrivals, *self.steps]
        return needed[0] if len(needed) == 1 else next(iter(gathered(needed)), DONE)

    def forget(self, group: int, blocks: int) -> None:
        """Let go of the pages of the first blocks that a window does not show any more."""
        self.lease.forget(group, blocks, all_of(self.steps))

    def release(self) -> None:
        """Let everything go; nobody gets the slots before the steps have finished."""
        after = all_of(self.steps)
        room, private = self.room, self._private
        self.room = self._private = None
        self.lease.release(after)
        if room is not None:
            room.cancel(after)
        if private is not None:
            self._cache.drop([private])

    def put_away(self, partly_filled: bool) -> None:
        """Let everything go, but keep the partly filled block under a key that nobody else knows.

        It is in the cache, where it can be moved, and is not dropped before `release`.
        """
        private = b"private" + os.urandom(16) if partly_filled else None
        if private is not None:
            self.lease.extend(self.commit([private]))
            self._cache.keep([private])  # while it is leased: it cannot go in between
        self.release()
        self._private = private

    def take_back(self, keys: list[bytes]) -> BlockReservation[bytes] | None:
        """Hold the leading full blocks again and, if these are all, the partly filled one.

        Returns
        -------
        BlockReservation, optional
            The partly filled block; None if there is none, or nothing that it could follow.

        Raises
        ------
        OutOfPagesError
            They do not fit; nothing has changed.
        """
        room = None
        lease = self._cache.acquire(keys)
        try:
            if self._private is not None:
                if len(lease) == len(keys):
                    with contextlib.suppress(KeyError):  # a copy of it failed
                        room = self._cache.withdraw([self._private])
                if room is None:
                    self._cache.drop([self._private])
        except BaseException:
            lease.release()
            raise
        self._private = None
        self.lease = lease
        self.room = room
        self.arrivals = [*lease.events, *(room.fences if room is not None else ())]
        self.steps = []  # the blocks have them among their events, and the slots as fences
        return room


def unproven(events: list[Event]) -> list[Event]:
    """Leave out the events that have finished well."""
    return [event for event in events if not event.query() or event.error is not None]
