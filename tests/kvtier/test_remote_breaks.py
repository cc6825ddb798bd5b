"""What once broke the remote level, and what it must not do whatever happens at the same moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvtier import (
    BlockCache,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
    TierStorage,
)
from kvtier.remote.client import STRAY, MooncakeClient
from kvtier.remote.health import Health
from tests.kvtier.remote_store import Store
from tests.kvtier.test_remote import MIB, ONE, TWO, Host, sent

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn, Until

Make = Callable[..., Host]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def host(stack: ExitStack, store: Store) -> Make:
    def make(**options: Any) -> Host:
        return Host(stack, store, **options)

    return make


def end_pause(host: Host) -> None:
    """Let the next call try the store again."""
    host.cache._remote._link.health._again = 0.0  # type: ignore[union-attr]


# --------------------------------------------------------------------------- bytes and memory


def test_a_slot_goes_to_nobody_though_its_block_was_committed_again(
    host: Make, store: Store, tiers: Tiers, until: Until, gate: Callable[[], Gate]
) -> None:
    # The letter waits behind two others; meanwhile its block is withdrawn and committed unwritten.
    # There is no room to offer it anew.
    computing = [gate(), gate()]
    one, other = host(in_flight=3), host()
    for key, event in enumerate(computing, 10):
        one.compute(tiers, key, ready=event)
        event.wait_asked()
    one.compute(tiers, 1)
    one.cache.withdraw([1]).commit(keys=[2])
    one.cache.drop([2])
    slot = one.cache._index.pages(10)[0].slot + 2
    with one.cache.reserve(range(20, 26)) as room:
        assert slot in room.slots().tolist()
        assert any(not fence.query() for fence in room.fences)
        for event in computing:
            event.set()
    until(lambda: other.fetch(1) == 1)
    assert other.holds(tiers, 1)


def test_memory_that_the_store_still_reads_is_not_given_back(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    go = store.hold("put")
    one = host(host=4, deadline=0.05)
    one.compute(tiers, *range(8))
    store.wait_reached("put")
    until(lambda: all(fence.query() for fence in one.cache._index.pages(7)[0].fences))
    with pytest.raises(BufferError, match="live views"):  # the deadline is over, the call is not
        one.storage.adjust_cache_level("host", 2 * MIB)
    go()
    until(lambda: one.stats.state == "degraded")
    until(lambda: not one.cache._remote._going._under_way)  # type: ignore[union-attr]
    one.storage.adjust_cache_level("host", 2 * MIB)
    assert one.storage.quota("host") == 2 * MIB
    one.cache._check()


@pytest.mark.parametrize("gpu", [0, 2])
def test_a_slot_that_may_still_be_written_is_nobodys(
    host: Make, store: Store, tiers: Tiers, until: Until, gpu: int
) -> None:
    one, other = host(), host(gpu=gpu)
    one.compute(tiers, 1)
    sent(one, 1, until)
    store.codes["get"] = STRAY
    assert other.fetch(1) == 0
    assert other.stats.misses == {"stray": 1}
    level = other.cache._remote
    assert level is not None
    if gpu:
        assert level._staging is not None
        assert len(level._staging._free) == level._staging.count - 1
    else:
        assert other.storage.levels[0].groups[0].slots.in_use == 1
    store.codes.clear()
    assert other.fetch(1) == 1
    assert other.holds(tiers, 1)
    other.cache._check()


def test_what_the_engine_gave_up_may_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def batch_get_into_multi_buffers(self, *_: object) -> list[int]:
            return [-800, 32, -704]

    client = MooncakeClient.__new__(MooncakeClient)
    client._store = Engine()
    assert client.get(["a", "b", "c"], [], []) == [-800, 32, -704]
    monkeypatch.setattr("kvtier.remote.client._PATIENCE", 0.0)
    assert client.get(["a", "b", "c"], [], []) == [STRAY, 32, STRAY]


# ------------------------------------------------------------------------------ what it survives


def test_a_key_that_is_asked_for_twice_at_once(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1, 2)
    sent(one, 2, until)
    other.cache.prefetch([1, 1]).wait(20)
    assert other.fetch(1, 2) == 2
    assert other.holds(tiers, 1, 2)
    other.cache._check()


def test_a_commit_while_the_storage_closes_leaves_it_whole(
    host: Make, store: Store, tiers: Tiers, until: Until, spawn: Spawn
) -> None:
    one, other = host(gpu=2, host=0), host(gpu=2, host=0)
    one.compute(tiers, 1)
    sent(one, 1, until)
    go = store.hold("get")
    other.cache.prefetch([1])
    store.wait_reached("get")
    room = other.cache.reserve([2])
    closing = spawn(other.storage.close)
    until(lambda: other.cache._remote._in._closing.is_set())  # type: ignore[union-attr]
    room.commit()
    go()
    closing.result(20)
    assert other.storage.latch.reason is None
    assert other.stats.unsent == {"closed": 1}


def test_what_goes_wrong_in_an_offer_is_no_concern_of_the_cache(
    host: Make, store: Store, tiers: Tiers, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host(gpu=2, host=0)

    def fail(*_: object) -> None:
        raise RuntimeError("no such copy")

    with monkeypatch.context() as patch:
        patch.setattr(one.storage, "copy_out", fail)
        one.compute(tiers, 1)
    assert one.storage.latch.reason is None
    assert one.stats.unsent == {"error": 1}
    one.compute(tiers, 2)
    sent(one, 1, until)
    assert one.holds(tiers, 1, 2)


def test_who_reads_a_slot_for_ever_holds_up_one_fetch_until_its_deadline(
    host: Make, store: Store, tiers: Tiers, until: Until, gate: Callable[[], Gate]
) -> None:
    one, other = host(), host(host=2, mode="read-only", deadline=0.5)
    one.compute(tiers, 1)
    sent(one, 1, until)
    reading = gate()
    other.compute(tiers, 10, 11, 12, 13)
    other.cache.acquire([10, 11, 12, 13]).release(after=reading)
    other.cache.prefetch([1]).wait(20)
    until(lambda: other.stats.misses == {"late": 1})
    assert other.stats.state == "up"  # the store is not to blame
    assert other.cache.lookup([1]) == 1
    other.cache._check()
    reading.set()


def test_waiting_for_bytes_of_ours_is_no_silence_of_the_store(
    host: Make, store: Store, tiers: Tiers, until: Until, gate: Callable[[], Gate]
) -> None:
    one = host(deadline=0.5)
    one.compute(tiers, 1)
    sent(one, 1, until)
    computing = gate()
    one.compute(tiers, 2, ready=computing)
    computing.wait_asked()
    flights = one.cache._remote._going  # type: ignore[union-attr]
    until(lambda: all(flight.left == 0 for flight in list(flights._under_way)))
    assert not flights.overdue()
    one.compute(tiers, 3)
    assert one.stats.state == "up"
    computing.set()


def test_a_cache_that_could_not_be_built_can_be_built_again(
    stack: ExitStack, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.remote.client.find_spec", lambda name: None)
    remote = RemoteCacheTierConfig("nowhere:1")
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig(2 * MIB), remote], ONE)
    storage = stack.enter_context(TierStorage(config, device="cpu"))
    with pytest.raises(ImportError, match="mooncake"):
        BlockCache(storage)
    BlockCache(storage, connect=store.connect)


def test_a_close_that_was_interrupted_goes_on_where_it_was(
    host: Make, store: Store, tiers: Tiers, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    level = one.cache._remote
    assert level is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(level._in._worker, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.storage.close()
    assert store.closed == 0
    one.storage.close()
    assert store.closed == 1
    one.storage.close()
    assert store.closed == 1


def test_a_store_that_was_left_keeps_what_it_may_write_to(
    host: Make, store: Store, tiers: Tiers, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    store.codes["get"] = STRAY
    assert other.fetch(1) == 0
    store.up = False
    left: list[BaseException] = []
    monkeypatch.setattr("kvtier.latch.Latch.close", lambda _, reason: left.append(reason))
    other.storage.close()  # with the latch closed the levels are leaked
    assert len(left) == 1
    store.up = True


def test_what_goes_out_leaves_staging_for_what_comes(
    host: Make, store: Store, tiers: Tiers, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.remote.staging._BYTES", 0)  # eight slots
    one, other = host(), host(gpu=8, host=0)
    one.compute(tiers, 1)
    sent(one, 1, until)
    go = store.hold("put")
    for key in range(10, 20):
        other.compute(tiers, key)
    assert other.stats.unsent == {"busy": 6}
    assert other.fetch(1) == 1
    go()


def test_a_child_has_nothing_of_the_store(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one = host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    level = one.cache._remote
    assert level is not None
    with level._counts._lock, level._coming._lock, level._link.health._lock:
        # As if threads held them at that moment: in the child nobody will let go of them.
        child = os.fork()
        if child == 0:
            ok = one.cache.lookup([1, 2]) == 1 and one.storage.stats().remote is None
            one.storage.close()
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert one.cache.lookup([1, 2]) == 1


# -------------------------------------------------------------------------------- figures


def test_a_block_that_came_without_a_page_of_a_window_is_counted_once(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(host=8, layers=TWO), host(host=8, layers=TWO)
    one.compute(tiers, 1, 2, 3)
    sent(one, 6, until)
    for name in store.objects:
        if name.endswith("-1-" + b"i\x03".hex()):
            store.objects[name] = bytes(len(store.objects[name]))
    other.fetch(1, 2, 3)
    assert other.stats.misses == {"corrupt": 1}


def test_a_block_that_was_computed_meanwhile_is_counted_as_here(
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
    assert other.stats.misses == {"here": 1}


def test_when_a_job_is_done_its_keys_can_be_asked_for_again(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    job = other.cache.prefetch([2])
    with other.storage.lock:
        # What ends a fetch needs the lock: so the job is not done before all is as it says.
        assert not job.event.query() or not other.cache._remote._in._coming  # type: ignore[union-attr]
    job.wait(20)
    assert other.stats.misses == {"absent": 1}
    assert other.cache._remote._in._coming == {}  # type: ignore[union-attr]


def test_a_lookup_counts_over_blocks_that_are_here_alone(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(), host(mode="read-only")
    one.compute(tiers, 1, 2, 4)
    sent(one, 3, until)
    other.compute(tiers, 1, 3)
    assert other.cache.lookup([1, 2, 3, 4, 5]) == 4
    assert other.fetch(1, 2, 3, 4, 5) == 4


def test_a_lookup_counts_no_block_whose_window_is_nowhere(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(host=8, layers=TWO), host(host=8, layers=TWO)
    one.compute(tiers, 1, 2, 3, 4)
    sent(one, 8, until)
    assert other.fetch(1, 2, 3, 4) == 4  # of 1 and 2 without the pages of the window
    assert other.cache.match([1, 2]) == 0
    assert other.cache.lookup([1, 2]) == 2
    store.objects.clear()
    assert other.cache.lookup([1, 2]) == 0
    assert other.cache.lookup([1, 2, 3, 4]) == 4


@pytest.mark.parametrize("gpu", [0, 8])
def test_a_shorter_prefix_gets_the_pages_of_its_own_window(
    host: Make, store: Store, tiers: Tiers, until: Until, gpu: int
) -> None:
    one, other = host(gpu=gpu, host=8, layers=TWO), host(gpu=gpu, host=8, layers=TWO)
    one.compute(tiers, 1, 2, 3, 4, 5)
    sent(one, 10, until)
    assert other.fetch(1, 2, 3, 4, 5) == 5
    assert other.stats.fetched_pages == 5 + 2
    assert other.cache.match([1, 2, 3]) == 0
    assert other.fetch(1, 2, 3) == 3
    assert other.stats.fetched_pages == 5 + 2 + 2
    assert other.holds(tiers, 1, 2, 3)
    assert other.holds(tiers, 1, 2, 3, 4, 5)
    assert other.stats.misses == {}
    other.cache._check()


def test_what_lacks_a_page_of_its_window_in_the_store_is_not_fetched(
    host: Make, store: Store, tiers: Tiers, until: Until
) -> None:
    one, other = host(host=8, layers=TWO), host(host=8, layers=TWO)
    one.compute(tiers, 1, 2, 3)
    sent(one, 6, until)
    (last,) = (name for name in store.objects if name.endswith("-1-" + b"i\x03".hex()))
    del store.objects[last]
    assert other.cache.lookup([1, 2, 3]) == 2
    assert other.fetch(1, 2, 3) == 2
    assert other.holds(tiers, 1, 2)
    assert other.stats.misses == {"absent": 1}


def test_keys_without_a_name_end_the_prefix(
    host: Make, store: Store, tiers: Tiers, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = host(), host()
    one.compute(tiers, 1)
    sent(one, 1, until)
    keys: list[Any] = [1, ("a", 2), 3]
    assert other.cache.lookup(keys) == 1
    assert other.fetch(*keys) == 1
    assert other.stats.misses == {"unnamed": 2}
    assert not caplog.records


def test_a_storage_that_was_closed_says_so(host: Make, store: Store) -> None:
    one = host()
    one.storage.close()
    assert one.stats.state == "closed"
    assert one.cache.lookup([1]) == 0


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(host: Make, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        host().cache.lookup([1], timeout)


# ------------------------------------------------------------------------------ back-off


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_calls_that_fail_together_are_one_failure() -> None:
    clock = Clock()
    health = Health(clock)
    for _ in range(8):  # they were under way when the store went away
        health.failed("no answer")
    clock.now += 0.5
    assert health.may_ask()
    for _ in range(8):
        health.failed("no answer")
    clock.now += 1.0
    assert health.may_ask()
    assert health.degradations == 1


def test_a_store_that_is_always_late_is_asked_less_and_less(
    host: Make, store: Store, tiers: Tiers, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    one = host(deadline=0.01)
    health = one.cache._remote._link.health  # type: ignore[union-attr]
    flights = one.cache._remote._going  # type: ignore[union-attr]
    for key in range(3):
        go = store.hold("put")
        one.compute(tiers, key)
        store.wait_reached("put")
        until(lambda: all(flight.left == 0 for flight in list(flights._under_way)))
        go()
        until(lambda: not flights._under_way)
        end_pause(one)
    assert one.stats.degradations == 1
    assert health._pause > 0.5
    assert "answers again" not in caplog.text


# --------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": 5}, "remote.master: expected str"),
        ({"metadata": None}, "remote.metadata: expected str"),
        ({"namespace": b"m"}, "remote.namespace: expected str"),
        ({"devices": ["mlx5_0"]}, "remote.devices: expected str"),
        ({"host": 5}, "remote.host: expected str"),
        ({"deadline": "1s"}, "remote.deadline: expected Real"),
        ({"replicas": 1.5}, "remote.replicas: expected a whole number"),
    ],
)
def test_a_value_of_another_kind_is_refused_at_the_call(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        RemoteCacheTierConfig(**{"master": "master:1", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master": ":1"}, "remote.master: ':1' is not host:port"),
        ({"master": "master:0"}, "remote.master: 'master:0' is not host:port"),
        ({"master": "master:65536"}, "remote.master: 'master:65536' is not host:port"),
        ({"host": ""}, "remote.host: '' names no host"),
        ({"deadline": 1e12}, "remote.deadline: 1000000000000.0 s is above"),
        ({"in_flight": 1}, "remote.in_flight: 1 is below the minimum of 2 pages"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    remote = RemoteCacheTierConfig(**{"master": "master:1", **options})
    config = KVCacheManagerConfig(16, [HostCacheTierConfig(8 * MIB), remote], TWO)
    with pytest.raises(ValueError, match=message):
        config.validate()
