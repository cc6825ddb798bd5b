"""The host memory of LMCache, as its configuration names it."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from hostmem import HostMem
from hostmem.units import align_up, parse_size
from kvtier.integrations.lmcache.allocator import install_allocator
from kvtier.integrations.lmcache.options import plugin_options

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["KvtierHostMemory"]

# A slot is what one call of the driver page-locks at least: other threads' calls wait so long.
_USUAL_SLOT = 8 << 20
_OPTIONS = ("size", "slot_size", "page_mode", "allow_remote_numa_fallback")


class KvtierHostMemory(StoragePluginInterface):
    """A storage plugin that stores nothing: it gives ``LocalCPUBackend`` its memory.

    LMCache has no setting for an allocator. It hands its new ``LocalCPUBackend`` to every storage
    plugin, and here this plugin installs `HostMemAllocator`. ``max_local_cpu_size`` is what LMCache
    sets aside itself, before that and for nothing: make it small, such as 0.01 (GiB).

    Parameters
    ----------
    dst_device, config, metadata, local_cpu_backend, loop
        See ``StoragePluginInterface``. The options, in ``extra_config`` of the configuration:
        ``size`` (bytes of each worker, or text such as ``"64GiB"``); ``slot_size`` (bytes that
        hold the largest object; some 8 MiB of whole chunks where omitted); ``page_mode`` and
        ``allow_remote_numa_fallback`` (see `hostmem.HostMem`).

    Raises
    ------
    ValueError
        An option that there is not, or no ``size``; no ``LocalCPUBackend`` with memory of its own.
    ResourceBusyError
        That memory is in use.
    HostOOMError, PlacementRefusedError, CuError
        As `hostmem.HostMem` says.
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
        if config is None or local_cpu_backend is None:
            raise ValueError(
                "KvtierHostMemory: there is no LocalCPUBackend to give memory to: "
                "max_local_cpu_size must be above 0, and the role not the scheduler's"
            )
        options = plugin_options(
            config.storage_plugins or (), config.extra_config or {}, type(self).__name__, _OPTIONS
        )
        if "size" not in options:
            raise ValueError("KvtierHostMemory: the option size is missing")
        slot = parse_size(options.pop("slot_size", 0), "slot_size") or _slot_size(local_cpu_backend)
        size = parse_size(options.pop("size"))
        memory = HostMem(
            size,
            device=_device(dst_device),
            slot_size=slot,
            on_register_failure="pageable",  # slower, where the alternative is no server
            **options,
        )
        try:
            self.allocator = install_allocator(local_cpu_backend, memory)
        except BaseException:
            memory.close()
            raise

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """Give the backend whose memory this is."""
        return self.local_cpu_backend

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        """Say no: nothing is stored here."""
        return False

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        """Say no: nothing is being stored here."""
        return False

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> None:
        """Store nothing."""

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        """Find nothing."""
        return None

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Find nothing; an empty list sends LMCache on to the next backend."""
        return []

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        """Find nothing."""
        return 0

    def get_non_blocking(self, key: CacheEngineKey, location: str | None = None) -> None:
        """Find nothing."""

    def pin(self, key: CacheEngineKey) -> bool:
        """Find nothing to pin."""
        return False

    def unpin(self, key: CacheEngineKey) -> bool:
        """Find nothing to unpin."""
        return False

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Find nothing to remove."""
        return False

    def clear(self) -> int:
        """Clear nothing."""
        return 0

    def close(self) -> None:
        """Leave the memory to ``LocalCPUBackend``, which closes it."""


def _slot_size(backend: LocalCPUBackend) -> int:
    """Bytes of whole chunks, so that a memory full of them has no gaps."""
    chunk = align_up(backend.get_full_chunk_size_bytes(), 4096)
    return chunk * max(1, _USUAL_SLOT // chunk)


def _device(dst_device: str) -> int | str:
    """Name the device of LMCache's as `HostMem` does; other makers' take ordinary memory."""
    kind, _, ordinal = dst_device.partition(":")
    if kind != "cuda":
        return "cpu"
    return int(ordinal) if ordinal else "auto"
