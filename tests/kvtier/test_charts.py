"""Charts: axes with round numbers, and SVG that says what it shows."""

from __future__ import annotations

import re
from itertools import pairwise
from math import isclose
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.replay.axes import (
    Axis,
    count_axis,
    log_axis,
    percent_axis,
    rate_axis,
    seconds_axis,
    show_seconds,
)
from kvtier.replay.charts import (
    Bar,
    Mark,
    Series,
    bars,
    chart,
    columns,
    stack,
    standalone,
    style,
)

SVG = "{http://www.w3.org/2000/svg}"
UNIT = Axis(0.0, 10.0, [(0.0, "0"), (10.0, "ten")])

# ----------------------------------------------------------------------------------- axes


def labels(axis: Axis) -> list[str]:
    return [label for _, label in axis.ticks]


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (percent_axis(), ["0%", "50%", "100%"]),
        (percent_axis(0.034), ["0%", "1%", "2%", "3%", "4%"]),
        (count_axis(0), ["0", "1"]),
        (count_axis(7), ["0", "2", "4", "6", "8"]),
        (count_axis(12_031), ["0", "5,000", "10,000", "15,000"]),
        (rate_axis(0), ["0", "0.5 B/s", "1 B/s"]),
        (rate_axis(300 << 20), ["0", "100 MiB/s", "200 MiB/s", "300 MiB/s"]),
        (rate_axis(1000 << 20), ["0", "0.5 GiB/s", "1 GiB/s"]),
        (seconds_axis(2.3), ["0", "0.5 s", "1 s", "1.5 s", "2 s"]),
        (seconds_axis(0.05), ["0", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms"]),
        (seconds_axis(0.0000031), ["0", "1 µs", "2 µs", "3 µs"]),
        (log_axis(2e-5, 0.03), ["10 µs", "100 µs", "1 ms", "10 ms", "100 ms"]),
        (log_axis(1.0, 1.0), ["1 s", "10 s"]),
    ],
)
def test_the_values_that_are_named_are_round(axis: Axis, expected: list[str]) -> None:
    assert labels(axis) == expected


@pytest.mark.parametrize("make", [percent_axis, count_axis, rate_axis, seconds_axis])
@given(most=st.floats(0, 1e15))
def test_an_axis_reaches_as_far_as_its_values(make: object, most: float) -> None:
    assert callable(make)
    axis = make(most)
    if make is percent_axis:
        most = min(most, 1.0)
    assert axis.low == 0
    assert axis.high >= most * (1 - 1e-6)
    assert all(a < b for (a, _), (b, _) in pairwise(axis.ticks))
    assert len(set(labels(axis))) == len(labels(axis)) <= 12


def test_a_course_ends_where_it_ends() -> None:
    axis = seconds_axis(2.3)
    assert axis.high == 2.3
    assert axis.place(2.3) == 1.0


def test_a_place_is_never_beyond_the_ends() -> None:
    assert [UNIT.place(value) for value in (-5, 0, 2.5, 10, 99)] == [0, 0, 0.25, 1, 1]
    ratios = log_axis(1e-3, 1.0)
    assert [round(ratios.place(value), 6) for value in (0, 1e-3, 1e-2, 1)] == [0, 0, 0.333333, 1]


