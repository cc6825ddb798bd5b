"""Tiers for the keys and values of language models: GPU, host and disk, over `hostmem`.

`TierStorage` holds pages in levels and moves them; `BlockCache` finds blocks by key in any level
and hands them out in the hot one; `KVCacheManager` gives sequences of tokens their pages. The
configuration classes say how much memory each level may use.
"""

import logging

from hostmem._version import __version__
from hostmem.errors import (
    ClosedError,
    CorruptedError,
    CuError,
    CuOOMError,
    DiskOOMError,
    HostOOMError,
    OutOfMemoryError,
    OutOfPagesError,
    PeerInitError,
    PlacementRefusedError,
    RegistrationError,
    ResourceBusyError,
)
from kvtier.block_job import BlockJob
from kvtier.blocks import BlockCache
from kvtier.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTier,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
)
from kvtier.config_file import load_config
from kvtier.engine_pages import EnginePages
from kvtier.events import BlockEvent
from kvtier.keys import chain_keys, layout_fingerprint
from kvtier.leases import BlockLease, BlockReservation
from kvtier.manager import KVCacheManager
from kvtier.page import Page
from kvtier.plan import CachePlan, LevelPlan
from kvtier.ranks import create_on_all_ranks
from kvtier.sequence import KVSequence
from kvtier.slots import SlotAllocator
from kvtier.stats import (
    Activity,
    LevelStats,
    RemoteStats,
    Scope,
    StorageStats,
    Traffic,
    Usage,
    Waits,
)
from kvtier.storage import TierStorage
from kvtier.transfer.codec import ColdPageCodec, Concatenate
from kvtier.transfer.copier import PageCopier
from kvtier.transfer.staging import StagingBuffer

__all__ = [
    "Activity",
    "AttentionLayerConfig",
    "BlockCache",
    "BlockEvent",
    "BlockJob",
    "BlockLease",
    "BlockReservation",
    "BufferConfig",
    "CachePlan",
    "CacheTier",
    "CacheTierConfig",
    "ClosedError",
    "ColdPageCodec",
    "Concatenate",
    "CorruptedError",
    "CuError",
    "CuOOMError",
    "DiskCacheTierConfig",
    "DiskOOMError",
    "EnginePages",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "HostOOMError",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "KVSequence",
    "LevelPlan",
    "LevelStats",
    "OutOfMemoryError",
    "OutOfPagesError",
    "Page",
    "PageCopier",
    "PeerInitError",
    "PlacementRefusedError",
    "RegistrationError",
    "RemoteCacheTierConfig",
    "RemoteStats",
    "ResourceBusyError",
    "Scope",
    "SlotAllocator",
    "StagingBuffer",
    "StorageStats",
    "TierStorage",
    "Traffic",
    "Usage",
    "Waits",
    "__version__",
    "chain_keys",
    "create_on_all_ranks",
    "layout_fingerprint",
    "load_config",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
