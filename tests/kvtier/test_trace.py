"""Reading a trace: what is accepted, and how each kind of bad line is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from kvtier.replay import Request, TraceError, read_trace

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}'


def line(**changes: object) -> str:
    """Give a good line with some fields changed; a field changed to ``...`` is left out."""
    record = {**json.loads(GOOD), **changes}
    return json.dumps({name: value for name, value in record.items() if value is not ...})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_a_line_is_a_request(path: Path) -> None:
    path.write_text(GOOD + "\n")
    assert read_trace(path) == [Request(5, 600, 7, [0, 1])]


def test_the_order_of_the_file_is_kept(path: Path) -> None:
    path.write_text("\n".join([line(timestamp=9), line(timestamp=3)]))
    assert [request.timestamp for request in read_trace(path)] == [9, 3]


def test_blank_lines_are_skipped_and_counted(path: Path) -> None:
    path.write_text(f"\n  \t\n{GOOD}\r\n\r\nwrong\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:5: "):
        read_trace(path)


def test_unknown_fields_are_ignored(path: Path) -> None:
    path.write_text(line(type="chat", ttft=0.25, tags=[None]))
    assert read_trace(path) == [Request(5, 600, 7, [0, 1])]


def test_a_prompt_without_blocks_is_a_request(path: Path) -> None:
    path.write_text(line(hash_ids=[]))
    assert read_trace(path)[0].hash_ids == []


@pytest.mark.parametrize("number", [-1, -(2**63), 2**63 - 1])
def test_any_signed_64_bit_integer_is_an_id(path: Path, number: int) -> None:
    path.write_text(line(hash_ids=[number]))
    assert read_trace(path)[0].hash_ids == [number]


def test_a_line_may_hold_characters_that_other_readers_take_for_line_ends(path: Path) -> None:
    path.write_text(GOOD.replace("}", ', "note": "a\u2028b\x85c"}'), encoding="utf-8")
    assert len(read_trace(path)) == 1


FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
NUMBERS = FIELDS[:3]

REFUSED: list[tuple[str, str]] = [
    ("{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
    (GOOD + "x", "not JSON: Extra data at column 78"),
    (GOOD + GOOD, "not JSON: Extra data at column 78"),
    ("[" * 100_000, "not a request: nested too deeply"),
    ("[1]", "expected an object, not a list"),
    ("null", "expected an object, not null"),
    ('"text"', 'expected an object, not "text"'),
    *((line(**{name: ...}), f"field '{name}' is missing") for name in FIELDS),
    *((line(**{name: -1}), f"{name}: -1 is negative") for name in NUMBERS),
    *((line(**{name: 2**63}), f"{name}: {2**63} does not fit in 64 bits") for name in NUMBERS),
    *((line(**{name: True}), f"{name}: expected an integer, not true") for name in NUMBERS),
    *((line(**{name: 1.5}), f"{name}: expected an integer, not 1.5") for name in NUMBERS),
    *((line(**{name: "1"}), f'{name}: expected an integer, not "1"') for name in NUMBERS),
    *((line(**{name: None}), f"{name}: expected an integer, not null") for name in NUMBERS),
    *((line(**{name: {}}), f"{name}: expected an integer, not an object") for name in NUMBERS),
    *(
        (line(timestamp=value), f"not a request: {json.dumps(value)} is not JSON")
        for value in (float("nan"), float("inf"), float("-inf"))
    ),
    (line(timestamp=1).replace("1,", "1e999,", 1), "timestamp: expected an integer, not Infinity"),
    (line(hash_ids=[float("nan")]), "not a request: NaN is not JSON"),
    (line(hash_ids=7), "hash_ids: expected a list of integers, not 7"),
    (line(hash_ids={"0": 1}), "hash_ids: expected a list of integers, not an object"),
    (line(hash_ids=[0, True]), "hash_ids: expected integers, found true"),
    (line(hash_ids=[0, 1.0]), "hash_ids: expected integers, found 1.0"),
    (line(hash_ids=["0", 1]), 'hash_ids: expected integers, found "0"'),
    (line(hash_ids=[0, None]), "hash_ids: expected integers, found null"),
    (line(hash_ids=[0, [1]]), "hash_ids: expected integers, found a list"),
    (line(hash_ids=[0, 2**63]), f"hash_ids: {2**63} does not fit in 64 bits"),
    (line(hash_ids=[-(2**63) - 1]), f"hash_ids: {-(2**63) - 1} does not fit in 64 bits"),
    (line(hash_ids=[10**60]), f"hash_ids: 1{'0' * 36}... does not fit in 64 bits"),
    (line(hash_ids=["x" * 99]), f'hash_ids: expected integers, found "{"x" * 36}...'),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=[f"{n}" for n in range(len(REFUSED))])
def test_a_bad_line_is_refused_with_its_number(path: Path, text: str, reason: str) -> None:
    path.write_text(f"{GOOD}\n{text}\n{GOOD}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}:2: {reason}"
    assert (caught.value.path, caught.value.line, caught.value.reason) == (str(path), 2, reason)


def test_a_number_of_more_digits_than_python_converts_is_refused(path: Path) -> None:
    path.write_text(line(timestamp=1).replace("1,", "9" * 5000 + ",", 1))
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: not a request: .*4300 digits"):
        read_trace(path)


def test_bytes_that_are_not_utf8_are_refused_with_their_column(path: Path) -> None:
    path.write_bytes(GOOD.encode() + b"\n{\xff}\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: not UTF-8: byte 0xff at column 2"):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_trace_without_requests_is_refused_as_a_whole(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: no requests in this trace"
    assert caught.value.line is None


def test_an_error_survives_pickling() -> None:
    error = TraceError("a.jsonl", 3, "not JSON")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, TraceError)
    assert (str(copy), copy.line) == ("a.jsonl:3: not JSON", 3)


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        read_trace(tmp_path)
