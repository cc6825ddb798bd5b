"""Slots that fail: alone, with the truth about why, and never with bytes that are not theirs."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostmem import CpuDevice, DiskOOMError, HostEvent, OutOfPagesError, StaticHostMem
from hostmem.testing import FaultPlan
from kvtier import BlockCache, Page, TierStorage
from kvtier.transfer import copier
from kvtier.transfer.checksums import Checksums
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.memory import DiskPool
from kvtier.transfer.page_events import BatchEvent, PageEvents
from kvtier.transfer.slot_io import SlotIOStats, SlotReadError

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

Bytes = NDArray[np.uint8]
SIZE = 4096
SLOTS = 16
PAGE = 256 << 10  # of storages


class Kit:
    """A file of slots, and memory as large: slot i's bytes go to, and come from, place i."""

    def __init__(self, folder: Path, cpu: CpuDevice, stack: ExitStack) -> None:
        self.file = SlotFile(str(folder), SIZE, SLOTS)
        stack.callback(self.file.close)
        self.memory = StaticHostMem(SLOTS * SIZE, device=cpu)
        stack.callback(self.memory.close)

    @property
    def pages(self) -> Bytes:
        return self.memory.view(0, SLOTS * SIZE).reshape(SLOTS, SIZE)

    def addresses(self, slots: list[int], shift: int = 0) -> NDArray[np.uint64]:
        at = np.array(slots, np.uint64) * np.uint64(SIZE) + np.uint64(shift)
        return np.uint64(self.memory.address) + at

    def _move(
        self, transfer: Callable[..., PageEvents], slots: list[int], after: Dependencies
    ) -> dict[int, BaseException]:
        """Move slots; give those that failed."""
        event = transfer(np.array(slots, np.int32), self.addresses(slots), after)
        event.wait_finished()
        return {slots[n]: error for n, error in event.failures.items()}

    def write(
        self, *slots: int, version: int = 0, after: Dependencies | None = None
    ) -> dict[int, BaseException]:
        for slot in slots:
            self.pages[slot] = content(slot, version)
        return self._move(self.file.write, list(slots), after or Dependencies())

    def read(self, *slots: int) -> dict[int, BaseException]:
        self.pages[list(slots)] = 0xEE
        return self._move(self.file.read, list(slots), Dependencies())

    def troubles(self) -> SlotIOStats:
        """Say what went wrong, without what went well."""
        return replace(self.file.stats(), writes=0, bytes_written=0, reads=0, bytes_read=0)

    def holds(self, slot: int, version: int = 0) -> bool:
        return bool(np.array_equal(self.pages[slot], content(slot, version)))

    def poke(self, at: int, data: bytes) -> None:
        """Write into the file behind everybody's back."""
        with open(f"/proc/self/fd/{self.file._fd}", "r+b", buffering=0) as raw:
            os.pwrite(raw.fileno(), data, at)

    def peek(self, at: int, n: int) -> bytes:
        with open(f"/proc/self/fd/{self.file._fd}", "rb", buffering=0) as raw:
            return os.pread(raw.fileno(), n, at)


