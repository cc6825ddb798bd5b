"""Host memory for language-model servers: usable at once, filled in the background.

`HostMem` reserves an address range in milliseconds, and populates, places and registers it with the
GPU while the caller already uses its first bytes. `StaticHostMem` is the small, fixed buffer beside
it; `placement_of` shows where any memory really is; `preflight`, `machine` and `capabilities` say
what can be had here.
"""

import logging

from hostmem._version import __version__
from hostmem.capabilities import Capabilities, Capability, capabilities
from hostmem.device import (
    CpuDevice,
    CudaDevice,
    CudaMemory,
    Device,
    Event,
    HostEvent,
    Stream,
    resolve_device,
)
from hostmem.errors import (
    ClosedError,
    CorruptedError,
    CuError,
    CuOOMError,
    DiskOOMError,
    HostmemError,
    HostOOMError,
    OutOfMemoryError,
    OutOfPagesError,
    PeerInitError,
    PlacementRefusedError,
    RegistrationError,
    ResourceBusyError,
)
from hostmem.lifetime import close_on_signal
from hostmem.machine import Machine, Node, machine
from hostmem.placement import Placement, Stretch, placement_of
from hostmem.preflight import Preflight, preflight
from hostmem.progress import FillProgress
from hostmem.progressive import HostMem
from hostmem.static import StaticHostMem

__all__ = [
    "Capabilities",
    "Capability",
    "ClosedError",
    "CorruptedError",
    "CpuDevice",
    "CuError",
    "CuOOMError",
    "CudaDevice",
    "CudaMemory",
    "Device",
    "DiskOOMError",
    "Event",
    "FillProgress",
    "HostEvent",
    "HostMem",
    "HostOOMError",
    "HostmemError",
    "Machine",
    "Node",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PeerInitError",
    "Placement",
    "PlacementRefusedError",
    "Preflight",
    "RegistrationError",
    "ResourceBusyError",
    "StaticHostMem",
    "Stream",
    "Stretch",
    "__version__",
    "capabilities",
    "close_on_signal",
    "machine",
    "placement_of",
    "preflight",
    "resolve_device",
]

# Whoever configures no logging is told by errors and `HostMem.failure`, not on standard error.
logging.getLogger(__name__).addHandler(logging.NullHandler())
