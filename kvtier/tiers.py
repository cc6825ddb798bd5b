"""The tiers of a cache: frozen data, checked before use as `kvtier.config` says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from math import isfinite
from numbers import Real
from operator import index
from typing import ClassVar, SupportsIndex, TypeVar

from hostmem import machine
from hostmem.page_mode import resolve_page_mode
from hostmem.units import Size, parse_size
from kvtier.quota import exact_size
from kvtier.transfer.compression import COMPRESSIONS

__all__ = [
    "CacheTier",
    "CacheTierConfig",
    "Checked",
    "DiskCacheTierConfig",
    "GpuCacheTierConfig",
    "HostCacheTierConfig",
    "RemoteCacheTierConfig",
    "every",
    "whole",
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


PROTOCOLS = ("tcp", "rdma")
"""How pages travel to a remote store."""
MODES = ("write-through", "write-back", "read-only")
"""When pages go out to a remote store."""
_DAY = 86_400  # seconds; longer than anybody waits, and less than any counter of milliseconds


class Checked:
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


class CacheTierConfig(Checked):
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
        every([deadline], Real, "remote.deadline")
        text = {
            "master": master,
            "metadata": metadata,
            "protocol": protocol,
            "mode": mode,
            "namespace": namespace,
            "devices": devices,
        }
        for name, value in (text if host is None else text | {"host": host}).items():
            every([value], str, f"remote.{name}")
        values = text | {
            "quota": segment,
            "max_quota": segment,
            "replicas": whole(replicas, "remote.replicas"),
            "deadline": float(deadline),
            "in_flight": whole(in_flight, "remote.in_flight"),
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


def whole(value: SupportsIndex, name: str) -> int:
    """Return a whole number, or say which field has something else."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected a whole number, not {value!r}")


def every(values: Iterable[T], kind: type, name: str) -> tuple[T, ...]:
    """Return values as a tuple, or say which one is of another kind."""
    kept = tuple(values)
    for value in kept:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name}: expected {kind.__name__}, not {value!r}")
    return kept


def _flag(value: bool, name: str) -> bool:
    """Return a flag, or say which field has something else."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, not {value!r}")
    return value
