"""The configuration of a tiered cache: frozen data that is checked as a whole before use.

Sizes are bytes, or text such as ``"64GiB"``, and are kept as integers. Text that is no size is
refused at once, and so is a value of the wrong type; everything else waits for ``validate()``,
which looks at every tier and layer and names all that is wrong in one `ValueError`: the field, the
minimum and the unit. ``validate(here=False)`` leaves out what only this machine knows, such as
whether a directory is there, so that a cache can be planned on another machine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite
from numbers import Real
from operator import index
from typing import ClassVar, SupportsIndex, TypeVar

from hostmem import machine
from hostmem.page_mode import resolve_page_mode
from hostmem.units import Size, parse_size
from kvtier.layout import group_layouts
from kvtier.plan import CachePlan, cold_page_bytes, make_plan, plan_level
from kvtier.quota import exact_size, grain_of, minimum_quota
from kvtier.transfer.codec import ColdPageCodec, check_codec
from kvtier.transfer.compression import COMPRESSIONS

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


T = TypeVar("T")


class CacheTier(StrEnum):
    """A kind of level, warmest first; the values are the keys of every output."""

    GPU = "gpu"
    """Memory of the device, where attention reads it."""
    HOST = "host"
    """Page-locked host memory."""
    DISK = "disk"
    """Files in one directory."""
    REMOTE = "remote"
    """A store that hosts share."""


_ORDER = tuple(CacheTier)

PROTOCOLS = ("tcp", "rdma")
"""How pages travel to a remote store."""
MODES = ("write-through", "write-back", "read-only")
"""When pages go out to a remote store."""
_DAY = 86_400  # seconds; longer than anybody waits, and less than any counter of milliseconds


class _Checked:
    """A piece of configuration that can say what is wrong with it."""

    __slots__ = ()

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong on any machine; nothing is built."""
        raise NotImplementedError

    def _problems_here(self) -> Iterator[str]:
        """Yield one sentence for each thing that this machine, as it is now, does not have."""
        return iter(())

    def validate(self, *, here: bool = True) -> None:
        """Check every field.

        Parameters
        ----------
        here : bool
            Whether to ask this machine, too: for directories, page modes, optional modules.

        Raises
        ------
        ValueError
            Naming everything that is wrong: the field, the minimum and the unit.
        """
        if found := [*self.problems(), *(self._problems_here() if here else ())]:
            raise ValueError("; ".join(found))


