"""What tests of a store of slots need: known bytes in memory, work that is held up, threads."""

from __future__ import annotations

import contextlib
import threading
import unittest
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hostmem import Event, HostEvent, HostMem
from hostmem.device import DeviceLike
from kvtier.testing.contents import mix
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import BatchEvent, PageEvents

__all__ = ["NOTHING", "SlotBench", "SlotStore", "Tags"]

NOTHING = Dependencies()
"""No dependencies."""
UNTOUCHED = 0x5A
"""Each byte of memory that nothing was read into."""
Addresses = NDArray[np.uint64]
Ids = NDArray[np.int32]
Tags = dict[int, int]
"""What slots hold: the number that their contents were made from."""


class SlotStore(Protocol):
    """What holds the slots of a level, as `kvtier.transfer.disk.SlotFile` does."""

    @property
    def slots(self) -> int:
        """How many there are."""

    def resize(self, slots: int) -> None:
        """Have so many slots; those below stay as they are."""

    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        """Write slots from memory, once all of ``after`` has happened; returns at once."""

    def read(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        """Read slots into memory, once all of ``after`` has happened; returns at once."""

    def close(self) -> None:
        """Finish what was submitted; idempotent."""


class SlotBench:
    """Makes stores, writes known contents to their slots and compares what comes back."""

    device: DeviceLike = "cpu"
    """Whose streams copy."""
    slot_size = 4096
    """Bytes of a slot; make a subclass for each size that is treated differently."""
    n_slots = 48
    """Slots of a store, at least 16."""
    moment = 0.02
    """Seconds that a store which does not wait is given to do something too early."""
    patience = 30.0
    """Seconds after which what should happen counts as never happening."""

    def make(self, slot_size: int, slots: int) -> SlotStore:
        """Build the store under test; it is closed when the test ends."""
        raise NotImplementedError("define make(self, slot_size, slots)")

    def damage(self, store: Any, slot: int) -> None:
        """Make it impossible to read what a slot holds, behind the store's back.

        Only where that can be; the tests that need it are skipped otherwise.
        """
        raise unittest.SkipTest("no damage() is defined")

    def setup_method(self) -> None:
        """Begin a test."""
        self._undo = contextlib.ExitStack()
        self._gates: list[HostEvent] = []
        self._guards: list[threading.Timer] = []
        self._threads: list[threading.Thread] = []
        self._tags = 0
        size = self.slot_size
        self.memory = HostMem(
            4 * self.n_slots * size, device=self.device, slot_size=size, wait=True
        )
        """Registered memory for slots, from and to which the tests transfer."""
        self._rows: NDArray[np.uint8] = self.memory.view(shape=(-1, size))
        self._rows[:] = UNTOUCHED

    def teardown_method(self) -> None:
        """End a test: let everything go on, and give everything back."""
        for guard in self._guards:
            guard.cancel()
        for gate in self._gates:
            if not gate.query():
                gate.set()
        for thread in (*self._threads, *self._guards):
            thread.join(self.patience)
        self._rows = np.empty((0, self.slot_size), np.uint8)
        try:
            self._undo.close()
        finally:
            with contextlib.suppress(BufferError):  # a failed test is shown with its arrays
                self.memory.close()

    def _store(self) -> SlotStore:
        store = self.make(self.slot_size, self.n_slots)
        self._undo.callback(store.close)
        assert store.slots == self.n_slots, "the store has not the slots that were asked for"
        return store

    def _addresses(self, rows: Iterable[int]) -> Addresses:
        offsets = np.array(list(rows), np.uint64) * np.uint64(self.slot_size)
        return offsets + np.uint64(self.memory.address)

    def _content(self, tag: int) -> NDArray[np.uint8]:
        positions = mix(np.arange(-(-self.slot_size // 8), dtype=np.uint64))
        return (positions ^ mix(np.array([tag], np.uint64))).view(np.uint8)[: self.slot_size]

    def _fill(self, rows: Sequence[int]) -> list[int]:
        """Give rows of the memory contents of their own; say which."""
        tags = [self._tags + n for n in range(len(rows))]
        self._tags += len(rows)
        for row, tag in zip(rows, tags, strict=True):
            self._rows[row] = self._content(tag)
        return tags

    def _holds(self, row: int, tag: int) -> bool:
        return bool(np.array_equal(self._rows[row], self._content(tag)))

    def _write(
        self, store: SlotStore, ids: Sequence[int], after: Dependencies = NOTHING
    ) -> tuple[PageEvents, Tags]:
        """Submit a write of new contents, from the first rows of the memory."""
        rows = range(len(ids))
        addresses = self._addresses(rows)
        tags = self._fill(rows)
        event = store.write(np.array(ids, np.int32), addresses, after)
        return event, dict(zip(ids, tags, strict=True))

    def _written(self, store: SlotStore, ids: Sequence[int]) -> Tags:
        event, tags = self._write(store, ids)
        event.synchronize(self.patience)
        return tags

    def _target(self, place: int) -> int:
        """Say into which row of the memory a read goes: between others that stay as they are."""
        return self.n_slots + 2 * place + 1

    def _read(
        self, store: SlotStore, ids: Sequence[int], after: Dependencies = NOTHING
    ) -> PageEvents:
        addresses = self._addresses(map(self._target, range(len(ids))))
        self._rows[self.n_slots :] = UNTOUCHED
        return store.read(np.array(ids, np.int32), addresses, after)

    def _check(self, ids: Sequence[int], tags: Tags) -> None:
        """Compare what was read with what the slots should hold, and the memory around it."""
        for place, slot in enumerate(ids):
            assert self._holds(self._target(place), tags[slot]), (
                f"slot {slot}, place {place} of {list(ids)}: not the bytes that were written last"
            )
        targets = {self._target(place) for place in range(len(ids))}
        around = [row for row in range(self.n_slots, len(self._rows)) if row not in targets]
        assert (self._rows[around] == UNTOUCHED).all(), "memory that nobody named was written"

    def _verify(self, store: SlotStore, tags: Tags, ids: Sequence[int] | None = None) -> None:
        ids = list(tags) if ids is None else ids
        self._read(store, ids).synchronize(self.patience)
        self._check(ids, tags)

    def _gate(self) -> HostEvent:
        """Make an event that finishes when the test says so, or in the end by itself.

        A store that waits for it in the wrong place would otherwise keep the test for ever.
        """
        gate = HostEvent()
        guard = threading.Timer(self.patience, gate.set)
        guard.daemon = True
        guard.start()
        self._gates.append(gate)
        self._guards.append(guard)
        return gate

    def _goes_on(self, event: Event) -> None:
        """Verify that work has not finished, nor does in the next moment."""
        assert not event.query(), "the work did not wait"
        try:
            event.synchronize(self.moment)
        except TimeoutError:
            return
        raise AssertionError("the work did not wait")

    def _start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="conformance", daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def _failed_at(self, *places: int) -> PageEvents:
        event = BatchEvent(1)
        event.part_done({place: OSError(f"no data for place {place}") for place in places})
        return event

    def _finish(self, event: PageEvents) -> None:
        """Wait for work that may fail."""
        try:
            event.synchronize(self.patience)
        except TimeoutError:
            raise AssertionError("the work never finished") from None
        except Exception:
            pass

    def _fails_at(self, event: PageEvents, pages: int, *places: int) -> None:
        """Verify that some pages of an event fail, and that it says so in every way."""
        self._finish(event)
        failures = {place: str(error) for place, error in event.failures.items()}
        assert sorted(failures) == list(places), f"failed are the places {sorted(failures)}"
        assert event.query()
        assert str(event.error) in failures.values(), "the event's error is none of its pages'"
        for place in range(pages):
            for error in (event.failure(place), event.page(place).error):
                assert (str(error) if error else None) == failures.get(place)

    def _old_or_nothing(self, store: SlotStore, old: Tags, ids: Sequence[int]) -> None:
        """Verify that a slot whose write failed holds what it held, or cannot be read."""
        for slot in ids:
            event = self._read(store, [slot])
            self._finish(event)
            if event.error is None:
                self._check([slot], old)
