"""Blocks taken out to be written again, leases that grow, and slots that others still use."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from hostmem import HostEvent, OutOfPagesError, ResourceBusyError
from hostmem.testing import FaultPlan
from kvtier import AttentionLayerConfig, BlockCache, BufferConfig, Page, TierStorage
from kvtier.transfer.memory import MemoryPool

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

MIB = 1 << 20
COPY = "process_vm_readv"
# Of each MiB of a level, each group gets half: group 0 a page, group 1 two.
TWO_GROUPS = [
    AttentionLayerConfig(0, [BufferConfig("kv", MIB // 2)]),
    AttentionLayerConfig(1, [BufferConfig("kv", MIB // 4)], sliding_window_size=32),
]


class Blocks:
    """A cache whose blocks are written and read by their keys."""

    def __init__(self, tiers: Tiers, storage: TierStorage) -> None:
        self.tiers = tiers
        self.storage = storage
        self.cache: BlockCache[int] = BlockCache(storage)

    def write(self, pages: Sequence[Page], *keys: int) -> None:
        for page, key in zip(pages, keys, strict=True):
            self.tiers.write(self.storage, page, key)

    def store(self, *keys: int) -> None:
        with self.cache.reserve(keys) as fresh:
            fresh.wait()
            for column in fresh._columns:
                self.write([page for page in column if page is not None], *keys)
            fresh.commit()

    def holds(self, slot: int, key: int, group: int = 0) -> bool:
        (pool,) = self.storage.levels[0].groups[group].memory.pools
        found = self.tiers._slot(cast(MemoryPool, pool), slot)
        return bool((found == self.tiers.content(key, len(found))).all())

    def read(self, *keys: int) -> list[int]:
        with self.cache.acquire(keys) as lease:
            lease.wait()
            for key, slot in zip(lease.keys, lease.slots().tolist(), strict=True):
                assert self.holds(slot, key), f"block {key} holds wrong bytes"
            return lease.keys

    def page(self, key: int, group: int = 0) -> Page:
        page = self.cache._index.blocks[key].pages[group]
        assert page is not None
        return page

    @property
    def used(self) -> list[int]:
        return [level.used for level in self.storage.stats().levels.values()]

    def order(self) -> list[list[Page]]:
        return [list(policy.victims()) for at in self.storage.levels for policy in at.policies]


@pytest.fixture
def build(tiers: Tiers) -> Callable[..., Blocks]:
    return lambda *sizes, **options: Blocks(tiers, tiers.build(*sizes, **options))


# ------------------------------------------------------------------------------ withdraw


def test_a_withdrawn_block_keeps_its_bytes_and_is_found_no_more(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)  # 0 goes down
    with blocks.cache.withdraw([0, 2]) as fresh:
        assert fresh.keys == []
        assert len(fresh) == 2
        assert [key in blocks.cache for key in (0, 1, 2)] == [False, True, False]
        assert blocks.cache.match([0]) == 0
        fresh.wait()
        slots = fresh.slots().tolist()
        assert [blocks.holds(slot, key) for slot, key in zip(slots, (0, 2), strict=True)] == [
            True,
            True,
        ]
        blocks.write(fresh._pages(), 10, 12)
        fresh.commit(keys=[10, 12])
    assert blocks.read(10, 12) == [10, 12]
    blocks.cache._check()


def test_a_withdrawn_block_that_is_cancelled_is_gone(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1)
    blocks.cache.withdraw([0]).cancel()
    assert blocks.used == [1, 0]
    blocks.store(0)
    assert blocks.read(0, 1) == [0, 1]


def test_a_withdrawn_block_is_not_moved_and_its_key_may_be_stored_meanwhile(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0)
    fresh = blocks.cache.withdraw([0])
    slot = fresh.slots().tolist()
    blocks.store(1, 2, 3)
    blocks.store(0, 4, 5)
    assert fresh.slots().tolist() == slot
    assert blocks.holds(slot[0], 0)
    with pytest.raises(OutOfPagesError):
        blocks.cache.reserve([6, 7, 8, 9])
    fresh.commit(keys=[0])  # gives way: 0 is there
    assert blocks.read(0, 4, 5) == [0, 4, 5]
    blocks.cache._check()


def test_a_withdrawn_block_is_kept_no_longer_and_its_pages_are_another_blocks(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.cache.keep([0])
    fresh = blocks.cache.withdraw([0])
    fresh.commit(keys=[9])
    for first in range(10, 30, 4):
        blocks.store(*range(first, first + 4))
    assert 9 not in blocks.cache
    assert 0 not in blocks.cache
    assert blocks.cache.lost == 0
    blocks.cache._check()


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([1, 9], KeyError, "9"),
        ([1, 0], ResourceBusyError, "keys: 1 of 2 blocks are leased, such as 0"),
        ([1, 1], ValueError, "keys: 1 occurs twice"),
    ],
)
def test_what_cannot_be_withdrawn_is_refused_and_nothing_changes(
    build: Callable[..., Blocks], keys: list[int], error: type[Exception], message: str
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2)
    with blocks.cache.acquire([0]):
        before = blocks.order(), blocks.used
        with pytest.raises(error, match=message):
            blocks.cache.withdraw(keys)
        assert (blocks.order(), blocks.used) == before
        assert 1 in blocks.cache


def test_withdrawing_more_than_fits_changes_nothing(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1)
    blocks.store(2, 3, 4, 5)
    blocks.cache.keep([0])
    with blocks.cache.acquire([2, 3, 4]):
        before = blocks.order()
        with pytest.raises(OutOfPagesError):
            blocks.cache.withdraw([0, 1])
        assert blocks.order() == before
        assert blocks.page(0).kept
        assert not blocks.page(0).leases
    assert blocks.read(0, 1) == [0, 1]


def test_a_block_that_lacks_a_page_cannot_be_written_again(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4, layers=TWO_GROUPS)
    blocks.store(0)
    blocks.storage.discard([blocks.page(0, 1)])
    blocks.cache._index._dropped(blocks.page(0, 1))
    assert 0 in blocks.cache
    with pytest.raises(KeyError):
        blocks.cache.withdraw([0])
    assert 0 in blocks.cache


def test_a_withdrawn_block_that_cannot_be_brought_says_so_and_is_not_committed(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    blocks.page(0).ready.synchronize()
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, at=2)
        fresh = blocks.cache.withdraw([0])
        with pytest.raises(OSError, match=COPY):
            fresh.wait()
    assert len(fresh.fences) >= 1
    fresh.commit(keys=[9])  # what is written into half a block is no good
    assert blocks.read(9) == []
    assert blocks.cache.lost == 1
    assert 0 not in blocks.cache
    blocks.cache._check()


def test_who_writes_a_withdrawn_block_waits_for_who_still_reads_it(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    blocks = build(4, 4)
    blocks.store(0)
    reading = gate()
    blocks.cache.acquire([0]).release(after=reading)
    fresh = blocks.cache.withdraw([0])
    assert reading in fresh.fences
    fresh.cancel()


# ------------------------------------------------------------------------------ keys, later


def test_blocks_get_their_keys_when_they_are_committed(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    fresh = blocks.cache.reserve([None, 7, None])
    assert fresh.keys == [7]
    with pytest.raises(ValueError, match="keys: block 0 has none; give the keys"):
        fresh.commit()
    with pytest.raises(ValueError, match="keys: block 1 has none"):
        fresh.commit_leased(keys=cast(list[int], [5, None]))
    with pytest.raises(ValueError, match="keys: 2 for 3 blocks"):
        fresh.commit(keys=[5, 6])
    with pytest.raises(ValueError, match="keys: 4 for 3 blocks"):
        fresh.commit_leased(keys=[5, 6, 7, 8])
    with pytest.raises(ValueError, match="keys: 5 occurs twice"):
        fresh.commit(keys=[5, 6, 5])
    assert len(blocks.cache) == 0
    fresh.commit(keys=[5, 6, 8])
    assert list(blocks.cache) == [5, 6, 8]
    blocks.cache.reserve([7]).cancel()  # what was reserved is not any more


def test_leading_blocks_are_committed_and_held_while_the_others_stay_open(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    fresh = blocks.cache.reserve([0, 1, 2])
    blocks.write(fresh._pages(), 0, 1, 2)
    slots = fresh.slots().tolist()
    lease = fresh.commit_leased(keys=[0, 1])
    assert (lease.keys, lease.found, lease.slots().tolist()) == ([0, 1], [0, 0], slots[:2])
    assert (fresh.keys, fresh.slots().tolist()) == ([2], slots[2:])
    assert [key in blocks.cache for key in range(3)] == [True, True, False]
    with pytest.raises(ValueError, match="2 is there already or reserved"):
        blocks.cache.reserve([2])
    with pytest.raises(OutOfPagesError):
        blocks.cache.reserve([5, 6])  # all four are held but one
    last = fresh.commit_leased()
    assert last.keys == [2]
    with pytest.raises(ValueError, match="committed or cancelled"):
        fresh.commit_leased()
    lease.extend(last)
    assert lease.slots().tolist() == slots
    lease.release()
    assert blocks.read(0, 1, 2) == [0, 1, 2]
    assert blocks.storage.leased(0) == 0


def test_what_is_there_already_is_held_in_place_of_what_was_computed(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    fresh = blocks.cache.reserve([None, None])
    blocks.write(fresh._pages(), 0, 1)
    blocks.store(0)
    lease = fresh.commit_leased(keys=[0, 1])
    assert lease.slots()[0] == blocks.page(0).slot
    assert blocks.used == [2, 0]
    blocks.store(2)
    lease.release()
    assert blocks.read(0, 1, 2) == [0, 1, 2]
    blocks.cache._check()


def test_slots_that_gave_way_are_nobodys_while_they_are_still_written(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    """The engine's step writes the block although another one has computed it meanwhile."""
    blocks = build(4, 4)
    writing = gate()
    fresh = blocks.cache.reserve([None])
    (slot,) = fresh.slots().tolist()
    blocks.store(0)
    fresh.commit(writing, keys=[0])
    with blocks.cache.reserve([1, 2, 3]) as others:
        assert slot in others.slots()
        assert writing in others.fences
        writing.set()


