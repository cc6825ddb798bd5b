"""Linux, as functions over integers and numpy arrays.

One raiser: a call that fails raises `OSError` with the call, the range and the meaning of its errno
here, or `HostOOMError` where memory ran out. Addresses and sizes are bytes.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import _linux_abi, trace
from hostmem._sys.seam import intercept, restate
from hostmem.errors import HostOOMError

__all__ = [
    "IOV_MAX",
    "Policy",
    "advise_huge",
    "advise_no_fork",
    "advise_small",
    "allow",
    "are_huge",
    "buffer",
    "copy",
    "copy_one_by_one",
    "deny",
    "discard",
    "fallocate",
    "get_policy",
    "huge_regions",
    "iovecs",
    "meaning",
    "node_of_pages",
    "populate",
    "preadv",
    "pwritev",
    "reserve",
    "resident_by_page_kind",
    "set_policy",
    "touch",
    "unmap",
    "zero",
]


class _Library(Protocol):
    """What the generated module's library offers; it types the calls."""

    def mmap(self, addr: Any, length: int, prot: int, flags: int, fd: int, offset: int) -> Any: ...
    def munmap(self, addr: Any, length: int) -> int: ...
    def mprotect(self, addr: Any, length: int, prot: int) -> int: ...
    def madvise(self, addr: Any, length: int, advice: int) -> int: ...
    def process_vm_readv(
        self, pid: int, local: Any, n_local: int, remote: Any, n_remote: int, flags: int
    ) -> int: ...
    def preadv(self, fd: int, iov: Any, count: int, offset: int) -> int: ...
    def pwritev(self, fd: int, iov: Any, count: int, offset: int) -> int: ...
    def ioctl(self, fd: int, request: int, argument: Any) -> int: ...


ffi: Any = _linux_abi.ffi
_libc = ffi.dlopen(None)

_PROT_NONE, _PROT_READ_WRITE = 0, 1 | 2
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x02, 0x20, 0x4000
_MAP_HUGETLB, _MAP_HUGE_SHIFT = 0x40000, 26
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 10, 14, 15
_MADV_POPULATE_WRITE = 23
_ADVICE = {
    _MADV_DONTNEED: "MADV_DONTNEED",
    _MADV_DONTFORK: "MADV_DONTFORK",
    _MADV_HUGEPAGE: "MADV_HUGEPAGE",
    _MADV_NOHUGEPAGE: "MADV_NOHUGEPAGE",
    _MADV_POPULATE_WRITE: "MADV_POPULATE_WRITE",
}
_PAGEMAP_SCAN = 0xC060_6610  # _IOWR('f', 16, struct pm_scan_arg)
_SYSCALLS_OF = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "move_pages": 279, "fallocate": 285},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "move_pages": 239, "fallocate": 47},
}
_SYSCALLS = _SYSCALLS_OF.get(platform.machine(), {})
_NAMES = {number: name for name, number in _SYSCALLS.items()}

_lib = cast(
    _Library,
    trace.library(
        _libc,
        ffi,
        (name for name in vars(_Library) if not name.startswith("_")),
        {"madvise": {2: _ADVICE}, "ioctl": {1: {_PAGEMAP_SCAN: "PAGEMAP_SCAN"}}},
    ),
)
_raw_syscall = trace.c_call(
    "syscall", ffi.cast("raw_syscall_t", ffi.addressof(_libc, "syscall")), ffi, {0: _NAMES}
)

IOV_MAX = 1024
"""Most segments one vectored call takes."""

_LARGEST_TRANSFER = 1 << 30  # the kernel silently cuts a vectored call short of 2 GiB
_NODE_BITS = 1024  # CONFIG_NODES_SHIFT is at most 10


def _pointer(address: int) -> Any:
    return ffi.cast("void *", address)


