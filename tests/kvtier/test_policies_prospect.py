"""Prospect: who goes first and why, what it finds out from the order of calls, and its insides."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.eviction import Prospect
from kvtier.eviction.outlook import (
    AGES,
    BUCKETS,
    CELLS,
    LEFT,
    TIP,
    Outlook,
    _best_rates,
    class_of,
)
from kvtier.eviction.runs import Run


def check(policy: Prospect[int]) -> None:
    """Compare everything that is kept in two places."""
    policy._settle()
    waiting = policy._waiting
    runs = list(dict.fromkeys(policy._runs.values()))
    assert Counter(chain.from_iterable(run.keys for run in runs)) == Counter(list(policy._runs))
    assert all(policy._runs[key] is run for run in runs for key in run.keys)
    children = Counter(run.parent for run in runs if run.parent is not None)
    leaves = {run for cell in waiting._cells for cohort in cell for run in cohort.leaves}
    assert not any(run.refused for run in leaves)
    assert all(run.refused for run in waiting._refused)
    leaves.update(waiting._refused)
    for run in runs:
        assert run.kids == children[run]
        assert (run in leaves) == (run.kids == 0)
        assert run.cohort is not None
    assert leaves <= set(runs)
    ghosts = list(policy._ghosts.values())
    assert not any(ghost.keys for ghost in ghosts)
    weights: Counter[object] = Counter()
    for run in (*runs, *ghosts):
        assert run.weight >= max(len(run.keys), 1)
        weights[run.cohort] += run.weight
    assert weights == {cohort: cohort.weight for cohort in waiting._cohorts.values()}
    for place, cell in enumerate(waiting._order):
        assert waiting._place[cell] == place
        assert (waiting._mask >> place & 1) == bool(waiting._cells[cell])
        for cohort in waiting._cells[cell]:
            assert cohort.cell == cell
            assert cohort.leaves
    aging = Counter(cohort for queue in waiting._aging for cohort in queue if cohort.weight)
    assert set(aging.values()) <= {1}
    for cohort in waiting._cohorts.values():
        age = waiting._epoch - cohort.epoch
        bucket = cohort.cell % BUCKETS
        assert cohort in aging or bucket == len(AGES)
        assert bucket == 0 or age >= AGES[bucket - 1]
        assert waiting._cohorts[cohort.cell // BUCKETS, cohort.epoch] is cohort


requests = st.lists(
    st.tuples(
        st.sampled_from(["reference", "live", "requests", "remove", "evict", "capacity"]),
        st.lists(st.integers(0, 20), min_size=1, max_size=9),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(requests, st.none() | st.integers(1, 40))
def test_what_it_keeps_agrees(log: list[tuple[str, list[int]]], capacity: int | None) -> None:
    policy: Prospect[int] = Prospect(capacity)
    for call, keys in log:
        if call == "reference":
            policy.reference(keys)
        elif call == "live":
            for key in keys:
                (policy.touch if key in policy else policy.insert)(key)
        elif call == "requests":
            request(policy, list(dict.fromkeys(keys)))
        elif call == "evict":
            policy.evict(len(keys), lambda key: key % 4 != 0)
        elif call == "capacity":
            policy.capacity = keys[0] + 1
        else:
            for key in set(keys) & set(policy._runs):
                policy.remove(key)
        check(policy)


def request(policy: Prospect[Any], keys: list[Any], capacity: int | None = None) -> int:
    """Use a request's leading keys and add the others, once room was made; give the hits."""
    hits = next((n for n, key in enumerate(keys) if key not in policy), len(keys))
    policy.touch_many(keys[:hits])
    rest = keys[hits:]
    policy.touch_many([key for key in rest if key in policy])
    new = [key for key in rest if key not in policy]
    if capacity is not None:
        policy.evict(max(len(policy) + len(new) - capacity, 0))
    policy.insert_many([key for key in rest if key not in policy])  # some may just have gone
    return hits