class CacheTierConfig(_Checked):
    """What the tiers have in common: a quota and the bound it may be raised to."""

    __slots__ = ()

    tier: ClassVar[CacheTier]
    hot: ClassVar[bool] = False
    """Whether blocks lie in the pools of their layout, where attention reads them."""
    quota: int
    """Bytes the level may use at first."""
    max_quota: int | None
    """Bytes it may ever use, which is its reservation; None: what the machine has."""

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the quota and its bound."""
        if self.quota <= 0:
            yield f"{self.tier}.quota: {exact_size(self.quota)} is below the minimum of 1 B"
        if self.max_quota is not None and self.max_quota < self.quota:
            yield (
                f"{self.tier}.max_quota: {exact_size(self.max_quota)} is below the quota, "
                f"its minimum, of {exact_size(self.quota)}"
            )

    def _set_quotas(self, quota: Size, max_quota: Size | None) -> None:
        bound = None if max_quota is None else parse_size(max_quota, f"{self.tier}.max_quota")
        object.__setattr__(self, "quota", parse_size(quota, f"{self.tier}.quota"))
        object.__setattr__(self, "max_quota", bound)


@dataclass(frozen=True, slots=True, init=False)
class GpuCacheTierConfig(CacheTierConfig):
    """The hot level, in GPU memory (on the cpu device: in host memory).

    Parameters
    ----------
    quota : int or str
        Bytes it may use at first.
    max_quota : int or str, optional
        Bytes it may ever use; by default the device's memory.
    """

    tier: ClassVar[CacheTier] = CacheTier.GPU
    hot: ClassVar[bool] = True

    quota: int
    max_quota: int | None

    def __init__(self, quota: Size, max_quota: Size | None = None) -> None:
        self._set_quotas(quota, max_quota)


@dataclass(frozen=True, slots=True, init=False)
class HostCacheTierConfig(CacheTierConfig):
    """A level in page-locked host memory.

    Parameters
    ----------
    quota : int or str
        Bytes it may use at first.
    max_quota : int or str, optional
        Bytes it may ever use; by default the memory this process can really have.
    allow_remote_numa_fallback : bool
        True prefers the GPU's NUMA node; False insists on it, and building the level fails
        where that cannot be enforced.
    page_mode : str, optional
        What pages the memory is made of, as `hostmem.HostMem` takes it: ``"small"``, ``"huge"``,
        ``"auto"``, ``"hugetlb"`` or ``"hugetlb-1GiB"``; by default what ``HOSTMEM_THP`` says.
    """

    tier: ClassVar[CacheTier] = CacheTier.HOST

    quota: int
    max_quota: int | None
    allow_remote_numa_fallback: bool
    page_mode: str | None

    def __init__(
        self,
        quota: Size,
        max_quota: Size | None = None,
        allow_remote_numa_fallback: bool = True,
        page_mode: str | None = None,
    ) -> None:
        self._set_quotas(quota, max_quota)
        fallback = _flag(allow_remote_numa_fallback, "host.allow_remote_numa_fallback")
        object.__setattr__(self, "allow_remote_numa_fallback", fallback)
        object.__setattr__(self, "page_mode", page_mode)

    def _problems_here(self) -> Iterator[str]:
        """Yield why this machine has no such pages."""
        try:
            resolve_page_mode(self.page_mode, machine())
        except ValueError as error:
            yield f"host.{error}" if self.page_mode else str(error)


@dataclass(frozen=True, slots=True, init=False)
class DiskCacheTierConfig(CacheTierConfig):
    """A level in files of one directory.

    Parameters
    ----------
    quota : int or str
        Bytes it may use at first.
    path : str or path-like
        An existing directory this process may write to.
    max_quota : int or str, optional
        Bytes it may ever use; by default the free space of the directory.
    persist : bool
        Whether what is there when the process ends, however it ends, is found again by the next
        one with the same layout and path.
    compression : {"blosc2"}, optional
        What the pages are compressed with on their way to the file; None: nothing. Takes the
        extra of the same name, as in ``pip install hostmem[blosc2]``.
    """

    tier: ClassVar[CacheTier] = CacheTier.DISK

    quota: int
    path: str
    max_quota: int | None
    persist: bool
    compression: str | None

    def __init__(
        self,
        quota: Size,
        path: str | os.PathLike[str],
        max_quota: Size | None = None,
        *,
        persist: bool = False,
        compression: str | None = None,
    ) -> None:
        self._set_quotas(quota, max_quota)
        object.__setattr__(self, "path", os.fspath(path))
        object.__setattr__(self, "persist", _flag(persist, "disk.persist"))
        object.__setattr__(self, "compression", compression)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the quotas and the compression."""
        yield from CacheTierConfig.problems(self)
        if self.compression is not None and self.compression not in COMPRESSIONS:
            known = ", ".join(map(repr, COMPRESSIONS))
            yield f"disk.compression: {self.compression!r} is not known; give {known} or None"

    def _problems_here(self) -> Iterator[str]:
        """Yield what is wrong with the directory, and that the compression is not installed."""
        name = self.compression
        if name is not None and name in COMPRESSIONS and find_spec(name) is None:
            yield (
                f"disk.compression: {name!r} needs the module of that name; "
                f"pip install hostmem[{name}]"
            )
        if not os.path.exists(self.path):
            yield f"disk.path: {self.path!r} does not exist; create the directory first"
        elif not os.path.isdir(self.path):
            yield f"disk.path: {self.path!r} is not a directory"
        elif not os.access(self.path, os.W_OK | os.X_OK):
            yield f"disk.path: {self.path!r} is not writable by this process"


