"""Compression of slots: smaller where that is possible, exact always, and refused when damaged."""

from __future__ import annotations

import errno
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.transfer.compression import Blosc2, CompressionStats, SlotPacker, compression

Bytes = NDArray[np.uint8]
SLOT = 64 << 10
GRAIN = 4096


class Zlib:
    """A compression of the standard library."""

    def compress(self, data: Bytes) -> bytes:
        return zlib.compress(data.tobytes(), 1)

    def decompress(self, data: Bytes, out: Bytes) -> None:
        out[:] = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8)


@pytest.fixture(params=["zlib", "blosc2"])
def packer(request: pytest.FixtureRequest) -> SlotPacker:
    if request.param == "zlib":
        return SlotPacker(Zlib(), SLOT)
    pytest.importorskip("blosc2", reason="the extra is not installed")
    return SlotPacker(compression("blosc2"), SLOT)


def numbers(seed: int = 0, size: int = SLOT) -> Bytes:
    """Make what keys and values look like: normal, in bfloat16."""
    values = np.random.default_rng(seed).standard_normal(size // 2).astype(np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)


def noise(size: int = SLOT) -> Bytes:
    return np.frombuffer(np.random.default_rng(1).bytes(size), np.uint8)


def room(size: int = SLOT) -> Bytes:
    return np.full(size, 0xAB, np.uint8)  # what was there before


def unpacked(packer: SlotPacker, stored: Bytes, size: int = SLOT) -> Bytes:
    page = np.empty(size, np.uint8)
    packer.unpack(stored, page)
    return page


@pytest.mark.parametrize("page", [numbers(), np.zeros(SLOT, np.uint8)], ids=["numbers", "zeros"])
def test_a_page_gets_smaller_by_whole_blocks_and_comes_back(
    packer: SlotPacker, page: Bytes
) -> None:
    before, memory = page.copy(), room()
    stored = packer.pack(page, memory)
    assert len(stored) < SLOT
    assert len(stored) % GRAIN == 0
    assert np.shares_memory(stored, memory)
    assert np.array_equal(unpacked(packer, stored), page)
    assert np.array_equal(page, before)


def test_nothing_of_what_was_there_before_is_stored(packer: SlotPacker) -> None:
    stored = packer.pack(np.zeros(SLOT, np.uint8), room())
    assert not (stored[-1000:] == 0xAB).any()


def test_noise_is_stored_as_it_is(packer: SlotPacker) -> None:
    page = noise()
    stored = packer.pack(page, room())
    assert stored is page
    assert np.array_equal(unpacked(packer, stored), page)


def test_a_page_that_shrinks_by_less_than_a_block_is_stored_as_it_is() -> None:
    class Hardly(Zlib):
        def compress(self, data: Bytes) -> bytes:
            return super().compress(data).ljust(SLOT - GRAIN - 31, b"\0")  # and a header of 32

    page = np.zeros(SLOT, np.uint8)
    assert SlotPacker(Hardly(), SLOT).pack(page, room()) is page


@pytest.mark.parametrize("size", [1, 31, 32, 100, GRAIN])
def test_a_slot_of_one_block_is_stored_as_it_is(size: int) -> None:
    packer, page = SlotPacker(Zlib(), size), np.zeros(size, np.uint8)
    assert packer.pack(page, room(size)) is page
    assert np.array_equal(unpacked(packer, page, size), page)


def test_slots_of_odd_sizes_pack(packer: SlotPacker) -> None:
    odd = SlotPacker(packer._compression, 10_001)
    page = np.arange(10_001).astype(np.uint8)
    stored = odd.pack(page, room(10_001))
    assert len(stored) in (GRAIN, 2 * GRAIN)
    assert np.array_equal(unpacked(odd, stored, 10_001), page)


@given(st.binary(min_size=0, max_size=300), st.integers(0, 3 * GRAIN))
def test_whatever_is_packed_comes_back(start: bytes, zeros: int) -> None:
    page = np.frombuffer(start + bytes(zeros) + bytes(noise(5000)), np.uint8)
    packer = SlotPacker(Zlib(), len(page))
    stored = packer.pack(page, room(len(page)))
    assert len(stored) <= len(page)
    assert np.array_equal(unpacked(packer, stored, len(page)), page)


# -------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("at", [8, 12, 16, 24, 28, 32, 1000, 4000])
def test_a_changed_byte_is_found(packer: SlotPacker, at: int) -> None:
    stored = packer.pack(numbers(), room()).copy()
    stored[at] ^= 1
    with pytest.raises(OSError, match="no packed page") as told:
        unpacked(packer, stored)
    assert told.value.errno == errno.EBADMSG


def test_what_is_cut_off_is_found(packer: SlotPacker) -> None:
    stored = packer.pack(numbers(), room())
    for length in (0, 10, 32, GRAIN, len(stored) - GRAIN):
        with pytest.raises(OSError, match="no packed page"):
            unpacked(packer, stored[:length])


def test_a_page_of_another_size_is_refused(packer: SlotPacker) -> None:
    stored = packer.pack(numbers(), room())
    with pytest.raises(OSError, match=f"of a page of {SLOT} bytes, not of {2 * SLOT}"):
        unpacked(SlotPacker(Zlib(), 2 * SLOT), stored, 2 * SLOT)


def test_what_another_compression_made_is_refused() -> None:
    class Other(Zlib):
        def compress(self, data: Bytes) -> bytes:
            return b"something else"

    stored = SlotPacker(Other(), SLOT).pack(numbers(), room())
    with pytest.raises(OSError, match="no packed page") as told:
        unpacked(SlotPacker(Zlib(), SLOT), stored)
    assert isinstance(told.value.__cause__, zlib.error)


def test_a_page_that_looks_like_a_packed_one_comes_back() -> None:
    """It is as long as a slot, which no packed page is."""

    class Never(Zlib):
        def compress(self, data: Bytes) -> bytes:
            return data.tobytes()

    page = noise().copy()
    stored = SlotPacker(Zlib(), SLOT).pack(numbers(), room())
    page[: len(stored)] = stored
    packer = SlotPacker(Never(), SLOT)
    assert packer.pack(page, room()) is page
    assert np.array_equal(unpacked(packer, page), page)


# -------------------------------------------------------------------------------------- figures


def test_ratio_and_rates_are_told() -> None:
    packer = SlotPacker(Zlib(), SLOT)
    assert packer.stats() == CompressionStats()
    assert (packer.stats().ratio, packer.stats().packing_rate) == (1.0, 0.0)
    assert packer.stats().unpacking_rate == 0.0
    stored = packer.pack(np.zeros(SLOT, np.uint8), room())
    before = packer.stats()
    assert len(stored) == GRAIN
    assert (before.packed_pages, before.raw_pages, before.unpacked_bytes) == (1, 0, 0)
    assert before.ratio == SLOT / GRAIN
    packer.pack(noise(), room())
    unpacked(packer, stored)
    now = packer.stats()
    assert (now.packed_pages, now.raw_pages) == (2, 1)
    assert (now.packed_bytes, now.stored_bytes) == (2 * SLOT, SLOT + GRAIN)
    assert now.unpacked_bytes == SLOT
    assert now.packing_rate == now.packed_bytes / now.packing_seconds > 0
    assert now.unpacking_rate == SLOT / now.unpacking_seconds > 0
    assert before.packed_pages == 1  # a snapshot


def test_pages_that_were_not_unpacked_are_not_counted() -> None:
    packer = SlotPacker(Zlib(), SLOT)
    with pytest.raises(OSError, match="no packed page"):
        unpacked(packer, np.zeros(GRAIN, np.uint8))
    assert packer.stats() == CompressionStats()


def test_threads_share_a_packer(packer: SlotPacker) -> None:
    def there_and_back(seed: int) -> bool:
        page = numbers(seed)
        return np.array_equal(unpacked(packer, packer.pack(page, room())), page)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, range(40)))
    assert packer.stats().packed_pages == 40


# ----------------------------------------------------------------------------------- by name


def test_blosc2_gains_what_is_documented_on_bfloat16() -> None:
    pytest.importorskip("blosc2", reason="the extra is not installed")
    packer = SlotPacker(Blosc2(), 1 << 20)
    packer.pack(numbers(size=1 << 20), room(1 << 20))
    assert packer.stats().ratio > 1.4


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="compression: 'lzma' is none of 'blosc2'"):
        compression("lzma")


def test_a_compression_whose_module_is_missing_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing: Any = None  # as for a module that is known not to be there
    monkeypatch.setitem(sys.modules, "blosc2", missing)
    with pytest.raises(ValueError, match=r"pip install hostmem\[blosc2\]"):
        compression("blosc2")
