"""A fill inside a control group that allows less than was asked: an error, and the process lives.

In groups of either version; a child that the kernel kills, or holds up for ever because it is over
``memory.high``, is a failed test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostmem.conftest import Child

pytestmark = pytest.mark.cgroup

GROUP = 256 << 20  # bytes that the group allows
LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}  # by version

Group = Callable[[str], Path]


@pytest.fixture
def version() -> int:
    """Version of the control groups that have the memory controller."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return 1 if any("memory" in line.split(":")[1].split(",") for line in lines) else 2


@pytest.fixture
def group(version: int) -> Iterator[Group]:
    """Make a group below this process's own, in which one limit is set."""
    made: list[Path] = []

    def make(limit: str) -> Path:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if version == 1 and "memory" in controllers.split(","):
                parent = Path("/sys/fs/cgroup/memory" + path)
            elif version == 2 and not controllers:
                parent = Path("/sys/fs/cgroup" + path)
        made.append(parent / f"hostmem-limited-{os.getpid()}-{limit}")
        made[-1].mkdir()
        (made[-1] / limit).write_text(str(GROUP))
        return made[-1]

    yield make
    for folder in made:
        folder.rmdir()


FILL = """
    from pathlib import Path

    Path("{group}/cgroup.procs").write_text("0")
    from hostmem import HostMem, HostOOMError

    with HostMem("512MiB", device="cpu") as memory:
        try:
            memory.wait_usable(memory.size)
        except HostOOMError as error:
            print("refused by {limit}" if "{limit}" in str(error) else error)
        print(64 << 20 < memory.committed < {bytes}, type(memory.failure).__name__)
        memory.view(0, memory.committed)[:] = 7
        # Once more is allowed it goes on.
        Path("{group}/{limit}").write_text(str(1 << 30))
        memory.resize(memory.size)
        memory.wait_usable(memory.size)
        print(memory.committed == memory.size)
"""


def test_a_fill_that_its_group_does_not_allow_is_an_error(
    child: Child, group: Group, version: int
) -> None:
    for limit in LIMITS[version]:
        folder = group(limit)
        done = child(FILL.format(group=folder, limit=limit, bytes=GROUP))
        assert done.returncode == 0, f"{limit}: {done.stderr}"
        said = [f"refused by {limit}", "True HostOOMError", "True"]
        assert done.stdout.splitlines() == said
        if version == 2:
            lines = (folder / "memory.events").read_text().splitlines()
            events = {name: int(count) for name, count in map(str.split, lines)}
            # Nobody was held up, nor killed.
            assert (events["high"], events["oom"], events["oom_kill"]) == (0, 0, 0)
