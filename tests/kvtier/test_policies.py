"""Every policy against a set of keys, and ARC and S3-FIFO against what their papers say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.eviction import ARC, POLICIES, S3FIFO, EvictionPolicy, make_policy
from kvtier.eviction.priority import ByPriority

every_policy = pytest.mark.parametrize("name", POLICIES)

keys = st.integers(0, 15)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), keys),
        st.tuples(st.just("touch"), keys),
        st.tuples(st.just("use or insert"), st.lists(keys, max_size=6)),
        st.tuples(st.just("request"), st.lists(keys, max_size=6, unique=True)),
        st.tuples(st.just("remove"), keys),
        st.tuples(st.just("evict"), st.integers(0, 5)),
        st.tuples(st.just("evict some"), st.integers(0, 5)),
        st.tuples(st.just("capacity"), st.integers(1, 10)),
        st.tuples(st.just("reference"), st.lists(keys, max_size=8)),
    ),
    max_size=40,
)


def thirds(key: int) -> bool:
    return key % 3 == 0


def evict_as_promised(policy: EvictionPolicy[int], n: int, may: Callable[[int], bool]) -> None:
    """Evict; it must take the first victims that may go, or none."""
    before = list(policy.victims())
    promised = list(islice(filter(may, before), n))
    evicted = policy.evict(n, may)
    if len(promised) < n:
        assert evicted is None
        assert list(policy.victims()) == before
    else:
        assert evicted == promised


@every_policy
@given(log=calls, capacity=st.none() | st.integers(1, 10))
def test_a_policy_holds_what_a_set_would(
    name: str, log: list[tuple[str, Any]], capacity: int | None
) -> None:
    policy: EvictionPolicy[int] = make_policy(name, capacity)
    held: set[int] = set()
    for call, what in log:
        if call == "insert" and what in held:
            with pytest.raises(ValueError, match="already present"):
                policy.insert(what)
        elif call == "insert":
            policy.insert(what)
            held.add(what)
        elif call in ("touch", "remove") and what not in held:
            with pytest.raises(KeyError):
                getattr(policy, call)(what)
        elif call == "touch":
            policy.touch(what)
        elif call == "use or insert":
            for key in what:
                (policy.touch if key in held else policy.insert)(key)
                held.add(key)
        elif call == "request":
            policy.touch_many([key for key in what if key in held])
            policy.insert_many(key for key in what if key not in held)
            held.update(what)
        elif call == "remove":
            policy.remove(what)
            held.remove(what)
        elif call == "evict":
            evict_as_promised(policy, what, lambda key: True)
            held = {key for key in held if key in policy}
        elif call == "evict some":
            evict_as_promised(policy, what, thirds)
            held = {key for key in held if key in policy}
        elif call == "capacity":
            policy.capacity = what
        else:
            hits = next((n for n, key in enumerate(what) if key not in held), len(what))
            before = len(held)
            assert policy.reference(what) == hits
            now = {key for key in range(16) if key in policy}
            assert now <= held | set(what)
            if policy.capacity is None:
                assert now == held | set(what)
            else:
                assert len(now) <= max(policy.capacity, before)
            held = now
        victims = list(policy.victims())
        assert len(victims) == len(policy) == len(held)
        assert set(victims) == held == {key for key in range(16) if key in policy}


@every_policy
def test_a_lowered_capacity_is_kept_by_the_next_request_that_needs_room(name: str) -> None:
    policy = make_policy(name, 8)
    policy.reference(list(range(8)))
    policy.capacity = 3
    assert len(policy) == 8
    policy.reference([8])
    assert len(policy) <= 3


@every_policy
def test_a_request_may_come_as_a_tuple(name: str) -> None:
    policy = make_policy(name, 8)
    policy.reference((1, 2, 3))
    assert policy.reference((1, 2, 4)) == 2


class Page:
    """A key that is made anew each time its content comes."""

    def __init__(self, content: int) -> None:
        self.content = content


@pytest.mark.parametrize("name", ["arc", "s3fifo", "prospect"])
def test_a_remembered_key_is_known_by_its_identity(name: str) -> None:
    def victims_after_return(of: Callable[[int], Any], **options: Any) -> list[int]:
        policy = make_policy(name, 8, **options)
        for request in [[0, 1], [2, 3], [4, 5]]:
            for content in request:
                policy.insert(of(content))
            policy.evict(2)
        for content in (0, 8, 9):
            policy.insert(of(content))
        return [getattr(key, "content", key) for key in policy.victims()]

    by_page = victims_after_return(Page, identity=lambda page: page.content)
    assert by_page == victims_after_return(int)
    if name != "prospect":  # where a return moves the key in the order
        assert by_page != victims_after_return(Page)


@every_policy
def test_what_comes_from_a_level_above_is_inserted(name: str) -> None:
    above, policy = make_policy(name, 4), make_policy(name, 8)
    above.reference([1, 2, 3, 4])
    evicted = above.evict(3)
    assert evicted is not None
    for key in evicted:
        policy.insert_evicted(key, above)
    policy.insert_evicted(9, make_policy("lru"))
    assert set(policy.victims()) == {*evicted, 9}
    with pytest.raises(ValueError, match="already present"):
        policy.insert_evicted(evicted[0], above)


@every_policy
def test_what_many_calls_say_one_may_say(name: str) -> None:
    one, many = make_policy(name, 8), make_policy(name, 8)
    many.insert_many(iter([1, 2, 3]))
    many.touch_many(iter([1, 2]))
    for key in (1, 2, 3):
        one.insert(key)
    for key in (1, 2):
        one.touch(key)
    if name != "prospect":  # which learns more from many
        assert list(many.victims()) == list(one.victims())
    with pytest.raises(ValueError, match="3 is already present"):
        many.insert_many([3])
    with pytest.raises(KeyError):
        many.touch_many([1, 9])
    assert set(many.victims()) == {1, 2, 3}


@every_policy
def test_keys_of_several_priorities_go_to_the_policy_of_each(name: str) -> None:
    policy: ByPriority[int] = ByPriority(
        lambda capacity: make_policy(name, capacity), lambda key: key // 10, 12
    )
    policy.insert_many([20, 0, 21, 1, 10])
    assert [key // 10 for key in policy.victims()] == [0, 0, 1, 2, 2]
    alone = make_policy(name, 12)
    alone.insert_many([20, 21])
    alone.touch_many([20])
    policy.touch_many(key for key in (0, 20, 10))
    assert list(policy.victims())[3:] == list(alone.victims())
    with pytest.raises(KeyError):
        policy.touch_many([30])
    assert set(policy.victims()) == {0, 1, 10, 20, 21}


# ------------------------------------------------------------------------------------------ ARC


def lists(policy: ARC[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any], float]:
    """Give T1, T2, B1, B2, least recently used first, and the target."""
    four = (policy._t1, policy._t2, policy._b1, policy._b2)
    t1, t2, b1, b2 = (list(one) for one in four)
    return t1, t2, b1, b2, policy.target


def test_arc_follows_the_cases_of_its_paper() -> None:
    # Worked out by hand, c = 3; T1 T2 B1 B2 target after each request.
    steps: list[tuple[str, tuple[str, str, str, str, float]]] = [
        ("a", ("a", "", "", "", 0)),
        ("b", ("ab", "", "", "", 0)),
        ("a", ("b", "a", "", "", 0)),  # case I: a second use leads to T2
        ("c", ("bc", "a", "", "", 0)),
        ("d", ("cd", "a", "b", "", 0)),  # IV: T1 is above its target, b goes
        ("b", ("d", "ab", "c", "", 1)),  # II: target +1; T1 is above it, c goes
        ("e", ("de", "b", "c", "a", 1)),  # IV: T1 is not above it, a goes from T2
        ("f", ("ef", "b", "d", "a", 1)),  # IV A: L1 is full: c is forgotten; d goes
        ("d", ("ef", "d", "", "ab", 2)),  # II: +1; T1 is not above its target, b goes
    ]
    policy = ARC[str](3)
    for key, (t1, t2, b1, b2, target) in steps:
        policy.reference([key])
        assert lists(policy) == (list(t1), list(t2), list(b1), list(b2), target), key


def test_arc_moves_its_target_by_the_ratio_of_what_it_remembers() -> None:
    policy = ARC[str](4)
    policy._t1.update(dict.fromkeys("pq"))
    policy._t2.update(dict.fromkeys("rs"))
    policy._b1.update(dict.fromkeys("x"))
    policy._b2.update(dict.fromkeys("uvw"))
    policy.reference("x")  # B2 is three times as long as B1: +3
    assert policy.target == 3
    assert list(policy._t2) == ["s", "x"]  # T1 is below the target, so r went
    # B1 is empty, B2 has four: -1. T1 has just the target then, and a key of B2 takes its place.
    policy.reference("u")
    assert lists(policy) == (["q"], ["s", "x", "u"], ["p"], ["v", "w", "r"], 2)


def test_arc_forgets_what_is_beyond_twice_the_capacity() -> None:
    policy = ARC[int](2)
    policy.reference([1, 2])
    policy.reference([1, 2])  # both in T2
    for key in range(3, 10):
        policy.reference([key])
    t1, t2, b1, b2, _ = lists(policy)
    assert len(t1) + len(b1) <= 2
    assert len(t1) + len(t2) + len(b1) + len(b2) <= 4


def test_arc_evicts_from_t1_down_to_its_target_first() -> None:
    policy = ARC[int](10)
    policy.reference([1, 2, 3, 4, 5, 6])
    policy.reference([5, 6])
    policy._target = 2.5
    assert list(policy.victims()) == [1, 2, 5, 6, 3, 4]
    assert policy.evict(3) == [1, 2, 5]
    assert lists(policy)[:4] == ([3, 4], [6], [1, 2], [5])


@given(st.lists(keys, max_size=80), st.integers(1, 8))
def test_arc_keeps_the_bounds_of_its_paper(log: list[int], capacity: int) -> None:
    policy = ARC[int](capacity)
    for key in log:
        policy.reference([key])
        t1, t2, b1, b2, target = lists(policy)
        assert len(t1) + len(t2) <= capacity
        assert len(t1) + len(b1) <= capacity
        assert len(t1) + len(t2) + len(b1) + len(b2) <= 2 * capacity
        assert 0 <= target <= capacity
        assert not set(b1) & set(b2)
        assert not {*t1, *t2} & {*b1, *b2}


# -------------------------------------------------------------------------------------- S3-FIFO


def queues(policy: S3FIFO[Any]) -> tuple[dict[Any, int], dict[Any, int], list[Any]]:
    """Give S and M with uses, and G; oldest first."""
    return dict(policy._small), dict(policy._main), list(policy._ghosts)


def test_s3_fifo_follows_its_paper() -> None:
    policy = S3FIFO[str](10)  # S has one key, M nine
    policy.reference("abcdefghij")
    assert queues(policy) == (dict.fromkeys("abcdefghij", 0), {}, [])
    policy.reference("a")
    policy.reference("ab")  # a was used twice, b once
    policy.reference("k")
    # S is above its share: a, used more than once, goes to M without its uses; b goes out.
    assert queues(policy) == (dict.fromkeys("cdefghijk", 0), {"a": 0}, ["b"])
    policy.reference("b")  # remembered: into M; c goes
    assert queues(policy) == (dict.fromkeys("defghijk", 0), {"a": 0, "b": 0}, ["c"])
    policy.reference("aaaaa")  # three uses are counted
    assert queues(policy)[1] == {"a": 3, "b": 0}


def test_s3_fifo_goes_round_in_its_main_queue() -> None:
    policy = S3FIFO[str](10)
    policy._main.update({"a": 2, "b": 1, "c": 0, "d": 0})
    # S is below its share. a and b were used and go round, with one use less; c goes.
    assert policy.evict(1) == ["c"]
    assert queues(policy) == ({}, {"d": 0, "a": 1, "b": 0}, [])
    # d goes; a goes round once more; b goes.
    assert policy.evict(2) == ["d", "b"]
    assert queues(policy) == ({}, {"a": 0}, [])


def test_s3_fifo_remembers_as_many_as_its_main_queue_holds() -> None:
    policy = S3FIFO[int](10)
    policy.reference(list(range(40)))
    assert queues(policy)[2] == list(range(21, 30))


def test_s3_fifo_passes_over_what_may_not_go() -> None:
    policy = S3FIFO[str](10)
    policy.reference("abc")
    policy.reference("bb")
    assert policy.evict(1, lambda key: key != "a") == ["c"]
    # b moved on, since its turn came before that of c; a stays where it is.
    assert queues(policy) == ({"a": 0}, {"b": 0}, ["c"])
