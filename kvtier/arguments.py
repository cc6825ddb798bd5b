"""Arguments that would do harm later if they were of a wrong type."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from hostmem import Event

__all__ = ["check_event", "whole_number"]


def check_event(event: object, name: str) -> None:
    """Raise TypeError unless something is an `Event`."""
    if not isinstance(event, Event):
        raise TypeError(f"{name}: a hostmem.Event is needed, not {type(event).__name__}")


def whole_number(value: SupportsIndex, name: str) -> int:
    """Give a whole number; TypeError for anything else."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: a whole number is needed, not {value!r}") from None
