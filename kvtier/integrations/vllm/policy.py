"""Our eviction policy in the place of vLLM's LRU and ARC."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvtier.eviction import Prospect

__all__ = ["ProspectCachePolicy"]


class ProspectCachePolicy(CachePolicy):
    """Evicts the chunks that are expected to pay the fewest hits for their room.

    `kvtier.eviction.Prospect` learns from whole requests, and vLLM tells which chunks a request
    has used and added when it has finished. The chunks of a request that goes on are out of its
    hands until then: they go last, those of older requests first, and of each request the end of
    the prompt first.

    Parameters
    ----------
    cache_capacity : int
        Chunks that the cache holds.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget everything, what was learned included."""
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._finished: Prospect[OffloadKey] = Prospect(max(self.cache_capacity, 1))
        self._going_on: dict[OffloadKey, tuple[int, int]] = {}  # lowest first to go
        self._requests: dict[str, int] = {}
        self._used = 0

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Find a chunk."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        """Add a chunk that a request adds."""
        self._chunks[key] = chunk
        position = req_context.get_offload_key_position(key)
        if position is None:
            self._going_on[key] = self._now()
        else:
            began = self._requests.get(req_context.req_id)
            if began is None:
                began = self._requests[req_context.req_id] = self._now()[0]
            self._going_on[key] = began, -position

    def _now(self) -> tuple[int, int]:
        self._used += 1
        return self._used, 0

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk whose store failed."""
        del self._chunks[key]
        if self._going_on.pop(key, None) is None:
            self._finished.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note that chunks are used, in the order of a prefix."""
        keys = list(keys)
        self._finished.touch_many([key for key in keys if key in self._finished])
        for key in reversed(keys):
            if key in self._going_on:
                self._going_on[key] = self._now()

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Learn from what a request has used and added."""
        self._requests.pop(req_context.req_id, None)
        keys = order_request_keys(key_groups, req_context)
        self._finished.touch_many([key for key in keys if key in self._finished])
        added = [key for key in keys if self._going_on.pop(key, None) is not None]
        self._finished.insert_many(added)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Take out ``n`` chunks that nobody uses and that are not protected, or none."""

        def idle(key: OffloadKey) -> bool:
            return self._chunks[key].ref_cnt == 0 and key not in protected

        gone = self._finished.evict(n, idle)
        if gone is None:
            late = sorted(filter(idle, self._going_on), key=self._going_on.__getitem__)
            early = sum(map(idle, self._finished.victims()))
            if early + len(late) < n:
                return None
            gone = [*(self._finished.evict(early, idle) or ()), *islice(late, n - early)]
            for key in gone[early:]:
                del self._going_on[key]
        return [(key, self._chunks.pop(key)) for key in gone]
