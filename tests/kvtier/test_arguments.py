"""Arguments that would do harm later are refused at the call, and cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hostmem import OutOfPagesError
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    TierStorage,
)

CONFIG = KVCacheManagerConfig(
    4,
    [GpuCacheTierConfig("2MiB", "2MiB"), HostCacheTierConfig("2MiB", "2MiB")],
    [AttentionLayerConfig(0, [BufferConfig("kv", "128KiB")])],
)


@pytest.fixture
def storage() -> Iterator[TierStorage]:
    with TierStorage(CONFIG, device="cpu") as storage:
        yield storage
        assert storage.latch.reason is None


@pytest.fixture
def cache(storage: TierStorage) -> BlockCache[Any]:
    cache: BlockCache[Any] = BlockCache(storage)
    cache.reserve(["a", "b"]).commit()
    return cache


class Torch:
    """Looks like an event, and is none."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


CALLS: dict[str, Callable[[BlockCache[Any], Any], object]] = {
    "reserve": lambda cache, bad: cache.reserve(["c"], priority=bad),
    "set_priority": lambda cache, bad: cache.set_priority(["a"], bad),
    "commit": lambda cache, bad: cache.reserve([None]).commit(bad, keys=["c"]),
    "commit_leased": lambda cache, bad: cache.reserve([None]).commit_leased(bad, keys=["c"]),
    "cancel": lambda cache, bad: cache.reserve([None]).cancel(bad),
    "release": lambda cache, bad: cache.acquire(["a"]).release(bad),
    "extend": lambda cache, bad: cache.reserve([None]).extend(bad),
}


@pytest.mark.parametrize("bad", [None, "hi", 0.5, float("nan"), Torch()], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_type_is_refused(cache: BlockCache[Any], call: str, bad: object) -> None:
    with pytest.raises(TypeError, match="is needed"):
        CALLS[call](cache, bad)
    assert sorted(cache) == ["a", "b"]


def test_what_was_refused_can_still_be_used(cache: BlockCache[Any], storage: TierStorage) -> None:
    lease, room = cache.acquire(["a"]), cache.reserve([None])
    calls: list[Callable[[Any], object]] = [lease.release, room.cancel, room.commit]
    for call in calls:
        with pytest.raises(TypeError):
            call(None)
    with pytest.raises(TypeError, match="BlockReservation is needed"):
        room.extend(lease)  # type: ignore[arg-type]
    lease.release()
    room.cancel()
    assert storage.leased(0) == 0
    cache._check()


def test_keys_may_be_any_iterable(cache: BlockCache[Any], storage: TierStorage) -> None:
    with cache.acquire(key for key in "ab") as lease:  # type: ignore[arg-type]
        assert lease.keys == ["a", "b"]
    with cache.reserve(key for key in "cd") as room:  # type: ignore[arg-type]
        assert room.keys == ["c", "d"]
    assert storage.leased(0) == 0


class Key:
    """A key whose hash fails the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def __hash__(self) -> int:
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("no hash today")
        return 7


def test_a_key_that_fails_leaves_no_block_half_there(
    cache: BlockCache[Any], storage: TierStorage
) -> None:
    with cache.reserve([None] * 3) as room:
        with pytest.raises(RuntimeError, match="no hash today"):
            room.commit(keys=["c", Key(), "e"])
        assert cache.match(["c"]) == 0
    assert storage.leased(0) == 0
    cache._check()


def test_more_than_a_level_can_ever_hold_is_refused_at_once(cache: BlockCache[Any]) -> None:
    with pytest.raises(OutOfPagesError) as caught:
        cache.reserve([None] * 100_000)
    assert caught.value.short == 100_000 - 16


def test_a_sequence_refuses_before_anything_has_changed() -> None:
    with KVCacheManager(CONFIG, device="cpu") as manager:
        for options in ({"salt": "abc"}, {"salt": bytearray(b"abc")}, {"priority": "hi"}):
            with pytest.raises(TypeError, match="needed"):
                manager.create_sequence([1, 2], reuse=False, **options)
        sequence = manager.create_sequence([1, 2])
        with pytest.raises(TypeError, match="whole number"):
            sequence.grow(float("nan"))  # type: ignore[arg-type]
        sequence.grow(4)
        with pytest.raises(TypeError, match="Event is needed"):
            sequence.commit([1, 2, 3, 4], None)  # type: ignore[arg-type]
        assert sequence.num_tokens == 0
        sequence.commit([1, 2, 3, 4])
