"""What a GPU computes while pages are copied: matrix products, on a stream that waits for copies.

On the cpu device numpy computes, on the caller's thread.
"""

from __future__ import annotations

import importlib.util
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from hostmem import CudaDevice, Device, Event
from hostmem.device import DONE

__all__ = ["Product", "product"]


class Product(Protocol):
    """Computes, and measures what that took and what it waited for."""

    def wait(self, event: Event) -> None:
        """Let what is submitted from now on wait for copies."""

    def run(self, times: int) -> Event:
        """Submit products; the event is that of the last."""

    def take(self) -> tuple[float, float]:
        """Wait for all and return the seconds of the products, and of waiting, since the last."""


class _GpuProduct:
    def __init__(self, device: CudaDevice, rows: int) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        where = f"cuda:{device.ordinal}"
        self._stream = torch.cuda.Stream(where)
        with torch.cuda.stream(self._stream):
            shape = rows, rows
            self._left, self._right, self._out = (
                torch.ones(shape, dtype=torch.bfloat16, device=where) for _ in range(3)
            )
        self._products: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []

    def _mark(self) -> Any:
        mark = self._torch.cuda.Event(enable_timing=True)
        mark.record(self._stream)
        return mark

    def wait(self, event: Event) -> None:
        before = self._mark()  # done when the products so far are
        self._device.wait(self._stream.cuda_stream, event)
        self._waits.append((before, self._mark()))

    def run(self, times: int) -> Event:
        before = self._mark()
        with self._torch.cuda.stream(self._stream):
            for _ in range(times):
                self._torch.mm(self._left, self._right, out=self._out)
        self._products.append((before, self._mark()))
        return self._device.event(self._stream.cuda_stream)

    def take(self) -> tuple[float, float]:
        self._stream.synchronize()
        computed, waited = (
            sum(before.elapsed_time(after) for before, after in marks) / 1e3
            for marks in (self._products, self._waits)
        )
        self._products.clear()
        self._waits.clear()
        return computed, waited


class _CpuProduct:
    def __init__(self, rows: int) -> None:
        self._left = np.ones((rows, rows), np.float32)
        self._out = np.empty_like(self._left)
        self._computed = self._waited = 0.0

    def wait(self, event: Event) -> None:
        start = perf_counter()
        event.wait_finished()
        self._waited += perf_counter() - start

    def run(self, times: int) -> Event:
        start = perf_counter()
        for _ in range(times):
            np.matmul(self._left, self._left, out=self._out)
        self._computed += perf_counter() - start
        return DONE

    def take(self) -> tuple[float, float]:
        taken = self._computed, self._waited
        self._computed = self._waited = 0.0
        return taken


def product(device: Device, rows: int) -> Product:
    """Make what computes on a device: products of square matrices, bfloat16 on a GPU.

    Raises
    ------
    SystemExit
        There is a GPU and no torch.
    """
    if not isinstance(device, CudaDevice):
        return _CpuProduct(rows)
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("on a GPU the products are torch's, which is not installed")
    return _GpuProduct(device, rows)
