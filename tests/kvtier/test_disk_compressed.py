"""Files of slots that compress: fewer bytes, the same pages, and damage is found."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, DiskOOMError, StaticHostMem
from hostmem.testing import FaultPlan
from kvtier.transfer import compression as compressions
from kvtier.transfer.compression import SlotPacker, compression
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies

Bytes = NDArray[np.uint8]
SIZE = 64 << 10
SLOTS = 16


class Zlib:
    """A compression of the standard library, which can be told to fail."""

    refuses = b"no such page"

    def compress(self, data: Bytes) -> bytes:
        if data[: len(self.refuses)].tobytes() == self.refuses:
            raise RuntimeError("it does not like this page")
        return zlib.compress(data.tobytes(), 1)

    def decompress(self, data: Bytes, out: Bytes) -> None:
        out[:] = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8)


def page(seed: int, noise: int, size: int = SIZE) -> Bytes:
    """Make a page that begins with so many bytes that do not get fewer."""
    made = np.full(size, seed, np.uint8)
    made[:noise] = np.frombuffer(np.random.default_rng(seed).bytes(noise), np.uint8)
    return made


class Kit:
    """A file, and memory with a page for each slot."""

    def __init__(self, folder: Path, cpu: CpuDevice, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.memory = StaticHostMem(SLOTS * SIZE, device=cpu)
        stack.callback(self.memory.close)
        self.file = self.open()

    def open(self, size: int = SIZE, **options: Any) -> SlotFile:
        if hasattr(self, "file"):
            self.file.close()
        options = {"compression": "zlib", **options}
        self.file = SlotFile(str(self.folder), size, SLOTS, **options)
        self._stack.callback(self.file.close)
        return self.file

    def at(self, slot: int) -> Bytes:
        return self.memory.view(slot * self.file.slot_size, self.file.slot_size)

    def _move(self, transfer: Callable[..., Any], slots: list[int], *more: Any) -> dict[int, Any]:
        offsets = np.array(slots, np.uint64) * np.uint64(self.file.slot_size)
        addresses = np.uint64(self.memory.address) + offsets
        event = transfer(np.array(slots, np.int32), addresses, Dependencies(), *more)
        event.wait_finished()
        return {slots[n]: error for n, error in event.failures.items()}

    def write(self, pages: dict[int, Bytes], names: list[bytes] | None = None) -> dict[int, Any]:
        for slot, made in pages.items():
            self.at(slot)[:] = made
        return self._move(self.file.write, list(pages), names)

    def read(self, *slots: int) -> dict[int, Any]:
        for slot in slots:
            self.at(slot)[:] = 0xEE
        return self._move(self.file.read, list(slots))

    def holds(self, pages: dict[int, Bytes]) -> bool:
        """Read slots; tell whether each is what it should be."""
        assert self.read(*pages) == {}
        return all(np.array_equal(self.at(slot), made) for slot, made in pages.items())

    def bytes_of(self, work: Callable[[], Any]) -> tuple[int, int]:
        """Say how many bytes were written and read meanwhile."""
        before = self.file.stats()
        work()
        after = self.file.stats()
        return after.bytes_written - before.bytes_written, after.bytes_read - before.bytes_read

    def poke(self, at: int) -> None:
        with open(f"/proc/self/fd/{self.file._fd}", "r+b", buffering=0) as file:
            old = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)


@pytest.fixture(autouse=True)
def _zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compressions, "COMPRESSIONS", {**compressions.COMPRESSIONS, "zlib": lambda: Zlib()}
    )


@pytest.fixture
def kit(tmp_path: Path, cpu: CpuDevice) -> Iterator[Kit]:
    with ExitStack() as stack:
        yield Kit(tmp_path, cpu, stack)


MIXED = {0: page(1, 100), 1: page(2, SIZE), 2: page(3, SIZE // 2), 7: page(4, 0), 9: page(5, SIZE)}
STORED = (4 + 64 + 36 + 4 + 64) << 10  # header and rounding included; noise stays as it is


@pytest.mark.parametrize("name", ["zlib", "blosc2"])
def test_pages_come_back_and_fewer_bytes_are_moved(kit: Kit, name: str) -> None:
    if name != "zlib":
        pytest.importorskip(name, reason="the extra is not installed")
    kit.open(compression=name)
    assert kit.bytes_of(lambda: kit.write(MIXED)) == (STORED, 0)
    assert kit.bytes_of(lambda: kit.holds(MIXED)) == (0, STORED)
    assert kit.holds(MIXED)
    stats = kit.file.stats()
    assert (stats.writes, stats.reads) == (5, 10)  # neighbours are not joined
    assert stats.compression is not None
    assert (stats.compression.packed_pages, stats.compression.raw_pages) == (5, 2)
    assert stats.compression.stored_bytes == STORED


def test_without_compression_there_is_nothing_to_say_of_it(kit: Kit) -> None:
    kit.open(compression=None)
    assert kit.bytes_of(lambda: kit.write(MIXED)) == (5 * SIZE, 0)
    assert kit.file.stats().compression is None


def test_a_slot_is_as_long_as_what_it_holds_now(kit: Kit) -> None:
    for noise in (SIZE, 100, SIZE // 2, SIZE, 0):
        made = {3: page(noise % 251, noise)}
        assert not kit.write(made)
        assert kit.holds(made)


def test_slots_that_were_never_written_hold_zeros(kit: Kit) -> None:
    assert kit.holds({5: np.zeros(SIZE, np.uint8)})
    kit.write({5: page(1, 9), 15: page(2, 9)})
    kit.file.resize(5)
    kit.file.resize(SLOTS)
    assert kit.holds({5: np.zeros(SIZE, np.uint8), 15: np.zeros(SIZE, np.uint8)})


@pytest.mark.parametrize("size", [1, 4096, 5000, 8191, 3 * 4096])
def test_slots_of_any_size(kit: Kit, size: int) -> None:
    kit.open(size)
    pages = {slot: page(slot, size * slot // SLOTS, size) for slot in range(SLOTS)}
    assert not kit.write(pages)
    assert kit.holds(pages)


@pytest.mark.odirect
def test_packed_pages_bypass_the_page_cache_as_others_do(kit: Kit) -> None:
    assert kit.file.direct
    kit.write(MIXED)
    assert kit.holds(MIXED)


# --------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("byte", [0, 9, 31, 40, 20_000])
def test_damage_to_what_is_stored_fails_its_page_alone(kit: Kit, byte: int) -> None:
    kit.write(MIXED)
    kit.poke(2 * SIZE + byte)  # of a packed page
    kit.poke(9 * SIZE + byte)  # of one that is as it was
    failed = kit.read(*MIXED)
    assert {slot: error.errno for slot, error in failed.items()} == dict.fromkeys(
        (2, 9), errno.EBADMSG
    )
    assert kit.file.stats().corrupt == 2
    assert not kit.write(MIXED)
    assert kit.holds(MIXED)


def test_a_packed_page_of_another_slot_is_found_out(kit: Kit) -> None:
    """Its own checksum is right, and the slot's is not."""
    kit.write({1: page(1, 99), 2: page(2, 99)})
    with open(f"/proc/self/fd/{kit.file._fd}", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), os.pread(file.fileno(), 4096, SIZE), 2 * SIZE)
    assert list(kit.read(1, 2)) == [2]


