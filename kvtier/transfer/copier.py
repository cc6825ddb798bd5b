"""The page copier: moves the pages of a group from one level's slots to another's."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from hostmem import CudaMemory, Device
from hostmem.units import align_up
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.lane import Lane, Which
from kvtier.transfer.memory import DiskPool, Ids, MemoryPool, PageMemory
from kvtier.transfer.page_events import PageEvents
from kvtier.transfer.plan import Addresses, AddressSpace, CopyPlan
from kvtier.transfer.staging import StagingBuffer

__all__ = ["PageCopier", "reachable"]

_STAGING_BYTES = 32 << 20
_STAGING_GRAIN = 4096  # O_DIRECT takes no other addresses
_MOST_STAGED = 512
_LEAST_STAGED = 2


class PageCopier:
    """Moves pages between levels, asynchronously. Calls return at once.

    Between memories, pages are copied by the device, in one batch a call, on a lane for each
    direction. Between memory and disk they are read and written by the file's threads, through a
    staging buffer where the disk cannot reach the memory.

    Parameters
    ----------
    device : Device
        Who copies.
    largest_page : int
        Bytes of the largest page; a staging buffer holds one.
    staged : bool
        Whether pages are sure to go through staging buffers, so that these are made now.
    """

    def __init__(self, device: Device, largest_page: int, *, staged: bool) -> None:
        with contextlib.ExitStack() as undo:
            self._down = Lane(device, "kvtier-offload")
            undo.callback(self._down.close)
            self._up = Lane(device, "kvtier-onboard")
            undo.callback(self._up.close)
            self._device = device
            self._buffer_bytes = align_up(largest_page, _STAGING_GRAIN)
            self._staging: StagingBuffer | None = None
            if staged:
                self._ring()
            undo.pop_all()

    def _ring(self) -> StagingBuffer:
        """Return the staging buffers, which are made when they are first needed."""
        if self._staging is None:
            fits = min(_STAGING_BYTES // self._buffer_bytes, _MOST_STAGED)
            self._staging = StagingBuffer(
                self._device, self._buffer_bytes, max(fits, _LEAST_STAGED)
            )
        return self._staging

    def copy(
        self,
        source: PageMemory,
        source_ids: Ids,
        destination: PageMemory,
        destination_ids: Ids,
        after: Dependencies,
        *,
        up: bool,
    ) -> list[tuple[int, PageEvents]]:
        """Copy pages ``source_ids[i]`` to pages ``destination_ids[i]``.

        Parameters
        ----------
        source, destination : PageMemory
            Of the same pool group in two levels.
        source_ids, destination_ids : int32 arrays, shape (pages,)
            Slots.
        after : Dependencies
            What must have happened before.
        up : bool
            Whether towards the hot level.

        Returns
        -------
        list of (int, PageEvents)
            Events and how many pages, in order, each stands for. A failed copy finishes its event,
            too; pages that failed are named in it, and their sources are as they were.
        """
        to_disk = isinstance(destination.pools[0], DiskPool)
        from_disk = isinstance(source.pools[0], DiskPool)
        near, near_ids, far, far_ids = (
            (destination, destination_ids, source, source_ids)
            if up
            else (source, source_ids, destination, destination_ids)
        )
        if not to_disk and not from_disk:
            lane = self._up if up else self._down
            plan = partial(_plan_pages, near, near_ids, far, far_ids, up)
            return [(len(near_ids), lane.submit(plan, len(near_ids), after))]
        if not reachable(near):
            return self._through_staging(near, near_ids, far, far_ids, after, up)
        file = cast(DiskPool, far.pools[0]).file
        pool = cast(MemoryPool, near.pools[0])
        after = replace(after, usable=partial(pool.wait_usable, near_ids))
        transfer = file.write if to_disk else file.read
        return [(len(near_ids), transfer(far_ids, pool.addresses(near_ids), after))]

    def relocate(
        self, memory: PageMemory, old_ids: Ids, new_ids: Ids, after: Dependencies
    ) -> list[tuple[int, PageEvents]]:
        """Copy pages to other slots of the same level; see `copy`."""
        pool = memory.pools[0]
        if not isinstance(pool, DiskPool):
            plan = partial(_plan_within, memory, old_ids, new_ids)
            return [(len(old_ids), self._down.submit(plan, len(old_ids), after))]
        staging = self._ring()
        events: list[tuple[int, PageEvents]] = []
        for first in range(0, len(old_ids), staging.count):
            old, new = (ids[first : first + staging.count] for ids in (old_ids, new_ids))
            buffers = staging.acquire(len(old))
            data = after.part(first, first + len(old)).data
            read = pool.file.read(old, buffers, Dependencies(data))
            written = pool.file.write(new, buffers, Dependencies((read,), after.fences))
            staging.release(len(old), written)
            events.append((len(old), written))
        return events

    def _through_staging(
        self,
        near: PageMemory,
        near_ids: Ids,
        disk: PageMemory,
        disk_ids: Ids,
        after: Dependencies,
        up: bool,
    ) -> list[tuple[int, PageEvents]]:
        staging = self._ring()
        file = cast(DiskPool, disk.pools[0]).file
        events: list[tuple[int, PageEvents]] = []
        for first in range(0, len(near_ids), staging.count):
            ids = near_ids[first : first + staging.count]
            slots = disk_ids[first : first + staging.count]
            buffers = staging.acquire(len(ids))
            plan = partial(_plan_buffers, near, ids, buffers, staging, up)
            data = after.part(first, first + len(ids)).data
            event: PageEvents
            if up:
                read = file.read(slots, buffers, Dependencies(data))
                event = self._up.submit(plan, len(ids), Dependencies((read,), after.fences))
            else:
                copied = self._down.submit(plan, len(ids), Dependencies(data))
                event = file.write(slots, buffers, Dependencies((copied,), after.fences))
            staging.release(len(ids), event)
            events.append((len(ids), event))
        return events

    def close(self) -> None:
        """Finish what was submitted and give threads, streams and buffers back."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            if self._staging is not None:
                stack.callback(self._staging.close)
            stack.callback(self._up.close)
            stack.callback(self._down.close)


