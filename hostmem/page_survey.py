"""What the kernel says of each page of a range, counted by stretch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hostmem import procfs
from hostmem._sys import linux
from hostmem.machine import machine
from hostmem.process_maps import read_mappings
from hostmem.units import align_down, align_up

__all__ = ["PageSurvey", "edges_of", "page_range", "survey_pages"]

_CHUNK = 1 << 16  # pages asked about in one call: what is counted then stays in the cache
_ERRNOS = 256  # more than the kernel has
_GOLDEN = (math.sqrt(5) - 1) / 2

Pages = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageSurvey:
    """Pages by what the kernel says of them."""

    edges: list[int]
    """Where the stretches begin, in pages from the first one; then the end of the last."""
    counts: list[Counter[tuple[int, int]]]
    """Of each stretch: (node or negative errno, bytes of the page that maps it) -> pages."""
    asked: int
    """Pages that the kernel was asked about."""
    total: int
    """Pages that those stand for."""
    why_no_sizes: str = ""
    """Why all are given as small pages; empty where the sizes are the kernel's."""

    @property
    def error(self) -> float:
        """How far a share of the pages may be off, 19 times in 20: a fraction, 0 for all pages."""
        if self.asked == self.total:
            return 0.0
        # The worst case, a share of one half; what is drawn is not put back.
        left = (self.total - self.asked) / (self.total - 1)
        return 1.96 * math.sqrt(0.25 / self.asked * left)


def page_range(address: int, nbytes: int) -> tuple[int, int]:
    """Return the addresses of the whole pages that a range shares a byte with."""
    page = machine().page_size
    start = align_down(address, page)
    return start, align_up(address + nbytes, page) if nbytes else start


