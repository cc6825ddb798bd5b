"""Codecs of cold pages: what the copier asks of them, and what becomes of pages they refuse."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, CudaDevice, Device, Stream
from hostmem.device.cpu import CpuStream
from hostmem.testing import FakeDriver, FaultPlan
from kvtier import PageCopier
from kvtier.layout import BufferPlace, GroupLayout, PoolLayout
from kvtier.transfer import copier as copier_module
from kvtier.transfer.codec import ColdPageCodec, Concatenate, configured, piece_sizes
from kvtier.transfer.copier import reachable
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.memory import DiskPool, Ids, PageMemory
from kvtier.transfer.page_events import BatchEvent, gathered
from kvtier.transfer.plan import Addresses
from tests.kvtier.copier_bench import Bench, finish, ids

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

NOTHING = Dependencies()
POOLS = {"one-pool": (12288,), "three-pools": (4096, 2048, 6144)}
HEADER = 64
Bytes = NDArray[np.uint8]


def layout(*pools: tuple[int, ...]) -> GroupLayout:
    """Describe a group by the sizes of the buffers in each pool."""
    made = []
    for sizes in pools:
        starts = np.cumsum((0, *sizes[:-1])).tolist()
        places = [BufferPlace(0, "kv", at, size) for at, size in zip(starts, sizes, strict=True)]
        made.append(PoolLayout(sum(sizes), tuple(places)))
    return GroupLayout(tuple(made), (0,), None, None)


def groups_of(sizes: tuple[int, ...]) -> tuple[GroupLayout, ...]:
    return (layout(*((size,) for size in sizes)),)


class Xor:
    """Flips every bit, behind a header that tells whether a page is one of ours."""

    def __init__(self, tiers: Tiers) -> None:
        self._raw = tiers.raw
        self._groups: tuple[GroupLayout, ...] = ()
        self.refused: set[int] = set()
        self.broken: set[int] = set()
        self.batches: list[tuple[str, int]] = []

    def configure(self, groups: tuple[GroupLayout, ...]) -> None:
        self._groups = groups

    def page_bytes(self, group: int) -> int:
        return HEADER + self._groups[group].page_bytes

    def coded(self, hot: Bytes) -> Bytes:
        """Say what a page becomes."""
        body = hot ^ np.uint8(0xFF)
        header = np.zeros(HEADER, np.uint8)
        header[:4] = np.frombuffer(zlib.crc32(body.tobytes()).to_bytes(4, "little"), np.uint8)
        return np.concatenate([header, body])

    def encode(self, group: int, hot: Addresses, cold: Addresses, stream: Stream) -> None:
        def run() -> None:
            self._break(number)
            for pieces, page in zip(hot.T.tolist(), cold.tolist(), strict=True):
                parts = [self._raw(at, size) for at, size in zip(pieces, sizes, strict=True)]
                self._raw(page, self.page_bytes(group))[:] = self.coded(np.concatenate(parts))

        number = self._begin("encode", len(cold))
        sizes = piece_sizes(self._groups[group], len(hot))
        cast(CpuStream, stream).call(run)

    def decode(self, group: int, cold: Addresses, hot: Addresses, stream: Stream) -> None:
        def run() -> None:
            self._break(number)
            for pieces, at in zip(hot.T.tolist(), cold.tolist(), strict=True):
                page = self._raw(at, self.page_bytes(group))
                body = page[HEADER:] ^ np.uint8(0xFF)
                if not np.array_equal(self.coded(body), page):
                    raise ValueError("not a page of this codec")
                places = np.cumsum((0, *sizes))
                for n, piece in enumerate(pieces):
                    self._raw(piece, sizes[n])[:] = body[places[n] : places[n + 1]]

        number = self._begin("decode", len(cold))
        sizes = piece_sizes(self._groups[group], len(hot))
        cast(CpuStream, stream).call(run)

    def _begin(self, what: str, pages: int) -> int:
        self.batches.append((what, pages))
        if len(self.batches) in self.refused:
            raise RuntimeError(f"batch {len(self.batches)} is refused")
        return len(self.batches)

    def _break(self, number: int) -> None:
        if number in self.broken:
            raise RuntimeError(f"batch {number} is broken")


class Padded(Concatenate):
    """Leaves room for a header, and lets the device copy the rest."""

    def page_bytes(self, group: int) -> int:
        return HEADER + super().page_bytes(group)

    def encode(self, group: int, hot: Addresses, cold: Addresses, stream: Stream) -> None:
        super().encode(group, hot, cold + np.uint64(HEADER), stream)

    def decode(self, group: int, cold: Addresses, hot: Addresses, stream: Stream) -> None:
        super().decode(group, cold + np.uint64(HEADER), hot, stream)


@pytest.fixture
def bench(cpu: CpuDevice, tmp_path: Path, tiers: Tiers) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(cpu, tmp_path, tiers, stack)


@pytest.fixture
def xor(tiers: Tiers) -> Xor:
    return Xor(tiers)


class Levels:
    """A hot level, a host level and a disk level, and a copier with a codec between them."""

    def __init__(self, bench: Bench, codec: ColdPageCodec, sizes: tuple[int, ...]) -> None:
        (page,) = configured(codec, groups_of(sizes))
        self.copier = bench.copier(page, codec=codec)
        self.hot, self.host, self.disk = bench.hot(*sizes), bench.host(page), bench.disk(page)

    def cold(self, kind: str) -> PageMemory:
        return self.host if kind == "host" else self.disk


def on_disk(disk: PageMemory, slot: int) -> Bytes:
    """Read a page past the file."""
    file = cast(DiskPool, disk.pools[0]).file
    with open(f"/proc/self/fd/{file._fd}", "rb", buffering=0) as opened:
        opened.seek(slot * file.slot_size)
        return np.frombuffer(opened.read(file.slot_size), np.uint8)


# ------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("sizes", POOLS.values(), ids=POOLS)
def test_cold_pages_are_what_the_codec_makes_of_hot_ones(
    bench: Bench, xor: Xor, sizes: tuple[int, ...], kind: str
) -> None:
    at = Levels(bench, xor, sizes)
    cold, pages = at.cold(kind), bench.put(at.hot, 3, 4, 0)
    finish(at.copier.copy(at.hot, ids(3, 4, 0), cold, ids(7, 8, 2), NOTHING, up=False))
    for slot, page in zip((7, 8, 2), pages, strict=True):
        found = bench.get(cold, slot) if kind == "host" else on_disk(cold, slot)
        assert np.array_equal(found, xor.coded(page))
        # Who is copied is not changed.
    for slot, page in zip((3, 4, 0), pages, strict=True):
        assert np.array_equal(bench.get(at.hot, slot), page)
    finish(at.copier.copy(cold, ids(7, 8, 2), at.hot, ids(9, 10, 12), NOTHING, up=True))
    for slot, page in zip((9, 10, 12), pages, strict=True):
        assert np.array_equal(bench.get(at.hot, slot), page)
    assert xor.batches == [("encode", 3), ("decode", 3)]


def test_between_cold_levels_pages_move_as_they_are(bench: Bench, xor: Xor) -> None:
    at = Levels(bench, xor, (4096, 8192))
    (page,) = bench.put(at.hot, 3)
    finish(at.copier.copy(at.hot, ids(3), at.host, ids(7), NOTHING, up=False))
    finish(at.copier.relocate(at.host, ids(7), ids(6), NOTHING))
    other = bench.host(at.host.page_bytes)
    finish(at.copier.copy(at.host, ids(6), other, ids(1), NOTHING, up=False))
    finish(at.copier.copy(other, ids(1), at.host, ids(6), NOTHING, up=True))
    finish(at.copier.copy(at.host, ids(6), at.disk, ids(5), NOTHING, up=False))
    finish(at.copier.relocate(at.disk, ids(5), ids(4), NOTHING))
    assert xor.batches == [("encode", 1)]
    finish(at.copier.copy(at.disk, ids(4), at.hot, ids(2), NOTHING, up=True))
    assert np.array_equal(bench.get(at.hot, 2), page)


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("device", ["cpu", "gpu-like"])
def test_a_codec_may_let_the_device_copy(
    cpu: CpuDevice, tmp_path: Path, tiers: Tiers, device: str, kind: str
) -> None:
    on: Device = cpu if device == "cpu" else CudaDevice(0, driver=FakeDriver())
    with ExitStack() as stack:
        bench = Bench(on, tmp_path, tiers, stack)
        at = Levels(bench, Padded(), (4096, 2048))
        cold, pages = at.cold(kind), bench.put(at.hot, 3, 4, 5)
        finish(at.copier.copy(at.hot, ids(3, 4, 5), cold, ids(0, 1, 2), NOTHING, up=False))
        found = bench.get(cold, 1) if kind == "host" else on_disk(cold, 1)
        assert np.array_equal(found[HEADER:], pages[1])
        finish(at.copier.copy(cold, ids(0, 1, 2), at.hot, ids(9, 8, 7), NOTHING, up=True))
        for slot, page in zip((9, 8, 7), pages, strict=True):
            assert np.array_equal(bench.get(at.hot, slot), page)


def test_a_codec_is_told_the_group(bench: Bench, tiers: Tiers) -> None:
    xor = Xor(tiers)
    small, large = configured(xor, (layout((4096,)), layout((2048,), (8192, 2048))))
    assert (small, large) == (4096 + HEADER, 12288 + HEADER)
    copier, host = bench.copier(large, codec=xor), bench.host(large)
    hot = PageMemory(bench.host(2048, 10240).pools, 1, hot=True)
    (page,) = bench.put(hot, 0)
    finish(copier.copy(hot, ids(0), host, ids(3), NOTHING, up=False))
    assert np.array_equal(bench.get(host, 3), xor.coded(page))


# ------------------------------------------------------------------------------------- failures


@pytest.fixture
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch be staged in parts of three pages."""
    monkeypatch.setattr(copier_module, "_STAGING_BYTES", 6 * 16384)


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("how", ["refused", "broken"])
def test_pages_that_cannot_be_encoded_stay_where_they_were(
    bench: Bench, xor: Xor, kind: str, how: str
) -> None:
    at = Levels(bench, xor, (4096, 8192))
    cold, pages = at.cold(kind), bench.put(at.hot, 0, 1)
    getattr(xor, how).add(1)
    with FaultPlan() as plan:
        ((_, event),) = at.copier.copy(at.hot, ids(0, 1), cold, ids(5, 6), NOTHING, up=False)
        event.wait_finished()
        assert [str(event.failures[n]) for n in (0, 1)] == [f"batch 1 is {how}"] * 2
        assert plan.calls("pwritev") == []
    for slot, page in enumerate(pages):
        assert np.array_equal(bench.get(at.hot, slot), page)
    finish(at.copier.copy(at.hot, ids(0, 1), cold, ids(5, 6), NOTHING, up=False))
    finish(at.copier.copy(cold, ids(5, 6), at.hot, ids(8, 9), NOTHING, up=True))
    assert np.array_equal(bench.get(at.hot, 8), pages[0])


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("how", ["refused", "broken"])
def test_pages_that_cannot_be_decoded_stay_where_they_were(
    bench: Bench, xor: Xor, kind: str, how: str
) -> None:
    at = Levels(bench, xor, (4096, 8192))
    cold, pages = at.cold(kind), bench.put(at.hot, 0, 1)
    finish(at.copier.copy(at.hot, ids(0, 1), cold, ids(5, 6), NOTHING, up=False))
    getattr(xor, how).add(2)
    ((_, event),) = at.copier.copy(cold, ids(5, 6), at.hot, ids(8, 9), NOTHING, up=True)
    with pytest.raises(RuntimeError, match=f"batch 2 is {how}"):
        event.synchronize()
    assert set(event.failures) == {0, 1}
    finish(at.copier.copy(cold, ids(5, 6), at.hot, ids(8, 9), NOTHING, up=True))
    assert np.array_equal(bench.get(at.hot, 9), pages[1])


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
def test_a_batch_that_fails_takes_no_other_with_it(bench: Bench, xor: Xor, up: bool) -> None:
    at = Levels(bench, xor, (4096, 8192))
    slots = ids(*range(8))
    bench.put(at.hot, *range(8))
    if up:
        finish(at.copier.copy(at.hot, slots, at.disk, slots, NOTHING, up=False))
    xor.refused.add(len(xor.batches) + 2)
    source, to = (at.disk, at.hot) if up else (at.hot, at.disk)
    events = at.copier.copy(source, slots, to, slots + np.int32(8), NOTHING, up=up)
    for _, event in events:
        event.wait_finished()
    assert [(n, len(event.failures)) for n, event in events] == [(3, 0), (3, 3), (2, 0)]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_pages_whose_data_failed_are_kept_from_the_codec(bench: Bench, xor: Xor, kind: str) -> None:
    at = Levels(bench, xor, (4096, 8192))
    cold, pages = at.cold(kind), bench.put(at.hot, 0, 1, 2)
    brought, gone = BatchEvent(1), OSError(errno.EIO, "gone")
    brought.part_done({1: gone})
    after = Dependencies(gathered([brought.page(n) for n in range(3)]))
    ((_, event),) = at.copier.copy(at.hot, ids(0, 1, 2), cold, ids(4, 5, 6), after, up=False)
    event.wait_finished()
    assert event.failures == {1: gone}
    assert xor.batches == [("encode", 2)]
    finish(at.copier.copy(cold, ids(4, 6), at.hot, ids(8, 9), NOTHING, up=True))
    assert np.array_equal(bench.get(at.hot, 9), pages[2])


