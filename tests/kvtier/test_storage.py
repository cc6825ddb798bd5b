"""The tier storage: where pages are, what makes them move, and that their bytes come along."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostmem import (
    ClosedError,
    CpuDevice,
    CudaDevice,
    DiskOOMError,
    HostEvent,
    HostMem,
    OutOfPagesError,
    RegistrationError,
)
from hostmem.testing import FakeDriver, FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)
from kvtier.transfer.memory import MemoryPool
from kvtier.transfer.page_events import whole

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

MIB = 1 << 20
COPY = "process_vm_readv"


def layers(*groups: tuple[int, ...]) -> list[AttentionLayerConfig]:
    """Make a pool group of each row of buffer sizes."""
    return [
        AttentionLayerConfig(
            n,
            [BufferConfig(f"b{i}", size) for i, size in enumerate(sizes)],
            sliding_window_size=n or None,
        )
        for n, sizes in enumerate(groups)
    ]


def slots(storage: TierStorage, pages: list[Page]) -> list[tuple[str, int]]:
    return [(storage.levels[page.level].name, page.slot) for page in pages]


def state(storage: TierStorage) -> Any:
    """Give all that a refused call must leave as it was."""
    return (
        [
            [(p.owner, p.slot, p.level, p.leases, p.kept) for p in policy.victims()]
            for level in storage.levels
            for policy in level.policies
        ],
        [g.slots.statistics() for level in storage.levels for g in level.groups],
        storage.stats(),
    )


# ------------------------------------------------------------------------------- new pages


def test_new_pages_are_in_the_hot_level_and_leased_once(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = storage.new_pages(["a", "b"], 0)
    assert slots(storage, pages) == [("gpu", 0), ("gpu", 1)]
    assert [(page.owner, page.leases, page.fences) for page in pages] == [
        ("a", 1, ()),
        ("b", 1, ()),
    ]
    storage._check()


def test_a_page_takes_part_in_eviction_only_once_committed(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = storage.new_pages([0, 1, 2, 3], 0)
    storage.release(pages)
    with pytest.raises(OutOfPagesError):
        storage.new_pages([4], 0)
    storage.commit(pages)
    storage.new_pages([4], 0)
    assert slots(storage, pages) == [("host", 0), ("gpu", 1), ("gpu", 2), ("gpu", 3)]


def test_no_pages_are_no_change(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    before = state(storage)
    assert storage.new_pages([], 0) == []
    assert storage.onboard([]) == []
    assert state(storage) == before


# -------------------------------------------------------------------------------- eviction


def test_a_page_is_in_one_level_at_a_time(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    pages = tiers.new(storage, *range(4)) + tiers.new(storage, 4, 5)
    assert tiers.order(storage) == [[2, 3, 4, 5], [0, 1], []]
    assert [level.used for level in storage.stats().levels.values()] == [4, 2, 0]
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_the_least_recently_used_page_goes_first(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    storage.touch([pages[0], pages[1]])
    tiers.new(storage, 4)
    assert tiers.order(storage) == [[3, 0, 1, 4], [2]]


def test_a_touch_counts_in_whatever_level_the_page_is(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, *range(4, 8))
    storage.touch([pages[0]])
    tiers.new(storage, 8)
    assert tiers.order(storage) == [[5, 6, 7, 8], [2, 3, 0, 4], [1]]


def test_evictions_cascade_down_and_drop_at_the_end(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    dropped: list[Any] = []
    storage.attach(lambda page: dropped.append(page.owner))
    for key in range(15):
        tiers.new(storage, key)
    assert tiers.order(storage) == [[11, 12, 13, 14], [7, 8, 9, 10], [3, 4, 5, 6]]
    assert dropped == [0, 1, 2]
    assert storage.stats().pages_dropped == 3
    storage._check()


def test_without_a_level_below_pages_are_dropped(tiers: Tiers) -> None:
    storage = tiers.build(4)
    dropped: list[Any] = []
    storage.attach(lambda page: dropped.append(page.owner))
    tiers.new(storage, *range(4))
    tiers.new(storage, 4, 5, 6)
    assert (tiers.order(storage), dropped) == ([[3, 4, 5, 6]], [0, 1, 2])


def test_without_a_host_level_pages_go_to_disk(tiers: Tiers) -> None:
    storage = tiers.build(4, 0, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, 4, 5)
    assert slots(storage, pages[:2]) == [("disk", 0), ("disk", 1)]
    assert all(tiers.intact(storage, page) for page in pages)
    assert storage.stats().bytes_moved == {"gpu->disk": MIB}


def test_a_level_smaller_than_the_batch_passes_on_what_it_cannot_hold(tiers: Tiers) -> None:
    page = MIB // 4
    storage = tiers.build(16, 8, 24, page=page)
    pages = tiers.new(storage, *range(16)) + tiers.new(storage, *range(16, 32))
    # Sixteen pages came to a level of eight: the first eight are where eight more pushed them.
    assert tiers.order(storage) == [
        list(range(16, 32)),
        list(range(8, 16)),
        list(range(8)),
    ]
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_a_last_level_smaller_than_the_batch_drops_what_it_cannot_hold(tiers: Tiers) -> None:
    storage = tiers.build(16, 8, page=MIB // 4)
    dropped: list[Any] = []
    storage.attach(lambda page: dropped.append(page.owner))
    tiers.new(storage, *range(16))
    tiers.new(storage, *range(16, 32))
    assert tiers.order(storage) == [list(range(16, 32)), list(range(8, 16))]
    assert dropped == list(range(8))
    storage._check()


# ------------------------------------------------------------------------ leased and kept


def test_a_leased_page_is_neither_moved_nor_dropped(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    storage.lease([pages[0], pages[2]])
    tiers.new(storage, 4, 5)
    assert slots(storage, pages) == [("gpu", 0), ("host", 0), ("gpu", 2), ("host", 1)]
    tiers.new(storage, 6, 7)
    assert tiers.order(storage)[0] == [0, 2, 6, 7]


def test_a_leased_page_of_a_lower_level_stays_there(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, *range(4, 8))
    storage.lease([pages[0]])
    tiers.new(storage, *range(8, 12))
    assert tiers.order(storage)[1] == [0, 5, 6, 7]
    assert tiers.intact(storage, pages[0])


def test_a_lease_lasts_until_as_many_releases(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    storage.lease(pages)
    storage.lease(pages)
    storage.release(pages)
    with pytest.raises(OutOfPagesError):
        storage.new_pages([4], 0)
    storage.release(pages)
    storage.new_pages([4], 0)
    with pytest.raises(ValueError, match="is not leased"):
        storage.release(pages)


def test_a_kept_page_moves_down_but_is_never_dropped(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    pages[0].kept = True
    tiers.new(storage, *range(4, 8))
    tiers.new(storage, *range(8, 12))
    assert tiers.order(storage) == [[8, 9, 10, 11], [0, 5, 6, 7]]
    assert tiers.intact(storage, pages[0])


def test_kept_pages_that_would_have_to_be_dropped_refuse_the_new_ones(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    for page in tiers.new(storage, *range(4)) + tiers.new(storage, *range(4, 8)):
        page.kept = True
    before = state(storage)
    with pytest.raises(OutOfPagesError, match="level host"):
        storage.new_pages([8], 0)
    assert state(storage) == before


# ------------------------------------------------------------------------- all or nothing


def test_a_refusal_changes_nothing(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, *range(4, 8))
    tiers.new(storage, 8, 9)
    hot = list(storage.levels[0].policies[0].victims())
    storage.lease(hot[:2])
    before = state(storage)
    with pytest.raises(OutOfPagesError, match="level gpu, group 0: 3 more slots wanted") as told:
        storage.new_pages([10, 11, 12], 0)
    assert told.value.facts == {"level": 0, "group": 0, "wanted": 3, "short": 1}
    assert state(storage) == before
    assert all(tiers.intact(storage, page) for page in pages)
    storage.new_pages([10, 11], 0)


def test_more_pages_than_the_level_holds_are_refused(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    tiers.new(storage, *range(4))
    before = state(storage)
    with pytest.raises(OutOfPagesError, match=r"5 more slots wanted, .* it has 4; ask for fewer"):
        storage.new_pages(list(range(4, 9)), 0)
    assert state(storage) == before


def test_a_refusal_deep_down_changes_nothing_above(tiers: Tiers) -> None:
    """The first eight of twelve pages would still fit, with what they push down."""
    storage = tiers.build(16, 8, 8, page=MIB // 4)
    for page in tiers.new(storage, *range(16)):
        page.kept = True
    tiers.new(storage, *range(16, 28))  # 0 to 11 go down
    before = state(storage)
    with pytest.raises(OutOfPagesError, match="level disk"):
        storage.new_pages(list(range(28, 44)), 0)
    assert state(storage) == before
    storage._check()


def test_a_refusal_of_one_pool_group_changes_no_other(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, layers=layers((MIB,), (MIB,)))  # two pages a group
    first = tiers.new(storage, 0, 1)
    second = tiers.new(storage, 0, 1, group=1)
    tiers.new(storage, 2, 3)
    tiers.new(storage, 2, 3, group=1)
    storage.lease(list(storage.levels[0].policies[1].victims()))
    storage.lease([*first, *second])
    before = state(storage)
    with pytest.raises(OutOfPagesError, match="group 1"):
        storage.onboard([*first, *second])
    assert state(storage) == before


def test_room_for_several_groups_is_checked_together(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, layers=layers((MIB,), (MIB,)))
    storage.new_pages([0, 1], 1)
    before = state(storage)
    storage.check_room({0: 2})
    with pytest.raises(OutOfPagesError, match="group 1"):
        storage.check_room({0: 2, 1: 1})
    assert state(storage) == before


# ------------------------------------------------------------------------------- onboarding


def leased(storage: TierStorage, pages: list[Page]) -> list[Page]:
    storage.lease(pages)
    return pages


def test_onboarded_pages_are_the_most_recent_in_the_order_given(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, 4, 5)
    asked = leased(storage, [pages[2], pages[1], pages[0]])
    assert storage.onboard(asked) == [pages[1], pages[0]]
    # Slots for two were wanted: 3 and 4, the oldest that nobody leases, went.
    assert tiers.order(storage) == [[5, 2, 1, 0], [3, 4], []]
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_pages_of_several_levels_come_up_together(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 8)
    pages = [tiers.new(storage, key)[0] for key in range(10)]
    assert tiers.order(storage) == [[6, 7, 8, 9], [2, 3, 4, 5], [0, 1]]
    asked = leased(storage, [pages[0], pages[3], pages[9], pages[1]])
    storage.onboard(asked)
    assert tiers.order(storage)[0] == [0, 3, 9, 1]
    assert all(tiers.intact(storage, page) for page in pages)
    assert sorted(storage.stats().bytes_moved) == [
        "disk->gpu",
        "gpu->host",
        "host->disk",
        "host->gpu",
    ]
    storage._check()


def test_a_page_that_is_named_twice_moves_once(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, 4)
    storage.lease([pages[0], pages[0]])
    assert storage.onboard([pages[0], pages[0]]) == [pages[0]]
    assert tiers.order(storage) == [[2, 3, 4, 0], [1]]
    storage._check()


def test_a_whole_level_below_comes_up_through_a_full_one(tiers: Tiers) -> None:
    """All its pages are leased, so that nothing can come to it: what is evicted goes past it."""
    storage = tiers.build(16, 8, 24, page=MIB // 4)
    pages = [tiers.new(storage, key)[0] for key in range(24)]
    assert tiers.order(storage) == [list(range(8, 24)), list(range(8)), []]
    storage.onboard(leased(storage, pages[:8]))
    assert tiers.order(storage) == [[*range(16, 24), *range(8)], [], list(range(8, 16))]
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_pages_that_do_not_fit_beside_the_leased_ones_stay_below(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    others = tiers.new(storage, 4, 5, 6)
    storage.lease(others)
    asked = leased(storage, pages[:2])
    before = state(storage)
    with pytest.raises(OutOfPagesError):
        storage.onboard(asked)
    assert state(storage) == before


def test_only_leased_pages_are_onboarded(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, 4)
    before = state(storage)
    with pytest.raises(ValueError, match="is not leased"):
        storage.onboard([pages[0]])
    assert state(storage) == before


def test_a_group_of_several_pools_is_one_page_below(tiers: Tiers) -> None:
    sizes = ((MIB // 4, MIB // 4, MIB // 8), (MIB // 8 + 8, MIB // 16))
    storage = tiers.build(8, 8, 8, layers=layers(*sizes))
    made = [tiers.new(storage, key, group=group)[0] for key in range(30) for group in (0, 1)]
    kept = [p for p in made if any(p in at.policies[p.group] for at in storage.levels)]
    assert {p.level for p in kept} == {0, 1, 2}
    assert all(tiers.intact(storage, page) for page in kept)
    for page in kept:
        if page.level and page in storage.levels[page.level].policies[page.group]:
            storage.onboard(leased(storage, [page]))
            assert tiers.intact(storage, page)
            storage.release([page])
    storage._check()


# ---------------------------------------------------------------------------------- discard


def test_a_discarded_page_is_gone_from_whatever_level(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    pages = [tiers.new(storage, key)[0] for key in range(10)]
    storage.discard([pages[9], pages[3], pages[0]])
    assert tiers.order(storage) == [[6, 7, 8], [2, 4, 5], [1]]
    assert [level.used for level in storage.stats().levels.values()] == [3, 3, 1]
    assert storage.stats().pages_dropped == 0
    storage._check()


def test_discarding_new_pages_keeps_their_slots_fenced(tiers: Tiers) -> None:
    """Nobody has waited for the copies that read them: the next owner must."""
    storage = tiers.build(4, 8)
    old = tiers.new(storage, *range(4))
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        pages = storage.new_pages([4, 5], 0)
        held.wait_reached()
        (fence,) = pages[0].fences
        assert not fence.query()
        slots = [page.slot for page in pages]
        storage.discard(pages)
        assert all(page.freed for page in pages)
        again = storage.new_pages([6, 7], 0)
        assert again[0].slot in slots
        assert again[0].fences == (fence,)
        held.release()
        fence.synchronize()
    assert all(tiers.intact(storage, page) for page in old)


def test_discarding_new_pages_with_several_fences_keeps_them_all(tiers: Tiers) -> None:
    storage = tiers.build(4, 8)
    old = tiers.new(storage, *range(4))
    with FaultPlan() as plan:
        held = [plan.hold(COPY, at=1), plan.hold(COPY, at=2)]
        (one,) = storage.new_pages([4], 0)
        (two,) = storage.new_pages([5], 0)
        storage.discard([one, two])
        pages = storage.new_pages([6, 7], 0)  # both slots, and what fences either
        assert len(pages[0].fences) == 2
        storage.discard(pages)
        (again,) = storage.new_pages([8], 0)
        held[0].release()
        held[1].wait_reached()
        assert not all(fence.query() for fence in again.fences)
        held[1].release()
        for fence in again.fences:
            fence.synchronize()
    assert all(tiers.intact(storage, page) for page in old)


# ------------------------------------------------------------------------ fences and copies


def test_a_slot_is_fenced_by_the_copy_that_reads_it(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    (old,) = tiers.new(storage, 0)
    tiers.new(storage, 1, 2, 3)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        (new,) = storage.new_pages([4], 0)
        held.wait_reached()
        assert new.slot == 0
        (fence,) = new.fences
        assert fence is whole(old.ready)
        assert not fence.query()
        assert storage.levels[0].groups[0].slots.statistics().ready == 0
        held.release()
        fence.wait_finished()
    tiers.write(storage, new)
    assert tiers.intact(storage, old)


def test_a_free_slot_whose_copy_has_finished_needs_no_fence(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, 4)
    pages[0].ready.synchronize()
    (page,) = storage.onboard(leased(storage, [pages[0]]))
    page.ready.synchronize()
    slot = page.slot
    storage.discard([page])
    (new,) = storage.new_pages([5], 0)
    assert (new.slot, new.fences) == (slot, ())


def test_every_copy_waits_for_the_one_that_brings_its_bytes(tiers: Tiers) -> None:
    """Through three levels and back, submitted while the first copy has not even begun."""
    storage = tiers.build(4, 4, 4)
    (page, *others) = tiers.new(storage, *range(4))
    tiers.new(storage, *range(4, 8))
    for one in others:
        assert tiers.intact(storage, one)
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        last = tiers_commit(storage, list(range(8, 12)))  # 4..7 down to host, 0..3 to disk
        moved = storage.onboard(leased(storage, [page]))
        assert moved == [page]
        events = [page.ready, *(p.ready for p in last)]
        held.wait_reached()
        assert not page.ready.query()
        held.release()
        for event in events:
            event.wait_finished()
    assert page.level == 0
    assert tiers.intact(storage, page)
    storage._check()


def tiers_commit(storage: TierStorage, keys: list[int]) -> list[Page]:
    """Commit pages without writing them, as a stream that has still to run would."""
    pages = storage.new_pages(keys, 0)
    storage.commit(pages)
    storage.release(pages)
    return pages


def test_a_chain_of_moves_is_submitted_while_every_copy_is_held(
    tiers: Tiers, gate: Callable[[], Gate]
) -> None:
    """Pages run down from the hot level to disk and up again before any byte has moved."""
    storage = tiers.build(4, 4, 8)
    pages = tiers.new(storage, *range(4))
    shut = gate()
    # Their bytes "come" when the gate opens: all that is submitted below depends on it.
    for page in pages:
        page.ready = shut
    tiers_commit(storage, list(range(4, 8)))
    tiers_commit(storage, list(range(8, 12)))
    assert slots(storage, pages) == [("disk", n) for n in range(4)]
    storage.onboard(leased(storage, pages[:2]))
    storage.release(pages[:2])
    tiers_commit(storage, list(range(12, 15)))
    # 8 and 9 made room for 0 and 1; 10, 11 and 0 for the three after them.
    assert tiers.order(storage) == [[1, 12, 13, 14], [9, 10, 11, 0], [2, 3, 4, 5, 6, 7, 8]]
    assert not any(page.ready.query() for page in pages)
    shut.set()
    for page in pages:
        assert tiers.intact(storage, page)
    storage._check()


def test_a_move_to_disk_does_not_wait_for_host_memory_that_is_being_filled(
    tiers: Tiers, spawn: Spawn
) -> None:
    """A fresh slot waits for its registration on a thread of ours, not under the lock."""
    with contextlib.ExitStack() as stack:
        plan = stack.enter_context(FaultPlan())
        page = MIB // 4
        config = tiers.config(8, 8, 8, page=page)
        # The hot level registers 1 MiB twice; the host's first registration is the third call.
        held = plan.hold("cuMemHostRegister", at=3)
        storage = TierStorage(config, device="cpu")
        stack.callback(storage.close)
        stack.callback(held.release)
        pages = tiers.new(storage, *range(8))

        def push() -> list[Page]:
            return tiers_commit(storage, list(range(8, 16))) + tiers_commit(
                storage, list(range(16, 24))
            )

        pushed = spawn(push)
        assert len(pushed.result(20)) == 16  # although no byte of the host level is usable
        held.wait_reached()
        assert slots(storage, pages) == [("disk", n) for n in range(8)]
        assert not any(page.ready.query() for page in pages)
        held.release()
        assert all(tiers.intact(storage, page) for page in pages)


# --------------------------------------------------------------------------------- failures


def test_a_page_whose_copy_failed_says_so_and_never_gets_bytes(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        tiers.new(storage, 4)
        with pytest.raises(OSError, match=COPY):
            pages[0].ready.synchronize()
    assert pages[0].lost
    storage.onboard(leased(storage, [pages[0]]))
    with pytest.raises(OSError, match=COPY):
        pages[0].ready.synchronize()
    assert pages[0].lost
    storage._check()


def test_a_failed_copy_costs_only_the_pages_it_was_to_bring(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    pages = [tiers.new(storage, key)[0] for key in range(4)]
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT)
        pages += tiers.new(storage, 4)  # loses 0, whose slot 4 has got
        pages[0].ready.wait_finished()
        dropped: list[Any] = []
        storage.attach(lambda page: dropped.append(page.owner))
        pages += [tiers.new(storage, key)[0] for key in range(5, 8)]
    assert [page.lost for page in pages] == [True] + [False] * 7
    tiers.new(storage, *range(8, 12))
    assert tiers.order(storage) == [[8, 9, 10, 11], [4, 5, 6, 7], [1, 2, 3]]
    assert dropped == [0]
    assert all(tiers.intact(storage, page) for page in pages[1:])
    storage._check()


def test_a_failed_write_to_disk_loses_its_page_and_the_next_move_goes_on(tiers: Tiers) -> None:
    storage = tiers.build(4, 0, 8)
    pages = tiers.new(storage, *range(4))
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO)
        tiers.new(storage, 4)
        with pytest.raises(OSError, match="pwritev"):
            pages[0].ready.synchronize()
    tiers.new(storage, 5, 6)
    assert [page.lost for page in pages] == [True, False, False, False]
    assert all(tiers.intact(storage, page) for page in pages[1:])
    # Its slot is free: the hot one had another page, so it was dropped.
    assert storage.stats().levels["disk"].used == 2
    storage._check()


def test_a_source_slot_stays_fenced_while_something_still_writes_it(
    tiers: Tiers, gate: Callable[[], Gate]
) -> None:
    """One page of a batch failed; another page's bytes are still arriving in its slot."""
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, *range(4))
    bad, arriving = HostEvent(), gate()
    pages[0].ready, pages[1].ready = bad, arriving
    new = storage.new_pages([4, 5], 0)  # 0 and 1 go down in one copy
    bad.set(OSError(errno.EIO, "the disk is gone"))
    arriving.wait_asked()
    assert [page.slot for page in new] == [0, 1]
    assert not any(fence.query() for fence in new[0].fences)
    arriving.set()
    for fence in new[0].fences:
        fence.wait_finished()
    assert pages[0].lost
    assert tiers.intact(storage, pages[1])


