"""Generated traces: reproducible, dense, growing turn by turn."""

from __future__ import annotations

import hashlib
import io
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.replay import Request, generate, read_trace, write_trace
from kvtier.replay.generator import _Dice

SYSTEM_BLOCKS = 2  # 1,024 tokens of system prompt in blocks of 512, the defaults


def conversations(requests: list[Request], shared: int) -> list[list[Request]]:
    """Group requests by the first id that is not the system prompt's."""
    found: dict[int, list[Request]] = {}
    for request in requests:
        found.setdefault(request.hash_ids[shared], []).append(request)
    return list(found.values())


def test_the_random_bits_are_those_of_splitmix64() -> None:
    # The published reference values for seed 1234567.
    dice = _Dice(1234567)
    assert [dice.below(1 << 64) for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_seed_names_one_trace_for_ever() -> None:
    # Figures in changelogs and issues refer to seeds: a new digest here is a decision.
    file = io.StringIO()
    write_trace(generate(7, 400), file)
    digest = hashlib.sha256(file.getvalue().encode()).hexdigest()
    assert digest == "ab90ba8f5b131a3ac9ec6693ea41018fba73c7cb04c88228c5c9de912558b545"


def test_another_seed_gives_another_trace() -> None:
    assert list(generate(0, 20)) != list(generate(1, 20))


def test_a_shorter_trace_is_the_start_of_a_longer_one() -> None:
    assert list(generate(3, 500))[:100] == list(generate(3, 100))


@given(
    seed=st.integers(),
    requests=st.integers(0, 300),
    users=st.integers(1, 80),
    block_tokens=st.integers(1, 3_000),
    system_tokens=st.integers(0, 5_000),
    room=st.integers(1, 60_000),
    document_percent=st.integers(0, 100),
)
def test_whatever_the_options_the_trace_is_consistent(
    seed: int,
    requests: int,
    users: int,
    block_tokens: int,
    system_tokens: int,
    room: int,
    document_percent: int,
) -> None:
    if block_tokens < 64:  # keeps an example's ids in the hundreds a request
        system_tokens, room = system_tokens % 500, room % 2_000 + 1
    trace = list(
        generate(
            seed,
            requests,
            users=users,
            block_tokens=block_tokens,
            system_tokens=system_tokens,
            context_tokens=system_tokens + room,
            document_percent=document_percent,
        )
    )
    assert len(trace) == requests
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(trace))
    assert all(request.timestamp == 0 for request in trace[:1])
    unseen = 0  # ids appear in ascending order without a gap
    for request in trace:
        assert 1 <= request.input_length <= system_tokens + room
        assert len(request.hash_ids) == -(-request.input_length // block_tokens)
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        for number in request.hash_ids:
            assert number <= unseen
            unseen = max(unseen, number + 1)
    shared = system_tokens // block_tokens
    assert all(request.hash_ids[:shared] == list(range(shared)) for request in trace)


def test_a_turn_begins_with_all_ids_of_the_turn_before_and_holds_its_answer() -> None:
    talks = conversations(list(generate(0, 2_000)), SYSTEM_BLOCKS)
    turns = [pair for talk in talks for pair in pairwise(talk)]
    assert len(turns) > 1_000
    for before, after in turns:
        assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
        assert after.input_length > before.input_length + before.output_length


def test_a_user_reads_the_answer_before_the_next_turn() -> None:
    talks = conversations(list(generate(0, 500)), SYSTEM_BLOCKS)
    for before, after in (pair for talk in talks for pair in pairwise(talk)):
        # 20 ms a token of the answer, then at least 3 s.
        assert after.timestamp >= before.timestamp + 20 * before.output_length + 3_000


def test_conversations_are_interleaved() -> None:
    requests = list(generate(0, 64))
    firsts = [request.hash_ids[SYSTEM_BLOCKS] for request in requests]
    changes = sum(a != b for a, b in pairwise(firsts))
    assert changes > 55  # of 63: hardly anybody speaks twice in a row


def test_with_documents_only_nothing_but_the_system_prompt_is_shared() -> None:
    requests = list(generate(0, 50, document_percent=100))
    assert all(request.input_length >= 1_024 + 8_192 for request in requests)
    ids = [number for request in requests for number in request.hash_ids[SYSTEM_BLOCKS:]]
    assert len(set(ids)) == len(ids)


def test_without_documents_every_conversation_starts_with_a_message() -> None:
    talks = conversations(list(generate(0, 400, document_percent=0)), SYSTEM_BLOCKS)
    # 1,024 tokens of system prompt and a message below 256 * 2**8.
    assert all(1_280 <= talk[0].input_length < 1_024 + 65_536 for talk in talks)
    assert max(map(len, talks)) > 1


def test_a_half_of_heavy_values_lies_in_the_first_octave_and_a_quarter_in_the_next() -> None:
    dice = _Dice(0)
    octaves = [dice.heavy(100, 3) // 100 for _ in range(20_000)]
    shares = [
        sum(low <= value < high for value in octaves) / len(octaves)
        for low, high in ((1, 2), (2, 4), (4, 8), (8, 16))
    ]
    # The standard deviation of a share of 20,000 is at most 0.0036.
    assert shares == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8], abs=0.015)


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    requests = list(generate(11, 300))
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        write_trace(requests, file)
    assert read_trace(path) == requests


def test_a_line_is_written_as_the_public_traces_have_it() -> None:
    file = io.StringIO()
    write_trace([Request(1, 513, 2, [4, 5])], file)
    assert file.getvalue() == (
        '{"timestamp": 1, "input_length": 513, "output_length": 2, "hash_ids": [4, 5]}\n'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": -1}, "requests: -1"),
        ({"users": 0}, "users: 0"),
        ({"block_tokens": 0}, "block_tokens: 0"),
        ({"system_tokens": -1}, "system_tokens: -1"),
        ({"system_tokens": 100, "context_tokens": 100}, r"system_tokens: 100 is not in 0\.\.99"),
        ({"document_percent": -1}, "document_percent: -1"),
        ({"document_percent": 101}, "document_percent: 101"),
    ],
)
def test_an_option_out_of_range_is_refused_at_the_call(
    options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(0, **options)
