"""Replay without bytes: what a policy would hit on one level, and what the bookkeeping costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from kvtier.eviction import EvictionPolicy
from kvtier.replay.progress import Progress
from kvtier.replay.recording import Moment, Recording
from kvtier.replay.trace import Request

__all__ = ["MetadataResult", "replay_metadata"]

_STRIDE = 256
"""Requests between two looks at the progress line; a few milliseconds."""


@dataclass(frozen=True, slots=True)
class MetadataResult:
    """Counts of a replay without bytes."""

    requests: int
    """Requests replayed."""
    block_refs: int
    """Block references, the length of all ``hash_ids``."""
    hits: int
    """References that came before their request's first absent block."""
    seconds: float
    """Time of the replay loop alone."""


def replay_metadata(
    requests: Sequence[Request],
    policy: EvictionPolicy[int],
    progress: Progress | None = None,
    recording: Recording | None = None,
) -> MetadataResult:
    """Replay a trace on one level.

    Parameters
    ----------
    requests : sequence of Request
        A parsed trace.
    policy : EvictionPolicy of int
        Decides what stays; left in its final state.
    progress : Progress, optional
        Told every few milliseconds.
    recording : Recording, optional
        Given the course of the replay, its one level called ``gpu``.

    Returns
    -------
    MetadataResult
        The counts and the time.

    Notes
    -----
    Blocks for the whole replay; adds 0.1 us a request to what the policy costs.
    """
    reference = policy.reference
    block_refs = hits = 0
    start = perf_counter()
    for first in range(0, len(requests), _STRIDE):
        stretch = requests[first : first + _STRIDE]
        for request in stretch:
            ids = request.hash_ids
            block_refs += len(ids)
            hits += reference(ids)
        if progress is not None:
            progress.update(first + len(stretch), block_refs=block_refs, hits=hits)
        if recording is not None:
            taken = _moments(first + len(stretch), block_refs, hits)
            recording.note(perf_counter() - start, taken)
    seconds = perf_counter() - start
    if recording is not None:
        recording.end(_moments(len(requests), block_refs, hits)(seconds))
    return MetadataResult(len(requests), block_refs, hits, seconds)


def _moments(requests: int, block_refs: int, hits: int) -> Callable[[float], Moment]:
    """Give what makes a moment of these counts."""

    def take(seconds: float) -> Moment:
        return Moment(seconds=seconds, requests=requests, block_refs=block_refs, hits={"gpu": hits})

    return take
