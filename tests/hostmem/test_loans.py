"""Memory that somebody else owns: when the copy kernel may reach it, and when not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, StaticHostMem, resolve_device
from hostmem._sys.driver import Pointer, load_driver
from hostmem.testing import FakeDriver, FaultPlan

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child

KIB, MIB = 1 << 10, 1 << 20
GRANULE = 2 * MIB
COUNT, PAGE = 64, 4 * KIB
HALF = np.uint64(COUNT * PAGE)

Column = NDArray[np.uint64]
REAL = pytest.param("real", marks=pytest.mark.gpu)


@dataclass
class Foreign:
    """Memory of a GPU that was mapped behind the device's back, and host memory to copy from."""

    device: CudaDevice
    host: StaticHostMem
    address: int  # of four granules, of which the third has no memory

    def batch(self, granule: int = 0) -> tuple[Column, Column, Column]:
        offsets = np.arange(COUNT, dtype=np.uint64) * np.uint64(PAGE)
        to = np.uint64(self.address + granule * GRANULE) + offsets
        return to, np.uint64(self.host.address) + offsets, np.full(COUNT, PAGE, np.uint64)

    def launches(self, granule: int = 0) -> int:
        """Copy pages up, and down to the second half of the host's; count runs of the kernel."""
        to, source, sizes = self.batch(granule)
        view = self.host.view(shape=(2, COUNT * PAGE))
        view[0], view[1] = np.random.default_rng(3).integers(0, 256, COUNT * PAGE, np.uint8), 0
        stream = self.device.stream()
        with FaultPlan() as plan:
            stream.copy(to, source, sizes)
            stream.copy(source + HALF, to, sizes)
            stream.synchronize()
            count = len(plan.calls("cuLaunchKernel"))
        stream.close()
        assert np.array_equal(view[1], view[0])
        return count


@pytest.fixture(params=["fake", REAL])
def foreign(request: pytest.FixtureRequest) -> Iterator[Foreign]:
    driver = FakeDriver(kernels=True) if request.param == "fake" else load_driver()
    device = CudaDevice(0, driver=driver, copy_kernel="64KiB")
    address = driver.memory_reserve(0, 4 * GRANULE)
    for granule in (0, 1, 3):
        driver.memory_map(0, address + granule * GRANULE, GRANULE)
    with StaticHostMem(2 * int(HALF), device=device) as host:
        yield Foreign(device, host, address)
    for granule in (0, 1, 3):
        driver.memory_unmap(0, address + granule * GRANULE, GRANULE)
    driver.memory_release(0, address, 4 * GRANULE)


def test_the_kernel_reaches_memory_of_others_while_it_is_lent(foreign: Foreign) -> None:
    assert foreign.launches() == 0
    with foreign.device.borrow([(foreign.address, 2 * GRANULE)]) as loan:
        assert foreign.launches() == foreign.launches(granule=1) == 2
        loan.close()
        assert foreign.launches() == 0
    assert len(foreign.device.lent_memory.table) == 0


def test_only_what_is_lent_is_for_the_kernel(foreign: Foreign) -> None:
    with foreign.device.borrow([(foreign.address, COUNT * PAGE - 1)]):
        assert foreign.launches() == 2  # all but the last page
        assert list(foreign.device.lent_memory.table) == [(foreign.address, COUNT * PAGE - 1)]
        assert foreign.launches(granule=1) == 0


def test_loans_may_overlap_and_end_in_any_order(foreign: Foreign) -> None:
    first = foreign.device.borrow([(foreign.address, 2 * GRANULE), (foreign.address, GRANULE)])
    second = foreign.device.borrow([(foreign.address + GRANULE - PAGE, GRANULE)])
    first.close()
    assert foreign.launches() == 0
    assert foreign.launches(granule=1) == 2
    second.close()
    assert len(foreign.device.lent_memory.table) == 0


@pytest.mark.parametrize("start", [1, 2])
def test_memory_that_is_not_there_is_no_ones_to_lend(foreign: Foreign, start: int) -> None:
    hole = foreign.address + 2 * GRANULE
    with pytest.raises(ValueError, match=rf"the driver knows no memory at {hole:#x}, which is in"):
        foreign.device.borrow([(foreign.address + start * GRANULE, 2 * GRANULE)])
    assert len(foreign.device.lent_memory.table) == 0


def test_page_locked_memory_of_others_is_lent_too(foreign: Foreign) -> None:
    device = foreign.device
    device.registered.discard(foreign.host.address)  # as if another library had registered it
    try:
        with device.borrow([(foreign.address, GRANULE), (foreign.host.address, 2 * int(HALF))]):
            assert foreign.launches() == 2
        assert foreign.launches() == 0
    finally:
        device.registered.add(foreign.host.address, 2 * int(HALF))


@pytest.mark.parametrize(
    "pointer",
    [
        Pointer("device", 1, True, 1 << 62),
        Pointer("device", 0, False, 1 << 62),
        Pointer("managed", 0, True, 1 << 62),
    ],
    ids=["of another GPU", "not to be reached", "moves by itself"],
)
def test_what_a_kernel_should_not_touch_goes_through_an_engine(pointer: Pointer) -> None:
    class Elsewhere(FakeDriver):
        def pointer(self, ordinal: int, address: int) -> Pointer | None:
            return pointer

    device = CudaDevice(0, driver=Elsewhere(kernels=True))
    with device.borrow([(1 << 40, GRANULE)]):
        assert len(device.lent_memory.table) == len(device.lent_registered.table) == 0


def test_the_cpu_asks_nobody() -> None:
    with resolve_device("cpu").borrow([(1 << 40, 1)]):
        pass


Where = Callable[[Foreign], int]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (lambda f: f.address, ("device", 0, GRANULE)),
        (lambda f: f.address + GRANULE + 5, ("device", 0, GRANULE - 5)),
        (lambda f: f.address + 2 * GRANULE, None),
        (lambda f: f.host.address + PAGE, ("host", 0, 2 * int(HALF) - PAGE)),
        (lambda f: 4096, None),
    ],
    ids=["first byte", "in the middle", "reserved only", "registered", "nothing"],
)
def test_a_driver_says_what_is_at_an_address(
    foreign: Foreign, where: Where, found: tuple[str, int, int] | None
) -> None:
    address = where(foreign)
    pointer = foreign.device.driver.pointer(0, address)
    if found is None:
        assert pointer is None
    else:
        assert pointer is not None
        assert (pointer.kind, pointer.ordinal, pointer.end - address) == found
        assert pointer.reachable


def test_a_forked_child_has_no_loans_and_no_lock_that_a_thread_held(child: Child) -> None:
    done = child(
        """
        import os, threading
        from hostmem.device.loans import Loans

        loans = Loans()
        give_back = loans.add([(4096, 4096)])
        held, ended = threading.Event(), threading.Event()

        def hold():
            with loans._lock:
                held.set()
                ended.wait()

        threading.Thread(target=hold).start()
        held.wait()
        pid = os.fork()
        if not pid:
            give_back()
            os._exit(10 + len(loans.table))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(loans.table))
        ended.set()
        """,
    )
    assert (done.stdout, done.stderr) == ("10 1\n", "")
