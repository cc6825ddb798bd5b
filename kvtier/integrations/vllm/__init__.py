"""Plug-ins for vLLM's KV offloading, to be named in its configuration.

`KvtierOffloadingSpec` is a host tier in memory that is usable at once, `KvtierDiskTier` a disk
level behind vLLM's own host tier, `ProspectCachePolicy` an eviction policy for any of vLLM's host
tiers. `docs/vllm.md` says how they are configured.

vLLM is imported when the first of these names is asked for, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.integrations.versions import on_demand

if TYPE_CHECKING:
    from kvtier.integrations.vllm.disk_tier import KvtierDiskTier
    from kvtier.integrations.vllm.policy import ProspectCachePolicy
    from kvtier.integrations.vllm.spec import KvtierOffloadingSpec
    from kvtier.integrations.vllm.worker import KvtierOffloadingWorker

__all__ = [
    "KNOWN_VERSIONS",
    "KvtierDiskTier",
    "KvtierOffloadingSpec",
    "KvtierOffloadingWorker",
    "ProspectCachePolicy",
]

KNOWN_VERSIONS = ("0.33",)
"""Leading parts of the versions of vLLM whose interfaces these plug-ins are made for."""

_PLACES = {
    "KvtierDiskTier": "disk_tier",
    "KvtierOffloadingSpec": "spec",
    "KvtierOffloadingWorker": "worker",
    "ProspectCachePolicy": "policy",
}

__getattr__ = on_demand(__name__, "vllm", KNOWN_VERSIONS, _PLACES)
