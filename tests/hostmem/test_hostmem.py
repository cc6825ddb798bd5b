"""What memory promises while nothing goes wrong: where it is, when it is usable, who keeps it."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CpuDevice, HostMem, machine, placement_of
from hostmem.courier import callbacks
from hostmem.fill_threads import fill_thread_budget
from hostmem.testing import FaultPlan

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child, Maps
    from tests.threads import Spawn, Until

PAGE = mmap.PAGESIZE
KIB, MIB = 1 << 10, 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"

# With one populating thread the order of the calls is known: pieces of 512 KiB, and registrations
# of 1, 1, 2, 4 and then 8 MiB.


def resident(memory: HostMem) -> int:
    """Bytes of memory that the whole capacity holds now."""
    found = placement_of(memory.address, memory.capacity)
    if found.method.startswith("not verifiable"):
        pytest.skip(found.method)
    return found.resident


def write_pattern(memory: HostMem, nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    """Write random bytes from offset 0; returns a copy of them."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    memory.view(0, nbytes)[:] = data
    return data


# ------------------------------------------------------------------------------ construction


@pytest.mark.parametrize("name", ["mprotect", POPULATE, "cuMemHostRegister"])
def test_constructing_leaves_every_costly_call_to_other_threads(name: str) -> None:
    callers = set()

    def note(*_: int) -> bool:
        callers.add(threading.get_ident())
        return False

    with FaultPlan() as plan:
        plan.fail(name, 0, when=note)
        with HostMem(2 * MIB, device="cpu", wait=True):
            pass
    assert callers
    assert threading.get_ident() not in callers


