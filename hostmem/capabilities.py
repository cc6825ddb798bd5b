"""What the kernel, the container and the driver let this process do, and why not: by trying."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from hostmem._sys import linux
from hostmem._sys.driver import load_driver
from hostmem.describing import html_of, notebook, one_line
from hostmem.errors import HostmemError

__all__ = ["Capabilities", "Capability", "capabilities"]


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether something can be done here."""

    available: bool
    """True if trying it worked."""
    reason: str
    """What was seen: the errno's meaning, the driver's version..."""

    def __bool__(self) -> bool:
        return self.available


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Each thing that the library can use, tried once on a page of its own."""

    populate_write: Capability
    """Faulting pages in by MADV_POPULATE_WRITE; without it pages are touched."""
    set_policy: Capability
    """Setting a range's NUMA policy (mbind); without it placement is by first touch."""
    get_policy: Capability
    """Reading a policy back (get_mempolicy)."""
    page_nodes: Capability
    """Asking where pages are (move_pages)."""
    page_kinds: Capability
    """Asking how large pages are (PAGEMAP_SCAN)."""
    copy_list: Capability
    """Copying many ranges in one call (process_vm_readv)."""
    cuda: Capability
    """A CUDA driver that starts and sees a device."""

    def __iter__(self) -> Iterator[tuple[str, Capability]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    @one_line
    def __repr__(self) -> str:
        there = ", ".join(name for name, found in self if found) or "nothing"
        lacking = ", ".join(name for name, found in self if not found)
        return f"<Capabilities: {there}{lacking and f'; not {lacking}'}>"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [str(self)])

    def __str__(self) -> str:
        return "\n".join(
            f"{name:<15}{'yes' if found else 'no ':<4} {found.reason}" for name, found in self
        )


@lru_cache(maxsize=1)
def capabilities() -> Capabilities:
    """Try everything once per process; takes a few milliseconds, and the driver's start-up."""
    page = os.sysconf("SC_PAGESIZE")
    address = linux.reserve(2 * page, page)
    try:
        linux.allow(address, 2 * page)
        return _probe(address, page)
    finally:
        linux.unmap(address, 2 * page)


def _probe(address: int, page: int) -> Capabilities:
    def populate() -> str:
        if not linux.populate(address, page):
            raise OSError("the kernel does not know the advice (Linux 5.14 has it)")
        return "MADV_POPULATE_WRITE"

    def set_policy() -> str:
        linux.set_policy(address, page, linux.Policy.DEFAULT, ())
        return "mbind"

    def page_kinds() -> str:
        linux.resident_by_page_kind(address, page)
        return "PAGEMAP_SCAN"

    def page_nodes() -> str:
        linux.touch(address, page)
        status = int(linux.node_of_pages(np.array([address], np.uint64))[0])
        if status < 0:
            raise OSError(-status, os.strerror(-status))
        return f"move_pages sees node {status}"

    def copy_list() -> str:
        one = np.array([address], np.uint64)
        linux.copy(one + np.uint64(page), one, np.array([page], np.uint64))
        return "process_vm_readv"

    return Capabilities(
        populate_write=_try(populate),
        set_policy=_try(set_policy),
        get_policy=_try(lambda: f"get_mempolicy says {linux.get_policy(address)[0].name}"),
        page_nodes=_try(page_nodes),
        page_kinds=_try(page_kinds),
        copy_list=_try(copy_list),
        cuda=_try(_cuda),
    )


def _cuda() -> str:
    driver = load_driver()
    count = driver.device_count()
    version = driver.version()
    return f"CUDA {version // 1000}.{version % 1000 // 10}, {count} device{'s' * (count != 1)}"


def _try(probe: Callable[[], str]) -> Capability:
    try:
        return Capability(True, probe())
    except (OSError, HostmemError) as error:
        return Capability(False, str(error))
