"""Copy plans: from slot numbers to few, large descriptors, without a loop over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["AddressSpace", "Addresses", "CopyPlan"]

Addresses = NDArray[np.uint64]


class AddressSpace(Protocol):
    """A memory that knows where the driver's registrations of it end."""

    def registration_index(self, addresses: Addresses) -> NDArray[np.int64] | None:
        """Give the number of the registration that holds each address; None: copies may span."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies to submit in one batch; the arrays have one entry a copy."""

    destinations: Addresses
    """Addresses to write to."""
    sources: Addresses
    """Addresses to read from."""
    sizes: Addresses
    """Bytes."""

    @classmethod
    def of(cls, destinations: Addresses, sources: Addresses, size: int) -> Self:
        """Plan copies of one size."""
        return cls(destinations, sources, np.full(len(sources), size, np.uint64))

    @classmethod
    def joined(cls, plans: Sequence[Self]) -> Self:
        """Put several plans into one batch."""
        if len(plans) == 1:
            return plans[0]
        return cls(
            np.concatenate([plan.destinations for plan in plans]),
            np.concatenate([plan.sources for plan in plans]),
            np.concatenate([plan.sizes for plan in plans]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that all copies move."""
        return int(self.sizes.sum())

    def merged(self, destination: AddressSpace, source: AddressSpace) -> Self:
        """Join copies that continue each other on both sides, within one registration of each.

        A driver call costs half a microsecond a copy, and refuses a copy that crosses the end of a
        registration. O(n log n); the order of copies in a batch has no meaning, so they are sorted,
        and not stably, which takes six times as long.
        """
        if len(self.sizes) < 2:
            return self
        order = self.sources.argsort()
        # One allocation: several that are freed at once go back to the kernel each time.
        to, start, size, ends = rows = np.empty((4, len(order)), np.uint64)
        for column, row in zip((self.destinations, self.sources, self.sizes), rows, strict=False):
            column.take(order, out=row, mode="clip")  # the mode that needs no buffer
        joins = start[1:] == np.add(start, size, out=ends)[:-1]
        joins &= to[1:] == np.add(to, size, out=ends)[:-1]
        if not joins.any():
            return self  # before registrations are looked up, which costs more
        for space, addresses in ((destination, to), (source, start)):
            index = space.registration_index(addresses)
            if index is not None:
                joins &= index[1:] == index[:-1]
        if not joins.any():
            return self
        (first,) = np.concatenate(([True], ~joins)).nonzero()
        return type(self)(to[first], start[first], np.add.reduceat(size, first))
