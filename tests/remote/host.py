"""A process with a cache over a remote store, which does what it reads: a line, an answer.

python -m tests.remote.host '{"master": "127.0.0.1:50051", ...}'
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
    TierStorage,
)
from kvtier.remote.client import MooncakeClient
from kvtier.remote.names import ObjectNames

PAGE = 256 << 10
MIB = 1 << 20


def content(key: int) -> NDArray[np.uint8]:
    """Say what the block of a key holds."""
    words = np.arange(PAGE // 8, dtype=np.uint64) + np.uint64(key * 1_000_003)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return (words ^ (words >> np.uint64(29))).view(np.uint8)


class Host:
    """The cache and what it can be told to do."""

    def __init__(
        self, master: str, metadata: str, *, gpu: int = 0, host: int = 64, **remote: Any
    ) -> None:
        tiers: list[Any] = [GpuCacheTierConfig(gpu * MIB, gpu * MIB)] if gpu else []
        tiers.append(HostCacheTierConfig(host * MIB, host * MIB))
        remote = {"local_segment": 64 * MIB, "host": "127.0.0.1", "deadline": 5.0, **remote}
        self.tier = RemoteCacheTierConfig(master, metadata, **remote)
        # For what goes past the cache: what it lent would go with it.
        self.guest = RemoteCacheTierConfig(master, metadata, **{**remote, "local_segment": 0})
        layers = [AttentionLayerConfig(0, [BufferConfig("kv", PAGE)])]
        self.config = KVCacheManagerConfig(16, [*tiers, self.tier], layers)
        self.storage = TierStorage(self.config, device="cpu")
        self.cache: BlockCache[int] = BlockCache(self.storage)

    def _page(self, slot: int) -> NDArray[np.uint8]:
        pool: Any = self.storage.levels[0].groups[0].memory.pools[0]
        return np.asarray(pool.memory.view(slot * PAGE, PAGE))

    def compute(self, keys: list[int], wrong: int = 0) -> int:
        """Compute blocks; the bytes may be those of others."""
        with self.cache.reserve(keys) as room:
            room.wait()
            for key, slot in zip(keys, room.slots().tolist(), strict=True):
                self._page(slot)[:] = content(key + wrong)
            room.commit()
        return len(keys)

    def holds(self, keys: list[int], wrong: int = 0) -> bool:
        """Tell whether all blocks are here, every byte as computed."""
        with self.cache.acquire(keys) as lease:
            lease.wait()
            slots = lease.slots().tolist()
            return len(slots) == len(keys) and all(
                bool((self._page(slot) == content(key + wrong)).all())
                for key, slot in zip(keys, slots, strict=True)
            )

    def fetch(self, keys: list[int]) -> int:
        """Prefetch blocks; how many leading ones are here then."""
        self.cache.prefetch(keys).wait()
        return self.cache.match(keys)

    def match(self, keys: list[int]) -> int:
        """Count the leading blocks that are here."""
        return self.cache.match(keys)

    def lookup(self, keys: list[int]) -> int:
        """Count the leading blocks that are here or in the store."""
        return self.cache.lookup(keys)

    def drop(self, keys: list[int]) -> int:
        """Forget blocks here."""
        return self.cache.drop(keys)

    def stats(self) -> dict[str, Any]:
        """Give the figures of the remote level."""
        found = self.storage.stats().remote
        assert found is not None
        return asdict(found)

    def stat(self, name: str) -> Any:
        """Give one of them."""
        return self.stats()[name]

    def settled(self, pages: int) -> bool:
        """Tell whether so many pages have gone out, or are known not to."""
        found = self.stats()
        return bool(found["sent_pages"] + sum(found["unsent"].values()) == pages)

    def overwrite(self, key: int) -> int:
        """Store other bytes under the name of a block, past the cache."""
        client = MooncakeClient(self.guest)
        name = ObjectNames(self.config).name(key, 0)
        size: int = client._store.get_size(name)
        other = np.full(size, 7, np.uint8)
        address = other.__array_interface__["data"][0]
        client.remove([name])
        client.register(address, size)
        (code,) = client.put([name], [[address]], [[size]])
        client.unregister(address)
        client.close()
        return code

    def begin_put(self, keys: list[int]) -> list[int]:
        """Begin to store blocks past the cache, and go no further."""
        self.begun = MooncakeClient(self.guest)
        names = [ObjectNames(self.config).name(key, 0) for key in keys]
        sizes = [PAGE + 32] * len(keys)
        codes: list[int] = self.begun._store.batch_put_session_start(names, sizes, self.begun._how)
        return codes


def main(options: dict[str, Any]) -> None:
    """Obey until told to close."""
    host = Host(**options)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints is not an answer
    answers.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        if order == "close":
            break
        answers.write(json.dumps(getattr(host, order)(*arguments)) + "\n")
    host.storage.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
