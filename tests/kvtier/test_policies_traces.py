"""What the policies hit on loads of many kinds; the public trace where it is at hand.

Our own policy must be clearly better than LRU where conversations go on, and nowhere much worse.
All loads are generated from seeds.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from heapq import heapify, heapreplace
from itertools import accumulate, count
from pathlib import Path
from random import Random

import pytest

from kvtier.eviction import EvictionPolicy, make_policy
from kvtier.replay.generator import generate

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"

Load = list[list[int]]


def conversations(
    seed: int = 0,
    requests: int = 5_000,
    *,
    users: int = 200,
    goes_on: float = 0.7,
    one_shot: float = 0.2,
    first: float = 12,
    further: float = 5,
    spread: float = 1.2,
    prompts: int = 1,
    prompt_blocks: int = 2,
) -> Load:
    """Make users who talk, with lognormal pauses (``spread``), some of whom paste long texts.

    The last block of a turn is cut short: it differs in the next one.
    """
    dice, fresh = Random(seed), count(prompts * prompt_blocks)

    def begin() -> tuple[list[int], bool]:
        prompt = dice.randrange(prompts) * prompt_blocks
        return list(range(prompt, prompt + prompt_blocks)), dice.random() < one_shot

    queue = [(dice.random() * 60, user) for user in range(users)]
    heapify(queue)
    talks = [begin() for _ in range(users)]
    turns = [0] * users
    load: Load = []
    while len(load) < requests:
        now, user = queue[0]
        ids, once = talks[user]
        mean = (4 * first if once else first) if turns[user] == 0 else further
        ids = ids + [next(fresh) for _ in range(1 + int(dice.expovariate(1 / mean)))]
        load.append(ids)
        turns[user] += 1
        if once or dice.random() > goes_on or len(ids) > 250:
            talks[user], turns[user] = begin(), 0
        else:
            talks[user] = ids[:-1], False
        heapreplace(queue, (now + dice.lognormvariate(3, spread), user))
    return load


def generated(seed: int, users: int) -> Load:
    return [request.hash_ids for request in generate(seed, 6_000, users=users)]


def zipf(seed: int, skew: float, keys: int = 8_000, n: int = 40_000, span: int = 1) -> Load:
    """Make independent requests for keys, each of ``span`` blocks, some far more popular."""
    dice = Random(seed)
    weights = list(accumulate((rank + 1) ** -skew for rank in range(keys)))
    return [
        [span * bisect(weights, dice.random() * weights[-1]) + at for at in range(span)]
        for _ in range(n // span)
    ]


def shifting(seed: int) -> Load:
    """Make what is popular change every 8,000 requests."""
    return [[key + n // 8_000 * 1_500] for n, (key,) in enumerate(zipf(seed, 0.9, keys=3_000))]


def loop(blocks: int, per_request: int = 10, rounds: int = 10) -> Load:
    return [
        list(range(first, first + per_request))
        for _ in range(rounds)
        for first in range(0, blocks, per_request)
    ]


def unique(n: int = 40_000, per_request: int = 20) -> Load:
    return [list(range(first, first + per_request)) for first in range(0, n, per_request)]


def scans(seed: int) -> Load:
    """Make popular prompts, with stretches of long ones that nobody repeats in between."""
    fresh = count(1_000_000)
    load: Load = []
    for n, request in enumerate(zipf(seed, 1.0, keys=300, n=40_000, span=8)):
        load.append(request)
        if n % 500 < 100:
            load.append([next(fresh) for _ in range(60)])
    return load


def bursts(seed: int) -> Load:
    """Make documents that are asked about a few times at once and hardly later."""
    dice, fresh = Random(seed), count()
    documents: Load = []
    load: Load = []
    while len(load) < 4_000:
        documents.append([next(fresh) for _ in range(dice.randint(5, 60))])
        for _ in range(min(int(dice.paretovariate(1.1)), 100)):
            load.append(documents[-1] + [next(fresh) for _ in range(3)])
        if dice.random() < 0.3:
            load.append([*dice.choice(documents[-200:]), next(fresh)])
    return load


def sets(seed: int) -> Load:
    """Make requests whose keys have nothing to do with prefixes."""
    dice = Random(seed)
    return [[dice.randrange(2_000) for _ in range(dice.randint(1, 12))] for _ in range(4_000)]


TALKS: dict[str, Callable[[], Load]] = {
    "conversations": conversations,
    "conversations, half return": lambda: conversations(1, goes_on=0.5, users=500, spread=1.5),
    "conversations, 300 prompts": lambda: conversations(
        2, goes_on=0.6, users=400, one_shot=0, first=3, further=2, prompts=300, prompt_blocks=20
    ),
    "conversations, no shared prompt": lambda: conversations(3, prompts=5_000, prompt_blocks=1),
    "conversations, few long": lambda: conversations(
        4, users=100, goes_on=0.85, spread=0.6, prompts=8, prompt_blocks=10
    ),
    "generated, 64 users": lambda: generated(0, 64),
    "generated, 400 users": lambda: generated(1, 400),
    "generated, 1,500 users": lambda: generated(2, 1_500),
}
OTHERS: dict[str, Callable[[], Load]] = {
    "one-shot prompts": lambda: conversations(5, goes_on=0, prompts=40, prompt_blocks=12),
    "zipf 0.7": lambda: zipf(0, 0.7),
    "zipf 0.9": lambda: zipf(1, 0.9),
    "zipf 1.2": lambda: zipf(2, 1.2),
    "zipf of chains": lambda: zipf(3, 0.8, keys=2_000, n=60_000, span=8),
    "shifting zipf": lambda: shifting(4),
    "loop": lambda: loop(4_000),
    "all unique": unique,
    "scans": lambda: scans(6),
    "bursts": lambda: bursts(7),
}
SHARES = (0.01, 0.05, 0.2, 0.5)
"""Capacities, as shares of the distinct blocks."""


def capacities(load: Load) -> list[int]:
    blocks = len({key for request in load for key in request})
    return [max(int(blocks * share), 20) for share in SHARES]


@cache
def load_of(name: str) -> Load:
    return (TALKS | OTHERS)[name]()


@cache
def hits_of(policy: str, capacity: int, name: str) -> int:
    return hits(policy, capacity, load_of(name))


def hits(name: str, capacity: int, load: Load) -> int:
    policy = make_policy(name, capacity)
    return sum(policy.reference(request) for request in load)


@pytest.mark.parametrize("name", [*TALKS, *OTHERS])
def test_prospect_is_nowhere_much_worse_than_lru(name: str) -> None:
    for room in capacities(load_of(name)):
        assert hits_of("prospect", room, name) >= 0.97 * hits_of("lru", room, name), room


@pytest.mark.parametrize("name", TALKS)
def test_prospect_beats_lru_where_conversations_go_on_and_room_is_short(name: str) -> None:
    tight = capacities(load_of(name))[:2]
    gains = [hits_of("prospect", room, name) / hits_of("lru", room, name) for room in tight]
    assert max(gains) >= 1.1
    assert min(gains) >= 1.0


def test_prospect_loses_nothing_where_nothing_can_be_known() -> None:
    # Which of these keys comes next is chance, and so is who hits a little more.
    loads = [sets(seed) for seed in range(6)]
    for share in range(len(SHARES)):
        lru, prospect = (
            sum(hits(policy, capacities(load)[share], load) for load in loads)
            for policy in ("lru", "prospect")
        )
        assert prospect >= 0.95 * lru


def test_prospect_keeps_most_of_a_loop_that_lru_loses() -> None:
    load = loop(4_000)
    assert hits("lru", 2_000, load) == 0
    assert hits("prospect", 2_000, load) >= 0.9 * 0.45 * sum(map(len, load))  # first round: none


def serve(policy: EvictionPolicy[int], capacity: int, load: Load) -> int:
    """Serve requests as a cache of blocks does: touch, make room, insert."""
    hits = 0
    for request in load:
        ids = request[:capacity]
        leading = next((n for n, key in enumerate(ids) if key not in policy), len(ids))
        hits += leading
        for key in ids[:leading]:
            policy.touch(key)
        for key in ids[leading:]:
            if key in policy:
                policy.touch(key)
        absent = [key for key in ids if key not in policy]
        policy.evict(max(len(policy) + len(absent) - capacity, 0), lambda key: key not in ids)  # noqa: B023
        for key in absent:
            policy.insert(key)
        assert len(policy) <= capacity
    return hits


@pytest.mark.parametrize("name", TALKS)
def test_prospect_does_about_as_well_key_by_key(name: str) -> None:
    load = load_of(name)
    capacity = capacities(load)[2]
    found = serve(make_policy("prospect", capacity), capacity, load)
    # Least with 1,500 users who all begin at once: new blocks may not stay out here, and nothing
    # is known for long about when people return.
    assert found >= 0.9 * hits_of("prospect", capacity, name)
    assert found >= 0.93 * hits_of("lru", capacity, name)


def serve_requests(policy: EvictionPolicy[int], capacity: int, load: Load) -> int:
    """Serve requests as a cache of blocks does that tells what each uses and adds."""
    hits = 0
    for request in load:
        ids = request[:capacity]
        leading = next((n for n, key in enumerate(ids) if key not in policy), len(ids))
        hits += leading
        policy.touch_many(ids[:leading])
        policy.touch_many([key for key in ids[leading:] if key in policy])
        absent = [key for key in ids if key not in policy]
        policy.evict(max(len(policy) + len(absent) - capacity, 0), lambda key: key not in ids)  # noqa: B023
        policy.insert_many(absent)
        assert len(policy) <= capacity
    return hits


@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("share", [0, 2])
def test_prospect_does_as_well_where_room_is_made_first(name: str, share: int) -> None:
    load = load_of(name)
    capacity = capacities(load)[share]
    found = serve_requests(make_policy("prospect", capacity), capacity, load)
    # Least where a request takes a large part of the room: that must be free before it is known.
    assert found >= (0.88, 0.98)[share > 0] * hits_of("prospect", capacity, name)
    assert found >= 0.99 * hits_of("lru", capacity, name)


def serve_two(
    levels: Sequence[EvictionPolicy[int]], capacity: Sequence[int], load: Load
) -> Iterator[int]:
    """Serve requests from two levels as the storage does; yield the hits of each."""
    hot, cold = levels

    def make_room(n: int, held: set[int]) -> None:
        out = hot.evict(max(len(hot) + n - capacity[0], 0), lambda key: key not in held)
        assert out is not None
        cold.evict(max(len(cold) + len(out) - capacity[1], 0))
        for key in out:
            cold.insert_evicted(key, hot)

    for request in load:
        ids = request[: capacity[0] // 2]
        leading = next(
            (n for n, key in enumerate(ids) if key not in hot and key not in cold), len(ids)
        )
        yield leading
        found = ids[:leading]
        up = {key for key in found if key in cold}
        for key in filter(up.__contains__, found):
            cold.remove(key)
        make_room(len(up), set(found))
        for key in found:
            (hot.insert if key in up else hot.touch)(key)
        for key in ids[leading:]:
            for level in levels:
                if key in level:
                    level.touch(key)
        absent = [key for key in ids if key not in hot and key not in cold]
        make_room(len(absent), set())
        for key in absent:
            hot.insert(key)


@pytest.mark.parametrize("name", TALKS)
def test_prospect_on_two_levels_is_not_worse_than_lru_on_both(name: str) -> None:
    load = load_of(name)
    room = max(capacities(load)[2], 1_000)
    rooms = (room // 4, room - room // 4)
    lru, prospect = (
        sum(serve_two([make_policy(policy, one) for one in rooms], rooms, load))
        for policy in ("lru", "prospect")
    )
    assert prospect >= 0.97 * lru


@pytest.fixture(scope="module")
def public() -> Load:
    if not TRACE.exists():
        pytest.skip(f"the public conversation trace is not at {TRACE}")
    with TRACE.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


@pytest.mark.parametrize(
    ("capacity", "percent"),
    [(1000, 1.35 * 4.45), (5000, 1.35 * 11.04), (10000, 1.05 * 21.12), (20000, 1.05 * 28.75),
     (50000, 0.99 * 35.46)],
)  # fmt: skip
def test_prospect_on_the_conversation_trace(public: Load, capacity: int, percent: float) -> None:
    assert 100 * hits("prospect", capacity, public) / sum(map(len, public)) >= percent


@pytest.mark.parametrize("half", [0, 1])
def test_prospect_on_halves_of_the_conversation_trace(public: Load, half: int) -> None:
    middle = len(public) // 2
    load = public[half * middle : (half + 1) * middle]
    for capacity in (1_000, 5_000, 20_000):
        assert hits("prospect", capacity, load) > hits("lru", capacity, load)
