"""Processes that may use only some of the machine's CPUs and nodes (control groups, version 2)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostmem import machine
from tests.hostmem.conftest import Child

pytestmark = [pytest.mark.numa2, pytest.mark.cgroup]

Cpuset = Callable[[int, int], str]


@pytest.fixture
def cpuset() -> Iterator[Cpuset]:
    """Make a group with the CPUs of one node and the memory of another; code that enters it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "")
    group = Path(f"/sys/fs/cgroup{own}", f"hostmem-cpuset-{os.getpid()}")
    group.mkdir()
    if not (group / "cpuset.mems").exists():
        group.rmdir()
        pytest.skip("no cpuset controller of control groups version 2")

    def restrict(cpus_of: int, memory_of: int) -> str:
        (group / "cpuset.cpus").write_text(",".join(map(str, machine().fill_cpus(cpus_of))))
        (group / "cpuset.mems").write_text(str(memory_of))
        return f"open('{group}/cgroup.procs', 'w').write('0')\n"

    yield restrict
    group.rmdir()


@pytest.fixture
def near() -> int:
    """A node with memory and CPUs."""
    return next(
        n.number for n in machine().nodes if n.memory_total and machine().fill_cpus(n.number)
    )


@pytest.fixture
def far(near: int) -> int:
    """Another node with memory."""
    return next(n.number for n in machine().nodes if n.memory_total and n.number != near)


FILL = """
import logging, sys
from hostmem import HostMem, HostmemError, machine

logging.basicConfig(stream=sys.stdout, format="%(message)s")
try:
    with HostMem(
        "8MiB", device="cpu", numa_node={node}, allow_remote_numa_fallback={fallback}, wait=True
    ) as memory:
        found = memory.placement()
        print(found.accepted)
        print(found.bytes_by_node)
except HostmemError as error:
    print(type(error).__name__, error)
"""


def run(child: Child, code: str) -> list[str]:
    done = child(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("fallback", "policy"), [(True, "preferred"), (False, "bind")])
def test_a_node_whose_cpus_are_not_ours_is_filled_from_others(
    child: Child, cpuset: Cpuset, near: int, far: int, fallback: bool, policy: str
) -> None:
    enter = cpuset(near, far)
    assert run(child, enter + FILL.format(node=far, fallback=fallback)) == [
        f"fill threads run anywhere: this process may use no CPU of node {far}",
        f"{policy} node {far}",
        str({far: 8 << 20}),
    ]


def test_memory_that_prefers_a_node_which_is_not_ours_is_elsewhere(
    child: Child, cpuset: Cpuset, near: int, far: int
) -> None:
    enter = cpuset(near, near)
    *_, accepted, found = run(child, enter + FILL.format(node=far, fallback=True))
    assert accepted.startswith("refused (")
    assert found == str({near: 8 << 20})


def test_memory_bound_to_a_node_that_is_not_ours_is_refused(
    child: Child, cpuset: Cpuset, near: int, far: int
) -> None:
    enter = cpuset(near, near)
    *_, said = run(child, enter + FILL.format(node=far, fallback=False))
    assert said.startswith(f"PlacementRefusedError strict placement on bind node {far}: ")
    assert "mbind" in said
