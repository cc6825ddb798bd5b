"""How pages lie in the slots of a file: as they are, or packed by a compression."""

from __future__ import annotations

import mmap
import threading
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hostmem.files import memory_at, read_ranges, write_ranges
from hostmem.units import align_up
from kvtier.transfer.compression import SlotPacker
from kvtier.transfer.unnamed_file import DIRECT_GRAIN

__all__ = ["Moved", "PackedSlots", "PlainSlots", "SlotBytes"]

Addresses = NDArray[np.uint64]


class Moved(NamedTuple):
    """What a transfer cost."""

    requests: int
    """To the file."""
    nbytes: int
    """Bytes of the file in them."""


class SlotBytes(Protocol):
    """Moves pages between memory and neighbouring slots. Called by several threads at once."""

    def resize(self, slots: int) -> None:
        """Know so many slots; new ones hold zeros."""

    def stored(self, first: int, count: int) -> list[int]:
        """Say how many bytes of slots hold something; 0: all of them."""

    def restore(self, slot: int, stored: int) -> None:
        """Take over what `stored` said in an earlier process."""

    def write(self, first: int, addresses: Addresses) -> Moved:
        """Write pages to the slots from ``first`` on; blocks.

        Raises
        ------
        OSError
            Whatever the kernel says. Slots may hold a part.
        """

    def read(self, first: int, addresses: Addresses) -> Moved:
        """Read the slots from ``first`` on into memory; blocks.

        Raises
        ------
        OSError
            Whatever the kernel says; EIO for a file that ends too early; EBADMSG for a slot that
            holds nothing that was written. Memory may hold a part.
        """


class PlainSlots:
    """Pages as they are: neighbours are one request.

    Parameters
    ----------
    fd : int
        The file.
    slot_size : int
        Bytes of a slot.
    """

    def __init__(self, fd: int, slot_size: int) -> None:
        self._fd = fd
        self._slot_size = slot_size

    def resize(self, slots: int) -> None:
        """Need to know nothing."""

    def stored(self, first: int, count: int) -> list[int]:
        """Say that all of the slots holds something."""
        return [0] * count

    def restore(self, slot: int, stored: int) -> None:
        """Need to know nothing."""

    def write(self, first: int, addresses: Addresses) -> Moved:
        """Write pages to the slots from ``first`` on."""
        write_ranges(self._fd, first * self._slot_size, addresses, self._slot_size)
        return Moved(1, len(addresses) * self._slot_size)

    def read(self, first: int, addresses: Addresses) -> Moved:
        """Read the slots from ``first`` on into memory."""
        read_ranges(self._fd, first * self._slot_size, addresses, self._slot_size)
        return Moved(1, len(addresses) * self._slot_size)


class PackedSlots:
    """Packed pages at the beginning of their slots: a request each, of what is stored there.

    Parameters
    ----------
    fd : int
        The file.
    slot_size : int
        Bytes of a slot.
    packer : SlotPacker
        Packs and unpacks.
    """

    def __init__(self, fd: int, slot_size: int, packer: SlotPacker) -> None:
        self._fd = fd
        self._slot_size = slot_size
        self._packer = packer
        self._lock = threading.Lock()  # a resize moves the array
        self._lengths = np.zeros(0, np.uint32)  # 0: all of the slot
        self._rooms = threading.local()

    def resize(self, slots: int) -> None:
        """Know so many slots; new ones hold zeros."""
        lengths = np.zeros(slots, np.uint32)
        with self._lock:
            kept = min(slots, len(self._lengths))
            lengths[:kept] = self._lengths[:kept]
            self._lengths = lengths

    def stored(self, first: int, count: int) -> list[int]:
        """Say how many bytes of slots hold something."""
        with self._lock:
            lengths: list[int] = self._lengths[first : first + count].tolist()
            return lengths

    def restore(self, slot: int, stored: int) -> None:
        """Take over what `stored` said in an earlier process."""
        self._lengths[slot] = stored

    def write(self, first: int, addresses: Addresses) -> Moved:
        """Write pages to the slots from ``first`` on."""
        nbytes = 0
        for slot, address in enumerate(addresses.tolist(), first):
            stored = self._packer.pack(memory_at(address, self._slot_size), self._room())
            with self._lock:
                self._lengths[slot] = len(stored)
            write_ranges(self._fd, slot * self._slot_size, _address(stored), len(stored))
            nbytes += len(stored)
        return Moved(len(addresses), nbytes)

    def read(self, first: int, addresses: Addresses) -> Moved:
        """Read the slots from ``first`` on into memory."""
        nbytes = 0
        for slot, address in enumerate(addresses.tolist(), first):
            page = memory_at(address, self._slot_size)
            with self._lock:
                length = int(self._lengths[slot])
            packed = 0 < length < self._slot_size
            stored = self._room()[:length] if packed else page
            read_ranges(self._fd, slot * self._slot_size, _address(stored), len(stored))
            if packed:
                self._packer.unpack(stored, page)
            nbytes += len(stored)
        return Moved(len(addresses), nbytes)

    def _room(self) -> NDArray[np.uint8]:
        """Give this thread's memory for a packed page: of its own, and fit for direct I/O."""
        room: NDArray[np.uint8] | None = getattr(self._rooms, "room", None)
        if room is None:
            memory = mmap.mmap(-1, align_up(self._slot_size, DIRECT_GRAIN))
            room = self._rooms.room = np.frombuffer(memory, np.uint8, self._slot_size)
        return room


def _address(data: NDArray[np.uint8]) -> Addresses:
    return np.array([data.__array_interface__["data"][0]], np.uint64)
