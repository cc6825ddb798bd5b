"""Host memory that is sized once: populated and registered before it is handed out."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hostmem import lifetime
from hostmem.closing import Closable
from hostmem.describing import one_line
from hostmem.device import DeviceLike, resolve_device
from hostmem.device.base import Device
from hostmem.errors import ClosedError, CuError, CuOOMError, RegistrationError
from hostmem.machine import machine
from hostmem.numa import NodeLike, apply_placement, place
from hostmem.page_mode import PageMode
from hostmem.reservation import Reservation
from hostmem.units import Size, format_size, parse_size
from hostmem.views import LiveViews

__all__ = ["StaticHostMem"]

log = logging.getLogger("hostmem")


class _Core:
    """The inside of a `StaticHostMem`, which refers to nothing the user has."""

    def __init__(self, reservation: Reservation, device: Device) -> None:
        self.reservation = reservation
        self.device = device
        self.lock = threading.RLock()
        self.closed = False

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            if self._unregister():
                self.reservation.release()

    def shut_down(self) -> None:
        with self.lock:
            if not self.closed:
                self._unregister()

    def _unregister(self) -> bool:
        self.closed = True
        try:
            with self.device.turns:
                self.device.unregister(self.reservation.address)
        except (CuError, CuOOMError) as error:
            log.error("%r is leaked on purpose: %s", self.reservation, error)
            return False
        return True

    def abandon(self) -> None:
        self.lock = threading.RLock()
        self.closed = True


class StaticHostMem(Closable):
    """A buffer of a fixed size in one registration, usable when the constructor returns.

    For what is small and needed whole, such as staging rings: no thread, no watermark.

    Parameters
    ----------
    nbytes : int or str
        Bytes, at least 1; the mapping is rounded up to pages.
    device, numa_node
        As for `HostMem`.

    Raises
    ------
    ValueError
        No bytes, or not a size.
    HostOOMError
        Memory ran out; nothing was kept.
    RegistrationError
        The driver refused; nothing was kept.

    Notes
    -----
    Blocks while the memory is populated (about 3 GiB/s) and registered.
    """

    def __init__(
        self, nbytes: Size, *, device: DeviceLike = "auto", numa_node: NodeLike = "auto"
    ) -> None:
        self.nbytes = parse_size(nbytes, "nbytes")
        """Bytes, as asked."""
        if self.nbytes < 1:
            raise ValueError(f"nbytes: {nbytes!r}; give at least 1 byte")
        here = machine()
        self.device = resolve_device(device)
        """Who the memory is registered with."""
        placement = place(numa_node, self.device, True, here)
        reservation = Reservation(self.nbytes, here.page_size, PageMode.SMALL, here)
        try:
            apply_placement(placement, reservation.address, reservation.nbytes)
            reservation.allow(0, self.nbytes)
            reservation.populate(0, self.nbytes)
            self._register(reservation.address)
        except BaseException:
            reservation.release()
            raise
        self.address = reservation.address
        """Address of the first byte."""
        self._core = _Core(reservation, self.device)
        self._views = LiveViews()
        self._finalizer = lifetime.watch(self, self._core)

    def _register(self, address: int) -> None:
        try:
            with self.device.turns:
                self.device.register(address, self.nbytes)
        except (CuError, CuOOMError) as error:
            raise RegistrationError(
                f"the driver refused to register {format_size(self.nbytes)}: {error}",
                nbytes=self.nbytes,
                code=error.facts.get("code"),
            ) from error

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child."""
        return self._core.closed

    def view(
        self,
        offset: int = 0,
        nbytes: int | None = None,
        *,
        dtype: DTypeLike = np.uint8,
        shape: tuple[int, ...] | None = None,
    ) -> NDArray[Any]:
        """Return a writable numpy array over bytes of this memory; see `HostMem.view`."""
        if nbytes is None:
            nbytes = self.nbytes - offset
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"view: bytes [{offset}, {offset + nbytes}) are outside 0..{self.nbytes}"
            )
        with self._core.lock:
            if self._core.closed:
                raise ClosedError("the memory was closed")
            data = self._views.make(self, offset, nbytes)
        array: NDArray[Any] = data.view(dtype)
        return array if shape is None else array.reshape(shape)

    def _registered_at(self, offset: int) -> tuple[int, int] | None:
        return None if self._core.closed else (0, self.nbytes)

    def close(self) -> None:
        """Unregister and give the memory back. Idempotent; BufferError under a live view."""
        with self._core.lock:  # so that no view is made meanwhile
            if self.closed:
                return
            taken = self._views.holding(0)
            if taken:
                raise BufferError(f"{len(taken)} live views hold this memory; drop them first")
            self._core.close()
            self._finalizer.detach()

    @one_line
    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self.address:#x}"
        return f"<StaticHostMem {format_size(self.nbytes)}, {state}, {self.device.name}>"
