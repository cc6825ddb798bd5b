"""Address space that is backed piece by piece, and whose ranges are rounded to pages."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import HostOOMError, machine
from hostmem._sys import linux
from hostmem.huge_pages import pools
from hostmem.page_mode import PageMode, resolve_page_mode
from hostmem.reservation import Reservation
from hostmem.testing import FaultPlan

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    """Eight pages."""
    made = Reservation(8 * PAGE, 1, PageMode.SMALL, machine())
    yield made
    made.release()


def is_accessible(address: int) -> bool:
    result = np.zeros(1, np.uint8)
    there = np.array([result.__array_interface__["data"][0]], np.uint64)
    try:
        linux.copy(there, np.array([address], np.uint64), np.array([1], np.uint64))
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    return True


def pages_of(reservation: Reservation) -> NDArray[np.uint64]:
    end = reservation.address + reservation.nbytes
    return np.arange(reservation.address, end, reservation.page_size, dtype=np.uint64)


def accessible(reservation: Reservation) -> list[int]:
    """Numbers of the pages that may be touched."""
    pages = enumerate(pages_of(reservation).tolist())
    return [number for number, address in pages if is_accessible(address)]


def resident(reservation: Reservation) -> list[int]:
    """Numbers of the pages that hold memory."""
    found: list[int] = np.flatnonzero(linux.node_of_pages(pages_of(reservation)) >= 0).tolist()
    return found


# --------------------------------------------------------------------------------- the range


def test_nothing_of_it_can_be_touched_at_first(reservation: Reservation) -> None:
    assert accessible(reservation) == []
    assert resident(reservation) == []


@pytest.mark.parametrize(("nbytes", "pages"), [(1, 1), (PAGE, 1), (PAGE + 1, 2), (5 * PAGE, 5)])
def test_its_bytes_are_whole_pages(nbytes: int, pages: int) -> None:
    made = Reservation(nbytes, 1, PageMode.SMALL, machine())
    assert made.nbytes == pages * PAGE
    made.release()


@pytest.mark.parametrize(
    ("grain", "alignment"),
    [
        (1, PAGE),
        (3 * PAGE, PAGE),
        (12 * PAGE, 4 * PAGE),
        (32 << 20, 32 << 20),
        (33 << 20, 1 << 20),
        (1 << 30, 1 << 30),
    ],
)
def test_its_base_is_aligned_to_the_power_of_two_in_its_grain(grain: int, alignment: int) -> None:
    made = Reservation(PAGE, grain, PageMode.SMALL, machine())
    assert made.address % alignment == 0
    made.release()


def test_its_base_is_aligned_to_huge_pages_where_they_are_asked_for() -> None:
    here = dataclasses.replace(machine(), huge_page_size=1 << 29)
    made = Reservation(PAGE, 1, PageMode.HUGE, here)
    assert made.address % (1 << 29) == 0
    made.release()


def test_it_knows_larger_pages() -> None:
    here = dataclasses.replace(machine(), page_size=16 * PAGE)
    made = Reservation(17 * PAGE, 1, PageMode.SMALL, here)
    assert made.nbytes == 32 * PAGE
    assert made.address % (16 * PAGE) == 0
    made.allow(16 * PAGE, 16 * PAGE + 1)
    assert accessible(made) == [1]
    assert is_accessible(made.address + 31 * PAGE)
    made.release()


def test_what_holds_for_all_of_it_is_set_once_before_it_is_used() -> None:
    with FaultPlan() as plan:
        made = Reservation(8 * PAGE, 1, PageMode.HUGE, machine())
        whole = (made.address, 8 * PAGE)
        assert plan.log[1:] == [
            ("madvise(MADV_DONTFORK)", whole),
            ("madvise(MADV_HUGEPAGE)", whole),
        ]
        made.allow(0, 8 * PAGE)
        made.populate(0, 8 * PAGE)
        assert len(plan.calls("madvise(MADV_DONTFORK)")) == 1
        made.release()


@pytest.mark.parametrize("mode", [PageMode.HUGE, PageMode.AUTO], ids=str)
def test_huge_pages_are_asked_for(mode: PageMode) -> None:
    with FaultPlan() as plan:
        Reservation(PAGE, 1, mode, machine()).release()
        assert len(plan.calls("madvise(MADV_HUGEPAGE)")) == 1


def test_a_kernel_without_huge_pages_is_no_error() -> None:
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_NOHUGEPAGE)", errno.EINVAL)
        Reservation(PAGE, 1, PageMode.SMALL, machine()).release()


@pytest.mark.parametrize("call", ["madvise(MADV_DONTFORK)", "madvise(MADV_NOHUGEPAGE)"])
def test_a_refused_step_gives_the_address_space_back(call: str) -> None:
    with FaultPlan() as plan:
        plan.fail(call, errno.EACCES)
        with pytest.raises(OSError, match="madvise"):
            Reservation(8 * PAGE, 1, PageMode.SMALL, machine())
        ((_, nbytes),) = plan.calls("munmap")
    assert nbytes == 8 * PAGE


def test_no_address_space_is_no_memory() -> None:
    with pytest.raises(HostOOMError):
        Reservation(1 << 60, 1, PageMode.SMALL, machine())


def test_released_it_is_gone() -> None:
    made = Reservation(PAGE, 1, PageMode.SMALL, machine())
    made.allow(0, PAGE)
    made.release()
    assert not is_accessible(made.address)


def test_many_commits_leave_few_mappings(reservation: Reservation) -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    for number in range(8):
        reservation.allow(number * PAGE, (number + 1) * PAGE)
        reservation.populate(number * PAGE, (number + 1) * PAGE)
    assert mappings() <= before + 1  # the used part, and the rest


# -------------------------------------------------------------------------------- the rounding

# Slots of 3/4 page: slot n is bytes [n, n + 1) * 3/4 page. Slots 0 to 3 are pages 0 to 2.
SLOT = 3 * PAGE // 4


def test_access_is_rounded_outward(reservation: Reservation) -> None:
    reservation.allow(2 * SLOT, 3 * SLOT)  # from 1.5 to 2.25 pages
    assert accessible(reservation) == [1, 2]


def test_populating_is_rounded_outward(reservation: Reservation) -> None:
    reservation.allow(0, 8 * PAGE)
    reservation.populate(2 * SLOT, 3 * SLOT)
    assert resident(reservation) == [1, 2]


def test_giving_back_is_rounded_inward(reservation: Reservation) -> None:
    reservation.allow(0, 8 * PAGE)
    reservation.populate(0, 8 * PAGE)
    reservation.give_back(2 * SLOT, 6 * SLOT)  # from 1.5 to 4.5 pages
    assert resident(reservation) == accessible(reservation) == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("start", "end"), [(1, PAGE - 1), (PAGE // 2, PAGE), (1, 2 * PAGE - 1), (PAGE, PAGE)]
)
def test_no_whole_page_is_nothing_to_give_back(
    reservation: Reservation, start: int, end: int
) -> None:
    reservation.allow(0, 2 * PAGE)
    reservation.populate(0, 2 * PAGE)
    reservation.give_back(start, end)
    assert resident(reservation) == [0, 1]


def test_a_page_shared_with_a_neighbour_keeps_its_bytes(reservation: Reservation) -> None:
    reservation.allow(0, 2 * SLOT)
    reservation.populate(0, 2 * SLOT)
    mark = np.array([7], np.uint8)
    at = np.array([reservation.address + SLOT - 1], np.uint64)  # the last byte of slot 0
    one = np.ones(1, np.uint64)
    here = np.array([mark.__array_interface__["data"][0]], np.uint64)
    linux.copy(at, here, one)
    reservation.give_back(SLOT, 2 * SLOT)
    mark[:] = 0
    linux.copy(here, at, one)
    assert mark.tolist() == [7]


def test_what_was_given_back_comes_again(reservation: Reservation) -> None:
    for _ in range(2):
        reservation.allow(0, 2 * PAGE)
        reservation.populate(0, 2 * PAGE)
        assert resident(reservation) == [0, 1]
        reservation.give_back(0, 2 * PAGE)
        assert resident(reservation) == accessible(reservation) == []


@pytest.mark.parametrize("at", [0, 1, PAGE, 3 * PAGE + 5])
def test_an_empty_range_is_nothing(reservation: Reservation, at: int) -> None:
    with FaultPlan() as plan:
        reservation.give_back(at, at)
        if at % PAGE == 0:
            reservation.allow(at, at)
            reservation.populate(at, at)
        assert plan.log == []


def test_a_kernel_without_populating_has_its_pages_touched(reservation: Reservation) -> None:
    reservation.allow(0, 8 * PAGE)
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.EINVAL)
        reservation.populate(PAGE, 3 * PAGE)
    assert resident(reservation) == [1, 2]


def test_an_answer_of_the_kernel_is_passed_on_as_it_is(reservation: Reservation) -> None:
    reservation.allow(0, PAGE)
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.EFAULT)
        with pytest.raises(
            OSError, match=r"Bad address \(EFAULT\); a page cannot be had"
        ) as caught:
            reservation.populate(0, PAGE)
    assert caught.value.errno == errno.EFAULT
    assert not isinstance(caught.value, HostOOMError)


# ---------------------------------------------------------------------------- giving up huge pages


def flags_of(reservation: Reservation) -> list[tuple[int, set[str]]]:
    """Return (offset, flags) of each mapping inside a reservation; "hg" is huge, "nh" small."""
    found: list[tuple[int, set[str]]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            offset = int(first.partition("-")[0], 16) - reservation.address
        elif first == "VmFlags:" and 0 <= offset < reservation.nbytes:
            found.append((offset, set(line.split()[1:])))
    return found


def test_small_pages_from_an_offset_are_one_mapping_more() -> None:
    made = Reservation(64 * PAGE, 1, PageMode.HUGE, machine())
    made.allow(0, 32 * PAGE)
    made.use_small_pages_from(16 * PAGE)
    modes = [(offset // PAGE, "nh" in flags) for offset, flags in flags_of(made)]
    assert modes == [(0, False), (16, True), (32, True)]
    made.allow(32 * PAGE, 64 * PAGE)
    assert [offset // PAGE for offset, _ in flags_of(made)] == [0, 16]
    made.release()


@pytest.mark.parametrize(
    ("offset", "first"),
    [(0, 0), (1, PAGE), (PAGE, PAGE), (7 * PAGE, 7 * PAGE), (7 * PAGE + 1, None)],
)
def test_small_pages_begin_with_a_whole_page(
    reservation: Reservation, offset: int, first: int | None
) -> None:
    with FaultPlan() as plan:
        reservation.use_small_pages_from(offset)
        expected = [] if first is None else [(reservation.address + first, 8 * PAGE - first)]
        assert plan.calls("madvise(MADV_NOHUGEPAGE)") == expected


# -------------------------------------------------------------------------------------- hugetlb


def address_space() -> int:
    """Bytes this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


