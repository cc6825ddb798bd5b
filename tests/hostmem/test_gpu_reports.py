"""What others ran into with a GPU: threads, contexts, forks, and objects dropped while they copy.

On the fake driver as well, where it has what is asked about; contexts are the real one's alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, CudaMemory, HostMem, StaticHostMem
from hostmem._sys.driver import load_driver
from hostmem.device.cuda import CudaStream
from hostmem.errors import CuError
from hostmem.testing import FakeDriver, FaultPlan
from tests.hostmem.drivers import DRIVERS, drivers

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child
    from tests.threads import Spawn

# A thread, because a driver call that hangs takes no signal: it prints every stack and exits.
pytestmark = pytest.mark.timeout(120, method="thread")

MIB = 1 << 20
INVALID_VALUE, NOT_REGISTERED = 1, 713

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.uint64]


def made(name: str) -> Iterator[CudaDevice]:
    driver = DRIVERS[name]()
    yield CudaDevice(0, driver=driver)
    if isinstance(driver, FakeDriver):
        assert list(driver.registered) == [], "the test left memory registered"


@pytest.fixture(params=drivers(["fake", "real"]))
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    yield from made(request.param)


@pytest.fixture(params=drivers(DRIVERS))
def any_device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    yield from made(request.param)


def numbers(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def u64(*values: int) -> Numbers:
    return np.array(values, np.uint64)


def copy(stream: CudaStream, destination: int, source: int, nbytes: int) -> None:
    stream.copy(u64(destination), u64(source), u64(nbytes))


def submit(
    device: CudaDevice, stream: CudaStream, to: Numbers, source: Numbers, sizes: Numbers
) -> None:
    """Give a batch to the driver itself: a stream may have another way for small ranges."""
    if device.aliases is not None:
        to, source = device.aliases.of(to), device.aliases.of(source)
    device.driver.copy_batch(0, to, source, sizes, stream.handle)


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    with pytest.raises(CuError) as caught:
        yield
    assert caught.value.code == code, str(caught.value)


@contextlib.contextmanager
def bench(device: CudaDevice, nbytes: int) -> Iterator[tuple[CudaStream, CudaMemory]]:
    stream, memory = device.stream(), CudaMemory(device, nbytes, nbytes, 2 * MIB)
    try:
        yield stream, memory
    finally:
        stream.close()
        memory.close()


# ----------------------------------------------------- the batch call in each shape, and none


@pytest.mark.parametrize("count", [0, 1, 2, 65_536])
def test_batches_of_any_size_touch_their_ranges_and_nothing_between(
    any_device: CudaDevice, count: int
) -> None:
    # Ranges of 48 bytes at a stride of 64, the last one first on the device.
    nbytes = 64 * max(count, 1)
    offsets = np.arange(0, 64 * count, 64, dtype=np.uint64)
    sizes = np.full(count, 48, np.uint64)
    host = StaticHostMem(2 * nbytes, device=any_device)
    with host, bench(any_device, nbytes) as (stream, memory):
        there, back = host.view(0, nbytes), host.view(nbytes, nbytes)
        here, on_device = np.uint64(host.address), np.uint64(memory.address)
        there[:] = 0xA5
        copy(stream, memory.address, host.address, nbytes)
        stream.synchronize()
        there[:] = data = numbers(nbytes)
        turned = np.ascontiguousarray(on_device + offsets[::-1])

        submit(any_device, stream, turned, here + offsets, sizes)
        copy(stream, host.address + nbytes, memory.address, nbytes)
        stream.synchronize()
        expected = np.full((max(count, 1), 64), 0xA5, np.uint8)
        expected[:count, :48] = data.reshape(-1, 64)[:count, :48][::-1]
        assert np.array_equal(back, expected.reshape(-1))

        back[:] = 0x5A
        submit(any_device, stream, here + np.uint64(nbytes) + offsets, turned, sizes)
        stream.synchronize()
        expected = np.full((max(count, 1), 64), 0x5A, np.uint8)
        expected[:count, :48] = data.reshape(-1, 64)[:count, :48]
        assert np.array_equal(back, expected.reshape(-1))
        del there, back


@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to device"])
@pytest.mark.parametrize(
    ("bad", "others"), [(0, 0), (0, 2), (1, 2), (2, 2)], ids=["alone", "first", "second", "last"]
)
def test_a_copy_over_two_registrations_is_refused(
    any_device: CudaDevice, bad: int, others: int, to_host: bool
) -> None:
    page = 4096
    with (
        HostMem(2 * MIB, device=any_device, commit_unit=MIB, wait=True) as memory,
        bench(any_device, 2 * MIB) as (stream, gpu),
    ):
        data = numbers(page)
        memory.view(0, page)[:] = data
        end = memory.boundary_after(0)
        assert end < 2 * MIB
        starts = [page * (2 + n) for n in range(others)]
        starts.insert(bad, end - page // 2)
        ends = (
            np.uint64(memory.address) + u64(*starts),
            np.uint64(gpu.address) + u64(*(page * (2 + n) for n in range(others + 1))),
        )
        to, source = ends if to_host else ends[::-1]
        with refused(INVALID_VALUE):
            submit(any_device, stream, to, source, np.full(others + 1, page, np.uint64))
        # The stream goes on, and what was refused is not found out later.
        copy(stream, gpu.address, memory.address, page)
        copy(stream, memory.address + page, gpu.address, page)
        stream.record().synchronize()
        assert np.array_equal(memory.view(page, page), data)


def test_the_legacy_stream_is_refused(any_device: CudaDevice) -> None:
    with StaticHostMem(4096, device=any_device) as host, bench(any_device, MIB) as (_, memory):
        for count in (1, 2):
            offsets = np.arange(count, dtype=np.uint64) * np.uint64(8)
            ends = np.uint64(memory.address) + offsets, np.uint64(host.address) + offsets
            with refused(INVALID_VALUE):
                any_device.driver.copy_batch(0, *ends, np.full(count, 8, np.uint64), 0)


BY_ENVIRONMENT = """
import numpy as np
from hostmem import CudaDevice, CudaMemory, CuError, HostMem
from hostmem._sys.driver import load_driver

