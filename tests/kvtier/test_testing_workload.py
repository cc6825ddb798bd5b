"""The prompts of the test kit: seeded, chained, and of the lengths that were asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvtier.replay import generate
from kvtier.testing import prompts


def test_the_same_seed_makes_the_same_tokens_and_another_one_others() -> None:
    first, again, other = (list(prompts(seed, 30)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0].dtype == np.int32
    assert not np.array_equal(first[0][:16], other[0][:16])


def test_tokens_are_as_many_as_the_trace_says_and_shared_where_its_blocks_are() -> None:
    options = {"users": 4, "system_tokens": 40, "context_tokens": 1024}
    trace = list(generate(5, 60, block_tokens=16, **options))
    made = list(prompts(5, 60, tokens_per_block=16, **options))
    assert [len(tokens) for tokens in made] == [request.input_length for request in trace]
    for one, its in zip(trace, made, strict=True):
        for other, others in zip(trace, made, strict=True):
            pairs = zip(one.hash_ids, other.hash_ids, strict=False)
            shared = 16 * next((n for n, (a, b) in enumerate(pairs) if a != b), 10**6)
            same = min(shared, len(its), len(others))
            assert np.array_equal(its[:same], others[:same])
            if same == shared:
                assert not np.array_equal(its[same : same + 4], others[same : same + 4])


def test_a_conversation_goes_on_from_all_that_was_said() -> None:
    made = list(prompts(1, 40, users=1, document_percent=0))
    grown = [
        np.array_equal(before, after[: len(before)]) for before, after in itertools.pairwise(made)
    ]
    assert grown.count(True) > 20
    assert all(np.array_equal(tokens[:32], made[0][:32]) for tokens in made)


def test_tokens_are_of_the_vocabulary() -> None:
    tokens = np.concatenate(list(prompts(2, 20, vocabulary=7)))
    assert set(tokens.tolist()) == set(range(7))


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary: 0"):
        next(prompts(vocabulary=0))
