"""Where memory really is, asked of the kernel page by page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import linux
from hostmem.machine import machine
from hostmem.numa import describe_policy
from hostmem.units import align_down, align_up, format_size

__all__ = ["Placement", "find_placement", "placement_of"]

_CHUNK = 1 << 18  # pages asked about in one call


@dataclass(frozen=True, slots=True)
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
    """How it was found, or why it is not verifiable."""
    bytes_by_node: dict[int, int] = field(default_factory=dict)
    """Resident bytes (whole pages) by memory node."""
    bytes_by_page_size: dict[int, int] = field(default_factory=dict)
    """Resident bytes by the size of the page that maps them; empty where the kernel cannot say."""

    @property
    def found(self) -> str:
        """What was found, in words."""
        parts = [f"{format_size(n)} on node {k}" for k, n in sorted(self.bytes_by_node.items())]
        return ", ".join(parts) or "nothing resident"

    @property
    def resident(self) -> int:
        """Resident bytes."""
        return sum(self.bytes_by_node.values())

    def __str__(self) -> str:
        sizes = sorted(self.bytes_by_page_size.items())
        pages = ", ".join(f"{format_size(n)} in {format_size(size)} pages" for size, n in sizes)
        return (
            f"asked     {self.asked}\naccepted  {self.accepted}\nfound     {self.found}\n"
            f"pages     {pages or 'not known'}\nmethod    {self.method}"
        )


def placement_of(obj: Any, nbytes: int | None = None) -> Placement:
    """Look at where a buffer's memory is.

    Parameters
    ----------
    obj : buffer, array, tensor or int
        Anything with the buffer or array interface (numpy, memoryview, bytearray), a CPU tensor, or
        an address.
    nbytes : int, optional
        Bytes from an address; required with an address only.

    Returns
    -------
    Placement
        Of whole pages: what the buffer shares with neighbours on its first and last page counts.

    Raises
    ------
    TypeError
        Not a buffer, or an address without ``nbytes``.

    Notes
    -----
    Costs about 80 ns a small page (move_pages). Blocks nobody.
    """
    address, size = _extent(obj, nbytes)
    try:
        accepted = describe_policy(*linux.get_policy(address)) if size else "no policy"
    except OSError as error:
        accepted = f"not verifiable ({error.strerror or error})"
    return find_placement(address, size, "no policy", accepted)


def _extent(obj: Any, nbytes: int | None) -> tuple[int, int]:
    if isinstance(obj, int) and not isinstance(obj, bool):
        if nbytes is None or nbytes < 0 or obj < 0:
            raise TypeError("nbytes: an address needs the number of bytes from it")
        return obj, nbytes
    if nbytes is not None:
        raise TypeError("nbytes: goes with an address; a buffer has its own")
    if hasattr(obj, "data_ptr") and hasattr(obj, "nbytes"):  # a tensor, without importing torch
        return int(obj.data_ptr()), int(obj.nbytes)
    try:
        array = np.asarray(obj if hasattr(obj, "__array_interface__") else memoryview(obj))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected a buffer, an array, a tensor or an address, not {type(obj).__name__}"
        ) from error
    if array.size == 0:
        return 0, 0
    start = int(array.__array_interface__["data"][0])
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(r for r in reach if r < 0)
    high = sum(r for r in reach if r > 0) + array.itemsize
    return start + low, high - low


def find_placement(address: int, nbytes: int, asked: str, accepted: str) -> Placement:
    """Ask the kernel about every page of a range."""
    by_node, method = _by_node(address, nbytes)
    by_size: dict[int, int] = {}
    if by_node:
        start, end = _pages(address, nbytes)
        try:
            small, huge = linux.resident_by_page_kind(start, end - start)
        except OSError as error:
            method = f"{method}; page sizes not verifiable ({error.strerror or error})"
        else:
            sizes = {machine().page_size: small, machine().huge_page_size or 0: huge}
            by_size = {size: n for size, n in sizes.items() if n}
    return Placement(address, nbytes, asked, accepted, method, by_node, by_size)


def _pages(address: int, nbytes: int) -> tuple[int, int]:
    page = machine().page_size
    start = align_down(address, page)
    return start, align_up(address + nbytes, page) if nbytes else start


def _by_node(address: int, nbytes: int) -> tuple[dict[int, int], str]:
    start, end = _pages(address, nbytes)
    page = machine().page_size
    counts: NDArray[np.int64] = np.zeros(0, np.int64)
    for first in range(start, end, _CHUNK * page):
        addresses = np.arange(first, min(first + _CHUNK * page, end), page, dtype=np.uint64)
        try:
            status = linux.node_of_pages(addresses)
        except OSError as error:
            return {}, f"not verifiable: move_pages: {error.strerror or error}"
        found = np.bincount(status[status >= 0], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    by_node = {node: int(n) * page for node, n in enumerate(counts.tolist()) if n}
    return by_node, "move_pages, every page"