@given(requests)
def test_chains_go_from_their_ends(log: list[tuple[str, list[int]]]) -> None:
    # Keys that name their whole prefix, as a hash chained over it does.
    policy: Prospect[tuple[int, ...]] = Prospect(12)
    for call, ids in log:
        chained = [tuple(ids[: n + 1]) for n in range(len(ids))]
        if call == "evict":
            policy.evict(len(ids))
        elif call == "requests":
            policy.capacity = None
            request(policy, chained)
            policy.capacity = 12
        else:
            policy.reference(chained)
        held = set(policy.victims())
        assert all(len(key) == 1 or key[:-1] in held for key in held)
        gone: set[tuple[int, ...]] = set()
        for key in policy.victims():
            assert all(other[:-1] != key or other in gone for other in held)
            gone.add(key)


def test_before_it_has_seen_anything_what_was_used_last_stays() -> None:
    policy: Prospect[int] = Prospect(40)
    for first in range(0, 40, 4):
        policy.reference(list(range(first, first + 4)))
    for again in (0, 4):
        policy.reference(list(range(again, again + 4)))
    evicted = policy.evict(16)
    assert evicted is not None
    assert not {0, 1, 2, 4, 5, 6} & set(evicted)


def test_a_long_request_that_nobody_repeats_does_not_flush_a_conversation() -> None:
    policy: Prospect[int] = Prospect(64)
    talk = [0, 1, 2, 3]
    hits = fresh = 0
    for turn in range(400):
        fresh = 1_000 + 100 * turn
        policy.reference([0, *range(fresh, fresh + 70)])  # more than the cache has
        hits = policy.reference(talk)
        talk = [0, 1, 2, 3, *talk[4:], 10 + turn][:20]
    assert hits == 20


def test_what_is_worth_less_than_what_went_for_it_is_the_next_to_go() -> None:
    policy: Prospect[int] = Prospect(64)
    talk = list(range(20))
    for first in range(100, 1_500, 70):  # a conversation comes back, what is between never does
        request(policy, talk, 64)
        request(policy, [-1, *range(first, first + 64)], 64)
    request(policy, talk, 64)
    request(policy, [-1, *range(2_000, 2_050)], 64)
    assert next(policy.victims()) == 2_049
    policy.evict(40)
    assert set(talk[:10]) <= set(policy.victims())


def test_a_refused_key_that_is_asked_for_is_refused_no_longer() -> None:
    policy: Prospect[int] = Prospect(4)
    for _ in range(200):  # learn that these return, and others do not
        request(policy, [0, 1, 2, 3], 4)
    policy.evict(3)
    policy.insert_many([10, 11, 12])
    assert [policy._runs[key].refused for key in (0, 11, 12)] == [False, True, True]
    policy.touch_many([10, 11])
    policy._settle()
    assert [policy._runs[key].refused for key in (10, 11, 12)] == [False, False, True]
    assert next(policy.victims()) == 12
    policy.touch_many([12])
    policy._settle()
    assert not policy._runs[12].refused
    check(policy)


def test_a_refused_key_costs_nothing_when_it_goes() -> None:
    policy: Prospect[int] = Prospect(4)
    for _ in range(200):
        request(policy, [0, 1, 2, 3], 4)
    policy.evict(3)
    assert all(spent > 0 for spent in policy._spent)
    policy.insert_many([10, 11, 12])
    assert policy.evict(1) == [12]
    assert policy._spent == [-inf]


def test_a_cache_that_tells_requests_is_not_one_that_keys_pass_through() -> None:
    policy: Prospect[int] = Prospect(16)
    policy.insert_many(range(8))
    policy.insert(20)
    assert not policy._is_passed_through


def test_a_request_that_goes_on_elsewhere_leaves_the_rest_of_a_run() -> None:
    policy: Prospect[int] = Prospect(16)
    request(policy, list(range(8)))
    request(policy, [30, 31])
    policy.remove(7)  # what follows a run hides it
    policy.touch_many([0, 1, 2, 30, 31])
    assert policy._runs[3].kind == LEFT
    check(policy)


