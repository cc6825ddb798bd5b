"""The copy kernel: the bytes it moves, what is chosen for it, and the queue that feeds it."""

from __future__ import annotations

import errno
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, HostMem, StaticHostMem
from hostmem._sys.driver import HOST_POINTERS, Result, load_driver
from hostmem.device import CudaMemory, Stream
from hostmem.device import copy_kernel as module
from hostmem.device.copy_choice import CopyChoice, Limits
from hostmem.device.copy_kernel import _ROWS, CopyQueue
from hostmem.device.pinned import PinnedRanges
from hostmem.errors import CuError
from hostmem.testing import FakeDriver, FaultPlan
from tests.threads import Spawn

pytestmark = pytest.mark.timeout(60, method="thread")

KIB, MIB = 1 << 10, 1 << 20
SIZE = 8 * MIB
PAGE_OF_NOBODY = 1 << 20  # below all that the kernel maps by itself

Addresses = NDArray[np.uint64]
GPU = pytest.param("real", marks=pytest.mark.gpu)


def fake(**options: Any) -> CudaDevice:
    return CudaDevice(0, driver=FakeDriver(kernels=True), **options)


class Both:
    """Memory of both sides, with random bytes, and a stream."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.host = StaticHostMem(SIZE, device=device)
        self.gpu = CudaMemory(device, SIZE, SIZE, 2 * MIB)
        self.stream: Stream = device.stream()
        self.random = np.random.default_rng(5)
        self.host.view()[:] = self.random.integers(0, 256, SIZE, np.uint8)

    def copy(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        self.stream.copy(to, source, sizes)
        self.stream.synchronize()

    def pages(self, page: int, count: int) -> tuple[Addresses, Addresses, Addresses]:
        """Choose pages of the GPU's and of the first half of the host's memory."""
        some = [self.random.permutation(SIZE // 2 // page)[:count] for _ in range(2)]
        gpu, host = (places.astype(np.uint64) * np.uint64(page) for places in some)
        gpu, host = gpu + np.uint64(self.gpu.address), host + np.uint64(self.host.address)
        return gpu, host, np.full(count, page, np.uint64)

    def close(self) -> None:
        self.stream.close()
        self.gpu.close()
        self.host.close()
        assert len(self.device.registered) == len(self.device.memory) == 0


@pytest.fixture
def opened() -> Iterator[Callable[[CudaDevice], Both]]:
    made: list[Both] = []

    def make(device: CudaDevice) -> Both:
        made.append(Both(device))
        return made[-1]

    yield make
    gc.collect()  # what was caught on the way holds frames, and they hold views
    for both in made:
        both.close()


Opened = Callable[[CudaDevice], Both]


@pytest.mark.parametrize("driver", ["fake", GPU])
def test_bytes_arrive_whatever_the_size_and_only_those(driver: str, opened: Opened) -> None:
    device = fake(copy_kernel="1MiB") if driver == "fake" else CudaDevice(0, copy_kernel="1MiB")
    both = opened(device)
    # Ragged: pieces, parts of pieces, single grains, and sizes that only an engine takes.
    sizes = np.array([16, 4096, 4112, 512, 8192, 60_000, 17, 16 * KIB, 1, 65_536, 48], np.uint64)
    sizes = np.tile(sizes, 12)
    starts = (np.cumsum(sizes + np.uint64(64)) - sizes) // np.uint64(16) * np.uint64(16)
    assert int(starts[-1] + sizes[-1]) < SIZE // 2
    order = both.random.permutation(len(sizes))
    starts, sizes = starts[order], sizes[order]
    host, gpu = np.uint64(both.host.address), np.uint64(both.gpu.address)
    half = np.uint64(SIZE // 2)
    both.host.view()[SIZE // 2 :] = 0
    both.copy(gpu + starts, host + starts, sizes)  # up, within, down
    both.copy(gpu + half + starts, gpu + starts, sizes)
    both.copy(host + half + starts, gpu + half + starts, sizes)
    expected = np.zeros(SIZE // 2, np.uint8)
    view = both.host.view()
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        expected[start : start + size] = view[start : start + size]
    assert np.array_equal(view[SIZE // 2 :], expected)


@pytest.mark.parametrize("driver", ["fake", GPU])
def test_more_copies_than_the_table_has_rows(driver: str, opened: Opened) -> None:
    device = fake(copy_kernel="1MiB") if driver == "fake" else CudaDevice(0, copy_kernel="1MiB")
    both = opened(device)
    gpu, host, sizes = both.pages(16, 2 * _ROWS + 5)
    both.copy(gpu, host, sizes)
    both.copy(host + np.uint64(SIZE // 2), gpu, sizes)
    rows = (host - np.uint64(both.host.address)).astype(np.intp) // 16
    view = both.host.view(shape=(2, SIZE // 32, 16))
    assert np.array_equal(view[1, rows], view[0, rows])


@pytest.mark.gpu
def test_limits_are_measured_on_a_gpu_and_both_paths_give_the_same_bytes(opened: Opened) -> None:
    device = CudaDevice(0)
    both = opened(device)
    gpu, host, sizes = both.pages(4 * KIB, 512)
    both.copy(gpu, host, sizes)
    assert len(device.copies.rates) == 15
    assert device.copies.limits is not None
    assert min(device.copies.limits) >= 4 * KIB  # engines are an order slower there
    engine = CudaDevice(0, copy_kernel=0)
    there = np.uint64(SIZE // 2)
    stream = engine.stream()
    stream.copy(host + there, gpu, sizes)
    stream.synchronize()
    stream.close()
    view = both.host.view(shape=(2, SIZE // 2))
    for start in (host - np.uint64(both.host.address)).tolist():
        assert np.array_equal(view[1, start : start + 4 * KIB], view[0, start : start + 4 * KIB])


class Clock:
    """Time in which a GPU's copies take what they are said to cost."""

    def __init__(self, plan: FaultPlan, engine_copy: float) -> None:
        self._plan = plan
        self._engine_copy = engine_copy
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        engine = sum(copies for (copies,) in self._plan.calls("cuMemcpyBatchAsync"))
        return engine * self._engine_copy + len(self._plan.calls("cuLaunchKernel")) * 2e-4