def content(slot: int, version: int = 0) -> Bytes:
    words = np.arange(SIZE // 8, dtype=np.uint64) + np.uint64(slot * 1_000_003 + version * 77_777)
    return (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)


def covering(*slots: int, size: int = SIZE) -> Callable[..., bool]:
    """Choose the calls that touch one of the slots; a call may begin within one."""
    return lambda fd, n, at: any(at // size <= slot < at // size + n for slot in slots)


@pytest.fixture
def kit(tmp_path: Path, cpu: CpuDevice) -> Iterator[Kit]:
    with ExitStack() as stack:
        yield Kit(tmp_path, cpu, stack)


# -------------------------------------------------------------------------------- checksums


@pytest.mark.parametrize(("at", "bit"), [(0, 0), (1234, 4), (SIZE - 1, 7)])
def test_a_flipped_bit_fails_its_slot_and_no_other(
    kit: Kit, caplog: pytest.LogCaptureFixture, at: int, bit: int
) -> None:
    kit.write(*range(8))
    place = 5 * SIZE + at
    kit.poke(place, bytes([kit.peek(place, 1)[0] ^ 1 << bit]))
    with caplog.at_level(logging.ERROR, "kvtier"):
        failed = kit.read(*range(8))
    assert list(failed) == [5]
    assert isinstance(failed[5], SlotReadError)
    assert failed[5].errno == errno.EBADMSG
    assert f"slot 5 at file offset {5 * SIZE} of a file in {kit.file.folder}" in str(failed[5])
    assert all(kit.holds(slot) for slot in range(8) if slot != 5)
    assert kit.troubles() == SlotIOStats(read_failures=1, corrupt=1)
    assert f"1 of 8 slots in {kit.file.folder} were not read, 1 of them corrupt" in caplog.text
    # Written again it is as good as new.
    assert not kit.write(5, version=1)
    assert not kit.read(5)
    assert kit.holds(5, version=1)


def test_two_slots_that_changed_places_fail(kit: Kit) -> None:
    kit.write(*range(4))
    first, second = kit.peek(SIZE, SIZE), kit.peek(2 * SIZE, SIZE)
    kit.poke(SIZE, second + first)
    assert sorted(kit.read(*range(4))) == [1, 2]


def test_a_write_that_never_reached_the_disk_fails_the_next_read(kit: Kit) -> None:
    kit.write(3)
    old = kit.peek(3 * SIZE, SIZE)
    kit.write(3, version=1)
    kit.poke(3 * SIZE, old)
    assert list(kit.read(3)) == [3]


def test_a_slot_that_was_never_written_holds_zeros_and_is_known_to(kit: Kit) -> None:
    assert not kit.read(1, 2)
    assert not kit.pages[1:3].any()
    kit.poke(2 * SIZE, b"x")
    assert list(kit.read(1, 2)) == [2]


def test_slots_are_known_through_a_resize(kit: Kit) -> None:
    kit.write(0, 9)
    kit.file.resize(10)
    kit.file.resize(SLOTS)
    assert not kit.read(0, 9, 12)
    assert kit.holds(0)
    assert kit.holds(9)


def test_a_slot_that_was_cut_off_and_grew_again_holds_zeros(kit: Kit) -> None:
    kit.write(12)
    kit.file.resize(10)
    kit.file.resize(SLOTS)
    assert not kit.read(12)
    assert not kit.pages[12].any()


def test_what_slots_hold_is_known_by_place() -> None:
    sums = Checksums(512)
    sums.resize(4)
    sums.note(1, np.array([7, 8], np.uint32))
    assert sums.differing(1, np.array([7, 9], np.uint32)).tolist() == [1]
    sums.resize(2)
    sums.resize(3)
    assert sums.differing(1, np.array([7, 8], np.uint32)).tolist() == [1]


# ------------------------------------------------------------------------- errors, slot by slot


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_slot_that_cannot_be_written_fails_alone_in_its_request(kit: Kit, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("pwritev", number, times=None, when=covering(3))
        failed = kit.write(*range(8))
    assert list(failed) == [3]
    assert isinstance(failed[3], OSError if number == errno.EIO else DiskOOMError)
    assert kit.holds(3)  # the memory is as it was
    assert kit.troubles() == SlotIOStats(write_failures=1)
    # Nor does the slot answer with what it held before.
    assert list(kit.read(*range(8))) == [] or not kit.holds(3)


def test_a_slot_that_cannot_be_read_fails_alone_in_its_request(kit: Kit) -> None:
    kit.write(*range(8))
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None, when=covering(2, 6))
        failed = kit.read(*range(8))
    assert list(failed) == [2, 6]
    assert {error.errno for error in failed.values()} == {errno.EIO}  # type: ignore[attr-defined]
    assert all(kit.holds(slot) for slot in (0, 1, 3, 4, 5, 7))
    assert kit.troubles() == SlotIOStats(read_failures=2)


def test_an_error_that_does_not_come_again_costs_nothing(kit: Kit) -> None:
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO).fail("preadv", errno.EIO)
        assert not kit.write(*range(8))
        assert not kit.read(*range(8))
    assert all(kit.holds(slot) for slot in range(8))
    assert kit.troubles() == SlotIOStats()


def test_what_was_moved_is_counted_in_requests_and_bytes(kit: Kit) -> None:
    kit.write(0, 1, 2, 5, 7, 8)
    kit.read(1, 2)
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=covering(11))
        kit.write(10, 11)
    # Runs 0-2, 5, 7-8, and slot 10 alone, after the request for both failed.
    assert kit.file.stats() == SlotIOStats(
        writes=4, bytes_written=7 * SIZE, reads=1, bytes_read=2 * SIZE, write_failures=1
    )


