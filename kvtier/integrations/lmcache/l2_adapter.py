"""Our disk level behind LMCache's multi-process server: a file of slots, one for each object."""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from hostmem import ClosedError
from hostmem.units import align_up, parse_size
from kvtier.eviction import make_policy
from kvtier.integrations.lmcache.slot_memory import SlotMemory
from kvtier.integrations.slot_directory import Entry
from kvtier.integrations.slot_store import SlotStore
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.page_events import PageEvents
from kvtier.transfer.workers import Workers

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["KvtierL2Adapter"]

log = logging.getLogger("kvtier")

Name = bytes

_DIGEST = 16
_SIZE = struct.Struct("<Q")
_OPTIONS = ("path", "quota", "chunk_bytes", "persist", "compression", "eviction_policy")
_NEEDED = ("path", "quota", "chunk_bytes")


class KvtierL2Adapter(L2AdapterInterface):
    """An L2 adapter in one file, past the page cache, with checksums, and evicting.

    What it holds is what was stored until it is full; then objects that nobody reads or has locked
    give way, and the listeners are told. An object that cannot be read, or is not what was
    written, is forgotten, and its bit is 0. No call waits for the disk but `close`; all may be
    made from any thread.

    Parameters
    ----------
    params : mapping
        ``adapter_params`` of the configuration: ``path`` (an existing directory), ``quota`` (bytes
        of the file, or text such as ``"200GiB"``, set aside at once), ``chunk_bytes`` (bytes that
        the largest object has); ``persist`` (whether objects are found after a restart; false
        where omitted), ``compression`` and ``eviction_policy`` (see `kvtier.DiskCacheTierConfig`
        and `kvtier.eviction.POLICIES`).
    l1_memory_desc : L1MemoryDesc, optional
        Not used: any memory is read and written.

    Raises
    ------
    ValueError
        An option that there is not, or one that is missing; a quota that holds no object; a policy
        or compression that there is not; a file there with another ``chunk_bytes``.
    DiskOOMError, ResourceBusyError, OSError
        As `kvtier.transfer.disk.SlotFile` says.
    """

    def __init__(
        self, params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        if strange := sorted(set(params) - set(_OPTIONS)):
            raise ValueError(f"there is no option {strange[0]}; known are {', '.join(_OPTIONS)}")
        if missing := [option for option in _NEEDED if option not in params]:
            raise ValueError(f"KvtierL2Adapter: the option {missing[0]} is missing")
        self.slot_size = align_up(parse_size(params["chunk_bytes"], "chunk_bytes"), 4096)
        quota = parse_size(params["quota"], "quota")
        slots = quota // self.slot_size if self.slot_size > 0 else 0
        if slots < 1:
            raise ValueError(f"quota: {quota} B hold no object, which takes {self.slot_size} B")
        policy = params.get("eviction_policy", "prospect")
        make_policy(policy)  # an unknown one is told before there is a file
        super().__init__(slots * self.slot_size)
        file = SlotFile(
            params["path"], self.slot_size, slots,
            name="lmcache-l2.slots" if params.get("persist", False) else None,
            layout=b"lmcache l2", compression=params.get("compression"),
        )  # fmt: skip
        there = [(slot, record[:_DIGEST]) for slot, record in file.restored]
        self._slots: SlotStore[Name] = SlotStore(file, policy, there)
        self._sizes: dict[Name, int] = {}
        for _, record in file.restored:
            (self._sizes[record[:_DIGEST]],) = _SIZE.unpack_from(record, _DIGEST)
        self._keys: dict[Name, ObjectKey] = {}
        self._locks: dict[Name, list[Entry[Name]]] = {}
        self._tasks = count()
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups: dict[int, Bitmap] = {}
        self._loads: dict[int, Bitmap] = {}
        self._closed = False
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._writers = Workers("kvtier-lmcache-store", 1)
        self._readers = Workers("kvtier-lmcache-load", 1)
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._store_fd, self._lookup_fd, self._load_fd = (os.eventfd(0, flags) for _ in range(3))

    def get_store_event_fd(self) -> int:
        """Give the descriptor that is readable when a store has finished."""
        return self._store_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Give the descriptor that is readable when a lookup has finished."""
        return self._lookup_fd

    def get_load_event_fd(self) -> int:
        """Give the descriptor that is readable when a load has finished."""
        return self._load_fd

    # --------------------------------------------------------------------------------- storing

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start writing the objects that are not there.

        The task fails if not all of them find room or can be written; those that do are there.
        """
        wanted = {
            _name(key): (key, obj)
            for key, obj in zip(keys, objects, strict=True)
            if obj.get_size() <= self.slot_size
        }
        with self._lock:
            self._check_open()
            taken = self._slots.take(list(wanted))
            gone = self._drop(taken.evicted)
            for entry in taken.entries:
                key, obj = wanted[entry.key]
                self._keys[entry.key], self._sizes[entry.key] = key, obj.get_size()
            names = [entry.key + _SIZE.pack(self._sizes[entry.key]) for entry in taken.entries]
        self._tell_deleted(gone)
        complete = taken.complete and len(wanted) == len(set(map(_name, keys)))
        submitted = False
        try:
            memories = [SlotMemory(wanted[e.key][1], self.slot_size) for e in taken.entries]
            for memory in memories:
                memory.fill()
            with self._lock:
                self._check_open()
                task = next(self._tasks)
                events = self._slots.write(taken.entries, [m.address for m in memories], names)
                self._writers.put(
                    partial(self._stored, task, taken.entries, memories, events, complete)
                )
                submitted = True
        finally:
            if not submitted:  # closed meanwhile, or no memory for a copy
                with self._lock:
                    self._drop(entry.key for entry in self._slots.lose(taken.entries))
        return task

    def _stored(
        self,
        task: int,
        entries: list[Entry[Name]],
        memories: list[SlotMemory],  # which must live until here
        events: PageEvents,
        complete: bool,
    ) -> None:
        events.wait_finished()
        failures = events.failures
        with self._lock:
            good = [entry.key for place, entry in enumerate(entries) if place not in failures]
            stored = [(self._keys[name], self._sizes[name]) for name in good]
        if stored:  # told before they can be found and give way, which is told, too
            known, sizes = [key for key, _ in stored], [size for _, size in stored]
            _tell(partial(self._notify_keys_stored, known, sizes))
        nbytes = sum(size for _, size in stored)
        with self._lock:
            self._drop(entry.key for entry in self._slots.settle(entries, events))
            self._stores[task] = L2StoreResult(complete and not failures, nbytes)
        os.eventfd_write(self._store_fd, 1)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Give the stores that have finished since the last call."""
        with self._lock:
            done, self._stores = self._stores, {}
        return done

    # ------------------------------------------------------------------------------ looking up

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look objects up, and keep each that is there until `submit_unlock`."""
        found, back = Bitmap(len(keys)), []
        with self._lock:
            self._check_open()
            for place, key in enumerate(keys):
                name = _name(key)
                if held := self._slots.hold([name]):
                    self._locks.setdefault(name, []).extend(held)
                    found.set(place)
                    if name not in self._keys:  # since a restart: LMCache knows of it from now on
                        self._keys[name] = key
                        back.append((key, self._sizes[name]))
            task = next(self._tasks)
            self._lookups[task] = found
        if back:
            self._notify_keys_stored([key for key, _ in back], [size for _, size in back])
        with self._lock:
            if self._lookup_fd >= 0:  # else closed meanwhile
                os.eventfd_write(self._lookup_fd, 1)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Say which objects of a lookup were there, once."""
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Undo one lock of each object; those that are not locked are passed over."""
        with self._lock:
            for name in map(_name, keys):
                if locks := self._locks.get(name):
                    self._slots.release([locks.pop()])
                    if not locks:
                        del self._locks[name]

    # --------------------------------------------------------------------------------- loading

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start reading the objects that are there, into memory that has as many bytes."""
        held: dict[Name, tuple[int, Entry[Name], SlotMemory]] = {}
        with self._lock:
            self._check_open()
            for place, (key, obj) in enumerate(zip(keys, objects, strict=True)):
                name = _name(key)
                fits = self._sizes.get(name, 0) <= obj.get_size() <= self.slot_size
                if name in held or not fits:
                    continue
                if self._slots.ready(name):
                    memory = SlotMemory(obj, self.slot_size)  # first: it may find no memory
                    (entry,) = self._slots.hold([name])
                    held[name] = (place, entry, memory)
            task = next(self._tasks)
            entries = [entry for _, entry, _ in held.values()]
            events = self._slots.read(entries, [memory.address for _, _, memory in held.values()])
            self._readers.put(partial(self._loaded, task, keys, list(held.values()), events))
        return task

    def _loaded(
        self,
        task: int,
        keys: list[ObjectKey],
        held: list[tuple[int, Entry[Name], SlotMemory]],
        events: PageEvents,
    ) -> None:
        events.wait_finished()
        found = Bitmap(len(keys))
        good = [
            (place, memory) for n, (place, _, memory) in enumerate(held) if n not in events.failures
        ]
        with self._lock:
            lost = self._slots.settle([entry for _, entry, _ in held], events)
            gone = self._drop(entry.key for entry in lost)
        for place, memory in good:
            memory.empty()
            found.set(place)
        _tell(partial(self._tell_deleted, gone))
        if good:
            _tell(partial(self._notify_keys_accessed, [keys[place] for place, _ in good]))
        with self._lock:
            self._loads[task] = found
        os.eventfd_write(self._load_fd, 1)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Say which objects of a load have come, once; None while it goes on."""
        with self._lock:
            return self._loads.pop(task_id, None)

    # --------------------------------------------------------------------------------- removal

    def delete(self, keys: list[ObjectKey]) -> None:
        """Forget objects, with their locks; those that are absent are passed over."""
        with self._lock:
            self._check_open()
            lost = self._slots.lose(self._slots.hold(map(_name, keys)))
            gone = self._drop(entry.key for entry in lost)
        self._tell_deleted(gone)

    def _drop(self, names: Iterable[Name]) -> list[tuple[ObjectKey, int]]:
        """Forget what is known of objects that are gone; those that LMCache was told of."""
        gone = []
        for name in names:
            self._slots.release(self._locks.pop(name, ()))
            key, size = self._keys.pop(name, None), self._sizes.pop(name)
            if key is not None:
                gone.append((key, size))
        return gone

    def _tell_deleted(self, gone: list[tuple[ObjectKey, int]]) -> None:
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the L2 adapter was closed")

    def report_status(self) -> dict[str, Any]:
        """Say how many objects there are, and what went wrong so far."""
        stats = self._slots.stats()
        return {
            "is_healthy": not self._closed,
            "type": type(self).__name__,
            "objects": len(self._slots),
            "write_failures": stats.write_failures,
            "read_failures": stats.read_failures,
            "corrupt": stats.corrupt,
        }

    def close(self) -> None:
        """Finish what is being written and read, and close the file. Idempotent."""
        with self._lock:
            self._closed = True
        with self._closing:
            self._slots.close()
            self._writers.close()
            self._readers.close()
            with self._lock:  # nobody is writing to one
                fds = (self._store_fd, self._lookup_fd, self._load_fd)
                self._store_fd = self._lookup_fd = self._load_fd = -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)


def _tell(listeners: Callable[[], None]) -> None:
    """Call listeners on a thread of ours, which must finish the task whatever they raise."""
    try:
        listeners()
    except Exception:
        log.exception("a listener of the L2 adapter failed")


def _name(key: ObjectKey) -> Name:
    fields = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash)
    return blake2b(repr(fields).encode(), digest_size=_DIGEST).digest()
