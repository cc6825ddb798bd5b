"""What a replay with bytes is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
)
from kvtier.remote.client import check_installed

__all__ = ["ReplayOptions"]

_IN_FLIGHT = 1024  # pages; a request computes hundreds at once, faster than any model


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The tiers, the block and the policy of a replay with bytes."""

    trace: str
    """What to call the trace in the result."""
    gpu_quota: int = 64 << 20
    """Bytes of level 0, which on the cpu device is host memory."""
    host_quota: int | None = 512 << 20
    """Bytes of the host tier; None leaves it out."""
    disk_quota: int | None = None
    """Bytes of the disk tier, given together with ``disk_path``; None leaves it out."""
    disk_path: str | None = None
    """Directory the disk tier keeps its files in; it must exist."""
    block_bytes: int = 64 << 10
    """Bytes of one block's keys and values."""
    tokens_per_block: int = 512
    """Tokens a block stands for, 512 in Mooncake's traces."""
    device: str | int = "auto"
    """``"cpu"``, ``"auto"`` or a GPU ordinal."""
    policy: str = "lru"
    """Eviction policy of every level, a name in ``kvtier.eviction.POLICIES``."""
    remote: str | None = None
    """``"host:port"`` of the master of a store that processes share; None for no such store."""
    remote_metadata: str = "P2PHANDSHAKE"
    """The store's metadata server, as `RemoteCacheTierConfig` takes it."""
    remote_segment: int = 512 << 20
    """Bytes that each process lends the store."""
    remote_namespace: str = ""
    """What the processes that share blocks agree on."""

    def __post_init__(self) -> None:
        if (self.disk_quota is None) != (self.disk_path is None):
            raise ValueError("a disk tier takes both a quota and a path")
        if self.remote is not None:
            check_installed()

    def config(self) -> KVCacheManagerConfig:
        """Describe the tiers: one layer whose one buffer, ``kv``, is the block.

        Returns
        -------
        KVCacheManagerConfig
            Validated; nothing has been built.

        Raises
        ------
        ValueError
            If a quota, the block or the directory is refused; the message names the field.
        """
        tiers: list[CacheTierConfig] = [GpuCacheTierConfig(self.gpu_quota)]
        if self.host_quota is not None:
            tiers.append(HostCacheTierConfig(self.host_quota))
        if self.disk_quota is not None and self.disk_path is not None:
            tiers.append(DiskCacheTierConfig(self.disk_quota, self.disk_path))
        if self.remote is not None:
            tiers.append(
                RemoteCacheTierConfig(
                    self.remote,
                    self.remote_metadata,
                    local_segment=self.remote_segment,
                    namespace=self.remote_namespace,
                    in_flight=_IN_FLIGHT,
                )
            )
        config = KVCacheManagerConfig(
            tokens_per_block=self.tokens_per_block,
            cache_tiers=tiers,
            layers=[AttentionLayerConfig(0, [BufferConfig("kv", self.block_bytes)])],
        )
        config.validate()
        return config
