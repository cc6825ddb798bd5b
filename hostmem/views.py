"""Numpy arrays over memory of ours, and the knowledge of which of them live."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hostmem._sys.dlpack import CUDA_HOST, capsule_of, label_pinned
from hostmem.device.base import Device

__all__ = ["HostArray", "LiveViews", "Owner"]


class Owner(Protocol):
    """Whose memory views are of. Offsets are bytes from its address."""

    @property
    def address(self) -> int:
        """Address of offset 0."""

    @property
    def device(self) -> Device:
        """Who the memory is registered with."""

    def _registered_at(self, offset: int) -> tuple[int, int] | None:
        """Return the (start, nbytes) of the registration that holds ``offset``, or None."""


class HostArray(np.ndarray[Any, np.dtype[Any]]):
    """An array over memory of ours, which it can also export as pinned memory.

    Slices and reshaped or retyped arrays are of this type, too; results of arithmetic are plain
    arrays. The type alone says nothing of where the bytes are (`copy` keeps it, for example):
    that is looked up at the export, by the addresses of the very array that is exported.
    """

    __slots__ = ()

    __array_priority__ = -1.0  # joined with plain arrays, the result is a plain one

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export the array as a DLPack capsule, labelled as the consumer asks.

        Without a wish, and for ``(1, 0)``, the label is kDLCPU: every importer takes that, while
        torch's refuses kDLCUDAHost, and jax's does where it has no GPU. Those that ask the driver
        about the address, as torch does, find it page-locked under either label.

        Parameters
        ----------
        stream : None
            Host memory has no stream to wait for.
        max_version : tuple of int, optional
            The newest DLPack version the consumer knows; from (1, 0) on, the capsule is versioned
            (with numpy 2.1 and newer).
        dl_device : tuple of int, optional
            ``(3, n)``: kDLCUDAHost. Pinned memory is every device's: the label's number is 0.
        copy : bool, optional
            True: a copy, which is labelled kDLCPU.

        Returns
        -------
        PyCapsule
            It keeps the memory like any view.

        Raises
        ------
        BufferError
            Pinned memory is asked for and the bytes are not all in one registration, or a copy of
            them is wanted; another device is asked for; the array has what DLPack cannot say.

        Notes
        -----
        The label is of the moment: ``suspend_registration`` does not ask who has imported what.
        """
        if dl_device is None or dl_device[0] != CUDA_HOST:
            return capsule_of(
                self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
            )
        if copy:
            raise BufferError("a copy is not pinned memory: ask for one on the CPU, (1, 0)")
        address = _address(self)
        _refuse_unpinned(self, address)
        capsule = capsule_of(self, stream=stream, max_version=max_version, copy=copy)
        label_pinned(capsule, address)
        return capsule

    def __array_wrap__(
        self, array: NDArray[Any], context: Any = None, return_scalar: bool = True
    ) -> Any:
        """Make the result of a function a plain array; numpy 1.26 does not ask for scalars."""
        if array is self:  # the function's ``out``
            return array
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain array: the bytes travel, the memory does not."""
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _refuse_unpinned(array: NDArray[Any], address: int) -> None:
    """Raise BufferError unless one registration holds all bytes of an array."""
    export: Any = array.base
    while isinstance(export, np.ndarray):
        export = export.base
    if not isinstance(export, _Export):
        raise BufferError("not pinned memory: these bytes are a copy; ask view() itself for them")
    owner = export.owner
    if owner.device.kind != "cuda":
        raise BufferError(
            f"not pinned memory: {owner.device.name} registers nothing with a CUDA driver"
        )
    if not array.size:
        return
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    start = address - owner.address + sum(step for step in steps if step < 0)
    end = address - owner.address + sum(step for step in steps if step > 0) + array.itemsize
    boundary, at = 0, start
    while at < end:
        found = owner._registered_at(at)
        if found is None:
            raise BufferError(
                f"not pinned memory: byte {at} of [{start}, {end}) is not registered: the driver "
                "refused it (see `quarantined`), or the registration is suspended"
            )
        at = sum(found)
        boundary = boundary or at
    if boundary < end:
        raise BufferError(
            f"not one range of pinned memory: a registration ends at {boundary}, inside bytes "
            f"[{start}, {end}); consolidate() joins registrations"
        )


class _Export:
    """What an array of ours holds on to.

    Numpy keeps it alive as long as any array, slice, memoryview or tensor that came from it lives,
    and it keeps the owner of the memory.
    """

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(self, owner: Owner, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class LiveViews:
    """The views of one memory that somebody still holds.

    Counted by a weak reference to what each view's arrays share, so that slices, memoryviews and
    imports into other libraries count, and dropping the last of them is enough.
    """

    def __init__(self) -> None:
        self._ranges: dict[weakref.ref[_Export], tuple[int, int]] = {}

    def make(self, owner: Owner, start: int, nbytes: int) -> HostArray:
        """Make a byte array over ``[start, start + nbytes)`` of the owner's memory."""
        export = _Export(owner, owner.address + start, nbytes)
        if nbytes:
            # One dictionary operation each way: nothing here can be interrupted half-way.
            self._ranges[weakref.ref(export, self._forget)] = (start, start + nbytes)
        return np.asarray(_interface(export)).view(HostArray)

    def _forget(self, reference: weakref.ref[_Export]) -> None:
        self._ranges.pop(reference, None)

    def holding(self, start: int, end: int | None = None) -> list[tuple[int, int]]:
        """Return the (start, end) of the live views that hold a byte of ``[start, end)``."""
        ranges = list(self._ranges.values())
        return sorted(r for r in ranges if r[1] > start and (end is None or r[0] < end))


def _interface(export: _Export) -> Any:
    return export
