"""The drivers that one contract holds for: the fake and the real one, each in its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import pytest

from hostmem._sys.driver import HOST_POINTERS, CudaDriver, Driver, load_driver
from hostmem.testing import FakeDriver

__all__ = ["DRIVERS", "drivers"]


@lru_cache
def real(batch_version: int) -> CudaDriver:
    return CudaDriver(batch_version)


DRIVERS: dict[str, Callable[[], Driver]] = {
    "fake": FakeDriver,
    "fake, another name for host memory": lambda: FakeDriver(attributes={HOST_POINTERS: 0}),
    "real": load_driver,
    "real, as of CUDA 12.8": lambda: real(12080),
    "real, without the batch call": lambda: real(0),
}


def drivers(names: Iterable[str] = DRIVERS) -> list[Any]:
    """Make parameters of names; the real ones need a GPU."""
    return [pytest.param(n, marks=[pytest.mark.gpu] if "real" in n else []) for n in names]
