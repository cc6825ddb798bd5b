"""What machine this is, read from proc and sys of machines that are not here."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hostmem import Machine, Node, machine
from hostmem.machine import node_of_pci_device, read_machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
THP = "sys/kernel/mm/transparent_hugepage"
NODES = "sys/devices/system/node"


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files as the kernel shows them, each with a newline at its end."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def node_files(number: int, cpulist: str, mib: int) -> dict[str, str]:
    folder = f"{NODES}/node{number}"
    return {
        f"{folder}/cpulist": cpulist,
        f"{folder}/meminfo": (
            f"Node {number} MemTotal:       {mib * 1024} kB\nNode {number} MemFree:   17 kB"
        ),
    }


# A usual server: two nodes, each with CPUs and memory.
SERVER = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic",
    "proc/meminfo": "MemTotal:       4194304 kB\nMemFree:        1000 kB",
    "sys/devices/system/cpu/online": "0-7",
    f"{THP}/hpage_pmd_size": "2097152",
    f"{THP}/enabled": "always [madvise] never",
    f"{THP}/defrag": "always defer defer+madvise [madvise] never",
    f"{NODES}/online": "0-1",
    **node_files(0, "0-3", 2048),
    **node_files(1, "4-7", 2048),
}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return write(tmp_path, SERVER)


def test_a_server_is_read(server: Path) -> None:
    assert read_machine(server, page_size=4096) == Machine(
        kernel="6.8.0-45-generic",
        page_size=4096,
        huge_page_size=2 * MIB,
        thp_enabled="madvise",
        thp_defrag="madvise",
        memory_total=4 * GIB,
        memory_limit=None,
        nodes=(Node(0, (0, 1, 2, 3), 2 * GIB), Node(1, (4, 5, 6, 7), 2 * GIB)),
        allowed_cpus=tuple(range(8)),
    )


def test_pages_of_64_kib_have_huge_ones_of_512_mib(server: Path) -> None:
    write(server, {f"{THP}/hpage_pmd_size": str(512 * MIB)})
    found = read_machine(server, page_size=64 * KIB)
    assert (found.page_size, found.huge_page_size) == (64 * KIB, 512 * MIB)


def test_the_page_is_this_machines_unless_given(server: Path) -> None:
    assert read_machine(server).page_size == os.sysconf("SC_PAGESIZE")


def test_a_kernel_may_have_no_huge_pages(tmp_path: Path) -> None:
    write(tmp_path, {name: text for name, text in SERVER.items() if not name.startswith(THP)})
    found = read_machine(tmp_path)
    assert (found.huge_page_size, found.thp_enabled, found.thp_defrag) == (None, "", "")


@pytest.mark.parametrize("chosen", ["always", "madvise", "never"])
def test_the_choice_is_the_word_in_brackets(server: Path, chosen: str) -> None:
    words = "always madvise never".replace(chosen, f"[{chosen}]")
    write(server, {f"{THP}/enabled": words})
    assert read_machine(server).thp_enabled == chosen


# ------------------------------------------------------------------------------------- nodes


@pytest.mark.parametrize(
    ("cpulist", "cpus"),
    [
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("0,2,4", (0, 2, 4)),
        ("0-1,8-9,15", (0, 1, 8, 9, 15)),
        ("", ()),
    ],
)
def test_a_list_of_cpus_is_read(server: Path, cpulist: str, cpus: tuple[int, ...]) -> None:
    write(server, node_files(0, cpulist, 2048))
    assert read_machine(server).nodes[0].cpus == cpus


def test_a_node_may_have_no_cpus(server: Path) -> None:
    write(server, {f"{NODES}/online": "0-2", **node_files(2, "", 512)})
    assert read_machine(server).node(2) == Node(2, (), 512 * MIB)


def test_a_node_may_have_no_memory(server: Path) -> None:
    write(server, node_files(1, "4-7", 0))
    assert read_machine(server).node(1) == Node(1, (4, 5, 6, 7), 0)


def test_nodes_may_be_numbered_with_gaps(server: Path) -> None:
    write(server, {f"{NODES}/online": "0,8,250-251"})
    write(server, {**node_files(8, "4-7", 64), **node_files(250, "", 16), **node_files(251, "", 0)})
    found = read_machine(server)
    assert [node.number for node in found.nodes] == [0, 8, 250, 251]
    assert found.node(8) == Node(8, (4, 5, 6, 7), 64 * MIB)
    assert found.node(1) is None


def test_a_socket_may_be_several_nodes(server: Path) -> None:
    # Sub-NUMA clustering: one node's CPUs are two ranges, the first and second hyper-threads.
    clusters = {f"{NODES}/online": "0-3"}
    for number in range(4):
        first = 2 * number
        clusters |= node_files(number, f"{first}-{first + 1},{first + 8}-{first + 9}", 1024)
    found = read_machine(write(server, clusters))
    assert [node.cpus for node in found.nodes] == [
        (0, 1, 8, 9),
        (2, 3, 10, 11),
        (4, 5, 12, 13),
        (6, 7, 14, 15),
    ]


def test_a_kernel_may_show_no_nodes(tmp_path: Path) -> None:
    write(tmp_path, {name: text for name, text in SERVER.items() if not name.startswith(NODES)})
    assert read_machine(tmp_path).nodes == ()


def test_a_machine_of_which_nothing_can_be_read_is_described_all_the_same(tmp_path: Path) -> None:
    found = read_machine(tmp_path, page_size=4096)
    assert found == Machine("", 4096, None, "", "", 0, None, (), ())
    assert "huge none" in str(found)


# ------------------------------------------------------------------------ what follows from it


def described(**changes: object) -> Machine:
    two = (Node(0, (0, 1), GIB), Node(1, (2, 3), GIB))
    base = Machine("6.8", 4096, 2 * MIB, "madvise", "madvise", 2 * GIB, None, two, (0, 1, 2, 3))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_threads_fill_a_node_from_its_cpus() -> None:
    assert described().fill_cpus(1) == (2, 3)


def test_threads_fill_a_node_from_those_of_its_cpus_that_are_allowed() -> None:
    assert described(allowed_cpus=(0, 3)).fill_cpus(1) == (3,)


@pytest.mark.parametrize("node", [None, 7])
def test_there_are_no_cpus_of_no_node(node: int | None) -> None:
    assert described().fill_cpus(node) == ()


def test_there_may_be_no_cpu_of_a_node_for_this_process() -> None:
    assert described(allowed_cpus=(0, 1)).fill_cpus(1) == ()


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 2 * GIB), (GIB, GIB), (4 * GIB, 2 * GIB), (0, 0)]
)
def test_a_process_has_the_least_of_memory_and_limit(limit: int | None, expected: int) -> None:
    assert described(memory_limit=limit).memory_for_process == expected


def test_the_limit_of_the_control_group_is_read(server: Path) -> None:
    write(
        server,
        {
            "proc/self/cgroup": "0::/job",
            "proc/self/mountinfo": "31 25 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/job/memory.max": str(GIB),
        },
    )
    assert read_machine(server).memory_for_process == GIB


def test_a_machine_describes_itself() -> None:
    assert str(described(memory_limit=GIB)) == (
        "kernel       6.8\n"
        "memory       2 GiB, control group limit 1 GiB\n"
        "pages        4 KiB, huge 2 MiB (enabled=madvise, defrag=madvise)\n"
        "cpus         4 allowed\n"
        "node 0       1 GiB, 2 cpus\n"
        "node 1       1 GiB, 2 cpus"
    )


# ------------------------------------------------------------------------------- PCI devices


@pytest.mark.parametrize(("text", "node"), [("0", 0), ("1", 1), ("-1", None)])
def test_a_pci_device_has_the_node_that_sysfs_says(
    tmp_path: Path, text: str, node: int | None
) -> None:
    write(tmp_path, {"sys/bus/pci/devices/0000:1b:00.0/numa_node": text})
    assert node_of_pci_device("0000:1b:00.0", tmp_path) == node


def test_a_pci_device_that_sysfs_does_not_show_has_no_known_node(tmp_path: Path) -> None:
    assert node_of_pci_device("0000:1b:00.0", tmp_path) is None


# ------------------------------------------------------------------------------ this machine


def test_this_machine_is_read_once() -> None:
    assert machine() is machine()


def test_this_machine_has_what_the_system_says() -> None:
    here = machine()
    assert here.kernel == os.uname().release
    assert here.page_size == os.sysconf("SC_PAGESIZE")
    assert here.memory_total == os.sysconf("SC_PHYS_PAGES") * here.page_size
    assert set(here.allowed_cpus) == os.sched_getaffinity(0)
