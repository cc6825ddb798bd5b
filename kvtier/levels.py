"""Levels: a tier of the configuration, made real as pool groups and eviction policies."""

from __future__ import annotations

import contextlib
import logging
import shutil
from functools import partial
from operator import attrgetter
from pathlib import Path

from hostmem import CudaDevice, CudaMemory, Device, HostMem, machine
from kvtier.config import (
    CacheTier,
    CacheTierConfig,
    DiskCacheTierConfig,
    HostCacheTierConfig,
)
from kvtier.eviction import EvictionPolicy, make_policy
from kvtier.eviction.priority import ByPriority
from kvtier.page import Page
from kvtier.plan import LevelPlan
from kvtier.pools import PoolGroup
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.memory import DiskPool, MemoryPool, PageMemory, Pool

__all__ = ["Level", "build_level", "default_max_quota"]

log = logging.getLogger("kvtier")


class Level:
    """One level at work.

    Parameters
    ----------
    index : int
        0 is the hot level.
    plan : LevelPlan
        Its quotas and slots.
    groups : list of PoolGroup
        Its memory, by pool group.
    policy : str
        The eviction policy of each group.
    """

    def __init__(self, index: int, plan: LevelPlan, groups: list[PoolGroup], policy: str) -> None:
        self.index = index
        self.plan = plan
        self.quota = plan.quota
        """Bytes it may use now."""
        self.groups = groups
        self.policies: list[EvictionPolicy[Page]] = [
            ByPriority(partial(_make_policy, policy), attrgetter("priority"), group.slots.n_slots)
            for group in groups
        ]
        """What goes first, by pool group."""

    @property
    def name(self) -> str:
        """``gpu``, ``host`` or ``disk``."""
        return str(self.plan.tier)

    @property
    def fill_fraction(self) -> float:
        """Share of the slots whose memory is usable, 0 to 1."""
        slots = sum(group.slots.n_slots for group in self.groups)
        usable = sum(group.memory.usable_pages() for group in self.groups)
        return usable / slots

    def close(self) -> None:
        """Give all memory back."""
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            for group in self.groups:
                stack.callback(group.close)

    def leak(self) -> None:
        """Leave memory mapped for ever, because a copy may still use it; close files."""
        for group in self.groups:
            if isinstance(group.memory.pools[0], DiskPool):
                group.close()
            else:
                _leaked.append(group)
                nbytes = group.slots.n_slots * group.memory.page_bytes
                log.error("%d bytes of level %s are leaked on purpose", nbytes, self.name)


_leaked: list[PoolGroup] = []
"""Groups whose memory is never given back."""


def _make_policy(name: str, capacity: int | None) -> EvictionPolicy[Page]:
    return make_policy(name, capacity, attrgetter("content"))


def default_max_quota(tier: CacheTierConfig, device: Device) -> int:
    """Bytes a level can ever use here, where the configuration does not bound it."""
    if isinstance(tier, DiskCacheTierConfig):
        return shutil.disk_usage(tier.path).free + (_kept_bytes(tier.path) if tier.persist else 0)
    if isinstance(tier, HostCacheTierConfig):
        return machine().memory_for_process
    return device.memory_total


def build_level(
    index: int,
    plan: LevelPlan,
    tier: CacheTierConfig,
    device: Device,
    policy: str,
    *,
    layout: bytes = b"",
) -> Level:
    """Reserve the memory of a level; all or nothing. Host memory is filled in the background.

    Files that outlive the process keep ``layout``, what the bytes of a page mean: at most 256
    bytes.
    """
    groups: list[PoolGroup] = []
    with contextlib.ExitStack() as undo:
        for group, slot_sizes in enumerate(plan.slot_sizes):
            pools: list[Pool] = []
            for number, slot_size in enumerate(slot_sizes):
                pool = _build_pool(plan, group, number, slot_size, tier, device, layout)
                undo.callback(pool.close)
                pools.append(pool)
            memory = PageMemory(pools, group, hot=plan.hot)
            groups.append(PoolGroup(memory, plan.slots[group], plan.max_slots[group]))
        level = Level(index, plan, groups, policy)
        undo.pop_all()
    return level


def _build_pool(
    plan: LevelPlan,
    group: int,
    number: int,
    slot_size: int,
    tier: CacheTierConfig,
    device: Device,
    layout: bytes,
) -> Pool:
    slots = plan.slots[group]
    if isinstance(tier, DiskCacheTierConfig):
        name = _file_name(group) if tier.persist else None
        how = tier.compression
        return DiskPool(
            SlotFile(tier.path, slot_size, slots, name=name, layout=layout, compression=how)
        )
    capacity, size, unit = plan.max_quota, slots * slot_size, plan.unit(group, number)
    if plan.tier is CacheTier.GPU and isinstance(device, CudaDevice):
        return MemoryPool(CudaMemory(device, capacity, size, unit), slot_size)
    host = tier if isinstance(tier, HostCacheTierConfig) else None
    memory = HostMem(
        capacity,
        size,
        device=device,
        slot_size=slot_size,
        commit_unit=unit,
        allow_remote_numa_fallback=host.allow_remote_numa_fallback if host else True,
        page_mode=host.page_mode if host else None,
        wait=plan.tier is CacheTier.GPU,
    )
    return MemoryPool(memory, slot_size)


def _file_name(group: int | str) -> str:
    return f"kvtier-g{group}.slots"


def _kept_bytes(folder: str) -> int:
    """Bytes of a directory that the files of an earlier process take: they are used again."""
    files = Path(folder).glob(_file_name("*"))
    return sum(file.stat().st_blocks * _BLOCK for file in files)


_BLOCK = 512  # what st_blocks counts, whatever the file system's block is
