"""The configuration of a tiered cache: frozen data that is checked as a whole before use.

Sizes are bytes, or text such as ``"64GiB"``, and are kept as integers. Text that is no size is
refused at once, and so is a value of the wrong type; everything else waits for ``validate()``,
which looks at every tier and layer and names all that is wrong in one `ValueError`: the field, the
minimum and the unit. ``validate(here=False)`` leaves out what only this machine knows, such as
whether a directory is there, so that a cache can be planned on another machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from numbers import Real

from hostmem.units import Size, parse_size
from kvtier.layout import group_layouts
from kvtier.plan import CachePlan, cold_page_bytes, make_plan, plan_level
from kvtier.quota import exact_size, grain_of, minimum_quota
from kvtier.tiers import (
    CacheTier,
    CacheTierConfig,
    Checked,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    RemoteCacheTierConfig,
    every,
    whole,
)
from kvtier.transfer.codec import ColdPageCodec, check_codec

__all__ = [
    "AttentionLayerConfig",
    "BufferConfig",
    "CacheTier",
    "CacheTierConfig",
    "DiskCacheTierConfig",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "KVCacheManagerConfig",
    "RemoteCacheTierConfig",
]


@dataclass(frozen=True, slots=True, init=False)
class BufferConfig(Checked):
    """One buffer of a layer.

    Parameters
    ----------
    role : str
        What it holds, such as ``"key"``; distinct within the layer.
    size : int or str
        Bytes of one block, that is of ``tokens_per_block`` tokens.
    """

    role: str
    size: int

    def __init__(self, role: str, size: Size) -> None:
        if not isinstance(role, str):
            raise TypeError(f"role of a buffer: expected text, not {role!r}")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "size", parse_size(size, f"size of buffer {role!r}"))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the size."""
        if self.size <= 0:
            yield f"buffer {self.role!r}: size: {self.size} B is below the minimum of 1 B"


@dataclass(frozen=True, slots=True)
class AttentionLayerConfig(Checked):
    """One attention layer: its buffers, and which of its tokens stay visible."""

    layer_id: int
    """Distinct within the cache."""
    buffers: Sequence[BufferConfig]
    """At least one; kept as a tuple."""
    sliding_window_size: int | None = None
    """Tokens that attention looks back, the present one included; None: all."""
    num_sink_tokens: int | None = None
    """First tokens that stay visible beyond the window; only with a window."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_id", whole(self.layer_id, "layer_id"))
        buffers = every(self.buffers, BufferConfig, f"layer {self.layer_id}: buffers")
        object.__setattr__(self, "buffers", buffers)
        for name in ("sliding_window_size", "num_sink_tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(value, f"layer {self.layer_id}: {name}"))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the layer and each of its buffers."""
        where = f"layer {self.layer_id}"
        window, sinks = self.sliding_window_size, self.num_sink_tokens
        if not self.buffers:
            yield f"{where}: buffers: none given, the minimum is 1 buffer"
        for buffer in self.buffers:
            yield from (f"{where}: {problem}" for problem in buffer.problems())
        for role in _repeated(buffer.role for buffer in self.buffers):
            yield f"{where}: buffers: role {role!r} is given more than once"
        if window is not None and window <= 0:
            yield f"{where}: sliding_window_size: {window} is below the minimum of 1 token"
        if sinks is not None and sinks < 0:
            yield f"{where}: num_sink_tokens: {sinks} is below the minimum of 0 tokens"
        if sinks and window is None:
            yield f"{where}: num_sink_tokens: {sinks} tokens, but no sliding_window_size"


