"""Which host memory is registered, by the rules of the driver."""

from __future__ import annotations

import os
import weakref

import numpy as np
from numpy.typing import NDArray

from hostmem._sys.driver import Result, refuse
from hostmem.ranges import RangeTable

__all__ = ["PinnedRanges"]


_tables: weakref.WeakSet[PinnedRanges] = weakref.WeakSet()


class PinnedRanges(RangeTable):
    """Registered host memory, for what plays the driver: it answers as the driver does.

    Ranges are bytes, not pages: neighbours may share a page, and no byte is registered twice.
    """

    def __init__(self) -> None:
        super().__init__()
        _tables.add(self)

    def pin(self, address: int, nbytes: int, detail: str) -> None:
        """Register a range.

        Raises
        ------
        CuError
            INVALID_VALUE: no bytes. HOST_MEMORY_ALREADY_REGISTERED: some of them are; the message
            names the range that has them.
        """
        if nbytes < 1:
            refuse(Result.INVALID_VALUE, "cuMemHostRegister", detail)
        try:
            self.add(address, nbytes)
        except ValueError as error:
            code = Result.HOST_MEMORY_ALREADY_REGISTERED
            refuse(code, "cuMemHostRegister", f"{detail}: {error}")

    def unpin(self, address: int, detail: str) -> None:
        """Undo `pin`.

        Raises
        ------
        CuError
            INVALID_VALUE: the range that holds ``address`` begins before it.
            HOST_MEMORY_NOT_REGISTERED: none holds it.
        """
        try:
            self.remove(address)
        except KeyError:
            inside = self.at(address) is not None
            code = Result.INVALID_VALUE if inside else Result.HOST_MEMORY_NOT_REGISTERED
            refuse(code, "cuMemHostUnregister", detail)

    def first_refused(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> tuple[int, str] | None:
        """Find the first copy of a batch that crosses the end of a registration, and say which.

        A range that begins in unregistered memory may end in a registration, not the reverse.
        """
        found = []
        for name, addresses in (("destination", destinations), ("source", sources)):
            at = self.first_leaving(addresses, sizes)
            if at is not None:
                found.append((at, name, int(addresses[at])))
        if not found:
            return None
        at, name, address = min(found)
        return at, (
            f"copy {at} of {len(sizes)}: the {name}, {int(sizes[at])} bytes at {address:#x}, "
            "crosses the end of a registration"
        )


def _forked() -> None:
    # What the parent registered is not mapped in the child: new memory may get the same addresses.
    for table in list(_tables):
        table.abandon()


os.register_at_fork(after_in_child=_forked)
