"""Plug-ins for LMCache: host memory that is usable at once, and a disk level.

`KvtierHostMemory` gives LMCache its host memory and `KvtierDiskBackend` keeps what leaves it; both
are storage plugins, to be named in LMCache's configuration. `HostMemAllocator` is the allocator
behind the first, and `install_allocator` puts it into a backend that a program made itself.
`KvtierL2Adapter` is the disk level of LMCache's multi-process server.
`docs/lmcache.md` says how they are configured.

LMCache is imported when the first of these names is asked for, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.integrations.versions import on_demand

if TYPE_CHECKING:
    from kvtier.integrations.lmcache.allocator import HostMemAllocator, install_allocator
    from kvtier.integrations.lmcache.disk_backend import KvtierDiskBackend
    from kvtier.integrations.lmcache.host_memory import KvtierHostMemory
    from kvtier.integrations.lmcache.l2_adapter import KvtierL2Adapter

__all__ = [
    "KNOWN_VERSIONS",
    "HostMemAllocator",
    "KvtierDiskBackend",
    "KvtierHostMemory",
    "KvtierL2Adapter",
    "install_allocator",
]

KNOWN_VERSIONS = ("0.5",)
"""Leading parts of the versions of LMCache whose interfaces these plug-ins are made for."""

_PLACES = {
    "HostMemAllocator": "allocator",
    "KvtierDiskBackend": "disk_backend",
    "KvtierHostMemory": "host_memory",
    "KvtierL2Adapter": "l2_adapter",
    "install_allocator": "allocator",
}

__getattr__ = on_demand(__name__, "lmcache", KNOWN_VERSIONS, _PLACES)