HUGETLB_SIZES = sorted(pools())
SIZE = HUGETLB_SIZES[0] if HUGETLB_SIZES else 0
needs_hugetlb = pytest.mark.skipif(not HUGETLB_SIZES, reason="a kernel without hugetlb")


@pytest.fixture
def hugetlb() -> PageMode:
    return resolve_page_mode(f"hugetlb-{SIZE}", machine())


@pytest.fixture
def of_four() -> Iterator[None]:
    """Four pages more than in use in the pool of the smallest size."""
    setting = Path(f"/sys/kernel/mm/hugepages/hugepages-{SIZE >> 10}kB/nr_hugepages")
    before = setting.read_text()
    pool = pools()[SIZE]
    wanted = pool.total - pool.free + 4
    try:
        setting.write_text(str(wanted))
    except OSError as error:
        pytest.skip(f"the hugetlb pool cannot be set: {error.strerror}")
    try:
        if pools()[SIZE].free != 4 or pools()[SIZE].surplus_limit:
            pytest.skip("the kernel finds no four huge pages, or would add to them")
        yield
    finally:
        setting.write_text(before)


@needs_hugetlb
def test_everything_is_rounded_to_the_pages_of_the_pool(hugetlb: PageMode) -> None:
    made = Reservation(SIZE + 1, 1, hugetlb, machine())
    assert (made.page_size, made.hugetlb_size, made.nbytes) == (SIZE, SIZE, 2 * SIZE)
    assert made.address % SIZE == 0
    made.release()


