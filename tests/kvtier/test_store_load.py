"""An engine's pages: stored and loaded again, every byte, and what becomes of what fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CpuDevice, HostEvent, OutOfPagesError, StaticHostMem
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockJob,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
)

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

KIB, MIB = 1 << 10, 1 << 20
COPY = "process_vm_readv"
HOMES = 12
BETWEEN = 0x77
# Two pool groups, the first of two pools: 512 KiB and 256 KiB a block; of 4 MiB, 4 and 8 slots.
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", 96 * KIB), BufferConfig("value", 96 * KIB)]),
    AttentionLayerConfig(1, [BufferConfig("key", 96 * KIB), BufferConfig("value", 96 * KIB)]),
    AttentionLayerConfig(2, [BufferConfig("state", 128 * KIB)]),
    AttentionLayerConfig(3, [BufferConfig("kv", 256 * KIB)], sliding_window_size=32),
]
ONE_GROUP = [AttentionLayerConfig(0, [BufferConfig("kv", 512 * KIB)])]


class Engine:
    """Pages of an engine, each buffer with its own stride, and a cache for them."""

    def __init__(
        self,
        tiers: Tiers,
        stack: ExitStack,
        folder: Path,
        *,
        host: int = 4,
        disk: int = 0,
        layers: Sequence[AttentionLayerConfig] = LAYERS,
        **options: Any,
    ) -> None:
        levels: list[Any] = [HostCacheTierConfig(host * MIB, host * MIB)]
        if disk:
            levels.append(DiskCacheTierConfig(disk * MIB, str(folder), disk * MIB))
        config = KVCacheManagerConfig(16, levels, layers)
        self.tiers = tiers
        self.storage = stack.enter_context(TierStorage(config, device="cpu"))
        self.layouts = self.storage.plan.groups
        self.rows: dict[tuple[int, str], NDArray[np.uint8]] = {}
        buffers = {}
        for n, (layer, buffer) in enumerate((at, one) for at in layers for one in at.buffers):
            name, stride = (layer.layer_id, buffer.role), buffer.size + n * 512
            memory = stack.enter_context(StaticHostMem(HOMES * stride, device="cpu"))
            self.rows[name] = tiers.raw(memory.address, HOMES * stride).reshape(HOMES, stride)
            self.rows[name][:] = BETWEEN
            buffers[name] = memory.address, stride
        pages = EnginePages(self.storage, buffers, HOMES)
        self.cache: BlockCache[int] = BlockCache(self.storage, engine=pages, **options)

    def pieces(self, group: int, home: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Give the pieces of a page, and where each is in a whole one."""
        offset = 0
        for pool in self.layouts[group].pools:
            for place in pool.buffers:
                row = self.rows[place.layer_id, place.role][home]
                assert (row[place.size :] == BETWEEN).all(), "bytes between pages were written"
                yield row[: place.size], offset
                offset += place.size

    def content(self, key: int, group: int) -> NDArray[np.uint8]:
        return self.tiers.content(key * 2 + group, self.layouts[group].page_bytes)

    def write(self, keys: Sequence[int], homes: Sequence[int]) -> None:
        for key, home in zip(keys, homes, strict=True):
            for group in range(len(self.layouts)):
                for piece, offset in self.pieces(group, home):
                    piece[:] = self.content(key, group)[offset : offset + len(piece)]

    def scrub(self) -> None:
        """Overwrite all pages."""
        for group in range(len(self.layouts)):
            for home in range(HOMES):
                for piece, _ in self.pieces(group, home):
                    piece[:] = 0xEE

    def holds(self, key: int, home: int, group: int = 0) -> bool:
        content = self.content(key, group)
        return all(
            bool((piece == content[offset : offset + len(piece)]).all())
            for piece, offset in self.pieces(group, home)
        )

    def untouched(self, home: int, group: int = 0) -> bool:
        return all((piece == 0xEE).all() for piece, _ in self.pieces(group, home))

    def store(self, *keys: int) -> BlockJob[int]:
        """Store blocks, wait, and overwrite the pages."""
        self.write(keys, range(len(keys)))
        job = self.cache.store(keys, range(len(keys)))
        job.wait(20)
        self.scrub()
        return job

    def assert_loads(self, *keys: int) -> None:
        """Load blocks into the last pages, and compare every byte."""
        self.scrub()
        homes = list(range(HOMES - len(keys), HOMES))
        self.cache.load(keys, homes).wait(20)
        for group in range(len(self.layouts)):
            assert all(self.holds(*at, group) for at in zip(keys, homes, strict=True))
            assert all(self.untouched(home, group) for home in range(HOMES - len(keys)))

    def state(self) -> object:
        return (
            {key: block.pages for key, block in self.cache._index.blocks.items()},
            [list(policy.victims()) for at in self.storage.levels for policy in at.policies],
            [group.slots.in_use for at in self.storage.levels for group in at.groups],
            [self.storage.leased(group) for group in range(len(self.layouts))],
        )

    def level(self, key: int) -> list[int]:
        return [page.level for page in self.cache._index.pages(key)]


