"""Blocks of which sliding windows show only some pages: found, held, forgotten and dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hostmem import HostEvent, OutOfPagesError
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockLease,
    BufferConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers

MIB = 1 << 20
TOKENS = 16


def layer(
    number: int, kib: int, window: int | None = None, sinks: int | None = None
) -> AttentionLayerConfig:
    """Describe a layer with a window and sinks of so many blocks."""
    return AttentionLayerConfig(
        number,
        [BufferConfig("kv", kib << 10)],
        sliding_window_size=window and window * TOKENS,
        num_sink_tokens=sinks and sinks * TOKENS,
    )


# Of 4 MiB, each of two groups gets half: 4 pages of group 0, and 8 of group 1.
WINDOWED = [layer(0, 512), layer(1, 256, window=2)]
SINKS = [layer(0, 512), layer(1, 256, window=2, sinks=1)]
ALL_WINDOWED = [layer(0, 512, window=2), layer(1, 256, window=1, sinks=1)]
SEVERAL = [layer(0, 256), layer(1, 256, window=2), layer(2, 256, window=3, sinks=1)]


class Blocks:
    """A cache whose pages hold their keys and groups."""

    def __init__(self, storage: TierStorage, tiers: Tiers) -> None:
        self.storage = storage
        self.tiers = tiers
        self.cache: BlockCache[int] = BlockCache(storage)

    def write(self, page: Page, key: int) -> None:
        self.tiers.write(self.storage, page, key * 8 + page.group)

    def store(self, *keys: int) -> None:
        with self.cache.reserve(keys) as fresh:
            fresh.wait()
            for column in fresh._columns:
                for key, page in zip(keys, column, strict=True):
                    assert page is not None
                    self.write(page, key)
            fresh.commit()

    def verify(self, lease: BlockLease[int]) -> None:
        lease.wait()
        for column in lease._columns:
            for key, page in zip(lease.keys, column, strict=True):
                if page is not None:
                    assert page.level == 0
                    assert self.tiers.intact(self.storage, page, key * 8 + page.group)

    def page(self, key: int, group: int) -> Page | None:
        return self.cache._index.blocks[key].pages[group]

    def lack(self, group: int, *keys: int) -> None:
        """Let the pages of a group be dropped, as those that leave the last level are."""
        for key in keys:
            page = self.page(key, group)
            assert page is not None
            self.storage.discard([page])
            self.cache._index._dropped(page)

    def crowd(self, group: int, n: int) -> None:
        """Fill slots of a group with what is no block."""
        pages = self.storage.new_pages(range(n), group)
        self.storage.commit(pages)
        self.storage.release(pages)

    def shown(self, *keys: int) -> list[list[int]]:
        """Acquire blocks, verify them, and give the places that have a page, by group."""
        with self.cache.acquire(keys) as lease:
            self.verify(lease)
            return [
                np.flatnonzero(lease.slots(group) >= 0).tolist()
                for group in range(len(self.storage.plan.groups))
            ]


@pytest.fixture
def build(tiers: Tiers) -> Callable[..., Blocks]:
    def make(layers: Sequence[AttentionLayerConfig], *sizes: int) -> Blocks:
        return Blocks(tiers.build(*(sizes or (4, 4)), layers=layers), tiers)

    return make


# ------------------------------------------------------------------------------ what is held


def test_a_lease_holds_what_the_token_behind_it_sees(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1, 2, 3)
    assert blocks.shown(0, 1, 2, 3) == [[0, 1, 2, 3], [2, 3]]
    assert blocks.shown(0, 1) == [[0, 1], [0, 1]]
    assert blocks.shown(0) == [[0], [0]]
    assert [blocks.storage.leased(group) for group in (0, 1)] == [0, 0]


def test_sinks_are_held_as_well(build: Callable[..., Blocks]) -> None:
    blocks = build(SINKS)
    blocks.store(0, 1, 2, 3)
    assert blocks.shown(0, 1, 2, 3) == [[0, 1, 2, 3], [0, 2, 3]]


def test_what_is_not_shown_is_not_brought(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1, 2, 3)
    blocks.crowd(1, 8)  # the pages of group 1 go down
    with blocks.cache.acquire([0, 1, 2, 3]) as lease:
        blocks.verify(lease)
        assert lease.found == [0, 0, 1, 1]
        levels = [page and page.level for page in (blocks.page(key, 1) for key in range(4))]
        assert levels == [1, 1, 0, 0]
        assert lease.slots(1).tolist()[:2] == [-1, -1]
        assert lease.keys == [0, 1, 2, 3]


def test_a_prefetch_brings_what_is_shown(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1, 2, 3)
    blocks.crowd(1, 8)
    job = blocks.cache.prefetch([0, 1, 2, 3])
    job.wait(20)
    assert job.keys == [0, 1, 2, 3]
    levels = [page and page.level for page in (blocks.page(key, 1) for key in range(4))]
    assert levels == [1, 1, 0, 0]


# ------------------------------------------------------------------------------ what is lacking


def test_a_block_that_lacks_a_page_is_found_where_no_window_shows_it(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1, 2, 3)
    blocks.lack(1, 1)
    assert 1 in blocks.cache
    assert [blocks.cache.match(range(n)) for n in range(5)] == [0, 1, 1, 1, 4]
    assert blocks.shown(0, 1, 2, 3) == [[0, 1, 2, 3], [2, 3]]
    assert blocks.shown(0, 1, 2) == [[0], [0]]
    blocks.cache._check()


def test_a_sink_that_is_lacking_leaves_what_is_before_it(build: Callable[..., Blocks]) -> None:
    blocks = build(SINKS)
    blocks.store(0, 1, 2, 3)
    blocks.lack(1, 0)
    assert [blocks.cache.match(range(n)) for n in range(5)] == [0] * 5
    assert blocks.shown(0, 1, 2, 3) == [[], []]


def test_a_block_that_lacks_a_page_gets_one_when_it_is_computed_again(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1)
    blocks.lack(1, 1)
    with pytest.raises(ValueError, match="1 is there already"):
        blocks.cache.reserve([1])
    with blocks.cache.reserve([None]) as fresh:
        fresh.wait()
        for column in fresh._columns:
            assert column[0] is not None
            blocks.write(column[0], 1)
        lease = fresh.commit_leased(keys=[1])
    assert lease.slots(0).tolist() == [getattr(blocks.page(1, 0), "slot", None)]
    assert lease.slots(1).tolist() == [getattr(blocks.page(1, 1), "slot", None)]
    blocks.verify(lease)
    lease.release()
    assert blocks.shown(0, 1) == [[0, 1], [0, 1]]
    assert [group.slots.in_use for group in blocks.storage.levels[0].groups] == [2, 2]
    blocks.cache._check()


def test_the_page_that_completes_a_kept_block_is_kept(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED)
    blocks.store(0)
    blocks.lack(1, 0)
    blocks.cache.keep([0])
    with blocks.cache.reserve([None]) as fresh:
        fresh.commit(keys=[0])
    for _ in range(4):
        blocks.crowd(1, 8)
    assert blocks.page(0, 1) is not None
    blocks.cache.keep([0], False)
    blocks.crowd(1, 8)
    blocks.crowd(1, 8)
    assert blocks.page(0, 1) is None


def test_pages_of_a_window_are_dropped_one_by_one_and_the_others_with_their_block(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1, 2, 3)
    blocks.crowd(1, 8)
    blocks.crowd(1, 6)
    assert [blocks.page(key, 1) is not None for key in range(4)] == [False, False, True, True]
    assert len(blocks.cache) == 4
    assert blocks.cache.match([0, 1, 2, 3]) == 4
    blocks.crowd(0, 4)
    blocks.crowd(0, 2)
    assert list(blocks.cache) == [2, 3]
    assert blocks.storage.stats().pages_dropped == 4
    blocks.crowd(0, 2)
    assert list(blocks.cache) == []
    assert sum(group.slots.in_use for at in blocks.storage.levels for group in at.groups) == 8 + 14
    blocks.cache._check()


def test_blocks_that_lack_pages_are_touched_kept_and_dropped_like_others(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1)
    blocks.lack(1, 0, 1)
    blocks.cache.touch([0])
    blocks.cache.keep([0])
    blocks.cache.set_priority([0], 3)
    assert blocks.cache.room_for([0]) == [0, 0]
    assert blocks.cache.drop([0, 1]) == 2
    assert blocks.storage.stats().levels["gpu"].used == 0


def test_a_match_is_what_an_acquire_finds_whatever_is_lacking(
    build: Callable[..., Blocks],
) -> None:
    for lacking in range(64):
        blocks = build(SEVERAL, 6, 6)
        blocks.store(0, 1, 2)
        for bit, (group, key) in enumerate([(g, k) for g in (1, 2) for k in (0, 1, 2)]):
            if lacking >> bit & 1:
                blocks.lack(group, key)
        for n in range(4):
            found = blocks.cache.match(range(n))
            with blocks.cache.acquire(range(n)) as lease:
                assert len(lease) == found
                blocks.verify(lease)
        blocks.storage.close()


# ------------------------------------------------------------------------------ forgetting


def test_forgotten_pages_may_leave_and_the_block_stays(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1)
    lease = blocks.cache.acquire([0, 1])
    fresh = blocks.cache.reserve([2])
    fresh.wait()
    for column in fresh._columns:
        assert column[0] is not None
        blocks.write(column[0], 2)
    lease.extend(fresh.commit_leased())
    lease.forget(1, 1)  # the token behind block 2 sees blocks 1 and 2
    assert lease.slots(1).tolist()[0] == -1
    assert (lease.slots(1) >= 0).tolist() == [False, True, True]
    assert (lease.slots(0) >= 0).all()
    blocks.crowd(1, 6)
    forgotten = blocks.page(0, 1)
    assert forgotten is not None
    assert forgotten.level == 1
    blocks.verify(lease)
    lease.release()
    assert blocks.shown(0, 1, 2) == [[0, 1, 2], [1, 2]]
    assert [blocks.storage.leased(group) for group in (0, 1)] == [0, 0]
    blocks.cache._check()


def test_sinks_are_not_forgotten_and_forgetting_twice_is_forgetting_once(
    build: Callable[..., Blocks],
) -> None:
    blocks = build([layer(0, 512), layer(1, 256, window=4, sinks=1)])
    blocks.store(0, 1, 2, 3)
    lease, other = blocks.cache.acquire(range(4)), blocks.cache.acquire(range(4))
    for n in (0, 1, 2, 2, 1, 3):
        lease.forget(1, n)
    assert (lease.slots(1) >= 0).tolist() == [True, False, False, True]
    assert blocks.storage.leased(1) == 4  # the other one holds all
    other.release()
    assert blocks.storage.leased(1) == 2
    lease.forget(1, 99)
    assert (lease.slots(1) >= 0).tolist() == [True, False, False, False]
    assert len(lease.slots(1)) == 4
    lease.release()


def test_what_cannot_be_forgotten_is_refused(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1)
    lease = blocks.cache.acquire([0, 1])
    with pytest.raises(ValueError, match=r"group: 0 is not one of those with a window, \[1\]"):
        lease.forget(0, 1)
    with pytest.raises(ValueError, match="blocks: -1 is below 0"):
        lease.forget(1, -1)
    assert (lease.slots(1) >= 0).all()
    lease.release()
    with pytest.raises(ValueError, match="lease was released"):
        lease.forget(1, 1)


def test_forgotten_pages_are_nobodys_while_a_step_reads_them(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    blocks = build(WINDOWED)
    blocks.store(0, 1, 2, 3)
    reading = gate()
    with blocks.cache.acquire([0, 1]) as lease:
        lease.forget(1, 1, after=reading)
        page = blocks.page(0, 1)
        assert page is not None
        assert page.fences == (reading,)
    blocks.cache.drop([0])
    fresh = blocks.storage.new_pages(range(5), 1)  # four free slots, and that one
    assert reading in fresh[-1].fences
    blocks.storage.discard(fresh)
    reading.set()


# ------------------------------------------------------------------------------ other groups


def test_each_of_several_windows_shows_its_own(build: Callable[..., Blocks]) -> None:
    blocks = build(SEVERAL, 6, 6)
    blocks.store(0, 1, 2, 3, 4)
    assert blocks.shown(0, 1, 2, 3, 4) == [[0, 1, 2, 3, 4], [3, 4], [0, 2, 3, 4]]
    blocks.lack(1, 3)
    blocks.lack(2, 1)
    # Five would show group 1 of block 3; four as well; three show group 2 of block 1.
    assert blocks.cache.match(range(5)) == 1
    assert blocks.shown(0, 1, 2, 3, 4) == [[0], [0], [0]]
    blocks.cache._check()


def test_where_all_groups_have_windows_a_block_goes_with_its_last_page(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(ALL_WINDOWED)
    blocks.store(0, 1, 2, 3)
    assert blocks.shown(0, 1, 2, 3) == [[2, 3], [0, 3]]
    blocks.lack(0, 1)
    assert blocks.cache.match(range(4)) == 4
    with blocks.cache.acquire(range(4)) as lease:
        assert lease.found == [0, 0, 0, 0]
        assert lease.keys == [0, 1, 2, 3]
        blocks.lack(1, 1)  # nobody holds a page of it
        assert list(blocks.cache) == [0, 2, 3]
        lease.wait()
    assert blocks.cache.match(range(4)) == 1
    blocks.lack(0, 0)
    assert 0 in blocks.cache
    assert blocks.cache.match([0]) == 0
    blocks.cache._check()
    blocks.cache.drop([0, 2, 3])
    assert blocks.storage.stats().levels["gpu"].used == 0


def test_a_block_that_was_never_computed_goes_with_its_pages_of_windows(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(WINDOWED)
    broken = HostEvent()
    with blocks.cache.reserve([0]) as fresh:
        lease = fresh.commit_leased(broken)
    lease.forget(1, 1)
    broken.set(RuntimeError("the kernel failed"))
    assert blocks.shown(0) == [[], []]
    assert 0 in blocks.cache  # what is held of it fails when it is waited for
    with pytest.raises(RuntimeError, match="kernel"):
        lease.wait()
    lease.release()
    assert 0 not in blocks.cache
    assert blocks.storage.stats().levels["gpu"].used == 0
    assert blocks.cache.lost == 1


def test_acquiring_needs_room_for_what_is_shown_alone(build: Callable[..., Blocks]) -> None:
    blocks = build(WINDOWED, 4, 4, 8)
    blocks.store(0, 1, 2, 3)
    blocks.crowd(1, 8)
    held = blocks.storage.new_pages(range(6), 1)
    assert blocks.shown(0, 1, 2, 3) == [[0, 1, 2, 3], [2, 3]]
    more = blocks.storage.new_pages(range(1), 1)
    with blocks.cache.acquire([0]), pytest.raises(OutOfPagesError, match="group 1"):
        blocks.cache.acquire([0, 1])
    blocks.storage.discard([*held, *more])


def test_what_the_next_token_sees_can_be_asked_for() -> None:
    layers = [
        AttentionLayerConfig(0, [BufferConfig("kv", 1 << 16)]),
        AttentionLayerConfig(1, [BufferConfig("kv", 1 << 16)], 6, 2),
    ]
    config = KVCacheManagerConfig(4, [HostCacheTierConfig("8MiB", "8MiB")], layers)
    with TierStorage(config, device="cpu") as storage:
        seen = BlockCache[int](storage).visible(5)  # token 20 sees tokens 15 to 20, and 0 and 1
    assert seen.tolist() == [[True] * 5, [True, False, False, True, True]]
