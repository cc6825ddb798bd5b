"""What a cache tells of its blocks: in order, joined, bounded, and true."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostmem import HostEvent
from hostmem.testing import FaultPlan
from kvtier import AttentionLayerConfig, BlockCache, BlockEvent, BufferConfig, TierStorage
from kvtier.events import EventLog

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

MIB = 1 << 20
COPY = "process_vm_readv"
# Of each MiB of a level, each group gets half: group 0 a page, group 1 two.
TWO_GROUPS = [
    AttentionLayerConfig(0, [BufferConfig("kv", MIB // 2)]),
    AttentionLayerConfig(1, [BufferConfig("kv", MIB // 4)], sliding_window_size=32),
]
Told = tuple[str, tuple[int, ...], int, str | None, str | None]


class Watched:
    """A cache, and what it tells."""

    def __init__(self, storage: TierStorage, max_events: int = 1000) -> None:
        self.storage = storage
        self.cache: BlockCache[int] = BlockCache(storage, max_events=max_events)

    def store(self, *keys: int, priority: int = 0) -> None:
        with self.cache.reserve(keys, priority=priority) as fresh:
            fresh.wait()
            fresh.commit()

    def told(self) -> list[Told]:
        return [(e.kind, e.keys, e.group, e.source, e.level) for e in self.cache.take_events()]


@pytest.fixture
def watch(tiers: Tiers) -> Callable[..., Watched]:
    def build(
        *sizes: int, layers: Sequence[AttentionLayerConfig] | None = None, **options: int
    ) -> Watched:
        return Watched(tiers.build(*sizes, layers=layers), **options)

    return build


# ------------------------------------------------------------------------------ the log alone


def test_events_that_are_alike_are_joined_to_one() -> None:
    log: EventLog[int] = EventLog(100)
    log.note("stored", [1, 2], 0, None, "gpu")
    log.note("stored", iter([3]), 0, None, "gpu")
    log.note("stored", [3], 1, None, "gpu")
    log.note("stored", [4], 0, None, "gpu")
    log.note("moved", [], 0, "gpu", "host")
    assert log.take() == [
        BlockEvent("stored", (1, 2, 3), 0, None, "gpu"),
        BlockEvent("stored", (3,), 1, None, "gpu"),
        BlockEvent("stored", (4,), 0, None, "gpu"),
    ]
    assert log.take() == []
    assert log.dropped == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5))), st.integers(0, 9), st.data())
def test_a_log_holds_the_last_keys_and_counts_the_others(
    notes: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    log: EventLog[int] = EventLog(most)
    expected: list[tuple[int, int]] = []
    number = dropped = 0
    for group, n in notes:
        keys = range(number, number + n)
        number += n
        log.note("stored", keys, group, None, "gpu")
        expected += [(group, key) for key in keys]
        dropped += len(expected[: len(expected) - most]) if len(expected) > most else 0
        expected = expected[len(expected) - most if len(expected) > most else 0 :]
        assert log.dropped == dropped
        if data.draw(st.booleans()):
            assert [(e.group, key) for e in log.take() for key in e.keys] == expected
            expected = []
    events = log.take()
    assert [(e.group, key) for e in events for key in e.keys] == expected
    assert all(event.keys for event in events)


# ------------------------------------------------------------------------------ of a cache


def test_what_is_stored_moved_and_removed_is_told_in_order(watch: Callable[..., Watched]) -> None:
    it = watch(4, 4)
    it.store(0, 1, 2, 3)
    it.store(4, 5)
    assert it.told() == [
        ("stored", (0, 1, 2, 3), 0, None, "gpu"),
        ("moved", (0, 1), 0, "gpu", "host"),
        ("stored", (4, 5), 0, None, "gpu"),
    ]
    it.store(6, 7, 8, 9)  # two of these find room below, and two push others out
    assert it.told() == [
        ("moved", (2, 3, 4, 5), 0, "gpu", "host"),
        ("removed", (0, 1), 0, "host", None),
        ("stored", (6, 7, 8, 9), 0, None, "gpu"),
    ]
    it.cache.acquire([2]).release()
    it.cache.drop([7, 3])
    assert it.told() == [
        ("moved", (6,), 0, "gpu", "host"),
        ("removed", (3,), 0, "host", None),
        ("moved", (2,), 0, "host", "gpu"),
        ("removed", (7,), 0, "gpu", None),
    ]


def test_each_pool_group_is_told_of_by_itself(watch: Callable[..., Watched]) -> None:
    it = watch(4, 4, layers=TWO_GROUPS)
    it.store(0, 1)
    assert it.told() == [
        ("stored", (0, 1), 0, None, "gpu"),
        ("stored", (0, 1), 1, None, "gpu"),
    ]
    it.cache.drop([1, 0])
    assert it.told() == [
        ("removed", (1,), 0, "gpu", None),
        ("removed", (1,), 1, "gpu", None),
        ("removed", (0,), 0, "gpu", None),
        ("removed", (0,), 1, "gpu", None),
    ]


def test_reserved_blocks_are_nobodys_news_until_they_are_committed(
    watch: Callable[..., Watched],
) -> None:
    it = watch(4, 4)
    it.cache.reserve([0, 1]).cancel()
    fresh = it.cache.reserve([None, 3])
    assert it.told() == []
    fresh.commit(keys=[2, 3])
    assert it.told() == [("stored", (2, 3), 0, None, "gpu")]


def test_a_commit_of_what_is_there_in_the_first_level_is_no_news(
    watch: Callable[..., Watched],
) -> None:
    it = watch(4, 4)
    it.store(0)
    it.told()
    with it.cache.reserve([None, None]) as fresh:
        fresh.commit(keys=[0, 1])
    assert it.told() == [("stored", (1,), 0, None, "gpu")]


def test_a_colder_page_that_gives_way_is_removed_before_the_new_one_is_stored(
    watch: Callable[..., Watched],
) -> None:
    it = watch(4, 4)
    it.store(0)
    fresh = it.cache.reserve([None, None])
    it.store(1, 2)  # 0 goes down
    it.told()
    fresh.commit(keys=[0, 3])
    assert it.told() == [
        ("removed", (0,), 0, "host", None),
        ("stored", (0, 3), 0, None, "gpu"),
    ]


def test_a_withdrawn_block_is_removed_where_it_was_brought_to(
    watch: Callable[..., Watched],
) -> None:
    it = watch(4, 4)
    it.store(0, 1, 2, 3)
    it.store(4)
    it.told()
    with it.cache.withdraw([0]) as fresh:
        assert it.told() == [
            ("moved", (1,), 0, "gpu", "host"),
            ("moved", (0,), 0, "host", "gpu"),
            ("removed", (0,), 0, "gpu", None),
        ]
        fresh.wait()
        fresh.commit(keys=[9])
    assert it.told() == [("stored", (9,), 0, None, "gpu")]


def test_a_page_that_goes_back_because_its_copy_failed_has_moved_back(
    watch: Callable[..., Watched],
) -> None:
    it = watch(4, 4)
    it.store(0, 1, 2, 3)
    it.store(4)
    it.cache._index.pages(0)[0].ready.synchronize()
    it.told()
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, at=2)
        with it.cache.acquire([0]) as lease, pytest.raises(OSError, match=COPY):
            lease.wait()
    assert it.told() == [
        ("moved", (1,), 0, "gpu", "host"),
        ("moved", (0,), 0, "host", "gpu"),
        ("moved", (0,), 0, "gpu", "host"),
    ]


def test_a_block_that_was_never_computed_is_removed_when_that_is_found_out(
    watch: Callable[..., Watched],
) -> None:
    it = watch(4, 4, layers=TWO_GROUPS)
    broken = HostEvent()
    with it.cache.reserve([0]) as fresh:
        fresh.commit(broken)
    it.told()
    broken.set(RuntimeError("the kernel failed"))
    assert len(it.cache.acquire([0])) == 0
    assert it.told() == [
        ("removed", (0,), 0, "gpu", None),
        ("removed", (0,), 1, "gpu", None),
    ]


def test_a_page_that_a_window_can_do_without_is_removed_alone(
    watch: Callable[..., Watched],
) -> None:
    # Group 0 has 4 and 8 slots, group 1 has 8 and 16: group 1 is filled by others.
    it = watch(4, 4, layers=TWO_GROUPS)
    it.store(0, 1)
    it.told()
    for _ in range(2):
        pages = it.storage.new_pages(range(100, 108), 1)
        it.storage.commit(pages)
        it.storage.release(pages)
    assert it.told() == [
        ("moved", (0, 1), 1, "gpu", "host"),
        ("removed", (0, 1), 1, "host", None),
    ]
    assert 0 in it.cache


def test_the_oldest_keys_go_and_are_counted(watch: Callable[..., Watched]) -> None:
    it = watch(4, 4, max_events=3)
    it.store(0, 1)
    it.store(2, 3)
    assert it.cache.events_dropped == 1
    assert it.told() == [("stored", (1, 2, 3), 0, None, "gpu")]
    it.cache.drop([0])
    assert it.told() == [("removed", (0,), 0, "gpu", None)]
    assert it.cache.events_dropped == 1


def test_without_events_there_is_nothing_to_take(watch: Callable[..., Watched]) -> None:
    it = watch(4, 4, max_events=0)
    it.store(0, 1, 2, 3)
    it.store(4)
    it.cache.drop([0, 1])
    assert it.cache.take_events() == []
    assert it.cache.events_dropped == 0


def test_fewer_events_than_none_are_refused(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    with pytest.raises(ValueError, match="max_events: -1 is below 0"):
        BlockCache(storage, max_events=-1)
    BlockCache(storage)


def test_a_picture_made_of_events_is_the_cache(watch: Callable[..., Watched]) -> None:
    it = watch(4, 4, layers=TWO_GROUPS)
    picture: dict[tuple[int, int], str] = {}
    for n in range(60):
        keys = [n * 7 % 11, 20 + n * 5 % 11, 40 + n * 3 % 7]
        with it.cache.acquire(keys):
            it.store(*(key for key in keys if key not in it.cache))
        for event in it.cache.take_events():
            for key in event.keys:
                assert picture.pop((key, event.group), None) == event.source
                if event.level is not None:
                    picture[key, event.group] = event.level
    assert set(picture.values()) == {"gpu", "host"}
    assert picture == {
        (key, page.group): it.storage.levels[page.level].name
        for key in it.cache
        for page in it.cache._index.pages(key)
    }