def test_nothing_is_refused_where_there_is_room() -> None:
    policy: Prospect[int] = Prospect(8)
    for _ in range(200):
        request(policy, [0, 1, 2, 3], 8)
    request(policy, [10, 11, 12, 13], 8)
    assert not policy._waiting._refused
    policy.evict(3)
    policy.insert_many([])
    assert policy._spent  # still to be compared with what comes
    policy.insert_many([20])
    assert not policy._spent


def test_keys_that_are_there_are_not_inserted_with_others() -> None:
    policy: Prospect[int] = Prospect(8)
    policy.insert_many([1, 2])
    with pytest.raises(ValueError, match="key 2 is already present"):
        policy.insert_many([3, 2])
    assert sorted(policy.victims()) == [1, 2]
    check(policy)


def test_an_absent_key_ends_a_row_of_touches() -> None:
    policy: Prospect[int] = Prospect(8)
    policy.insert_many([1, 2, 3])
    with pytest.raises(KeyError):
        policy.touch_many([1, 9, 3])
    check(policy)


def test_the_rest_of_a_run_that_a_request_did_not_use_is_known_as_left() -> None:
    policy: Prospect[int] = Prospect(16)
    request(policy, list(range(10)), 16)
    policy.touch_many([0, 1, 2, 3])
    policy.evict(2)  # 9 and 8, or so: between what a request uses and what it adds
    policy.insert_many([20, 21])
    assert policy._runs[4].kind == LEFT
    assert policy._runs[20].parent is policy._runs[3]
    check(policy)


def test_a_loop_larger_than_the_cache_keeps_a_part_of_it() -> None:
    policy: Prospect[int] = Prospect(50)
    hits = [policy.reference([10 * part + n for n in range(10)]) for part in list(range(10)) * 30]
    assert sum(hits[-10:]) >= 40


def test_touches_find_runs_and_the_ends_go_first() -> None:
    policy: Prospect[str] = Prospect(16)
    policy.insert("a")
    policy.touch("a")
    for key in "bcd":
        policy.insert(key)
    for key in "abcd":
        policy.touch(key)
    for key in "ef":
        policy.insert(key)  # follows a, b, c, d
    for key in "ab":
        policy.touch(key)
    for key in "xy":
        policy.insert(key)  # another way on from a, b
    order = list(policy.victims())
    for chain_ in ("abcdef", "abxy"):
        places = [order.index(key) for key in chain_]
        assert places == sorted(places, reverse=True)


def test_an_insertion_after_an_eviction_begins_a_request() -> None:
    policy: Prospect[str] = Prospect(4)
    for key in "ab":
        policy.insert(key)
    for key in "ab":
        policy.touch(key)
    policy.insert("c")
    assert policy.evict(0) == []
    policy.insert("d")
    assert policy._runs["c"].parent is policy._runs["b"]
    assert policy._runs["d"].parent is None


def test_what_was_joined_wrongly_is_parted_when_it_is_touched() -> None:
    policy: Prospect[str] = Prospect(16)
    policy.insert("a")
    policy.touch("a")
    for key in "bcpqr":  # p, q and r are of the next request
        policy.insert(key)
    for key in "pq":
        policy.touch(key)
    policy.touch("a")
    assert policy._runs["p"].parent is None
    assert policy._runs["q"] is policy._runs["p"]
    assert policy._runs["r"].parent is policy._runs["p"]
    assert policy._runs["b"].keys == ["b", "c"]


def test_where_keys_are_never_touched_they_go_in_the_order_they_came() -> None:
    policy: Prospect[int] = Prospect(100)
    for key in (5, 4, 3, 9, 8):
        policy.insert(key)
    assert list(policy.victims()) == [5, 4, 3, 9, 8]


