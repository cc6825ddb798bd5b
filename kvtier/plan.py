"""From a configuration to numbers: shares, slots, padding and memory of every level.

A plan is worked out before anything is built, in exact integers, and is all that the builder of
the levels needs to know. Printing it shows what the quotas of a configuration amount to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from hostmem.describing import Table, html_of, notebook
from hostmem.units import align_up, format_size
from kvtier.layout import GroupLayout, group_layouts
from kvtier.quota import exact_size, exact_weights, grain_of, quota_holding, slots_in, split_quota
from kvtier.transfer.codec import ColdPageCodec, configured

if TYPE_CHECKING:
    from kvtier.config import CacheTier, CacheTierConfig, KVCacheManagerConfig

__all__ = ["CachePlan", "LevelPlan", "cold_page_bytes", "make_plan", "plan_level"]


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """What one level is made of; tuples have one entry a pool group."""

    tier: CacheTier
    """Its kind."""
    hot: bool
    """Whether blocks lie in the pools of their layout, rather than as whole pages."""
    quota: int
    """Bytes it may use at first, rounded up to the grain."""
    max_quota: int
    """Bytes it may ever use, rounded up to the grain; every pool reserves all of it."""
    grain: int
    """Bytes in which quotas are counted, from the initial quota and kept for life."""
    weights: tuple[int, ...]
    """By which quotas are split over the groups, see `kvtier.quota.split_quota`."""
    shares: tuple[int, ...]
    """Bytes of the quota that each group gets; they add up to it."""
    slots: tuple[int, ...]
    """Slots that fit in each share; at least one."""
    max_slots: tuple[int, ...]
    """Slots of the group that the whole ``max_quota`` would hold."""
    slot_sizes: tuple[tuple[int, ...], ...]
    """Slot bytes of each group's pools: as laid out when hot, one pool of whole pages when cold."""

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of each group, over all its pools."""
        return tuple(map(sum, self.slot_sizes))

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of all the slots of each group: the memory, or the file, that it takes."""
        return tuple(n * page for n, page in zip(self.slots, self.page_bytes, strict=True))

    @property
    def padding(self) -> tuple[int, ...]:
        """Bytes of each share that hold no slot."""
        return tuple(a - b for a, b in zip(self.shares, self.slot_bytes, strict=True))

    @property
    def address_space(self) -> tuple[int, ...]:
        """Bytes of address space that each group reserves: ``max_quota`` for each of its pools.

        A file needs none.
        """
        reserved = 0 if self.tier == "disk" else self.max_quota
        return tuple(len(sizes) * reserved for sizes in self.slot_sizes)

    def unit(self, group: int, pool: int = 0) -> int:
        """Give the commit unit of a pool in bytes: the grain rounded up to a slot multiple."""
        return align_up(self.grain, self.slot_sizes[group][pool])

    def at(self, quota: int) -> LevelPlan:
        """Work out the same level at another quota of so many bytes; grain and bound stay.

        Raises
        ------
        ValueError
            Above ``max_quota``, below the minimum, or a share would hold no page.
        """
        if quota > self.max_quota:
            raise ValueError(
                f"{self.tier}.quota: {exact_size(quota)} is above max_quota, "
                f"{exact_size(self.max_quota)}"
            )
        try:
            shares = split_quota(quota, self.weights, self.grain)
        except ValueError as error:
            raise ValueError(f"{self.tier}.{error}") from None
        for group, (share, page) in enumerate(zip(shares, self.page_bytes, strict=True)):
            if share < page:
                enough = quota_holding(self.page_bytes, self.weights, self.grain)
                raise ValueError(
                    f"{self.tier}.quota: of {exact_size(quota)} pool group {group} gets "
                    f"{exact_size(share)}, which holds none of its pages of {exact_size(page)}; "
                    f"the minimum that holds one of every group is {exact_size(enough)}"
                )
        slots = tuple(map(slots_in, shares, self.page_bytes))
        return replace(self, quota=sum(shares), shares=shares, slots=slots)

    def describe(self) -> str:
        """Show the level as a table, one row a group."""
        return "\n".join([self._title(), *_table(list(self._rows()))])

    def _title(self) -> str:
        return (
            f"{self.tier}: quota {format_size(self.quota)}, "
            f"at most {format_size(self.max_quota)}, in grains of {format_size(self.grain)}"
        )

    @notebook
    def _repr_html_(self) -> str:
        return html_of(self._title(), [Table(list(self._rows()))])

    def _rows(self) -> Iterator[tuple[str, ...]]:
        where = "file" if self.tier == "disk" else f"{self.tier} memory"
        yield (
            *("group", "slot bytes", "share", "slots", "max slots"),
            *(where, "padding", "address space"),
        )
        for group, sizes in enumerate(self.slot_sizes):
            yield (
                str(group),
                " + ".join(f"{size:,}" for size in sizes),
                format_size(self.shares[group]),
                f"{self.slots[group]:,}",
                f"{self.max_slots[group]:,}",
                format_size(self.slot_bytes[group]),
                format_size(self.padding[group]),
                format_size(self.address_space[group]),
            )


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a whole cache is made of."""

    tokens_per_block: int
    """Tokens of a block."""
    groups: tuple[GroupLayout, ...]
    """The pool groups, the same in every level."""
    levels: tuple[LevelPlan, ...]
    """The levels, hot to cold."""

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: equal plans have equal ones, on every machine and in every run."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Give all of it as what JSON can hold, sizes in bytes; the order of lists has a meaning.

        Beside the fields there are ``digest``, ``totals`` and, in each level, ``page_bytes``,
        ``slot_bytes``, ``padding`` and ``address_space``, as the properties say.
        """
        figures = asdict(self)
        for level, shown in zip(self.levels, figures["levels"], strict=True):
            for name in ("page_bytes", "slot_bytes", "padding", "address_space"):
                shown[name] = getattr(level, name)
        totals = {str(level.tier): sum(level.slot_bytes) for level in self.levels}
        totals["padding"] = sum(sum(level.padding) for level in self.levels)
        totals["address_space"] = sum(sum(level.address_space) for level in self.levels)
        return {"digest": self.digest, "totals": totals, **figures}

    def describe(self) -> str:
        """Show the groups, every level and what all take together, as text for a person."""
        title = f"pool groups, blocks of {self.tokens_per_block:,} tokens"
        parts = ["\n".join([title, *_table(self._group_rows())])]
        return "\n\n".join([*parts, *(level.describe() for level in self.levels), self._totals()])

    def _group_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("group", "layers", "pools", "page bytes", "window", "sinks")
        ]
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
        return rows

    @notebook
    def _repr_html_(self) -> str:
        levels = (Table(list(level._rows()), level._title()) for level in self.levels)
        groups = Table(self._group_rows(), "pool groups")
        totals = Table(self._total_rows(), "in total")
        title = f"blocks of {self.tokens_per_block:,} tokens, digest {self.digest}"
        return html_of(title, [groups, *levels, totals])

    def _totals(self) -> str:
        return "\n".join(["in total", *_table(self._total_rows()), "", f"digest {self.digest}"])

    def _total_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", "slots", "bytes", "padding", "address space")]
        for level in self.levels:
            figures = (level.slot_bytes, level.padding, level.address_space)
            sizes = (format_size(sum(each)) for each in figures)
            rows.append((str(level.tier), f"{sum(level.slots):,}", *sizes))
        return rows

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
        Validated here first, but for what depends on the machine.
    default_max_quota : callable, optional
        Gives the bytes a tier may ever use where its ``max_quota`` is None, such as the memory
        of the machine; without it that is the quota itself.

    Raises
    ------
    ValueError
        If the configuration is not valid, a share cannot hold one page of its group, or a quota
        is above the bound that ``default_max_quota`` found.
    """
    config.validate(here=False)
    groups = group_layouts(config.layers)
    cold_pages = cold_page_bytes(config.cold_page_codec, groups)
    bounds = [
        default_max_quota(tier) if tier.max_quota is None and default_max_quota else None
        for tier in config.cache_tiers
    ]
    levels = tuple(
        plan_level(tier, groups, cold_pages, config.initial_pool_ratio, default_max_quota=bound)
        for tier, bound in zip(config.cache_tiers, bounds, strict=True)
    )
    return CachePlan(config.tokens_per_block, groups, levels)


def cold_page_bytes(
    codec: ColdPageCodec | None, groups: tuple[GroupLayout, ...]
) -> tuple[int, ...]:
    """Give the bytes of a page of each group in the levels that are not hot; see `configured`."""
    if codec is None:
        return tuple(group.page_bytes for group in groups)
    return configured(codec, groups)


def plan_level(
    tier: CacheTierConfig,
    groups: Sequence[GroupLayout],
    cold_pages: Sequence[int],
    ratio: Sequence[float] | None = None,
    *,
    default_max_quota: int | None = None,
) -> LevelPlan:
    """Work out one level.

    Parameters
    ----------
    tier : CacheTierConfig
        Its quotas, in bytes.
    groups : sequence of GroupLayout
        The pool groups.
    cold_pages : sequence of int
        Bytes of a page of each group, for a level that is not hot.
    ratio : sequence of float, optional
        A positive number for each group, by which the quota is split; None: its bytes of a page.
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
    slot_sizes = tuple(
        tuple(pool.slot_size for pool in group.pools) if tier.hot else (page,)
        for group, page in zip(groups, cold_pages, strict=True)
    )
    pages = tuple(map(sum, slot_sizes))
    max_quota = align_up(bound, grain)
    return LevelPlan(
        tier=tier.tier,
        hot=tier.hot,
        quota=0,
        max_quota=max_quota,
        grain=grain,
        weights=pages if ratio is None else exact_weights(ratio),
        shares=(),
        slots=(),
        max_slots=tuple(slots_in(max_quota, page) for page in pages),
        slot_sizes=slot_sizes,
    ).at(tier.quota)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
