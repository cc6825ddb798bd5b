"""Where pages shall go: what is asked, and what the kernel, honest or not, makes of it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hostmem import (
    CpuDevice,
    CudaDevice,
    Device,
    HostMem,
    Machine,
    Node,
    PlacementRefusedError,
    StaticHostMem,
    machine,
)
from hostmem._sys import linux
from hostmem._sys.linux import Policy
from hostmem.numa import PlacementRequest, apply_placement, place
from hostmem.testing import FakeDriver, FaultPlan

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGESIZE")


def machine_of(*memory: int) -> Machine:
    """Return a machine with a node for each of the given memory sizes (bytes)."""
    nodes = tuple(Node(number, (number,), size) for number, size in enumerate(memory))
    return dataclasses.replace(machine(), nodes=nodes)


TWO = machine_of(GIB, GIB)


def gpu(node: int | None) -> Device:
    device = CudaDevice(0, driver=FakeDriver())
    device.__dict__["numa_nodes_found"] = {"sysfs": node, "driver": None}
    return device


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU whose node nobody knows."""
    monkeypatch.setattr("hostmem.device.cuda.machine", lambda: TWO)
    return gpu(None)


# ------------------------------------------------------------------------------ what is asked


def test_auto_prefers_the_gpus_node() -> None:
    assert place("auto", gpu(1), True, TWO) == PlacementRequest(Policy.PREFERRED, (1,), False)


def test_auto_strict_binds_to_the_gpus_node() -> None:
    assert place("auto", gpu(0), False, TWO) == PlacementRequest(Policy.BIND, (0,), True)


def test_auto_asks_for_nothing_where_the_gpus_node_is_unknown(unknown: Device) -> None:
    assert place("auto", unknown, True, TWO) == PlacementRequest(Policy.DEFAULT, (), False)


def test_auto_strict_is_refused_where_the_gpus_node_is_unknown(unknown: Device) -> None:
    with pytest.raises(PlacementRefusedError, match=r"node of cuda:0 .* is unknown.*numa_node="):
        place("auto", unknown, False, TWO)


def test_auto_on_the_cpu_asks_for_nothing() -> None:
    request = place("auto", CpuDevice(), True, TWO)
    assert request == PlacementRequest(Policy.DEFAULT, (), False)
    assert request.node is None


@pytest.mark.parametrize("node", ["auto", None])
def test_strict_on_the_cpu_needs_an_explicit_node(node: str | None) -> None:
    with pytest.raises(ValueError, match=r"numa_node: strict .* needs an explicit node"):
        place(node, CpuDevice(), False, TWO)


def test_strict_on_the_cpu_binds_to_an_explicit_node() -> None:
    assert place(1, CpuDevice(), False, TWO) == PlacementRequest(Policy.BIND, (1,), True)


def test_none_asks_for_nothing_on_a_gpu_too() -> None:
    assert place(None, gpu(1), True, TWO) == PlacementRequest(Policy.DEFAULT, (), False)


def test_an_explicit_node_wins_over_the_gpus() -> None:
    assert place(0, gpu(1), True, TWO).nodes == (0,)


def test_several_nodes_are_spread_over() -> None:
    request = place([1, 0], gpu(0), True, TWO)
    assert request == PlacementRequest(Policy.INTERLEAVE, (1, 0), False)
    assert request.node == (1, 0)


def test_one_node_in_a_sequence_is_preferred() -> None:
    assert place([1], gpu(0), True, TWO) == PlacementRequest(Policy.PREFERRED, (1,), False)


@pytest.mark.parametrize("node", [np.int64(1), [np.int32(1)], np.array([1]), (1,), range(1, 2)])
def test_a_node_is_any_integer(node: Any) -> None:
    request = place(node, CpuDevice(), True, TWO)
    assert request.nodes == (1,)
    assert request.node == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("node", [2, [0, 2], 10**6])
def test_a_node_that_does_not_exist_is_refused(node: Any, strict: bool) -> None:
    with pytest.raises(PlacementRefusedError, match=r"no node \d+; this machine has \[0, 1\]"):
        place(node, CpuDevice(), not strict, TWO)


def test_strict_on_a_node_without_memory_is_refused() -> None:
    with pytest.raises(PlacementRefusedError, match="node 1 has no memory") as caught:
        place(1, CpuDevice(), False, machine_of(GIB, 0))
    assert caught.value.node == 1


