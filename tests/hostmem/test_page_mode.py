"""Which size of pages is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hostmem import HostMem, Machine, machine
from hostmem.page_mode import PageJudge, PageMode, resolve_page_mode
from tests.roots import write


def kernel(
    enabled: str = "madvise", defrag: str = "madvise", huge: int | None = 1 << 21
) -> Machine:
    return dataclasses.replace(
        machine(), huge_page_size=huge, thp_enabled=enabled, thp_defrag=defrag
    )


NO_THP = kernel("", "", None)


@pytest.fixture(autouse=True)
def no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTMEM_THP", raising=False)


def test_small_pages_are_the_default() -> None:
    assert resolve_page_mode(None, kernel()) is PageMode.SMALL


@pytest.mark.parametrize(
    ("setting", "mode"), [("0", PageMode.SMALL), ("1", PageMode.HUGE), ("auto", PageMode.AUTO)]
)
def test_the_environment_sets_the_default(
    monkeypatch: pytest.MonkeyPatch, setting: str, mode: PageMode
) -> None:
    monkeypatch.setenv("HOSTMEM_THP", setting)
    assert resolve_page_mode(None, kernel()) is mode


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_THP", "1")
    assert resolve_page_mode("small", kernel()) is PageMode.SMALL


@pytest.mark.parametrize("setting", ["2", "yes", "huge", "", "AUTO"])
def test_another_setting_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("HOSTMEM_THP", setting)
    with pytest.raises(ValueError, match=f"HOSTMEM_THP: '{setting}'; give 0, 1 or auto"):
        resolve_page_mode(None, kernel())


def test_a_bad_setting_does_not_matter_to_who_says_what_they_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOSTMEM_THP", "yes")
    assert resolve_page_mode("huge", kernel()) is PageMode.HUGE


@pytest.mark.parametrize("here", [kernel(), kernel("never"), NO_THP], ids=["yes", "never", "none"])
def test_small_pages_are_everywhere(here: Machine) -> None:
    assert resolve_page_mode("small", here) is PageMode.SMALL


@pytest.mark.parametrize("enabled", ["always", "madvise"])
def test_huge_pages_are_where_one_may_ask_for_them(enabled: str) -> None:
    assert resolve_page_mode("huge", kernel(enabled)) is PageMode.HUGE


@pytest.mark.parametrize(
    ("here", "why"),
    [(kernel("never"), "are never"), (NO_THP, "are not in this kernel")],
    ids=["never", "none"],
)
def test_huge_pages_are_refused_where_there_are_none(here: Machine, why: str) -> None:
    with pytest.raises(ValueError, match=f"page_mode: 'huge'.*{why}; use 'auto'"):
        resolve_page_mode("huge", here)


@pytest.mark.parametrize("enabled", ["always", "madvise"])
@pytest.mark.parametrize("defrag", ["always", "defer", "defer+madvise", "madvise", "never"])
def test_auto_begins_with_huge_pages_where_there_are_some(enabled: str, defrag: str) -> None:
    assert resolve_page_mode("auto", kernel(enabled, defrag)) is PageMode.AUTO


@pytest.mark.parametrize("here", [kernel("never"), NO_THP], ids=["never", "none"])
def test_auto_is_small_where_there_are_none(here: Machine) -> None:
    assert resolve_page_mode("auto", here) is PageMode.SMALL


@pytest.mark.parametrize("junk", ["", "HUGE", "2MiB", "thp", "huge-2MiB", "small-", "auto-x"])
def test_another_mode_is_refused(junk: str) -> None:
    with pytest.raises(ValueError, match=f"page_mode: '{junk}'"):
        resolve_page_mode(junk, kernel())


def test_a_memory_says_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostmem.progressive.machine", lambda: kernel("never"))
    with HostMem("1MiB", device="cpu", page_mode="auto") as memory:
        assert memory.page_mode == "small"


# ------------------------------------------------------------------------------ hugetlb pools


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A kernel with empty pools of 2 MiB and 1 GiB pages; the default is 2 MiB."""
    write(tmp_path, {"proc/meminfo": "MemTotal: 8 kB\nHugepagesize:       2048 kB"})
    for kib in (2048, 1 << 20):
        for name in ("nr_hugepages", "free_hugepages"):
            write(tmp_path, {f"sys/kernel/mm/hugepages/hugepages-{kib}kB/{name}": "0"})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hugetlb", 2 << 20),
        ("hugetlb-2MiB", 2 << 20),
        ("hugetlb-2048kib", 2 << 20),
        ("hugetlb-1GiB", 1 << 30),
    ],
)
def test_a_pool_is_chosen_though_it_is_empty(root: Path, name: str, size: int) -> None:
    mode = resolve_page_mode(name, NO_THP, root)
    assert (str(mode), mode.hugetlb_size) == (name, size)
    assert mode.page_size(NO_THP) == mode.largest_page_size(NO_THP) == size


