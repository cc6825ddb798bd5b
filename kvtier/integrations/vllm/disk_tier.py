"""Our disk level behind vLLM's host tier: a file of slots, one for each chunk."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
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

from hostmem.units import Size, parse_size
from kvtier.eviction import make_policy
from kvtier.integrations.slot_directory import Entry
from kvtier.integrations.slot_store import SlotStore
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.page_events import PageEvents

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["KvtierDiskTier"]


class _Job:
    """Slots that are being written or read."""

    __slots__ = ("began", "complete", "entries", "events", "is_load")

    def __init__(
        self,
        entries: list[Entry[OffloadKey]],
        events: PageEvents,
        *,
        is_load: bool,
        complete: bool,
    ) -> None:
        self.entries = entries
        self.events = events
        """Of the entries, in their order."""
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
        eviction_policy: str = "prospect",
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        nbytes, chunk = parse_size(quota, "quota"), self.block_size_bytes
        if nbytes < chunk:
            raise ValueError(f"quota: {nbytes} B hold no chunk, which takes {chunk} B")
        self._address = np.asarray(primary_kv_view).__array_interface__["data"][0]
        name, layout = None, b""
        if persist:  # a replica of the engine has a file of its own
            name = f"vllm-{offloading_spec.config.parallel.data_parallel_index}.slots"
            layout = _layout(offloading_spec, chunk)
        slots = nbytes // chunk
        make_policy(eviction_policy)  # an unknown one is told before there is a file
        file = SlotFile(path, chunk, slots, name=name, layout=layout, compression=compression)
        self._slots: SlotStore[OffloadKey] = SlotStore(
            file, eviction_policy, ((slot, OffloadKey(key)) for slot, key in file.restored)
        )
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
        """Start writing the chunks that are not there, the leading ones if not all find room."""
        taken = self._slots.take(list(job_metadata.keys))
        self._note(taken.evicted, removed=True)
        self._submit(job_metadata, taken.entries, is_load=False, complete=taken.complete)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start reading the chunks that are there; the others have failed."""
        held = self._slots.hold(job_metadata.keys)
        complete = len(held) == len(job_metadata.keys)
        self._submit(job_metadata, held, is_load=True, complete=complete)

    def _submit(
        self, asked: TransferJob, entries: list[Entry[OffloadKey]], *, is_load: bool, complete: bool
    ) -> None:
        rows = dict(zip(asked.keys, asked.chunk_ids.tolist(), strict=True))
        addresses = [self._address + rows[e.key] * self.block_size_bytes for e in entries]
        events = (
            self._slots.read(entries, addresses)
            if is_load
            else self._slots.write(entries, addresses, [entry.key for entry in entries])
        )
        self._jobs[asked.job_id] = _Job(entries, events, is_load=is_load, complete=complete)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Give the jobs that have finished since the last call."""
        done = [job_id for job_id, job in self._jobs.items() if job.events.query()]
        return [self._finish(job_id, self._jobs.pop(job_id)) for job_id in done]

    def _finish(self, job_id: int, job: _Job) -> JobResult:
        failures = job.events.failures
        good = [entry for place, entry in enumerate(job.entries) if place not in failures]
        lost = self._slots.settle(job.entries, job.events)
        moved = [entry.key for entry in good]
        if job.is_load:
            self._note([entry.key for entry in lost], removed=True)
        else:
            self._note(moved, removed=False)
        success = job.complete and not failures
        return JobResult(
            job_id,
            success,
            successful_keys=tuple(moved) if job.is_load and not success else None,
            transfer_time=perf_counter() - job.began,
            transfer_bytes=len(moved) * self.block_size_bytes,
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
            job.events.wait_finished()

    def shutdown(self) -> None:
        """Finish what was submitted and close the file. Idempotent."""
        self._slots.close()


def _layout(spec: Any, chunk: int) -> bytes:
    """Name what the bytes of a chunk mean: other things to another model, or another split."""
    config = spec.config
    parallel = config.parallel
    fields = [
        config.model.name, config.model.dtype, config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk, config.kv_cache_layout, config.replicated_layout,
        config.canonical_layout, parallel.tp_size, parallel.pp_size, parallel.pcp_size,
        parallel.dcp_size, chunk,
        [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
    ]  # fmt: skip
    return b"vllm " + blake2b(repr(fields).encode(), digest_size=16).hexdigest().encode()
