"""What the bytes of a token are: a function of all tokens so far, the layer and the role.

A token of a buffer is so many 64-bit words. Word ``i`` is the scrambled position ``i`` xor a seed,
and the seed scrambles together what the token is and which buffer it is in. So every word differs
from its neighbours, from the same word of another token, layer, role, prefix or tenant, and from
itself moved by a byte; and making it costs one operation, as fast as memory.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.replay.pattern import Words, mix

__all__ = ["BlockContents", "Words", "buffer_seed", "mix", "prefix_states"]


def prefix_states(tokens: ArrayLike, salt: bytes = b"") -> Words:
    """Give a number for each token that depends on it, on all before it, and on where it is.

    Parameters
    ----------
    tokens : sequence of int
        A sequence from its beginning.
    salt : bytes
        Whose sequence it is; another tenant's equal tokens are other ones.

    Returns
    -------
    uint64 array, shape (tokens,)
    """
    ids = np.asarray(tokens).astype(np.int64).view(np.uint64)
    steps = mix(ids ^ mix(np.arange(len(ids), dtype=np.uint64)))
    return mix(np.cumsum(steps, dtype=np.uint64) + _seed(salt))


def buffer_seed(layer_id: int, role: str) -> np.uint64:
    """Give the number of a buffer, with which a token's state is mixed."""
    return _seed(f"{layer_id} {role}".encode())


def _seed(name: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name, digest_size=8).digest(), "little"))


class BlockContents:
    """The bytes of blocks in buffers of one size.

    A block holds its tokens one after another, each in ``size // tokens`` bytes; what is left at
    the end belongs to the last token.

    Parameters
    ----------
    size : int
        Bytes of a block in one buffer.
    tokens : int
        Tokens of a block.
    """

    def __init__(self, size: int, tokens: int) -> None:
        self.size = size
        self.tokens = tokens
        self.token_bytes = size // tokens
        """Bytes of every token but the last one, which may have some more."""
        self._rest = size - tokens * self.token_bytes
        self._positions = mix(np.arange(-(-(self.token_bytes + self._rest) // 8), dtype=np.uint64))

    def fill(self, seeds: Words, out: NDArray[np.uint8]) -> None:
        """Write what blocks hold.

        Parameters
        ----------
        seeds : uint64 array, shape (blocks, tokens)
            Of each token in its buffer.
        out : uint8 array, shape (blocks, size), contiguous and aligned to 8 bytes
            Is written.
        """
        words = self._positions[: -(-self.token_bytes // 8)]
        if not self._rest and self.token_bytes % 8 == 0:
            shaped = out.view(np.uint64).reshape(len(seeds), self.tokens, len(words))
            np.bitwise_xor(words, seeds[:, :, np.newaxis], out=shaped)
            return
        main = self.size - self._rest
        if main:
            made = (words ^ seeds[:, :, np.newaxis]).view(np.uint8)
            out[:, :main] = made[:, :, : self.token_bytes].reshape(len(seeds), main)
        if self._rest:
            last = (self._positions ^ seeds[:, -1:]).view(np.uint8)
            out[:, main:] = last[:, self.token_bytes : self.token_bytes + self._rest]

    def begins(self, token: ArrayLike) -> NDArray[np.int64]:
        """Say at which byte of the block tokens begin; the number of tokens stands for the end."""
        tokens = np.asarray(token, np.int64)
        return tokens * self.token_bytes + np.where(tokens == self.tokens, self._rest, 0)

    def token_at(self, offset: int) -> int:
        """Say which token of the block a byte belongs to."""
        last = self.tokens - 1
        return min(offset // self.token_bytes, last) if self.token_bytes else last

    def seed_of(self, token: NDArray[np.uint8]) -> np.uint64 | None:
        """Tell from a token's bytes which seed they were made of; None where they are too few."""
        if len(token) < 8:
            return None
        return np.uint64(token[:8].copy().view(np.uint64)[0] ^ self._positions[0])
