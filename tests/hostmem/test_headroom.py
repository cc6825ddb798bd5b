"""How much can still be taken: from machines that are not here, and in real control groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from hostmem.headroom import Headroom, HeadroomGauge, Limit, headroom
from tests.roots import in_group, kib, write

MIB, GIB = 1 << 20, 1 << 30
NODES = "sys/devices/system/node"


def left(total: int, taken: int) -> int:
    """Work out what remains of a limit: a sixteenth up to 64 MiB, and tables, are kept back."""
    rest = total - taken - min(64 * MIB, total // 16)
    return max(rest - rest // 128, 0)


def machine_with(available: int, **more: int) -> dict[str, str]:
    fields = {"MemTotal": 64 * GIB, "MemFree": MIB, "MemAvailable": available, **more}
    return {"proc/meminfo": kib(fields)}


def node_with(number: int, **fields: int) -> dict[str, str]:
    named = {name.replace("_file", "(file)"): n for name, n in fields.items()}
    return {f"{NODES}/node{number}/meminfo": kib(named, f"Node {number} ")}


# --------------------------------------------------------------------------------- the machine


def test_a_machine_has_what_is_available(tmp_path: Path) -> None:
    found = headroom(root=write(tmp_path, machine_with(12 * GIB)))
    assert found.nbytes == left(64 * GIB, 52 * GIB)
    assert found.limit == "MemAvailable (64 GiB, of which 52 GiB in use)"


def test_a_machine_on_which_nothing_can_be_read_has_no_limit(tmp_path: Path) -> None:
    found = headroom(nodes=(0,), strict=True, root=tmp_path)
    assert found == Headroom(())
    assert found.nbytes > 1 << 60
    assert found.limit == "no limit that could be read"


def test_nonsense_is_no_limit(tmp_path: Path) -> None:
    names = ["proc/meminfo", "proc/self/cgroup", "proc/self/mountinfo", "proc/self/status"]
    names += ["proc/zoneinfo", "proc/sys/vm/overcommit_memory", f"{NODES}/has_memory"]
    write(tmp_path, dict.fromkeys([*names, f"{NODES}/node1/meminfo"], "what? 12 x - 4\n: 3 kB"))
    assert headroom(nodes=(1,), strict=True, root=tmp_path) == Headroom(())


def test_of_nothing_left_nothing_may_be_taken(tmp_path: Path) -> None:
    assert headroom(root=write(tmp_path, machine_with(MIB))).nbytes == 0


def test_strict_accounting_limits_by_what_is_promised(tmp_path: Path) -> None:
    files = machine_with(60 * GIB, CommitLimit=32 * GIB, Committed_AS=20 * GIB)
    files |= {
        "proc/sys/vm/overcommit_memory": "2",
        "proc/sys/vm/user_reserve_kbytes": str(128 << 10),
        "proc/sys/vm/admin_reserve_kbytes": str(8 << 10),
    }
    found = headroom(root=write(tmp_path, files))
    assert found.nbytes == left(32 * GIB, 20 * GIB + 136 * MIB)
    assert found.limit.startswith("CommitLimit (vm.overcommit_memory=2)")


@pytest.mark.parametrize("mode", ["0", "1"])
def test_without_strict_accounting_promises_do_not_count(tmp_path: Path, mode: str) -> None:
    files = machine_with(60 * GIB, CommitLimit=32 * GIB, Committed_AS=40 * GIB)
    files |= {"proc/sys/vm/overcommit_memory": mode}
    found = headroom(root=write(tmp_path, files))
    assert [limit.name for limit in found.limits] == ["MemAvailable"]


# ------------------------------------------------------------------------------ control groups


@pytest.mark.parametrize(
    ("version", "limit", "usage", "stat"),
    [
        (2, "memory.max", "memory.current", "inactive_file {}\nshmem 4"),
        (2, "memory.high", "memory.current", "inactive_file {}\nshmem 4"),
        (
            1,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file {}\ntotal_shmem 4",
        ),
    ],
)
def test_page_cache_is_free(
    tmp_path: Path, version: int, limit: str, usage: str, stat: str
) -> None:
    group = {limit: GIB, usage: 900 * MIB, "memory.stat": stat.format(700 * MIB)}
    files = in_group(version, "/job", {f"job/{name}": text for name, text in group.items()})
    found = headroom(root=write(tmp_path, machine_with(60 * GIB) | files))
    assert found.nbytes == left(GIB, 200 * MIB)
    assert found.limit.startswith(f"{limit} of {tmp_path}/sys/fs/cgroup")


def test_an_ancestor_that_others_fill_limits(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": 4 * GIB,
        "pod/memory.current": 4 * GIB - 300 * MIB,
        "pod/memory.high": "max",
        "pod/job/memory.max": 2 * GIB,
        "pod/job/memory.current": 100 * MIB,
    }
    root = write(tmp_path, machine_with(60 * GIB) | in_group(2, "/pod/job", files))
    found = headroom(root=root)
    assert found.nbytes == left(4 * GIB, 4 * GIB - 300 * MIB)
    assert found.limit == (
        f"memory.max of {root}/sys/fs/cgroup/pod (4 GiB, of which 3.71 GiB in use)"
    )
    assert [limit.name.split()[0] for limit in found.limits] == [
        "MemAvailable",
        "memory.max",
        "memory.max",
    ]


def test_groups_without_a_limit_do_not_limit(tmp_path: Path) -> None:
    files = in_group(2, "/job", {"job/memory.max": "max", "job/memory.current": 70 * GIB})
    found = headroom(root=write(tmp_path, machine_with(60 * GIB) | files))
    assert [limit.name for limit in found.limits] == ["MemAvailable"]


def test_a_process_that_is_moved_has_the_limits_of_its_new_group(tmp_path: Path) -> None:
    files = {"a/memory.max": GIB, "a/memory.current": 0, "b/memory.max": MIB, "b/memory.current": 0}
    root = write(tmp_path, machine_with(60 * GIB) | in_group(2, "/a", files))
    gauge = HeadroomGauge(root=root)
    assert gauge.read().nbytes == left(GIB, 0)
    write(root, {"proc/self/cgroup": "0::/b"})
    assert gauge.read().nbytes == left(MIB, 0)


def test_a_gauge_sees_a_limit_change(tmp_path: Path) -> None:
    files = in_group(2, "/job", {"job/memory.max": "max", "job/memory.current": 5 * MIB})
    root = write(tmp_path, machine_with(60 * GIB) | files)
    gauge = HeadroomGauge(root=root)
    assert gauge.read().nbytes == left(64 * GIB, 4 * GIB)
    write(root, {"sys/fs/cgroup/job/memory.max": str(GIB)})
    assert gauge.read().nbytes == left(GIB, 5 * MIB)


# --------------------------------------------------------------------------------------- nodes

TWO_NODES = {
    **machine_with(60 * GIB),
    f"{NODES}/has_memory": "0-1",
    **node_with(0, MemTotal=32 * GIB, MemFree=30 * GIB),
    **node_with(
        1,
        MemTotal=32 * GIB,
        MemFree=2 * GIB,
        Active_file=GIB,
        Inactive_file=3 * GIB,
        Dirty=256 * MIB,
        Writeback=128 * MIB,
        Shmem=9 * GIB,
        FilePages=13 * GIB,
    ),
}
FREE_ON_1 = 2 * GIB + 4 * GIB - 384 * MIB


def test_a_strict_node_has_what_is_free_on_it_and_its_page_cache(tmp_path: Path) -> None:
    found = headroom(nodes=(1,), strict=True, root=write(tmp_path, TWO_NODES))
    assert found.nbytes == left(32 * GIB, 32 * GIB - FREE_ON_1)
    assert found.limit.startswith("free memory of node 1 (32 GiB")


def test_a_wished_node_does_not_limit(tmp_path: Path) -> None:
    found = headroom(nodes=(1,), strict=False, root=write(tmp_path, TWO_NODES))
    assert [limit.name for limit in found.limits] == ["MemAvailable"]


def test_several_strict_nodes_add_up(tmp_path: Path) -> None:
    files = TWO_NODES | {f"{NODES}/has_memory": "0-2"}
    files |= node_with(2, MemTotal=32 * GIB, MemFree=GIB)
    found = headroom(nodes=(1, 2), strict=True, root=write(tmp_path, files))
    assert found.nbytes == left(64 * GIB, 64 * GIB - FREE_ON_1 - GIB)
    assert found.limit.startswith("free memory of nodes 1, 2")


def test_all_nodes_together_are_the_machine(tmp_path: Path) -> None:
    found = headroom(nodes=(1, 0), strict=True, root=write(tmp_path, TWO_NODES))
    assert [limit.name for limit in found.limits] == ["MemAvailable"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_cpuset_limits_to_its_nodes(tmp_path: Path, strict: bool) -> None:
    files = TWO_NODES | {"proc/self/status": "Name:\tx\nMems_allowed_list:\t1\nTgid:\t7"}
    nodes = (1,) if strict else ()
    found = headroom(nodes, strict, root=write(tmp_path, files))
    assert found.nbytes == left(32 * GIB, 32 * GIB - FREE_ON_1)
    assert ("cpuset" in found.limit) is not strict


ZONES = """\
Node 0, zone      DMA
        high     1000
        managed  4000
        protection: (0, 9, 9)
