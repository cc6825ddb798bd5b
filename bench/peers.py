"""What users do for page-locked memory without us; each blocks until all of it is there.

Those that keep what they have allocated run in a process of their own. There, CUDA is started
before the clock is.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter

from hostmem import CudaDevice, Device
from hostmem.units import format_size

__all__ = ["pinned_peers"]

_TORCH = """
import sys, time, torch
torch.zeros(1, device=f"cuda:{sys.argv[2]}")
start = time.perf_counter()
memory = torch.empty(int(sys.argv[1]), dtype=torch.uint8, pin_memory=True)
print(time.perf_counter() - start)
"""
_CUPY = """
import sys, time, cupy
cupy.cuda.Device(int(sys.argv[2])).use()
cupy.zeros(1)
start = time.perf_counter()
memory = cupy.cuda.alloc_pinned_memory(int(sys.argv[1]))
print(time.perf_counter() - start)
"""
_THREADS = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"

# name: (the module it needs, the program, how torch is configured)
_CHILDREN = {
    "torch pin_memory": ("torch", _TORCH, ""),
    "torch, 8 threads": ("torch", _TORCH, _THREADS),
    "CuPy pinned": ("cupy", _CUPY, ""),
}


def pinned_peers(size: int, device: Device) -> tuple[dict[str, Callable[[], float]], list[str]]:
    """Give the peers for so many bytes, and say which are missing here and why.

    Returns
    -------
    dict of str to callable
        Each allocates once and returns the seconds that took.
    list of str
        A line for each peer that is not among them.
    """
    if not isinstance(device, CudaDevice):
        names = ", ".join(["cuMemHostAlloc", *_CHILDREN])
        return {}, [f"{names}: need a GPU"]
    found: dict[str, Callable[[], float]] = {
        "cuMemHostAlloc": partial(_host_alloc, size, device.ordinal)
    }
    missing = []
    for name, (module, program, configuration) in _CHILDREN.items():
        if importlib.util.find_spec(module) is None:
            missing.append(f"{name}: {module} is not installed")
        else:
            found[name] = partial(_in_child, program, size, device.ordinal, configuration)
    return found, missing


def _host_alloc(size: int, ordinal: int) -> float:
    from cuda.bindings import driver as cu

    _, context = cu.cuDevicePrimaryCtxRetain(ordinal)
    cu.cuCtxPushCurrent(context)
    try:
        start = perf_counter()
        code, address = cu.cuMemHostAlloc(size, 0)
        seconds = perf_counter() - start
        if code != cu.CUresult.CUDA_SUCCESS:
            raise SystemExit(f"cuMemHostAlloc of {format_size(size)}: {code.name}")
        cu.cuMemFreeHost(address)
    finally:
        cu.cuCtxPopCurrent()
        cu.cuDevicePrimaryCtxRelease(ordinal)
    return seconds


def _in_child(program: str, size: int, ordinal: int, configuration: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", program, str(size), str(ordinal)],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": configuration},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)