def test_a_full_disk_says_where_how_much_and_what_is_free(kit: Kit) -> None:
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC)
        error = kit.write(3)[3]
    assert isinstance(error, DiskOOMError)
    assert (error.path, error.nbytes) == (kit.file.folder, SIZE)
    assert error.free == pytest.approx(
        os.statvfs(kit.file.folder).f_bavail * os.statvfs(kit.file.folder).f_frsize, rel=0.5
    )
    assert isinstance(error.__cause__, OSError)


def test_a_slot_written_in_part_is_neither_old_nor_new(tmp_path: Path, cpu: CpuDevice) -> None:
    """The kernel stops in the middle of a slot, and then for good."""
    with ExitStack() as stack:
        file = SlotFile(str(tmp_path), 2 * SIZE, 4)
        stack.callback(file.close)
        memory = StaticHostMem(8 * SIZE, device=cpu)
        stack.callback(memory.close)
        page, slot = memory.view(0, 2 * SIZE), np.array([1], np.int32)
        at = np.array([memory.address], np.uint64)
        page[:] = 1
        file.write(slot, at, Dependencies()).synchronize()
        page[:] = 2
        with FaultPlan() as plan:
            plan.short("pwritev", SIZE).fail("pwritev", errno.EIO, at=2)
            with pytest.raises(OSError, match="pwritev"):
                file.write(slot, at, Dependencies()).synchronize()
        with pytest.raises(SlotReadError, match="is corrupt"):
            file.read(slot, at, Dependencies()).synchronize()
        del page


def test_a_file_that_somebody_cut_gives_what_is_left(kit: Kit) -> None:
    kit.write(*range(8))
    os.truncate(f"/proc/self/fd/{kit.file._fd}", 5 * SIZE + 512)
    failed = kit.read(*range(8))
    assert list(failed) == [5, 6, 7]
    assert all(isinstance(error, SlotReadError) for error in failed.values())
    assert all(kit.holds(slot) for slot in range(5))
    # What is written then makes the file longer; the hole before it holds nothing of ours.
    assert not kit.write(7, version=1)
    assert list(kit.read(*range(8))) == [5, 6]
    assert kit.holds(7, version=1)


@pytest.mark.odirect
def test_memory_that_direct_io_does_not_take_fails_its_slot_alone(kit: Kit) -> None:
    kit.write(*range(4))
    addresses = kit.addresses([0, 1, 2, 3])
    addresses[2] = kit.addresses([8], shift=8)[0]
    event = kit.file.read(np.arange(4, dtype=np.int32), addresses, Dependencies())
    event.wait_finished()
    assert {n: e.errno for n, e in event.failures.items()} == {  # type: ignore[attr-defined]
        2: errno.EINVAL
    }
    assert all(kit.holds(slot) for slot in (0, 1, 3))


def test_pages_whose_bytes_never_came_are_not_written_and_the_others_are(kit: Kit) -> None:
    gone = OSError(errno.EIO, "the copy failed")
    data = BatchEvent(1)
    data.part_done({1: gone})
    kit.write(*range(4), version=1)
    failed = kit.write(0, 1, 2, 3, version=2, after=Dependencies((data,)))
    assert failed == {1: gone}
    assert not kit.read(*range(4))
    assert [kit.holds(n, 1) for n in range(4)] == [False, True, False, False]
    assert [kit.holds(n, 2) for n in range(4)] == [True, False, True, True]
    assert kit.troubles() == SlotIOStats()  # no fault of the disk


