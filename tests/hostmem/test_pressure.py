"""When the fill should rest: stall figures and counters of machines that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostmem.pressure import PressureGauge
from tests.roots import in_group, kib, write

MIB, GIB = 1 << 20, 1 << 30


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def stalled(full: float, some: float = 0.0) -> str:
    """Return the kernel's figures after seconds of stalls since the start."""
    return "\n".join(
        f"{kind} avg10=0.00 avg60=0.00 avg300=0.00 total={round(seconds * 1e6)}"
        for kind, seconds in (("some", max(some, full)), ("full", full))
    )


def machine_with(available: int, full: float) -> dict[str, str]:
    fields = {"MemTotal": 64 * GIB, "MemAvailable": available}
    return {"proc/meminfo": kib(fields), "proc/pressure/memory": stalled(full)}


OWN = "sys/fs/cgroup/job/memory.pressure"
IN_GROUP = in_group(2, "/job", {"job/cgroup.type": "domain"})


# -------------------------------------------------------------------------------------- stalls


def test_a_group_whose_tasks_stall_is_pressed_until_they_do_not(
    tmp_path: Path, clock: Clock
) -> None:
    root = write(tmp_path, {**IN_GROUP, OWN: stalled(7.0)})
    gauge = PressureGauge(root, clock)
    assert gauge.pressed() is None  # what was before does not count
    clock.now += 0.2
    write(root, {OWN: stalled(7.062)})
    assert gauge.pressed() == (
        "memory pressure: tasks of this control group stalled 31% of the last 0.2 s"
    )
    clock.now += 0.1
    assert gauge.pressed() is None


def test_what_a_fill_stalls_while_it_drives_page_cache_out_is_no_pressure(
    tmp_path: Path, clock: Clock
) -> None:
    root = write(tmp_path, {**IN_GROUP, OWN: stalled(0)})
    gauge = PressureGauge(root, clock)
    clock.now += 1.0
    write(root, {OWN: stalled(0.04)})
    assert gauge.pressed() is None


def test_tasks_that_stall_while_others_get_on_are_no_pressure(tmp_path: Path, clock: Clock) -> None:
    root = write(tmp_path, {**IN_GROUP, OWN: stalled(0)})
    gauge = PressureGauge(root, clock)
    clock.now += 1.0
    write(root, {OWN: stalled(full=0.0, some=1.0)})
    assert gauge.pressed() is None


def test_the_files_are_not_read_more_often_than_every_tenth_of_a_second(
    tmp_path: Path, clock: Clock
) -> None:
    root = write(tmp_path, {**IN_GROUP, OWN: stalled(0)})
    gauge = PressureGauge(root, clock)
    clock.now += 0.09
    write(root, {OWN: stalled(0.09)})
    assert gauge.pressed() is None
    clock.now += 0.02
    assert gauge.pressed() is not None
    clock.now += 0.09
    assert gauge.pressed() is not None  # still of the same reading
    clock.now += 0.02
    assert gauge.pressed() is None


def test_another_group_that_thrashes_does_not_press_this_one(tmp_path: Path, clock: Clock) -> None:
    root = write(tmp_path, {**IN_GROUP, **machine_with(GIB, 0), OWN: stalled(0)})
    gauge = PressureGauge(root, clock)
    clock.now += 1.0
    write(root, machine_with(GIB, 1.0))
    assert gauge.pressed() is None


@pytest.mark.parametrize(("available", "presses"), [(7 * GIB, True), (9 * GIB, False)])
def test_without_a_group_a_machine_that_stalls_is_pressed_when_its_memory_is_tight(
    tmp_path: Path, clock: Clock, available: int, presses: bool
) -> None:
    # With more than an eighth available, some group thrashes inside a limit of its own.
    root = write(tmp_path, machine_with(available, 5.0))
    gauge = PressureGauge(root, clock)
    clock.now += 1.0
    write(root, machine_with(available, 5.5))
    expected = "memory pressure: tasks of the machine stalled 50% of the last 1.0 s"
    assert gauge.pressed() == (expected if presses else None)


def test_a_group_whose_figures_are_switched_off_goes_by_the_machines(
    tmp_path: Path, clock: Clock
) -> None:
    root = write(tmp_path, {**IN_GROUP, **machine_with(GIB, 0)})
    gauge = PressureGauge(root, clock)
    clock.now += 1.0
    write(root, machine_with(GIB, 0.5))
    assert "the machine" in (gauge.pressed() or "")


