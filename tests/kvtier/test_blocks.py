"""The block cache: what is found, what is held, and that wrong bytes are never served."""

from __future__ import annotations

import errno
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from hostmem import (
    ClosedError,
    CorruptedError,
    DiskOOMError,
    HostEvent,
    OutOfPagesError,
    RegistrationError,
    ResourceBusyError,
)
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockLease,
    BlockReservation,
    BufferConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
    levels,
)
from kvtier.block import Block
from kvtier.transfer.memory import MemoryPool

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

MIB = 1 << 20
COPY = "process_vm_readv"

Cache = BlockCache[int]


def owned(held: BlockLease[int] | BlockReservation[int]) -> Iterator[tuple[int, Page]]:
    """Give the pages that are held, each with the key of its block."""
    for page in held._pages():
        key = cast(Block[int], page.owner).key
        assert key is not None
        yield key, page


class Blocks:
    """A cache whose blocks are written and read like a model does."""

    def __init__(self, tiers: Tiers, storage: TierStorage) -> None:
        self.tiers = tiers
        self.storage = storage
        self.cache: Cache = BlockCache(storage)

    def pages(self, key: int) -> list[Page]:
        return self.cache._index.pages(key)

    def store(self, *keys: int) -> None:
        """Compute blocks into reserved pages and commit them."""
        with self.cache.reserve(keys) as fresh:
            fresh.wait()
            for key, page in owned(fresh):
                self.tiers.write(self.storage, page, key)
            fresh.commit()

    def read(self, *keys: int) -> list[int]:
        """Acquire blocks and compare every byte; give the keys that were found."""
        with self.cache.acquire(keys) as lease:
            lease.wait()
            for key, page in owned(lease):
                assert page.level == 0
                assert self.tiers.intact(self.storage, page, key)
            return lease.keys

    def levels(self, *keys: int) -> list[int]:
        return [self.pages(key)[0].level for key in keys]


@pytest.fixture
def build(tiers: Tiers) -> Callable[..., Blocks]:
    return lambda *sizes, **options: Blocks(tiers, tiers.build(*sizes, **options))


