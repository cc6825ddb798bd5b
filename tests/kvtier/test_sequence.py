"""Sequences: what they reuse, hold, let go of and get back, and whose bytes they read."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hostmem import ClosedError, HostEvent, OutOfPagesError, ResourceBusyError
from hostmem.courier import closings
from hostmem.testing import FaultPlan
from kvtier.manager import KVCacheManager
from tests.kvtier.sequence_engine import PAGE, Engine, T, config_of

if TYPE_CHECKING:
    from kvtier.sequence import KVSequence
    from tests.kvtier.conftest import Gate
    from tests.threads import Spawn

COPY = "process_vm_readv"
SLOTS = (2 << 20) // PAGE  # of a level of 2 MiB with one group

Build = Callable[..., Engine]


@pytest.fixture
def build() -> Iterator[Build]:
    with ExitStack() as stack:

        def make(*sizes: Any, **options: Any) -> Engine:
            manager = KVCacheManager(config_of(*sizes, **options), device="cpu")
            return Engine(stack.enter_context(manager))

        yield make


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


# --------------------------------------------------------------------------- room and tables


def test_a_new_sequence_holds_nothing(build: Build) -> None:
    engine = build()
    with engine.manager.create_sequence() as sequence:
        assert (sequence.num_tokens, sequence.num_cached_tokens, sequence.capacity) == (0, 0, 0)
        assert sequence.page_table().shape == (0,)
        assert sequence.events == ()
        assert engine.held() == [0]
        sequence.wait()


def test_room_comes_in_whole_blocks(build: Build) -> None:
    engine = build()
    with engine.manager.create_sequence() as sequence:
        for asked, blocks in [(1, 1), (4, 1), (5, 2), (0, 2), (8, 2), (9, 3)]:
            sequence.grow(asked)
            assert sequence.capacity == blocks * T
            assert sequence.page_table().tolist() == tokens(blocks)
            assert engine.held() == [blocks]


def test_room_is_counted_from_the_committed_tokens(build: Build) -> None:
    with build().manager.create_sequence() as sequence:
        sequence.grow(3)
        sequence.commit([1, 2, 3])
        sequence.grow(1)
        assert sequence.capacity == 4
        sequence.grow(2)
        assert sequence.capacity == 8


def test_a_growth_that_does_not_fit_changes_nothing(build: Build) -> None:
    engine = build()
    with engine.start(tokens(6)) as sequence, engine.manager.create_sequence() as other:
        other.grow((SLOTS - 3) * T)
        table = sequence.page_table()
        with pytest.raises(OutOfPagesError):
            sequence.grow(2 + 2 * T)
        assert sequence.capacity == 8
        assert sequence.page_table() is table
        assert engine.held() == [SLOTS - 1]
        sequence.grow(2 + T)
        engine.verify(sequence, tokens(6))


def test_a_growth_fits_in_all_groups_or_in_none(build: Build) -> None:
    engine = build(4, windows=[(None, None), (8, None)], initial_pool_ratio=[1, 1])
    with engine.manager.create_sequence() as sequence, engine.manager.create_sequence() as other:
        other.grow(SLOTS * T - T)
        with pytest.raises(OutOfPagesError):
            sequence.grow(2 * T)
        assert engine.held() == [SLOTS - 1, SLOTS - 1]
        assert [len(sequence.page_table(group)) for group in (0, 1)] == [0, 0]


def test_a_table_is_one_object_until_it_changes(build: Build) -> None:
    engine = build()
    with engine.manager.create_sequence() as sequence:
        sequence.grow(4)
        table = sequence.page_table()
        assert table.dtype == np.int32
        assert not table.flags.writeable
        sequence.grow(2)
        sequence.commit([1, 2, 3])
        sequence.grow(1)
        sequence.commit([4])  # a full block, whose page stays where it is
        assert sequence.page_table() is table
        sequence.grow(1)
        assert sequence.page_table() is not table
        assert sequence.page_table().tolist() == [0, 1]


def test_a_group_that_does_not_exist_has_no_table(build: Build) -> None:
    with build().manager.create_sequence() as sequence, pytest.raises(IndexError):
        sequence.page_table(1)


# ---------------------------------------------------------------------------- commit and reuse


@pytest.mark.parametrize(
    ("prompt", "found"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (30, 12)]
)
def test_full_blocks_are_reused_but_never_the_last_token(
    build: Build, prompt: int, found: int
) -> None:
    engine = build()
    engine.run(tokens(13))
    assert engine.manager.match(tokens(prompt)) == found
    with engine.manager.create_sequence(tokens(prompt)) as sequence:
        assert sequence.num_cached_tokens == sequence.num_tokens == sequence.capacity == found
        engine.verify(sequence, tokens(prompt))
        engine.step(sequence, tokens(prompt))
        assert sequence.num_cached_tokens == found
        assert sequence.num_tokens == prompt
        engine.verify(sequence, tokens(prompt))


def test_a_block_is_found_as_soon_as_it_is_full(build: Build) -> None:
    engine = build()
    with engine.manager.create_sequence() as sequence:
        for count in range(1, 10):
            engine.step(sequence, tokens(count))
            assert engine.manager.match(tokens(20)) == count // T * T


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 11])
def test_a_prompt_may_be_computed_in_pieces(build: Build, most: int) -> None:
    engine = build()
    with engine.manager.create_sequence() as sequence:
        sequence.grow(20)
        engine.step(sequence, tokens(18), most=most)
        engine.verify(sequence, tokens(18))
        assert sequence.capacity == 20
    assert engine.run(tokens(18)) == 16
    assert engine.held() == [0]


def test_tokens_that_differ_part_the_ways(build: Build) -> None:
    engine = build()
    engine.run(tokens(12))
    other = [*tokens(6), 99, *tokens(6, 7)]
    assert engine.run(other) == 4
    assert engine.run([*other, 1, 2]) == 12


def test_salts_share_nothing(build: Build) -> None:
    engine = build()
    engine.run(tokens(9), salt=b"a")
    assert engine.run(tokens(9), salt=b"b") == 0
    assert engine.run(tokens(9)) == 0
    assert engine.run(tokens(9), salt=b"a") == 8
    assert [engine.manager.match(tokens(9), salt=salt) for salt in (b"a", b"b", b"c")] == [8, 8, 0]


def test_reuse_can_be_declined(build: Build) -> None:
    engine = build()
    engine.run(tokens(9))
    assert engine.run(tokens(9), reuse=False) == 0


def test_blocks_that_two_compute_are_kept_once(build: Build) -> None:
    engine = build()
    create = engine.manager.create_sequence
    with create(tokens(8)) as first, create(tokens(8)) as second:
        first.grow(8)
        second.grow(8)
        assert engine.held() == [4]
        engine.step(first, tokens(8))
        table = second.page_table()
        assert table.tolist() == [2, 3]
        engine.step(second, tokens(8))
        assert second.page_table() is not table
        assert second.page_table().tolist() == first.page_table().tolist() == [0, 1]
        assert engine.held() == [2]
        engine.verify(second, tokens(8))
    assert len(engine.manager.cache) == 2
    engine.manager.cache._check()


def test_who_shares_a_block_waits_for_the_step_that_computes_it(
    build: Build, gate: Callable[[], Gate]
) -> None:
    engine, computed = build(), gate()
    with engine.start(tokens(3)) as first, engine.start(tokens(3)) as second:
        first.grow(1)
        engine.write(first, tokens(4))
        first.commit([3], computed)
        engine.write(second, tokens(4))
        second.commit([3])
        assert list(second.events) == [computed]
        assert first.events == ()
        third = engine.manager.create_sequence(tokens(5))
        assert list(third.events) == [computed]
        computed.set()
        assert second.events == third.events == ()
        third.close()


def test_blocks_of_a_higher_priority_stay(build: Build) -> None:
    engine = build()
    engine.run(tokens(4 * T + 1), priority=1)
    for first in range(1000, 10_000, 1000):
        engine.run(tokens(4 * T, first))
    assert engine.manager.match(tokens(4 * T + 1)) == 4 * T


def test_tokens_may_be_an_array(build: Build) -> None:
    engine = build()
    with engine.manager.create_sequence(np.arange(6)) as sequence:
        sequence.grow(6)
        engine.write(sequence, tokens(6))
        sequence.commit(np.arange(6, dtype=np.int32))
        sequence.commit(np.array([], np.int64))
    assert engine.run(tokens(6)) == 4


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (tokens(6), ValueError, "6 after 3 do not fit into the capacity of 8 tokens; call grow"),
        ([5, -1], ValueError, "tokens: -1 is not in"),
        ([2**63], ValueError, "tokens: one is not in"),
        ([1.5], TypeError, "float"),
        (b"ab", TypeError, "tokens: integers are needed"),
        (np.array([[1]]), ValueError, "tokens: the shape"),
    ],
)
def test_tokens_that_are_refused_change_nothing(
    build: Build, bad: Any, error: type[Exception], message: str
) -> None:
    engine = build()
    with engine.start(tokens(3)) as sequence:
        sequence.grow(5)
        with pytest.raises(error, match=message):
            sequence.commit(bad)
        assert (sequence.num_tokens, sequence.capacity) == (3, 8)
        engine.step(sequence, tokens(8))
    assert engine.run(tokens(9)) == 8


# ------------------------------------------------------------------------- what to wait for


def test_a_reused_block_is_waited_for_while_it_comes(build: Build) -> None:
    engine = build(2, 4)
    engine.run(tokens(9))
    engine.run(tokens(SLOTS * T, 1000))  # moves it down
    with FaultPlan() as plan:
        held = plan.hold(COPY)
        with engine.manager.create_sequence(tokens(9)) as sequence:
            held.wait_reached()
            assert sequence.num_tokens == 8
            events = sequence.events
            assert events
            assert not any(event.query() for event in events)
            held.release()
            sequence.wait()
            assert sequence.events == ()
            engine.verify(sequence, tokens(9))


def test_slots_that_a_step_still_uses_are_fenced(build: Build, gate: Callable[[], Gate]) -> None:
    """Neither a closed sequence nor a suspended one waits for its last step."""
    engine, steps = build(), [gate(), gate()]
    create = engine.manager.create_sequence
    closed, suspended = create(), create()
    for sequence, step in zip((closed, suspended), steps, strict=True):
        sequence.grow(SLOTS * T // 2)
        sequence.commit((), step)
    closed.close()
    suspended.suspend()
    with create() as sequence:
        sequence.grow(SLOTS * T)
        waited = sequence.events
        assert waited
        assert not any(event.query() for event in waited)
        steps[0].set()
        assert 0 < len(sequence.events) < len(waited) or len(waited) == 1
        steps[1].set()
        assert sequence.events == ()
    suspended.close()


@pytest.mark.parametrize("end", ["close", "suspend"])
def test_full_blocks_that_a_step_still_reads_are_fenced(
    build: Build, gate: Callable[[], Gate], end: str
) -> None:
    engine, step = build(), gate()
    with engine.start(tokens(SLOTS * T)) as sequence:
        sequence.commit((), step)
        getattr(sequence, end)()
        with engine.manager.create_sequence() as other:
            other.grow(T)
            assert [event.query() for event in other.events] == [False]
            step.set()
            assert other.events == ()


def test_a_failed_step_is_no_reason_to_keep_its_slots(build: Build) -> None:
    engine, step = build(), HostEvent()
    with engine.manager.create_sequence() as sequence:
        sequence.grow(SLOTS * T)
        sequence.commit((), step)
    with engine.manager.create_sequence() as sequence:
        sequence.grow(SLOTS * T)
        assert sequence.events
        step.set(RuntimeError("the kernel failed"))
        assert sequence.events == ()
        sequence.wait()


def test_fences_that_have_finished_are_not_gathered_by_who_only_waits(
    build: Build, gate: Callable[[], Gate]
) -> None:
    engine, step = build(), gate()
    with engine.manager.create_sequence() as other:
        other.grow(SLOTS * T)
        other.commit((), step)
    with engine.manager.create_sequence() as sequence:
        sequence.grow(T)
        assert len(sequence._fences) == 1
        step.set()
        sequence.wait()
        sequence.grow(2 * T)
        assert sequence._fences == []


# --------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_failed_step_computed_is_never_served_nor_what_follows(
    build: Build, failing: int
) -> None:
    """A block is as wrong as the tokens before it; of steps before the failure all is right."""
    engine = build()
    steps = [HostEvent() for _ in range(3)]
    with engine.manager.create_sequence() as sequence:
        sequence.grow(12)
        engine.write(sequence, tokens(12))
        for n, step in enumerate(steps):
            sequence.commit(tokens(4, 4 * n), step)
    for n, step in enumerate(steps):
        step.set(RuntimeError("the kernel failed") if n == failing else None)
    with engine.manager.create_sequence(tokens(13)) as sequence:
        assert sequence.num_tokens == 4 * failing
        engine.verify(sequence, tokens(13))


def test_a_block_depends_on_each_step_that_wrote_to_it(build: Build) -> None:
    engine = build()
    first, second = HostEvent(), HostEvent()
    with engine.manager.create_sequence() as sequence:
        sequence.grow(4)
        engine.write(sequence, tokens(4))
        sequence.commit(tokens(2), first)
        sequence.commit(tokens(2, 2), second)
        second.set()
        other = engine.manager.create_sequence(tokens(5))
        assert other.num_tokens == 4
        (event,) = other.events
        assert not event.query()
        first.set(RuntimeError("the kernel failed"))
        assert event.query()
        with pytest.raises(RuntimeError, match="the kernel failed"):
            other.wait()
        other.close()
    assert engine.run(tokens(5)) == 0


def test_a_reused_block_that_cannot_be_brought_is_lost_at_the_next_resume(build: Build) -> None:
    engine = build(2, 4)
    engine.run(tokens(9))
    engine.run(tokens(SLOTS * T, 1000))
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, at=2)  # the first copy makes room
        with engine.manager.create_sequence(tokens(9)) as sequence:
            with pytest.raises(OSError, match=COPY):
                sequence.wait()
            assert sequence.num_tokens == 8
            sequence.grow(1)
            sequence.commit([8])
            sequence.suspend()
            before = sequence.num_tokens
            lost = sequence.resume()
            assert sequence.num_tokens == before - lost
            sequence.wait()
            engine.verify(sequence, tokens(9))
            engine.step(sequence, tokens(9))
            engine.verify(sequence, tokens(9))
    engine.manager.cache._check()


def test_what_is_computed_on_a_block_that_did_not_come_is_not_served(build: Build) -> None:
    """An engine whose stream waits, and does not ask, computes from whatever is in the slot."""
    engine = build(2, 4)
    engine.run(tokens(5))
    engine.run(tokens(SLOTS * T, 1000))
    with FaultPlan() as plan:
        plan.fail(COPY, errno.EFAULT, at=2)
        with engine.manager.create_sequence(tokens(5)) as sequence:
            for event in sequence.events:
                event.wait_finished()
            sequence.grow(8)
            sequence.commit(tokens(8, 4))
    engine.run(tokens(4))  # the block is back, and leads to those behind it
    with engine.manager.create_sequence(tokens(13)) as sequence:
        assert sequence.num_tokens == 4
        engine.verify(sequence, tokens(13))


# ------------------------------------------------------------------------------ suspending


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6, 8, 11])
def test_a_suspended_sequence_comes_back_whole(build: Build, count: int) -> None:
    engine = build(2, 4)
    with engine.start(tokens(count)) as sequence:
        sequence.grow(10)
        sequence.suspend()
        assert (sequence.suspended, sequence.num_tokens) == (True, count)
        assert engine.held() == [0]
        engine.run(tokens(SLOTS * T, 1000))  # takes every hot page
        assert sequence.resume() == 0
        assert (sequence.suspended, sequence.num_tokens) == (False, count)
        assert sequence.capacity == -(-count // T) * T
        sequence.wait()
        engine.verify(sequence, tokens(count))
        engine.step(sequence, tokens(14))
        engine.verify(sequence, tokens(14))
    assert engine.run(tokens(14)) == 12
    assert engine.held() == [0]
    assert len(engine.manager.cache) == 3 + SLOTS  # nothing private is left
    engine.manager.cache._check()


def test_a_partly_filled_block_is_kept_wherever_it_goes(build: Build, tmp_path: Path) -> None:
    engine = build(2, 2, (4, tmp_path))
    with engine.start(tokens(3)) as sequence:
        sequence.suspend()
        for first in range(1000, 10_000, 1000):  # far more than all levels hold
            engine.run(tokens(SLOTS * T, first))
        assert sequence.resume() == 0
        sequence.wait()
        engine.verify(sequence, tokens(3))
    engine.manager.cache._check()


def test_a_partly_filled_block_is_found_by_nobody_else(build: Build) -> None:
    engine = build()
    with engine.start(tokens(7)) as sequence:
        sequence.suspend()
        assert engine.manager.match(tokens(20)) == 4
        assert engine.run(tokens(8)) == 4
        assert sequence.resume() == 0


def test_a_resumed_block_that_fills_up_is_found(build: Build) -> None:
    engine = build()
    with engine.start(tokens(6)) as sequence:
        sequence.suspend()
        sequence.resume()
        engine.step(sequence, tokens(8))
        assert engine.manager.match(tokens(9)) == 8
        assert engine.run(tokens(9)) == 8


def test_what_others_needed_the_room_of_is_lost_and_said_to_be(build: Build) -> None:
    engine = build()  # no level below: what is evicted is gone
    with engine.start(tokens(11)) as sequence:
        sequence.suspend()
        engine.run(tokens((SLOTS - 2) * T, 1000))  # the kept block and another one stay
        assert sequence.resume() == 11
        assert (sequence.num_tokens, sequence.capacity) == (0, 0)
        assert engine.held() == [0]
        engine.step(sequence, tokens(11))
        engine.verify(sequence, tokens(11))
    assert engine.run(tokens(11)) == 8
    engine.run(tokens(SLOTS * T, 2000))  # nothing is kept any more
    engine.manager.cache._check()


def test_a_step_may_run_while_its_sequence_is_suspended_and_resumed(
    build: Build, gate: Callable[[], Gate]
) -> None:
    engine, step = build(2, 4), gate()
    with engine.start(tokens(5)) as sequence:
        sequence.grow(1)
        engine.write(sequence, tokens(6))
        sequence.commit([5], step)
        sequence.suspend()
        assert sequence.resume() == 0
        assert sequence.events  # whoever reads the block waits for what writes it
        step.set()
        assert sequence.events == ()
        engine.verify(sequence, tokens(6))


def test_slots_that_were_given_back_are_not_waited_for_after_a_pause(
    build: Build, gate: Callable[[], Gate]
) -> None:
    engine, step = build(), gate()
    with engine.manager.create_sequence() as other:
        other.grow(SLOTS * T)
        other.commit((), step)
    with engine.manager.create_sequence() as sequence:
        sequence.grow(T)
        assert sequence.events
        sequence.suspend()
        sequence.resume()
        assert sequence.events == ()


def test_a_failed_step_is_lost_with_the_pause(build: Build) -> None:
    engine, step = build(), HostEvent()
    with engine.start(tokens(6)) as sequence:
        sequence.grow(1)
        sequence.commit([6], step)
        sequence.suspend()
        step.set(RuntimeError("the kernel failed"))
        assert sequence.resume() == 3
        assert sequence.num_tokens == 4
        engine.step(sequence, tokens(9))  # and what is computed now is good
        engine.verify(sequence, tokens(9))
    assert engine.run(tokens(9)) == 8


def test_a_resume_is_refused_where_little_room_is_left(build: Build) -> None:
    engine = build(max_util_for_resume=0.5)
    with engine.start(tokens(2 * T + 1)) as sequence, engine.manager.create_sequence() as other:
        sequence.suspend()
        other.grow((SLOTS // 2 - 2) * T)
        with pytest.raises(ResourceBusyError, match="above max_util_for_resume") as refused:
            sequence.resume()
        assert (refused.value.used, refused.value.needed) == (SLOTS // 2 - 2, 3)
        assert sequence.suspended
        assert engine.held() == [SLOTS // 2 - 2]
        other.close()
        with engine.manager.create_sequence() as another:
            another.grow((SLOTS // 2 - 3) * T)
            assert sequence.resume() == 0
        engine.verify(sequence, tokens(2 * T + 1))


def test_nobody_takes_the_room_between_the_question_and_the_resume(
    build: Build, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(max_util_for_resume=0.5)
    storage = engine.manager.storage
    count = storage.leased
    taken: list[bool] = []

    def take() -> bool:
        if free := storage.lock.acquire(blocking=False):
            storage.lock.release()
        return free

    def leased(group: int) -> int:
        taken.append(spawn(take).result(20))
        return count(group)

    with engine.start(tokens(5)) as sequence:
        sequence.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(storage, "leased", leased)
            assert sequence.resume() == 0
    assert taken == [False]


def test_pages_that_run_anyway_are_not_counted_twice(build: Build) -> None:
    engine = build(max_util_for_resume=0.5)
    with engine.start(tokens(6 * T)) as sequence, engine.start(tokens(6 * T)):
        sequence.suspend()
        assert sequence.resume() == 0
        assert engine.held() == [6]


def test_a_sequence_that_is_alone_may_always_resume(build: Build) -> None:
    engine = build(max_util_for_resume=0.1)
    with engine.start(tokens(SLOTS * T)) as sequence:
        sequence.suspend()
        assert sequence.resume() == 0
        engine.verify(sequence, tokens(SLOTS * T))


def test_a_resume_that_does_not_fit_leaves_it_suspended(build: Build) -> None:
    """Pages that are kept are not in use, but cannot go where the levels below are full of them."""
    engine = build(2, 2, max_util_for_resume=1.0)
    with ExitStack() as stack:
        sequence = stack.enter_context(engine.start(tokens(T + 1)))
        sequence.suspend()
        for first in range(1000, 1000 + SLOTS):
            stack.enter_context(engine.start([first])).suspend()
        engine.manager.create_sequence(tokens(T + 1)).close()  # the full block is hot again
        with engine.manager.create_sequence() as other:
            other.grow((SLOTS - 2) * T)  # with the full block and a kept one, all is taken
            with pytest.raises(OutOfPagesError):
                sequence.resume()
            assert sequence.suspended
            assert engine.held() == [SLOTS - 2]
        assert sequence.resume() == 0
        sequence.wait()
        engine.verify(sequence, tokens(T + 1))
    engine.manager.cache._check()


def test_pausing_and_going_on_twice_is_once(build: Build) -> None:
    engine = build()
    with engine.start(tokens(6)) as sequence:
        assert sequence.resume() == 0
        sequence.suspend()
        sequence.suspend()
        assert sequence.resume() == 0
        assert sequence.resume() == 0
        engine.verify(sequence, tokens(6))


# --------------------------------------------------------------------------------- windows


WINDOWS = [(None, None), (6, None), (6, 5)]


def test_windows_let_go_of_what_they_do_not_show(build: Build) -> None:
    engine = build(6, windows=WINDOWS, initial_pool_ratio=[1, 1, 1])
    with engine.manager.create_sequence() as sequence:
        for count in range(1, 41):
            engine.step(sequence, tokens(count))
            engine.verify(sequence, tokens(count))
        # The token at 40 sees 35 to 39, of the blocks 8 and 9; and 0 to 4, of the blocks 0 and 1.
        assert (sequence.page_table(0) >= 0).tolist() == [True] * 10
        assert (sequence.page_table(1) >= 0).tolist() == [False] * 8 + [True] * 2
        assert (sequence.page_table(2) >= 0).tolist() == [True] * 2 + [False] * 6 + [True] * 2
        assert engine.held() == [10, 2, 4]
    assert engine.held() == [0, 0, 0]
    engine.manager.cache._check()


def test_a_window_that_moves_within_a_block_leaves_the_table_alone(build: Build) -> None:
    engine = build(6, windows=WINDOWS, initial_pool_ratio=[1, 1, 1])
    with engine.manager.create_sequence() as sequence:
        sequence.grow(12)
        sequence.commit(tokens(11))
        tables = [sequence.page_table(group) for group in range(3)]
        assert (tables[1] >= 0).tolist() == [False, True, True]
        sequence.commit([11])  # a block is full, and still the token at 7 is seen
        assert all(sequence.page_table(group) is tables[group] for group in range(3))


def test_a_sequence_may_be_longer_than_a_window_has_pages(build: Build) -> None:
    engine = build(6, windows=[(None, None), (6, 5)], initial_pool_ratio=[2, 1])
    n = 2 * SLOTS * T
    with engine.manager.create_sequence() as sequence:
        engine.step(sequence, tokens(n), most=3 * T)
        engine.verify(sequence, tokens(n))
        sequence.suspend()
        assert sequence.resume() == 0
        sequence.wait()
        engine.verify(sequence, tokens(n))
        assert engine.held() == [2 * SLOTS, 4]


@pytest.mark.parametrize("most", [1, 5, 17])
def test_a_prefix_is_reused_where_its_windows_are_there(build: Build, most: int) -> None:
    engine = build(12, windows=WINDOWS, initial_pool_ratio=[1, 1, 1])
    with engine.manager.create_sequence() as sequence:
        engine.step(sequence, tokens(30), most=most)
    with engine.manager.create_sequence(tokens(30)) as sequence:
        assert sequence.num_tokens == 28
        assert engine.held() == [7, 2, 4]  # the token at 28 sees 23 to 27, and the sinks
        engine.verify(sequence, tokens(30))
        engine.step(sequence, tokens(50), most=most)
        engine.verify(sequence, tokens(50))
    engine.manager.cache._check()


def test_a_step_that_reads_a_window_fences_what_the_next_does_not_see(
    build: Build, gate: Callable[[], Gate]
) -> None:
    engine, step = build(2, windows=[(5, None)]), gate()
    with engine.manager.create_sequence() as sequence:
        engine.step(sequence, tokens(7))
        sequence.grow(1)
        engine.write(sequence, tokens(8))
        sequence.commit([7], step)  # it reads the token at 3; the next one, those from 4 on
        assert sequence.page_table().tolist() == [-1, 1]
        with engine.manager.create_sequence() as other:
            other.grow((SLOTS - 1) * T)
            assert other.events
            step.set()
            assert other.events == ()


# --------------------------------------------------------------------- closed and suspended

CALLS: dict[str, Callable[[KVSequence], object]] = {
    "grow": lambda sequence: sequence.grow(1),
    "commit": lambda sequence: sequence.commit([1]),
    "page_table": lambda sequence: sequence.page_table(),
    "suspend": lambda sequence: sequence.suspend(),
    "resume": lambda sequence: sequence.resume(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_sequence_says_so(build: Build, call: Callable[[KVSequence], object]) -> None:
    sequence = build().start(tokens(5))
    sequence.close()
    assert sequence.closed
    with pytest.raises(ClosedError, match="the sequence was closed"):
        call(sequence)
    sequence.close()
    assert (sequence.num_tokens, sequence.suspended) == (5, False)


@pytest.mark.parametrize("name", ["grow", "commit", "page_table"])
def test_a_suspended_sequence_is_not_used(build: Build, name: str) -> None:
    engine = build()
    with engine.start(tokens(5)) as sequence:
        sequence.suspend()
        with pytest.raises(ValueError, match="suspended; call resume first"):
            CALLS[name](sequence)
        sequence.resume()
        engine.verify(sequence, tokens(5))


@pytest.mark.parametrize("suspended", [False, True])
def test_closing_leaves_only_full_blocks(build: Build, suspended: bool) -> None:
    engine = build()
    sequence = engine.start(tokens(6))
    sequence.grow(20)
    if suspended:
        sequence.suspend()
    sequence.close()
    assert engine.held() == [0]
    assert len(engine.manager.cache) == 1
    with engine.manager.create_sequence() as other:
        other.grow(SLOTS * T)  # nothing is kept any more
    engine.manager.cache._check()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_dropped_sequence_is_closed_with_a_warning(build: Build, suspended: bool) -> None:
    engine = build()
    sequence = engine.start(tokens(6))
    if suspended:
        sequence.suspend()
    sequences = [sequence]
    del sequence
    with pytest.warns(ResourceWarning, match="KVSequence was dropped without close"):
        sequences.clear()
    assert closings.drain(20)
    assert engine.held() == [0]
    assert len(engine.manager.cache) == 1
    engine.manager.cache._check()


def test_a_sequence_says_how_it_stands(build: Build) -> None:
    sequence = build().start(tokens(6))
    assert repr(sequence) == "<KVSequence of 6 tokens>"
    sequence.suspend()
    assert repr(sequence) == "<KVSequence of 6 tokens, suspended>"
    sequence.close()
    assert repr(sequence) == "<KVSequence of 6 tokens, closed>"


# --------------------------------------------------------------------------------- threads


def test_a_sequence_may_be_closed_while_another_thread_uses_it(build: Build, spawn: Spawn) -> None:
    engine = build()
    sequence = engine.manager.create_sequence()
    started = threading.Event()

    def decode() -> int:
        for count in range(SLOTS * T):
            try:
                sequence.grow(1)
                sequence.commit([count])
            except ClosedError:
                return count
            started.set()
        return SLOTS * T

    decoding = spawn(decode)
    assert started.wait(20)
    sequence.close()
    assert decoding.result(20) > 0
    assert engine.held() == [0]
    engine.manager.cache._check()


def test_steps_go_on_while_another_thread_holds_the_storage(build: Build, spawn: Spawn) -> None:
    """Only pages that come or go need it."""
    engine = build()
    with engine.start(tokens(5)) as sequence:

        def step() -> None:
            sequence.grow(1)
            sequence.page_table()
            sequence.commit([5])

        with engine.manager.storage.lock:
            spawn(step).result(20)
        engine.write(sequence, tokens(6))
        assert sequence.num_tokens == 6


def test_threads_with_sequences_of_their_own_share_blocks_and_read_right_bytes(
    build: Build, spawn: Spawn, tmp_path: Path
) -> None:
    engine = build(4, 4, (8, tmp_path), windows=[(None, None), (6, 5)], initial_pool_ratio=[1, 1])

    def work(number: int) -> int:
        chance, reused = random.Random(number), 0
        for _ in range(40):
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 5))] * 3
            try:
                with engine.manager.create_sequence(prompt) as sequence:
                    sequence.wait()
                    reused += sequence.num_cached_tokens
                    engine.step(sequence, prompt)
                    sequence.suspend()
                    sequence.resume()
                    sequence.wait()
                    engine.verify(sequence, prompt)
                    engine.step(sequence, [*prompt, 1, 2, 3])
                    sequence.wait()  # its last block may be another's by now, still on its way
                    engine.verify(sequence, [*prompt, 1, 2, 3])
            except (OutOfPagesError, ResourceBusyError):
                continue
        return reused

    done = [spawn(work, number) for number in range(4)]
    assert all(future.result(60) for future in done)
    assert engine.held() == [0, 0]
    engine.manager.cache._check()
