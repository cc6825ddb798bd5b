"""What a storage can say about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LevelStats", "StorageStats"]


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level at one moment."""

    slots: int
    """Pages it can hold, over all pool groups."""
    used: int
    """Pages it holds."""
    quota: int
    """Bytes it may use."""


@dataclass(frozen=True, slots=True)
class StorageStats:
    """A storage at one moment."""

    levels: dict[str, LevelStats]
    """By name of the level, the hot one first."""
    bytes_moved: dict[str, int]
    """Bytes submitted to be moved so far, by pair of levels such as ``gpu->host``."""
    pages_dropped: int
    """Pages evicted from the last level so far."""
