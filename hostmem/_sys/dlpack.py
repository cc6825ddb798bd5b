"""DLPack capsules as numpy makes them, and the label in them that says where the bytes are.

A capsule of our own would need a deleter, and one that is Python code crashes when a consumer drops
its tensor after the interpreter has ended. Numpy's is C and holds out: so numpy makes the capsule,
and two words in it are changed before anybody else has seen it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CPU", "CUDA_HOST", "capsule_of", "label_pinned"]

CPU, CUDA_HOST = 1, 3  # kDLCPU and kDLCUDAHost; the device's number is 0 for both

_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"
_MAJOR = 1  # of the layout below: a new one need not be compatible
# Numpy 1.26 has neither versioned capsules nor any argument but the stream.
_NEGOTIATES = np.lib.NumpyVersion(np.__version__) >= "2.1.0"

# Prototypes of our own: those in ctypes.pythonapi belong to whoever sets them last.
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Tensor(ctypes.Structure):
    """The beginning of DLManagedTensor, which is its DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, of DLPack 1."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


def capsule_of(
    array: NDArray[Any],
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """Let numpy export an array, labelled kDLCPU; arguments and errors are those of ``__dlpack__``.

    Raises
    ------
    BufferError
        Another device is asked for, or the array has what DLPack cannot say.
    """
    export = np.ndarray.__dlpack__
    if _NEGOTIATES:
        return export(array, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
    if dl_device is not None and tuple(dl_device) != (CPU, 0):
        raise BufferError(f"DLPack device {tuple(dl_device)}: this array is on ({CPU}, 0)")
    return export(array.copy() if copy else array, stream=stream)


def label_pinned(capsule: Any, address: int) -> None:
    """Relabel a fresh capsule of `capsule_of` from kDLCPU to kDLCUDAHost.

    Parameters
    ----------
    capsule : PyCapsule
        Nobody else has seen it.
    address : int
        Of the array's first item.

    Raises
    ------
    BufferError
        It is not laid out as this module knows; it was not changed.
    """
    name = _name_of(capsule)
    tensor, major = _Tensor(), 0
    if name == _PLAIN:
        tensor, major = _Tensor.from_address(_pointer_in(capsule, name)), _MAJOR
    elif name == _VERSIONED:
        versioned = _Versioned.from_address(_pointer_in(capsule, name))
        tensor, major = versioned.tensor, versioned.major
    found = (tensor.data or 0) + tensor.byte_offset, tensor.device_type, tensor.device_id
    if major != _MAJOR or found != (address, CPU, 0):
        raise BufferError(f"numpy {np.__version__} made a DLPack capsule of an unknown layout")
    tensor.device_type = CUDA_HOST
