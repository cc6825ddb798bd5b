"""What the bookkeeping costs: the LRU policy against a bare ``OrderedDict`` doing the same.

Both replay one parsed trace on one level of ``--capacity-blocks`` blocks, in turn, and must count
the same hits; only the loops are timed. Exit status 1 when ours takes more than six times as long.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from bench.measure import machine_line, pairs, write_json
from kvtier.eviction import make_policy
from kvtier.replay import Request, generate, read_trace, replay_metadata

LIMIT = 6.0


def ordered_dict_lru(requests: Sequence[Request], capacity: int) -> tuple[int, float]:
    """Replay on the plainest LRU there is; return prefix hits and seconds."""
    start = perf_counter()
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        prefix = True
        for key in request.hash_ids:
            if key in cache:
                cache.move_to_end(key)
                hits += prefix
            else:
                prefix = False
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[key] = None
    return hits, perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="default: 12,000 generated requests")
    parser.add_argument("--capacity-blocks", metavar="N", type=int, default=20_000)
    parser.add_argument("--pairs", metavar="N", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()

    requests = read_trace(arguments.trace) if arguments.trace else list(generate(0, 12_000))
    capacity = arguments.capacity_blocks
    block_refs = sum(len(request.hash_ids) for request in requests)
    counts: set[int] = set()

    def ours() -> float:
        result = replay_metadata(requests, make_policy("lru", capacity))
        counts.add(result.hits)
        return result.seconds

    def peer() -> float:
        hits, seconds = ordered_dict_lru(requests, capacity)
        counts.add(hits)
        return seconds

    result = pairs(ours, peer, arguments.pairs)
    if len(counts) != 1:
        sys.exit(f"the two disagree about the hits: {sorted(counts)}")
    (hits,) = counts
    print(machine_line())
    print(
        f"{arguments.trace or 'generated trace'}: {len(requests):,} requests, "
        f"{block_refs:,} block references, {capacity:,} blocks, hit rate {hits / block_refs:.2%}"
    )
    for name, seconds in (("kvtier lru", result.ours_median), ("OrderedDict", result.peer_median)):
        print(f"{name:<12}{seconds:8.4f} s{seconds * 1e6 / block_refs:8.3f} us a reference")
    low, high = result.ratio_quartiles
    verdict = "holds" if result.ratio <= LIMIT else "FALLS SHORT"
    print(
        f"{'ratio':<12}{result.ratio:8.2f}   quartiles {low:.2f}-{high:.2f}, "
        f"{arguments.pairs} pairs; at most {LIMIT:g}: {verdict}"
    )
    if arguments.json:
        write_json(
            arguments.json,
            {"metadata_lru": result},
            trace=str(arguments.trace or "generated"),
            requests=len(requests),
            block_refs=block_refs,
            capacity_blocks=capacity,
            hits=hits,
        )
    return 0 if result.ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