@pytest.fixture
def build(tiers: Tiers, tmp_path: Path, cpu: CpuDevice) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:
        yield lambda **options: Engine(tiers, stack, tmp_path, **options)


# ------------------------------------------------------------------------------ there and back


def test_stored_blocks_are_loaded_into_other_pages(build: Callable[..., Engine]) -> None:
    engine = build()
    job = engine.store(5, 6, 7)
    assert (job.keys, job.done, job.error, dict(job.failed)) == ([5, 6, 7], True, None, {})
    assert engine.cache.match([5, 6, 7, 8]) == 3
    engine.assert_loads(5, 6, 7)
    engine.cache._check()
    assert [engine.storage.leased(group) for group in (0, 1)] == [0, 0]


def test_blocks_are_stored_in_any_order_of_pages_and_each_group_in_its_own(
    build: Callable[..., Engine],
) -> None:
    engine = build()
    engine.write([0, 1, 2], [9, 2, 4])
    other = [[9, 2, 4], [3, 11, 0]]
    for key, home in zip([0, 1, 2], other[1], strict=True):
        for piece, offset in engine.pieces(1, home):
            piece[:] = engine.content(key, 1)[offset : offset + len(piece)]
    engine.cache.store([0, 1, 2], other).wait(20)
    engine.scrub()
    engine.cache.load([2, 0], [[7, 1], [1, 8]]).wait(20)
    assert engine.holds(2, 7)
    assert engine.holds(0, 1)
    assert engine.holds(2, 1, 1)
    assert engine.holds(0, 8, 1)
    assert engine.untouched(8)
    assert engine.untouched(7, 1)


def test_blocks_that_went_to_the_disk_are_loaded_from_there(build: Callable[..., Engine]) -> None:
    engine = build(disk=8)
    for first in range(0, 8, 2):
        engine.store(first, first + 1)
    assert engine.level(0)[0] == 1
    for first in range(0, 8, 2):
        engine.assert_loads(first, first + 1)
    moved = engine.storage.stats().bytes_moved
    assert moved["engine->host"] == moved["host->engine"] == 8 * 768 * KIB
    assert moved["host->disk"] >= 4 * 512 * KIB


def test_more_blocks_than_the_first_level_holds_are_loaded_a_few_at_a_time(
    build: Callable[..., Engine],
) -> None:
    engine = build(disk=8)
    for first in range(0, 8, 4):
        engine.store(*range(first, first + 4))
    before = engine.state()
    with pytest.raises(OutOfPagesError):
        engine.cache.load(range(8), range(8))
    assert engine.state() == before
    for first in range(0, 8, 4):
        engine.assert_loads(*range(first, first + 4))


def test_no_blocks_are_a_job_that_is_done(build: Callable[..., Engine]) -> None:
    engine = build()
    for job in (engine.cache.store([], []), engine.cache.load([], []), engine.cache.prefetch([])):
        job.wait(0)
        assert (job.done, job.error, job.keys, job.event.query()) == (True, None, [], True)


