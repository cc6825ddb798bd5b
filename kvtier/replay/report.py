"""A replay as one page of HTML: figures, pictures and tables, without scripts and without network.

The page holds the figures as ``--json`` writes them (``script#summary``), and the course of the
replay (``script#course``), for programs that are given nothing but the page.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from hostmem import __version__, machine
from hostmem.placement_map import draw_html
from hostmem.units import format_size
from kvtier.replay.axes import show_seconds
from kvtier.replay.charts import style
from kvtier.replay.destination import write_whole
from kvtier.replay.figures import Figure, figures
from kvtier.replay.options import ReplayOptions
from kvtier.replay.recording import Recording
from kvtier.replay.summary import ReplayResult

__all__ = ["render_report", "write_report"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the browser may do for the page: nothing is fetched and nothing is run."""


def write_report(
    result: ReplayResult,
    recording: Recording,
    path: str | PathLike[str],
    *,
    options: ReplayOptions | None = None,
    command: str = "",
) -> None:
    """Write the page, all or nothing, as `kvtier.replay.destination.write_whole` does it.

    Parameters
    ----------
    result : ReplayResult
        The figures.
    recording : Recording
        Their course.
    path : path
        A file to create or replace.
    options : ReplayOptions, optional
        What was asked for; None in a replay of metadata.
    command : str
        The command line that the figures are from.

    Raises
    ------
    OSError
        If it cannot be written; a file that was there is then unchanged.
    """
    write_whole(render_report(result, recording, options=options, command=command), path)


def render_report(
    result: ReplayResult,
    recording: Recording,
    *,
    options: ReplayOptions | None = None,
    command: str = "",
) -> str:
    """Return the page as text; the arguments are those of `write_report`."""
    name = escape(Path(result.trace).name)
    place = "metadata only" if result.device is None else f"device {escape(result.device)}"
    cards = [*map(_figure, figures(result, recording)), _levels(result)]
    cards += [_placement(level, recording) for level in recording.placements]
    if options is not None:
        cards.append(_section("Configuration", _configuration(options)))
    cards.append(_section("Machine", _machine(result)))
    if command:
        words = " ".join(f"<span>{escape(word)}</span>" for word in command.split(" "))
        cards.append(f'<section class="card"><h2>Command</h2>\n<code>{words}</code></section>')
    cards.append(_every(result))
    refs = f"{result.requests:,} requests, {result.block_refs:,} block references"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>Replay of {name}</title>
<style>
{style()}{_page_style()}</style>
</head>
<body>
<main>
<header>
<h1>Replay of {name}</h1>
<p class="soft">{refs}, policy {escape(result.policy)}, {place}</p>
{_alarm(result)}</header>
<dl class="tiles">
{"".join(_tile(*tile) for tile in _tiles(result))}</dl>
<div class="cards">
{"".join(f"{card}{chr(10)}" for card in cards)}</div>
</main>
{_data("summary", result.to_json())}
{_data("course", recording.to_json())}
</body>
</html>
"""


@cache
def _page_style() -> str:
    return files("kvtier.replay").joinpath("report.css").read_text()


def _alarm(result: ReplayResult) -> str:
    """Say at the head of the page what must not be overlooked."""
    found = []
    if result.corrupt_blocks:
        found.append(f"Blocks that came back with wrong bytes: {result.corrupt_blocks:,}.")
    if result.lost_blocks:
        found.append(f"Blocks lost to copies that failed: {result.lost_blocks:,}.")
    return f'<p class="alarm">{" ".join(found)}</p>\n' if found else ""


def _tiles(result: ReplayResult) -> Iterator[tuple[str, str, str]]:
    """Yield name, figure and remark of what is looked at first."""
    yield "Hit rate", f"{result.hit_rate:.1%}", f"{result.hits:,} hits"
    rate = result.requests / result.seconds if result.seconds else 0.0
    yield "Served in", show_seconds(result.seconds), f"{rate:,.0f} requests a second"
    if result.latency_us is not None:
        p50, p99 = (show_seconds(us / 1e6) for us in (result.latency_us.p50, result.latency_us.p99))
        yield "Median request", p50, f"99 in 100 within {p99}"
    if result.first_request_done_seconds is not None:
        yield "First request", show_seconds(result.first_request_done_seconds), "after the start"
    if "host" in result.levels and result.mode == "bytes":
        filled = result.host_tier_filled_seconds
        shown = "never" if filled is None else show_seconds(filled)
        yield "Host tier filled", shown, "in the background"
    if result.verified_blocks is not None:
        corrupt = f"{result.corrupt_blocks:,} corrupt" if result.corrupt_blocks else "none corrupt"
        yield "Blocks compared", f"{result.verified_blocks:,}", corrupt


def _tile(name: str, figure: str, note: str) -> str:
    return (
        f'<div><dt>{escape(name)}</dt><dd class="figure">{escape(figure)}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>\n'
    )


def _figure(figure: Figure) -> str:
    """Set a picture: its sentence, its charts, and its table to be opened."""
    shown = []
    for n, svg in enumerate(figure.charts):
        if figure.subtitles:
            shown.append(f"<h3>{escape(figure.subtitles[n])}</h3>")
        shown.append(svg)
    drawn = "\n".join(shown)
    return f"""<figure class="card" id="{figure.name}">
