"""Memory that is given back in the middle, and what brings it back."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import numpy as np
import pytest

from hostmem import (
    ClosedError,
    CpuDevice,
    HostMem,
    HostOOMError,
    RegistrationError,
    ResourceBusyError,
)
from hostmem.testing import FaultPlan
from tests.hostmem.conftest import Maps
from tests.threads import Spawn, Until

MIB = 1 << 20
UNIT = 4 * MIB
POPULATE = "madvise(MADV_POPULATE_WRITE)"
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN


def filled(size: int = 4 * UNIT, capacity: int | None = None, **options: object) -> HostMem:
    options.setdefault("commit_unit", UNIT)
    memory = HostMem(capacity or size, size, device="cpu", **options)  # type: ignore[arg-type]
    memory.wait_usable(size)
    for unit in range(0, size, UNIT):
        memory.view(unit, min(UNIT, size - unit))[:] = unit // UNIT + 1
    return memory


def resident(address: int, nbytes: int) -> int:
    """Bytes of a range that the kernel holds in memory, by /proc/self/smaps of whole mappings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            start, end = (int(part, 16) for part in word.split("-"))
            inside = address <= start and end <= address + nbytes
        elif inside and word == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


# ----------------------------------------------------------------------------- giving back


def test_a_released_unit_holds_no_memory_and_its_neighbours_keep_their_bytes(maps: Maps) -> None:
    with filled() as memory:
        memory.release(UNIT, UNIT)
        assert memory.released == [(UNIT, UNIT)]
        assert [perms for *_, perms in maps(memory.address + UNIT, UNIT)] == ["---p"]
        assert resident(memory.address, 4 * UNIT) == 3 * UNIT
        assert not any(UNIT <= start < 2 * UNIT for start, _ in memory.registrations)
        assert memory.view(0, UNIT).min() == 1
        assert memory.view(2 * UNIT, UNIT).min() == 3
        assert (memory.size, memory.committed) == (4 * UNIT, UNIT)


def test_what_is_usable_is_told_range_by_range() -> None:
    with filled() as memory:
        memory.release(UNIT, UNIT)
        assert memory.is_usable(UNIT)
        assert not memory.is_usable(UNIT + 1)
        assert not memory.is_usable(4 * UNIT)
        assert memory.is_usable(4 * UNIT, 2 * UNIT)
        assert not memory.is_usable(4 * UNIT, 2 * UNIT - 1)
        assert memory.is_usable(UNIT, UNIT)
        memory.wait_usable(4 * UNIT, 0, start=2 * UNIT)
        with pytest.raises(ValueError, match="were released; recommit"):
            memory.wait_usable(2 * UNIT, 0)
        with pytest.raises(ValueError, match="were released; recommit"):
            memory.view(UNIT, 1)
        with pytest.raises(ValueError, match="is not usable"):
            memory.boundary_after(UNIT)
        with pytest.raises(ValueError, match=r"start: 2 is outside 0\.\.1"):
            memory.wait_usable(1, start=2)
        with pytest.raises(ValueError, match="start: -1"):
            memory.wait_usable(1, start=-1)


def test_a_unit_smaller_than_a_page_comes_back_zero() -> None:
    with HostMem(80_000, device="cpu", commit_unit=500, wait=True) as memory:
        memory.view()[:] = 7
        memory.release(500, 1000)
        memory.recommit(500, 1000)
        assert memory.view(0, 500).min() == memory.view(1500, 500).min() == 7
        assert not memory.view(500, 1000).any()


def test_what_lies_past_a_hole_is_waited_for_by_callback_and_asyncio(until: Until) -> None:
    outcomes: list[BaseException | None] = []
    with filled() as memory:
        memory.release(0, UNIT)
        memory.add_usable_callback(4 * UNIT, outcomes.append, start=UNIT)
        with pytest.raises(ValueError, match="were released"):
            memory.add_usable_callback(4 * UNIT, outcomes.append)
        asyncio.run(memory.wait_usable_async(4 * UNIT, start=UNIT))
        refused = memory.wait_usable_async(4 * UNIT)
        with pytest.raises(ValueError, match="were released"):
            asyncio.run(refused)
        until(lambda: outcomes)
        assert outcomes == [None]


