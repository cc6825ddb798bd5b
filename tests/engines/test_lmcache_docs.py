"""The configuration that docs/lmcache.md shows, as LMCache reads it, with a size for tests."""

from __future__ import annotations

from pathlib import Path

from kvtier.integrations.lmcache import HostMemAllocator, KvtierDiskBackend
from tests.engines.lmcache_backends import (
    DTYPE,
    FMT,
    SHAPE,
    LMCacheEngineConfig,
    fill,
    holds,
    key,
    storage_manager,
)
from tests.snippets import DOCS, blocks


def test_the_configuration_works(tmp_path: Path) -> None:
    (shown,) = (block.code for block in blocks(DOCS / "lmcache.md") if block.kind == "yaml")
    for given, small in {"64GiB": "8MiB", "/nvme/kv": str(tmp_path), "500GiB": "64MiB"}.items():
        assert given in shown
        shown = shown.replace(given, small)
    file = tmp_path / "lmcache.yaml"
    file.write_text(shown)
    config = LMCacheEngineConfig.from_file(str(file))
    with storage_manager(config) as manager:
        assert isinstance(manager.local_cpu_backend.get_memory_allocator(), HostMemAllocator)
        disk = manager.storage_backends["disk"]
        assert type(disk) is KvtierDiskBackend
        obj = manager.allocate(SHAPE, DTYPE, FMT)
        manager.batched_put([key(1)], [fill(obj, 1)])
        got = manager.get(key(1))
        assert holds(got, 1)
        got.ref_count_down()
        del obj, got
    assert (tmp_path / "lmcache-0.slots").exists()
