"""What users may write for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hostmem.device
from hostmem import CpuDevice, CudaDevice, resolve_device
from hostmem.device import cuda
from hostmem.errors import CuError, CuOOMError, HostmemError
from hostmem.testing import FakeDriver

Install = Callable[[FakeDriver | HostmemError], None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make a driver the process's own, or loading it fail."""
    hostmem.device._cuda.cache_clear()

    def install(found: FakeDriver | HostmemError) -> None:
        def load() -> FakeDriver:
            if isinstance(found, HostmemError):
                raise found
            return found

        monkeypatch.setattr(hostmem.device, "load_driver", load)
        monkeypatch.setattr(cuda, "load_driver", load)

    yield install
    hostmem.device._cuda.cache_clear()


def error(code: int) -> CuError:
    return CuError("no driver", code=code, symbol="?", call="cuInit")


def test_a_device_is_itself() -> None:
    device = CpuDevice()
    assert resolve_device(device) is device


def test_cpu_is_the_cpu_and_always_the_same() -> None:
    device = resolve_device("cpu")
    assert device.kind == "cpu"
    assert device.ordinal is None
    assert resolve_device("cpu") is device


def test_cpu_does_not_look_for_a_driver(driver: Install) -> None:
    driver(error(999))
    assert resolve_device("cpu").kind == "cpu"


def test_auto_is_the_only_gpu(driver: Install) -> None:
    driver(FakeDriver())
    device = resolve_device("auto")
    assert isinstance(device, CudaDevice)
    assert device.ordinal == 0


def test_auto_is_the_cpu_where_no_gpu_is_visible(driver: Install) -> None:
    driver(FakeDriver(0))
    assert resolve_device("auto") is resolve_device("cpu")


def test_auto_among_several_gpus_asks_for_an_ordinal(driver: Install) -> None:
    driver(FakeDriver(2))
    with pytest.raises(ValueError, match=r"device: 'auto' with 2 visible GPUs; give an ordinal"):
        resolve_device("auto")


@pytest.mark.parametrize("code", [-1, 34, 100], ids=["no library", "a stub library", "no device"])
def test_auto_is_the_cpu_where_there_is_no_driver(driver: Install, code: int) -> None:
    driver(error(code))
    assert resolve_device("auto") is resolve_device("cpu")


@pytest.mark.parametrize("code", [3, 500, 802, 999])
def test_auto_does_not_hide_a_broken_driver(driver: Install, code: int) -> None:
    driver(error(code))
    with pytest.raises(CuError) as caught:
        resolve_device("auto")
    assert caught.value.code == code


def test_auto_does_not_hide_that_the_driver_ran_out_of_memory(driver: Install) -> None:
    driver(CuOOMError("cuInit: no memory", code=2, symbol="?", call="cuInit"))
    with pytest.raises(CuOOMError):
        resolve_device("auto")


def test_an_ordinal_needs_a_driver(driver: Install) -> None:
    driver(error(-1))
    with pytest.raises(CuError):
        resolve_device(0)


@pytest.mark.parametrize("ordinal", [1, np.int64(1), np.uint8(1)])
def test_an_ordinal_is_any_integer(driver: Install, ordinal: Any) -> None:
    driver(FakeDriver(2))
    assert resolve_device(ordinal).ordinal == 1


def test_a_gpu_is_always_the_same_device(driver: Install) -> None:
    driver(FakeDriver(2))
    assert resolve_device(1) is resolve_device(1)
    assert resolve_device(0) is not resolve_device(1)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_an_ordinal_is_one_of_the_visible_devices(driver: Install, ordinal: int) -> None:
    driver(FakeDriver(2))
    with pytest.raises(ValueError, match=f"device: {ordinal}"):
        resolve_device(ordinal)


@pytest.mark.parametrize("junk", ["gpu", "cuda:0", "0", "", "CPU"])
def test_another_name_is_refused(junk: str) -> None:
    with pytest.raises(ValueError, match=r"device: .*give an ordinal, 'cpu' or 'auto'"):
        resolve_device(junk)


@pytest.mark.parametrize("junk", [True, False, None, 1.0, b"cpu", [0], object()])
def test_what_is_no_number_is_refused(junk: Any) -> None:
    with pytest.raises(TypeError, match=r"device: .*give an ordinal, 'cpu' or 'auto'"):
        resolve_device(junk)
