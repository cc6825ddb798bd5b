"""Memory on machines with several nodes: every page is where it was asked to be."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from hostmem import (
    HostMem,
    Machine,
    Node,
    PlacementRefusedError,
    StaticHostMem,
    machine,
    placement_of,
)
from hostmem.testing import FaultPlan
from tests.hostmem.conftest import Child
from tests.threads import Spawn

pytestmark = pytest.mark.numa2

SIZE = 32 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"


@pytest.fixture
def here() -> Machine:
    return machine()


@pytest.fixture
def nodes(here: Machine) -> list[Node]:
    """The nodes with memory."""
    return [node for node in here.nodes if node.memory_total]


@pytest.fixture
def apart(here: Machine, nodes: list[Node]) -> tuple[tuple[int, ...], Node]:
    """CPUs of one node, and another node, which has memory and CPUs."""
    node = next(node for node in reversed(nodes) if here.fill_cpus(node.number))
    cpus = next(cpus for n in nodes if n is not node and (cpus := here.fill_cpus(n.number)))
    return cpus, node


@pytest.fixture
def without_cpus(nodes: list[Node]) -> Node:
    """A node that has memory and no CPU."""
    node = next((node for node in nodes if not node.cpus), None)
    if node is None:
        pytest.skip("no node has memory and no CPU")
    return node


def memory_on(node: Node, strict: bool, page_mode: str = "small") -> HostMem:
    return HostMem(
        SIZE,
        device="cpu",
        numa_node=node.number,
        allow_remote_numa_fallback=not strict,
        page_mode=page_mode,
        wait=True,
    )


strictly = pytest.mark.parametrize("strict", [False, True], ids=["preferred", "strict"])


# ----------------------------------------------------------------------------------- one node


@strictly
@pytest.mark.parametrize("page_mode", ["small", "huge"])
def test_every_page_is_on_the_node_that_was_asked(
    nodes: list[Node], strict: bool, page_mode: str
) -> None:
    for node in nodes:
        with memory_on(node, strict, page_mode) as memory:
            assert memory.placement().bytes_by_node == {node.number: SIZE}


@strictly
def test_what_was_accepted_is_what_was_asked(nodes: list[Node], strict: bool) -> None:
    for node in nodes:
        policy = f"{'bind' if strict else 'preferred'} node {node.number}"
        with memory_on(node, strict) as memory:
            placement = memory.placement()
            assert (placement.asked, placement.accepted) == (policy, policy)
            # Of a part of it too, and by an address that nobody knows is ours.
            assert placement_of(memory.address + SIZE // 2, 4096).accepted == policy


def test_static_memory_is_on_the_node_that_was_asked(nodes: list[Node]) -> None:
    for node in nodes:
        with StaticHostMem("4MiB", device="cpu", numa_node=node.number) as memory:
            assert placement_of(memory.view()).bytes_by_node == {node.number: 4 << 20}


@strictly
def test_memory_that_grew_is_where_the_rest_is(nodes: list[Node], strict: bool) -> None:
    for node in nodes:
        with HostMem(
            SIZE,
            "2MiB",
            device="cpu",
            numa_node=node.number,
            allow_remote_numa_fallback=not strict,
            wait=True,
        ) as memory:
            memory.resize(SIZE)
            memory.wait_usable(SIZE)
            assert memory.placement().bytes_by_node == {node.number: SIZE}


@strictly
def test_a_node_after_the_last_is_refused(here: Machine, strict: bool) -> None:
    after = max(node.number for node in here.nodes) + 1
    with pytest.raises(PlacementRefusedError, match=f"there is no node {after}"):
        HostMem(SIZE, device="cpu", numa_node=after, allow_remote_numa_fallback=not strict)


# -------------------------------------------------------------------------- who faults the pages

PINNED = """
    import logging, os, sys

    os.sched_setaffinity(0, {cpus})
    from hostmem import HostMem

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    for fallback in (True, False):
        with HostMem(
            "8MiB", device="cpu", numa_node={node}, allow_remote_numa_fallback=fallback, wait=True
        ) as memory:
            print(memory.placement().bytes_by_node)
"""


def test_threads_of_another_node_place_pages_all_the_same(
    child: Child, apart: tuple[tuple[int, ...], Node]
) -> None:
    cpus, node = apart
    done = child(PINNED.format(cpus=cpus, node=node.number))
    assert done.returncode == 0, done.stderr
    said = f"fill threads run anywhere: this process may use no CPU of node {node.number}"
    assert done.stdout.splitlines() == [said, str({node.number: 8 << 20})] * 2


def test_a_caller_on_another_node_places_pages_all_the_same(
    spawn: Spawn, apart: tuple[tuple[int, ...], Node]
) -> None:
    cpus, node = apart

    def populate() -> dict[int, int]:
        os.sched_setaffinity(0, cpus)  # of this thread
        with StaticHostMem("4MiB", device="cpu", numa_node=node.number) as memory:
            return placement_of(memory.view()).bytes_by_node

    assert spawn(populate).result(20) == {node.number: 4 << 20}


def test_fill_threads_run_on_the_nodes_cpus(
    here: Machine, apart: tuple[tuple[int, ...], Node]
) -> None:
    _, node = apart
    with FaultPlan() as plan:
        populating = plan.hold(POPULATE)
        with HostMem(SIZE, device="cpu", numa_node=node.number, fill_threads=1) as memory:
            populating.wait_reached()
            (thread,) = (t for t in threading.enumerate() if "populate" in t.name)
            assert thread.native_id is not None
            cpus = os.sched_getaffinity(thread.native_id)
            populating.release()
            memory.wait_usable(SIZE)
    assert cpus == set(here.fill_cpus(node.number))


# --------------------------------------------------------------------------------- several nodes


def test_pages_are_spread_evenly_over_all_nodes(here: Machine, nodes: list[Node]) -> None:
    numbers = [node.number for node in nodes]
    share = 600 * here.page_size
    with HostMem(share * len(numbers), device="cpu", numa_node=numbers, wait=True) as memory:
        placement = memory.placement()
    assert placement.accepted == f"interleave nodes {', '.join(map(str, numbers))}"
    assert placement.bytes_by_node == dict.fromkeys(numbers, share)


# ---------------------------------------------------------------------------- memory without CPUs


def test_memory_without_cpus_is_a_node(here: Machine, without_cpus: Node) -> None:
    assert here.node(without_cpus.number) == without_cpus
    assert here.fill_cpus(without_cpus.number) == ()
    cpus = sorted(cpu for node in here.nodes for cpu in node.cpus)
    assert cpus == list(range(os.cpu_count() or 0))


@strictly
def test_memory_without_cpus_is_filled_from_anywhere(
    without_cpus: Node, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    number = without_cpus.number
    with caplog.at_level(logging.WARNING, "hostmem"), memory_on(without_cpus, strict) as memory:
        assert memory.placement().bytes_by_node == {number: SIZE}
    said = f"fill threads run anywhere: this process may use no CPU of node {number}"
    assert caplog.messages == [said]