def test_pages_that_are_not_wanted_are_not_written(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.store(0, 1)
    engine.cache.load([0, 1], [[3, -1], [-1, 4]]).wait(20)
    assert engine.holds(0, 3)
    assert engine.holds(1, 4, 1)
    assert all(engine.untouched(home) for home in range(HOMES) if home != 3)
    assert all(engine.untouched(home, 1) for home in range(HOMES) if home != 4)


def test_a_block_may_be_loaded_into_two_pages_at_once(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.store(0)
    engine.cache.load([0, 0], [3, 4]).wait(20)
    assert engine.holds(0, 3)
    assert engine.holds(0, 4)


# ------------------------------------------------------------------------------ what is stored


def test_what_is_there_is_not_copied_again_but_touched(build: Callable[..., Engine]) -> None:
    engine = build(disk=8)
    engine.store(0, 1, 2)
    engine.write([9, 9, 3], [0, 1, 2])
    job = engine.cache.store([0, 1, 3], [0, 1, 2])
    assert job.keys == [3]
    job.wait(20)
    engine.scrub()
    engine.store(4)
    assert engine.level(2)[0] == 1
    engine.assert_loads(0, 1, 3, 4)


def test_a_page_that_a_block_lacks_is_added_to_it(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.write([0, 1, 2], range(3))
    job = engine.cache.store([0, 1, 2], [[0, 1, 2], [-1, -1, 2]])
    assert job.keys == [0, 1, 2]
    job.wait(20)
    assert engine.cache.match([0, 1, 2]) == 0  # the window of what follows 2 shows 1, too
    with pytest.raises(KeyError, match="0"):
        engine.cache.load([0], [0])
    job = engine.cache.store([0, 1, 2], [[0, 1, 2], [-1, 1, 2]])
    assert job.keys == [1]
    job.wait(20)
    assert engine.cache.match([0, 1, 2]) == 3
    engine.scrub()
    engine.cache.load([0, 1, 2], [[0, 1, 2], [-1, 1, 2]]).wait(20)
    assert [engine.holds(n, n, 1) for n in range(3)] == [False, True, True]
    assert engine.cache.store([0], [0]).keys == [0]


def test_a_block_that_gets_a_page_does_not_lose_the_others_to_make_room(
    build: Callable[..., Engine],
) -> None:
    engine = build()
    engine.write([0], [0])
    engine.cache.store([0], [[0], [-1]], priority=-1).wait(20)
    engine.store(1, 2, 3)  # the four slots of group 0 are in use
    engine.write([4, 0], [0, 1])
    job = engine.cache.store([4, 0], [0, 1])  # 0 would be the first to go
    assert job.keys == [4, 0]
    job.wait(20)
    engine.cache._check()
    assert [key in engine.cache for key in range(5)] == [True, False, True, True, True]
    engine.assert_loads(0)
    assert [engine.storage.leased(group) for group in (0, 1)] == [0, 0]


def test_a_block_that_a_reservation_was_to_compute_may_be_stored_meanwhile(
    build: Callable[..., Engine],
) -> None:
    engine = build()
    with engine.cache.reserve([0, 1]) as fresh:
        engine.store(0)
        fresh.wait()
        fresh.commit()
    assert 1 in engine.cache
    engine.assert_loads(0)
    engine.cache._check()


def test_a_block_that_could_not_be_read_is_stored_anew(build: Callable[..., Engine]) -> None:
    engine = build(disk=8)
    engine.store(0, 1, 2, 3)
    engine.store(4)
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        job = engine.cache.load([0], [0])
        with pytest.raises(OSError, match="preadv"):
            job.wait(20)
    engine.cache.touch([1])  # the cache learns of it by whatever is asked next
    engine.storage.settle()
    assert 0 in engine.cache
    assert engine.store(0).keys == [0]
    engine.assert_loads(0)
    engine.cache._check()


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("keys", "pages", "error", "message"),
    [
        ([0, 0], [1, 2], ValueError, "keys: 0 occurs twice"),
        ([0, 1], [1], ValueError, "pages: the shape"),
        ([0, 1], [1, HOMES], ValueError, "pages: 12 of pool group 0"),
        ([7, 8], [[1, -1], [1, 2]], ValueError, "pages: block 8 has none of pool group 0"),
        ([0, 7], [1.5, 2.5], TypeError, "pages: integers"),
        ([5, 6, 7, 8, 9], range(5), OutOfPagesError, "group 0"),
    ],
)
def test_a_refused_store_changes_nothing(
    build: Callable[..., Engine],
    keys: list[int],
    pages: Any,
    error: type[Exception],
    message: str,
) -> None:
    engine = build()
    engine.store(0, 1, 2)
    before = engine.state()
    with pytest.raises(error, match=message):
        engine.cache.store(keys, pages)
    assert engine.state() == before


def test_a_store_that_does_not_fit_beside_what_is_held_changes_nothing(
    build: Callable[..., Engine],
) -> None:
    engine = build(disk=4)
    engine.store(0, 1, 2, 3)
    with engine.cache.acquire([0, 1, 2]):
        before = engine.state()
        with pytest.raises(OutOfPagesError, match="release leases, or raise the quota"):
            engine.cache.store([3, 4, 5], [0, 1, 2])
        assert engine.state() == before
        engine.store(4)
    engine.assert_loads(0, 1, 2, 4)


def test_a_load_of_what_is_not_there_changes_nothing(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.store(0, 1)
    before = engine.state()
    with pytest.raises(KeyError, match=r"block 9 is not here, .* match again"):
        engine.cache.load([0, 9, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="3 of pool group 0 is named twice"):
        engine.cache.load([0, 1], [3, 3])
    assert engine.state() == before
    assert all(engine.untouched(home) for home in range(HOMES))


# ------------------------------------------------------------------------------ order of copies


def test_a_store_waits_for_the_step_that_writes_and_a_load_for_the_store(
    build: Callable[..., Engine], gate: Callable[[], Gate], spawn: Spawn
) -> None:
    engine = build()
    written = gate()
    engine.scrub()
    stored = engine.cache.store([0, 1], [0, 1], ready=written)
    assert engine.cache.match([0, 1]) == 2  # found from now on
    loaded = engine.cache.load([0, 1], [4, 5])
    waits = spawn(loaded.wait)
    written.wait_asked()
    assert (stored.done, loaded.done) == (False, False)
    assert (stored.error, stored.event.query(), loaded.event.query()) == (None, False, False)
    with pytest.raises(TimeoutError):
        stored.wait(0)
    assert "under way" in repr(stored)
    engine.write([0, 1], [0, 1])
    written.set()
    waits.result(20)
    assert stored.done
    assert [engine.holds(key, key + 4) for key in (0, 1)] == [True, True]
    assert repr(stored) == "<BlockJob of 2 blocks, done>"


def test_a_load_waits_for_who_still_uses_the_pages(
    build: Callable[..., Engine], gate: Callable[[], Gate]
) -> None:
    engine = build()
    engine.store(0)
    used = gate()
    job = engine.cache.load([0], [3], ready=used)
    used.wait_asked()
    assert engine.untouched(3)
    used.set(RuntimeError("whose failure is not the load's"))
    job.wait(20)
    assert engine.holds(0, 3)


def test_the_slot_of_a_block_that_is_being_loaded_is_not_overwritten(
    build: Callable[..., Engine], gate: Callable[[], Gate]
) -> None:
    engine = build()
    engine.store(0, 1, 2, 3)
    used = gate()
    load = engine.cache.load([0, 1, 2, 3], [4, 5, 6, 7], ready=used)
    engine.write([8, 9], [0, 1])
    store = engine.cache.store([8, 9], [0, 1])  # drops 0 and 1
    assert engine.cache.drop([2]) == 1
    fresh = engine.cache.reserve([10])
    assert any(not fence.query() for fence in fresh.fences)
    assert not store.done
    used.set()
    load.wait(20)
    assert all(engine.holds(key, key + 4, group) for key in range(4) for group in (0, 1))
    store.wait(20)
    fresh.cancel()
    engine.assert_loads(8, 9, 3)


def test_a_stored_block_is_moved_down_before_it_has_been_copied(
    build: Callable[..., Engine], gate: Callable[[], Gate]
) -> None:
    engine = build(disk=8)
    written = gate()
    engine.write([0, 1, 2, 3], range(4))
    first = engine.cache.store([0, 1, 2, 3], range(4), ready=written)
    engine.write([4, 5], [8, 9])
    second = engine.cache.store([4, 5], [8, 9])
    assert engine.level(0)[0] == 1
    assert not second.done
    written.set()
    first.wait(20)
    second.wait(20)
    engine.assert_loads(0, 1)
    engine.assert_loads(4, 5, 2, 3)


# ------------------------------------------------------------------------------ failures


def test_blocks_of_a_step_that_failed_are_never_served(
    build: Callable[..., Engine], gate: Callable[[], Gate]
) -> None:
    engine = build()
    step = gate()
    stored = engine.cache.store([0, 1], [0, 1], ready=step)
    loaded = engine.cache.load([1], [5])
    step.set(RuntimeError("the kernel failed"))
    for job, keys in ((stored, [0, 1]), (loaded, [1])):
        with pytest.raises(RuntimeError, match="the kernel failed"):
            job.wait(20)
        assert job.done
        assert list(job.failed) == keys
        assert isinstance(job.error, RuntimeError)
        assert repr(job) == f"<BlockJob of {len(keys)} blocks, failed>"
        assert isinstance(job.event.error, RuntimeError)
    assert len(engine.cache.acquire([0, 1])) == 0
    with pytest.raises(KeyError):
        engine.cache.load([0], [0])
    assert engine.storage.stats().levels["host"].used == 0
    assert engine.store(0, 1).keys == [0, 1]
    engine.assert_loads(0, 1)


def test_a_step_that_failed_as_part_of_a_job_fails_what_is_stored_after_it(
    build: Callable[..., Engine],
) -> None:
    """The places of a job's blocks are not those of the blocks that are stored."""
    engine = build(disk=8, layers=ONE_GROUP)
    engine.store(*range(8))
    engine.store(8, 9)  # 0 and 1 go down
    for key in (0, 1):
        engine.cache._index.pages(key)[0].ready.synchronize()
    slot = engine.cache._index.pages(1)[0].slot
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None, when=lambda fd, n, at: n > 1 or at == slot << 19)
        job = engine.cache.load([0, 1], [0, 1])
        stored = engine.cache.store([77, 78, 79], [0, 1, 2], ready=job.event)
        with pytest.raises(OSError, match="preadv"):
            job.wait(20)
        assert list(job.failed) == [1]
        with pytest.raises(OSError, match="preadv"):
            stored.wait(20)
    assert list(stored.failed) == [77, 78, 79]
    with pytest.raises(KeyError):
        engine.cache.load([77], [3])


def test_a_copy_from_the_engine_that_fails_costs_those_blocks(
    build: Callable[..., Engine],
) -> None:
    engine = build()
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, times=None)
        job = engine.cache.store([0, 1], [0, 1])
        with pytest.raises(OSError, match=COPY):
            job.wait(20)
    assert set(job.failed) == {0, 1}
    engine.storage.settle()
    assert len(engine.cache.acquire([0, 1])) == 0
    assert engine.storage.stats().levels["host"].used == 0
    engine.store(0, 1)
    engine.assert_loads(0, 1)


def test_a_copy_to_the_engine_that_fails_costs_nothing(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.store(0, 1)
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, times=None)
        job = engine.cache.load([0, 1], [0, 1])
        with pytest.raises(OSError, match=COPY):
            job.wait(20)
    assert engine.cache.match([0, 1]) == 2
    engine.assert_loads(0, 1)


def test_a_block_that_cannot_be_read_from_disk_fails_alone_and_can_be_asked_again(
    build: Callable[..., Engine],
) -> None:
    engine = build(disk=8, layers=ONE_GROUP)
    engine.store(0, 1, 2, 3, 4, 5, 6, 7)
    engine.store(*range(8, 16))
    slot = engine.cache._index.pages(1)[0].slot
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None, when=lambda fd, n, at: n > 1 or at == slot << 19)
        engine.scrub()
        job = engine.cache.load([0, 1, 2], [0, 1, 2])
        with pytest.raises(OSError, match="preadv"):
            job.wait(20)
        assert list(job.failed) == [1]
        assert [engine.holds(key, key) for key in range(3)] == [True, False, True]
    engine.storage.settle()
    engine.assert_loads(0, 1, 2)
    engine.cache._check()


def test_a_block_fails_with_a_page_of_any_group(build: Callable[..., Engine]) -> None:
    engine = build(disk=12)
    for first in range(0, 12, 4):
        engine.store(*range(first, first + 4))
    assert engine.level(0) == [1, 1]
    file = engine.storage.levels[1].groups[1].memory.pools[0].file  # type: ignore[attr-defined]
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None, when=lambda fd, n, at: fd == file._fd)
        job = engine.cache.load([0], [0])
        with pytest.raises(OSError, match="preadv"):
            job.wait(20)
    assert list(job.failed) == [0]
    assert engine.holds(0, 0)  # of group 0


