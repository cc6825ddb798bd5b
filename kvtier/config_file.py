"""Configurations in files: a cache described in TOML or JSON.

```toml
tokens_per_block = 16
max_util_for_resume = 0.97       # these two may be left out,
initial_pool_ratio = [3, 1]      # as may all that has a default in the classes of the configuration

[[cache_tiers]]                  # hot to cold
tier = "gpu"                     # quota, max_quota
quota = "8GiB"

[[cache_tiers]]
tier = "host"                    # quota, max_quota, allow_remote_numa_fallback, page_mode
quota = "64GiB"

[[cache_tiers]]
tier = "disk"                    # quota, path, max_quota, persist, compression
quota = "1TiB"
path = "/var/cache/kv"

[[cache_tiers]]
tier = "remote"                  # master and what else RemoteCacheTierConfig takes
master = "kv-master:50051"
namespace = "llama-70b, fp8"

[[layers]]
count = 40                       # layers 0 to 39; without it one
buffers = { key = "64KiB", value = "64KiB" }

[[layers]]
layer_ids = [40, 42]             # or by their ids
sliding_window_size = 1024
num_sink_tokens = 4
buffers = { key = "64KiB", value = "64KiB" }
```

Sizes are bytes, or text such as ``"64GiB"``; those of buffers are of one block. JSON has the same
names. A codec for cold pages is code and has no place in a file.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hostmem.units import parse_size
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

__all__ = ["load_config", "parse_config"]

T = TypeVar("T")
Read = Callable[[object, str], T]
"""Reads a value, given where it is, or raises ValueError."""

_MOST_LAYERS = 1 << 16
"""Of one entry; a slip of the pen must not take all memory."""


def load_config(path: str | os.PathLike[str]) -> KVCacheManagerConfig:
    """Read a configuration from a file; the head of this module has the format.

    Parameters
    ----------
    path : str or path-like
        A file whose name ends in ``.toml`` or ``.json``.

    Returns
    -------
    KVCacheManagerConfig
        As the file has it; call its ``validate`` or ``plan`` to know whether it makes sense.

    Raises
    ------
    ValueError
        The file is not TOML or JSON, or has an unknown key, lacks one, or has a value of the wrong
        type; the message names the file and the place, such as ``cache_tiers[1].quota``.
    OSError
        The file cannot be read.
    """
    path = Path(path)
    try:
        if path.suffix == ".toml":
            return parse_config(tomllib.loads(path.read_text(encoding="utf-8")))
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8")
            return parse_config(json.loads(text, object_pairs_hook=_without_repeats))
        raise ValueError("the name must end in .toml or .json")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None


def parse_config(table: Mapping[str, object]) -> KVCacheManagerConfig:
    """Make a configuration of what a file has; see `load_config`."""
    with _Table(table, "") as top:
        return KVCacheManagerConfig(
            tokens_per_block=top.get("tokens_per_block", _whole),
            cache_tiers=top.get("cache_tiers", _each(_tier)),
            layers=list(_layers(top.get("layers", _each(_layer_entry)))),
            **top.optional(
                max_util_for_resume=_number,
                initial_pool_ratio=_each(_number),
            ),
        )


class _Table:
    """A table of a file, whose keys are asked for one by one; in the end none may be left."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(place, "a table", value)
        self._left = dict(value)
        self._known: list[str] = []
        self._place = place

    def get(self, key: str, read: Read[T]) -> T:
        """Read the value of a key that must be there."""
        self._known.append(key)
        if key not in self._left:
            raise ValueError(f"{self._at(key)}: missing")
        return read(self._left.pop(key), self._at(key))

    def optional(self, **keys: Read[Any]) -> dict[str, Any]:
        """Read the values of those keys that are there."""
        self._known += keys
        there = {key: read for key, read in keys.items() if key in self._left}
        return {key: self.get(key, read) for key, read in there.items()}

    def _at(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._left and error is None:
            known = ", ".join(dict.fromkeys(self._known))
            key = next(iter(self._left))
            raise ValueError(f"{self._at(key)}: unknown key; known here are {known}")


def _tier(value: object, place: str) -> CacheTierConfig:
    with _Table(value, place) as table:
        kind = table.get("tier", _tier_name)
        if kind is CacheTier.REMOTE:
            return _remote(table)
        quota = table.get("quota", _size)
        bound = table.optional(max_quota=_size)
        if kind is CacheTier.GPU:
            return GpuCacheTierConfig(quota, **bound)
        if kind is CacheTier.HOST:
            options = table.optional(allow_remote_numa_fallback=_flag, page_mode=_text)
            return HostCacheTierConfig(quota, **bound, **options)
        path = table.get("path", _text)
        options = table.optional(persist=_flag, compression=_text)
        return DiskCacheTierConfig(quota, path, **bound, **options)


def _remote(table: _Table) -> RemoteCacheTierConfig:
    text = dict.fromkeys(("metadata", "protocol", "mode", "namespace", "host", "devices"), _text)
    return RemoteCacheTierConfig(
        table.get("master", _text),
        **table.optional(**text),
        **table.optional(local_segment=_size, deadline=_number),
        **table.optional(replicas=_whole, in_flight=_whole),
    )


def _layer_entry(value: object, place: str) -> tuple[list[int] | int, dict[str, Any]]:
    """Read an entry: the ids of its layers, or how many they are, and what they have in common."""
    with _Table(value, place) as table:
        ids = table.optional(layer_ids=_each(_whole), count=_count)
        if len(ids) == 2:
            raise ValueError(f"{place}: give layer_ids or count, not both")
        common = table.optional(sliding_window_size=_whole, num_sink_tokens=_whole)
        common["buffers"] = table.get("buffers", _buffers)
        return next(iter(ids.values()), 1), common


def _layers(
    entries: Iterable[tuple[list[int] | int, dict[str, Any]]],
) -> Iterator[AttentionLayerConfig]:
    """Make the layers; where an entry only says how many, their ids follow the largest so far."""
    following = 0
    for ids, common in entries:
        for layer_id in range(following, following + ids) if isinstance(ids, int) else ids:
            yield AttentionLayerConfig(layer_id, **common)
            following = max(following, layer_id + 1)


def _buffers(value: object, place: str) -> list[BufferConfig]:
    if not isinstance(value, Mapping):
        raise _wrong(place, "a table of roles and sizes", value)
    return [BufferConfig(role, _size(size, f"{place}.{role}")) for role, size in value.items()]


def _each(read: Read[T]) -> Read[list[T]]:
    """Make a reader of lists."""

    def read_all(value: object, place: str) -> list[T]:
        if not isinstance(value, list):
            raise _wrong(place, "a list", value)
        return [read(one, f"{place}[{index}]") for index, one in enumerate(value)]

    return read_all


def _tier_name(value: object, place: str) -> CacheTier:
    try:
        return CacheTier(_text(value, place))
    except ValueError:
        raise _wrong(place, " or ".join(f"{tier.value!r}" for tier in CacheTier), value) from None


def _size(value: object, place: str) -> int:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return parse_size(value, place)
    raise _wrong(place, "bytes or text such as '64GiB'", value)


def _count(value: object, place: str) -> int:
    count = _whole(value, place)
    if not 0 < count <= _MOST_LAYERS:
        raise ValueError(f"{place}: {count:,} layers; the least is 1, the most {_MOST_LAYERS:,}")
    return count


def _whole(value: object, place: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(place, "a whole number", value)


def _number(value: object, place: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise _wrong(place, "a number", value)


def _flag(value: object, place: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(place, "true or false", value)


def _text(value: object, place: str) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(place, "text", value)


def _wrong(place: str, expected: str, value: object) -> ValueError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ValueError(f"{f'{place}: ' if place else ''}expected {expected}, not {shown}")


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a table of JSON, in which a name that is there twice would hide the first."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return table