@pytest.mark.parametrize("name", ["hugetlb-4MiB", "hugetlb-0", "hugetlb-1", "hugetlb--2MiB"])
def test_a_pool_that_does_not_exist_is_refused_by_its_name(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"page_mode: '{name}'.*it has: 2 MiB, 1 GiB"):
        resolve_page_mode(name, kernel(), root)


def test_a_pool_of_no_size_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="page_mode: 'big' is no size"):
        resolve_page_mode("hugetlb-big", kernel(), root)


def test_a_kernel_without_hugetlb_has_no_pool(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"this kernel has no hugetlb pool; it has: none"):
        resolve_page_mode("hugetlb", kernel(), tmp_path)


def test_a_mode_knows_its_pages() -> None:
    here = dataclasses.replace(kernel(huge=1 << 29), page_size=1 << 16)
    for mode, largest in (
        (PageMode.SMALL, 1 << 16),
        (PageMode.HUGE, 1 << 29),
        (PageMode.AUTO, 1 << 29),
    ):
        assert mode.page_size(here) == 1 << 16
        assert mode.largest_page_size(here) == largest
        assert mode.hugetlb_size is None


# ---------------------------------------------------------------------- the judge: free blocks

MIB = 1 << 20
UNIT = 32 * MIB
HERE = dataclasses.replace(kernel(), page_size=4096)  # blocks of order 9 are huge pages


def free_blocks(root: Path, *order_9_by_node: int) -> None:
    lines = [
        f"Node {n}, zone Normal 9 0 0 0 0 0 0 0 0 {free} 0"
        for n, free in enumerate(order_9_by_node)
    ]
    write(root, {"proc/buddyinfo": "\n".join(lines)})


def stalls(root: Path, compact: int, reclaim: int = 0) -> None:
    write(root, {"proc/vmstat": f"allocstall_normal {reclaim}\ncompact_stall {compact}"})


@pytest.fixture
def plenty(tmp_path: Path) -> Path:
    """A machine with huge pages to spare."""
    free_blocks(tmp_path, 100_000)
    stalls(tmp_path, 0)
    return tmp_path


@pytest.mark.parametrize(("blocks", "huge"), [(64, True), (63, False), (0, False)])
def test_huge_pages_end_where_their_blocks_do(tmp_path: Path, blocks: int, huge: bool) -> None:
    free_blocks(tmp_path, blocks)  # 64 blocks of 2 MiB are four times 32 MiB
    why = PageJudge((), HERE, tmp_path).still_huge(UNIT)
    assert (why is None) is huge


def test_the_reason_has_the_figures(tmp_path: Path) -> None:
    free_blocks(tmp_path, 9, 3)
    assert PageJudge((1,), HERE, tmp_path).still_huge(UNIT) == (
        "node 1 has 6 MiB free in blocks of 2 MiB and more, and would compact memory for others "
        "(defrag=madvise)"
    )


def test_only_the_blocks_of_its_nodes_count(tmp_path: Path) -> None:
    free_blocks(tmp_path, 29_600, 33, 33)
    judge = {nodes: PageJudge(nodes, HERE, tmp_path) for nodes in [(), (0,), (1,), (1, 2)]}
    found = {nodes: one.still_huge(UNIT) is None for nodes, one in judge.items()}
    assert found == {(): True, (0,): True, (1,): False, (1, 2): True}


