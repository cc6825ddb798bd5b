"""Blocks shared by processes over a real store, and what becomes of them when something dies."""

from __future__ import annotations

import signal

import pytest

from tests.remote.cluster import Cluster, HostProcess

KEYS = list(range(1, 41))


@pytest.mark.parametrize("peer_to_peer", [False, True], ids=["http", "p2p"])
@pytest.mark.parametrize("gpu", [0, 16], ids=["host-first", "gpu-first"])
def test_stored_by_one_found_by_another(cluster: Cluster, gpu: int, peer_to_peer: bool) -> None:
    cluster.peer_to_peer = peer_to_peer
    one, other = cluster.host(gpu=gpu), cluster.host(gpu=gpu, local_segment=0)
    one("compute", KEYS)
    one.until("settled", len(KEYS))
    assert one("stat", "unsent") == {}
    assert other("match", KEYS) == 0
    assert other("lookup", [*KEYS, 1000]) == len(KEYS)
    assert other("fetch", [*KEYS, 1000]) == len(KEYS)
    assert other("holds", KEYS)
    assert other("stat", "misses") == {"absent": 1}
    assert other.close() == 0
    assert one.close() == 0


def test_write_back_sends_what_is_evicted(cluster: Cluster) -> None:
    one, other = cluster.host(host=4, mode="write-back"), cluster.host(local_segment=0)
    for key in KEYS:
        one("compute", [key])
    gone = len(KEYS) - 16
    one.until("settled", gone)
    found = other("fetch", KEYS)
    assert found == one("stat", "sent_pages")
    assert other("holds", KEYS[:found])


def test_a_reader_leaves_the_store_as_it_is(cluster: Cluster) -> None:
    one, other = cluster.host(mode="read-only"), cluster.host()
    one("compute", [1])
    other("compute", [2])
    other.until("settled", 1)
    assert other("fetch", [1]) == 0
    assert one("fetch", [2]) == 1
    assert one("holds", [1, 2])


def test_a_writer_that_is_killed_leaves_nothing_wrong(cluster: Cluster) -> None:
    # The store is in the segments of the others; in the middle of its puts the writer is killed.
    writer = cluster.host(local_segment=0)
    one, other = cluster.host(), cluster.host(local_segment=0)
    assert one("lookup", KEYS) == 0  # its segment is there
    writer("compute", KEYS)
    writer.kill()
    found = other("fetch", KEYS)
    assert other("holds", KEYS[:found])
    one("compute", [500])
    one.until("settled", 1)
    assert other("fetch", [500]) == 1
    assert other("holds", [500])


def test_a_put_that_was_begun_and_never_ended_is_not_found(cluster: Cluster) -> None:
    writer = cluster.host(local_segment=0)
    one, other = cluster.host(), cluster.host(local_segment=0)
    assert one("lookup", KEYS) == 0
    assert writer("begin_put", [1, 2]) == [0, 0]
    writer.kill()
    assert other("lookup", [1, 2]) == 0
    assert other("fetch", [1, 2]) == 0
    one("compute", [1, 2, 3])
    one.until("settled", 3)
    assert other("fetch", [3]) == 1
    found = other("fetch", [1, 2])
    assert other("holds", [1, 2][:found])


def test_blocks_in_a_dead_hosts_segment_are_misses(cluster: Cluster) -> None:
    one, other = cluster.host(), cluster.host(local_segment=0)
    one("compute", KEYS)
    one.until("settled", len(KEYS))
    assert other("fetch", KEYS[:3]) == 3
    one.kill()
    assert other("fetch", KEYS) == 3
    assert other("holds", KEYS[:3])
    third = cluster.host()
    assert any(_shared(third, other, key) for key in range(900, 1300))
    assert other("stat", "state") == "up"


def _shared(one: HostProcess, other: HostProcess, key: int) -> bool:
    """Compute a block on one, and tell whether the other finds it: it may be placed on the dead."""
    before = one("stat", "sent_pages") + sum(one("stat", "unsent").values())
    one("compute", [key])
    one.until("settled", before + 1)
    return bool(other("fetch", [key]) == 1 and other("holds", [key]))


