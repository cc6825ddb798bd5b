"""Which bytes of memory an object has: arrays, tensors, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["extent"]


def extent(obj: Any, nbytes: int | None = None) -> tuple[int, int]:
    """Return the address and the bytes from it, up to the last, that an object's items lie in.

    Parameters
    ----------
    obj : buffer, array, tensor or int
        Anything with the buffer, array or DLPack interface, a CPU tensor, or an address.
    nbytes : int, optional
        Bytes from an address; required with an address only.

    Raises
    ------
    TypeError
        Nothing with bytes in host memory, or an address without ``nbytes``.
    """
    if isinstance(obj, int) and not isinstance(obj, bool):
        if nbytes is None or nbytes < 0 or obj < 0:
            raise TypeError("nbytes: an address needs the number of bytes from it")
        return obj, nbytes
    if nbytes is not None:
        raise TypeError("nbytes: goes with an address; a buffer has its own")
    if hasattr(obj, "data_ptr") and hasattr(obj, "nbytes"):  # a tensor, without importing torch
        return _of_tensor(obj)
    array = _array(obj)
    start = int(array.__array_interface__["data"][0])
    return _reach(start, array.shape, array.strides, array.itemsize)


def _of_tensor(tensor: Any) -> tuple[int, int]:
    if not getattr(tensor, "is_cpu", True):
        raise TypeError(f"expected a tensor in host memory, not on {tensor.device}")
    start = int(tensor.data_ptr())
    if not hasattr(tensor, "stride"):
        return start, int(tensor.nbytes)
    size = int(tensor.element_size())
    return _reach(start, tuple(tensor.shape), [n * size for n in tensor.stride()], size)


def _array(obj: Any) -> NDArray[Any]:
    try:
        if hasattr(obj, "__array_interface__"):
            return np.asarray(obj)
        if hasattr(obj, "__dlpack__"):
            return np.from_dlpack(obj)
        return np.asarray(memoryview(obj))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(
            "expected a buffer, an array or a tensor in host memory, or an address, not "
            f"{type(obj).__name__}"
        ) from error


def _reach(
    start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[int, int]:
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    low = sum(r for r in reach if r < 0)
    high = sum(r for r in reach if r > 0) + itemsize
    return start + low, high - low
