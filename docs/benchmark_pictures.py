"""Pictures of the tables of bench/results that are easier seen than read, as files of SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.replay.axes import Axis, count_axis, log_axis, percent_axis, show_seconds
from kvtier.replay.charts import Bar, Series, bars, chart, standalone

__all__ = ["Picture", "pictures"]

Table = Mapping[str, Any]
"""As `bench.measure.Table` has it, read from JSON."""

WIDTH = 520
OURS, PEERS, UNBOUND, NOTHING = 1, 2, 5, 0


@dataclass(frozen=True, slots=True)
class Picture:
    """A file of SVG and what it shows."""

    name: str
    """Of the file."""
    title: str
    svg: str


def pictures(result: str, table: Table, tables: Sequence[Table]) -> Iterator[Picture]:
    """Yield the pictures that belong to a table, which may be none.

    Parameters
    ----------
    result : str
        Name of the result's file, without its ending; the names of pictures begin with it.
    table : mapping
        The table.
    tables : sequence of mapping
        All those of the result.
    """
    for beginning, draw in _DRAWN.items():
        if table["title"].startswith(beginning):
            for word, title, svg in draw(table, tables):
                yield Picture(f"{result}-{word}.svg", title, standalone(svg))


Drawn = Iterator[tuple[str, str, str]]
"""A word that tells pictures of one result apart, the title, and the chart."""


def _pages(table: Table, _: Sequence[Table]) -> Drawn:
    """Show how close copies of pages come to contiguous memory, by the size of the page."""
    columns = {"hostmem": (3, OURS), "the driver's batch call": (6, PEERS)}
    for way, words in (("up", "to the GPU"), ("down", "from the GPU")):
        rows = [row for row in table["rows"] if row[0].endswith(f" {way}")]
        sizes = [row[0].removesuffix(f" {way}") for row in rows]
        ticks = [(float(n), size) for n, size in enumerate(sizes)]
        lines = [
            Series(name, [(n, _first(row[at])) for n, row in enumerate(rows)], colour, dots=True)
            for name, (at, colour) in columns.items()
        ]
        text = "; ".join(
            f"{line.name}: " + ", ".join(f"{y:.0%} at {sizes[round(x)]}" for x, y in line.points)
            for line in lines
        )
        title = f"Random pages {words}, as a share of contiguous memory, by the size of a page"
        x = Axis(-0.4, len(rows) - 0.6, ticks)
        svg = chart(f"pages-{way}", title, text, x, percent_axis(), lines, width=WIDTH, height=240)
        yield way, title, svg


def _rates(table: Table, tables: Sequence[Table]) -> Drawn:
    """Show how fast host memory is made ready, and how long other calls waited meanwhile."""
    rows = [(row[0], _first(row[1]), row[1]) for row in table["rows"] if row[1] != "-"]
    title = "Rate at which host memory is made ready, GiB/s"
    axis = count_axis(max(rate for _, rate, _ in rows))
    yield "rates", title, _bars("rates", title, axis, [(a, b, f"{b:.1f}") for a, b, _ in rows])

    waits = [(row[0], max(map(_first, row[2:])) / 1e3) for row in table["rows"]]
    title = "Longest CUDA call of another thread meanwhile"
    yield "waits", title, _dots("waits", title, waits)


def _blocked(table: Table, _: Sequence[Table]) -> Drawn:
    """Show which share of the time other threads could not call the driver."""
    shares = [(row[0], max(map(_first, row[1:])) / 100) for row in table["rows"]]
    title = "Share of the time in which another thread's CUDA call was blocked"
    rows = [(name, share, f"{share:.1%}") for name, share in shares]
    yield "blocked", title, _bars("blocked", title, percent_axis(), rows)


def _first_slot(table: Table, tables: Sequence[Table]) -> Drawn:
    """Show when the first slot can be used, by capacity, beside all of a peer's 4 GiB."""
    (ours,) = (each for each in tables if "first usable MiB" in each["title"])
    at = ours["columns"].index("small pages, warm")
    rows = [(f"default, {row[0]}", _first(row[at]) / 1e3) for row in ours["rows"]]
    rows += [(f"{row[0]}, 4 GiB", _first(row[1]) / 1e3) for row in table["rows"]]
    title = "Time until the first bytes can be used"
    yield "first", title, _dots("first", title, rows)


def _bars(name: str, title: str, axis: Axis, rows: Sequence[tuple[str, float, str]]) -> str:
    shown = [Bar(_name(row), value, text, _colour(row)) for row, value, text in rows]
    return bars(name, title, _said(shown), axis, shown, width=WIDTH)


def _dots(name: str, title: str, rows: Sequence[tuple[str, float]]) -> str:
    """Draw times over powers of ten, where a bar would have no beginning."""
    shown = [Bar(_name(row), value, show_seconds(value), _colour(row)) for row, value in rows]
    values = [max(value, 1e-5) for _, value in rows]
    axis = log_axis(min(values), max(values))
    return bars(name, title, _said(shown), axis, shown, shape="dot", width=WIDTH)


def _said(rows: Sequence[Bar]) -> str:
    return "; ".join(f"{row.name}: {row.text}" for row in rows)


def _name(row: str) -> str:
    return row.replace("default", "hostmem").replace("unbound", "hostmem unbound")


def _colour(row: str) -> int:
    known = {"default": OURS, "unbound": UNBOUND, "nothing": NOTHING}
    return known.get(row.partition(",")[0], PEERS)


def _first(cell: str) -> float:
    """Read the figure of a cell such as ``"27.77 (27.37-27.85)"``."""
    return float(cell.split()[0])


_DRAWN: Mapping[str, Callable[[Table, Sequence[Table]], Drawn]] = {
    "Random pages": _pages,
    "Longest call while filling": _rates,
    "Blocked while filling": _blocked,
    "ms until 4 GiB can be used": _first_slot,
}
"""Who draws a table, by how its title begins."""
