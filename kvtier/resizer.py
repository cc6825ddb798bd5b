"""Changes of a quota: what gives up slots, what gets more, and how both are undone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from hostmem import Event, ResourceBusyError
from hostmem.device import fresh
from kvtier.latch import Latch
from kvtier.levels import Level
from kvtier.mover import Mover
from kvtier.page import Departure
from kvtier.plan import LevelPlan

__all__ = ["Resizer"]


class Resizer:
    """Gives the pool groups of a level other numbers of slots while others use them.

    Changes take turns. Each holds the storage's lock while it decides, and not while it waits for
    copies or for memory: pages are made, found and moved meanwhile.

    Parameters
    ----------
    mover : Mover
        Who empties slots.
    latch : Latch
        Guards what must not be left half done.
    lock : RLock
        The storage's.
    """

    def __init__(self, mover: Mover, latch: Latch, lock: threading.RLock) -> None:
        self._mover = mover
        self._latch = latch
        self._lock = lock
        self._turn = threading.Lock()

    def change(self, level: Level, plan: LevelPlan) -> None:
        """Let a level be as planned: its groups shrink, then others grow; all or nothing.

        Raises
        ------
        Exception
            As `TierStorage.adjust_cache_level` says.
        """
        with self._turn, contextlib.ExitStack() as undo:
            old = [group.slots.n_slots for group in level.groups]
            shrinking = {g: n for g, n in enumerate(plan.slots) if n < old[g]}
            growing = {
                g: n
                for g, n in enumerate(plan.slots)
                if n > old[g] or (n == old[g] and level.groups[g].failed())  # tried again
            }
            undo.callback(self._cancel, level, shrinking)
            self._empty(level, shrinking)
            for group, n_slots in shrinking.items():
                self._cut(level, group, n_slots)
                undo.callback(self._grow, level, group, old[group])
            for group, n_slots in growing.items():
                self._grow(level, group, n_slots)
                undo.callback(self._shrink, level, group, old[group])
            undo.pop_all()
            with self._lock:
                level.quota = plan.quota

    # --------------------------------------------------------------------------------- shrinking

    def _shrink(self, level: Level, group: int, n_slots: int) -> None:
        self._empty(level, {group: n_slots})
        self._cut(level, group, n_slots)

    def _empty(self, level: Level, shrinking: Mapping[int, int]) -> None:
        """Let all pages leave the slots that go, and wait for it."""
        with self._lock:
            self._mover.settle()
            for group, n_slots in shrinking.items():
                self._check(level, group, n_slots)
            for group, n_slots in shrinking.items():
                level.groups[group].slots.begin_shrink(n_slots)
        done = not shrinking
        while not done:
            with self._lock:
                departures = self._evict(level, shrinking)
                # Who was evicted keeps a claim to its slot until it has arrived.
                if done := not departures:
                    departures = self._relocate(level, shrinking)
                self._mover.deferred.update(one.page for one in departures)
            self._settle_departures(level, departures)

    def _evict(self, level: Level, shrinking: Mapping[int, int]) -> list[Departure]:
        """Let so many pages leave the level that the rest fits into the slots that stay."""
        departures: list[Departure] = []
        for group, n_slots in shrinking.items():
            self._check(level, group, n_slots)
            if (excess := level.groups[group].slots.in_use - n_slots) > 0:
                departures += self._mover.evict(level.index, group, excess, anywhere=True)
        return departures

    def _relocate(self, level: Level, shrinking: Mapping[int, int]) -> list[Departure]:
        departures: list[Departure] = []
        for group, n_slots in shrinking.items():
            above = [page for page in level.policies[group].victims() if page.slot >= n_slots]
            departures += self._mover.relocate(above, level.index, group)
        return departures

    def _check(self, level: Level, group: int, n_slots: int) -> None:
        """Refuse a shrink that leases, or the levels below, do not allow."""
        slots = level.groups[group].slots
        movable = {page.slot for page in level.policies[group].victims() if not page.leases}
        held = [slot for slot in slots.live_above(n_slots).tolist() if slot not in movable]
        if held:
            raise ResourceBusyError(
                f"level {level.name}, group {group}: slots {held[:8]} are leased and would go "
                f"with {n_slots} slots; release them first",
                level=level.index,
                group=group,
                slots=held,
            )
        if (excess := slots.in_use - n_slots) > 0:
            self._mover.plan_eviction(level.index, group, excess, anywhere=True)

    def _settle_departures(self, level: Level, departures: Sequence[Departure]) -> None:
        """Wait for pages to leave; if one cannot, give it its slot back, and raise why."""
        try:
            for gone in departures:
                gone.page.ready.wait_finished()
        finally:
            with self._lock:
                self._mover.deferred.difference_update(one.page for one in departures)
        with self._lock, self._latch:
            lost = [one for one in departures if one.page.origin is one and one.page.lost]
            causes = [one.page.ready.error for one in lost if self._mover.is_whole(one)]
            if causes:
                self._cancel(level, range(len(level.groups)))
            self._mover.resolve(one.page for one in lost if not one.page.leases)
        if causes:
            cause = cast(BaseException, causes[0])
            raise fresh(cause) from cause

    def _cancel(self, level: Level, groups: Iterable[int]) -> None:
        """Hand all slots out again."""
        with self._lock:
            for group in groups:
                level.groups[group].slots.cancel_shrink()

    def _cut(self, level: Level, group: int, n_slots: int) -> None:
        """Give the memory of empty slots back, from ``n_slots`` on."""
        where = level.groups[group]
        before = where.slots.n_slots
        with self._lock:
            using = cast(tuple[Event, ...], where.slots.resize(n_slots))
            self._mover.forget_left(level.index, group, n_slots)
        try:
            for event in using:
                event.wait_finished()
            where.memory.resize(n_slots)
        except BaseException:
            with self._lock:
                where.slots.resize(before)
            raise
        with self._lock:
            level.policies[group].capacity = n_slots

    # ----------------------------------------------------------------------------------- growing

    def _grow(self, level: Level, group: int, n_slots: int) -> None:
        where = level.groups[group]
        before = where.slots.n_slots
        try:
            where.memory.resize(n_slots)
            if level.plan.hot:
                where.memory.wait_usable()  # hot slots are written without asking
        except BaseException:
            where.memory.resize(before)
            raise
        with self._lock:
            where.slots.resize(n_slots)
            level.policies[group].capacity = n_slots
