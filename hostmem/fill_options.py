"""The arguments of a `HostMem`, checked one by one before anything is taken."""

from __future__ import annotations

import math
import os

from hostmem.fill_threads import default_fill_threads
from hostmem.registration import OnRegisterFailure
from hostmem.units import Size, align_up, parse_size

__all__ = ["fill_rate_of", "policy_of", "size_of", "threads_of", "unit_of"]

_COMMIT_UNIT = 32 << 20


def size_of(name: str, value: Size, least: int) -> int:
    """Turn a size into bytes, at least ``least``; ValueError names the argument."""
    nbytes = parse_size(value, name)
    if nbytes < least:
        raise ValueError(f"{name}: {value!r}; give at least {least} byte{'s' * (least != 1)}")
    if nbytes >= 1 << 62:
        raise ValueError(f"{name}: {value!r} is more than any address space")
    return nbytes


def unit_of(commit_unit: Size | None, slot_size: int, page_size: int) -> int:
    """Turn ``commit_unit`` into bytes: a multiple of the slot size; at least a page by default."""
    if commit_unit is None:
        return align_up(max(_COMMIT_UNIT, page_size), slot_size)
    unit = size_of("commit_unit", commit_unit, 1)
    if unit % slot_size:
        raise ValueError(f"commit_unit: {unit} is no multiple of the slot size, {slot_size}")
    return unit


def threads_of(threads: int | str, *, registers: bool) -> int:
    """Turn ``fill_threads`` into a number of threads."""
    if threads == "auto":
        return default_fill_threads(registers)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(
            f"fill_threads: {threads!r}; give 'auto' or a number of threads, 1 or more"
        )
    return min(threads, max(4 * (os.cpu_count() or 1), 4))


def fill_rate_of(rate: float | None) -> float | None:
    """Check ``fill_rate``: positive and finite bytes per second, or None."""
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"fill_rate: {rate!r}; give bytes per second above 0, or None")
    return rate


def policy_of(policy: str) -> OnRegisterFailure:
    """Turn ``on_register_failure`` into its meaning."""
    try:
        return OnRegisterFailure(policy)
    except ValueError:
        names = ", ".join(repr(p.value) for p in OnRegisterFailure)
        raise ValueError(f"on_register_failure: {policy!r}; give one of {names}") from None
