"""The remote level against a store in memory: what goes, what comes, and what it never does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from hostmem import ClosedError, HostEvent, StaticHostMem
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
    RemoteStats,
    TierStorage,
)
from kvtier.remote.trailers import TRAILER_BYTES
from tests.kvtier.remote_store import Store, raw

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn, Until

KIB, MIB = 1 << 10, 1 << 20
PAGE = 512 * KIB
ONE = [AttentionLayerConfig(0, [BufferConfig("kv", PAGE)])]
# Two pool groups, the first of two pools, the second with a window of two blocks.
TWO = [
    AttentionLayerConfig(0, [BufferConfig("key", 96 * KIB), BufferConfig("value", 96 * KIB)]),
    AttentionLayerConfig(1, [BufferConfig("state", 128 * KIB)]),
    AttentionLayerConfig(2, [BufferConfig("kv", 256 * KIB)], sliding_window_size=32),
]


class Host:
    """One process's cache; its pages are written and read past it."""

    def __init__(
        self,
        stack: ExitStack,
        store: Store,
        *,
        gpu: int = 0,
        host: int = 4,
        disk: str | None = None,
        layers: Sequence[AttentionLayerConfig] = ONE,
        **remote: Any,
    ) -> None:
        tiers: list[Any] = [GpuCacheTierConfig(gpu * MIB, gpu * MIB)] if gpu else []
        if host:
            tiers.append(HostCacheTierConfig(host * MIB, host * MIB))
        if disk is not None:
            tiers.append(DiskCacheTierConfig(4 * MIB, disk, 4 * MIB))
        remote = {"deadline": 20.0, "local_segment": 0, **remote}
        tiers.append(RemoteCacheTierConfig("nowhere:1", **remote))
        config = KVCacheManagerConfig(16, tiers, layers)
        self.storage = stack.enter_context(TierStorage(config, device="cpu"))
        self.cache: BlockCache[int] = BlockCache(self.storage, connect=store.connect)

    @property
    def stats(self) -> RemoteStats:
        found = self.storage.stats().remote
        assert found is not None
        return found

    def _parts(self, group: int, slot: int) -> Iterator[tuple[int, int, int]]:
        memory = self.storage.levels[0].groups[group].memory
        for pool, offset in zip(memory.pools, memory.offsets, strict=True):
            yield pool.memory.address + slot * pool.slot_size, pool.slot_size, offset  # type: ignore[attr-defined]

    def compute(self, tiers: Tiers, *keys: int, ready: HostEvent | None = None) -> None:
        """Compute blocks whose bytes their keys decide."""
        with self.cache.reserve(keys) as room:
            room.wait()
            for group in range(len(self.storage.plan.groups)):
                for key, slot in zip(keys, room.slots(group).tolist(), strict=True):
                    for address, nbytes, offset in self._parts(group, slot):
                        content = tiers.content(key * 2 + group, offset + nbytes)[offset:]
                        raw(address, nbytes)[:] = content
            if ready is None:
                room.commit()
            else:
                room.commit(ready)

    def holds(self, tiers: Tiers, *keys: int) -> bool:
        """Tell whether blocks are there, and every byte of their pages as computed."""
        with self.cache.acquire(keys) as lease:
            lease.wait()
            return len(lease) == len(keys) and all(
                bool((raw(at, n) == tiers.content(key * 2 + group, offset + n)[offset:]).all())
                for group in range(len(self.storage.plan.groups))
                for key, slot in zip(keys, lease.slots(group).tolist(), strict=True)
                if slot >= 0
                for at, n, offset in self._parts(group, slot)
            )

    def fetch(self, *keys: int) -> int:
        """Prefetch blocks; how many are there then."""
        self.cache.prefetch(keys).wait(20)
        return self.cache.match(keys)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def host(stack: ExitStack, store: Store) -> Callable[..., Host]:
    def make(**options: Any) -> Host:
        return Host(stack, store, **options)

    return make


Make = Callable[..., Host]


def sent(host: Host, pages: int, until: Until) -> None:
    until(lambda: host.stats.sent_pages == pages)