def test_a_wait_across_a_unit_ends_when_that_is_released(spawn: Spawn) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, when=lambda address, _: address >= memory.address + 3 * UNIT)
        with HostMem(4 * UNIT, 0, device="cpu", commit_unit=UNIT, fill_threads=1) as memory:
            memory.resize(4 * UNIT)
            memory.wait_usable(2 * UNIT)
            hold.wait_reached()
            across = spawn(memory.wait_usable, 4 * UNIT)
            beyond = spawn(lambda: memory.wait_usable(4 * UNIT, start=2 * UNIT))
            while memory._core.watermark.waiting < 2:
                pass
            memory.release(UNIT, UNIT)  # while the fill goes on
            with pytest.raises(ValueError, match="were released"):
                across.result()
            hold.release()
            beyond.result()
            assert memory.progress.state == "filled"


@pytest.mark.parametrize(
    ("offset", "nbytes", "why"),
    [
        (0, 1, "no whole units"),
        (1, UNIT, "no whole units"),
        (0, 0, "no whole units"),
        (0, -UNIT, "no whole units"),
        (-UNIT, UNIT, "no whole units"),
        (4 * UNIT, UNIT, "not filled yet"),
        (3 * UNIT, 2 * UNIT, "not filled yet"),
        (0, 2 * UNIT, "are released"),
    ],
)
def test_what_is_no_filled_unit_is_not_released(offset: int, nbytes: int, why: str) -> None:
    with filled(4 * UNIT, 8 * UNIT) as memory:
        memory.release(UNIT, UNIT)
        before = memory.registrations
        with pytest.raises(ValueError, match=why):
            memory.release(offset, nbytes)
        assert memory.registrations == before
        assert memory.released == [(UNIT, UNIT)]


def test_a_live_view_keeps_its_unit_and_no_other() -> None:
    with filled() as memory:
        view = memory.view(2 * UNIT - 1, 2)
        for unit in (UNIT, 2 * UNIT):
            with pytest.raises(BufferError, match="live views hold bytes of"):
                memory.release(unit, UNIT)
        memory.release(0, UNIT)
        memory.release(3 * UNIT, UNIT)
        assert view.tolist() == [2, 3]
        del view


def test_a_driver_that_does_not_let_go_leaves_all_as_it_was() -> None:
    with filled() as memory:
        before = memory.registrations
        with FaultPlan() as plan:
            plan.fail("cuMemHostUnregister", UNKNOWN, at=2)  # the first of two went well
            with pytest.raises(RegistrationError, match="refused to unregister"):
                memory.release(0, 2 * UNIT)
        assert memory.committed == 4 * UNIT
        assert memory.released == []
        assert sum(n for _, n in memory.registrations) == sum(n for _, n in before)
        assert memory.view(0, UNIT).min() == 1


def test_too_many_mappings_leave_all_as_it_was() -> None:
    with filled() as memory:
        with FaultPlan() as plan:
            plan.fail("mprotect", errno.ENOMEM)
            with pytest.raises(HostOOMError, match="number of mappings"):
                memory.release(UNIT, UNIT)
        assert memory.committed == 4 * UNIT
        assert sum(n for _, n in memory.registrations) == 4 * UNIT
        assert memory.view(UNIT, UNIT).min() == 2  # not a byte was lost


# ----------------------------------------------------------------------------- coming back


def test_recommitted_units_are_zero_and_registered() -> None:
    with filled() as memory:
        memory.release(0, 3 * UNIT)
        assert memory.released == [(0, 3 * UNIT)]
        memory.recommit(UNIT, UNIT)
        assert memory.released == [(0, UNIT), (2 * UNIT, UNIT)]
        assert memory.committed == 0
        assert not memory.view(UNIT, UNIT).any()
        memory.recommit(0, UNIT)
        memory.recommit(2 * UNIT, UNIT)
        assert memory.released == []
        assert memory.committed == 4 * UNIT
        assert sum(n for _, n in memory.registrations) == 4 * UNIT
        assert memory.view(3 * UNIT, UNIT).min() == 4


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, UNIT), (UNIT, 2 * UNIT), (UNIT, UNIT - 1), (UNIT, 0), (UNIT + 1, 1)]
)
def test_only_whole_released_units_come_back(offset: int, nbytes: int) -> None:
    with filled() as memory:
        memory.release(UNIT, UNIT)
        with pytest.raises(ValueError, match="no whole released units"):
            memory.recommit(offset, nbytes)
        assert memory.released == [(UNIT, UNIT)]


