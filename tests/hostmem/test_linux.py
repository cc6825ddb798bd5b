"""The kernel's calls as functions: what they do, and what their errors say."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem._sys import linux
from hostmem._sys.linux import Policy
from hostmem.errors import HostOOMError
from hostmem.testing import FaultPlan

PAGE = os.sysconf("SC_PAGESIZE")
Bytes = NDArray[np.uint8]


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def read(address: int, nbytes: int) -> Bytes:
    """Read memory by the kernel: EFAULT where it cannot be read."""
    result = np.zeros(nbytes, np.uint8)
    linux.copy(u64(address_of(result)), u64(address), u64(nbytes))
    return result


def write(address: int, data: Bytes) -> None:
    linux.copy(u64(address), u64(address_of(data)), u64(len(data)))


def resident(address: int, pages: int) -> list[bool]:
    addresses = np.arange(address, address + pages * PAGE, PAGE, dtype=np.uint64)
    return [bool(status >= 0) for status in linux.node_of_pages(addresses)]


def vm_flags(address: int) -> set[str]:
    """Return the kernel's two-letter flags of the mapping that begins at an address."""
    text = Path("/proc/self/smaps").read_text()
    match = re.search(rf"^{address:x}-.*?^VmFlags: (.*?)$", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no mapping begins at {address:#x}"
    return set(match[1].split())


@pytest.fixture
def reserved() -> Iterator[int]:
    """Sixteen reserved pages between two that stay so, and merge with no neighbour: the address."""
    address = linux.reserve(18 * PAGE, PAGE)
    yield address + PAGE
    linux.unmap(address, 18 * PAGE)


@pytest.fixture
def memory(reserved: int) -> int:
    """The same, accessible."""
    linux.allow(reserved, 16 * PAGE)
    linux.advise_small(reserved, 16 * PAGE)
    return reserved


# ------------------------------------------------------------------------------------ errors

RANGE_CALLS: dict[str, Callable[[int], object]] = {
    "munmap": lambda a: linux.unmap(a, 2 * PAGE),
    "mprotect": lambda a: linux.allow(a, 2 * PAGE),
    "madvise(MADV_POPULATE_WRITE)": lambda a: linux.populate(a, 2 * PAGE),
    "madvise(MADV_DONTNEED)": lambda a: linux.discard(a, 2 * PAGE),
    "madvise(MADV_DONTFORK)": lambda a: linux.advise_no_fork(a, 2 * PAGE),
    "madvise(MADV_HUGEPAGE)": lambda a: linux.advise_huge(a, 2 * PAGE),
    "madvise(MADV_NOHUGEPAGE)": lambda a: linux.advise_small(a, 2 * PAGE),
    "mbind": lambda a: linux.set_policy(a, 2 * PAGE, Policy.BIND, (0,)),
}
OTHER_CALLS: dict[str, Callable[[int], object]] = {
    "mmap": lambda a: linux.reserve(2 * PAGE, PAGE),
    "get_mempolicy": linux.get_policy,
    "move_pages": lambda a: linux.node_of_pages(u64(a)),
    "ioctl": lambda a: linux.resident_by_page_kind(a, PAGE),
    "process_vm_readv": lambda a: linux.copy(u64(a), u64(a + PAGE), u64(8)),
    "preadv": lambda a: linux.preadv(0, linux.iovecs(u64(a), 8), 0),
    "pwritev": lambda a: linux.pwritev(0, linux.iovecs(u64(a), 8), 0),
}


@pytest.mark.parametrize("call", RANGE_CALLS | OTHER_CALLS)
def test_an_error_carries_its_errno_and_names_its_call(call: str, memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail(call, errno.EFAULT)
        with pytest.raises(OSError, match=call.partition("(")[0]) as caught:
            (RANGE_CALLS | OTHER_CALLS)[call](memory)
    assert caught.value.errno == errno.EFAULT
    assert "Bad address" in str(caught.value)


@pytest.mark.parametrize("call", RANGE_CALLS)
def test_the_error_of_a_range_names_the_range(call: str, memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail(call, errno.EFAULT)
        expected = re.escape(f"{call} of {2 * PAGE} bytes at {memory:#x}")
        with pytest.raises(OSError, match=rf"{expected}: Bad address \(EFAULT\)"):
            RANGE_CALLS[call](memory)


@pytest.mark.parametrize("call", ["mmap", "mprotect", "madvise(MADV_POPULATE_WRITE)"])
def test_no_memory_is_an_error_of_its_own(call: str, memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail(call, errno.ENOMEM)
        with pytest.raises(HostOOMError) as caught:
            (RANGE_CALLS | OTHER_CALLS)[call](memory)
    assert caught.value.nbytes == 2 * PAGE
    assert caught.value.call == call.partition("(")[0]


@pytest.mark.parametrize("call", RANGE_CALLS | OTHER_CALLS)
def test_a_plan_sees_the_call(call: str, memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail(call, errno.EFAULT)
        with pytest.raises(OSError, match="Bad address"):
            (RANGE_CALLS | OTHER_CALLS)[call](memory)
        assert [name for name, _ in plan.log] == [call]


# ----------------------------------------------------------------------------- address space


@pytest.mark.parametrize("alignment", [PAGE, 16 * PAGE, 2 << 20, 1 << 30])
def test_a_reservation_is_aligned(alignment: int) -> None:
    address = linux.reserve(3 * PAGE, alignment)
    assert address % alignment == 0
    linux.unmap(address, 3 * PAGE)


def test_alignment_takes_no_address_space_beside_the_reservation() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    before = mapped()
    reservations = [linux.reserve(PAGE, 1 << 30) for _ in range(4)]
    assert mapped() - before < 16 << 20  # none kept of the GiB that it was aligned in
    for address in reservations:
        linux.unmap(address, PAGE)


def test_a_reservation_cannot_be_touched(reserved: int) -> None:
    with pytest.raises(OSError, match="process_vm_readv") as caught:
        read(reserved, 1)
    assert caught.value.errno == errno.EFAULT


def test_a_reservation_is_charged_nothing(reserved: int) -> None:
    linux.allow(reserved, 16 * PAGE)
    assert "nr" in vm_flags(reserved)  # no reserve accounting


def test_more_than_the_address_space_is_no_memory() -> None:
    with pytest.raises(HostOOMError, match="ask for a smaller capacity"):
        linux.reserve(1 << 60, PAGE)


def test_access_comes_and_goes(reserved: int) -> None:
    linux.allow(reserved, 2 * PAGE)
    write(reserved, np.full(2 * PAGE, 7, np.uint8))
    linux.deny(reserved + PAGE, PAGE)
    assert read(reserved, PAGE).tolist() == [7] * PAGE
    with pytest.raises(OSError, match="process_vm_readv"):
        read(reserved + PAGE, 1)


def test_memory_that_was_unmapped_is_gone() -> None:
    address = linux.reserve(PAGE, PAGE)
    linux.allow(address, PAGE)
    linux.unmap(address, PAGE)
    with pytest.raises(OSError, match="process_vm_readv"):
        read(address, 1)


def test_a_real_refusal_carries_its_errno(reserved: int) -> None:
    with pytest.raises(OSError, match="munmap") as caught:
        linux.unmap(reserved + 1, PAGE)
    assert caught.value.errno == errno.EINVAL


# ------------------------------------------------------------------------------------- pages


def test_populating_faults_exactly_the_range_in(memory: int) -> None:
    if not linux.populate(memory + PAGE, 2 * PAGE):
        pytest.skip("the kernel does not know MADV_POPULATE_WRITE")
    assert resident(memory, 4) == [False, True, True, False]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_kernel_without_populating_is_told_by_the_answer(memory: int, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", number)
        assert linux.populate(memory, PAGE) is False
    assert resident(memory, 1) == [False]


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_populating_goes_on_after_an_interruption(memory: int, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("madvise(MADV_POPULATE_WRITE)", number, times=3)
        linux.populate(memory, PAGE)
        assert len(plan.calls("madvise(MADV_POPULATE_WRITE)")) == 4


def test_populating_keeps_what_is_there(memory: int) -> None:
    write(memory, np.full(PAGE, 7, np.uint8))
    linux.populate(memory, 2 * PAGE)
    assert read(memory, PAGE).tolist() == [7] * PAGE


def test_touching_faults_exactly_the_range_in(memory: int) -> None:
    linux.touch(memory + PAGE, 2 * PAGE)
    assert resident(memory, 4) == [False, True, True, False]


def test_discarded_pages_are_given_back_and_read_as_zero(memory: int) -> None:
    write(memory, np.full(2 * PAGE, 7, np.uint8))
    linux.discard(memory + PAGE, PAGE)
    assert resident(memory, 2) == [True, False]
    assert not read(memory + PAGE, PAGE).any()


def test_a_range_is_kept_out_of_children(memory: int) -> None:
    linux.advise_no_fork(memory, 16 * PAGE)
    assert "dc" in vm_flags(memory)


def test_page_sizes_are_asked_for(memory: int) -> None:
    if not linux.advise_huge(memory, 16 * PAGE):
        pytest.skip("a kernel without transparent huge pages")
    assert "hg" in vm_flags(memory)
    assert linux.advise_small(memory, 16 * PAGE)
    assert "nh" in vm_flags(memory)


@pytest.mark.parametrize("advise", [linux.advise_huge, linux.advise_small])
def test_a_kernel_without_huge_pages_is_told_by_the_answer(
    memory: int, advise: Callable[[int, int], bool]
) -> None:
    with FaultPlan() as plan:
        for name in ("HUGEPAGE", "NOHUGEPAGE"):
            plan.fail(f"madvise(MADV_{name})", errno.EINVAL)
        assert advise(memory, PAGE) is False


# --------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("policy", [Policy.PREFERRED, Policy.BIND, Policy.INTERLEAVE])
def test_a_policy_is_read_back(reserved: int, policy: Policy) -> None:
    linux.set_policy(reserved, 16 * PAGE, policy, (0,))
    assert linux.get_policy(reserved) == (policy, (0,))
    assert linux.get_policy(reserved + 15 * PAGE) == (policy, (0,))


def test_a_policy_can_be_taken_back(reserved: int) -> None:
    linux.set_policy(reserved, PAGE, Policy.BIND, (0,))
    linux.set_policy(reserved, PAGE, Policy.DEFAULT, ())
    assert linux.get_policy(reserved) == (Policy.DEFAULT, ())


@pytest.mark.parametrize("node", [-1, 1023, 1024, 10**9])
def test_a_node_that_does_not_exist_is_refused(reserved: int, node: int) -> None:
    with pytest.raises(OSError, match="mbind") as caught:
        linux.set_policy(reserved, PAGE, Policy.BIND, (node,))
    assert caught.value.errno == errno.EINVAL


def test_a_container_that_forbids_placement_is_named(reserved: int) -> None:
    with FaultPlan() as plan:
        plan.fail("mbind", errno.EPERM)
        with pytest.raises(OSError, match=r"policy BIND, nodes \[0\]; .*seccomp.*CAP_SYS_NICE"):
            linux.set_policy(reserved, PAGE, Policy.BIND, (0,))


def test_a_machine_of_unknown_call_numbers_has_no_such_calls(
    monkeypatch: pytest.MonkeyPatch, reserved: int
) -> None:
    monkeypatch.setattr(linux, "_SYSCALLS", {})
    with pytest.raises(OSError, match="mbind") as caught:
        linux.set_policy(reserved, PAGE, Policy.BIND, (0,))
    assert caught.value.errno == errno.ENOSYS


def test_the_policy_of_nowhere_is_an_error() -> None:
    with pytest.raises(OSError, match="get_mempolicy") as caught:
        linux.get_policy(0)
    assert caught.value.errno == errno.EFAULT


def test_pages_that_are_not_there_have_an_errno_for_a_node(memory: int) -> None:
    linux.touch(memory, PAGE)
    nodes = linux.node_of_pages(u64(memory, memory + PAGE)).tolist()
    assert nodes[0] >= 0
    assert nodes[1] in (-errno.ENOENT, -errno.EFAULT)


def test_no_pages_are_nowhere() -> None:
    assert linux.node_of_pages(u64()).tolist() == []


def page_kinds(address: int, nbytes: int) -> tuple[int, int]:
    try:
        return linux.resident_by_page_kind(address, nbytes)
    except OSError as error:
        pytest.skip(f"{error}")


def test_resident_pages_are_counted_by_kind(memory: int) -> None:
    linux.touch(memory, PAGE)
    linux.touch(memory + 4 * PAGE, 2 * PAGE)
    assert page_kinds(memory, 16 * PAGE) == (3 * PAGE, 0)
    assert page_kinds(memory + PAGE, 4 * PAGE) == (PAGE, 0)


def test_more_regions_than_one_scan_returns_are_counted() -> None:
    # Every other page of 2,200: 1,100 regions, of which one call returns 1,024.
    address = linux.reserve(2200 * PAGE, PAGE)
    linux.allow(address, 2200 * PAGE)
    linux.advise_small(address, 2200 * PAGE)
    for number in range(0, 2200, 2):
        linux.touch(address + number * PAGE, PAGE)
    assert page_kinds(address, 2200 * PAGE) == (1100 * PAGE, 0)
    linux.unmap(address, 2200 * PAGE)


def test_a_scan_leaves_no_descriptor_open(memory: int) -> None:
    before = os.listdir("/proc/self/fd")
    with FaultPlan() as plan:
        plan.fail("ioctl", errno.ENOTTY)
        with pytest.raises(OSError, match="PAGEMAP_SCAN"):
            linux.resident_by_page_kind(memory, PAGE)
    assert os.listdir("/proc/self/fd") == before


# ------------------------------------------------------------------------------------- bytes


def numbers(nbytes: int) -> Bytes:
    return np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)


def test_segments_are_laid_out_as_c_does() -> None:
    assert linux.iovecs(u64(1, 2), u64(3, 4)).tolist() == [[1, 3], [2, 4]]
    assert linux.iovecs(u64(1, 2), 5).tolist() == [[1, 5], [2, 5]]


Copy = Callable[[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]], None]


@pytest.mark.parametrize("copy", [linux.copy, linux.copy_one_by_one])
@pytest.mark.parametrize("count", [1, 1024, 1025, 3000])
def test_ranges_are_copied(copy: Copy, count: int) -> None:
    source, result = numbers(8 * count), np.zeros(8 * count, np.uint8)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(8)
    sizes = np.arange(count, dtype=np.uint64) % np.uint64(8) + np.uint64(1)
    there = np.uint64(address_of(result)) + starts
    copy(there, np.uint64(address_of(source)) + starts[::-1], sizes)
    for number, size in enumerate(sizes.tolist()):
        taken = 8 * (count - 1 - number)
        assert np.array_equal(result[8 * number : 8 * number + size], source[taken : taken + size])
        assert not result[8 * number + size : 8 * number + 8].any()


@pytest.mark.parametrize(
    "sizes", [[8192], [8193], [30000], [8192, 1], [4096] * 5, [1, 20000, 1], [5000, 5000, 5000]]
)
def test_a_call_moves_no_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    limit, moved = 8192, list[int]()
    monkeypatch.setattr(linux, "_LARGEST_TRANSFER", limit)
    call = linux._copy_call

    def counted(pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64], n: int) -> None:
        assert int(local[:, 1].sum()) == int(remote[:, 1].sum()) == n
        moved.append(n)
        call(pid, local, remote, n)

    monkeypatch.setattr(linux, "_copy_call", counted)
    source, result = numbers(sum(sizes)), np.zeros(sum(sizes), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    linux.copy(
        np.uint64(address_of(result)) + starts, np.uint64(address_of(source)) + starts, u64(*sizes)
    )
    assert np.array_equal(result, source)
    assert sum(moved) == sum(sizes)
    assert max(moved) <= limit


@pytest.mark.parametrize("end", ["source", "destination"])
def test_a_copy_that_meets_inaccessible_memory_is_an_error(memory: int, end: str) -> None:
    linux.deny(memory + PAGE, PAGE)
    other = np.zeros(2 * PAGE, np.uint8)
    ends = u64(memory), u64(address_of(other))
    with pytest.raises(OSError, match=rf"process_vm_readv of {2 * PAGE} bytes") as caught:
        linux.copy(*(ends if end == "destination" else ends[::-1]), u64(2 * PAGE))
    assert caught.value.errno == errno.EFAULT


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_scattered_memory_is_written_and_read_back(descriptor: int) -> None:
    data, result = numbers(3000), np.zeros(3000, np.uint8)
    starts, sizes = u64(0, 1000, 1001), u64(1000, 1, 1999)
    table = linux.iovecs(np.uint64(address_of(data)) + starts, sizes)
    assert linux.pwritev(descriptor, table, 100) == 3000
    assert os.pread(descriptor, 3000, 100) == data.tobytes()
    table = linux.iovecs(np.uint64(address_of(result)) + starts, sizes)
    assert linux.preadv(descriptor, table, 100) == 3000
    assert np.array_equal(result, data)


def test_a_read_ends_with_the_file(descriptor: int) -> None:
    os.pwrite(descriptor, b"abc", 0)
    result = np.zeros(8, np.uint8)
    table = linux.iovecs(u64(address_of(result)), 8)
    assert linux.preadv(descriptor, table, 1) == 2
    assert linux.preadv(descriptor, table, 3) == 0
    assert result[:2].tobytes() == b"bc"


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_transfer_goes_on_after_an_interruption(descriptor: int, name: str) -> None:
    os.pwrite(descriptor, b"abcd", 0)
    buffer = np.zeros(4, np.uint8)
    with FaultPlan() as plan:
        plan.fail(name, errno.EINTR, times=2)
        table = linux.iovecs(u64(address_of(buffer)), 4)
        assert getattr(linux, name)(descriptor, table, 0) == 4
        assert plan.calls(name) == [(descriptor, 1, 0)] * 3


def test_a_failed_transfer_names_its_place_in_the_file(descriptor: int) -> None:
    buffer = np.zeros(4, np.uint8)
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC)
        with pytest.raises(OSError, match=r"pwritev of 4 bytes at file offset 512: No space"):
            linux.pwritev(descriptor, linux.iovecs(u64(address_of(buffer)), 4), 512)
