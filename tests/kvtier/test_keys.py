"""Keys of blocks: the same in every release, for every kind of sequence, and only when equal."""

from __future__ import annotations

import doctest
from array import array
from collections.abc import Callable
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    keys,
)
from kvtier.keys import chain_keys, decode_key, encode_key, layout_fingerprint, token_ids

LAST = 2**63 - 1

tokens_of = st.lists(st.integers(0, LAST) | st.integers(0, 3), max_size=40)
sizes = st.integers(1, 9)
salts = st.binary(max_size=20)


# ------------------------------------------------------------------------------ stability


def test_the_example_is_right() -> None:
    assert doctest.testmod(keys).failed == 0


@pytest.mark.parametrize(
    ("tokens", "size", "salt", "layout", "expected"),
    [
        ([7], 1, b"", b"", ["21e7721dbffd3e182e246c4e406e433e"]),
        (
            range(8),
            4,
            b"",
            b"",
            ["c5844024d454e2e666d529b00c43d00a", "f9fec9fecbd1d920883a6262ec417dad"],
        ),
        (
            range(8),
            4,
            b"tenant",
            b"",
            ["93a883827097bf6c3e3b5e85b7042bba", "edd6f5ae8862269751593e1cf6c1e9c2"],
        ),
        (
            range(8),
            4,
            b"",
            b"layout",
            ["600118be120b0e095ca7bb54963993a2", "3747dd4b4c22bac59607e5f2ec676759"],
        ),
        ([LAST, 0, 151_935], 3, b"\0", b"\xff", ["88dd7632d57db0007ef1e68701733c68"]),
    ],
)
def test_keys_are_those_of_every_release(
    tokens: Any, size: int, salt: bytes, layout: bytes, expected: list[str]
) -> None:
    """Stored blocks are found under them: a change here needs another personalisation."""
    found = chain_keys(tokens, size, salt=salt, layout=layout)
    assert [key.hex() for key in found] == expected


@given(tokens_of, sizes, salts, salts)
def test_a_key_is_the_hash_of_its_parent_and_its_tokens(
    tokens: list[int], size: int, salt: bytes, layout: bytes
) -> None:
    """Worked out here token by token, as another program would that reads the files."""
    begin = size.to_bytes(8, "little") + len(layout).to_bytes(8, "little") + layout + salt
    key = blake2b(begin, digest_size=16, person=b"kvtier.root.1").digest()
    expected = []
    for first in range(0, len(tokens) - size + 1, size):
        text = b"".join(token.to_bytes(8, "little") for token in tokens[first : first + size])
        key = blake2b(key + text, digest_size=16).digest()
        expected.append(key)
    assert chain_keys(tokens, size, salt=salt, layout=layout) == expected


# ---------------------------------------------------------------------------- what they name