def test_a_disk_that_gets_full_keeps_what_fits(tmp_path: Path, cpu: CpuDevice) -> None:
    """A real file system of 64 KiB, on which no room can be set aside."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        with ExitStack() as stack:
            with FaultPlan() as plan:
                plan.fail("fallocate", errno.EOPNOTSUPP)
                kit = Kit(tmp_path, cpu, stack)
            failed = kit.write(*range(SLOTS))
            assert len(failed) == SLOTS - 32768 // SIZE
            assert all(isinstance(error, DiskOOMError) for error in failed.values())
            assert {error.free for error in failed.values()} == {0}  # type: ignore[attr-defined]
            assert set(kit.read(*range(SLOTS))) == set(failed)
            assert all(kit.holds(slot) for slot in range(SLOTS) if slot not in failed)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# ------------------------------------------------------------------------ whatever happens


_FAULT = st.tuples(
    st.sampled_from(["preadv", "pwritev"]),
    st.sampled_from([errno.EIO, errno.ENOSPC, 0]),
    st.integers(0, SLOTS - 1),
)
_STEP: st.SearchStrategy[tuple[str, set[int], Any]] = st.one_of(
    st.tuples(st.just("write"), st.sets(st.integers(0, SLOTS - 1), min_size=1), st.none()),
    st.tuples(st.just("read"), st.sets(st.integers(0, SLOTS - 1), min_size=1), st.none()),
    st.tuples(st.just("flip"), st.just(set()), st.integers(0, SLOTS * SIZE - 1)),
    st.tuples(st.just("cut"), st.just(set()), st.integers(0, SLOTS * SIZE)),
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(_STEP, st.lists(_FAULT, max_size=3)), max_size=12))
def test_no_read_succeeds_with_bytes_that_were_not_written_last(
    tmp_path: Path, cpu: CpuDevice, steps: list[tuple[Any, list[tuple[str, int, int]]]]
) -> None:
    with ExitStack() as stack:
        kit = Kit(tmp_path, cpu, stack)
        last = dict.fromkeys(range(SLOTS), 0)  # the version that was to be in a slot
        sound = set(range(SLOTS))  # what nobody damaged since
        for version, ((what, slots, at), faults) in enumerate(steps, 1):
            order = [slot * 7 % SLOTS for slot in slots]  # not as they are in the file
            bad: dict[str, set[int]] = {"preadv": set(), "pwritev": set()}
            with FaultPlan() as plan:
                for name, number, slot in faults:
                    if number:
                        plan.fail(name, number, times=None, when=covering(slot))
                        bad[name].add(slot)
                    else:
                        plan.short(name, 512, when=covering(slot))
                if what == "write":
                    failed = set(kit.write(*order, version=version))
                    assert failed <= bad["pwritev"]
                    assert all(kit.holds(slot, version) for slot in order)
                    last |= dict.fromkeys(order, version)
                    sound |= set(order) - failed
                    sound -= failed
                elif what == "read":
                    failed = set(kit.read(*order))
                    assert failed & sound <= bad["preadv"]
                    for slot in set(order) - failed:
                        wrote = last[slot]
                        assert kit.holds(slot, wrote) if wrote else not kit.pages[slot].any()
                elif what == "flip":
                    kit.poke(at, bytes([(kit.peek(at, 1) or b"\0")[0] ^ 1]))
                    sound.discard(at // SIZE)
                elif at < os.fstat(kit.file._fd).st_size:
                    os.truncate(f"/proc/self/fd/{kit.file._fd}", at)
                    sound -= set(range(at // SIZE, SLOTS))


# --------------------------------------------------------------------- what it means for pages


def test_one_slot_that_fails_costs_one_page_of_a_batch(tiers: Tiers) -> None:
    storage = tiers.build(8, 0, 16, page=PAGE)
    pages = tiers.new(storage, *range(8))
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=covering(1, size=PAGE))
        tiers.new(storage, *range(8, 16))
        for page in pages:
            page.ready.wait_finished()
        assert plan.calls("pwritev")[0][1] == 8  # one request
    assert [page.lost for page in pages] == [page.slot == 1 for page in pages]
    rest = [page for page in pages if not page.lost]
    assert all(tiers.intact(storage, page) for page in rest)
    storage.lease(rest)
    storage.onboard(rest)
    assert all(tiers.intact(storage, page) for page in rest)
    storage._check()


def test_the_pages_of_a_batch_are_lost_further_on_only_where_they_failed(tiers: Tiers) -> None:
    """A read of which one page fails is followed by the move of all of them."""
    storage = tiers.build(8, 0, 16, page=PAGE)
    pages = tiers.new(storage, *range(8))
    tiers.new(storage, *range(8, 16))
    storage.lease(pages)
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None, when=covering(2, size=PAGE))
        held = plan.hold("preadv")
        storage.onboard(pages)
        storage.release(pages)
        tiers_new = storage.new_pages(range(16, 24), 0)  # and down again, before they are there
        held.release()
        for page in (*pages, *tiers_new):
            page.ready.wait_finished()
    assert sum(page.lost for page in pages) == 1
    assert all(tiers.intact(storage, page) for page in pages if not page.lost)
    storage._check()


def test_a_corrupt_page_is_a_miss_and_the_rest_of_its_batch_are_hits(tiers: Tiers) -> None:
    storage = tiers.build(4, 0, 8)
    cache: BlockCache[int] = BlockCache(storage)
    for key in range(4):
        with cache.reserve([key]) as fresh:
            fresh.wait()
            fresh.commit()
    with cache.reserve([4, 5, 6, 7]) as fresh:
        fresh.wait()
        fresh.commit()
    (pool,) = storage.levels[1].groups[0].memory.pools
    assert isinstance(pool, DiskPool)
    (block,) = cache._index.pages(1)
    with open(f"/proc/self/fd/{pool.file._fd}", "r+b", buffering=0) as raw:
        os.pwrite(raw.fileno(), b"\x55" * 8, block.slot * pool.slot_size)
    with cache.acquire([0, 1, 2, 3]) as lease, pytest.raises(SlotReadError, match="is corrupt"):
        lease.wait()
    assert [key in cache for key in range(4)] == [True, False, True, True]
    with cache.acquire([2, 3]) as lease:
        lease.wait()
        assert len(lease) == 2
    assert cache.lost == 1
    storage._check()


@pytest.mark.parametrize("sizes", [(16, 0, 32), (8, 16, 32)], ids=["hot", "host"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_shrink_whose_pages_cannot_be_written_leaves_them_where_they_were(
    tiers: Tiers, sizes: tuple[int, int, int], number: int
) -> None:
    storage, level = tiers.build(*sizes, page=PAGE), 1 if sizes[1] else 0
    pages = tiers.new(storage, *range(8))
    for first in range(8, sum(sizes[:2]), 8):
        pages += tiers.new(storage, *range(first, first + 8))
    for page in pages:
        page.ready.synchronize()
    before = {page.owner: (page.level, page.slot) for page in pages}
    with FaultPlan() as plan:
        plan.fail("pwritev", number, times=None, when=covering(3, 5, size=PAGE))
        with pytest.raises(OSError if number == errno.EIO else DiskOOMError):
            storage.adjust_cache_level(level, "2MiB")
    assert storage.levels[level].groups[0].slots.n_slots == 16
    storage._check()
    gone = [page for page in pages if (page.level, page.slot) != before[page.owner]]
    assert len(gone) == 6  # of eight
    assert all(storage.levels[page.level].name == "disk" for page in gone)
    assert all(tiers.intact(storage, page) for page in pages)
    assert storage.stats().levels["disk"].used == 6
    in_level = [page.owner for page in pages if page.level == level]
    assert set(tiers.order(storage)[level]) == set(in_level)
    assert storage.levels[level].groups[0].slots.in_use == len(in_level)
    storage.adjust_cache_level(level, "2MiB")
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_kept_pages_that_cannot_be_written_are_not_lost_to_a_shrink(tiers: Tiers) -> None:
    storage = tiers.build(16, 0, 16, page=PAGE)
    pages = tiers.new(storage, *range(16))
    storage.keep(pages)
    storage.touch(pages[:8])  # the others, whose slots would go, leave first
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=covering(3, 5, size=PAGE))
        with pytest.raises(OutOfPagesError, match=r"kept pages .* could not be moved"):
            storage.adjust_cache_level(0, "2MiB")
    assert storage.levels[0].groups[0].slots.limit == 16
    assert sum(page.level for page in pages) == 6  # of eight
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()
    storage.adjust_cache_level(0, "2MiB")
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_a_page_that_was_lost_before_does_not_stand_against_a_shrink(tiers: Tiers) -> None:
    storage = tiers.build(16, 0, 16, page=PAGE)
    pages = tiers.new(storage, *range(16))
    lost = next(page for page in pages if page.slot == 12)
    storage.discard([page for page in pages if page.slot < 8])
    bad = HostEvent()
    bad.set(OSError(errno.EIO, "the kernel failed"))
    lost.ready = bad
    storage.adjust_cache_level(0, "2MiB")
    rest = [page for page in pages if page.slot >= 8 and page is not lost]
    assert all(tiers.intact(storage, page) for page in rest)
    assert lost.lost
    storage._check()


@pytest.fixture
def crowded(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> tuple[TierStorage, list[Page]]:
    """Seven free slots on a disk before the last eight; a staging buffer for two pages."""
    monkeypatch.setattr(copier, "_STAGING_BYTES", 2 * PAGE)
    storage = tiers.build(8, 0, 16, page=PAGE)
    pages = [tiers.new(storage, key)[0] for key in range(24)]
    for page in pages:
        page.ready.synchronize()
    below = sorted((page for page in pages if page.level == 1), key=lambda page: page.slot)
    storage.lease(below[:7])
    storage.discard(below[:8])
    return storage, below[8:15]


def test_a_corrupt_page_does_not_stand_against_a_shrink_of_the_disk(
    tiers: Tiers, crowded: tuple[TierStorage, list[Page]]
) -> None:
    storage, pages = crowded
    (pool,) = storage.levels[1].groups[0].memory.pools
    assert isinstance(pool, DiskPool)
    bad = pages[5]  # not in the first part that the staging buffer takes
    with open(f"/proc/self/fd/{pool.file._fd}", "r+b", buffering=0) as raw:
        os.pwrite(raw.fileno(), b"\x55" * 8, bad.slot * PAGE)
    storage.adjust_cache_level(1, "2MiB")
    assert [page.lost for page in pages] == [page is bad for page in pages]
    assert all(tiers.intact(storage, page) for page in pages if page is not bad)
    storage._check()


def test_a_page_that_cannot_be_read_does_not_stand_against_a_shrink_of_the_disk(
    tiers: Tiers, crowded: tuple[TierStorage, list[Page]]
) -> None:
    storage, pages = crowded
    bad = pages[5]
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None, when=covering(bad.slot, size=PAGE))
        storage.adjust_cache_level(1, "2MiB")
    assert [page.lost for page in pages] == [page is bad for page in pages]
    assert all(tiers.intact(storage, page) for page in pages if page is not bad)
    storage._check()


def test_a_page_that_cannot_be_moved_within_the_disk_stays_in_its_slot(
    tiers: Tiers, crowded: tuple[TierStorage, list[Page]]
) -> None:
    storage, pages = crowded
    before = {page.owner: page.slot for page in pages}
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=covering(3, size=PAGE))
        with pytest.raises(OSError, match="pwritev"):
            storage.adjust_cache_level(1, "2MiB")
    assert storage.levels[1].groups[0].slots.n_slots == 16
    assert sum(page.slot == before[page.owner] for page in pages) == 1
    assert all(tiers.intact(storage, page) for page in pages)
    storage.adjust_cache_level(1, "2MiB")
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()
