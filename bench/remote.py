"""Time the remote level against the bare client of Mooncake Store, in the same run.

    make build/remote/venv/stamp
    LD_LIBRARY_PATH=... build/remote/venv/bin/python -m bench.remote [--size 64MiB] [--rounds 7]
        [--json FILE]

A master and a process that lends the store its memory run beside; every byte crosses the loopback.
Ours stores blocks in a cache of host memory until all have gone out, and prefetches them into an
empty one: with a checksum made or compared, slots taken, and blocks entered. The bare client moves
as many bytes between registered memory and the store, in calls of as many blocks as ours. Look-ups
are of 1,000 keys in one call, of which none is there.

Printed are rates in GiB/s and how many times the bare client's ours is: the median of the rounds
(with the quartiles). The aim is 0.9.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import (
    Finding,
    Table,
    compare,
    in_turn,
    machine_line,
    quartiles,
    write_tables,
)
from hostmem import StaticHostMem
from hostmem.units import format_size, parse_size
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    RemoteCacheTierConfig,
    TierStorage,
)
from kvtier.remote.client import MooncakeClient
from kvtier.remote.names import ObjectNames
from kvtier.remote.outbox import BATCH

GIB = 1 << 30
BLOCK = 256 << 10
AIM = 0.9
LOOKED_UP = 1000
Arms = dict[str, Callable[[], float]]


def free_port() -> int:
    """Find a port that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start_master(stack: ExitStack) -> str:
    """Start a master that ends with the stack; its address."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the module mooncake is not installed: see the head of this file")
    port = free_port()
    process = subprocess.Popen(
        [
            str(Path(spec.submodule_search_locations[0], "mooncake_master")),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            f"--metrics_port={free_port()}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"127.0.0.1:{port}"
        if process.poll() is not None:
            sys.exit("the master ended at once")
        time.sleep(0.01)


def lend(master: str, size: int) -> None:
    """Lend the store memory until the standard input ends: what the peer process does."""
    client = MooncakeClient(tier(master, size))
    print("ready", flush=True)
    sys.stdin.read()
    client.close()


def tier(master: str, segment: int = 0, in_flight: int = 1 << 20) -> RemoteCacheTierConfig:
    """Describe the store."""
    return RemoteCacheTierConfig(
        master, local_segment=segment, host="127.0.0.1", deadline=30.0, in_flight=in_flight
    )


class Bare:
    """The client alone, with registered memory."""

    def __init__(self, master: str, size: int, stack: ExitStack) -> None:
        self.client = MooncakeClient(tier(master))
        stack.callback(self.client.close)
        memory = StaticHostMem(size, device="cpu")
        stack.callback(memory.close)
        memory.view()[:] = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8)
        self.client.register(memory.address, size)
        stack.callback(self.client.unregister, memory.address)
        self._pages = [memory.address + at for at in range(0, size, BLOCK)]
        self.store: Any = self.client._store
        self._round = 0

    def put(self) -> float:
        """Store everything; the seconds."""
        self._round += 1
        start = time.perf_counter()
        for keys, pages in self._batches():
            assert not any(self.store.batch_put_from(keys, pages, [BLOCK] * len(keys)))
        return time.perf_counter() - start

    def get(self) -> float:
        """Read everything that was stored last, and remove it; the seconds of reading."""
        start = time.perf_counter()
        for keys, pages in self._batches():
            codes = self.store.batch_get_into(keys, pages, [BLOCK] * len(keys))
            assert set(codes) == {BLOCK}
        seconds = time.perf_counter() - start
        for keys, _ in self._batches():
            self.client.remove(keys)
        return seconds

    def _batches(self) -> list[tuple[list[str], list[int]]]:
        names = [f"bare-{self._round}-{n}" for n in range(len(self._pages))]
        firsts = range(0, len(names), BATCH)
        return [(names[at : at + BATCH], self._pages[at : at + BATCH]) for at in firsts]

    def look_up(self) -> float:
        """Ask for keys that are not there; the seconds."""
        names = [f"none-{n:032x}" for n in range(LOOKED_UP)]
        start = time.perf_counter()
        self.store.batch_is_exist(names)
        return time.perf_counter() - start


class Ours:
    """A cache that sends and one that fetches."""

    def __init__(self, master: str, size: int, stack: ExitStack) -> None:
        self._keys = list(range(size // BLOCK))
        layers = [AttentionLayerConfig(0, [BufferConfig("kv", BLOCK)])]
        self._caches: list[tuple[TierStorage, BlockCache[int]]] = []
        for _ in range(2):
            tiers = [HostCacheTierConfig(size, size), tier(master)]
            self._config = KVCacheManagerConfig(16, tiers, layers)
            storage = stack.enter_context(TierStorage(self._config, device="cpu"))
            memory: Any = storage.levels[0].groups[0].memory.pools[0]
            view = memory.memory.view()
            view[:] = np.frombuffer(np.random.default_rng(1).bytes(len(view)), np.uint8)
            del view
            self._caches.append((storage, BlockCache(storage)))
        self._client = MooncakeClient(tier(master))
        stack.callback(self._client.close)
        self._sent = self._fetched = 0

    def _stats(self, which: int) -> Any:
        return self._caches[which][0].stats().remote

    def put(self) -> float:
        """Commit every block, and wait until all have gone out; the seconds."""
        _, cache = self._caches[0]
        cache.drop(self._keys)
        with cache.reserve(self._keys) as room:
            room.wait()
            self._sent += len(self._keys)
            start = time.perf_counter()
            room.commit()
            while (found := self._stats(0)).sent_pages < self._sent:
                assert not found.unsent, found
                time.sleep(0.0005)
        return time.perf_counter() - start

    def get(self) -> float:
        """Prefetch every block that was stored last, and remove it; the seconds of fetching."""
        _, cache = self._caches[1]
        cache.drop(self._keys)
        start = time.perf_counter()
        cache.prefetch(self._keys).wait()
        seconds = time.perf_counter() - start
        assert cache.match(self._keys) == len(self._keys), self._stats(1)
        names = ObjectNames(self._config)
        self._client.remove([names.name(key, 0) for key in self._keys])
        return seconds

    def look_up(self) -> float:
        """Ask for keys that are not there; the seconds."""
        keys = range(1 << 40, (1 << 40) + LOOKED_UP)
        start = time.perf_counter()
        self._caches[1][1].lookup(keys)
        return time.perf_counter() - start


def compared(
    what: str, times: dict[str, list[float]], size: int
) -> tuple[list[str], list[Finding]]:
    """Compare the two: a row of the table, and a finding if bytes were moved."""
    bare, ours = times["bare client"], times["ours"]
    pairs = compare(bare, ours)  # its time over ours
    low, high = pairs.ratio_quartiles
    ratio = f"{pairs.ratio:.2f} ({low:.2f}-{high:.2f})"
    shown = [
        f"{quartiles([size / s / GIB for s in one])} GiB/s" if size else f"{quartiles(one, 1e3)} ms"
        for one in (bare, ours)
    ]
    row = [what, *shown, ratio]
    if not size:
        return row, []
    question, beside = f"{what} beside the bare client of the store", f"bare client: {shown[0]}"
    held = pairs.ratio >= AIM
    return row, [Finding(question, shown[1], f">= {AIM} of it", beside, ratio, held)]


def measure(master: str, size: int, rounds: int) -> tuple[Table, list[Finding], dict[str, Any]]:
    """Measure all; the table, what has a bound, and the seconds."""
    with ExitStack() as stack:
        bare, ours = Bare(master, size, stack), Ours(master, size, stack)
        puts: dict[str, list[float]] = {"bare client": [], "ours": []}

        def both(name: str, one: Bare | Ours) -> Callable[[], float]:
            """What is read must have been stored: the time of that is kept beside."""

            def run() -> float:
                puts[name].append(one.put())
                return one.get()

            return run

        arms: Arms = {"bare client": both("bare client", bare), "ours": both("ours", ours)}
        gets = in_turn(arms, rounds)
        lookups = in_turn({"bare client": bare.look_up, "ours": ours.look_up}, 10 * rounds)
    stores = {name: seconds[1:] for name, seconds in puts.items()}
    seconds = {"store": stores, "fetch": gets, f"look up {LOOKED_UP:,} keys": lookups}
    found = [
        compared(what, times, 0 if times is lookups else size) for what, times in seconds.items()
    ]
    table = Table(
        f"Blocks of {format_size(BLOCK)} to a remote store and back, {format_size(size)}",
        ["", "bare client", "ours", "of the bare client's rate"],
        [row for row, _ in found],
        "Mooncake Store over TCP on the loopback. Medians and quartiles.",
    )
    return table, [finding for _, some in found for finding in some], seconds


def main() -> None:
    """Start what it takes, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="64MiB", help="bytes a run moves")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lend", metavar="MASTER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = parse_size(options.size, "size") // (BATCH * BLOCK) * (BATCH * BLOCK)
    if options.lend:
        lend(options.lend, 3 * size)
        return
    with ExitStack() as stack:
        os.environ.setdefault("GLOG_minloglevel", "3")  # the engine says much
        master = start_master(stack)
        command = [sys.executable, "-m", "bench.remote", "--lend", master, "--size", str(size)]
        peer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        stack.callback(peer.wait)
        assert peer.stdin is not None
        assert peer.stdout is not None
        stack.callback(peer.stdin.close)
        peer.stdout.readline()
        print(machine_line())
        table, findings, seconds = measure(master, size, options.rounds)
        for part in (table, *findings):
            print(part)
        if options.json:
            write_tables(options.json, [table], findings, rounds=options.rounds, seconds=seconds)


if __name__ == "__main__":
    main()
