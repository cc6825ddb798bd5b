"""Our disk level behind LMCache's host memory: a file of slots, one for each object."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from hostmem import ClosedError
from hostmem.units import align_up, parse_size
from kvtier.eviction import make_policy
from kvtier.integrations.lmcache.object_form import ObjectForm
from kvtier.integrations.lmcache.options import plugin_options
from kvtier.integrations.lmcache.slot_memory import SlotMemory
from kvtier.integrations.slot_directory import Entry
from kvtier.integrations.slot_store import SlotStore
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.page_events import BatchEvent, PageEvents
from kvtier.transfer.slot_io import SlotIOStats
from kvtier.transfer.slot_record import NAME_BYTES
from kvtier.transfer.workers import Workers

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["KvtierDiskBackend"]

log = logging.getLogger("kvtier")

Name = bytes
OnComplete = Callable[["CacheEngineKey"], None]

_PAGE = 4096  # what LMCache aligns objects to, and transfers past the page cache need
_DIGEST = 16
_OPTIONS = (
    "path", "quota", "persist", "compression", "eviction_policy", "chunk_bytes", "max_pending",
)  # fmt: skip


class _Transfer:
    """An object on its way to its slot, or from there."""

    __slots__ = ("entry", "key", "memory", "obj")

    def __init__(
        self, entry: Entry[Name], key: CacheEngineKey, obj: MemoryObj, slot_size: int
    ) -> None:
        self.entry = entry
        self.key = key
        self.obj = obj
        self.memory = SlotMemory(obj, slot_size)


class KvtierDiskBackend(StoragePluginInterface):
    """A storage plugin: one file of slots, past the page cache, with checksums, and evicting.

    What it holds is what was stored until it is full; then objects that nobody reads or has pinned
    give way. An object that cannot be read, or is not what was written, is forgotten: a miss. All
    methods may be called from any thread; a put never waits for the disk.

    Parameters
    ----------
    dst_device, config, metadata, local_cpu_backend, loop
        See ``StoragePluginInterface``. The options, in ``extra_config`` of the configuration:
        ``path`` (an existing directory); ``quota`` (bytes of the file of each worker, or text such
        as ``"200GiB"``, set aside at once); ``persist`` (whether objects are found after a
        restart; false where omitted); ``compression`` (see `kvtier.DiskCacheTierConfig`);
        ``eviction_policy`` (a name in `kvtier.eviction.POLICIES`; ``"prospect"``); ``chunk_bytes``
        (bytes that the largest object has, by LMCache's reckoning where omitted); ``max_pending``
        (bytes of objects that may wait to be written, ``"1GiB"``: more are not stored).

    Raises
    ------
    ValueError
        An option that there is not, or none of ``path`` and ``quota``; a quota that holds no
        object; no ``LocalCPUBackend``; a policy or compression that there is not; a file there of
        another model or layout.
    DiskOOMError, ResourceBusyError, OSError
        As `kvtier.transfer.disk.SlotFile` says.

    Notes
    -----
    LMCache closes its host memory before it closes storage plugins, and frees it under whatever is
    written from there. So closing the ``LocalCPUBackend`` that it was given closes this first.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: LocalCPUBackend | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config is None or metadata is None or local_cpu_backend is None:
            raise ValueError(
                "KvtierDiskBackend: there is no LocalCPUBackend to load into: max_local_cpu_size "
                "must be above 0, and the role not the scheduler's"
            )
        options = plugin_options(
            config.storage_plugins or (), config.extra_config or {}, type(self).__name__, _OPTIONS
        )
        if missing := {"path", "quota"} - set(options):
            raise ValueError(f"KvtierDiskBackend: the option {min(missing)} is missing")
        chunk = parse_size(options.get("chunk_bytes", 0), "chunk_bytes")
        self.slot_size = align_up(chunk or local_cpu_backend.get_full_chunk_size_bytes(), _PAGE)
        quota = parse_size(options["quota"], "quota")
        slots = quota // self.slot_size
        if not slots:
            raise ValueError(f"quota: {quota} B hold no object, which takes {self.slot_size} B")
        pending = parse_size(options.get("max_pending", "1GiB"), "max_pending")
        policy = options.get("eviction_policy", "prospect")
        make_policy(policy)  # an unknown one is told before there is a file
        name, layout = None, b""
        if options.get("persist", False):  # a worker has keys, and a file, of its own
            name = f"lmcache-{metadata.worker_id}.slots"
            layout = _layout(config, metadata, self.slot_size)
        file = SlotFile(
            options["path"], self.slot_size, slots,
            name=name, layout=layout, compression=options.get("compression"),
        )  # fmt: skip
        try:
            there = [(slot, name[:_DIGEST]) for slot, name in file.restored]
            self._slots: SlotStore[Name] = SlotStore(file, policy, there)
            self._forms = {
                name[:_DIGEST]: ObjectForm.decoded(name[_DIGEST:]) for _, name in file.restored
            }
            self._writers = Workers("kvtier-lmcache-put", 1)
            self._readers = Workers("kvtier-lmcache-get", 1)
        except BaseException:
            file.close()  # else its threads and its lock stay
            raise
        self._pins: dict[Name, list[Entry[Name]]] = {}
        self._pending = 0
        self._most_pending = max(pending // self.slot_size, 1)
        self._dropped = 0
        self._too_large = False
        self._closed = False
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        _before_close(local_cpu_backend, self.close)

    def __str__(self) -> str:
        return "KvtierDiskBackend"

    @property
    def dropped(self) -> int:
        """Objects that were not stored, since too many were waiting to be written."""
        return self._dropped

    def stats(self) -> SlotIOStats:
        """Say what was moved and what went wrong so far; also of a closed one."""
        return self._slots.stats()

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """Give the backend whose memory objects are loaded into."""
        return self.local_cpu_backend

    # ------------------------------------------------------------------------------ looking up

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Tell whether an object can be read by now, and keep it there until `unpin`."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """Count the leading objects that can be read by now, and keep them until `unpin`."""
        names = [_name(key) for key in keys]
        found = 0
        with self._lock:
            for name in names:
                if self._closed or not self._slots.ready(name):
                    break
                if pin:
                    self._pins.setdefault(name, []).extend(self._slots.hold([name]))
                found += 1
        return found

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """See `batched_contains`."""
        return self.batched_contains(keys, pin)

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Tell whether an object is being written."""
        with self._lock:
            return self._slots.ready(_name(key)) is False

    def pin(self, key: CacheEngineKey) -> bool:
        """Keep an object until `unpin`, as often as it was pinned; False if it is absent."""
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        """Undo one `pin`; False if there was none."""
        name = _name(key)
        with self._lock:
            pins = self._pins.get(name)
            if not pins:
                return False
            self._slots.release([pins.pop()])
            if not pins:
                del self._pins[name]
        return True

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Forget an object, with its pins; False if it is absent or being written.

        Who reads it goes on doing so. Without ``force`` a pinned one stays.
        """
        name = _name(key)
        with self._lock:
            return self._remove(name) if force or name not in self._pins else False

    def clear(self) -> int:
        """Forget every object that is not pinned or being written; the tokens they had."""
        with self._lock:
            idle = [(name, f.tokens) for name, f in self._forms.items() if name not in self._pins]
            return sum(tokens for name, tokens in idle if self._remove(name))

    def _remove(self, name: Name) -> bool:
        if self._closed or not self._slots.ready(name):
            return False
        self._forget(self._slots.lose(self._slots.hold([name])))
        return True

    def _forget(self, lost: Iterable[Entry[Name]]) -> None:
        for entry in lost:
            self._forms.pop(entry.key, None)
            self._slots.release(self._pins.pop(entry.key, ()))

    # --------------------------------------------------------------------------------- storing

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: OnComplete | None = None,
    ) -> None:
        """Start writing the objects that are not there; each is held until it is written.

        Those that find no room, in the file or among those that wait, are not stored.

        Parameters
        ----------
        keys, objs
            Objects under their keys.
        transfer_spec
            Not used.
        on_complete_callback : callable, optional
            Called with the key of each object that was written, on a thread of ours; what it
            raises is logged.
        """
        wanted: dict[Name, tuple[CacheEngineKey, MemoryObj, ObjectForm]] = {}
        for key, obj in zip(keys, objs, strict=False):  # as LMCache's own
            form = ObjectForm.of(obj)
            if form is not None and self._fits(obj):
                wanted.setdefault(_name(key), (key, obj, form))
        taken = self._take(wanted)
        submitted = False
        try:
            transfers = [_Transfer(e, *wanted[e.key][:2], self.slot_size) for e in taken]
            for transfer in transfers:
                transfer.memory.fill()
            names = [_record(entry.key, wanted[entry.key][2]) for entry in taken]
            with self._lock:
                if transfers and not self._closed:
                    events = self._slots.write(taken, [t.memory.address for t in transfers], names)
                    written = partial(self._written, transfers, events, on_complete_callback)
                    self._writers.put(written)
                    submitted = True
        finally:
            if not submitted:  # closed meanwhile, or no memory for a copy
                with self._lock:
                    self._pending -= len(taken)
                    self._forget(self._slots.lose(taken))
                _let_go(wanted[entry.key][1] for entry in taken)

    def _fits(self, obj: MemoryObj) -> bool:
        if obj.get_size() <= self.slot_size:
            return True
        if not self._too_large:
            self._too_large = True
            log.error(
                "an object of %d bytes is larger than a slot of %d, and so not stored: the option "
                "chunk_bytes must be as large", obj.get_size(), self.slot_size,
            )  # fmt: skip
        return False

    def _take(
        self, wanted: dict[Name, tuple[CacheEngineKey, MemoryObj, ObjectForm]]
    ) -> list[Entry[Name]]:
        """Take slots for objects that are absent, and hold the objects."""
        with self._lock:
            if self._closed:
                return []
            self._slots.touch(wanted)
            absent = [name for name in wanted if self._slots.ready(name) is None]
            room = self._most_pending - self._pending
            self._dropped += len(absent[room:])
            taken = self._slots.take(absent[:room])
            for name in taken.evicted:
                del self._forms[name]
            for entry in taken.entries:
                _, obj, self._forms[entry.key] = wanted[entry.key]
                obj.ref_count_up()
            self._pending += len(taken.entries)
            return taken.entries

    def _written(
        self, transfers: list[_Transfer], events: PageEvents, on_complete: OnComplete | None
    ) -> None:
        events.wait_finished()
        with self._lock:
            self._pending -= len(transfers)
            self._forget(self._slots.settle([t.entry for t in transfers], events))
        for place, transfer in enumerate(transfers):
            transfer.obj.ref_count_down()
            if on_complete is not None and place not in events.failures:
                try:
                    on_complete(transfer.key)
                except Exception:
                    log.exception("the callback of a put failed")

    # --------------------------------------------------------------------------------- loading

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Read an object into host memory; None if it is absent, unreadable, or finds no room."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Read objects into host memory, all at once; None for each that `get_blocking` misses."""
        transfers, events = self._start(keys)
        events.wait_finished()
        return self._read(keys, transfers, events)

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """Read objects into host memory: the leading ones, up to the first that is missed."""
        arrived: asyncio.Future[list[MemoryObj]] = asyncio.get_running_loop().create_future()
        transfers, events = self._start(keys)
        job = partial(self._deliver, keys, transfers, events, arrived)
        with self._lock:
            waits = not self._closed
            if waits:
                self._readers.put(job)
        if not waits:  # closing has waited for the file, and there is nobody to wait here
            job()
        return await arrived

    def get_non_blocking(
        self, key: CacheEngineKey, location: str | None = None
    ) -> Future[MemoryObj | None] | None:
        """Start reading an object; None if it is absent."""
        if self.loop is None or not self.contains(key):
            return None

        async def one() -> MemoryObj | None:
            return next(iter(await self.batched_get_non_blocking("", [key])), None)

        return asyncio.run_coroutine_threadsafe(one(), self.loop)

    def _start(self, keys: list[CacheEngineKey]) -> tuple[list[_Transfer], PageEvents]:
        """Start reading what is there and finds room."""
        assert self.local_cpu_backend is not None
        held: list[tuple[CacheEngineKey, Entry[Name], ObjectForm]] = []
        with self._lock:
            for name, key in {_name(key): key for key in keys}.items():
                for entry in [] if self._closed else self._slots.hold([name]):
                    held.append((key, entry, self._forms[name]))
        transfers, left = [], []
        try:
            for key, entry, form in held:
                # Not waiting for room: who holds it may be waiting for this thread.
                obj = self.local_cpu_backend.allocate(*form.layout(), busy_loop=False)
                if obj is None:
                    left.append(entry)
                else:
                    transfers.append(_Transfer(entry, key, obj, self.slot_size))
            with self._lock:
                events = self._slots.read(
                    [t.entry for t in transfers], [t.memory.address for t in transfers]
                )
                self._slots.release(left)
        except BaseException as error:
            with self._lock:
                self._slots.release(entry for _, entry, _ in held)
            _let_go(transfer.obj for transfer in transfers)
            if not isinstance(error, ClosedError):  # since they were held
                raise
            return [], BatchEvent(0)
        return transfers, events

    def _read(
        self, keys: Sequence[CacheEngineKey], transfers: list[_Transfer], events: PageEvents
    ) -> list[MemoryObj | None]:
        """Give the objects of finished reads, in the places of their keys."""
        failures = events.failures
        with self._lock:
            self._forget(self._slots.settle([t.entry for t in transfers], events))
        found: dict[Name, MemoryObj] = {}
        for place, transfer in enumerate(transfers):
            if place in failures:
                transfer.obj.ref_count_down()
            else:
                transfer.memory.empty()
                found[transfer.entry.key] = transfer.obj
        return [found.pop(_name(key), None) for key in keys]

    def _deliver(
        self,
        keys: list[CacheEngineKey],
        transfers: list[_Transfer],
        events: PageEvents,
        arrived: asyncio.Future[list[MemoryObj]],
    ) -> None:
        events.wait_finished()
        objs = self._read(keys, transfers, events)
        leading = objs.index(None) if None in objs else len(objs)
        _let_go(objs[leading:])

        def settle() -> None:
            if arrived.cancelled():  # nobody waits any more
                _let_go(objs[:leading])
            else:
                arrived.set_result([obj for obj in objs[:leading] if obj is not None])

        try:
            arrived.get_loop().call_soon_threadsafe(settle)
        except RuntimeError:  # the loop was closed
            _let_go(objs[:leading])

    # --------------------------------------------------------------------------------- closing

    def close(self) -> None:
        """Finish what is being written and read, and close the file. Idempotent.

        Blocks until the objects that were being written are free. Later puts do nothing, and gets
        miss.
        """
        with self._lock:
            self._closed = True
        with self._closing:
            self._slots.close()
            self._writers.close()
            self._readers.close()


def _name(key: CacheEngineKey) -> Name:
    # Not its text alone: tags are whatever a request says, and may look like several there.
    fields = (key.to_string(), key.tags)
    return blake2b(repr(fields).encode(), digest_size=_DIGEST).digest()


def _record(name: Name, form: ObjectForm) -> bytes:
    """Name an object in the file; without a name, where that is too long, it does not come back."""
    record = name + form.encoded()
    return record if len(record) <= NAME_BYTES else b""


def _let_go(objs: Iterable[MemoryObj | None]) -> None:
    for obj in objs:
        if obj is not None:
            obj.ref_count_down()


def _before_close(backend: LocalCPUBackend, function: Callable[[], None]) -> None:
    """Have a function called before the memory of this one backend is closed."""
    close = backend.close

    def both() -> None:
        function()
        close()

    backend.close = both


def _layout(config: Any, metadata: Any, slot_size: int) -> bytes:
    """Name what the bytes of an object mean: other things to another model, or another split."""
    fields = [
        metadata.model_name, metadata.world_size, metadata.worker_id, str(metadata.kv_dtype),
        list(metadata.kv_shape), metadata.use_mla, config.chunk_size, config.use_layerwise,
        config.enable_blending, config.pre_caching_hash_algorithm, slot_size,
    ]  # fmt: skip
    return b"lmcache " + blake2b(repr(fields).encode(), digest_size=16).hexdigest().encode()
