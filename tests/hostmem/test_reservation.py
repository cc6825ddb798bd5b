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
from hostmem.page_mode import PageMode
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


def test_it_says_what_it_is(reservation: Reservation) -> None:
    assert repr(reservation) == f"<Reservation {8 * PAGE // 1024} KiB at {reservation.address:#x}>"