def test_the_constructor_returns_before_anything_is_populated(cpu: CpuDevice) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        with HostMem(MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            assert memory.committed == 0
            assert list(cpu.registered) == []
            hold.release()


def test_a_capacity_beyond_the_machines_memory_costs_nothing() -> None:
    with HostMem("16TiB", MIB, device="cpu", wait=True) as memory:
        assert memory.capacity == 16 << 40
        assert placement_of(memory.address, 64 * MIB).resident in (0, MIB)


def test_without_a_size_the_whole_capacity_is_filled() -> None:
    with HostMem("3MiB", device="cpu") as memory:
        memory.wait_usable(3 * MIB)
        assert (memory.size, memory.committed, memory.capacity) == (3 * MIB,) * 3


def test_capacity_and_size_are_rounded_up_to_slots_and_no_further() -> None:
    with HostMem(100_000, 50_000, device="cpu", slot_size=6000) as memory:
        assert memory.capacity == 102_000
        assert memory.size == 54_000
        memory.wait_usable(54_000)
        assert memory.committed == 54_000


def test_a_size_of_nothing_is_usable_at_once_and_can_grow() -> None:
    with HostMem(MIB, 0, device="cpu") as memory:
        memory.wait_usable(0, 0)
        assert memory.progress.state == "filled"
        memory.resize(MIB)
        memory.wait_usable(MIB)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity: 0; give at least 1 byte"),
        ({"capacity": -5}, "capacity: -5"),
        ({"capacity": "many"}, "capacity: 'many' is no size"),
        ({"capacity": 1 << 62}, "more than any address space"),
        ({"size": -1}, "size: -1"),
        # Compared as given: rounded up to slots both would be 12,000.
        ({"capacity": 10_000, "size": 10_001, "slot_size": 6000}, "10001 bytes are more than"),
        ({"slot_size": 0}, "slot_size: 0"),
        ({"slot_size": 3, "commit_unit": 4}, "commit_unit: 4 is no multiple of the slot size, 3"),
        ({"commit_unit": 0}, "commit_unit: 0"),
        ({"fill_threads": 0}, "fill_threads: 0"),
        ({"fill_threads": True}, "fill_threads: True"),
        ({"fill_threads": "all"}, "fill_threads: 'all'"),
        ({"fill_rate": 0}, "fill_rate: 0"),
        ({"fill_rate": float("inf")}, "fill_rate: inf"),
        ({"on_register_failure": "ignore"}, "on_register_failure: 'ignore'"),
        ({"page_mode": "gigantic"}, "page_mode: 'gigantic'"),
        ({"device": "gpu"}, "device: 'gpu'"),
        ({"numa_node": -1}, "numa_node: -1"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_before_anything_is_taken(
    arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"capacity": MIB, "device": "cpu"} | arguments
    with FaultPlan() as plan, pytest.raises(ValueError, match=message):
        HostMem(**given)
    assert plan.calls("mmap") == []


# -------------------------------------------------------------------------- the address range


@pytest.mark.parametrize(
    ("slot_size", "commit_unit", "alignment"),
    [
        (1, None, 32 * MIB),
        (1, 8 * MIB, 8 * MIB),
        (1, 3 * MIB, MIB),
        (576 * KIB, 576 * KIB, 64 * KIB),  # nine times 64 KiB
        (576 * KIB, None, 64 * KIB),  # the next multiple above 32 MiB is 57 of them
        (6000, None, PAGE),  # 16 divides it, which is less than a page
        (6000, 6000, PAGE),
        (1, 1, PAGE),
    ],
)
def test_the_base_is_aligned_to_the_power_of_two_in_the_commit_unit(
    slot_size: int, commit_unit: int | None, alignment: int
) -> None:
    # Several, because one could be aligned by chance.
    memories = [
        HostMem(MIB, 0, device="cpu", slot_size=slot_size, commit_unit=commit_unit)
        for _ in range(4)
    ]
    assert [memory.address % alignment for memory in memories] == [0] * 4
    for memory in memories:
        memory.close()


def test_where_huge_pages_may_be_used_the_base_is_aligned_to_them() -> None:
    huge = machine().huge_page_size
    if not huge or machine().thp_enabled not in ("always", "madvise"):
        pytest.skip("no transparent huge pages")
    memories = [
        HostMem(3 * MIB, device="cpu", commit_unit=MIB, page_mode="huge", wait=True)
        for _ in range(4)
    ]
    assert [memory.address % huge for memory in memories] == [0] * 4
    for memory in memories:
        memory.close()


def test_growing_keeps_the_base_and_the_bytes() -> None:
    with HostMem(8 * MIB, MIB, device="cpu", wait=True) as memory:
        base = memory.address
        data = write_pattern(memory, MIB)
        memory.resize(8 * MIB)
        memory.wait_usable(8 * MIB)
        assert memory.address == base
        assert np.array_equal(memory.view(0, MIB), data)
        assert not memory.view(MIB, 7 * MIB).any()


def test_shrinking_and_growing_again_keeps_the_base_and_the_retained_bytes() -> None:
    with HostMem(8 * MIB, device="cpu", wait=True) as memory:
        base = memory.address
        data = write_pattern(memory, 8 * MIB)
        memory.resize(3 * MIB + 17)
        assert (memory.size, memory.committed) == (3 * MIB + 17,) * 2
        assert np.array_equal(memory.view(), data[: 3 * MIB + 17])
        memory.resize(8 * MIB)
        memory.wait_usable(8 * MIB)
        assert memory.address == base
        assert np.array_equal(memory.view(0, 3 * MIB + 17), data[: 3 * MIB + 17])


def test_a_page_shared_with_a_slot_that_stays_is_not_lost() -> None:
    # 6,000-byte slots: registrations end inside pages, and so does what is given back.
    with HostMem(1200 * 6000, device="cpu", slot_size=6000, wait=True) as memory:
        data = write_pattern(memory, memory.size)
        for size in (900 * 6000, 175 * 6000, 174 * 6000):
            memory.resize(size)
            assert np.array_equal(memory.view(), data[:size])
        memory.resize(1200 * 6000)
        memory.wait_usable(1200 * 6000)
        assert np.array_equal(memory.view(0, 174 * 6000), data[: 174 * 6000])


def test_address_space_past_the_size_is_inaccessible(maps: Maps) -> None:
    with HostMem(8 * MIB, MIB, device="cpu", wait=True) as memory:
        assert maps(memory.address, memory.capacity) == [
            (0, MIB, "rw-p"),
            (MIB, 8 * MIB, "---p"),
        ]


def test_touching_address_space_past_the_size_is_a_segmentation_fault(child: Child) -> None:
    done = child(
        """
        import ctypes, resource
        from hostmem import HostMem
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        memory = HostMem("8MiB", "1MiB", device="cpu", wait=True)
        ctypes.string_at(memory.address + (1 << 20) - 1, 1)
        print("below", flush=True)
        ctypes.string_at(memory.address + (1 << 20), 1)
        print("above", flush=True)
        """
    )
    assert (done.stdout, done.returncode) == ("below\n", -11)


def test_shrinking_gives_the_memory_back_and_takes_the_access(maps: Maps) -> None:
    with HostMem(8 * MIB, device="cpu", wait=True) as memory:
        assert resident(memory) == 8 * MIB
        memory.resize(2 * MIB)
        assert resident(memory) == 2 * MIB
        assert maps(memory.address, memory.capacity) == [
            (0, 2 * MIB, "rw-p"),
            (2 * MIB, 8 * MIB, "---p"),
        ]


def test_what_a_shrink_cuts_out_of_a_registration_stays_for_later(cpu: CpuDevice) -> None:
    # Registrations end at 1, 2, 4 and 8 MiB; 5 MiB cuts the last one.
    with HostMem(8 * MIB, device="cpu", wait=True) as memory, FaultPlan() as plan:
        memory.resize(5 * MIB)
        assert memory.registrations[-1] == (4 * MIB, 4 * MIB)
        memory.resize(8 * MIB)
        memory.wait_usable(8 * MIB, 0)
        assert plan.log == []


def test_closing_gives_the_address_range_back(maps: Maps) -> None:
    memory = HostMem(8 * MIB, device="cpu", wait=True)
    address = memory.address
    with FaultPlan() as plan:
        memory.close()
    assert plan.calls("munmap") == [(address, 8 * MIB)]


def test_many_commits_leave_few_mappings(maps: Maps) -> None:
    with HostMem(16 * MIB, 0, device="cpu", slot_size=PAGE, commit_unit=4 * PAGE) as memory:
        with FaultPlan() as plan:
            for size in range(MIB, 16 * MIB, MIB):
                memory.resize(size)
                memory.wait_usable(size)
        assert len(plan.calls("cuMemHostRegister")) == 15 * MIB // (4 * PAGE)
        assert len(maps(memory.address, memory.capacity)) == 2


# ------------------------------------------------------------------------------ page faults


@pytest.mark.parametrize("refused", [0, 22], ids=["populated", "touched"])
def test_each_page_is_faulted_exactly_once(child: Child, refused: int) -> None:
    pages = 64 * MIB // PAGE
    done = child(
        f"""
        import resource
        from hostmem import HostMem
        from hostmem.testing import FaultPlan
        HostMem("1MiB", device="cpu", wait=True).close()  # what is imported and started late
        with FaultPlan() as plan, HostMem("64MiB", 0, device="cpu", page_mode="small") as memory:
            plan.fail({POPULATE!r}, {refused}, times=None)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for size in range(1 << 20, 65 << 20, 7 << 20):
                memory.resize(size)
                memory.wait_usable(size)
            memory.resize("64MiB")
            memory.wait_usable(64 << 20)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """
    )
    assert done.returncode == 0, done.stderr
    # Stacks of threads and the interpreter's own pages are some faults more.
    assert pages <= int(done.stdout) < pages * 1.1


# ---------------------------------------------------------------------------- registrations


def test_registrations_are_small_first_and_then_8_mib() -> None:
    with HostMem(40 * MIB, device="cpu", wait=True) as memory:
        sizes = [nbytes // MIB for _, nbytes in memory.registrations]
    assert sizes == [1, 1, 2, 4, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("slot_size", "commit_unit", "nbytes"),
    [
        (1, None, 48 * MIB + 5),
        (1, 3 * MIB, 20 * MIB),
        (PAGE, PAGE, 2 * MIB),
        (6000, None, 40_002_000),
        (6000, 30_000, 3_000_000),
        (576 * KIB, 1152 * KIB, 36 * MIB),
        (576 * KIB, None, 72 * MIB),
        (9 * MIB, None, 45 * MIB),  # a slot larger than registrations would be
    ],
)
def test_registrations_are_whole_slots_inside_one_commit_unit(
    cpu: CpuDevice, slot_size: int, commit_unit: int | None, nbytes: int
) -> None:
    with HostMem(
        nbytes, device="cpu", slot_size=slot_size, commit_unit=commit_unit, wait=True
    ) as memory:
        found = memory.registrations
        unit = memory.commit_unit
        assert unit % slot_size == 0
        assert list(cpu.registered) == [(memory.address + start, n) for start, n in found]
        end = 0
        for start, size in found:
            assert start == end
            assert start % slot_size == size % slot_size == 0
            assert start // unit == (start + size - 1) // unit
            assert size <= max(8 * MIB, slot_size)
            end = start + size
        assert end == memory.size


def test_growth_inside_a_unit_adds_a_registration_there() -> None:
    with HostMem(4 * MIB, MIB // 2, device="cpu", wait=True) as memory:
        memory.resize(MIB)
        memory.wait_usable(MIB)
        assert memory.registrations == [(0, MIB // 2), (MIB // 2, MIB // 2)]


def test_the_end_of_a_registration_is_told_for_each_offset_below_the_watermark() -> None:
    with HostMem(4 * MIB, device="cpu", wait=True) as memory:
        ends = [memory.boundary_after(offset) for offset in (0, MIB - 1, MIB, 4 * MIB - 1)]
        assert ends == [MIB, MIB, 2 * MIB, 4 * MIB]
        assert memory.same_registration(2 * MIB, 4 * MIB - 1)
        assert not memory.same_registration(2 * MIB - 1, 2 * MIB)
        for offset in (-1, 4 * MIB):
            with pytest.raises(ValueError, match="is not usable"):
                memory.boundary_after(offset)


# ---------------------------------------------------------------------------------- waiting


def test_a_wait_ends_with_the_registration_that_holds_its_bytes() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)  # the piece from 1 MiB on
        with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
            memory.wait_usable(MIB)
            hold.wait_reached()
            assert memory.committed == MIB
            assert memory.is_usable(MIB)
            assert not memory.is_usable(MIB + 1)
            hold.release()
            memory.wait_usable(4 * MIB)


def test_bytes_are_not_usable_before_they_are_registered() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("cuMemHostRegister", at=2)
        with HostMem(2 * MIB, device="cpu") as memory:
            hold.wait_reached()
            with pytest.raises(TimeoutError):
                memory.wait_usable(MIB + 1, 0)
            assert memory.committed == MIB
            hold.release()


def test_below_the_watermark_a_wait_takes_no_lock(spawn: Spawn) -> None:
    memory = HostMem(MIB, device="cpu", wait=True)
    with memory._mark._lock, memory._core.lock, memory._core.filler._lock:
        assert spawn(memory.wait_usable, MIB).result(10) is None
        assert spawn(memory.is_usable, MIB).result(10) is True
    memory.close()


def test_part_of_the_usable_range_is_usable() -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        assert memory.is_usable(MIB, MIB // 2)
        assert memory.is_usable(MIB, MIB)
        assert not memory.is_usable(MIB // 2, MIB)
        assert not memory.is_usable(MIB, -1)
        assert not memory.is_usable(MIB + 1)


@pytest.mark.parametrize("end", [-1, MIB + 1])
def test_waiting_for_an_end_outside_the_size_is_refused(end: int) -> None:
    with (
        HostMem(2 * MIB, MIB, device="cpu", wait=True) as memory,
        pytest.raises(ValueError, match=f"end: {end} is outside 0..{MIB}"),
    ):
        memory.wait_usable(end)


def test_a_shrink_ends_the_waits_it_makes_impossible(spawn: Spawn, until: Until) -> None:
    with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
        memory.wait_usable(MIB)
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
            beyond = spawn(memory.wait_usable, 4 * MIB)
            within = spawn(memory.wait_usable, 2 * MIB)
            until(lambda: memory._mark.waiting == 2)
            hold.wait_reached()
            shrinking = spawn(memory.resize, 3 * MIB)
            with pytest.raises(ValueError, match="outside"):
                beyond.result(10)  # told before the fill has stopped
            assert not shrinking.done()
            hold.release()
            shrinking.result(10)
            assert within.result(10) is None


def test_closing_ends_the_waits(spawn: Spawn, until: Until) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        memory = HostMem(MIB, device="cpu", fill_threads=1)
        waiting = spawn(memory.wait_usable, MIB)
        until(lambda: memory._mark.waiting == 1)
        hold.wait_reached()
        closing = spawn(memory.close)
        assert isinstance(waiting.exception(10), ClosedError)
        hold.release()
        closing.result(10)


def test_callbacks_come_in_the_order_of_their_ends() -> None:
    seen: list[tuple[int, BaseException | None, str]] = []

    def note(end: int) -> Callable[[BaseException | None], None]:
        return lambda error: seen.append((end, error, threading.current_thread().name))

    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        with HostMem(4 * MIB, device="cpu") as memory:
            hold.wait_reached()
            for end in (4 * MIB, MIB, 2 * MIB):
                memory.add_usable_callback(end, note(end))
            hold.release()
            memory.wait_usable(4 * MIB)
            assert callbacks.drain(10)
    name = "hostmem-callbacks"
    assert seen == [(MIB, None, name), (2 * MIB, None, name), (4 * MIB, None, name)]


def test_a_coroutine_awaits_its_bytes() -> None:
    async def use(memory: HostMem) -> int:
        await memory.wait_usable_async(MIB)
        return memory.committed

    with HostMem(MIB, device="cpu") as memory:
        assert asyncio.run(use(memory)) == MIB


def test_a_coroutine_is_told_that_the_memory_was_closed() -> None:
    async def use(memory: HostMem) -> None:
        waiting = asyncio.ensure_future(memory.wait_usable_async(MIB))
        await asyncio.sleep(0)  # let it begin
        memory.close()
        with pytest.raises(ClosedError):
            await waiting

    memory = HostMem(MIB, 0, device="cpu")
    memory.pause_fill()
    memory.resize(MIB)
    asyncio.run(use(memory))


def test_coroutines_that_give_up_leave_nothing_behind() -> None:
    async def poll(memory: HostMem) -> None:
        for _ in range(100):
            waiting = asyncio.ensure_future(memory.wait_usable_async(MIB))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    with HostMem(MIB, 0, device="cpu") as memory:
        memory.pause_fill()
        memory.resize(MIB)
        asyncio.run(poll(memory))
        assert memory._mark.waiting == 0


# ----------------------------------------------------------------------- stopping, by order


@pytest.mark.parametrize("name", [POPULATE, "cuMemHostRegister"])
def test_closing_ends_the_fill_after_the_call_it_is_in(
    name: str, spawn: Spawn, until: Until
) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(name, at=2)
        memory = HostMem(64 * MIB, device="cpu", fill_threads=1)
        hold.wait_reached()
        closing = spawn(memory.close)
        until(lambda: memory.closed)
        until(lambda: not memory._core.filler._running)
        calls = len(plan.calls(POPULATE)), len(plan.calls("cuMemHostRegister"))
        hold.release()
        closing.result(10)
        after = len(plan.calls(POPULATE)), len(plan.calls("cuMemHostRegister"))
    # While a registration is held, the populating thread may be in the middle of one piece.
    assert after[0] - calls[0] <= (name == "cuMemHostRegister")
    assert after[1] == calls[1]


def test_shrinking_ends_the_fill_after_the_piece_it_is_in(spawn: Spawn, until: Until) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=6)
        with HostMem(64 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.wait_usable(2 * MIB)
            shrinking = spawn(memory.resize, 2 * MIB)
            until(lambda: memory.size == 2 * MIB)
            until(lambda: not memory._core.filler._running)
            assert not shrinking.done()  # it waits for that piece
            hold.release()
            shrinking.result(10)
            assert len(plan.calls(POPULATE)) == 6
            assert resident(memory) == 2 * MIB


def test_growing_does_not_wait_for_the_fill() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE)
        with HostMem(4 * MIB, MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.resize(4 * MIB)
            assert memory.size == 4 * MIB
            hold.release()
            memory.wait_usable(4 * MIB)


def test_growing_during_the_last_registration_goes_on_from_there() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("cuMemHostRegister")
        with HostMem(4 * MIB, MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.resize(4 * MIB)
            hold.release()
            memory.wait_usable(4 * MIB, 20)
            assert memory.registrations == [(0, MIB), (MIB, MIB), (2 * MIB, 2 * MIB)]


def test_growing_while_the_last_fill_ends_starts_another() -> None:
    with HostMem(8 * MIB, 0, device="cpu") as memory:
        for size in range(PAGE, 400 * PAGE, PAGE):
            memory.resize(size)  # the threads of the step before are about to end
            memory.wait_usable(size, 20)
        assert memory.committed == 399 * PAGE


def test_a_paused_fill_rests_until_it_is_resumed(until: Until) -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=4)
        with HostMem(16 * MIB, device="cpu", fill_threads=1) as memory:
            hold.wait_reached()
            memory.pause_fill()
            hold.release()
            memory.wait_usable(2 * MIB)  # what is populated is still registered
            assert memory.progress.state == "paused"
            assert memory.progress.pauses == 1
            assert len(plan.calls(POPULATE)) == 4
            memory.resume_fill()
            memory.wait_usable(16 * MIB)


def test_a_paused_fill_can_be_closed() -> None:
    with HostMem(16 * MIB, 0, device="cpu") as memory:
        memory.pause_fill()
        memory.resize(16 * MIB)
        assert memory.progress.state == "paused"


def test_a_rated_fill_can_be_closed_between_its_pieces() -> None:
    # One piece at once, the next one in half a million seconds.
    with (
        FaultPlan() as plan,
        HostMem(16 * MIB, device="cpu", fill_rate=1.0, fill_threads=2) as memory,
    ):
        with pytest.raises(TimeoutError):
            memory.wait_usable(MIB, 0.05)
        assert len(plan.calls(POPULATE)) == 1


def test_a_rate_spreads_the_pieces_over_time() -> None:
    # Pieces of 512 KiB at 16 MiB/s: the fifth begins 4/32 s after the first.
    with HostMem(5 * MIB // 2, device="cpu", fill_rate=16.0 * MIB, wait=True) as memory:
        filled = memory.progress.filled_seconds
        assert filled is not None
        assert filled >= 0.125


def test_the_populating_threads_share_the_first_unit() -> None:
    # All of them are in the first unit at once: none has taken a unit for itself.
    with FaultPlan() as plan:
        holds = [plan.hold(POPULATE, at=n) for n in (1, 2)]
        with HostMem(64 * MIB, device="cpu", fill_threads=2) as memory:
            if os.cpu_count() == 1:
                holds[0].release()
            for hold in holds:
                hold.wait_reached()
            offsets = sorted(start - memory.address for start, _ in plan.calls(POPULATE)[:2])
            assert offsets == [0, MIB // 2]
            for hold in holds:
                hold.release()


def test_all_memories_share_one_budget_of_populating_threads(until: Until) -> None:
    budget = fill_thread_budget()
    with FaultPlan() as plan:
        holds = [plan.hold(POPULATE, at=n + 1) for n in range(budget)]
        memories = [HostMem(4 * MIB, device="cpu", fill_threads=budget) for _ in range(2)]
        for hold in holds:
            hold.wait_reached()
        # Twice as many threads have a piece in hand as are let in.
        for memory in memories:
            until(partial(has_taken, memory, budget))
        assert len(plan.calls(POPULATE)) == budget
        for hold in holds:
            hold.release()
        for memory in memories:
            memory.wait_usable(4 * MIB)
            memory.close()


def has_taken(memory: HostMem, pieces: int) -> bool:
    return memory._core.filler._taken == min(pieces * MIB // 2, 4 * MIB)


# ------------------------------------------------------------------------------------ views


DERIVED: dict[str, Callable[[Any], object]] = {
    "itself": lambda view: view,
    "slice": lambda view: view[5:6],
    "reversed": lambda view: view[::-1],
    "other type": lambda view: view.view(np.uint32),
    "reshaped": lambda view: view.reshape(2, -1).T,
    "memoryview": lambda view: memoryview(view),
    "part of a memoryview": lambda view: memoryview(view)[3:9].cast("B"),
    "frombuffer": lambda view: np.frombuffer(view, np.uint8),
    "dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_whatever_is_made_from_a_view_holds_the_memory(
    derive: Callable[[Any], object],
) -> None:
    with HostMem(2 * MIB, device="cpu", wait=True) as memory:
        derived = derive(memory.view(MIB, MIB))
        with pytest.raises(BufferError, match=rf"\[{MIB}, {2 * MIB}\)"):
            memory.resize(MIB)
        with pytest.raises(BufferError, match="live views hold bytes past 0"):
            memory.close()
        del derived
        memory.resize(MIB)


def test_a_copy_of_a_view_holds_nothing() -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        copied = memory.view().copy()
    assert copied.nbytes == MIB


def test_a_shrink_under_a_view_changes_nothing(maps: Maps) -> None:
    with HostMem(4 * MIB, device="cpu", wait=True) as memory, FaultPlan() as plan:
        data = write_pattern(memory, 4 * MIB)
        view = memory.view(3 * MIB, 16)
        before = memory.registrations
        with pytest.raises(BufferError):
            memory.resize(2 * MIB)
        assert (memory.size, memory.committed) == (4 * MIB, 4 * MIB)
        assert memory.registrations == before
        assert plan.log == []
        assert np.array_equal(memory.view(), data)
        del view


def test_a_view_that_a_shrink_would_cut_hinders_it() -> None:
    with HostMem(2 * MIB, device="cpu", wait=True) as memory:
        view = memory.view(MIB - 1, 2)
        with pytest.raises(BufferError):
            memory.resize(MIB)
        memory.resize(MIB + 1)
        del view


def test_a_refused_shrink_leaves_the_fill_running() -> None:
    with HostMem(8 * MIB, device="cpu") as memory:
        view = memory.view(0, MIB)
        with pytest.raises(BufferError):
            memory.resize(0)
        memory.wait_usable(8 * MIB, 20)
        del view


def test_a_close_under_a_view_changes_nothing() -> None:
    memory = HostMem(MIB, device="cpu", wait=True)
    view = memory.view(0, 16)
    with FaultPlan() as plan, pytest.raises(BufferError):
        memory.close()
    assert plan.log == []
    assert not memory.closed
    view[:] = 3
    assert int(memory.view(0, 16).sum()) == 48
    del view
    memory.close()


def test_a_view_below_the_new_size_does_not_hinder_a_shrink() -> None:
    with HostMem(2 * MIB, device="cpu", wait=True) as memory:
        view = memory.view(0, MIB)
        view[:] = 7
        memory.resize(MIB)
        assert int(view.sum()) == 7 * MIB
        del view


def test_growing_under_a_view_is_allowed() -> None:
    with HostMem(2 * MIB, MIB, device="cpu", wait=True) as memory:
        view = memory.view()
        memory.resize(2 * MIB)
        memory.wait_usable(2 * MIB)
        assert view.nbytes == MIB
        del view


def test_a_view_of_no_bytes_holds_nothing() -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        view = memory.view(MIB)
        assert view.nbytes == 0
        memory.close()


def test_a_view_waits_for_its_bytes_only() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
            memory.view(0, MIB)[:] = 1
            with pytest.raises(TimeoutError):
                memory.view(0, MIB + 1, timeout=0)
            hold.release()


def test_a_view_has_the_type_and_shape_asked_for() -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        view = memory.view(3, 24, dtype=np.float64, shape=(3, 1))
        assert view.dtype == np.float64
        assert view.shape == (3, 1)
        assert view.ctypes.data == memory.address + 3
        assert view.flags.writeable
        del view


def test_two_views_see_the_same_bytes() -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        memory.view(100, 4)[:] = [1, 2, 3, 4]
        assert memory.view(102, 2).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 2), (0, MIB + 1), (MIB, 1), (MIB + 1, None), (5, -1)]
)
def test_a_view_outside_the_size_is_refused(offset: int, nbytes: int | None) -> None:
    with (
        HostMem(2 * MIB, MIB, device="cpu", wait=True) as memory,
        pytest.raises(ValueError, match=f"outside 0..{MIB}"),
    ):
        memory.view(offset, nbytes)


@pytest.mark.parametrize("arguments", [{"dtype": np.uint64}, {"shape": (2, 3)}])
def test_a_view_that_does_not_fit_is_refused_and_holds_nothing(arguments: dict[str, Any]) -> None:
    with HostMem(MIB, device="cpu", wait=True) as memory:
        with pytest.raises(ValueError):  # noqa: PT011 - numpy's words
            memory.view(0, 7, **arguments)
        memory.resize(0)


def test_a_view_may_cross_registrations_unless_one_is_asked_for() -> None:
    with HostMem(2 * MIB, device="cpu", wait=True) as memory:
        assert memory.view(MIB - 1, 2).nbytes == 2
        with pytest.raises(ValueError, match=f"a registration ends at {MIB}"):
            memory.view(MIB - 1, 2, one_registration=True)
        assert memory.view(0, MIB, one_registration=True).nbytes == MIB
        assert memory.view(MIB, 0, one_registration=True).nbytes == 0


# ------------------------------------------------------------------------- resizing at once


@pytest.mark.parametrize("size", [-1, 2 * MIB + 1])
def test_a_size_outside_the_capacity_is_refused_and_changes_nothing(size: int) -> None:
    with HostMem(2 * MIB, MIB, device="cpu", wait=True) as memory:
        with pytest.raises(ValueError, match=f"size: {size}"):
            memory.resize(size)
        assert (memory.size, memory.committed) == (MIB, MIB)


def test_resizing_from_many_threads_ends_in_a_size_that_one_of_them_asked_for(
    spawn: Spawn,
) -> None:
    sizes = [n * 700 * KIB for n in range(1, 9)]
    with HostMem(8 * MIB, device="cpu") as memory:

        def resize(mine: list[int]) -> None:
            for size in mine:
                memory.resize(size)

        resizing = [spawn(resize, sizes[n:] + sizes[:n]) for n in range(6)]
        for future in resizing:
            future.result(60)
        assert memory.size in sizes
        memory.wait_usable(memory.size, 20)
        # It may be more: a registration that a shrink cut stays.
        assert sum(nbytes for _, nbytes in memory.registrations) >= memory.size
        write_pattern(memory, memory.size)


# ------------------------------------------------------------------------------- inspection


def test_progress_tells_the_size_the_share_and_the_state() -> None:
    with FaultPlan() as plan:
        hold = plan.hold(POPULATE, at=3)
        with HostMem(4 * MIB, device="cpu", fill_threads=1) as memory:
            memory.wait_usable(MIB)
            hold.wait_reached()
            progress = memory.progress
            assert (progress.size, progress.committed, progress.fraction) == (4 * MIB, MIB, 0.25)
            assert (progress.state, progress.registrations, progress.threads) == ("filling", 1, 1)
            assert progress.filled_seconds is None
            assert progress.first_usable_seconds is not None
            hold.release()
            memory.wait_usable(4 * MIB)
            done = memory.progress
            assert (done.state, done.fraction, done.eta) == ("filled", 1.0, 0.0)
            assert done.filled_seconds is not None
            assert 0 < done.first_usable_seconds <= done.filled_seconds  # type: ignore[operator]


def test_a_memory_describes_itself() -> None:
    memory = HostMem(2 * MIB, device="cpu", wait=True)
    assert repr(memory) == (
        f"<HostMem 2 MiB at {memory.address:#x}, 2 MiB usable (100 %), cpu, no node, small pages>"
    )
    assert "registered     2 ranges, 0 quarantined" in memory.describe()
    memory.close()
    assert repr(memory) == memory.describe() == "<HostMem 2 MiB, closed>"


def test_placement_counts_the_resident_pages() -> None:
    with HostMem(8 * MIB, 2 * MIB, device="cpu", wait=True) as memory:
        placement = memory.placement()
        if placement.method.startswith("not verifiable"):
            pytest.skip(placement.method)
        assert placement.resident == 2 * MIB


def test_filling_logs_the_route_alone(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "hostmem"),
        HostMem(2 * MIB, device="cpu", wait=True) as memory,
    ):
        memory.resize(MIB)
    (record,) = caplog.records
    assert "is page-locked for nobody: cpu reads host memory as it is" in record.getMessage()