def test_a_host_level_that_cannot_be_filled_loses_pages_but_not_the_storage(tiers: Tiers) -> None:
    with contextlib.ExitStack() as stack:
        plan = stack.enter_context(FaultPlan())
        # The hot level registers 1 MiB twice; what follows is all of the host level's.
        plan.fail("cuMemHostRegister", 2, at=3, times=None, when=lambda at, n: n <= MIB)
        filling = plan.hold("cuMemHostRegister", at=3, when=lambda at, n: n <= MIB)
        storage = TierStorage(tiers.config(8, 8, 8, page=MIB // 4), device="cpu")
        stack.callback(storage.close)
        pages = tiers.new(storage, *range(8))
        tiers_commit(storage, list(range(8, 16)))
        filling.release()
        for page in pages:
            with pytest.raises(Exception, match="register"):
                page.ready.synchronize()
        tiers_commit(storage, list(range(16, 24)))
        assert all(page.lost for page in pages)
        storage._check()


def test_a_host_level_that_could_not_be_filled_is_passed_over(tiers: Tiers) -> None:
    with contextlib.ExitStack() as stack:
        plan = stack.enter_context(FaultPlan())
        plan.fail("cuMemHostRegister", 2, at=3, times=None, when=lambda at, n: n <= MIB)
        storage = TierStorage(tiers.config(8, 8, 8, page=MIB // 4), device="cpu")
        stack.callback(storage.close)
        with pytest.raises(RegistrationError):
            storage.levels[1].groups[0].memory.wait_usable()
        pages = tiers.new(storage, *range(8))
        tiers_commit(storage, list(range(8, 16)))
        for page in pages:
            page.ready.synchronize()
        assert {page.level for page in pages} == {2}
        assert all(tiers.intact(storage, page) for page in pages)
        storage._check()


# -------------------------------------------------------------------------------- building


def test_a_config_is_refused_before_anything_is_built(tiers: Tiers, tmp_path: Path) -> None:
    good = tiers.config(4, 4, 4)
    bad = KVCacheManagerConfig(
        16,
        [*good.cache_tiers[:2], DiskCacheTierConfig(2 * MIB, str(tmp_path / "missing"))],
        good.layers,
    )
    with FaultPlan() as plan:
        with pytest.raises(ValueError, match=r"disk\.path"):
            TierStorage(bad, device="cpu")
        assert plan.log == []


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        (HostCacheTierConfig("8EiB"), r"host\.quota: 8 EiB .* is above the .* that are there"),
        (DiskCacheTierConfig("8EiB", "."), r"disk\.quota: 8 EiB .* is above the"),
        (HostCacheTierConfig("4MiB", "2MiB"), r"host\.max_quota"),
        (HostCacheTierConfig(1), r"host\.quota"),
    ],
    ids=["more-than-the-host", "more-than-the-disk", "above-its-bound", "below-a-grain"],
)
def test_an_impossible_quota_is_refused_before_anything_is_built(
    tiers: Tiers, tier: Any, message: str
) -> None:
    good = tiers.config(4)
    with FaultPlan() as plan:
        with pytest.raises(ValueError, match=message):
            TierStorage(
                KVCacheManagerConfig(16, [*good.cache_tiers, tier], good.layers), device="cpu"
            )
        assert plan.log == []


def test_a_gpu_quota_above_the_memory_of_the_device_is_refused(tiers: Tiers) -> None:
    device = CudaDevice(0, driver=FakeDriver(memory=1 << 30))
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig("2GiB")], tiers.config(4).layers)
    with pytest.raises(ValueError, match=r"gpu\.quota: 2 GiB .* is above the 1 GiB"):
        TierStorage(config, device=device)


