"""Which block to drop first: policies by name.

A new policy is a subclass of `EvictionPolicy` and an entry in `POLICIES`.
"""

from __future__ import annotations

from typing import Any

from kvtier.eviction.lru import LRU
from kvtier.eviction.policy import EvictionPolicy

__all__ = ["LRU", "POLICIES", "EvictionPolicy", "make_policy"]

POLICIES: dict[str, type[EvictionPolicy[Any]]] = {"lru": LRU}
"""The policies, by the names that configurations and the command line use."""


def make_policy(name: str, capacity: int | None = None) -> EvictionPolicy[Any]:
    """Build a policy by name.

    Parameters
    ----------
    name : str
        A key of `POLICIES`.
    capacity : int, optional
        Keys that the cache holds; None: unbounded.

    Raises
    ------
    ValueError
        If there is no policy of that name, or the capacity is below 1.
    """
    try:
        policy = POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"policy: there is no {name!r}; choose from {known}") from None
    return policy(capacity)
