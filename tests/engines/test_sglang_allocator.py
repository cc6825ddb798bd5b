"""SGLang's own host pools in a `HostMem`, and the way there and back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")

import hostmem  # noqa: E402
from hostmem import CpuDevice, HostOOMError, ResourceBusyError, placement_of  # noqa: E402
from hostmem.courier import closings  # noqa: E402
from hostmem.testing import FaultPlan  # noqa: E402
from tests.engines.sglang_pools import import_sglang, mha_pool  # noqa: E402
from tests.snippets import DOCS, blocks  # noqa: E402

common = import_sglang("sglang.srt.mem_cache.pool_host.common")
base = import_sglang("sglang.srt.mem_cache.pool_host.base")

from kvtier.integrations.sglang import HostMemTensorAllocator, install  # noqa: E402

POPULATE = "madvise(MADV_POPULATE_WRITE)"


@pytest.fixture(autouse=True)
def memory_is_given_back(cpu: CpuDevice) -> Iterator[None]:
    yield
    gc.collect()
    assert closings.drain(20)
    assert list(cpu.registered) == []


@pytest.fixture
def installed() -> Iterator[Callable[[], None]]:
    undo = install()
    yield undo
    undo()


def test_a_tensor_is_usable_in_one_registration_and_given_back_with_its_last_view(
    cpu: CpuDevice,
) -> None:
    tensor = HostMemTensorAllocator().allocate((2, 3 << 19), torch.float16, "cpu")
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 3 << 19), torch.float16)
    assert list(cpu.registered) == [(tensor.data_ptr(), tensor.nbytes)]
    assert placement_of(tensor).resident == tensor.nbytes
    assert not tensor.any()
    part = tensor[1]
    del tensor
    gc.collect()
    assert closings.drain(20)
    part[:] = 3
    assert len(list(cpu.registered)) == 1
    del part
    gc.collect()
    assert closings.drain(20)
    assert list(cpu.registered) == []


def test_a_tensor_of_nothing_takes_nothing() -> None:
    assert HostMemTensorAllocator().allocate((0, 4), torch.uint8, "cpu").numel() == 0


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda"):
        HostMemTensorAllocator().allocate((4,), torch.uint8, "cuda")


def test_a_deadline_that_passes_leaves_nothing(cpu: CpuDevice) -> None:
    allocator = HostMemTensorAllocator(timeout=0, fill_rate=1.0)  # a byte a second
    with pytest.raises(TimeoutError):
        allocator.allocate((64 << 20,), torch.uint8, "cpu")
    assert list(cpu.registered) == []


def test_memory_that_cannot_be_had_is_the_callers_error() -> None:
    with FaultPlan() as plan:
        plan.fail(POPULATE, 12, times=None)
        with pytest.raises(HostOOMError):
            HostMemTensorAllocator().allocate((1 << 20,), torch.uint8, "cpu")


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pools_of_sglang_live_in_it(
    installed: Callable[[], None], cpu: CpuDevice, layout: str
) -> None:
    pool = mha_pool(layout)
    assert isinstance(pool.allocator, HostMemTensorAllocator)
    assert list(cpu.registered) == [(pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes)]
    page = pool.get_dummy_flat_data_page()
    page[:] = 5
    taken = pool.alloc(2 * pool.page_size)
    pool.set_from_flat_data_page(int(taken[0]), page)
    assert torch.equal(pool.get_data_page(int(taken[0])), page)
    pool.destroy()


def test_sglang_registers_its_own_memory_and_leaves_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        common, "_cuda_host_register", lambda buffer, *_: asked.append(buffer.data_ptr())
    )
    undo = install()
    theirs = common.alloc_with_host_register(
        (4096,), torch.uint8, "cpu", True, common.HostTensorAllocator()
    )
    ours = common.alloc_with_host_register(
        (4096,), torch.uint8, "cpu", True, common.get_allocator_from_storage("default")
    )
    assert asked == [theirs.data_ptr()]
    common._cuda_host_unregister_ranges(None, [], operation="nothing of ours")
    assert getattr(ours, common._CUDA_HOST_REGISTERED_RANGES_ATTR) == []
    undo()


def test_storage_that_owns_its_memory_keeps_its_allocator(installed: Callable[[], None]) -> None:
    assert isinstance(base.get_allocator_from_storage("shm"), common.ShmHostTensorAllocator)
    for kind in ("default", "file", "dynamic", "nixl"):
        assert isinstance(base.get_allocator_from_storage(kind), HostMemTensorAllocator)


def test_undone_it_is_as_before_everywhere() -> None:
    before = {
        (name, what): module.__dict__[what]
        for name, module in list(sys.modules.items())
        for what in ("get_allocator_from_storage", "_cuda_host_register")
        if name.startswith("sglang.") and what in module.__dict__
    }
    assert len(before) >= 4
    undo = install()
    with pytest.raises(ResourceBusyError):
        install()
    assert all(sys.modules[name].__dict__[what] is not was for (name, what), was in before.items())
    undo()
    undo()
    assert all(sys.modules[name].__dict__[what] is was for (name, what), was in before.items())
    assert type(mha_pool().allocator) is common.HostTensorAllocator


def test_options_go_to_the_memory(installed: Callable[[], None]) -> None:
    installed()
    undo = install(page_mode="nonsense")
    try:
        with pytest.raises(ValueError, match="nonsense"):
            mha_pool()
    finally:
        undo()


PLUGIN = """
from sglang.srt.plugins import load_plugins
load_plugins()
from tests.engines.sglang_pools import import_sglang
base = import_sglang("sglang.srt.mem_cache.pool_host.base")
print(type(base.get_allocator_from_storage("default")).__name__)
"""


def test_a_plugin_of_sglang_may_install_it(tmp_path: Path) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nhost_pools = my_host_pools:start\n"
    )
    # A GPU's machine needs no help with what SGLang imports.
    help_here = """
from tests.engines.sglang_pools import import_sglang
import_sglang("sglang.srt.mem_cache.pool_host.common")
"""
    (code,) = [block.code for block in blocks(DOCS / "sglang.md") if block.kind == "py"]
    (tmp_path / "my_host_pools.py").write_text(help_here + code)
    root = Path(hostmem.__file__).parents[1]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    child = subprocess.run(
        [sys.executable, "-c", PLUGIN], env=environment, capture_output=True, text=True, timeout=100
    )
    assert child.stdout.strip().splitlines()[-1:] == ["HostMemTensorAllocator"], child.stderr