def meaning(number: int | None) -> str:
    """Say what an errno means: ``Operation not permitted (EPERM)``."""
    if number is None:
        return "no reason given"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def _error(number: int, call: str, address: int, nbytes: int, what: str = "") -> OSError:
    """Build the exception for an errno: which call, which range, what the errno means."""
    message = f"{call} of {nbytes} bytes at {address:#x}: {meaning(number)}"
    return OSError(number, f"{message}; {what}" if what else message)


# ---------------------------------------------------------------- address space: mmap, mprotect


def reserve(nbytes: int, alignment: int, hugetlb_size: int | None = None) -> int:
    """Reserve address space that holds no memory, is charged nothing and cannot be touched.

    Parameters
    ----------
    nbytes, alignment : int
        Bytes; ``nbytes`` a page multiple, ``alignment`` a power of two of at least a page.
    hugetlb_size : int, optional
        Bytes of a page of the hugetlb pool that will back it; None for ordinary memory. Nothing
        of the pool is set aside.

    Returns
    -------
    int
        The address, a multiple of ``alignment``.

    Raises
    ------
    HostOOMError
        ENOMEM: the address space, RLIMIT_AS or vm.max_map_count said no.
    OSError
        EINVAL: the kernel has no hugetlb pages of that size.
    """
    length = nbytes + alignment - (hugetlb_size or os.sysconf("SC_PAGESIZE"))
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    if hugetlb_size:
        flags |= _MAP_HUGETLB | (hugetlb_size.bit_length() - 1) << _MAP_HUGE_SHIFT
        flags = int(ffi.cast("int", flags))  # sizes from 4 GiB reach the sign
    number = intercept("mmap", 0, length)
    if not number:
        raw = int(ffi.cast("intptr_t", _lib.mmap(ffi.NULL, length, _PROT_NONE, flags, -1, 0)))
        if raw == -1:
            number = ffi.errno
    if number == errno.ENOMEM:
        raise HostOOMError(
            f"mmap cannot reserve {nbytes} bytes of address space: larger than the process may map "
            "(address space, RLIMIT_AS, vm.max_map_count); ask for a smaller capacity",
            call="mmap",
            nbytes=nbytes,
        )
    if number:
        raise _error(number, "mmap", 0, length)
    address = raw + -raw % alignment
    _unmap_quietly(raw, address - raw)
    _unmap_quietly(address + nbytes, raw + length - address - nbytes)
    return address


def _unmap_quietly(address: int, nbytes: int) -> None:
    # Trimming what alignment left over: nothing is lost if it stays.
    if nbytes:
        _lib.munmap(_pointer(address), nbytes)


def unmap(address: int, nbytes: int) -> None:
    """Give the address space back, with whatever memory it holds (munmap)."""
    number = intercept("munmap", address, nbytes)
    if not number and _lib.munmap(_pointer(address), nbytes):
        number = ffi.errno
    if number:
        raise _error(number, "munmap", address, nbytes)


def allow(address: int, nbytes: int) -> None:
    """Make a page range readable and writable (mprotect)."""
    _protect(address, nbytes, _PROT_READ_WRITE)


def deny(address: int, nbytes: int) -> None:
    """Make a page range inaccessible (mprotect)."""
    _protect(address, nbytes, _PROT_NONE)


def _protect(address: int, nbytes: int, protection: int) -> None:
    number = intercept("mprotect", address, nbytes, protection)
    if not number and _lib.mprotect(_pointer(address), nbytes, protection):
        number = ffi.errno
    if number == errno.ENOMEM:
        raise HostOOMError(
            f"mprotect of {nbytes} bytes at {address:#x}: the commit limit "
            "(vm.overcommit_memory=2), RLIMIT_DATA, or the number of mappings (vm.max_map_count) "
            "is used up",
            call="mprotect",
            address=address,
            nbytes=nbytes,
        )
    if number:
        raise _error(number, "mprotect", address, nbytes)


# ------------------------------------------------------------------------------ pages: madvise


def _advise(address: int, nbytes: int, advice: int) -> int:
    number = intercept(f"madvise({_ADVICE[advice]})", address, nbytes)
    if number:
        return number
    return ffi.errno if _lib.madvise(_pointer(address), nbytes, advice) else 0