def test_a_page_that_is_not_there_any_more_is_not_decoded(bench: Bench, xor: Xor) -> None:
    at = Levels(bench, xor, (4096, 8192))
    bench.put(at.hot, 0)
    finish(at.copier.copy(at.hot, ids(0), at.disk, ids(5), NOTHING, up=False))
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO)
        ((_, event),) = at.copier.copy(at.disk, ids(5), at.hot, ids(8), NOTHING, up=True)
        with pytest.raises(OSError, match="preadv"):
            event.synchronize()
    assert xor.batches == [("encode", 1)]


# ---------------------------------------------------------------------------------- the default


@pytest.mark.parametrize("sizes", POOLS.values(), ids=POOLS)
def test_concatenate_makes_what_a_copier_without_a_codec_makes(
    bench: Bench, sizes: tuple[int, ...]
) -> None:
    class Own(Concatenate):
        """Not the default, so that the copier lets it copy by itself."""

    hot, ours, theirs = bench.hot(*sizes), bench.host(12288), bench.host(12288)
    codec = Own()
    assert configured(codec, groups_of(sizes)) == (12288,)
    slots = ids(0, 1, 2, 3, 9)
    pages = bench.put(hot, *slots.tolist())
    finish(bench.copier(12288).copy(hot, slots, ours, slots, NOTHING, up=False))
    copier = bench.copier(12288, codec=codec)
    finish(copier.copy(hot, slots, theirs, slots, NOTHING, up=False))
    for slot, page in zip(slots.tolist(), pages, strict=True):
        assert np.array_equal(bench.get(ours, slot), bench.get(theirs, slot))
        assert np.array_equal(bench.get(theirs, slot), page)
    finish(copier.copy(theirs, slots, hot, slots + np.int32(4), NOTHING, up=True))
    for slot, page in zip((slots + 4).tolist(), pages, strict=True):
        assert np.array_equal(bench.get(hot, slot), page)


