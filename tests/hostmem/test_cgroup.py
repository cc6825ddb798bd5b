"""The memory limit of control groups, read from hierarchies of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostmem.cgroup import memory_limit

MIB, GIB = 1 << 20, 1 << 30

# Lines of mountinfo: id, parent, device, root in the hierarchy, mount point, ... - type, source,
# options (proc_pid_mountinfo(5)).
V2_MOUNT = "31 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "36 32 0:30 / /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory"
V1_UNLIMITED = "9223372036854771712"

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
