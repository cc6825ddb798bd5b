"""The inside of a `HostMem`: all it holds, and what is done to it one thing at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from hostmem.errors import ClosedError, HostOOMError, ResourceBusyError
from hostmem.fill_threads import Populating, bind_to
from hostmem.filler import Filler
from hostmem.machine import machine
from hostmem.registration import Registrations, registration_limit
from hostmem.reservation import Reservation
from hostmem.units import align_down, align_up
from hostmem.views import LiveViews
from hostmem.watermark import Watermark

__all__ = ["Core"]

log = logging.getLogger("hostmem")

_PIECE = 2 << 20
_ALONE = 64 << 20  # bytes that the calling thread populates itself: starting others takes as long


class Core:
    """Refers to nothing that the user has: it outlives an object that was dropped, to close it.

    Its lock makes a resize, a release, a close and so on one at a time; some take long. The view
    lock is held for a moment: to make a view of what is usable, or to see that there is none of
    what is about to go. The fill and those who wait take neither.

    Parameters
    ----------
    reservation, registrations, watermark, filler
        The parts.
    slot_size, commit_unit : int
        Bytes.
    cpus : tuple of int
        Where threads that populate run; empty for anywhere.
    """

    __slots__ = (
        "__weakref__",
        "_cpus",
        "_shrinking",
        "_slot_size",
        "_suspended",
        "_unit",
        "filler",
        "lock",
        "registrations",
        "released",
        "reservation",
        "view_lock",
        "views",
        "watermark",
    )

    def __init__(
        self,
        reservation: Reservation,
        registrations: Registrations,
        watermark: Watermark,
        filler: Filler,
        *,
        slot_size: int,
        commit_unit: int,
        cpus: tuple[int, ...],
    ) -> None:
        self.reservation = reservation
        self.registrations = registrations
        self.watermark = watermark
        self.filler = filler
        self._slot_size = slot_size
        self._unit = commit_unit
        self._cpus = cpus
        self._suspended = False
        self.views = LiveViews()
        self.lock = threading.RLock()
        self.view_lock = threading.RLock()
        self._shrinking = False
        self.released = False

    def check_open(self) -> None:
        """Raise `ClosedError` once closed."""
        if self.watermark.closed:
            raise ClosedError("the memory was closed, or belongs to the parent of this process")

    def refuse_under_views(self, start: int, end: int | None = None) -> None:
        """Raise `BufferError` if a live view holds a byte of ``[start, end)``."""
        taken = self.views.holding(start, end)
        if taken:
            ranges = ", ".join(f"[{first}, {last})" for first, last in taken[:4])
            more = f" and {len(taken) - 4} more" if len(taken) > 4 else ""
            where = f"past {start}" if end is None else f"of [{start}, {end})"
            raise BufferError(
                f"live views hold bytes {where}: {ranges}{more}; drop them first (arrays, "
                "memoryviews, tensors made from view())"
            )

    # --------------------------------------------------------------------------------- the size

    def resize(self, target: int) -> None:
        """Grow in the background, or give back what is past the target."""
        with self.lock:
            self.check_open()
            mark = self.watermark
            if target >= mark.size and not self._shrinking:
                self.filler.fill_to(target)
                return
            with self.view_lock:
                self.refuse_under_views(target)
                mark.resize(target, 0)  # first: nothing is usable that is about to go
            self._shrinking = True
            try:
                self.filler.stop()
                # A released range that reaches over the target ends where it began.
                over = mark.released.at(target)
                keep = target if over is None else over[0]
                self._cut_consolidated(keep)
                self.filler.shrink_to(keep)
                self._shrinking = False
            finally:
                if not mark.closed:  # a signal handler may have closed it meanwhile
                    self.filler.fill_to(target)

    def _cut_consolidated(self, size: int) -> None:
        over = self.registrations.at(size)
        if over is not None and over[0] < size and over[1] > self._unit:
            self.registrations.cut(align_up(size, self._unit))

    # ------------------------------------------------------------------- giving back in the middle

    def release(self, offset: int, nbytes: int) -> None:
        """Give whole units below the frontier back."""
        with self.lock:
            self.check_open()
            units = self._whole_units(offset, nbytes)
            with self.view_lock:
                self.refuse_under_views(offset, offset + nbytes)
                self.watermark.release(units)  # first: nothing is usable that is about to go
            while units:
                start, size = units[0]
                giving_back = False
                try:
                    self.registrations.drop(start, start + size)
                    giving_back = True
                    self.reservation.give_back(start, start + size)
                except BaseException as error:
                    if giving_back and not isinstance(error, OSError | HostOOMError):
                        del units[0]  # Ctrl-C: perhaps it is gone
                    for start, size in units:
                        self.registrations.mend(start, start + size)
                        self.watermark.restore(start)
                    raise
                del units[0]

    def _whole_units(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        unit, mark, end = self._unit, self.watermark, offset + nbytes
        whole = offset % unit == 0 and (end % unit == 0 or end == mark.size)
        if not whole or offset < 0 or nbytes <= 0:
            raise ValueError(f"release: bytes [{offset}, {end}) are no whole units of {unit} bytes")
        if end > mark.frontier:
            raise ValueError(
                f"release: bytes [{offset}, {end}) are not filled yet; {mark.frontier} are"
            )
        if gone := mark.released.overlapping(offset, end):
            raise ValueError(f"release: {gone[0][1]} bytes at offset {gone[0][0]} are released")
        return [(start, min(unit, end - start)) for start in range(offset, end, unit)]

    def recommit(self, offset: int, nbytes: int) -> None:
        """Bring released units back, one after the other."""
        units = self._released_units(offset, nbytes)
        with contextlib.ExitStack() as stack:
            crew = None
            if nbytes > _ALONE and self.filler.threads > 1:
                crew = stack.enter_context(
                    ThreadPoolExecutor(
                        self.filler.threads, "hostmem-populate", bind_to, (self._cpus,)
                    )
                )
            for start, size in units:
                with self.lock:
                    self.check_open()
                    self._refuse_while_suspended("recommit")
                    if self.watermark.released.at(start) == (start, size):
                        self._commit(start, start + size, crew)
                        self.watermark.restore(start)

    def _released_units(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        with self.lock:
            self.check_open()
            end = offset + nbytes
            units = self.watermark.released.overlapping(offset, end)
        inside = all(offset <= start and start + size <= end for start, size in units)
        if nbytes <= 0 or not inside or sum(size for _, size in units) < nbytes:
            raise ValueError(
                f"recommit: bytes [{offset}, {end}) are no whole released units; see `released`"
            )
        return units

    def _commit(self, start: int, end: int, crew: ThreadPoolExecutor | None) -> None:
        """Make a released range what it was before, or leave it released."""
        try:
            # The pages that were given back: one shared with a neighbour was kept, and holds bytes.
            page = self.reservation.page_size
            first, last = align_up(start, page), align_down(end, page)
            self.reservation.allow(first, last)
            for at in range(first, last, _ALONE):
                stop = min(at + _ALONE, last)
                self.filler.admit(at, stop - at)
                self._populate_together(at, stop, crew)
            # Parts of pages that the neighbours have, too: these are not fresh.
            self.reservation.zero(start, min(first, end))
            self.reservation.zero(max(last, start), end)
            at = start
            while at < end:
                stop = self.registrations.next_end(at, end)
                self.registrations.register_range(at, stop)
                at = stop
        except BaseException:
            self.registrations.drop(start, end)
            self.reservation.give_back(start, end)
            raise

    def _populate_together(self, start: int, end: int, crew: ThreadPoolExecutor | None) -> None:
        step = max(_PIECE, self.reservation.page_size)
        jobs: list[Future[None]] = []
        try:
            for at in range(start, end, step):
                piece = at, min(at + step, end)
                if crew is None:
                    self._populate(*piece)
                    continue
                try:
                    jobs.append(crew.submit(self._populate, *piece))
                except RuntimeError:  # no more threads can be had: this one is there
                    crew = None
                    self._populate(*piece)
            wait(jobs)
        except BaseException:  # Ctrl-C: nothing may be taken from under them
            for job in jobs:
                job.cancel()
            wait(jobs)
            raise
        for job in jobs:
            job.result()

    def _populate(self, start: int, end: int) -> None:
        with Populating(lambda: False):
            self.reservation.populate(start, end)

    # ------------------------------------------------------------------------------ registration

    def suspend(self) -> None:
        """Unregister everything and keep the bytes."""
        with self.lock:
            self.check_open()
            self._suspended = True
            self.filler.suspend()
            self.registrations.suspend()

    def resume(self) -> None:
        """Register again what was suspended, and fill on."""
        with self.lock:
            self.check_open()
            if self._suspended:
                self.registrations.resume()
                self._suspended = False
                self.filler.unsuspend()
                self.filler.fill_to(self.watermark.size)

    def consolidate(self) -> None:
        """Register all that is filled in the fewest ranges."""
        with self.lock:
            self.check_open()
            self._refuse_while_suspended("consolidate")
            if self.filler.running and self.watermark.frontier < self.watermark.size:
                raise ResourceBusyError(
                    "consolidate: the fill is under way; wait for wait_usable(size)"
                )
            self.filler.stop()  # it is at its end
            self.registrations.consolidate(registration_limit(machine().kernel, self._slot_size))

    def _refuse_while_suspended(self, call: str) -> None:
        if self._suspended:
            raise ResourceBusyError(
                f"{call}: the registration is suspended; resume_registration() first"
            )

    def ranges_released(self) -> Iterator[tuple[int, int]]:
        """Yield the released ranges as (offset, nbytes), neighbours as one, ascending."""
        start = end = 0
        for offset, nbytes in self.watermark.released:
            if offset != end:
                if end:
                    yield start, end - start
                start = offset
            end = offset + nbytes
        if end:
            yield start, end - start

    # ---------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Give everything back; memory that a device may still reach is left mapped."""
        with self.lock:
            if self.released:
                return
            self.shut_down()  # Ctrl-C may end it early; closing again goes on from there
            if not self.registrations.end:
                self._unmap()
            else:
                self.released = True
                log.error(
                    "%d bytes at %#x are leaked on purpose: a device may still reach them",
                    self.reservation.nbytes,
                    self.reservation.address,
                )

    def _unmap(self) -> None:
        self.released = True
        try:
            self.reservation.release()
        except OSError:
            self.released = False  # it is still there, and closing again tries again
            raise

    def shut_down(self) -> None:
        """Stop and unregister; the memory stays mapped."""
        with self.lock:
            with self.view_lock:
                self.watermark.close()
            self.filler.stop()
            self.registrations.unregister_down_to(0)

    def abandon(self) -> None:
        """Forget everything in a forked child."""
        self.watermark.abandon()
        self.filler.abandon()
        self.registrations.abandon()
        self.lock = threading.RLock()
        self.view_lock = threading.RLock()
        self.released = True
