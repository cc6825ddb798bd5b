"""The pages of an engine: what is refused, and where each buffer's page is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice
from hostmem.device import CudaMemory
from hostmem.testing import FakeDriver
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
)

MIB = 1 << 20
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", 4096), BufferConfig("value", 4096)]),
    AttentionLayerConfig(1, [BufferConfig("state", 512)]),
    AttentionLayerConfig(2, [BufferConfig("kv", 1024)], sliding_window_size=64),
]
BUFFERS = {
    (0, "key"): (0x10_0000, 4096),
    (0, "value"): (0x20_0000, 8192),
    (1, "state"): (0x30_0000, 512),
    (2, "kv"): (0x40_0000, 1024),
}
CONFIG = KVCacheManagerConfig(16, [HostCacheTierConfig("4MiB", "4MiB")], LAYERS)


def pages(
    n_pages: int | Sequence[int] = 10,
    buffers: Mapping[tuple[int, str], tuple[int, int]] = BUFFERS,
) -> EnginePages:
    return EnginePages(CONFIG.plan(), buffers, n_pages)


def homes(given: Any, blocks: int = 3, n_pages: int | Sequence[int] = 10) -> NDArray[np.int32]:
    return pages(n_pages).homes(blocks, given)


# ------------------------------------------------------------------------------ what there is


def test_a_page_is_its_buffers_in_the_order_of_a_block() -> None:
    whole, windowed = pages().memory
    assert [pool.slot_size for pool in whole.pools] == [4096, 4096, 512]
    assert whole.offsets == (0, 4096, 8192)
    assert (whole.page_bytes, windowed.page_bytes) == (8704, 1024)
    assert (whole.group, windowed.group) == (0, 1)
    assert whole.hot
    assert windowed.hot


def test_a_page_is_a_stride_behind_the_one_before_it() -> None:
    ids = np.array([0, 3, 9], np.int32)
    found = []
    for memory in pages().memory:
        for pool in memory.pools:
            found.append(pool.addresses(ids).tolist())  # type: ignore[attr-defined]
    wanted = [[base + n * stride for n in (0, 3, 9)] for base, stride in BUFFERS.values()]
    assert found == wanted


def test_addresses_beyond_the_first_4_gib_and_in_the_upper_half_are_exact() -> None:
    high = dict.fromkeys(BUFFERS, (0xFFFF_8000_0000_0000, 1 << 20))
    (pool,) = EnginePages(CONFIG.plan(), high, 1 << 20).memory[1].pools
    found = pool.addresses(np.array([(1 << 20) - 1], np.int32)).tolist()  # type: ignore[attr-defined]
    assert found == [0xFFFF_8000_0000_0000 + ((1 << 20) - 1 << 20)]


def test_they_are_as_many_of_each_pool_group_as_is_said() -> None:
    assert pages(7).n_pages == (7, 7)
    assert pages([7, 9]).n_pages == (7, 9)
    assert repr(pages([7, 9])) == "<EnginePages: 7 pages of 8.5 KiB, 9 pages of 1 KiB>"


def test_a_storage_says_what_a_block_is_made_of_as_well_as_a_plan() -> None:
    with TierStorage(CONFIG, device="cpu") as storage:
        assert EnginePages(storage, BUFFERS, 3).groups == CONFIG.plan().groups


def test_the_memory_is_not_the_librarys_to_change_or_to_free() -> None:
    memory = pages().memory[0]
    assert memory.usable_pages() == 10
    memory.wait_usable()
    memory.pools[0].close()
    memory.close()
    with pytest.raises(NotImplementedError):
        memory.resize(20)


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({(0, "key"): None}, r"buffers: \[\(0, 'key'\)\] are in the configuration or given"),
        ({(7, "key"): (1, 4096)}, r"buffers: \[\(7, 'key'\)\] are in the configuration or given"),
        ({(0, "value"): (4096, 4095)}, r"\(0, 'value'\) has a stride of 4095 B, below 4096 B"),
        ({(0, "value"): (4096, -4096)}, "a stride of -4096 B"),
        ({(2, "kv"): (0, 4096)}, "has the base 0, which is no address"),
        ({(2, "kv"): (-1, 4096)}, "has the base -1, which is no address"),
    ],
)
def test_buffers_that_are_not_those_of_the_configuration_are_refused(
    change: dict[tuple[int, str], tuple[int, int] | None], message: str
) -> None:
    given = {name: place for name, place in {**BUFFERS, **change}.items() if place is not None}
    with pytest.raises(ValueError, match=message):
        pages(buffers=given)


@pytest.mark.parametrize(
    ("n_pages", "message"),
    [
        (0, "n_pages: 0 is below the minimum of 1 page"),
        ([3, -1], "n_pages: -1 is below"),
        ([3], "n_pages: 1 numbers for 2 pool groups"),
        ([], "n_pages: 0 numbers for 2 pool groups"),
        ([1, 2, 3], "n_pages: 3 numbers for 2 pool groups"),
    ],
)
def test_a_number_of_pages_that_cannot_be_is_refused(n_pages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pages(n_pages)


@pytest.mark.parametrize("given", [[0, 3, 9], (0, 3, 9), np.array([0, 3, 9], np.uint16)])
def test_one_row_is_of_every_group(given: Any) -> None:
    found = homes(given)
    assert found.tolist() == [[0, 3, 9], [0, 3, 9]]
    assert found.dtype == np.int32


def test_a_row_of_each_group_may_lack_pages() -> None:
    assert homes([[0, 1, -1], [-1, -1, 9]]).tolist() == [[0, 1, -1], [-1, -1, 9]]
    assert homes([-1, -1, -1]).tolist() == [[-1] * 3] * 2
    assert homes([], blocks=0).shape == (2, 0)
    assert homes(np.empty((2, 0), np.int32), blocks=0).shape == (2, 0)


def test_what_is_given_is_not_changed_and_may_change_later() -> None:
    given = np.array([1, 2, 3], np.int32)
    found = homes(given)
    given[:] = 0
    assert found.tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 1], r"the shape is \(2,\), not \(3,\) or \(2, 3\)"),
        ([[0, 1, 2]], r"the shape is \(1, 3\)"),
        ([[0, 1], [0, 1], [0, 1]], r"the shape is \(3, 2\)"),
        (5, r"the shape is \(\)"),
        ([0, 1, 10], r"10 of pool group 0 is not in 0\.\.9"),
        ([0, 1, -2], "-2 of pool group 0 is not in"),
        ([[0, 1, 2], [0, 1, 1 << 40]], "1099511627776 of pool group 1 is not in"),
        ([0, 1, 0], "0 of pool group 0 is named twice"),
        ([[0, 1, 2], [3, 3, -1]], "3 of pool group 1 is named twice"),
    ],
)
def test_pages_that_there_are_not_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        homes(given)


def test_each_group_is_held_against_its_own_number_of_pages() -> None:
    assert homes([[0, 1, 2], [5, 6, 7]], n_pages=[3, 8]).tolist() == [[0, 1, 2], [5, 6, 7]]
    with pytest.raises(ValueError, match="3 of pool group 0"):
        homes([1, 2, 3], n_pages=[3, 8])


@pytest.mark.parametrize("given", [[0.0, 1.0, 2.0], [True, False, True], ["0", "1", "2"]])
def test_pages_that_are_no_integers_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="pages: integers are needed"):
        homes(given)


def test_pages_of_another_configuration_are_refused() -> None:
    other = KVCacheManagerConfig(16, [HostCacheTierConfig("4MiB", "4MiB")], LAYERS[:1])
    some = {name: place for name, place in BUFFERS.items() if name[0] == 0}
    with (
        TierStorage(CONFIG, device="cpu") as storage,
        pytest.raises(ValueError, match="of another configuration"),
    ):
        BlockCache(storage, engine=EnginePages(other.plan(), some, 10))


def test_a_storage_with_a_hot_level_of_its_own_takes_no_engine() -> None:
    config = KVCacheManagerConfig(16, [GpuCacheTierConfig("4MiB", "4MiB")], LAYERS)
    with TierStorage(config, device="cpu") as storage:
        with pytest.raises(ValueError, match="leave the tier out"):
            BlockCache(storage, engine=EnginePages(storage, BUFFERS, 10))
        cache = BlockCache[int](storage)  # the refused one is not in the way
        for call in (cache.store, cache.load):
            with pytest.raises(ValueError, match=r"give it its pages \(engine=EnginePages"):
                call([1], [0])


def test_pages_where_the_driver_knows_no_memory_are_refused() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    with TierStorage(CONFIG, device=device) as storage:
        with pytest.raises(ValueError, match="the driver knows no memory at 0x100000, which is in"):
            BlockCache(storage, engine=EnginePages(storage, BUFFERS, 10))
        BlockCache[int](storage)  # the refused one is not in the way


def test_pages_are_borrowed_from_the_engine_until_the_storage_is_closed() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    with closing(CudaMemory(device, 2 * MIB, 2 * MIB, 2 * MIB)) as memory:
        places = {name: memory.address + n * 128 * 1024 for n, name in enumerate(BUFFERS)}
        buffers = {name: (places[name], stride) for name, (_, stride) in BUFFERS.items()}
        sizes = {(0, "key"): 4096, (0, "value"): 4096, (1, "state"): 512, (2, "kv"): 1024}
        with TierStorage(CONFIG, device=device) as storage:
            BlockCache(storage, engine=EnginePages(storage, buffers, 10))
            assert list(device.lent_memory.table) == [
                (base, 9 * stride + sizes[name]) for name, (base, stride) in buffers.items()
            ]
        assert len(device.lent_memory.table) == 0