def test_a_gpu_on_a_node_without_memory_is_refused_strictly() -> None:
    with pytest.raises(PlacementRefusedError, match="node 1 has no memory"):
        place("auto", gpu(1), False, machine_of(GIB, 0))


def test_a_node_without_memory_may_be_preferred() -> None:
    assert place(1, CpuDevice(), True, machine_of(GIB, 0)).nodes == (1,)


@pytest.mark.parametrize(
    "junk",
    ["0", "", "node0", -1, True, 1.0, [], [0, 0], [0, -1], [0, "1"], [True], 1j, b"0"],
    ids=repr,
)
def test_what_is_no_node_is_refused(junk: Any) -> None:
    with pytest.raises(ValueError, match="numa_node: "):
        place(junk, CpuDevice(), True, TWO)


@pytest.mark.parametrize(
    ("policy", "nodes", "words"),
    [
        (Policy.DEFAULT, (), "no policy"),
        (Policy.LOCAL, (), "local"),
        (Policy.PREFERRED, (1,), "preferred node 1"),
        (Policy.BIND, (0,), "bind node 0"),
        (Policy.INTERLEAVE, (0, 1), "interleave nodes 0, 1"),
    ],
)
def test_a_request_says_what_it_is(policy: Policy, nodes: tuple[int, ...], words: str) -> None:
    assert str(PlacementRequest(policy, nodes, False)) == words


# ------------------------------------------------------------------------ what the kernel says


@pytest.fixture
def reserved() -> Iterator[int]:
    """Sixteen reserved pages: the address."""
    address = linux.reserve(16 * PAGE, PAGE)
    yield address
    linux.unmap(address, 16 * PAGE)


PREFERRED = PlacementRequest(Policy.PREFERRED, (0,), False)
STRICT = PlacementRequest(Policy.BIND, (0,), True)


@pytest.mark.parametrize("request_", [PREFERRED, STRICT], ids=str)
def test_what_was_accepted_is_read_back(reserved: int, request_: PlacementRequest) -> None:
    assert apply_placement(request_, reserved, 16 * PAGE) == str(request_)
    assert linux.get_policy(reserved + 15 * PAGE) == (request_.policy, (0,))


