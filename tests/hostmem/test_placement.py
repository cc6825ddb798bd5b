"""Where memory really is: any buffer, page by page, and what cannot be known."""

from __future__ import annotations

import array
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hostmem import HostMem, Placement, machine, placement_of
from hostmem._sys import linux
from hostmem.placement import find_placement
from hostmem.testing import FaultPlan

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def memory() -> Iterator[int]:
    """Eight accessible pages with small pages in 0, 1, 2 and 5, and holes: the address."""
    address = linux.reserve(8 * PAGE, PAGE)
    linux.allow(address, 8 * PAGE)
    linux.advise_small(address, 8 * PAGE)
    linux.touch(address, 3 * PAGE)
    linux.touch(address + 5 * PAGE, PAGE)
    yield address
    linux.unmap(address, 8 * PAGE)


def view(address: int, nbytes: int) -> Any:
    """Return a numpy array over bytes somewhere."""

    class Exporter:
        def __init__(self) -> None:
            data = {"typestr": "|u1", "shape": (nbytes,), "data": (address, False)}
            self.__array_interface__ = {"version": 3, **data}

    return np.asarray(Exporter())


def extent(obj: Any) -> tuple[int, int]:
    found = placement_of(obj)
    return found.address, found.nbytes


# --------------------------------------------------------------------------- what is counted


def test_resident_pages_are_counted_and_holes_are_not(memory: int) -> None:
    assert placement_of(memory, 8 * PAGE).resident == 4 * PAGE


def test_pages_are_counted_whole(memory: int) -> None:
    # Bytes from the middle of page 1 to the middle of page 2.
    assert placement_of(memory + PAGE + 100, PAGE).resident == 2 * PAGE


def test_a_range_without_resident_pages_has_none(memory: int) -> None:
    found = placement_of(memory + 6 * PAGE, 2 * PAGE)
    assert found.bytes_by_node == {}
    assert found.bytes_by_page_size == {}
    assert found.found == "nothing resident"


def test_no_bytes_have_no_pages(memory: int) -> None:
    assert placement_of(memory + 1, 0).resident == 0


def test_memory_that_is_not_mapped_has_no_pages() -> None:
    address = linux.reserve(PAGE, PAGE)
    linux.unmap(address, PAGE)
    found = placement_of(address, PAGE)
    assert found.resident == 0
    assert found.accepted.startswith("not verifiable (get_mempolicy")


def test_on_a_machine_of_one_node_all_pages_are_on_it(memory: int) -> None:
    nodes = [node.number for node in machine().nodes if node.memory_total]
    if len(nodes) != 1:
        pytest.skip("this machine has several nodes with memory")
    assert placement_of(memory, 8 * PAGE).bytes_by_node == {nodes[0]: 4 * PAGE}


def test_small_pages_are_told(memory: int) -> None:
    found = placement_of(memory, 8 * PAGE)
    if "page sizes not verifiable" in found.method:
        pytest.skip(found.method)
    assert found.bytes_by_page_size == {PAGE: 4 * PAGE}


def test_huge_pages_are_told() -> None:
    huge = machine().huge_page_size
    if huge is None or machine().thp_enabled == "never":
        pytest.skip("no transparent huge pages")
    address = linux.reserve(2 * huge, huge)
    try:
        linux.allow(address, 2 * huge)
        linux.advise_huge(address, huge)
        linux.advise_small(address + huge, huge)
        linux.touch(address, huge)
        linux.touch(address + huge, PAGE)
        try:
            if linux.resident_by_page_kind(address, huge) != (0, huge):
                pytest.skip("the kernel had no huge page free")
        except OSError as error:
            pytest.skip(f"{error}")
        found = placement_of(address, 2 * huge)
        assert found.bytes_by_page_size == {huge: huge, PAGE: PAGE}
        assert found.resident == huge + PAGE
    finally:
        linux.unmap(address, 2 * huge)


