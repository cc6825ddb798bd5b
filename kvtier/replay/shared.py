"""Replay by two processes that share a remote store: what each finds of the other's work."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from kvtier.replay.options import ReplayOptions
from kvtier.replay.progress import Progress
from kvtier.replay.summary import LevelUse, ReplayResult
from kvtier.replay.trace import Request

__all__ = ["CROSS_HOST", "OWN", "format_sharing", "replay_shared"]

PROCESSES = 2
CROSS_HOST, OWN = "remote", "remote-own"
"""What hits in the store are counted under: blocks that another process computed, or this one."""


def replay_shared(requests: Sequence[Request], options: ReplayOptions) -> ReplayResult:
    """Deal the requests of a trace in turn to processes that share a store, and serve them at once.

    Each process has all the tiers of the options for itself. Blocks that come from the store are
    compared byte for byte.

    Parameters
    ----------
    requests : sequence of Request
        In order.
    options : ReplayOptions
        The tiers; ``remote`` names the master of a store that runs.

    Returns
    -------
    ReplayResult
        Of all processes together; ``seconds`` is the longest, and there is no latency.

    Raises
    ------
    ImportError
        Mooncake's package is not installed.
    Exception
        As `replay_bytes`, from any of the processes.
    """
    # What an earlier replay left in the store is not found.
    options = replace(options, remote_namespace=f"replay {os.urandom(8).hex()}")
    context = get_context("spawn")  # the engine's threads must not be forked
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        parts = [
            pool.submit(_serve, list(requests[first::PROCESSES]), options)
            for first in range(PROCESSES)
        ]
        results = [part.result() for part in parts]
    return _together(results)


def _serve(requests: Sequence[Request], options: ReplayOptions) -> ReplayResult:
    """Serve one process's requests."""
    from kvtier.replay.engine import replay_bytes

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        return replay_bytes(requests, options, Progress(len(requests), nowhere))


def _together(results: Sequence[ReplayResult]) -> ReplayResult:
    hits: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for result in results:
        hits.update(result.hits_by_level)
        moved.update(result.bytes_moved or {})
    levels = {
        name: LevelUse(
            slots=sum(result.levels[name].slots or 0 for result in results),
            quota=sum(result.levels[name].quota or 0 for result in results),
            used=sum(result.levels[name].used for result in results),
        )
        for name in results[0].levels
    }
    return replace(
        results[0],
        requests=sum(result.requests for result in results),
        block_refs=sum(result.block_refs for result in results),
        hits=sum(result.hits for result in results),
        hits_by_level=dict(hits),
        bytes_moved=dict(moved),
        levels=levels,
        seconds=max(result.seconds for result in results),
        verified_blocks=sum(result.verified_blocks or 0 for result in results),
        corrupt_blocks=sum(result.corrupt_blocks or 0 for result in results),
        lost_blocks=sum(result.lost_blocks or 0 for result in results),
        first_request_done_seconds=None,
        host_tier_filled_seconds=None,
        latency_us=None,
    )


def format_sharing(result: ReplayResult) -> str:
    """Say what the processes found in the store, in a line for a person."""
    cross, own = (result.hits_by_level.get(name, 0) for name in (CROSS_HOST, OWN))
    share = cross / result.block_refs if result.block_refs else 0.0
    return (
        f"{PROCESSES} processes: {cross:,} cross-host hits ({share:.2%} of all references), "
        f"{own:,} on own blocks in the store"
    )
