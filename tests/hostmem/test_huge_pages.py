"""Where huge pages could come from, read from a made-up proc and sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostmem import huge_pages
from hostmem.huge_pages import HugePool
from tests.roots import write

MIB = 1 << 20

BUDDYINFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal   3509   1159    560    300    131     76     35     15      9     15    104
Node 1, zone   Normal      8      4      2      1      0      0      0      0      0      2      0
"""


# ---------------------------------------------------------------------------------- free blocks


@pytest.mark.parametrize(
    ("nodes", "mib"),
    [
        ((), 2 + 12 + 30 + 416 + 4),
        ((0,), 2 + 12 + 30 + 416),
        ([1], 4),
        ((0, 1), 464),
        ((7,), 0),
    ],
    ids=str,
)
def test_free_blocks_that_hold_a_huge_page_are_added_up(
    tmp_path: Path, nodes: tuple[int, ...], mib: int
) -> None:
    write(tmp_path, {"proc/buddyinfo": BUDDYINFO})
    assert huge_pages.free_huge_bytes(nodes, 4096, 2 * MIB, tmp_path) == mib * MIB


def test_pages_may_have_other_sizes(tmp_path: Path) -> None:
    # 64 KiB and 512 MiB: order 13.
    write(tmp_path, {"proc/buddyinfo": "Node 0, zone Normal" + " 1" * 12 + " 7 3"})
    assert huge_pages.free_huge_bytes((), 1 << 16, 512 * MIB, tmp_path) == 3 * 512 * MIB


def test_a_huge_page_larger_than_any_block_is_not_free(tmp_path: Path) -> None:
    write(tmp_path, {"proc/buddyinfo": BUDDYINFO})
    assert huge_pages.free_huge_bytes((), 4096, 1 << 30, tmp_path) == 0


def test_free_memory_in_no_list_is_in_one_piece(tmp_path: Path) -> None:
    write(tmp_path, {"proc/buddyinfo": "Node 0, zone Normal 512 0 0 0 0 0 0 0 0 1"})  # 4 MiB
    meminfo = "sys/devices/system/node/node0/meminfo"
    write(tmp_path, {meminfo: "Node 0 MemTotal: 99999 kB\nNode 0 MemFree: 10240 kB"})
    assert huge_pages.free_huge_bytes((), 4096, 2 * MIB, tmp_path) == (2 + 6) * MIB
    write(tmp_path, {meminfo: "Node 0 MemFree: 1024 kB"})  # read a moment later
    assert huge_pages.free_huge_bytes((), 4096, 2 * MIB, tmp_path) == 2 * MIB


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Node 0, zone Normal",
        "Node x, zone Normal 1 2 3",
        "Node 0, zone Normal 1 -2 3",
        "Node 0, zone Normal 1 2.5",
        "\x00\xff",
        "nothing of the kind",
    ],
)
def test_what_makes_no_sense_is_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"proc/buddyinfo": text})
    write(tmp_path, {"proc/vmstat": text})
    assert huge_pages.free_bytes_by_order(4096, tmp_path) == {}
    assert huge_pages.free_huge_bytes((), 4096, 4096, tmp_path) == 0
    assert huge_pages.compactions(tmp_path) is None


def test_a_line_that_makes_no_sense_spoils_no_other(tmp_path: Path) -> None:
    write(tmp_path, {"proc/buddyinfo": "Node ?\nNode 3, zone Normal 1 1\nNode 4, zone"})
    assert huge_pages.free_bytes_by_order(4096, tmp_path) == {3: [4096, 8192]}


def test_this_machine_says_something() -> None:
    assert huge_pages.free_bytes_by_order(4096)
    assert huge_pages.compactions() is not None


def test_compactions_and_reclaims_of_faults_are_counted(tmp_path: Path) -> None:
    text = "nr_free_pages 5\nallocstall_normal 10\nallocstall_movable 200\ncompact_stall 3000\n"
    write(tmp_path, {"proc/vmstat": text + "compact_success 77"})
    assert huge_pages.compactions(tmp_path) == 3210


# ---------------------------------------------------------------------------------------- pools


def pool(root: Path, kib: int, nodes: dict[int, str], **files: str) -> None:
    for name, text in files.items():
        write(root, {f"sys/kernel/mm/hugepages/hugepages-{kib}kB/{name}": text})
    for node, text in nodes.items():
        folder = f"sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB"
        write(root, {f"{folder}/free_hugepages": text})


def test_pools_are_read_by_page_size_and_node(tmp_path: Path) -> None:
    two = {"nr_hugepages": "64\n", "free_hugepages": "40\n", "resv_hugepages": "4\n"}
    pool(tmp_path, 2048, {0: "30\n", 1: "10\n"}, **two, nr_overcommit_hugepages="8\n")
    pool(tmp_path, 1 << 20, {0: "0\n"}, nr_hugepages="0", free_hugepages="0")
    assert huge_pages.pools(tmp_path) == {
        2 * MIB: HugePool(64, 40, 4, 8, {0: 30, 1: 10}),
        1 << 30: HugePool(0, 0, 0, 0, {0: 0}),
    }


def test_a_kernel_without_hugetlb_has_no_pools(tmp_path: Path) -> None:
    assert huge_pages.pools(tmp_path) == {}
    assert huge_pages.default_pool_size(tmp_path) is None


def test_a_pool_that_makes_no_sense_is_left_out(tmp_path: Path) -> None:
    pool(tmp_path, 2048, {0: "??"}, nr_hugepages="many", free_hugepages="1")
    pool(tmp_path, 64, {}, nr_hugepages="1")
    pool(tmp_path, 32768, {0: "-1"}, nr_hugepages="3", free_hugepages="2", resv_hugepages="?")
    write(tmp_path, {"sys/kernel/mm/hugepages/hugepages-hugekB/nr_hugepages": "1"})
    write(tmp_path, {"sys/kernel/mm/hugepages/README": "1"})
    assert huge_pages.pools(tmp_path) == {32 * MIB: HugePool(3, 2, 0, 0, {})}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("HugePages_Total: 0\nHugepagesize:       2048 kB\nHugetlb: 0 kB\n", 2 * MIB),
        ("Hugepagesize: ? kB\n", None),
        ("Hugepagesize:", None),
        ("MemTotal: 1 kB\n", None),
    ],
)
def test_the_default_size_is_read(tmp_path: Path, text: str, size: int | None) -> None:
    write(tmp_path, {"proc/meminfo": text})
    assert huge_pages.default_pool_size(tmp_path) == size
