"""A container that forbids placement calls, by a real filter in a child process."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import Any

import pytest

from hostmem._sys import linux

pytestmark = pytest.mark.seccomp

# A filter is a program of the classic BPF (seccomp(2)): load the number of the call, which is the
# first word of struct seccomp_data, answer EPERM for those named, allow the rest. It is for life.
FILTER = """
import ctypes, json, struct, sys
from hostmem import HostMem, PlacementRefusedError, capabilities, placement_of

LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000

def install(program):
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) == 0, ctypes.get_errno()

numbers = [int(word) for word in sys.argv[1:]]
"""

FORBIDDEN = """
program = [(LOAD_WORD, 0, 0, 0)]
for left, number in zip(range(len(numbers), 0, -1), numbers):
    program.append((JUMP_IF_EQUAL, left, 0, number))  # over the rest and the ALLOW
install([*program, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | 1)])  # EPERM

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


def run(code: str, *arguments: int) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", FILTER + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    result: dict[str, Any] = json.loads(child.stdout)
    return result


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process saw to which mbind, get_mempolicy and move_pages answer EPERM."""
    if not linux._SYSCALLS:
        pytest.skip("no numbers of these calls on this machine")
    return run(FORBIDDEN, *linux._SYSCALLS.values())


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


# Loads the low words of the call's number and of its third argument, the advice.
WITHOUT_POPULATE = """
madvise, EINVAL, POPULATE_WRITE = numbers[0], 22, 23
install([
    (LOAD_WORD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 2, madvise),
    (LOAD_WORD, 0, 0, 32), (JUMP_IF_EQUAL, 1, 0, POPULATE_WRITE),
    (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EINVAL),
])
with HostMem("4MiB", device="cpu", commit_unit="1MiB", wait=True) as memory:
    found = {"resident": memory.placement().resident}
    memory.view()[:] = 7
    memory.release(1 << 20, 1 << 20)
    memory.recommit(1 << 20, 1 << 20)
    found["sum"] = int(memory.view().sum())
found["capability"] = [bool(capabilities().populate_write), capabilities().populate_write.reason]
json.dump(found, sys.stdout)
"""


def test_a_kernel_that_does_not_know_populate_is_touched_instead() -> None:
    """As gVisor and kernels before 5.14 answer."""
    number = {"x86_64": 28, "aarch64": 233}.get(platform.machine())
    if number is None:
        pytest.skip("no number of madvise on this machine")
    found = run(WITHOUT_POPULATE, number)
    assert found["resident"] == 4 << 20
    assert found["sum"] == 7 * (3 << 20)
    assert found["capability"] == [False, "the kernel does not know the advice (Linux 5.14 has it)"]