@needs_hugetlb
def test_a_pool_of_none_is_enough_to_reserve(hugetlb: PageMode) -> None:
    before, mapped = pools()[SIZE], address_space()
    made = Reservation(1 << 40, 64 * SIZE, hugetlb, machine())
    assert made.address % (64 * SIZE) == 0
    assert address_space() - mapped < (1 << 40) + SIZE  # none kept of what it was aligned in
    assert pools()[SIZE] == before  # nothing is set aside
    assert [flags & {"dc", "ht"} for _, flags in flags_of(made)] == [{"dc", "ht"}]
    made.release()


@needs_hugetlb
def test_no_advice_about_transparent_pages_is_given_on_a_pool(hugetlb: PageMode) -> None:
    with FaultPlan() as plan:
        Reservation(SIZE, 1, hugetlb, machine()).release()
        names = {name for name, _ in plan.log}
    assert names == {"mmap", "munmap", "madvise(MADV_DONTFORK)", "madvise(MADV_POPULATE_WRITE)"}


@needs_hugetlb
def test_pages_of_a_pool_are_taken_and_given_back(hugetlb: PageMode, of_four: None) -> None:
    made = Reservation(4 * SIZE, 1, hugetlb, machine())
    made.allow(0, 4 * SIZE)
    made.populate(0, SIZE + 1)
    assert pools()[SIZE].free == 2
    made.give_back(1, 2 * SIZE)  # the second page: the first is not all inside
    assert pools()[SIZE].free == 3
    assert [number for number, a in enumerate(pages_of(made).tolist()) if is_accessible(a)] == [
        0,
        2,
        3,
    ]
    made.allow(SIZE, 2 * SIZE)
    made.populate(SIZE, 4 * SIZE)
    assert pools()[SIZE].free == 0
    made.release()
    assert pools()[SIZE].free == 4


