"""Blocks of an engine's tensors in chunks of host memory and back, every byte.

On the cpu device and the fake driver everywhere, on the real one where there is a GPU.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, CudaDevice, CudaMemory, Device, HostEvent
from hostmem._sys.driver import load_driver
from hostmem.device import DONE
from hostmem.testing import FakeDriver, FaultPlan
from kvtier.integrations.vllm.chunk_memory import BlockTensor, ChunkMemory
from kvtier.integrations.vllm.chunk_transfers import ChunkTransfers, behind_torch

pytestmark = pytest.mark.timeout(120, method="thread")

MIB = 1 << 20
POPULATE = "madvise(MADV_POPULATE_WRITE)"
BLOCKS = 40
PAGES = (4096, 1536, 4096)  # bytes of a page in each tensor
STRIDES = (4096, 2048, 4096)  # the second has padding between its pages
# Two groups of layers that share tensors, as those of hybrid models do; 1,000 bytes of the third.
GROUPS = (((0, 4096), (1, 1536), (2, 1000)), ((0, 4096), (2, 4096)))


@pytest.fixture(params=["cpu", "fake", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    if request.param == "cpu":
        return cpu
    return CudaDevice(0, driver=load_driver() if request.param == "real" else FakeDriver())


class Tensors:
    """Device memory of an engine, whose bytes a test writes and reads through a stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sizes = [stride * BLOCKS for stride in STRIDES]
        self.memory: CudaMemory | None = None
        self.host = np.zeros(sum(self.sizes), np.uint8)
        self.base = self.host.__array_interface__["data"][0]
        if isinstance(device, CudaDevice):
            self.memory = CudaMemory(device, self.host.nbytes, self.host.nbytes, 2 * MIB)
            self.base = self.memory.address

    @property
    def described(self) -> list[BlockTensor]:
        bases = np.cumsum([0, *self.sizes[:-1]]) + self.base
        shapes = zip(bases.tolist(), STRIDES, PAGES, strict=True)
        return [BlockTensor(*shape) for shape in shapes]

    def write(self, content: NDArray[np.uint8]) -> None:
        self._copy(self.base, content.__array_interface__["data"][0])

    def read(self) -> NDArray[np.uint8]:
        found = np.empty_like(self.host)
        self._copy(found.__array_interface__["data"][0], self.base)
        return found

    def _copy(self, to: int, source: int) -> None:
        stream = self.device.stream()
        at, size = (np.array([n], np.uint64) for n in (to, self.host.nbytes))
        stream.copy(at, np.array([source], np.uint64), size)
        stream.synchronize()
        stream.close()

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


class Tier:
    """Tensors, chunks, and the transfers between them."""

    def __init__(self, device: Device, *, per_chunk: int = 1, chunks: int = 24) -> None:
        self.tensors = Tensors(device)
        self.chunks = ChunkMemory(self.tensors.described, GROUPS, per_chunk, chunks, device=device)
        self.ready: Callable[[], Any] = lambda: DONE
        self.transfers = ChunkTransfers(self.chunks, device, lambda: self.ready())
        self.content = np.random.default_rng(7).integers(0, 256, self.tensors.host.nbytes, np.uint8)
        self.tensors.write(self.content)
        self.jobs = 0

    def start(
        self,
        direction: str,
        blocks: Sequence[int],
        chunks: Sequence[int],
        sizes: Sequence[int] | None = None,
        first: Sequence[int] = (0, 0),
        **options: bool,
    ) -> int:
        places = self.chunks.places(blocks, sizes or (len(blocks), 0), first, chunks)
        getattr(self.transfers, direction)(self.jobs, places, **options)
        self.jobs += 1
        return self.jobs - 1

    def run(self, *args: Any, **options: Any) -> None:
        job = self.start(*args, **options)
        self.transfers.wait([job])
        (ended,) = self.transfers.finished()
        assert (ended.job, ended.error) == (job, None)

    def scrub(self) -> None:
        self.tensors.write(np.full_like(self.content, 0xEE))

    def assert_moved(self, pairs: dict[int, int], group: int = 0) -> None:
        """The device has what block k had in block v, and nothing else was written."""
        now, expected = self.tensors.read(), np.full_like(self.content, 0xEE)
        for source, to in pairs.items():
            for tensor, size in GROUPS[group]:
                base = sum(self.tensors.sizes[:tensor])
                at, there = base + to * STRIDES[tensor], base + source * STRIDES[tensor]
                expected[at : at + size] = self.content[there : there + size]
        assert (now == expected).all()

    def close(self) -> None:
        self.transfers.close()
        self.tensors.close()


