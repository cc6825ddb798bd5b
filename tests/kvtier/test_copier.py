"""The page copier: every pair of memories, whole pages on one side and pools on the other."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hostmem import ClosedError, CpuDevice, CudaDevice, Device, HostEvent, HostMem
from hostmem.testing import FakeDriver, FaultPlan
from kvtier import PageCopier
from kvtier.transfer import copier as copier_module
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.memory import DiskPool, Ids, MemoryPool, PageMemory
from kvtier.transfer.page_events import BatchEvent, PageEvents, gathered
from kvtier.transfer.plan import Addresses
from tests.kvtier.copier_bench import PAGES, Bench, finish, ids

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

NOTHING = Dependencies()
HOT = {"one-pool": (12288,), "three-pools": (4096, 2048, 6144), "odd": (5000,)}


@pytest.fixture(params=["cpu", "gpu-like"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return cpu if request.param == "cpu" else CudaDevice(0, driver=FakeDriver())


@pytest.fixture
def bench(device: Device, tmp_path: Path, tiers: Tiers) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(device, tmp_path, tiers, stack)


@pytest.fixture
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the staging buffer hold six pages of 12 KiB: a batch takes half of them at a time."""
    monkeypatch.setattr(copier_module, "_STAGING_BYTES", 6 * 12288)


# ------------------------------------------------------------------------ the pairs of kinds


@pytest.mark.parametrize("sizes", HOT.values(), ids=HOT)
def test_pages_go_from_hot_pools_to_whole_pages_of_the_host_and_back(
    bench: Bench, sizes: tuple[int, ...]
) -> None:
    copier, hot, host = bench.copier(sum(sizes)), bench.hot(*sizes), bench.host(sum(sizes))
    pages = bench.put(hot, 3, 4, 5, 15, 0)
    down = copier.copy(hot, ids(3, 4, 5, 15, 0), host, ids(7, 8, 9, 2, 10), NOTHING, up=False)
    assert finish(down) == [5]
    # A cold page is its hot slots, one behind the other.
    for slot, page in zip((7, 8, 9, 2, 10), pages, strict=True):
        assert np.array_equal(bench.get(host, slot), page)
    up = copier.copy(host, ids(7, 8, 9, 2, 10), hot, ids(1, 2, 12, 13, 14), NOTHING, up=True)
    assert finish(up) == [5]
    for slot, page in zip((1, 2, 12, 13, 14), pages, strict=True):
        assert np.array_equal(bench.get(hot, slot), page)


@pytest.mark.parametrize("sizes", HOT.values(), ids=HOT)
def test_pages_go_from_hot_pools_to_disk_and_back(bench: Bench, sizes: tuple[int, ...]) -> None:
    copier, hot, disk = bench.copier(sum(sizes)), bench.hot(*sizes), bench.disk(sum(sizes))
    pages = bench.put(hot, 3, 4, 5, 15, 0)
    finish(copier.copy(hot, ids(3, 4, 5, 15, 0), disk, ids(7, 8, 9, 2, 10), NOTHING, up=False))
    finish(copier.copy(disk, ids(7, 8, 9, 2, 10), hot, ids(1, 2, 12, 13, 14), NOTHING, up=True))
    for slot, page in zip((1, 2, 12, 13, 14), pages, strict=True):
        assert np.array_equal(bench.get(hot, slot), page)


def test_pages_go_from_the_host_to_disk_and_from_there_to_hot_pools(bench: Bench) -> None:
    copier, hot = bench.copier(12288), bench.hot(4096, 2048, 6144)
    host, disk = bench.host(12288), bench.disk(12288)
    pages = bench.put(host, 6, 2, 3)
    finish(copier.copy(host, ids(6, 2, 3), disk, ids(0, 1, 9), NOTHING, up=False))
    finish(copier.copy(disk, ids(9, 0, 1), hot, ids(4, 5, 6), NOTHING, up=True))
    assert np.array_equal(bench.get(hot, 4), pages[2])
    assert np.array_equal(bench.get(hot, 5), pages[0])
    assert np.array_equal(bench.get(hot, 6), pages[1])