def test_a_kernel_without_figures_is_not_pressed(tmp_path: Path, clock: Clock) -> None:
    gauge = PressureGauge(tmp_path, clock)
    clock.now += 1.0
    assert gauge.pressed() is None


@pytest.mark.parametrize("text", ["", "nonsense", "full total=x", "some total=99000000"])
def test_nonsense_is_no_pressure(tmp_path: Path, clock: Clock, text: str) -> None:
    root = write(tmp_path, machine_with(GIB, 0))
    gauge = PressureGauge(root, clock)
    for figures in (text, stalled(50), text, stalled(60)):
        clock.now += 1.0
        write(root, {"proc/pressure/memory": figures})
        assert gauge.pressed() is None


# ------------------------------------------------------------------------------------ counters


def group_at(version: int, used: int, hits: int, cache: int = 0) -> dict[str, str]:
    """Return a process's group with a limit of 1 GiB, used so far and hit so often."""
    if version == 1:
        files: dict[str, object] = {
            "job/memory.limit_in_bytes": GIB,
            "job/memory.usage_in_bytes": used,
            "job/memory.stat": f"total_inactive_file {cache}",
            "job/memory.failcnt": hits,
        }
    else:
        files = {
            "job/memory.max": 2 * GIB,
            "job/memory.high": GIB,
            "job/memory.current": used,
            "job/memory.stat": f"inactive_file {cache}",
            "job/memory.events": f"low 0\nhigh {hits}\nmax 5",
        }
    return in_group(version, "/job", files)


@pytest.mark.parametrize(
    ("version", "limit"),
    [
        (1, "memory.limit_in_bytes of {}/sys/fs/cgroup/memory/job"),
        (2, "memory.high of {}/sys/fs/cgroup/job"),
    ],
)
def test_a_limit_that_is_hit_presses_once(
    tmp_path: Path, clock: Clock, version: int, limit: str
) -> None:
    root = write(tmp_path, group_at(version, used=GIB - 100 * MIB, hits=3))
    gauge = PressureGauge(root, clock)
    clock.now += 0.1
    assert gauge.pressed() is None  # hits of before do not count
    write(root, group_at(version, used=GIB - 100 * MIB, hits=17))
    clock.now += 0.1
    assert gauge.pressed() == f"{limit.format(root)} was hit 14 times with 100 MiB left"
    clock.now += 0.1
    assert gauge.pressed() is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_full_of_page_cache_may_hit_its_limit(
    tmp_path: Path, clock: Clock, version: int
) -> None:
    root = write(tmp_path, group_at(version, used=GIB, hits=0, cache=200 * MIB))
    gauge = PressureGauge(root, clock)
    write(root, group_at(version, used=GIB, hits=5000, cache=200 * MIB))
    clock.now += 1.0
    assert gauge.pressed() is None


def test_the_limit_of_an_ancestor_presses(tmp_path: Path, clock: Clock) -> None:
    def files(hits: int) -> dict[str, str]:
        pod = {"pod/memory.max": GIB, "pod/memory.current": GIB, "pod/memory.events": f"max {hits}"}
        return in_group(2, "/pod/job", {**pod, "pod/job/memory.events": "max 0"})

    root = write(tmp_path, files(0))
    gauge = PressureGauge(root, clock)
    write(root, files(1))
    clock.now += 1.0
    assert gauge.pressed() == f"memory.max of {root}/sys/fs/cgroup/pod was hit 1 time with 0 B left"


def test_counters_that_cannot_be_read_for_a_while_are_no_hits(tmp_path: Path, clock: Clock) -> None:
    root = write(tmp_path, group_at(1, used=GIB, hits=9))
    failcnt = root / "sys/fs/cgroup/memory/job/memory.failcnt"
    gauge = PressureGauge(root, clock)
    for text in ("nonsense", "9", "nonsense", "9"):
        failcnt.write_text(text)
        clock.now += 1.0
        assert gauge.pressed() is None


def test_a_limit_that_was_lifted_is_no_pressure(tmp_path: Path, clock: Clock) -> None:
    root = write(tmp_path, group_at(2, used=GIB, hits=0))
    gauge = PressureGauge(root, clock)
    write(root, group_at(2, used=GIB, hits=1) | {"sys/fs/cgroup/job/memory.high": "max"})
    clock.now += 1.0
    assert gauge.pressed() is None


# -------------------------------------------------------------------------------- this machine


def test_this_machine_is_read(clock: Clock) -> None:
    gauge = PressureGauge(clock=clock)
    clock.now += 3600.0  # nothing stalls for a fifth of an hour between two lines
    assert gauge.pressed() is None
