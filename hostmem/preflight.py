"""What would become of a host memory of some size here, found out without taking any."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import SupportsIndex

from hostmem import huge_pages, procfs
from hostmem._sys.driver import HOST_REGISTER
from hostmem.cgroup import hugetlb_limits
from hostmem.describing import html_of, notebook, one_line
from hostmem.device import CudaDevice, Device, resolve_device
from hostmem.errors import CuError, CuOOMError, PlacementRefusedError
from hostmem.headroom import Limit, headroom
from hostmem.machine import Machine, machine, read_machine
from hostmem.numa import NodeLike, place
from hostmem.page_mode import PageMode, resolve_page_mode
from hostmem.units import Size, align_down, align_up, format_size, parse_size

__all__ = ["Preflight", "preflight"]

_ROOT = Path("/")
_GRAIN = 2 << 20  # bytes that recommendations are multiples of
_REGISTERED_PER_GPU_BYTE = 512  # registering takes 2 MiB of GPU memory a GiB
_FEW_MAPPINGS = 1000


@dataclass(frozen=True, slots=True, repr=False)
class Preflight:
    """What this machine says to a host memory of that size."""

    size: int
    """Bytes that each process is to have, in whole pages of the pool where it is hugetlb's."""
    ranks: int
    """Processes that are to have so much, all at the same time."""
    device: str
    """The device that it would be registered with."""
    limits: tuple[Limit, ...]
    """What bounds it, the tightest first."""
    gpu_bytes: int
    """Bytes of GPU memory that registering takes, of each process's GPU."""
    notes: tuple[str, ...]
    """What else a person should know."""
    grain: int = _GRAIN
    """Bytes that the recommendation is a multiple of."""

    @property
    def available(self) -> int:
        """Bytes that each process could have; what is asked where nothing bounds it."""
        return min((self.for_each(limit) for limit in self.limits), default=self.size)

    @property
    def fits(self) -> bool:
        """Whether all the processes can have their size, as things are now."""
        return self.size <= self.available

    @property
    def recommended(self) -> int:
        """The largest size, in bytes, that fits for each process; 0 if none does."""
        return align_down(self.available, self.grain)

    def for_each(self, limit: Limit) -> int:
        """Bytes that one of the limits leaves for each process."""
        return limit.nbytes if limit.of_each else limit.nbytes // self.ranks

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [str(self)])

    @one_line
    def __repr__(self) -> str:
        answer = "fits" if self.fits else f"does not fit, {format_size(self.recommended)} would"
        return f"<Preflight {self.ranks} x {format_size(self.size)} on {self.device}: {answer}>"

    def __str__(self) -> str:
        each = f" for each of {self.ranks} processes" if self.ranks > 1 else ""
        short = self.limits[0] if self.limits else None
        answer = "fits" if self.fits or short is None else f"does not fit: {short.name} says no"
        most = format_size(self.recommended) if self.recommended else "nothing"
        rows = [
            ("asked", f"{format_size(self.size)}{each} on {self.device}"),
            ("answer", f"{answer}; at most {most}{' each' * (self.ranks > 1)}"),
        ]
        for n, limit in enumerate(self.limits):
            left = format_size(self.for_each(limit))
            rows.append(("" if n else "limits", f"{left:<10}{limit}"))
        if self.gpu_bytes:
            rows.append(("gpu", f"{format_size(self.gpu_bytes)} of its memory for registering"))
        rows += [("" if n else "notes", note) for n, note in enumerate(self.notes)]
        return "\n".join(f"{label:<13}{text}" for label, text in rows)