@pytest.mark.parametrize(
    ("call", "error", "kind"),
    [
        (POPULATE, errno.ENOMEM, HostOOMError),
        ("mprotect", errno.ENOMEM, HostOOMError),
        ("cuMemHostRegister", OUT_OF_MEMORY, RegistrationError),
        (POPULATE, errno.EFAULT, OSError),
    ],
)
def test_a_unit_that_cannot_come_back_stays_released(
    call: str, error: int, kind: type[Exception], cpu: CpuDevice
) -> None:
    with filled() as memory:
        memory.release(UNIT, 2 * UNIT)
        with FaultPlan() as plan:
            inside = memory.address + 2 * UNIT
            plan.fail(call, error, times=None, when=lambda address, *_: address >= inside)
            with pytest.raises(kind):
                memory.recommit(UNIT, 2 * UNIT)
        assert memory.released == [(2 * UNIT, UNIT)]  # the first of the two is back
        assert resident(memory.address, 4 * UNIT) == 3 * UNIT
        assert sum(n for _, n in memory.registrations) == 3 * UNIT
        memory.recommit(2 * UNIT, UNIT)
        assert not memory.view(2 * UNIT, UNIT).any()


def test_a_pageable_unit_comes_back_quarantined() -> None:
    with filled(on_register_failure="pageable") as memory:
        memory.release(UNIT, UNIT)
        with FaultPlan() as plan:
            plan.fail("cuMemHostRegister", 801, times=None)
            memory.recommit(UNIT, UNIT)
        assert memory.quarantined
        assert sum(n for _, n in memory.quarantined) == UNIT
        assert memory.committed == 4 * UNIT
        memory.release(UNIT, UNIT)
        assert memory.quarantined == []


def test_pages_shared_with_neighbours_keep_their_bytes() -> None:
    slot, slots = 5000, 8
    unit = slot * 4
    with HostMem(slot * slots, device="cpu", slot_size=slot, commit_unit=unit, wait=True) as memory:
        memory.view()[:] = 7
        memory.release(0, unit)
        assert memory.view(unit, unit).min() == 7
        with FaultPlan() as plan:
            plan.fail(POPULATE, errno.EINVAL, times=None)  # pages are touched instead
            memory.recommit(0, unit)
        assert memory.view(unit, unit).min() == 7
        assert not memory.view(0, unit).any()
        memory.release(unit, unit)  # the last
        memory.recommit(unit, unit)
        assert memory.committed == memory.size
        memory.view()[:] = 1


# --------------------------------------------------------------------------- with the rest


def test_a_short_last_unit_is_released_and_the_memory_grows_past_it() -> None:
    with filled(2 * UNIT + MIB, 4 * UNIT) as memory:
        memory.release(2 * UNIT, MIB)
        memory.resize(3 * UNIT)
        memory.wait_usable(3 * UNIT, 20, start=2 * UNIT + MIB)
        memory.view(2 * UNIT + MIB, 3 * MIB)[:] = 9
        assert memory.released == [(2 * UNIT, MIB)]
        memory.recommit(2 * UNIT, MIB)
        assert memory.view(2 * UNIT + MIB, 3 * MIB).min() == 9
        assert memory.committed == 3 * UNIT


