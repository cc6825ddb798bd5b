"""Where the memory of a whole process is, for a person or for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostmem.describing import html_of, notebook, one_line
from hostmem.process_maps import Mapping, read_mappings
from hostmem.units import format_size

__all__ = ["ProcessReport", "report_process"]

_ROOT = Path("/")
_SHOWN = 20  # mappings
# What matters to who wants to pin the memory, or wonders about its pages and children.
_FLAGS = {
    "pf": "cannot be pinned (pf)",
    "io": "cannot be pinned (io)",
    "ht": "hugetlb",
    "dc": "not in forked children",
    "nh": "no huge pages",
    "hg": "huge pages asked",
}


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The mappings of a process, those with the most resident memory first."""

    process: int | str
    """Its number, or ``self``."""
    mappings: tuple[Mapping, ...]
    """All of them."""

    @property
    def bytes_by_node(self) -> dict[int, int]:
        """Resident bytes by memory node; empty where the kernel does not say."""
        return _sum(mapping.bytes_by_node for mapping in self.mappings)

    @property
    def bytes_by_page_size(self) -> dict[int, int]:
        """Resident bytes by the size of the page that maps them."""
        return _sum(mapping.bytes_by_page_size for mapping in self.mappings)

    @one_line
    def __repr__(self) -> str:
        resident = sum(mapping.resident for mapping in self.mappings)
        return (
            f"<ProcessReport of {self.process}: {format_size(resident)} resident in "
            f"{len(self.mappings)} mappings>"
        )

    def describe(self) -> str:
        """Show the largest mappings as a table, and the totals; see `table`."""
        return self.table(_SHOWN)

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [self.describe()])

    def table(self, limit: int | None = None) -> str:
        """Lay the mappings out, ``limit`` of them or all, and the totals below."""
        shown = self.mappings[:limit]
        head = ("address", "size", "resident", "on nodes", "in pages of", "policy", "name; flags")
        rows = [head, *map(_row, shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        left = len(self.mappings) - len(shown)
        if left:
            rest = sum(mapping.resident for mapping in self.mappings[len(shown) :])
            lines.append(f"and {left} more with {format_size(rest)} resident")
        total = sum(mapping.resident for mapping in self.mappings)
        pinned = sum(m.nbytes for m in self.mappings if {"pf", "io"} & {*m.flags})
        lines += [
            "",
            f"resident      {format_size(total)} in {len(self.mappings)} mappings",
            f"on nodes      {_shares(self.bytes_by_node, 'node {}'.format) or 'not known'}",
            f"in pages of   {_shares(self.bytes_by_page_size, format_size) or 'not known'}",
        ]
        if pinned:
            lines.append(f"flags         {format_size(pinned)} of address space cannot be pinned")
        return "\n".join(lines)

    def as_json(self, limit: int | None = None) -> dict[str, Any]:
        """Return the same for json: sizes in bytes, addresses as integers."""
        return {
            "process": self.process,
            "bytes_by_node": self.bytes_by_node,
            "bytes_by_page_size": self.bytes_by_page_size,
            "mapping_count": len(self.mappings),
            "mappings": [
                {
                    "address": mapping.start,
                    "nbytes": mapping.nbytes,
                    "permissions": mapping.permissions,
                    "name": mapping.name,
                    "resident": mapping.resident,
                    "page_size": mapping.page_size,
                    "bytes_by_node": mapping.bytes_by_node,
                    "bytes_by_page_size": mapping.bytes_by_page_size,
                    "policy": mapping.policy,
                    "flags": mapping.flags,
                }
                for mapping in self.mappings[:limit]
            ],
        }


def report_process(process: int | str = "self", root: Path = _ROOT) -> ProcessReport:
    """Read where a process's memory is; raises as `read_mappings` does."""
    mappings = read_mappings(process, root=root)
    largest = sorted(mappings, key=lambda mapping: (-mapping.resident, -mapping.nbytes))
    return ProcessReport(process, tuple(largest))


def _row(mapping: Mapping) -> tuple[str, ...]:
    flags = [words for flag, words in _FLAGS.items() if flag in mapping.flags]
    name = mapping.name or "anonymous"
    return (
        f"{mapping.start:x}-{mapping.end:x}",
        format_size(mapping.nbytes),
        format_size(mapping.resident),
        _shares(mapping.bytes_by_node, str),
        _shares(mapping.bytes_by_page_size, format_size),
        mapping.policy or "not known",
        "; ".join([name, *flags]),
    )


def _shares(nbytes: dict[int, int], name: Callable[[int], str]) -> str:
    """Say ``0: 2 MiB, 1: 3 MiB``; only the name where all is of one."""
    if len(nbytes) == 1:
        return name(*nbytes)
    return ", ".join(f"{name(key)}: {format_size(n)}" for key, n in sorted(nbytes.items()))


def _sum(tables: Iterable[dict[int, int]]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for table in tables:
        found.update(table)
    return dict(sorted(found.items()))