def _advise_or_raise(address: int, nbytes: int, advice: int) -> None:
    number = _advise(address, nbytes, advice)
    if number:
        raise _error(number, f"madvise({_ADVICE[advice]})", address, nbytes)


def populate(address: int, nbytes: int) -> bool:
    """Fault a page range in for writing (MADV_POPULATE_WRITE); blocks, without the GIL.

    Returns
    -------
    bool
        False where the kernel does not know the advice (EINVAL before 5.14, ENOSYS, gVisor): the
        range is untouched then, and `touch` does the same.

    Raises
    ------
    HostOOMError
        ENOMEM.
    OSError
        Any other errno, as it is. EFAULT: a touch would be SIGBUS; the hugetlb pool, or the file
        system behind the range, is full. What was faulted in before stays.
    """
    while True:
        number = _advise(address, nbytes, _MADV_POPULATE_WRITE)
        if number == 0:
            return True
        if number in (errno.EINTR, errno.EAGAIN):
            continue  # a signal came in between; what is faulted in stays so
        if number in (errno.EINVAL, errno.ENOSYS):
            return False
        if number == errno.ENOMEM:
            raise HostOOMError(
                f"madvise(MADV_POPULATE_WRITE) of {nbytes} bytes at {address:#x}: out of memory "
                "(machine, control group or bound NUMA node); lower the size or free memory",
                call="madvise",
                address=address,
                nbytes=nbytes,
            )
        what = "a page cannot be had, and touching it would kill" if number == errno.EFAULT else ""
        raise _error(number, "madvise(MADV_POPULATE_WRITE)", address, nbytes, what)


def touch(address: int, nbytes: int) -> None:
    """Fault a page range in by writing a zero to each page, which must never have been used."""
    array = np.frombuffer(ffi.buffer(_pointer(address), nbytes), np.uint8)
    array[:: os.sysconf("SC_PAGESIZE")] = 0


def zero(address: int, nbytes: int) -> None:
    """Write zeros over a range."""
    np.frombuffer(ffi.buffer(_pointer(address), nbytes), np.uint8)[:] = 0


def discard(address: int, nbytes: int) -> None:
    """Give a range's pages back to the kernel; they read as zero later (MADV_DONTNEED)."""
    _advise_or_raise(address, nbytes, _MADV_DONTNEED)


def advise_no_fork(address: int, nbytes: int) -> None:
    """Keep a range out of forked children (MADV_DONTFORK)."""
    _advise_or_raise(address, nbytes, _MADV_DONTFORK)


def advise_huge(address: int, nbytes: int) -> bool:
    """Ask for transparent huge pages; False where the kernel has none (EINVAL)."""
    return _advise_pages(address, nbytes, _MADV_HUGEPAGE)


def advise_small(address: int, nbytes: int) -> bool:
    """Ask for small pages only; False where the kernel has no huge ones anyway (EINVAL)."""
    return _advise_pages(address, nbytes, _MADV_NOHUGEPAGE)


def _advise_pages(address: int, nbytes: int, advice: int) -> bool:
    number = _advise(address, nbytes, advice)
    if number in (0, errno.EINVAL):
        return number == 0
    raise _error(number, f"madvise({_ADVICE[advice]})", address, nbytes)


# ------------------------------------------------- placement: mbind, get_mempolicy, move_pages


class Policy(enum.IntEnum):
    """Memory policies of set_mempolicy(2)."""

    DEFAULT = 0
    PREFERRED = 1
    BIND = 2
    INTERLEAVE = 3
    LOCAL = 4
    PREFERRED_MANY = 5
    WEIGHTED_INTERLEAVE = 6


def _syscall(name: str, *args: int) -> tuple[int, int]:
    """Make a raw call; returns its result and, where that is negative, the errno."""
    number = intercept(name, *args)
    if number:
        return -1, number
    if name not in _SYSCALLS:
        return -1, errno.ENOSYS
    result = int(_raw_syscall(_SYSCALLS[name], *args, *(0,) * (6 - len(args))))
    return result, ffi.errno if result < 0 else 0


