"""What each policy hits, beside one that knows the future, and what it costs.

Every policy of ``kvtier.eviction.POLICIES`` replays one parsed trace on one level, by capacity;
*clairvoyant* knows the future: it drops the block that is asked for last, and lets none in that is
asked for later than all it has (Belady, with bypass). Times are of the replay loops alone, the
least of ``--rounds``, with the policies in turn. A policy that takes more than four times as long
as LRU is marked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

from bench.measure import machine_line
from kvtier.eviction import POLICIES, make_policy
from kvtier.replay import Request, generate, read_trace, replay_metadata

LIMIT = 4.0


def clairvoyant(requests: Sequence[Request], capacity: int) -> int:
    """Give the prefix hits of a cache that knows when each block is asked for next."""
    keys = [key for request in requests for key in request.hash_ids]
    never = len(keys)
    following = [never] * never  # index of the next reference to the same block
    seen: dict[int, int] = {}
    for at in reversed(range(never)):
        following[at] = seen.get(keys[at], never)
        seen[keys[at]] = at
    held: dict[int, int] = {}  # block -> its next reference
    latest: list[tuple[int, int]] = []  # heap of (-next reference, block); old entries stay
    hits = at = 0
    for request in requests:
        prefix = True
        for key in request.hash_ids:
            following_at = following[at]
            at += 1
            if key in held:
                hits += prefix
            else:
                prefix = False
                if following_at == never:
                    continue
                while len(held) >= capacity:
                    last, victim = latest[0]
                    if held.get(victim) == -last:
                        if -last <= following_at:
                            break
                        del held[victim]
                    heappop(latest)
                if len(held) >= capacity:
                    continue
            held[key] = following_at
            heappush(latest, (-following_at, key))
    return hits


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="default: generated")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the generated trace")
    parser.add_argument("--requests", metavar="N", type=int, default=12_000)
    parser.add_argument("--users", metavar="N", type=int, default=400)
    parser.add_argument(
        "--capacity-blocks", metavar="N", type=int, nargs="+",
        default=[1_000, 5_000, 10_000, 20_000, 50_000],
    )  # fmt: skip
    parser.add_argument("--rounds", metavar="N", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()

    requests = (
        read_trace(arguments.trace)
        if arguments.trace
        else list(generate(arguments.seed, arguments.requests, users=arguments.users))
    )
    block_refs = sum(len(request.hash_ids) for request in requests)
    distinct = len({key for request in requests for key in request.hash_ids})
    print(machine_line())
    print(
        f"{arguments.trace or 'generated trace'}: {len(requests):,} requests, "
        f"{block_refs:,} block references, {distinct:,} distinct blocks"
    )
    print(f"{'blocks':>10} {'policy':<12}{'hit rate':>9}{'of LRU':>8}{'us a ref':>10}{'of LRU':>8}")
    results: list[dict[str, object]] = []
    for capacity in arguments.capacity_blocks:
        hits: dict[str, int] = {}
        seconds: dict[str, float] = {}
        for _ in range(arguments.rounds):
            for name in POLICIES:
                result = replay_metadata(requests, make_policy(name, capacity))
                hits[name] = result.hits
                seconds[name] = min(result.seconds, seconds.get(name, result.seconds))
        hits["clairvoyant"] = clairvoyant(requests, capacity)
        for name, count in hits.items():
            line = f"{capacity:>10,} {name:<12}{count / block_refs:>9.4f}"
            line += f"{count / hits['lru']:>8.3f}" if hits["lru"] else f"{'-':>8}"
            if name in seconds:
                ratio = seconds[name] / seconds["lru"]
                line += f"{seconds[name] * 1e6 / block_refs:>10.2f}{ratio:>8.2f}"
                line += " !" if ratio > LIMIT else ""
            print(line)
            results.append(
                {
                    "capacity_blocks": capacity,
                    "policy": name,
                    "hit_rate": count / block_refs,
                    "us_a_reference": (
                        seconds[name] * 1e6 / block_refs if name in seconds else None
                    ),
                }
            )
    if arguments.json:
        document = {
            "machine": machine_line(),
            "trace": str(arguments.trace or "generated"),
            "requests": len(requests),
            "block_refs": block_refs,
            "results": results,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
