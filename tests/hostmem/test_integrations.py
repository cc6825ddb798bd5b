"""Parts of a memory for other libraries: usable, in one registration, joined again."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hostmem.integrations.known as known
from hostmem import ClosedError, HostMem, HostOOMError, RegistrationError
from hostmem.integrations.range_allocator import HeldRange, RangeAllocator
from hostmem.testing import FaultPlan

if TYPE_CHECKING:
    from tests.threads import Spawn, Until

KIB, MIB = 1 << 10, 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


def offset(held: HeldRange, memory: HostMem) -> int:
    return held.address - memory.address


def test_ranges_are_the_lowest_that_fit_aligned_and_of_the_bytes_asked() -> None:
    with HostMem(MIB, device="cpu") as memory:
        ranges = RangeAllocator(memory)
        held = [ranges.allocate(nbytes) for nbytes in (1, 1000, 256)]
        assert [offset(each, memory) for each in held] == [0, 256, 1280]
        assert [each.nbytes for each in held] == [1, 1000, 256]
        held[1].release()
        again = ranges.allocate(1024)
        assert offset(again, memory) == 256
        for each in (held[0], held[2], again):
            each.release()


def test_neighbours_that_were_given_back_in_any_order_are_one_range_again() -> None:
    with HostMem(MIB, device="cpu") as memory:
        ranges = RangeAllocator(memory)
        held = [ranges.allocate(64 * KIB) for _ in range(4)]
        for each in (held[2], held[0], held[3], held[1]):
            each.release()
            each.release()  # idempotent
        assert ranges.free == [(0, MIB)]


def test_where_no_free_range_is_long_enough_nothing_is_taken() -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        memory.consolidate()
        ranges = RangeAllocator(memory)
        held = ranges.allocate(MIB - 256)
        with pytest.raises(HostOOMError, match=r"no 512 B are free.*longest free range has 256 B"):
            ranges.allocate(512)
        assert ranges.free == [(MIB - 256, 256)]
        held.release()


def test_bytes_are_waited_for_and_not_handed_out_before(spawn: Spawn) -> None:
    with FaultPlan() as plan, HostMem(MIB, 0, device="cpu", fill_threads=1) as memory:
        hold = plan.hold(POPULATE)
        memory.resize(MIB)
        hold.wait_reached()
        made = spawn(RangeAllocator(memory).allocate, 4 * KIB)
        assert not made.done()
        assert memory.committed == 0
        hold.release()
        held = made.result()
        assert memory.is_usable(4 * KIB)
        held.release()


def test_while_one_waits_for_the_fill_another_gets_what_is_filled(
    spawn: Spawn, until: Until
) -> None:
    with HostMem(2 * MIB, MIB, device="cpu", wait=True) as memory, FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        memory.resize(2 * MIB)
        hold.wait_reached()
        ranges = RangeAllocator(memory)
        low = ranges.allocate(512 * KIB)
        waits = spawn(ranges.allocate, 768 * KIB)  # does not fit below the watermark
        until(lambda: len(ranges.free) == 2)
        small = ranges.allocate(KIB)
        assert offset(small, memory) == 512 * KIB
        assert not waits.done()
        hold.release()
        for held in (low, small, waits.result()):
            held.release()


def test_a_wait_ends_at_its_deadline_and_leaves_nothing_taken() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        with HostMem(MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            ranges = RangeAllocator(memory, timeout=0)
            with pytest.raises(TimeoutError):
                ranges.allocate(KIB)
            assert ranges.free == [(0, MIB)]
            hold.release()


def test_a_fill_that_failed_is_told_to_who_asks_beyond_and_the_rest_serves_on() -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 999, at=2, times=None)
        with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
            ranges = RangeAllocator(memory)
            held = ranges.allocate(MIB)
            with pytest.raises(RegistrationError):
                ranges.allocate(MIB)
            assert ranges.free == [(MIB, 3 * MIB)]
            held.release()


def test_no_range_crosses_two_registrations() -> None:
    with HostMem(8 * MIB, device="cpu", fill_threads=1, wait=True) as memory:
        ends = [start + nbytes for start, nbytes in memory.registrations]
        assert ends[:2] == [MIB, 2 * MIB]
        ranges = RangeAllocator(memory)
        held = [ranges.allocate(768 * KIB) for _ in range(4)]
        for each in held:
            start = offset(each, memory)
            assert memory.same_registration(start, start + each.nbytes - 1)
        assert offset(held[1], memory) == MIB  # and not 768 KiB, where the first one ends
        for each in held:
            each.release()


def test_no_range_crosses_registrations_that_were_made_while_it_waited(spawn: Spawn) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        with HostMem(8 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            ranges = RangeAllocator(memory)
            waits = [spawn(ranges.allocate, 768 * KIB) for _ in range(4)]
            hold.release()
            held = [wait.result() for wait in waits]
            for each in held:
                start = offset(each, memory)
                assert memory.same_registration(start, start + each.nbytes - 1)
                each.release()


def test_ranges_are_aligned_where_registrations_are_not() -> None:
    with HostMem(8 * MIB, device="cpu", fill_threads=1, slot_size=6000, wait=True) as memory:
        assert memory.registrations[1][0] % 256
        ranges = RangeAllocator(memory)
        held = [ranges.allocate(700_000) for _ in range(6)]
        assert {each.address % 256 for each in held} == {0}
        for each in held:
            each.release()


def test_a_range_longer_than_a_commit_unit_is_refused_at_once_and_served_when_consolidated() -> (
    None
):
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        with HostMem(4 * MIB, device="cpu", commit_unit=MIB, fill_threads=1) as memory:
            hold.wait_reached()
            ranges = RangeAllocator(memory, timeout=None)
            with pytest.raises(HostOOMError, match=r"commit_unit, or consolidate\(\)"):
                ranges.allocate(2 * MIB)
            hold.release()
            memory.wait_usable(4 * MIB)
            with pytest.raises(HostOOMError, match="in one registration"):
                ranges.allocate(2 * MIB)
            assert ranges.free == [(0, 4 * MIB)]
            memory.consolidate()
            held = ranges.allocate(2 * MIB)
            held.release()


def test_unregistered_bytes_are_passed_over() -> None:
    first: list[int] = []

    def is_the_first(address: int, *_: int) -> bool:
        first.append(address)
        return address == first[0]

    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 999, times=None, when=is_the_first)
        with HostMem(
            4 * MIB, device="cpu", fill_threads=1, on_register_failure="pageable", wait=True
        ) as memory:
            (bad,) = memory.quarantined
            held = RangeAllocator(memory).allocate(KIB)
            assert not bad[0] <= offset(held, memory) < sum(bad)
            held.release()


def test_growing_memory_makes_room_and_shrunk_memory_has_none() -> None:
    with HostMem(2 * MIB, MIB, device="cpu") as memory:
        ranges = RangeAllocator(memory)
        first = ranges.allocate(MIB)
        memory.resize(2 * MIB)
        second = ranges.allocate(MIB)
        with pytest.raises(BufferError):
            memory.resize(MIB)
        second.release()
        memory.resize(MIB)
        with pytest.raises(HostOOMError):
            ranges.allocate(MIB)
        assert ranges.free == []
        first.release()


@pytest.mark.parametrize("released", [0, 1])  # where the range would begin, and where it would end
def test_what_was_released_in_the_middle_is_passed_over(released: int) -> None:
    with HostMem(4 * MIB, device="cpu", commit_unit=MIB, wait=True) as memory:
        memory.consolidate()
        ranges = RangeAllocator(memory)
        first = ranges.allocate(released * MIB - KIB) if released else None
        memory.release(released * MIB, MIB)
        held = ranges.allocate(4 * KIB)
        assert offset(held, memory) == (released + 1) * MIB
        memory.recommit(released * MIB, MIB)
        again = ranges.allocate(4 * KIB)
        assert offset(again, memory) < (released + 1) * MIB
        for each in (held, again, first):
            if each is not None:
                each.release()
        assert ranges.free == [(0, 4 * MIB)]


def test_a_resize_that_takes_what_is_waited_for_leaves_no_room(spawn: Spawn, until: Until) -> None:
    with HostMem(4 * MIB, MIB, device="cpu", wait=True) as memory, FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        memory.resize(4 * MIB)
        hold.wait_reached()
        ranges = RangeAllocator(memory)
        low = ranges.allocate(MIB)
        waits = spawn(ranges.allocate, KIB)
        until(lambda: memory.waiting == 1)
        shrinks = spawn(memory.resize, MIB)
        until(lambda: memory.waiting == 0)
        with pytest.raises(HostOOMError):
            waits.result()
        hold.release()
        shrinks.result()
        low.release()
        assert ranges.free == [(0, MIB)]


@pytest.mark.parametrize("nbytes", [1, 2 * MIB, 8 * MIB])  # more than a unit, and than there is
def test_closed_memory_says_that_it_is_closed(nbytes: int) -> None:
    memory = HostMem(4 * MIB, device="cpu", commit_unit=MIB)
    ranges = RangeAllocator(memory)
    memory.close()
    with pytest.raises(ClosedError):
        ranges.allocate(nbytes)


def test_memory_is_not_closed_under_a_range() -> None:
    memory = HostMem(MIB, device="cpu")
    held = RangeAllocator(memory).allocate(KIB)
    with pytest.raises(BufferError):
        memory.close()
    held.release()
    memory.close()


@pytest.mark.parametrize("alignment", [0, 3, 1 << 62])
def test_an_alignment_that_cannot_be_is_refused(alignment: int) -> None:
    with HostMem(MIB, device="cpu") as memory, pytest.raises(ValueError, match="alignment"):
        RangeAllocator(memory, alignment=alignment)


def test_no_bytes_are_no_range() -> None:
    with HostMem(MIB, device="cpu") as memory, pytest.raises(ValueError, match="at least 1"):
        RangeAllocator(memory).allocate(0)


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9000)), max_size=60))
def test_held_ranges_never_overlap_and_all_comes_back(steps: list[tuple[int, int]]) -> None:
    with HostMem(64 * KIB, device="cpu", wait=True) as memory:
        ranges = RangeAllocator(memory)
        held: list[HeldRange] = []
        for which, nbytes in steps:
            if which < 4 and held:
                held.pop(which % len(held)).release()
                continue
            try:
                held.append(ranges.allocate(nbytes))
            except HostOOMError:
                continue
            taken = sorted((each.address, each.nbytes) for each in held)
            ends = [0, *(address + size for address, size in taken)]
            assert all(address >= end for (address, _), end in zip(taken, ends, strict=False))
            assert all(address % 256 == 0 for address, _ in taken)
            start = offset(held[-1], memory)
            np.asarray(memory.view(start, nbytes))[:] = which
        for each in held:
            each.release()
        assert ranges.free == [(0, 64 * KIB)]


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, MIB)), max_size=60),
    held_at=st.integers(1, 3),
    alignment=st.sampled_from([1, 64, 256, 4096]),
)
def test_while_the_fill_is_held_nothing_is_handed_out_twice_or_too_soon(
    steps: list[tuple[int, int]], held_at: int, alignment: int
) -> None:
    with (
        FaultPlan() as plan,
        HostMem(8 * MIB, MIB, device="cpu", commit_unit=MIB, fill_threads=1, wait=True) as memory,
    ):
        hold = plan.hold(POPULATE, at=held_at)
        memory.resize(8 * MIB)
        hold.wait_reached()
        ranges = RangeAllocator(memory, alignment=alignment, timeout=0)
        held: list[tuple[HeldRange, int]] = []
        for number, (which, nbytes) in enumerate(steps, 1):
            if which < 4 and held:
                held.pop(which % len(held))[0].release()
                continue
            try:
                made = ranges.allocate(nbytes)
            except (HostOOMError, TimeoutError):
                continue
            start = offset(made, memory)
            assert memory.is_usable(start + nbytes, start)
            assert memory.same_registration(start, start + nbytes - 1)
            assert made.address % alignment == 0
            memory.view(start, nbytes)[:] = number
            held.append((made, number))
        for made, number in held:
            assert (memory.view(offset(made, memory), made.nbytes) == number).all()
            made.release()
        hold.release()
        assert ranges.free == [(0, 8 * MIB)]


# ------------------------------------------------------------------------------------ versions


def library(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("some_library")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", module)


@pytest.mark.parametrize("found", ["1.2", "1.2.7", "14.0", "1.2+cu13"])
def test_a_known_version_is_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    library(monkeypatch, found)
    module = known.import_known("ours", "some_library", ["1.2", "14"])
    assert module.__version__ == found


@pytest.mark.parametrize("found", ["1.20", "2.0", "1", "140.1"])
def test_another_version_is_refused_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    library(monkeypatch, found)
    with pytest.raises(ImportError) as refused:
        known.import_known("ours", "some_library", ["1.2", "14"])
    for part in ("ours", "1.2.x or 14.x", f"some_library {found} is installed"):
        assert part in str(refused.value)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(ImportError, match=r"ours needs no_such_library 1\.x, which cannot"):
        known.import_known("ours", "no_such_library", ["1"])


CHILD = """
import sys
import hostmem
assert not [name for name in sys.modules if name.startswith("hostmem.integrations")]
import hostmem.integrations
from hostmem.integrations import known, range_allocator
assert not {"cupy", "cuda.core"} & set(sys.modules)
"""


def test_imports_bring_no_library() -> None:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