@pytest.mark.parametrize(
    ("call", "at", "error"),
    [
        ("mmap", 1, errno.ENOMEM),  # the hot level's address space
        ("madvise(MADV_POPULATE_WRITE)", 1, errno.ENOMEM),  # its memory
        ("cuMemHostRegister", 1, 801),  # its registration: NOT_SUPPORTED is not tried again
        ("mmap", 2, errno.ENOMEM),  # the host level's address space
    ],
)
def test_a_level_that_cannot_be_built_is_an_error_and_nothing_is_kept(
    tiers: Tiers, cpu: CpuDevice, call: str, at: int, error: int
) -> None:
    before = mapped(), len(os.listdir("/proc/self/fd"))
    with FaultPlan() as plan:
        plan.fail(call, error, at=at)
        with pytest.raises((MemoryError, RegistrationError)):
            TierStorage(tiers.config(4, 4, 4), device="cpu")
        assert len(plan.calls("mmap")) == len(plan.calls("munmap")) + (call == "mmap")
    assert list(cpu.registered) == []
    assert [t.name for t in threading.enumerate() if t.name.startswith("kvtier-")] == []
    assert len(os.listdir("/proc/self/fd")) == before[1]
    assert os.listdir(tiers.folder) == []


def test_staging_buffers_that_are_sure_to_be_needed_are_built_with_the_levels(
    tiers: Tiers, cpu: CpuDevice
) -> None:
    # Two pools make up a hot page, so that no file can be read into it.
    config = tiers.config(4, 4, 4, layers=layers((MIB // 2, MIB // 4)))
    with FaultPlan() as plan:
        plan.fail("mmap", errno.ENOMEM, at=4)  # two hot pools, one host pool, the buffers
        with pytest.raises(MemoryError):
            TierStorage(config, device="cpu")
        assert len(plan.calls("mmap")) == len(plan.calls("munmap")) + 1
    assert list(cpu.registered) == []


def mapped() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_a_disk_level_that_cannot_be_built_is_an_error_and_nothing_is_kept(
    tiers: Tiers, cpu: CpuDevice
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with FaultPlan() as plan:
        plan.fail("fallocate", errno.ENOSPC)
        with pytest.raises(DiskOOMError):
            TierStorage(tiers.config(4, 4, 4), device="cpu")
        assert len(plan.calls("mmap")) == len(plan.calls("munmap"))
    assert list(cpu.registered) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["cuMemAddressReserve", "cuMemCreate", "cuStreamCreate"])
def test_a_gpu_level_that_cannot_be_built_is_an_error_and_nothing_is_kept(
    tiers: Tiers, call: str
) -> None:
    driver = FakeDriver()
    device = CudaDevice(0, driver=driver)
    free = driver.memory_info(0)
    with FaultPlan() as plan:
        plan.fail(call, 2)
        with pytest.raises(MemoryError):
            TierStorage(tiers.config(4, 4, 4), device=device)
    assert driver.memory_info(0) == free
    assert list(driver.registered) == []
    with TierStorage(tiers.config(4, 4, 4), device=device):
        pass


def test_an_unknown_policy_is_refused_before_anything_is_built(tiers: Tiers) -> None:
    with FaultPlan() as plan:
        with pytest.raises(ValueError, match="policy: there is no 'best'"):
            TierStorage(tiers.config(4), device="cpu", policy="best")
        assert plan.log == []


# ------------------------------------------------------------------------------ on a "GPU"


def test_a_gpu_level_moves_its_pages_through_the_driver(tiers: Tiers) -> None:
    device = CudaDevice(0, driver=FakeDriver())
    storage = tiers.build(4, 4, 8, device=device)
    pages = [tiers.new(storage, key)[0] for key in range(12)]
    assert tiers.order(storage) == [[8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]
    storage.onboard(leased(storage, [pages[1], pages[6]]))
    assert all(tiers.intact(storage, page) for page in pages)
    storage._check()


def test_a_gpu_level_without_a_host_level_goes_through_the_staging_buffer(tiers: Tiers) -> None:
    device = CudaDevice(0, driver=FakeDriver())
    storage = tiers.build(4, 0, 12, device=device)
    pages = [tiers.new(storage, key)[0] for key in range(12)]
    storage.onboard(leased(storage, [pages[0], pages[5], pages[3]]))
    assert all(tiers.intact(storage, page) for page in pages)
    assert storage.stats().bytes_moved == {"gpu->disk": 11 * MIB // 2, "disk->gpu": 3 * MIB // 2}


# ------------------------------------------------------------------------------ inspection


def test_the_figures_add_up(tiers: Tiers) -> None:
    storage = tiers.build(4, 4, 4)
    for key in range(14):
        tiers.new(storage, key)
    stats = storage.stats()
    assert {name: (at.slots, at.used, at.quota) for name, at in stats.levels.items()} == {
        "gpu": (4, 4, 2 * MIB),
        "host": (4, 4, 2 * MIB),
        "disk": (4, 4, 2 * MIB),
    }
    # Of 14 pages of half a MiB ten left the hot level, six the host level and two the disk.
    assert stats.bytes_moved == {"gpu->host": 5 * MIB, "host->disk": 3 * MIB}
    assert stats.pages_dropped == 2
    assert [storage.quota(level) for level in range(3)] == [2 * MIB] * 3
    levels, held, moved, _, files = storage.describe().split("\n\n")
    assert [line.split()[:3] for line in levels.splitlines()] == [
        ["level", "slots", "used"],
        ["gpu", "4", "4"],
        ["host", "4", "4"],
        ["disk", "4", "4"],
    ]
    assert [line.split()[1] for line in held.splitlines()] == ["pages", "4", "4", "4"]
    assert [line.split()[0] for line in moved.splitlines()[1:]] == ["gpu->host", "host->disk"]
    (row,) = [line.split() for line in files.splitlines()[1:]]
    assert row[:5] == ["group", "0", str(stats.files[0].writes), "3", "MiB"]
    assert stats.files[0].bytes_written == 3 * MIB


def test_one_thing_is_told_about_drops(tiers: Tiers) -> None:
    storage = tiers.build(4)
    storage.attach(lambda page: None)
    with pytest.raises(ValueError, match="has a cache already"):
        storage.attach(lambda page: None)


def test_the_check_finds_a_page_that_is_in_two_places(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, 0, 1)
    storage._check()
    pages[0].slot = pages[1].slot
    with pytest.raises(AssertionError, match="two pages in one slot"):
        storage._check()
    pages[0].slot = 0


# ------------------------------------------------------------------------------------ close


def test_closing_finishes_the_moves_that_were_submitted(tiers: Tiers, spawn: Spawn) -> None:
    storage = tiers.build(4, 4, 4)
    pages = tiers.new(storage, *range(4))
    tiers.new(storage, *range(4, 8))
    with FaultPlan() as plan:
        held = plan.hold("pwritev")
        tiers_commit(storage, [8])
        held.wait_reached()
        closing = spawn(storage.close)
        assert not closing.done()
        held.release()
        closing.result(20)
    assert pages[0].ready.query()
    assert pages[0].ready.error is None


def test_closing_twice_at_once_gives_the_memory_back_after_the_moves(
    tiers: Tiers, cpu: CpuDevice, spawn: Spawn
) -> None:
    storage = tiers.build(4, 4)
    tiers.new(storage, *range(4))
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        tiers_commit(storage, [4])
        held.wait_reached()
        closings = [spawn(storage.close), spawn(storage.close)]
        for closing in closings:  # neither has ended while a copy goes on
            with pytest.raises(TimeoutError):
                closing.result(0.1)
        assert list(cpu.registered) != []
        held.release()
        for closing in closings:
            closing.result(20)
    assert list(cpu.registered) == []


def test_a_closed_storage_makes_and_moves_no_pages(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    pages = tiers.new(storage, 0, 1, 2)
    storage.lease(pages)
    storage.close()
    with pytest.raises(ClosedError):
        storage.new_pages([3], 0)
    with pytest.raises(ClosedError):
        storage.onboard(pages)
    storage.release(pages)
    assert "closed" in repr(storage)


def hot_memory(storage: TierStorage) -> HostMem:
    pool = storage.levels[0].groups[0].memory.pools[0]
    assert isinstance(pool, MemoryPool)
    assert isinstance(pool.memory, HostMem)
    return pool.memory


def test_a_live_view_keeps_its_level_open_and_no_other(tiers: Tiers, cpu: CpuDevice) -> None:
    storage = tiers.build(4, 4)
    view = hot_memory(storage).view(0, 8)
    with pytest.raises(BufferError, match="live views"):
        storage.close()
    assert len({address for address, _ in cpu.registered}) == 2  # the hot level's two MiB
    view[:] = 7
    del view
    storage.close()
    assert list(cpu.registered) == []


def test_the_error_of_a_body_is_not_hidden_by_a_live_view(tiers: Tiers) -> None:
    storage = tiers.build(4, 4)
    view = hot_memory(storage).view(0, 8)
    with pytest.raises(KeyError) as caught, storage:
        raise KeyError("the real trouble")
    assert "stays open" in caught.value.__notes__[0]
    del view


# --------------------------------------------------------------------------- against a model


class Model:
    """Exclusive levels in least recently used order, as plain lists; the least recent first."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.levels: list[list[int]] = [[] for _ in sizes]
        self.leases: dict[int, int] = {}
        self.dropped: list[int] = []

    def room(self, level: int) -> int:
        return self.sizes[level] - len(self.levels[level])

    def push_out(self, level: int) -> None:
        """Take the least recent page that nobody leases out of a level, and put it below."""
        victim = next(key for key in self.levels[level] if not self.leases.get(key))
        self.levels[level].remove(victim)
        self.put_below(level, victim)

    def put_below(self, level: int, key: int) -> None:
        below = level + 1
        if below == len(self.sizes):
            self.dropped.append(key)
        elif self.room(below) > 0:
            self.levels[below].append(key)
        elif all(self.leases.get(other) for other in self.levels[below]):
            self.put_below(below, key)  # nothing there can make room
        else:
            self.push_out(below)
            self.levels[below].append(key)

    def fits(self, n: int) -> bool:
        free = sum(not self.leases.get(key) for key in self.levels[0])
        return n <= self.room(0) + free

    def new(self, keys: list[int]) -> None:
        for _ in range(len(keys) - self.room(0)):
            self.push_out(0)
        self.levels[0] += keys

    def onboard(self, keys: list[int]) -> None:
        coming = [key for key in keys if key not in self.levels[0]]
        for _ in range(len(coming) - self.room(0)):
            self.push_out(0)
        for level in self.levels:
            level[:] = [key for key in level if key not in keys]
        self.levels[0] += keys

    def touch(self, key: int) -> None:
        for level in self.levels:
            if key in level:
                level.remove(key)
                level.append(key)

    @property
    def keys(self) -> list[int]:
        return [key for level in self.levels for key in level]


class StorageMachine(RuleBasedStateMachine):
    """The storage does what the model does, and every byte read is the one that was written."""

    tiers: Tiers
    sizes: tuple[int, int, int]

    def __init__(self) -> None:
        super().__init__()
        self.storage = TierStorage(self.tiers.config(*self.sizes, page=MIB // 4), device="cpu")
        self.model = Model([size for size in self.sizes if size])
        self.pages: dict[int, Page] = {}
        self.next = 0
        self.gone: list[int] = []
        self.storage.attach(lambda page: self.gone.append(page.owner))  # type: ignore[arg-type]

    def teardown(self) -> None:
        try:
            for key in self.model.keys:
                assert self.tiers.intact(self.storage, self.pages[key])
        finally:
            self.storage.close()

    def some(self, data: st.DataObject, most: int = 8) -> list[int]:
        return data.draw(
            st.lists(st.sampled_from(self.model.keys), min_size=1, max_size=most, unique=True)
        )

    @rule(n=st.integers(1, 9))
    def new(self, n: int) -> None:
        keys = list(range(self.next, self.next + n))
        if not self.model.fits(n):
            before = state(self.storage)
            with pytest.raises(OutOfPagesError):
                self.storage.new_pages(keys, 0)
            assert state(self.storage) == before
            return
        self.next += n
        self.pages.update(zip(keys, self.tiers.new(self.storage, *keys), strict=True))
        self.model.new(keys)

    @precondition(lambda self: self.model.keys)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        for key in self.some(data):
            self.storage.touch([self.pages[key]])
            self.model.touch(key)

    @precondition(lambda self: self.model.keys)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        for key in self.some(data, 3):
            self.storage.lease([self.pages[key]])
            self.model.leases[key] = self.model.leases.get(key, 0) + 1

    @precondition(lambda self: any(self.model.leases.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, n in self.model.leases.items() if n]))
        self.storage.release([self.pages[key]])
        self.model.leases[key] -= 1

    @precondition(lambda self: self.model.keys)
    @rule(data=st.data())
    def onboard(self, data: st.DataObject) -> None:
        keys = self.some(data)
        pages = [self.pages[key] for key in keys]
        self.storage.lease(pages)
        for key in keys:
            self.model.leases[key] = self.model.leases.get(key, 0) + 1
        if self.model.fits(sum(key not in self.model.levels[0] for key in keys)):
            self.storage.onboard(pages)
            self.model.onboard(keys)
            assert all(self.tiers.intact(self.storage, page) for page in pages)
        else:
            before = state(self.storage)
            with pytest.raises(OutOfPagesError):
                self.storage.onboard(pages)
            assert state(self.storage) == before
        self.storage.release(pages)
        for key in keys:
            self.model.leases[key] -= 1

    @precondition(lambda self: any(not self.model.leases.get(key) for key in self.model.keys))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        free = [key for key in self.model.keys if not self.model.leases.get(key)]
        key = data.draw(st.sampled_from(free))
        self.storage.discard([self.pages[key]])
        for level in self.model.levels:
            if key in level:
                level.remove(key)

    @precondition(lambda self: self.model.keys)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        for key in self.some(data, 2):
            assert self.tiers.intact(self.storage, self.pages[key])

    @invariant()
    def as_in_the_model(self) -> None:
        assert self.tiers.order(self.storage) == self.model.levels
        assert self.gone == self.model.dropped
        self.storage._check()


@pytest.mark.parametrize(
    "sizes",
    [(8, 8, 8), (16, 8, 16), (8, 8, 0), (8, 0, 16)],
    ids=["3", "small", "no-disk", "no-host"],
)
def test_the_storage_does_what_a_model_does(tiers: Tiers, sizes: tuple[int, int, int]) -> None:
    class Machine(StorageMachine):
        pass

    Machine.tiers, Machine.sizes = tiers, sizes
    case = Machine.TestCase
    case.settings = settings(
        max_examples=12, stateful_step_count=30, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
