"""The pictures of a replay: what each shows, in a sentence, as a chart and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hostmem.units import format_size
from kvtier.replay.axes import (
    count_axis,
    log_axis,
    percent_axis,
    rate_axis,
    seconds_axis,
    show_seconds,
)
from kvtier.replay.charts import Mark, Series, chart, columns, stack
from kvtier.replay.recording import Course, Moment, Recording
from kvtier.replay.summary import Latency, ReplayResult

__all__ = ["Figure", "figures"]

_STEPS, _ROWS = 72, 12
_COLOURS = {"gpu": 1, "host": 3, "disk": 2, "slots": 0, "blocks": 5}
_LOW, _SMALL, _MARGIN = 84, 110, 48

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture with what belongs to it."""

    name: str
    """A word that is its own."""
    title: str
    caption: str
    """What there is to see, with the figures that matter; may be empty."""
    charts: Sequence[str]
    """SVG, from top to bottom."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The same as a table; the first column names the row."""
    subtitles: Sequence[str] = ()
    """A line above each chart; none where there is one chart that needs none."""


def figures(result: ReplayResult, recording: Recording) -> Iterator[Figure]:
    """Yield the pictures that there is something to show in."""
    course = recording.course.moments
    if not course:
        return
    if recording.filling.moments:
        yield _filling(result, recording.filling)
    if course[-1].block_refs:
        yield _hits(result, course)
    if result.bytes_moved:
        yield _moved(result, course)
    if recording.waits:
        yield _waits(recording, course)
    if recording.latencies.classes and result.latency_us is not None:
        yield _latency(result.latency_us, recording.latencies.classes)


def _filling(result: ReplayResult, filling: Course) -> Figure:
    """Show how the host tier was filled while requests were served."""
    moments = filling.moments
    end, filled = moments[-1].seconds, result.host_tier_filled_seconds
    usable: Points = [(0.0, 0.0), *((m.seconds, m.host_filled or 0.0) for m in moments)]
    if filled is not None:
        usable = [*(point for point in usable if point[0] < filled), (filled, 1.0), (end, 1.0)]
    served: Points = [(0.0, 0.0), *((m.seconds, float(m.requests)) for m in moments)]
    first = result.first_request_done_seconds
    then = next((m.requests for m in moments if filled is not None and m.seconds >= filled), None)
    parts = []
    if first is not None:
        parts.append(f"The first request was served after {show_seconds(first)}.")
    if filled is None:
        parts.append("The host tier was never filled.")
    else:
        parts.append(f"The host tier was filled after {show_seconds(filled)}")
        parts[-1] += f", when {then:,} requests had been served." if then is not None else "."
    x = seconds_axis(end)
    marks = [] if first is None else [Mark(first, "first request served")]
    return Figure(
        "filling",
        "Serving while filling",
        " ".join(parts),
        [
            chart(
                "filling-usable",
                "Usable share of the host tier",
                parts[-1],
                x,
                percent_axis(steps=2),
                [Series("usable", usable, 3)],
                wash=True,
                marks=marks,
                height=_SMALL,
                margin=_MARGIN,
            ),
            chart(
                "filling-served",
                "Requests served meanwhile",
                parts[0],
                x,
                count_axis(moments[-1].requests, steps=2),
                [Series("served", served, 1)],
                wash=True,
                height=_SMALL,
                margin=_MARGIN,
            ),
        ],
        ["time", "usable", "requests"],
        [
            [show_seconds(m.seconds), f"{m.host_filled or 0:.1%}", f"{m.requests:,}"]
            for m in _thin(moments)
        ],
        ["Host tier, usable", "Requests served"],
    )


def _hits(result: ReplayResult, course: Sequence[Moment]) -> Figure:
    """Show where the blocks that were asked for were found."""
    steps = [(a, b) for a, b in _steps(course) if b.block_refs > a.block_refs]

    def share(level: str) -> Callable[[Moment, Moment], float]:
        return lambda a, b: _grown(a.hits, b.hits, level) / (b.block_refs - a.block_refs)

    series = [
        Series(
            f"{name} {_percent(result.hits_by_level.get(name, 0), result.block_refs)}",
            _curve(steps, share(name)),
            _COLOURS.get(name, 4),
        )
        for name in result.levels
    ]
    caption = (
        f"{result.hit_rate:.1%} of {result.block_refs:,} block references were found,"
        " before the first absent block of their request."
    )
    rows = [
        [
            f"{show_seconds(a.seconds)} to {show_seconds(b.seconds)}",
            *(f"{share(name)(a, b):.1%}" for name in result.levels),
        ]
        for a, b in _steps(course, _ROWS)
        if b.block_refs > a.block_refs
    ]
    return Figure(
        "hits",
        "Hits by level",
        caption,
        [
            stack(
                "hits-chart",
                "Share of block references found, by level",
                caption,
                seconds_axis(course[-1].seconds),
                percent_axis(),
                series,
            )
        ],
        ["time", *result.levels],
        rows,
    )