def test_a_page_that_cannot_be_compressed_fails_alone(kit: Kit) -> None:
    refused = page(0, 0)
    refused[: len(Zlib.refuses)] = np.frombuffer(Zlib.refuses, np.uint8)
    failed = kit.write({3: page(3, 9), 4: refused, 5: page(5, 9)})
    assert {slot: error.errno for slot, error in failed.items()} == {4: errno.EIO}
    assert "it does not like this page" in str(failed[4])
    assert np.array_equal(kit.at(4), refused)
    assert kit.holds({3: page(3, 9), 5: page(5, 9)})
    assert list(kit.read(4)) == [4]


def test_a_page_that_looks_like_a_packed_one_comes_back(kit: Kit) -> None:
    kit.open(name="x.slots")
    packed = SlotPacker(compression("zlib"), SIZE).pack(page(1, 999), np.empty(SIZE, np.uint8))
    liar = page(7, SIZE)
    liar[: len(packed)] = packed
    assert not kit.write({3: page(3, 9), 4: liar}, [b"3", b"4"])
    assert kit.holds({3: page(3, 9), 4: liar})
    kit.open(name="x.slots")
    assert [slot for slot, _ in kit.file.restored] == [3, 4]
    assert kit.holds({3: page(3, 9), 4: liar})


def test_a_full_disk_is_told_as_without_compression(kit: Kit) -> None:
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC, times=None, when=lambda fd, n, at: at // SIZE == 4)
        failed = kit.write({3: page(3, 9), 4: page(4, 9)})
    assert isinstance(failed.pop(4), DiskOOMError)
    assert failed == {}
    assert list(kit.read(3, 4)) == [4]


def test_short_transfers_are_continued(kit: Kit) -> None:
    with FaultPlan() as plan:
        plan.short("pwritev", 4096, times=None)
        plan.short("preadv", 4096, times=None)
        assert not kit.write(MIXED)
        assert kit.holds(MIXED)


@pytest.mark.parametrize("name", ["zip", "", "Blosc2"])
def test_an_unknown_compression_leaves_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"compression: '{name}' is none of 'blosc2'"):
        SlotFile(str(tmp_path), SIZE, SLOTS, name="x.slots", compression=name)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------- that persist


def test_packed_pages_come_back_and_are_read_as_they_are_stored(kit: Kit) -> None:
    kit.open(name="x.slots")
    kit.write(MIXED, [b"%d" % slot for slot in MIXED])
    kit.open(name="x.slots")
    assert [slot for slot, _ in kit.file.restored] == list(MIXED)
    assert kit.bytes_of(lambda: kit.holds(MIXED)) == (0, STORED)
    changed = {0: MIXED[1], 1: MIXED[0]}
    assert kit.bytes_of(lambda: kit.write(changed)) == ((4 + 64) << 10, 0)
    assert kit.holds({**MIXED, **changed})


def test_another_compression_is_refused_and_nothing_changes(kit: Kit) -> None:
    kit.open(name="x.slots")
    kit.write(MIXED, [b"%d" % slot for slot in MIXED])
    with pytest.raises(ValueError, match=r"x\.slots\.index is of compression zlib, not of .* none"):
        kit.open(name="x.slots", compression=None)
    kit.open(name="x.slots")
    assert kit.holds(MIXED)
    kit.open(name="y.slots", compression=None)
    with pytest.raises(ValueError, match="compression none, not of compression zlib"):
        kit.open(name="y.slots")