Node 1, zone    DMA32
  pages free     5
        min      64
        low      80
        high     100
        managed  5000
        protection: (0, 0, 90000, 90000)
  pagesets
    cpu: 0
              count: 3
              high:  378
Node 1, zone   Normal
        high     700
        managed  8000000
        protection: (0, 0, 0, 20)
Node 1, zone  Movable
        high     32
        managed  0
        protection: (0, 0, 0, 0)"""


def test_what_the_kernel_keeps_of_a_node_is_not_free(tmp_path: Path) -> None:
    # All of the 32-bit zone is protected from those that a normal zone could serve; of the normal
    # zone the high watermark and what is protected are kept; pages are 64 KiB here.
    files = TWO_NODES | {"proc/zoneinfo": ZONES}
    root = write(tmp_path, files)
    kept = (5000 + 700 + 20) * (64 << 10)
    found = headroom(nodes=(1,), strict=True, page_size=64 << 10, root=root)
    assert found.nbytes == left(32 * GIB, 32 * GIB - FREE_ON_1 + kept)


# --------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [
        (Limit("x", 1600, 0), 1600 - 100 - 1500 // 128),
        (Limit("x", 1600, 1500), 0),
        (Limit("x", 1600, 1700), 0),
        (Limit("x", 1600, 0, exact=True), 1600),
        (Limit("x", 1600, 1700, exact=True), 0),
        (Limit("x", 1 << 40, 1 << 39), (1 << 39) - 64 * MIB - ((1 << 39) - 64 * MIB) // 128),
    ],
)
def test_a_limit_leaves_a_margin_unless_it_is_exact(limit: Limit, nbytes: int) -> None:
    assert limit.nbytes == nbytes


def test_a_limit_says_why() -> None:
    assert str(Limit("x", 2 * GIB, GIB)) == "x (2 GiB, of which 1 GiB in use)"
    assert str(Limit("x", 2 * GIB, GIB, why="because")) == "x (because)"


# -------------------------------------------------------------------------------- this machine

GROUP = 1 * GIB


class Run(Protocol):
    """Run code in processes of one group; what they report, line by line."""

    def __call__(self, code: str, processes: int = 1) -> list[dict[str, Any]]: ...


@pytest.fixture
def in_a_group(tmp_path: Path) -> Iterator[Run]:
    """A control group of 1 GiB below this process's own, to run code in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, limit = Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
            break
        if not controllers:
            parent, limit = Path("/sys/fs/cgroup" + path), "memory.max"
    group = parent / f"hostmem-headroom-{os.getpid()}"
    group.mkdir()
    (group / limit).write_text(str(GROUP))
    prefix = """
        import json, mmap, os, sys
        sys.stdin.readline()
        from hostmem.headroom import HeadroomGauge, headroom
        def say(**facts):
            print(json.dumps(facts), flush=True)
        def used():
            names = ("memory.usage_in_bytes", "memory.current")
            paths = [os.path.join(sys.argv[1], name) for name in names]
            return [int(open(path).read()) for path in paths if os.path.exists(path)][0]
    """

    def run(code: str, processes: int = 1) -> list[dict[str, Any]]:
        program = textwrap.dedent(prefix) + textwrap.dedent(code)
        children = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-c", program, str(group), str(tmp_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(processes)
        ]
        for child in children:
            (group / "cgroup.procs").write_text(str(child.pid))
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [child.communicate(timeout=60)[0] for child in children]
        assert [child.returncode for child in children] == [0] * processes
        return [json.loads(line) for answer in answers for line in answer.splitlines()]

    yield run
    group.rmdir()