# --------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("gpu", [0, 2])
def test_a_block_computed_on_one_host_is_found_on_another(
    host: Make, tiers: Tiers, until: Until, gpu: int
) -> None:
    one, other = host(gpu=gpu), host(gpu=gpu)
    one.compute(tiers, 1, 2, 3)
    sent(one, 3, until)
    assert other.cache.match([1, 2, 3, 4]) == 0
    assert other.cache.lookup([1, 2, 3, 4]) == 3
    assert other.fetch(1, 2, 3, 4) == 3
    assert other.holds(tiers, 1, 2, 3)
    assert other.stats.fetched_pages == 3
    assert other.stats.fetched_bytes == 3 * PAGE
    assert other.stats.misses == {"absent": 1}
    assert other.stats.unsent == {}
    other.cache._check()


@pytest.mark.parametrize("gpu", [0, 4])
def test_groups_of_several_pools_and_windows_come_back(
    host: Make, tiers: Tiers, until: Until, gpu: int
) -> None:
    one, other = host(gpu=gpu, host=8, layers=TWO), host(gpu=gpu, host=8, layers=TWO)
    one.compute(tiers, 1, 2, 3, 4)
    sent(one, 8, until)
    assert other.fetch(1, 2, 3, 4) == 4
    assert other.holds(tiers, 1, 2, 3, 4)
    # The window of two blocks shows the last two, the token behind them included.
    assert other.stats.fetched_pages == 4 + 2
    other.cache._check()


def test_a_gpu_level_and_an_engines_host_level_share_pages(
    host: Make, tiers: Tiers, until: Until
) -> None:
    one, other = host(gpu=4, host=0, layers=TWO), host(host=8, layers=TWO)
    one.compute(tiers, 1, 2)
    sent(one, 4, until)
    assert other.fetch(1, 2) == 2
    for group in (0, 1):
        with other.cache.acquire([1, 2]) as lease:
            size = other.storage.plan.groups[group].page_bytes
            for key, slot in zip((1, 2), lease.slots(group).tolist(), strict=True):
                ((at, nbytes, _),) = other._parts(group, slot)
                assert nbytes == size
                assert (raw(at, size) == tiers.content(key * 2 + group, size)).all()


def test_an_engines_blocks_are_stored_and_loaded(
    stack: ExitStack, store: Store, tiers: Tiers, until: Until
) -> None:
    def make() -> tuple[BlockCache[int], Any]:
        remote = RemoteCacheTierConfig("nowhere:1", deadline=20.0)
        config = KVCacheManagerConfig(16, [HostCacheTierConfig(4 * MIB), remote], ONE)
        storage = stack.enter_context(TierStorage(config, device="cpu"))
        memory = stack.enter_context(StaticHostMem(4 * PAGE, device="cpu"))
        pages = EnginePages(storage, {(0, "kv"): (memory.address, PAGE)}, 4)
        return BlockCache(storage, engine=pages, connect=store.connect), memory.view()

    (one, memory), (other, there) = make(), make()
    memory[:] = 7
    one.store([1, 2], [0, 1]).wait(20)
    until(lambda: len(store.objects) == 2)
    other.prefetch([1, 2]).wait(20)
    other.load([1, 2], [2, 3]).wait(20)
    assert (there[2 * PAGE :] == 7).all()