def test_a_lower_level_values_keys_as_the_level_above_does() -> None:
    above: Prospect[int] = Prospect(40)
    below: Prospect[int] = Prospect(400)
    fresh = 1000
    for turn in range(200):
        for talk in range(4):  # conversations that go on, between prompts that nobody repeats
            start = 100 * talk
            above.reference(list(range(start, start + 4 + turn % 4)))
            above.reference(list(range(fresh, fresh + 8)))
            fresh += 8
    evicted = above.evict(len(above))
    assert evicted is not None
    for key in reversed(evicted):  # even if the most valuable come first
        below.insert_evicted(key, above)
    check(below)
    order = list(below.victims())
    talks = [place for place, key in enumerate(order) if key < 1000]
    others = [place for place, key in enumerate(order) if key >= 1000]
    assert sum(talks) / len(talks) > sum(others) / len(others)
    assert len(below._ghosts) == 0


def test_no_more_is_remembered_than_twice_the_capacity() -> None:
    policy: Prospect[int] = Prospect(100)
    for first in range(0, 5_000, 2):
        policy.reference([first, first + 1])
    assert 100 < len(policy._ghosts) <= 200
    check(policy)


def test_the_same_calls_give_the_same_result() -> None:
    def run() -> tuple[int, list[int]]:
        policy: Prospect[int] = Prospect(30)
        hits = sum(policy.reference([n * n % 47, n % 13, n % 5]) for n in range(600))
        return hits, list(policy.victims())

    assert run() == run()


# ----------------------------------------------------------------------------------- the outlook


def test_a_rate_looks_as_far_ahead_as_pays() -> None:
    # Nothing returns in the first two epochs, half in the third, nothing later.
    rates = _best_rates([0.0, 0.5, 0.0], [2.0, 1.0, 10.0])
    assert rates == pytest.approx([0.5 / 2.75, 0.5 / 0.75, 0.0])


def test_a_rate_does_not_wait_for_what_is_far_and_rare() -> None:
    rates = _best_rates([0.5, 0.1], [1.0, 100.0])
    assert rates == pytest.approx([0.5 / 0.75, 0.1 / 95])


def test_without_experience_worth_falls_with_age_alike_in_all_classes() -> None:
    worth = Outlook().worth()
    assert len(worth) == CELLS
    by_class = [worth[first : first + BUCKETS] for first in range(0, CELLS, BUCKETS)]
    assert all(one == pytest.approx(by_class[0]) for one in by_class)
    assert sorted(by_class[0][1:], reverse=True) == by_class[0][1:]


def test_a_class_that_returns_is_worth_more_than_one_that_does_not() -> None:
    outlook = Outlook()
    loyal, fickle = class_of(0, 3) * BUCKETS, class_of(0, 1) * BUCKETS
    for cell in (loyal, fickle):
        for bucket in range(6):
            outlook.waited[cell + bucket] += 1_000
    for _ in range(400):
        outlook.note_return(loyal + 5, 1)
    worth = outlook.worth()
    assert worth[loyal] > 3 * worth[fickle]
    assert worth[loyal + 5] > worth[loyal]  # the time of the return is near


def test_old_experience_fades() -> None:
    outlook = Outlook()
    outlook.waited[0] = 40_000
    for _ in range(20_000):
        outlook.note_return(0, 1)
    outlook.worth()
    assert outlook.returned[0] == 10_000
    assert outlook.waited[0] == 20_000


def test_turns_are_counted_alike_along_a_conversation() -> None:
    policy: Prospect[int] = Prospect(100)
    talk: list[int] = []
    for turn in range(5):
        talk += range(10 * turn, 10 * turn + 3)
        policy.reference(talk)
    runs: dict[Run[int], None] = dict.fromkeys(policy._runs[key] for key in talk)
    assert {run.turns for run in list(runs)[:-1]} <= {5, 6, 7, 8, 9, 10}
    assert policy._runs[talk[-1]].kind == TIP