@needs_hugetlb
def test_a_short_pool_is_an_error_and_no_signal(hugetlb: PageMode, of_four: None) -> None:
    made = Reservation(8 * SIZE, 1, hugetlb, machine())
    made.allow(0, 8 * SIZE)
    made.populate(0, 2 * SIZE)
    expected = "the hugetlb pool of .* pages is short: 0 free, 6 wanted"
    with pytest.raises(HostOOMError, match=expected) as refused:
        made.populate(2 * SIZE, 8 * SIZE)
    assert (refused.value.offset, refused.value.nbytes) == (2 * SIZE, 6 * SIZE)
    made.give_back(2 * SIZE, 8 * SIZE)  # also the part that was had
    assert pools()[SIZE].free == 2
    made.release()


@needs_hugetlb
def test_another_answer_about_a_pool_is_passed_on(hugetlb: PageMode) -> None:
    made = Reservation(SIZE, 1, hugetlb, machine())
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.EIO)
        with pytest.raises(OSError, match="EIO"):
            made.populate(0, SIZE)
    made.release()


@needs_hugetlb
def test_a_pool_is_refused_where_its_pages_can_only_be_touched(hugetlb: PageMode) -> None:
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.EINVAL)
        with pytest.raises(ValueError, match=r"hugetlb needs MADV_POPULATE_WRITE \(Linux 5.14\)"):
            Reservation(SIZE, 1, hugetlb, machine())
        assert len(plan.calls("munmap")) == 1


@needs_hugetlb
def test_pages_of_a_pool_are_never_touched(hugetlb: PageMode) -> None:
    made = Reservation(SIZE, 1, hugetlb, machine())
    made.allow(0, SIZE)  # touching would be SIGBUS where the pool is empty
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.EINVAL)
        with pytest.raises(ValueError, match="MADV_POPULATE_WRITE"):
            made.populate(0, SIZE)
    made.release()


@needs_hugetlb
@pytest.mark.skipif(len(HUGETLB_SIZES) < 2, reason="one size of hugetlb pages")
def test_each_pool_is_its_own() -> None:
    size = HUGETLB_SIZES[-1]
    made = Reservation(1, 1, resolve_page_mode(f"hugetlb-{size}", machine()), machine())
    assert (made.page_size, made.nbytes) == (size, size)
    text = Path("/proc/self/smaps").read_text()
    mapping = text[text.index(f"\n{made.address:x}-") :]
    assert f"KernelPageSize: {size >> 10:>8} kB" in mapping[:200]
    made.release()


def test_it_says_what_it_is(reservation: Reservation) -> None:
    assert repr(reservation) == f"<Reservation {8 * PAGE // 1024} KiB at {reservation.address:#x}>"