def test_no_policy_makes_no_call(reserved: int) -> None:
    with FaultPlan() as plan:
        nothing = PlacementRequest(Policy.DEFAULT, (), False)
        assert apply_placement(nothing, reserved, 16 * PAGE) == "no policy"
        assert plan.log == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_refused_preference_is_by_first_touch(reserved: int, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("mbind", number)
        accepted = apply_placement(PREFERRED, reserved, 16 * PAGE)
    assert accepted.startswith("refused (mbind: ")
    assert errno.errorcode[number] in accepted
    assert accepted.endswith("by first touch of threads on the node")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_refused_strict_policy_is_an_error(reserved: int, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("mbind", number)
        with pytest.raises(PlacementRefusedError, match="strict placement on bind node 0") as found:
            apply_placement(STRICT, reserved, 16 * PAGE)
    error = found.value
    assert (error.node, error.call, error.errno) == (0, "mbind", number)
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("request_", [PREFERRED, STRICT], ids=str)
def test_a_policy_that_cannot_be_read_back_is_not_verifiable(
    reserved: int, request_: PlacementRequest
) -> None:
    with FaultPlan() as plan:
        plan.fail("get_mempolicy", errno.EPERM)
        accepted = apply_placement(request_, reserved, 16 * PAGE)
    assert accepted.startswith("accepted, not verifiable (get_mempolicy")


def lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mbind say yes and do nothing, as gVisor's does."""
    monkeypatch.setattr(linux, "set_policy", lambda *_: None)


def test_a_kernel_that_does_not_mean_it_is_found_out_strictly(
    monkeypatch: pytest.MonkeyPatch, reserved: int
) -> None:
    lie(monkeypatch)
    with pytest.raises(PlacementRefusedError, match=r"accepted it and reports no policy.*gVisor"):
        apply_placement(STRICT, reserved, 16 * PAGE)


def test_a_kernel_that_does_not_mean_it_is_reported_otherwise(
    monkeypatch: pytest.MonkeyPatch, reserved: int
) -> None:
    lie(monkeypatch)
    assert apply_placement(PREFERRED, reserved, 16 * PAGE) == "no policy"


def test_a_kernel_that_made_bind_a_preference_is_found_out(
    monkeypatch: pytest.MonkeyPatch, reserved: int
) -> None:
    # The page places of both can be the same: only the policy tells them apart.
    linux.set_policy(reserved, 16 * PAGE, Policy.PREFERRED, (0,))
    lie(monkeypatch)
    with pytest.raises(PlacementRefusedError, match="reports preferred node 0"):
        apply_placement(STRICT, reserved, 16 * PAGE)


def test_the_kernels_order_of_nodes_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch)
    monkeypatch.setattr(linux, "get_policy", lambda address: (Policy.BIND, (0, 1)))
    request = PlacementRequest(Policy.BIND, (1, 0), True)
    assert apply_placement(request, 0, PAGE) == "bind nodes 0, 1"


# ----------------------------------------------------------------------------- whole memories


def test_a_strict_memory_says_what_was_asked_and_accepted() -> None:
    with HostMem(
        "1MiB", device="cpu", numa_node=0, allow_remote_numa_fallback=False, wait=True
    ) as memory:
        placement = memory.placement()
    assert (placement.asked, placement.accepted) == ("bind node 0", "bind node 0")
    assert memory.node == 0


def test_a_strict_memory_that_is_refused_leaves_nothing_behind() -> None:
    with FaultPlan() as plan:
        plan.fail("mbind", errno.EPERM)
        with pytest.raises(PlacementRefusedError):
            HostMem("1MiB", device="cpu", numa_node=0, allow_remote_numa_fallback=False)
        ((_, reserved_bytes),) = plan.calls("mmap")
        ((_, unmapped_bytes),) = plan.calls("munmap")
    assert 0 < unmapped_bytes <= reserved_bytes


def test_a_preferred_memory_that_is_refused_is_filled_by_first_touch() -> None:
    with FaultPlan() as plan:
        plan.fail("mbind", errno.EPERM)
        with HostMem("1MiB", device="cpu", numa_node=0, wait=True) as memory:
            assert "first touch" in memory.placement().accepted


def test_a_refused_static_memory_is_filled_all_the_same() -> None:
    with FaultPlan() as plan:
        plan.fail("mbind", errno.EPERM)
        with StaticHostMem("64KiB", device="cpu", numa_node=0) as memory:
            assert not memory.view().any()


@pytest.mark.parametrize("fallback", [True, False])
def test_a_memory_on_a_node_that_does_not_exist_is_refused(fallback: bool) -> None:
    with pytest.raises(PlacementRefusedError, match="there is no node 999"):
        HostMem("1MiB", device="cpu", numa_node=999, allow_remote_numa_fallback=fallback)


def test_a_memory_on_the_cpu_has_no_node() -> None:
    with HostMem("1MiB", device="cpu", wait=True) as memory, FaultPlan() as plan:
        assert memory.node is None
        assert memory.placement().asked == "no policy"
        assert plan.calls("mbind") == []


def test_a_memory_is_bound_once_and_as_a_whole() -> None:
    with (
        FaultPlan() as plan,
        HostMem("8MiB", device="cpu", numa_node=0, commit_unit="1MiB", wait=True) as memory,
    ):
        assert [args[:3] for args in plan.calls("mbind")] == [
            (memory.address, 8 << 20, Policy.PREFERRED)
        ]


def test_a_node_without_cpus_for_this_process_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = dataclasses.replace(machine(), allowed_cpus=())
    monkeypatch.setattr("hostmem.progressive.machine", lambda: here)
    with (
        caplog.at_level(logging.WARNING, "hostmem"),
        HostMem("1MiB", device="cpu", numa_node=0, wait=True),
    ):
        assert "this process may use no CPU of node 0" in caplog.text


@pytest.mark.numa2
def test_pages_are_where_they_were_bound() -> None:
    node = max(n.number for n in machine().nodes if n.memory_total)
    with HostMem(
        "8MiB", device="cpu", numa_node=node, allow_remote_numa_fallback=False, wait=True
    ) as memory:
        assert memory.placement().bytes_by_node == {node: 8 << 20}


@pytest.mark.numa2
def test_pages_are_spread_over_several_nodes() -> None:
    nodes = [n.number for n in machine().nodes if n.memory_total][:2]
    with HostMem("8MiB", device="cpu", numa_node=nodes, wait=True) as memory:
        assert memory.placement().bytes_by_node == dict.fromkeys(nodes, 4 << 20)