@given(tokens_of, tokens_of, sizes, salts)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(
    head: list[int], tail: list[int], size: int, salt: bytes
) -> None:
    whole = chain_keys(head + tail, size, salt=salt)
    assert chain_keys(head, size, salt=salt) == whole[: len(head) // size]
    assert len(whole) == len(head + tail) // size


@given(tokens_of, sizes, salts, st.integers(0, 8))
def test_a_chain_goes_on_from_any_key(
    tokens: list[int], size: int, salt: bytes, known: int
) -> None:
    whole = chain_keys(tokens, size, salt=salt)
    known = min(known, len(whole))
    parent = whole[known - 1] if known else None
    rest = chain_keys(
        tokens[known * size :], size, salt=salt if parent is None else b"", parent=parent
    )
    assert whole[:known] + rest == whole


@given(st.lists(st.tuples(tokens_of, sizes, salts, salts), min_size=2, max_size=6))
def test_keys_are_equal_only_where_all_that_precedes_them_is(
    sequences: list[tuple[list[int], int, bytes, bytes]],
) -> None:
    """Whatever the tokens per block, the salt and the layout: nothing moves from one to another."""
    named: dict[bytes, object] = {}
    for tokens, size, salt, layout in sequences:
        for n, key in enumerate(chain_keys(tokens, size, salt=salt, layout=layout), 1):
            meaning = (tuple(tokens[: n * size]), size, salt, layout)
            assert named.setdefault(key, meaning) == meaning
    assert len(set(named.values())) == len(named)


def test_what_adds_up_to_the_same_bytes_is_not_the_same() -> None:
    alike = [
        chain_keys([1, 2], 2, salt=b"ab"),
        chain_keys([1, 2], 2, layout=b"ab"),
        chain_keys([1, 2], 2, salt=b"b", layout=b"a"),
        chain_keys([1, 2], 2),
        chain_keys([1, 2], 1),
        chain_keys([2, 1], 2),
        chain_keys([1 | 2 << 32, 0], 2),
        chain_keys([1, 2, 3], 3),
    ]
    found = list(chain.from_iterable(alike))
    assert len(set(found)) == len(found) == 9


def test_a_block_after_another_one_is_another_block() -> None:
    first, second = chain_keys([1, 2, 1, 2], 2)
    assert first != second


# ------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        lambda ids: array("i", ids),
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, ">u2"),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids * 2, np.int64).reshape(2, -1).T.copy()[:, 0],
        lambda ids: list(np.array(ids, np.int16)),
    ],
    ids=["tuple", "array", "int32", "int64", "big endian", "uint64", "strided", "numpy scalars"],
)
def test_every_kind_of_sequence_gives_the_same_keys(kind: Callable[[list[int]], Any]) -> None:
    ids = [5, 0, 32_000, 7, 8]
    assert chain_keys(kind(ids), 2) == chain_keys(ids, 2)
    assert token_ids(kind(ids)).tolist() == ids


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int32), np.zeros(0, np.uint8), [3]])
def test_what_fills_no_block_has_no_key(empty: Any) -> None:
    assert chain_keys(empty, 2) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [0, -1],
        [0, 2**63],
        [0, -(2**63) - 1],
        [2**200],
        np.array([3, -1], np.int8),
        np.array([2**63], np.uint64),
    ],
)
def test_a_token_out_of_range_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"^tokens: .*not in 0\.\.2\*\*63 - 1$"):
        chain_keys(tokens, 2)


def test_the_token_that_is_refused_is_named() -> None:
    for tokens in ([4, -7, 5], np.array([4, -7, 5])):
        with pytest.raises(ValueError, match="tokens: -7 is not"):
            chain_keys(tokens, 2)
    with pytest.raises(ValueError, match="tokens: 9223372036854775808 is not"):
        chain_keys(np.array([4, 2**63], np.uint64), 2)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        ["1"],
        "12",
        b"12345678",
        bytearray(8),
        memoryview(bytes(8)),
        array("d", [1.0]),
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([2**70]),
        [[1, 2]],
        3,
        None,
    ],
)
def test_what_is_no_integer_is_refused(tokens: Any) -> None:
    """Rounding it, or reading bytes as eight tokens, would name blocks that nobody asked about."""
    with pytest.raises(TypeError):
        chain_keys(tokens, 2)


def test_a_table_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens: the shape must be \(tokens,\), not \(1, 2\)"):
        chain_keys(np.array([[1, 2]]), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block: 0 is below the minimum of 1"),
        ({"parent": bytes(16), "salt": b"x"}, "salt and layout: the parent has them"),
        ({"parent": bytes(16), "layout": b"x"}, "salt and layout: the parent has them"),
        ({"parent": b"short"}, "parent: b'short' is no key of 16 bytes"),
    ],
)
def test_a_chain_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_keys([1, 2], **{"tokens_per_block": 2, **options})


# --------------------------------------------------------------------------------- layouts


def config(**changes: Any) -> KVCacheManagerConfig:
    layers = [
        AttentionLayerConfig(0, [BufferConfig("key", 4096), BufferConfig("value", 4096)]),
        AttentionLayerConfig(1, [BufferConfig("key", 2048)], sliding_window_size=64),
    ]
    given: dict[str, Any] = {
        "tokens_per_block": 16,
        "cache_tiers": [GpuCacheTierConfig("4MiB")],
        "layers": layers,
    }
    return KVCacheManagerConfig(**{**given, **changes})