FILL_THE_CACHE = """
path = os.path.join(sys.argv[2], "cached")
with open(path, "wb") as file:
    for _ in range(600):
        file.write(b"x" * (1 << 20))
    file.flush()
    os.fsync(file.fileno())
with open(path, "rb", buffering=0) as file:
    while file.read(1 << 20):
        pass
"""


@pytest.mark.cgroup
def test_a_process_in_a_real_group_has_what_the_group_leaves(in_a_group: Run) -> None:
    # Page cache does not count as taken; memory of one's own does, and so does shared memory.
    code = f"""
say(nbytes=headroom().nbytes, limit=headroom().limit, used=used())
{FILL_THE_CACHE}
say(nbytes=headroom().nbytes, used=used())
shared = mmap.mmap(-1, 200 << 20)  # which is tmpfs's
shared.write(bytes(200 << 20))
say(nbytes=headroom().nbytes, used=used())
"""
    before, cached, shared = in_a_group(code)
    assert 0.8 * GROUP < before["nbytes"] < GROUP
    assert "hostmem-headroom-" in before["limit"]
    assert cached["used"] > before["used"] + 500 * MIB
    assert abs(before["nbytes"] - cached["nbytes"]) < 48 * MIB
    assert 190 * MIB < cached["nbytes"] - shared["nbytes"] < 248 * MIB


@pytest.mark.cgroup
@pytest.mark.parametrize("processes", [1, 4])
def test_processes_that_take_what_the_headroom_says_live(in_a_group: Run, processes: int) -> None:
    # Each takes a part of what is left, at the same time as the others, and there is page cache.
    code = f"""
gauge, kept, total = HeadroomGauge(), [], 0
{FILL_THE_CACHE.replace('"cached"', '"cached-%d" % os.getpid()').replace("600", "100")}
while (step := gauge.read().nbytes // 16 // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
    kept.append(mmap.mmap(-1, step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1].write(bytes(step))
    total += step
    if step < 1 << 20:
        break
say(total=total)
"""
    taken = sum(answer["total"] for answer in in_a_group(code, processes=processes))
    assert taken > 0.75 * GROUP