def test_many_pages_are_asked_about_in_several_calls(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr("hostmem.placement._CHUNK", 3)
    with FaultPlan() as plan:
        assert placement_of(memory, 8 * PAGE).resident == 4 * PAGE
        assert [args[1] for args in plan.calls("move_pages")] == [3, 3, 2]


def test_nodes_found_by_different_calls_are_added(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    # Three calls: nodes 1 0 0, then 2 and two pages that are nowhere, then 0 1.
    answers = iter([[1, 0, 0], [2, -errno.ENOENT, -errno.EFAULT], [0, 1]])
    monkeypatch.setattr("hostmem.placement._CHUNK", 3)
    monkeypatch.setattr(linux, "node_of_pages", lambda a: np.array(next(answers), np.int32))
    found = placement_of(memory, 8 * PAGE)
    assert found.bytes_by_node == {0: 3 * PAGE, 1: 2 * PAGE, 2: PAGE}


# -------------------------------------------------------------------------- kinds of buffers


def test_an_array(memory: int) -> None:
    assert extent(view(memory, 8 * PAGE)) == (memory, 8 * PAGE)


def test_an_array_of_larger_items(memory: int) -> None:
    assert extent(view(memory, 1024).view(np.float64).reshape(16, 8)) == (memory, 1024)


def test_a_slice_of_an_array(memory: int) -> None:
    # Every third byte of ten: bytes 0, 3, 6 and 9.
    assert extent(view(memory, 10)[::3]) == (memory, 10)
    assert extent(view(memory, 10)[1::4]) == (memory + 1, 9)


def test_an_array_with_negative_strides(memory: int) -> None:
    assert extent(view(memory, 100)[::-1]) == (memory, 100)
    assert extent(view(memory, 100).reshape(10, 10)[::-1, ::-2]) == (memory + 1, 99)


def test_a_transposed_array(memory: int) -> None:
    assert extent(view(memory, 96).view(np.uint32).reshape(4, 6).T) == (memory, 96)


def test_a_single_item(memory: int) -> None:
    assert extent(view(memory, 8).view(np.uint64).reshape(())) == (memory, 8)


def test_a_broadcast_array_has_the_bytes_it_has(memory: int) -> None:
    assert extent(np.broadcast_to(view(memory, 8), (1000, 8))) == (memory, 8)


@pytest.mark.parametrize("empty", [np.zeros(0), np.zeros((3, 0, 2)), b"", bytearray()])
def test_an_empty_buffer_has_nothing(empty: Any) -> None:
    found = placement_of(empty)
    assert (found.nbytes, found.resident) == (0, 0)


def test_a_memoryview(memory: int) -> None:
    assert extent(memoryview(view(memory, 100))) == (memory, 100)
    assert extent(memoryview(view(memory, 100))[10:20]) == (memory + 10, 10)
    assert extent(memoryview(view(memory, 100))[::-2]) == (memory + 1, 99)


@pytest.mark.parametrize(
    "buffer", [bytes(5000), bytearray(5000), array.array("d", [0.0] * 625), mmap.mmap(-1, 5000)]
)
def test_a_buffer_of_the_standard_library(buffer: Any) -> None:
    found = placement_of(buffer)
    assert found.nbytes == 5000
    assert found.address == np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


@dataclass
class Tensor:
    """As much of a torch tensor as is looked at."""

    address: int
    nbytes: int

    def data_ptr(self) -> int:
        return self.address


def test_a_tensor(memory: int) -> None:
    found = placement_of(Tensor(memory, 3 * PAGE))
    assert (found.address, found.nbytes, found.resident) == (memory, 3 * PAGE, 3 * PAGE)


def test_a_view_of_a_memory_of_ours() -> None:
    with HostMem("1MiB", device="cpu", wait=True) as mem:
        assert placement_of(mem.view()).resident == 1 << 20


@pytest.mark.parametrize("nbytes", [None, -1])
def test_an_address_needs_its_bytes(nbytes: int | None) -> None:
    with pytest.raises(TypeError, match="nbytes: an address needs"):
        placement_of(4096, nbytes)


def test_a_negative_address_is_none() -> None:
    with pytest.raises(TypeError):
        placement_of(-4096, 1)


def test_a_buffer_has_bytes_of_its_own() -> None:
    with pytest.raises(TypeError, match="nbytes: goes with an address"):
        placement_of(bytearray(10), 5)


@pytest.mark.parametrize("junk", [None, "text", 1.5, [1, 2], object(), True])
def test_what_is_no_buffer_is_refused(junk: Any) -> None:
    with pytest.raises(TypeError, match=f"expected a buffer.* not {type(junk).__name__}"):
        placement_of(junk)


# --------------------------------------------------------------------- what cannot be known


def test_where_pages_are_may_be_forbidden_to_know(memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM)
        found = placement_of(memory, 8 * PAGE)
    assert found.bytes_by_node == {}
    assert found.method.startswith("not verifiable: move_pages")
    assert "EPERM" in found.method


def test_half_an_answer_is_none(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr("hostmem.placement._CHUNK", 3)
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM, at=2)
        assert placement_of(memory, 8 * PAGE).bytes_by_node == {}


def test_page_sizes_may_be_unknown(memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail("ioctl", errno.ENOTTY)
        found = placement_of(memory, 8 * PAGE)
    assert found.resident == 4 * PAGE
    assert found.bytes_by_page_size == {}
    assert "page sizes not verifiable (ioctl(PAGEMAP_SCAN)" in found.method


def test_the_policy_may_be_forbidden_to_know(memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail("get_mempolicy", errno.EPERM)
        assert placement_of(memory, 8 * PAGE).accepted.startswith("not verifiable (get_mempolicy")


# ------------------------------------------------------------------------------ for a person


def test_memory_of_others_was_not_asked_for(memory: int) -> None:
    found = placement_of(memory, 8 * PAGE)
    assert (found.asked, found.accepted) == ("no policy", "no policy")
    assert found.method.startswith("move_pages, every page")


def test_the_policy_in_force_is_shown(memory: int) -> None:
    linux.set_policy(memory, 8 * PAGE, linux.Policy.BIND, (0,))
    assert placement_of(memory, 8 * PAGE).accepted == "bind node 0"


def test_a_placement_describes_itself() -> None:
    placement = Placement(
        4096, 8 << 20, "bind node 1", "bind node 1", "by looking",
        bytes_by_node={1: 6 << 20, 0: 2 << 20},
        bytes_by_page_size={2 << 20: 4 << 20, 4096: 4 << 20},
    )  # fmt: skip
    assert str(placement) == (
        "asked     bind node 1\n"
        "accepted  bind node 1\n"
        "found     2 MiB on node 0, 6 MiB on node 1\n"
        "pages     4 MiB in 4 KiB pages, 4 MiB in 2 MiB pages\n"
        "method    by looking"
    )


def test_a_placement_with_nothing_to_tell_says_so(memory: int) -> None:
    text = str(find_placement(memory + 6 * PAGE, PAGE, "a", "b"))
    assert "found     nothing resident\npages     not known" in text
