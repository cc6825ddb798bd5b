"""A node whose memory is nearly used up: spill where that is allowed, an error where not.

In children, which the kernel ends first if it must end somebody: a child that is killed is a
failed test.
"""

from __future__ import annotations

import pytest

from hostmem import Node, machine
from tests.hostmem.conftest import Child

pytestmark = pytest.mark.numa2

LARGEST = 2 << 30  # bytes: filling a larger node takes too long for a test


@pytest.fixture
def node() -> Node:
    """A node with memory and CPUs that is small enough to be filled."""
    found = [n for n in machine().nodes if n.cpus and 0 < n.memory_total <= LARGEST]
    if not found:
        pytest.skip(f"no node has {LARGEST >> 30} GiB or less")
    return found[-1]  # the first one holds what the system itself uses


# Uses up the node's memory but for 160 MiB, without the library.
NEARLY_FULL = """
    from pathlib import Path

    Path("/proc/self/oom_score_adj").write_text("1000")
    from hostmem import HostMem, HostOOMError, StaticHostMem, placement_of
    from hostmem._sys import linux

    MIB = 1 << 20
    asked = 256 * MIB
    words = Path("/sys/devices/system/node/node{node}/meminfo").read_text().split()
    free = int(words[words.index("MemFree:") + 1]) * 1024
    used = (free - 160 * MIB) // (2 * MIB) * (2 * MIB)
    address = linux.reserve(used, 2 * MIB)
    linux.allow(address, used)
    linux.set_policy(address, used, linux.Policy.BIND, [{node}])
    linux.populate(address, used)
"""

PREFERRED = """
    with HostMem(
        asked, device="cpu", numa_node={node}, page_mode="{page_mode}", wait=True
    ) as memory:
        view = memory.view()
        view[:] = 7
        found = memory.placement()
        print(found.accepted, sum(found.bytes_by_node.values()) // MIB)
        print(found.bytes_by_node[{node}] > 16 * MIB, len(found.bytes_by_node) > 1)
        del view
"""

STATIC = """
    with StaticHostMem(asked, device="cpu", numa_node={node}) as memory:
        found = placement_of(memory.address, asked).bytes_by_node
        print(sum(found.values()) // MIB, len(found) > 1)
"""

STRICT = """
    with HostMem(
        asked,
        device="cpu",
        numa_node={node},
        allow_remote_numa_fallback=False,
        page_mode="{page_mode}",
    ) as memory:
        try:
            memory.wait_usable(asked)
        except HostOOMError as error:
            print("refused, and alive")
        print(0 < memory.committed < asked, type(memory.failure).__name__)
        memory.view(0, memory.committed)[:] = 7
        found = memory.placement().bytes_by_node
        print(list(found) == [{node}], memory.committed <= found[{node}] < asked)
        # Once there is room it goes on.
        linux.unmap(address, used)
        memory.resize(asked)
        memory.wait_usable(asked)
        print(memory.placement().bytes_by_node == {{{node}: asked}})
"""


def run(child: Child, code: str, node: int, page_mode: str = "small") -> list[str]:
    done = child((NEARLY_FULL + code).format(node=node, page_mode=page_mode))
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    return done.stdout.splitlines()


pages = pytest.mark.parametrize("page_mode", ["small", "huge"])


@pages
def test_memory_that_prefers_a_full_node_spills(child: Child, node: Node, page_mode: str) -> None:
    said = run(child, PREFERRED, node.number, page_mode)
    assert said == [f"preferred node {node.number} 256", "True True"]


def test_static_memory_that_prefers_a_full_node_spills(child: Child, node: Node) -> None:
    assert run(child, STATIC, node.number) == ["256 True"]


@pages
def test_memory_bound_to_a_full_node_is_an_error_and_no_end(
    child: Child, node: Node, page_mode: str
) -> None:
    assert run(child, STRICT, node.number, page_mode) == [
        "refused, and alive",
        "True HostOOMError",
        "True True",
        "True",
    ]