@pytest.mark.parametrize("peer_to_peer", [False, True], ids=["http", "p2p"])
def test_a_master_that_is_killed_and_started_again(cluster: Cluster, peer_to_peer: bool) -> None:
    cluster.peer_to_peer = peer_to_peer
    one, other = cluster.host(), cluster.host()
    one("compute", [1])
    one.until("settled", 1)
    assert other("fetch", [1]) == 1
    cluster.master.kill()
    for host in (one, other):
        host("compute", [2])
        host.until("lookup", [3], is_=0)
        host.until("stat", "state", is_="degraded")
        assert host("holds", [1, 2])
    cluster.master.start()
    for host in (one, other):
        _recovers(host)
        assert host("stat", "degradations") >= 1
    assert any(_shared(one, other, key) for key in range(100, 500))
    assert other("holds", [1, 2])


def _recovers(host: HostProcess) -> None:
    """Ask for something that nobody has until the store answers again."""
    while host("lookup", [5]) == 0 and host("stat", "state") != "up":
        pass  # each order has a time limit, and so has the test


def test_a_master_that_hangs_holds_nobody_up(cluster: Cluster) -> None:
    one = cluster.host(deadline=0.5)
    one("compute", [1])
    one.until("settled", 1)
    cluster.master.signal(signal.SIGSTOP)
    assert one("lookup", [5]) == 0
    assert one("fetch", [5]) == 0
    one("compute", [2])
    assert one("holds", [1, 2])
    one.until("stat", "state", is_="degraded")
    cluster.master.signal(signal.SIGCONT)
    _recovers(one)


def test_a_host_starts_before_its_master(cluster: Cluster) -> None:
    cluster.master.kill()
    one = cluster.host()
    one("compute", [1])
    one.until("stat", "state", is_="degraded")
    assert one("fetch", [5]) == 0
    cluster.master.start()
    _recovers(one)
    one("compute", [2])
    one.until("stat", "sent_pages", is_=1)
    assert one("holds", [1, 2])


def test_a_full_store_refuses_or_evicts_and_serves_on(cluster: Cluster) -> None:
    one = cluster.host(local_segment=16 << 20)
    other = cluster.host(local_segment=0)
    many = list(range(1, 181))  # 45 MiB
    for first in range(0, len(many), 20):
        one("compute", many[first : first + 20])
        one.until("settled", first + 20)
    assert one("stat", "unsent").get("full", 0) > 0
    assert one("stat", "state") == "up"
    found = other("fetch", many)
    assert other("holds", many[:found])


def test_a_value_that_was_changed_is_never_served(cluster: Cluster) -> None:
    one, other = cluster.host(), cluster.host(local_segment=0)
    one("compute", [1, 2])
    one.until("settled", 2)
    assert one("overwrite", 2) == 0
    assert other("fetch", [1, 2]) == 1
    assert other("holds", [1])
    assert other("stat", "misses") == {"corrupt": 1}
    assert other("lookup", [1, 2]) == 1  # it was removed
    one("drop", [2])
    one("compute", [2])
    one.until("settled", 3)
    assert other("fetch", [1, 2]) == 2
    assert other("holds", [1, 2])


def test_two_writers_of_one_key(cluster: Cluster) -> None:
    one, two, other = cluster.host(), cluster.host(), cluster.host(local_segment=0)
    one.send("compute", KEYS)
    two.send("compute", KEYS)
    one.read()
    two.read()
    one.until("settled", len(KEYS))
    two.until("settled", len(KEYS))
    other.until("fetch", KEYS, is_=len(KEYS))
    assert other("holds", KEYS)
    # Bytes that differ, as no two computations of one key should: the first to come stays, whole.
    one("compute", [700])
    one.until("settled", len(KEYS) + 1)
    two("compute", [700], 1)
    two.until("settled", len(KEYS) + 1)
    assert other("fetch", [700]) == 1
    assert other("holds", [700])


@pytest.mark.parametrize("first", ["writer", "reader", "master"])
def test_they_end_in_any_order(cluster: Cluster, first: str) -> None:
    writer, reader = cluster.host(), cluster.host()
    writer("compute", KEYS)
    writer.until("settled", len(KEYS))
    assert reader("fetch", KEYS) == len(KEYS)
    if first == "master":
        cluster.master.kill()
    if first == "writer":
        assert writer.close() == 0
        assert reader("holds", KEYS)
        assert reader.close() == 0
    else:
        assert reader.close() == 0
        assert writer("holds", KEYS)
        assert writer.close() == 0
