"""Host memory that is usable at once and filled in the background."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from operator import index
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hostmem import lifetime
from hostmem._sys import linux
from hostmem.admission import Admission
from hostmem.closing import Closable
from hostmem.core import Core
from hostmem.courier import callbacks
from hostmem.describing import Facts, html_of, notebook, one_line, percent
from hostmem.device import DeviceLike, resolve_device
from hostmem.device.base import Device
from hostmem.errors import HostmemError
from hostmem.fill_options import fill_rate_of, policy_of, size_of, threads_of, unit_of
from hostmem.filler import Filler
from hostmem.machine import machine
from hostmem.numa import NodeLike, PlacementRequest, apply_placement, place
from hostmem.page_mode import PageJudge, PageMode, resolve_page_mode
from hostmem.placement import Placement, find_placement
from hostmem.progress import FillProgress, Listener
from hostmem.registration import Registrations
from hostmem.reservation import Reservation
from hostmem.route import route_of
from hostmem.stall_budget import StallBudget
from hostmem.units import Size, align_up, format_size
from hostmem.watermark import Watermark

__all__ = ["HostMem"]

log = logging.getLogger("hostmem")

_STALL_BUDGET = 2e-3  # seconds
_LOOKED_AT = 16  # pages


class HostMem(Closable):
    """Host memory whose address range is there at once and whose bytes follow in the background.

    Construction reserves ``capacity`` bytes of address space, starts threads that populate and
    register it from offset 0 up to ``size``, and returns within milliseconds. The *watermark*,
    `committed`, says how far the bytes are usable; `wait_usable` and `view` wait only for those
    they name. The base address never moves.

    Parameters
    ----------
    capacity : int or str
        Bytes of address space, such as ``"64GiB"``; the most that `resize` can ever reach.
    size : int or str, optional
        Bytes to make usable; the capacity where omitted. Both are rounded up to ``slot_size``.
    device : int, Device or str
        Who the memory is registered with: a GPU's ordinal, ``"cpu"``, or ``"auto"`` for the only
        GPU, or the CPU where there is none.
    slot_size : int or str
        Bytes of one slot of the caller's; no registration ever ends inside a slot.
    commit_unit : int or str, optional
        Bytes whose multiples no registration crosses: itself a multiple of ``slot_size``; 32 MiB,
        rounded up to slots, where omitted. The base is aligned to the largest power of two that
        divides it.
    numa_node : "auto", int, sequence of int, or None
        ``"auto"``: the GPU's node (no policy on the cpu device). Several: pages are spread over
        them. None: no policy.
    allow_remote_numa_fallback : bool
        True: the node is preferred. False: the node is enforced, and anything else is an error.
    page_mode : "small", "huge", "auto", "hugetlb", "hugetlb-1GiB" or None
        Pages to ask for; None: as the environment variable ``HOSTMEM_THP`` (0, 1, auto) says,
        small where it is not set. ``"auto"`` takes huge pages as long as the node has them in
        stock; ``"hugetlb"`` takes those that the administrator set aside, of the default size or of
        the one that is named.
    fill_threads : "auto" or int
        Populating threads; they share one budget per process, 12 at most, with those of other
        objects. ``"auto"``: the budget, and 8 at most on a GPU, whose driver keeps up with no more.
    fill_rate : float, optional
        Bytes per second that the fill stays under.
    stall_budget : float, optional
        Seconds that one registration should stay under, since another thread's driver calls wait
        for it: registrations grow and shrink accordingly. None: as large as is fastest.
    on_register_failure : "raise", "stop" or "pageable"
        What a refused registration means: the fill stops there (and logs an error; with ``"stop"``
        only those are told who ask beyond), or the range becomes usable unregistered.
    wait : bool
        Return only when the size is usable, or raise what went wrong.

    Raises
    ------
    ValueError, TypeError
        An argument that makes no sense; nothing was taken.
    HostOOMError
        The address space is not to be had.
    PlacementRefusedError
        No such node, or a strict placement that cannot be enforced here.
    CuError
        A GPU was asked for and the driver does not start.

    Notes
    -----
    Every method may be called from any thread. Close it, or use it as a context manager; one that
    is dropped is closed all the same, on another thread, with a `ResourceWarning`.

    Processes of a host take turns inside the driver's registration, by a lock on a file; the
    environment variable ``HOSTMEM_TURNS`` names another file, or switches that off (0).

    Examples
    --------
    >>> with HostMem("64MiB", device="cpu") as memory:
    ...     memory.view(0, 4096)[:] = 7  # waits for these bytes only
    ...     int(memory.view(0, 4096).sum())
    28672
    """

    __slots__ = (
        "__weakref__",
        "_accepted",
        "_capacity",
        "_commit_unit",
        "_core",
        "_device",
        "_finalizer",
        "_mark",
        "_page_mode",
        "_placement",
        "_slot_size",
    )

    def __init__(
        self,
        capacity: Size,
        size: Size | None = None,
        *,
        device: DeviceLike = "auto",
        slot_size: Size = 1,
        commit_unit: Size | None = None,
        numa_node: NodeLike = "auto",
        allow_remote_numa_fallback: bool = True,
        page_mode: str | None = None,
        fill_threads: int | str = "auto",
        fill_rate: float | None = None,
        stall_budget: float | None = _STALL_BUDGET,
        on_register_failure: str = "raise",
        wait: bool = False,
    ) -> None:
        here = machine()
        self._slot_size = size_of("slot_size", slot_size, 1)
        asked = size_of("capacity", capacity, 1)
        target = asked if size is None else size_of("size", size, 0)
        if target > asked:
            raise ValueError(f"size: {target} bytes are more than the capacity, {asked}")
        self._capacity = align_up(asked, self._slot_size)
        policy = policy_of(on_register_failure)
        rate = fill_rate_of(fill_rate)
        budget = StallBudget(stall_budget)
        self._page_mode = pages = resolve_page_mode(page_mode, here)
        self._commit_unit = unit_of(commit_unit, self._slot_size, pages.page_size(here))
        self._device: Device = resolve_device(device)
        threads = threads_of(fill_threads, registers=self._device.stalls)
        self._placement: PlacementRequest = place(
            numa_node, self._device, allow_remote_numa_fallback, here
        )

        reservation = Reservation(self._capacity, self._commit_unit, pages, here)
        try:
            self._accepted = apply_placement(
                self._placement, reservation.address, reservation.nbytes
            )
        except BaseException:
            reservation.release()
            raise
        self._mark = Watermark(align_up(target, self._slot_size))
        cpus = self._fill_cpus()
        registrations = Registrations(
            self._device,
            reservation.address,
            slot_size=self._slot_size,
            commit_unit=self._commit_unit,
            smallest=align_up(here.page_size, self._slot_size),
            policy=policy,
            budget=budget,
        )
        judge = PageJudge(self._placement.nodes, here) if pages is PageMode.AUTO else None
        admission = Admission(reservation, self._placement, str(pages), judge)
        filler = Filler(
            reservation,
            registrations,
            self._mark,
            admission,
            slot_size=self._slot_size,
            commit_unit=self._commit_unit,
            threads=threads,
            rate=rate,
            cpus=cpus,
        )
        self._core = Core(
            reservation,
            registrations,
            self._mark,
            filler,
            slot_size=self._slot_size,
            commit_unit=self._commit_unit,
            cpus=cpus,
        )
        try:
            self._finalizer = lifetime.watch(self, self._core)
        except BaseException:
            reservation.release()
            raise
        filler.fill_to(self._mark.size)
        if log.isEnabledFor(logging.INFO):
            log.info(
                "%s at %#x is %s; %s pages; placement asked %s, accepted %s; turns %s",
                format_size(self._capacity),
                self.address,
                route_of(self._device),
                pages,
                self._placement,
                self._accepted,
                self._device.turns.state,
            )
        if wait:
            try:
                self.wait_usable(self._mark.size)
            except BaseException:
                self.close()
                raise

    def _fill_cpus(self) -> tuple[int, ...]:
        nodes = self._placement.nodes
        cpus = machine().fill_cpus(nodes[0]) if len(nodes) == 1 else ()
        if len(nodes) == 1 and not cpus:
            log.warning(
                "fill threads run anywhere: this process may use no CPU of node %d", nodes[0]
            )
        return cpus

    # ------------------------------------------------------------------------------ properties

    @property
    def address(self) -> int:
        """Address of offset 0; the same for the object's life."""
        return self._core.reservation.address

    @property
    def capacity(self) -> int:
        """Bytes of address space: what `resize` can reach."""
        return self._capacity

    @property
    def size(self) -> int:
        """Bytes that are usable or being made so."""
        return self._mark.size

    @property
    def committed(self) -> int:
        """Bytes from offset 0 that are usable now, without a hole; 0 once closed."""
        return max(self._mark.usable_end, 0)

    @property
    def slot_size(self) -> int:
        """Bytes of one slot of the caller's."""
        return self._slot_size

    @property
    def commit_unit(self) -> int:
        """Bytes that `release` gives back at a time; no registration of the fill crosses one."""
        return self._commit_unit

    @property
    def device(self) -> Device:
        """Who the memory is registered with."""
        return self._device

    @property
    def node(self) -> int | tuple[int, ...] | None:
        """Memory node that was asked for, several to spread over, or None."""
        return self._placement.node

    @property
    def page_mode(self) -> str:
        """Pages that were asked for; `FillProgress.page_mode` has those asked for now."""
        return str(self._page_mode)

    @property
    def waiting(self) -> int:
        """Threads and callbacks that wait for bytes now."""
        return self._mark.waiting

    @property
    def failure(self) -> BaseException | None:
        """Why the fill stopped short of the size, or None."""
        return self._mark.failure

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child."""
        return self._mark.closed

    @property
    def registrations(self) -> list[tuple[int, int]]:
        """Registered ranges, ascending: (offset, nbytes)."""
        return list(self._core.registrations.registered)

    @property
    def quarantined(self) -> list[tuple[int, int]]:
        """Ranges that are usable but that the driver refused: (offset, nbytes)."""
        return list(self._core.registrations.quarantined)

    @property
    def released(self) -> list[tuple[int, int]]:
        """Ranges that `release` gave back: (offset, nbytes), neighbours as one."""
        return list(self._core.ranges_released())

    # --------------------------------------------------------------------------------- waiting

    def wait_usable(self, end: int, timeout: float | None = None, *, start: int = 0) -> None:
        """Block until bytes ``[start, end)`` are usable.

        Below the watermark this is a comparison: no lock, no system call.

        Parameters
        ----------
        end : int
            Offset of the byte after the last.
        timeout : float, optional
            Seconds; 0 polls, None waits for ever (Ctrl-C works).
        start : int
            Offset of the first byte; it matters only where memory below it was released.

        Raises
        ------
        ValueError
            ``end`` is negative or past the size, or bytes of the range were released; also if a
            resize or a release made it so during the wait.
        TimeoutError
            Not usable in time.
        ClosedError
            Closed, before or during the wait.
        HostOOMError, RegistrationError, OSError, HostmemError
            The fill stopped below ``end``; the cause is the error's ``__cause__``.
        """
        if 0 <= start <= end <= self._mark.usable_end:
            return
        self._mark.wait(end, timeout, start)

    def is_usable(self, end: int, start: int = 0) -> bool:
        """Tell, without blocking, whether bytes ``[start, end)`` are usable."""
        if 0 <= start <= end <= self._mark.usable_end:
            return True
        return self._mark.is_usable(start, end)

    def add_usable_callback(
        self, end: int, function: Callable[[BaseException | None], object], *, start: int = 0
    ) -> None:
        """Call ``function(error_or_None)`` once when bytes ``[start, end)`` are, or will not be.

        It runs on a thread of ours, one callback after another, at once if they are usable already.
        What it raises is logged.

        Raises
        ------
        ValueError
            As `wait_usable`.
        """
        callbacks.start()
        self._mark.add_callback(end, function, start)

    async def wait_usable_async(self, end: int, *, start: int = 0) -> None:
        """Await what `wait_usable` blocks for, and raise what it raises."""
        import asyncio  # whoever awaits has paid for it; nobody else should

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def arrived(error: BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, error)

        callbacks.start()
        callback = self._mark.add_callback(end, arrived, start)
        try:
            await done
        finally:
            self._mark.forget(callback)  # cancelled: waiting again and again keeps nothing

    # ------------------------------------------------------------------------- resizing, pausing

    def resize(self, size: Size) -> None:
        """Set the size: grow in the background, or give back what is past it.

        The base and the bytes below the new size stay. Growing returns at once. Shrinking stops the
        fill within one piece (4 MiB) and one registration, and then takes as long as unregistering
        and unmapping what goes. Resizing to the present size retries after a failure. Memory is
        given back by whole registrations; the rest of one that is cut is kept for later growth. One
        that `consolidate` made is registered again as far as the commit unit goes. A released range
        that reaches over the new size is filled again up to it.

        Parameters
        ----------
        size : int or str
            Bytes, at most the capacity; rounded up to ``slot_size``.

        Raises
        ------
        ValueError
            Negative or above the capacity; nothing changed.
        BufferError
            A live view holds bytes that would go; nothing changed.
        ClosedError
            Closed.
        """
        asked = size_of("size", size, 0)
        if asked > self._capacity:
            raise ValueError(f"size: {asked} bytes are more than the capacity, {self._capacity}")
        self._core.resize(align_up(asked, self._slot_size))

    def release(self, offset: SupportsIndex, nbytes: SupportsIndex) -> None:
        """Give whole commit units in the middle back; their bytes are lost.

        Unit by unit: after a failure those before it are released, and the others as they were.
        Blocks while they are unregistered and unmapped. Memory is given back by whole pages: units
        should be multiples of them. The size and all other bytes stay; waits
        and views for the range, and `wait_usable` without ``start`` beyond it, are refused until
        `recommit`. The range must be idle: no copy may be under way there, nor in a registration
        that `consolidate` made and that holds it.

        Parameters
        ----------
        offset, nbytes : int
            Bytes: multiples of `commit_unit`, but for a short last unit.

        Raises
        ------
        ValueError
            No whole units, not filled yet, or released already; nothing changed.
        BufferError
            A live view holds bytes of it; nothing changed.
        RegistrationError
            The driver refused to unregister.
        HostOOMError
            The number of mappings (vm.max_map_count) is used up.
        ClosedError
            Closed.
        """
        self._core.release(index(offset), index(nbytes))

    def recommit(self, offset: SupportsIndex, nbytes: SupportsIndex) -> None:
        """Bring released units back, all zero; blocks until they are usable.

        Unit by unit: after a failure those before it are back, and `released` names the others.

        Parameters
        ----------
        offset, nbytes : int
            Bytes: whole units that were released.

        Raises
        ------
        ValueError
            Not all of it is released, or no whole units; nothing changed.
        HostOOMError
            Memory is short.
        RegistrationError
            The driver refused, and ``on_register_failure`` is not ``"pageable"``.
        ResourceBusyError
            The registration is suspended.
        ClosedError
            Closed.
        """
        self._core.recommit(index(offset), index(nbytes))

    def pause_fill(self) -> None:
        """Let the fill rest after the pieces it is at; waits above the watermark then last."""
        self._check_open()
        self._core.filler.pause()

    def resume_fill(self) -> None:
        """Let a paused fill go on."""
        self._check_open()
        self._core.filler.resume()

    def suspend_registration(self) -> None:
        """Unregister everything and keep the bytes, for example to checkpoint the process.

        Blocks for the piece and the registration under way, and for unregistering. The memory stays
        usable by the CPU; the fill rests until `resume_registration`. No copy may be under way.
        Idempotent.

        Raises
        ------
        RegistrationError
            The driver refused to unregister a range; `resume_registration` brings back the others.
        ClosedError
            Closed.
        """
        self._core.suspend()

    def resume_registration(self) -> None:
        """Register again what `suspend_registration` unregistered, and fill on. Idempotent.

        Raises
        ------
        RegistrationError
            The driver refused, and ``on_register_failure`` is not ``"pageable"``: still suspended,
            and to be resumed again.
        ClosedError
            Closed.
        """
        self._core.resume()

    def consolidate(self) -> None:
        """Register everything again in the fewest ranges, so that large views copy in one call.

        For memory that is filled and idle: no copy may be under way. Other driver calls of the
        process wait while a large range is registered (0.4 s for 8 GiB). On kernels 6.11 to 6.13 a
        range stays below 2 GiB, elsewhere below 512 GiB.

        Raises
        ------
        ResourceBusyError
            The fill is under way, or the registration suspended; nothing changed.
        RegistrationError
            The driver refused. All bytes stay usable; what is not registered is in `quarantined`.
        ClosedError
            Closed.
        """
        self._core.consolidate()

    # -------------------------------------------------------------------------------- progress

    @property
    def progress(self) -> FillProgress:
        """How far the fill is, at this moment; never blocks for the fill."""
        return self._core.filler.progress()

    def iter_progress(self, period: float = 0.1) -> Iterator[FillProgress]:
        """Iterate over the progress until the size is reached, or will not be.

        Parameters
        ----------
        period : float
            Seconds between two.

        Yields
        ------
        FillProgress
            The last one's state is ``filled``, ``failed`` or ``closed``.
        """
        if not period >= 0:
            raise ValueError(f"period: {period!r} seconds; give 0 or more")
        while True:
            progress = self.progress
            yield progress
            if progress.state in ("filled", "failed", "closed"):
                return
            with contextlib.suppress(TimeoutError, ValueError, OSError, HostmemError):
                self.wait_usable(progress.size, period, start=progress.filled)

    def add_progress_callback(
        self, function: Callable[[FillProgress], object], period: float = 0.1
    ) -> Callable[[], None]:
        """Call ``function(progress)`` now, as the fill moves on, and when it ends.

        It runs on a thread of ours; what it raises is logged.

        Parameters
        ----------
        function : callable
            Given a `FillProgress`.
        period : float
            Seconds between two calls, at least; the last one is not left out.

        Returns
        -------
        callable
            Call it to be told no more.
        """
        listener = Listener(function, period)
        self._check_open()
        callbacks.start()
        self._core.filler.listen(listener)
        return lambda: self._core.filler.forget(listener)

    # ---------------------------------------------------------------------------------- access

    def view(
        self,
        offset: SupportsIndex = 0,
        nbytes: SupportsIndex | None = None,
        *,
        dtype: DTypeLike = np.uint8,
        shape: tuple[int, ...] | None = None,
        timeout: float | None = None,
        one_registration: bool = False,
    ) -> NDArray[Any]:
        """Return a numpy array over bytes of this memory, once they are usable.

        The array and whatever is made from it (slices, memoryviews, tensors) keep the memory: while
        one lives, `close` and a `resize` that would take its bytes raise `BufferError`. A consumer
        of DLPack gets it labelled kDLCPU, or as pinned memory (kDLCUDAHost) where it asks for
        ``dl_device=(3, 0)``; that is a `BufferError` unless one registration with a GPU's driver
        holds all the bytes. The label is of that moment.

        Parameters
        ----------
        offset : int
            First byte.
        nbytes : int, optional
            Bytes, a multiple of the item size; up to the size where omitted.
        dtype : dtype
            Type of the items; ``offset`` need not be aligned to it.
        shape : tuple of int, optional
            Shape, row-major; one dimension where omitted.
        timeout : float, optional
            Seconds to wait at most.
        one_registration : bool
            Refuse a range that the driver would refuse to copy in one call.

        Returns
        -------
        numpy.ndarray
            Writable; of a subclass, whose slices can be exported as pinned memory, too. Results of
            arithmetic are plain arrays.

        Raises
        ------
        ValueError
            A range outside the size or released, a shape that does not fit, or a registration
            boundary inside.
        TimeoutError, ClosedError, HostOOMError, RegistrationError, OSError, HostmemError
            As `wait_usable`.
        """
        size, start = self._mark.size, index(offset)
        end = size if nbytes is None else start + index(nbytes)
        if not 0 <= start <= end <= size:
            self._check_open()
            raise ValueError(f"view: bytes [{start}, {end}) are outside 0..{size}")
        core = self._core
        while True:
            self.wait_usable(end, timeout, start=start)
            with core.view_lock:
                if self._mark.is_usable(start, end):
                    # Still so, and counted before a resize, release or close can look.
                    if one_registration and start < end:
                        self._refuse_boundary(start, end)
                    data = core.views.make(self, start, end - start)
                    break
        array: NDArray[Any] = data.view(dtype)
        return array if shape is None else array.reshape(shape)

    def _registered_at(self, offset: int) -> tuple[int, int] | None:
        return self._core.registrations.registered.at(offset)

    def _refuse_boundary(self, start: int, end: int) -> None:
        boundary = self.boundary_after(start)
        if boundary < end:
            raise ValueError(
                f"view: a registration ends at {boundary}, inside bytes [{start}, {end}); the "
                "driver copies no range across it; consolidate() joins registrations"
            )

    def boundary_after(self, offset: int) -> int:
        """Return where the registration that holds ``offset`` ends: the first byte after it.

        Raises
        ------
        ValueError
            ``offset`` is not usable.
        """
        if self._mark.is_usable(offset, offset + 1):
            found = self._core.registrations.at(offset)
            if found is not None:  # else a shrink took it just now
                return sum(found)
        self._check_open()
        raise ValueError(f"offset: {offset} is not usable; {self.committed} bytes from 0 are")

    def registration_index(self, offsets: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Give the number of the registration that holds each offset, -1 for none; vectorised.

        Two usable offsets with the same number may be spanned by one copy. Numbers of different
        calls do not compare.
        """
        return self._core.registrations.registered.index_of(offsets)

    def same_registration(self, a: int, b: int) -> bool:
        """Tell whether two usable offsets lie in one registration, so that a copy may span them."""
        return self.boundary_after(a) == self.boundary_after(b)

    # ------------------------------------------------------------------------------ inspection

    def placement(self, detail: bool = False, sample: int | None = None) -> Placement:
        """Look where the resident pages are, and in which state every byte is.

        Parameters
        ----------
        detail : bool
            Also show 1,024 stretches of the range one by one, instead of 64.
        sample : int, optional
            Pages to ask about, spread over the range; all where omitted (80 ns a small page).

        Raises
        ------
        ClosedError
            Closed.
        """
        self._check_open()
        core, table = self._core, self._core.registrations
        filled = align_up(max(self._mark.size, table.end), core.reservation.page_size)
        states = [
            (name, *extent)
            for name, extents in (
                ("registered", table.registered),
                ("quarantined", table.quarantined),
                ("suspended", table.suspended),
                ("released", core.ranges_released()),
            )
            for extent in extents
        ]
        if filled < self._capacity:
            states.append(("reserved", filled, self._capacity - filled))
        return find_placement(
            self.address,
            self._capacity,
            str(self._placement),
            self._accepted,
            states=states,
            detail=detail,
            sample=sample,
        )

    def describe(self) -> str:
        """Say everything about this memory, for a person, in a few lines."""
        if self.closed:
            return repr(self)
        return str(self._facts())

    def _facts(self) -> Facts:
        progress = self.progress
        rows = [
            ("capacity", f"{format_size(self.capacity)} at {self.address:#x}"),
            ("fill", str(progress)),
            ("device", self.device.name),
            (
                "registered",
                f"{progress.registrations} ranges, {len(self.quarantined)} quarantined, "
                f"longest call {progress.longest_registration_seconds * 1e3:.1f} ms",
            ),
            ("turns", self.device.turns.state),
            ("released", format_size(progress.released)),
            ("rests", f"{progress.rests} for memory pressure, {progress.pauses} pauses"),
            ("pages", f"asked {self.page_mode}, now {progress.page_mode}"),
            ("placement", f"asked {self._placement}, accepted {self._accepted}"),
            ("waiting", str(self.waiting)),
        ]
        if self.failure is not None:
            rows.append(("failure", str(self.failure)))
        return Facts(rows, 15)

    @one_line
    def __repr__(self) -> str:
        mark, core = self._mark, self._core
        if mark.closed:
            return f"<HostMem {format_size(self._capacity)}, closed>"
        size, usable, node = mark.size, self.committed, self.node
        parts = [
            f"{format_size(size)} at {core.reservation.address:#x}",
            f"{format_size(usable)} usable" + (f" ({percent(usable / size)})" if size else ""),
            self._device.name,
            "no node" if node is None else f"node {node}",
            self._pages_in_words(usable),
        ]
        if self._capacity > size:
            parts.append(f"may grow to {format_size(self._capacity)}")
        if mark.failure is not None:
            parts.append("failed")
        elif mark.frontier < size:
            parts.append(core.filler.state)  # progress() would wait for the filler's lock
        for extents, what in (
            (mark.released, "released"),
            (core.registrations.quarantined, "quarantined"),
        ):
            if nbytes := extents.total:
                parts.append(f"{format_size(nbytes)} {what}")
        if waiting := mark.waiting:
            parts.append(f"{waiting} waiting")
        return f"<HostMem {', '.join(parts)}>"

    def _pages_in_words(self, usable: int) -> str:
        """Say which pages were asked for; how many are huge, where that is for the kernel to say.

        A few of the usable pages are looked at, in some 0.1 ms.
        """
        if self._page_mode not in (PageMode.HUGE, PageMode.AUTO) or not usable:
            return f"{self._page_mode} pages"
        offsets = np.linspace(0, usable - 1, _LOOKED_AT).astype(np.uint64)
        try:
            huge = linux.are_huge(offsets + np.uint64(self.address))
        except OSError:  # an old kernel, or no proc file system
            return f"{self._page_mode} pages"
        return f"huge pages {percent(np.count_nonzero(huge) / _LOOKED_AT)}"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [] if self.closed else [self._facts()])

    # -------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Stop the fill, unregister and give everything back. Idempotent, from any thread.

        Blocks for one piece and one registration of the fill, and then for unregistering and
        unmapping. Waits in other threads end with `ClosedError`. Where the driver refuses to
        unregister, the memory is left mapped on purpose, and that is logged.

        Raises
        ------
        BufferError
            A live view holds this memory; nothing changed.
        """
        core = self._core
        with core.lock:
            with core.view_lock:
                if not core.released:
                    core.refuse_under_views(0)
                self._mark.close()
            core.close()
            self._finalizer.detach()

    def _check_open(self) -> None:
        self._core.check_open()

    def __enter__(self) -> Self:
        self._check_open()
        return self
