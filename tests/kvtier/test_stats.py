"""The meter: what it counts, its peaks, and what a scope sees of it."""

from __future__ import annotations

import threading
from collections import defaultdict
from copy import deepcopy
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvtier.stats import Activity, LevelStats, Meter, StorageStats, Traffic, Usage, Waits
from tests.threads import DEADLINE, Spawn

KIB = 1 << 10


def test_a_level_has_a_current_value_a_peak_and_a_total() -> None:
    meter = Meter()
    for pages in (3, 2, -4, 1):
        meter.occupied("host", pages, pages * KIB)
    (name, use), *others = meter.activity().levels.items()
    assert (name, others) == ("host", [])
    assert use == Usage(2, 2 * KIB, 5, 5 * KIB, 6, 6 * KIB)


def test_copies_are_under_way_until_they_arrive() -> None:
    meter = Meter()
    meter.moved("gpu->host", 3, 3 * KIB)
    meter.moved("gpu->host", 2, 2 * KIB)
    meter.arrived("gpu->host", 3, 3 * KIB)
    assert meter.activity().pairs == {
        "gpu->host": Traffic(2, 2 * KIB, 5, 5 * KIB, 5, 5 * KIB, failed_pages=0)
    }
    meter.arrived("gpu->host", 2, 2 * KIB, failed=1)
    meter.moved("host->disk", 1, KIB)
    meter.moved("gpu->host", 3, 3 * KIB)
    meter.arrived("gpu->host", 3, 3 * KIB, failed=2)
    pairs = meter.activity().pairs
    assert pairs["gpu->host"] == Traffic(0, 0, 5, 5 * KIB, 8, 8 * KIB, failed_pages=3)
    assert list(pairs) == ["gpu->host", "host->disk"]


def test_levels_and_pairs_are_counted_apart() -> None:
    meter = Meter()
    meter.occupied("gpu", 1, KIB)
    meter.occupied("host", 2, 2 * KIB)
    levels = meter.activity().levels
    assert (levels["gpu"].pages, levels["host"].pages) == (1, 2)


def test_hits_are_counted_by_level_and_misses_together() -> None:
    meter = Meter()
    assert meter.activity().hit_rate is None
    meter.found("gpu", 3)
    meter.found("disk", 1)
    meter.found("gpu", 2)
    meter.missed(2)
    meter.missed(4)
    found = meter.activity()
    assert (found.hits, found.misses) == ({"gpu": 5, "disk": 1}, 6)
    assert found.hit_rate == 0.5


def test_waits_have_a_count_a_sum_and_a_longest() -> None:
    meter = Meter()
    for seconds in (0.5, 2.0, 0.25):
        meter.waited("onboard", seconds)
    meter.waited("memory", 0.0)
    assert meter.activity().waits == {"onboard": Waits(3, 2.75, 2.0), "memory": Waits(1, 0.0, 0.0)}


def test_what_was_given_does_not_change_any_more() -> None:
    meter = Meter()
    count_everything(meter)
    with meter.scope() as scope:
        count_everything(meter)
        given = meter.activity(), scope.activity
        before = deepcopy(given)
        count_everything(meter)
        assert given == before
        assert meter.activity() != given[0]
        assert scope.activity != given[1]


def test_a_name_that_was_never_counted_is_not_there() -> None:
    meter = Meter()
    with meter.scope() as scope:
        pass
    for found in (meter.activity(), scope.activity):
        for names in (found.levels, found.pairs, found.hits, found.waits):
            assert not isinstance(names, defaultdict)
            assert names == {}


def test_a_scope_counts_its_block_alone() -> None:
    meter = Meter()
    count_everything(meter)
    with meter.scope() as scope:
        assert scope.activity == Activity(
            levels={"gpu": Usage(2, 2 * KIB, 2, 2 * KIB)},
            pairs={"gpu->host": Traffic(1, KIB, 1, KIB)},
        )
        meter.occupied("gpu", 1, KIB)
        meter.occupied("gpu", -3, -3 * KIB)
        meter.arrived("gpu->host", 1, KIB, failed=1)
        meter.found("gpu", 7)
        meter.missed(1)
        meter.waited("memory", 0.5)
        inside = scope.activity
    count_everything(meter)
    assert inside == Activity(
        levels={"gpu": Usage(0, 0, 3, 3 * KIB, 1, KIB)},
        pairs={"gpu->host": Traffic(0, 0, 1, KIB, 0, 0, failed_pages=1)},
        hits={"gpu": 7},
        misses=1,
        waits={"memory": Waits(1, 0.5, 0.5)},
    )
    assert scope.activity == inside  # it ended with the block


