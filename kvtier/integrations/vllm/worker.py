"""What moves blocks between vLLM's tensors and our host memory, in the process of the GPU."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from hostmem import HostMem, resolve_device
from hostmem.units import format_size
from kvtier.integrations.vllm.chunk_memory import BlockTensor, ChunkMemory, Places
from kvtier.integrations.vllm.chunk_transfers import ChunkTransfers, behind_torch

__all__ = ["KvtierOffloadingWorker"]

log = logging.getLogger("kvtier")


class KvtierOffloadingWorker(OffloadingWorker):
    """Copies blocks to chunks of host memory and back; every call returns at once but `wait`.

    Parameters
    ----------
    kv_caches : CanonicalKVCaches
        The tensors of this worker, all on one GPU, or all on the CPU.
    blocks_per_chunk, num_chunks : int
        What the scheduler counts in.
    page_mode, allow_remote_numa_fallback
        See `hostmem.HostMem`.

    Raises
    ------
    HostOOMError, PlacementRefusedError, CuError, ValueError
        As `hostmem.HostMem` says, or for tensors that are not of one device.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        num_chunks: int,
        *,
        page_mode: str | None = None,
        allow_remote_numa_fallback: bool = True,
    ) -> None:
        places = {cache.tensor.device for cache in kv_caches.tensors}
        if len(places) != 1 or (place := next(iter(places))).type not in ("cuda", "cpu"):
            raise ValueError(f"kv_caches: on {sorted(map(str, places))}, not on one GPU or the CPU")
        device = resolve_device("cpu" if place.type == "cpu" else place.index)
        self._tensors = [cache.tensor for cache in kv_caches.tensors]  # keeps their memory
        tensors = [
            BlockTensor(
                cache.tensor.data_ptr(),
                cache.tensor.stride(0) * cache.tensor.element_size(),
                cache.page_size_bytes,
            )
            for cache in kv_caches.tensors
        ]
        self._chunks = ChunkMemory(
            tensors,
            [
                [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
                for refs in kv_caches.group_data_refs
            ],
            blocks_per_chunk,
            num_chunks,
            device=device,
            page_mode=page_mode,
            allow_remote_numa_fallback=allow_remote_numa_fallback,
        )
        lent = [one.extent(len(t)) for one, t in zip(tensors, self._tensors, strict=True)]
        self._transfers = ChunkTransfers(self._chunks, device, behind_torch(device, place), lent)
        log.info(
            "KV offloading: %d chunks of %s in host memory, node %s, filled in the background",
            num_chunks, format_size(self._chunks.chunk_bytes), self.memory.node,
        )  # fmt: skip

    @property
    def memory(self) -> HostMem:
        """The host memory; chunk i begins at offset ``i * slot_size``."""
        return self._chunks.memory

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying blocks to chunks, behind what the current stream has been given."""
        self._transfers.store(job_id, self._places(src_spec, dst_spec))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start copying chunks to blocks, behind what the current stream has been given."""
        self._transfers.load(job_id, self._places(dst_spec, src_spec), expedited=expedited)
        return True

    def _places(self, blocks: GPULoadStoreSpec, chunks: Any) -> list[Places]:
        return self._chunks.places(
            blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.block_ids
        )

    def get_finished(self) -> list[TransferResult]:
        """Give the transfers that have ended since the last call."""
        return [
            TransferResult(ended.job, ended.error is None, ended.nbytes, ended.seconds)
            for ended in self._transfers.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Block until transfers have ended."""
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Finish what was submitted, and give the memory back. Idempotent."""
        self._transfers.close()
        self._tensors.clear()