device = CudaDevice(0)
assert load_driver()._batch_version == 0
stream, gpu = device.stream(), CudaMemory(device, 2 << 20, 2 << 20, 2 << 20)
with HostMem("2MiB", device=device, commit_unit="1MiB", wait=True) as memory:
    view = memory.view()
    view[:] = data = np.random.default_rng(0).integers(0, 256, 2 << 20, np.uint8)
    offsets = np.arange(0, 2 << 20, 64 << 10, dtype=np.uint64)
    here, there = np.uint64(memory.address) + offsets, np.uint64(gpu.address) + offsets
    sizes = np.full(len(offsets), 64 << 10, np.uint64)
    stream.copy(np.ascontiguousarray(there[::-1]), here, sizes)
    stream.synchronize()
    view[:] = 0
    stream.copy(here, np.ascontiguousarray(there[::-1]), sizes)
    stream.synchronize()
    assert np.array_equal(view, data)
    end = np.uint64(memory.address + memory.boundary_after(0) - 8)
    try:
        stream.copy(there[:1], np.array([end]), np.array([16], np.uint64))
    except CuError as error:
        assert error.code == 1, error
    else:
        raise AssertionError("a copy over two registrations was not refused")
    del view
stream.close()
gpu.close()
"""


@pytest.mark.gpu
def test_batches_are_switched_off_by_the_environment(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTMEM_BATCH_COPY", "0")
    done = child(BY_ENVIRONMENT)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# ---------------------------------------------------------------------- threads and contexts


def steps(device: CudaDevice) -> Iterator[str]:
    """Do what needs the driver, from the first call to the last, and stop after each."""
    data = numbers(4 * MIB)
    memory = HostMem(4 * MIB, 4 * MIB, device=device, wait=True)
    yield "host memory is filled"
    ring = StaticHostMem(MIB, device=device)
    yield "a ring is registered"
    gpu = CudaMemory(device, 8 * MIB, 4 * MIB, 2 * MIB)
    gpu.resize(8 * MIB)
    yield "device memory is taken"
    stream, other = device.stream(), device.stream()
    yield "streams are made"
    memory.consolidate()
    memory.view()[:] = data
    copy(stream, gpu.address, memory.address, 4 * MIB)
    yield "bytes are sent"
    event = stream.record()
    other.wait(event)
    copy(other, gpu.address + 4 * MIB, gpu.address, 4 * MIB)
    copy(other, ring.address, gpu.address + 4 * MIB, MIB)
    yield "another stream waits for them"
    other.record().synchronize()
    event.synchronize()
    assert event.query()
    yield "events are waited for"
    assert np.array_equal(ring.view(), data[:MIB])
    memory.view()[:] = 0
    copy(stream, memory.address, gpu.address, 4 * MIB)
    stream.synchronize()
    assert np.array_equal(memory.view(), data)
    yield "bytes are back"
    with refused(NOT_REGISTERED):
        device.unregister(min(memory.address, ring.address) - (1 << 30))
    yield "a call is refused"
    memory.suspend_registration()
    memory.resume_registration()
    memory.resize(2 * MIB)
    yield "registrations change"
    assert 0 < device.driver.memory_info(0)[0] < device.memory_total
    yield "the device is asked"
    for one in (stream, other, gpu, ring, memory):
        one.close()
        yield f"{type(one).__name__} is closed"
    with refused(NOT_REGISTERED):
        device.unregister(ring.address)


def test_a_thread_that_never_used_the_driver_does_everything(
    device: CudaDevice, spawn: Spawn
) -> None:
    assert len(spawn(lambda: list(steps(device))).result(60)) == 16


def test_each_step_may_be_another_threads(device: CudaDevice, spawn: Spawn) -> None:
    work = steps(device)
    while spawn(next, work, None).result(60) is not None:
        pass


@pytest.fixture
def cuda() -> Any:
    return pytest.importorskip("cuda.bindings.driver")


def result(answer: Any) -> Any:
    code, *results = answer
    assert int(code) == 0, code
    return results[0] if results else None


@contextlib.contextmanager
def no_context(cuda: Any) -> Iterator[None]:
    """As a thread of the runtime's whose context was taken away."""
    device = result(cuda.cuDeviceGet(0))
    result(cuda.cuCtxSetCurrent(result(cuda.cuDevicePrimaryCtxRetain(device))))
    result(cuda.cuCtxSetCurrent(cuda.CUcontext(0)))
    try:
        yield
    finally:
        result(cuda.cuDevicePrimaryCtxRelease(device))


