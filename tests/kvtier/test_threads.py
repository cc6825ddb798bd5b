"""Eight threads at once on one storage: whatever they do, bytes are right and the books balance.

Two seconds a test; ``KVTIER_STRESS_SECONDS=60`` makes it a minute.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import HostEvent, OutOfPagesError, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockLease,
    BlockReservation,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
)
from kvtier.transfer.memory import MemoryPool

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers
    from tests.threads import Spawn

SECONDS = float(os.environ.get("KVTIER_STRESS_SECONDS", "2"))
THREADS = 8
MIB = 1 << 20
KEYS = 900  # more than all levels hold
QUOTAS = ((4, 8), (6, 12), (10, 20))  # MiB that each level has at least and at most
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", 16 << 10), BufferConfig("value", 16 << 10)]),
    AttentionLayerConfig(1, [BufferConfig("kv", 20 << 10)], sliding_window_size=64),
]
Bytes = NDArray[np.uint8]


class StepError(Exception):
    """A step of the model that failed: its blocks never held what they should."""


class Stress:
    """What the threads share."""

    def __init__(self, tiers: Tiers, storage: TierStorage, tolerated: type[Exception]) -> None:
        self.tiers = tiers
        self.storage = storage
        self.cache: BlockCache[int] = BlockCache(storage)
        self.tolerated = (StepError, tolerated)
        """What a copy may fail of."""
        self.steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.contents: dict[tuple[int, int], Bytes] = {}
        self.until = time.monotonic() + SECONDS

    def model(self) -> None:
        """Run steps in the order of their submission, as a device does."""
        while (step := self.steps.get()) is not None:
            step()

    def parts(
        self, held: BlockLease[int] | BlockReservation[int]
    ) -> Iterator[tuple[int, Bytes, Bytes]]:
        """Give the key of each piece of hot memory, the piece, and what it should hold."""
        for group, found in enumerate(self.storage.levels[0].groups):
            memory = found.memory
            for key, slot in zip(held.keys, held.slots(group).tolist(), strict=True):
                if slot < 0:
                    continue  # the window does not show it
                content = self.contents.get((group, key))
                if content is None:
                    content = self.tiers.content(key * 2 + group, memory.page_bytes)
                    self.contents[group, key] = content
                for pool, offset in zip(memory.pools, memory.offsets, strict=True):
                    part = content[offset : offset + pool.slot_size]
                    yield key, self.tiers._slot(cast(MemoryPool, pool), slot), part


class Worker:
    """One thread: does one thing after another, chosen by chance."""

    def __init__(self, shared: Stress, seed: int) -> None:
        self.shared = shared
        self.storage, self.cache = shared.storage, shared.cache
        self.random = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.leases: list[BlockLease[int]] = []
        self.kept: set[int] = set()

    def run(self) -> Counter[str]:
        things = {
            self.acquire: 30,
            self.reserve: 30,
            self.release: 15,
            self.touch: 5,
            self.set_priority: 3,
            self.keep: 2,
            self.unkeep: 4,
            self.drop: 2,
            self.look: 3,
            self.adjust: 2,
        }
        try:
            while time.monotonic() < self.shared.until:
                (thing,) = self.random.choices(list(things), list(things.values()))
                thing()
                self.did[thing.__name__] += 1
        finally:
            for lease in self.leases:
                lease.release()
            for key in self.kept:
                self.tolerating(lambda key=key: self.cache.keep([key], False), KeyError)  # type: ignore[misc]
        return self.did

    def tolerating(self, call: Callable[[], object], *errors: type[Exception]) -> None:
        try:
            call()
        except errors as error:
            self.did[type(error).__name__] += 1

    def keys(self, most: int = 24) -> list[int]:
        """Choose keys that follow each other; some are asked for more often than others."""
        first = int(KEYS * self.random.random() ** 2)
        return list(range(first, min(first + self.random.randint(1, most), KEYS)))

    # ------------------------------------------------------------------------- what it may do

    def acquire(self) -> None:
        lease = self.look_at(self.keys())
        if lease is None or len(self.leases) == 3:
            self.release()
        if lease is not None:
            self.leases.append(lease)

    def look_at(self, keys: list[int]) -> BlockLease[int] | None:
        """Lease the blocks that are there and compare every byte."""
        try:
            lease = self.cache.acquire(keys)
        except OutOfPagesError:
            self.did["OutOfPagesError"] += 1
            return None
        try:
            lease.wait()
            for key, found, expected in self.shared.parts(lease):
                assert np.array_equal(found, expected), f"block {key} holds wrong bytes"
        except self.shared.tolerated:
            self.did["failed"] += 1
            lease.release()
            return None
        self.did["verified"] += len(lease)
        return lease

    def release(self) -> None:
        if self.leases:
            self.leases.pop(self.random.randrange(len(self.leases))).release()

    def reserve(self) -> None:
        keys = [key for key in self.keys() if key not in self.cache]
        self.random.shuffle(keys)
        try:
            fresh = self.cache.reserve(keys, priority=self.random.choice((0, 0, 0, 1, -1)))
        except (ValueError, OutOfPagesError) as error:  # another thread was faster, or has leases
            self.did[type(error).__name__] += 1
            return
        how = self.random.random()
        if how < 0.1:
            fresh.cancel()
        elif how < 0.5:
            fresh.wait()
            self.write(fresh)
            fresh.commit()
        else:
            self.submit(fresh, fail=how > 0.97)

    def write(self, fresh: BlockReservation[int]) -> None:
        for _, page, content in self.shared.parts(fresh):
            page[:] = content

    def submit(self, fresh: BlockReservation[int], *, fail: bool) -> None:
        """Commit blocks that the model computes later."""
        event, parts, fences = HostEvent(), list(self.shared.parts(fresh)), fresh.fences

        def step() -> None:
            for fence in fences:
                fence.wait_finished()
            for _, page, content in parts:
                page[:] = 0xEE if fail else content
            event.set(StepError("a step failed") if fail else None)

        fresh.commit(event)
        self.shared.steps.put(step)

    def touch(self) -> None:
        self.tolerating(lambda: self.cache.touch(self.keys()), KeyError)

    def set_priority(self) -> None:
        priority = self.random.choice((-1, 0, 0, 2))
        self.tolerating(lambda: self.cache.set_priority(self.keys(4), priority), KeyError)

    def keep(self) -> None:
        key = self.random.randrange(KEYS)
        if len(self.kept) < 4 and key in self.cache:
            self.kept.add(key)
            self.tolerating(lambda: self.cache.keep([key]), KeyError)

    def unkeep(self) -> None:
        if self.kept:
            key = self.kept.pop()
            self.tolerating(lambda: self.cache.keep([key], False), KeyError)

    def drop(self) -> None:
        self.tolerating(lambda: self.cache.drop(self.keys(6)), ResourceBusyError)

    def look(self) -> None:
        keys = self.keys()
        assert 0 <= self.cache.match(keys) <= len(keys)
        for level in self.storage.stats().levels.values():
            assert 0 <= level.used <= level.slots
        assert self.storage.describe()

    def adjust(self) -> None:
        level = self.random.randrange(len(QUOTAS))
        quota = self.random.randint(*QUOTAS[level]) * MIB
        refusals = (ResourceBusyError, OutOfPagesError, *self.shared.tolerated)
        self.tolerating(lambda: self.storage.adjust_cache_level(level, quota), *refusals)


Work = Callable[[type[Exception]], Counter[str]]


@pytest.fixture
def work(tiers: Tiers, spawn: Spawn, tmp_path: Path) -> Iterator[Work]:
    """Let the threads work, then look at every block that is left, and let all go."""
    least, most = zip(*([n * MIB for n in quota] for quota in QUOTAS), strict=True)
    config = KVCacheManagerConfig(
        16,
        [
            GpuCacheTierConfig(least[0], most[0]),
            HostCacheTierConfig(least[1], most[1]),
            DiskCacheTierConfig(least[2], str(tmp_path), most[2]),
        ],
        LAYERS,
    )
    with TierStorage(config, device="cpu") as storage:

        def run(tolerated: type[Exception]) -> Counter[str]:
            shared = Stress(tiers, storage, tolerated)
            model = spawn(shared.model)
            futures = [spawn(Worker(shared, seed).run) for seed in range(THREADS)]
            wait(futures, SECONDS + 40)
            shared.steps.put(None)  # not while somebody submits steps: they would never end
            did = sum((future.result(0) for future in futures), Counter[str]())
            model.result(40)
            storage._check()
            last = Worker(shared, THREADS)
            for key in range(KEYS):
                lease = last.look_at([key])
                if lease is not None:
                    lease.release()
            storage._check()
            shared.cache.drop(range(KEYS))
            assert len(shared.cache) == 0
            storage._check()
            assert [level.used for level in storage.stats().levels.values()] == [0, 0, 0]
            return did

        yield run


def test_threads_do_anything_at_once(work: Work) -> None:
    did = work(StepError)
    assert did["verified"] > 0, did
    assert did["adjust"] > 0, did


def test_threads_do_anything_at_once_while_the_disk_fails(work: Work) -> None:
    chance = random.Random(1)

    def now_and_then(*_: int) -> bool:
        return chance.random() < 0.02

    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=now_and_then)
        plan.fail("preadv", errno.EIO, times=None, when=now_and_then)
        did = work(OSError)
    assert did["verified"] > 0, did
    assert did["failed"] > 0, did
