"""From a configuration to numbers: shares, slots, padding and address space of every level.

A plan is worked out before anything is built, in exact integers, and is all that the builder of
the levels needs to know. Printing it shows what the quotas of a configuration amount to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostmem.units import align_up, format_size
from kvtier.layout import GroupLayout, group_layouts
from kvtier.quota import exact_size, exact_weights, grain_of, quota_holding, slots_in, split_quota

if TYPE_CHECKING:
    from kvtier.config import CacheTier, CacheTierConfig, KVCacheManagerConfig

__all__ = ["CachePlan", "LevelPlan", "group_weights", "make_plan", "plan_level"]


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """What one level is made of; tuples have one entry a pool group."""

    tier: CacheTier
    """Its kind."""
    quota: int
    """Bytes it may use at first, rounded up to the grain."""
    max_quota: int
    """Bytes it may ever use, rounded up to the grain; every pool reserves all of it."""
    grain: int
    """Bytes in which quotas are counted, from the initial quota and kept for life."""
    shares: tuple[int, ...]
    """Bytes of the quota that each group gets; they add up to it."""
    slots: tuple[int, ...]
    """Slots that fit in each share; at least one."""
    max_slots: tuple[int, ...]
    """Slots of the group that the whole ``max_quota`` would hold."""
    slot_sizes: tuple[tuple[int, ...], ...]
    """Slot bytes of each group's pools: as laid out when hot, one pool of whole pages when cold."""

    @property
    def padding(self) -> tuple[int, ...]:
        """Bytes of each share that hold no slot."""
        return tuple(
            share - slots * sum(sizes)
            for share, slots, sizes in zip(self.shares, self.slots, self.slot_sizes, strict=True)
        )

    @property
    def address_space(self) -> tuple[int, ...]:
        """Bytes of address space that each group reserves: ``max_quota`` for each of its pools."""
        return tuple(len(sizes) * self.max_quota for sizes in self.slot_sizes)

    def unit(self, group: int, pool: int = 0) -> int:
        """Give the commit unit of a pool in bytes: the grain rounded up to a slot multiple."""
        return align_up(self.grain, self.slot_sizes[group][pool])

    def describe(self) -> str:
        """Show the level as a table, one row a group."""
        title = (
            f"{self.tier}: quota {format_size(self.quota)}, "
            f"at most {format_size(self.max_quota)}, in grains of {format_size(self.grain)}"
        )
        return "\n".join([title, *_table(list(self._rows()))])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("group", "slot bytes", "share", "slots", "max slots", "padding", "address space")
        for group, sizes in enumerate(self.slot_sizes):
            yield (
                str(group),
                " + ".join(f"{size:,}" for size in sizes),
                format_size(self.shares[group]),
                f"{self.slots[group]:,}",
                f"{self.max_slots[group]:,}",
                format_size(self.padding[group]),
                format_size(self.address_space[group]),
            )


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a whole cache is made of."""

    groups: tuple[GroupLayout, ...]
    """The pool groups, the same in every level."""
    levels: tuple[LevelPlan, ...]
    """The levels, hot to cold."""

    def describe(self) -> str:
        """Show the groups and every level as text for a person."""
        rows = [("group", "layers", "pools", "page bytes", "window", "sinks")]
        for index, group in enumerate(self.groups):
            window, sinks = group.sliding_window_size, group.num_sink_tokens
            rows.append(
                (
                    str(index),
                    str(len(group.layer_ids)),
                    str(len(group.pools)),
                    f"{group.page_bytes:,}",
                    "all" if window is None else f"{window:,}",
                    f"{sinks or 0:,}",
                )
            )
        parts = ["\n".join(["pool groups", *_table(rows)])]
        return "\n\n".join(parts + [level.describe() for level in self.levels])

    def __str__(self) -> str:
        return self.describe()


def make_plan(
    config: KVCacheManagerConfig,
    *,
    default_max_quota: Callable[[CacheTierConfig], int] | None = None,
) -> CachePlan:
    """Work out a plan from a configuration; nothing is allocated.

    Parameters
    ----------
    config : KVCacheManagerConfig
        Validated here first.
    default_max_quota : callable, optional
        Gives the bytes a tier may ever use where its ``max_quota`` is None, such as the memory
        of the machine; without it that is the quota itself.

    Raises
    ------
    ValueError
        If the configuration is not valid, a share cannot hold one page of its group, or a quota
        is above the bound that ``default_max_quota`` found.
    """
    config.validate()
    groups = group_layouts(config.layers)
    weights = group_weights(config, groups)
    bounds = [
        default_max_quota(tier) if tier.max_quota is None and default_max_quota else None
        for tier in config.cache_tiers
    ]
    levels = tuple(
        plan_level(tier, groups, weights, hot=level == 0, default_max_quota=bound)
        for level, (tier, bound) in enumerate(zip(config.cache_tiers, bounds, strict=True))
    )
    return CachePlan(groups, levels)


def group_weights(config: KVCacheManagerConfig, groups: Sequence[GroupLayout]) -> tuple[int, ...]:
    """Give the integer weights by which a level's quota is split over the groups."""
    if config.initial_pool_ratio is None:
        return tuple(group.page_bytes for group in groups)
    return exact_weights(config.initial_pool_ratio)


def plan_level(
    tier: CacheTierConfig,
    groups: Sequence[GroupLayout],
    weights: Sequence[int],
    *,
    hot: bool,
    default_max_quota: int | None = None,
) -> LevelPlan:
    """Work out one level.

    Parameters
    ----------
    tier : CacheTierConfig
        Its quotas, in bytes.
    groups : sequence of GroupLayout
        The pool groups.
    weights : sequence of int
        As for `kvtier.quota.split_quota`.
    hot : bool
        Whether blocks lie in the pools of their layout, rather than as whole pages.
    default_max_quota : int, optional
        Bytes the level may ever use if the tier names no ``max_quota``; None: its quota.

    Raises
    ------
    ValueError
        If the quota is below the minimum or above the default bound, or a share holds no page.
    """
    grain = grain_of(tier.quota)
    bound = next(b for b in (tier.max_quota, default_max_quota, tier.quota) if b is not None)
    if bound < tier.quota:
        raise ValueError(
            f"{tier.tier}.quota: {exact_size(tier.quota)} is above the {exact_size(bound)} that "
            f"are there; lower it, or give {tier.tier}.max_quota to insist"
        )
    max_quota = align_up(bound, grain)
    pages = [group.page_bytes for group in groups]
    shares = split_quota(tier.quota, weights, grain)
    for group, (share, page) in enumerate(zip(shares, pages, strict=True)):
        if share < page:
            enough = quota_holding(pages, weights, grain)
            raise ValueError(
                f"{tier.tier}.quota: of {exact_size(tier.quota)} pool group {group} gets "
                f"{exact_size(share)}, which holds none of its pages of {exact_size(page)}; "
                f"the minimum that holds one of every group is {exact_size(enough)}"
            )
    return LevelPlan(
        tier=tier.tier,
        quota=sum(shares),
        max_quota=max_quota,
        grain=grain,
        shares=shares,
        slots=tuple(slots_in(share, page) for share, page in zip(shares, pages, strict=True)),
        max_slots=tuple(slots_in(max_quota, page) for page in pages),
        slot_sizes=tuple(
            tuple(pool.slot_size for pool in group.pools) if hot else (group.page_bytes,)
            for group in groups
        ),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
