"""Which block to drop first: policies by name.

A new policy is a subclass of `EvictionPolicy` and an entry in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from kvtier.eviction.arc import ARC
from kvtier.eviction.lru import LRU
from kvtier.eviction.policy import EvictionPolicy
from kvtier.eviction.prospect import Prospect
from kvtier.eviction.s3fifo import S3FIFO

__all__ = ["ARC", "LRU", "POLICIES", "S3FIFO", "EvictionPolicy", "Prospect", "make_policy"]

POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    "lru": LRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "prospect": Prospect,
}
"""The policies, by the names that configurations and the command line use."""


def make_policy(
    name: str,
    capacity: int | None = None,
    identity: Callable[[Any], Hashable] | None = None,
) -> EvictionPolicy[Any]:
    """Build a policy by name.

    Parameters
    ----------
    name : str
        A key of `POLICIES`.
    capacity : int, optional
        Keys that the cache holds; None: unbounded.
    identity : callable, optional
        What a key stands for; see `EvictionPolicy`.

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
    return policy(capacity, identity)
