"""Sequences of tokens such as users make them: conversations that go on, and long documents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvtier.replay.generator import generate
from kvtier.testing.contents import mix

__all__ = ["prompts"]


def prompts(
    seed: int = 0,
    requests: int = 200,
    *,
    tokens_per_block: int = 16,
    users: int = 8,
    system_tokens: int = 32,
    context_tokens: int = 4096,
    document_percent: int = 10,
    vocabulary: int = 128_000,
) -> Iterator[NDArray[np.int32]]:
    """Make the prompts of a seeded workload, in the order of their arrival.

    A prompt of a conversation begins with all of the prompt before it, answers included, and every
    prompt with the system prompt. Which prompts there are and how long they are says
    `kvtier.replay.generate`, and the same arguments make the same tokens on every machine.

    Parameters
    ----------
    seed, requests, users, system_tokens, context_tokens, document_percent
        As for `kvtier.replay.generate`.
    tokens_per_block : int
        Tokens of a block; whole blocks of the system prompt are shared by all.
    vocabulary : int
        Tokens are from 0 to this, exclusive.

    Yields
    ------
    int32 array, shape (tokens,)

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    if vocabulary < 1:
        raise ValueError(f"vocabulary: {vocabulary} has no token; at least 1")
    places = np.arange(tokens_per_block, dtype=np.uint64)

    @lru_cache(maxsize=65_536)
    def block(name: int) -> NDArray[np.int32]:
        words = mix(places + mix(np.array([seed ^ name], np.int64).view(np.uint64)))
        return (words % np.uint64(vocabulary)).astype(np.int32)

    for request in generate(
        seed,
        requests,
        users=users,
        block_tokens=tokens_per_block,
        system_tokens=system_tokens,
        context_tokens=context_tokens,
        document_percent=document_percent,
    ):
        yield np.concatenate([block(name) for name in request.hash_ids])[: request.input_length]
