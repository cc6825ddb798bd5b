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
)

__all__ = ["ReplayOptions"]


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

    def __post_init__(self) -> None:
        if (self.disk_quota is None) != (self.disk_path is None):
            raise ValueError("a disk tier takes both a quota and a path")

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
        config = KVCacheManagerConfig(
            tokens_per_block=self.tokens_per_block,
            cache_tiers=tiers,
            layers=[AttentionLayerConfig(0, [BufferConfig("kv", self.block_bytes)])],
        )
        config.validate()
        return config
