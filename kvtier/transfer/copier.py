"""The page copier: moves the pages of a group from one level's slots to another's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from hostmem import CudaMemory, Device, Stream
from hostmem.describing import one_line
from hostmem.spans import span
from hostmem.units import align_up
from kvtier.transfer.codec import ColdPageCodec, Concatenate, check_codec, concatenation
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.lane import Lane, Which
from kvtier.transfer.memory import AddressedPool, DiskPool, Ids, MemoryPool, PageMemory
from kvtier.transfer.page_events import PageEvents
from kvtier.transfer.plan import Addresses, AddressSpace, CopyPlan
from kvtier.transfer.staging import StagingBuffer

__all__ = ["PageCopier", "reachable"]

_STAGING_BYTES = 32 << 20
_STAGING_GRAIN = 4096  # O_DIRECT takes no other addresses
_MOST_STAGED = 512
_LEAST_STAGED = 2


class PageCopier:
    """Moves pages between levels, asynchronously. Calls return at once, from any thread.

    Between memories, pages are copied by the device, in one batch a call, on a lane for each
    direction. Between memory and disk they are read and written by the file's threads, through a
    staging buffer where the disk cannot reach the memory. Between the hot layout and whole pages,
    a codec copies them.

    Parameters
    ----------
    device : Device
        Who copies.
    largest_page : int
        Bytes of the largest page of any level; a staging buffer holds one.
    staged : bool
        Whether pages are sure to go through staging buffers, so that these are made now; otherwise
        the first call that needs them waits while they are made (some 10 ms).
    codec : ColdPageCodec, optional
        Configured; by default, `Concatenate`.

    Raises
    ------
    TypeError
        The codec lacks a method.
    """

    def __init__(
        self,
        device: Device,
        largest_page: int,
        *,
        staged: bool,
        codec: ColdPageCodec | None = None,
    ) -> None:
        if codec is not None:
            check_codec(codec)
        self._codec = None if _is_default(codec) else codec
        with contextlib.ExitStack() as undo:
            self._down = Lane(device, "kvtier-offload")
            undo.callback(self._down.close)
            self._up = Lane(device, "kvtier-onboard")
            undo.callback(self._up.close)
            self._device = device
            self._buffer_bytes = align_up(largest_page, _STAGING_GRAIN)
            self._staging: StagingBuffer | None = None
            self._making = threading.Lock()
            if staged:
                self._ring()
            undo.pop_all()

    def _ring(self) -> StagingBuffer:
        """Return the staging buffers, which are made when they are first needed."""
        with self._making:
            if self._staging is None:
                fits = min(_STAGING_BYTES // self._buffer_bytes, _MOST_STAGED)
                count = max(fits, _LEAST_STAGED)
                self._staging = StagingBuffer(self._device, self._buffer_bytes, count)
            return self._staging

    @span("copy pages", "copy", domain="kvtier")
    def copy(
        self,
        source: PageMemory,
        source_ids: Ids,
        destination: PageMemory,
        destination_ids: Ids,
        after: Dependencies,
        *,
        up: bool,
        names: Sequence[bytes] | None = None,
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
        names : sequence of bytes, optional
            What each page is called in a file that outlives the process.

        Returns
        -------
        list of (int, PageEvents)
            Events and how many pages, in order, each stands for. A failed copy finishes its event,
            too; pages that failed are named in it, and their sources are as they were. A codec
            that refuses a batch fails its pages.

        Raises
        ------
        ClosedError
            The copier, or the file, was closed.
        """
        near, near_ids, far, far_ids = (
            (destination, destination_ids, source, source_ids)
            if up
            else (source, source_ids, destination, destination_ids)
        )
        disk = far.pools[0]
        if not isinstance(disk, DiskPool):
            lane = self._up if up else self._down
            work = partial(self._copy_pages, near, near_ids, far, far_ids, up)
            return [(len(near_ids), lane.submit(work, len(near_ids), after))]
        if not reachable(near, self._codec):
            return list(self._through_staging(near, near_ids, disk, far_ids, after, up, names))
        pool = cast(MemoryPool, near.pools[0])
        after = replace(after, usable=partial(pool.wait_usable, near_ids))
        addresses = pool.addresses(near_ids)
        event = (
            disk.file.read(far_ids, addresses, after)
            if up
            else disk.file.write(far_ids, addresses, after, names)
        )
        return [(len(near_ids), event)]

    @span("copy pages within a level", "copy", domain="kvtier")
    def relocate(
        self,
        memory: PageMemory,
        old_ids: Ids,
        new_ids: Ids,
        after: Dependencies,
        *,
        names: Sequence[bytes] | None = None,
    ) -> list[tuple[int, PageEvents]]:
        """Copy pages to other slots of the same level; see `copy`."""
        pool = memory.pools[0]
        if not isinstance(pool, DiskPool):
            work = partial(_copy_within, memory, old_ids, new_ids)
            return [(len(old_ids), self._down.submit(work, len(old_ids), after))]
        ring = self._ring()
        events: list[tuple[int, PageEvents]] = []
        for part in _parts(len(old_ids), ring):
            old, new = old_ids[part], new_ids[part]
            data = after.part(part.start, part.stop).data
            with ring.lend(len(old)) as loan:
                read = pool.file.read(old, loan.addresses, Dependencies(data, loan.fences))
                loan.until = read
                behind = Dependencies((read,), after.fences)
                written = pool.file.write(new, loan.addresses, behind, names and names[part])
                loan.until = written
            events.append((len(old), written))
        return events

    def _through_staging(
        self,
        near: PageMemory,
        near_ids: Ids,
        disk: DiskPool,
        disk_ids: Ids,
        after: Dependencies,
        up: bool,
        names: Sequence[bytes] | None,
    ) -> Iterator[tuple[int, PageEvents]]:
        ring = self._ring()
        for part in _parts(len(near_ids), ring):
            ids, slots = near_ids[part], disk_ids[part]
            data = after.part(part.start, part.stop).data
            event: PageEvents
            with ring.lend(len(ids)) as loan:
                work = partial(self._copy_hot, near, ids, loan.addresses, ring, up)
                first = Dependencies(data, loan.fences)
                if up:
                    read = disk.file.read(slots, loan.addresses, first)
                    loan.until = read
                    event = self._up.submit(work, len(ids), Dependencies((read,), after.fences))
                else:
                    copied = self._down.submit(work, len(ids), first)
                    loan.until = copied
                    behind = Dependencies((copied,), after.fences)
                    event = disk.file.write(slots, loan.addresses, behind, names and names[part])
                loan.until = event
            yield len(ids), event

    def _copy_pages(
        self,
        near: PageMemory,
        ids: Ids,
        far: PageMemory,
        far_ids: Ids,
        up: bool,
        which: Which,
        stream: Stream,
    ) -> None:
        """Submit the copies between two memories, once both can be used."""
        pool = cast(AddressedPool, far.pools[0])
        pool.wait_usable(far_ids[which])
        self._copy_hot(near, ids, pool.addresses(far_ids), pool, up, which, stream)

    def _copy_hot(
        self,
        near: PageMemory,
        ids: Ids,
        pages: Addresses,
        space: AddressSpace,
        up: bool,
        which: Which,
        stream: Stream,
    ) -> None:
        """Submit the copies between a group's slots and whole pages in a space."""
        cold = pages[which]
        pools = [cast(AddressedPool, pool) for pool in near.pools]
        for pool in pools:
            pool.wait_usable(ids[which])
        hot = near.addresses(ids[which])
        if self._codec is None or not near.hot:
            plan = plan_pages(pools, hot, cold, space, up=up)
            stream.copy(plan.destinations, plan.sources, plan.sizes)
        elif up:
            self._codec.decode(near.group, cold, hot, stream)
        else:
            self._codec.encode(near.group, hot, cold, stream)

    @one_line
    def __repr__(self) -> str:
        ring = "" if self._staging is None else f", {self._staging!r}"
        codec = "" if self._codec is None else f", pages by {type(self._codec).__name__}"
        closed = ", closed" if self._up._closed else ""
        return f"<PageCopier on {self._device.name}{codec}{ring}{closed}>"

    def close(self) -> None:
        """Finish what was submitted and give threads, streams and buffers back. Idempotent."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            if self._staging is not None:
                stack.callback(self._staging.close)
            stack.callback(self._up.close)
            stack.callback(self._down.close)


def plan_pages(
    pools: Sequence[AddressedPool],
    hot: Addresses,
    cold: Addresses,
    space: AddressSpace,
    *,
    up: bool,
) -> CopyPlan:
    """Plan the copies between slots of pools and whole pages in a space.

    Parameters
    ----------
    pools : sequence of AddressedPool
        Of one pool group.
    hot : uint64 array, shape (pools, pages)
        Addresses of the slots.
    cold : uint64 array, shape (pages,)
        Addresses of the pages.
    space : AddressSpace
        Where the pages are.
    up : bool
        Whether towards the slots.
    """
    plan = concatenation(hot, cold, [pool.slot_size for pool in pools], up=up)
    if len(pools) > 1:
        return plan  # what follows a piece in its page is in another pool
    return plan.merged(pools[0], space) if up else plan.merged(space, pools[0])


def reachable(group: PageMemory, codec: ColdPageCodec | None = None) -> bool:
    """Tell whether a file can be read into, or written from, whole pages of a group.

    Parameters
    ----------
    group : PageMemory
        In a level of memory.
    codec : ColdPageCodec, optional
        What makes whole pages of hot ones.
    """
    pool = group.pools[0]
    return (
        len(group.pools) == 1
        and isinstance(pool, MemoryPool)
        and not isinstance(pool.memory, CudaMemory)
        and (_is_default(codec) or not group.hot)
    )


def _is_default(codec: ColdPageCodec | None) -> bool:
    return codec is None or type(codec) is Concatenate


def _parts(pages: int, ring: StagingBuffer) -> Iterator[slice]:
    """Cut a batch, so that one part is copied while the one before is read or written."""
    size = max(ring.count // 2, 1)
    for first in range(0, pages, size):
        yield slice(first, min(first + size, pages))


def _copy_within(memory: PageMemory, old: Ids, new: Ids, which: Which, stream: Stream) -> None:
    """Submit the copies from slots to other slots of the same level, merged."""
    old, new = old[which], new[which]
    parts = []
    for pool in memory.pools:
        space = cast(AddressedPool, pool)
        space.wait_usable(new)
        to, source = space.addresses(new), space.addresses(old)
        parts.append(CopyPlan.of(to, source, space.slot_size).merged(space, space))
    plan = CopyPlan.joined(parts)
    stream.copy(plan.destinations, plan.sources, plan.sizes)