@pytest.mark.parametrize("size", [UNIT, UNIT + MIB, 2 * UNIT, 2 * UNIT + MIB, 3 * UNIT, MIB, 0])
def test_a_shrink_past_released_units_leaves_what_is_below(size: int) -> None:
    with filled() as memory:
        memory.release(UNIT, 2 * UNIT)
        memory.resize(size)
        assert memory.released in ([], [(UNIT, UNIT)], [(UNIT, 2 * UNIT)])
        for offset, nbytes in memory.released:
            assert offset + nbytes <= size
            memory.recommit(offset, nbytes)
        memory.wait_usable(size, 20)
        memory.view()[min(UNIT, size) :] = 5
        if size:
            assert memory.view(0, min(UNIT, size)).min() == 1
        memory.resize(4 * UNIT)
        memory.wait_usable(4 * UNIT, 20)
        memory.view()[:] = 3


def test_a_memory_with_released_units_is_closed_without_a_trace(maps: Maps) -> None:
    memory = filled()
    address = memory.address
    memory.release(0, UNIT)
    memory.release(3 * UNIT, UNIT)
    memory.close()
    assert maps(address, 4 * UNIT) == []
    for call in (memory.release, memory.recommit):
        with pytest.raises(ClosedError):
            call(0, UNIT)


def test_mappings_stay_bounded(maps: Maps) -> None:
    units, unit = 256, 128 << 10
    random = np.random.default_rng(5)
    with HostMem(64 * units * unit, units * unit, device="cpu", commit_unit=unit, wait=True) as m:
        start = len(maps(m.address, m.capacity))
        gone: set[int] = set()
        for _ in range(600):
            unit_number = int(random.integers(units))
            if unit_number in gone:
                m.recommit(unit_number * unit, unit)
                gone.remove(unit_number)
            else:
                m.release(unit_number * unit, unit)
                gone.add(unit_number)
            assert len(maps(m.address, m.capacity)) <= start + 2 * len(gone)
        for unit_number in gone:
            m.recommit(unit_number * unit, unit)
        assert len(maps(m.address, m.capacity)) == start
        assert m.committed == m.size


def test_the_placement_shows_every_state(caplog: pytest.LogCaptureFixture) -> None:
    with filled(4 * UNIT, 8 * UNIT, on_register_failure="pageable") as memory:
        memory.release(UNIT, 2 * UNIT)
        with FaultPlan() as plan:
            plan.fail("cuMemHostRegister", 801, times=None)
            memory.recommit(2 * UNIT, UNIT)
        assert memory.placement().bytes_by_state == {
            "resident": 3 * UNIT,
            "registered": 2 * UNIT,
            "quarantined": UNIT,
            "released": UNIT,
            "reserved": 4 * UNIT,
        }
        memory.suspend_registration()
        states = memory.placement(detail=True, sample=256).bytes_by_state
        assert (states["suspended"], states.get("registered", 0)) == (2 * UNIT, 0)
        memory.resize(MIB)  # the rest of a registration is kept
        states = memory.placement().bytes_by_state
        assert states["resident"] + states["reserved"] == 8 * UNIT


# --------------------------------------------------------------- suspended, and consolidated


def test_a_suspended_memory_is_not_registered_and_keeps_its_bytes(cpu: CpuDevice) -> None:
    with filled() as memory:
        before = memory.registrations
        memory.suspend_registration()
        memory.suspend_registration()
        assert memory.registrations == []
        assert list(cpu.registered) == []
        assert memory.view(UNIT, UNIT).min() == 2
        assert memory.boundary_after(0) == before[0][1]
        assert memory.progress.state == "filled"
        memory.resume_registration()
        memory.resume_registration()
        assert memory.registrations == before
        assert memory.view(3 * UNIT, UNIT).min() == 4


def test_a_fill_rests_while_the_registration_is_suspended() -> None:
    with filled(UNIT, 4 * UNIT) as memory:
        memory.suspend_registration()
        memory.resize(2 * UNIT)
        assert memory.progress.state == "suspended"
        with pytest.raises(TimeoutError):
            memory.wait_usable(2 * UNIT, 0)
        memory.release(0, UNIT)
        with pytest.raises(ResourceBusyError, match="resume_registration"):
            memory.recommit(0, UNIT)
        with pytest.raises(ResourceBusyError, match="resume_registration"):
            memory.consolidate()
        memory.resume_registration()
        memory.wait_usable(2 * UNIT, 20, start=UNIT)
        memory.recommit(0, UNIT)
        assert sum(n for _, n in memory.registrations) == 2 * UNIT