def test_an_axis_of_ratios_has_no_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        log_axis(0, 1)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (4e-9, "4.00 ns"), (9.9996e-7, "1.00 µs"), (0.0125, "12.5 ms"), (1234, "1,234 s")],
)
def test_a_time_has_three_digits(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


# --------------------------------------------------------------------------------- charts


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(standalone(svg))


def shown(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(f"{SVG}text")]


def paths(svg: ElementTree.Element, kind: str) -> list[list[tuple[float, float]]]:
    """Return the points of the paths of a class."""
    found = [p for p in svg.iter(f"{SVG}path") if kind in p.get("class", "").split()]
    pairs = [re.findall(r"(-?[\d.]+) (-?[\d.]+)", p.get("d", "")) for p in found]
    return [[(float(a), float(b)) for a, b in points] for points in pairs]


LINES = [
    Series("a <b> & c", [(0, 0), (5, 10), (10, 5)]),
    Series("other", [(0, 10), (10, 10)], 2, dashed=True, dots=True),
]
CHARTS = {
    "lines": chart("n", "T & t", "What <it> shows", UNIT, UNIT, LINES, marks=[Mark(5, "<half>")]),
    "wash": chart("n", "T & t", "What <it> shows", UNIT, UNIT, LINES, wash=True),
    "nothing": chart("n", "T & t", "What <it> shows", UNIT, UNIT, [Series("a", [])], wash=True),
    "stack": stack("n", "T & t", "What <it> shows", UNIT, UNIT,
                   [Series("a", [(0, 1), (10, 2)]), Series("b", [(0, 3), (10, 4)], 2)]),
    "columns": columns("n", "T & t", "What <it> shows", UNIT, UNIT, [(0, 5, 10, "0 <= x < 5")]),
    "bars": bars("n", "T & t", "What <it> shows", UNIT, [Bar("<x>", 5, "5 & more")]),
    "dots": bars("n", "T & t", "What <it> shows", UNIT, [Bar("<x>", 5, "5")], shape="dot"),
}  # fmt: skip


@pytest.mark.parametrize("text", CHARTS.values(), ids=CHARTS)
def test_a_chart_says_what_it_shows(text: str) -> None:
    svg = parse(text)
    assert svg.get("role") == "img"
    names = (svg.get("aria-labelledby") or "").split()
    by_id = {part.get("id"): part.text for part in svg.iter() if part.get("id")}
    assert [by_id[name] for name in names] == ["T & t", "What <it> shows"]


@pytest.mark.parametrize("text", CHARTS.values(), ids=CHARTS)
def test_nothing_is_drawn_outside_of_a_chart(text: str) -> None:
    svg = parse(text)
    _, _, width, height = map(float, (svg.get("viewBox") or "").split())
    for part in svg.iter():
        for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(part.get(name, "0")) <= limit
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", part.get("d", "")):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


@pytest.mark.parametrize("text", CHARTS.values(), ids=CHARTS)
def test_a_chart_needs_nothing_from_elsewhere(text: str) -> None:
    assert not re.search(r"(href|src|url\(|@import|<script|on\w+=)", text)


def test_lines_are_where_their_values_are() -> None:
    first, second = paths(parse(CHARTS["lines"]), "curve")
    (left, bottom), (middle, top), (right, between) = first
    assert isclose(middle - left, right - middle, abs_tol=0.2)
    assert isclose(bottom - between, between - top, abs_tol=0.2)
    assert second == [(left, top), (right, top)]


def test_several_lines_are_named_and_one_is_not() -> None:
    assert {"a <b> & c", "other"} <= set(shown(parse(CHARTS["lines"])))
    alone = chart("n", "t", "d", UNIT, UNIT, LINES[:1])
    assert shown(parse(alone)) == ["0", "ten", "0", "ten"]


def test_a_mark_is_named_and_does_not_move_what_is_drawn_out_of_sight() -> None:
    svg = parse(CHARTS["lines"])
    assert "<half>" in shown(svg)
    (label,) = [text for text in svg.iter(f"{SVG}text") if text.text == "<half>"]
    assert float(label.get("y", "0")) < min(y for line in paths(svg, "curve") for _, y in line)


def test_no_line_goes_through_the_name_of_a_mark() -> None:
    marks = [Mark(4, "the one half"), Mark(6, "most of them, by far")]
    svg = parse(chart("n", "t", "d", UNIT, UNIT, LINES[:1], marks=marks))
    lines = [p.get("d", "") for p in svg.iter(f"{SVG}path") if p.get("class") == "mark"]
    tops = [re.fullmatch(r"M([\d.]+) ([\d.]+)V[\d.]+", line) for line in lines]
    names = [t for t in svg.iter(f"{SVG}text") if t.text in {mark.name for mark in marks}]
    assert len(tops) == len(names) == 2
    for text in names:
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        width = 7.6 * len(text.text or "")
        left, right = (x - width, x) if text.get("text-anchor") == "end" else (x, x + width)
        assert 0 <= left < right <= 328
        for top in tops:
            assert top is not None
            assert not (left < float(top[1]) < right and float(top[2]) < y)


def test_areas_are_on_top_of_each_other() -> None:
    lower, upper = paths(parse(CHARTS["stack"]), "area")
    assert upper[2:] == list(reversed(lower[:2]))  # the one's top is the other's floor
    floor = lower[-1][1]
    assert floor - upper[0][1] == pytest.approx(4 * (floor - lower[0][1]), abs=0.3)  # 1 + 3


def test_a_column_covers_its_class_and_says_its_count() -> None:
    svg = parse(CHARTS["columns"])
    (rect,) = svg.iter(f"{SVG}rect")
    assert [part.text for part in rect] == ["0 <= x < 5"]
    frame = [text for text in svg.iter(f"{SVG}text") if text.get("text-anchor") == "middle"]
    start, end = (float(text.get("x", "0")) for text in frame)
    assert float(rect.get("width", "0")) == pytest.approx((end - start) / 2, abs=8)


def test_a_bar_is_as_long_as_its_figure() -> None:
    rows = [Bar("all", 10, "10"), Bar("half", 5, "5"), Bar("none", 0, "0")]
    rects = list(parse(bars("n", "t", "d", UNIT, rows)).iter(f"{SVG}rect"))
    full, half, none = (float(rect.get("width", "0")) for rect in rects)
    assert half == pytest.approx(full / 2, abs=0.1)
    assert none == 1  # still to be seen


def test_the_colours_are_there_for_light_and_for_dark() -> None:
    light, _, dark = style().partition("prefers-color-scheme: dark")
    for name in ("--paper", "--ink", "--soft", "--line", *(f"--c{n}" for n in range(7))):
        assert f"{name}: #" in light
        assert f"{name}: #" in dark.partition("}")[0]
