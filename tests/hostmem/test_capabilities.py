"""What this process may do, and why not."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from hostmem import Capabilities, Capability, capabilities
from hostmem.errors import CuError, CuOOMError, HostmemError
from hostmem.testing import FakeDriver, FaultPlan


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Let everything be tried again, here and after the test."""
    capabilities.cache_clear()
    yield
    capabilities.cache_clear()


def driver(monkeypatch: pytest.MonkeyPatch, found: FakeDriver | HostmemError) -> None:
    def load() -> FakeDriver:
        if isinstance(found, HostmemError):
            raise found
        return found

    # By its full name the package has the function, not the module.
    monkeypatch.setattr(sys.modules["hostmem.capabilities"], "load_driver", load)


CALLS = {
    "populate_write": "madvise(MADV_POPULATE_WRITE)",
    "set_policy": "mbind",
    "get_policy": "get_mempolicy",
    "page_nodes": "move_pages",
    "page_kinds": "ioctl",
    "copy_list": "process_vm_readv",
}


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM])
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_is_a_capability_that_is_not_there(name: str, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail(CALLS[name], number, times=None)
        found = dict(capabilities())[name]
    assert not found
    if name == "populate_write" and number in (errno.ENOSYS, errno.EINVAL):
        assert "Linux 5.14 has it" in found.reason
    elif name == "populate_write" and number == errno.ENOMEM:
        assert "out of memory" in found.reason
    else:
        assert errno.errorcode[number] in found.reason
        assert CALLS[name] in found.reason


@pytest.mark.parametrize("name", CALLS)
def test_one_refusal_does_not_hide_the_others(name: str) -> None:
    before = {other: bool(found) for other, found in capabilities()}
    capabilities.cache_clear()
    with FaultPlan() as plan:
        plan.fail(CALLS[name], errno.EPERM, times=None)
        after = {other: bool(found) for other, found in capabilities()}
    assert after == before | {name: False}


def test_what_works_says_what_was_seen() -> None:
    found = capabilities()
    if found.page_nodes:
        assert found.page_nodes.reason.startswith("move_pages sees node ")
    if found.get_policy:
        assert found.get_policy.reason == "get_mempolicy says DEFAULT"


@pytest.mark.parametrize(("count", "words"), [(1, "1 device"), (0, "0 devices"), (8, "8 devices")])
def test_a_driver_says_its_version_and_devices(
    monkeypatch: pytest.MonkeyPatch, count: int, words: str
) -> None:
    driver(monkeypatch, FakeDriver(count))
    assert capabilities().cuda.reason == f"CUDA 13.0, {words}"


@pytest.mark.parametrize("kind", [CuError, CuOOMError])
def test_a_driver_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, kind: type[HostmemError]
) -> None:
    driver(monkeypatch, kind("cuInit: it is ill", code=999, symbol="?", call="cuInit"))
    assert capabilities().cuda == Capability(False, "cuInit: it is ill")


def test_everything_is_tried_once() -> None:
    first = capabilities()
    with FaultPlan() as plan:
        assert capabilities() is first
        assert plan.log == []


def test_trying_leaves_nothing_behind() -> None:
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    with FaultPlan() as plan:
        capabilities()
        ((_, nbytes),) = plan.calls("munmap")
    assert nbytes == 2 * os.sysconf("SC_PAGESIZE")
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == (descriptors, threads)


def test_they_describe_themselves() -> None:
    yes, no = Capability(True, "seen"), Capability(False, "EPERM")
    text = str(Capabilities(yes, no, yes, yes, yes, yes, no)).splitlines()
    assert text[:2] == ["populate_write yes  seen", "set_policy     no   EPERM"]
    assert text[6] == "cuda           no   EPERM"
