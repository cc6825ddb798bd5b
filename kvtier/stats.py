"""What a storage can say about itself: levels, what moved, what was found, and who waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hostmem.units import format_size
from kvtier.transfer.slot_io import SlotIOStats

__all__ = ["Activity", "LevelStats", "Meter", "Scope", "StorageStats", "Traffic", "Usage", "Waits"]


@dataclass(slots=True)
class Usage:
    """Pages and their bytes: now, at most at one time, and altogether."""

    pages: int = 0
    """Pages now."""
    nbytes: int = 0
    """Bytes now."""
    peak_pages: int = 0
    """Most pages at one time."""
    peak_bytes: int = 0
    """Most bytes at one time."""
    total_pages: int = 0
    """Pages that ever came."""
    total_bytes: int = 0
    """Bytes that ever came."""

    def change(self, pages: int, nbytes: int) -> None:
        """Note that pages came or, where the numbers are negative, went."""
        self.pages += pages
        self.nbytes += nbytes
        if nbytes > 0:
            self.total_pages += pages
            self.total_bytes += nbytes
            if self.pages > self.peak_pages:
                self.peak_pages = self.pages
            if self.nbytes > self.peak_bytes:
                self.peak_bytes = self.nbytes


@dataclass(slots=True)
class Traffic(Usage):
    """The same of copies from one level to another, which come when submitted and go when done."""

    failed_pages: int = 0
    """Pages whose copy failed."""


@dataclass(slots=True)
class Waits:
    """How often and how long one thing was waited for."""

    count: int = 0
    """Times."""
    seconds: float = 0.0
    """Seconds, all together."""
    longest: float = 0.0
    """Seconds of the longest."""


@dataclass(slots=True)
class Activity:
    """What happened in a storage since it was built, or in the time of one `Scope`."""

    levels: dict[str, Usage] = field(default_factory=dict)
    """What each level held, by its name."""
    pairs: dict[str, Traffic] = field(default_factory=dict)
    """What moved, by pair of levels such as ``gpu->host``."""
    hits: dict[str, int] = field(default_factory=dict)
    """Blocks that were asked for and found, by the level they were in."""
    misses: int = 0
    """Blocks that were asked for and not found."""
    waits: dict[str, Waits] = field(default_factory=dict)
    """Waiting, by what was waited for."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the blocks asked for that were found, 0 to 1; None where none was."""
        found = sum(self.hits.values())
        return found / (found + self.misses) if found + self.misses else None

    def describe(self) -> str:
        """Show it as tables, for a person."""
        held = [
            (name, *_usage_row(use), f"{self.hits.get(name, 0):,}")
            for name, use in self.levels.items()
        ]
        moved = [
            (name, *_usage_row(use), f"{use.failed_pages:,}") for name, use in self.pairs.items()
        ]
        waited = [
            (name, f"{wait.count:,}", f"{wait.seconds:.3f}", f"{wait.longest:.3f}")
            for name, wait in self.waits.items()
        ]
        tables = [
            _table([tuple(head.split()), *rows])
            for head, rows in (
                ("level pages peak came bytes peak came hits", held),
                ("copies pages peak all bytes peak all failed", moved),
                ("wait times seconds longest", waited),
            )
            if rows
        ]
        rate = self.hit_rate
        share = "" if rate is None else f", hit rate {rate:.1%}"
        return "\n\n".join([*tables, f"misses {self.misses:,}{share}"])


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level at one moment."""

    slots: int
    """Pages it can hold, over all pool groups."""
    used: int
    """Pages it holds."""
    quota: int
    """Bytes it may use."""


@dataclass(frozen=True, slots=True)
class StorageStats:
    """A storage at one moment."""

    levels: dict[str, LevelStats]
    """By name of the level, the warmest first."""
    bytes_moved: dict[str, int]
    """Bytes submitted to be moved so far, by pair of levels such as ``gpu->host``."""
    pages_dropped: int
    """Pages evicted from the last level so far."""
    activity: Activity = field(default_factory=Activity)
    """The same and more over time: peaks, totals, hits, waits."""
    files: tuple[SlotIOStats, ...] = ()
    """What the files of a disk level did, by pool group; empty without one."""

    def describe(self) -> str:
        """Show it as tables, for a person."""
        levels = [
            (name, f"{level.slots:,}", f"{level.used:,}", format_size(level.quota))
            for name, level in self.levels.items()
        ]
        tables = [_table([("level", "slots", "used", "quota"), *levels]), self.activity.describe()]
        if self.files:
            tables.append(_files_table(self.files))
        return "\n\n".join(tables)


class Meter:
    """Counts what a storage does. A call costs less than a microsecond.

    Parameters
    ----------
    lock : context manager, optional
        Held while a scope begins or ends. For every other call the caller holds it.
    """

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext() if lock is None else lock
        """Orders everything."""
        self._book = _book()
        self._books = [self._book]  # of those who count: always, and in each open scope

    def occupied(self, level: str, pages: int, nbytes: int) -> None:
        """Note that a level holds so many pages more, or fewer where the numbers are negative."""
        for book in self._books:
            book.levels[level].change(pages, nbytes)

    def moved(self, pair: str, pages: int, nbytes: int) -> None:
        """Note that copies of pages were submitted."""
        for book in self._books:
            book.pairs[pair].change(pages, nbytes)

    def arrived(self, pair: str, pages: int, nbytes: int, failed: int = 0) -> None:
        """Note that copies have finished, of which ``failed`` pages did not get there."""
        for book in self._books:
            traffic = book.pairs[pair]
            traffic.change(-pages, -nbytes)
            traffic.failed_pages += failed

    def found(self, level: str, blocks: int) -> None:
        """Note that blocks were asked for and are in a level."""
        for book in self._books:
            book.hits[level] += blocks

    def missed(self, blocks: int) -> None:
        """Note that blocks were asked for and are nowhere."""
        for book in self._books:
            book.misses += blocks

    def waited(self, what: str, seconds: float) -> None:
        """Note that somebody waited for something."""
        for book in self._books:
            waits = book.waits[what]
            waits.count += 1
            waits.seconds += seconds
            waits.longest = max(waits.longest, seconds)

    def activity(self) -> Activity:
        """Give all that was counted; what is given does not change any more."""
        return _copy(self._book)

    def scope(self) -> Scope:
        """Make a context manager that counts for the time of its block alone.

        Its totals, hits, misses and waits begin at 0; what a level holds and what is under way are
        the storage's own, and peaks begin there. Scopes of several threads may overlap: each counts
        what everybody does.
        """
        return Scope(self)

    def _begin(self) -> Activity:
        """Open another book, which begins with what is now."""
        book = _book()
        for now, then in ((self._book.levels, book.levels), (self._book.pairs, book.pairs)):
            for name, use in now.items():
                then[name].change(use.pages, use.nbytes)
                then[name].total_pages = then[name].total_bytes = 0
        self._books.append(book)
        return book

    def _end(self, book: Activity) -> None:
        self._books = [other for other in self._books if other is not book]


class Scope:
    """Counts during one ``with`` block, which may be entered again and then begins anew.

    Parameters
    ----------
    meter : Meter
        Who counts.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._book = _book()

    @property
    def activity(self) -> Activity:
        """What was counted so far or, after the block, during it."""
        with self._meter.lock:
            return _copy(self._book)

    def __enter__(self) -> Self:
        with self._meter.lock:
            self._meter._end(self._book)  # where the scope is open already
            self._book = self._meter._begin()
        return self

    def __exit__(self, *_: object) -> None:
        with self._meter.lock:
            self._meter._end(self._book)