TWO_GROUPS = [
    AttentionLayerConfig(0, [BufferConfig("key", MIB // 4), BufferConfig("value", MIB // 4)]),
    AttentionLayerConfig(1, [BufferConfig("key", MIB // 4)], sliding_window_size=128),
]


# ------------------------------------------------------------------------------ finding


def test_what_was_stored_is_found_with_its_bytes(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(1, 2, 3)
    assert blocks.read(1, 2, 3) == [1, 2, 3]
    assert len(blocks.cache) == 3
    assert 2 in blocks.cache
    assert 4 not in blocks.cache


def test_a_match_ends_at_the_first_absent_key(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(1, 2, 4)
    assert blocks.cache.match([1, 2, 3, 4]) == 2
    assert blocks.cache.match([1, 2, 4]) == 3
    assert blocks.cache.match([3]) == 0
    assert blocks.cache.match([]) == 0


def test_a_match_touches_nothing(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.cache.match([0, 1])
    blocks.store(4)
    assert blocks.levels(0, 1, 2, 3, 4) == [1, 0, 0, 0, 0]


def test_acquired_are_the_leading_blocks_that_are_there(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(1, 2, 4)
    with blocks.cache.acquire([1, 2, 3, 4]) as lease:
        assert (len(lease), lease.keys, lease.found) == (2, [1, 2], [0, 0])
        assert lease.slots().tolist() == [0, 1]
        assert lease.slots().dtype == np.int32


def test_nothing_that_is_there_is_an_empty_lease(build: Callable[..., Blocks]) -> None:
    with build(4, 4).cache.acquire([1, 2]) as lease:
        lease.wait()
        assert (len(lease), lease.slots().tolist(), lease.events) == (0, [], ())


def test_acquired_blocks_come_up_and_say_where_they_were(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4, 8)
    for key in range(10):
        blocks.store(key)
    assert blocks.levels(*range(10)) == [2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    with blocks.cache.acquire([0, 2, 9]) as lease:
        assert lease.found == [2, 1, 0]
        lease.wait()
        assert blocks.levels(0, 2, 9) == [0, 0, 0]
    assert blocks.read(0, 2, 9) == [0, 2, 9]
    # What was asked for last is most recent, in the order of the prefix.
    assert [p.owner.key for p in blocks.storage.levels[0].policies[0].victims()][-3:] == [0, 2, 9]  # type: ignore[attr-defined]


def test_a_key_that_is_named_twice_is_the_same_block(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    with blocks.cache.acquire([0, 0]) as lease:
        lease.wait()
        slots = lease.slots().tolist()
        assert slots[0] == slots[1]
    assert blocks.pages(0)[0].leases == 0
    blocks.storage._check()


def test_touched_blocks_stay_longer(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.cache.touch([1, 0])
    blocks.store(4, 5)
    assert blocks.levels(0, 1, 2, 3) == [0, 0, 1, 1]


def test_touching_ends_at_the_first_absent_key(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1)
    with pytest.raises(KeyError):
        blocks.cache.touch([0, 7, 1])


def test_what_is_held_says_so(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(1, 2)
    with blocks.cache.acquire([1, 2]) as lease, blocks.cache.reserve([3]) as fresh:
        assert repr(lease) == "<BlockLease of 2 blocks>"
        assert repr(fresh) == "<BlockReservation of 1 blocks>"
    assert repr(lease) == "<BlockLease of 2 blocks, which it does not hold any more>"
    with pytest.raises(ValueError, match="released"):
        lease.slots()  # they may be others' by now
    assert repr(blocks.cache) == f"<BlockCache of 2 blocks over {blocks.storage!r}>"


def test_one_cache_a_storage(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    with pytest.raises(ValueError, match="has a cache already"):
        BlockCache(blocks.storage)


# ------------------------------------------------------------------------------ reserving


def test_reserved_blocks_are_found_only_once_committed(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    with blocks.cache.reserve([1, 2]) as fresh:
        assert fresh.keys == [1, 2]
        assert blocks.cache.match([1]) == 0
        assert 1 not in blocks.cache
        assert len(blocks.cache.acquire([1])) == 0
        fresh.commit()
    assert blocks.cache.match([1, 2]) == 2


def test_a_reservation_that_is_left_is_cancelled(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    with pytest.raises(KeyError), blocks.cache.reserve([1, 2]):
        raise KeyError("the model failed")
    assert blocks.cache.match([1]) == 0
    assert blocks.storage.stats().levels["gpu"].used == 0
    blocks.store(1, 2)
    blocks.storage._check()


def test_cancelling_twice_or_after_the_commit_does_nothing(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    fresh = blocks.cache.reserve([1])
    fresh.cancel()
    fresh.cancel()
    other = blocks.cache.reserve([1])
    other.commit()
    other.cancel()
    assert 1 in blocks.cache
    assert blocks.storage.stats().levels["gpu"].used == 1


def test_a_reservation_is_committed_once(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    fresh = blocks.cache.reserve([1])
    fresh.commit()
    with pytest.raises(ValueError, match="committed or cancelled"):
        fresh.commit()
    gone = blocks.cache.reserve([2])
    gone.cancel()
    with pytest.raises(ValueError, match="committed or cancelled"):
        gone.commit()
    assert 2 not in blocks.cache


@pytest.mark.parametrize(
    ("keys", "message"),
    [([5, 1], "1 is there already"), ([5, 2], "2 is there already or reserved"), ([5, 5], "twice")],
)
def test_a_key_that_is_there_or_reserved_or_named_twice_is_refused(
    build: Callable[..., Blocks], keys: list[int], message: str
) -> None:
    blocks = build(4, 4)
    blocks.store(1)
    with blocks.cache.reserve([2]):
        before = blocks.storage.stats()
        with pytest.raises(ValueError, match=message):
            blocks.cache.reserve(keys)
        assert blocks.storage.stats() == before
    blocks.store(5)  # nothing of the refused reservation is left


def test_reserving_more_than_fits_beside_what_is_held_changes_nothing(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    with blocks.cache.acquire([0, 1]):
        before = blocks.tiers.order(blocks.storage), blocks.storage.stats()
        with pytest.raises(OutOfPagesError):
            blocks.cache.reserve([4, 5, 6])
        assert (blocks.tiers.order(blocks.storage), blocks.storage.stats()) == before
        blocks.store(4, 5)
    assert blocks.read(0, 1, 4, 5) == [0, 1, 4, 5]


def test_acquiring_more_than_fits_beside_what_is_held_changes_nothing(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4, 5, 6, 7)
    with blocks.cache.acquire([4, 5, 6]):
        before = blocks.tiers.order(blocks.storage), blocks.storage.stats().levels
        with pytest.raises(OutOfPagesError):
            blocks.cache.acquire([0, 1])
        assert (blocks.tiers.order(blocks.storage), blocks.storage.stats().levels) == before
        assert blocks.pages(0)[0].leases == 0
        assert blocks.read(0) == [0]


def test_a_refused_reservation_moves_no_page_of_another_group(
    build: Callable[..., Blocks],
) -> None:
    # Of 4 MiB the groups get 2 each: four pages of half a MiB, and eight of a quarter.
    blocks = build(4, 4, layers=TWO_GROUPS)
    blocks.store(0, 1, 2, 3)
    held = blocks.storage.new_pages(range(4), 1)  # the second group has no slot left
    with blocks.cache.acquire([0, 1, 2]):
        before = [blocks.tiers.order(blocks.storage, group) for group in (0, 1)]
        with pytest.raises(OutOfPagesError):
            blocks.cache.reserve([4, 5])
        assert [blocks.tiers.order(blocks.storage, group) for group in (0, 1)] == before
    blocks.storage.discard(held)


# ------------------------------------------------------------------------------ holding


def test_a_leased_block_stays_where_it_is_with_its_bytes(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    with blocks.cache.acquire([0]) as lease:
        slot = lease.slots().tolist()
        blocks.store(4, 5, 6)
        blocks.store(7, 8, 9)
        assert lease.slots().tolist() == slot
        assert blocks.tiers.intact(blocks.storage, blocks.pages(0)[0], 0)
    blocks.store(10, 11, 12, 13)
    assert blocks.levels(0) == [1]


def test_releasing_twice_is_releasing_once(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0)
    with blocks.cache.acquire([0]), blocks.cache.acquire([0]) as second:
        second.release()
        second.release()
        assert blocks.pages(0)[0].leases == 1
    assert blocks.pages(0)[0].leases == 0


def test_an_evicted_block_is_forgotten(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    for key in range(10):
        blocks.store(key)
    assert [key for key in range(10) if key in blocks.cache] == list(range(2, 10))
    assert len(blocks.cache) == 8
    assert blocks.storage.stats().pages_dropped == 2
    blocks.store(0)
    assert blocks.read(0) == [0]


def test_the_pages_of_a_block_are_dropped_together(build: Callable[..., Blocks]) -> None:
    # Group 0 has 4 slots a level, group 1 has 8: group 0 drops pages first.
    blocks = build(4, 4, layers=TWO_GROUPS)
    for key in range(11):
        blocks.store(key)
    assert len(blocks.cache) == 8
    used = [g.slots.in_use for at in blocks.storage.levels for g in at.groups]
    assert used == [4, 8, 4, 0]
    assert blocks.read(3, 4) == [3, 4]
    blocks.storage._check()


def test_every_group_of_a_block_is_brought_up(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4, layers=TWO_GROUPS)
    for key in range(6):
        blocks.store(key)
    assert [page.level for page in blocks.pages(0)] == [1, 0]
    with blocks.cache.acquire([0]) as lease:
        assert lease.found == [1]
        lease.wait()
        assert [page.level for page in blocks.pages(0)] == [0, 0]
        assert lease.slots(0).tolist() == [blocks.pages(0)[0].slot]
        assert lease.slots(1).tolist() == [blocks.pages(0)[1].slot]
    assert blocks.read(0) == [0]


# ------------------------------------------------------------------------------ order of copies


def test_a_lease_is_there_before_its_bytes_and_waits_for_them(
    build: Callable[..., Blocks], spawn: Spawn
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        with blocks.cache.acquire([0]) as lease:
            waits = spawn(lease.wait)
            held.wait_reached()
            assert not waits.done()
            assert not any(event.query() for event in lease.events)
            held.release()
            waits.result(20)
            assert blocks.tiers.intact(blocks.storage, blocks.pages(0)[0], 0)


def test_a_reservation_waits_for_the_copies_that_read_its_slots(
    build: Callable[..., Blocks], spawn: Spawn
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        with blocks.cache.reserve([4]) as fresh:
            waits = spawn(fresh.wait)
            held.wait_reached()
            assert not waits.done()
            assert len(fresh.fences) == 1
            held.release()
            waits.result(20)
            blocks.tiers.write(blocks.storage, fresh._pages()[0], 4)
            fresh.commit()
    assert blocks.read(0, 4) == [0, 4]


def test_a_cancelled_reservation_leaves_its_slots_fenced(build: Callable[..., Blocks]) -> None:
    """The next one would else write over what is still being copied away."""
    blocks = build(4, 8)
    blocks.store(0, 1, 2, 3)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        with blocks.cache.reserve([4, 5]) as given_up:
            held.wait_reached()
            fences = given_up.fences
        with blocks.cache.reserve([6, 7]) as fresh:
            assert fresh.fences == fences
            held.release()
            fresh.wait()
            for key, page in owned(fresh):
                blocks.tiers.write(blocks.storage, page, key)
            fresh.commit()
    assert blocks.read(0, 1) == [0, 1]
    assert blocks.read(6, 7) == [6, 7]


def test_a_block_is_moved_only_when_it_is_computed(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    blocks = build(4, 4)
    computed = gate()
    with blocks.cache.reserve([0, 1, 2, 3]) as fresh:
        fresh.commit(computed)
    with blocks.cache.reserve([4, 5, 6, 7]) as others:  # 0 to 3 must go down
        computed.wait_asked()
        assert not any(fence.query() for fence in others.fences)
        for key, page in owned(fresh):
            blocks.tiers.raw(
                blocks.storage.levels[0].groups[0].memory.pools[0].memory.address  # type: ignore[attr-defined]
                + key * MIB // 2,
                MIB // 2,
            )[:] = blocks.tiers.content(key, MIB // 2)
            assert page.level == 1
        computed.set()
        others.wait()
    assert blocks.read(0, 1, 2, 3) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------ failures


def test_a_block_that_could_not_be_brought_is_told_to_who_waits_and_stays_where_it_was(
    build: Callable[..., Blocks], caplog: pytest.LogCaptureFixture
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)  # 0 goes to the host level
    blocks.pages(0)[0].ready.synchronize()
    with FaultPlan() as plan, caplog.at_level(logging.ERROR, "kvtier"):
        # The first copy makes room, the second brings the block.
        plan.fail(COPY, errno.EFAULT, at=2)
        with blocks.cache.acquire([0]) as lease, pytest.raises(OSError, match=COPY):
            lease.wait()
    assert 0 in blocks.cache
    assert blocks.cache.lost == 0
    assert "stays in level host" in caplog.text
    assert blocks.pages(0)[0].level == 1
    assert blocks.read(0) == [0]
    blocks.storage._check()


def test_a_block_that_was_lost_on_its_way_down_is_not_found(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 0, 8)
    blocks.store(0, 1, 2, 3)
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC)
        blocks.store(4)
        blocks.pages(0)[0].ready.wait_finished()
    assert blocks.read(1, 0, 2) == [1]
    assert blocks.cache.match([0]) == 0
    blocks.store(0)
    assert blocks.read(1, 0, 2) == [1, 0, 2]


def test_a_block_that_could_not_be_brought_to_several_returns_with_the_last(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    blocks.pages(0)[0].ready.synchronize()
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, at=2)
        first, second = blocks.cache.acquire([0]), blocks.cache.acquire([0])
        for lease in (first, second):
            with pytest.raises(OSError, match=COPY):
                lease.wait()
    first.release()
    assert 0 in blocks.cache
    assert len(blocks.cache.acquire([0])) == 0  # but nobody else gets it
    second.release()
    assert blocks.pages(0)[0].level == 1
    assert blocks.read(0) == [0]


def test_a_block_that_was_never_computed_is_never_served(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    broken = HostEvent()
    with blocks.cache.reserve([0, 1]) as fresh:
        fresh.commit(broken)
    broken.set(RuntimeError("the kernel failed"))
    blocks.store(2)
    assert blocks.read(0, 1, 2) == []
    assert blocks.cache.match([1, 2]) == 2  # not looked at yet: a match moves and asks nothing
    assert blocks.read(1, 2) == []
    assert blocks.read(2) == [2]
    assert blocks.cache.lost == 2


def test_a_lost_block_that_is_evicted_is_counted_and_forgotten(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    broken = HostEvent()
    broken.set(RuntimeError("the kernel failed"))
    with blocks.cache.reserve([0, 1]) as fresh:
        fresh.commit(broken)
    blocks.store(2, 3)
    blocks.store(4, 5, 6)
    assert [key in blocks.cache for key in range(7)] == [False, False] + [True] * 5
    assert blocks.cache.lost == 2
    assert blocks.read(2, 3, 4, 5) == [2, 3, 4, 5]


def test_a_first_level_of_host_memory_is_written_once_it_is_filled(
    tiers: Tiers, spawn: Spawn
) -> None:
    layer = AttentionLayerConfig(0, [BufferConfig("kv", MIB)])
    config = KVCacheManagerConfig(16, [HostCacheTierConfig("8MiB", "8MiB")], [layer])
    with FaultPlan() as plan:
        held = plan.hold("cuMemHostRegister")
        with TierStorage(config, device="cpu") as storage:
            cache = BlockCache[int](storage)
            with cache.reserve([1]) as fresh:
                waiting = spawn(fresh.wait)
                held.wait_reached()
                assert not waiting.done()
                (filled,) = fresh.fences  # for those who do not call wait
                assert not filled.query()
                with pytest.raises(TimeoutError):
                    filled.synchronize(0)
                held.release()
                waiting.result(20)
                filled.synchronize()
                assert filled.query()
                assert filled.error is None
                tiers.write(storage, fresh._pages()[0], 1)
                fresh.commit()
            with cache.acquire([1]) as lease:
                lease.wait()
                assert tiers.intact(storage, lease._pages()[0], 1)


def test_a_fill_that_fails_fails_the_fence_of_what_it_should_have_filled(
    tiers: Tiers,
) -> None:
    layer = AttentionLayerConfig(0, [BufferConfig("kv", MIB)])
    config = KVCacheManagerConfig(16, [HostCacheTierConfig("8MiB", "8MiB")], [layer])
    with FaultPlan() as plan:
        held = plan.hold("cuMemHostRegister")
        plan.fail("cuMemHostRegister", 2, times=None)
        with TierStorage(config, device="cpu") as storage:
            with BlockCache[int](storage).reserve([1]) as fresh:
                (filled,) = fresh.fences
                held.wait_reached()
                held.release()
                with pytest.raises(RegistrationError):
                    filled.synchronize()
                assert filled.query()
                assert isinstance(filled.error, RegistrationError)
                with pytest.raises(RegistrationError):
                    fresh.wait()
            storage._check()


def test_a_refusal_says_how_many_are_too_many(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    with blocks.cache.reserve([0, 1, 2]), pytest.raises(OutOfPagesError) as caught:
        blocks.cache.reserve([3, 4, 5])
    assert caught.value.short == 2
    with blocks.cache.reserve([0, 1, 2]), blocks.cache.reserve([3]):
        pass


# --------------------------------------------------------- what stays, and what goes first


def test_kept_blocks_move_down_and_are_never_dropped(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.cache.keep([0, 1])
    for first in range(4, 24, 4):
        blocks.store(*range(first, first + 4))
    assert [key for key in range(24) if key in blocks.cache] == [0, 1, 18, 19, 20, 21, 22, 23]
    assert blocks.read(0, 1) == [0, 1]
    blocks.cache.keep([0, 1], False)
    for first in range(24, 36, 4):
        blocks.store(*range(first, first + 4))
    assert 0 not in blocks.cache
    blocks.storage._check()


def test_kept_blocks_that_fill_every_level_leave_no_room(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(*range(4))
    blocks.store(*range(4, 8))
    blocks.cache.keep(range(8))
    with pytest.raises(OutOfPagesError):
        blocks.cache.reserve([8])
    assert blocks.read(4, 5, 6, 7) == [4, 5, 6, 7]
    with pytest.raises(OutOfPagesError):  # a swap needs a free slot
        blocks.cache.acquire([0])
    blocks.cache.drop([4])
    assert blocks.read(0) == [0]
    blocks.storage._check()


def test_a_kept_block_that_cannot_be_moved_stays_and_no_room_is_made(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 0, 8)
    blocks.store(0, 1, 2, 3)
    blocks.cache.keep([0])
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC, times=None)
        with pytest.raises(OutOfPagesError, match="kept pages") as caught:
            blocks.cache.reserve([4])
    assert isinstance(caught.value.__cause__, DiskOOMError)
    assert blocks.pages(0)[0].level == 0
    assert blocks.read(0, 1, 2, 3) == [0, 1, 2, 3]
    blocks.storage._check()
    blocks.store(4)
    assert blocks.read(0, 4) == [0, 4]


def test_blocks_of_a_lower_priority_go_first(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1)
    blocks.store(2, 3)
    blocks.cache.set_priority([0], 5)
    blocks.cache.set_priority([3], -1)
    blocks.store(4)
    assert blocks.pages(3)[0].level == 1
    blocks.store(5)
    assert blocks.pages(1)[0].level == 1
    assert blocks.pages(0)[0].level == 0
    with blocks.cache.reserve([6], priority=-2) as fresh:
        fresh.commit()
    blocks.store(7)
    assert blocks.pages(6)[0].level == 1
    with pytest.raises(KeyError):
        blocks.cache.set_priority([0, 99], 1)
    assert blocks.pages(0)[0].priority == 5
    blocks.storage._check()


def test_a_dropped_block_is_gone_and_a_leased_one_is_not_dropped(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2)
    blocks.cache.keep([2])
    with blocks.cache.acquire([0]), pytest.raises(ResourceBusyError, match="leased"):
        blocks.cache.drop([1, 0])
    assert 1 in blocks.cache
    assert blocks.cache.drop([0, 2, 2, 99]) == 2
    assert [key in blocks.cache for key in range(3)] == [False, True, False]
    assert blocks.storage.stats().levels["gpu"].used == 1
    blocks.storage._check()


def test_a_block_that_could_not_be_read_can_be_computed_anew(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 0, 8)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    blocks.pages(0)[0].ready.synchronize()
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        with blocks.cache.acquire([0]) as lease, pytest.raises(OSError, match="preadv"):
            lease.wait()
    assert 0 in blocks.cache  # where it was
    blocks.store(0)
    assert blocks.read(0) == [0]
    blocks.storage._check()


def test_hits_and_misses_are_counted_by_level(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    with blocks.storage.scope() as scope:
        blocks.read(0, 4, 9, 1)
    assert scope.activity.hits == {"host": 1, "gpu": 1}
    assert scope.activity.misses == 2


def test_a_broken_invariant_ends_the_use_of_its_storage_alone(build: Callable[..., Blocks]) -> None:
    blocks, other = build(4, 4), build(4, 4)
    blocks.store(0, 1, 2, 3)
    other.store(0)
    lane = blocks.storage._mover._copier._down
    lane._closed = True  # what it is given now will never be copied
    with pytest.raises(CorruptedError, match="ClosedError") as caught:
        blocks.cache.reserve([4])
    lane._closed = False
    assert isinstance(caught.value.__cause__, ClosedError)
    with pytest.raises(CorruptedError, match="ClosedError"):
        blocks.cache.acquire([0])
    assert other.read(0) == [0]
    # A copy that nobody knows of may still run: the memory is not unmapped.
    pool = blocks.storage.levels[0].groups[0].memory.pools[0]
    assert isinstance(pool, MemoryPool)
    address = pool.memory.address
    blocks.storage.close()
    assert blocks.tiers.raw(address, 1).size
    assert {id(group) for group in levels._leaked} == {
        id(level.groups[0]) for level in blocks.storage.levels
    }
    while levels._leaked:
        levels._leaked.pop().close()


# ------------------------------------------------------------------------------ threads


def test_a_thread_finds_what_another_committed(build: Callable[..., Blocks], spawn: Spawn) -> None:
    blocks = build(4, 4)
    reserved, committed = threading.Event(), threading.Event()

    def writer() -> None:
        with blocks.cache.reserve([1]) as fresh:
            reserved.set()
            blocks.tiers.write(blocks.storage, fresh._pages()[0], 1)
            fresh.commit()
        committed.set()

    writing = spawn(writer)
    assert reserved.wait(20)
    assert committed.wait(20)
    assert spawn(blocks.read, 1).result(20) == [1]
    writing.result(20)


def test_two_threads_that_want_to_compute_the_same_block_do_not_both(
    build: Callable[..., Blocks], spawn: Spawn
) -> None:
    blocks = build(4, 4)
    fresh = blocks.cache.reserve([1, 2])
    with pytest.raises(ValueError, match="2 is there already or reserved"):
        spawn(blocks.cache.reserve, [2, 3]).result(20)
    fresh.cancel()
    spawn(blocks.cache.reserve, [2, 3]).result(20).cancel()


def test_nobody_waits_for_the_copies_of_another(build: Callable[..., Blocks], spawn: Spawn) -> None:
    blocks = build(4, 8)
    blocks.store(0, 1, 2, 3)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        fresh = blocks.cache.reserve([4])
        held.wait_reached()  # a copy goes on, and will for as long as the test likes
        assert spawn(blocks.cache.match, [1, 2]).result(20) == 2
        lease = spawn(blocks.cache.acquire, [1, 2]).result(20)
        assert lease.found == [0, 0]
        lease.wait()
        other = spawn(blocks.cache.reserve, [5]).result(20)
        held.release()
        for one in (fresh, other):
            one.cancel()
        lease.release()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns fifty times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_four_threads_use_three_tiers_and_every_byte_is_right(tiers: Tiers, spawn: Spawn) -> None:
    # 64 hot pages, 64 in the host level and 128 on disk, for 400 keys in chains of 8.
    page = 32 << 10
    storage = tiers.build(64, 64, 128, page=page)
    cache: Cache = BlockCache(storage)
    (pool,) = storage.levels[0].groups[0].memory.pools
    hot = tiers.raw(pool.memory.address, 64 * page).reshape(64, page)  # type: ignore[attr-defined]
    contents = {key: tiers.content(key, page) for key in range(400)}
    verified = [0] * 4

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(500):
            chain = chance.randrange(50) * 8
            keys = list(range(chain, chain + chance.randint(1, 8)))
            try:
                with cache.acquire(keys) as lease:
                    lease.wait()
                    for slot, key in zip(lease.slots().tolist(), lease.keys, strict=True):
                        assert np.array_equal(hot[slot], contents[key]), f"block {key} is wrong"
                    verified[number] += len(lease)
                    missing = keys[len(lease) :]
                    fresh = cache.reserve(missing)
            except OutOfPagesError:
                continue  # the others hold too much just now
            except ValueError:
                continue  # another one has reserved or stored one of them meanwhile
            with fresh:
                fresh.wait()
                for slot, key in zip(fresh.slots().tolist(), missing, strict=True):
                    hot[slot] = contents[key]
                if chance.random() < 0.9:
                    fresh.commit()

    for future in [spawn(work, number) for number in range(4)]:
        future.result(60)
    assert min(verified) > 50
    assert cache.lost == 0
    storage._check()
    stats = storage.stats()
    assert len(cache) == sum(level.used for level in stats.levels.values())
    for stored in cache:
        (kept,) = cache._index.pages(stored)
        assert tiers.intact(storage, kept, stored)