def test_a_block_that_was_lost_on_its_way_to_the_disk_is_not_loaded(
    build: Callable[..., Engine],
) -> None:
    engine = build(disk=8, layers=ONE_GROUP)
    engine.store(*range(8))
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC, times=None)
        engine.store(8)
        engine.cache._index.pages(0)[0].ready.wait_finished()
    with pytest.raises(KeyError, match="0"):
        engine.cache.load([0], [0])
    assert engine.store(0).keys == [0]
    engine.assert_loads(0, 8)


def test_a_closed_storage_takes_and_gives_nothing(build: Callable[..., Engine]) -> None:
    engine = build()
    engine.store(0)
    engine.storage.close()
    with pytest.raises(ClosedError):
        engine.cache.store([1], [0])
    with pytest.raises(ClosedError):
        engine.cache.load([0], [0])


# ------------------------------------------------------------------------------ prefetch, jobs


def test_prefetched_blocks_come_up_and_may_leave_again(build: Callable[..., Engine]) -> None:
    engine = build(disk=8, layers=ONE_GROUP)
    engine.store(*range(8))
    engine.store(8, 9)
    job = engine.cache.prefetch([0, 1, 77, 2])
    assert job.keys == [0, 1]
    job.wait(20)
    assert engine.level(0) == engine.level(1) == [0]
    assert engine.storage.leased(0) == 0
    engine.store(*range(20, 28))
    assert engine.level(0) == [1]
    engine.assert_loads(0, 1)


