"""What moves blocks between vLLM's tensors and our host memory, in the process of the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from hostmem import CudaDevice, Event, HostMem, Stream, resolve_device
from hostmem.device import DONE
from hostmem.units import format_size
from kvtier.integrations.vllm.chunk_memory import BlockTensor, ChunkMemory, Places
from kvtier.transfer.jobs import Dependencies, TransferEvent
from kvtier.transfer.lane import Lane, Which

__all__ = ["KvtierOffloadingWorker"]

log = logging.getLogger("kvtier")


class _Job:
    """A transfer under way."""

    __slots__ = ("began", "event", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.began = perf_counter()
        """Of its copies, once they are submitted: what it waits for before is no transfer."""
        self.event: TransferEvent


class KvtierOffloadingWorker(OffloadingWorker):
    """Copies blocks to chunks of host memory and back; every call returns at once but `wait`.

    A store into a chunk whose memory is not committed yet waits for it on a thread of its own.

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
            raise ValueError(f"kv_caches: on {sorted(map(str, places))}, not on one GPU, or the CPU")
        self._place = place
        self._device = resolve_device("cpu" if place.type == "cpu" else place.index)
        self._rows = [_rows(cache) for cache in kv_caches.tensors]  # keeps their memory
        self._chunks = ChunkMemory(
            [
                BlockTensor(rows.data_ptr(), rows.stride(0), cache.page_size_bytes)
                for rows, cache in zip(self._rows, kv_caches.tensors, strict=True)
            ],
            [
                [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
                for refs in kv_caches.group_data_refs
            ],
            blocks_per_chunk,
            num_chunks,
            device=self._device,
            page_mode=page_mode,
            allow_remote_numa_fallback=allow_remote_numa_fallback,
        )
        self._jobs: dict[int, _Job] = {}
        self._lanes: list[Lane] = []
        try:
            for name in ("store", "load", "expedited"):
                self._lanes.append(Lane(self._device, f"kvtier-vllm-{name}"))
        except BaseException:
            self.shutdown()
            raise
        self._store, self._load, self._expedited = self._lanes
        log.info(
            "KV offloading: %d chunks of %s in host memory on node %s, filled in the background",
            num_chunks, format_size(self._chunks.chunk_bytes), self.memory.node,
        )  # fmt: skip

    @property
    def memory(self) -> HostMem:
        """The host memory: chunk i begins at offset ``i * slot_size``."""
        return self._chunks.memory

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start copying blocks to chunks, behind what the current stream has been given."""
        return self._submit(job_id, self._store, src_spec, dst_spec, to_host=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start copying chunks to blocks, behind what the current stream has been given."""
        lane = self._expedited if expedited else self._load
        return self._submit(job_id, lane, dst_spec, src_spec, to_host=False)

    def _submit(
        self,
        job_id: int,
        lane: Lane,
        blocks: GPULoadStoreSpec,
        chunks: CPULoadStoreSpec,
        *,
        to_host: bool,
    ) -> bool:
        places = self._chunks.places(
            blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.chunk_ids
        )
        job = _Job(self._chunks.nbytes(places))
        after = Dependencies((self._computed(),))
        job.event = lane.submit(self._copy(job, places, to_host=to_host), 1, after)
        self._jobs[job_id] = job
        return True

    def _computed(self) -> Event:
        """Give an event of all that the engine's current stream has been given."""
        if not isinstance(self._device, CudaDevice):
            return DONE
        import torch

        return self._device.event(torch.cuda.current_stream(self._place).cuda_stream)

    def _copy(
        self, job: _Job, places: Sequence[Places], *, to_host: bool
    ) -> Callable[[Which, Stream], None]:
        def copy(which: Which, stream: Stream) -> None:
            plan = self._chunks.plan(places, to_host=to_host)
            job.began = perf_counter()
            if plan is not None:
                stream.copy(plan.destinations, plan.sources, plan.sizes)

        return copy

    def get_finished(self) -> list[TransferResult]:
        """Give the transfers that have finished since the last call, in order of submission.

        Their seconds end when this is called: copies that ended earlier look slower than they were.
        """
        results = []
        for job_id, job in [*self._jobs.items()]:
            if not job.event.query():
                continue
            del self._jobs[job_id]
            if (error := job.event.error) is not None:
                log.error("KV offloading: transfer %d failed: %s", job_id, error)
            seconds = perf_counter() - job.began
            results.append(TransferResult(job_id, error is None, job.nbytes, seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Block until transfers have finished, well or not."""
        for job in [self._jobs[n] for n in job_ids if n in self._jobs]:
            job.event.wait_finished()

    def shutdown(self) -> None:
        """Finish what was submitted, and give the memory back. Idempotent."""
        for lane in self._lanes:
            lane.close()
        self._jobs.clear()
        self._chunks.close()
        self._rows.clear()


def _rows(cache: CanonicalKVCacheTensor) -> Any:
    """View a tensor as bytes, the page of each block in a row."""
    import torch

    return cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
