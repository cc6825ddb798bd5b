"""Other libraries and the memory of a real GPU: they find it pinned, and copy from it as such.

Each library is optional. Order is shown by a gate: a word in registered memory that a stream waits
for, so that what was submitted behind it has not begun before the test says so.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import HostMem

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child
    from tests.threads import Until

pytestmark = [
    # A thread, because a driver call that hangs takes no signal: it prints every stack and exits.
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.filterwarnings("default"),  # the warnings of these libraries are not ours
]

MIB = 1 << 20
PAGE = 4096
HOST = 1  # cudaMemoryTypeHost
TO_DEVICE = 1  # cudaMemcpyHostToDevice


@pytest.fixture
def memory() -> Iterator[HostMem]:
    """16 MiB in several registrations; the last page is the gate's."""
    with HostMem(16 * MIB, device=0, wait=True) as memory:
        assert memory.boundary_after(0) < 8 * MIB
        yield memory
        gc.collect()  # what pytest caught, and cycles of the libraries, hold views


@pytest.fixture
def whole(memory: HostMem) -> HostMem:
    """The same in one registration."""
    memory.consolidate()
    return memory


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    if not module.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    module.cuda.init()
    return module


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="cupy is not installed", exc_type=ImportError)


def pattern(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@contextlib.contextmanager
def gate(memory: HostMem, stream: int) -> Iterator[Callable[[], None]]:
    """Keep a stream from going on until the function is called; at the latest at the end."""
    from cuda.bindings import driver

    at = memory.size - PAGE

    def put(value: int) -> None:
        memory.view(at, 4, dtype=np.uint32)[:] = value

    put(0)
    reached = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
    (code,) = driver.cuStreamWaitValue32(stream, memory.address + at, 1, reached)
    if code == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
        pytest.skip("streams cannot wait for a word in memory here")
    assert code == driver.CUresult.CUDA_SUCCESS
    try:
        yield lambda: put(1)
    finally:
        put(1)


# -------------------------------------------------------------------------------------- torch


@pytest.mark.gpu
def test_torch_finds_a_view_pinned(whole: HostMem, torch: Any) -> None:
    view = whole.view(0, 8 * MIB, dtype=np.float32, shape=(2, -1))
    tensors = [torch.from_numpy(view), torch.as_tensor(view), torch.from_dlpack(view)]
    for tensor in tensors:
        assert tensor.is_pinned()
        assert tensor.data_ptr() == whole.address
        assert tuple(tensor.shape) == view.shape
    assert torch.from_numpy(view[1:, ::2]).is_pinned()
    assert not torch.from_numpy(view.copy()).is_pinned()
    del tensors, tensor, view


@pytest.mark.gpu
def test_torch_and_the_view_see_each_others_writes(whole: HostMem, torch: Any) -> None:
    view = whole.view(0, PAGE)
    for tensor in (torch.from_numpy(view), torch.from_dlpack(view)):
        view[:] = 3
        assert tensor.sum().item() == 3 * PAGE
        tensor.fill_(5)
        assert view.tolist() == [5] * PAGE
        back = np.from_dlpack(tensor)
        assert back.__array_interface__["data"][0] == whole.address
    del tensor, back, view


@pytest.mark.gpu
def test_a_tensor_of_torch_holds_the_memory(whole: HostMem, torch: Any) -> None:
    tensor = torch.from_dlpack(whole.view(0, PAGE))
    with pytest.raises(BufferError, match="live views"):
        whole.close()
    del tensor
    whole.resize(0)  # which a view would hinder, too


@pytest.mark.gpu
def test_pinned_tensors_of_torch_reach_numpy(torch: Any) -> None:
    tensor = torch.zeros(PAGE, dtype=torch.uint8).pin_memory()
    array = np.from_dlpack(tensor)
    tensor.fill_(7)
    assert array.tolist() == [7] * PAGE


@pytest.mark.gpu
def test_copies_of_torch_return_before_they_run_and_overlap(whole: HostMem, torch: Any) -> None:
    data = pattern(4 * MIB)
    up, down = whole.view(0, 4 * MIB), whole.view(4 * MIB, 4 * MIB)
    up[:] = data
    down[:] = 0
    host_up, host_down = torch.from_numpy(up), torch.from_numpy(down)
    there = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda:0")
    filled = torch.full_like(there, 9)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    begun, ended = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    with gate(whole, one.cuda_stream) as open_gate:
        with torch.cuda.stream(one):
            there.copy_(host_up, non_blocking=True)
            begun.record()
        assert not begun.query()  # the call is back, the copy waits at the gate
        with torch.cuda.stream(two):
            host_down.copy_(filled, non_blocking=True)
            ended.record()
        ended.synchronize()  # the other stream's copy does not wait for it
        assert not begun.query()
        assert (down == 9).all()
        open_gate()
        begun.synchronize()
    assert np.array_equal(there.cpu().numpy(), data)
    del up, down, host_up, host_down


@pytest.mark.gpu
def test_torch_copies_across_a_boundary_after_consolidate_only(memory: HostMem, torch: Any) -> None:
    data = pattern(8 * MIB)
    view = memory.view(0, 8 * MIB)
    view[:] = data
    host = torch.from_numpy(view)
    there = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    with pytest.raises(BufferError, match=r"consolidate\(\)"):
        view.__dlpack__(dl_device=(3, 0))
    with pytest.raises(RuntimeError, match="invalid argument"):
        there.copy_(host)
    memory.consolidate()
    there.copy_(host)
    torch.cuda.synchronize()
    assert np.array_equal(there.cpu().numpy(), data)
    view[:] = 0
    host.copy_(there)
    assert np.array_equal(view, data)
    del view, host


# --------------------------------------------------------------------------------------- cupy


@pytest.mark.gpu
def test_cupy_copies_from_and_to_a_view(whole: HostMem, cupy: Any, until: Until) -> None:
    data = pattern(4 * MIB)
    view, back = whole.view(0, 4 * MIB), whole.view(4 * MIB, 4 * MIB)
    view[:] = data
    back[:] = 0
    with cupy.cuda.Device(0):
        assert cupy.cuda.runtime.pointerGetAttributes(whole.address).type == HOST
        assert np.array_equal(cupy.asarray(view).get(), data)
        there, stream = cupy.zeros(4 * MIB, cupy.uint8), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device(0).synchronize()
        there.set(view, stream=stream)
        there.get(out=back, stream=stream)
        stream.synchronize()
        cupy.cuda.Device(0).synchronize()
    assert np.array_equal(back, data)
    del view, back, there, stream
    gc.collect()
    # What it has transferred, cupy lets go of when it transfers something else.
    until(lambda: cupy.asarray(pattern(MIB)).size and not whole._core.views.holding(0))


@pytest.mark.gpu
def test_a_copy_of_cupy_returns_before_it_runs(whole: HostMem, cupy: Any) -> None:
    data = pattern(4 * MIB)
    view = whole.view(0, 4 * MIB)
    view[:] = data
    with cupy.cuda.Device(0):
        there, stream = cupy.zeros(4 * MIB, cupy.uint8), cupy.cuda.Stream(non_blocking=True)
        done = cupy.cuda.Event()
        cupy.cuda.Device(0).synchronize()
        with gate(whole, stream.ptr) as open_gate:
            cupy.cuda.runtime.memcpyAsync(
                there.data.ptr, whole.address, view.nbytes, TO_DEVICE, stream.ptr
            )
            done.record(stream)
            assert not done.done
            open_gate()
            stream.synchronize()
        assert np.array_equal(there.get(), data)
    del view


# -------------------------------------------------------------------------------------- numba


@pytest.mark.gpu
def test_numba_copies_from_and_to_a_view(whole: HostMem) -> None:
    cuda = pytest.importorskip(
        "numba.cuda", reason="numba with CUDA is not installed", exc_type=ImportError
    )
    if not cuda.is_available():
        pytest.skip("numba has no CUDA here")
    data = pattern(4 * MIB)
    view, back = whole.view(0, 4 * MIB), whole.view(4 * MIB, 4 * MIB)
    view[:] = data
    back[:] = 0
    stream = cuda.stream()
    there = cuda.to_device(view, stream=stream)
    there.copy_to_host(back, stream=stream)
    stream.synchronize()
    assert np.array_equal(back, data)
    del view, back, there


def test_numba_compiles_for_views() -> None:
    numba = pytest.importorskip("numba", reason="numba is not installed", exc_type=ImportError)

    @numba.njit  # type: ignore[untyped-decorator]
    def double(array: Any) -> Any:
        total = 0
        for i in range(array.size):
            array[i] *= 2
            total += array[i]
        return total

    with HostMem(MIB, device="cpu") as memory:
        view = memory.view(0, 64, dtype=np.int64)
        view[:] = 3
        assert double(view) == 48
        assert memory.view(0, 64, dtype=np.int64).tolist() == [6] * 8
        del view


# ---------------------------------------------------------------------------------------- jax


def test_jax_on_the_cpu_imports_a_view(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="jax is not installed", exc_type=ImportError)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # a child, so that no GPU is taken for good
    done = child("""
        import contextlib
        import gc
        import jax, jax.dlpack, jax.numpy
        import numpy as np
        from hostmem import HostMem

        memory = HostMem(1 << 20, device="cpu", wait=True)
        view = memory.view(0, 4096, dtype=np.float32)
        view[:] = np.arange(1024)
        array = jax.dlpack.from_dlpack(view)
        assert [device.platform for device in array.devices()] == ["cpu"]
        assert float(array.sum()) == 1023 * 512
        assert float(jax.numpy.asarray(view).sum()) == 1023 * 512
        assert float(jax.jit(lambda x: x.sum())(view)) == 1023 * 512
        del array, view
        while not memory.closed:  # jax lets go on a thread of its own, and traces in cycles
            gc.collect()
            with contextlib.suppress(BufferError):
                memory.close()
        print("ready")
    """)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


# --------------------------------------------------------------------------------------- docs

PAGE_OF_DOCS = Path(__file__).parents[2] / "docs" / "interoperation.md"
RECIPES = re.findall(r"^```py\n(.*?)^```$", PAGE_OF_DOCS.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.gpu
@pytest.mark.parametrize("code", RECIPES, ids=lambda code: str(code.split()[1]))
def test_a_recipe_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for name in node.names:
                pytest.importorskip(
                    name.name, reason=f"{name.name} is not installed", exc_type=ImportError
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            pytest.importorskip(
                node.module, reason=f"{node.module} is not installed", exc_type=ImportError
            )
    exec(compile(code, str(PAGE_OF_DOCS), "exec"), {"__name__": "__main__"})
