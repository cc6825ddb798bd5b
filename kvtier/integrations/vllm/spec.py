"""The host tier, as vLLM's configuration names it."""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtier.integrations.vllm.worker import KvtierOffloadingWorker

__all__ = ["KvtierOffloadingSpec"]


class KvtierOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU tier with our memory, our copies and our eviction policy.

    Which chunks there are is still kept by vLLM's own manager, in the scheduler. What is new is
    in the workers: host memory that each has to itself, usable at once and filled in the
    background.

    Parameters
    ----------
    config : OffloadingConfig
        Its ``extra_config`` takes what that of ``CPUOffloadingSpec`` takes, ``cpu_bytes_to_use``
        above all, and ``page_mode`` and ``allow_remote_numa_fallback`` of `hostmem.HostMem`.
        Where it names no ``eviction_policy``, it is `ProspectCachePolicy`.

    Raises
    ------
    ValueError
        ``canonical_layout`` or ``secondary_tiers``, which need memory that processes share.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        if config.canonical_layout or config.extra_config.get("secondary_tiers"):
            raise ValueError(
                "KvtierOffloadingSpec: each worker has its host memory to itself; "
                "canonical_layout and secondary_tiers need spec_name TieringOffloadingSpec"
            )
        super().__init__(config)
        self._ours: KvtierOffloadingWorker | None = None
        if "eviction_policy" not in self.extra_config:
            self.eviction_policy = "ProspectCachePolicy"
            self.cache_policy_module_path = "kvtier.integrations.vllm"

    def _uses_shared_region(self) -> bool:
        return False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker of this process, the first time."""
        if self._ours is None:
            if not self.num_chunks:
                raise ValueError(
                    f"cpu_bytes_to_use: {self.extra_config['cpu_bytes_to_use']} bytes for "
                    f"{self.config.parallel.world_size} workers hold no chunk, which takes "
                    f"{self.kv_bytes_per_chunk} bytes of all of them"
                )
            self._ours = KvtierOffloadingWorker(
                kv_caches,
                self.blocks_per_chunk,
                self.num_chunks,
                page_mode=self.extra_config.get("page_mode"),
                allow_remote_numa_fallback=self.extra_config.get(
                    "allow_remote_numa_fallback", True
                ),
            )
        return self._ours