def set_policy(address: int, nbytes: int, policy: Policy, nodes: Sequence[int]) -> None:
    """Set the NUMA policy of a range (mbind); pages already there do not move.

    Raises
    ------
    OSError
        EPERM (a seccomp filter without CAP_SYS_NICE), EINVAL (no such node, or none with memory
        that this process may use), ENOSYS.
    """
    mask = np.zeros(_NODE_BITS // 64, np.uint64)
    for node in nodes:
        if not 0 <= node < _NODE_BITS:
            raise _error(errno.EINVAL, "mbind", address, nbytes, f"node {node} cannot exist")
        mask[node // 64] |= np.uint64(1 << node % 64)
    # The kernel takes one off maxnode, hence the 1 more.
    result, number = _syscall(
        "mbind", address, nbytes, int(policy), mask.ctypes.data, _NODE_BITS + 1, 0
    )
    if result < 0:
        what = f"policy {policy.name}, nodes {list(nodes)}"
        if number == errno.EPERM:
            what += "; a container's seccomp profile refuses it without CAP_SYS_NICE"
        raise _error(number, "mbind", address, nbytes, what)


def get_policy(address: int) -> tuple[Policy, tuple[int, ...]]:
    """Read the policy in force at an address back (get_mempolicy with MPOL_F_ADDR)."""
    mode = np.zeros(1, np.int32)
    mask = np.zeros(_NODE_BITS // 64, np.uint64)
    result, number = _syscall(
        "get_mempolicy", mode.ctypes.data, mask.ctypes.data, _NODE_BITS, address, 2
    )
    if result < 0:
        raise _error(number, "get_mempolicy", address, 0)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return Policy(int(mode[0]) & 0xFF), tuple(np.flatnonzero(bits).tolist())


def node_of_pages(
    addresses: NDArray[np.uint64], status: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Ask where pages are (move_pages that moves nothing).

    Parameters
    ----------
    addresses : uint64 array, shape (pages,), contiguous
        One address in each page.
    status : int32 array, shape (pages or more,), contiguous, optional
        Where the answer goes; a new array where omitted.

    Returns
    -------
    int32 array, shape (pages,)
        The node, or a negative errno: -ENOENT where nothing is resident, -EFAULT where nothing is
        mapped or the page is the shared zero page.
    """
    status = np.empty(len(addresses), np.int32) if status is None else status[: len(addresses)]
    status.fill(-errno.ENOENT)
    result, number = _syscall(
        "move_pages", 0, len(addresses), addresses.ctypes.data, 0, status.ctypes.data, 0
    )
    if result < 0:
        raise _error(number, "move_pages", int(addresses[0]) if len(addresses) else 0, 0)
    restate(addresses, status)
    return status


_PAGE_IS_PRESENT, _PAGE_IS_ZERO, _PAGE_IS_HUGE = 1 << 3, 1 << 5, 1 << 6
_REGIONS = 1024


def resident_by_page_kind(address: int, nbytes: int) -> tuple[int, int]:
    """Count resident bytes of a range in small and in huge pages (PAGEMAP_SCAN).

    Returns
    -------
    small, huge : int
        Bytes; huge are mapped by one entry of a higher page table level (THP or hugetlb).

    Raises
    ------
    OSError
        ENOTTY before Linux 6.7; EPERM or ENOENT where /proc is not there.
    """
    totals = [0, 0]
    with _descriptor("/proc/self/pagemap") as fd:
        for found in _scan(fd, address, nbytes, _PAGE_IS_PRESENT):
            lengths = (found[:, 1] - found[:, 0]).astype(np.int64)
            huge = (found[:, 2] & np.uint64(_PAGE_IS_HUGE)) != 0
            totals[0] += int(lengths[~huge].sum())
            totals[1] += int(lengths[huge].sum())
    return totals[0], totals[1]


def huge_regions(address: int, nbytes: int) -> NDArray[np.uint64]:
    """Find what of a page range is mapped by huge pages, THP or hugetlb (PAGEMAP_SCAN).

    Returns
    -------
    uint64 array, shape (regions, 2)
        First address and end of each region, ascending, cut to the range.

    Raises
    ------
    OSError
        As `resident_by_page_kind`.
    """
    wanted = _PAGE_IS_PRESENT | _PAGE_IS_HUGE
    with _descriptor("/proc/self/pagemap") as fd:
        found = [f[:, :2].copy() for f in _scan(fd, address, nbytes, wanted)]
    return np.concatenate(found) if found else np.zeros((0, 2), np.uint64)


def are_huge(addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Tell of single pages whether a huge page maps them; about 5 us each, as `huge_regions`."""
    page, wanted = os.sysconf("SC_PAGESIZE"), _PAGE_IS_PRESENT | _PAGE_IS_HUGE
    with _descriptor("/proc/self/pagemap") as fd:
        found = [sum(map(len, _scan(fd, address, page, wanted))) for address in addresses.tolist()]
    return np.array(found, np.bool_)


def _scan(fd: int, address: int, nbytes: int, wanted: int) -> Iterator[NDArray[np.uint64]]:
    """Yield the regions (start, end, categories) that have all the wanted categories.

    Each array is gone with the next. The shared zero page is nobody's memory: never in them.
    """
    start, end = address, address + nbytes
    regions = np.empty((min(_REGIONS, nbytes // os.sysconf("SC_PAGESIZE") + 1), 3), np.uint64)
    scan = ffi.new("struct pm_scan_arg *")
    scan.size = ffi.sizeof("struct pm_scan_arg")
    scan.end, scan.vec, scan.vec_len = end, regions.ctypes.data, len(regions)
    scan.category_inverted = _PAGE_IS_ZERO
    scan.category_mask = wanted | _PAGE_IS_ZERO
    scan.return_mask = _PAGE_IS_PRESENT | _PAGE_IS_HUGE
    while start < end:
        scan.start = start
        number = intercept("ioctl", fd, _PAGEMAP_SCAN)
        count = -1 if number else _lib.ioctl(fd, _PAGEMAP_SCAN, scan)
        if count < 0:
            raise _error(number or ffi.errno, "ioctl(PAGEMAP_SCAN)", address, nbytes)
        yield regions[:count]
        start = int(scan.walk_end)


@contextlib.contextmanager
def _descriptor(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


# -------------------------------------------- bytes: process_vm_readv, preadv, pwritev, fallocate


def buffer(address: int, nbytes: int) -> memoryview:
    """Show a memory range as a buffer. The caller sees to it that the range stays."""
    return memoryview(ffi.buffer(_pointer(address), nbytes))


def iovecs(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64] | int) -> NDArray[np.uint64]:
    """Lay addresses and sizes out as C's ``struct iovec`` array, shape (segments, 2)."""
    table = np.empty((len(addresses), 2), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = sizes
    return table


def copy(
    destinations: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64]
) -> None:
    """Copy ranges of this process, many in one system call and without the GIL.

    process_vm_readv on ourselves is a memory copy with a list: one call moves up to 1,024 ranges,
    so that other Python threads do not queue for the interpreter between them. It answers EFAULT
    where a plain copy would be killed by a signal. Blocks until the bytes are there. Ranges must
    not overlap.

    Raises
    ------
    OSError
        EFAULT: a range is not readable, or not writable. Ranges before it are copied.
        ENOSYS, EPERM: not here; `copy_one_by_one` does the same.
    """
    number = intercept("process_vm_readv", len(sizes))
    if number:
        raise _error(number, "process_vm_readv", int(sources[0]), int(sizes[0]))
    pid = os.getpid()
    bounds = np.cumsum(sizes)
    start, moved = 0, 0
    while start < len(sizes):
        fits = int(np.searchsorted(bounds, moved + _LARGEST_TRANSFER, side="right"))
        stop = min(start + IOV_MAX, max(fits, start + 1), len(sizes))
        if int(sizes[start]) > _LARGEST_TRANSFER:
            # One range larger than a call takes: cut it.
            _copy_large(pid, int(destinations[start]), int(sources[start]), int(sizes[start]))
        else:
            local = iovecs(destinations[start:stop], sizes[start:stop])
            remote = iovecs(sources[start:stop], sizes[start:stop])
            _copy_call(pid, local, remote, int(bounds[stop - 1]) - moved)
        start, moved = stop, int(bounds[stop - 1])


def _copy_large(pid: int, destination: int, source: int, nbytes: int) -> None:
    for offset in range(0, nbytes, _LARGEST_TRANSFER):
        size = min(_LARGEST_TRANSFER, nbytes - offset)
        local = np.array([[destination + offset, size]], np.uint64)
        remote = np.array([[source + offset, size]], np.uint64)
        _copy_call(pid, local, remote, size)


def _copy_call(
    pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64], expected: int
) -> None:
    result = _lib.process_vm_readv(
        pid,
        ffi.from_buffer("struct iovec[]", local),
        len(local),
        ffi.from_buffer("struct iovec[]", remote),
        len(remote),
        0,
    )
    if result != expected:
        number = ffi.errno if result < 0 else errno.EFAULT
        what = f"{max(result, 0)} of {expected} bytes in {len(local)} ranges were copied"
        raise _error(number, "process_vm_readv", int(remote[0, 0]), expected, what)


def copy_one_by_one(
    destinations: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64]
) -> None:
    """Copy ranges of this process by memmove, for where process_vm_readv is refused."""
    for destination, source, size in zip(
        destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        ffi.memmove(_pointer(destination), _pointer(source), size)


def preadv(fd: int, table: NDArray[np.uint64], offset: int) -> int:
    """Read a file range into memory ranges (`iovecs`); returns bytes read, 0 at the end of file."""
    return _transfer("preadv", _lib.preadv, fd, table, offset)


def pwritev(fd: int, table: NDArray[np.uint64], offset: int) -> int:
    """Write memory ranges (`iovecs`) to a file range; returns bytes written."""
    return _transfer("pwritev", _lib.pwritev, fd, table, offset)


def _transfer(name: str, function: Any, fd: int, table: NDArray[np.uint64], offset: int) -> int:
    while True:
        number = intercept(name, fd, len(table), offset)
        if number <= 0:
            asked = table if not number else _first_bytes(table, -number)
            result = int(function(fd, ffi.from_buffer("struct iovec[]", asked), len(asked), offset))
            if result >= 0:
                return result
            number = ffi.errno
        if number != errno.EINTR:
            text = f"{name} of {int(table[:, 1].sum())} bytes at file offset {offset}"
            raise OSError(number, f"{text}: {os.strerror(number)}")


def _first_bytes(table: NDArray[np.uint64], nbytes: int) -> NDArray[np.uint64]:
    """Cut a vector after so many bytes."""
    cut = table.copy()
    before = np.cumsum(cut[:, 1]) - cut[:, 1]
    cut[:, 1] = np.minimum(cut[:, 1], np.uint64(nbytes) - np.minimum(before, np.uint64(nbytes)))
    return cut


def fallocate(fd: int, offset: int, nbytes: int) -> None:
    """Have the file system set room for a file range aside; the file grows as needed.

    Unlike posix_fallocate it writes nothing where the file system cannot do so.

    Raises
    ------
    OSError
        ENOSPC, EDQUOT, EFBIG: no room; part of it may have been set aside. EOPNOTSUPP, ENOSYS:
        not here.
    """
    while True:
        number = _syscall("fallocate", fd, 0, offset, nbytes)[1]
        if not number:
            return
        if number != errno.EINTR:
            text = f"fallocate of {nbytes} bytes at file offset {offset}"
            raise OSError(number, f"{text}: {os.strerror(number)}")
