"""Every public object says its state in one line, whatever the state; some show tables."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import kvtier
from hostmem import HostEvent, resolve_device
from kvtier import (
    Activity,
    AttentionLayerConfig,
    BlockCache,
    BlockEvent,
    BufferConfig,
    CacheTier,
    Concatenate,
    DiskCacheTierConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    LevelStats,
    PageCopier,
    RemoteCacheTierConfig,
    RemoteStats,
    SlotAllocator,
    StagingBuffer,
    StorageStats,
    TierStorage,
    Traffic,
    Usage,
    Waits,
    levels,
)
from kvtier.block import Block
from kvtier.eviction import POLICIES, make_policy
from kvtier.page import Page
from tests.threads import Spawn

MIB = 1 << 20
Make = Callable[["Kit"], Any]


class Kit:
    """Builds small caches, and closes them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack

    def config(self, *, gpu: bool = True) -> KVCacheManagerConfig:
        hot = [GpuCacheTierConfig("2MiB", "2MiB")] if gpu else []
        tiers = [*hot, HostCacheTierConfig("2MiB", "2MiB")]
        layers = [AttentionLayerConfig(0, [BufferConfig("kv", "512KiB")])]
        return KVCacheManagerConfig(16, tiers, layers)

    def storage(self, *, gpu: bool = True) -> TierStorage:
        made = TierStorage(self.config(gpu=gpu), device="cpu")
        self.stack.callback(made.close)
        return made

    def cache(self, blocks: int = 2) -> BlockCache[Any]:
        made: BlockCache[Any] = BlockCache(self.storage(), max_events=99)
        for key in range(blocks):
            made.reserve([key]).commit()
        return made

    def manager(self) -> KVCacheManager:
        made = KVCacheManager(self.config(), device="cpu")
        self.stack.callback(made.close)
        return made

    def engine(self) -> tuple[EnginePages, BlockCache[Any]]:
        storage = self.storage(gpu=False)
        memory = np.zeros(4 * MIB // 2, np.uint8)
        base = memory.__array_interface__["data"][0]
        pages = EnginePages(storage.plan, {(0, "kv"): (base, MIB // 2)}, 4)
        self.stack.callback(lambda: memory)  # as long as the storage
        return pages, BlockCache(storage, engine=pages)

    def broken(self) -> TierStorage:
        made = TierStorage(self.config(), device="cpu")
        self.stack.callback(_give_back_leaked)
        self.stack.callback(made.close)
        with pytest.raises(kvtier.CorruptedError), made.latch:
            raise AssertionError("two\nlines")
        return made

    def ring(self) -> StagingBuffer:
        made = StagingBuffer(resolve_device("cpu"), 4096, 8)
        self.stack.callback(made.close)
        return made

    def copier(self, *, staged: bool) -> PageCopier:
        made = PageCopier(resolve_device("cpu"), 4096, staged=staged)
        self.stack.callback(made.close)
        return made


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with ExitStack() as stack:
        yield Kit(tmp_path, stack)


def closed(thing: Any) -> Any:
    thing.close()
    return thing


def half(kind: type) -> tuple[Make, str]:
    return lambda kit: object.__new__(kind), f"<{kind.__name__}, incomplete>"


def held(kit: Kit) -> Any:
    return kit.stack.enter_context(kit.cache().acquire([0, 1]))


def taken_over(kit: Kit) -> Any:
    lease = kit.cache().acquire([0])
    lease.release()
    return lease


def reservation(kit: Kit) -> Any:
    return kit.stack.enter_context(kit.cache(0).reserve([1, 2, 3]))


def stored(kit: Kit) -> Any:
    _, cache = kit.engine()
    job = cache.store(["a"], [1])
    job.wait()
    return job


def lost(kit: Kit) -> BlockCache[Any]:
    cache = kit.cache(1)
    event = HostEvent()
    cache.reserve(["x"]).commit(event)
    event.set(OSError("no bytes"))
    cache.acquire(["x"]).release()
    return cache


def allocator(used: int, shrink: int | None = None) -> SlotAllocator:
    made = SlotAllocator(64)
    made.allocate(used)
    if shrink is not None:
        made.begin_shrink(shrink)
    return made


def with_taken(ring: StagingBuffer) -> StagingBuffer:
    ring.acquire(3)
    return ring


def _give_back_leaked() -> None:
    while levels._leaked:
        levels._leaked.pop().close()


def policy(name: str, kit: Kit) -> Any:
    return make_policy(name, 5)


def page() -> Page:
    return Page(Block("a\nb"), 0, 7, ())


STATES: dict[str, list[tuple[Make, str]]] = {
    "Activity": [
        (lambda k: Activity(), "<Activity: 0 hits, 0 misses, 0 B moved>"),
        (lambda k: k.cache(8)._storage.stats().activity, " misses, 2 MiB moved>"),
        half(Activity),
    ],
    "AttentionLayerConfig": [(lambda k: k.config().layers[0], "AttentionLayerConfig(layer_id=0,")],
    "BlockCache": [
        (lambda k: k.cache(2), "<BlockCache of 2 blocks over <TierStorage on cpu: gpu 2 MiB"),
        (lambda k: BlockCache(closed(k.storage())), "host 2 MiB, closed>>"),
        (lost, "<BlockCache of 1 blocks, 1 lost over "),
        half(BlockCache),
    ],
    "BlockEvent": [
        (lambda k: k.cache(1).take_events()[0], "<BlockEvent stored: 0; group 0, gpu>"),
        (
            lambda k: BlockEvent("moved", tuple(range(1000)), 1, "gpu", "host"),
            "<BlockEvent moved: 0, 1, 2, 3 and 996 more; group 1, gpu -> host>",
        ),
        (
            lambda k: BlockEvent("removed", (Block("a\nb"),), 1, "host", None),
            "<BlockEvent removed: block 'a\\nb'; group 1, host>",
        ),
    ],
    "BlockJob": [(stored, "<BlockJob of 1 blocks, done>"), half(kvtier.BlockJob)],
    "BlockLease": [
        (held, "<BlockLease of 2 blocks>"),
        (taken_over, "<BlockLease of 1 blocks, which it does not hold any more>"),
        half(kvtier.BlockLease),
    ],
    "BlockReservation": [
        (reservation, "<BlockReservation of 3 blocks>"),
        half(kvtier.BlockReservation),
    ],
    "BufferConfig": [
        (lambda k: BufferConfig("k\nv", 4096), "BufferConfig(role='k\\nv', size=4096)")
    ],
    "CachePlan": [(lambda k: k.config().plan(), "CachePlan(tokens_per_block=16, ")],
    "CacheTier": [(lambda k: CacheTier.GPU, "<CacheTier.GPU: 'gpu'>")],
    "Concatenate": [
        (lambda k: Concatenate(), "<Concatenate, not configured>"),
        (lambda k: configured(k), "<Concatenate: pages of 512 KiB>"),
    ],
    "DiskCacheTierConfig": [
        (lambda k: DiskCacheTierConfig("2MiB", "a\nb"), "DiskCacheTierConfig(quota=2097152, ")
    ],
    "EnginePages": [(lambda k: k.engine()[0], "<EnginePages: 4 pages of 512 KiB>")],
    "GpuCacheTierConfig": [
        (lambda k: GpuCacheTierConfig("2MiB"), "GpuCacheTierConfig(quota=2097152, max_quota=None)")
    ],
    "HostCacheTierConfig": [(lambda k: HostCacheTierConfig(4096), "HostCacheTierConfig(quota=40")],
    "KVCacheManager": [
        (lambda k: k.manager(), "<KVCacheManager of 0 sequences over <TierStorage on cpu: "),
        (lambda k: closed(k.manager()), "host 2 MiB, closed>, closed>"),
        half(KVCacheManager),
    ],
    "KVCacheManagerConfig": [(lambda k: k.config(), "KVCacheManagerConfig(tokens_per_block=16, ")],
    "KVSequence": [
        (lambda k: k.stack.enter_context(k.manager().create_sequence([])), "<KVSequence of 0 tok"),
        (lambda k: closed(k.manager().create_sequence([])), "tokens, closed>"),
        half(kvtier.KVSequence),
    ],
    "LevelPlan": [(lambda k: k.config().plan().levels[0], "LevelPlan(tier=<CacheTier.GPU")],
    "LevelStats": [(lambda k: LevelStats(1, 2, 3), "LevelStats(slots=1, used=2, quota=3)")],
    "Page": [
        (lambda k: page(), "<Page of block 'a\\nb', group 0, level 0 slot 7>"),
        half(Page),
    ],
    "PageCopier": [
        (lambda k: k.copier(staged=False), "<PageCopier on cpu>"),
        (lambda k: k.copier(staged=True), "<PageCopier on cpu, <StagingBuffer 512 of 4 KiB, 0 "),
        (lambda k: closed(k.copier(staged=False)), "<PageCopier on cpu, closed>"),
        half(PageCopier),
    ],
    "RemoteCacheTierConfig": [
        (lambda k: RemoteCacheTierConfig("a:1"), "RemoteCacheTierConfig(master='a:1', ")
    ],
    "RemoteStats": [
        (lambda k: RemoteStats("up", 1, 2, 3, 4, {"full": 5}, {}, 6), "RemoteStats(state='up', "),
    ],
    "Scope": [
        (lambda k: k.storage().scope(), "<Scope, not open: 0 hits, 0 misses, 0 B moved>"),
        (lambda k: k.stack.enter_context(k.storage().scope()), "<Scope, open: 0 hits"),
        half(kvtier.Scope),
    ],
    "SlotAllocator": [
        (lambda k: allocator(0), "<SlotAllocator 0 of 64 slots in use, 64 never used>"),
        (lambda k: allocator(12), "<SlotAllocator 12 of 64 slots in use, 52 never used>"),
        (lambda k: allocator(64), "<SlotAllocator 64 of 64 slots in use, 0 never used>"),
        (lambda k: allocator(12, 32), "52 never used, shrinking to 32>"),
        half(SlotAllocator),
    ],
    "StagingBuffer": [
        (lambda k: k.ring(), "<StagingBuffer 8 of 4 KiB, 0 taken>"),
        (lambda k: with_taken(k.ring()), "<StagingBuffer 8 of 4 KiB, 3 taken>"),
        (lambda k: closed(k.ring()), "<StagingBuffer 8 of 4 KiB, closed>"),
        half(StagingBuffer),
    ],
    "StorageStats": [
        (
            lambda k: k.cache(3)._storage.stats(),
            "<StorageStats: gpu 3 of 4, host 0 of 4; 0 hits, 0 misses, 0 B moved, 0 pages dropped>",
        ),
        half(StorageStats),
    ],
    "TierStorage": [
        (lambda k: k.storage(), "<TierStorage on cpu: gpu 2 MiB, host 2 MiB>"),
        (lambda k: closed(k.storage()), "<TierStorage on cpu: gpu 2 MiB, host 2 MiB, closed>"),
        (lambda k: k.broken(), "host 2 MiB, corrupted: AssertionError>"),
        half(TierStorage),
    ],
    "Traffic": [(lambda k: Traffic(), "Traffic(pages=0, ")],
    "Usage": [(lambda k: Usage(), "Usage(pages=0, ")],
    "Waits": [(lambda k: Waits(), "Waits(count=0, ")],
}
POLICY_CASES: list[tuple[Make, str]] = [
    (partial(policy, name), ": 0 keys of at most 5>") for name in POLICIES
]
CASES = [case for cases in STATES.values() for case in cases] + POLICY_CASES


def configured(kit: Kit) -> Concatenate:
    made = Concatenate()
    made.configure(kit.config().plan().groups)
    return made


def kinds() -> set[str]:
    """Name what the package exports whose instances a user may have at the prompt."""
    things = {name: getattr(kvtier, name) for name in kvtier.__all__}
    return {
        name
        for name, thing in things.items()
        if inspect.isclass(thing) and not issubclass(thing, Exception)
    }


def test_every_public_kind_is_looked_at() -> None:
    abstract = {"CacheTierConfig", "ColdPageCodec"}
    assert kinds() - abstract == set(STATES)


@pytest.mark.parametrize(("make", "says"), CASES, ids=itertools.count())
def test_it_says_its_state_in_one_line(kit: Kit, make: Make, says: str) -> None:
    shown = repr(make(kit))
    assert says in shown
    assert len(shown.splitlines()) == 1
    assert " object at 0x" not in shown


@pytest.mark.parametrize("name", sorted(set(kvtier.__all__) - kinds() - {"__version__"}))
def test_what_remains_is_functions_and_errors(name: str) -> None:
    thing: Any = getattr(kvtier, name)
    if isinstance(thing, type):
        assert len(repr(thing("two\nlines")).splitlines()) == 1
    else:
        assert inspect.isfunction(thing)


def test_a_repr_does_not_wait_for_the_storage(kit: Kit, spawn: Spawn) -> None:
    cache = kit.cache()
    storage = cache._storage
    with storage.scope() as scope, cache.acquire([0]) as lease, storage.lock:
        for thing in (cache, storage, scope, lease, lease._pages()[0], storage._copier):
            assert "incomplete" not in spawn(repr, thing).result(20)


def test_a_key_that_cannot_be_shown_is_no_error(kit: Kit) -> None:
    class Key:
        def __repr__(self) -> str:
            raise RuntimeError("a bug of somebody else's")

    cache: BlockCache[Any] = BlockCache(kit.storage())
    with cache.reserve([Key()]) as room:
        assert repr(room._blocks[0]) == "<Block, incomplete>"
        assert repr(room) == "<BlockReservation of 1 blocks>"


FORKED = """
import os
from kvtier import *
tiers = [GpuCacheTierConfig("2MiB", "2MiB"), HostCacheTierConfig("2MiB", "2MiB")]
config = KVCacheManagerConfig(16, tiers, [AttentionLayerConfig(0, [BufferConfig("kv", "512KiB")])])
manager = KVCacheManager(config, device="cpu")
sequence = manager.create_sequence([])
sequence.grow(40)
storage = TierStorage(config, device="cpu")
cache = BlockCache(storage)
cache.reserve([1, 2]).commit()
lease, room = cache.acquire([1]), cache.reserve([3])
things = [
    manager, sequence, storage, cache, lease, room, lease._pages()[0], storage.stats(),
    storage.scope(), storage._copier, storage.levels[0].groups[0].slots, cache.prefetch([2]),
    storage.levels[1].groups[0].memory.pools[0].memory, storage.levels[0].policies[0],
]
gone = os.fork()
if gone == 0:
    shown = [repr(one) for one in things]
    assert all(len(one.splitlines()) == 1 for one in shown), shown
    assert not any("incomplete" in one for one in shown), shown
    assert shown[2].endswith(", closed>"), shown
    os._exit(0)
print(os.waitpid(gone, 0)[1], flush=True)
os._exit(0)
"""


def test_a_forked_child_can_look_at_everything() -> None:
    root = str(Path(kvtier.__file__).parents[1])
    where = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-Wignore::DeprecationWarning", "-c", FORKED],  # forks beside threads
        env={**os.environ, "PYTHONPATH": where},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


SHOWN: list[Make] = [
    lambda k: k.storage(),
    lambda k: closed(k.storage()),
    lambda k: k.broken(),
    lambda k: TierStorage.__new__(TierStorage),
    lambda k: k.manager(),
    lambda k: k.cache(8)._storage.stats(),
    lambda k: k.cache(8)._storage.stats().activity,
    lambda k: Activity(),
    lambda k: k.config().plan(),
    lambda k: k.config().plan().levels[0],
]


@pytest.mark.parametrize("make", SHOWN, ids=itertools.count())
def test_a_notebook_gets_whole_and_escaped_html(kit: Kit, make: Make) -> None:
    root = ElementTree.fromstring(make(kit)._repr_html_())
    assert {node.tag for node in root.iter()} <= {
        *("div", "code", "table", "caption", "thead", "tbody", "tr", "th", "td", "pre")
    }


def test_every_kind_with_a_description_is_shown_in_notebooks() -> None:
    described = {name for name in kinds() if hasattr(getattr(kvtier, name), "describe")}
    assert described == {
        *("Activity", "CachePlan", "KVCacheManager", "LevelPlan", "StorageStats", "TierStorage")
    }
    assert all(hasattr(getattr(kvtier, name), "_repr_html_") for name in described)


def test_html_has_the_figures_of_the_tables(kit: Kit) -> None:
    plan = kit.config().plan()
    cells = [node.text for node in ElementTree.fromstring(plan._repr_html_()).iter("td")]
    assert cells
    assert all(cell and cell in plan.describe() for cell in cells)
