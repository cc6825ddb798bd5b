"""Which copies go through the copy kernel, and which through a copy engine: measured."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hostmem._sys.driver import MULTIPROCESSORS
from hostmem.describing import html_of, notebook, one_line
from hostmem.device.copy_kernel import GRAIN, CopyKernel, CopyQueue
from hostmem.device.copy_rates import CopyRates, Rates
from hostmem.errors import CuError, OutOfMemoryError
from hostmem.ranges import RangeTable
from hostmem.units import format_size

if TYPE_CHECKING:
    from hostmem.device.cuda import CudaDevice

__all__ = ["CopyChoice", "Limits"]

# Errors are logged as text: a handler that keeps records would keep frames, and views with them.
log = logging.getLogger("hostmem")

Addresses = NDArray[np.uint64]

_FEWEST = 8  # copies: below, a batch is over before its rows have been brought
_SIZES = tuple(4096 << shift for shift in (0, 2, 4, 6, 8))  # bytes: 4 KiB to 1 MiB
_MARGIN = 1.02  # a copy engine leaves the multiprocessors to others


class Limits(NamedTuple):
    """Bytes of the largest copies that go through the kernel; 0 for none."""

    up: int
    """From the host to the GPU."""
    down: int
    """From the GPU to the host."""
    within: int
    """From the GPU's memory to the GPU's memory."""


_NONE = Limits(0, 0, 0)
_UP, _DOWN, _WITHIN = range(len(_NONE))


class _Reach(NamedTuple):
    """Memory in one of some tables."""

    tables: tuple[RangeTable, ...]

    def enclose(self, start: int, end: int) -> bool:
        return any(table.encloses(start, end) for table in self.tables)

    def cover(self, starts: Addresses, sizes: Addresses) -> NDArray[np.bool_]:
        there = [table.covers(starts, sizes) for table in self.tables if len(table)]
        return np.logical_or.reduce(there) if there else np.zeros(len(starts), np.bool_)


class CopyChoice:
    """Sorts the copies of a device's batches.

    Parameters
    ----------
    device : CudaDevice
        Whose copies.
    largest : int, optional
        Bytes of the largest copies that go through the kernel, in any direction; 0 for none. By
        default it is measured when it first matters, which takes a few tenths of a second; nothing
        is registered meanwhile.
    blocks : int
        Blocks of 256 threads that the kernel takes at most.
    clock : callable
        Seconds; for tests.

    Attributes
    ----------
    rates : tuple of Rates
        What was measured; empty before, and where ``largest`` is given.
    """

    def __init__(
        self,
        device: CudaDevice,
        largest: int | None,
        blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._lock = threading.RLock()  # the collector may run anybody's code inside
        self._clock = clock
        self._kernel: CopyKernel | None = None
        self._limits = None if largest is None else Limits(largest, largest, largest)
        self._why = ""  # nothing goes through the kernel
        self.blocks = blocks
        self.rates: tuple[Rates, ...] = ()

    @property
    def limits(self) -> Limits | None:
        """Up to which size copies go through the kernel; None: not measured yet."""
        return self._limits

    @property
    def _most(self) -> int:
        """Bytes of the largest copy that may be for the kernel."""
        return _SIZES[-1] if self._limits is None else max(self._limits)

    def may_take(self, sizes: Addresses) -> bool:
        """Tell at a glance whether any copy of a batch of these sizes may be for the kernel."""
        return len(sizes) >= _FEWEST and int(sizes.min()) <= self._most

    def by_kernel(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses
    ) -> NDArray[np.bool_] | bool:
        """Tell which copies of a batch are for the kernel: all, none, or some of them.

        Those between the GPU's memory and registered memory, or within the former, that are small
        and aligned to ``GRAIN``. Blocks while limits are measured.
        """
        if len(sizes) < _FEWEST:
            return False
        limits, most = self._limits, self._most
        shortest, longest = int(sizes.min()), int(sizes.max())
        if shortest > most:
            return False
        way = self._way_of_all(destinations, sources, sizes, shortest, longest)
        if way is not None and longest <= most:
            limits = self._measured() if limits is None else limits
            if shortest > limits[way]:
                return False
            if longest <= limits[way]:
                return self._loaded()
        small = (sizes <= most) & ((destinations | sources | sizes) % np.uint64(GRAIN) == 0)
        ways = self._way_of_each(destinations, sources, sizes)
        if limits is None:
            if np.count_nonzero(small & (ways[0] | ways[1] | ways[2])) < _FEWEST:
                return False
            limits = self._measured()
        within_limits = [way & (sizes <= limit) for way, limit in zip(ways, limits, strict=True)]
        small &= within_limits[0] | within_limits[1] | within_limits[2]
        taken = np.count_nonzero(small)
        if taken < _FEWEST or not self._loaded():
            return False
        return bool(taken == len(sizes)) or small

    def _way_of_all(
        self,
        destinations: Addresses,
        sources: Addresses,
        sizes: Addresses,
        shortest: int,
        longest: int,
    ) -> int | None:
        """Return the index of the way that all copies go, if their bounds already tell it."""
        # Each pass over the copies counts: a batch of small ones is over in a millisecond.
        bits = int(np.bitwise_or.reduce(destinations)) | int(np.bitwise_or.reduce(sources))
        bits |= longest if shortest == longest else int(np.bitwise_or.reduce(sizes))
        if bits % GRAIN:
            return None
        gpu, host = self._places()
        to = int(destinations.min()), int(destinations.max()) + longest
        source = int(sources.min()), int(sources.max()) + longest
        to_gpu, from_gpu = gpu.enclose(*to), gpu.enclose(*source)
        if to_gpu and from_gpu:
            return _WITHIN
        if to_gpu and host.enclose(*source):
            return _UP
        if from_gpu and host.enclose(*to):
            return _DOWN
        return None

    def _way_of_each(
        self, destinations: Addresses, sources: Addresses, sizes: Addresses
    ) -> tuple[NDArray[np.bool_], ...]:
        """Tell for each way which copies go it."""
        gpu, host = self._places()
        to_gpu, from_gpu = gpu.cover(destinations, sizes), gpu.cover(sources, sizes)
        up, down = to_gpu & ~from_gpu, from_gpu & ~to_gpu
        if up.any():
            up &= host.cover(sources, sizes)
        if down.any():
            down &= host.cover(destinations, sizes)
        return up, down, to_gpu & from_gpu

    def _places(self) -> tuple[_Reach, _Reach]:
        """Give what the kernel may reach: of the GPU's memory, and of the host's."""
        device = self._device
        return (
            _Reach((device.memory, device.lent_memory.table)),
            _Reach((device.registered, device.lent_registered.table)),
        )

    def queue(self, stream: int) -> CopyQueue | None:
        """Make a queue of the kernel for a stream; None where there is no memory for it.

        Called after `by_kernel` found something for it.
        """
        assert self._kernel is not None
        try:
            return CopyQueue(self._kernel, stream)
        except OutOfMemoryError as error:  # there may be some later
            self._refused(str(error))
        except CuError as error:
            self._refused(str(error))
            self._limits = _NONE
        return None

    def _refused(self, why: str) -> None:
        """Note why small copies go through the copy engines; log it once."""
        if self._why != why:
            self._why = why
            log.warning("small pages go through the copy engines of %s: %s", self._device, why)

    def describe(self) -> str:
        """Return a table of what goes where, and of the rates that were measured."""
        lines = [self._summary()]
        if self.rates:
            lines.append(f"{'GB/s':<8}{'size':>10}{'kernel':>10}{'engine':>10}")
        lines += [
            f"{r.way:<8}{format_size(r.size):>10}{r.kernel / 1e9:10.1f}{r.engine / 1e9:10.1f}"
            for r in self.rates
        ]
        return "\n".join(lines)

    @one_line
    def __repr__(self) -> str:
        limits = self._limits
        if limits is None:
            state = "not measured yet"
        elif not any(limits):
            state = "all through the copy engines"
        else:
            names = zip(Limits._fields, limits, strict=True)
            sizes = ", ".join(f"{way} to {format_size(size)}" for way, size in names)
            state = f"by the copy kernel {sizes}"
        return f"<CopyChoice of {self._device.name}: {state}>"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [self.describe()])

    def _summary(self) -> str:
        if self._limits is None:
            return "copies: the sizes that the copy kernel takes are measured at their first use"
        if not any(self._limits):
            return "copies: all through the copy engines" + (self._why and f" ({self._why})")
        names = zip(Limits._fields, self._limits, strict=True)
        sizes = ", ".join(f"{way} to {format_size(size)}" for way, size in names)
        device = self._device
        total = device.driver.attribute(device.ordinal, MULTIPROCESSORS)
        return (
            f"copies: {sizes} by the copy kernel, {self.blocks} blocks on {total} multiprocessors"
        )

    def _loaded(self) -> bool:
        """Tell whether there is a kernel, and load it if need be."""
        with self._lock:
            if self._kernel is None and self._limits != _NONE:
                try:
                    self._kernel = CopyKernel(self._device, self.blocks)
                except CuError as error:
                    log.warning("%s has no copy kernel: %s", self._device, str(error))
                    self._limits, self._why = _NONE, str(error)
            return self._kernel is not None

    def _measured(self) -> Limits:
        """Measure limits, unless somebody else did meanwhile."""
        with self._lock:
            if self._limits is None and self._loaded():
                self._limits = self._measure()
                log.info("%s: %s", self._device, self.describe())
            return self._limits or _NONE

    def _measure(self) -> Limits:
        assert self._kernel is not None
        try:
            with (
                CopyRates(self._kernel, self._clock) as measured,
                self._device.registrations_held_up(),
            ):
                if not measured.right():
                    log.warning("the copy kernel copies wrong bytes on %s: not used", self._device)
                    self._why = "the copy kernel copies wrong bytes"
                    return _NONE
                self.rates = tuple(
                    measured.of(way, size) for way in Limits._fields for size in _SIZES
                )
        except (CuError, OutOfMemoryError) as error:
            self._refused(str(error))
            return _NONE
        return Limits(*(_limit([r for r in self.rates if r.way == way]) for way in Limits._fields))


def _limit(rates: Sequence[Rates]) -> int:
    """Return the last size, of sizes that rise, up to which the kernel was faster at each."""
    faster = takewhile(lambda rate: rate.kernel > _MARGIN * rate.engine, rates)
    return max((rate.size for rate in faster), default=0)
