"""Address space that is reserved at once and backed with memory piece by piece."""

from __future__ import annotations

import contextlib

from hostmem._sys import linux
from hostmem.machine import Machine
from hostmem.page_mode import PageMode
from hostmem.units import align_down, align_up, format_size

__all__ = ["Reservation"]


class Reservation:
    """A range of address space with a fixed base. Offsets and sizes are bytes from that base.

    It is inaccessible and costs nothing until `allow` and `populate`. What holds for all of it
    (page size, absence from forked children, the owner's NUMA policy) is set once, before any of it
    is used: the kernel then keeps it as two mappings, the used part and the rest.

    Ranges of `allow` and `populate` are widened to pages. Ranges of `give_back` are narrowed, so
    that a page shared with a neighbour that stays is not lost.

    Parameters
    ----------
    nbytes : int
        Bytes; rounded up to pages.
    grain : int
        The base is a multiple of the largest power of two that divides this, of the page, and of
        the huge page where the mode may use those.
    mode : PageMode
        Page size to ask for.
    machine : Machine
        Whose page sizes these are.

    Raises
    ------
    HostOOMError
        The address space, RLIMIT_AS or vm.max_map_count said no.
    """

    def __init__(self, nbytes: int, grain: int, mode: PageMode, machine: Machine) -> None:
        self.page_size = machine.page_size
        largest_page = self.page_size
        if mode is PageMode.HUGE and machine.huge_page_size:
            largest_page = machine.huge_page_size
        self.nbytes = align_up(nbytes, self.page_size)
        self.address = linux.reserve(self.nbytes, max(grain & -grain, largest_page))
        with contextlib.ExitStack() as undo:
            undo.callback(linux.unmap, self.address, self.nbytes)
            linux.advise_no_fork(self.address, self.nbytes)
            advise = linux.advise_huge if mode is PageMode.HUGE else linux.advise_small
            advise(self.address, self.nbytes)
            undo.pop_all()

    def allow(self, start: int, end: int) -> None:
        """Make the pages of ``[start, end)`` accessible."""
        first, last = self._outward(start, end)
        if first < last:
            linux.allow(self.address + first, last - first)

    def populate(self, start: int, end: int) -> None:
        """Fault the pages of ``[start, end)`` in; they must be accessible and never used before.

        Blocks, without the GIL. Raises `HostOOMError` where memory runs out.
        """
        first, last = self._outward(start, end)
        if first < last and not linux.populate(self.address + first, last - first):
            linux.touch(self.address + first, last - first)

    def give_back(self, start: int, end: int) -> None:
        """Return the memory of the pages inside ``[start, end)`` and make them inaccessible."""
        first, last = align_up(start, self.page_size), align_down(end, self.page_size)
        if first < last:
            linux.discard(self.address + first, last - first)
            linux.deny(self.address + first, last - first)

    def release(self) -> None:
        """Give address space and memory back to the kernel."""
        linux.unmap(self.address, self.nbytes)

    def _outward(self, start: int, end: int) -> tuple[int, int]:
        return align_down(start, self.page_size), align_up(end, self.page_size)

    def __repr__(self) -> str:
        return f"<Reservation {format_size(self.nbytes)} at {self.address:#x}>"
