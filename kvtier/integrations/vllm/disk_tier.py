"""Our disk level behind vLLM's host tier: a file of slots, one for each chunk."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from hostmem.device import DONE
from hostmem.units import Size, parse_size
from kvtier.integrations.vllm.slot_directory import SlotDirectory
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import PageEvents

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["KvtierDiskTier"]


class _Job:
    """Slots that are being written or read."""

    __slots__ = ("began", "complete", "events", "is_load", "keys", "others")

    def __init__(
        self, keys: list[OffloadKey], events: PageEvents | None, *, is_load: bool, complete: bool
    ) -> None:
        self.keys = keys
        """Those that are moved."""
        self.events = events
        """Of them, in their order; None for none."""
        self.is_load = is_load
        self.complete = complete
        """Whether they are all that was asked for."""
        self.began = perf_counter()


class KvtierDiskTier(SecondaryTierManager):
    """A secondary tier in one file, past the page cache, with checksums, and evicting.

    What it holds is what was stored until it is full; then chunks that nobody reads give way. A
    chunk that cannot be read, or is not what was written, is forgotten, and its load fails: vLLM
    computes it anew. No call waits for the disk but `drain_jobs` and `shutdown`.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        See ``SecondaryTierManager``.
    path : str
        An existing directory. One tier a directory, unless it does not persist.
    quota : int or str
        Bytes of the file, such as ``"200GiB"``, set aside at once.
    persist : bool
        Whether chunks are found again after a restart, with the same model and layout.
    compression : {"blosc2"}, optional
        See `kvtier.DiskCacheTierConfig`.
    eviction_policy : str
        A name in `kvtier.eviction.POLICIES`.
    enable_kv_events : bool
        Tell which chunks come and go, where KV events are enabled globally.
    locality : {"LOCAL", "REMOTE"}, optional
        Where the directory is, for those events.

    Raises
    ------
    ValueError
        A quota that holds no chunk; a policy or compression that there is not; a file there of
        another model or layout.
    DiskOOMError, ResourceBusyError, OSError
        As `kvtier.transfer.disk.SlotFile` says.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        path: str,
        quota: Size,
        persist: bool = False,
        compression: str | None = None,
        eviction_policy: str = "lru",
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        nbytes, chunk = parse_size(quota, "quota"), self.block_size_bytes
        if nbytes < chunk:
            raise ValueError(f"quota: {nbytes} B hold no chunk, which takes {chunk} B")
        self._address = np.asarray(primary_kv_view).__array_interface__["data"][0]
        self._slots: SlotDirectory[OffloadKey] = SlotDirectory(nbytes // chunk, eviction_policy)
        index = offloading_spec.config.parallel.data_parallel_index if persist else None
        self._file = SlotFile(
            path,
            chunk,
            nbytes // chunk,
            name=f"vllm-{index}.slots" if persist else None,
            layout=_layout(offloading_spec, chunk) if persist else b"",
            compression=compression,
        )
        for slot, name in self._file.restored:
            self._slots.restore(OffloadKey(name), slot)
        self._jobs: dict[int, _Job] = {}
        wanted = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if wanted else None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Tell whether a chunk is in the file, or on its way there."""
        ready = self._slots.ready(key)
        if ready is None:
            return LookupResult.MISS
        return LookupResult.HIT if ready else LookupResult.RETRY

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of chunks; those that are absent are passed over."""
        self._slots.touch(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start writing the chunks that are not there; as many leading ones as there is room for."""
        keys = list(job_metadata.keys)
        chunks = dict(zip(keys, job_metadata.chunk_ids.tolist(), strict=True))
        taken = self._slots.take(keys)
        self._note(taken.evicted, removed=True)
        events = None
        if taken.keys:
            ids = np.array(taken.slots, np.int32)
            events = self._file.write(
                ids, self._addresses([chunks[key] for key in taken.keys]), _AT_ONCE, taken.keys
            )
        self._jobs[job_metadata.job_id] = _Job(
            taken.keys, events, is_load=False, complete=taken.complete
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start reading the chunks that are there; the others have failed."""
        asked = list(job_metadata.keys)
        chunks = dict(zip(asked, job_metadata.chunk_ids.tolist(), strict=True))
        held = self._slots.hold(asked)
        events = None
        if held:
            events = self._file.read(
                np.array([*held.values()], np.int32),
                self._addresses([chunks[key] for key in held]),
                _AT_ONCE,
            )
        self._jobs[job_metadata.job_id] = _Job(
            [*held], events, is_load=True, complete=len(held) == len(asked)
        )

    def _addresses(self, chunks: list[int]) -> NDArray[np.uint64]:
        offsets = np.array(chunks, np.uint64) * np.uint64(self.block_size_bytes)
        return offsets + np.uint64(self._address)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Give the jobs that have finished since the last call."""
        done = [n for n, job in self._jobs.items() if job.events is None or job.events.query()]
        return [self._finish(n, self._jobs.pop(n)) for n in done]

    def _finish(self, job_id: int, job: _Job) -> JobResult:
        failures = {} if job.events is None else job.events.failures
        failed = [key for place, key in enumerate(job.keys) if place in failures]
        good = [key for place, key in enumerate(job.keys) if place not in failures]
        self._slots.release(good)
        gone = self._slots.lose(failed)
        if gone:
            self._file.forget(np.array(gone, np.int32))
        if job.is_load:
            self._note(failed, removed=True)
        else:
            self._note(good, removed=False)
        success = job.complete and not failed
        return JobResult(
            job_id,
            success,
            successful_keys=tuple(good) if job.is_load and not success else None,
            transfer_time=perf_counter() - job.began,
            transfer_bytes=len(good) * self.block_size_bytes,
        )

    def _note(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(
                OffloadingEvent(
                    keys=keys,
                    medium=self.medium,
                    removed=removed,
                    locality=self.locality,
                    ownership=self.tier_type,
                    removal_expected=True,
                )
            )

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Give what came and went since the last call."""
        if self._events is None:
            return []
        taken, self._events = self._events, []
        return taken

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for chunks as they are computed."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Block until nothing is being read or written."""
        for job in self._jobs.values():
            if job.events is not None:
                job.events.wait_finished()

    def shutdown(self) -> None:
        """Finish what was submitted and close the file. Idempotent."""
        self._file.close()


_AT_ONCE = Dependencies((DONE,))


def _layout(spec: Any, chunk: int) -> bytes:
    """Name what the bytes of a chunk mean: to another model, or another split of it, other things."""
    config = spec.config
    parallel = config.parallel
    fields = [
        config.model.name, config.model.dtype, config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk, config.kv_cache_layout, config.replicated_layout,
        config.canonical_layout, parallel.tp_size, parallel.pp_size, parallel.pcp_size,
        parallel.dcp_size, chunk,
        [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
    ]  # fmt: skip
    return b"vllm " + blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest().encode()
