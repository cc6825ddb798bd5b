"""Where memory really is: any buffer, page by page, and what cannot be known."""

from __future__ import annotations

import array
import errno
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from hostmem import HostMem, Placement, huge_pages, machine, placement_of, process_maps
from hostmem._sys import linux
from hostmem.placement import find_placement
from hostmem.process_maps import parse_mappings, read_mappings
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


@pytest.fixture
def mixed() -> Iterator[tuple[int, int]]:
    """One huge page, then one small page in a range for small ones: address, size of the huge."""
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
        yield address, huge
    finally:
        linux.unmap(address, 2 * huge)


def test_huge_pages_are_told(mixed: tuple[int, int]) -> None:
    address, huge = mixed
    found = placement_of(address, 2 * huge)
    assert found.bytes_by_page_size == {huge: huge, PAGE: PAGE}
    assert found.resident == huge + PAGE
    (node,) = found.bytes_by_node
    assert found.bytes_by_node_and_page_size == {(node, huge): huge, (node, PAGE): PAGE}
    # 64 stretches: the first half is of huge pages, and one more has a page.
    assert [s.bytes_by_page_size for s in found.stretches[30:34]] == [
        {huge: huge // 32}, {huge: huge // 32}, {PAGE: PAGE}, {}
    ]  # fmt: skip


def test_page_sizes_are_told_from_inside_a_huge_page(mixed: tuple[int, int]) -> None:
    address, huge = mixed
    found = placement_of(address + huge // 2 + 1, huge // 2)
    assert found.bytes_by_page_size == {huge: huge // 2, PAGE: PAGE}


@pytest.mark.parametrize("chunk", [1, 100, 512, 1 << 16])
def test_page_sizes_do_not_depend_on_the_calls(
    monkeypatch: pytest.MonkeyPatch, mixed: tuple[int, int], chunk: int
) -> None:
    address, huge = mixed
    monkeypatch.setattr("hostmem.page_survey._CHUNK", chunk)
    assert placement_of(address, 2 * huge).bytes_by_page_size == {huge: huge, PAGE: PAGE}


def test_huge_pages_are_told_however_few_regions_a_call_returns(
    monkeypatch: pytest.MonkeyPatch, mixed: tuple[int, int]
) -> None:
    _, huge = mixed
    between = linux.reserve(3 * huge, huge)
    try:
        linux.allow(between, 3 * huge)
        for place in (between, between + 2 * huge):
            linux.advise_huge(place, huge)
            linux.touch(place, huge)
        before = placement_of(between, 3 * huge)
        monkeypatch.setattr(linux, "_REGIONS", 1)
        assert placement_of(between, 3 * huge) == before
        if before.bytes_by_page_size == {huge: 2 * huge}:
            assert linux.huge_regions(between, 3 * huge).tolist() == [
                [between, between + huge], [between + 2 * huge, between + 3 * huge]
            ]  # fmt: skip
    finally:
        linux.unmap(between, 3 * huge)


def test_page_sizes_are_those_of_smaps(mixed: tuple[int, int]) -> None:
    address, huge = mixed
    told: dict[int, int] = {}
    nodes: dict[int, int] = {}
    for mapping in read_mappings():
        if address <= mapping.start < address + 2 * huge:
            assert mapping.end <= address + 2 * huge, "the kernel joined it with a neighbour"
            for size, n in mapping.bytes_by_page_size.items():
                told[size] = told.get(size, 0) + n
            for node, n in mapping.bytes_by_node.items():
                nodes[node] = nodes.get(node, 0) + n
    found = placement_of(address, 2 * huge)
    assert (found.bytes_by_page_size, found.bytes_by_node) == (told, nodes)


def test_huge_pages_are_told_by_smaps(mixed: tuple[int, int]) -> None:
    address, huge = mixed
    with FaultPlan() as plan:
        plan.fail("ioctl", errno.ENOTTY, times=None)
        assert placement_of(address, huge).bytes_by_page_size == {huge: huge}


def test_the_zero_page_is_nobodys(memory: int) -> None:
    # Reading memory that was never written maps the one page of zeros that all share.
    assert view(memory, 8 * PAGE)[4 * PAGE] == 0
    found = placement_of(memory, 8 * PAGE)
    assert found.resident == 4 * PAGE
    assert found.bytes_without_node == {"EFAULT": PAGE, "ENOENT": 3 * PAGE}
    assert linux.resident_by_page_kind(memory, 8 * PAGE) == (4 * PAGE, 0)
    assert "4 KiB not mapped, or the zero page (EFAULT)" in str(found)


@pytest.fixture
def pool() -> Iterator[int]:
    """Eight pages more in the hugetlb pool of 2 MiB: bytes of a page."""
    count = Path("/proc/sys/vm/nr_hugepages")
    size = huge_pages.default_pool_size()
    if size is None:
        pytest.skip("no hugetlb here")
    before = int(count.read_text())
    try:
        count.write_text(f"{before + 8}")
    except OSError as error:
        pytest.skip(f"the hugetlb pool cannot be changed: {error}")
    try:
        if huge_pages.pools()[size].free < 4:
            pytest.skip("the hugetlb pool found no memory")
        yield size
    finally:
        count.write_text(f"{before}")


@pytest.mark.parametrize("sample", [None, 64])
def test_pages_of_a_hugetlb_pool_have_their_own_size(pool: int, sample: int | None) -> None:
    address = linux.reserve(4 * pool, pool, pool)
    try:
        linux.allow(address, 4 * pool)
        linux.populate(address + pool, 2 * pool)
        found = placement_of(address, 4 * pool, sample=sample)
        assert found.bytes_by_page_size == {pool: 2 * pool}
        assert found.bytes_without_node == {"ENOENT": 2 * pool}
        part = placement_of(address + pool + PAGE, PAGE)
        assert (part.resident, part.bytes_by_page_size) == (PAGE, {pool: PAGE})
        with FaultPlan() as plan:
            plan.fail("move_pages", errno.EPERM)
            assert placement_of(address, 4 * pool).bytes_by_node == found.bytes_by_node
            plan.fail("ioctl", errno.ENOTTY)
            found = placement_of(address, 4 * pool)
        assert found.bytes_by_page_size == {pool: 2 * pool}
    finally:
        linux.unmap(address, 4 * pool)


def test_a_pool_with_pages_of_a_size_of_its_own_is_told_from_huge_pages(
    monkeypatch: pytest.MonkeyPatch, mixed: tuple[int, int]
) -> None:
    # As if the mapping were of a pool of 1 GiB pages, and the process had such pages.
    address, huge = mixed
    gib = 1 << 30
    other = process_maps.Mapping(address + huge, address + 2 * huge, "rw-p", "", PAGE)
    ours = process_maps.Mapping(address, address + huge, "rw-p", "", gib)
    monkeypatch.setattr("hostmem.page_survey.read_mappings", lambda **_: [ours, other])
    monkeypatch.setattr("hostmem.procfs.read", lambda _: "HugetlbPages:\t 1048576 kB")
    assert placement_of(address, 2 * huge).bytes_by_page_size == {gib: huge, PAGE: PAGE}


def test_many_pages_are_asked_about_in_several_calls(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr("hostmem.page_survey._CHUNK", 3)
    with FaultPlan() as plan:
        assert placement_of(memory, 8 * PAGE).resident == 4 * PAGE
        assert [args[1] for args in plan.calls("move_pages")] == [3, 3, 2]


def test_nodes_found_by_different_calls_are_added(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    # Three calls: nodes 1 0 0, then 2 and two pages that are nowhere, then 0 1.
    answers = iter([[1, 0, 0], [2, -errno.ENOENT, -errno.EFAULT], [0, 1]])
    monkeypatch.setattr("hostmem.page_survey._CHUNK", 3)
    monkeypatch.setattr(linux, "node_of_pages", lambda *_: np.array(next(answers), np.int32))
    found = placement_of(memory, 8 * PAGE)
    assert found.bytes_by_node == {0: 3 * PAGE, 1: 2 * PAGE, 2: PAGE}
    assert found.bytes_without_node == {"ENOENT": PAGE, "EFAULT": PAGE}
    assert found.bytes_by_node_and_page_size == {
        (0, PAGE): 3 * PAGE, (1, PAGE): 2 * PAGE, (2, PAGE): PAGE
    }  # fmt: skip
    assert [s.symbol for s in found.stretches] == [*"1002--01"]


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


class OnlyDlpack:
    """An object of some other library, which shares its memory by DLPack and no other way."""

    def __init__(self, inner: Any, error: Exception | None = None) -> None:
        self.inner, self.error = inner, error

    def __dlpack__(self, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


def test_an_object_with_dlpack_only(memory: int) -> None:
    assert extent(OnlyDlpack(view(memory, 96).reshape(8, 12)[::2])) == (memory, 84)


@pytest.mark.parametrize("error", [BufferError("on a GPU"), RuntimeError("no")])
def test_an_object_whose_memory_dlpack_does_not_share_is_refused(error: Exception) -> None:
    with pytest.raises(TypeError, match=r"expected a buffer.* not OnlyDlpack"):
        placement_of(OnlyDlpack(np.zeros(1), error))


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


class StridedTensor(Tensor):
    """A transposed tensor of 4 x 6 items of 4 bytes, of which every other row is seen."""

    shape = (6, 2)
    is_cpu = True
    device = "cpu"

    def stride(self) -> tuple[int, ...]:
        return (1, 12)

    def element_size(self) -> int:
        return 4


def test_a_tensor_that_is_not_contiguous(memory: int) -> None:
    # Its own nbytes, 48, are those of its items; they lie in (5 * 1 + 1 * 12) * 4 + 4 bytes.
    assert extent(StridedTensor(memory, 48)) == (memory, 72)


def test_a_tensor_on_a_gpu_is_refused(memory: int) -> None:
    tensor = StridedTensor(memory, 48)
    tensor.is_cpu, tensor.device = False, "cuda:0"
    with pytest.raises(TypeError, match="host memory, not on cuda:0"):
        placement_of(tensor)


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


# ------------------------------------------------------------------------------- by sample


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """4,096 pages, dealt out to two nodes in turn; the last quarter is not there: the address."""
    address = linux.reserve(4096 * PAGE, PAGE)

    def answer(addresses: Any, *_: Any) -> Any:
        number = (addresses.astype(np.int64) - address) // PAGE
        assert ((number >= 0) & (number < 4096)).all()
        return np.where(number < 3072, number % 2, -errno.ENOENT).astype(np.int32)

    monkeypatch.setattr(linux, "node_of_pages", answer)
    yield address
    linux.unmap(address, 4096 * PAGE)


@pytest.mark.parametrize("sample", [1, 7, 256, 1024, 4095])
def test_a_sample_stands_for_all(dealt: int, sample: int) -> None:
    found = placement_of(dealt, 4096 * PAGE, sample=sample)
    assert found.resident + sum(found.bytes_without_node.values()) == 4096 * PAGE
    assert f"move_pages, {sample:,} of 4,096 pages: counts are scaled, within" in found.method
    for stretch in found.stretches:
        assert (stretch.resident or 0) <= stretch.nbytes


def test_a_sample_is_as_good_as_it_says(dealt: int) -> None:
    found = placement_of(dealt, 4096 * PAGE, sample=256)
    match = re.search(r"within ([\d.]+)%", found.method)
    assert match
    # 1.96 * sqrt(1 / 4 / 256 * 3840 / 4095)
    assert float(match[1]) == pytest.approx(5.93, abs=0.01)
    error = float(match[1]) / 100 * 4096 * PAGE
    # Every 16th page: were it the same of each 16, all would be found on one node.
    assert abs(found.bytes_by_node[0] - 1536 * PAGE) <= error
    assert abs(found.bytes_by_node[1] - 1536 * PAGE) <= error
    assert abs(found.bytes_without_node["ENOENT"] - 1024 * PAGE) <= error


def test_a_sample_is_the_same_every_time(dealt: int) -> None:
    first = placement_of(dealt, 4096 * PAGE, sample=100)
    assert placement_of(dealt, 4096 * PAGE, sample=100) == first


def test_a_sample_asks_about_so_many_pages(memory: int) -> None:
    with FaultPlan() as plan:
        placement_of(memory, 8 * PAGE, sample=3)
        assert [args[1] for args in plan.calls("move_pages")] == [3]


@pytest.mark.parametrize("sample", [8, 9, 1000])
def test_a_sample_of_all_is_no_sample(memory: int, sample: int) -> None:
    found = placement_of(memory, 8 * PAGE, sample=sample)
    assert found == placement_of(memory, 8 * PAGE)
    assert found.method == "move_pages, every page"


def test_a_sample_tells_huge_pages(mixed: tuple[int, int]) -> None:
    address, huge = mixed
    found = placement_of(address, huge, sample=16)
    assert found.bytes_by_page_size == {huge: huge}


def test_a_sample_leaves_out_what_is_reserved(dealt: int) -> None:
    states = [("reserved", 0, 1024 * PAGE), ("reserved", 2048 * PAGE, 2048 * PAGE)]
    found = find_placement(dealt, 4096 * PAGE, "a", "b", states=states, sample=64)
    assert found.resident == 1024 * PAGE
    assert found.bytes_without_node == {}
    assert "64 of 1,024 pages not reserved" in found.method


@pytest.mark.parametrize("sample", [0, -1])
def test_a_sample_of_nothing_is_refused(memory: int, sample: int) -> None:
    with pytest.raises(ValueError, match="sample"):
        placement_of(memory, PAGE, sample=sample)


# ------------------------------------------------------------------------------- by state


def test_states_are_added_up_and_drawn(memory: int) -> None:
    states = [
        ("registered", 0, PAGE),
        ("registered", PAGE, 2 * PAGE),
        ("quarantined", 5 * PAGE, PAGE),
        ("released", 3 * PAGE, PAGE),
        ("reserved", 6 * PAGE, 2 * PAGE),
    ]
    found = find_placement(memory, 8 * PAGE, "a", "b", states=states)
    assert found.bytes_by_state == {
        "resident": 4 * PAGE, "registered": 3 * PAGE, "quarantined": PAGE, "released": PAGE,
        "reserved": 2 * PAGE,
    }  # fmt: skip
    node = next(iter(found.bytes_by_node))
    assert "".join(s.symbol for s in found.stretches) == f"{node}{node}{node}_-#.."
    assert [s.state for s in found.stretches] == [
        "registered", "registered", "registered", "released", "", "quarantined",
        "reserved", "reserved",
    ]  # fmt: skip
    assert "16 KiB resident, 12 KiB registered" in str(found)


def test_reserved_address_space_is_not_asked_about(memory: int) -> None:
    states = [("reserved", 3 * PAGE - 1, 2 * PAGE + 2), ("reserved", 6 * PAGE, 2 * PAGE)]
    with FaultPlan() as plan:
        found = find_placement(memory, 8 * PAGE, "a", "b", states=states)
        # Pages 0 to 2, of which the last is not wholly reserved, and page 5.
        assert [args[1] for args in plan.calls("move_pages")] == [3, 1]
    assert found.resident == 4 * PAGE
    assert found.bytes_without_node == {}
    assert found.method == "move_pages, every page that is not reserved"


def test_nothing_but_reserved_is_nothing(memory: int) -> None:
    found = find_placement(memory, 8 * PAGE, "a", "b", states=[("reserved", 0, 8 * PAGE)], sample=4)
    assert found.found == "nothing resident"
    assert "".join(s.symbol for s in found.stretches) == "........"


def test_a_range_of_a_terabyte_costs_what_is_not_reserved() -> None:
    size = 1 << 40
    address = linux.reserve(size, PAGE)
    try:
        states = [("reserved", 64 * PAGE, size - 64 * PAGE)]
        with FaultPlan() as plan:
            found = find_placement(address, size, "a", "b", states=states)
            assert [args[1] for args in plan.calls("move_pages")] == [64]
        assert found.bytes_without_node == {"ENOENT": 64 * PAGE}
    finally:
        linux.unmap(address, size)


@pytest.mark.parametrize(("detail", "count"), [(False, 64), (True, 1024)])
def test_stretches_cover_the_range(detail: bool, count: int) -> None:
    address = linux.reserve(3000 * PAGE, PAGE)
    try:
        found = placement_of(address + 100, 3000 * PAGE - 200, detail=detail)
        assert len(found.stretches) == count
        end = 0
        for stretch in found.stretches:
            assert stretch.offset == end
            assert stretch.nbytes > 0
            end += stretch.nbytes
        assert end == found.nbytes
    finally:
        linux.unmap(address, 3000 * PAGE)


def test_states_are_drawn_where_they_are_in_a_range_that_begins_inside_a_page(memory: int) -> None:
    # Bytes from 100 into page 2, of three pages: the first stretch ends with page 2.
    states = [("registered", 0, PAGE - 100), ("released", PAGE - 100, PAGE + 100)]
    found = find_placement(memory + 2 * PAGE + 100, 2 * PAGE, "a", "b", states=states)
    assert [(s.offset, s.nbytes, s.bytes_by_state) for s in found.stretches] == [
        (0, PAGE - 100, {"registered": PAGE - 100}),
        (PAGE - 100, PAGE, {"released": PAGE}),
        (2 * PAGE - 100, 100, {"released": 100}),
    ]


def test_stretches_add_up(memory: int) -> None:
    found = placement_of(memory, 8 * PAGE)
    assert sum(s.resident or 0 for s in found.stretches) == found.resident
    assert [s.resident for s in found.stretches] == [PAGE, PAGE, PAGE, 0, 0, PAGE, 0, 0]


# --------------------------------------------------------------------- what cannot be known


def test_numa_maps_tells_where_move_pages_is_forbidden(memory: int) -> None:
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM)
        found = placement_of(memory, 8 * PAGE)
    assert found.verifiable
    assert found.resident == 4 * PAGE
    assert found.bytes_by_page_size == {PAGE: 4 * PAGE}
    assert found.bytes_by_state == {"resident": 4 * PAGE}
    assert found.method.startswith("numa_maps, totals of")
    assert "EPERM" in found.method
    # Which page is where is not known, so the map does not say so.
    assert {stretch.symbol for stretch in found.stretches} == {"?"}


def test_a_mapping_that_is_more_than_the_range_is_told(memory: int) -> None:
    linux.touch(memory + 7 * PAGE, PAGE)
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM)
        found = placement_of(memory + 7 * PAGE, PAGE)
    assert found.resident >= 5 * PAGE
    assert re.search(r"totals of whole mappings: .*, 4 KiB of it asked", found.method)


def test_a_mapping_of_the_range_alone_is_exact(memory: int) -> None:
    linux.deny(memory, PAGE)  # the neighbours are other mappings then
    linux.deny(memory + 6 * PAGE, 2 * PAGE)
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM)
        found = placement_of(memory + PAGE, 5 * PAGE)
    assert found.resident == 3 * PAGE
    assert "totals of the range's mappings" in found.method


def test_without_numa_maps_nothing_is_verifiable(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    maps = Path("/proc/self/maps").read_text()
    monkeypatch.setattr(process_maps, "read_mappings", lambda **_: [*parse_mappings(maps)])
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM)
        found = placement_of(memory, 8 * PAGE)
    assert found.bytes_by_node == {}
    assert "resident" not in found.bytes_by_state
    assert found.method.startswith("not verifiable: move_pages")
    assert found.found == found.method
    assert ": not verifiable;" in repr(found)


def test_without_proc_nothing_is_verifiable(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    def nobody(**_: object) -> None:
        raise ProcessLookupError("there is no process self")

    monkeypatch.setattr(process_maps, "read_mappings", nobody)
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.ENOSYS)
        assert "no process self" in placement_of(memory, 8 * PAGE).method
        plan.fail("ioctl", errno.ENOTTY)
        found = placement_of(memory, 8 * PAGE)
    assert found.bytes_by_page_size == {}
    assert "page sizes not verifiable (PAGEMAP_SCAN: " in found.method


def test_half_an_answer_is_none(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr("hostmem.page_survey._CHUNK", 3)
    with FaultPlan() as plan:
        plan.fail("move_pages", errno.EPERM, at=2)
        assert placement_of(memory, 8 * PAGE).method.startswith("numa_maps")


@pytest.mark.parametrize("error", [errno.ENOTTY, errno.EPERM])
def test_smaps_tells_page_sizes_where_the_scan_is_not_there(memory: int, error: int) -> None:
    with FaultPlan() as plan:
        plan.fail("ioctl", error)
        found = placement_of(memory, 8 * PAGE)
    assert found.resident == 4 * PAGE
    assert found.bytes_by_page_size == {PAGE: 4 * PAGE}
    assert found.bytes_by_node_and_page_size == {}
    assert "page sizes by smaps" in found.method


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


def test_several_nodes_and_page_sizes_are_crossed() -> None:
    placement = Placement(
        0, 8 << 20, "a", "b", "by looking",
        bytes_by_node={0: 6 << 20, 1: 2 << 20},
        bytes_by_page_size={4096: 4 << 20, 2 << 20: 4 << 20},
        bytes_by_node_and_page_size={
            (1, 2 << 20): 2 << 20, (0, 2 << 20): 2 << 20, (0, 4096): 4 << 20
        },
        bytes_without_node={"EBUSY": 4096, "EIO": 8192},
    )  # fmt: skip
    assert str(placement).splitlines()[4:] == [
        "          4 MiB on node 0 in 4 KiB pages",
        "          2 MiB on node 0 in 2 MiB pages",
        "          2 MiB on node 1 in 2 MiB pages",
        "no node   4 KiB busy (EBUSY), 8 KiB for another reason (EIO)",
        "method    by looking",
    ]


def test_a_placement_is_one_line() -> None:
    placement = Placement(4096, 8 << 20, "bind node 1", "x", "y", bytes_by_node={1: 6 << 20})
    assert repr(placement) == ("<Placement of 8 MiB at 0x1000: 6 MiB on node 1; asked bind node 1>")


def test_a_notebook_is_shown_a_table_and_a_map(memory: int) -> None:
    states = [("<b>", 0, PAGE)]
    page = find_placement(memory, 8 * PAGE, "a & b", "<c>", states=states)._repr_html_()
    root = ElementTree.fromstring(page)  # every tag is closed, every character escaped
    assert [cell.text for cell in root.iter("td")][:2] == ["a & b", "<c>"]
    boxes = list(root.iter("span"))
    assert len(boxes) == 8
    assert boxes[0].get("title", "").startswith("4 KiB at 0 · <b> · 4 KiB on node")
    assert "src=" not in page
    assert "http" not in page


def test_nothing_is_shown_without_a_map() -> None:
    page = placement_of(b"")._repr_html_()
    assert "<span" not in page


def test_a_placement_with_nothing_to_tell_says_so(memory: int) -> None:
    text = str(find_placement(memory + 6 * PAGE, PAGE, "a", "b"))
    assert "found     nothing resident\npages     not known" in text
