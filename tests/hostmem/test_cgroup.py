"""The memory limit of control groups, read from hierarchies of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostmem.cgroup import (
    MemoryGroup,
    hugetlb_limits,
    memory_groups,
    memory_limit,
    pressure_file,
)
from tests.roots import V1_MOUNT, V1_UNLIMITED, V2_MOUNT

MIB, GIB = 1 << 20, 1 << 30

OTHER_MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
33 32 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
27 1 254:0 / / rw - ext4 /dev/vda rw
"""


def lay_out(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """Write a process's proc files, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    (root / "proc/self/mountinfo").write_text(OTHER_MOUNTS + mounts + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


# --------------------------------------------------------------------------------- version 2


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_v2_limits_by_max_and_by_high(tmp_path: Path, name: str) -> None:
    other = "memory.high" if name == "memory.max" else "memory.max"
    root = lay_out(tmp_path, "0::/job", V2_MOUNT, {f"job/{name}": "1048576", f"job/{other}": "max"})
    assert memory_limit(root) == MIB


def test_v2_the_lower_of_max_and_high_counts(tmp_path: Path) -> None:
    files = {"job/memory.max": str(2 * GIB), "job/memory.high": str(GIB)}
    assert memory_limit(lay_out(tmp_path, "0::/job", V2_MOUNT, files)) == GIB


def test_v2_no_limit_is_none(tmp_path: Path) -> None:
    files = {"job/memory.max": "max", "job/memory.high": "max"}
    assert memory_limit(lay_out(tmp_path, "0::/job", V2_MOUNT, files)) is None


def test_v2_a_limit_of_no_bytes_is_a_limit(tmp_path: Path) -> None:
    assert memory_limit(lay_out(tmp_path, "0::/job", V2_MOUNT, {"job/memory.max": "0"})) == 0


@pytest.mark.parametrize("lowest", ["a", "a/b", "a/b/c"])
def test_v2_the_lowest_of_the_ancestors_counts(tmp_path: Path, lowest: str) -> None:
    groups = ["a", "a/b", "a/b/c"]
    files = {f"{g}/memory.max": str(MIB if g == lowest else GIB) for g in groups}
    assert memory_limit(lay_out(tmp_path, "0::/a/b/c", V2_MOUNT, files)) == MIB


def test_v2_other_groups_do_not_count(tmp_path: Path) -> None:
    files = {"a/memory.max": str(GIB), "b/memory.max": "1", "a/below/memory.max": "1"}
    assert memory_limit(lay_out(tmp_path, "0::/a", V2_MOUNT, files)) == GIB


def test_v2_the_root_group_has_no_limit_files(tmp_path: Path) -> None:
    assert memory_limit(lay_out(tmp_path, "0::/", V2_MOUNT, {"cgroup.procs": "1"})) is None


def test_v2_in_a_namespace_the_containers_group_is_the_root(tmp_path: Path) -> None:
    root = lay_out(tmp_path, "0::/", V2_MOUNT, {"memory.max": str(GIB), "memory.high": "max"})
    assert memory_limit(root) == GIB


def test_v2_a_part_of_the_hierarchy_may_be_mounted(tmp_path: Path) -> None:
    # Without a namespace: the container's group is mounted at the top, and named in full.
    mount = V2_MOUNT.replace(" / /sys", " /docker/abc /sys")
    files = {"memory.max": str(GIB), "inside/memory.max": str(MIB)}
    root = lay_out(tmp_path, "0::/docker/abc/inside", mount, files)
    assert memory_limit(root) == MIB


def test_v2_a_group_outside_the_mounted_part_has_the_limits_of_its_top(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace(" / /sys", " /docker/abc /sys")
    # The group of the same name inside it is another one.
    files = {"memory.max": str(GIB), "system.slice/memory.max": "1"}
    assert memory_limit(lay_out(tmp_path, "0::/system.slice", mount, files)) == GIB


@pytest.mark.parametrize("group", ["/../other", "/.."])
def test_v2_a_group_outside_the_namespace_has_the_limits_of_its_top(
    tmp_path: Path, group: str
) -> None:
    files = {"memory.max": str(GIB)}
    root = lay_out(tmp_path, f"0::{group}", V2_MOUNT, files)
    (root / "sys/fs/other").mkdir()
    (root / "sys/fs/other/memory.max").write_text("1\n")
    assert memory_limit(root) == GIB


def test_v2_a_hierarchy_that_is_mounted_twice_counts_once(tmp_path: Path) -> None:
    root = lay_out(tmp_path, "0::/job", f"{V2_MOUNT}\n{V2_MOUNT}", {"job/memory.max": "5"})
    top = f"{root}/sys/fs/cgroup"
    assert [group.folder for group in memory_groups(root)] == [top, f"{top}/job"]


# --------------------------------------------------------------------------------- version 1


def test_v1_limits_by_limit_in_bytes(tmp_path: Path) -> None:
    files = {"memory/job/memory.limit_in_bytes": str(GIB)}
    root = lay_out(tmp_path, "5:memory:/job\n3:cpu:/other", V1_MOUNT, files)
    assert memory_limit(root) == GIB


@pytest.mark.parametrize("unlimited", [V1_UNLIMITED, "9223372036854710272"], ids=["4K", "64K"])
def test_v1_no_limit_is_none(tmp_path: Path, unlimited: str) -> None:
    # The largest multiple of a page that fits: it depends on the page.
    files = {"memory/job/memory.limit_in_bytes": unlimited}
    assert memory_limit(lay_out(tmp_path, "5:memory:/job", V1_MOUNT, files)) is None


def test_v1_the_lowest_of_the_ancestors_counts(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/a/memory.limit_in_bytes": str(MIB),
        "memory/a/b/memory.limit_in_bytes": str(GIB),
    }
    assert memory_limit(lay_out(tmp_path, "5:memory:/a/b", V1_MOUNT, files)) == MIB


def test_v1_the_controller_may_share_its_hierarchy(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace("/memory rw", "/cpu,memory rw").replace("rw,memory", "rw,cpu,memory")
    files = {"cpu,memory/job/memory.limit_in_bytes": str(GIB)}
    assert memory_limit(lay_out(tmp_path, "5:cpu,memory:/job", mount, files)) == GIB


def test_v1_in_docker_without_a_namespace_the_group_is_mounted_at_the_top(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/abc /sys")
    files = {"memory/memory.limit_in_bytes": str(GIB)}
    assert memory_limit(lay_out(tmp_path, "5:memory:/docker/abc", mount, files)) == GIB


def test_v1_another_controllers_group_does_not_count(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/job/memory.limit_in_bytes": "1", "memory/memory.limit_in_bytes": "5"}
    root = lay_out(tmp_path, "4:cpu,cpuacct:/job\n5:memory:/", V1_MOUNT, files)
    assert memory_limit(root) == 5


def test_v1_ancestors_outside_the_container_limit_it(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /pod/abc /sys")
    files = {
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/memory.stat": f"cache 0\nhierarchical_memory_limit {MIB}",
    }
    assert memory_limit(lay_out(tmp_path, "5:memory:/pod/abc", mount, files)) == MIB


def test_v1_a_limit_that_statistics_repeat_is_listed_once(tmp_path: Path) -> None:
    text = f"hierarchical_memory_limit {MIB}"
    group = MemoryGroup(1, str(tmp_path), orphan=True)
    group_with(tmp_path, 1, memory_limit_in_bytes=MIB, memory_stat=text)
    assert list(group.limits()) == [("memory.limit_in_bytes", MIB)]


def test_v1_the_root_of_the_hierarchy_has_no_ancestors(tmp_path: Path) -> None:
    files = {
        "memory/release_agent": "",
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/memory.stat": "hierarchical_memory_limit 1",
    }
    assert memory_limit(lay_out(tmp_path, "5:memory:/", V1_MOUNT, files)) is None


def test_a_slice_with_a_backslash_in_its_name_is_found(tmp_path: Path) -> None:
    # systemd writes "-" inside a name as "\\x2d"; mountinfo writes a backslash as its octal code.
    mount = V1_MOUNT.replace(" / /sys", r" /my\134x2djob.slice /sys")
    files = {
        "memory/memory.limit_in_bytes": str(GIB),
        "memory/inside/memory.limit_in_bytes": str(MIB),
    }
    root = lay_out(tmp_path, r"5:memory:/my\x2djob.slice/inside", mount, files)
    assert memory_limit(root) == MIB


# --------------------------------------------------------------------------- both, and neither

UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def test_hybrid_the_memory_controller_is_where_it_is(tmp_path: Path) -> None:
    # systemd's hybrid: memory in version 1, a version 2 hierarchy without controllers beside it.
    files = {
        "memory/job/memory.limit_in_bytes": str(GIB),
        "unified/user.slice/cgroup.procs": "1",
    }
    root = lay_out(
        tmp_path,
        "5:memory:/job\n1:name=systemd:/x\n0::/user.slice",
        f"{V1_MOUNT}\n{UNIFIED}",
        files,
    )
    assert memory_limit(root) == GIB


def test_hybrid_the_least_of_both_versions_counts(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(GIB),
        "unified/user.slice/memory.max": str(MIB),
    }
    root = lay_out(tmp_path, "5:memory:/job\n0::/user.slice", f"{V1_MOUNT}\n{UNIFIED}", files)
    assert memory_limit(root) == MIB


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert memory_limit(lay_out(tmp_path, "", "", {})) is None


def test_control_groups_that_are_not_mounted_are_no_limit(tmp_path: Path) -> None:
    assert memory_limit(lay_out(tmp_path, "5:memory:/job\n0::/job", "", {})) is None


@pytest.mark.parametrize(
    ("cgroup", "mounts"),
    [
        ("nonsense", f"{V1_MOUNT}\n{V2_MOUNT}"),
        ("5:memory", V1_MOUNT),
        ("::\n\n5:memory:/job", "nonsense\n - \n1 2 3 - cgroup\n1 2 3 4 5 - cgroup cgroup"),
    ],
)
def test_nonsense_is_no_limit(tmp_path: Path, cgroup: str, mounts: str) -> None:
    files = {"memory/job/memory.limit_in_bytes": "1", "memory/job/memory.stat": "x"}
    files |= {"memory.max": "1"}
    assert memory_limit(lay_out(tmp_path, cgroup, mounts, files)) is None


@pytest.mark.parametrize("text", ["", "nonsense", "-1", "1.5"])
def test_a_limit_that_is_no_number_is_none(tmp_path: Path, text: str) -> None:
    files = {"memory/job/memory.limit_in_bytes": text, "memory/memory.stat": text}
    assert memory_limit(lay_out(tmp_path, "5:memory:/job", V1_MOUNT, files)) is None


# ------------------------------------------------------------------------- what is in use, and met


def group_with(folder: Path, version: int, **files: object) -> MemoryGroup:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")
    return MemoryGroup(version, str(folder), orphan=False)


def test_v1_page_cache_is_not_in_use_except_what_is_to_be_written(tmp_path: Path) -> None:
    # The lists hold no tmpfs; "cache" does. The group's own figures are without those below it.
    stat = "cache 900\nactive_file 1\ninactive_file 2\ndirty 3\ntotal_cache 900\n"
    stat += "total_active_file 100\ntotal_inactive_file 200\ntotal_dirty 30\ntotal_writeback 4\n"
    group = group_with(tmp_path, 1, memory_usage_in_bytes=1000, memory_stat=stat)
    assert group.taken() == 1000 - (100 + 200 - 30 - 4)


def test_v2_page_cache_and_slabs_are_not_in_use_except_what_is_to_be_written(
    tmp_path: Path,
) -> None:
    stat = "file 900\nshmem 500\nactive_file 100\ninactive_file 200\nslab_reclaimable 50\n"
    stat += "file_dirty 30\nfile_writeback 4\nslab 60"
    group = group_with(tmp_path, 2, memory_current=1000, memory_stat=stat)
    assert group.taken() == 1000 - (100 + 200 + 50 - 30 - 4)


@pytest.mark.parametrize("version", [1, 2])
def test_without_figures_all_of_the_usage_is_in_use(tmp_path: Path, version: int) -> None:
    group = group_with(tmp_path, version, memory_current=1000, memory_usage_in_bytes=1000)
    assert group.taken() == 1000


def test_counters_that_lag_behind_make_no_nonsense(tmp_path: Path) -> None:
    more_dirty = group_with(
        tmp_path, 2, memory_current=1000, memory_stat="inactive_file 5\nfile_dirty 500"
    )
    assert more_dirty.taken() == 1000
    more_cache = group_with(tmp_path, 2, memory_current=10, memory_stat="inactive_file 500")
    assert more_cache.taken() == 0


def test_v2_hits_are_counted_by_limit(tmp_path: Path) -> None:
    group = group_with(tmp_path, 2, memory_events="low 9\nhigh 3\nmax 4\noom 0\noom_kill 0")
    assert group.hits() == {"memory.high": 3, "memory.max": 4}


def test_v1_hits_are_counted(tmp_path: Path) -> None:
    assert group_with(tmp_path, 1, memory_failcnt=7).hits() == {"memory.limit_in_bytes": 7}


@pytest.mark.parametrize("version", [1, 2])
def test_hits_that_cannot_be_read_are_not_zero(tmp_path: Path, version: int) -> None:
    assert group_with(tmp_path, version).hits() == {}


def test_stall_figures_are_of_the_own_group(tmp_path: Path) -> None:
    files = {"job/cgroup.type": "domain", "job/memory.pressure": "", "memory.pressure": ""}
    root = lay_out(tmp_path, "5:memory:/other\n0::/job", f"{V1_MOUNT}\n{V2_MOUNT}", files)
    assert pressure_file(root) == f"{root}/sys/fs/cgroup/job/memory.pressure"


def test_the_root_is_no_own_group(tmp_path: Path) -> None:
    files = {"memory.pressure": "", "cgroup.procs": "1"}
    assert pressure_file(lay_out(tmp_path, "0::/", V2_MOUNT, files)) is None


def test_a_containers_root_is_its_own_group(tmp_path: Path) -> None:
    files = {"memory.pressure": "", "cgroup.type": "domain"}
    root = lay_out(tmp_path, "0::/", V2_MOUNT, files)
    assert pressure_file(root) == f"{root}/sys/fs/cgroup/memory.pressure"


# ---------------------------------------------------------------------------- huge pages' limits


@pytest.mark.parametrize(
    ("size", "name"), [(64 << 10, "64KB"), (2 * MIB, "2MB"), (GIB, "1GB"), (16 * GIB, "16GB")]
)
def test_v2_limits_huge_pages_by_size(tmp_path: Path, size: int, name: str) -> None:
    files = {
        f"job/hugetlb.{name}.max": str(4 * GIB),
        f"job/hugetlb.{name}.current": str(GIB),
        "job/hugetlb.3MB.max": "1",
        f"hugetlb.{name}.max": "max",
    }
    root = lay_out(tmp_path, "0::/job", V2_MOUNT, files)
    expected = (f"hugetlb.{name}.max of {root}/sys/fs/cgroup/job", 4 * GIB, GIB)
    assert list(hugetlb_limits(size, root)) == [expected]


def test_v1_limits_huge_pages_in_a_hierarchy_of_its_own(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace("/memory", "/hugetlb").replace("rw,memory", "rw,hugetlb")
    files = {
        "hugetlb/hugetlb.2MB.limit_in_bytes": V1_UNLIMITED,
        "hugetlb/job/hugetlb.2MB.limit_in_bytes": str(4 * MIB),
        "hugetlb/job/hugetlb.2MB.usage_in_bytes": str(2 * MIB),
        "memory/hugetlb.2MB.limit_in_bytes": "1",
    }
    root = lay_out(tmp_path, "7:hugetlb:/job\n5:memory:/", f"{V1_MOUNT}\n{mount}", files)
    folder = f"{root}/sys/fs/cgroup/hugetlb/job"
    expected = (f"hugetlb.2MB.limit_in_bytes of {folder}", 4 * MIB, 2 * MIB)
    assert list(hugetlb_limits(2 * MIB, root)) == [expected]


# ------------------------------------------------------------------------------ this machine

CHILD = "import sys; sys.stdin.readline(); from hostmem.cgroup import memory_limit; "
CHILD += "print(memory_limit())"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of ours below this process's own, with a limit of 300 MiB."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, limit = Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
            break
        if not controllers:
            parent, limit = Path("/sys/fs/cgroup" + path), "memory.max"
    child = parent / f"hostmem-test-{os.getpid()}"
    child.mkdir()
    (child / limit).write_text(str(300 * MIB))
    yield child
    child.rmdir()


@pytest.mark.cgroup
def test_a_process_in_a_real_group_sees_its_limit(group: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        (group / "cgroup.procs").write_text(str(child.pid))
        answer, _ = child.communicate("go\n", timeout=30)
    assert answer.strip() == str(300 * MIB)