@pytest.fixture
def tier(device: Device) -> Iterator[Callable[..., Tier]]:
    made: list[Tier] = []

    def make(**options: int) -> Tier:
        made.append(Tier(device, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_blocks_come_back_into_other_blocks(tier: Callable[..., Tier]) -> None:
    at = tier()
    at.run("store", [3, 4, 5, 9], [7, 0, 2, 23])
    at.scrub()
    at.run("load", [30, 31, 10], [23, 7, 2])
    at.assert_moved({9: 30, 3: 31, 5: 10})


def test_a_chunk_of_several_blocks_can_be_loaded_from_within(tier: Callable[..., Tier]) -> None:
    at = tier(per_chunk=4)
    at.run("store", range(10), [5, 1, 3])  # the third chunk holds two blocks
    at.scrub()
    at.run("load", range(20, 26), [5, 1, 3], first=(3, 0))  # blocks 3 to 8 of the request
    at.assert_moved({3: 20, 4: 21, 5: 22, 6: 23, 7: 24, 8: 25})


def test_a_store_may_begin_within_a_chunk_too(tier: Callable[..., Tier]) -> None:
    at = tier(per_chunk=3)
    at.run("store", [1], [2])
    at.run("store", [2, 8, 9], [2, 4], first=(1, 0))
    at.scrub()
    at.run("load", [11, 12, 18, 19], [2, 4])
    at.assert_moved({1: 11, 2: 12, 8: 18, 9: 19})


def test_every_group_has_its_own_chunks_and_pages(tier: Callable[..., Tier]) -> None:
    at = tier(per_chunk=2)
    at.run("store", [1, 2, 3, 7], [0, 1, 2], sizes=(3, 1), first=(0, 5))
    at.scrub()
    at.run("load", [33], [2], sizes=(0, 1), first=(0, 5))
    at.assert_moved({7: 33}, group=1)


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_many_blocks_at_once(tier: Callable[..., Tier], per_chunk: int) -> None:
    at = tier(per_chunk=per_chunk, chunks=40)
    order = np.random.default_rng(3).permutation(BLOCKS)
    chunks = np.random.default_rng(4).permutation(40)[: -(-BLOCKS // per_chunk)]
    at.run("store", order, chunks)
    at.scrub()
    at.run("load", np.arange(BLOCKS), chunks)
    at.assert_moved(dict(zip(order.tolist(), range(BLOCKS), strict=True)))


def test_the_bytes_of_a_transfer_are_those_worth_copying(tier: Callable[..., Tier]) -> None:
    at = tier(per_chunk=2)
    at.start("store", [1, 2, 3, 7], [0, 1, 2], sizes=(3, 1))
    at.transfers.wait([0])
    (ended,) = at.transfers.finished()
    assert ended.nbytes == 3 * (4096 + 1536 + 1000) + (4096 + 4096)
    assert ended.seconds >= 0


def test_no_blocks_are_a_transfer_that_has_ended(tier: Callable[..., Tier]) -> None:
    at = tier()
    at.run("store", [], [])


def test_a_transfer_waits_for_the_stream_of_the_engine(tier: Callable[..., Tier]) -> None:
    at, computed = tier(), HostEvent()
    at.ready = lambda: computed
    job = at.start("store", [3], [0])
    late = np.full_like(at.content, 9)
    at.tensors.write(late)  # what the engine computes meanwhile
    assert at.transfers.finished() == []
    computed.set()
    at.transfers.wait([job])
    assert [ended.error for ended in at.transfers.finished()] == [None]
    at.ready = lambda: DONE
    at.content = late
    at.scrub()
    at.run("load", [5], [0])
    at.assert_moved({3: 5})


def test_a_store_into_memory_to_come_holds_nobody_up(device: Device) -> None:
    with FaultPlan() as plan:
        fill = plan.hold(POPULATE)
        at = Tier(device)
        stored = at.start("store", [3], [4])
        fill.wait_reached()
        assert at.transfers.finished() == []
        assert at.chunks.memory.committed == 0
        fill.release()
        at.transfers.wait([stored])
        assert [ended.error for ended in at.transfers.finished()] == [None]
        at.scrub()
        at.run("load", [5], [4])
        at.assert_moved({3: 5})
        at.close()


def test_memory_that_never_comes_fails_the_store_and_no_call(device: Device) -> None:
    with FaultPlan() as plan:
        plan.fail(POPULATE, errno.ENOMEM, times=None)
        at = Tier(device)
        job = at.start("store", [3], [4])
        at.transfers.wait([job])  # does not raise
        (ended,) = at.transfers.finished()
        assert isinstance(ended.error, MemoryError)
        at.close()


def test_memory_that_the_driver_refuses_serves_all_the_same() -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 801, times=None)  # CUDA_ERROR_NOT_SUPPORTED
        at = Tier(CudaDevice(0, driver=FakeDriver()))
        at.run("store", [3], [4])
        at.scrub()
        at.run("load", [5], [4])
        at.assert_moved({3: 5})
        assert at.chunks.memory.quarantined
        at.close()


@pytest.mark.parametrize("lends", [True, False])
def test_small_pages_of_tensors_that_are_lent_go_through_the_copy_kernel(lends: bool) -> None:
    driver = FakeDriver(kernels=True)
    tensors = Tensors(CudaDevice(0, driver=driver))  # somebody else's, to the other device object
    device = CudaDevice(0, driver=driver, copy_kernel="64KiB")
    lent = [one.extent(BLOCKS) for one in tensors.described] if lends else []
    chunks = ChunkMemory(tensors.described, GROUPS, 1, 24, device=device)
    transfers = ChunkTransfers(chunks, device, lambda: DONE, lent)
    with FaultPlan() as plan:
        transfers.store(0, chunks.places(range(24), (24, 0), (0, 0), range(24)))
        transfers.wait([0])
        assert bool(plan.calls("cuLaunchKernel")) is lends
    transfers.close()
    assert not len(device.lent_memory.table)
    tensors.close()


def test_an_expedited_load_does_not_queue_behind_others(tier: Callable[..., Tier]) -> None:
    at, slow = tier(), HostEvent()
    at.run("store", [1, 2], [0, 1])
    at.ready = lambda: slow
    first = at.start("load", [11], [0])
    at.ready = lambda: DONE
    second = at.start("load", [12], [1], expedited=True)
    at.transfers.wait([second])
    assert [ended.job for ended in at.transfers.finished()] == [second]
    slow.set()
    at.transfers.wait([first, 99])
    assert [ended.job for ended in at.transfers.finished()] == [first]


def test_what_ended_is_told_once_and_in_order(tier: Callable[..., Tier]) -> None:
    at = tier()
    jobs = [at.start("store", [n], [n]) for n in range(5)]
    at.transfers.wait(jobs)
    assert [ended.job for ended in at.transfers.finished()] == jobs
    assert at.transfers.finished() == []


def test_close_finishes_what_was_submitted(device: Device) -> None:
    at = Tier(device)
    for _ in range(8):
        at.start("store", range(BLOCKS // 2), range(BLOCKS // 2))
    at.close()
    at.close()
    assert at.chunks.memory.closed


@pytest.mark.parametrize(
    ("blocks", "sizes", "first", "chunks", "told"),
    [
        ([1, 2], (2,), (0,), [0], "of 1 groups"),
        ([1, 2], (2, 0), (0,), [0, 1], "of 2 groups, beginning at 1"),
        ([1, 2], (1, 0), (0, 0), [0], "2 blocks and 1 chunks were given"),
        ([1, 2], (2, 0), (0, 0), [0, 1], "2 blocks and 2 chunks"),
        ([1, 2], (2, 0), (1, 0), [0], "2 blocks and 1 chunks"),
        ([1, 2], (2, 0), (0, 0), [4], r"4\.\.4, of 0\.\.3"),
        ([1, 2], (2, 0), (0, 0), [-1], r"-1\.\.-1, of 0\.\.3"),
    ],
)
def test_blocks_and_chunks_that_do_not_fit_are_refused(
    cpu: CpuDevice, blocks: Any, sizes: Any, first: Any, chunks: Any, told: str
) -> None:
    tensors = Tensors(cpu)
    memory = ChunkMemory(tensors.described, GROUPS, 2, 4, device=cpu)
    with pytest.raises(ValueError, match=told):
        memory.places(blocks, sizes, first, chunks)
    memory.close()


@pytest.mark.parametrize(
    ("groups", "per_chunk", "chunks", "told"),
    [
        ([[(0, 4097)]], 1, 1, "no page of 4097 bytes in tensor 0"),
        ([[(3, 1)]], 1, 1, "no page of 1 bytes in tensor 3"),
        ([[(0, 1)]], 1, 0, "0 chunks of 1 blocks"),
        ([[(0, 1)]], 0, 1, "1 chunks of 0 blocks"),
    ],
)
def test_memory_that_makes_no_sense_is_refused(
    cpu: CpuDevice, groups: Any, per_chunk: int, chunks: int, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        ChunkMemory(Tensors(cpu).described, groups, per_chunk, chunks, device=cpu)


@pytest.mark.gpu
def test_a_store_waits_for_the_current_stream_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    place = torch.device("cuda:0")
    pages = torch.zeros((8, 1 << 20), dtype=torch.int8, device=place)
    device = CudaDevice(0)
    tensor = BlockTensor(pages.data_ptr(), pages.stride(0), 1 << 20)
    memory = ChunkMemory([tensor], [[(0, 1 << 20)]], 1, 4, device=device)
    transfers = ChunkTransfers(memory, device, behind_torch(device, place))
    memory.memory.wait_usable(memory.memory.size)
    busy = torch.ones((4096, 4096), device=place)
    stream = torch.cuda.Stream(place)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(200):  # tens of milliseconds before the page is written
            busy = busy @ busy
            busy.clamp_(-1, 1)
        pages[3].fill_(7)
        transfers.store(1, memory.places([3], [1], [0], [2]))
        submitted_early = not stream.query()
        pages[3].add_(0)
    transfers.wait([1])
    assert submitted_early, "the submission has waited for the stream"
    assert (memory.memory.view(2 << 20, 1 << 20, dtype=np.int8) == 7).all()
    with torch.cuda.stream(stream):
        pages[5].fill_(1)
        transfers.load(2, memory.places([5], [1], [0], [2]))
    transfers.wait([2])
    assert bool((pages[5] == 7).all())
    assert [ended.error for ended in transfers.finished()] == [None, None]
    transfers.close()
