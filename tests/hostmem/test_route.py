"""One line in the log says which route memory takes to its device, and why."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest

import hostmem
import kvtier
from hostmem import CudaDevice, HostMem, resolve_device
from hostmem._sys.driver import (
    HOST_NUMA_ID,
    HOST_PAGE_TABLES,
    HOST_POINTERS,
    HOST_REGISTER,
    PAGEABLE_ACCESS,
    CudaDriver,
    DriverAttribute,
    Result,
)
from hostmem.route import route_of
from hostmem.testing import FakeDriver, FaultPlan
from tests.hostmem.conftest import Child

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
DISCRETE = "because the GPU copies other memory only by way of the driver's own buffers"


def gpu(**attributes: int) -> CudaDevice:
    named: dict[str, DriverAttribute] = {
        "register": HOST_REGISTER,
        "pageable": PAGEABLE_ACCESS,
        "tables": HOST_PAGE_TABLES,
        "pointers": HOST_POINTERS,
    }
    answers = {named[name]: value for name, value in attributes.items()}
    return CudaDevice(0, FakeDriver(numa_node=3, attributes=answers))


@pytest.mark.parametrize(
    ("attributes", "route"),
    [
        ({}, DISCRETE),
        ({"pageable": 1}, "because the GPU reaches other memory by faults that bring it page by"),
        ({"pageable": 1, "tables": 1}, "also here, where the GPU reads the host's page tables"),
        ({"register": 0}, "not page-locked: the driver says that it registers no host memory here"),
        ({"register": 0, "tables": 1}, "not page-locked: the driver says"),
        ({"pointers": 0}, f"{DISCRETE}, and it has addresses of its own for it ("),
    ],
)
def test_the_attributes_of_the_device_decide(attributes: dict[str, int], route: str) -> None:
    said = route_of(gpu(**attributes))
    assert route in said
    assert said.endswith("; node 3)")
    for attribute, default in (
        (HOST_REGISTER, attributes.get("register", 1)),
        (PAGEABLE_ACCESS, attributes.get("pageable", 0)),
        (HOST_PAGE_TABLES, attributes.get("tables", 0)),
        (HOST_POINTERS, attributes.get("pointers", 1)),
        (HOST_NUMA_ID, 3),
    ):
        assert f"{attribute.name} {default}" in said
    assert route.partition(", and")[0] in PAGE.read_text()  # which lists the routes


def test_an_old_driver_is_no_reason_to_fail() -> None:
    with FaultPlan() as plan:
        plan.fail("cuDeviceGetAttribute", Result.INVALID_VALUE, times=None)
        plan.fail("cuDeviceGetPCIBusId", Result.INVALID_VALUE, times=None)
        said = route_of(gpu())
    assert DISCRETE in said
    assert said.count("unknown") == 6


def test_the_cpu_page_locks_nothing() -> None:
    said = route_of(resolve_device("cpu"))
    assert said == "page-locked for nobody: cpu reads host memory as it is"


def test_a_memory_says_its_route_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "hostmem"),
        HostMem("4MiB", "1MiB", device=gpu(), numa_node=None, wait=True) as memory,
    ):
        memory.resize("2MiB")
        memory.wait_usable(2 << 20)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("hostmem", logging.INFO)
    text = record.getMessage()
    assert text.startswith(f"4 MiB at {memory.address:#x} is page-locked by cuMemHostRegister, ")
    assert "; small pages; placement asked " in text
    assert "\n" not in text


def test_a_memory_asks_the_driver_nothing_for_a_log_that_nobody_reads() -> None:
    with FaultPlan() as plan, HostMem("1MiB", device=gpu(), numa_node=None, wait=True):
        assert len(plan.calls("cuDeviceGetAttribute")) == 1  # what registered memory is called


def test_that_there_is_no_gpu_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> CudaDriver:
        raise hostmem.CuError("no CUDA driver: none", code=100, symbol="NO_DEVICE", call="cuInit")

    monkeypatch.setattr(hostmem.device, "load_driver", absent)
    with caplog.at_level(logging.INFO, "hostmem"):
        resolve_device("auto")
    assert caplog.messages == ["device 'auto' is the cpu: no CUDA driver: none"]


@pytest.mark.parametrize("package", [hostmem, kvtier])
def test_a_package_has_a_logger_with_a_null_handler(package: ModuleType) -> None:
    name = package.__name__
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger(name).handlers)


def test_without_a_configuration_nothing_is_printed(child: Child) -> None:
    done = child(
        """
        from hostmem import HostMem
        from hostmem.testing import FaultPlan
        with FaultPlan() as plan:
            plan.fail("cuMemHostRegister", 801)
            with HostMem("1MiB", device="cpu") as memory:
                try:
                    memory.wait_usable(1)
                except Exception as error:
                    print(type(error).__name__)
        """
    )
    assert (done.stdout, done.stderr) == ("RegistrationError\n", "")


@pytest.mark.gpu
def test_the_route_to_a_real_gpu_names_what_the_driver_says() -> None:
    device = CudaDevice(0)
    said = route_of(device)
    assert f" ({device.name}: host registration supported " in said
    assert said.count("unknown") <= 1  # a virtual machine may not know the node
    assert len(said.splitlines()) == 1