def test_other_slots_are_left_alone(bench: Bench) -> None:
    copier, hot, host = bench.copier(4096), bench.hot(4096), bench.host(4096)
    others = [slot for slot in range(PAGES) if slot not in (3, 4)]
    pages = bench.put(host, *others)
    bench.put(hot, 0, 1)
    finish(copier.copy(hot, ids(0, 1), host, ids(3, 4), NOTHING, up=False))
    for slot, page in zip(others, pages, strict=True):
        assert np.array_equal(bench.get(host, slot), page)


# --------------------------------------------------------------------------------- requests


def test_a_batch_is_one_submission_and_neighbours_one_descriptor_inside_a_registration(
    cpu: CpuDevice, tmp_path: Path, tiers: Tiers
) -> None:
    with ExitStack() as stack:
        bench = Bench(cpu, tmp_path, tiers, stack)
        copier, hot, host = bench.copier(4096), bench.host(4096), bench.host(4096)
        with FaultPlan() as plan:
            finish(copier.copy(hot, ids(*range(8)), host, ids(*range(2, 10)), NOTHING, up=False))
            # Registrations hold four slots: the sources end one at 4, the destinations (shifted
            # by two) at 4 and 8, that is before the sources 2 and 6. 0-1, 2-3, 4-5, 6-7.
            assert plan.calls("cuMemcpyBatchAsync") == [(4,)]


@pytest.mark.usefixtures("few_buffers")
def test_more_pages_than_staging_buffers_go_in_parts_with_an_event_each(bench: Bench) -> None:
    sizes = (4096, 8192)  # two pools: the file cannot read into a page
    copier, hot, disk = bench.copier(12288), bench.hot(*sizes), bench.disk(12288)
    slots = ids(0, 2, 4, 6, 8, 10, 12)
    pages = bench.put(hot, *slots.tolist())
    assert finish(copier.copy(hot, slots, disk, slots, NOTHING, up=False)) == [3, 3, 1]
    back = slots + np.int32(1)
    assert finish(copier.copy(disk, slots, hot, back, NOTHING, up=True)) == [3, 3, 1]
    for slot, page in zip(back.tolist(), pages, strict=True):
        assert np.array_equal(bench.get(hot, slot), page)


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("what", ["down", "up", "within"])
def test_pages_whose_data_failed_fail_in_the_part_they_are_in(bench: Bench, what: str) -> None:
    hot, disk = bench.hot(4096, 8192), bench.disk(12288)
    copier = bench.copier(12288)
    pages = bench.put(hot, 0, 1, 2, 3, 4)
    finish(copier.copy(hot, ids(0, 1, 2, 3, 4), disk, ids(0, 1, 2, 3, 4), NOTHING, up=False))
    brought, gone = BatchEvent(1), OSError(errno.EIO, "gone")
    brought.part_done({4: gone})
    after = Dependencies(gathered([brought.page(n) for n in range(5)]))
    old, new = ids(0, 1, 2, 3, 4), ids(9, 8, 7, 6, 5)
    if what == "within":
        events = copier.relocate(disk, old, new, after)
    elif what == "down":
        events = copier.copy(hot, old, disk, new, after, up=False)
    else:
        events = copier.copy(disk, old, hot, new, after, up=True)
    for _, event in events:
        event.wait_finished()
    assert [(count, event.failures) for count, event in events] == [(3, {}), (2, {1: gone})]
    if what != "up":
        finish(copier.copy(disk, new[:4], hot, new[:4], NOTHING, up=True))
    for slot, page in zip(new[:4].tolist(), pages[:4], strict=True):
        assert np.array_equal(bench.get(hot, slot), page)


