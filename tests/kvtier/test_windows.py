"""What windows show of a sequence's blocks, beside counting token by token."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.layout import GroupLayout
from kvtier.windows import Windows

Window = tuple[int | None, int | None]


def build(tokens_per_block: int, *windows: Window) -> Windows:
    return Windows([GroupLayout((), (), *window) for window in windows], tokens_per_block)


def seen(window: Window, tokens_per_block: int, block: int, blocks: int) -> bool:
    """Tell whether the token behind so many blocks, or a later one, sees a token of a block.

    Later tokens look back no further, and sinks are seen by all.
    """
    size, sinks = window
    tokens = range(block * tokens_per_block, (block + 1) * tokens_per_block)
    asking = blocks * tokens_per_block
    return any(
        size is None or token < (sinks or 0) or asking - size < token <= asking for token in tokens
    )


WINDOW = st.one_of(
    st.just((None, None)),
    st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 12))),
)
WINDOWS = st.lists(WINDOW, min_size=1, max_size=4)
TOKENS = st.integers(1, 8)


@given(WINDOW, TOKENS, st.integers(0, 30))
def test_stale_are_the_blocks_of_which_no_token_is_seen(
    window: Window, tokens: int, blocks: int
) -> None:
    first, end = build(tokens, window).stale(0, blocks)
    assert 0 <= first <= end <= blocks
    unseen = [n for n in range(blocks) if not seen(window, tokens, n, blocks)]
    assert list(range(first, end)) == unseen


@given(WINDOW, TOKENS, st.integers(0, 30))
def test_what_is_stale_stays_stale(window: Window, tokens: int, blocks: int) -> None:
    windows = build(tokens, window)
    stale, later = (range(*windows.stale(0, n)) for n in (blocks, blocks + 1))
    assert set(stale) <= set(later)


@given(WINDOW, TOKENS)
def test_sinks_are_the_blocks_that_are_seen_for_ever(window: Window, tokens: int) -> None:
    windows = build(tokens, window)
    if window[0] is None:
        with pytest.raises(ValueError, match="group: 0 is not one of those with a window"):
            windows.sinks(0)
    else:
        for_ever = [n for n in range(20) if seen(window, tokens, n, 1000)]
        assert for_ever == list(range(windows.sinks(0)))


@given(WINDOWS, TOKENS, st.data())
@example([(1, None), (1, None)], 1, None)
def test_usable_are_the_most_blocks_of_which_none_is_seen_and_missing(
    shown: list[Window], tokens: int, data: st.DataObject | None
) -> None:
    whole = [window[0] is None for window in shown]
    rows = []
    if data is not None:
        row = st.tuples(*(st.just(True) if w else st.booleans() for w in whole))
        rows = data.draw(st.lists(row, max_size=24))
    counts = [
        count
        for count in range(len(rows) + 1)
        if all(
            rows[n][group] or not seen(window, tokens, n, count)
            for group, window in enumerate(shown)
            for n in range(count)
        )
    ]
    assert build(tokens, *shown).usable(rows, bool) == max(counts)


def test_a_later_block_may_make_a_gap_harmless() -> None:
    windows = build(1, (None, None), (2, None))  # the token itself and the one before it
    there, gone = (True, True), (True, False)
    assert windows.usable([there, gone, there], bool) == 3
    assert windows.usable([there, gone], bool) == 1
    assert windows.usable([gone, there], bool) == 2
    assert windows.usable([gone], bool) == 0
    assert windows.usable([], bool) == 0


def test_a_gap_among_the_sinks_is_seen_for_ever() -> None:
    windows = build(1, (None, None), (2, 2))
    rows = [(True, True)] * 10
    rows[1] = (True, False)
    assert windows.usable(rows, bool) == 1


def test_windows_that_end_at_other_blocks_each_shorten_what_the_others_use() -> None:
    """Each of two windows can use only every other count, so in the end there is none."""
    windows = build(1, (2, None), (2, None))
    rows = [(n % 2 == 0, n % 2 == 1) for n in range(4 * sys.getrecursionlimit())]
    assert windows.usable(rows, bool) == 0
    rows = [(n % 2 == 0, n % 2 == 1 or n == 6) for n in range(50)]
    assert windows.usable(rows, bool) == 7


def test_groups_are_whole_or_sliding() -> None:
    windows = build(16, (None, None), (64, 16), (None, None), (32, None))
    assert (windows.whole, windows.sliding) == ([0, 2], [1, 3])
    with pytest.raises(ValueError, match=r"group: 7 is not one of those with a window, \[1, 3\]"):
        windows.sinks(7)


def test_what_a_window_does_not_show_is_hidden_in_its_column_alone() -> None:
    windows = build(16, (None, None), (32, 16))
    columns: list[list[int | None]] = [list(range(6)), list(range(6))]
    windows.hide(columns)
    assert columns == [list(range(6)), [0, None, None, None, 4, 5]]
    few: list[list[int | None]] = [[0], [0]]
    windows.hide(few)
    assert few == [[0], [0]]
    nothing: list[list[int | None]] = [[], []]
    windows.hide(nothing)
    assert nothing == [[], []]