def test_a_block_that_was_never_computed_may_be_reserved_again_at_once(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    step = HostEvent()
    blocks.cache.reserve([0, 1]).commit(step)
    with pytest.raises(ValueError, match="0 is there already"):
        blocks.cache.reserve([0])
    step.set(RuntimeError("the kernel failed"))
    blocks.store(0, 1)  # nobody has asked for them in between
    assert blocks.read(0, 1) == [0, 1]
    assert blocks.cache.lost == 2


def test_a_failed_page_is_replaced_and_goes_when_who_waits_for_it_lets_go(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 4)
    broken = HostEvent()
    lost = blocks.cache.reserve([0]).commit_leased(broken)
    broken.set(RuntimeError("the kernel failed"))
    with blocks.cache.reserve([None]) as fresh:
        blocks.write(fresh._pages(), 0)
        fresh.commit(keys=[0])
    assert blocks.used == [2, 0]
    assert blocks.read(0) == [0]
    with pytest.raises(RuntimeError, match="kernel"):
        lost.wait()
    lost.release()
    assert blocks.used == [1, 0]
    assert blocks.read(0) == [0]
    blocks.cache._check()


def test_what_is_held_of_a_block_that_is_lost_stays_until_it_is_let_go(
    build: Callable[..., Blocks],
) -> None:
    """A group's page is lost and its block with it, while somebody holds the other group's."""
    blocks = build(4, 4, layers=TWO_GROUPS)
    step = HostEvent()
    blocks.cache.reserve([0]).commit(step)
    page = blocks.page(0, 1)
    blocks.storage.lease([page])  # as while it alone is loaded
    step.set(RuntimeError("the kernel failed"))
    blocks.storage.resolve([blocks.page(0, 0)])
    assert 0 not in blocks.cache
    assert (page.freed, blocks.storage.leased(1)) == (False, 1)
    blocks.store(0)
    blocks.cache._let_go([page], HostEvent())
    assert (page.freed, blocks.storage.leased(1)) == (True, 0)
    assert blocks.used == [2, 0]
    blocks.cache._check()


def test_a_refused_reservation_drops_nothing_that_could_not_be_read(
    build: Callable[..., Blocks],
) -> None:
    blocks = build(4, 0, 8)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    blocks.page(0).ready.synchronize()
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO, times=None)
        with blocks.cache.acquire([0]) as lease, pytest.raises(OSError, match="preadv"):
            lease.wait()
    with blocks.cache.acquire([2, 3, 4]):
        with pytest.raises(OutOfPagesError):
            blocks.cache.reserve([0, 5])
        assert 0 in blocks.cache
    assert blocks.read(0) == [0]  # the disk is well again


