"""Whether a size would fit, on machines that are not here and on this one."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from hostmem import CudaDevice
from hostmem._sys.driver import HOST_REGISTER, Result
from hostmem.preflight import Preflight, preflight
from hostmem.testing import FaultPlan
from hostmem.testing.driver import FakeDriver
from tests.hostmem.conftest import Child
from tests.roots import in_group, kib, write

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NODES = "sys/devices/system/node"
POOL = "hugepages/hugepages-2048kB"
MEMORY = {"MemTotal": 64 * GIB, "MemAvailable": 40 * GIB}
MOST = 40 * GIB - 64 * MIB - (40 * GIB - 64 * MIB) // 128  # of the machine, after the margin


def node(number: int, free: int, **more: str) -> dict[str, str]:
    folder = f"{NODES}/node{number}"
    fields = {"MemTotal": 32 * GIB, "MemFree": free}
    return {f"{folder}/meminfo": kib(fields, f"Node {number} "), f"{folder}/cpulist": ""}


SERVER = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic",
    "proc/meminfo": kib(MEMORY),
    "proc/sys/vm/max_map_count": "65530",
    "sys/kernel/mm/transparent_hugepage/hpage_pmd_size": str(2 * MIB),
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer [madvise] never",
    f"{NODES}/online": "0-1",
    f"{NODES}/has_memory": "0-1",
    **node(0, 30 * GIB),
    **node(1, 8 * GIB),
}


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return write(tmp_path, SERVER)


def pool(size: int, free: int, reserved: int, on_nodes: tuple[int, ...]) -> dict[str, str]:
    """Return the files of a pool of 2 MiB pages, counted in pages."""
    by_node = {
        f"{NODES}/node{n}/{POOL}/free_hugepages": str(count) for n, count in enumerate(on_nodes)
    }
    folder = f"sys/kernel/mm/{POOL}"
    return {
        f"{folder}/nr_hugepages": str(size),
        f"{folder}/free_hugepages": str(free),
        f"{folder}/resv_hugepages": str(reserved),
        f"{folder}/nr_overcommit_hugepages": "0",
        "proc/meminfo": f"{kib(MEMORY)}\nHugepagesize: 2048 kB",
        **by_node,
    }


def gpu(**answers: Any) -> CudaDevice:
    return CudaDevice(0, driver=FakeDriver(**answers))


def limit_names(found: Preflight) -> list[str]:
    return [limit.name for limit in found.limits]


# ------------------------------------------------------------------------------------- fitting


def test_what_is_available_fits(server: Path) -> None:
    found = preflight(MOST, device="cpu", root=server)
    assert (found.size, found.ranks, found.device, found.gpu_bytes) == (MOST, 1, "cpu", 0)
    assert found.fits
    assert found.recommended == MOST // (2 * MIB) * (2 * MIB)
    assert limit_names(found) == ["MemAvailable"]


def test_one_byte_more_does_not_fit(server: Path) -> None:
    assert not preflight(MOST + 1, device="cpu", root=server).fits


def test_ranks_share_the_machine(server: Path) -> None:
    found = preflight("5GiB", device="cpu", ranks=8, root=server)
    assert not found.fits
    assert found.recommended == MOST // 8 // (2 * MIB) * (2 * MIB)
    assert preflight(found.recommended, device="cpu", ranks=8, root=server).fits


def test_the_tightest_limit_is_the_first_and_named(server: Path) -> None:
    files = {"job/memory.max": 4 * GIB, "job/memory.high": 3 * GIB, "job/memory.current": GIB}
    found = preflight("16GiB", device="cpu", root=write(server, in_group(2, "/job", files)))
    folder = f"{server}/sys/fs/cgroup/job"
    assert limit_names(found) == [
        f"memory.high of {folder}",
        f"memory.max of {folder}",
        "MemAvailable",
    ]
    assert f"does not fit: memory.high of {folder} says no" in str(found)


def test_a_strict_node_limits(server: Path) -> None:
    strict = {"numa_node": 1, "allow_remote_numa_fallback": False}
    found = preflight("16GiB", device="cpu", root=server, **strict)  # type: ignore[arg-type]
    assert not found.fits
    assert limit_names(found) == ["free memory of node 1", "MemAvailable"]
    assert found.notes == ()


def test_a_wished_node_that_is_too_small_is_a_note(server: Path) -> None:
    found = preflight("16GiB", device="cpu", numa_node=1, root=server)
    assert found.fits
    (note,) = found.notes
    assert "free memory of node 1 (32 GiB, of which 24 GiB in use)" in note
    assert "from other nodes" in note
    assert preflight("2GiB", device="cpu", numa_node=1, root=server).notes == ()
    assert len(preflight("2GiB", ranks=8, device="cpu", numa_node=1, root=server).notes) == 1


@pytest.mark.parametrize("node", [7, (0, 7)])
def test_placement_that_is_refused_is_a_limit(server: Path, node: int | tuple[int, ...]) -> None:
    found = preflight("1MiB", device="cpu", numa_node=node, root=server)
    assert (found.fits, found.recommended) == (False, 0)
    assert "there is no node 7" in str(found)


def test_a_machine_of_which_nothing_can_be_read_takes_everything(tmp_path: Path) -> None:
    found = preflight("1TiB", device="cpu", page_mode="small", root=tmp_path)
    assert (found.fits, found.limits, found.recommended) == (True, (), 1 << 40)
    assert "fits" in str(found)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"size": 0}, ValueError),
        ({"size": -1}, ValueError),
        ({"size": "much"}, ValueError),
        ({"size": 1, "ranks": 0}, ValueError),
        ({"size": 1, "ranks": True}, ValueError),
        ({"size": 1, "ranks": 1.5}, TypeError),
        ({"size": 1, "device": "tpu"}, ValueError),
        ({"size": 1, "numa_node": -1}, ValueError),
        ({"size": 1, "page_mode": "giant"}, ValueError),
        ({"size": 1, "allow_remote_numa_fallback": False}, ValueError),
    ],
)
def test_a_bad_argument_is_an_error(
    server: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        preflight(**{"device": "cpu", "root": server, **arguments})


# ----------------------------------------------------------------------------------- page modes


def test_hugetlb_is_bounded_by_its_pool_alone(server: Path) -> None:
    root = write(server, pool(size=10, free=6, reserved=1, on_nodes=(4, 2)))
    found = preflight(9 * MIB, device="cpu", page_mode="hugetlb", root=root)
    assert found.size == 10 * MIB
    assert (found.fits, found.recommended) == (True, 10 * MIB)
    assert limit_names(found) == ["pool of 2 MiB pages"]
    assert not preflight(11 * MIB, device="cpu", page_mode="hugetlb", root=root).fits


def test_ranks_take_whole_pages_of_a_pool(server: Path) -> None:
    root = write(server, pool(size=3, free=3, reserved=0, on_nodes=(3, 0)))
    found = preflight("2.5MiB", ranks=2, device="cpu", page_mode="hugetlb", root=root)
    assert (found.fits, found.recommended) == (False, 2 * MIB)


def test_recommendations_are_whole_pages_of_the_pool(server: Path) -> None:
    files = pool(size=3, free=3, reserved=0, on_nodes=(3, 0))
    gigantic = {name.replace("2048kB", "1048576kB"): text for name, text in files.items()}
    root = write(server, gigantic)
    found = preflight(1, ranks=2, device="cpu", page_mode="hugetlb-1GiB", root=root)
    assert (found.size, found.fits, found.recommended) == (GIB, True, GIB)


def test_a_strict_node_has_its_own_part_of_a_pool(server: Path) -> None:
    root = write(server, pool(size=10, free=6, reserved=0, on_nodes=(4, 2)))
    strict = {"numa_node": 1, "allow_remote_numa_fallback": False, "page_mode": "hugetlb"}
    found = preflight(1, device="cpu", root=root, **strict)  # type: ignore[arg-type]
    assert found.recommended == 4 * MIB
    assert limit_names(found)[0] == "pool of 2 MiB pages, on node 1"
    wish = preflight(1, device="cpu", numa_node=1, page_mode="hugetlb", root=root)
    assert wish.recommended == 12 * MIB


def test_a_group_may_limit_huge_pages(server: Path) -> None:
    files = pool(size=10, free=10, reserved=0, on_nodes=(10, 0))
    group = {"job/hugetlb.2MB.max": 8 * MIB, "job/hugetlb.2MB.current": 2 * MIB}
    root = write(server, files | in_group(2, "/job", group))
    found = preflight(1, device="cpu", page_mode="hugetlb", root=root)
    assert found.recommended == 6 * MIB


@pytest.mark.parametrize("mode", ["huge", "auto"])
def test_fragmentation_is_a_note_for_those_who_want_huge_pages(server: Path, mode: str) -> None:
    # Orders 0 to 10: 100 free blocks of 4 MiB on node 0.
    zones = "Node 0, zone   Normal 0 0 0 0 0 0 0 0 0 0 100"
    write(server, {"proc/buddyinfo": zones, **node(0, 400 * MIB), **node(1, 0)})
    (note,) = preflight("8GiB", device="cpu", page_mode=mode, root=server).notes
    assert note.startswith("only 400 MiB is free in blocks of 2 MiB")
    assert "defrag=madvise" in note
    assert preflight("300MiB", device="cpu", page_mode=mode, root=server).notes == ()
    assert preflight("8GiB", device="cpu", page_mode="small", root=server).notes == ()


# ------------------------------------------------------------------------------------- the GPU


def test_registering_takes_gpu_memory(server: Path) -> None:
    found = preflight("20GiB", device=gpu(memory=64 * MIB), root=server)
    assert found.gpu_bytes == 40 * MIB
    assert found.fits
    assert "64 MiB free; registering takes 2 MiB a GiB" in str(found)
    assert preflight(1, device=gpu(), root=server).gpu_bytes == 1


def test_a_gpu_that_is_full_limits_each_rank_by_itself(server: Path) -> None:
    found = preflight("10GiB", ranks=2, device=gpu(memory=4 * MIB), root=server)
    assert not found.fits
    assert found.recommended == 2 * GIB
    assert found.limits[0].name == "memory of cuda:0 Fake GPU 0"


def test_a_gpu_that_does_not_answer_is_a_note(server: Path) -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemGetInfo", Result.NOT_SUPPORTED)
        found = preflight("10GiB", device=gpu(), root=server)
    assert found.fits
    assert any("is not known" in note and "cuMemGetInfo" in note for note in found.notes)


def test_a_gpu_without_room_for_a_context_takes_nothing(server: Path) -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemGetInfo", Result.OUT_OF_MEMORY)
        found = preflight("10GiB", device=gpu(), root=server)
    assert (found.fits, found.recommended) == (False, 0)
    assert "OUT_OF_MEMORY" in str(found)


def test_a_gpu_that_registers_no_host_memory_is_a_note(server: Path) -> None:
    device = gpu(attributes={HOST_REGISTER: 0})
    notes = preflight("1GiB", device=device, root=server).notes
    assert any("on_register_failure='pageable'" in note for note in notes)


def test_wsl_page_locks_half_of_the_memory(server: Path) -> None:
    write(server, {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2"})
    found = preflight("36GiB", device=gpu(memory=GIB), root=server)
    assert not found.fits
    assert found.recommended == 32 * GIB
    assert found.limits[0].name == "page-locking under WSL2"
    assert preflight("36GiB", device="cpu", root=server).fits


def test_the_memlock_limit_is_named_and_does_not_count(server: Path) -> None:
    before, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, most))
    try:
        found = preflight("1GiB", device=gpu(), root=server)
        small = preflight("1MiB", device=gpu(), root=server)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (before, most))
    (note,) = found.notes
    assert note.startswith("RLIMIT_MEMLOCK is 1 MiB")
    assert found.fits
    assert small.notes == ()


# --------------------------------------------------------------------------------- other notes


def test_swap_is_named_and_does_not_count(server: Path) -> None:
    write(server, {"proc/meminfo": kib({**MEMORY, "SwapTotal": 100 * GIB})})
    found = preflight("50GiB", device="cpu", root=server)
    assert not found.fits
    assert any("100 GiB of swap is not counted" in note for note in found.notes)


def test_mappings_that_run_out_are_a_note(server: Path) -> None:
    assert preflight("1GiB", device="cpu", root=server).notes == ()
    write(server, {"proc/self/maps": "\n".join(["1-2 rw-p"] * 64_600)})
    (note,) = preflight("1GiB", device="cpu", root=server).notes
    assert "64600 mappings of 65530 (vm.max_map_count)" in note


# ---------------------------------------------------------------------------- what it looks like


def test_it_is_a_table_for_a_person(server: Path) -> None:
    found = preflight("64GiB", ranks=2, device=gpu(), numa_node=None, root=server)
    text = str(found).splitlines()
    assert text[:5] == [
        "asked        64 GiB for each of 2 processes on cuda:0 Fake GPU 0",
        "answer       does not fit: MemAvailable says no; at most 19.8 GiB each",
        "limits       19.8 GiB  MemAvailable (64 GiB, of which 24 GiB in use)",
        "             8 TiB     memory of cuda:0 Fake GPU 0 "
        "(16 GiB free; registering takes 2 MiB a GiB)",
        "gpu          128 MiB of its memory for registering",
    ]
    assert all("RLIMIT_MEMLOCK" in line for line in text[5:])


def test_its_repr_is_one_line(server: Path) -> None:
    assert (
        repr(preflight("1GiB", device="cpu", root=server)) == "<Preflight 1 x 1 GiB on cpu: fits>"
    )
    assert repr(preflight("64GiB", ranks=2, device="cpu", root=server)) == (
        "<Preflight 2 x 64 GiB on cpu: does not fit, 19.8 GiB would>"
    )


# -------------------------------------------------------------------------------- this machine


def test_this_machine_can_have_a_little_and_not_everything() -> None:
    assert preflight("1MiB", device="cpu").fits
    assert not preflight("1PiB", device="cpu").fits


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_on_address_space_limits_each_rank(child: Child, name: str) -> None:
    code = f"""
        import json, resource
        from hostmem.preflight import preflight
        resource.setrlimit(resource.{name}, (4 << 30, 4 << 30))
        found = preflight("8MiB", ranks=2, device="cpu")
        print(json.dumps([found.fits, found.recommended, found.limits[0].name]))
    """
    done = child(code)
    assert done.returncode == 0, done.stderr
    fits, recommended, first = json.loads(done.stdout)
    assert fits
    assert 2 * GIB < recommended < 4 * GIB
    assert first == name