@pytest.mark.odirect
@pytest.mark.usefixtures("few_buffers")
def test_pages_of_whole_blocks_go_through_buffers_made_for_larger_odd_pages(bench: Bench) -> None:
    """Direct I/O takes aligned memory only; the largest page is of another group."""
    copier, hot, disk = bench.copier(10000), bench.hot(4096, 4096), bench.disk(8192)
    pages = bench.put(hot, 0, 1, 2)
    finish(copier.copy(hot, ids(0, 1, 2), disk, ids(3, 1, 5), NOTHING, up=False))
    finish(copier.copy(disk, ids(3, 1, 5), hot, ids(4, 5, 6), NOTHING, up=True))
    for slot, page in zip((4, 5, 6), pages, strict=True):
        assert np.array_equal(bench.get(hot, slot), page)


# ----------------------------------------------------------------------------- dependencies


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
def test_nothing_is_written_before_its_fences(
    bench: Bench, gate: Callable[[], Gate], kind: str, up: bool
) -> None:
    copier, hot = bench.copier(4096), bench.hot(4096)
    cold = bench.host(4096) if kind == "host" else bench.disk(4096)
    fence = gate()
    (page,) = bench.put(hot, 0)
    finish(copier.copy(hot, ids(0), cold, ids(5), NOTHING, up=False))
    bench.put(hot, 1)
    source, to = (cold, hot) if up else (hot, cold)
    from_, at = (5, 2) if up else (1, 5)
    ((_, event),) = copier.copy(
        source, ids(from_), to, ids(at), Dependencies(fences=(fence,)), up=up
    )
    fence.wait_asked()
    assert not event.query()
    # What the fence protects is untouched: slot 2 of the hot level, or page 5 of the cold one.
    if up:
        assert not bench.get(hot, 2).any()
    else:
        finish(copier.copy(cold, ids(5), hot, ids(9), NOTHING, up=True))
        assert np.array_equal(bench.get(hot, 9), page)
    fence.set()
    event.synchronize()


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
def test_failed_data_fails_the_copy_and_writes_nothing(bench: Bench, kind: str, up: bool) -> None:
    copier, hot = bench.copier(4096), bench.hot(4096)
    cold = bench.host(4096) if kind == "host" else bench.disk(4096)
    data = HostEvent()
    data.set(OSError(errno.EIO, "the disk is gone"))
    source, to = (cold, hot) if up else (hot, cold)
    bench.put(hot, 1)
    with FaultPlan() as plan:
        ((_, event),) = copier.copy(source, ids(1), to, ids(2), Dependencies((data,)), up=up)
        with pytest.raises(OSError, match="the disk is gone"):
            event.synchronize()
        assert plan.calls("pwritev") == plan.calls("preadv") == []
        assert plan.calls("process_vm_readv") == []


@pytest.mark.parametrize("sizes", [(12288,), (4096, 8192)], ids=["direct", "staged"])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_fails_the_copy(bench: Bench, sizes: tuple[int, ...], call: str) -> None:
    copier, hot, disk = bench.copier(12288), bench.hot(*sizes), bench.disk(12288)
    pages = bench.put(hot, 1)
    with FaultPlan() as plan:
        plan.fail(call, errno.EIO)
        down = copier.copy(hot, ids(1), disk, ids(3), NOTHING, up=False)
        if call == "pwritev":
            with pytest.raises(OSError, match="pwritev"):
                finish(down)
        else:
            finish(down)
            with pytest.raises(OSError, match="preadv"):
                finish(copier.copy(disk, ids(3), hot, ids(2), NOTHING, up=True))
    # The copier goes on.
    finish(copier.copy(hot, ids(1), disk, ids(3), NOTHING, up=False))
    finish(copier.copy(disk, ids(3), hot, ids(2), NOTHING, up=True))
    assert np.array_equal(bench.get(hot, 2), pages[0])


