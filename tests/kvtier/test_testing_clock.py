"""The simulated clock, and what of ours goes on in an order that it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hostmem import CpuDevice, Event
from hostmem.pressure import PressureGauge
from kvtier import SlotAllocator, StagingBuffer
from kvtier.testing import SimulatedClock
from kvtier.transfer.jobs import Dependencies, all_of
from kvtier.transfer.page_events import BatchEvent, gathered

if TYPE_CHECKING:
    from pathlib import Path

    from tests.threads import Spawn, Until


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(100.0)


def test_time_passes_only_when_it_is_advanced(clock: SimulatedClock) -> None:
    assert clock() == clock() == 100.0
    clock.advance(2.5)
    assert clock() == 102.5
    clock.advance(0)
    assert clock() == 102.5


def test_events_finish_at_their_moments_and_not_before(clock: SimulatedClock) -> None:
    late, early, now = clock.event(3), clock.event(1), clock.event(0)
    assert [e.query() for e in (late, early, now)] == [False, False, False]
    clock.advance(0)
    assert [e.query() for e in (late, early, now)] == [False, False, True]
    clock.advance(1)
    assert [e.query() for e in (late, early, now)] == [False, True, True]
    clock.advance(1.999)
    assert not late.query()
    clock.advance(0.001)
    late.synchronize()
    assert clock.pending == 0


def test_an_event_fails_when_it_finishes(clock: SimulatedClock) -> None:
    event = clock.event(1, OSError("the copy failed"))
    assert event.error is None
    clock.advance(1)
    with pytest.raises(OSError, match="the copy failed"):
        event.synchronize()


def test_things_happen_in_their_order_and_the_clock_shows_their_moment(
    clock: SimulatedClock,
) -> None:
    seen: list[tuple[str, float]] = []
    clock.call(2, lambda: seen.append(("c", clock())))
    clock.call(1, lambda: seen.append(("a", clock())))
    clock.call(1, lambda: seen.append(("b", clock())))
    clock.call(1.5, lambda: clock.call(0.25, lambda: seen.append(("new", clock()))))
    clock.advance(10)
    assert seen == [("a", 101), ("b", 101), ("new", 101.75), ("c", 102)]
    assert clock() == 110


def test_one_thing_at_a_time(clock: SimulatedClock) -> None:
    events = [clock.event(after) for after in (5, 1, 3)]
    order = []
    while clock.advance_to_next():
        order.append((clock(), [event.query() for event in events]))
    assert order == [
        (101, [False, True, False]),
        (103, [False, True, True]),
        (105, [True, True, True]),
    ]


def test_sleepers_wake_in_the_order_of_their_moments(
    clock: SimulatedClock, spawn: Spawn, until: Until
) -> None:
    sleepers = [spawn(clock.sleep, after) for after in (3.0, 1.0, 2.0)]
    until(lambda: clock.pending == 3)
    for expected in (1, 2, 0):
        assert clock.advance_to_next()
        sleepers[expected].result(20)
        assert sum(sleeper.done() for sleeper in sleepers) == 3 - clock.pending


def test_time_does_not_go_back(clock: SimulatedClock) -> None:
    with pytest.raises(ValueError, match=r"-1"):
        clock.advance(-1)
    with pytest.raises(ValueError, match=r"-0.5 s have passed"):
        clock.event(-0.5)
    assert clock.pending == 0


# ------------------------------------------------------------------ what goes on by this clock


def test_slots_come_back_when_their_work_has_finished_oldest_first(clock: SimulatedClock) -> None:
    slots = SlotAllocator(6, usable=lambda: 4)
    slots.allocate(4)
    slots.release([2], clock.event(2))
    slots.release([0], clock.event(1))
    slots.release([3], clock.event(9))
    clock.advance(2)
    first = slots.allocate(1)  # the work of two slots has finished: those before what is in flight
    assert first.ids.tolist() in ([2], [0])
    assert not first.fences
    rest = slots.allocate(4)  # then in flight, with a fence, then beyond the usable mark
    assert rest.ids.tolist() == [{2: 0, 0: 2}[int(first.ids[0])], 3, 4, 5]
    (fence,) = rest.fences
    assert isinstance(fence, Event)
    clock.advance(6.9)
    assert not fence.query()
    clock.advance(0.2)
    assert fence.query()


def test_a_staging_buffer_is_had_when_the_oldest_work_that_uses_it_has_finished(
    clock: SimulatedClock, cpu: CpuDevice, spawn: Spawn, until: Until
) -> None:
    ring = StagingBuffer(cpu, 4096, 2)
    try:
        first, second = ring.acquire(1), ring.acquire(1)
        ring.release(1, clock.event(2))
        ring.release(1, clock.event(1))
        waiting = spawn(ring.acquire, 1)
        clock.advance(1)  # the younger work finishes: a ring gives its buffers in turn
        assert not waiting.done()
        clock.advance(1)
        assert waiting.result(20).tolist() == first.tolist() != second.tolist()
        ring.release(1, clock.event(0))
        clock.advance(0)
    finally:
        ring.close()


def test_work_has_happened_when_the_last_of_it_has(clock: SimulatedClock) -> None:
    fence = all_of([clock.event(n) for n in (3, 1, 2)])
    finished = []
    while clock.advance_to_next():
        finished.append(fence.query())
    assert finished == [False, False, True]


def test_a_transfer_knows_the_failures_of_each_page_when_all_its_data_has_come(
    clock: SimulatedClock, spawn: Spawn, until: Until
) -> None:
    whole = BatchEvent(1)
    clock.call(1, lambda: whole.part_done({1: OSError("page 1")}))
    pages = gathered([clock.event(2), whole.page(1), clock.event(3, OSError("page 2"))])
    waiting = spawn(Dependencies(pages, (clock.event(4),)).wait, 3)
    for _ in range(3):
        assert clock.advance_to_next()
        assert not waiting.done()
    clock.advance_to_next()
    assert {n: str(error) for n, error in waiting.result(20).items()} == {1: "page 1", 2: "page 2"}


def test_pressure_is_read_when_a_tenth_of_a_second_has_passed(
    clock: SimulatedClock, tmp_path: Path
) -> None:
    stalls = tmp_path / "proc/pressure/memory"
    stalls.parent.mkdir(parents=True)

    def stalled(seconds: float) -> None:
        stalls.write_text(
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
            f"full avg10=0.00 avg60=0.00 avg300=0.00 total={int(seconds * 1e6)}\n"
        )

    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 1 kB\n")
    stalled(0)
    gauge = PressureGauge(tmp_path, clock)
    stalled(0.09)
    clock.advance(0.09)
    assert gauge.pressed() is None  # too early to look
    clock.advance(0.01)
    assert "stalled 90%" in str(gauge.pressed())
    clock.advance(0.2)
    assert gauge.pressed() is None
