"""The map of a range: a character for each stretch, and what it means."""

from __future__ import annotations

import pytest

from hostmem.placement_map import Stretch, draw, draw_html

MIB = 1 << 20


def stretch(nodes: dict[int, int] | None, offset: int = 0, **states: int) -> Stretch:
    return Stretch(offset, MIB, nodes, bytes_by_state=states)


@pytest.mark.parametrize(
    ("symbol", "nodes", "states"),
    [
        ("0", {0: MIB}, {}),
        ("9", {9: MIB}, {"registered": MIB}),
        ("a", {10: MIB}, {}),
        ("z", {35: MIB}, {}),
        ("+", {36: MIB}, {}),
        ("*", {0: MIB - 4096, 1: 4096}, {}),
        ("1", {1: MIB // 2}, {}),
        ("~", {1: MIB // 2 - 4096}, {}),
        ("-", {}, {}),
        ("-", {}, {"registered": MIB}),
        (".", {}, {"reserved": MIB}),
        (".", {}, {"reserved": MIB // 2 + 1, "registered": MIB // 2 - 1}),
        ("_", {}, {"released": MIB}),
        ("0", {0: MIB}, {"released": MIB}),  # said to be released, and there all the same
        ("#", {0: MIB}, {"quarantined": 4096, "registered": MIB - 4096}),
        ("?", None, {}),
        ("?", None, {"registered": MIB}),
        (".", None, {"reserved": MIB}),
        ("_", None, {"released": MIB}),
    ],
)
def test_a_stretch_has_a_symbol(
    symbol: str, nodes: dict[int, int] | None, states: dict[str, int]
) -> None:
    assert stretch(nodes, **states).symbol == symbol


def test_a_map_has_lines_offsets_and_a_legend_of_what_is_in_it() -> None:
    nodes: list[dict[int, int]] = [{0: MIB}, {0: MIB}, {1: MIB}, {}, {0: MIB // 2, 1: MIB // 2}]
    drawn = draw([stretch(found, n * MIB) for n, found in enumerate(nodes)], width=2)
    assert drawn.splitlines() == [
        "  0 B |00|",
        "2 MiB |1-|",
        "4 MiB |*|",
        "       each 1 MiB; * several nodes; - nothing resident; 0 node 0; 1 node 1",
    ]


def test_a_map_is_plain_text() -> None:
    drawn = draw([stretch({0: MIB})] * 3, 64)
    assert drawn.isascii()
    assert "\x1b" not in drawn


def test_a_map_of_nothing_says_so() -> None:
    assert draw([], 64) == "nothing to draw"


@pytest.mark.parametrize("width", [0, -1])
def test_a_map_needs_a_width(width: int) -> None:
    with pytest.raises(ValueError, match="width"):
        draw([stretch({0: MIB})], width)


def test_boxes_of_different_nodes_have_different_colours() -> None:
    page = draw_html([stretch({0: MIB}), stretch({1: MIB}), stretch({})])
    colours = [part.partition('"')[0] for part in page.split("background:")[1:]]
    assert len(set(colours)) == 3
    assert colours[2] == "transparent"
    assert " color:" not in page  # text and border are the page's: light or dark