def test_a_copy_into_memory_that_is_still_being_filled_waits_for_it_and_the_caller_does_not(
    cpu: CpuDevice, tmp_path: Path, tiers: Tiers
) -> None:
    with ExitStack() as stack:
        bench = Bench(cpu, tmp_path, tiers, stack)
        copier, hot, disk = bench.copier(4096), bench.host(4096), bench.disk(4096)
        (page,) = bench.put(hot, 1)
        plan = stack.enter_context(FaultPlan())
        held = plan.hold("cuMemHostRegister")
        memory = HostMem(PAGES * 4096, device=cpu, slot_size=4096, commit_unit=PAGES * 4096)
        stack.callback(memory.close)
        stack.callback(held.release)
        filling = PageMemory([MemoryPool(memory, 4096)])
        ((_, down),) = copier.copy(hot, ids(1), filling, ids(3), NOTHING, up=False)
        on = Dependencies((down,))
        ((_, away),) = copier.copy(filling, ids(3), disk, ids(0), on, up=False)
        held.wait_reached()
        assert not down.query()
        assert not away.query()
        held.release()
        away.synchronize()
        finish(copier.copy(disk, ids(0), hot, ids(2), NOTHING, up=True))
        assert np.array_equal(bench.get(hot, 2), page)


def test_a_read_into_memory_that_is_still_being_filled_waits_for_it_too(
    cpu: CpuDevice, tmp_path: Path, tiers: Tiers
) -> None:
    with ExitStack() as stack:
        bench = Bench(cpu, tmp_path, tiers, stack)
        copier, hot, disk = bench.copier(4096), bench.host(4096), bench.disk(4096)
        (page,) = bench.put(hot, 1)
        finish(copier.copy(hot, ids(1), disk, ids(0), NOTHING, up=False))
        plan = stack.enter_context(FaultPlan())
        held = plan.hold("cuMemHostRegister")
        memory = HostMem(PAGES * 4096, device=cpu, slot_size=4096, commit_unit=PAGES * 4096)
        stack.callback(memory.close)
        stack.callback(held.release)
        filling = PageMemory([MemoryPool(memory, 4096)])
        ((_, up),) = copier.copy(disk, ids(0), filling, ids(3), NOTHING, up=True)
        held.wait_reached()
        assert plan.calls("preadv") == []
        assert not up.query()
        held.release()
        up.synchronize()
        assert np.array_equal(bench.get(filling, 3), page)


# ---------------------------------------------------------------------------------- buffers

TWO_POOLS = (4096, 8192)  # the file cannot read into such a page


def half_of_the_pages(bench: Bench, copier: PageCopier) -> tuple[PageMemory, PageMemory]:
    """Make a hot level and a disk level that each hold content(slot + 1) in slots 0 to 7."""
    hot, disk = bench.hot(*TWO_POOLS), bench.disk(12288)
    bench.put(hot, *range(8))
    finish(copier.copy(hot, ids(*range(8)), disk, ids(*range(8)), NOTHING, up=False))
    return hot, disk


