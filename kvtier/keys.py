"""Keys of blocks: what a block holds and all that precedes it, hashed to 16 bytes.

A key is the hash of the previous block's key and of the block's tokens, so it names the whole
prefix; the first block follows a *root*, the hash of everything else that decides its bytes. Equal
keys therefore mean equal bytes, as far as 128 bits of blake2b go, on every machine and in every
release: keys are stored on disk. They are no secret, and a tenant who cannot guess another's salt
cannot guess its keys.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.layout import group_layouts

if TYPE_CHECKING:
    from kvtier.config import KVCacheManagerConfig

__all__ = [
    "KEY_BYTES",
    "NAME_BYTES",
    "Tokens",
    "chain_keys",
    "decode_key",
    "encode_key",
    "layout_fingerprint",
    "token_ids",
]

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Token ids, each in 0..2**63 - 1."""

KEY_BYTES = 16
"""Length of the keys that `chain_keys` makes."""

NAME_BYTES = 64
"""Length that no encoded key exceeds."""

# A hash with another personalisation is another function: no root equals a key or a fingerprint.
_ROOT = b"kvtier.root.1"
_LAYOUT = b"kvtier.layout.1"

_TOKEN = np.dtype("<i8")  # how a token enters the hash


def chain_keys(
    tokens: Tokens,
    tokens_per_block: int,
    *,
    salt: bytes = b"",
    parent: bytes | None = None,
    layout: bytes = b"",
) -> list[bytes]:
    """Give the keys of the full blocks of a sequence.

    Parameters
    ----------
    tokens : sequence of int or integer array, shape (tokens,)
        Token ids, each in 0..2**63 - 1. What does not fill a block at the end gets no key.
    tokens_per_block : int
        At least 1.
    salt : bytes
        What must not be shared, or does not fit: the tenant, the adapter, the weights.
    parent : bytes, optional
        The key of the block before these, which has salt and layout in it; None: there is none.
    layout : bytes
        What the bytes of a block mean: `layout_fingerprint`.

    Returns
    -------
    list of bytes
        One key of 16 bytes a full block. Those of a prefix are a prefix of those of the whole.

    Raises
    ------
    ValueError
        A token is out of range; ``tokens_per_block`` is below 1; a salt or layout beside a parent,
        or a parent that is no such key.
    TypeError
        Tokens that are no integers.

    Notes
    -----
    A negative id is refused because engines use them as placeholders, which would give different
    contents one name. Contents other than text, such as images, need ids made from their bytes.

    Examples
    --------
    >>> [key.hex() for key in chain_keys([1, 2, 3, 4, 5], 2)]
    ['e5ece8632a6ccff5a436c614a2496749', 'd591a8d60297966f008199f6ca0da446']
    """
    if tokens_per_block < 1:
        raise ValueError(f"tokens_per_block: {tokens_per_block} is below the minimum of 1 token")
    if parent is None:
        # The length of the layout keeps what is between it and the salt from moving.
        start = tokens_per_block.to_bytes(8, "little") + len(layout).to_bytes(8, "little")
        key = blake2b(start + layout + salt, digest_size=KEY_BYTES, person=_ROOT).digest()
    elif salt or layout:
        raise ValueError("salt and layout: the parent has them in it; give them or a parent")
    elif len(parent) != KEY_BYTES:
        raise ValueError(f"parent: {parent!r} is no key of {KEY_BYTES} bytes")
    else:
        key = parent
    data = np.frombuffer(token_ids(tokens), np.int64).astype(_TOKEN, copy=False).tobytes()
    size = tokens_per_block * _TOKEN.itemsize
    keys = []
    for end in range(size, len(data) + 1, size):
        key = blake2b(key + data[end - size : end], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def token_ids(tokens: Tokens) -> array[int]:
    """Check token ids and give a copy of them, as 64-bit integers.

    Raises
    ------
    ValueError
        One is out of 0..2**63 - 1, or the shape is another one.
    TypeError
        They are no integers.
    """
    if isinstance(tokens, (list, tuple)) or not hasattr(tokens, "__array__"):
        if isinstance(tokens, (bytes, bytearray, memoryview, str)):
            raise TypeError(f"tokens: integers are needed, not {type(tokens).__name__}")
        try:
            ids = array("q", tokens)  # three times as fast as numpy is with a list, and exact
        except OverflowError:
            raise ValueError("tokens: one is not in 0..2**63 - 1") from None
    else:  # of numpy, or a tensor
        given = np.asarray(tokens)
        if given.dtype.kind not in "iu":
            raise TypeError(f"tokens: integers are needed, not {given.dtype}")
        if given.ndim != 1:
            raise ValueError(f"tokens: the shape must be (tokens,), not {given.shape}")
        ids = array("q", given.astype(np.int64).tobytes())  # uint64 wraps round to negative
    few = len(ids) < 32  # numpy would take longer to begin
    if ids and (min(ids) if few else np.frombuffer(ids, np.int64).min()) < 0:
        lowest = tokens[ids.index(min(ids))]
        raise ValueError(f"tokens: {lowest} is not in 0..2**63 - 1")
    return ids


def layout_fingerprint(config: KVCacheManagerConfig) -> bytes:
    """Hash what decides what the bytes of a page mean: 16 bytes.

    In it are the tokens of a block and, of each pool group in order, its window, its sink tokens
    and where each layer's buffers lie. Quotas and tiers are not, so blocks outlive a change of
    those; nor are the model's weights and number format, which no configuration names.
    """
    groups = [
        [
            group.sliding_window_size,
            group.num_sink_tokens or 0,
            [
                [pool.slot_size, [[b.layer_id, b.role, b.offset, b.size] for b in pool.buffers]]
                for pool in group.pools
            ],
        ]
        for group in group_layouts(config.layers)
    ]
    text = json.dumps([config.tokens_per_block, groups], separators=(",", ":"))
    return blake2b(text.encode("ascii"), digest_size=KEY_BYTES, person=_LAYOUT).digest()


def encode_key(key: object) -> bytes:
    """Write a key as at most 64 bytes, which `decode_key` reads back.

    Raises
    ------
    TypeError
        It is not bytes, str or int.
    ValueError
        It would take more than 64 bytes, of which one says what it is.
    """
    match key:
        case bytes():
            name = b"b" + key
        case str():
            name = b"s" + key.encode("utf-8")
        case int():
            name = b"i" + key.to_bytes(key.bit_length() // 8 + 1, "big", signed=True)
        case _:
            raise TypeError(f"key: bytes, str or int can be stored, not {type(key).__name__}")
    if len(name) > NAME_BYTES:
        raise ValueError(
            f"key: a {type(key).__name__} of {len(name) - 1} bytes is above the bound of "
            f"{NAME_BYTES - 1} bytes of keys that are stored"
        )
    return name


def decode_key(name: bytes) -> bytes | str | int:
    """Give back the key that `encode_key` wrote; ValueError for anything else."""
    kind, body = name[:1], name[1:]
    key: bytes | str | int
    match kind:
        case b"b":
            key = body
        case b"s":
            key = body.decode("utf-8")
        case b"i":
            key = int.from_bytes(body, "big", signed=True)
        case _:
            raise ValueError(f"name: {name!r} is no key that was written")
    if encode_key(key) != name:
        raise ValueError(f"name: {name!r} is no key that was written")
    return key
