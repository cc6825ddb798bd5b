"""How fast the copy kernel and the copy engines of one GPU are, and whether they agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import linux
from hostmem.device.copy_kernel import GRAIN, CopyKernel, CopyQueue
from hostmem.device.memory import CudaMemory

__all__ = ["CopyRates", "Rates"]

Addresses = NDArray[np.uint64]

# Of a measurement, bytes and copies. Copy engines look faster in less memory, and when the same
# pages go again.
_BATCH, _MOST = 64 << 20, 512
_UNIT = 2 << 20  # bytes of a registration: an engine pays for going from one to another
_TRIES = 3
_LEAST = 1e-9  # seconds, where a clock saw nothing pass


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured for copies of one size, bytes a second."""

    way: str
    """``"up"``, ``"down"`` or ``"within"``, see `Limits`."""
    size: int
    """Bytes of a copy."""
    kernel: float
    engine: float


class CopyRates:
    """Measures, in memory of its own on both sides, each of two halves, and on a stream of its own.

    Parameters
    ----------
    kernel : CopyKernel
        To measure.
    clock : callable
        Seconds.

    Raises
    ------
    CuOOMError, HostOOMError
        There is no memory to measure in: 130 MiB of the host's, 128 MiB of the GPU's.
    """

    def __init__(self, kernel: CopyKernel, clock: Callable[[], float]) -> None:
        self._device = device = kernel.device
        self._clock = clock
        with contextlib.ExitStack() as undo:
            memory = CudaMemory(device, 2 * _BATCH, 2 * _BATCH, _BATCH)
            undo.callback(memory.close)
            host = linux.reserve(2 * _BATCH, _UNIT)
            undo.callback(linux.unmap, host, 2 * _BATCH)
            linux.advise_no_fork(host, 2 * _BATCH)
            linux.allow(host, 2 * _BATCH)
            for unit in range(host, host + 2 * _BATCH, _UNIT):
                with device.turns:
                    device.register(unit, _UNIT)
                undo.callback(self._unregister, unit)
            self._stream = device.driver.stream_create(device.ordinal)
            undo.callback(device.driver.stream_destroy, device.ordinal, self._stream)
            self._queue = CopyQueue(kernel, self._stream)
            undo.callback(self._queue.close)
            undo.callback(device.driver.stream_synchronize, device.ordinal, self._stream)
            self._undo = undo.pop_all()
        self._host, self._gpu = np.uint64(host), np.uint64(memory.address)
        self._words = np.frombuffer(linux.buffer(host, 2 * _BATCH), np.uint64).reshape(2, -1)
        self._random = np.random.default_rng(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _unregister(self, address: int) -> None:
        with self._device.turns:
            self._device.unregister(address)

    def right(self) -> bool:
        """Tell whether the kernel moves the same bytes as a copy engine, at any size."""
        half, host, gpu = np.uint64(_BATCH), self._host, self._gpu
        self._words[0] = np.arange(_BATCH // 8)
        self._words[1] = 0
        sizes = self._random.integers(1, 1024, 1024, np.uint64) * np.uint64(GRAIN)
        starts = np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.uint64)
        total = int(sizes.sum())
        words = total // 8
        self._kernel_copies(gpu + starts, host + starts, sizes)  # up, within, down
        self._kernel_copies(gpu + half + starts, gpu + starts, sizes)
        self._kernel_copies(host + half + starts, gpu + half + starts, sizes)
        self._synchronize()
        same = np.array_equal(self._words[1, :words], self._words[0, :words])
        same = same and not self._words[1, words:].any()  # nothing past the end
        self._words[1] = 0
        units = np.arange(0, total, _UNIT).astype(
            np.uint64
        )  # an engine copies within a registration
        ends = np.minimum(units + np.uint64(_UNIT), np.uint64(total))
        self._engine_copies(host + half + units, gpu + units, ends - units)
        self._synchronize()
        return same and np.array_equal(self._words[1, :words], self._words[0, :words])

    def of(self, way: str, size: int) -> Rates:
        """Measure both, in turn, for copies of a size in random order."""
        half, bytes_ = np.uint64(_BATCH), np.uint64(size)
        pages = _BATCH // size
        count = min(pages, _MOST)
        here, there = (
            self._random.permutation(pages)[:count].astype(np.uint64) * bytes_ for _ in range(2)
        )
        to = (self._host if way == "down" else self._gpu + half) + here
        source = (self._host if way == "up" else self._gpu) + there
        sizes = np.full(count, bytes_)
        best = [float("inf"), float("inf")]
        for _ in range(_TRIES):
            for path, submit in enumerate((self._kernel_copies, self._engine_copies)):
                start = self._clock()
                submit(to, source, sizes)
                self._synchronize()
                best[path] = min(best[path], self._clock() - start)
        kernel, engine = (count * size / max(seconds, _LEAST) for seconds in best)
        return Rates(way, size, kernel, engine)

    def _kernel_copies(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        self._queue.submit(to, source, sizes)

    def _engine_copies(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        device = self._device
        device.driver.copy_batch(device.ordinal, to, source, sizes, self._stream)

    def _synchronize(self) -> None:
        self._device.driver.stream_synchronize(self._device.ordinal, self._stream)