def preflight(
    size: Size,
    *,
    device: Device | SupportsIndex | str = "auto",
    ranks: int = 1,
    numa_node: NodeLike = "auto",
    allow_remote_numa_fallback: bool = True,
    page_mode: str | None = None,
    root: Path = _ROOT,
) -> Preflight:
    """Say whether a `HostMem` of a size fits here now, and what size does; takes no host memory.

    Parameters
    ----------
    size : int or str
        Bytes that each process is to have.
    device, numa_node, allow_remote_numa_fallback, page_mode
        As `HostMem` takes them.
    ranks : int
        Processes that are to have so much at the same time, each with a GPU of its own. They share
        the machine, the control groups and, with strict placement, the node: count those of this
        node then.
    root : Path
        Where proc and sys are mounted; another place in tests.

    Returns
    -------
    Preflight
        Also where nothing fits: a machine that is short is no error.

    Raises
    ------
    ValueError, TypeError
        A bad argument.
    CuError
        A GPU was asked for and the driver does not start.

    Notes
    -----
    Takes about a millisecond; asking a GPU for its free memory starts the driver and makes the
    device's primary context. The answer is of this moment: what others take later is not in it.
    """
    nbytes = parse_size(size)
    if nbytes < 1:
        raise ValueError(f"size: {size!r}; give at least 1 byte")
    if isinstance(ranks, bool) or index(ranks) < 1:
        raise ValueError(f"ranks: {ranks!r}; give a number of processes, 1 or more")
    where = resolve_device(device)
    here = machine() if root == _ROOT else read_machine(root)
    mode = resolve_page_mode(page_mode, here, root)
    limits: list[Limit] = []
    nodes: tuple[int, ...] = ()
    try:
        nodes = place(numa_node, where, allow_remote_numa_fallback, here).nodes
    except PlacementRefusedError as error:
        limits.append(Limit("placement", 0, 0, exact=True, why=str(error)))
    strict = not allow_remote_numa_fallback
    if mode.hugetlb_size:
        limits += _of_pool(mode.hugetlb_size, nodes if strict else (), root)
    else:
        limits += headroom(nodes, strict, here.page_size, root).limits
    limits += _of_process(root)
    notes = [*_notes(nbytes * ranks, nodes, strict, mode, here, root)]
    if isinstance(where, CudaDevice):
        for finding in _of_gpu(where, nbytes, here):
            if isinstance(finding, Limit):
                limits.append(finding)
            else:
                notes.append(finding)
    return Preflight(
        size=align_up(nbytes, mode.hugetlb_size or 1),
        ranks=ranks,
        device=where.name,
        limits=tuple(sorted(limits, key=lambda x: x.nbytes if x.of_each else x.nbytes // ranks)),
        gpu_bytes=-(-nbytes // _REGISTERED_PER_GPU_BYTE) if isinstance(where, CudaDevice) else 0,
        notes=tuple(notes),
        grain=max(mode.hugetlb_size or 0, _GRAIN),
    )


def _of_pool(page: int, nodes: tuple[int, ...], root: Path) -> Iterator[Limit]:
    """Yield what bounds memory from a pool of huge pages, which nothing else counts."""
    pool = huge_pages.pools(root)[page]
    name = f"pool of {format_size(page)} pages"
    promised = pool.reserved * page
    yield Limit(name, pool.total * page, (pool.total - pool.free) * page + promised, exact=True)
    if nodes:
        free = sum(pool.by_node.get(node, 0) for node in nodes) * page
        yield Limit(f"{name}, on node {', '.join(map(str, nodes))}", free, 0, exact=True)
    for name, nbytes, used in hugetlb_limits(page, root):
        yield Limit(name, nbytes, used, exact=True)


def _of_process(root: Path) -> Iterator[Limit]:
    """Yield the resource limits on address space, which a reservation and its use count for."""
    status = procfs.fields(procfs.read(root / "proc/self/status"))
    for name, number, used in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        nbytes, _ = resource.getrlimit(number)
        if nbytes != resource.RLIM_INFINITY:
            yield Limit(name, nbytes, status.get(used, 0), of_each=True)


def _of_gpu(device: CudaDevice, nbytes: int, here: Machine) -> Iterator[Limit | str]:
    """Yield what the GPU's side of registering bounds, and what is worth a note."""
    name = f"memory of {device.name}"
    try:
        free, total = device.driver.memory_info(device.ordinal)
    except CuOOMError as error:  # not even a context of ours
        yield Limit(name, 0, 0, exact=True, of_each=True, why=str(error))
    except CuError as error:
        yield f"the free {name} is not known: {error}"
    else:
        yield Limit(
            name,
            total * _REGISTERED_PER_GPU_BYTE,
            (total - free) * _REGISTERED_PER_GPU_BYTE,
            exact=True,
            of_each=True,
            why=f"{format_size(free)} free; registering takes 2 MiB a GiB",
        )
    try:
        registers = device.driver.attribute(device.ordinal, HOST_REGISTER)
    except CuError:
        registers = 1  # a driver that does not know the question
    if not registers:
        yield (
            f"{device.name} registers no host memory here (confidential computing?); use "
            "on_register_failure='pageable'"
        )
    if "microsoft" in here.kernel.lower():
        why = "about half of the memory, at times much less; on_register_failure='pageable' helps"
        yield Limit("page-locking under WSL2", here.memory_total // 2, 0, exact=True, why=why)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= locked < nbytes:
        yield (
            f"RLIMIT_MEMLOCK is {format_size(locked)}: the driver's registering does not count "
            "for it, mlock and io_uring do"
        )


def _notes(
    wanted: int, nodes: tuple[int, ...], strict: bool, mode: PageMode, here: Machine, root: Path
) -> Iterator[str]:
    """Yield what does not bound the memory, but will be noticed."""
    huge = here.huge_page_size
    if nodes and not strict and not mode.hugetlb_size:
        for limit in headroom(nodes, True, here.page_size, root).limits:
            if limit.name.startswith("free memory of node") and limit.nbytes < wanted:
                yield f"the {limit} is less than asked; the rest comes from other nodes"
    if mode in (PageMode.HUGE, PageMode.AUTO) and huge:
        free = huge_pages.free_huge_bytes(nodes, here.page_size, huge, root)
        if free < wanted:
            yield (
                f"only {format_size(free)} is free in blocks of {format_size(huge)}: the rest will "
                f"be small pages, or compacted while filling (defrag={here.thp_defrag or '-'})"
            )
    swap = procfs.fields(procfs.read(root / "proc/meminfo")).get("SwapTotal", 0)
    if swap:
        yield f"{format_size(swap)} of swap is not counted: page-locked memory is never swapped out"
    most = procfs.number(procfs.read(root / "proc/sys/vm/max_map_count"))
    mappings = len(procfs.read(root / "proc/self/maps").splitlines())
    if most is not None and most - mappings < _FEW_MAPPINGS:
        yield f"this process has {mappings} mappings of {most} (vm.max_map_count); raise it"
