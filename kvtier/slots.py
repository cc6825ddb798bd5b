"""Ids of fixed-size slots: which are in use, which may be reused, and after what work.

One allocator serves one pool group; it hands out numbers and never touches memory. Free slots are
of two kinds. *Fresh* ids were never handed out; they ascend from 0, so that memory is first used
in the order in which it is committed. *Recycled* ids came back, either finished or still *in
flight*: given back while some submitted work, marked by an event, may read or write them yet.

Recycled ids lie in one ring of 32-bit integers, the finished ones before those in flight::

    head -> | ready ... | in flight, in release order ... | unused |
                          '-- runs of (event, count) --'

so that work which finishes in order is recognised by moving the border between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hostmem.describing import one_line
from hostmem.errors import OutOfPagesError, ResourceBusyError

__all__ = ["Event", "SlotAllocator", "SlotStatistics", "Slots"]

Ids = npt.NDArray[np.int32]

_MOST_SLOTS = int(np.iinfo(np.int32).max)
_MOST_PLACES = 1 << 16  # what a 16-bit integer tells apart
_NAMED = 8  # how many slots an error message names at most


class Event(Protocol):
    """Marks submitted work."""

    def query(self) -> bool:
        """Say, without waiting or raising, whether the work has ended, well or badly."""


@dataclass(slots=True, eq=False)
class Slots:
    """What one allocation got."""

    ids: Ids
    """The slots, in the order of preference: ready, fresh, in flight, fresh beyond the mark."""
    fences: tuple[Event, ...]
    """The distinct events that work on these slots must wait for; mostly none."""


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """The state of an allocator at one moment, in slots."""

    n_slots: int
    """The present size: ids are below it."""
    capacity: int
    """What the size may grow to."""
    in_use: int
    """Handed out and not given back."""
    ready: int
    """Recycled, and their work seen to have finished."""
    in_flight: int
    """Recycled, and their work not yet seen to have finished."""
    fresh: int
    """Never handed out."""
    held: int
    """Recycled, and withheld: a shrink is being prepared, or their memory failed."""
    peak_in_use: int
    """The most that were ever in use at once."""
    released: int
    """Slots given back so far, in total."""


class SlotAllocator:
    """Hands out slot ids, the cheapest to use first.

    An allocation takes, in this order: recycled slots whose work has finished; fresh ids below
    the usable mark, ascending; recycled slots still in flight, oldest first, with their events;
    fresh ids above the mark. It never waits: the caller waits for the events it is handed, on a
    stream, and for the memory of the ids.

    Parameters
    ----------
    n_slots : int
        The size at first; at least 1.
    max_slots : int, optional
        What `resize` may grow it to; by default ``n_slots``. At most 2**31 - 1.
    usable : callable, optional
        Says how many slots, from 0, have usable memory now; by default all. Asked only when
        fresh ids compete with slots in flight, or memory failed.
    failed : callable, optional
        Says whether the others will not have any, for now: meanwhile none of them is handed out.
        By default they will. Asked by every allocation.

    Notes
    -----
    Not thread-safe: callers hold the lock of the level. Bookkeeping is 7 bytes a slot, and about
    16 more for each release in flight.
    """

    __slots__ = (
        "_capacity",
        "_counts",
        "_events",
        "_failed",
        "_flying",
        "_fresh",
        "_goal",
        "_head",
        "_held",
        "_in_use",
        "_limit",
        "_n_slots",
        "_peak",
        "_places",
        "_ready",
        "_released",
        "_ring",
        "_usable",
        "_used",
    )

    def __init__(
        self,
        n_slots: int,
        *,
        max_slots: int | None = None,
        usable: Callable[[], int] | None = None,
        failed: Callable[[], bool] | None = None,
    ) -> None:
        capacity = n_slots if max_slots is None else max_slots
        if not 1 <= n_slots <= capacity <= _MOST_SLOTS:
            raise ValueError(
                f"n_slots: {n_slots} of at most {capacity} slots; "
                f"both must be in 1..{_MOST_SLOTS}, the first no more than the second"
            )
        self._n_slots = n_slots
        self._capacity = capacity
        self._usable = usable
        self._failed = failed
        self._used = np.zeros(n_slots, np.bool_)
        self._places = np.empty(n_slots, np.uint16)  # by id: its place in the last release
        self._ring: Ids = np.empty(n_slots, np.int32)
        self._head = 0  # index in the ring of the first ready id
        self._ready = 0  # how many are ready, from the head
        self._flying = 0  # how many are in flight, behind the ready ones
        self._events: deque[Event] = deque()  # of the runs in flight, oldest first
        self._counts: deque[int] = deque()  # the length of each run
        self._fresh = 0  # ids from here on were never handed out
        self._goal = n_slots  # what a shrink that is being prepared will leave
        self._limit = n_slots  # ids from here on are not handed out now
        self._held: list[tuple[Ids, Event | None]] = []  # recycled ids beyond the limit
        self._in_use = 0
        self._peak = 0
        self._released = 0

    @property
    def n_slots(self) -> int:
        """The present size: ids are below it."""
        return self._n_slots

    @property
    def capacity(self) -> int:
        """What the size may grow to."""
        return self._capacity

    @property
    def in_use(self) -> int:
        """Slots handed out and not given back."""
        return self._in_use

    @property
    def limit(self) -> int:
        """Ids from here on are not handed out: ``n_slots``, or less while a shrink is prepared."""
        return self._limit

    @property
    def available(self) -> int:
        """Slots that an allocation could get now, those in flight included."""
        self._follow_memory()
        return self._ready + self._flying + max(0, self._limit - self._fresh)

    def allocate(self, n: int) -> Slots:
        """Take ``n`` slots, or none.

        Returns
        -------
        Slots
            The ids, and the events to wait for before touching them.

        Raises
        ------
        OutOfPagesError
            If fewer are available (``wanted``, ``free``); nothing has changed.
        ValueError
            If ``n`` is negative.

        Notes
        -----
        O(n) while finished slots suffice; otherwise also one query for each run in flight.
        """
        fences: tuple[Event, ...] = ()
        self._follow_memory()
        if 0 <= n <= self._ready:
            ids = self._peek(0, n)
            self._drop(n)
            self._ready -= n
        else:
            ids, fences = self._collect(n)
        # numpy is twice as fast with indices of its own type
        self._used[ids.astype(np.intp)] = True
        self._in_use = in_use = self._in_use + n
        if in_use > self._peak:
            self._peak = in_use
        return Slots(ids, fences)

    def allocate_one(self) -> tuple[int, Event | None]:
        """Take one slot: its id, and the event to wait for, if any.

        Raises
        ------
        OutOfPagesError
            If none is available.
        """
        fence: Event | None = None
        self._follow_memory()
        if not self._ready and self._flying:
            self._poll(1)
        if self._ready:
            slot = self._ring.item(self._head)
            self._drop(1)
            self._ready -= 1
        elif self._fresh < self._limit and (not self._flying or self._fresh < self._mark()):
            slot = self._fresh
            self._fresh = slot + 1
        elif self._flying:
            slot = self._ring.item(self._head)
            self._drop(1)
            self._flying -= 1
            fence = self._events[0]
            self._counts[0] -= 1
            if not self._counts[0]:
                self._counts.popleft()
                self._events.popleft()
        else:
            raise self._out_of_pages(1)
        self._used[slot] = True
        self._in_use = in_use = self._in_use + 1
        if in_use > self._peak:
            self._peak = in_use
        return slot, fence

    def release(
        self, ids: Sequence[int] | npt.NDArray[np.integer], event: Event | None = None
    ) -> None:
        """Give slots back.

        Parameters
        ----------
        ids : sequence of int
            Slots in use, each once, in any order.
        event : Event, optional
            Marks the last work that touches them; None: there is none.

        Raises
        ------
        ValueError
            If an id was never handed out, is not in use or occurs twice; nothing has changed.
        """
        index = self._in_use_only(ids)
        if event is not None and event.query():
            event = None
        self._used[index] = False
        self._in_use -= len(index)
        self._released += len(index)
        self._keep(index.astype(np.int32), event)

    def reclaim(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> bool:
        """Take exactly these slots into use, if all of them are free.

        Parameters
        ----------
        ids : sequence of int
            Distinct slots below ``n_slots``. Whoever names them knows what may still use them.

        Returns
        -------
        bool
            False, and nothing changed, if one is in use or withheld.

        Raises
        ------
        ValueError
            If an id is not in 0..``n_slots`` - 1, or occurs twice; nothing has changed.

        Notes
        -----
        O(n_slots). Fresh ids that are passed over count as recycled from then on.
        """
        index = np.asarray(ids, np.intp)
        wanted = np.zeros(self._n_slots, np.bool_)
        if index.size and not 0 <= index.min() <= index.max() < self._n_slots:
            raise ValueError(f"ids: {ids!r} are not all in 0..{self._n_slots - 1}")
        wanted[index] = True
        if np.count_nonzero(wanted) < len(index):
            raise ValueError(f"ids: one of {ids!r} occurs more than once")
        self._follow_memory()
        if wanted[self._limit :].any() or self._used[index].any():
            return False
        recycled = self._peek(0, self._ready + self._flying)
        stays = ~wanted[recycled]
        ready, flying = recycled[: self._ready], recycled[self._ready :]
        ready, flying = ready[stays[: self._ready]], flying[stays[self._ready :]]
        runs = np.repeat(np.arange(len(self._counts)), self._counts)[stays[self._ready :]]
        counts = np.bincount(runs, minlength=len(self._counts)).tolist()
        top = max(self._fresh, int(index.max(initial=-1)) + 1)
        passed = np.arange(self._fresh, top, dtype=np.int32)
        passed = passed[~wanted[passed]]
        self._head = 0
        self._place(0, np.concatenate((ready, passed, flying)))
        self._ready, self._flying, self._fresh = len(ready) + len(passed), len(flying), top
        self._events = deque(compress(self._events, counts))
        self._counts = deque(filter(None, counts))
        self._used[index] = True
        self._in_use += len(index)
        self._peak = max(self._peak, self._in_use)
        return True

    def live_above(self, limit: int) -> Ids:
        """Give the ids in use at or above ``limit``, ascending: what stands against a shrink."""
        return np.flatnonzero(self._used[limit : self._fresh]).astype(np.int32) + np.int32(limit)

    def begin_shrink(self, limit: int) -> None:
        """Hand out no id at or above ``limit`` until `resize` or `cancel_shrink`.

        Meanwhile slots beyond the limit are moved or dropped by the caller, and released.

        Raises
        ------
        ValueError
            If the limit is not in 1..``n_slots``.
        ResourceBusyError
            If another shrink is being prepared.
        """
        if not 1 <= limit <= self._n_slots:
            raise ValueError(f"limit: {limit} is not in 1..{self._n_slots} slots")
        self._refuse_while_shrinking()
        self._goal = limit
        self._withhold_from(min(self._limit, limit))

    def cancel_shrink(self) -> None:
        """Hand out all ids again; those withheld and in flight queue behind the others."""
        self._goal = self._n_slots
        self._follow_memory()

    def resize(self, n_slots: int) -> tuple[Event, ...]:
        """Grow or shrink; shrinking completes what `begin_shrink` prepared, if anything.

        Returns
        -------
        tuple of Event
            Unfinished work on slots beyond the new size: whoever owns the memory waits for it
            before giving that memory back. Empty when growing.

        Raises
        ------
        ValueError
            If the size is not in 1..``capacity``.
        ResourceBusyError
            If slots beyond the new size are in use (``slots``, at most 8 of them), or a shrink
            to another size is being prepared; nothing has changed.

        Notes
        -----
        O(n_slots). Ids beyond a shrunken size are fresh again when it grows.
        """
        if not 1 <= n_slots <= self._capacity:
            raise ValueError(f"n_slots: {n_slots} is not in 1..{self._capacity} slots")
        if n_slots != self._goal:
            self._refuse_while_shrinking()
        live = self.live_above(n_slots)
        if live.size:
            named = live[:_NAMED].tolist()
            raise ResourceBusyError(
                f"cannot shrink to {n_slots} slots: {live.size} beyond them are in use, such as "
                f"{named}; move or release them first",
                slots=named,
            )
        if n_slots < self._goal:
            self.begin_shrink(n_slots)
        beyond = (event for ids, event in self._held if (ids >= n_slots).any())
        fences = _distinct(event for event in beyond if not (event is None or event.query()))
        recycled = self._peek(0, self._ready + self._flying)
        used = self._used[:n_slots]
        self._used = np.zeros(n_slots, np.bool_)
        self._used[: len(used)] = used
        self._places = np.empty(n_slots, np.uint16)
        self._ring = np.empty(n_slots, np.int32)
        self._ring[: len(recycled)] = recycled
        self._head = 0
        kept = ((ids[ids < n_slots], event) for ids, event in self._held)
        self._held = [(ids, event) for ids, event in kept if len(ids)]
        self._fresh = min(self._fresh, n_slots)
        self._n_slots = self._goal = n_slots
        self._limit = min(self._limit, n_slots)
        self._follow_memory()
        return fences

    def statistics(self) -> SlotStatistics:
        """Give the present state; asks no event, so finished work may still count as in flight."""
        return SlotStatistics(
            n_slots=self._n_slots,
            capacity=self._capacity,
            in_use=self._in_use,
            ready=self._ready,
            in_flight=self._flying,
            fresh=self._n_slots - self._fresh,
            held=sum(len(ids) for ids, _ in self._held),
            peak_in_use=self._peak,
            released=self._released,
        )

    @one_line
    def __repr__(self) -> str:
        # From what is known: `available` would change the state, under a lock that others hold.
        shrinking = f", shrinking to {self._goal:,}" if self._goal < self._n_slots else ""
        return (
            f"<SlotAllocator {self._in_use:,} of {self._n_slots:,} slots in use, "
            f"{self._n_slots - self._fresh:,} never used{shrinking}>"
        )

    def _follow_memory(self) -> None:
        """Hand out ids as far as a shrink that is being prepared, and failed memory, allow."""
        limit = self._goal
        if self._failed is not None and self._failed():
            limit = min(limit, self._mark())
        if limit != self._limit:
            self._withhold_from(limit)

    def _withhold_from(self, limit: int) -> None:
        """Hand out no id at or above ``limit``, and those below it."""
        recycled = self._peek(0, self._ready + self._flying)
        ready, flying = recycled[: self._ready], recycled[self._ready :]
        runs = tuple(zip(self._events, self._counts, strict=True))
        held, self._held = self._held, []
        self._limit = limit
        self._head = self._ready = self._flying = 0
        self._events.clear()
        self._counts.clear()
        self._keep(ready, None)
        start = 0
        for event, count in runs:
            self._keep(flying[start : start + count], event)
            start += count
        for ids, known in held:
            self._keep(ids, known)

    def _collect(self, n: int) -> tuple[Ids, tuple[Event, ...]]:
        """Take ``n`` ids when those known to be ready do not suffice."""
        if n < 0:
            raise ValueError(f"n: {n} slots; cannot take less than 0")
        if n > self.available:
            raise self._out_of_pages(n)
        if self._flying:
            self._poll(n)
        ready = min(n, self._ready)
        mark = min(self._mark(), self._limit) if self._flying else self._limit
        below = min(n - ready, max(0, mark - self._fresh))
        flying = min(n - ready - below, self._flying)
        above = n - ready - below - flying
        fresh = np.arange(self._fresh, self._fresh + below + above, dtype=np.int32)
        self._fresh += below + above
        if len(fresh) == n:
            return fresh, ()
        # Slots in flight are taken only when all ready ones are, so both lie at the head.
        recycled = self._peek(0, ready + flying)
        self._drop(ready + flying)
        self._ready -= ready
        fences = self._board(flying)
        if len(recycled) == n:
            return recycled, fences
        pieces = (recycled[:ready], fresh[:below], recycled[ready:], fresh[below:])
        return np.concatenate(pieces), fences

    def _mark(self) -> int:
        return self._n_slots if self._usable is None else self._usable()

    def _poll(self, wanted: int) -> None:
        """Recognise finished work, as far as needed to have ``wanted`` slots ready."""
        events, counts = self._events, self._counts
        while self._ready < wanted and events and events[0].query():
            events.popleft()
            count = counts.popleft()
            self._ready += count
            self._flying -= count
        if self._ready >= wanted or len(events) < 2:
            return
        # The oldest work goes on; later work may have finished on another stream.
        pending = [True, *(not event.query() for event in islice(events, 1, None))]
        if all(pending):
            return
        going = np.repeat(pending, counts)
        flying = self._peek(self._ready, self._flying)
        self._place(self._ready, np.concatenate((flying[~going], flying[going])))
        self._events = deque(compress(events, pending))
        self._counts = deque(compress(counts, pending))
        left = int(np.count_nonzero(going))
        self._ready += self._flying - left
        self._flying = left

    def _board(self, n: int) -> tuple[Event, ...]:
        """Take the oldest ``n`` slots out of the runs in flight; give their distinct events."""
        self._flying -= n
        boarded = []
        while n:
            boarded.append(self._events[0])
            count = self._counts.popleft()
            if count > n:
                self._counts.appendleft(count - n)
                break
            self._events.popleft()
            n -= count
        return _distinct(boarded)

    def _keep(self, ids: Ids, event: Event | None) -> None:
        """Store recycled ids: below the limit in the ring, beyond it aside."""
        if self._limit < self._n_slots:
            beyond = ids >= self._limit
            if beyond.any():
                self._held.append((ids[beyond], event))
                ids = ids[~beyond]
        n = len(ids)
        if event is None:
            self._drop(-n)
            self._place(0, ids)
            self._ready += n
        elif n:
            self._place(self._ready + self._flying, ids)
            self._flying += n
            if self._events and self._events[-1] is event:
                self._counts[-1] += n
            else:
                self._events.append(event)
                self._counts.append(n)

    def _in_use_only(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
        """Give the ids as an index array, having made sure that each is in use and occurs once."""
        slots = np.asarray(ids)
        if slots.ndim != 1 or (slots.size and slots.dtype.kind not in "iu"):
            raise ValueError(f"ids: expected whole numbers in one row, not {ids!r}")
        index = slots.astype(np.intp)
        foreign = index.view(np.uintp) >= self._fresh  # negative ones are huge as unsigned
        if foreign.any():
            named = slots[foreign][:_NAMED].tolist()
            raise ValueError(f"ids: slots {named} were never handed out")
        used = self._used[index]
        if not used.all():
            named = slots[~used][:_NAMED].tolist()
            raise ValueError(f"ids: slots {named} are not in use; released twice?")
        if len(index) <= _MOST_PLACES:
            # Of an id that occurs twice, one place is kept. Sorting gives the interpreter away to
            # other threads, which keep it for longer than all of this takes.
            places = np.arange(len(index), dtype=np.uint16)
            self._places[index] = places
            twice = index[self._places[index] != places]
        else:
            ordered = np.sort(index)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            named = np.unique(twice)[:_NAMED].tolist()
            raise ValueError(f"ids: slots {named} occur more than once")
        return index

    def _peek(self, offset: int, n: int) -> Ids:
        """Copy ``n`` ids of the ring, from ``offset`` behind the head."""
        start = (self._head + offset) % len(self._ring)
        wrapped = start + n - len(self._ring)
        if wrapped <= 0:
            return self._ring[start : start + n].copy()
        return np.concatenate((self._ring[start:], self._ring[:wrapped]))

    def _place(self, offset: int, ids: Ids) -> None:
        """Write ids to the ring, from ``offset`` behind the head."""
        start = (self._head + offset) % len(self._ring)
        first = len(self._ring) - start
        self._ring[start : start + len(ids)] = ids[:first]
        if len(ids) > first:
            self._ring[: len(ids) - first] = ids[first:]

    def _drop(self, n: int) -> None:
        """Move the head ``n`` ids on; back, to make room before it, if negative."""
        self._head = (self._head + n) % len(self._ring)

    def _refuse_while_shrinking(self) -> None:
        if self._goal != self._n_slots:
            raise ResourceBusyError(
                f"a shrink from {self._n_slots} to {self._goal} slots is being prepared; "
                "complete it with resize, or cancel it, first",
                limit=self._goal,
            )

    def _out_of_pages(self, wanted: int) -> OutOfPagesError:
        free = self.available
        return OutOfPagesError(
            f"allocate: {wanted} slots wanted, {free} of {self._limit} are free "
            f"and {self._in_use} in use; evict, or raise the quota",
            wanted=wanted,
            free=free,
        )

    def _check(self) -> None:
        """Verify every invariant; AssertionError with the state if one is broken. O(n_slots)."""
        recycled = self._peek(0, self._ready + self._flying)
        held = [ids for ids, _ in self._held]
        everything = np.concatenate((np.flatnonzero(self._used), recycled, *held))
        state = f"{self.statistics()}, limit {self._limit}, runs {list(self._counts)}"
        assert 0 <= self._limit <= self._goal <= self._n_slots <= self._capacity, state
        assert self._goal >= 1, state
        assert len(self._ring) == len(self._used) == self._n_slots, state
        assert 0 <= self._head < self._n_slots, state
        assert 0 <= self._fresh <= self._n_slots, state
        assert np.array_equal(np.sort(everything), np.arange(self._fresh)), state
        assert np.count_nonzero(self._used) == self._in_use <= self._peak, state
        assert (recycled < self._limit).all(), state
        assert all((ids >= self._limit).all() for ids in held), state
        assert len(self._events) == len(self._counts), state
        assert all(count > 0 for count in self._counts), state
        assert sum(self._counts) == self._flying, state


def _distinct(events: Iterable[Event]) -> tuple[Event, ...]:
    """Keep the first of each event, told apart by identity, in order."""
    return tuple({id(event): event for event in events}.values())
