"""By which route a device gets at host memory, and why: one line for a log."""

from __future__ import annotations

from hostmem._sys.driver import (
    HOST_NUMA_ID,
    HOST_PAGE_TABLES,
    HOST_POINTERS,
    HOST_REGISTER,
    PAGEABLE_ACCESS,
)
from hostmem.device import CudaDevice, Device
from hostmem.errors import CuError

__all__ = ["route_of"]

_ATTRIBUTES = (HOST_REGISTER, PAGEABLE_ACCESS, HOST_PAGE_TABLES, HOST_POINTERS, HOST_NUMA_ID)


def route_of(device: Device) -> str:
    """Say how host memory is made reachable for a device, and what of the device decides it.

    Costs a call of the driver for each of five attributes.
    """
    if not isinstance(device, CudaDevice):
        return f"page-locked for nobody: {device.name} reads host memory as it is"
    found: dict[str, int | None] = {}
    for attribute in _ATTRIBUTES:
        try:
            found[attribute.name] = device.driver.attribute(device.ordinal, attribute)
        except CuError:  # the driver is older than the attribute
            found[attribute.name] = None
    if found[HOST_REGISTER.name] == 0:
        route = "not page-locked: the driver says that it registers no host memory here"
    elif found[HOST_PAGE_TABLES.name]:
        route = (
            "page-locked by cuMemHostRegister also here, where the GPU reads the host's page "
            "tables: its pages then neither move nor fault under a copy"
        )
    elif found[PAGEABLE_ACCESS.name]:
        route = (
            "page-locked by cuMemHostRegister, because the GPU reaches other memory by faults "
            "that bring it page by page"
        )
    else:
        route = (
            "page-locked by cuMemHostRegister, because the GPU copies other memory only by way of "
            "the driver's own buffers"
        )
    if found[HOST_POINTERS.name] == 0:
        route += ", and it has addresses of its own for it"
    attributes = ", ".join(f"{name} {_or_unknown(value)}" for name, value in found.items())
    try:
        node = device.numa_node
    except CuError:  # which is no reason for whoever logs this to fail
        node = None
    return f"{route} ({device.name}: {attributes}; node {_or_unknown(node)})"


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)
