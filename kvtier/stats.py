"""What a storage can say about itself: levels, what moved, what was found, and who waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hostmem.describing import Table, html_of, notebook, one_line
from hostmem.units import format_size
from kvtier.transfer.slot_io import SlotIOStats

__all__ = [
    "Activity",
    "LevelStats",
    "Meter",
    "RemoteStats",
    "Scope",
    "StorageStats",
    "Traffic",
    "Usage",
    "Waits",
]


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
        return "\n\n".join(map(str, self._parts()))

    def _parts(self) -> list[Table | str]:
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
            Table([tuple(head.split()), *rows])
            for head, rows in (
                ("level pages peak came bytes peak came hits", held),
                ("copies pages peak all bytes peak all failed", moved),
                ("wait times seconds longest", waited),
            )
            if rows
        ]
        rate = self.hit_rate
        share = "" if rate is None else f", hit rate {rate:.1%}"
        return [*tables, f"misses {self.misses:,}{share}"]

    def _summary(self) -> str:
        moved = sum(traffic.total_bytes for traffic in self.pairs.values())
        hits = sum(self.hits.values())
        return f"{hits:,} hits, {self.misses:,} misses, {format_size(moved)} moved"

    @one_line
    def __repr__(self) -> str:
        return f"<Activity: {self._summary()}>"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), self._parts())


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
class RemoteStats:
    """What went to and came from a remote store so far."""

    state: str
    """``"connecting"``, ``"up"``, ``"degraded"`` or ``"closed"``."""
    sent_pages: int
    """Pages that the store has taken, or had already."""
    sent_bytes: int
    """Bytes of these."""
    fetched_pages: int
    """Pages that came from the store and were what had been stored."""
    fetched_bytes: int
    """Bytes of these."""
    unsent: dict[str, int]
    """Pages that did not get there, by reason."""
    misses: dict[str, int]
    """Blocks that were looked for in the store and did not come, or not whole, by reason."""
    degradations: int
    """Times that the store did not answer, or too late, and was left alone for a while."""

    def _table(self) -> Table:
        head = "remote pages bytes other"
        rows = [
            ("sent", f"{self.sent_pages:,}", format_size(self.sent_bytes), _listed(self.unsent)),
            (
                "fetched",
                f"{self.fetched_pages:,}",
                format_size(self.fetched_bytes),
                _listed(self.misses),
            ),
            (self.state, "", "", f"degraded {self.degradations:,} times"),
        ]
        return Table([tuple(head.split()), *rows])


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
    remote: RemoteStats | None = None
    """What a remote store did; None without one."""

    def describe(self) -> str:
        """Show it as tables, for a person."""
        return "\n\n".join(map(str, self._parts()))

    def _parts(self) -> list[Table | str]:
        levels = [
            (name, f"{level.slots:,}", f"{level.used:,}", format_size(level.quota))
            for name, level in self.levels.items()
        ]
        shown = Table([("level", "slots", "used", "quota"), *levels])
        parts: list[Table | str] = [shown, *self.activity._parts()]
        if self.files:
            parts.append(_files_table(self.files))
        if self.remote is not None:
            parts.append(self.remote._table())
        return parts

    @one_line
    def __repr__(self) -> str:
        levels = ", ".join(
            f"{name} {at.used:,} of {at.slots:,}" for name, at in self.levels.items()
        )
        dropped = f"{self.pages_dropped:,} pages dropped"
        return f"<StorageStats: {levels}; {self.activity._summary()}, {dropped}>"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), self._parts())


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

    @one_line
    def __repr__(self) -> str:
        # Without the lock, which may be held for long: the figures may be of two moments.
        state = "open" if any(b is self._book for b in self._meter._books) else "not open"
        return f"<Scope, {state}: {self._book._summary()}>"

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


def _files_table(files: Sequence[SlotIOStats]) -> Table:
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
    return Table([tuple(head.split()), *rows])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "-"


def _usage_row(use: Usage) -> Iterator[str]:
    for pages in (use.pages, use.peak_pages, use.total_pages):
        yield f"{pages:,}"
    for nbytes in (use.nbytes, use.peak_bytes, use.total_bytes):
        yield format_size(nbytes)
