"""What the tests of the LMCache plug-ins share: LMCache's own backends, small, and known bytes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

with warnings.catch_warnings():  # those of LMCache and what it imports about each other
    warnings.simplefilter("ignore")
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.event_manager import EventManager
    from lmcache.v1.memory_management import MemoryFormat, MemoryObj
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.pin_monitor import PinMonitor
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.storage_manager import StorageManager

__all__ = [
    "CHUNK",
    "CHUNK_BYTES",
    "DTYPE",
    "FMT",
    "KIB",
    "MIB",
    "SHAPE",
    "LMCacheEngineConfig",
    "fill",
    "holds",
    "key",
    "lmcache_config",
    "lmcache_metadata",
    "local_backend",
    "storage_manager",
]

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 16
"""Tokens of a chunk."""
SHAPE = torch.Size((2, 4, CHUNK, 64))
DTYPE = torch.bfloat16
FMT = MemoryFormat.KV_2LTD
CHUNK_BYTES = SHAPE.numel() * DTYPE.itemsize
"""16 KiB: whole pages."""


def lmcache_config(
    plugins: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    max_local_cpu_size: float = 1 / 256,
    local_cpu: bool = True,
    **options: Any,
) -> Any:
    """A configuration; ``plugins`` are options by class, and each class is its plugin's name."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=local_cpu,
        max_local_cpu_size=max_local_cpu_size,
        lmcache_instance_id=f"test-{os.getpid()}",
        **options,
    )
    if plugins:
        config.storage_plugins = list(plugins)
        config.extra_config = {}
        for name, settings in plugins.items():
            loading = {"module_path": "kvtier.integrations.lmcache", "class_name": name}
            for option, value in {**loading, **settings}.items():
                config.extra_config[f"storage_plugin.{name}.{option}"] = value
    return config


def lmcache_metadata(model: str = "a/model", **options: Any) -> Any:
    return LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=DTYPE,
        kv_shape=(4, 2, CHUNK, 1, 64),
        chunk_size=CHUNK,
        **options,
    )


def local_backend(**options: Any) -> Any:
    """LMCache's host memory, 4 MiB where nothing else is said."""
    return LocalCPUBackend(lmcache_config(**options), lmcache_metadata(), "cpu")


@contextmanager
def storage_manager(config: Any, metadata: Any = None) -> Iterator[Any]:
    """LMCache's manager of all its storage, closed at the end as its engine closes it."""
    manager = StorageManager(config, metadata or lmcache_metadata(), EventManager())
    try:
        yield manager
    finally:
        manager.close()
        manager.loop.close()


def key(number: int, model: str = "a/model", **tags: str) -> Any:
    configs = {f"lmcache.tag.{name}": value for name, value in tags.items()}
    return CacheEngineKey(model, 1, 0, number, DTYPE, configs or None)


def _content(shape: Any, number: int) -> Any:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(shape, generator=generator).to(DTYPE)


def fill(obj: MemoryObj, number: int) -> MemoryObj:
    """Write bytes that follow from a number."""
    obj.tensor.copy_(_content(obj.get_shape(), number))
    return obj


def holds(obj: MemoryObj | None, number: int) -> bool:
    """Whether an object has the bytes that follow from a number."""
    return obj is not None and torch.equal(obj.tensor, _content(obj.get_shape(), number))


PinMonitor.GetOrCreate(lmcache_config(), lmcache_metadata())  # objects cannot be pinned without
