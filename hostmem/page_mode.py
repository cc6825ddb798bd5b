"""Which size of pages a reservation asks the kernel for, and whether huge ones still pay."""

from __future__ import annotations

import os
import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hostmem import huge_pages
from hostmem.machine import Machine
from hostmem.units import format_size, parse_size

__all__ = ["PageJudge", "PageMode", "resolve_page_mode"]

_ROOT = Path("/")
_BY_ENVIRONMENT = {"0": "small", "1": "huge", "auto": "auto"}
_COMPACTS = ("always", "madvise", "defer+madvise")  # `defrag` settings under which a fault waits
_SPARE = 4  # times what is needed next: others take free blocks at the same time
_WINDOW = 16  # pieces
_SLOW = 0.25 * (1 << 30)  # bytes/s of one thread; compacting 0.04-0.3 GiB/s, else 1.5-6 GiB/s


@dataclass(frozen=True, slots=True)
class PageMode:
    """Pages to ask for; what was got is read back from the kernel, see `Placement`."""

    name: str
    """As the ``page_mode`` argument has it."""
    hugetlb_size: int | None = None
    """Bytes of a page of the hugetlb pool to take from; None: no such pool is used."""

    SMALL: ClassVar[PageMode]
    """The machine's base pages only (MADV_NOHUGEPAGE)."""
    HUGE: ClassVar[PageMode]
    """Transparent huge pages (MADV_HUGEPAGE); the kernel falls back page by page."""
    AUTO: ClassVar[PageMode]
    """Transparent huge pages for as long as a `PageJudge` finds that they pay."""

    def page_size(self, machine: Machine) -> int:
        """Bytes that access and population are rounded to."""
        return self.hugetlb_size or machine.page_size

    def largest_page_size(self, machine: Machine) -> int:
        """Bytes of the largest page this may bring: what the base address is a multiple of."""
        if self in (PageMode.HUGE, PageMode.AUTO) and machine.huge_page_size:
            return machine.huge_page_size
        return self.page_size(machine)

    def __str__(self) -> str:
        return self.name


PageMode.SMALL = PageMode("small")
PageMode.HUGE = PageMode("huge")
PageMode.AUTO = PageMode("auto")


def resolve_page_mode(mode: str | None, machine: Machine, root: Path = _ROOT) -> PageMode:
    """Turn the ``page_mode`` argument into what is asked of the kernel.

    Parameters
    ----------
    mode : str, optional
        ``"small"``, ``"huge"``, ``"auto"``, ``"hugetlb"`` (the pool of the machine's default
        size), ``"hugetlb-1GiB"`` (the pool of that size), or None for the ``HOSTMEM_THP``
        environment variable (0, 1, auto) and, where that is not set, small.
    machine : Machine
        Where. ``"auto"`` is small where the kernel gives no transparent huge pages to those who
        ask.
    root : Path
        Where proc and sys are, for the pools; another place in tests.

    Raises
    ------
    ValueError
        Another mode, huge where the kernel has no huge pages, or a pool that does not exist. One
        that is empty is not refused here: it may be filled before it is needed.
    """
    if mode is None:
        setting = os.environ.get("HOSTMEM_THP", "0")
        if setting not in _BY_ENVIRONMENT:
            raise ValueError(f"HOSTMEM_THP: {setting!r}; give 0, 1 or auto")
        mode = _BY_ENVIRONMENT[setting]
    usable = bool(machine.huge_page_size) and machine.thp_enabled in ("always", "madvise")
    match str(mode).partition("-"):
        case ("small", "", ""):
            return PageMode.SMALL
        case ("auto", "", ""):
            return PageMode.AUTO if usable else PageMode.SMALL
        case ("huge", "", "") if usable:
            return PageMode.HUGE
        case ("huge", "", ""):
            raise ValueError(
                "page_mode: 'huge', but transparent huge pages are "
                f"{machine.thp_enabled or 'not in this kernel'}; use 'auto' to take what there is"
            )
        case ("hugetlb", "", ""):
            return PageMode(mode, _pool(mode, huge_pages.default_pool_size(root), root))
        case ("hugetlb", "-", size):
            return PageMode(mode, _pool(mode, parse_size(size, "page_mode"), root))
    raise ValueError(
        f"page_mode: {mode!r}; give 'small', 'huge', 'auto', 'hugetlb' or 'hugetlb-SIZE'"
    )


def _pool(mode: str, size: int | None, root: Path) -> int:
    """Return the page size of a pool that exists."""
    sizes = sorted(huge_pages.pools(root))
    if size is None or size not in sizes:
        wanted = "hugetlb pool" if size is None else f"hugetlb pool of {format_size(size)} pages"
        there = ", ".join(map(format_size, sizes)) or "none"
        raise ValueError(f"page_mode: {mode!r}, but this kernel has no {wanted}; it has: {there}")
    return size


class PageJudge:
    """Says while filling whether transparent huge pages are still worth asking for.

    On a fragmented node a fault on a huge page first moves other pages out of the way, at a tenth
    of the speed of small pages. It is foreseen from the free blocks, and noticed by the fill's own
    rate, which counts only while the kernel reports that faults do compact: on a machine that is
    merely busy small pages would be no faster.

    One lock of the caller's guards all calls.

    Parameters
    ----------
    nodes : tuple of int
        Nodes whose memory is taken; empty for all.
    machine : Machine
        Whose page sizes, and setting of ``defrag``, these are.
    root : Path
        Where proc and sys are; another place in tests.
    """

    def __init__(self, nodes: tuple[int, ...], machine: Machine, root: Path = _ROOT) -> None:
        self._nodes = nodes
        self._machine = machine
        self._root = root
        self._rates: deque[float] = deque(maxlen=_WINDOW)
        self._compactions_before: int | None = None

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn how long one thread took to populate ``nbytes``."""
        if seconds > 0:
            self._rates.append(nbytes / seconds)

    def still_huge(self, next_nbytes: int) -> str | None:
        """Say why huge pages should be given up, or None to go on with them.

        Reads /proc; some ten microseconds, and a few hundred while the fill is slow.

        Parameters
        ----------
        next_nbytes : int
            Bytes that will be populated before the next time this is asked.
        """
        return self._foreseen(next_nbytes) or self._noticed()

    def _foreseen(self, next_nbytes: int) -> str | None:
        here = self._machine
        if here.thp_defrag not in _COMPACTS or not here.huge_page_size:
            return None  # without a block the kernel takes small pages at once
        free = huge_pages.free_huge_bytes(
            self._nodes, here.page_size, here.huge_page_size, self._root
        )
        if free >= _SPARE * next_nbytes:
            return None
        if not huge_pages.free_bytes_by_order(here.page_size, self._root):
            return None  # nobody knows
        where = f"node {', '.join(map(str, self._nodes))}" if self._nodes else "the machine"
        return (
            f"{where} has {format_size(free)} free in blocks of "
            f"{format_size(here.huge_page_size)} and more, and would compact memory for others "
            f"(defrag={here.thp_defrag})"
        )

    def _noticed(self) -> str | None:
        if len(self._rates) < _WINDOW:
            return None
        rate = statistics.median(self._rates)
        if rate >= _SLOW:
            self._compactions_before = None
            return None
        before, now = self._compactions_before, huge_pages.compactions(self._root)
        self._compactions_before = now
        self._rates.clear()
        if before is None or now is None or now - before < _WINDOW // 2:
            return None  # slow for the first time, or it is not the size of the pages
        return (
            f"a thread gets {format_size(int(rate))}/s of huge pages, and faults had to compact or "
            f"reclaim memory {now - before} times meanwhile"
        )