<figcaption><h2>{escape(figure.title)}</h2><p>{escape(figure.caption)}</p></figcaption>
{drawn}
<details><summary>As a table</summary>{_table(figure.columns, figure.rows)}</details>
</figure>"""


def _levels(result: ReplayResult) -> str:
    rows = []
    for name, level in result.levels.items():
        hits = result.hits_by_level.get(name, 0)
        rows.append(
            [
                name,
                "unbounded" if level.slots is None else f"{level.slots:,}",
                f"{level.used:,}",
                "-" if level.quota is None else format_size(level.quota),
                f"{hits:,}",
            ]
        )
    table = _table(["level", "slots", "used", "quota", "hits"], rows)
    return f'<section class="card"><h2>Levels at the end</h2>{table}</section>'


def _placement(level: str, recording: Recording) -> str:
    """Show where the host memory of a level is, and how it got there."""
    found, fill = recording.placements[level], recording.fills[level]
    rows = [
        ("asked", found.asked),
        ("accepted", found.accepted),
        ("found", found.found),
        *((state, format_size(n)) for state, n in found.bytes_by_state.items()),
        *(
            (f"in {format_size(size)} pages", format_size(n))
            for size, n in sorted(found.bytes_by_page_size.items())
        ),
        ("filled at", f"{format_size(round(fill.rate))}/s, {fill.threads} threads"),
    ]
    if longest := fill.longest_registration_seconds:
        rows.append(("longest registration", show_seconds(longest)))
    return (
        f'<section class="card" id="placement-{escape(level)}">'
        f"<h2>Where the {escape(level)} level is</h2>\n"
        f'<div class="map">{draw_html(found.stretches)}</div>\n{_facts(rows)}'
        f'<p class="note">{escape(found.method)}</p></section>'
    )


def _every(result: ReplayResult) -> str:
    """List every figure under its name in the JSON, to six digits."""
    rows = "".join(
        f'<div><dt>{escape(name)}</dt><dd data-figure="{escape(name)}">{escape(text)}</dd></div>\n'
        for name, text in _flat(result.to_json())
    )
    return (
        '<section class="card wide"><h2>Every figure</h2>'
        f'<p class="note">As --json writes them, to six digits.</p><dl class="every">{rows}</dl>'
        "</section>"
    )


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{_facts(rows)}</section>'


def _configuration(options: ReplayOptions) -> list[tuple[str, str]]:
    shown = []
    for name, value in asdict(options).items():
        size = isinstance(value, int) and name.endswith(("_quota", "_bytes"))
        shown.append(
            (name, format_size(value) if size else "none" if value is None else str(value))
        )
    return shown


def _machine(result: ReplayResult) -> list[tuple[str, str]]:
    here = machine()
    limit = "none" if here.memory_limit is None else format_size(here.memory_limit)
    huge = "none" if here.huge_page_size is None else format_size(here.huge_page_size)
    return [
        *([("device", result.device)] if result.device else []),
        ("processor", f"{platform.machine()}, {len(here.allowed_cpus)} CPUs allowed"),
        ("memory", format_size(here.memory_total)),
        ("control group limit", limit),
        ("pages", f"{format_size(here.page_size)}, huge {huge}, enabled={here.thp_enabled or '-'}"),
        *(
            (f"node {n.number}", f"{format_size(n.memory_total)}, {len(n.cpus)} CPUs")
            for n in here.nodes
        ),
        ("kernel", here.kernel),
        ("host", os.uname().nodename),
        ("python", platform.python_version()),
        ("hostmem", __version__),
    ]


def _flat(value: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Name every figure by its path, such as ``latency_us.p50``."""
    found = []
    for name, each in value.items():
        match each:
            case Mapping():
                found += _flat(each, f"{before}{name}.")
            case float():
                found.append((before + name, f"{each:.6g}"))
            case _:
                found.append((before + name, each if isinstance(each, str) else json.dumps(each)))
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>\n"
        for name, *cells in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>\n'
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def _data(name: str, content: Any) -> str:
    """Embed data; no text in it can end the element, for ``<`` is written as an escape."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
