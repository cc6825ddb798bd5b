"""Pool groups: which pages may be had while the fill of their memory goes on, or has failed."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from hostmem import CpuDevice, HostMem, HostOOMError, OutOfPagesError
from hostmem.testing import FaultPlan
from kvtier.pools import PoolGroup
from kvtier.transfer.memory import MemoryPool, PageMemory

MIB = 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


@pytest.fixture
def plan() -> Iterator[FaultPlan]:
    with FaultPlan() as plan:
        yield plan


@pytest.fixture
def group(plan: FaultPlan, cpu: CpuDevice) -> Iterator[PoolGroup]:
    """Four pages of 1 MiB, each a commit unit of two populates; at most eight."""
    memory = HostMem(8 * MIB, 4 * MIB, device=cpu, slot_size=MIB, commit_unit=MIB, fill_threads=1)
    group = PoolGroup(PageMemory([MemoryPool(memory, MIB)]), 4, 8)
    yield group
    group.close()


def memory_of(group: PoolGroup) -> HostMem:
    (pool,) = group.memory.pools
    assert isinstance(pool, MemoryPool)
    assert isinstance(pool.memory, HostMem)
    return pool.memory


@pytest.fixture
def halfway(plan: FaultPlan) -> None:
    """Let the fill fail at its third page; needs to come before `group`."""
    plan.fail(POPULATE, errno.ENOMEM, at=5)


def failed(group: PoolGroup) -> None:
    with pytest.raises(HostOOMError):
        memory_of(group).wait_usable(4 * MIB, 20)


def test_pages_whose_memory_is_still_to_come_are_available(plan: FaultPlan, cpu: CpuDevice) -> None:
    filling = plan.hold(POPULATE, at=5)
    memory = HostMem(4 * MIB, 4 * MIB, device=cpu, slot_size=MIB, commit_unit=MIB, fill_threads=1)
    group = PoolGroup(PageMemory([MemoryPool(memory, MIB)]), 4, 4)
    filling.wait_reached()
    memory.wait_usable(2 * MIB, 20)  # registered while the next page is populated
    assert group.memory.usable_pages() == 2
    assert group.slots.available == 4
    filling.release()
    group.close()


@pytest.mark.usefixtures("halfway")
def test_pages_whose_memory_failed_are_not_available(group: PoolGroup) -> None:
    failed(group)
    assert group.failed()
    assert group.slots.available == group.memory.usable_pages() == 2
    with pytest.raises(OutOfPagesError, match="3 slots wanted, 2 of 2 are free"):
        group.slots.allocate(3)
    assert group.slots.allocate(2).ids.tolist() == [0, 1]
    memory_of(group).wait_usable(2 * MIB, timeout=0)


def test_a_page_that_was_waited_for_in_vain_is_not_handed_out_again(
    plan: FaultPlan, cpu: CpuDevice
) -> None:
    plan.fail(POPULATE, errno.ENOMEM, at=5)
    filling = plan.hold(POPULATE, at=5)
    memory = HostMem(4 * MIB, 4 * MIB, device=cpu, slot_size=MIB, commit_unit=MIB, fill_threads=1)
    group = PoolGroup(PageMemory([MemoryPool(memory, MIB)]), 4, 4)
    filling.wait_reached()
    ids = group.slots.allocate(4).ids
    filling.release()
    failed(group)
    group.slots.release(ids[::-1])
    assert group.slots.available == 2
    assert sorted(group.slots.allocate(2).ids.tolist()) == [0, 1]
    assert group.slots.statistics().held == 2
    memory.resize(4 * MIB)  # tries again
    assert sorted(group.slots.allocate(2).ids.tolist()) == [2, 3]
    memory.wait_usable(4 * MIB, 20)
    group.close()


@pytest.mark.usefixtures("halfway")
def test_a_failed_level_goes_on_with_what_it_has(group: PoolGroup) -> None:
    failed(group)
    group.slots.resize(2)
    group.memory.resize(2)
    assert group.slots.available == 2
    group.memory.resize(8)
    group.slots.resize(8)
    assert not group.failed()
    assert group.slots.available == 8
    memory_of(group).wait_usable(8 * MIB, 20)


@pytest.mark.usefixtures("halfway")
def test_slots_come_back_after_their_memory_was_closed(group: PoolGroup) -> None:
    failed(group)
    ids = group.slots.allocate(2).ids
    group.close()
    group.slots.release(ids)
    assert group.slots.available == 0