def test_the_default_by_name_is_the_default(bench: Bench) -> None:
    codec = Concatenate()
    hot, host, disk = bench.hot(4096), bench.host(4096), bench.disk(4096)
    configured(codec, groups_of((4096,)))
    copier = bench.copier(4096, staged=False, codec=codec)
    bench.put(hot, *range(4))
    with FaultPlan() as plan:
        finish(copier.copy(hot, ids(0, 1, 2, 3), host, ids(0, 1, 2, 3), NOTHING, up=False))
        assert plan.calls("cuMemcpyBatchAsync") == [(1,)]  # neighbours are joined
        finish(copier.copy(hot, ids(0), disk, ids(0), NOTHING, up=False))
        assert plan.calls("cuMemcpyBatchAsync") == [(1,)]  # straight from the slot
    assert reachable(hot, codec)


def test_a_file_cannot_reach_hot_pages_that_a_codec_makes_into_others(
    bench: Bench, xor: Xor
) -> None:
    assert reachable(bench.hot(4096))
    assert not reachable(bench.hot(4096), xor)
    assert reachable(bench.host(4096), xor)
    assert not reachable(bench.host(4096, 4096))
    assert bench.host(4096, 4096).hot  # a whole page has one pool


# ------------------------------------------------------------------- pages of the engine's own


