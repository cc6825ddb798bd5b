"""Whether a fill may take more, and in which pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostmem import HostMem, HostOOMError, machine
from hostmem._sys.linux import Policy
from hostmem.admission import Admission
from hostmem.headroom import Headroom, HeadroomGauge, Limit
from hostmem.numa import PlacementRequest
from hostmem.page_mode import PageJudge, PageMode
from hostmem.pressure import PressureGauge
from hostmem.reservation import Reservation
from hostmem.testing import FaultPlan
from tests.roots import write

MIB = 1 << 20
GIB = 1 << 30
ANYWHERE = PlacementRequest(Policy.DEFAULT, (), strict=False)
HUGE = machine().huge_page_size or 2 * MIB


class Gauge(HeadroomGauge):
    """Shows what the test says."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self) -> Headroom:
        return Headroom((Limit("memory.max of /job", self.nbytes, 0, exact=True),))


class Pressure(PressureGauge):
    """Says what the test says."""

    def __init__(self) -> None:
        self.why: str | None = None

    def pressed(self) -> str | None:
        return self.why


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    made = Reservation(64 * MIB, 32 * MIB, PageMode.SMALL, machine())
    yield made
    made.release()


def admission(reservation: Reservation, judge: PageJudge | None = None, **gauges: Any) -> Admission:
    made = Admission(reservation, ANYWHERE, "small" if judge is None else "auto", judge)
    vars(made).update(gauges)  # in place of the gauges that it would make
    return made


# ----------------------------------------------------------------------------- how much


@pytest.mark.parametrize(
    ("available", "granted"),
    [
        (64 * GIB, GIB),  # what is wanted
        (8 * GIB, 512 * MIB),  # a sixteenth of what there is
        (64 * MIB, 32 * MIB),  # no less than the least
        (32 * MIB, 32 * MIB),
    ],
)
def test_a_grant_is_a_part_of_what_there_is(
    reservation: Reservation, available: int, granted: int
) -> None:
    door = admission(reservation, _headroom=Gauge(available))
    assert door.grant(0, 32 * MIB, GIB) == granted


def test_what_does_not_fit_is_refused_by_the_limit_that_says_no(reservation: Reservation) -> None:
    door = admission(reservation, _headroom=Gauge(31 * MIB))
    with pytest.raises(HostOOMError, match=r"32 MiB more at offset 96 .*memory.max of /job") as e:
        door.grant(96, 32 * MIB, GIB)
    assert (e.value.available, e.value.nbytes, e.value.offset) == (31 * MIB, 32 * MIB, 96)


# ---------------------------------------------------------------------------- when


