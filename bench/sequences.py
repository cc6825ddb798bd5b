"""Time what an engine's step loop asks of sequences: one token for each of many.

    python -m bench.sequences [--sequences 256] [--steps 320] [--tokens-per-block 16]

Each step calls ``grow(1)``, ``page_table`` of every group, ``events`` and ``commit`` for each
sequence. Steps in which no block gets full and no page is needed are told from the others. Printed
are the median and the 10th and 90th percentile over the steps, in microseconds a sequence, then
what a pause, a return and an end cost, and a key. Nothing is computed, and nothing moves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import quantiles
from time import perf_counter_ns

import numpy as np

from bench.measure import machine_line
from hostmem import HostEvent
from kvtier import AttentionLayerConfig, BufferConfig, GpuCacheTierConfig, KVCacheManagerConfig
from kvtier.keys import chain_keys
from kvtier.manager import KVCacheManager
from kvtier.sequence import KVSequence

PROMPT = 100  # tokens


def row(name: str, times: list[float]) -> None:
    """Print the percentiles of times in microseconds."""
    tenths = quantiles(times, n=10) if len(times) > 1 else times * 9
    print(f"  {name:<34}{tenths[4]:>8.2f}{tenths[0]:>8.2f}{tenths[8]:>8.2f}")


def timed(action: Callable[[], object], calls: int = 1) -> float:
    """Time an action, in microseconds a call."""
    start = perf_counter_ns()
    action()
    return (perf_counter_ns() - start) / 1e3 / calls


def step(sequences: list[KVSequence], groups: int, tokens: list[int], ready: HostEvent) -> None:
    """Do what an engine does around one step."""
    for sequence in sequences:
        sequence.grow(1)
        for group in range(groups):
            sequence.page_table(group)
        sequence.events  # noqa: B018
        sequence.commit(tokens, ready)


def steps(layers: list[AttentionLayerConfig], n: int, count: int, block: int) -> None:
    """Measure sequences over one set of layers."""
    slots = n * ((PROMPT + count) // block + 2)
    quota = max(2 * slots * 64 * len(layers), 2 << 20 << len(layers))
    config = KVCacheManagerConfig(block, [GpuCacheTierConfig(quota, quota)], layers)
    with KVCacheManager(config, device="cpu") as manager:
        sequences = [manager.create_sequence() for _ in range(n)]
        for number, sequence in enumerate(sequences):
            sequence.grow(PROMPT)
            sequence.commit([number] * PROMPT)
        plain: list[float] = []
        paging: list[float] = []
        for number in range(count):
            ready = HostEvent()
            before = sequences[0].num_tokens
            took = timed(partial(step, sequences, len(layers), [number], ready), n)
            ready.set()
            turns = before % block == 0 or (before + 1) % block == 0
            (paging if turns else plain).append(took)
        row("step, no block full, no page", plain)
        row("step with one of these", paging)
        row("suspend", [timed(sequence.suspend) for sequence in sequences])
        row("resume", [timed(sequence.resume) for sequence in sequences])
        row("close", [timed(sequence.close) for sequence in sequences])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--tokens-per-block", type=int, default=16)
    options = parser.parse_args()
    print(f"{machine_line()}, {options.sequences} sequences")
    print(f"  {'us a sequence':<34}{'median':>8}{'10 %':>8}{'90 %':>8}")
    full = AttentionLayerConfig(0, [BufferConfig("kv", 64)])
    windowed = AttentionLayerConfig(1, [BufferConfig("kv", 64)], sliding_window_size=64)
    for name, layers in (("one pool group", [full]), ("and one of a window", [full, windowed])):
        print(name)
        steps(layers, options.sequences, options.steps, options.tokens_per_block)
    block = options.tokens_per_block
    tokens = np.random.default_rng(0).integers(0, 150_000, 256 * block)
    print("a key")
    for kind, given in (("of an array", tokens), ("of a list", tokens.tolist())):
        row(kind, [timed(partial(chain_keys, given, block), 256) for _ in range(50)])


if __name__ == "__main__":
    main()
