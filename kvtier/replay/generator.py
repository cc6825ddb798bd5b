"""Synthetic traces: many-turn conversations and one-shot documents, from a seed.

A fixed number of users share one assistant. Each holds one conversation after another; a turn's
prompt is all that was said before, the last answer included, plus a new message. Now and then a
user submits one long document instead and never returns to it, which is what flushes a cache that
only counts recency. Lengths and pauses are heavy-tailed.

The same arguments give the same trace on every machine and Python version: chance comes from
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), written out below, and all arithmetic is on
integers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import islice
from typing import TextIO

from kvtier.replay.trace import Request

__all__ = ["generate", "write_trace"]

_MASK64 = (1 << 64) - 1
_TOKEN_MS = 20
"""Milliseconds an answer takes a token; the user reads and thinks only afterwards."""


def generate(
    seed: int = 0,
    requests: int = 200,
    *,
    users: int = 64,
    block_tokens: int = 512,
    system_tokens: int = 1024,
    context_tokens: int = 131_072,
    document_percent: int = 10,
) -> Iterator[Request]:
    """Generate a trace, one request at a time.

    Parameters
    ----------
    seed : int
        Chooses the trace; taken modulo 2**64.
    requests : int
        Requests to generate, 0 or more.
    users : int
        Conversations going on at any moment, interleaved by time; at least 1.
    block_tokens : int
        Tokens a block holds; at least 1.
    system_tokens : int
        Tokens of the prompt that opens every request. Its whole blocks are shared by all; a rest
        shorter than a block differs by what follows it.
    context_tokens : int
        Tokens the longest prompt may have, more than ``system_tokens``. A conversation that would
        outgrow it ends.
    document_percent : int
        How many in a hundred conversations are a single request with a long document, 0..100.

    Returns
    -------
    iterator of Request
        Ordered by timestamp. Ids are numbered from 0 in the order they first appear, without
        gaps. ``input_length`` tokens take ``ceil(input_length / block_tokens)`` ids; the last
        block may be partly filled and keeps its id when a later turn fills it, so a turn's ids
        always begin with all ids of the turn before.

    Raises
    ------
    ValueError
        If an argument is out of range, before anything is generated.
    """
    if requests < 0:
        raise ValueError(f"requests: {requests} is negative")
    if users < 1:
        raise ValueError(f"users: {users} leaves nobody to ask; at least 1")
    if block_tokens < 1:
        raise ValueError(f"block_tokens: {block_tokens} is no block; at least 1 token")
    if not 0 <= system_tokens < context_tokens:
        raise ValueError(
            f"system_tokens: {system_tokens} is not in 0..{context_tokens - 1}, "
            "a prompt shorter than context_tokens"
        )
    if not 0 <= document_percent <= 100:
        raise ValueError(f"document_percent: {document_percent} is not in 0..100")
    world = _World(_Dice(seed), block_tokens, system_tokens, context_tokens, document_percent)
    return islice(world.requests(users), requests)


def write_trace(requests: Iterable[Request], file: TextIO) -> None:
    """Write requests as JSON lines, the format `read_trace` reads.

    Parameters
    ----------
    requests : iterable of Request
        Consumed one by one; nothing is held.
    file : text stream
        Where the lines go; not closed.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    for request in requests:
        record = {
            "timestamp": request.timestamp,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        file.write(json.dumps(record) + "\n")


class _Dice:
    """SplitMix64 and the few distributions the generator needs, in integers only."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK64

    def _bits(self) -> int:
        """Return the next 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK64
        mixed = ((self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        return mixed ^ (mixed >> 31)

    def below(self, bound: int) -> int:
        """Return an integer in ``0..bound-1``, uniform to within ``bound / 2**64``."""
        return (self._bits() * bound) >> 64

    def chance(self, percent: int) -> bool:
        """Return True ``percent`` times in a hundred."""
        return self.below(100) < percent

    def heavy(self, least: int, doublings: int) -> int:
        """Return an integer from a power law of exponent 1 in steps of octaves.

        Each octave is half as likely as the one below it and uniform inside: a half of the values
        lie in ``least..2*least-1``, a quarter in the next octave, and so on; the last octave,
        which ends below ``least << (doublings + 1)``, takes what is left.
        """
        octave = least
        for _ in range(doublings):
            if self.chance(50):
                break
            octave *= 2
        return octave + self.below(octave)


@dataclass(slots=True)
class _Conversation:
    """What one user has said and heard so far."""

    tokens: int
    ids: list[int] = field(default_factory=list)
    one_shot: bool = False


@dataclass(slots=True)
class _World:
    """The users, their conversations and the ids handed out so far."""

    dice: _Dice
    block_tokens: int
    system_tokens: int
    context_tokens: int
    document_percent: int
    next_id: int = 0

    def requests(self, users: int) -> Iterator[Request]:
        """Yield the requests of ``users`` users for ever, ordered by time."""
        # Each turn is drawn when its time has come, so that ids rise in the order they appear.
        self.next_id = self.system_tokens // self.block_tokens
        queue = [(self.dice.below(10_000), user) for user in range(users)]
        heapify(queue)
        start = queue[0][0]
        talks = [self._begin() for _ in range(users)]
        while True:
            now, user = queue[0]
            talk = talks[user]
            self._grow(talk)
            answer = self.dice.heavy(64, 5)
            yield Request(now - start, talk.tokens, answer, talk.ids.copy())
            talk.tokens += answer + self.dice.heavy(64, 9)
            pause = answer * _TOKEN_MS + self.dice.heavy(3_000, 6)
            if talk.one_shot or talk.tokens > self.context_tokens or self.dice.chance(15):
                talks[user] = self._begin()
            heapreplace(queue, (now + pause, user))

    def _begin(self) -> _Conversation:
        """Start a conversation: the system prompt and a first message or a document."""
        one_shot = self.dice.chance(self.document_percent)
        message = self.dice.heavy(8_192, 3) if one_shot else self.dice.heavy(256, 7)
        tokens = min(self.system_tokens + message, self.context_tokens)
        return _Conversation(tokens, one_shot=one_shot)

    def _grow(self, talk: _Conversation) -> None:
        """Give the conversation ids for all its tokens; the first ones are the system prompt's."""
        if not talk.ids:
            talk.ids.extend(range(self.system_tokens // self.block_tokens))
        missing = -(-talk.tokens // self.block_tokens) - len(talk.ids)
        talk.ids.extend(range(self.next_id, self.next_id + missing))
        self.next_id += missing
