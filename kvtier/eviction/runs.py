"""Runs of keys, and cohorts of runs: what a policy knows about prefixes and about time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Cohort", "Run"]

Key = TypeVar("Key", bound=Hashable)


class Run(Generic[Key]):
    """Keys that follow each other in a prefix and have always been asked for together.

    Runs form a tree: a request passes through a run, its child, and so on. The keys of a run are
    worth the same, except that each is worthless without those before it; so a run loses its last
    key first, and a run with children loses none. What is left of a run without keys is a ghost.
    """

    __slots__ = (
        "cohort", "depth", "keys", "kids", "kind", "parent", "refused", "request", "uses", "weight",
    )  # fmt: skip

    def __init__(self, keys: list[Key], depth: int, kind: int, request: int) -> None:
        self.keys = keys
        """In the order of the prefix."""
        self.depth = depth
        """Runs from the root to this one, itself included."""
        self.kind = kind
        """A kind of `kvtier.eviction.outlook`."""
        self.request = request
        """Number of the last request that used it."""
        self.uses = 1
        """Requests that used it."""
        self.parent: Run[Key] | None = None
        self.kids = 0
        """Runs with keys whose parent this is."""
        self.cohort: Cohort[Key] | None = None
        """Whom it ages with; None while the request that uses it lasts."""
        self.weight = 0
        """Keys that it had when it joined the cohort."""
        self.refused = False
        """Whether it goes before all others: it is worth less than what went for it."""

    @property
    def turns(self) -> int:
        """How often this stretch of a conversation, or what led to it, was asked for.

        Each turn of a conversation either uses a run again or adds one below it: the first runs
        of an old conversation and its last one get the same number.
        """
        return self.depth + self.uses - 1


class Cohort(Generic[Key]):
    """Runs of one class that were last used in one epoch: they grow old together."""

    __slots__ = ("cell", "epoch", "leaves", "weight")

    def __init__(self, cell: int, epoch: int) -> None:
        self.cell = cell
        """Their class and age, see `kvtier.eviction.outlook`."""
        self.epoch = epoch
        """When they were last used."""
        self.weight = 0
        """Keys of all its runs, of ghosts as well."""
        self.leaves: OrderedDict[Run[Key], None] = OrderedDict()
        """Its runs that may lose a key now."""
