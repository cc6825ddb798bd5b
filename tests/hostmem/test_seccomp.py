"""A container that forbids placement calls, by a real filter in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hostmem._sys import linux

pytestmark = pytest.mark.seccomp

# The filter is a program of the classic BPF (seccomp(2)): load the number of the call, which is the
# first word of struct seccomp_data, answer EPERM for those named, allow the rest. It is for life.
CHILD = """
import ctypes, json, struct, sys
from hostmem import HostMem, PlacementRefusedError, capabilities, placement_of

LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO_EPERM = 0x7FFF0000, 0x00050001
numbers = [int(word) for word in sys.argv[1:]]
program = [(LOAD_WORD, 0, 0, 0)]
for left, number in zip(range(len(numbers), 0, -1), numbers):
    program.append((JUMP_IF_EQUAL, left, 0, number))  # over the rest and the ALLOW
program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO_EPERM)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0, ctypes.get_errno()

found = {}
with HostMem("4MiB", device="cpu", numa_node=0, wait=True) as memory:
    memory.view()[:] = 7
    found["sum"] = int(memory.view().sum())
    placement = memory.placement()
    found |= {"asked": placement.asked, "accepted": placement.accepted, "node": memory.node}
    found |= {"method": placement.method, "bytes_by_node": placement.bytes_by_node}
    found["describe"] = memory.describe()
try:
    HostMem("4MiB", device="cpu", numa_node=0, allow_remote_numa_fallback=False)
except PlacementRefusedError as error:
    found["strict"] = str(error)
found["of_others"] = placement_of(bytearray(100000)).method
found["capabilities"] = {name: [bool(c), c.reason] for name, c in capabilities()}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process saw to which mbind, get_mempolicy and move_pages answer EPERM."""
    if not linux._SYSCALLS:
        pytest.skip("no numbers of these calls on this machine")
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, *map(str, linux._SYSCALLS.values())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    result: dict[str, Any] = json.loads(child.stdout)
    return result


def test_a_preferred_memory_works_and_is_placed_by_first_touch(found: dict[str, Any]) -> None:
    assert found["sum"] == 7 * (4 << 20)
    assert found["node"] == 0
    assert found["asked"] == "preferred node 0"
    assert "EPERM" in found["accepted"]
    assert found["accepted"].endswith("by first touch of threads on the node")


def test_a_memory_describes_how_it_was_placed(found: dict[str, Any]) -> None:
    assert "first touch" in found["describe"]


def test_a_strict_memory_is_refused_with_the_remedy(found: dict[str, Any]) -> None:
    assert "strict placement on bind node 0" in found["strict"]
    assert "EPERM" in found["strict"]
    assert "CAP_SYS_NICE" in found["strict"]


@pytest.mark.parametrize("whose", ["method", "of_others"])
def test_places_are_read_from_numa_maps(found: dict[str, Any], whose: str) -> None:
    assert found[whose].startswith("numa_maps, totals of")
    assert "move_pages" in found[whose]
    assert "EPERM" in found[whose]
    assert sum(found["bytes_by_node"].values()) >= 4 << 20


def test_capabilities_name_what_is_forbidden(found: dict[str, Any]) -> None:
    for name in ("set_policy", "get_policy", "page_nodes"):
        available, reason = found["capabilities"][name]
        assert not available
        assert "EPERM" in reason
