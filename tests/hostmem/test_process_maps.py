"""The mappings of processes: what proc says, and what it may say on other machines."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostmem import machine
from hostmem._sys import linux
from hostmem.process_maps import Mapping, parse_mappings, parse_nodes, read_mappings
from hostmem.process_report import ProcessReport, report_process

PAGE = os.sysconf("SC_PAGESIZE")
GIB = 1 << 30

SMAPS = """\
563ec7212000-563ec77d0000 rw-p 00000000 00:00 0                          [heap]
Size:               5880 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                5796 kB
AnonHugePages:      4096 kB
ShmemPmdMapped:        0 kB
FilePmdMapped:         0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:       0 kB
VmFlags: rd wr mr mw me ac
7f0000000000-7f0080000000 rw-p 00000000 00:10 4242                       /anon_hugepage (deleted)
Size:            2097152 kB
KernelPageSize:  1048576 kB
MMUPageSize:     1048576 kB
Rss:                   0 kB
AnonHugePages:         0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:  1048576 kB
VmFlags: rd wr mr mw me dc de ht
7f0100000000-7f0100400000 rw-s 00000000 fe:00 77                  /srv/my cache - old.bin (deleted)
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                2052 kB
FilePmdMapped:      2048 kB
VmFlags: rd wr sh mr mw me ms
7f0200000000-7f0200001000 rw-p 00000000 00:00 0                          [anon: x: y-z]
Size:                  4 kB
KernelPageSize:        4 kB
Rss:                   0 kB
VmFlags: rd wr pf io
7f0300000000-7f0300002000 ---p 00000000 00:00 0
Size:                  8 kB
KernelPageSize:        4 kB
Rss:                   0 kB
"""

NUMA_MAPS = """\
563ec7212000 interleave:0-1 heap anon=1449 dirty=1449 active=0 N0=725 N1=724 kernelpagesize_kB=4
7f0000000000 bind:1 file=/anon_hugepage\\040(deleted) huge anon=1 dirty=1 N1=1 kernelpagesize_kB=1048576
7f0100000000 prefer:0 file=/srv/my\\040N7=3\\040old.bin\\040(deleted) mapped=513 N0=513 kernelpagesize_kB=4
7f0200000000 weighted interleave:0,2
7f0300000000 default
"""  # noqa: E501


def mappings() -> list[Mapping]:
    return list(parse_mappings(SMAPS, parse_nodes(NUMA_MAPS)))


# ----------------------------------------------------------------------------------- the text


def test_every_mapping_is_read_with_its_name() -> None:
    assert [mapping.name for mapping in mappings()] == [
        "[heap]",
        "/anon_hugepage (deleted)",
        "/srv/my cache - old.bin (deleted)",
        "[anon: x: y-z]",
        "",
    ]
    assert [m.permissions for m in mappings()] == ["rw-p", "rw-p", "rw-s", "rw-p", "---p"]
    assert [mapping.nbytes for mapping in mappings()] == [
        0x5BE000, 2 * GIB, 4 << 20, 4096, 8192
    ]  # fmt: skip


def test_resident_bytes_are_told_by_page_size() -> None:
    huge = machine().huge_page_size or 0
    heap, pool, file, anonymous, _ = mappings()
    assert heap.bytes_by_page_size == {PAGE: 1700 << 10, huge: 4 << 20}
    assert file.bytes_by_page_size == {PAGE: 4096, huge: 2 << 20}
    assert (pool.page_size, pool.resident, pool.bytes_by_page_size) == (GIB, GIB, {GIB: GIB})
    assert (anonymous.resident, anonymous.bytes_by_page_size) == (0, {})


def test_nodes_are_counted_in_pages_of_the_mapping() -> None:
    heap, pool, file, anonymous, last = mappings()
    assert heap.bytes_by_node == {0: 725 * 4096, 1: 724 * 4096}
    assert pool.bytes_by_node == {1: GIB}
    assert file.bytes_by_node == {0: 513 * 4096}  # the name has a node in it, too
    assert anonymous.bytes_by_node == last.bytes_by_node == {}


def test_policies_are_as_the_kernel_says() -> None:
    assert [mapping.policy for mapping in mappings()] == [
        "interleave:0-1", "bind:1", "prefer:0", "weighted interleave:0,2", "default"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "policy",
    ["default", "local", "prefer (many):0-1", "prefer=static:1", "interleave=relative:0,3"],
)
@pytest.mark.parametrize("rest", ["", " stack anon=3 N0=3", " huge", " file=/a N0=3", " N0=3"])
def test_a_policy_ends_where_the_counts_begin(policy: str, rest: str) -> None:
    (found, by_node), *more = parse_nodes(f"7f00 {policy}{rest}\n").values()
    assert not more
    assert found == policy
    assert by_node == ({0: 3 * PAGE} if "N0" in rest else {})


def test_flags_are_words() -> None:
    assert mappings()[1].flags == ("rd", "wr", "mr", "mw", "me", "dc", "de", "ht")
    assert mappings()[4].flags == ()


def test_maps_alone_gives_addresses_and_names() -> None:
    text = "\n".join(line for line in SMAPS.splitlines() if "-7f" in line or "-56" in line)
    found = list(parse_mappings(text))
    assert [m.name for m in found] == [m.name for m in mappings()]
    assert {m.resident for m in found} == {0}
    assert {m.policy for m in found} == {None}


def test_a_node_without_a_mapping_is_passed_over() -> None:
    first, *_ = parse_mappings(SMAPS, {1: ("default", {0: 4096})})
    assert first.policy is None


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n", "7f00\n", "Rss: 4 kB\n"])
def test_text_that_is_nothing_is_nothing(text: str) -> None:
    assert list(parse_mappings(text)) == []
    assert parse_nodes(text) == {}


# ------------------------------------------------------------------------------- real processes


@pytest.fixture
def region() -> Iterator[int]:
    address = linux.reserve(8 * PAGE, PAGE)
    linux.allow(address, 4 * PAGE)
    linux.advise_no_fork(address, 4 * PAGE)  # a flag of its own keeps it apart from neighbours
    linux.touch(address, 3 * PAGE)
    yield address
    linux.unmap(address, 8 * PAGE)


def test_a_mapping_of_ours_is_found(region: int) -> None:
    (found,) = (m for m in read_mappings() if m.start <= region < m.end)
    assert found.permissions == "rw-p"
    assert found.resident >= 3 * PAGE
    assert sum(found.bytes_by_node.values()) == found.resident
    assert found.policy == "default"
    assert "dc" in found.flags


def test_another_process_is_read() -> None:
    code = "import mmap; m = mmap.mmap(-1, 40 << 20); m[::4096] = b'x' * 10240; print(); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        report = report_process(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(20)
    assert report.mappings[0].resident >= 40 << 20
    assert sum(report.bytes_by_node.values()) >= 40 << 20
    with pytest.raises(ProcessLookupError):
        report_process(child.pid)


def test_a_process_that_has_ended_but_was_not_waited_for_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError, match=f"process {child.pid}"):
            read_mappings(child.pid)
    finally:
        child.wait()


def test_a_process_that_does_not_exist_is_told(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    with pytest.raises(ProcessLookupError, match="there is no process 17"):
        read_mappings(17, root=tmp_path)


def fake(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "proc/17"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return tmp_path


def test_a_process_is_read_from_its_files(tmp_path: Path) -> None:
    root = fake(tmp_path, smaps=SMAPS, numa_maps=NUMA_MAPS)
    assert read_mappings(17, root=root) == mappings()
    assert {m.policy for m in read_mappings(17, nodes=False, root=root)} == {None}


def test_a_kernel_without_numa_maps_names_no_node(tmp_path: Path) -> None:
    found = read_mappings(17, root=fake(tmp_path, smaps=SMAPS))
    assert {m.policy for m in found} == {None}
    assert found[0].resident == 5796 << 10


def test_a_kernel_without_smaps_names_the_mappings(tmp_path: Path) -> None:
    root = fake(tmp_path, maps=SMAPS.splitlines()[0], numa_maps=NUMA_MAPS)
    (found,) = read_mappings(17, root=root)
    assert (found.name, found.policy) == ("[heap]", "interleave:0-1")


def test_a_kernel_thread_has_no_memory(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError, match="kernel thread"):
        read_mappings(17, root=fake(tmp_path, smaps="", maps="", numa_maps=""))


def refuse(monkeypatch: pytest.MonkeyPatch, error: int, name: str) -> None:
    read = Path.read_text

    def refused(path: Path, **options: str) -> str:
        if path.name == name:
            raise OSError(error, os.strerror(error))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", refused)


@pytest.mark.parametrize("name", ["smaps", "numa_maps"])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM])
def test_a_process_of_another_user_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, error: int
) -> None:
    root = fake(tmp_path, smaps=SMAPS, numa_maps=NUMA_MAPS)
    refuse(monkeypatch, error, name)
    with pytest.raises(PermissionError, match=f"process 17 .*{name}.*CAP_SYS_PTRACE") as caught:
        read_mappings(17, root=root)
    assert caught.value.errno == error


@pytest.mark.parametrize("name", ["smaps", "numa_maps"])
def test_a_process_that_ends_meanwhile_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    root = fake(tmp_path, smaps=SMAPS, numa_maps=NUMA_MAPS)
    refuse(monkeypatch, errno.ESRCH, name)
    with pytest.raises(ProcessLookupError, match="there is no process 17"):
        read_mappings(17, root=root)


# ----------------------------------------------------------------------------------- the report


def report() -> ProcessReport:
    found = sorted(mappings(), key=lambda mapping: -mapping.resident)
    return ProcessReport(17, tuple(found))


def test_a_report_begins_with_the_largest(tmp_path: Path) -> None:
    found = report_process(17, fake(tmp_path, smaps=SMAPS, numa_maps=NUMA_MAPS))
    assert [m.start for m in found.mappings] == [
        0x7F0000000000, 0x563EC7212000, 0x7F0100000000, 0x7F0300000000, 0x7F0200000000
    ]  # fmt: skip


def test_a_report_adds_up() -> None:
    huge = machine().huge_page_size or 0
    assert report().bytes_by_node == {0: 1238 * 4096, 1: GIB + 724 * 4096}
    assert report().bytes_by_page_size == {PAGE: 1704 << 10, huge: 6 << 20, GIB: GIB}


def test_a_table_shows_mappings_and_totals() -> None:
    lines = report().table().splitlines()
    assert len(lines) == 1 + 5 + 1 + 4
    assert lines[1].split("  ")[0] == "7f0000000000-7f0080000000"
    assert "bind:1" in lines[1]
    assert lines[1].endswith("/anon_hugepage (deleted); hugetlb; not in forked children")
    assert "0: 2.83 MiB, 1: 2.83 MiB" in lines[2]
    assert "cannot be pinned (pf); cannot be pinned (io)" in "\n".join(lines)
    assert "node 0: 4.84 MiB, node 1: 1 GiB" in lines[-3]
    assert lines[-1] == "flags         4 KiB of address space cannot be pinned"


def test_a_table_may_be_cut_and_says_what_is_left() -> None:
    lines = report().table(2).splitlines()
    assert len(lines) == 1 + 2 + 1 + 1 + 4
    assert lines[3] == "and 3 more with 2 MiB resident"


def test_a_table_without_nodes_says_so() -> None:
    text = ProcessReport(17, tuple(parse_mappings(SMAPS.partition("7f0000000000")[0]))).table()
    assert "on nodes      not known" in text
    assert "cannot be pinned" not in text


def test_a_report_for_programs_has_the_same() -> None:
    found = report().as_json(1)
    assert found["bytes_by_node"] == report().bytes_by_node
    assert found["mapping_count"] == 5
    (mapping,) = found["mappings"]
    assert (mapping["address"], mapping["nbytes"]) == (0x7F0000000000, 2 * GIB)
    assert mapping["policy"] == "bind:1"
