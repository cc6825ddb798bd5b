"""SGLang's host pools in memory of ours."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.pool_host import common

from hostmem import HostMem, ResourceBusyError
from hostmem.courier import closings

if TYPE_CHECKING:
    import torch

__all__ = ["HostMemTensorAllocator", "install"]

log = logging.getLogger("kvtier")

_OWNERS = {"mooncake", "mori", "shm", "tensorcast"}  # storage that must own the pool's memory
_WAIT = 600.0  # seconds


class HostMemTensorAllocator(common.HostTensorAllocator):
    """Tensors for host pools: populated by several threads, and page-locked meanwhile.

    A tensor is handed out when all of it is usable, in one registration: SGLang lays the halves of
    a pool side by side and uses both from the first page on. Until then the other threads of the
    process get on with the driver, the memory is next to the GPU, and what it may take is looked
    at before it is taken. It is given back when the last view of a tensor is dropped.

    Parameters
    ----------
    timeout : float or None
        Seconds that `allocate` waits for the fill at most; None: as long as it takes.
    **options
        For `hostmem.HostMem`, such as ``page_mode`` and ``allow_remote_numa_fallback``.
    """

    def __init__(self, *, timeout: float | None = _WAIT, **options: Any) -> None:
        super().__init__()
        self._timeout = timeout
        self._options = options

    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Make a tensor; blocks until its memory is populated and page-locked.

        Parameters
        ----------
        dims : tuple of int
            Shape.
        dtype : torch.dtype
            Type of the items.
        device : str
            ``"cpu"``. The memory is page-locked for torch's current GPU, where there is one.

        Returns
        -------
        torch.Tensor
            Of zeros.

        Raises
        ------
        ValueError
            Another device.
        TimeoutError
            The fill takes longer; nothing was kept.
        HostOOMError, PlacementRefusedError, RegistrationError, CuError, OSError
            As `hostmem.HostMem` says; nothing was kept.
        """
        import torch

        if device != "cpu":
            raise ValueError(f"device: {device!r}; host pools are memory of the CPU")
        self.dims, self.dtype = dims, dtype
        nbytes = prod(dims) * dtype.itemsize
        if not nbytes:
            return torch.empty(dims, dtype=dtype)
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        memory = HostMem(nbytes, **{"device": gpu, **self._options})
        try:
            memory.wait_usable(nbytes, self._timeout)
            memory.consolidate()
            array = memory.view(0, nbytes)
        except BaseException:
            memory.close()
            raise
        log.info("a host pool of SGLang's: %r", memory)
        tensor = torch.from_numpy(array).view(dtype).reshape(dims)
        # What SGLang remembers to unregister later: not its business here.
        setattr(tensor, common._CUDA_HOST_REGISTERED_RANGES_ATTR, [])
        _close_with(array, memory)
        return tensor


def _close_with(array: np.ndarray[Any, Any], memory: HostMem) -> None:
    """Let memory be closed when nothing that was made of a view is left."""
    export: Any = array
    while isinstance(export, np.ndarray):
        export = export.base
    weakref.finalize(export, closings.post, partial(_close, memory)).atexit = False


def _close(memory: HostMem) -> None:
    try:
        memory.close()
    except BufferError:  # the view is being dropped at this moment, on another thread
        closings.post(partial(_close, memory))


def install(*, timeout: float | None = _WAIT, **options: Any) -> Callable[[], None]:
    """Let SGLang's host pools, from now on, be made by `HostMemTensorAllocator`, in this process.

    SGLang has no setting for the allocator of its pools. This replaces, in ``pool_host.common``
    and wherever it was imported from there, ``get_allocator_from_storage``: where it would choose
    the ordinary ``HostTensorAllocator`` it now gives ours. Pools of storage backends that own
    their memory (mooncake, mori, shm, tensorcast) stay theirs. It also replaces
    ``_cuda_host_register``, which leaves tensors of ours alone: they are registered.

    Parameters
    ----------
    timeout, **options
        Of `HostMemTensorAllocator`.

    Returns
    -------
    callable
        Puts back what was there. Pools that exist keep their memory.

    Raises
    ------
    ImportError
        Another version of SGLang than those of `KNOWN_VERSIONS`.
    ResourceBusyError
        It is installed already.
    """
    choose, register = common.get_allocator_from_storage, common._cuda_host_register
    if getattr(choose, "of_kvtier", False):
        raise ResourceBusyError("install: done before in this process; call what it returned first")

    def get_allocator_from_storage(allocator_type: str) -> Any:
        if allocator_type in _OWNERS:
            return choose(allocator_type)
        return HostMemTensorAllocator(timeout=timeout, **options)

    def _cuda_host_register(
        buffer: torch.Tensor, registration_granularity_bytes: int | None = None
    ) -> None:
        if getattr(buffer, common._CUDA_HOST_REGISTERED_RANGES_ATTR, None) != []:
            register(buffer, registration_granularity_bytes)

    get_allocator_from_storage.of_kvtier = True  # type: ignore[attr-defined]
    _replace("get_allocator_from_storage", choose, get_allocator_from_storage)
    _replace("_cuda_host_register", register, _cuda_host_register)

    def undo() -> None:
        _replace("get_allocator_from_storage", get_allocator_from_storage, choose)
        _replace("_cuda_host_register", _cuda_host_register, register)

    return undo


def _replace(name: str, old: object, new: object) -> None:
    """Put one function in another's place in every module of SGLang's that has it by its name."""
    for where, module in list(sys.modules.items()):
        if where.startswith("sglang.") and module.__dict__.get(name) is old:
            setattr(module, name, new)