def _moved(result: ReplayResult, course: Sequence[Moment]) -> Figure:
    """Show the rate of copies between each pair of levels, all on one scale."""
    moved = result.bytes_moved or {}
    steps = _steps(course)

    def rate(pair: str) -> Callable[[Moment, Moment], float]:
        return lambda a, b: _grown(a.moved, b.moved, pair) / (b.seconds - a.seconds)

    curves = {pair: _curve(steps, rate(pair)) for pair in moved}
    peaks = {pair: max((y for _, y in curve), default=0.0) for pair, curve in curves.items()}
    x, y = seconds_axis(course[-1].seconds), rate_axis(max(peaks.values()), steps=2)
    arrows = {pair: pair.replace("->", " → ") for pair in moved}
    return Figure(
        "moved",
        "Bytes moved between levels",
        f"{format_size(sum(moved.values()))} in all. One scale for all pairs.",
        [
            chart(
                f"moved-{n}",
                f"Rate of copies {arrows[pair]}",
                f"At most {format_size(round(peaks[pair]))}/s.",
                x,
                y,
                [Series(pair, curves[pair], _COLOURS.get(pair.rpartition("->")[2], 4))],
                wash=True,
                height=_LOW,
            )
            for n, pair in enumerate(moved)
        ],
        ["pair", "bytes", "mean rate", "peak rate"],
        [
            [
                arrows[pair],
                format_size(nbytes),
                f"{format_size(round(nbytes / result.seconds))}/s",
                f"{format_size(round(peaks[pair]))}/s",
            ]
            for pair, nbytes in moved.items()
        ],
        [f"{arrows[pair]}: {format_size(nbytes)}" for pair, nbytes in moved.items()],
    )


def _waits(recording: Recording, course: Sequence[Moment]) -> Figure:
    """Show how much of the time went into waiting."""
    steps = _steps(course)
    waits = recording.waits

    def share(what: str) -> Callable[[Moment, Moment], float]:
        return lambda a, b: _grown(a.waited, b.waited, what) / (b.seconds - a.seconds)

    curves = {what: _curve(steps, share(what)) for what in waits}
    most = max((sum(y for _, y in at) for at in zip(*curves.values(), strict=True)), default=0.0)
    seconds = sum(each.seconds for each in waits.values())
    caption = f"{show_seconds(seconds)} of {show_seconds(course[-1].seconds)} were spent waiting."
    return Figure(
        "waits",
        "Waits",
        caption,
        [
            stack(
                "waits-chart",
                "Share of the time spent waiting, by what for",
                caption,
                seconds_axis(course[-1].seconds),
                percent_axis(most),
                [Series(f"for {what}", curves[what], _COLOURS.get(what, 4)) for what in waits],
            )
        ],
        ["waited for", "times", "in all", "longest"],
        [
            [what, f"{each.count:,}", show_seconds(each.seconds), show_seconds(each.longest)]
            for what, each in waits.items()
        ],
    )


def _latency(latency: Latency, classes: Sequence[tuple[float, float, int]]) -> Figure:
    """Show how the times of requests are distributed."""
    p50, p99 = latency.p50 / 1e6, latency.p99 / 1e6
    half, most = show_seconds(p50), show_seconds(p99)
    caption = f"Half of the requests took at most {half}, 99 in 100 at most {most}."
    named = [
        (f"{show_seconds(low / 1e6)} to {show_seconds(high / 1e6)}", low / 1e6, high / 1e6, count)
        for low, high, count in classes
    ]
    return Figure(
        "latency",
        "Time per request",
        caption,
        [
            columns(
                "latency-chart",
                "Requests by how long they took",
                caption,
                log_axis(named[0][1], named[-1][2]),
                count_axis(max(count for *_, count in named)),
                [(low, high, count, f"{text}: {count:,}") for text, low, high, count in named],
                marks=[Mark(p50, f"half: {half}"), Mark(p99, f"99 in 100: {most}")],
            )
        ],
        ["took", "requests"],
        [[text, f"{count:,}"] for text, _, _, count in named if count],
    )


def _steps(course: Sequence[Moment], most: int = _STEPS) -> list[tuple[Moment, Moment]]:
    """Cut the course, from its beginning, in at most so many pieces of about equal time."""
    start = Moment(seconds=0.0, requests=0, block_refs=0, hits={})
    kept, last = [start], course[-1]
    for moment in course[:-1]:
        if moment.seconds - kept[-1].seconds >= last.seconds / most:
            kept.append(moment)
    if len(kept) > 1 and last.seconds - kept[-1].seconds < last.seconds / most / 2:
        kept.pop()  # the rate of a very short piece says nothing
    return list(pairwise([*kept, last]))


def _curve(
    steps: Sequence[tuple[Moment, Moment]], value: Callable[[Moment, Moment], float]
) -> Points:
    """Put the value of each piece at its middle, and draw it out to both ends."""
    points = [((a.seconds + b.seconds) / 2, value(a, b)) for a, b in steps]
    if not points:
        return []
    return [(steps[0][0].seconds, points[0][1]), *points, (steps[-1][1].seconds, points[-1][1])]


def _thin(moments: Sequence[Moment]) -> Sequence[Moment]:
    """Take a table's worth of moments, the last among them."""
    stride = -(-len(moments) // _ROWS)
    return list(reversed(moments[::-1][::stride]))


def _grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0) - before.get(name, 0)


def _percent(part: float, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
