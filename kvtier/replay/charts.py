"""Charts as SVG text: small, without scripts, legible on white and on black.

A chart is drawn for the size it is shown at, so that its text keeps the size of the text around it.
It takes its colours from `style`, which a page holds once; `standalone` puts it into a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Literal

from kvtier.replay.axes import Axis

__all__ = ["Bar", "Mark", "Series", "bars", "chart", "columns", "stack", "standalone", "style"]

_WIDE, _NARROW = frozenset("%mwMW@→"), frozenset(" .,:;ijl|!'()")
_LINE = 18
"""Height of a line of text."""


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of points, in order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 1
    """One of the style's colours, 1 to 6; 0 is grey."""
    dashed: bool = False
    dots: bool = False
    """Whether each point is marked: for few points that were measured one by one."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the x axis that has a name."""

    at: float
    name: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A named figure in a chart of `bars`."""

    name: str
    value: float
    text: str
    """The figure as it is shown."""
    colour: int = 1


@cache
def style() -> str:
    """Give the style sheet of the charts: colours for light and dark, lines and type."""
    return files("kvtier.replay").joinpath("charts.css").read_text()


def standalone(svg: str) -> str:
    """Turn a chart into a file of its own, which brings its style."""
    head, _, rest = svg.partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{head}><style>\n{style()}</style>{rest}\n"


def chart(
    name: str,
    title: str,
    text: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    *,
    wash: bool = False,
    marks: Sequence[Mark] = (),
    margin: float = 0.0,
    width: int = 328,
    height: int = 190,
) -> str:
    """Draw lines.

    Parameters
    ----------
    name : str
        A word that no other chart of the page has.
    title, text : str
        What it shows, in few words and in a sentence, for those who do not see it.
    x, y : Axis
        The scales.
    series : sequence of Series
        The lines; a legend names them where there are several.
    wash : bool
        Whether the area below each is tinted.
    marks : sequence of Mark
        Places on the x axis to point out.
    margin : float
        Pixels left of the y axis, at least: for charts that are one above the other.
    width, height : int
        Pixels.
    """
    legend = [(s.name, s.colour) for s in series] if len(series) > 1 else []
    frame = _Frame(x, y, width, height, legend, marks, margin)
    body: list[str] = []
    for line in series:
        path = frame.path(line.points)
        if wash and line.points:
            first, last = (_n(frame.x(line.points[n][0])) for n in (0, -1))
            floor = _n(frame.bottom)
            body.append(
                f'<path class="wash c{line.colour}" d="{path}L{last} {floor}L{first} {floor}Z"/>'
            )
        dashed = " dashed" if line.dashed else ""
        body.append(f'<path class="curve c{line.colour}{dashed}" d="{path}"/>')
        if line.dots:
            body += [_dot(frame.x(a), frame.y(b), 3.5, line.colour) for a, b in line.points]
    return frame.svg(name, title, text, body)


def stack(
    name: str,
    title: str,
    text: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    *,
    width: int = 328,
    height: int = 190,
) -> str:
    """Draw areas on top of each other; all have points at the same places of x, the lowest first.

    Parameters
    ----------
    name, title, text, x, y, width, height
        As `chart`.
    series : sequence of Series
        The areas.
    """
    frame = _Frame(x, y, width, height, [(s.name, s.colour) for s in series])
    body = []
    floor = [(at, 0.0) for at, _ in series[0].points] if series else []
    for area in series:
        top = [(at, low + value) for (at, low), (_, value) in zip(floor, area.points, strict=True)]
        back = frame.path(list(reversed(floor))).replace("M", "L", 1)
        body.append(f'<path class="area c{area.colour}" d="{frame.path(top)}{back}Z"/>')
        floor = top
    return frame.svg(name, title, text, body)


def columns(
    name: str,
    title: str,
    text: str,
    x: Axis,
    y: Axis,
    parts: Sequence[tuple[float, float, float, str]],
    *,
    marks: Sequence[Mark] = (),
    colour: int = 1,
    width: int = 328,
    height: int = 190,
) -> str:
    """Draw a histogram.

    Parameters
    ----------
    name, title, text, x, y, marks, width, height
        As `chart`.
    parts : sequence of (low, high, value, text)
        Where each column begins and ends, how high it is, and what it says when pointed at.
    colour : int
        One of the style's colours.
    """
    frame = _Frame(x, y, width, height, [], marks)
    body = []
    for low, high, value, said in parts:
        left, right, top = frame.x(low), frame.x(high), frame.y(value)
        body.append(
            f'<rect class="area c{colour}" x="{_n(left + 0.5)}" y="{_n(top)}" '
            f'width="{_n(max(right - left - 1, 0.5))}" height="{_n(frame.bottom - top)}">'
            f"<title>{escape(said)}</title></rect>"
        )
    return frame.svg(name, title, text, body)


def bars(
    name: str,
    title: str,
    text: str,
    axis: Axis,
    rows: Sequence[Bar],
    *,
    shape: Literal["bar", "dot"] = "bar",
    width: int = 480,
) -> str:
    """Draw a figure a row: as a bar from 0, or as a dot where the axis is of ratios.

    Parameters
    ----------
    name, title, text
        As `chart`.
    axis : Axis
        The scale of the figures.
    rows : sequence of Bar
        From top to bottom.
    shape : str
        ``"bar"`` or ``"dot"``.
    width : int
        Pixels; the height follows from the rows.
    """
    pitch = 24
    left = 10 + max((_width(row.name) for row in rows), default=0)
    beside = 10 + max((_width(row.text) for row in rows), default=0)
    span = max(width - left - beside - 8, 40)
    height = pitch * len(rows) + _LINE + 8
    bottom = height - _LINE
    body = []
    for at, label in axis.ticks:
        x = left + span * axis.place(at)
        body.append(f'<path class="grid" d="M{_n(x)} 4V{bottom}"/>')
        body.append(_text(x, height - 4, label, "middle"))
    for n, row in enumerate(rows):
        y = 4 + pitch * n
        end = left + span * axis.place(row.value)
        body.append(_text(left - 8, y + 16, row.name, "end", ink=True))
        if shape == "bar":
            body.append(
                f'<rect class="area c{row.colour}" x="{_n(left)}" y="{y + 4}" '
                f'width="{_n(max(end - left, 1))}" height="16" rx="2"/>'
            )
        else:
            body.append(f'<path class="grid" d="M{_n(left)} {y + 12}H{_n(end)}"/>')
            body.append(_dot(end, y + 12, 5.5, row.colour))
        body.append(_text(end + (6 if shape == "bar" else 10), y + 16, row.text))
    return _svg(name, title, text, width, height, body)


class _Frame:
    """The axes and the legend around what is drawn."""

    def __init__(
        self,
        x: Axis,
        y: Axis,
        width: int,
        height: int,
        legend: Sequence[tuple[str, int]],
        marks: Sequence[Mark] = (),
        margin: float = 0.0,
    ) -> None:
        self._x, self._y = x, y
        self._width, self._height = width, height
        self._marks = marks
        self._legend, self._top = _legend(legend, width)
        self._top += _LINE * len(marks)
        self._left = 8 + max([margin - 8, *(_width(label) for _, label in y.ticks)])
        self._right = width - 10.0
        self.bottom = height - _LINE - 4.0

    def x(self, value: float) -> float:
        return self._left + (self._right - self._left) * self._x.place(value)

    def y(self, value: float) -> float:
        return self.bottom + (self._top - self.bottom) * self._y.place(value)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        places = "L".join(f"{_n(self.x(a))} {_n(self.y(b))}" for a, b in points)
        return places and f"M{places}"

    def svg(self, name: str, title: str, text: str, body: Iterable[str]) -> str:
        parts = [*self._legend, *self._grid(), *body, *self._names()]
        return _svg(name, title, text, self._width, self._height, parts)

    def _grid(self) -> Iterator[str]:
        for at, label in self._y.ticks:
            y = self.y(at)
            yield f'<path class="grid" d="M{_n(self._left)} {_n(y)}H{_n(self._right)}"/>'
            yield _text(self._left - 6, y + 4, label, "end")
        for at, label in self._x.ticks:
            x = min(self.x(at), self._width - _width(label) / 2)  # none is cut off
            yield _text(x, self._height - 4, label, "middle")

    def _names(self) -> Iterator[str]:
        """Draw the marks, each named in a line of its own above what is drawn.

        The leftmost is the lowest and its name to the left of it: no line goes through a name.
        """
        for n, mark in enumerate(sorted(self._marks, key=lambda mark: mark.at), 1):
            x, y = self.x(mark.at), self._top - _LINE * n + 10
            yield f'<path class="mark" d="M{_n(x)} {_n(y - 9)}V{_n(self.bottom)}"/>'
            room = 5 + _width(mark.name)
            left = x > room and (n < len(self._marks) or x + room > self._width)
            yield _text(
                x - 5 if left else x + 5, y, mark.name, "end" if left else "start", ink=True
            )


def _legend(entries: Sequence[tuple[str, int]], width: int) -> tuple[list[str], float]:
    """Set the names in lines above the chart; return them and where the chart may begin."""
    parts, x, y = [], 2.0, 4.0
    for name, colour in entries:
        room = 15 + _width(name)
        if x > 2 and x + room > width:
            x, y = 2.0, y + _LINE
        parts.append(
            f'<rect class="area c{colour}" x="{_n(x)}" y="{_n(y)}" width="10" height="10" rx="2"/>'
        )
        parts.append(_text(x + 15, y + 9, name, ink=True))
        x += room + 12
    return parts, y + _LINE + 4 if entries else 8.0


def _text(x: float, y: float, text: str, anchor: str = "start", *, ink: bool = False) -> str:
    shown = ' class="ink"' if ink else ""
    aligned = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{shown} x="{_n(x)}" y="{_n(y)}"{aligned}>{escape(text)}</text>'


def _dot(x: float, y: float, radius: float, colour: int) -> str:
    return f'<circle class="area c{colour}" cx="{_n(x)}" cy="{_n(y)}" r="{radius}"/>'


def _svg(name: str, title: str, text: str, width: int, height: int, body: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="{name}-title {name}-text">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-text">{escape(text)}</desc>',
            *body,
            "</svg>",
        ]
    )


def _width(text: str) -> float:
    """Estimate the width of a text in the charts' type, on the safe side."""
    return sum(11.4 if c in _WIDE else 4.4 if c in _NARROW else 7.6 for c in text)


def _n(value: float) -> str:
    """Write a coordinate: a tenth of a pixel is fine enough."""
    return f"{value:.1f}".removesuffix(".0")