@dataclass(frozen=True, slots=True)
class KVCacheManagerConfig(Checked):
    """A whole cache: its levels, and what a block of it is made of."""

    tokens_per_block: int
    """Tokens whose keys and values make a block."""
    cache_tiers: Sequence[CacheTierConfig]
    """The levels, hot to cold: gpu, then host, then disk, at most one of each, gpu or host always.

    Without a gpu tier the engine owns the hot pages, and copies between its own buffers and the
    first level. A `RemoteCacheTierConfig` may be given as the last: it has no slots of ours, and is
    found in ``remote``.
    """
    layers: Sequence[AttentionLayerConfig]
    """The attention layers."""
    max_util_for_resume: float = 0.97
    """Share of the hot level, above 0 and at most 1, up to which a paused request may resume."""
    initial_pool_ratio: Sequence[float] | None = None
    """A positive number for each pool group, by which the quotas are split; None: page bytes."""
    cold_page_codec: ColdPageCodec | None = None
    """What a page is made of in the levels that are not hot; None: the hot buffers of its layers,
    one after another."""
    remote: RemoteCacheTierConfig | None = None
    """The store that hosts share, if there is one."""

    def __post_init__(self) -> None:
        tokens = whole(self.tokens_per_block, "tokens_per_block")
        object.__setattr__(self, "tokens_per_block", tokens)
        tiers = every(self.cache_tiers, CacheTierConfig, "cache_tiers")
        if self.remote is not None:
            every([self.remote], RemoteCacheTierConfig, "remote")
        elif tiers and isinstance(tiers[-1], RemoteCacheTierConfig):
            object.__setattr__(self, "remote", tiers[-1])
            tiers = tiers[:-1]
        object.__setattr__(self, "cache_tiers", tiers)
        object.__setattr__(self, "layers", every(self.layers, AttentionLayerConfig, "layers"))
        if self.cold_page_codec is not None:
            check_codec(self.cold_page_codec)
        every([self.max_util_for_resume], Real, "max_util_for_resume")
        if self.initial_pool_ratio is not None:
            ratio = every(self.initial_pool_ratio, Real, "initial_pool_ratio")
            object.__setattr__(self, "initial_pool_ratio", ratio)

    def plan(self) -> CachePlan:
        """Work out what these quotas amount to, on any machine and without building anything.

        A ``max_quota`` of None counts as the quota: what a machine has is known there only.

        Raises
        ------
        ValueError
            If the configuration is not valid, as ``validate(here=False)`` says.
        """
        return make_plan(self)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the cache, every tier and every layer."""
        found = [*self._own_problems(), *self._layer_problems(), *self._tier_problems()]
        yield from found or self._share_problems()

    def _problems_here(self) -> Iterator[str]:
        """Yield what this machine does not have, for every tier."""
        for tier in self.cache_tiers:
            yield from tier._problems_here()

    def _own_problems(self) -> Iterator[str]:
        if self.tokens_per_block <= 0:
            yield f"tokens_per_block: {self.tokens_per_block} is below the minimum of 1 token"
        if not 0 < self.max_util_for_resume <= 1:
            yield f"max_util_for_resume: {self.max_util_for_resume} is not above 0 and at most 1"
        if self.initial_pool_ratio is not None:
            n_groups = len(group_layouts(self.layers))
            if len(self.initial_pool_ratio) != n_groups:
                yield (
                    f"initial_pool_ratio: {len(self.initial_pool_ratio)} numbers, "
                    f"but the layers form {n_groups} pool groups"
                )
            if not all(isfinite(part) and part > 0 for part in self.initial_pool_ratio):
                yield (
                    "initial_pool_ratio: every number must be finite and above 0, "
                    f"not {self.initial_pool_ratio}"
                )

    def _layer_problems(self) -> Iterator[str]:
        if not self.layers:
            yield "layers: none given, the minimum is 1 layer"
        for layer_id in _repeated(layer.layer_id for layer in self.layers):
            yield f"layers: layer_id {layer_id!r} is given more than once"
        for layer in self.layers:
            yield from layer.problems()

    def _tier_problems(self) -> Iterator[str]:
        tiers = [tier.tier for tier in self.cache_tiers]
        ranks = [list(CacheTier).index(tier) for tier in tiers]
        if not tiers:
            yield "cache_tiers: none given, the minimum is 1 tier, gpu or host"
        elif CacheTier.REMOTE in tiers or any(warm >= cold for warm, cold in pairwise(ranks)):
            yield (
                f"cache_tiers: {', '.join(tiers)} is not a valid order; "
                "gpu comes first, then host, then disk, then remote, at most one of each"
            )
        elif tiers == [CacheTier.DISK]:
            yield "cache_tiers: disk alone; it needs a gpu or a host tier above it"
        if self.remote is not None:
            yield from self.remote.problems()
            if self.remote.mode == "write-back" and CacheTier.HOST not in tiers:
                yield "remote.mode: 'write-back' needs a host tier, which pages go out from"
        n_groups = len(group_layouts(self.layers))
        if self.remote is not None and 0 < self.remote.in_flight < n_groups:
            yield (
                f"remote.in_flight: {self.remote.in_flight} is below the minimum of {n_groups} "
                "pages, one of each pool group"
            )
        for tier in self.cache_tiers:
            yield from tier.problems()
            grain = grain_of(tier.quota)
            least = minimum_quota(n_groups, grain)
            for field, given in (("quota", tier.quota), ("max_quota", tier.max_quota)):
                if given is not None and 0 < given < least:
                    yield (
                        f"{tier.tier}.{field}: {exact_size(given)} is below the minimum of "
                        f"{exact_size(least)}, {n_groups} pool groups of one "
                        f"{exact_size(grain)} grain each"
                    )

    def _share_problems(self) -> Iterator[str]:
        groups = group_layouts(self.layers)
        try:
            cold_pages = cold_page_bytes(self.cold_page_codec, groups)
        except ValueError as error:
            yield str(error)
            return
        for tier in self.cache_tiers:
            try:
                plan_level(tier, groups, cold_pages, self.initial_pool_ratio)
            except ValueError as error:
                yield str(error)


def _repeated(values: Iterable[Hashable]) -> list[Hashable]:
    return [value for value, count in Counter(values).items() if count > 1]
