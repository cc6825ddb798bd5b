"""Plug-ins for vLLM's KV offloading, to be named in its configuration.

`KvtierOffloadingSpec` is a host tier in memory that is usable at once, `KvtierDiskTier` a disk
level behind vLLM's own host tier, `ProspectCachePolicy` an eviction policy for any of vLLM's host
tiers. `docs/vllm.md` says how they are configured.

vLLM is imported when the first of these names is asked for, not with this module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier.integrations.versions import check_version

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


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version(__name__, "vllm", KNOWN_VERSIONS)
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
