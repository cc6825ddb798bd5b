"""Address space that is reserved at once and backed with memory piece by piece."""

from __future__ import annotations

import contextlib
import errno

from hostmem import huge_pages
from hostmem._sys import linux
from hostmem.errors import HostOOMError
from hostmem.machine import Machine
from hostmem.page_mode import PageMode
from hostmem.spans import span
from hostmem.units import align_down, align_up, format_size

__all__ = ["Reservation"]


class Reservation:
    """A range of address space with a fixed base. Offsets and sizes are bytes from that base.

    It is inaccessible and costs nothing until `allow` and `populate`. What holds for all of it
    (page size, absence from forked children, the owner's NUMA policy) is set once, before any of it
    is used: the kernel then keeps it as two mappings, the used part and the rest. Mappings of
    hugetlb pages it never joins again: there each boundary ever used adds one.

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
        Pages to ask for.
    machine : Machine
        Whose page sizes these are.

    Raises
    ------
    HostOOMError
        The address space, RLIMIT_AS or vm.max_map_count said no.
    ValueError
        A hugetlb pool is asked for where a short one could only be told by SIGBUS.
    """

    def __init__(self, nbytes: int, grain: int, mode: PageMode, machine: Machine) -> None:
        self.hugetlb_size = mode.hugetlb_size
        """Bytes of a page of the hugetlb pool behind it, or None."""
        self.page_size = mode.page_size(machine)
        """Bytes that everything is rounded to."""
        self.nbytes = align_up(nbytes, self.page_size)
        alignment = max(grain & -grain, mode.largest_page_size(machine))
        self.address = linux.reserve(self.nbytes, alignment, self.hugetlb_size)
        with contextlib.ExitStack() as undo:
            undo.callback(linux.unmap, self.address, self.nbytes)
            linux.advise_no_fork(self.address, self.nbytes)
            if self.hugetlb_size is not None:
                if not linux.populate(self.address, 0):
                    raise _touching_may_kill()
            elif mode is PageMode.SMALL:
                linux.advise_small(self.address, self.nbytes)
            else:
                linux.advise_huge(self.address, self.nbytes)
            undo.pop_all()

    def allow(self, start: int, end: int) -> None:
        """Make the pages of ``[start, end)`` accessible."""
        first, last = self._outward(start, end)
        if first < last:
            linux.allow(self.address + first, last - first)

    @span("populate", "fill")
    def populate(self, start: int, end: int) -> None:
        """Fault the pages of ``[start, end)`` in; they must be accessible and never used before.

        Blocks, without the GIL.

        Raises
        ------
        HostOOMError
            Memory, or the hugetlb pool, ran out.
        OSError
            Another answer of the kernel, as it is.
        """
        first, last = self._outward(start, end)
        if first == last:
            return
        address, nbytes = self.address + first, last - first
        try:
            known = linux.populate(address, nbytes)
        except OSError as error:
            if self.hugetlb_size is None or error.errno != errno.EFAULT:
                raise
            raise self._pool_is_short(first, nbytes) from error
        if not known:
            if self.hugetlb_size is not None:
                raise _touching_may_kill()
            linux.touch(address, nbytes)

    def _pool_is_short(self, offset: int, nbytes: int) -> HostOOMError:
        assert self.hugetlb_size is not None
        pool = huge_pages.pools().get(self.hugetlb_size)
        free = pool.free if pool else 0
        return HostOOMError(
            f"the hugetlb pool of {format_size(self.hugetlb_size)} pages is short: {free} free, "
            f"{nbytes // self.hugetlb_size} wanted at offset {offset} on the nodes and in the "
            "control group of this process; enlarge it (vm.nr_hugepages) or lower the size",
            call="madvise",
            offset=offset,
            nbytes=nbytes,
            available=free * self.hugetlb_size,
        )

    def zero(self, start: int, end: int) -> None:
        """Write zeros over ``[start, end)``, which must be accessible."""
        if start < end:
            linux.zero(self.address + start, end - start)

    def use_small_pages_from(self, offset: int) -> None:
        """Ask for small pages only, from the first whole page past ``offset`` to the end.

        What is there stays. The reservation is one mapping more afterwards.
        """
        first = align_up(offset, self.page_size)
        if first < self.nbytes:
            linux.advise_small(self.address + first, self.nbytes - first)

    def give_back(self, start: int, end: int) -> None:
        """Return the memory of the pages inside ``[start, end)`` and make them inaccessible.

        Raises
        ------
        HostOOMError
            The number of mappings (vm.max_map_count) is used up; nothing was given back.
        OSError
            EINVAL on hugetlb before Linux 5.18, which gives it back only with the whole range.
        """
        first, last = align_up(start, self.page_size), align_down(end, self.page_size)
        if first < last:
            address, nbytes = self.address + first, last - first
            linux.deny(address, nbytes)  # first: this can be refused, and then nothing is lost
            try:
                linux.discard(address, nbytes)
            except BaseException:
                linux.allow(address, nbytes)
                raise

    def release(self) -> None:
        """Give address space and memory back to the kernel."""
        linux.unmap(self.address, self.nbytes)

    def _outward(self, start: int, end: int) -> tuple[int, int]:
        return align_down(start, self.page_size), align_up(end, self.page_size)

    def __repr__(self) -> str:
        return f"<Reservation {format_size(self.nbytes)} at {self.address:#x}>"


def _touching_may_kill() -> ValueError:
    return ValueError(
        "page_mode: hugetlb needs MADV_POPULATE_WRITE (Linux 5.14), which this kernel does not "
        "know: to touch the pages instead is to be killed (SIGBUS) where the pool is short"
    )