@pytest.mark.usefixtures("few_buffers")
def test_a_copy_never_waits_for_buffers_that_are_in_use(
    bench: Bench, gate: Callable[[], Gate]
) -> None:
    """Whoever submits may be the one that has to open the gate."""
    copier = bench.copier(12288)
    hot, disk = half_of_the_pages(bench, copier)
    shut = gate()
    behind = Dependencies((shut,))
    low, high = ids(*range(8)), ids(*range(8, 16))
    events = copier.copy(hot, low, disk, high, behind, up=False)  # more than there are buffers
    events += copier.copy(disk, low, hot, high, NOTHING, up=True)
    events += copier.relocate(disk, high, low, Dependencies((events[2][1],)))
    assert [count for count, _ in events] == [3, 3, 2] * 3
    shut.wait_asked()
    assert not any(event.query() for _, event in events[:3])
    shut.set()
    finish(events)
    for slot in range(8):
        assert np.array_equal(bench.get(hot, slot + 8), bench.content(slot))


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_copies_of_both_directions_never_wait_for_each_other_in_a_circle(
    cpu: CpuDevice,
    tmp_path: Path,
    tiers: Tiers,
    gate: Callable[[], Gate],
    order: tuple[int, ...],
) -> None:
    """Each takes all buffers, and all are shut in when they are submitted."""
    with ExitStack() as stack:
        bench = Bench(cpu, tmp_path, tiers, stack)
        copier = bench.copier(12288)
        hot, disk = half_of_the_pages(bench, copier)
        gates = [gate() for _ in range(4)]
        down, up, within, back = (Dependencies((one,)) for one in gates)
        events = copier.copy(hot, ids(*range(6)), disk, ids(*range(8, 14)), down, up=False)
        events += copier.copy(disk, ids(*range(6)), hot, ids(*range(8, 14)), up, up=True)
        events += copier.relocate(disk, ids(*range(6)), ids(0, 1, 2, 3, 14, 15), within)
        after = Dependencies(back.data, tuple(event for _, event in events))
        events += copier.copy(hot, ids(*range(6)), disk, ids(*range(8, 14)), after, up=False)
        for which in order:
            gates[which].set()
        finish(events)
        for slot in range(6):
            assert np.array_equal(bench.get(hot, slot + 8), bench.content(slot))


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("seed", range(4))
def test_copies_that_depend_on_each_other_all_end_and_bring_the_right_bytes(
    bench: Bench, gate: Callable[[], Gate], seed: int
) -> None:
    copier, rng = bench.copier(12288), random.Random(seed)
    hot, disk = half_of_the_pages(bench, copier)
    there = {id(memory): [*range(8), *[None] * 8] for memory in (hot, disk)}
    last: dict[tuple[int, int], list[PageEvents]] = {}  # by memory and slot: who used it last
    shut = [gate() for _ in range(6)]
    events: list[tuple[int, PageEvents]] = []
    for _ in range(40):
        source, to = rng.choice([(hot, disk), (disk, hot), (disk, disk)])
        n = rng.randint(1, 7)
        full = [slot for slot, page in enumerate(there[id(source)]) if page is not None]
        old = rng.sample(full, min(n, len(full)))
        new = rng.sample(range(PAGES), len(old))
        if source is to and set(old) & set(new):
            continue
        used = [(id(source), slot) for slot in old] + [(id(to), slot) for slot in new]
        earlier = {id(event): event for key in used for event in last.get(key, ())}
        extra = [rng.choice(shut)] if rng.random() < 0.3 else []
        after = Dependencies((*earlier.values(), *extra))
        if source is to:
            made = copier.relocate(disk, ids(*old), ids(*new), after)
        else:
            made = copier.copy(source, ids(*old), to, ids(*new), after, up=to is hot)
        pages = [there[id(source)][slot] for slot in old]
        for slot, page in zip(new, pages, strict=True):
            there[id(to)][slot] = page
        last |= {key: [event for _, event in made] for key in used}
        events += made
    for one in shut:
        one.set()
    finish(events)
    for slot, page in enumerate(there[id(hot)]):
        if page is not None:
            assert np.array_equal(bench.get(hot, slot), bench.content(page))


@pytest.mark.parametrize("what", ["down", "up", "within"])
def test_buffers_are_in_use_until_the_last_step_is_done(bench: Bench, what: str) -> None:
    copier = bench.copier(12288)
    hot, disk = half_of_the_pages(bench, copier)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv" if what == "up" else "pwritev")
        if what == "within":
            ((_, event),) = copier.relocate(disk, ids(0, 1), ids(8, 9), NOTHING)
        elif what == "down":
            ((_, event),) = copier.copy(hot, ids(0, 1), disk, ids(8, 9), NOTHING, up=False)
        else:
            ((_, event),) = copier.copy(disk, ids(0, 1), hot, ids(8, 9), NOTHING, up=True)
        held.wait_reached()  # the first step is done
        ring = copier._ring()
        with ring.lend(ring.count) as loan:
            assert loan.fences == (event,)
        held.release()
        event.synchronize()


