"""Plug-ins for SGLang's hierarchical cache.

`KvtierHiCacheStorage` is a disk level, to be named in SGLang's configuration (the ``dynamic``
storage backend). `HostMemTensorAllocator` makes SGLang's host pools of memory that is filled by
several threads and page-locked bit by bit; SGLang has no setting for it, so `install` puts it in.
`docs/sglang.md` says how.

SGLang is imported when the first of these names is asked for, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.integrations.versions import on_demand

if TYPE_CHECKING:
    from kvtier.integrations.sglang.host_allocator import HostMemTensorAllocator, install
    from kvtier.integrations.sglang.storage import KvtierHiCacheStorage

__all__ = ["KNOWN_VERSIONS", "HostMemTensorAllocator", "KvtierHiCacheStorage", "install"]

KNOWN_VERSIONS = ("0.5.23",)
"""Leading parts of the versions of SGLang whose interfaces these plug-ins are made for."""

_PLACES = {
    "HostMemTensorAllocator": "host_allocator",
    "KvtierHiCacheStorage": "storage",
    "install": "host_allocator",
}

__getattr__ = on_demand(__name__, "sglang", KNOWN_VERSIONS, _PLACES)
