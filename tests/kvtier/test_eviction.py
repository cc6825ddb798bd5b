"""Eviction: the contract of a policy, and LRU against an independent one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.eviction import LRU, POLICIES, EvictionPolicy, make_policy

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"

requests = st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=25)


class Plain(EvictionPolicy[int]):
    """LRU in a list, on the methods that a policy has to have and no other."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.keys: list[int] = []

    def insert(self, key: int) -> None:
        self.keys.append(key)

    def touch(self, key: int) -> None:
        self.keys.remove(key)
        self.keys.append(key)

    def remove(self, key: int) -> None:
        self.keys.remove(key)

    def victims(self) -> Iterator[int]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys


def lru(*keys: int, capacity: int | None = None) -> LRU[int]:
    """Give an LRU into which the keys were inserted in turn."""
    policy = LRU[int](capacity)
    for key in keys:
        policy.insert(key)
    return policy


def by_age(history: list[int], capacity: int | None) -> list[int]:
    """Give the last ``capacity`` distinct keys of a history, oldest first: what LRU is."""
    last = {key: when for when, key in enumerate(history)}
    ordered = sorted(last, key=last.__getitem__)
    return ordered if capacity is None else ordered[-capacity:]


@given(requests, st.none() | st.integers(1, 10))
def test_lru_holds_the_keys_used_last(log: list[list[int]], capacity: int | None) -> None:
    policy = LRU[int](capacity)
    history: list[int] = []
    for keys in log:
        held = by_age(history, capacity)
        hits = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        assert policy.reference(keys) == hits
        history += keys
        assert list(policy.victims()) == by_age(history, capacity)


@given(requests, st.none() | st.integers(1, 10))
def test_the_general_replay_gives_what_the_one_of_lru_gives(
    log: list[list[int]], capacity: int | None
) -> None:
    plain, policy = Plain(capacity), LRU[int](capacity)
    for keys in log:
        assert plain.reference(keys) == policy.reference(keys)
        assert plain.keys == list(policy.victims())


@pytest.mark.parametrize("kind", [Plain, LRU])
def test_a_key_present_behind_a_miss_is_touched_but_no_hit(kind: type[EvictionPolicy[int]]) -> None:
    policy = kind(3)
    assert policy.reference([1, 2, 3]) == 0
    # 1 hits; 4 is absent and evicts 2; 3 is there and becomes younger than 1, and is no hit.
    assert policy.reference([1, 4, 3]) == 1
    assert list(policy.victims()) == [1, 4, 3]


@pytest.mark.parametrize("kind", [Plain, LRU])
def test_a_request_larger_than_the_cache_leaves_its_last_keys(
    kind: type[EvictionPolicy[int]],
) -> None:
    policy = kind(2)
    assert policy.reference([1, 2, 3, 4]) == 0
    assert list(policy.victims()) == [3, 4]


@pytest.mark.parametrize("kind", [Plain, LRU])
def test_a_lowered_capacity_takes_effect_when_room_is_needed(
    kind: type[EvictionPolicy[int]],
) -> None:
    policy = kind(4)
    policy.reference([1, 2, 3, 4])
    policy.capacity = 2
    assert policy.reference([4]) == 1
    assert len(policy) == 4
    assert policy.reference([5]) == 0
    assert list(policy.victims()) == [4, 5]


def test_a_touched_key_goes_last() -> None:
    policy = lru(1, 2, 3)
    policy.touch(1)
    assert list(policy.victims()) == [2, 3, 1]
    policy.touch_many([3, 2])
    assert list(policy.victims()) == [1, 3, 2]


def test_victims_are_not_removed_by_looking_at_them() -> None:
    policy = lru(1, 2)
    assert next(policy.victims()) == 1
    assert len(policy) == 2
    assert 1 in policy
    assert 3 not in policy


def test_the_least_recently_used_keys_are_evicted() -> None:
    policy = lru(1, 2, 3)
    policy.touch(1)
    assert policy.evict(2) == [2, 3]
    assert list(policy.victims()) == [1]


def test_keys_that_may_not_go_are_passed_over() -> None:
    policy = lru(0, 1, 2, 3, 4)
    assert policy.evict(2, lambda key: key % 2 == 0) == [0, 2]
    assert list(policy.victims()) == [1, 3, 4]


def test_an_eviction_of_too_many_changes_nothing() -> None:
    policy = lru(1, 2, 3)
    assert policy.evict(4) is None
    assert policy.evict(3, lambda key: key != 2) is None
    assert list(policy.victims()) == [1, 2, 3]


def test_no_more_keys_are_asked_about_than_needed() -> None:
    asked = []

    def odd(key: int) -> bool:
        asked.append(key)
        return key % 2 == 1

    assert lru(2, 1, 3).evict(1, odd) == [1]
    assert asked == [2, 1]


def test_none_is_a_number_of_keys_to_evict_and_less_is_not() -> None:
    policy = lru(1)
    assert policy.evict(0) == []
    with pytest.raises(ValueError, match="less than 0"):
        policy.evict(-1)


def test_a_key_is_inserted_once() -> None:
    policy = lru(1, 2)
    with pytest.raises(ValueError, match="key 1 is already present"):
        policy.insert(1)
    assert list(policy.victims()) == [1, 2]


def test_an_absent_key_can_be_neither_touched_nor_removed() -> None:
    policy = lru(1)
    for call in (policy.touch, policy.remove):
        with pytest.raises(KeyError):
            call(2)
    with pytest.raises(KeyError):
        policy.touch_many([1, 2])
    policy.remove(1)
    assert len(policy) == 0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_key_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity: {capacity} is below the minimum of 1 key"):
        make_policy("lru", capacity)


def test_policies_are_made_by_name() -> None:
    made = make_policy("lru", 7)
    assert type(made) is POLICIES["lru"] is LRU
    assert made.capacity == 7


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"there is no 'mru'; choose from .*lru"):
        make_policy("mru", 7)


@pytest.fixture(scope="module")
def trace() -> list[list[int]]:
    if not TRACE.exists():
        pytest.skip(f"the public conversation trace is not at {TRACE}")
    with TRACE.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


@pytest.mark.parametrize(
    ("capacity", "percent"),
    [(1000, 4.45), (5000, 11.04), (10000, 21.12), (20000, 28.75), (50000, 35.46), (None, 36.64)],
)
def test_lru_hits_on_the_conversation_trace_as_others_measured(
    trace: list[list[int]], capacity: int | None, percent: float
) -> None:
    policy = LRU[int](capacity)
    hits = sum(policy.reference(keys) for keys in trace)
    assert round(100 * hits / sum(map(len, trace)), 2) == percent
