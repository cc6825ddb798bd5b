"""SGLang's own host pools on a machine without a GPU, with bytes that say where they belong."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import warnings
from importlib import import_module
from typing import Any

__all__ = ["import_sglang", "mha_pool", "storage_config"]


class _Absent(types.ModuleType):
    """A module that has whatever is asked for, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_sglang(name: str) -> Any:
    """Import a module of SGLang's.

    Its models of pictures are imported with its pools, and want a torchvision made for the same
    torch, which there is for GPUs only: nothing here looks at a picture.
    """
    with warnings.catch_warnings():  # those of SGLang and what it imports about each other
        warnings.simplefilter("ignore")
        import_module("sglang")  # with transformers, which must not find what is not there
        absent = [] if importlib.util.find_spec("torchvision") else list(_TORCHVISION)
        for each in absent:
            module = _Absent(each)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(each, None, is_package=True)
            sys.modules[each] = module
        try:
            return import_module(name)
        finally:
            for each in absent:
                del sys.modules[each]


_TORCHVISION = (
    "torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.v2",
    "torchvision.transforms.functional", "torchvision.transforms.v2.functional",
)  # fmt: skip

LAYERS, HEADS, DIM = 3, 2, 64


def mha_pool(
    layout: str = "page_first", *, pages: int = 16, page_size: int = 16, v_dim: int = DIM
) -> Any:
    """A host pool of keys and values, its bytes all different."""
    import torch

    mha = import_sglang("sglang.srt.mem_cache.pool_host.mha")
    info = import_sglang("sglang.srt.mem_cache.device_pool_info")

    def buffers(dim: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(page_size, HEADS, dim, dtype=torch.float16) for _ in range(LAYERS))

    k, v = buffers(DIM), buffers(v_dim)
    pointers = torch.zeros(LAYERS, dtype=torch.uint64)
    given = info.MHABufferInfo(
        buffers=info.KVBuffers(
            k=k, v=v, k_data_ptrs=pointers, v_data_ptrs=pointers,
            layout=next(iter(info.KVBufferLayout)),
        ),
        page_size=page_size, head_num=HEADS, head_dim=DIM, v_head_dim=v_dim,
        dtype=torch.float16, device=torch.device("cpu"),
    )  # fmt: skip
    return mha.get_mha_host_pool_cls(given)(
        given, 1.0, 0, page_size, layout, pin_memory=False,
        device_capacity_tokens=page_size, start_layer=0, end_layer=LAYERS,
        host_token_capacity=pages * page_size,
    )  # fmt: skip


def storage_config(**changed: Any) -> Any:
    """The configuration of one rank."""
    storage = import_sglang("sglang.srt.mem_cache.hicache_storage")
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "org/model", "extra_config": None,
    }  # fmt: skip
    return storage.HiCacheStorageConfig(**{**given, **changed})