def test_the_fingerprint_is_that_of_every_release() -> None:
    text = (
        '[16,[[null,0,[[8192,[[0,"key",0,4096],[0,"value",4096,4096]]]]],'
        '[64,0,[[2048,[[1,"key",0,2048]]]]]]]'
    )
    expected = blake2b(text.encode(), digest_size=16, person=b"kvtier.layout.1")
    assert layout_fingerprint(config()) == expected.digest()
    assert expected.hexdigest() == "80501d6e49c8e526dcfbed12c01b0b04"


def test_a_fingerprint_does_not_depend_on_the_quotas() -> None:
    tiers = [GpuCacheTierConfig("32MiB"), HostCacheTierConfig("1GiB")]
    other = config(cache_tiers=tiers, initial_pool_ratio=[1, 2], max_util_for_resume=0.5)
    assert layout_fingerprint(other) == layout_fingerprint(config())


def test_no_sinks_and_zero_sinks_are_the_same_layout() -> None:
    def one(sinks: int | None) -> KVCacheManagerConfig:
        return config(layers=[AttentionLayerConfig(0, [BufferConfig("kv", 64)], 32, sinks)])

    assert layout_fingerprint(one(None)) == layout_fingerprint(one(0)) != layout_fingerprint(one(4))


def test_a_fingerprint_tells_apart_whatever_moves_a_byte() -> None:
    def one(*buffers: BufferConfig, layer: int = 0, **more: Any) -> KVCacheManagerConfig:
        return config(layers=[AttentionLayerConfig(layer, buffers, **more)])

    key, value = BufferConfig("key", 64), BufferConfig("value", 64)
    layers = config().layers
    different = [
        config(),
        config(tokens_per_block=32),
        config(layers=layers[::-1]),
        config(layers=layers[:1]),
        one(key, value),
        one(value, key),
        one(key),
        one(value),
        one(key, value, layer=1),
        one(key, value, sliding_window_size=128),
        one(key, value, sliding_window_size=64),
        one(key, value, sliding_window_size=64, num_sink_tokens=4),
        one(key, BufferConfig("value", 128)),
        one(BufferConfig("schlüssel", 64)),
    ]
    assert len({layout_fingerprint(one_of) for one_of in different}) == len(different)


# ----------------------------------------------------------------------------------- names


any_key = (
    st.binary(max_size=63)
    | st.text(max_size=15)
    | st.integers(-1000, 1000)
    | st.integers(1 - 2**503, 2**503 - 1)
)


@given(any_key, any_key)
def test_a_key_comes_back_from_its_name(key: bytes | str | int, other: bytes | str | int) -> None:
    name = encode_key(key)
    assert len(name) <= 64
    assert decode_key(name) == key
    assert type(decode_key(name)) is type(key)
    assert (encode_key(other) == name) == (other == key)


def test_names_are_those_of_every_release() -> None:
    known = [b"\x01\x02", "é", 0, 127, 128, -128, -129, 2**503 - 1]
    assert [encode_key(key) for key in known] == [
        b"b\x01\x02",
        b"s\xc3\xa9",
        b"i\x00",
        b"i\x7f",
        b"i\x00\x80",
        b"i\xff\x80",
        b"i\xff\x7f",
        b"i\x7f" + b"\xff" * 62,
    ]


def test_a_truth_is_the_number_it_equals() -> None:
    """Both find the same block in a dictionary."""
    assert decode_key(encode_key(True)) == 1


@pytest.mark.parametrize("key", [bytes(64), "é" * 32, 2**503, -(2**503)])
def test_a_key_that_is_too_long_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"above the bound of 63"):
        encode_key(key)


@pytest.mark.parametrize("key", [None, 1.0, (1, 2), bytearray(2), frozenset()])
def test_a_key_of_another_kind_is_refused(key: object) -> None:
    with pytest.raises(TypeError, match="bytes, str or int can be stored"):
        encode_key(key)


@pytest.mark.parametrize("name", [b"", b"x1", b"s\xff", b"i", b"i\x00\x01", b"b" + bytes(64)])
def test_a_name_that_was_never_written_is_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match=r"name|key|utf-8"):
        decode_key(name)