def test_a_page_that_was_replaced_while_it_could_not_be_read_does_not_come_back(
    build: Callable[..., Blocks],
) -> None:
    """It would go back to the level below, where its block has no use for it."""
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    blocks.store(4)
    blocks.page(0).ready.synchronize()
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, at=2)
        stuck = blocks.cache.acquire([0])
        with pytest.raises(OSError, match=COPY):
            stuck.wait()
    blocks.cache.drop([4])  # nobody goes down for the new one, and so the way back is open
    with blocks.cache.reserve([None]) as fresh:
        fresh.wait()
        blocks.write(fresh._pages(), 0)
        fresh.commit(keys=[0])
    page = blocks.page(0)
    stuck.release()
    assert blocks.page(0) is page
    assert blocks.read(0) == [0]
    assert sum(blocks.used) == len(blocks.cache)
    blocks.cache._check()


# ------------------------------------------------------------------------------ who holds what


def test_a_lease_takes_over_the_blocks_of_another(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2)
    lease, other = blocks.cache.acquire([0, 1]), blocks.cache.acquire([2, 9])
    lease.extend(other)
    assert (lease.keys, lease.found, len(other), other.keys) == ([0, 1, 2], [0, 0, 0], 0, [])
    other.release()
    assert blocks.storage.leased(0) == 3
    for mine, theirs in ((lease, lease), (lease, other), (other, lease)):
        with pytest.raises(ValueError, match=r"the same|was released"):
            mine.extend(theirs)
    lease.release()
    with pytest.raises(ValueError, match="lease was released"):
        lease.extend(blocks.cache.acquire([0]))
    assert blocks.page(0).leases == 1  # the refused one holds it still


