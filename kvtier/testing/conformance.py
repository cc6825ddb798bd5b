"""What every store of slots has to do, as tests for pytest: subclass, and say how to make one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hostmem import ClosedError, Event
from kvtier.testing.slot_bench import NOTHING, UNTOUCHED, SlotBench, Tags
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import PageEvents, gathered

__all__ = ["LevelConformance"]


class LevelConformance(SlotBench):
    """Tests of a store of slots: what `kvtier.TierStorage` relies on.

    Subclass it in a module of tests and define `make`. A test that does not apply is switched off
    by ``test_... = None`` in the subclass. Nothing here needs pytest but its way to find tests.

    Every test is deterministic for a store that is right. One that is wrong about the order of
    things is given a `moment` to show it.

    Examples
    --------
    >>> from kvtier.transfer.disk import SlotFile
    >>> class TestSlotFile(LevelConformance):
    ...     def make(self, slot_size, slots):
    ...         return SlotFile("/var/tmp", slot_size, slots)
    """

    # -------------------------------------------------------------------------------------- bytes

    def test_slots_come_back_in_any_order_and_batch(self) -> None:
        """What was written is read again, whatever the order and the number of slots."""
        store, chance = self._store(), np.random.default_rng(1)
        for size in (1, 2, 3, 7, self.n_slots // 2, self.n_slots):
            ids = chance.permutation(self.n_slots)[:size].tolist()
            tags = self._written(store, ids)
            self._verify(store, tags, chance.permutation(ids).tolist())
            for row, slot in enumerate(ids):
                assert self._holds(row, tags[slot]), "the memory that was written from changed"

    def test_neighbours_and_strides_come_back(self) -> None:
        """Runs of slots, upwards and downwards, and every second and third one."""
        store, last = self._store(), self.n_slots - 1
        for ids in (range(self.n_slots), range(last, -1, -1), range(0, last, 2), range(1, last, 3)):
            self._verify(store, self._written(store, ids))

    def test_other_slots_stay_as_they_are(self) -> None:
        """A write changes the slots that it names, and no other."""
        store = self._store()
        tags = self._written(store, range(self.n_slots))
        for ids in ([5], [0, self.n_slots - 1], [7, 8, 9], [11, 3]):
            tags |= self._written(store, ids)
            self._verify(store, tags)

    def test_a_slot_can_be_read_into_several_places_at_once(self) -> None:
        """Reads do not disturb each other, nor what they read."""
        store = self._store()
        tags = self._written(store, [4, 5])
        addresses = self._addresses(map(self._target, range(4)))
        events = [
            store.read(np.array([4, 5], np.int32), addresses[n : n + 2], NOTHING) for n in (0, 2)
        ]
        for event in events:
            event.synchronize(self.patience)
        self._check([4, 5, 4, 5], tags)

    def test_no_slots_are_no_work(self) -> None:
        """An empty batch finishes, and does not fail."""
        store = self._store()
        for submit in (store.write, store.read):
            event = submit(np.empty(0, np.int32), np.empty(0, np.uint64), NOTHING)
            event.synchronize(self.patience)
            assert event.query()
            assert not event.failures

    # --------------------------------------------------------------------------------------- order

    def test_a_slot_that_is_written_again_holds_what_came_last(self) -> None:
        """Writes of a slot that are fenced by each other happen in this order."""
        store = self._store()
        rows = range(8)
        tags, addresses = self._fill(rows), self._addresses(rows)
        event: Event | None = None
        for row in rows:
            after = Dependencies(fences=(event,) if event else ())
            event = store.write(np.array([6], np.int32), addresses[row : row + 1], after)
        assert event is not None
        self._read(store, [6], Dependencies((event,))).synchronize(self.patience)
        self._check([6], {6: tags[-1]})

    def test_a_read_waits_for_the_write_before_it(self) -> None:
        """What is read is what an earlier write brings, however late that begins."""
        store, gate = self._store(), self._gate()
        ids = [3, 4, 9]
        self._written(store, ids)
        written, tags = self._write(store, ids, Dependencies(fences=(gate,)))
        event = self._read(store, ids, Dependencies((written,)))
        self._goes_on(written)
        self._goes_on(event)
        gate.set()
        event.synchronize(self.patience)
        self._check(ids, tags)

    def test_a_write_waits_for_its_data(self) -> None:
        """The memory is not read before the events of its bytes have finished."""
        store, gate = self._store(), self._gate()
        event, _ = self._write(store, [2, 8], Dependencies((gate,)))
        self._goes_on(event)
        tags = self._fill([0, 1])  # only now is there what shall be written
        gate.set()
        event.synchronize(self.patience)
        self._verify(store, dict(zip([2, 8], tags, strict=True)))

    def test_a_read_touches_no_memory_before_its_fences(self) -> None:
        """The memory belongs to others until the fences have finished."""
        store, gate = self._store(), self._gate()
        tags = self._written(store, [2, 8])
        event = self._read(store, [2, 8], Dependencies(fences=(gate,)))
        self._goes_on(event)
        assert (self._rows[self.n_slots :] == UNTOUCHED).all(), "the read did not wait"
        gate.set()
        event.synchronize(self.patience)
        self._check([2, 8], tags)

    def test_a_write_touches_no_slot_before_its_fences(self) -> None:
        """A slot is written only when those that read it have finished."""
        store, gate = self._store(), self._gate()
        tags = self._written(store, [2, 8])
        reading = self._read(store, [2, 8], Dependencies(fences=(gate,)))
        writing, newer = self._write(store, [2, 8], Dependencies(fences=(reading,)))
        self._goes_on(writing)
        gate.set()
        writing.synchronize(self.patience)
        self._check([2, 8], tags)
        self._verify(store, newer)

    def test_nobody_who_submits_waits(self) -> None:
        """Work that cannot begin yet keeps no caller."""
        store, gate = self._store(), self._gate()
        after = Dependencies(fences=(gate,))
        submitted = [self._start(self._write, store, [n], after) for n in range(12)]
        events = [future.result(self.patience)[0] for future in submitted]
        assert not any(event.query() for event in events), "the work did not wait"
        gate.set()
        for event in events:
            event.synchronize(self.patience)

    # ---------------------------------------------------------------------------------- failures

    def test_fences_that_failed_do_not_matter(self) -> None:
        """Whether others succeeded is their business."""
        store, gate = self._store(), self._gate()
        gate.set(OSError("of somebody else"))
        event, tags = self._write(store, [1, 2], Dependencies(fences=(gate, self._failed_at(0))))
        event.synchronize(self.patience)
        reading = self._read(store, [1, 2], Dependencies(fences=(gate, self._failed_at(1))))
        reading.synchronize(self.patience)
        self._check([1, 2], tags)

    def test_a_page_whose_data_failed_is_not_written_and_the_others_are(self) -> None:
        """A write of many pages fails for those alone whose bytes never came."""
        store, ids = self._store(), [10, 3, 4, 5, 14]
        old = self._written(store, ids)
        event, new = self._write(store, ids, Dependencies((self._failed_at(1, 3),)))
        self._fails_at(event, 5, 1, 3)
        lost = [ids[1], ids[3]]
        self._verify(store, new, [slot for slot in ids if slot not in lost])
        self._old_or_nothing(store, old, lost)

    def test_a_page_whose_data_failed_is_not_read_and_the_others_are(self) -> None:
        """A read of many pages fails for those alone that an earlier write did not bring."""
        store, ids = self._store(), [10, 3, 4, 5, 14]
        tags = self._written(store, ids)
        event = self._read(store, ids, Dependencies((self._failed_at(2),)))
        self._fails_at(event, 5, 2)
        for place in (0, 1, 3, 4):
            assert self._holds(self._target(place), tags[ids[place]]), "a page beside it is wrong"

    def test_data_that_failed_altogether_fails_every_page(self) -> None:
        """An event that knows of no pages stands for all of them."""
        store, gate = self._store(), self._gate()
        gate.set(OSError("no data"))
        old = self._written(store, [1, 2])
        event, _ = self._write(store, [1, 2], Dependencies((gate,)))
        self._fails_at(event, 2, 0, 1)
        self._old_or_nothing(store, old, [1, 2])

    def test_memory_that_will_never_be_usable_fails_the_transfer(self) -> None:
        """What ``usable`` raises is in the event."""
        store = self._store()
        tags = self._written(store, [1, 2])

        def never() -> None:
            raise OSError("this memory will not come")

        for submit in (store.read, store.write):
            addresses = self._addresses(map(self._target, range(2)))
            event = submit(np.array([1, 2], np.int32), addresses, Dependencies(usable=never))
            self._fails_at(event, 2, 0, 1)
        self._old_or_nothing(store, tags, [1, 2])

    def test_work_that_fails_finishes_no_sooner_than_its_dependencies(self) -> None:
        """When an event has finished, nobody uses its slots and memory, failed or not."""
        store, gate = self._store(), self._gate()
        after = Dependencies((self._failed_at(0),), (gate,))
        event, _ = self._write(store, [1], after)
        self._goes_on(event)
        gate.set()
        self._fails_at(event, 1, 0)

    def test_every_waiter_gets_an_error_of_its_own(self) -> None:
        """An error that is raised collects frames, which must not meet those of another waiter."""
        store = self._store()
        event, _ = self._write(store, [1], Dependencies((self._failed_at(0),)))
        raised = []
        for _ in range(2):
            try:
                event.synchronize(self.patience)
            except OSError as error:
                raised.append(error)
        assert len(raised) == 2, "a failed event raises each time that it is waited for"
        assert raised[0] is not raised[1], "two waiters were given one error"

    def test_a_slot_that_cannot_be_read_fails_alone(self) -> None:
        """Needs `damage`. The pages beside it are read, and it is itself again when written."""
        store, ids = self._store(), [4, 5, 6, 12]
        tags = self._written(store, ids)
        self.damage(store, 5)
        event = self._read(store, ids)
        self._fails_at(event, 4, 1)
        for place in (0, 2, 3):
            assert self._holds(self._target(place), tags[ids[place]]), "a page beside it is wrong"
        tags |= self._written(store, [5])
        self._verify(store, tags)

    # -------------------------------------------------------------------------------------- sizes

    def test_growing_keeps_the_slots_and_brings_new_ones(self) -> None:
        """Old slots hold what they held; new ones can be used."""
        few = self.n_slots // 2
        store = self.make(self.slot_size, few)
        self._undo.callback(store.close)
        tags = self._written(store, range(few))
        store.resize(self.n_slots)
        assert store.slots == self.n_slots
        self._verify(store, tags)
        tags |= self._written(store, range(few, self.n_slots))
        self._verify(store, tags)

    def test_shrinking_keeps_the_slots_below(self) -> None:
        """Also after growing again."""
        store, few = self._store(), self.n_slots // 3
        tags = self._written(store, range(self.n_slots))
        kept = {slot: tag for slot, tag in tags.items() if slot < few}
        store.resize(few)
        assert store.slots == few
        self._verify(store, kept)
        store.resize(self.n_slots)
        self._verify(store, kept)
        self._verify(store, self._written(store, range(self.n_slots)))

    def test_the_same_size_is_no_change(self) -> None:
        """A resize to what there is keeps everything."""
        store = self._store()
        tags = self._written(store, range(self.n_slots))
        store.resize(self.n_slots)
        self._verify(store, tags)

    def test_slots_that_stay_are_transferred_while_others_come_and_go(self) -> None:
        """A resize does not disturb work on the slots that it keeps."""
        store, gate = self._store(), self._gate()
        event, tags = self._write(store, [0, 1, 2], Dependencies(fences=(gate,)))

        def resize() -> None:
            for slots in (8, self.n_slots, 8):
                store.resize(slots)

        resized = self._start(resize)
        gate.set()
        resized.result(self.patience)
        event.synchronize(self.patience)
        assert store.slots == 8
        self._verify(store, tags)

    # -------------------------------------------------------------------------------------- threads

    def test_several_threads_do_not_disturb_each_other(self) -> None:
        """Each has slots and memory of its own, beside those of the others."""
        store, threads, rounds = self._store(), 4, 12
        share = self.n_slots // threads

        def serve(me: int) -> None:
            chance = np.random.default_rng(me)
            rows = [n * threads + me for n in range(share)]
            held: Tags = {}
            for turn in range(rounds):
                ids = chance.permutation(rows)[: int(chance.integers(1, share + 1))].tolist()
                for n, slot in enumerate(ids):
                    held[slot] = (me * rounds + turn) * self.n_slots + n
                    self._rows[slot] = self._content(held[slot])
                after = store.write(np.array(ids, np.int32), self._addresses(ids), NOTHING)
                back = chance.permutation(list(held)).tolist()
                into = [self.n_slots + slot for slot in back]
                reading = store.read(
                    np.array(back, np.int32), self._addresses(into), Dependencies(fences=(after,))
                )
                after.synchronize(self.patience)
                reading.synchronize(self.patience)
                for slot, row in zip(back, into, strict=True):
                    assert self._holds(row, held[slot]), f"thread {me}: slot {slot} is wrong"

        for future in [self._start(serve, me) for me in range(threads)]:
            future.result(self.patience)

    def test_work_under_way_is_ordered_by_its_dependencies_alone(self) -> None:
        """Many reads and writes of few slots are submitted before any is waited for."""
        store, chance = self._store(), np.random.default_rng(7)
        ids = list(range(8))
        tags = self._written(store, ids)
        brought: dict[int, Event] = {}
        event: PageEvents
        used: dict[int, list[Event]] = defaultdict(list)
        expected: dict[int, int] = {}
        row = 8
        while row + 4 <= len(self._rows):
            some = chance.permutation(ids)[: int(chance.integers(1, 5))].tolist()
            rows = list(range(row, row + len(some)))
            row += len(some)
            addresses = self._addresses(rows)
            slots = np.array(some, np.int32)
            if chance.integers(2):
                for slot, tag in zip(some, self._fill(rows), strict=True):
                    tags[slot] = tag
                fences = tuple(event for slot in some for event in used.pop(slot, []))
                event = store.write(slots, addresses, Dependencies(fences=fences))
                brought |= {slot: event.page(n) for n, slot in enumerate(some)}
            else:
                expected |= {at: tags[slot] for at, slot in zip(rows, some, strict=True)}
                bringing = [brought[slot] for slot in some if slot in brought]
                data = gathered(bringing) if len(bringing) == len(some) else ()
                fences = () if data else tuple(bringing)
                event = store.read(slots, addresses, Dependencies(data, fences))
            for slot in some:
                used[slot].append(event)
        for last in (event for events in used.values() for event in events):
            last.synchronize(self.patience)
        for at, tag in expected.items():
            assert self._holds(at, tag), f"row {at}: a read did not see the write before it"
        self._verify(store, tags)

    # ---------------------------------------------------------------------------------------- close

    def test_closing_finishes_what_was_submitted(self) -> None:
        """When close returns, nothing goes on, and everything has succeeded."""
        store, gate = self._store(), self._gate()
        tags = self._written(store, range(8))
        events = [self._read(store, range(8))]
        events.append(self._write(store, range(8, 16), Dependencies(fences=(gate,)))[0])
        closing = self._start(store.close)
        gate.set()
        closing.result(self.patience)
        for event in events:
            assert event.query(), "close returned while work went on"
            assert event.error is None, f"work that was submitted failed: {event.error}"
        self._check(range(8), tags)

    def test_closing_waits_for_what_cannot_begin_yet(self) -> None:
        """No work is given up, or done too early, because somebody closes."""
        store, gate = self._store(), self._gate()
        event, _ = self._write(store, [1], Dependencies(fences=(gate,)))
        closing = self._start(store.close)
        self._goes_on(event)
        assert not closing.done(), "close returned while work was to be done"
        gate.set()
        closing.result(self.patience)
        assert event.query()
        assert event.error is None

    def test_closing_again_does_nothing(self) -> None:
        """From any thread, and from several at once."""
        store = self._store()
        self._written(store, [1])
        for closing in [self._start(store.close) for _ in range(3)]:
            closing.result(self.patience)
        store.close()

    def test_a_closed_store_refuses_work(self) -> None:
        """Nobody would ever do it; an event that never finishes would be worse."""
        store = self._store()
        store.close()
        addresses = self._addresses([0])
        for submit in (store.write, store.read):
            try:
                submit(np.array([0], np.int32), addresses, NOTHING)
            except ClosedError:
                continue
            raise AssertionError("a closed store took work")
