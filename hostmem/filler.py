"""The fill worker: threads that populate memory ahead of one thread that registers it.

The populating threads share the pieces of what comes next, instead of each taking a unit of its
own: the first bytes are then usable after a fraction of one unit's time, not after a unit's time
multiplied by the number of threads. Registering is left to one thread, in order, because the driver
serialises it anyway and because the watermark is a prefix.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time

from hostmem.errors import HostOOMError, RegistrationError
from hostmem.machine import machine
from hostmem.progress import FillProgress
from hostmem.registration import OnRegisterFailure, Registrations
from hostmem.reservation import Reservation
from hostmem.units import align_down, align_up
from hostmem.watermark import Watermark

__all__ = ["Filler", "fill_thread_budget", "valid_rate"]

log = logging.getLogger("hostmem")

_MIB = 1 << 20
_FIRST_REGISTRATION = _MIB
_LARGEST_REGISTRATION = 8 * _MIB  # longer ones keep other driver calls of the process waiting
_PIECE = 2 * _MIB
_FIRST_PIECE = _MIB // 2  # so that the threads share the first registrations, too
_SMALL_UNTIL = 8 * _MIB
_AHEAD = 64 * _MIB  # populated and not yet registered, at most
_LARGEST_GRANT = 1024 * _MIB
_MOST_THREADS = 12  # the kernel's page allocation does not scale past this


@functools.cache
def fill_thread_budget() -> int:
    """Say how many threads populate at once in this process, over all objects."""
    return max(1, min(len(machine().allowed_cpus), _MOST_THREADS))


@functools.cache
def _budget() -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(fill_thread_budget())


# The parent's threads that hold a part of the budget are not in the child to give it back.
os.register_at_fork(after_in_child=_budget.cache_clear)


class Filler:
    """Fills one reservation up to a target, in the background.

    Threads exist only while there is something to fill: the worker, which registers, and its
    populating threads. They hold no reference to the object the user has.

    Parameters
    ----------
    reservation, registrations, watermark
        What is filled, who registers it, who is told.
    slot_size, commit_unit : int
        Bytes; registrations are whole slots and never cross a multiple of the unit.
    threads : int
        Populating threads.
    rate : float, optional
        Bytes per second to stay under.
    cpus : tuple of int
        CPUs the populating threads run on; empty for wherever they are scheduled.
    policy : OnRegisterFailure
        What a refused registration means.
    """

    def __init__(
        self,
        reservation: Reservation,
        registrations: Registrations,
        watermark: Watermark,
        *,
        slot_size: int,
        commit_unit: int,
        threads: int,
        rate: float | None,
        cpus: tuple[int, ...],
        policy: OnRegisterFailure,
    ) -> None:
        self._reservation = reservation
        self._registrations = registrations
        self._watermark = watermark
        self._slot_size = slot_size
        self._unit = commit_unit
        self.threads = threads
        self._rate = rate
        self._cpus = cpus
        self._policy = policy

        self._lock = threading.Lock()
        self._registrable = threading.Condition(self._lock)  # the worker waits here
        self._room = threading.Condition(self._lock)  # the populating threads wait here
        # Guarded by _lock. Offsets in bytes: granted >= taken >= populated >= registered end.
        self._target = 0
        self._granted = 0
        self._taken = 0
        self._populated = 0
        self._done_pieces: dict[int, int] = {}  # start -> end of pieces done out of order
        self._populate_error: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._running = False
        self._paused = False
        self._pauses = 0
        self._next_piece_at = 0.0
        self._began: float | None = None
        self._first_usable: float | None = None
        self._filled: float | None = None

    # ---------------------------------------------------------------------- what the owner calls

    def fill_to(self, target: int) -> None:
        """Make ``target`` bytes the size and fill up to it in the background; returns at once.

        A failure before this is forgotten, also one that a worker is about to report.
        """
        with self._lock:
            self._watermark.resize(target, self._registrations.end)
            self._target = target
            if self._began is None:
                self._began = time.monotonic()
            if self._registrations.end >= target:
                self._filled = time.monotonic() - self._began
            elif not self._running or self._populate_error is not None:
                self._populate_error = None
                self._start_worker()
            self._wake_all()

    def _start_worker(self) -> None:
        """Start a worker that takes over from the one before, once that has ended."""
        worker = threading.Thread(
            target=self._run, args=(self._worker,), name="hostmem-fill", daemon=True
        )
        self._worker, self._running = worker, True
        try:
            worker.start()
        except RuntimeError as error:  # no more threads
            self._running = False
            log.error("the fill cannot start: %s", error)
            self._watermark.fail(error)
        except BaseException:  # Ctrl-C
            self._running = False
            raise

    def stop(self) -> None:
        """End the fill within one piece and one registration, and take back what is not usable.

        Blocks until the threads have ended. Afterwards everything past the registered end is
        inaccessible and holds no memory, and nothing runs until the next `fill_to`.
        """
        with self._lock:
            self._running = False
            self._wake_all()
            worker = self._worker
        _join(worker)

    def shrink_to(self, size: int) -> int:
        """Give back what lies past ``size``, by whole registrations; returns the end that stays.

        Only while stopped.
        """
        before = self._registrations.end
        self._registrations.unregister_down_to(size)
        kept = self._registrations.end
        page = self._reservation.page_size
        with self._lock:
            self._granted = self._taken = self._populated = align_up(kept, page)
        self._reservation.give_back(kept, align_up(before, page))
        return kept

    def abandon(self) -> None:
        """Forget the threads in a forked child, which has none, and locks that they may hold."""
        self._lock = threading.Lock()
        self._registrable = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._worker, self._running = None, False

    def pause(self) -> None:
        """Let the fill rest; what is populated is still registered."""
        with self._lock:
            self._pauses += not self._paused
            self._paused = True

    def resume(self) -> None:
        """Let a paused fill go on."""
        with self._lock:
            self._paused = False
            self._room.notify_all()

    def progress(self) -> FillProgress:
        """Take the figures of this moment; never blocks for the fill."""
        with self._lock:
            size, committed = self._watermark.size, max(self._watermark.usable_end, 0)
            began, now = self._began, time.monotonic()
            filled = self._filled if committed == size else None
            end = now if filled is None or began is None else began + filled
            seconds = 0.0 if began is None else end - began
            rate = committed / seconds if seconds else 0.0
            return FillProgress(
                size=size,
                committed=committed,
                seconds=seconds,
                rate=rate,
                eta=(size - committed) / rate if rate else None,
                first_usable_seconds=self._first_usable,
                filled_seconds=self._filled,
                threads=self.threads,
                registrations=len(self._registrations.registered),
                pauses=self._pauses,
                state=self._state(committed, size),
            )

    def _state(self, committed: int, size: int) -> str:
        if self._watermark.failure is not None:
            return "failed"
        if committed == size:
            return "filled"
        if not self._running:
            return "idle"
        return "paused" if self._paused else "filling"

    # -------------------------------------------------------------------------------- the worker

    def _run(self, previous: threading.Thread | None) -> None:
        """Register in order what the populating threads have populated, until there is no more."""
        _join(previous)
        me = threading.current_thread()
        with self._lock:
            self._populate_error = None  # what the last threads of the fill before met
        populators: list[threading.Thread] = []
        for number in range(self.threads):
            name = f"hostmem-populate-{number}"
            arguments = (me, populators, number)
            populators.append(
                threading.Thread(target=self._populate, args=arguments, name=name, daemon=True)
            )
        failure: BaseException | None = None
        try:
            populators[0].start()  # each starts the next one: starting many takes milliseconds
            while (end := self._next_registration(me)) is not None:
                self._registrations.register(end, self._policy)
                self._note_progress()
        except BaseException as error:  # whatever it is, it belongs to those who wait
            failure = error
        with self._lock:
            if self._is_over(me):
                failure = None  # stopped, or retried before anybody was told
            else:
                self._running = False
                failure = failure or self._populate_error
            self._wake_all()
        for thread in populators:
            _join(thread)
        self._take_back()
        if failure is not None:
            self._report(me, failure)

    def _is_over(self, worker: threading.Thread) -> bool:
        """Tell whether that worker and its populating threads are to end; under the lock."""
        return not self._running or self._worker is not worker

    def _next_registration(self, me: threading.Thread) -> int | None:
        """Wait until the next registration is populated; its end, or None to finish."""
        with self._lock:
            while True:
                if self._is_over(me):
                    return None
                start = self._registrations.end
                if start >= self._target:
                    self._running = False
                    return None
                end = self._registration_end(start)
                if self._populated >= end:
                    return end
                if self._populate_error is not None:
                    # The last whole slots below the page that could not be had.
                    last = align_down(min(self._populated, end), self._slot_size)
                    return last if last > start else None
                self._registrable.wait()

    def _registration_end(self, start: int) -> int:
        """Say where the registration that begins at ``start`` ends: small at first, then larger."""
        size = min(max(start, _FIRST_REGISTRATION), _LARGEST_REGISTRATION)
        size = max(align_down(size, self._slot_size), self._slot_size)
        unit_end = align_down(start, self._unit) + self._unit
        return min(start + size, unit_end, self._target)

    def _note_progress(self) -> None:
        end = self._registrations.end
        self._watermark.advance(end)
        with self._lock:
            assert self._began is not None
            elapsed = time.monotonic() - self._began
            if self._first_usable is None:
                self._first_usable = elapsed
            if end >= self._target:
                self._filled = elapsed
            self._room.notify_all()

    def _take_back(self) -> None:
        """Undo access and population past the registered end: a stopped fill took nothing more."""
        end = self._registrations.end
        self._watermark.advance(end)  # a refused registration may have obtained a part
        with self._lock:
            page = self._reservation.page_size
            granted, self._granted = self._granted, align_up(end, page)
            self._taken = self._populated = self._granted
            self._done_pieces.clear()
        if granted > self._granted:
            try:
                self._reservation.give_back(end, granted)
            except (OSError, HostOOMError) as error:
                log.error("what was populated past %d bytes is not given back: %s", end, error)

    def _report(self, me: threading.Thread, failure: BaseException) -> None:
        """Tell those who wait, unless a retry has begun meanwhile: what it meets is what counts."""
        level = logging.INFO if self._policy is OnRegisterFailure.STOP else logging.ERROR
        if not isinstance(failure, HostOOMError | RegistrationError | OSError):
            log.error("the fill worker failed", exc_info=failure)
        else:
            log.log(level, "the fill stopped at %d bytes: %s", self._registrations.end, failure)
        with self._lock:
            if self._worker is me:
                self._watermark.fail(failure)

    # ------------------------------------------------------------------------ populating threads

    def _populate(
        self, worker: threading.Thread, populators: list[threading.Thread], number: int
    ) -> None:
        if number + 1 < len(populators):
            try:
                populators[number + 1].start()
            except RuntimeError as error:
                log.warning("%d of %d fill threads run: %s", number + 1, len(populators), error)
        if self._cpus:
            try:
                os.sched_setaffinity(0, self._cpus)
            except OSError as error:
                log.warning("fill threads run anywhere: CPUs %s are refused: %s", self._cpus, error)
        while (piece := self._take_piece(worker)) is not None:
            failure: BaseException | None = None
            try:
                with _budget():
                    self._reservation.populate(*piece)
            except BaseException as error:
                failure = error
            self._finish_piece(*piece, failure)

    def _take_piece(self, worker: threading.Thread) -> tuple[int, int] | None:
        """Wait for the next piece and take it; None when there is nothing more to do."""
        with self._lock:
            while True:
                if self._is_over(worker) or self._populate_error is not None:
                    return None
                wait: float | None = None
                limit = min(self._target, self._registrations.end + _AHEAD)
                if self._taken < limit and not self._paused:
                    wait = self._pace()
                    if wait == 0:
                        return self._cut_piece()
                self._room.wait(wait)

    def _cut_piece(self) -> tuple[int, int] | None:
        start = self._taken
        size = _FIRST_PIECE if start < _SMALL_UNTIL else _PIECE
        page = self._reservation.page_size
        end = min(align_up(start + 1, max(size, page)), align_up(self._target, page))
        if end > self._granted:
            # A change of access waits for all who are populating, and they for it: fewer, larger
            # ones as the fill goes on.
            step = min(max(self._granted, self._unit), _LARGEST_GRANT)
            grant = align_up(min(max(end, self._granted + step), self._target), page)
            try:
                self._reservation.allow(self._granted, grant)
            except (OSError, HostOOMError) as error:
                self._populate_error = error
                self._wake_all()
                return None
            self._granted = grant
        self._taken = end
        if self._rate is not None:
            now = time.monotonic()
            self._next_piece_at = max(self._next_piece_at, now) + (end - start) / self._rate
        return start, end

    def _pace(self) -> float:
        """Seconds until the rate limit allows another piece."""
        if self._rate is None:
            return 0.0
        return max(0.0, self._next_piece_at - time.monotonic())

    def _finish_piece(self, start: int, end: int, failure: BaseException | None) -> None:
        with self._lock:
            if failure is not None:
                self._populate_error = self._populate_error or failure
                self._wake_all()
                return
            self._done_pieces[start] = end
            while (done := self._done_pieces.pop(self._populated, None)) is not None:
                self._populated = done
            self._registrable.notify()

    def _wake_all(self) -> None:
        self._registrable.notify_all()
        self._room.notify_all()


def _join(thread: threading.Thread | None) -> None:
    if thread is not None and thread.ident is not None:  # one that could not start has none
        thread.join()


def valid_rate(rate: float | None) -> float | None:
    """Check a ``fill_rate`` argument: positive and finite bytes per second, or None."""
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"fill_rate: {rate!r}; give bytes per second above 0, or None")
    return rate