@contextlib.contextmanager
def own_context(cuda: Any) -> Iterator[None]:
    """A second context of the same device, as some libraries make one."""
    parameters = [None] if cuda.CUDA_VERSION >= 13000 else []
    made = result(cuda.cuCtxCreate(*parameters, 0, result(cuda.cuDeviceGet(0))))
    try:
        yield
    finally:
        result(cuda.cuCtxDestroy(made))


@contextlib.contextmanager
def other_device(cuda: Any) -> Iterator[None]:
    if result(cuda.cuDeviceGetCount()) < 2:
        pytest.skip("gpu: one device")
    device = result(cuda.cuDeviceGet(1))
    result(cuda.cuCtxSetCurrent(result(cuda.cuDevicePrimaryCtxRetain(device))))
    try:
        yield
    finally:
        result(cuda.cuCtxSetCurrent(cuda.CUcontext(0)))
        result(cuda.cuDevicePrimaryCtxRelease(device))


@pytest.mark.gpu
@pytest.mark.parametrize("context", [no_context, own_context, other_device])
def test_what_is_current_on_the_calling_thread_does_not_matter_and_stays(
    cuda: Any, spawn: Spawn, context: Callable[[Any], contextlib.AbstractContextManager[None]]
) -> None:
    def work() -> None:
        device = CudaDevice(0, driver=load_driver())
        with context(cuda):
            before = int(result(cuda.cuCtxGetCurrent()))
            for done in steps(device):
                assert int(result(cuda.cuCtxGetCurrent())) == before, done

    spawn(work).result(60)


@pytest.mark.gpu
def test_the_end_of_a_context_that_was_current_does_not_concern_us(cuda: Any, spawn: Spawn) -> None:
    def work() -> None:
        work = steps(CudaDevice(0, driver=load_driver()))
        with own_context(cuda):
            for done in work:
                if done == "bytes are sent":
                    break
        for _ in work:
            assert int(result(cuda.cuCtxGetCurrent())) == 0

    spawn(work).result(60)


