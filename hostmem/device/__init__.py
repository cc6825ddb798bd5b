"""Devices: the GPU, and the CPU in its place."""

from __future__ import annotations

import logging
from functools import lru_cache
from operator import index
from typing import SupportsIndex

from hostmem._sys.driver import NO_LIBRARY, Result, load_driver
from hostmem.device.base import Device, Stream
from hostmem.device.cpu import CpuDevice
from hostmem.device.cuda import CudaDevice
from hostmem.device.events import DONE, Event, HostEvent, fresh
from hostmem.device.memory import CudaMemory
from hostmem.errors import CuError

__all__ = [
    "DONE",
    "CpuDevice",
    "CudaDevice",
    "CudaMemory",
    "Device",
    "Event",
    "HostEvent",
    "Stream",
    "fresh",
    "resolve_device",
]

log = logging.getLogger("hostmem")

_ABSENT = {NO_LIBRARY, Result.STUB_LIBRARY, Result.NO_DEVICE}
DeviceLike = Device | SupportsIndex | str


@lru_cache(maxsize=1)
def _cpu() -> CpuDevice:
    return CpuDevice()


@lru_cache(maxsize=64)
def _cuda(ordinal: int) -> CudaDevice:
    return CudaDevice(ordinal)


def resolve_device(device: DeviceLike) -> Device:
    """Turn what users write for a device into a `Device`.

    Parameters
    ----------
    device : int, Device or str
        A GPU's ordinal, ``"cpu"``, or ``"auto"``: the only visible GPU, or the CPU where there is
        none.

    Raises
    ------
    ValueError
        ``"auto"`` with several GPUs, no such GPU, or a name that is none of these.
    TypeError
        Neither a number nor a name.
    CuError
        A GPU was asked for and the driver does not start.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        if device == "cpu":
            return _cpu()
        if device != "auto":
            raise ValueError(f"device: {device!r}; give an ordinal, 'cpu' or 'auto'")
        count = _visible_devices()
        if count > 1:
            raise ValueError(f"device: 'auto' with {count} visible GPUs; give an ordinal")
        return _cuda(0) if count else _cpu()
    try:
        if isinstance(device, bool):
            raise TypeError
        ordinal = index(device)
    except TypeError:
        raise TypeError(f"device: {device!r}; give an ordinal, 'cpu' or 'auto'") from None
    return _cuda(ordinal)


def _visible_devices() -> int:
    try:
        return load_driver().device_count()
    except CuError as error:
        if error.code in _ABSENT:
            log.info("device 'auto' is the cpu: %s", error)
            return 0
        raise
