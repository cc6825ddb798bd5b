"""LMCache's memory objects over a `HostMem` that may still be filling."""

from __future__ import annotations

import logging
import threading
from typing import Any

from lmcache import torch_dev
from lmcache.utils import get_size_bytes
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import (
    AddressManager,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from hostmem import HostMem, HostmemError
from kvtier.integrations.lmcache.slot_addresses import SlotAddresses

__all__ = ["HostMemPool"]

log = logging.getLogger("kvtier")


class HostMemPool(TensorMemoryAllocator):
    """Objects in a `HostMem`, which it closes when it has been closed and the last one is free.

    An object's bytes are a view of the memory: they are waited for where the fill has not come so
    far, and stay as long as anybody holds a tensor over them. No lock is held while waiting. All
    methods may be called from any thread.

    Parameters
    ----------
    memory : HostMem
        Its ``slot_size`` bounds the objects, each of which is inside one slot.
    align_bytes : int
        What places and sizes of objects are multiples of.

    Raises
    ------
    ValueError
        A memory of no slot, or whose slots or address are not so aligned.
    """

    def __init__(self, memory: HostMem, align_bytes: int = AddressManager.ALIGN_BYTES) -> None:
        import torch

        if not memory.size or memory.slot_size % align_bytes or memory.address % align_bytes:
            raise ValueError(
                f"memory: {memory.size} bytes at {memory.address:#x} in slots of "
                f"{memory.slot_size} bytes; one slot at least is needed, and slots that are "
                f"multiples of {align_bytes} bytes and hold the largest object"
            )
        self._nothing = torch.empty(0, dtype=torch.uint8)
        super().__init__(self._nothing, align_bytes, memory.slot_size)
        self.address_manager = SlotAddresses(memory.size, align_bytes, memory.slot_size)
        self._memory: HostMem | None = memory
        self._base = memory.address
        self._lock = threading.Lock()
        self._closed = False
        self._told = False

    @property
    def memory(self) -> HostMem | None:
        """The memory; None once it was given back."""
        return self._memory

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> TensorMemoryObj | None:
        """Make one object; None if there is no room. See `batched_allocate`."""
        made = self.batched_allocate(shapes, dtypes, 1, fmt)
        return None if made is None else made[0]

    def batched_allocate(
        self,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[TensorMemoryObj] | None:
        """Make objects of one shape, all or none.

        Blocks for as long as the fill takes to reach them, if it has not.

        Returns
        -------
        list of TensorMemoryObj, or None
            None if there is no room, if the memory there could not be had, or after `close`.

        Raises
        ------
        ValueError
            Objects of no bytes, or of more than a slot, where the memory has as many.
        """
        shapes, dtypes = self._adapt_shapes_and_dtypes(shapes, dtypes)
        nbytes = get_size_bytes(shapes, dtypes)
        if self.address_manager.slot_size < nbytes <= self.address_manager.get_heap_size():
            # None would have LMCache evict everything and ask again.
            raise ValueError(
                f"an object of {nbytes} bytes is larger than a slot, which has "
                f"{self.address_manager.slot_size}: a larger slot_size is needed"
            )
        with self._lock:
            memory = None if self._closed else self._memory
            if memory is None:
                return None
            try:
                blocks = self.address_manager.batched_allocate(nbytes, batch_size)
            except RuntimeError:
                return None
            self.num_active_allocations += batch_size
        try:
            objects = [
                self._object(memory, start, nbytes, size, shapes, dtypes, fmt)
                for start, size in blocks
            ]
        except BaseException as error:
            self._give_back(blocks)
            if not isinstance(error, (HostmemError, OSError)):
                raise
            self._tell(error)
            return None
        self._count()
        return objects

    def _object(
        self,
        memory: HostMem,
        start: int,
        nbytes: int,
        size: int,
        shapes: list[Any],
        dtypes: list[Any],
        fmt: MemoryFormat,
    ) -> TensorMemoryObj:
        import torch

        data = torch.from_numpy(memory.view(start, nbytes))
        meta = MemoryObjMetadata(
            shapes[0], dtypes[0], start, size, 1, fmt=fmt, shapes=shapes, dtypes=dtypes
        )
        # LMCache's mixed allocator, in front of this, makes itself the parent. One that is dropped
        # before, since others of its batch could not be had, frees nothing.
        return TensorMemoryObj(data, meta, None)

    def _give_back(self, blocks: list[tuple[int, int]]) -> None:
        with self._lock:
            for start, size in blocks:
                self.address_manager.free(start, size)
            self.num_active_allocations -= len(blocks)
            last = self._closed and not self.num_active_allocations
        if last:
            self._release()

    def _tell(self, error: BaseException) -> None:
        if not self._told:
            self._told = True
            log.error("LMCache's host memory ends where its fill did: %s", str(error))

    def _count(self) -> None:
        self.stats_monitor.update_local_cache_usage(self.total_allocated_size)
        self.stats_monitor.update_active_memory_objs_count(self.num_active_allocations)

    def free(self, memory_obj: MemoryObj, allocator_type: str | None = None) -> None:
        """Take an object back; one that is free already is left alone.

        Raises
        ------
        ValueError
            It is not from here.
        """
        with self._lock:
            if not memory_obj.is_valid():
                return
            if memory_obj.data_ptr != self._base + memory_obj.meta.address:
                raise ValueError(f"the object at {memory_obj.data_ptr:#x} is not of this memory")
            super().free(memory_obj)
            # Who looks at its bytes all the same finds none, instead of another's, and an object
            # that somebody forgot does not keep the memory.
            memory_obj.raw_data = self._nothing
            last = self._closed and not self.num_active_allocations
        if last:
            self._release()

    def batched_free(
        self,
        memory_objs: list[MemoryObj],
        allocator_type: str | None = None,
        update_stats: bool = True,
    ) -> None:
        """Take objects back, each as `free` does; also those behind one that is not from here."""
        foreign: ValueError | None = None
        for memory_obj in memory_objs:
            try:
                self.free(memory_obj)
            except ValueError as error:
                foreign = error
        if foreign is not None:
            raise foreign

    def memcheck(self) -> bool:
        """Tell whether what is free and what is taken are the memory; LMCache logs both."""
        with self._lock:
            sound: bool = super().memcheck()
        return sound

    def close(self) -> None:
        """Make no more objects, and give the memory back with the last one. Idempotent.

        Whoever still holds an object may read and write it. Where the last one is free and a
        tensor of one is still held, the memory goes with that tensor, and this is logged.
        """
        with self._lock:
            self._closed = True
            held = self.num_active_allocations
        if held:
            log.info("LMCache's host memory is given back with the last of %d objects", held)
        else:
            self._release()

    def _release(self) -> None:
        if torch_dev.is_available():  # copies to and from it may be under way
            torch_dev.synchronize()
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is not None:
            try:
                memory.close()
            except BufferError as held:
                log.warning(
                    "LMCache's host memory goes with the last tensor over it: %s", str(held)
                )
