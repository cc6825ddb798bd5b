"""Keys in slots of a file: found when they are there, and gone only when nobody uses them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.eviction import POLICIES
from kvtier.integrations.slot_directory import Entry, SlotDirectory


def filled(slots: int, *keys: str, policy: str = "lru") -> SlotDirectory[str]:
    directory = SlotDirectory[str](slots, policy)
    directory.release(directory.take(keys).entries)
    return directory


def test_a_key_can_be_read_when_it_was_written_and_not_before() -> None:
    directory = SlotDirectory[str](4, "lru")
    taken = directory.take(["a", "b"])
    assert [entry.key for entry in taken.entries] == ["a", "b"]
    assert taken.complete
    assert directory.ready("a") is False
    assert directory.hold(["a", "b"]) == []
    directory.release(taken.entries)
    assert directory.ready("a") is True
    assert directory.ready("c") is None
    assert [entry.key for entry in directory.hold(["b", "c", "a"])] == ["b", "a"]


def test_keys_that_are_there_or_under_way_take_no_slot_again() -> None:
    directory = filled(4, "a")
    first = directory.take(["a", "b"])
    again = directory.take(["a", "b", "c"])
    assert [entry.key for entry in first.entries] == ["b"]
    assert [entry.key for entry in again.entries] == ["c"]
    assert first.complete
    assert again.complete


def test_the_least_recently_used_gives_way() -> None:
    directory = filled(3, "a", "b", "c")
    directory.touch(["a", "nowhere"])
    taken = directory.take(["d"])
    assert taken.evicted == ["b"]
    assert directory.ready("b") is None


def test_reading_and_storing_again_are_uses() -> None:
    directory = filled(3, "a", "b", "c")
    directory.release(directory.hold(["a"]))
    directory.take(["b"])
    assert directory.take(["d"]).evicted == ["c"]
    assert directory.take(["e"]).evicted == ["a"]


def test_what_is_asked_for_does_not_give_way_to_the_rest() -> None:
    directory = filled(3, "a", "b", "c")
    taken = directory.take(["a", "d", "e"])
    assert sorted(taken.evicted) == ["b", "c"]
    assert directory.ready("a") is True


def test_what_is_read_or_written_does_not_give_way() -> None:
    directory = filled(3, "a", "b")
    held = directory.hold(["a"])
    writing = directory.take(["c"])
    taken = directory.take(["d", "e"])  # only b can go
    assert taken.evicted == ["b"]
    assert [entry.key for entry in taken.entries] == ["d"]
    assert not taken.complete
    directory.release([*held, *writing.entries, *taken.entries])
    assert directory.take(["e"]).complete


def test_a_lost_key_is_not_found_and_its_slot_waits_for_the_last_reader() -> None:
    directory = filled(1, "a")
    (first,), (second,) = directory.hold(["a"]), directory.hold(["a"])
    assert directory.lose([first]) == [first]
    assert directory.ready("a") is None
    assert directory.take(["b"]).entries == []  # the second still reads there
    assert directory.lose([second]) == []  # it is known already
    assert [entry.slot for entry in directory.take(["b"]).entries] == [0]


def test_a_key_that_was_lost_can_be_written_elsewhere_while_somebody_reads_the_old_slot() -> None:
    directory = filled(2, "a")
    (one,), (other,) = directory.hold(["a"]), directory.hold(["a"])
    directory.lose([one])
    (fresh,) = directory.take(["a"]).entries
    assert fresh.slot != one.slot
    directory.release([other])
    assert directory.ready("a") is False
    directory.release([fresh])
    assert directory.ready("a") is True
    assert directory.take(["b"]).complete  # in the old slot


def test_what_could_not_be_written_was_never_there() -> None:
    directory = SlotDirectory[str](1, "lru")
    (entry,) = directory.take(["a"]).entries
    assert directory.lose([entry]) == [entry]
    assert directory.ready("a") is None
    assert directory.take(["b"]).complete


def test_restored_keys_are_there_the_younger_of_two() -> None:
    directory = SlotDirectory[str](4, "lru", [(3, "a"), (1, "b"), (0, "a")])
    assert len(directory) == 2
    assert [entry.slot for entry in directory.hold(["a", "b"])] == [0, 1]
    assert sorted(entry.slot for entry in directory.take(["c", "d"]).entries) == [2, 3]


class Directory(RuleBasedStateMachine):
    """Any order of calls, compared with sets."""

    SLOTS = 5

    def __init__(self) -> None:
        super().__init__()
        self.directory: SlotDirectory[int] | None = None
        self.ready: set[int] = set()
        self.writing: list[Entry[int]] = []
        self.reading: list[Entry[int]] = []

    @precondition(lambda self: self.directory is None)
    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.directory = SlotDirectory(self.SLOTS, policy)

    @precondition(lambda self: self.directory is not None)
    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def take(self, keys: list[int]) -> None:
        assert self.directory is not None
        before = {key for key in range(10) if self.directory.ready(key) is not None}
        used = {entry.key for entry in (*self.writing, *self.reading) if not entry.gone}
        idle = {key for key in self.ready - used if key not in keys}
        taken = self.directory.take(keys)
        new = [key for key in dict.fromkeys(keys) if key not in before]
        assert [entry.key for entry in taken.entries] == new[: len(taken.entries)]
        assert taken.complete == (len(taken.entries) == len(new))
        assert set(taken.evicted) <= idle
        if not taken.complete:
            assert set(taken.evicted) == idle, "more could have given way"
        self.ready -= set(taken.evicted)
        self.writing += taken.entries

    @precondition(lambda self: self.directory is not None)
    @rule(keys=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def hold(self, keys: list[int]) -> None:
        assert self.directory is not None
        held = self.directory.hold(keys)
        assert [entry.key for entry in held] == [key for key in keys if key in self.ready]
        self.reading += held

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), well=st.booleans())
    def written(self, data: st.DataObject, well: bool) -> None:
        entry = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self._end(entry, well)
        if well:
            self.ready.add(entry.key)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), well=st.booleans())
    def read(self, data: st.DataObject, well: bool) -> None:
        entry = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        known = not entry.gone
        self._end(entry, well)
        if not well and known:
            self.ready.discard(entry.key)

    def _end(self, entry: Entry[int], well: bool) -> None:
        assert self.directory is not None
        if well:
            self.directory.release([entry])
        else:
            self.directory.lose([entry])

    @invariant()
    def every_slot_is_somewhere_once(self) -> None:
        if self.directory is None:
            return
        found = {key for key in range(10) if self.directory.ready(key)}
        assert found == self.ready
        entries = [*self.directory._entries.values()]
        gone = {id(e): e for e in (*self.writing, *self.reading) if e.gone}
        slots = [e.slot for e in (*entries, *gone.values())] + self.directory._free
        assert sorted(slots) == list(range(self.SLOTS))
        assert set(self.directory._policy.victims()) == self.ready


TestDirectory = Directory.TestCase
TestDirectory.settings = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_all_policies_serve(policy: str) -> None:
    directory = filled(2, "a", "b", policy=policy)
    assert len(directory.take(["c"]).evicted) == 1