@dataclass(frozen=True, slots=True, init=False)
class RemoteCacheTierConfig(CacheTierConfig):
    """A store that hosts share, Mooncake Store: what one of them computed, the others find.

    It is no place of ours: what is there may be evicted at any moment. Takes the extra ``remote``,
    as in ``pip install hostmem[remote]``, and a master that runs.

    Parameters
    ----------
    master : str
        ``"host:port"`` of the master.
    metadata : str
        Where the hosts find each other: ``"http://host:port/metadata"``, or ``"P2PHANDSHAKE"`` for
        no such server.
    protocol : {"tcp", "rdma"}
        How pages travel.
    local_segment : int or str
        Bytes of this process's memory that the store may use, beside all quotas; 0 for none.
    replicas : int
        Copies of a page in the segments of as many processes.
    mode : {"write-through", "write-back", "read-only"}
        When pages go out: as soon as they are computed; when they leave the host level, which there
        must be then; or never.
    deadline : float
        Seconds after which nobody waits for the store any more; at most a day.
    in_flight : int
        Pages that may be under way, or wait for it, in each direction; one of each pool group at
        least. Others are not sent, or are misses.
    namespace : str
        What decides the bytes of a page and no configuration names: the model, its weights, their
        number format. Processes of different ones share nothing.
    host : str, optional
        How the others reach this host; by default by its address towards the master.
    devices : str
        The network cards for ``"rdma"``, such as ``"mlx5_0,mlx5_1"``; empty: those it finds.
    """

    tier: ClassVar[CacheTier] = CacheTier.REMOTE

    master: str
    metadata: str
    protocol: str
    quota: int
    max_quota: int | None
    replicas: int
    mode: str
    deadline: float
    in_flight: int
    namespace: str
    host: str | None
    devices: str

    def __init__(
        self,
        master: str,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        local_segment: Size = "1GiB",
        replicas: int = 1,
        *,
        mode: str = "write-through",
        deadline: float = 1.0,
        in_flight: int = 256,
        namespace: str = "",
        host: str | None = None,
        devices: str = "",
    ) -> None:
        segment = parse_size(local_segment, "remote.local_segment")
        _all([deadline], Real, "remote.deadline")
        text = {
            "master": master,
            "metadata": metadata,
            "protocol": protocol,
            "mode": mode,
            "namespace": namespace,
            "devices": devices,
        }
        for name, value in (text if host is None else text | {"host": host}).items():
            _all([value], str, f"remote.{name}")
        values = text | {
            "quota": segment,
            "max_quota": segment,
            "replicas": _whole(replicas, "remote.replicas"),
            "deadline": float(deadline),
            "in_flight": _whole(in_flight, "remote.in_flight"),
            "host": host,
        }
        for name, setting in values.items():
            object.__setattr__(self, name, setting)

    @property
    def local_segment(self) -> int:
        """Bytes of this process's memory that the store may use."""
        return self.quota

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the addresses, the numbers and the names."""
        host, _, port = self.master.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            yield f"remote.master: {self.master!r} is not host:port"
        if self.metadata != "P2PHANDSHAKE" and "://" not in self.metadata:
            yield f"remote.metadata: {self.metadata!r} is no URL, nor 'P2PHANDSHAKE'"
        for field, value, known in (
            ("protocol", self.protocol, PROTOCOLS),
            ("mode", self.mode, MODES),
        ):
            if value not in known:
                yield f"remote.{field}: {value!r} is none of {', '.join(map(repr, known))}"
        if self.quota < 0:
            yield f"remote.local_segment: {self.quota} B is below the minimum of 0 B"
        if self.replicas < 1:
            yield f"remote.replicas: {self.replicas} is below the minimum of 1"
        if self.in_flight < 1:
            yield f"remote.in_flight: {self.in_flight} is below the minimum of 1 page"
        if not (isfinite(self.deadline) and self.deadline > 0):
            yield f"remote.deadline: {self.deadline} s is not above 0 and finite"
        elif self.deadline > _DAY:
            yield f"remote.deadline: {self.deadline} s is above the maximum of {_DAY} s"
        if self.host == "":
            yield "remote.host: '' names no host; None takes the address towards the master"


@dataclass(frozen=True, slots=True, init=False)
class BufferConfig(_Checked):
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
class AttentionLayerConfig(_Checked):
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
        object.__setattr__(self, "layer_id", _whole(self.layer_id, "layer_id"))
        buffers = _all(self.buffers, BufferConfig, f"layer {self.layer_id}: buffers")
        object.__setattr__(self, "buffers", buffers)
        for name in ("sliding_window_size", "num_sink_tokens"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(value, f"layer {self.layer_id}: {name}"))

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
class KVCacheManagerConfig(_Checked):
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
        tokens = _whole(self.tokens_per_block, "tokens_per_block")
        object.__setattr__(self, "tokens_per_block", tokens)
        tiers = _all(self.cache_tiers, CacheTierConfig, "cache_tiers")
        if self.remote is not None:
            _all([self.remote], RemoteCacheTierConfig, "remote")
        elif tiers and isinstance(tiers[-1], RemoteCacheTierConfig):
            object.__setattr__(self, "remote", tiers[-1])
            tiers = tiers[:-1]
        object.__setattr__(self, "cache_tiers", tiers)
        object.__setattr__(self, "layers", _all(self.layers, AttentionLayerConfig, "layers"))
        if self.cold_page_codec is not None:
            check_codec(self.cold_page_codec)
        _all([self.max_util_for_resume], Real, "max_util_for_resume")
        if self.initial_pool_ratio is not None:
            ratio = _all(self.initial_pool_ratio, Real, "initial_pool_ratio")
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
        ranks = [_ORDER.index(tier) for tier in tiers]
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


def _whole(value: SupportsIndex, name: str) -> int:
    """Return a whole number, or say which field has something else."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected a whole number, not {value!r}")


def _all(values: Iterable[T], kind: type, name: str) -> tuple[T, ...]:
    """Return values as a tuple, or say which one is of another kind."""
    kept = tuple(values)
    for value in kept:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name}: expected {kind.__name__}, not {value!r}")
    return kept


def _flag(value: bool, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, not {value!r}")
    return value


def _repeated(values: Iterable[Hashable]) -> list[Hashable]:
    return [value for value, count in Counter(values).items() if count > 1]