class Strided:
    """Buffers of an engine: page i at its base and i strides, whatever the stride."""

    def __init__(self, base: int, stride: int, size: int) -> None:
        self.address = base
        self.stride = stride
        self.slot_size = size

    def addresses(self, ids: Ids) -> Addresses:
        return ids.astype(np.uint64) * np.uint64(self.stride) + np.uint64(self.address)

    def registration_index(self, addresses: Addresses) -> None:
        return None

    def wait_usable(self, ids: Ids) -> None:
        pass

    def usable_slots(self) -> int:
        return 1 << 30

    def resize(self, slots: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("coded", [False, True])
def test_pages_of_the_engine_become_the_same_cold_pages(
    bench: Bench, xor: Xor, tiers: Tiers, kind: str, coded: bool
) -> None:
    """Two buffers of one pool, which the engine has in two places, and one of another."""
    layouts = (layout((2048, 2048), (8192,)),)
    codec: ColdPageCodec = xor if coded else Concatenate()
    (page_bytes,) = configured(codec, layouts)
    buffers = [np.zeros((8, width), np.uint8) for width in (2048, 4096, 8192)]
    engine = PageMemory(
        [
            Strided(tiers.address(buffer), buffer.shape[1], size)
            for buffer, size in zip(buffers, (2048, 2048, 8192), strict=True)
        ],
        hot=True,
    )
    for row, buffer in enumerate(buffers):
        buffer[:] = np.arange(8, dtype=np.uint8)[:, None] + np.uint8(10 * row)
    copier, pools = bench.copier(page_bytes, codec=codec), bench.hot(4096, 8192)
    cold = bench.host(page_bytes) if kind == "host" else bench.disk(page_bytes)
    finish(copier.copy(engine, ids(1, 5), cold, ids(4, 2), NOTHING, up=False))
    finish(copier.copy(cold, ids(4, 2), pools, ids(0, 1), NOTHING, up=True))
    wanted = np.repeat(np.array([5, 15, 25], np.uint8), (2048, 2048, 8192))
    assert np.array_equal(bench.get(pools, 1), wanted)
    finish(copier.copy(cold, ids(2), engine, ids(7), NOTHING, up=True))
    assert [int(buffer[7, 0]) for buffer in buffers] == [5, 15, 25]
    assert int(buffers[1][7, 3000]) == 17  # what is between the pages is not ours


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("missing", ["configure", "page_bytes", "encode", "decode"])
def test_a_codec_without_a_method_is_refused(cpu: CpuDevice, missing: str) -> None:
    methods: dict[str, Callable[..., Any]] = {
        name: lambda *_: 1 for name in ("configure", "page_bytes", "encode", "decode")
    }
    del methods[missing]
    codec: Any = type("Half", (), methods)()
    message = f"cold_page_codec: Half is no ColdPageCodec, it has no {missing}$"
    with pytest.raises(TypeError, match=message):
        configured(codec, groups_of((4096,)))
    with pytest.raises(TypeError, match=message):
        PageCopier(cpu, 4096, staged=True, codec=codec)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (0, ValueError),
        (-4096, ValueError),
        (4096.0, TypeError),
        ("4096", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_a_codec_whose_pages_have_no_size_is_refused(given: Any, error: type[Exception]) -> None:
    class Odd(Concatenate):
        def page_bytes(self, group: int) -> int:
            return cast(int, given)

    with pytest.raises(error, match=r"cold_page_codec: Odd.page_bytes\(0\) is "):
        configured(Odd(), groups_of((4096,)))


def test_a_codec_is_asked_about_every_group(tiers: Tiers) -> None:
    class Second(Concatenate):
        def page_bytes(self, group: int) -> int:
            return 4096 * (1 - group)

    with pytest.raises(ValueError, match=r"page_bytes\(1\) is 0, the minimum is 1 B"):
        configured(Second(), (layout((4096,)), layout((4096,))))
    assert configured(Xor(tiers), ()) == ()


def test_pieces_are_pools_or_buffers() -> None:
    group = layout((2048, 2048), (8192,))
    assert piece_sizes(group, 2) == (4096, 8192)
    assert piece_sizes(group, 3) == (2048, 2048, 8192)
    with pytest.raises(ValueError, match="hot: 4 pieces a page, but the group has 2 pools of 3"):
        piece_sizes(group, 4)
