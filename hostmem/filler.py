"""The fill worker: threads that populate memory ahead of one thread that registers it.

The populating threads share the pieces of what comes next, instead of each taking a unit of its
own: the first bytes are then usable after a fraction of one unit's time, not after a unit's time
multiplied by the number of threads. Registering is left to one thread, in order, because the driver
serialises it anyway and because the watermark is a prefix.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from hostmem.admission import Admission
from hostmem.errors import HostOOMError, RegistrationError
from hostmem.fill_threads import Populating, bind_to
from hostmem.progress import FillProgress, Listener
from hostmem.registration import OnRegisterFailure, Registrations
from hostmem.reservation import Reservation
from hostmem.units import align_down, align_up
from hostmem.watermark import Watermark

__all__ = ["Filler"]

log = logging.getLogger("hostmem")

_MIB = 1 << 20
_PIECE = 2 * _MIB
_FIRST_PIECE = _MIB // 2  # so that the threads share the first registrations, too
_LARGE_PIECE = 4 * _MIB  # each costs a wake-up or two, as long as populating some 100 KiB
_SMALL_UNTIL = 8 * _MIB
_LARGE_FROM = 64 * _MIB
_AHEAD = 256 * _MIB  # populated and not yet registered, at most
_NOBODY = 1 << 62  # an end that is never populated
_LARGEST_GRANT = 1024 * _MIB
_ADMITTED_AT_LEAST = 32 * _MIB  # or the rest of the commit unit; less would ask too often
_ADMITTED_FOR = 0.1  # seconds
_LONGEST_WAIT = 3600.0  # seconds


class Filler:
    """Fills one reservation up to a target, in the background.

    Threads exist only while there is something to fill: the worker, which registers, and its
    populating threads. They hold no reference to the object the user has.

    Parameters
    ----------
    reservation, registrations, watermark, admission
        What is filled, who registers it, who is told, who says whether there is memory.
    slot_size, commit_unit : int
        Bytes; registrations are whole slots and never cross a multiple of the unit.
    threads : int
        Populating threads.
    rate : float, optional
        Bytes per second to stay under.
    cpus : tuple of int
        CPUs the populating threads run on; empty for wherever they are scheduled.
    """

    def __init__(
        self,
        reservation: Reservation,
        registrations: Registrations,
        watermark: Watermark,
        admission: Admission,
        *,
        slot_size: int,
        commit_unit: int,
        threads: int,
        rate: float | None,
        cpus: tuple[int, ...],
    ) -> None:
        self._reservation = reservation
        self._registrations = registrations
        self._watermark = watermark
        self._admission = admission
        self._slot_size = slot_size
        self._unit = commit_unit
        self.threads = threads
        self._rate = rate
        self._cpus = cpus
        self._ahead = max(_AHEAD, 2 * slot_size)

        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._registrable = threading.Condition(self._lock)  # the worker waits here
        self._room = threading.Condition(self._lock)  # the populating threads wait here
        # Guarded by _lock. Offsets in bytes: granted >= taken >= populated >= registered end.
        self._target = 0
        self._granted = 0
        self._taken = 0
        self._populated = 0
        self._done_pieces: dict[int, int] = {}  # start -> end of pieces done out of order
        self._awaited = _NOBODY  # the end that the worker sleeps for
        self._at_work = 0  # pieces taken and not finished
        self._reach = 0  # up to where memory may be accessible, whatever failed
        self._admitted = 0
        self._admitted_until = 0.0
        self._populate_error: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._workers: list[threading.Thread] = []  # those that may still run, the latest last
        self._running = False
        self._paused = False
        self._suspended = False
        self._pauses = 0
        self._listeners: list[Listener] = []
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
            elif self._suspended:
                pass  # resume_registration() starts it
            elif not self._running or self._populate_error is not None:
                self._populate_error = None
                self._start_worker()
            self._wake_all()

    def _start_worker(self) -> None:
        """Start a worker that takes over from those before, once they have ended."""
        before = [one for one in self._workers if one.ident is None or one.is_alive()]
        worker = threading.Thread(
            target=self._run, args=(before,), name="hostmem-fill", daemon=True
        )
        self._worker, self._running = worker, True
        self._workers = [*before, worker]
        try:
            worker.start()
        except RuntimeError as error:  # no more threads
            self._running = False
            self._workers = before
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
            workers = self._workers
        for worker in workers:
            _join(worker)

    @property
    def running(self) -> bool:
        """Whether there is a worker that may register."""
        return self._running

    def admit(self, offset: int, nbytes: int) -> None:
        """Raise `HostOOMError` if memory for ``nbytes`` more, at ``offset``, is not to be had."""
        with self._lock:
            self._admission.grant(offset, nbytes, nbytes)

    def suspend(self) -> None:
        """Stop, and start nothing before `unsuspend`."""
        with self._lock:
            self._suspended = True
        self.stop()

    def unsuspend(self) -> None:
        """Let `fill_to` start the fill again."""
        with self._lock:
            self._suspended = False

    def shrink_to(self, size: int) -> None:
        """Give back what lies past ``size``, by whole registrations. Only while stopped."""
        page = self._reservation.page_size
        reach = max(self._reach, align_up(self._registrations.end, page))
        self._registrations.unregister_down_to(size)
        kept = self._registrations.end
        self._watermark.trim(kept)
        with self._lock:
            self._granted = self._taken = self._populated = align_up(kept, page)
        self._reservation.give_back(kept, reach)
        self._reach = self._granted

    def abandon(self) -> None:
        """Forget the threads in a forked child, which has none, and locks that they may hold."""
        self._lock = threading.RLock()
        self._registrable = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._worker, self._workers, self._running = None, [], False

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

    # ------------------------------------------------------------------------------- progress

    def progress(self) -> FillProgress:
        """Take the figures of this moment; never blocks for the fill."""
        with self._lock:
            return self._progress()

    def _progress(self) -> FillProgress:
        mark, budget = self._watermark, self._registrations.budget
        size, filled = mark.size, mark.frontier
        began, now = self._began, time.monotonic()
        done = self._filled if filled == size else None
        end = now if done is None or began is None else began + done
        seconds = 0.0 if began is None else end - began
        rate = filled / seconds if seconds else 0.0
        return FillProgress(
            size=size,
            filled=filled,
            committed=max(mark.usable_end, 0),
            released=mark.released.total,
            seconds=seconds,
            rate=rate,
            eta=(size - filled) / rate if rate else None,
            first_usable_seconds=self._first_usable,
            filled_seconds=self._filled,
            threads=self.threads,
            registrations=len(self._registrations.registered),
            registration_size=budget.size,
            longest_registration_seconds=budget.longest,
            page_mode=self._admission.page_mode,
            pauses=self._pauses,
            rests=self._admission.rests,
            resting=self._admission.resting,
            state=self.state,
        )

    @property
    def state(self) -> str:
        """What it does, in a word; takes no lock."""
        mark = self._watermark
        if mark.closed:
            return "closed"
        if mark.failure is not None:
            return "failed"
        if mark.frontier == mark.size:
            return "filled"
        if self._suspended:
            return "suspended"
        if not self._running:
            return "idle"
        if self._paused:
            return "paused"
        return "filling" if self._admission.resting is None else "resting"

    def listen(self, listener: Listener) -> None:
        """Tell a listener of the progress from now on, and at once how far it is."""
        with self._lock:
            self._listeners.append(listener)
            listener.tell(self._progress())

    def forget(self, listener: Listener) -> None:
        """Tell a listener nothing more. Idempotent."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one is not listener]

    def _tell(self, always: bool) -> None:
        """Tell the listeners whose time has come, or all; under the lock."""
        now = time.monotonic()
        due = [one for one in self._listeners if always or now >= one.due]
        if due:
            progress = self._progress()
            for listener in due:
                listener.tell(progress)

    # -------------------------------------------------------------------------------- the worker

    def _run(self, before: list[threading.Thread]) -> None:
        """Register in order what the populating threads have populated, until there is no more."""
        for worker in before:
            _join(worker)
        me = threading.current_thread()
        with self._lock:
            if self._is_over(me):
                return  # and took nothing: the memory may even be gone
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
                self._registrations.register(end)
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
                end = self._registrations.next_end(start, self._target)
                if self._populated >= end:
                    return end
                if self._populate_error is not None and not self._at_work:
                    # The last whole slots below the page that could not be had.
                    last = align_down(min(self._populated, end), self._slot_size)
                    return last if last > start else None
                self._awaited = end
                self._registrable.wait()
                self._awaited = _NOBODY

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
            self._tell(always=end >= self._target)
            # All at once and seldom: to be woken takes a thread as long as to populate 100 KiB.
            if end >= self._target or end + self._ahead - self._taken >= self._ahead // 4:
                self._room.notify_all()

    def _take_back(self) -> None:
        """Undo access and population past the registered end: a stopped fill took nothing more."""
        end = self._registrations.end
        self._watermark.advance(end)  # a refused registration may have obtained a part
        with self._lock:
            page = self._reservation.page_size
            self._granted = self._taken = self._populated = align_up(end, page)
            self._done_pieces.clear()
            self._at_work = self._admitted = 0
            reach = self._reach
        try:
            self._reservation.give_back(end, reach)
        except (OSError, HostOOMError) as error:
            log.error("what was populated past %d bytes is not given back: %s", end, error)
        else:
            self._reach = self._granted

    def _report(self, me: threading.Thread, failure: BaseException) -> None:
        """Tell those who wait, unless a retry has begun meanwhile: what it meets is what counts."""
        level = (
            logging.INFO if self._registrations.policy is OnRegisterFailure.STOP else logging.ERROR
        )
        if not isinstance(failure, HostOOMError | RegistrationError | OSError):
            log.error("the fill worker failed", exc_info=failure)
        else:
            log.log(level, "the fill stopped at %d bytes: %s", self._registrations.end, failure)
        with self._lock:
            if self._worker is me:
                self._watermark.fail(failure)
                self._tell(always=True)

    # ------------------------------------------------------------------------ populating threads

    def _populate(
        self, worker: threading.Thread, populators: list[threading.Thread], number: int
    ) -> None:
        if number + 1 < len(populators):
            try:
                populators[number + 1].start()
            except RuntimeError as error:
                log.warning("%d of %d fill threads run: %s", number + 1, len(populators), error)
        bind_to(self._cpus)
        while (piece := self._next_piece(worker)) is not None:
            failure: BaseException | None = None
            try:
                with Populating(lambda: self._is_over(worker)) as allowed:
                    if not allowed:
                        return
                    began = time.perf_counter()
                    self._reservation.populate(*piece)
                    seconds = time.perf_counter() - began
            except BaseException as error:
                failure, seconds = error, 0.0
            self._finish_piece(*piece, seconds, failure)

    def _next_piece(self, worker: threading.Thread) -> tuple[int, int] | None:
        """Take the next piece; what prevents that, whatever it is, belongs to those who wait."""
        try:
            return self._take_piece(worker)
        except BaseException as error:
            with self._lock:
                self._populate_error = self._populate_error or error
                self._wake_all()
            return None

    def _take_piece(self, worker: threading.Thread) -> tuple[int, int] | None:
        """Wait for the next piece and take it; None when there is nothing more to do."""
        with self._lock:
            while True:
                if self._is_over(worker) or self._populate_error is not None:
                    return None
                wait: float | None = None
                limit = min(self._target, self._registrations.end + self._ahead)
                if self._taken < limit and not self._paused:
                    now = time.monotonic()
                    wait = self._pace(now)
                    if wait == 0 and now > self._admitted_until and self._taken >= _SMALL_UNTIL:
                        wait = self._admission.rest()  # never before the first bytes
                    if wait == 0:
                        return self._cut_piece()
                self._room.wait(None if wait is None else min(wait, _LONGEST_WAIT))

    def _cut_piece(self) -> tuple[int, int] | None:
        start = self._taken
        size = self._piece_at(start)
        page = self._reservation.page_size
        end = min(align_up(start + 1, max(size, page)), align_up(self._target, page))
        now = time.monotonic()
        if end > self._admitted or now > self._admitted_until:
            self._admit(start, end, now)
        if end > self._granted:
            self._grant(end)
        self._taken = end
        self._at_work += 1
        if self._rate is not None:
            self._next_piece_at = max(self._next_piece_at, now) + (end - start) / self._rate
        return start, end

    def _piece_at(self, start: int) -> int:
        """Bytes of a piece: small first, so that the threads share what is wanted first."""
        if start < _SMALL_UNTIL:
            return _FIRST_PIECE
        return _PIECE if start < _LARGE_FROM or self._rate is not None else _LARGE_PIECE

    def _admit(self, start: int, end: int, now: float) -> None:
        """Ask whether there is memory for the next piece, and for how many after it.

        The answer holds for a moment: after a pause others may have taken it.
        """
        unit_end = align_down(start, self._unit) + self._unit
        least = max(end, min(unit_end, start + _ADMITTED_AT_LEAST, self._target)) - start
        self._admitted = start + self._admission.grant(start, least, _LARGEST_GRANT)
        self._admitted_until = now + _ADMITTED_FOR
        self._admission.choose_pages(start, least)

    def _grant(self, end: int) -> None:
        """Make more memory accessible, up to ``end`` at least."""
        # A change of access waits for all who are populating, and they for it: fewer, larger
        # ones as the fill goes on.
        page, start = self._reservation.page_size, self._granted
        wanted = min(start + min(max(start, self._unit), _LARGEST_GRANT), self._target)
        granted = align_up(max(wanted, end), page)
        self._reach = max(self._reach, granted)
        try:
            self._reservation.allow(start, granted)
        except HostOOMError:  # by a limit on what is accessible: what is needed now may pass
            granted = align_up(end, page)
            self._reservation.allow(start, granted)
        self._granted = granted

    def _pace(self, now: float) -> float:
        """Seconds until the rate limit allows another piece."""
        return 0.0 if self._rate is None else max(0.0, self._next_piece_at - now)

    def _finish_piece(
        self, start: int, end: int, seconds: float, failure: BaseException | None
    ) -> None:
        with self._lock:
            self._at_work -= 1
            if failure is not None:
                self._populate_error = self._populate_error or failure
                self._wake_all()
                return
            self._admission.note(end - start, seconds)
            self._done_pieces[start] = end
            while (done := self._done_pieces.pop(self._populated, None)) is not None:
                self._populated = done
            if self._populated >= self._awaited or self._populate_error is not None:
                self._registrable.notify()

    def _wake_all(self) -> None:
        self._registrable.notify_all()
        self._room.notify_all()


def _join(thread: threading.Thread) -> None:
    if thread is threading.current_thread():
        raise RuntimeError("a thread of the fill cannot wait for its own end")
    while thread.ident is not None:  # one that could not start has none
        try:
            thread.join()
        except RuntimeError:  # it runs, and is about to say so
            os.sched_yield()
        else:
            return