@pytest.mark.parametrize(
    ("engine_copy", "limit"),
    [(1e-8, 0), (5e-7, 64 * KIB), (1e-6, 256 * KIB), (4e-6, MIB)],
)
def test_limits_are_those_of_the_very_device(
    engine_copy: float, limit: int, opened: Opened
) -> None:
    """A batch costs 0.2 ms by the kernel; the engine has 512, 512, 512, 256 and 64 copies to do."""
    both = opened(fake())
    with FaultPlan() as plan:
        clock = Clock(plan, engine_copy)
        choice = CopyChoice(both.device, None, 32, clock)
        both.device.__dict__["copies"] = choice
        gpu, host, sizes = both.pages(4 * KIB, 64)
        both.copy(gpu, host, sizes)
        assert choice.limits == Limits(limit, limit, limit)
        asked = clock.asked
        both.copy(gpu, host, sizes)
        assert clock.asked == asked  # once
    assert "measured" not in choice.describe()


class Gate(threading.Event):
    """An event that says when somebody has come to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.reached.set()
        return super().wait(timeout)


def test_nothing_is_registered_while_limits_are_measured(opened: Opened, spawn: Spawn) -> None:
    """Else the calls that are timed wait for a fill, and the limits are nonsense for good."""
    both = opened(fake())
    gate = both.device._may_register = Gate()
    with FaultPlan() as plan:

        class Fill(Clock):
            """The time, while another thread fills."""

            def __call__(self) -> float:
                if not self.asked:
                    fills.append(spawn(lambda: StaticHostMem(MIB, device=both.device)))
                    assert gate.reached.wait(30)
                registered.append(len(plan.calls("cuMemHostRegister")))
                return super().__call__()

        fills: list[Future[StaticHostMem]] = []
        registered: list[int] = []
        both.device.copies = CopyChoice(both.device, None, 32, Fill(plan, 1e-6))
        both.copy(*both.pages(4 * KIB, 64))
        assert both.device.copies.limits == Limits(256 * KIB, 256 * KIB, 256 * KIB)
        assert len(registered) > 15
        assert len(set(registered)) == 1
        fills[0].result(60).close()
        assert len(plan.calls("cuMemHostRegister")) > registered[-1]


def test_a_measurement_that_fails_holds_nobody_up_any_longer(opened: Opened) -> None:
    both = opened(fake())
    with FaultPlan() as plan:
        plan.fail("cuLaunchKernel", Result.INVALID_VALUE)
        both.copy(*both.pages(4 * KIB, 64))
    assert both.device.copies.limits == Limits(0, 0, 0)
    assert both.device._may_register.is_set()


def test_what_is_few_large_unknown_or_odd_goes_through_an_engine(opened: Opened) -> None:
    both = opened(fake(copy_kernel="8KiB"))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    foreign = np.zeros(SIZE // 2, np.uint8)
    base = np.uint64(foreign.__array_interface__["data"][0])
    outside = host - np.uint64(both.host.address) + base
    large = both.pages(16 * KIB, 64)
    batches = {
        "few": (gpu[:7], host[:7], sizes[:7]),
        "large": large,
        "unknown source": (gpu, outside, sizes),
        "unknown destination": (outside, gpu, sizes),
        "odd": (gpu + np.uint64(8), host, sizes - np.uint64(8)),
        "host to host": (host + np.uint64(SIZE // 2), host, sizes),
    }
    for name, batch in batches.items():
        with FaultPlan() as plan:
            both.copy(*batch)
            assert not plan.calls("cuLaunchKernel"), name
            assert len(plan.calls("cuMemcpyBatchAsync")) == 1
    with FaultPlan() as plan:
        both.copy(*(np.concatenate(pair) for pair in zip(large, (gpu, host, sizes), strict=True)))
        assert plan.calls("cuMemcpyBatchAsync") == [(64,)]
        assert len(plan.calls("cuLaunchKernel")) == 1


def test_memory_that_was_given_back_is_not_for_the_kernel(opened: Opened) -> None:
    both = opened(fake(copy_kernel="8KiB"))
    with HostMem(4 * MIB, device=both.device, wait=True) as memory:
        first = np.uint64(memory.address) + np.arange(64, dtype=np.uint64) * np.uint64(4 * KIB)
        sizes = np.full(64, 4 * KIB, np.uint64)
        to = np.uint64(both.gpu.address) + first - first[0]
        with FaultPlan() as plan:
            both.copy(to, first, sizes)
            assert len(plan.calls("cuLaunchKernel")) == 1
        memory.suspend_registration()
        with FaultPlan() as plan:
            both.copy(to, first, sizes)
            assert not plan.calls("cuLaunchKernel")
        memory.resume_registration()


def test_the_kernel_takes_no_more_blocks_than_it_may(opened: Opened) -> None:
    both = opened(fake(copy_kernel="64KiB", copy_blocks=3))
    gpu, host, sizes = both.pages(16 * KIB, 64)
    with FaultPlan() as plan:
        both.copy(gpu, host, sizes)
        assert plan.calls("cuLaunchKernel") == [(3,)]


def test_sizes_share_a_run_with_their_like(opened: Opened) -> None:
    both = opened(fake(copy_kernel="64KiB"))
    gpu, host, sizes = both.pages(64 * KIB, 32)
    sizes[::2] = 512
    with FaultPlan() as plan:
        both.copy(gpu, host, sizes)
        assert plan.calls("cuLaunchKernel") == [(2,), (32,)]  # 16 warps; 16 x 16 pieces


def test_a_kernel_that_copies_wrong_bytes_is_not_used(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(FakeDriver):
        def _copy_pages(self, table: int, rows: int, pieces: int) -> None:
            if rows > 1:
                super()._copy_pages(table, rows - 1, pieces)
            else:
                super()._copy_pages(table, rows, pieces)

    both = opened(CudaDevice(0, driver=Wrong(kernels=True)))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    with caplog.at_level(logging.WARNING, "hostmem"):
        both.copy(gpu, host, sizes)
    assert "wrong bytes" in caplog.text
    both.copy(host + np.uint64(SIZE // 2), gpu, sizes)
    view = both.host.view(shape=(2, SIZE // 2))
    for start in (host - np.uint64(both.host.address)).tolist():
        assert np.array_equal(view[1, start : start + 4096], view[0, start : start + 4096])


def test_a_driver_that_takes_no_program(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    both = opened(CudaDevice(0, driver=FakeDriver()))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    with caplog.at_level(logging.WARNING, "hostmem"), FaultPlan() as plan:
        both.copy(gpu, host, sizes)
        both.copy(gpu, host, sizes)
        assert len(plan.calls("cuModuleLoadData")) == 1
        assert plan.calls("cuMemcpyBatchAsync") == [(64,), (64,)]
    assert "no copy kernel" in caplog.text
    assert "copies: all through the copy engines (cuModuleLoadData: CUDA_ERROR_NOT_SUPPORTED" in (
        both.device.copies.describe()
    )


def test_without_memory_for_the_table_copies_go_through_an_engine(opened: Opened) -> None:
    both = opened(fake(copy_kernel="8KiB"))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    with FaultPlan() as plan:
        plan.fail("mmap", errno.ENOMEM)
        both.copy(gpu, host, sizes)
        assert plan.calls("cuMemcpyBatchAsync") == [(64,)]
        both.copy(gpu, host, sizes)  # there is some now
        assert len(plan.calls("cuLaunchKernel")) == 1


def test_a_table_that_the_driver_does_not_register(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    both = opened(fake(copy_kernel="8KiB"))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    with caplog.at_level(logging.WARNING, "hostmem"), FaultPlan() as plan:
        plan.fail("cuMemHostRegister", Result.NOT_SUPPORTED)
        for _ in range(3):
            both.copy(gpu, host, sizes)
        assert plan.calls("cuMemcpyBatchAsync") == [(64,)] * 3
        assert len(plan.calls("cuMemHostRegister")) == 1
    assert len(caplog.records) == 1
    assert "NOT_SUPPORTED" in both.device.copies.describe()


def test_an_interrupt_behind_a_registration_leaves_nothing_registered() -> None:
    class Interrupted(PinnedRanges):
        def add(self, start: int, nbytes: int) -> None:
            super().add(start, nbytes)
            raise KeyboardInterrupt

    device = fake()
    device.registered = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        StaticHostMem(MIB, device=device)
    assert len(device.registered) == 0


def test_who_submits_while_another_waits_for_rows_overwrites_none(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler, or the collector, may submit to the stream that is waiting."""
    monkeypatch.setattr(module, "_ROWS", 32)
    monkeypatch.setattr(module, "_MOST", 15)
    both = opened(fake(copy_kernel="8KiB"))
    gpu, host, sizes = both.pages(4 * KIB, 90)
    wait, inside = module.CopyQueue._wait_for, [True]

    def wait_and_submit(queue: CopyQueue, busy: Any) -> None:
        wait(queue, busy)
        if inside:
            inside.clear()
            queue.submit(gpu[60:], host[60:], sizes[60:])

    monkeypatch.setattr(module.CopyQueue, "_wait_for", wait_and_submit)
    both.copy(gpu[:60], host[:60], sizes[:60])
    assert not inside
    both.stream.close()  # while its table is known to be so small
    there = both.device.driver.copy_batch
    back = host + np.uint64(SIZE // 2)
    stream = both.device.driver.stream_create(0)
    there(0, back, gpu, sizes, stream)
    both.device.driver.stream_synchronize(0, stream)
    both.device.driver.stream_destroy(0, stream)
    view = both.host.view(shape=(2, SIZE // 2))
    for start in (host - np.uint64(both.host.address)).tolist():
        assert np.array_equal(view[1, start : start + 4096], view[0, start : start + 4096])


@pytest.mark.parametrize("at", [1, 2])
def test_a_launch_that_is_refused_loses_no_later_batch(at: int, opened: Opened) -> None:
    both = opened(fake(copy_kernel="16KiB"))
    gpu, host, sizes = both.pages(16 * KIB, 64)
    ragged = np.where(np.arange(64) < 32, np.uint64(512), np.uint64(16 * KIB))  # two runs
    with FaultPlan() as plan:
        plan.fail("cuLaunchKernel", Result.INVALID_VALUE, at=at)
        with pytest.raises(CuError, match="cuLaunchKernel"):
            both.stream.copy(gpu, host, ragged)
    for _ in range(2 * _ROWS // 64):  # once round the table, over the rows of the refused one
        both.stream.copy(gpu, host, sizes)
    both.stream.synchronize()
    both.copy(host + np.uint64(SIZE // 2), gpu, sizes)
    view = both.host.view(shape=(2, SIZE // 2))
    start = int(host[5]) - both.host.address
    assert np.array_equal(view[1, start : start + 4096], view[0, start : start + 4096])


def test_a_dropped_stream_gives_its_table_back_after_its_work(opened: Opened) -> None:
    both = opened(fake(copy_kernel="8KiB"))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    stream = both.device.stream()
    stream.copy(gpu, host, sizes)
    assert len(both.device.registered) == 2
    del stream
    gc.collect()
    assert len(both.device.registered) == 1


def test_a_closed_stream_takes_no_copies(opened: Opened) -> None:
    both = opened(fake(copy_kernel="8KiB"))
    gpu, host, sizes = both.pages(4 * KIB, 64)
    stream = both.device.stream()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.copy(gpu, host, sizes)


def test_a_gpu_that_has_other_names_for_host_memory_uses_its_engines() -> None:
    device = CudaDevice(0, driver=FakeDriver(kernels=True, attributes={HOST_POINTERS: 0}))
    assert device.copies.limits == Limits(0, 0, 0)


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("HOSTMEM_COPY_KERNEL", "many"),
        ("HOSTMEM_COPY_KERNEL", "-1B"),
        ("HOSTMEM_COPY_BLOCKS", "0"),
        ("HOSTMEM_COPY_BLOCKS", "half"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    variable: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, setting)
    with pytest.raises(ValueError, match=variable):
        fake()


def test_the_environment_decides_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_COPY_KERNEL", "0")
    assert fake().copies.limits == Limits(0, 0, 0)
    assert fake().copies.describe() == "copies: all through the copy engines"
    assert fake(copy_kernel="4KiB").copies.limits == Limits(4096, 4096, 4096)
    monkeypatch.setenv("HOSTMEM_COPY_KERNEL", "64KiB")
    monkeypatch.setenv("HOSTMEM_COPY_BLOCKS", "7")
    copies = fake().copies
    assert (copies.limits, copies.blocks) == (Limits(65536, 65536, 65536), 7)


def test_a_kernel_at_an_address_that_is_not_there_loses_the_fake_device() -> None:
    """As it does the real one: everything afterwards is answered with the same error."""
    driver = FakeDriver(kernels=True)
    device = CudaDevice(0, driver=driver, copy_kernel="8KiB")
    both = Both(device)
    gpu, host, sizes = both.pages(4 * KIB, 64)
    device.memory.add(PAGE_OF_NOBODY, 4 * KIB)  # which is a lie
    gpu[3] = PAGE_OF_NOBODY
    both.stream.copy(gpu, host, sizes)
    with pytest.raises(CuError, match="ILLEGAL_ADDRESS"):
        both.stream.synchronize()
    with pytest.raises(CuError, match="ILLEGAL_ADDRESS"):
        driver.memory_info(0)
    driver._lost = False  # so that all can be given back
    device.memory.discard(int(gpu[3]))
    both.close()


@pytest.mark.gpu
def test_the_real_driver_takes_the_program() -> None:
    assert load_driver().kernel(0, *program())


def program() -> tuple[str, str]:
    from hostmem._sys.copy_pages import NAME, PROGRAM

    return PROGRAM, NAME
