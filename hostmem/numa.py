"""Where pages shall go: what is asked, and what the kernel accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from hostmem._sys import linux
from hostmem._sys.linux import Policy
from hostmem.device.base import Device
from hostmem.errors import PlacementRefusedError
from hostmem.machine import Machine

__all__ = ["NodeLike", "PlacementRequest", "apply_placement", "place"]

NodeLike = str | int | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A NUMA policy for a whole reservation."""

    policy: Policy
    """DEFAULT where nothing is asked."""
    nodes: tuple[int, ...]
    """Nodes it names."""
    strict: bool
    """Whether anything else is an error."""

    @property
    def node(self) -> int | tuple[int, ...] | None:
        """The node, several to spread over, or None."""
        return self.nodes[0] if len(self.nodes) == 1 else self.nodes or None

    def __str__(self) -> str:
        return describe_policy(self.policy, self.nodes)


def describe_policy(policy: Policy, nodes: tuple[int, ...]) -> str:
    """Say a policy in words: ``preferred node 1``."""
    if not nodes:
        return "no policy" if policy is Policy.DEFAULT else policy.name.lower()
    names = ", ".join(map(str, nodes))
    return f"{policy.name.lower()} node{'s' if len(nodes) > 1 else ''} {names}"


def place(
    node: NodeLike, device: Device, allow_remote_fallback: bool, machine: Machine
) -> PlacementRequest:
    """Turn the ``numa_node`` argument into a request.

    Raises
    ------
    ValueError
        Not a node, or strict on the cpu device without an explicit one.
    PlacementRefusedError
        A node that does not exist; or strict where the GPU's node is unknown or has no memory.
    """
    strict = not allow_remote_fallback
    nodes = _nodes(node, device)
    if not nodes:
        if strict and device.kind == "cpu":
            raise ValueError(
                "numa_node: strict placement on the cpu device needs an explicit node; "
                "the CPU is next to none in particular"
            )
        if strict:
            raise PlacementRefusedError(
                f"strict placement: the memory node of {device.name} is unknown here "
                "(sysfs and driver do not say); give numa_node= or allow_remote_numa_fallback=True"
            )
        return PlacementRequest(Policy.DEFAULT, (), strict=False)
    for number in nodes:
        found = machine.node(number)
        existing = [n.number for n in machine.nodes]
        if found is None:
            raise PlacementRefusedError(
                f"numa_node: there is no node {number}; this machine has {existing}", node=number
            )
        if strict and not found.memory_total:
            raise PlacementRefusedError(f"numa_node: node {number} has no memory", node=number)
    policy = Policy.BIND if strict else Policy.PREFERRED if len(nodes) == 1 else Policy.INTERLEAVE
    return PlacementRequest(policy, nodes, strict)


def _nodes(node: NodeLike, device: Device) -> tuple[int, ...]:
    if node is None:
        return ()
    if isinstance(node, str) and node == "auto":
        return () if device.numa_node is None else (device.numa_node,)
    several = isinstance(node, Iterable) and not isinstance(node, bytes)
    given: list[Any] = list(node) if several else [node]  # type: ignore[arg-type]
    try:
        numbers = tuple(index(n) for n in given)
    except TypeError:
        numbers = ()
    truth = any(isinstance(n, bool) for n in given)
    if not numbers or truth or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"numa_node: {node!r}; give a node's number, several different ones to spread over, "
            "'auto' or None"
        )
    return numbers


def apply_placement(request: PlacementRequest, address: int, nbytes: int) -> str:
    """Set the policy over a whole reservation that holds nothing yet.

    Returns
    -------
    str
        What the kernel accepted, read back; or why it did not and what happens instead.

    Raises
    ------
    PlacementRefusedError
        The request is strict and the kernel refused, or said yes and did not mean it.
    """
    if not request.nodes:
        return "no policy"
    try:
        linux.set_policy(address, nbytes, request.policy, request.nodes)
    except OSError as error:
        if request.strict:
            raise PlacementRefusedError(
                f"strict placement on {request}: mbind: {linux.meaning(error.errno)}; run with "
                "CAP_SYS_NICE or a seccomp profile that allows mbind, or use "
                "allow_remote_numa_fallback=True",
                node=request.node,
                call="mbind",
                errno=error.errno,
            ) from error
        return (
            f"refused (mbind: {linux.meaning(error.errno)}); by first touch of threads on the node"
        )
    try:
        accepted = linux.get_policy(address)
    except OSError as error:
        return f"accepted, not verifiable (get_mempolicy: {linux.meaning(error.errno)})"
    if request.strict and accepted != (request.policy, tuple(sorted(request.nodes))):
        raise PlacementRefusedError(
            f"strict placement on {request}: the kernel accepted it and reports "
            f"{describe_policy(*accepted)}; this kernel (gVisor?) does not place memory",
            node=request.node,
            call="get_mempolicy",
        )
    return describe_policy(*accepted)