def test_a_prefetch_that_does_not_fit_changes_nothing(build: Callable[..., Engine]) -> None:
    engine = build(disk=8, layers=ONE_GROUP)
    engine.store(*range(8))
    engine.store(8)
    with engine.cache.acquire(range(1, 9)):
        before = engine.state()
        with pytest.raises(OutOfPagesError):
            engine.cache.prefetch([0])
        assert engine.state() == before


def test_a_job_is_waited_for_by_several_threads_and_its_time_is_counted(
    build: Callable[..., Engine], gate: Callable[[], Gate], spawn: Spawn
) -> None:
    engine = build()
    written = gate()
    with engine.storage.scope() as scope:
        job = engine.cache.store([0], [0], ready=written)
        waits = [spawn(job.wait) for _ in range(3)]
        written.wait_asked()
        with pytest.raises(TimeoutError):
            job.wait(0.001)
        written.set()
        for wait in waits:
            wait.result(20)
        job.wait()  # done: nothing to count
    assert 1 <= scope.activity.waits["jobs"].count <= 4


def test_an_event_of_a_job_is_one_that_others_wait_for(build: Callable[..., Engine]) -> None:
    engine = build()
    written = HostEvent()
    job = engine.cache.store([0, 1], [0, 1], ready=written)
    stream = engine.storage.device.stream()
    stream.wait(job.event)
    behind = stream.record()
    assert not behind.query()
    written.set()
    behind.synchronize(20)
    assert job.done
    stream.close()