def reachable(group: PageMemory) -> bool:
    """Tell whether a file can be read into, or written from, whole pages of a group."""
    pool = group.pools[0]
    return (
        len(group.pools) == 1
        and isinstance(pool, MemoryPool)
        and not isinstance(pool.memory, CudaMemory)
    )


def _plan_pages(
    near: PageMemory, ids: Ids, far: PageMemory, far_ids: Ids, up: bool, which: Which
) -> CopyPlan:
    """Plan the copies between two memories, once both can be used."""
    pool = cast(MemoryPool, far.pools[0])
    pool.wait_usable(far_ids[which])
    return _plan_buffers(near, ids, pool.addresses(far_ids), pool, up, which)


def _plan_buffers(
    near: PageMemory, ids: Ids, pages: Addresses, space: AddressSpace, up: bool, which: Which
) -> CopyPlan:
    """Plan the copies between a group's slots and whole pages, a pool at a time, and merge them."""
    ids, pages = ids[which], pages[which]
    parts = []
    for pool, offset in zip(near.pools, near.offsets, strict=True):
        memory = cast(MemoryPool, pool)
        memory.wait_usable(ids)
        slots, places = memory.addresses(ids), pages + np.uint64(offset)
        if up:
            part = CopyPlan.of(slots, places, memory.slot_size).merged(memory, space)
        else:
            part = CopyPlan.of(places, slots, memory.slot_size).merged(space, memory)
        parts.append(part)
    return CopyPlan.joined(parts)


def _plan_within(memory: PageMemory, old: Ids, new: Ids, which: Which) -> CopyPlan:
    """Plan the copies from slots to other slots of the same level, and merge them."""
    old, new = old[which], new[which]
    parts = []
    for pool in memory.pools:
        space = cast(MemoryPool, pool)
        space.wait_usable(new)
        to, source = space.addresses(new), space.addresses(old)
        parts.append(CopyPlan.of(to, source, space.slot_size).merged(space, space))
    return CopyPlan.joined(parts)