def edges_of(pages: int, parts: int) -> list[int]:
    """Cut pages into equal parts, at most one each: where each begins, and the end of the last."""
    parts = max(min(parts, pages), 1)
    return [n * pages // parts for n in range(parts + 1)]


def survey_pages(
    address: int,
    nbytes: int,
    stretches: int = 1,
    skip: Sequence[tuple[int, int]] = (),
    sample: int | None = None,
) -> PageSurvey:
    """Ask the kernel where the pages of a range are and how large they are.

    Parameters
    ----------
    address, nbytes : int
        The range.
    stretches : int
        Equal parts, in whole pages, to count in; fewer where there are fewer pages.
    skip : sequence of (offset, nbytes)
        Parts that hold nothing for certain, ascending; pages in them are not asked about.
    sample : int, optional
        Pages to ask about at most; counts are scaled.

    Raises
    ------
    OSError
        move_pages is not allowed here, or not there.
    """
    page = machine().page_size
    start, end = page_range(address, nbytes)
    pages = (end - start) // page
    ranges = list(_between(skip, address - start, pages, page))
    total = sum(last - first for first, last in ranges)
    sampled = sample is not None and sample < total
    if sample is not None and sampled:
        chunks = _sampled(ranges, total, sample)
        # So long that at least one page of each is in the sample.
        stretches = min(stretches, sample // 4)
    else:
        chunks = _every(ranges)
    edges = edges_of(pages, stretches)
    survey = _Count(start, edges, sampled)
    for chunk in chunks:
        survey.add(chunk)
    counts = survey.counts
    if sampled:
        for n, count in enumerate(counts):
            counts[n] = _scaled(count, _overlap(ranges, edges[n], edges[n + 1]))
    return PageSurvey(edges, counts, survey.asked, total, survey.why_no_sizes)


class _Count:
    """Counts pages as the kernel answers."""

    def __init__(self, start: int, edges: list[int], sampled: bool) -> None:
        self.counts: list[Counter[tuple[int, int]]] = [Counter() for _ in edges[1:]]
        self.asked = 0
        self.why_no_sizes = ""
        self._start = start
        self._page = machine().page_size
        self._edges = edges
        self._sampled = sampled
        self._sizes = [self._page, machine().huge_page_size or self._page]
        self._pools: list[tuple[int, int, int]] | None = None
        self._status = np.empty(_CHUNK, np.int32)

    def add(self, pages: Pages) -> None:
        """Count some pages, given by ascending numbers; no more than a chunk."""
        self.asked += len(pages)
        addresses = pages.astype(np.uint64)
        addresses *= np.uint64(self._page)
        addresses += np.uint64(self._start)
        status = linux.node_of_pages(addresses, self._status)
        kinds = self._kinds(pages, addresses)  # may find a size that is new
        many = len(self._sizes)
        keys = status.astype(np.int64)
        keys += _ERRNOS
        keys *= many
        if kinds is not None:
            keys += kinds
        cuts = np.searchsorted(pages, self._edges).tolist()
        for count, first, last in zip(self.counts, cuts, cuts[1:], strict=False):
            if first == last:
                continue
            bins = np.bincount(keys[first:last])
            for key in np.flatnonzero(bins).tolist():
                code, kind = divmod(key, many)
                count[code - _ERRNOS, self._sizes[kind]] += int(bins[key])

    def _kinds(self, pages: Pages, addresses: NDArray[np.uint64]) -> Pages | None:
        """Return the number of each page's size in the list of sizes; None where all are small."""
        if self.why_no_sizes:
            return None
        try:
            kinds = self._huge(addresses)
        except OSError as error:
            self.why_no_sizes = f"PAGEMAP_SCAN: {linux.meaning(error.errno)}"
            return None
        if kinds is not None:
            self._name_pools(pages, kinds)
        return kinds

    def _huge(self, addresses: NDArray[np.uint64]) -> Pages | None:
        if self._sampled:
            return linux.are_huge(addresses).astype(np.int64)
        first = int(addresses[0])
        found = linux.huge_regions(first, len(addresses) * self._page)
        if not len(found):
            return None
        steps = np.zeros(len(addresses) + 1, np.int64)
        at = (found - np.uint64(first)) // np.uint64(self._page)
        np.add.at(steps, at[:, 0].astype(np.int64), 1)
        np.add.at(steps, at[:, 1].astype(np.int64), -1)
        return np.cumsum(steps[:-1])

    def _name_pools(self, pages: Pages, kinds: Pages) -> None:
        """Tell pages of the hugetlb pools, of whatever size, from transparent huge pages."""
        if self._pools is None:
            self._pools = list(self._read_pools())
        for first, last, size in self._pools:
            low, high = np.searchsorted(pages, (first, last)).tolist()
            if size not in self._sizes:
                self._sizes.append(size)
            kinds[low:high] = self._sizes.index(size)

    def _read_pools(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first page, last page + 1, bytes of a page) of mappings of hugetlb pools."""
        # Reading smaps walks all page tables of the process: not where it has no such page.
        if procfs.fields(procfs.read("/proc/self/status")).get("HugetlbPages") == 0:
            return
        for mapping in read_mappings(nodes=False):
            if mapping.page_size > self._page:
                first = (mapping.start - self._start) // self._page
                yield first, first + mapping.nbytes // self._page, mapping.page_size


def _between(
    skip: Sequence[tuple[int, int]], shift: int, pages: int, page: int
) -> Iterator[tuple[int, int]]:
    """Yield the (first, last + 1) pages around the parts to skip, which lose their broken pages."""
    at = 0
    for offset, nbytes in skip:
        first = min(align_up(shift + offset, page) // page, pages)
        last = min((shift + offset + nbytes) // page, pages)
        if first < last:
            if at < first:
                yield at, first
            at = last
    if at < pages:
        yield at, pages


def _every(ranges: list[tuple[int, int]]) -> Iterator[Pages]:
    for first, last in ranges:
        for at in range(first, last, _CHUNK):
            yield np.arange(at, min(at + _CHUNK, last), dtype=np.int64)


def _sampled(ranges: list[tuple[int, int]], total: int, sample: int) -> Iterator[Pages]:
    """Yield one page of each of as many equal parts.

    Not the same one of each: pages that are dealt out to nodes in turn would all be of one node.
    The golden ratio's multiples spread the places in the parts evenly, and the same every time.
    """
    number = np.arange(sample)
    within = number * _GOLDEN % 1.0
    places = np.minimum(((number + within) * (total / sample)).astype(np.int64), total - 1)
    firsts, lasts = np.array(ranges, np.int64).T
    ends = np.cumsum(lasts - firsts)
    where = np.searchsorted(ends, places, side="right")
    pages = places - ends[where] + lasts[where]
    for at in range(0, sample, _CHUNK):
        yield pages[at : at + _CHUNK]


def _scaled(count: Counter[tuple[int, int]], pages: int) -> Counter[tuple[int, int]]:
    """Scale counts up so that they add up to the pages that they stand for."""
    shares = np.cumsum([0, *count.values()]) * (pages / max(count.total(), 1))
    whole = np.diff(np.rint(shares).astype(np.int64)).tolist()
    return Counter(dict(zip(count, whole, strict=True)))


def _overlap(ranges: list[tuple[int, int]], start: int, end: int) -> int:
    return sum(max(min(last, end) - max(first, start), 0) for first, last in ranges)
