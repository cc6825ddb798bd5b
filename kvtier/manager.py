"""The manager: sequences whose blocks are shared, over one cache and its storage."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref

from hostmem import ClosedError
from hostmem.closing import Closable
from hostmem.describing import html_of, notebook, one_line
from hostmem.device import DeviceLike
from kvtier.arguments import whole_number
from kvtier.blocks import BlockCache
from kvtier.config import KVCacheManagerConfig
from kvtier.keys import Tokens, chain_keys, layout_fingerprint
from kvtier.sequence import KVSequence, SequenceTerms
from kvtier.stats import StorageStats
from kvtier.storage import TierStorage

__all__ = ["KVCacheManager"]


class KVCacheManager(Closable):
    """Gives sequences of tokens their pages, and finds again what was computed for a prefix.

    Parameters
    ----------
    config : KVCacheManagerConfig
        Quotas and layers. The first tier is the gpu tier.
    device : int, Device or str
        Whose memory the hot level is in; see `hostmem.HostMem`.
    policy : str
        Eviction policy, a name in `kvtier.eviction.POLICIES`.

    Raises
    ------
    ValueError
        The configuration, or a quota that cannot be had here.
    HostOOMError, DiskOOMError, CuOOMError
        A level could not be built; nothing was kept.
    ImportError
        There is a remote tier, and Mooncake's package is not installed; nothing was kept.

    Notes
    -----
    Every method may be called from any thread. Only `close` waits for copies, and who makes room
    by moving down the partly filled block of a suspended sequence.

    Examples
    --------
    >>> import kvtier
    >>> layer = kvtier.AttentionLayerConfig(0, [kvtier.BufferConfig("kv", 4096)])
    >>> tiers = [kvtier.GpuCacheTierConfig("2MiB"), kvtier.HostCacheTierConfig("4MiB")]
    >>> config = kvtier.KVCacheManagerConfig(16, tiers, [layer])
    >>> prompt = list(range(40))
    >>> with KVCacheManager(config, device="cpu") as manager:
    ...     with manager.create_sequence(prompt) as first:
    ...         first.grow(40)  # then compute into first.page_table()
    ...         first.commit(prompt)
    ...     with manager.create_sequence(prompt) as second:
    ...         second.num_cached_tokens
    32
    """

    def __init__(
        self, config: KVCacheManagerConfig, *, device: DeviceLike = "auto", policy: str = "lru"
    ) -> None:
        config.validate()
        if not config.plan().levels[0].hot:
            raise ValueError(
                f"cache_tiers: the first is {config.cache_tiers[0].tier}, but sequences have their "
                "pages in a gpu tier; where the engine owns those, use BlockCache"
            )
        self.storage = TierStorage(config, device=device, policy=policy)
        """The levels."""
        try:
            self.cache: BlockCache[bytes] = BlockCache(self.storage)
            """The blocks, by the keys that `keys` gives."""
        except BaseException:
            self.storage.close()
            raise
        self._terms = SequenceTerms(
            self.storage,
            self.cache,
            self.storage.plan.groups,
            config.tokens_per_block,
            layout_fingerprint(config),
            config.max_util_for_resume,
        )
        self._lock = threading.Lock()
        self._sequences: weakref.WeakSet[KVSequence] = weakref.WeakSet()
        self._closed = False
        _managers.add(self)

    @property
    def tokens_per_block(self) -> int:
        """Tokens whose keys and values make a block."""
        return self._terms.tokens_per_block

    def keys(self, tokens: Tokens, *, salt: bytes = b"") -> list[bytes]:
        """Give the keys of the full blocks of a sequence, for calls of `cache`.

        Raises
        ------
        ValueError, TypeError
            As `kvtier.keys.chain_keys`.
        """
        terms = self._terms
        return chain_keys(tokens, terms.tokens_per_block, salt=salt, layout=terms.layout)

    def match(self, tokens: Tokens, *, salt: bytes = b"") -> int:
        """Count the leading tokens that a sequence created now would reuse; touches nothing."""
        return self.cache.match(self._reusable(tokens, salt)) * self.tokens_per_block

    def create_sequence(
        self,
        tokens: Tokens = (),
        *,
        salt: bytes = b"",
        priority: int = 0,
        reuse: bool = True,
    ) -> KVSequence:
        """Begin a sequence with the blocks of its prompt that are in the cache.

        They are brought to the hot level, wherever they are. The last token of the prompt is never
        among them: a model needs one to compute what comes next. What follows the
        ``num_cached_tokens`` is for the caller to compute and commit.

        Parameters
        ----------
        tokens : sequence of int or integer array, shape (tokens,)
            The prompt. It is looked up and not kept: nothing but `KVSequence.commit` adds tokens.
        salt : bytes
            Sequences of different salts share nothing: the tenant, the adapter, the weights.
        priority : int
            Blocks of a higher one stay in a level longer.
        reuse : bool
            Whether to look for the prompt; False computes all of it again.

        Raises
        ------
        OutOfPagesError
            The blocks that were found do not fit beside those in use; nothing has changed.
        ValueError, TypeError
            Tokens out of 0..2**63 - 1, or no integers.
        ClosedError
            The manager was closed.
        """
        if not isinstance(salt, bytes):
            raise TypeError(f"salt: bytes are needed, not {type(salt).__name__}")
        priority = whole_number(priority, "priority")
        keys = self._reusable(tokens, salt) if reuse else []
        sequence = KVSequence(self._terms, keys, salt, priority)
        with self._lock:
            if not self._closed:
                self._sequences.add(sequence)
                return sequence
        sequence.close()
        raise ClosedError("the manager was closed, or belongs to the parent of this process")

    def _reusable(self, tokens: Tokens, salt: bytes) -> list[bytes]:
        last = max(len(tokens) - 1, 0) // self.tokens_per_block
        return self.keys(tokens, salt=salt)[:last]

    # ------------------------------------------------------------------------------ inspection

    def stats(self) -> StorageStats:
        """Take the figures of the storage at this moment."""
        return self.storage.stats()

    def describe(self) -> str:
        """Say how full the levels are, for a person."""
        return self.storage.describe()

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), self.stats()._parts())

    @one_line
    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<KVCacheManager of {len(self._sequences)} sequences over {self.storage!r}{state}>"

    # -------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Close every sequence, then the storage. Idempotent; blocks until moves have finished.

        Raises
        ------
        BufferError
            A live view holds the memory of a level; the others are closed. Close again without it.
        """
        with self._lock:
            self._closed = True
            sequences = list(self._sequences)
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            stack.callback(self.storage.close)
            for sequence in sequences:
                stack.callback(sequence.close)

    def _abandon(self) -> None:
        self._lock = threading.Lock()
        self._closed = True
        for sequence in list(self._sequences):
            sequence.abandon()


_managers: weakref.WeakSet[KVCacheManager] = weakref.WeakSet()


def _forked() -> None:
    for manager in list(_managers):
        manager._abandon()


os.register_at_fork(after_in_child=_forked)