@pytest.mark.parametrize(
    ("defrag", "huge"),
    [
        ("always", False),
        ("madvise", False),
        ("defer+madvise", False),
        ("defer", True),  # no fault waits for a block: where there is none, a page is small
        ("never", True),
    ],
)
def test_few_blocks_matter_where_a_fault_compacts(tmp_path: Path, defrag: str, huge: bool) -> None:
    free_blocks(tmp_path, 0)
    here = dataclasses.replace(HERE, thp_defrag=defrag)
    assert (PageJudge((), here, tmp_path).still_huge(UNIT) is None) is huge


def test_a_machine_that_does_not_tell_its_blocks_is_tried(tmp_path: Path) -> None:
    assert PageJudge((), HERE, tmp_path).still_huge(UNIT) is None


# ------------------------------------------------------------------------- the judge: the rate

SLOW, FAST = 0.1, 3.0  # GiB/s of a thread


def pieces(judge: PageJudge, gib_per_second: float, count: int = 16) -> None:
    for _ in range(count):
        judge.note(2 * MIB, 2 * MIB / (gib_per_second * (1 << 30)))


def test_a_slow_fill_gives_huge_pages_up_while_faults_compact(plenty: Path) -> None:
    judge = PageJudge((), HERE, plenty)
    pieces(judge, SLOW)
    assert judge.still_huge(UNIT) is None  # noticed; whether they compact shows from here on
    pieces(judge, SLOW)
    stalls(plenty, 5, 3)
    assert judge.still_huge(UNIT) == (
        "a thread gets 102 MiB/s of huge pages, and faults had to compact or reclaim memory "
        "8 times meanwhile"
    )


def test_a_fill_that_is_slow_because_the_machine_is_busy_keeps_them(plenty: Path) -> None:
    judge = PageJudge((), HERE, plenty)
    stalls(plenty, 1000)
    for _ in range(5):
        pieces(judge, SLOW)
        assert judge.still_huge(UNIT) is None


@pytest.mark.parametrize(("faults", "huge"), [(0, True), (7, True), (8, False)])
def test_fast_pieces_in_between_do_not_hide_it_nor_do_a_few_faults_show_it(
    plenty: Path, faults: int, huge: bool
) -> None:
    judge = PageJudge((), HERE, plenty)
    stalls(plenty, 500)
    pieces(judge, SLOW)
    assert judge.still_huge(UNIT) is None
    pieces(judge, FAST, 7)
    pieces(judge, SLOW, 9)
    stalls(plenty, 500 + faults)
    assert (judge.still_huge(UNIT) is None) is huge


def test_some_slow_pieces_are_no_slow_fill(plenty: Path) -> None:
    judge = PageJudge((), HERE, plenty)
    for number in range(5):
        pieces(judge, SLOW, 7)
        pieces(judge, FAST, 9)
        stalls(plenty, 100 * number)
        assert judge.still_huge(UNIT) is None


def test_a_few_slow_pieces_are_not_enough_to_tell(plenty: Path) -> None:
    judge = PageJudge((), HERE, plenty)
    pieces(judge, SLOW)
    judge.still_huge(UNIT)
    stalls(plenty, 1000)
    pieces(judge, SLOW, 15)
    assert judge.still_huge(UNIT) is None
    pieces(judge, SLOW, 1)
    assert judge.still_huge(UNIT) is not None


def test_compacting_while_the_fill_was_fast_is_not_held_against_it(plenty: Path) -> None:
    judge = PageJudge((), HERE, plenty)
    pieces(judge, SLOW)
    assert judge.still_huge(UNIT) is None
    pieces(judge, FAST)
    assert judge.still_huge(UNIT) is None
    stalls(plenty, 1000)
    pieces(judge, SLOW)
    assert judge.still_huge(UNIT) is None


def test_a_kernel_that_counts_no_compaction_keeps_them(tmp_path: Path) -> None:
    judge = PageJudge((), HERE, tmp_path)
    for _ in range(3):
        pieces(judge, SLOW)
        assert judge.still_huge(UNIT) is None


def test_a_piece_that_took_no_time_tells_nothing(plenty: Path) -> None:
    judge = PageJudge((), HERE, plenty)
    for _ in range(32):
        judge.note(2 * MIB, 0.0)
    assert judge.still_huge(UNIT) is None
