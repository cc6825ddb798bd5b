"""Request traces: JSON lines in the format of Mooncake's public traces.

One object a line::

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3]}

``hash_ids`` names the blocks of the prompt in prefix order, one id a block; two requests that share
a leading run of ids share those tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, NoReturn

__all__ = ["Request", "TraceError", "read_trace"]

_INT64 = range(-(1 << 63), 1 << 63)
_NATURAL = range(1 << 63)


@dataclass(slots=True)
class Request:
    """One request of a trace."""

    timestamp: int
    """When it arrived, in milliseconds from the start of the trace."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens of the answer."""
    hash_ids: list[int]
    """One id per block of the prompt, in prefix order.

    Any signed 64-bit integer is an id, negative ones too: ids are names and carry no order.
    """


class TraceError(ValueError):
    """A trace cannot be used; the message starts with the file and the line.

    Attributes
    ----------
    path : str
        The file.
    line : int or None
        The line, counted from 1; None when the whole file is at fault.
    reason : str
        What is wrong with it.
    """

    def __init__(self, path: str, line: int | None, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path = path
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: {self.reason}"


def read_trace(path: str | PathLike[str]) -> list[Request]:
    """Read and check a whole trace.

    Parameters
    ----------
    path : path
        A file of JSON lines, UTF-8. Blank lines are skipped, unknown fields ignored.

    Returns
    -------
    list of Request
        In the order of the file, at least one.

    Raises
    ------
    TraceError
        At the first line that is not UTF-8, not JSON (``NaN`` and ``Infinity`` are none), not an
        object, lacks a field, or whose timestamp or lengths are not integers in 0..2**63-1 or ids
        not integers in -2**63..2**63-1 (true, 1.0 and "1" are no integers); and when there is no
        request at all.
    OSError
        If the file cannot be read.

    Notes
    -----
    Blocks for the whole read; about 15 us a request of 24 blocks.
    """
    requests: list[Request] = []
    name = fspath(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                requests.append(_parse(line))
            except ValueError as error:
                raise TraceError(name, number, str(error)) from None
    if not requests:
        raise TraceError(name, None, "no requests in this trace")
    return requests


def _parse(line: bytes) -> Request:
    """Make a request of one line; ValueError says what is wrong with it."""
    try:
        record = _decode(line.decode().rstrip())
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ValueError(f"not UTF-8: byte {byte:#04x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not a request: nested too deeply") from None
    except ValueError as error:  # a constant, or more digits than the interpreter converts
        raise ValueError(f"not a request: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, not {_shown(record)}")
    return Request(
        _natural(record, "timestamp"),
        _natural(record, "input_length"),
        _natural(record, "output_length"),
        _ids(record),
    )


def _natural(record: dict[str, Any], name: str) -> int:
    value = _field(record, name)
    if type(value) is not int:
        raise ValueError(f"{name}: expected an integer, not {_shown(value)}")
    if value not in _NATURAL:
        reason = "is negative" if value < 0 else "does not fit in 64 bits"
        raise ValueError(f"{name}: {_shown(value)} {reason}")
    return value


def _ids(record: dict[str, Any]) -> list[int]:
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids: expected a list of integers, not {_shown(ids)}")
    if not {int}.issuperset(map(type, ids)):
        stray = next(value for value in ids if type(value) is not int)
        raise ValueError(f"hash_ids: expected integers, found {_shown(stray)}")
    if ids and not (min(ids) in _INT64 and max(ids) in _INT64):
        stray = next(value for value in ids if value not in _INT64)
        raise ValueError(f"hash_ids: {_shown(stray)} does not fit in 64 bits")
    return ids


def _field(record: dict[str, Any], name: str) -> Any:
    try:
        return record[name]
    except KeyError:
        raise ValueError(f"field {name!r} is missing") from None


def _shown(value: object) -> str:
    """Write a value as the trace does, shortened to what fits in a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
