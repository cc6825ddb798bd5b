"""The table of disjoint ranges, against a plain dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hostmem.ranges import RangeTable

_SPACE = 40


def table_of(*ranges: tuple[int, int]) -> RangeTable:
    table = RangeTable()
    for start, nbytes in ranges:
        table.add(start, nbytes)
    return table


class RangesMachine(RuleBasedStateMachine):
    """Adds, removes and asks, while the model owns each integer of a small space by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RangeTable()
        self.owner: dict[int, tuple[int, int]] = {}

    @rule(start=st.integers(0, _SPACE - 1), nbytes=st.integers(1, 8))
    def add(self, start: int, nbytes: int) -> None:
        members = range(start, start + nbytes)
        if any(value in self.owner for value in members):
            with pytest.raises(ValueError, match="overlaps"):
                self.table.add(start, nbytes)
        else:
            self.table.add(start, nbytes)
            self.owner.update(dict.fromkeys(members, (start, nbytes)))

    @rule(start=st.integers(0, _SPACE - 1))
    def remove(self, start: int) -> None:
        found = self.owner.get(start)
        if found is None or found[0] != start:
            with pytest.raises(KeyError):
                self.table.remove(start)
        else:
            assert self.table.remove(start) == found[1]
            self.owner = {value: r for value, r in self.owner.items() if r != found}

    @rule(start=st.integers(0, _SPACE - 1), nbytes=st.integers(1, 12))
    def overlapping(self, start: int, nbytes: int) -> None:
        met = {self.owner[v] for v in range(start, start + nbytes) if v in self.owner}
        assert self.table.overlapping(start, start + nbytes) == sorted(met)

    @rule(starts=st.lists(st.integers(0, _SPACE - 1), max_size=6), data=st.data())
    def first_leaving(self, starts: list[int], data: st.DataObject) -> None:
        sizes = [data.draw(st.integers(1, 6)) for _ in starts]
        crosses = [
            start in self.owner and self.owner[start] != self.owner.get(start + size - 1)
            for start, size in zip(starts, sizes, strict=True)
        ]
        expected = crosses.index(True) if True in crosses else None
        found = self.table.first_leaving(np.array(starts, np.uint64), np.array(sizes, np.uint64))
        assert found == expected

    @invariant()
    def agrees_with_the_model(self) -> None:
        ranges = sorted(set(self.owner.values()))
        assert list(self.table) == ranges
        assert len(self.table) == len(ranges)
        everywhere = range(_SPACE + 10)
        assert [self.table.at(value) for value in everywhere] == [
            self.owner.get(value) for value in everywhere
        ]
        index = {found: at for at, found in enumerate(ranges)}
        numbers = self.table.index_of(np.arange(_SPACE + 10, dtype=np.uint64))
        assert numbers.tolist() == [
            index[self.owner[value]] if value in self.owner else -1 for value in everywhere
        ]


TestRanges = RangesMachine.TestCase
TestRanges.settings = settings(max_examples=40, stateful_step_count=30)


def test_an_overlap_is_refused_and_the_message_names_the_owner() -> None:
    table = table_of((0x1000, 0x1000))
    with pytest.raises(ValueError, match=r"overlaps \[0x1000, 0x2000\)"):
        table.add(0x1800, 0x1000)
    assert list(table) == [(0x1000, 0x1000)]


def test_neighbours_may_touch() -> None:
    assert list(table_of((8, 8), (0, 8), (16, 8))) == [(0, 8), (8, 8), (16, 8)]


def test_iterating_shows_the_table_as_it_was() -> None:
    table = table_of((0, 4), (4, 4))
    ranges = iter(table)
    table.remove(0)
    assert list(ranges) == [(0, 4), (4, 4)]


@given(st.integers(1 << 47, (1 << 63) - 1))
def test_addresses_of_the_whole_space_are_exact(address: int) -> None:
    # As floating point, neighbours up here would be the same number.
    table = table_of((address, 1))
    values = np.array([address - 1, address, address + 1], np.uint64)
    assert table.index_of(values).tolist() == [-1, 0, -1]


_RANGES = st.lists(st.tuples(st.integers(0, _SPACE), st.integers(1, 8)), min_size=1, max_size=20)


@given(added=_RANGES, asked=_RANGES)
def test_ranges_that_touch_cover_together(
    added: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    table, held = RangeTable(), set[int]()
    for start, nbytes in added:
        wanted = set(range(start, start + nbytes))
        if not wanted & held:
            table.add(start, nbytes)
            held |= wanted
    starts, sizes = np.array(asked, np.uint64).T
    assert table.covers(starts, sizes).tolist() == [
        set(range(start, start + nbytes)) <= held for start, nbytes in asked
    ]
    assert [table.encloses(start, start + nbytes) for start, nbytes in asked] == [
        set(range(start, start + nbytes)) <= held for start, nbytes in asked
    ]


def test_an_empty_table_covers_nothing() -> None:
    assert not RangeTable().covers(np.array([1], np.uint64), np.array([1], np.uint64)).any()
    assert not RangeTable().encloses(1, 2)


def test_what_is_not_there_can_be_discarded() -> None:
    table = table_of((0, 4))
    table.discard(1)
    assert list(table) == [(0, 4)]
    table.discard(0)
    assert list(table) == []
