"""The mappings of a process, as proc tells them: sizes, page sizes, nodes, policies, flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hostmem.machine import machine

__all__ = ["Mapping", "parse_mappings", "parse_nodes", "read_mappings"]

_ROOT = Path("/")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
_HUGETLB = ("Private_Hugetlb", "Shared_Hugetlb")
# A policy may have a blank in it ("weighted interleave:0-1"), so it ends where a known word begins.
_NODES = re.compile(
    r"([0-9a-f]+) (.*?)"
    r"(?: (?:file|anon|dirty|mapped|mapmax|swapcache|active|writeback|N\d+|kernelpagesize_kB)=.*"
    r"| (?:heap|stack|huge)(?: .*)?)?"
)
_ON_NODE = re.compile(r" N(\d+)=(\d+)(?= |$)")  # file names have no blank: proc writes \040
_NODE_PAGE = re.compile(r" kernelpagesize_kB=(\d+)")


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapping of a process."""

    start: int
    """Address of its first byte."""
    end: int
    """Address after its last byte."""
    permissions: str
    """As in ``rw-p``: read, write, execute, private or shared."""
    name: str
    """File, ``[heap]`` and the like; empty for anonymous memory."""
    page_size: int
    """Bytes of the kernel's page for it: larger than the machine's where it is hugetlb's."""
    resident: int = 0
    """Resident bytes, those of hugetlb included."""
    bytes_by_page_size: dict[int, int] = field(default_factory=dict)
    """Resident bytes by the size of the page that maps them."""
    flags: tuple[str, ...] = ()
    """The kernel's two-letter flags (VmFlags of smaps)."""
    policy: str | None = None
    """Its NUMA policy as numa_maps has it; None where that is not known."""
    bytes_by_node: dict[int, int] = field(default_factory=dict)
    """Resident bytes by memory node."""

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return self.end - self.start


def read_mappings(
    process: int | str = "self", *, nodes: bool = True, root: Path = _ROOT
) -> list[Mapping]:
    """Read the mappings of a process, ascending.

    Parameters
    ----------
    process : int or "self"
        Whose.
    nodes : bool
        Read policies and nodes as well, which walks the page tables a second time.
    root : Path
        Where proc is; another place in tests.

    Raises
    ------
    ProcessLookupError
        There is no such process (any more), or it has no memory of its own.
    PermissionError
        This user may not look into it.

    Notes
    -----
    The kernel walks the page tables: about 20 ms a GiB of small pages for each of the two files.
    The process goes on meanwhile, so that the files may differ by what it did.
    """
    folder = root / "proc" / str(process)
    text = _read(folder / "smaps", process) or _read(folder / "maps", process)
    if not text:
        raise ProcessLookupError(
            f"process {process} has no memory of its own: it has ended, or is a kernel thread"
        )
    placed = parse_nodes(_read(folder / "numa_maps", process)) if nodes else {}
    return list(parse_mappings(text, placed))


def _read(path: Path, process: int | str) -> str:
    """Return a file of a process; empty where the kernel has no such file."""
    try:
        return path.read_text(errors="replace")
    except PermissionError as error:
        raise PermissionError(
            error.errno,
            f"process {process} may not be looked into ({path}: {os.strerror(error.errno or 0)}); "
            "be its user, or have CAP_SYS_PTRACE",
        ) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        if isinstance(error, FileNotFoundError) and path.parent.exists():
            return ""
        raise ProcessLookupError(f"there is no process {process}") from error


def parse_mappings(
    text: str, placed: dict[int, tuple[str, dict[int, int]]] | None = None
) -> Iterator[Mapping]:
    """Read the text of smaps; of maps, which has the first line of each mapping only.

    Parameters
    ----------
    text : str
        The file.
    placed : dict, optional
        Policies and nodes by the address of a mapping, from `parse_nodes`.
    """
    header: re.Match[str] | None = None
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if match := _HEADER.fullmatch(line):
            if header is not None:
                yield _mapping(header, fields, placed or {})
            header, fields = match, {}
        else:
            name, _, value = line.partition(":")
            fields[name] = value
    if header is not None:
        yield _mapping(header, fields, placed or {})


def _mapping(
    header: re.Match[str], fields: dict[str, str], placed: dict[int, tuple[str, dict[int, int]]]
) -> Mapping:
    start = int(header[1], 16)
    small, huge_page = machine().page_size, machine().huge_page_size or 0
    page = _kilobytes(fields, "KernelPageSize") or small
    huge = sum(_kilobytes(fields, name) for name in _HUGE)
    pool = sum(_kilobytes(fields, name) for name in _HUGETLB)
    resident = _kilobytes(fields, "Rss")
    by_size = {small: resident - huge, huge_page: huge}
    if pool:  # the pool's pages are not in Rss
        by_size = {page: pool}
    policy, by_node = placed.get(start, (None, {}))
    return Mapping(
        start=start,
        end=int(header[2], 16),
        permissions=header[3],
        name=header[4],
        page_size=page,
        resident=resident + pool,
        bytes_by_page_size={size: n for size, n in by_size.items() if n},
        flags=tuple(fields.get("VmFlags", "").split()),
        policy=policy,
        bytes_by_node=by_node,
    )


def _kilobytes(fields: dict[str, str], name: str) -> int:
    number = fields.get(name, "").removesuffix("kB").strip()
    return int(number) * 1024 if number.isdecimal() else 0


def parse_nodes(text: str) -> dict[int, tuple[str, dict[int, int]]]:
    """Read the text of numa_maps: policy, and bytes by node, by the address of a mapping."""
    found = {}
    for line in text.splitlines():
        match = _NODES.fullmatch(line)
        if match is None:
            continue
        page = _NODE_PAGE.search(line)
        size = int(page[1]) * 1024 if page else machine().page_size
        by_node = {int(node): int(pages) * size for node, pages in _ON_NODE.findall(line)}
        found[int(match[1], 16)] = (match[2], by_node)
    return found
