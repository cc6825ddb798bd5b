"""Moves of pages that meet each other: claims to slots, copies that fail late, what is undone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pytest

from hostmem import HostEvent, HostMem, OutOfPagesError, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)
from kvtier.transfer import page_events
from kvtier.transfer.memory import MemoryPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn, Until

MIB = 1 << 20
PAGE = MIB // 2
COPY = "process_vm_readv"  # one call a page where pages go one by one


def storage_of(*groups: int) -> TierStorage:
    """Build 4 hot pages, of at most 16, and 8 in host memory for each group of pages this large."""
    layers = [
        AttentionLayerConfig(n, [BufferConfig("kv", size)], None if n == 0 else 10_000 * n)
        for n, size in enumerate(groups)
    ]
    quota = 2 * MIB * len(groups)
    tiers: list[Any] = [
        GpuCacheTierConfig(quota, 4 * quota),
        HostCacheTierConfig(2 * quota, 2 * quota),
    ]
    config = KVCacheManagerConfig(16, tiers, layers, initial_pool_ratio=[1] * len(groups))
    storage = TierStorage(config, device="cpu")
    for at in storage.levels[1].groups:
        at.memory.wait_usable()  # or its fill would meet the plans
    return storage


@pytest.fixture
def storage() -> Iterator[TierStorage]:
    with storage_of(PAGE) as storage:
        yield storage


@pytest.fixture
def two() -> Iterator[TierStorage]:
    with storage_of(PAGE, PAGE) as storage:
        assert len(storage.plan.groups) == 2
        yield storage


def fill(tiers: Tiers, storage: TierStorage, keys: range, group: int = 0) -> list[Page]:
    return [page for key in keys for page in tiers.new(storage, key, group=group)]


def intact(tiers: Tiers, storage: TierStorage, pages: list[Page]) -> bool:
    storage._check()
    return all(tiers.intact(storage, page) for page in pages)


def finish(pages: list[Page]) -> None:
    for page in pages:
        page.ready.wait_finished()


def sizes(storage: TierStorage) -> object:
    """Say how large everything is that a change of quotas changes."""
    return [
        (
            level.quota,
            [group.slots.n_slots for group in level.groups],
            [group.slots.limit for group in level.groups],
            [policy.capacity for policy in level.policies],
            [cast(MemoryPool, g.memory.pools[0]).memory.size for g in level.groups],
        )
        for level in storage.levels
    ]


# --------------------------------------------------------------------- changes that are undone


def test_a_shrink_that_a_lease_stops_on_its_way_hands_all_slots_out_again(
    tiers: Tiers, storage: TierStorage, spawn: Spawn
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    before = sizes(storage)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        shrink = spawn(storage.adjust_cache_level, 0, "2MiB")
        held.wait_reached()  # 0 to 3 leave; the others are to move to the slots that stay
        storage.lease(pages[4:5])
        held.release()
        with pytest.raises(ResourceBusyError, match="leased and would go"):
            shrink.result(60)
    assert sizes(storage) == before
    storage.release(pages[4:5])
    pages += fill(tiers, storage, range(8, 12))
    assert [page.level for page in pages] == [1] * 4 + [0] * 8
    assert intact(tiers, storage, pages)
    storage.adjust_cache_level(0, "2MiB")
    assert intact(tiers, storage, pages)


def test_a_group_that_grew_shrinks_again_when_the_next_one_cannot_grow(
    tiers: Tiers, two: TierStorage, spawn: Spawn
) -> None:
    pages = fill(tiers, two, range(4)) + fill(tiers, two, range(10, 14), 1)
    before = sizes(two)
    second = cast(MemoryPool, two.levels[0].groups[1].memory.pools[0]).memory

    def of_the_second(address: int, nbytes: int, *rest: int) -> bool:
        return second.address <= address < second.address + second.capacity

    with FaultPlan() as plan:
        populate = "madvise(MADV_POPULATE_WRITE)"
        plan.fail(populate, errno.ENOMEM, when=of_the_second)
        held = plan.hold(populate, when=of_the_second)
        growth = spawn(two.adjust_cache_level, 0, "8MiB")
        held.wait_reached()
        assert two.levels[0].groups[0].slots.n_slots == 8
        pages += fill(tiers, two, range(4, 8))  # in the slots that will go again
        assert [page.level for page in pages] == [0] * 12
        held.release()
        with pytest.raises(MemoryError):
            growth.result(60)
    assert sizes(two) == before
    assert sum(page.level for page in pages) == 4
    assert intact(tiers, two, pages)
    two.adjust_cache_level(0, "8MiB")
    assert intact(tiers, two, pages)


def test_a_group_that_shrank_grows_again_when_the_next_one_cannot_shrink(
    tiers: Tiers, two: TierStorage
) -> None:
    two.adjust_cache_level(0, "8MiB")
    pages = fill(tiers, two, range(3)) + fill(tiers, two, range(10, 13), 1)
    before = sizes(two)
    second = cast(MemoryPool, two.levels[0].groups[1].memory.pools[0]).memory
    view = cast(HostMem, second).view(3 * MIB, MIB)  # somebody looks at what would go
    with pytest.raises(BufferError):
        two.adjust_cache_level(0, "4MiB")
    assert sizes(two) == before
    pages += fill(tiers, two, range(3, 8))
    assert [page.level for page in pages] == [0] * 11
    assert intact(tiers, two, pages)
    del view
    two.adjust_cache_level(0, "4MiB")
    assert intact(tiers, two, pages)


def test_a_page_that_was_fetched_back_meanwhile_does_not_stand_against_the_shrink(
    tiers: Tiers, storage: TierStorage
) -> None:
    """Its later copy is the business of who leases it."""
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.discard(pages[1:4])
    level, resizer = storage.levels[0], storage._resizer
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        plan.fail(COPY, errno.EFAULT, at=2)
        level.groups[0].slots.begin_shrink(4)
        departures = resizer._evict(level, {0: 4})
        assert [one.page for one in departures] == pages[:1]
        storage._mover.deferred.update(pages[:1])
        storage.lease(pages[:1])
        held.wait_reached()
        assert storage.onboard(pages[:1]) == pages[:1]
        assert pages[0].slot != departures[0].slot  # which is still to be claimed
        held.release()
        resizer._settle_departures(level, departures)
        assert pages[0].lost
        assert len(plan.calls(COPY)) == 2
    assert level.groups[0].slots.limit == 4
    level.groups[0].slots.cancel_shrink()
    storage.release(pages[:1])
    storage.settle()
    assert pages[0].level == 1  # where it came from
    assert intact(tiers, storage, [*pages[:1], *pages[4:]])


def test_a_page_that_is_leased_on_its_way_is_not_taken_back_from_who_leases_it(
    tiers: Tiers, storage: TierStorage, spawn: Spawn
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.discard(pages[:7])
    page = pages[7]
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        plan.fail(COPY, errno.EFAULT)
        shrink = spawn(storage.adjust_cache_level, 0, "2MiB")
        held.wait_reached()
        storage.lease([page])
        slot = page.slot
        assert slot < 4
        held.release()
        with pytest.raises(OSError, match=COPY):
            shrink.result(60)
    assert (page.slot, page.lost) == (slot, True)
    storage.release([page])
    assert page.slot == 7
    assert intact(tiers, storage, [page])


def test_memory_is_given_back_when_the_steps_that_read_it_are_over(
    tiers: Tiers, storage: TierStorage, spawn: Spawn, gate: Callable[[], Gate]
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages, step = fill(tiers, storage, range(8)), gate()
    storage.lease(pages[6:])
    storage.release(pages[6:], step)
    shrink = spawn(storage.adjust_cache_level, 0, "2MiB")
    step.wait_asked()
    memory = cast(MemoryPool, storage.levels[0].groups[0].memory.pools[0]).memory
    assert (shrink.done(), memory.size) == (False, 4 * MIB)
    step.set()
    shrink.result(60)
    assert memory.size == 2 * MIB
    assert intact(tiers, storage, pages)


def test_a_page_that_never_arrived_is_not_counted_among_those_that_must_leave(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages = fill(tiers, storage, range(9))
    finish(pages)
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        put_down(storage)
        finish(pages)
    storage.adjust_cache_level(1, "2MiB")
    assert [page.freed for page in pages] == [True] + [False] * 8
    assert [page.level for page in pages[1:]] == [1] * 4 + [0] * 4
    assert intact(tiers, storage, pages[1:])


def test_the_same_quota_tries_again_what_could_not_be_filled(
    tiers: Tiers, storage: TierStorage, until: Until
) -> None:
    storage.adjust_cache_level(1, "2MiB")
    memory = cast(HostMem, cast(MemoryPool, storage.levels[1].groups[0].memory.pools[0]).memory)
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", errno.ENOMEM, times=None)
        storage.adjust_cache_level(1, "4MiB")
        until(lambda: memory.failure)
    storage.adjust_cache_level(1, "4MiB")
    memory.wait_usable(4 * MIB, 20)
    assert intact(tiers, storage, fill(tiers, storage, range(12)))


# ----------------------------------------------------------------------------- claims to a slot


def put_down(storage: TierStorage) -> None:
    """Let the page that is next to go leave the hot level."""
    with storage.lock:
        storage._mover.evict(0, 0, 1)


def two_through_one_slot(tiers: Tiers, storage: TierStorage) -> tuple[Page, Page, list[Page]]:
    """Let a page leave slot 0, and another one that got it after it; give both, and the rest."""
    pages = fill(tiers, storage, range(4))
    put_down(storage)
    (later,) = storage.new_pages([4], 0)
    assert (pages[0].level, later.slot) == (1, 0)
    storage.commit([later])
    storage.release([later])
    storage.touch(pages[1:])
    put_down(storage)
    assert later.level == 1
    return pages[0], later, pages[1:]


def test_a_page_does_not_return_to_a_slot_that_another_one_had_since(
    tiers: Tiers, storage: TierStorage
) -> None:
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        plan.fail(COPY, errno.EFAULT)
        first, later, rest = two_through_one_slot(tiers, storage)
        held.release()
        finish([first, later])
        storage.settle()
    assert first.freed
    assert later.level == 1
    assert storage.levels[0].groups[0].slots.in_use == 3
    assert intact(tiers, storage, rest)


def test_the_claim_of_who_left_a_slot_last_outlasts_those_before(
    tiers: Tiers, storage: TierStorage
) -> None:
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        plan.fail(COPY, errno.EFAULT, at=2)
        first, later, rest = two_through_one_slot(tiers, storage)
        held.release()
        finish([first, later])
        storage.settle()
    assert (first.level, later.level, later.slot) == (1, 0, 0)
    assert intact(tiers, storage, [first, *rest])


def test_a_move_that_arrived_says_nothing_of_the_next_one(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages = fill(tiers, storage, range(3))
    with FaultPlan() as plan:
        down, up = plan.hold(COPY), plan.hold(COPY, at=2)
        put_down(storage)
        storage.lease(pages[:1])
        storage.onboard(pages[:1])
        down.release()
        up.wait_reached()
        storage.settle()
        assert not pages[0].ready.query()
        assert pages[0].origin is not None
        up.release()
    assert intact(tiers, storage, pages)
    storage.release(pages[:1])


def test_a_copy_that_failed_is_for_those_to_see_to_who_lease_its_page(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages = fill(tiers, storage, range(3))
    put_down(storage)
    finish(pages)
    storage.lease(pages[:1])
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        storage.onboard(pages[:1])
        finish(pages)
    storage.settle()
    assert pages[0].level == 0
    assert pages[0].lost
    storage.release(pages[:1])
    assert (pages[0].level, pages[0].lost) == (1, False)
    assert intact(tiers, storage, pages)


def test_a_page_whose_bytes_never_came_does_not_return(
    tiers: Tiers, storage: TierStorage, gate: Callable[[], Gate]
) -> None:
    (page,) = storage.new_pages([0], 0)
    step = gate()
    storage.commit([page], step)
    storage.release([page])
    dropped: list[object] = []
    storage.attach(lambda page: dropped.append(page.owner))
    put_down(storage)
    step.set(RuntimeError("the kernel failed"))
    finish([page])
    storage.settle()
    assert page.freed
    assert dropped == [0]
    assert [level.groups[0].slots.in_use for level in storage.levels] == [0, 0]
    storage._check()


def test_no_page_returns_to_a_slot_whose_memory_was_given_back_meanwhile(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.touch(pages[:7])
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        put_down(storage)
        finish(pages)
    storage.lease(pages[7:])  # who has it sees to it, later
    storage.adjust_cache_level(0, "2MiB")
    storage.adjust_cache_level(0, "4MiB")
    storage.release(pages[7:])
    assert pages[7].freed
    assert intact(tiers, storage, pages[:7])


# -------------------------------------------------------------------------------------- fences


def test_slots_that_are_given_back_keep_their_fences(tiers: Tiers, storage: TierStorage) -> None:
    pages = fill(tiers, storage, range(4))
    before = storage.stats().levels["gpu"]
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        with storage.lock:
            ids, fences = storage._mover.take(0, 0, 1)
            assert any(not fence.query() for fence in fences)
            storage._mover.give_back(0, 0, ids, fences)
        assert storage.stats().levels["gpu"].used == before.used - 1  # who went down is down
        (again,) = storage.new_pages([4], 0)
        assert again.slot == ids[0]
        assert any(not fence.query() for fence in again.fences)
        held.release()
        storage.discard([again])
    assert intact(tiers, storage, pages)


@pytest.mark.parametrize("way", ["moved", "dropped"])
def test_nobody_gets_a_slot_that_a_step_still_reads(
    tiers: Tiers, storage: TierStorage, way: str
) -> None:
    pages, step = fill(tiers, storage, range(4)), HostEvent()
    storage.lease(pages[:2])
    storage.release(pages[:2], step)
    if way == "moved":
        put_down(storage)
        finish(pages)
    else:
        storage.discard(pages[:1])
    (fresh,) = storage.new_pages([4], 0)
    assert fresh.slot == 0
    assert any(not fence.query() for fence in fresh.fences)
    step.set()
    storage.discard([fresh])
    storage._check()


def test_a_slot_that_was_read_by_a_step_is_fenced_by_the_copy_as_well(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages, step = fill(tiers, storage, range(4)), HostEvent()
    storage.lease(pages[:1])
    storage.release(pages[:1], step)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        put_down(storage)
        step.set()
        (fresh,) = storage.new_pages([4], 0)
        assert fresh.slot == 0
        assert any(not fence.query() for fence in fresh.fences)
        held.release()
        storage.discard([fresh])
    assert intact(tiers, storage, pages)


def test_a_slot_that_a_copy_still_writes_is_fenced_when_its_page_is_dropped(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages = fill(tiers, storage, range(4))
    put_down(storage)
    finish(pages)
    storage.lease(pages[:1])
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        storage.onboard(pages[:1])
        storage.discard(pages[:1])
        (fresh,) = storage.new_pages([4], 0)
        assert fresh.slot == 0
        assert any(not fence.query() for fence in fresh.fences)
        held.release()
        storage.discard([fresh])
    assert intact(tiers, storage, pages[1:])


def test_the_steps_that_read_a_page_stay_with_the_slot_and_come_back_with_it(
    tiers: Tiers, storage: TierStorage
) -> None:
    pages, step = fill(tiers, storage, range(4)), HostEvent()
    storage.lease(pages[:1])
    storage.release(pages[:1], step)
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        put_down(storage)
        assert pages[0].fences == ()  # they read another slot than the one that it has now
        finish(pages)
        storage.settle()
    assert (pages[0].level, pages[0].slot) == (0, 0)
    storage.discard(pages[:1])
    (fresh,) = storage.new_pages([4], 0)
    assert fresh.slot == 0
    assert any(not fence.query() for fence in fresh.fences)
    step.set()
    storage.discard([fresh])
    assert intact(tiers, storage, pages[1:])


# -------------------------------------------------------------------------------- kept pages


def test_kept_pages_that_cannot_leave_slots_that_would_go_keep_them(
    tiers: Tiers, storage: TierStorage
) -> None:
    storage.adjust_cache_level(0, "4MiB")
    pages = fill(tiers, storage, range(8))
    storage.touch(pages[:4])  # the others, whose slots would go, leave first
    storage.keep(pages[4:7])
    where = [(page.level, page.slot) for page in pages]
    slots = storage.levels[0].groups[0].slots
    slots.begin_shrink(4)
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, times=None)
        with storage.lock, pytest.raises(OutOfPagesError, match="kept pages had to make room"):
            storage._mover.evict(0, 0, 3, anywhere=True)
    assert slots.limit == 8
    assert [(page.level, page.slot) for page in pages] == where
    assert intact(tiers, storage, pages)


def test_the_cause_is_that_of_the_first_kept_page_that_could_not_leave(tiers: Tiers) -> None:
    storage = tiers.build(4, 0, 8)
    pages = tiers.new(storage, *range(4))
    storage.keep(pages)

    def writes(slot: int) -> Callable[[int, int, int], bool]:
        return lambda fd, n, at: at <= slot * PAGE < at + n * PAGE

    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=lambda fd, n, at: n > 1)
        plan.fail("pwritev", errno.EIO, times=None, when=writes(1))
        plan.fail("pwritev", errno.ENXIO, times=None, when=writes(2))
        with storage.lock, pytest.raises(OutOfPagesError) as caught:
            storage._mover.evict(0, 0, 4)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EIO
    assert [page.level for page in pages] == [1, 0, 0, 1]
    assert intact(tiers, storage, pages)


def test_who_is_interrupted_while_kept_pages_move_is_told_and_no_page_is_lost(
    tiers: Tiers, storage: TierStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = fill(tiers, storage, range(4))
    storage.keep(pages[:2])

    def interrupt(event: object, timeout: float | None = None) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(page_events._PageEvent, "wait_finished", interrupt)
    with storage.lock, pytest.raises(KeyboardInterrupt):
        storage._mover.evict(0, 0, 2)
    assert [page.level for page in pages] == [1, 1, 0, 0]
    assert intact(tiers, storage, pages)
