"""Copy plans: which copies become one descriptor, and that the bytes stay the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.transfer.plan import Addresses, CopyPlan

FAR, NEAR = 1 << 40, 1 << 20  # where two memories begin


class Space:
    """A memory whose registrations end at given addresses."""

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.ends = np.array(sorted(ends), np.uint64)

    def registration_index(self, addresses: Addresses) -> NDArray[np.int64] | None:
        return np.searchsorted(self.ends, addresses, side="right").astype(np.int64)


class Anywhere:
    """A memory that copies may span as they like."""

    def registration_index(self, addresses: Addresses) -> NDArray[np.int64] | None:
        return None


def plan(destinations: Sequence[int], sources: Sequence[int], size: int) -> CopyPlan:
    return CopyPlan.of(np.array(destinations, np.uint64), np.array(sources, np.uint64), size)


def rows(copies: CopyPlan) -> list[tuple[int, int, int]]:
    """Give (destination, source, bytes) of every descriptor."""
    return list(
        zip(
            copies.destinations.tolist(),
            copies.sources.tolist(),
            copies.sizes.tolist(),
            strict=True,
        )
    )


def slots(base: int, ids: Sequence[int], size: int) -> list[int]:
    return [base + slot * size for slot in ids]


pairs = st.lists(
    st.tuples(st.integers(0, 24), st.integers(0, 24)),
    max_size=24,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)
runs = st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 12)).map(
    lambda run: [(run[0] + i, run[1] + i) for i in range(run[2])]
)
ends = st.lists(st.integers(0, 25), max_size=6)


@given(
    moves=pairs | runs,
    size=st.sampled_from([1, 5000, 65536]),
    near_ends=ends,
    far_ends=ends,
    shuffle=st.randoms(use_true_random=False),
)
def test_a_merged_plan_copies_the_same_bytes_in_the_fewest_descriptors(
    moves: list[tuple[int, int]],
    size: int,
    near_ends: list[int],
    far_ends: list[int],
    shuffle: random.Random,
) -> None:
    to, source = Space(slots(FAR, far_ends, size)), Space(slots(NEAR, near_ends, size))
    shuffle.shuffle(moves)
    whole = plan(
        slots(FAR, [d for d, _ in moves], size), slots(NEAR, [s for _, s in moves], size), size
    )

    merged = whole.merged(to, source)

    # The same slots, as pairs of where they come from and where they go.
    found = sorted(
        ((d - FAR) // size + i, (s - NEAR) // size + i)
        for d, s, n in rows(merged)
        for i in range(n // size)
    )
    assert found == sorted(moves)
    assert all(n % size == 0 for n in merged.sizes.tolist())
    assert merged.nbytes == len(moves) * size

    # No descriptor has a registration's end inside it.
    for d, s, n in rows(merged):
        assert not any(d < FAR + end * size < d + n for end in far_ends)
        assert not any(s < NEAR + end * size < s + n for end in near_ends)

    # A descriptor begins only where none can be continued.
    there = set(moves)
    begins = [
        (d, s) for d, s in moves if (d - 1, s - 1) not in there or d in far_ends or s in near_ends
    ]
    assert len(rows(merged)) == len(begins)


def test_a_run_of_slots_is_one_descriptor() -> None:
    whole = plan([800, 900, 1000], [100, 200, 300], 100)
    assert rows(whole.merged(Space(), Space())) == [(800, 100, 300)]


def test_copies_that_continue_on_one_side_only_stay_apart() -> None:
    whole = plan([800, 950], [100, 200], 100)
    assert rows(whole.merged(Space(), Space())) == [(800, 100, 100), (950, 200, 100)]


def test_a_run_backwards_is_no_run() -> None:
    whole = plan([900, 800], [100, 200], 100)
    assert rows(whole.merged(Space(), Space())) == [(900, 100, 100), (800, 200, 100)]


def test_a_run_ends_where_a_registration_of_the_destination_ends() -> None:
    whole = plan([800, 900, 1000], [100, 200, 300], 100)
    assert rows(whole.merged(Space([900]), Space())) == [(800, 100, 100), (900, 200, 200)]


def test_a_run_ends_where_a_registration_of_the_source_ends() -> None:
    whole = plan([800, 900, 1000], [100, 200, 300], 100)
    assert rows(whole.merged(Space(), Space([300]))) == [(800, 100, 200), (1000, 300, 100)]


def test_a_memory_without_registrations_never_ends_a_run() -> None:
    whole = plan([800, 900], [100, 200], 100)
    assert rows(whole.merged(Anywhere(), Anywhere())) == [(800, 100, 200)]


def test_a_plan_of_no_copies_stays_one() -> None:
    empty = plan([], [], 100)
    assert rows(empty.merged(Space(), Space())) == []
    assert empty.nbytes == 0


def test_joined_plans_are_one_batch_in_order() -> None:
    joined = CopyPlan.joined([plan([1, 2], [3, 4], 10), plan([5], [6], 20)])
    assert rows(joined) == [(1, 3, 10), (2, 4, 10), (5, 6, 20)]
    assert joined.nbytes == 40