@pytest.mark.gpu
def test_no_other_device_gets_a_context(cuda: Any, spawn: Spawn) -> None:
    count = result(cuda.cuDeviceGetCount())
    if count < 2:
        pytest.skip("gpu: one device")

    def active(ordinal: int) -> bool:
        answer = cuda.cuDevicePrimaryCtxGetState(result(cuda.cuDeviceGet(ordinal)))
        return bool(answer[2])

    before = [active(n) for n in range(count - 1)]
    device = CudaDevice(count - 1, driver=load_driver())
    with HostMem(4 * MIB, device=device, wait=True):
        spawn(device.stream().close).result(60)
    assert [active(n) for n in range(count - 1)] == before


# ---------------------------------------------------------------------------- dropped at once


def test_bytes_arrive_though_all_that_named_them_is_dropped(any_device: CudaDevice) -> None:
    nbytes, size = 16 * MIB, 256 << 10
    offsets = range(0, nbytes, size)
    with (
        StaticHostMem(nbytes, device=any_device) as host,
        bench(any_device, nbytes) as (back, memory),
    ):
        view = host.view()
        view[:] = data = numbers(nbytes)
        stream = any_device.stream()
        with FaultPlan() as plan:
            held = plan.hold("process_vm_readv")  # by which the fake copies
            submit(
                any_device,
                stream,
                u64(*(memory.address + at for at in offsets)),
                u64(*(host.address + at for at in offsets)),
                np.full(len(offsets), size, np.uint64),
            )
            event = stream.record()
            del view, stream
            gc.collect()
            spoilt = [np.full(len(offsets), 1, np.uint64) for _ in range(64)]  # where they were
            held.release()
            event.synchronize()
        assert all((array == 1).all() for array in spoilt)
        host.view()[:] = 0
        copy(back, host.address, memory.address, nbytes)
        back.synchronize()
        assert np.array_equal(host.view(), data)


# -------------------------------------------------------------------------------------- fork

FORK = """
import gc, os, sys
import numpy as np
from hostmem import CudaDevice, CudaMemory, HostMem, StaticHostMem
from hostmem._sys import seam
from hostmem.testing import FakeDriver

def u64(value):
    return np.array([value], np.uint64)

def there_and_back(seed):
    for host in (memory, ring):
        data = np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)
        host.view(0, 1 << 20)[:] = data
        stream.copy(u64(gpu.address), u64(host.address), u64(1 << 20))
        stream.record().synchronize()
        host.view(0, 1 << 20)[:] = 0
        stream.copy(u64(host.address), u64(gpu.address), u64(1 << 20))
        stream.synchronize()
        assert np.array_equal(host.view(0, 1 << 20), data), seed

device = CudaDevice(0, driver={driver})
stream, gpu = device.stream(), CudaMemory(device, 2 << 20, 2 << 20, 2 << 20)
memory = HostMem("4MiB", device=device, commit_unit="4MiB", wait=True)
memory.consolidate()
ring = StaticHostMem("1MiB", device=device)
there_and_back(1)
lives, ends = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    seam.install(lambda name, args: print("child:", name, flush=True) or 0)
    os.write(lives[1], b"1")
    os.read(ends[0], 1)
    {leave}
os.read(lives[0], 1)
there_and_back(2)  # the child lives, and would keep the old pages
os.write(ends[1], b"1")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
there_and_back(3)
for one in (stream, gpu, ring, memory):
    one.close()
"""
LEAVE = {
    "drops everything": "del stream, gpu, memory, ring, device; gc.collect(); sys.exit(0)",
    "ends as it is": "sys.exit(0)",
    "is gone at once": "os._exit(0)",
}


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
@pytest.mark.parametrize("driver", drivers({"fake": 0, "real": 0}))
def test_a_child_that_was_forked_calls_no_driver_and_the_parent_goes_on(
    child: Child, driver: str, leave: str
) -> None:
    named = "None" if driver == "real" else "FakeDriver()"
    done = child(FORK.format(driver=named, leave=leave), "-Wdefault::ResourceWarning")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", os.EX_OK)
