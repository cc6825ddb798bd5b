"""Changing a level's quota while it is in use: a transaction, and no byte is lost."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hostmem import DiskOOMError, HostMem, OutOfPagesError, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kvtier.conftest import Tiers
    from tests.threads import Spawn

MIB = 1 << 20
PAGE = MIB // 2  # four to a grain


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[TierStorage]:
    """Levels of 4 hot, 8 host and 8 disk pages; host and disk may have 32."""
    config = KVCacheManagerConfig(
        16,
        [
            GpuCacheTierConfig("2MiB", "8MiB"),
            HostCacheTierConfig("4MiB", "16MiB"),
            DiskCacheTierConfig("4MiB", tmp_path, "16MiB"),
        ],
        [AttentionLayerConfig(0, [BufferConfig("kv", PAGE)])],
    )
    with TierStorage(config, device="cpu") as storage:
        yield storage


def state(storage: TierStorage, pages: list[Page]) -> object:
    """Everything that a refused change must leave as it was."""
    memories = [
        pool.memory.size
        for level in storage.levels[:2]
        for pool in level.groups[0].memory.pools
        if hasattr(pool, "memory")
    ]
    places = [(page.level, page.slot) for page in pages]
    order = [[p.owner for p in level.policies[0].victims()] for level in storage.levels]
    return storage.stats(), places, order, memories


def fill(tiers: Tiers, storage: TierStorage, keys: range) -> list[Page]:
    """Make pages one after another, so that each may move the one before down."""
    return [page for key in keys for page in tiers.new(storage, key)]


def assert_all_there(tiers: Tiers, storage: TierStorage, pages: list[Page]) -> None:
    for page in pages:
        data = tiers.read(storage, page)
        assert isinstance(page.owner, int)
        assert np.array_equal(data, tiers.content(page.owner, PAGE)), page
    storage._check()


def test_a_level_grows_in_place_and_takes_more_pages(tiers: Tiers, storage: TierStorage) -> None:
    pages = fill(tiers, storage, range(4))
    storage.adjust_cache_level(0, "4MiB")
    assert storage.quota(0) == 4 * MIB
    pages += fill(tiers, storage, range(4, 8))
    assert [page.level for page in pages] == [0] * 8
    assert_all_there(tiers, storage, pages)


def test_a_quota_is_rounded_up_to_the_grain(storage: TierStorage) -> None:
    storage.adjust_cache_level(1, 4 * MIB + 1)
    assert storage.quota(1) == 6 * MIB
    assert storage.stats().levels["host"].slots == 12


def test_the_bound_is_reached_and_not_passed(storage: TierStorage) -> None:
    storage.adjust_cache_level(1, "16MiB")
    before = state(storage, [])
    with pytest.raises(ValueError, match=r"host\.quota: .* above max_quota, 16 MiB"):
        storage.adjust_cache_level(1, 16 * MIB + 1)
    assert state(storage, []) == before


@pytest.mark.parametrize("quota", [0, -1, 2 * MIB - 1])
def test_less_than_a_grain_is_refused(storage: TierStorage, quota: int) -> None:
    before = state(storage, [])
    with pytest.raises(ValueError, match="below the minimum"):
        storage.adjust_cache_level(1, quota)
    assert state(storage, []) == before


def test_shrinking_moves_the_least_recently_used_down_and_the_rest_together(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.touch(pages[:2])  # now 2, 3, 4, 5 are the least recently used
    storage.adjust_cache_level(0, "2MiB")
    assert [page.level for page in pages] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert sorted(page.slot for page in pages if page.level == 0) == [0, 1, 2, 3]
    assert_all_there(tiers, storage, pages)
    hot, host = (level.policies[0].victims() for level in storage.levels[:2])
    assert [page.owner for page in hot] == [6, 7, 0, 1]
    assert [page.owner for page in host] == [2, 3, 4, 5]


def test_a_shrunken_level_gives_its_memory_back(tiers: Tiers, storage: TierStorage) -> None:
    storage.adjust_cache_level(1, "8MiB")
    storage.adjust_cache_level(1, "2MiB")
    memory = storage.levels[1].groups[0].memory.pools[0]
    assert isinstance(memory.memory, HostMem)  # type: ignore[attr-defined]
    assert memory.memory.size == 2 * MIB  # type: ignore[attr-defined]


def test_shrinking_the_last_level_drops(tiers: Tiers, storage: TierStorage) -> None:
    dropped: list[object] = []
    storage.attach(lambda page: dropped.append(page.owner))
    pages = fill(tiers, storage, range(20))  # 4 hot, 8 in host memory, 8 on disk
    storage.adjust_cache_level(2, "2MiB")
    assert dropped == [0, 1, 2, 3]
    assert storage.stats().levels["disk"].used == 4
    assert_all_there(tiers, storage, pages[4:])


def test_pages_on_disk_move_to_the_slots_that_stay(tiers: Tiers, storage: TierStorage) -> None:
    pages = fill(tiers, storage, range(20))
    storage.touch(pages[:4])  # on disk, 4 to 7 go first
    storage.adjust_cache_level(2, "2MiB")
    assert sorted(page.slot for page in pages[:4]) == [0, 1, 2, 3]
    assert_all_there(tiers, storage, pages[:4] + pages[8:])


def test_a_leased_page_in_a_slot_that_would_go_refuses_the_shrink(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.lease(pages[5:6])
    before = state(storage, pages)
    with pytest.raises(ResourceBusyError) as caught:
        storage.adjust_cache_level(0, "2MiB")
    assert caught.value.slots == [pages[5].slot]
    assert state(storage, pages) == before
    storage.release(pages[5:6])
    storage.adjust_cache_level(0, "2MiB")
    assert_all_there(tiers, storage, pages)


def test_a_reserved_page_in_a_slot_that_would_go_refuses_the_shrink(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    fill(tiers, storage, range(5))
    reserved = storage.new_pages([5], 0)
    with pytest.raises(ResourceBusyError):
        storage.adjust_cache_level(0, "2MiB")
    storage.discard(reserved)
    storage.adjust_cache_level(0, "2MiB")


def test_a_shrink_that_the_levels_below_have_no_room_for_changes_nothing(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(24))  # 8 hot, 8 in host memory, 8 on disk
    for page in pages[:16]:
        page.kept = True  # may move down, not be dropped
    before = state(storage, pages)
    with pytest.raises(OutOfPagesError):
        storage.adjust_cache_level(0, "2MiB")
    assert state(storage, pages) == before
    assert_all_there(tiers, storage, pages)


def test_a_growth_without_room_on_the_disk_changes_nothing(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages = fill(tiers, storage, range(20))
    before = state(storage, pages)
    with FaultPlan() as plan:
        plan.fail("fallocate", errno.ENOSPC)
        with pytest.raises(DiskOOMError):
            storage.adjust_cache_level(2, "8MiB")
    assert state(storage, pages) == before
    assert_all_there(tiers, storage, pages)


def test_a_level_grows_again_over_what_it_gave_back(tiers: Tiers, storage: TierStorage) -> None:
    pages = fill(tiers, storage, range(12))  # 4 hot, 8 in host memory
    storage.adjust_cache_level(1, "2MiB")
    storage.adjust_cache_level(1, "8MiB")
    pages += fill(tiers, storage, range(12, 24))
    assert storage.stats().levels["host"].used == 16
    assert_all_there(tiers, storage, pages)


def test_shrinking_waits_for_the_copy_that_still_reads_a_slot_that_goes(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    with FaultPlan() as plan:
        pages = fill(tiers, storage, range(8))
        storage.adjust_cache_level(0, "2MiB")
        calls = [name for name, _ in plan.log]
    # The hot memory is cut only when the copies out of it are over.
    last_copy = max(i for i, name in enumerate(calls) if name == "process_vm_readv")
    assert "madvise(MADV_DONTNEED)" not in calls[:last_copy]
    assert_all_there(tiers, storage, pages)


def test_a_hot_level_whose_growth_fails_is_as_it_was(tiers: Tiers, storage: TierStorage) -> None:
    pages = fill(tiers, storage, range(4))
    storage.levels[1].groups[0].memory.wait_usable()  # or its fill would meet the fault
    before = state(storage, pages)
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.ENOMEM)
        with pytest.raises(MemoryError):
            storage.adjust_cache_level(0, "4MiB")
    assert state(storage, pages) == before
    storage.adjust_cache_level(0, "4MiB")
    pages += fill(tiers, storage, range(4, 8))
    assert_all_there(tiers, storage, pages)


def test_others_go_on_while_a_level_waits_for_its_memory(
    tiers: Tiers, storage: TierStorage, spawn: Spawn
) -> None:
    pages = fill(tiers, storage, range(4))
    storage.levels[1].groups[0].memory.wait_usable()  # or its fill would be held
    with FaultPlan() as plan:
        held = plan.hold("madvise(MADV_POPULATE_WRITE)")
        growth = spawn(storage.adjust_cache_level, 0, "4MiB")
        held.wait_reached()
        pages += tiers.new(storage, 4)  # moves another one down: there is no more room yet
        assert [page.level for page in pages] == [1, 0, 0, 0, 0]
        assert storage.quota(0) == 2 * MIB
        held.release()
        growth.result(60)
    assert storage.quota(0) == 4 * MIB
    assert_all_there(tiers, storage, pages)


def spread(tiers: Tiers, storage: TierStorage) -> list[Page]:
    """Four pages in the upper half of eight hot slots."""
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.discard(pages[:4])
    assert [page.slot for page in pages[4:]] == [4, 5, 6, 7]
    return pages[4:]


def test_others_go_on_while_a_shrink_waits_for_its_copies(
    tiers: Tiers, storage: TierStorage, spawn: Spawn
) -> None:
    pages = spread(tiers, storage)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        shrink = spawn(storage.adjust_cache_level, 0, "2MiB")
        held.wait_reached()
        storage.lease(pages)  # wherever they are by now
        assert storage.onboard(pages) == []
        assert sorted(page.slot for page in pages) == [0, 1, 2, 3]
        with pytest.raises(OutOfPagesError):
            storage.new_pages(["another"], 0)  # the slots that go are not handed out
        storage.release(pages)
        held.release()
        shrink.result(60)
    assert storage.quota(0) == 2 * MIB
    assert_all_there(tiers, storage, pages)


def test_changes_of_a_quota_take_turns(tiers: Tiers, storage: TierStorage, spawn: Spawn) -> None:
    pages = spread(tiers, storage)
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv")
        shrink = spawn(storage.adjust_cache_level, 0, "2MiB")
        held.wait_reached()
        growth = spawn(storage.adjust_cache_level, 0, "8MiB")
        held.release()
        shrink.result(60)
        growth.result(60)
    assert storage.quota(0) == 8 * MIB
    assert_all_there(tiers, storage, pages)


def test_a_page_that_cannot_leave_its_slot_keeps_it_whoever_learns_of_it_first(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages = spread(tiers, storage)
    level, resizer = storage.levels[0], storage._resizer
    with FaultPlan() as plan:
        plan.fail("process_vm_readv", errno.EFAULT, times=None)
        level.groups[0].slots.begin_shrink(4)
        departures = resizer._relocate(level, {0: 4})
        storage._mover.deferred.update(pages)
        assert sorted(page.slot for page in pages) == [0, 1, 2, 3]
        for page in pages:
            page.ready.wait_finished()
        storage.settle()  # another thread's: it leaves the pages to the one that shrinks
        storage.resolve(pages)
        with pytest.raises(OSError, match="process_vm_readv"):
            resizer._settle_departures(level, departures)
    assert [page.slot for page in pages] == [4, 5, 6, 7]
    assert_all_there(tiers, storage, pages)
    storage.adjust_cache_level(0, "2MiB")
    assert_all_there(tiers, storage, pages)


def test_while_a_level_is_about_to_shrink_only_slots_that_stay_make_room(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    slots = storage.levels[0].groups[0].slots
    storage.touch(pages[:4])  # in the slots that stay are the most recently used
    slots.begin_shrink(4)
    pages += tiers.new(storage, 8)
    assert [page.level for page in pages] == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    storage.lease(pages[1:4] + pages[8:])
    with pytest.raises(OutOfPagesError):
        storage.new_pages(["another"], 0)
    slots.cancel_shrink()
    pages += tiers.new(storage, 9)
    assert pages[4].level == 1
    storage.release(pages[1:4] + pages[8:9])
    assert_all_there(tiers, storage, pages)


@pytest.mark.parametrize("level", [-1, 3, "remote", None, 0.5])
def test_a_level_that_there_is_not_is_refused(storage: TierStorage, level: Any) -> None:
    before = storage.stats()
    for call in (storage.quota, lambda level: storage.adjust_cache_level(level, "4MiB")):
        with pytest.raises(ValueError, match=r"is none of 0..2 \(gpu, host, disk\)"):
            call(level)
    assert storage.stats() == before


def test_a_level_has_a_name(storage: TierStorage) -> None:
    storage.adjust_cache_level("host", "8MiB")
    assert storage.quota("host") == storage.quota(1) == 8 * MIB