def _book() -> Activity:
    """Make an empty book, in which every name is there when it is first counted."""
    return Activity(
        levels=defaultdict(Usage),
        pairs=defaultdict(Traffic),
        hits=defaultdict(int),
        waits=defaultdict(Waits),
    )


def _copy(book: Activity) -> Activity:
    return Activity(
        levels={name: replace(use) for name, use in book.levels.items()},
        pairs={name: replace(use) for name, use in book.pairs.items()},
        hits=dict(book.hits),
        misses=book.misses,
        waits={name: replace(waits) for name, waits in book.waits.items()},
    )


def _files_table(files: Sequence[SlotIOStats]) -> str:
    head = "file writes bytes failed reads bytes failed corrupt restored packed"
    rows = [
        (
            f"group {group}",
            f"{found.writes:,}",
            format_size(found.bytes_written),
            f"{found.write_failures:,}",
            f"{found.reads:,}",
            format_size(found.bytes_read),
            f"{found.read_failures:,}",
            f"{found.corrupt:,}",
            f"{found.restored:,}",
            "-" if found.compression is None else f"{found.compression.ratio:.2f}x",
        )
        for group, found in enumerate(files)
    ]
    return _table([tuple(head.split()), *rows])


def _usage_row(use: Usage) -> Iterator[str]:
    for pages in (use.pages, use.peak_pages, use.total_pages):
        yield f"{pages:,}"
    for nbytes in (use.nbytes, use.peak_bytes, use.total_bytes):
        yield format_size(nbytes)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Set columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{name:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        for name, *cells in rows
    )