def test_nobody_reads_into_buffers_that_were_given_back(bench: Bench) -> None:
    copier = bench.copier(12288)
    hot, disk = half_of_the_pages(bench, copier)
    copier.close()
    with FaultPlan() as plan:
        with pytest.raises(ClosedError):
            copier.copy(disk, ids(0), hot, ids(8), NOTHING, up=True)
        with pytest.raises(ClosedError):
            copier.relocate(disk, ids(0), ids(9), NOTHING)
        assert plan.calls("preadv") == []


# ------------------------------------------------------------------------------------ names


class Noting(SlotFile):
    """A file that notes what its slots are called."""

    def __init__(self, folder: str, slot_size: int, slots: int) -> None:
        self.names: dict[int, bytes] = {}
        super().__init__(folder, slot_size, slots)

    def write(
        self,
        ids: Ids,
        addresses: Addresses,
        after: Dependencies,
        names: Sequence[bytes] | None = None,
    ) -> PageEvents:
        self.names.update(zip(ids.tolist(), names or (), strict=names is not None))
        return super().write(ids, addresses, after)


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("sizes", [(12288,), TWO_POOLS], ids=["direct", "staged"])
def test_a_file_is_told_what_its_pages_are_called(
    bench: Bench, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    copier, hot = bench.copier(12288), bench.hot(*sizes)
    file = Noting(str(tmp_path), 12288, PAGES)
    with ExitStack() as stack:
        stack.callback(file.close)
        disk = PageMemory([DiskPool(file)])
        bench.put(hot, 0, 1, 2, 3)
        names = [b"a", b"b", b"c", b"d"]
        finish(
            copier.copy(hot, ids(0, 1, 2, 3), disk, ids(9, 1, 7, 4), NOTHING, up=False, names=names)
        )
        assert file.names == {9: b"a", 1: b"b", 7: b"c", 4: b"d"}
        finish(copier.relocate(disk, ids(9, 1, 7, 4), ids(0, 2, 3, 5), NOTHING, names=names[::-1]))
        assert file.names == {
            9: b"a",
            1: b"b",
            7: b"c",
            4: b"d",
            0: b"d",
            2: b"c",
            3: b"b",
            5: b"a",
        }
        finish(copier.copy(disk, ids(0, 2, 3, 5), hot, ids(4, 5, 6, 7), NOTHING, up=True))


# ------------------------------------------------------------------------------------ close


def test_closing_finishes_what_was_submitted(bench: Bench, spawn: Spawn) -> None:
    copier, hot, disk = bench.copier(12288), bench.hot(4096, 8192), bench.disk(12288)
    bench.put(hot, 1)
    with FaultPlan() as plan:
        held = plan.hold("pwritev")
        ((_, event),) = copier.copy(hot, ids(1), disk, ids(3), NOTHING, up=False)
        held.wait_reached()
        closing = spawn(copier.close)
        assert not closing.done()
        held.release()
        closing.result(20)
    assert event.query()
    assert event.error is None


def test_closing_gives_everything_back_although_one_stream_fails(tmp_path: Path) -> None:
    driver = FakeDriver()
    copier = PageCopier(CudaDevice(0, driver=driver), 4096, staged=True)
    assert list(driver.registered) != []
    with FaultPlan() as plan:
        plan.fail("cuStreamSynchronize", 700)
        with pytest.raises(Exception, match="cuStreamSynchronize"):
            copier.close()
    assert list(driver.registered) == []
    copier.close()


def test_a_staging_buffer_that_cannot_be_had_leaves_no_thread(cpu: CpuDevice) -> None:
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.ENOMEM)
        with pytest.raises(MemoryError):
            PageCopier(cpu, 4096, staged=True)
