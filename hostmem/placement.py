"""Where memory really is: what was asked, what was accepted, what was found."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hostmem import process_maps
from hostmem._sys import linux
from hostmem.describing import Facts, html_of, notebook, one_line
from hostmem.extent import extent
from hostmem.machine import machine
from hostmem.numa import describe_policy
from hostmem.page_survey import PageSurvey, edges_of, page_range, survey_pages
from hostmem.placement_map import Stretch, draw, draw_html
from hostmem.units import format_size

__all__ = ["Placement", "State", "Stretch", "find_placement", "placement_of"]

State = tuple[str, int, int]
"""A part of a range and the state its owner knows it in: (name, offset, nbytes)."""

_Ranges = Mapping[str, Sequence[tuple[int, int]]]
_Key = TypeVar("_Key", int, str, tuple[int, int])
_STRETCHES, _STRETCHES_IN_DETAIL = 64, 1024
_WITHOUT_NODE = {
    "ENOENT": "not resident",
    "EFAULT": "not mapped, or the zero page",
    "EBUSY": "busy",
    "EACCES": "shared with others",
}


@dataclass(frozen=True, slots=True, repr=False)
class Placement:
    """Where a range's resident pages are: what was asked, what was accepted, what was found."""

    address: int
    """Of the first byte."""
    nbytes: int
    """Bytes looked at."""
    asked: str
    """The policy that was requested; ``no policy`` for memory that is not ours."""
    accepted: str
    """The policy the kernel reports for the range, or why it cannot be read."""
    method: str
    """How it was found, how exact that is, or why it is not verifiable."""
    bytes_by_node: dict[int, int] = field(default_factory=dict)
    """Resident bytes (whole pages) by memory node."""
    bytes_by_page_size: dict[int, int] = field(default_factory=dict)
    """Resident bytes by the size of the page that maps them; empty where the kernel cannot say."""
    bytes_by_state: dict[str, int] = field(default_factory=dict)
    """Bytes by state: ``resident``, and those the owner knows, such as ``registered``,
    ``quarantined``, ``released``, ``reserved``. A byte may be in several."""
    bytes_without_node: dict[str, int] = field(default_factory=dict)
    """Bytes of pages for which the kernel names no node, by what it says instead: ``ENOENT`` where
    nothing is resident, ``EFAULT`` where nothing is mapped or the zero page is, and so on."""
    bytes_by_node_and_page_size: dict[tuple[int, int], int] = field(default_factory=dict)
    """The cross table; empty where the kernel does not say it page by page."""
    stretches: tuple[Stretch, ...] = ()
    """The range in equal parts, each with what was found there."""

    @property
    def verifiable(self) -> bool:
        """Whether the kernel said anything."""
        return not self.method.startswith("not verifiable")

    @property
    def found(self) -> str:
        """What was found, in words."""
        if not self.verifiable:
            return self.method
        parts = [f"{format_size(n)} on node {k}" for k, n in sorted(self.bytes_by_node.items())]
        return ", ".join(parts) or "nothing resident"

    @property
    def resident(self) -> int:
        """Resident bytes that were found."""
        return sum(self.bytes_by_node.values())

    def map(self, width: int = 64) -> str:
        """Draw the stretches, one character each, in lines of ``width``, with a legend."""
        return draw(self.stretches, width)

    @one_line
    def __repr__(self) -> str:
        found = self.found if self.verifiable else "not verifiable"
        size = format_size(self.nbytes)
        return f"<Placement of {size} at {self.address:#x}: {found}; asked {self.asked}>"

    def __str__(self) -> str:
        return "\n".join(f"{name:<10}{text}" for name, text in self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        sizes = sorted(self.bytes_by_page_size.items())
        pages = ", ".join(f"{format_size(n)} in {format_size(size)} pages" for size, n in sizes)
        rows = [
            ("asked", self.asked),
            ("accepted", self.accepted),
            ("found", self.found),
            ("pages", pages or "not known"),
        ]
        if len(self.bytes_by_node) > 1 and len(self.bytes_by_page_size) > 1:
            rows += [
                ("", f"{format_size(n)} on node {node} in {format_size(size)} pages")
                for (node, size), n in sorted(self.bytes_by_node_and_page_size.items())
            ]
        if self.bytes_by_state:
            states = ", ".join(f"{format_size(n)} {k}" for k, n in self.bytes_by_state.items())
            rows.append(("states", states))
        if self.bytes_without_node:
            rest = ", ".join(
                f"{format_size(n)} {_WITHOUT_NODE.get(name, 'for another reason')} ({name})"
                for name, n in self.bytes_without_node.items()
            )
            rows.append(("no node", rest))
        return [*rows, ("method", self.method)]

    @notebook
    def _repr_html_(self) -> str:
        drawn = draw_html(self.stretches) if self.stretches else ""
        return html_of(repr(self), [Facts(self._rows())], drawn)


def placement_of(
    obj: Any, nbytes: int | None = None, *, detail: bool = False, sample: int | None = None
) -> Placement:
    """Look at where a buffer's memory is.

    Parameters
    ----------
    obj : buffer, array, tensor or int
        Anything with the buffer, array or DLPack interface (numpy, memoryview, bytearray, mmap), a
        CPU tensor, or an address.
    nbytes : int, optional
        Bytes from an address; required with an address only.
    detail : bool
        1,024 stretches in place of 64.
    sample : int, optional
        Pages to ask about at most, for very large buffers; the counts are scaled, and ``method``
        says how exact they are.

    Returns
    -------
    Placement
        Of whole pages: what the buffer shares with neighbours on its first and last page counts,
        and so does what lies between the items of an array that is not contiguous.

    Raises
    ------
    TypeError
        Not a buffer, one that is not in host memory, or an address without ``nbytes``.
    ValueError
        A sample below 1.

    Notes
    -----
    Costs 80 to 300 ns a small page (move_pages). Blocks nobody.
    """
    address, size = extent(obj, nbytes)
    try:
        accepted = describe_policy(*linux.get_policy(address)) if size else "no policy"
    except OSError as error:
        accepted = f"not verifiable (get_mempolicy: {linux.meaning(error.errno)})"
    return find_placement(address, size, "no policy", accepted, detail=detail, sample=sample)


def find_placement(
    address: int,
    nbytes: int,
    asked: str,
    accepted: str,
    *,
    states: Sequence[State] = (),
    detail: bool = False,
    sample: int | None = None,
) -> Placement:
    """Ask the kernel about the pages of a range.

    Parameters
    ----------
    address, nbytes : int
        The range.
    asked, accepted : str
        What to say of the policy.
    states : sequence of (name, offset, nbytes)
        What its owner knows; ranges of one name are disjoint. The kernel is not asked about what
        is ``"reserved"``: address space that cannot hold memory.
    detail, sample
        As `placement_of`.

    Raises
    ------
    ValueError
        A sample below 1.
    """
    if sample is not None and index(sample) < 1:
        raise ValueError(f"sample: {sample!r}; give at least 1 page")
    by_name: dict[str, list[tuple[int, int]]] = {}
    for name, offset, size in sorted(states, key=lambda state: state[1]):
        by_name.setdefault(name, []).append((offset, size))
    parts = _STRETCHES_IN_DETAIL if detail else _STRETCHES
    blank = Placement(address, nbytes, asked, accepted, "")
    try:
        survey = survey_pages(address, nbytes, parts, by_name.get("reserved", ()), sample)
    except OSError as error:
        return _by_mappings(blank, by_name, parts, f"move_pages: {linux.meaning(error.errno)}")
    return _by_pages(blank, by_name, survey)


def _by_pages(blank: Placement, by_name: _Ranges, survey: PageSurvey) -> Placement:
    page = machine().page_size
    cross: Counter[tuple[int, int]] = Counter()
    for count in survey.counts:
        cross.update(count)
    placed = {key: pages * page for key, pages in cross.items() if key[0] >= 0}
    by_node = _sum((node, n) for (node, _), n in placed.items())
    by_size = _sum((size, n) for (_, size), n in placed.items())
    method = _counted(survey, bool(by_name.get("reserved")))
    if survey.why_no_sizes and placed:
        by_size, how = _sizes_by_mappings(blank.address, blank.nbytes)
        method += f"; page sizes {how or f'not verifiable ({survey.why_no_sizes})'}"
    return replace(
        blank,
        method=method,
        bytes_by_node=by_node,
        bytes_by_page_size=by_size,
        bytes_by_state={"resident": sum(by_node.values()), **_totals(by_name)},
        bytes_without_node=_sum(
            (errno.errorcode.get(-code, str(-code)), pages * page)
            for (code, _), pages in cross.items()
            if code < 0
        ),
        bytes_by_node_and_page_size={} if survey.why_no_sizes else _sum(placed.items()),
        stretches=tuple(_stretches(blank, by_name, survey.edges, survey)),
    )


def _counted(survey: PageSurvey, some_reserved: bool) -> str:
    if survey.asked == survey.total:
        return "move_pages, every page" + " that is not reserved" * some_reserved
    return (
        f"move_pages, {survey.asked:,} of {survey.total:,} pages{' not reserved' * some_reserved}: "
        f"counts are scaled, within {survey.error:.2%} of those pages 19 times in 20"
    )


def _by_mappings(blank: Placement, by_name: _Ranges, parts: int, why: str) -> Placement:
    """Look at whole mappings, where the kernel tells nothing of single pages."""
    start, end = page_range(blank.address, blank.nbytes)
    pages = (end - start) // machine().page_size
    stretches = tuple(_stretches(blank, by_name, edges_of(pages, parts), None))
    states = _totals(by_name)
    try:
        found = _mappings(start, end, nodes=True)
    except OSError as error:
        found, why = [], f"{why}; {error}"
    if not found or any(mapping.policy is None for mapping in found):
        method = f"not verifiable: {why}; numa_maps says nothing either"
        return replace(blank, method=method, bytes_by_state=states, stretches=stretches)
    by_node = _sum(pair for mapping in found for pair in mapping.bytes_by_node.items())
    return replace(
        blank,
        method=f"numa_maps{_scope(found, start, end)} ({why})",
        bytes_by_node=by_node,
        bytes_by_page_size=_sum(
            pair for mapping in found for pair in mapping.bytes_by_page_size.items()
        ),
        bytes_by_state={"resident": sum(by_node.values()), **states},
        stretches=stretches,
    )


def _sizes_by_mappings(address: int, nbytes: int) -> tuple[dict[int, int], str]:
    """Return bytes by page size, and how they were found; empty where they cannot be."""
    start, end = page_range(address, nbytes)
    try:
        found = _mappings(start, end, nodes=False)
    except OSError:
        return {}, ""
    by_size = _sum(pair for mapping in found for pair in mapping.bytes_by_page_size.items())
    return by_size, f"by smaps{_scope(found, start, end)}" if by_size else ""


def _mappings(start: int, end: int, *, nodes: bool) -> list[process_maps.Mapping]:
    mappings = process_maps.read_mappings(nodes=nodes)
    return [mapping for mapping in mappings if mapping.start < end and start < mapping.end]


def _scope(found: list[process_maps.Mapping], start: int, end: int) -> str:
    """Say so where the mappings are more than the range."""
    inside = sum(min(m.end, end) - max(m.start, start) for m in found)
    whole = sum(m.nbytes for m in found)
    if whole == inside:
        return ", totals of the range's mappings"
    return f", totals of whole mappings: {format_size(whole)}, {format_size(inside)} of it asked"


def _stretches(
    blank: Placement, by_name: _Ranges, edges: list[int], survey: PageSurvey | None
) -> Iterator[Stretch]:
    if not blank.nbytes:
        return
    page = machine().page_size
    shift = blank.address % page
    offsets = [min(max(edge * page - shift, 0), blank.nbytes) for edge in edges]
    covered = {name: np.diff(_covered(ranges, offsets)) for name, ranges in by_name.items()}
    for n, (first, last) in enumerate(pairwise(offsets)):
        counts = {} if survey is None else survey.counts[n]
        placed = {key: pages * page for key, pages in counts.items() if key[0] >= 0}
        sizes_known = survey is not None and not survey.why_no_sizes
        yield Stretch(
            first,
            last - first,
            None if survey is None else _sum((node, b) for (node, _), b in placed.items()),
            _sum((size, b) for (_, size), b in placed.items()) if sizes_known else {},
            {name: int(each[n]) for name, each in covered.items() if each[n]},
        )


def _covered(ranges: Sequence[tuple[int, int]], offsets: list[int]) -> NDArray[np.int64]:
    """Count the bytes below each offset that are in one of the ranges (ascending, disjoint)."""
    starts, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(sizes)])
    at = np.searchsorted(starts, offsets, side="right")
    past = np.asarray(offsets) - np.concatenate([[0], starts])[at]
    last = np.concatenate([[0], sizes])[at]
    covered: NDArray[np.int64] = before[at] - np.maximum(last - past, 0)
    return covered


def _totals(by_name: _Ranges) -> dict[str, int]:
    return {name: sum(size for _, size in ranges) for name, ranges in by_name.items()}


def _sum(pairs: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    """Add up by key, in the order of the keys; keys with nothing are left out."""
    found: Counter[_Key] = Counter()
    for key, nbytes in pairs:
        found[key] += nbytes
    return {key: n for key, n in sorted(found.items()) if n}
