"""Configurations as vLLM hands them to its specs, without a model."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

__all__ = ["BLOCK_BYTES", "key", "keys", "offloading_config", "request"]

BLOCK_BYTES = 3 * 2048  # of one worker


def offloading_config(
    extra: dict[str, Any],
    *,
    world_size: int = 1,
    blocks_per_chunk: int = 1,
    events: bool = False,
    canonical: bool = False,
    replicated: bool = False,
    model: str = "a/model",
    engine: str = "engine",
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1", "layer.2"), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=events,
        extra_config=extra,
        engine_id=engine,
        model=OffloadingModelConfig(model, "float16", 4096),
        cache=OffloadingCacheConfig(16, blocks_per_chunk),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=world_size, tp_size=world_size, pp_size=1, pcp_size=1, dcp_size=1,
            data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        canonical_layout=canonical,
        replicated_layout=replicated,
        kv_cache_layout="LBHNC",
    )  # fmt: skip


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def request(name: str, prompt: list[OffloadKey] | None = None) -> ReqContext:
    """Make the context of a request whose keys are at the ends of its blocks."""
    context = ReqContext(name)
    for place, each in enumerate(prompt or ()):
        context.set_offload_key_position(each, (place + 1) * 16)
    return context
