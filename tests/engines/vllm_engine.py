"""vLLM's own scheduler and connector on the CPU, with a model that only writes what it would.

The pages of a block get bytes that follow from all tokens up to each, so that every page that was
not computed in place can be told from the one that should be there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

__all__ = ["BLOCK", "Engine", "page_bytes"]

BLOCK = 16  # tokens
LAYERS = ("layer.0", "layer.1", "layer.2")
END = 2  # the token that ends an answer
_SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float16)
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": len(LAYERS), "vocab_size": 1 << 16, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": END,
}  # fmt: skip


def page_bytes() -> int:
    """Bytes of a block's page in one layer."""
    return int(_SPEC.page_size_bytes)


class Engine:
    """A scheduler and a worker, joined by the connector that a configuration names.

    Parameters
    ----------
    folder : Path
        For the description of the model.
    extra : mapping
        ``kv_connector_extra_config``.
    blocks : int
        Of device memory.
    """

    def __init__(self, folder: Path, extra: Mapping[str, Any], *, blocks: int) -> None:
        (folder / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0,
            enforce_eager=True, max_model_len=4096,
        )  # fmt: skip
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=256, max_model_len=4096,
                enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both",
                kv_connector_extra_config=dict(extra),
            ),
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = blocks
        page = page_bytes()
        memory = [
            KVCacheTensor(
                size=len(LAYERS) * blocks * page, layers=list(LAYERS),
                layer_stride=blocks * page, block_stride=page,
            )
        ]  # fmt: skip
        caches = KVCacheConfig(blocks, memory, [KVCacheGroupSpec(list(LAYERS), _SPEC)])
        self.scheduler = Scheduler(
            config, caches, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        self.worker = OffloadingConnector(config, KVConnectorRole.WORKER, caches)
        self.pages = torch.zeros((len(LAYERS), blocks, page), dtype=torch.int8)
        self.worker.register_kv_caches(dict(zip(LAYERS, self.pages, strict=True)))
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._requests = 0
        self.loaded: dict[str, int] = {}
        """Of each request, the tokens that it did not compute."""

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        """The worker of the plug-in."""
        return self.worker.connector_worker.worker

    # ------------------------------------------------------------------------------- requests

    def ask(self, prompt: Sequence[int], answer: int = 3) -> str:
        """Add a request that is answered with so many tokens; give its name."""
        name = f"request-{self._requests}"
        self._requests += 1
        wanted = SamplingParams(max_tokens=answer, ignore_eos=True)
        request = Request(name, list(prompt), wanted, None, block_hasher=self._hasher)
        self._tokens[name] = list(prompt)
        self.scheduler.add_request(request)
        return name

    def run(self, *prompts: Sequence[int]) -> list[int]:
        """Answer prompts, all at the same time; give the tokens that each did not compute."""
        names = [self.ask(prompt) for prompt in prompts]
        steps = 0
        while self.scheduler.has_requests():
            self.step()
            steps += 1
            assert steps < 10_000, "the engine does not come to an end"
        return [self.loaded.pop(name) for name in names]

    def step(self) -> None:
        """Schedule, move and compute once."""
        planned = self.scheduler.schedule()
        told = planned.kv_connector_metadata
        self.worker.bind_connector_metadata(told)
        self.worker.handle_preemptions(told)
        self.worker.start_load_kv(ForwardContext({}, {}, {}))
        self._compute(planned)
        self.worker.wait_for_save()
        _, received = self.worker.get_finished(planned.finished_req_ids)
        moved = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        names = list(planned.num_scheduled_tokens)
        sampled = [self._sample(name) for name in names]
        self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                names,
                {name: n for n, name in enumerate(names)},
                sampled,
                kv_connector_output=KVConnectorOutput(
                    finished_recving=received, kv_connector_worker_meta=moved
                ),
            ),
        )

    def _compute(self, planned: Any) -> None:
        for new in planned.scheduled_new_reqs:
            self._tables[new.req_id] = [*new.block_ids[0]]
            self.loaded.setdefault(new.req_id, new.num_computed_tokens)
        cached = planned.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None:
                if name in cached.resumed_req_ids:
                    self._tables[name] = []
                self._tables[name] += more[0]
        for name, count in planned.num_scheduled_tokens.items():
            done = self.scheduler.requests[name].num_computed_tokens - count
            self._check(name, done)
            self._write(name, done, done + count)

    def _sample(self, name: str) -> list[int]:
        """Answer with a token that follows from those before, once all of them are computed."""
        request = self.scheduler.requests[name]
        tokens = self._tokens[name]
        if request.num_computed_tokens < len(tokens):
            return []
        tokens.append(3 + sum(tokens) % 1000)
        return tokens[-1:]

    # ---------------------------------------------------------------------------------- bytes

    def _rows(self, name: str, first: int, last: int) -> Iterator[tuple[int, int, int, Any]]:
        """Give layer, block, token of the block, and the bytes, for tokens of a request."""
        tokens = self._tokens[name]
        size = page_bytes() // BLOCK
        for at in range(first, last):
            seed = hashlib.blake2b(np.array(tokens[: at + 1], np.int64).tobytes()).digest()
            for layer in range(len(LAYERS)):
                text = (seed + bytes([layer])) * (size // (len(seed) + 1) + 1)
                content = torch.frombuffer(bytearray(text[:size]), dtype=torch.int8)
                yield layer, self._tables[name][at // BLOCK], at % BLOCK, content

    def _write(self, name: str, first: int, last: int) -> None:
        size = page_bytes() // BLOCK
        for layer, block, slot, content in self._rows(name, first, last):
            self.pages[layer, block, slot * size : (slot + 1) * size] = content

    def _check(self, name: str, computed: int) -> None:
        """Compare every byte that the request takes as computed."""
        size = page_bytes() // BLOCK
        for layer, block, slot, content in self._rows(name, 0, computed):
            there = self.pages[layer, block, slot * size : (slot + 1) * size]
            assert torch.equal(there, content), f"{name}: token {slot} of block {block} is wrong"

    def forget_device(self) -> None:
        """Let the device's prefix cache find nothing any more, and overwrite its pages."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.pages.fill_(0x55)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