def test_a_reservation_takes_over_the_blocks_of_another(build: Callable[..., Blocks]) -> None:
    blocks, elsewhere = build(4, 4), build(4, 4)
    fresh, other = blocks.cache.reserve([0, 1]), blocks.cache.reserve([2])
    fresh.extend(other)
    other.cancel()
    with pytest.raises(ValueError, match="committed or cancelled"):
        other.commit()
    with pytest.raises(ValueError, match="of another cache"):
        fresh.extend(elsewhere.cache.reserve([5]))
    assert fresh.keys == [0, 1, 2]
    blocks.write(fresh._pages(), 0, 1, 2)
    fresh.commit()
    assert blocks.read(0, 1, 2) == [0, 1, 2]


def test_nobody_gets_the_slot_of_a_block_that_a_running_step_reads(
    build: Callable[..., Blocks], gate: Callable[[], Gate], spawn: Spawn
) -> None:
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    reading = gate()
    lease = blocks.cache.acquire([0, 1, 2, 3])
    lease.release(after=reading)
    lease.release(after=gate())  # the second time does nothing
    fresh = blocks.cache.reserve([4])  # 0 goes down, its slot is still read
    waits = spawn(fresh.wait)
    reading.wait_asked()
    assert not waits.done()
    reading.set()
    waits.result(20)
    blocks.cache.drop([1])
    with blocks.cache.reserve([5]) as another:
        assert another.fences == ()
    fresh.cancel()


def test_nobody_gets_the_slot_of_a_dropped_block_that_a_running_step_reads(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    blocks = build(4, 4)
    blocks.store(0)
    first, second, done = gate(), gate(), HostEvent()
    done.set()
    one, two, three = (blocks.cache.acquire([0]) for _ in range(3))
    one.release(after=first)
    two.release(after=second)
    three.release(after=done)
    blocks.cache.drop([0])
    fresh = blocks.cache.reserve([1, 2, 3, 4])
    (fence,) = fresh.fences
    first.set()
    assert not fence.query()
    second.set(RuntimeError("whose failure belongs to others"))
    fresh.wait()
    fresh.cancel()


def test_nobody_gets_the_slot_of_a_cancelled_block_that_a_running_step_writes(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    blocks = build(4, 4)
    writing = gate()
    fresh = blocks.cache.reserve([0, 1])
    fresh.cancel(after=writing)
    fresh.cancel()
    blocks.store(0, 1)  # there are two others
    with blocks.cache.reserve([2, 3]) as others:
        assert others.fences == (writing,)
        writing.set()


def test_a_page_that_goes_back_is_still_read_by_who_read_it(
    build: Callable[..., Blocks], gate: Callable[[], Gate]
) -> None:
    """Its copy down fails while a step reads its slot: it is there again, and so is the step."""
    blocks = build(4, 4)
    blocks.store(0, 1, 2, 3)
    reading = gate()
    blocks.cache.keep([0])
    blocks.cache.acquire([0]).release(after=reading)
    blocks.cache.touch([1, 2, 3])
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        with pytest.raises(OutOfPagesError, match="could not be moved"):
            blocks.cache.reserve([4])
    assert blocks.page(0).level == 0
    with blocks.cache.withdraw([0]) as again:
        assert reading in again.fences


def test_leased_pages_are_counted_once_each_and_by_group(build: Callable[..., Blocks]) -> None:
    blocks = build(4, 4, layers=TWO_GROUPS)
    blocks.store(0, 1, 2, 3)
    assert blocks.cache.room_for([0, 1, 2, 3, 4]) == [4, 2]  # a window of two blocks
    first = blocks.cache.acquire([0, 1, 2])
    assert [blocks.storage.leased(group) for group in (0, 1)] == [3, 2]
    assert blocks.cache.room_for([0, 1, 2, 3]) == [1, 1]
    second = blocks.cache.acquire([0, 1, 2])
    assert [blocks.storage.leased(group) for group in (0, 1)] == [3, 2]
    first.release()
    second.forget(1, 2)
    assert [blocks.storage.leased(group) for group in (0, 1)] == [3, 1]
    second.release()
    fresh = blocks.cache.withdraw([3])
    assert [blocks.storage.leased(group) for group in (0, 1)] == [1, 1]
    fresh.cancel()
    assert [blocks.storage.leased(group) for group in (0, 1)] == [0, 0]
    assert blocks.cache.room_for([]) == [0, 0]