def test_a_scope_has_peaks_of_its_own() -> None:
    meter = Meter()
    meter.occupied("gpu", 9, 9 * KIB)
    meter.occupied("gpu", -8, -8 * KIB)
    with meter.scope() as scope:
        meter.occupied("gpu", 2, 2 * KIB)
    assert scope.activity.levels["gpu"].peak_pages == 3
    assert meter.activity().levels["gpu"].peak_pages == 9


def test_scopes_may_overlap_and_end_in_any_order() -> None:
    meter = Meter()
    first, second = meter.scope(), meter.scope()
    first.__enter__()
    meter.missed(1)
    second.__enter__()
    meter.missed(2)
    first.__exit__(None, None, None)
    meter.missed(4)
    second.__exit__(None, None, None)
    meter.missed(8)
    assert (first.activity.misses, second.activity.misses) == (3, 6)
    assert meter.activity().misses == 15


def test_a_scope_that_is_entered_again_begins_anew() -> None:
    meter = Meter()
    scope = meter.scope()
    for blocks in (1, 2):
        with scope:
            meter.missed(blocks)
            assert scope.activity.misses == blocks
    with scope:
        meter.missed(1)
        with scope:
            meter.missed(4)
        meter.missed(8)
    assert scope.activity.misses == 4
    assert len(meter._books) == 1  # nobody counts for a scope that is over


def test_a_scope_ends_when_its_block_raises() -> None:
    meter = Meter()
    scope = meter.scope()
    try:
        with scope:
            raise KeyError
    except KeyError:
        meter.missed(1)
    assert scope.activity.misses == 0


def test_a_scope_waits_for_the_lock_that_orders_the_counts(spawn: Spawn) -> None:
    asked, lock = threading.Semaphore(0), threading.Lock()

    class Asked:
        def __enter__(self) -> None:
            asked.release()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    scope = Meter(Asked()).scope()
    for step in (scope.__enter__, lambda: scope.activity, scope.__exit__):
        lock.acquire()
        done = spawn(step)
        assert asked.acquire(timeout=DEADLINE)
        assert not done.done()
        lock.release()
        done.result(DEADLINE)


def test_the_stats_of_a_storage_have_an_activity_even_if_nobody_counts() -> None:
    stats = StorageStats({"gpu": LevelStats(4, 1, KIB)}, {}, 0)
    assert stats.activity == Activity()


def test_an_activity_prints_as_tables() -> None:
    meter = Meter()
    count_everything(meter)
    lines = [line.split() for line in meter.activity().describe().splitlines()]
    assert ["gpu", "2", "5", "5", "2", "KiB", "5", "KiB", "5", "KiB", "4"] in lines
    assert ["gpu->host", "1", "2", "2", "1", "KiB", "2", "KiB", "2", "KiB", "1"] in lines
    assert ["memory", "1", "1.500", "1.500"] in lines
    assert ["misses", "4,", "hit", "rate", "50.0%"] in lines
    assert Activity().describe() == "misses 0"


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    meter = Meter()
    meter.occupied("a-level-with-a-long-name", 1_000_000, 1)
    head, row, *_ = meter.activity().describe().splitlines()
    assert len(head) == len(row)
    assert head.index("pages") + len("pages") == row.index("1,000,000") + len("1,000,000")


def count_everything(meter: Meter) -> None:
    meter.occupied("gpu", 5, 5 * KIB)
    meter.occupied("gpu", -3, -3 * KIB)
    meter.moved("gpu->host", 2, 2 * KIB)
    meter.arrived("gpu->host", 1, KIB, failed=1)
    meter.found("gpu", 4)
    meter.missed(4)
    meter.waited("memory", 1.5)


@given(st.lists(st.integers(-20, 20)), st.lists(st.integers(-20, 20)))
def test_counts_are_those_of_a_plain_history(before: list[int], inside: list[int]) -> None:
    def expected(start: int, changes: list[int]) -> dict[str, Usage]:
        held = list(accumulate(changes, initial=start))
        came, top = sum(pages for pages in changes if pages > 0), max(0, *held)
        return {"x": Usage(held[-1], 2 * held[-1], top, 2 * top, came, 2 * came)}

    meter = Meter()
    meter.occupied("x", 0, 0)
    for pages in before:
        meter.occupied("x", pages, 2 * pages)
    with meter.scope() as scope:
        for pages in inside:
            meter.occupied("x", pages, 2 * pages)
    assert scope.activity.levels == expected(sum(before), inside)
    assert meter.activity().levels == expected(0, before + inside)