def test_a_fill_rests_while_memory_is_short_and_goes_on_afterwards(
    reservation: Reservation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hostmem")
    pressure = Pressure()
    door = admission(reservation, _pressure=pressure)
    assert (door.rest(), door.resting, door.rests) == (0.0, None, 0)
    pressure.why = "tasks stalled"
    assert door.rest() > 0
    assert door.rest() > 0
    assert (door.resting, door.rests) == ("tasks stalled", 1)
    assert caplog.text.count("the fill rests: tasks stalled") == 1
    pressure.why = None
    assert (door.rest(), door.resting, door.rests) == (0.0, None, 1)
    pressure.why = "again"
    assert door.rest() > 0
    assert door.rests == 2


def test_a_rest_does_not_last_for_ever(
    reservation: Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("hostmem.admission.time.monotonic", lambda: now)
    pressure = Pressure()
    pressure.why = "tasks stalled"
    door = admission(reservation, _pressure=pressure)
    waited = 0.0
    while (rest := door.rest()) > 0:
        waited += rest
        now += rest
        assert waited < 60
    assert waited == pytest.approx(5, abs=0.3)
    assert door.rest() > 0  # one piece was let through


# ---------------------------------------------------------------------------- in which pages


def fragmented(root: Path) -> PageJudge:
    """A judge of a machine that has nothing but single pages free, and compacts on a fault."""
    free = "  ".join(["100000", *["0"] * 10])
    write(
        root,
        {
            "proc/buddyinfo": f"Node 0, zone   Normal  {free}\n",
            "proc/vmstat": "compact_stall 0\n",
            "sys/devices/system/node/online": "0\n",
        },
    )
    return PageJudge((), machine(), root)


@pytest.mark.skipif(
    machine().thp_defrag not in ("always", "madvise", "defer+madvise"),
    reason=f"faults do not compact memory here (defrag={machine().thp_defrag})",
)
def test_huge_pages_are_given_up_once_where_there_are_none(
    reservation: Reservation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door = admission(reservation, fragmented(tmp_path))
    assert door.page_mode == "auto"
    with FaultPlan() as plan:
        door.choose_pages(8 * MIB, 32 * MIB)
        door.choose_pages(16 * MIB, 32 * MIB)
        door.note(MIB, 1.0)
        assert plan.calls("madvise(MADV_NOHUGEPAGE)") == [(reservation.address + 8 * MIB, 56 * MIB)]
    assert door.page_mode == "small"
    assert caplog.text.count("small pages from offset 8388608 on") == 1


def test_a_mode_that_is_not_auto_stays(reservation: Reservation) -> None:
    door = admission(reservation)
    with FaultPlan() as plan:
        door.choose_pages(0, 64 * MIB)
        door.note(MIB, 10.0)
        assert plan.log == []


# ------------------------------------------------------------------------ in a whole memory


def test_a_memory_that_does_not_fit_fills_as_far_as_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gauge = Gauge(64 * MIB)  # of what is not there yet, unlike a real one

    def read(self: HeadroomGauge) -> Headroom:
        left = gauge.nbytes
        gauge.nbytes = max(left - 16 * MIB, 0)
        return Headroom((Limit("the test", left, 0, exact=True),))

    monkeypatch.setattr(HeadroomGauge, "read", read)
    with HostMem(256 * MIB, device="cpu", commit_unit=16 * MIB) as memory:
        with pytest.raises(HostOOMError, match=r"16 MiB more at offset .*the test"):
            memory.wait_usable(256 * MIB)
        filled = memory.committed
        assert filled == 64 * MIB
        memory.view(0, filled)[:] = 3
        gauge.nbytes = GIB
        memory.resize(256 * MIB)  # retries
        memory.wait_usable(256 * MIB)
        memory.release(0, 16 * MIB)
        gauge.nbytes = 16 * MIB - 1
        with pytest.raises(HostOOMError, match="the test"):
            memory.recommit(0, 16 * MIB)
        assert memory.released == [(0, 16 * MIB)]


def test_the_progress_tells_why_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    why: list[str | None] = ["the test presses"]
    monkeypatch.setattr(PressureGauge, "pressed", lambda _: why[0])
    monkeypatch.setattr("hostmem.filler._ADMITTED_FOR", 0.0)  # ask before every piece
    with HostMem(64 * MIB, device="cpu") as memory:
        memory.wait_usable(8 * MIB)
        resting = next(p for p in memory.iter_progress(1e-3) if p.state == "resting")
        assert resting.resting == "the test presses"
        assert "resting" in str(resting)
        assert "the test presses" in str(resting)
        why[0] = None
        memory.wait_usable(64 * MIB)
        assert memory.progress.rests == 1
        assert memory.progress.resting is None


def test_a_hugetlb_memory_is_refused_at_the_first_unit_that_the_pool_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        memory = HostMem("64MiB", device="cpu", page_mode="hugetlb")
    except ValueError as error:
        pytest.skip(f"hugetlb: {error}")
    with memory:
        memory.resize(0)
        monkeypatch.setattr("hostmem.huge_pages.pools", dict)
        memory.resize("64MiB")
        with pytest.raises(HostOOMError, match="hugetlb pool of 2 MiB pages leaves 0"):
            memory.wait_usable(64 * MIB)
