"""What the tests of this package share: tiny tiers whose bytes can be read, and nothing left."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CpuDevice, Device, HostEvent
from hostmem._sys import seam
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)
from kvtier.transfer.memory import DiskPool, MemoryPool
from tests.threads import DEADLINE

_MIB = 1 << 20
_THREADS = ("kvtier-", "hostmem-fill", "hostmem-populate", "hostmem-cpu-stream", "spawned")
_DRIVER_FILES = re.compile(r"/dev/nvidia|anon_inode:|pipe:|socket:|.*/libcuda\.so")


def _threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(_THREADS))


def _open_files() -> Counter[str]:
    """Name the open files; a driver's own, which it opens when it first needs them, are not."""
    names: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            name = os.readlink(f"/proc/self/fd/{number}")
            names[name] += not _DRIVER_FILES.match(name)
    return names


@pytest.fixture(autouse=True)
def nothing_is_left(cpu: CpuDevice) -> Iterator[None]:
    """After each test no thread runs, nothing is registered, no file is open, no plan installed."""
    before = _open_files()
    yield
    deadline = time.monotonic() + DEADLINE
    while _threads() and time.monotonic() < deadline:
        gc.collect()  # the stream of a fake driver ends on its own, when nothing refers to it
    assert _threads() == []
    assert list(cpu.registered) == []
    assert +(_open_files() - before) == Counter()
    assert seam.install(None) is None


class Gate(HostEvent):
    """An event that the test sets, and that knows when somebody waits for it."""

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        super().__init__()
        self._asked = threading.Event()

    def synchronize(self, timeout: float | None = None) -> None:
        self._asked.set()
        super().synchronize(timeout)

    def wait_asked(self) -> None:
        """Block until a thread waits for this event."""
        assert self._asked.wait(DEADLINE), "nobody waits for the event"


@pytest.fixture
def gate() -> Iterator[Callable[[], Gate]]:
    """Make gates; those still shut when the test ends are opened."""
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate())
        return gates[-1]

    yield make
    for one in gates:
        if not one.query():
            one.set()


class _Range:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class Tiers:
    """Builds storages, and writes and reads pages behind their back."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def config(
        self,
        gpu: int,
        host: int = 0,
        disk: int = 0,
        *,
        page: int = _MIB // 2,
        layers: Sequence[AttentionLayerConfig] | None = None,
        folder: Path | None = None,
    ) -> KVCacheManagerConfig:
        """Describe levels of so many pages each, of one buffer unless layers say otherwise.

        With layers, the three numbers are MiB. Quotas come in steps of 2 MiB.
        """
        unit = page if layers is None else _MIB
        tiers: list[Any] = [GpuCacheTierConfig(gpu * unit, gpu * unit)]
        if host:
            tiers.append(HostCacheTierConfig(host * unit, host * unit))
        if disk:
            tiers.append(DiskCacheTierConfig(disk * unit, str(folder or self.folder), disk * unit))
        return KVCacheManagerConfig(
            16, tiers, layers or [AttentionLayerConfig(0, [BufferConfig("kv", page)])]
        )

    def build(self, *args: Any, device: Device | str = "cpu", **options: Any) -> TierStorage:
        """Build what `config` describes; it is closed when the test ends."""
        storage = TierStorage(self.config(*args, **options), device=device)
        self._stack.callback(storage.close)
        return storage

    def new(self, storage: TierStorage, *keys: int, group: int = 0) -> list[Page]:
        """Make pages, write what their keys say, commit them and let them go."""
        pages = storage.new_pages(keys, group)
        for page in pages:
            for fence in page.fences:
                fence.wait_finished()
            self.write(storage, page)
        storage.commit(pages)
        storage.release(pages)
        return pages

    def content(self, key: int, nbytes: int) -> NDArray[np.uint8]:
        """Say what a page of a key holds: every byte depends on the key and the position."""
        words = np.arange(-(-nbytes // 8), dtype=np.uint64) + np.uint64(key * 1_000_003)
        words *= np.uint64(0x9E3779B97F4A7C15)
        return (words ^ (words >> np.uint64(29))).view(np.uint8)[:nbytes]

    def raw(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Give an array over memory that nobody knows of."""
        interface: Any = _Range(address, nbytes)
        return np.asarray(interface)

    def address(self, array: NDArray[Any]) -> int:
        return int(array.__array_interface__["data"][0])

    def write(self, storage: TierStorage, page: Page, key: int | None = None) -> None:
        """Write a page, in memory or in the file, past the storage."""
        memory = storage.levels[page.level].groups[page.group].memory
        data = self.content(cast(int, page.owner) if key is None else key, memory.page_bytes)
        for pool, offset in zip(memory.pools, memory.offsets, strict=True):
            part = data[offset : offset + pool.slot_size]
            if isinstance(pool, DiskPool):
                with open(f"/proc/self/fd/{pool.file._fd}", "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), part.tobytes(), page.slot * pool.slot_size)
            else:
                self._slot(cast(MemoryPool, pool), page.slot)[:] = part

    def read(self, storage: TierStorage, page: Page) -> NDArray[np.uint8]:
        """Read a page from where it is, past the storage, once it is there."""
        page.ready.synchronize()
        parts = []
        for pool in storage.levels[page.level].groups[page.group].memory.pools:
            if isinstance(pool, DiskPool):
                with open(f"/proc/self/fd/{pool.file._fd}", "rb", buffering=0) as file:
                    data = os.pread(file.fileno(), pool.slot_size, page.slot * pool.slot_size)
                parts.append(np.frombuffer(data, np.uint8))
            else:
                parts.append(self._slot(cast(MemoryPool, pool), page.slot).copy())
        return np.concatenate(parts)

    def _slot(self, pool: MemoryPool, slot: int) -> NDArray[np.uint8]:
        return self.raw(pool.memory.address + slot * pool.slot_size, pool.slot_size)

    def intact(self, storage: TierStorage, page: Page, key: int | None = None) -> bool:
        """Tell whether a page holds what its key says, every byte."""
        found = self.read(storage, page)
        wanted = self.content(cast(int, page.owner) if key is None else key, len(found))
        return bool(np.array_equal(found, wanted))

    def order(self, storage: TierStorage, group: int = 0) -> list[list[Any]]:
        """Give the owners of the pages in each level, the next to go first."""
        return [[page.owner for page in at.policies[group].victims()] for at in storage.levels]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with contextlib.ExitStack() as stack:
        yield Tiers(tmp_path, stack)