def test_pages_lie_in_registered_units(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one = host(host=64)
    one.compute(tiers, 1)
    sent(one, 1, until)
    memory = one.storage.levels[0].groups[0].memory.pools[0].memory  # type: ignore[attr-defined]
    # The unit that is in use, and the trailers; nothing else of 64 MiB.
    assert store.ranges.pop(memory.address) == memory.commit_unit
    assert sum(store.ranges.values()) < MIB
    store.ranges[memory.address] = memory.commit_unit


def test_what_cannot_be_registered_is_not_sent(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    store.registers = False
    one = host()
    one.compute(tiers, 1)
    until(lambda: one.stats.unsent == {"unregistered": 1})
    assert store.objects == {}
    assert one.fetch(2) == 0


def test_other_layouts_and_namespaces_share_nothing(host: Make, tiers: Tiers, until: Until) -> None:
    one = host(namespace="a")
    one.compute(tiers, 1)
    sent(one, 1, until)
    wide = [AttentionLayerConfig(0, [BufferConfig("kv", PAGE // 2)])]
    assert host(namespace="b").fetch(1) == 0
    assert host(namespace="a", layers=wide).fetch(1) == 0
    assert host(namespace="a", gpu=2).fetch(1) == 1  # other tiers are as good


# ------------------------------------------------------------------------------------- modes


def test_a_reader_sends_nothing(host: Make, store: Store, tiers: Tiers, until: Until) -> None:
    writer, reader = host(), host(mode="read-only")
    writer.compute(tiers, 1)
    sent(writer, 1, until)
    reader.compute(tiers, 2)
    assert reader.fetch(1) == 1
    assert len(store.objects) == 1


@pytest.mark.parametrize("gpu", [0, 2])
def test_write_back_sends_what_leaves_the_host_level(
    host: Make, store: Store, tiers: Tiers, until: Until, gpu: int
) -> None:
    one, other = host(gpu=gpu, host=2, mode="write-back"), host()
    fits = 2 * MIB // PAGE
    for key in range(fits * (2 if gpu else 1)):
        one.compute(tiers, key)
    assert one.stats.sent_pages + sum(one.stats.unsent.values()) == 0
    for key in range(100, 100 + fits):
        one.compute(tiers, key)
    sent(one, fits, until)
    assert len(store.objects) == fits
    assert 0 not in one.cache
    assert other.fetch(0) == 1
    assert other.holds(tiers, 0)
    one.cache._check()


def test_write_through_sends_a_page_once(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one = host(gpu=2, host=2)
    for key in range(16):
        one.compute(tiers, key)
        sent(one, key + 1, until)
    assert [call for call, _ in store.calls].count("put") == 16


def test_write_back_before_a_disk(host: Make, tiers: Tiers, until: Until, tmp_path: Any) -> None:
    one, other = host(host=2, disk=str(tmp_path), mode="write-back"), host()
    for key in range(8):
        one.compute(tiers, key)
    sent(one, 4, until)
    assert other.fetch(0, 1, 2, 3) == 4
    assert other.holds(tiers, 0, 1, 2, 3)


def test_write_back_holds_the_slot_until_the_page_is_out(
    host: Make, store: Store, tiers: Tiers, until: Until, spawn: Spawn
) -> None:
    go = store.hold("put")
    one, other = host(host=2, mode="write-back"), host()
    one.compute(tiers, 0, 1, 2, 3)
    with one.cache.reserve([4]) as room:
        store.wait_reached("put")
        assert not all(fence.query() for fence in room.fences)
        waiting = spawn(room.wait)
        assert not waiting.done()
        go()
        waiting.result(20)
    sent(one, 1, until)
    assert other.fetch(0) == 1
    assert other.holds(tiers, 0)


def test_a_page_goes_out_when_its_bytes_are_there(
    host: Make, store: Store, tiers: Tiers, gate: Callable[[], Gate], until: Until
) -> None:
    computing = gate()
    one = host()
    one.compute(tiers, 1, ready=computing)
    computing.wait_asked()
    assert ("put", 1) not in store.calls
    computing.set()
    sent(one, 1, until)


def test_a_page_that_was_never_computed_is_not_sent(
    host: Make, store: Store, tiers: Tiers, gate: Callable[[], Gate], until: Until
) -> None:
    computing = gate()
    one = host()
    one.compute(tiers, 1, ready=computing)
    computing.set(RuntimeError("the kernel failed"))
    until(lambda: one.stats.unsent == {"late": 1})
    assert store.objects == {}


# ------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize("gpu", [0, 2])
@pytest.mark.parametrize("at", [0, PAGE - 1, PAGE, PAGE + 8, PAGE + 16, PAGE + 20])
def test_a_changed_byte_is_a_miss_and_removed(
    host: Make, store: Store, tiers: Tiers, until: Until, gpu: int, at: int
) -> None:
    one, other = host(), host(gpu=gpu)
    one.compute(tiers, 1, 2)
    sent(one, 2, until)
    name = list(store.objects)[1]
    data = bytearray(store.objects[name])
    data[at] ^= 1
    store.objects[name] = bytes(data)
    assert other.fetch(1, 2) == 1
    assert other.holds(tiers, 1)
    assert other.stats.misses == {"corrupt": 1}
    assert name not in store.objects
    assert other.stats.state == "up"
    assert other.storage.levels[0].groups[0].slots.in_use == 1
    other.cache._check()


def test_a_page_under_another_name_is_a_miss(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1, 2)
    sent(one, 2, until)
    first, second = store.objects
    store.objects[first], store.objects[second] = store.objects[second], store.objects[first]
    assert other.fetch(1, 2) == 0
    assert other.stats.misses == {"corrupt": 2}


def test_an_object_of_another_size_is_a_miss(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    (name,) = store.objects
    store.objects[name] = store.objects[name][:-TRAILER_BYTES]
    assert other.fetch(1) == 0
    assert other.stats.misses == {"refused": 1}


def test_what_was_evicted_in_between_is_a_miss(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    go = store.hold("get")
    job = other.cache.prefetch([1])
    store.wait_reached("get")
    store.objects.clear()
    go()
    job.wait(20)
    assert other.cache.match([1]) == 0
    assert other.stats.misses == {"absent": 1}
    other.cache._check()


@pytest.mark.parametrize(("code", "reason"), [(-800, "peer"), (-12, "code -12"), (-200, "full")])
def test_a_refusal_is_counted_with_its_reason(
    host: Make, store: Store, tiers: Tiers, until: Until, code: int, reason: str
) -> None:
    store.codes["put"] = code
    one = host()
    one.compute(tiers, 1)
    until(lambda: one.stats.unsent == {reason: 1})
    assert one.stats.state == "up"


def test_a_code_of_the_get_is_the_reason_of_the_miss(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1, 2)
    sent(one, 2, until)
    store.codes["get"] = -800
    assert other.fetch(1, 2) == 0
    assert other.stats.misses == {"peer": 2}
    other.cache._check()


def test_keys_that_cannot_be_named_stay_here(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one = host()
    with one.cache.reserve([("a", 1)]) as room:  # type: ignore[list-item]
        room.commit()
    until(lambda: one.stats.unsent == {"unnamed": 1})
    assert one.cache.lookup([("a", 2)]) == 0  # type: ignore[list-item]
    assert one.fetch(("b", 3)) == 0  # type: ignore[arg-type]


def test_little_staging_takes_more_calls(
    host: Make, store: Store, tiers: Tiers, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.remote.staging._BYTES", 0)  # eight slots, two for each call
    one, other = host(gpu=8, host=0, layers=TWO), host(gpu=8, host=0, layers=TWO)
    for key in range(9):
        one.compute(tiers, key)
        sent(one, 2 * key + 2, until)
    assert other.fetch(*range(9)) == 9
    assert other.stats.fetched_pages > 8
    assert other.holds(tiers, *range(9))
    assert max(objects for call, objects in store.calls if call == "get") <= 2


def test_no_room_is_a_miss(host: Make, store: Store, tiers: Tiers, until: Until) -> None:
    one, other = host(), host(host=2)
    one.compute(tiers, 1)
    sent(one, 1, until)
    with other.cache.reserve([10, 11, 12, 13]):
        assert other.fetch(1) == 0
        assert other.stats.misses == {"room": 1}


# -------------------------------------------------------------------------- slow, dead, bounded


def test_a_store_that_does_not_answer_is_left_alone_and_tried_again(
    host: Make, store: Store, tiers: Tiers, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    one = host()
    store.codes["put"] = store.codes["exist"] = -900
    one.compute(tiers, 1)
    until(lambda: one.stats.state == "degraded")
    calls = len(store.calls)
    assert one.fetch(2) == 0
    assert one.cache.lookup([2]) == 0
    assert len(store.calls) == calls
    assert one.stats.misses == {"degraded": 2}
    assert one.stats.unsent == {"master": 1}
    store.codes.clear()
    health = one.cache._remote._link.health  # type: ignore[union-attr]
    health._again = 0.0  # the pause is over
    assert one.fetch(2) == 0
    until(lambda: one.stats.state == "up")
    one.compute(tiers, 3)
    sent(one, 1, until)
    assert one.stats.degradations == 1
    assert "answers again" in caplog.text


def test_a_master_that_is_not_there_yet_is_connected_to_later(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    store.refuses = True
    one = host()
    assert one.fetch(1) == 0
    assert one.stats.state == "degraded"
    store.refuses = False
    one.cache._remote._link.health._again = 0.0  # type: ignore[union-attr]
    one.compute(tiers, 2)
    sent(one, 1, until)
    assert one.stats.state == "up"


def test_a_client_that_is_not_healthy_is_not_called(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one = host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    store.up = False
    assert one.fetch(2) == 0
    assert one.stats.misses == {"master": 1}
    assert [call for call, _ in store.calls] == ["connect", "put"]
    one.storage.close()  # and not told of the end: it would hold everybody up
    assert store.closed == 0
    assert store.ranges


def test_nobody_waits_longer_than_the_deadline(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host(deadline=0.05)
    one.compute(tiers, 1)
    sent(one, 1, until)
    go = store.hold("get")
    job = other.cache.prefetch([1])
    store.wait_reached("get")
    job.wait(20)  # returns though the store has not answered
    assert other.cache.match([1]) == 0
    assert other.storage.levels[0].groups[0].slots.in_use == 1  # the slot is still the store's
    assert other.cache.lookup([1]) == 0
    assert other.stats.state == "degraded"
    go()
    until(lambda: other.storage.levels[0].groups[0].slots.in_use == 0)
    assert other.cache.match([1]) == 0
    other.cache._check()


def test_a_slot_is_not_held_longer_than_the_deadline(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    go = store.hold("put")
    one = host(host=2, deadline=0.05)
    one.compute(tiers, 0, 1, 2, 3)
    store.wait_reached("put")
    one.compute(tiers, 4, 5, 6, 7)  # in the slots that the store still reads
    go()
    until(lambda: one.stats.state == "degraded")
    assert one.holds(tiers, 4, 5, 6, 7)


def test_a_page_whose_slot_changed_before_its_checksum_is_not_sent(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    go = store.hold("connect")
    one = host(host=2, deadline=0.05)
    one.compute(tiers, 0, 1, 2, 3)
    store.wait_reached("connect")
    one.compute(tiers, 4)  # waits for the deadline, then overwrites one of them
    go()
    until(lambda: "late" in one.stats.unsent)
    assert store.objects == {}


def test_what_is_under_way_is_bounded(host: Make, store: Store, tiers: Tiers, until: Until) -> None:
    go = store.hold("put")
    one = host(in_flight=2)
    one.compute(tiers, 1, 2)
    store.wait_reached("put")
    one.compute(tiers, 3)
    assert one.stats.unsent == {"busy": 1}
    go()
    sent(one, 2, until)
    one.compute(tiers, 4)
    sent(one, 3, until)


def test_a_fetch_asks_for_as_much_as_may_be_under_way(
    host: Make, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host(in_flight=2)
    one.compute(tiers, 1, 2, 3)
    sent(one, 3, until)
    assert other.fetch(1, 2, 3) == 2
    assert other.stats.misses == {"busy": 1}
    assert other.fetch(1, 2, 3) == 3


def test_two_who_want_a_block_fetch_it_once(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1, 2)
    sent(one, 2, until)
    go = store.hold("get")
    first = other.cache.prefetch([1, 2])
    store.wait_reached("get")
    second = other.cache.prefetch([1, 2])
    assert not second.done
    go()
    second.wait(20)
    assert first.done
    assert other.holds(tiers, 1, 2)
    assert [call for call, _ in store.calls].count("get") == 1


def test_what_was_fetched_and_dropped_is_fetched_again(
    host: Make, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    for _ in range(2):
        assert other.fetch(1) == 1
        assert other.holds(tiers, 1)
        assert other.cache.drop([1]) == 1
    assert other.stats.fetched_pages == 2


def test_a_slot_that_somebody_still_reads_is_not_fetched_into(
    host: Make, store: Store, tiers: Tiers, until: Until, gate: Callable[[], Gate]
) -> None:
    one, other = host(), host(host=2, mode="read-only")
    one.compute(tiers, 1)
    sent(one, 1, until)
    reading = gate()
    other.compute(tiers, 10, 11, 12, 13)
    other.cache.acquire([10, 11, 12, 13]).release(after=reading)
    job = other.cache.prefetch([1])
    reading.wait_asked()
    assert not any(call == "get" for call, _ in store.calls)
    reading.set()
    job.wait(20)
    assert other.holds(tiers, 1)


def test_windows_count_the_blocks_in_front(host: Make, tiers: Tiers, until: Until) -> None:
    sinks = dataclasses.replace(TWO[2], num_sink_tokens=16)
    layers = [*TWO[:2], sinks]
    one, other = host(host=16, layers=layers), host(host=16, layers=layers, mode="read-only")
    for key in range(6):
        one.compute(tiers, key)
    sent(one, 12, until)
    other.compute(tiers, 0, 1)
    assert other.fetch(*range(6)) == 6
    assert other.stats.fetched_pages == 4 + 2  # the first of these is no sink
    assert other.holds(tiers, *range(6))


def test_a_block_that_was_computed_meanwhile_stays(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host(mode="read-only")
    one.compute(tiers, 1)
    sent(one, 1, until)
    go = store.hold("get")
    job = other.cache.prefetch([1])
    store.wait_reached("get")
    other.compute(tiers, 1)
    go()
    job.wait(20)
    assert other.holds(tiers, 1)
    assert len(other.cache) == 1
    other.cache._check()


def test_a_lookup_of_a_thousand_keys_is_one_call(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one = host()
    assert one.cache.lookup(range(1000)) == 0
    assert store.calls == [("connect", 1), ("exist", 1000)]


# --------------------------------------------------------------------------------- teardown


def test_the_storage_closes_while_a_call_is_under_way(
    host: Make, store: Store, tiers: Tiers, spawn: Spawn, until: Until
) -> None:
    go = store.hold("put")
    one = host()
    one.compute(tiers, 1)
    store.wait_reached("put")
    one.compute(tiers, 2)
    closing = spawn(one.storage.close)
    until(lambda: one.cache._remote._out._closing.is_set())  # type: ignore[union-attr]
    assert not closing.done()
    go()
    closing.result(20)
    assert store.closed == 1
    assert store.ranges == {}
    assert one.stats.unsent == {"closed": 1}
    with pytest.raises(ClosedError):
        one.cache.prefetch([3])


def test_a_fetch_that_the_end_overtakes_gives_its_pages_back(
    host: Make, store: Store, tiers: Tiers, spawn: Spawn, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    go = store.hold("get")
    other.cache.prefetch([1])
    store.wait_reached("get")
    closing = spawn(other.storage.close)
    until(lambda: other.cache._remote._in._closing.is_set())  # type: ignore[union-attr]
    go()
    closing.result(20)
    other.cache._check()


def test_mooncake_is_asked_for_where_it_is_missing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.remote.client.find_spec", lambda name: None)
    remote = RemoteCacheTierConfig("nowhere:1")
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig(2 * MIB), remote], ONE)
    with pytest.raises(ImportError, match=r"pip install hostmem\[remote\]"):
        KVCacheManager(config, device="cpu")


# ------------------------------------------------------------------------------ configuration


def test_a_remote_tier_is_the_last_and_has_no_slots() -> None:
    remote = RemoteCacheTierConfig("master:50051", local_segment="2GiB")
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig(2 * MIB), remote], ONE)
    assert config.remote is remote
    assert remote.local_segment == 2 << 30
    assert [level.tier for level in config.plan().levels] == ["gpu"]
    assert dataclasses.replace(config, tokens_per_block=8).remote is remote
    early = KVCacheManagerConfig(16, [remote, GpuCacheTierConfig(2 * MIB)], ONE)
    with pytest.raises(ValueError, match="then disk, then remote"):
        early.validate()
    with pytest.raises(ValueError, match="minimum is 1 tier"):
        KVCacheManagerConfig(16, [remote], ONE).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": "nowhere"}, "remote.master: 'nowhere' is not host:port"),
        ({"metadata": "nowhere"}, "remote.metadata: 'nowhere' is no URL"),
        ({"protocol": "udp"}, "remote.protocol: 'udp' is none of 'tcp', 'rdma'"),
        ({"mode": "write"}, "remote.mode: 'write' is none of 'write-through', 'write-back'"),
        ({"replicas": 0}, "remote.replicas: 0 is below the minimum of 1"),
        ({"in_flight": 0}, "remote.in_flight: 0 is below the minimum of 1 page"),
        ({"deadline": 0.0}, "remote.deadline: 0.0 s is not above 0"),
        ({"deadline": float("nan")}, "remote.deadline: nan s is not above 0"),
        ({"mode": "write-back"}, "remote.mode: 'write-back' needs a host tier"),
    ],
)
def test_what_is_wrong_with_the_tier_is_named(options: dict[str, Any], message: str) -> None:
    remote = RemoteCacheTierConfig(**{"master": "master:1", **options})
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig(2 * MIB), remote], ONE)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_a_segment_is_a_size() -> None:
    with pytest.raises(ValueError, match="local_segment"):
        RemoteCacheTierConfig("master:1", local_segment="many")
