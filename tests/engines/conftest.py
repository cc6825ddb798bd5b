"""What these tests share: engines imported once, as noisy as they are, and nothing left behind.

They run in an environment of their own, `make test-engines`; elsewhere they are not collected.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from hostmem import CpuDevice
from hostmem._sys import seam
from tests.threads import DEADLINE

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

collect_ignore_glob = [f"*{name}*" for name in ("lmcache", "vllm") if not find_spec(name)]

if "*vllm*" not in collect_ignore_glob:
    with warnings.catch_warnings():  # those of vLLM and torch about each other
        warnings.simplefilter("ignore")
        for name in (
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
            "vllm.v1.core.sched.scheduler",
            "vllm.v1.kv_offload.tiering.spec",
        ):
            import_module(name)

_THREADS = ("kvtier-", "hostmem-fill", "hostmem-populate", "hostmem-cpu-stream", "spawned")


def _threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(_THREADS))


@pytest.fixture(autouse=True)
def nothing_is_left(cpu: CpuDevice) -> Iterator[None]:
    """After each test no thread of ours runs, nothing is registered, no plan is installed."""
    yield
    deadline = time.monotonic() + DEADLINE
    while _threads() and time.monotonic() < deadline:
        os.sched_yield()
    assert not _threads()
    assert list(cpu.registered) == []
    assert seam.install(None) is None
