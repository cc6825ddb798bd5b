"""Compare what could compress the disk level: ratio, and rates of one core, side by side.

    python -m bench.codec [--page 1MiB] [--pages 16] [--rounds 5] [--json FILE]

Pages hold normally distributed numbers in bfloat16, which is roughly what keys and values are. Ours
is `SlotPacker` with `Blosc2`: header, checksum and rounding to 4 KiB are in its figures. The others
are zlib, and LZ4, Zstandard and zlib as blosc2 has them, bare. Every other arm is to have a lower
ratio than ours, but for what ours is made of.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure import in_turn, machine_line, spread
from hostmem.units import format_size, parse_size
from kvtier.transfer.compression import SlotPacker, compression

GIB = 1 << 30
Bytes = NDArray[np.uint8]


def bfloat16(pages: int, page: int) -> list[Bytes]:
    """Make pages of normally distributed numbers."""
    rng, made = np.random.default_rng(0), []
    for _ in range(pages):
        bits = rng.standard_normal(page // 2).astype(np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        made.append((rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8))
    return made


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to compress."""

    pack: Callable[[Bytes], Any]
    unpack: Callable[[Any, Bytes], object]


def ours(page: int) -> Arm:
    packer = SlotPacker(compression("blosc2"), page)
    return Arm(lambda data: packer.pack(data, np.empty(page, np.uint8)), packer.unpack)


def plain_zlib() -> Arm:
    def unpack(packed: bytes, out: Bytes) -> None:
        out[:] = np.frombuffer(zlib.decompress(packed), np.uint8)

    return Arm(lambda data: zlib.compress(data.tobytes(), 1), unpack)


def blosc(codec: str, filter_: str) -> Arm:
    blosc2: Any = import_module("blosc2")
    how = {
        "codec": blosc2.Codec[codec],
        "clevel": 1,
        "typesize": 2,
        "filters": [blosc2.Filter[filter_]],
        "filters_meta": [0],
        "nthreads": 1,
    }
    return Arm(
        lambda data: blosc2.compress2(data, **how),
        lambda packed, out: blosc2.decompress2(packed, out, nthreads=1),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.codec", description=__doc__)
    parser.add_argument("--page", default="1MiB", help="bytes of a page")
    parser.add_argument("--pages", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    page = parse_size(options.page, "page")
    arms = {
        "ours: zstd, shuffled": ours(page),
        "zstd, shuffled, bare": blosc("ZSTD", "SHUFFLE"),
        "zstd": blosc("ZSTD", "NOFILTER"),
        "zstd, bits shuffled": blosc("ZSTD", "BITSHUFFLE"),
        "lz4": blosc("LZ4", "NOFILTER"),
        "lz4, shuffled": blosc("LZ4", "SHUFFLE"),
        "lz4, bits shuffled": blosc("LZ4", "BITSHUFFLE"),
        "zlib, shuffled": blosc("ZLIB", "SHUFFLE"),
        "zlib of the library": plain_zlib(),
    }
    pages, out = bfloat16(options.pages, page), np.empty(page, np.uint8)
    packed = {name: [arm.pack(data) for data in pages] for name, arm in arms.items()}
    size = page * len(pages)

    def packing(name: str) -> float:
        start = thread_time()
        for data in pages:
            arms[name].pack(data)
        return thread_time() - start

    def unpacking(name: str) -> float:
        start = thread_time()
        for made in packed[name]:
            arms[name].unpack(made, out)
        seconds = thread_time() - start
        if not np.array_equal(out, pages[-1]):
            raise SystemExit(f"{name}: not what was packed")
        return seconds

    print(machine_line())
    print(f"{len(pages)} pages of {format_size(page)}, {options.rounds} rounds, one core\n")
    print(f"{'':22} {'ratio':>6} {'in, GiB/s':>20} {'out, GiB/s':>20}")
    figures = {}
    rounds = [
        in_turn({name: partial(run, name) for name in arms}, options.rounds)
        for run in (packing, unpacking)
    ]
    for name, made in packed.items():
        ratio = size / sum(map(len, made))
        rates = [spread([size / s / GIB for s in times[name]]) for times in rounds]
        figures[name] = {"ratio": ratio, "in": rates[0], "out": rates[1]}
        shown = (f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in rates)
        print(f"{name:22} {ratio:6.3f}", *(f"{text:>20}" for text in shown))
    if options.json:
        document = {"machine": machine_line(), "page": page, "results": figures}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
