"""What travels behind each page: its checksum, and whose page it is."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hostmem.files import checksums

__all__ = ["TRAILER_BYTES", "Trailers"]

Addresses = NDArray[np.uint64]

_MAGIC = 0x3145_4741_5054_564B  # "KVTPAGE1"
_TRAILER = np.dtype(
    [("magic", "<u8"), ("nbytes", "<u8"), ("sum", "<u4"), ("check", "<u4"), ("", "V8")]
)
TRAILER_BYTES = _TRAILER.itemsize
"""Length of a trailer."""


class Trailers:
    """Room for trailers, at addresses that a store reads and writes.

    A page is believed if it has the checksum of its trailer, and the trailer is of its name: one
    that was cut off, changed, or stored under a wrong name, is not.

    Parameters
    ----------
    count : int
        Trailers.
    """

    def __init__(self, count: int) -> None:
        self._rows = np.zeros(count, _TRAILER)
        self.address: int = self._rows.__array_interface__["data"][0]
        """Where they begin."""
        self.nbytes = self._rows.nbytes
        """Bytes of them all."""

    def addresses(self, count: int) -> list[int]:
        """Give the addresses of the first trailers."""
        return [self.address + n * TRAILER_BYTES for n in range(count)]

    def write(self, names: Sequence[str], pages: Addresses, nbytes: int) -> None:
        """Write the trailers of pages of ``nbytes`` each, which are read for it."""
        rows = self._rows[: len(names)]
        rows["magic"], rows["nbytes"] = _MAGIC, nbytes
        rows["sum"] = checksums(pages, nbytes)
        rows["check"] = _checks(names, rows["sum"])

    def believed(self, names: Sequence[str], pages: Addresses, nbytes: int) -> NDArray[np.bool_]:
        """Tell which pages are what was stored under their names; shape (pages,)."""
        rows = self._rows[: len(names)]
        good = (rows["magic"] == _MAGIC) & (rows["nbytes"] == nbytes)
        good &= rows["check"] == _checks(names, rows["sum"])
        good[good] = rows["sum"][good] == checksums(pages[good], nbytes)
        return np.asarray(good, np.bool_)


def _checks(names: Sequence[str], sums: NDArray[np.uint32]) -> NDArray[np.uint32]:
    pairs = zip(names, sums.tolist(), strict=True)
    return np.array([zlib.crc32(name.encode(), found) for name, found in pairs], np.uint32)