def test_a_suspended_memory_shrinks_and_closes() -> None:
    with filled() as memory:
        memory.suspend_registration()
        memory.resize(UNIT)
        memory.resume_registration()
        assert sum(n for _, n in memory.registrations) == UNIT
        memory.suspend_registration()


def test_a_refused_resumption_is_tried_again(cpu: CpuDevice) -> None:
    with filled() as memory:
        memory.suspend_registration()
        with FaultPlan() as plan:
            plan.fail("cuMemHostRegister", OUT_OF_MEMORY, at=3, times=None)
            with pytest.raises(RegistrationError):
                memory.resume_registration()
        assert 0 < sum(n for _, n in memory.registrations) < 4 * UNIT
        memory.resume_registration()
        assert sum(n for _, n in memory.registrations) == 4 * UNIT
        assert memory.committed == 4 * UNIT


def test_a_driver_that_does_not_let_go_is_asked_again() -> None:
    with filled() as memory:
        with FaultPlan() as plan:
            plan.fail("cuMemHostUnregister", UNKNOWN, at=2)
            with pytest.raises(RegistrationError):
                memory.suspend_registration()
        assert 0 < sum(n for _, n in memory.registrations) < 4 * UNIT
        memory.suspend_registration()
        assert memory.registrations == []
        memory.resume_registration()
        assert sum(n for _, n in memory.registrations) == 4 * UNIT


def test_a_consolidated_memory_is_one_registration_between_holes() -> None:
    with filled() as memory:
        with pytest.raises(ValueError, match=r"consolidate\(\) joins"):
            memory.view(one_registration=True)
        memory.consolidate()
        assert memory.registrations == [(0, 4 * UNIT)]
        assert memory.same_registration(0, 4 * UNIT - 1)
        assert memory.view(one_registration=True).nbytes == 4 * UNIT
        memory.consolidate()
        memory.release(2 * UNIT, UNIT)
        assert memory.registrations == [(0, 2 * UNIT), (3 * UNIT, UNIT)]
        assert memory.view(0, UNIT).min() == 1
        memory.recommit(2 * UNIT, UNIT)
        memory.consolidate()
        assert memory.registrations == [(0, 4 * UNIT)]
        assert memory.view(3 * UNIT, UNIT).min() == 4


@pytest.mark.parametrize("size", [MIB, UNIT, UNIT + MIB, 3 * UNIT])
def test_a_consolidated_memory_shrinks_by_units(size: int, maps: Maps) -> None:
    with filled() as memory:
        memory.consolidate()
        memory.resize(size)
        kept = -(-size // UNIT) * UNIT
        assert memory.registrations == [(0, kept)]
        assert resident(memory.address, 4 * UNIT) == kept
        assert memory.view(0, MIB).min() == 1
        memory.resize(4 * UNIT)
        memory.wait_usable(4 * UNIT, 20)


def test_a_refused_consolidation_leaves_all_usable_and_says_what_is_not_registered() -> None:
    with filled() as memory:
        with FaultPlan() as plan:
            # The whole, its first half, and everything that begins in the second.
            top = memory.address + 2 * UNIT
            plan.fail(
                "cuMemHostRegister",
                OUT_OF_MEMORY,
                times=None,
                when=lambda address, nbytes: nbytes > UNIT or address >= top,
            )
            with pytest.raises(RegistrationError):
                memory.consolidate()
        assert sum(n for _, n in memory.registrations) == 2 * UNIT
        assert memory.quarantined == [(2 * UNIT, 2 * UNIT)]
        assert memory.committed == 4 * UNIT
        assert memory.view(3 * UNIT, UNIT).min() == 4


def test_a_memory_that_fills_is_not_consolidated() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=12)
        with HostMem(8 * UNIT, device="cpu", commit_unit=UNIT, fill_threads=1) as memory:
            hold.wait_reached()
            with pytest.raises(ResourceBusyError, match="under way"):
                memory.consolidate()
            hold.release()
            memory.wait_usable(memory.size)
            memory.consolidate()
            assert memory.registrations == [(0, 8 * UNIT)]
