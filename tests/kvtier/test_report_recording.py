"""The course of a replay: bounded, spread over its time, and the same figures as the totals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostmem import CudaDevice
from hostmem.testing import FakeDriver, FaultPlan
from kvtier.eviction import make_policy
from kvtier.replay import Progress, ReplayOptions, Request, replay_metadata
from kvtier.replay.engine import replay_bytes
from kvtier.replay.recording import Course, Histogram, Moment, Recording

MIB = 1 << 20


def at(seconds: float, filled: float | None = None) -> Moment:
    return Moment(
        seconds=seconds, requests=round(seconds), block_refs=0, hits={}, host_filled=filled
    )


def requests(*ids: list[int]) -> list[Request]:
    return [Request(n, 512, 1, row) for n, row in enumerate(ids)]


# --------------------------------------------------------------------------------- course


@given(steps=st.lists(st.floats(1e-6, 10), max_size=400), limit=st.sampled_from([2, 8, 32]))
def test_a_course_is_bounded_and_in_order(steps: list[float], limit: int) -> None:
    course = Course(limit, gap=0.5)
    for seconds in itertools.accumulate(steps):
        if course.due(seconds):
            course.add(at(seconds))
        assert len(course.moments) <= limit
    times = [moment.seconds for moment in course.moments]
    assert times == sorted(times)
    assert bool(times) == bool(steps)


def test_the_moments_of_a_course_are_equally_far_apart_where_requests_take_longer() -> None:
    course = Course(8, gap=0.001)
    for n in range(12):
        if course.due(n * 7.0):
            course.add(at(n * 7.0))
    assert [moment.seconds for moment in course.moments] == [0, 14, 28, 42, 56, 70]


def test_the_moments_of_a_course_are_equally_far_apart() -> None:
    course = Course(64, gap=1.0)
    for n in range(100_000):
        if course.due(n / 7):
            course.add(at(n / 7))
    times = [moment.seconds for moment in course.moments]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert 32 <= len(times) <= 64
    assert times[0] == 0.0
    assert max(gaps) < 1.3 * min(gaps)
    assert 100_000 / 7 - times[-1] < 2 * max(gaps)


def test_the_last_moment_is_kept_whatever_the_time() -> None:
    course = Course(4, gap=100)
    course.add(at(0))
    course.end(at(1))
    assert [moment.seconds for moment in course.moments] == [0, 1]
    assert not course.due(1e9)


# ------------------------------------------------------------------------------ histogram


@given(st.lists(st.integers(0, 10**12)))
def test_a_histogram_counts_every_sample_once(samples: list[int]) -> None:
    classes = Histogram.of(samples).classes
    assert sum(count for *_, count in classes) == len(samples)
    for (_, high, _), (low, _, _) in itertools.pairwise(classes):
        assert high == low
    for low, high, count in classes:
        inside = [
            n for n in samples if low * 1000 * (1 + 1e-9) <= max(n, 1) < high * 1000 * (1 - 1e-9)
        ]
        assert len(inside) <= count


def test_a_class_is_a_tenth_of_a_power_of_ten() -> None:
    low, high, count = Histogram.of([1_000, 1_000, 9_999]).classes[0]
    assert (low, round(high, 6), count) == (1.0, 1.258925, 2)
    assert len(Histogram.of([1_000, 9_999]).classes) == 10
    assert Histogram.of([]).classes == []


# ------------------------------------------------------------------------------ recording


def test_the_filling_is_noted_until_it_is_over() -> None:
    recording = Recording()
    for n in range(10):
        recording.note(float(n), lambda s: at(s, min(s / 4, 1.0)))
    recording.end(at(10.0, 1.0))
    assert [m.host_filled for m in recording.filling.moments] == [0, 0.25, 0.5, 0.75, 1.0]
    assert [m.seconds for m in recording.course.moments] == list(range(11))


def test_a_filling_that_is_not_over_is_noted_to_the_end() -> None:
    recording = Recording()
    recording.note(0.0, lambda s: at(s, 0.0))
    recording.end(at(9.0, 0.5))
    assert [m.host_filled for m in recording.filling.moments] == [0.0, 0.5]


def test_without_a_host_tier_there_is_no_filling() -> None:
    recording = Recording()
    recording.note(0.0, at)
    recording.end(at(1.0))
    assert recording.filling.moments == ()


def test_nobody_looks_before_it_is_time() -> None:
    def refuse(seconds: float) -> Moment:
        raise AssertionError(seconds)

    recording = Recording()
    recording.note(0.0, at)
    recording.note(0.0001, refuse)


# --------------------------------------------------------------------------------- replay


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., ReplayOptions]:
    def make(**changes: object) -> ReplayOptions:
        known: dict[str, object] = {
            "trace": "made up",
            "gpu_quota": 2 * MIB,
            "host_quota": 2 * MIB,
            "disk_quota": 2 * MIB,
            "disk_path": str(tmp_path),
            "block_bytes": MIB // 4,
            "device": "cpu",
        }
        return ReplayOptions(**(known | changes))  # type: ignore[arg-type]

    return make


def test_the_course_ends_with_the_figures_of_the_replay(
    options: Callable[..., ReplayOptions],
) -> None:
    rows = requests(*([n % 30, n % 7] for n in range(200)))
    recording = Recording()
    result = replay_bytes(rows, options(), Progress(len(rows)), recording)
    last = recording.course.moments[-1]
    assert (last.requests, last.block_refs) == (200, 400)
    assert last.seconds == result.seconds
    assert dict(last.hits) == dict(result.hits_by_level)
    assert dict(last.moved) == dict(result.bytes_moved or {})
    assert sum(count for *_, count in recording.latencies.classes) == 200
    assert last.waited == {what: waits.seconds for what, waits in recording.waits.items()}
    assert set(recording.waits) == {"blocks", "slots"}


def test_where_the_host_memory_is_is_noted(options: Callable[..., ReplayOptions]) -> None:
    recording = Recording()
    replay_bytes(requests([1]), options(), Progress(1), recording)
    assert set(recording.placements) == set(recording.fills) == {"gpu", "host"}
    for found in recording.placements.values():
        # The map is of the 2 MiB in use; the rest of the range would drown it.
        assert sum(stretch.nbytes for stretch in found.stretches) == 2 * MIB
        assert found.bytes_by_state["reserved"] == found.nbytes - 2 * MIB


def test_of_a_gpu_only_the_host_level_is_host_memory(
    options: Callable[..., ReplayOptions],
) -> None:
    recording = Recording()
    device = CudaDevice(0, driver=FakeDriver())
    replay_bytes(requests([1]), options(device=device), Progress(1), recording)
    assert set(recording.placements) == {"host"}


def test_requests_are_served_while_the_host_tier_fills(
    options: Callable[..., ReplayOptions],
) -> None:
    recording = Recording()

    class Releases(Progress):
        def update(self, done: int, **_: object) -> None:
            if done == 6:  # the hot level holds eight blocks
                held.release()

    rows = requests(*([n] for n in range(200)))
    with FaultPlan() as plan:
        # The hot level is registered in two calls; the third is the host level's first.
        held = plan.hold("cuMemHostRegister", at=3)
        replay_bytes(rows, options(), Releases(len(rows)), recording)
    first, *_, last = recording.filling.moments
    assert (first.requests, first.host_filled) == (1, 0.0)
    assert last.requests >= 6
    assert all(m.host_filled == 0.0 for m in recording.filling.moments if m.requests < 6)


def test_a_replay_without_requests_has_a_course(options: Callable[..., ReplayOptions]) -> None:
    recording = Recording()
    replay_bytes([], options(), Progress(0), recording)
    (only,) = recording.course.moments
    assert (only.requests, only.block_refs, only.hits) == (0, 0, {})


def test_a_replay_of_metadata_has_a_course() -> None:
    rows = requests(*([n % 50] for n in range(1_000)))
    recording = Recording()
    counts = replay_metadata(rows, make_policy("lru", None), None, recording)
    last = recording.course.moments[-1]
    assert (last.requests, last.block_refs, last.hits) == (1_000, 1_000, {"gpu": 950})
    assert last.seconds == counts.seconds
    assert recording.filling.moments == ()
