"""The conformance class, over every store of ours, and over stores that are wrong."""

from __future__ import annotations

import gc
import os
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CudaDevice, CudaMemory, HostMem, resolve_device
from hostmem.device import DeviceLike
from hostmem.testing import FakeDriver
from kvtier import PageCopier
from kvtier.testing import LevelConformance
from kvtier.testing.slot_bench import SlotStore
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.memory import DiskPool, MemoryPool, PageMemory
from kvtier.transfer.page_events import BatchEvent, PageEvents

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

Ids = NDArray[np.int32]
Addresses = NDArray[np.uint64]

# ------------------------------------------------------------------------------- stores of ours


class TestSlotFile(LevelConformance):
    """Whole blocks: past the page cache where the directory allows it."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = str(tmp_path)

    def make(self, slot_size: int, slots: int) -> SlotStore:
        return SlotFile(self.folder, slot_size, slots)

    def damage(self, store: Any, slot: int) -> None:
        with open(f"/proc/self/fd/{store._fd}", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\xff", slot * store.slot_size + store.slot_size // 2)


class TestSlotFileOfOddSlots(TestSlotFile):
    slot_size = 5000


class TestSlotFileOfLargeSlots(TestSlotFile):
    slot_size = 1 << 20  # a request holds a few of them
    n_slots = 16


class TestPersistentSlotFile(TestSlotFile):
    """A file with a name, which stays."""

    def make(self, slot_size: int, slots: int) -> SlotStore:
        return SlotFile(self.folder, slot_size, slots, name="slots", layout=b"as today")


class TestCompressedSlotFile(TestSlotFile):
    """Pages that lie in about half of their slots."""

    slot_size = 64 << 10
    n_slots = 64

    def make(self, slot_size: int, slots: int) -> SlotStore:
        pytest.importorskip("blosc2", reason="the extra is not installed")
        return SlotFile(self.folder, slot_size, slots, compression="blosc2")

    def _content(self, tag: int) -> NDArray[np.uint8]:
        page = super()._content(tag)
        page[self.slot_size // 2 :] = 0
        return page

    def damage(self, store: Any, slot: int) -> None:
        with open(f"/proc/self/fd/{store._fd}", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\xff\x00", slot * store.slot_size + 5000)


class CopiedStore:
    """A level's slots as a copier reaches them from memory.

    The other side are whole pages in host memory; which, is told from their addresses.
    """

    def __init__(self, device: DeviceLike, memory: HostMem, far: PageMemory, slots: int) -> None:
        self.slots = slots
        self.far = far
        self._closing = threading.Lock()
        self._memory = memory
        self._near = PageMemory([MemoryPool(memory, far.page_bytes)])
        self._copier = PageCopier(resolve_device(device), far.page_bytes, staged=False)

    def resize(self, slots: int) -> None:
        self.far.resize(slots)
        self.slots = slots

    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        return self._copy(ids, addresses, after, up=False)

    def read(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        return self._copy(ids, addresses, after, up=True)

    def _copy(self, ids: Ids, addresses: Addresses, after: Dependencies, *, up: bool) -> PageEvents:
        size = np.uint64(self.far.page_bytes)
        near = ((addresses - np.uint64(self._memory.address)) // size).astype(np.int32)
        sides = (self.far, ids, self._near, near) if up else (self._near, near, self.far, ids)
        events = self._copier.copy(*sides, after, up=up)
        (found,) = [event for _, event in events] or [BatchEvent(0)]
        return found

    def close(self) -> None:
        with self._closing:  # one after another, as a storage does it
            self._copier.close()
            self.far.close()


class TestCopiedHostMemory(LevelConformance):
    """Host memory in several registrations, some of it still being committed."""

    # The memory says so itself; and every slot of it can be read.
    test_memory_that_will_never_be_usable_fails_the_transfer = None  # type: ignore[assignment]
    test_a_slot_that_cannot_be_read_fails_alone = None  # type: ignore[assignment]

    def make(self, slot_size: int, slots: int) -> SlotStore:
        memory = HostMem(
            self.n_slots * slot_size,
            slots * slot_size,
            device=self.device,
            slot_size=slot_size,
            commit_unit=4 * slot_size,
        )
        far = PageMemory([MemoryPool(memory, slot_size)])
        return CopiedStore(self.device, self.memory, far, slots)


class TestCopiedHostMemoryOfOddSlots(TestCopiedHostMemory):
    slot_size = 5000


class TestCopiedDeviceMemory(TestCopiedHostMemory):
    """The memory of a GPU, of which a driver in Python keeps the rules."""

    def setup_method(self) -> None:
        self.device = CudaDevice(0, driver=FakeDriver())
        super().setup_method()

    def make(self, slot_size: int, slots: int) -> SlotStore:
        device = resolve_device(self.device)
        assert isinstance(device, CudaDevice)
        memory = CudaMemory(device, self.n_slots * slot_size, slots * slot_size, slot_size)
        far = PageMemory([MemoryPool(memory, slot_size)])
        return CopiedStore(device, self.memory, far, slots)


@pytest.mark.gpu
class TestCopiedGpuMemory(TestCopiedDeviceMemory):
    slot_size = 65536

    def setup_method(self) -> None:
        super().setup_method()
        self.device = resolve_device(0)


class TestCopiedFile(TestSlotFile):
    """A file as the copier uses it."""

    def make(self, slot_size: int, slots: int) -> SlotStore:
        far = PageMemory([DiskPool(SlotFile(self.folder, slot_size, slots))])
        return CopiedStore(self.device, self.memory, far, slots)

    # The memory says so itself.
    test_memory_that_will_never_be_usable_fails_the_transfer = None  # type: ignore[assignment]

    def damage(self, store: Any, slot: int) -> None:
        super().damage(store.far.pools[0].file, slot)


# ------------------------------------------------------------------------- stores that are wrong


class Plain:
    """A store in a dictionary, with a thread for each batch; right, and the base of wrong ones."""

    def __init__(self, slot_size: int, slots: int, raw: Callable[[int, int], Any]) -> None:
        self.slot_size = slot_size
        self.slots = slots
        self._raw = raw
        self._held: dict[int, bytes] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def resize(self, slots: int) -> None:
        self.slots = slots

    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        return self._submit(self._store, ids, addresses, after)

    def read(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        return self._submit(self._load, ids, addresses, after)

    def _store(self, slot: int, address: int) -> None:
        self._held[slot] = self._raw(address, self.slot_size).tobytes()

    def _load(self, slot: int, address: int) -> None:
        self._raw(address, self.slot_size)[:] = np.frombuffer(self._held[slot], np.uint8)

    def _submit(
        self, move: Callable[[int, int], None], ids: Ids, addresses: Addresses, after: Dependencies
    ) -> PageEvents:
        with self._lock:
            if self._closed:
                self.refuse()
            event = BatchEvent(1)
            thread = threading.Thread(target=self._run, args=(event, move, ids, addresses, after))
            self._threads.append(thread)
            thread.start()
        return event

    def refuse(self) -> None:
        raise ClosedError("closed")

    def _run(self, event: BatchEvent, move: Any, *args: Any) -> None:
        event.part_done(self.perform(move, *args))

    def perform(
        self, move: Any, ids: Ids, addresses: Addresses, after: Dependencies
    ) -> dict[int, BaseException]:
        try:
            failures = dict(self.wait(len(ids), after))
        except Exception as error:
            return dict.fromkeys(range(len(ids)), error)
        for place, (slot, address) in enumerate(zip(ids.tolist(), addresses.tolist(), strict=True)):
            if place not in failures:
                try:
                    move(slot, address)
                except Exception as error:
                    failures[place] = error
        return failures

    def wait(self, pages: int, after: Dependencies) -> Any:
        return after.wait(pages)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


class WaitsForNothing(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return after.failures(pages)


class OverlooksFences(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return Dependencies(after.data, (), after.usable).wait(pages)


class OverlooksData(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return Dependencies((), after.fences, after.usable).wait(pages)


class MakesTheCallerWait(Plain):
    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        after.wait_finished()
        return super().write(ids, addresses, after)


class OverlooksThatMemoryIsUnusable(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return Dependencies(after.data, after.fences).wait(pages)


class FailsForOthersFences(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return {**after.wait(pages), **Dependencies(after.fences).failures(pages)}


class FailsTheWholeBatch(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        failures = after.wait(pages)
        return dict.fromkeys(range(pages), next(iter(failures.values()))) if failures else {}


class OverlooksFailedData(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        after.wait(pages)
        return {}


class FailsAtTheWrongPlace(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return {(place + 1) % pages: error for place, error in after.wait(pages).items()}


class FailsTooSoon(Plain):
    def wait(self, pages: int, after: Dependencies) -> Any:
        return after.failures(pages) or after.wait(pages)


class LosesTheErrors(Plain):
    def _run(self, event: BatchEvent, move: Any, *args: Any) -> None:
        self.perform(move, *args)
        event.part_done({})


class FinishesBeforeItIsDone(Plain):
    def _run(self, event: BatchEvent, move: Any, *args: Any) -> None:
        event.part_done({})
        super()._run(BatchEvent(1), move, *args)


class Raises(Plain):
    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        for error in after.failures(len(ids)).values():
            raise error
        return super().write(ids, addresses, after)


class ReadsOneByteTooMany(Plain):
    def _load(self, slot: int, address: int) -> None:
        data = np.frombuffer(self._held[slot] + b"\0", np.uint8)
        self._raw(address, self.slot_size + 1)[:] = data


class ReadsOneByteTooFew(Plain):
    def _load(self, slot: int, address: int) -> None:
        data = np.frombuffer(self._held[slot], np.uint8)[:-1]
        self._raw(address, self.slot_size - 1)[:] = data


class KeepsTheFirst(Plain):
    def _store(self, slot: int, address: int) -> None:
        if slot not in self._held:
            super()._store(slot, address)


class SortsTheSlots(Plain):
    def write(self, ids: Ids, addresses: Addresses, after: Dependencies) -> PageEvents:
        return super().write(np.sort(ids), addresses, after)


class WritesTheNeighbourToo(Plain):
    def _store(self, slot: int, address: int) -> None:
        super()._store(slot, address)
        if slot == 5:
            super()._store(slot + 1, address)


class ChangesTheSource(Plain):
    def _store(self, slot: int, address: int) -> None:
        super()._store(slot, address)
        self._raw(address, 1)[:] ^= 1


class SharesOneBuffer(Plain):
    """Is not made for several threads: batches that overlap exchange their bytes."""

    _buffer: Any = None
    _never = threading.Event()

    def _load(self, slot: int, address: int) -> None:
        self._buffer = np.frombuffer(self._held[slot], np.uint8)
        self._never.wait(0.002)  # others have a buffer to write now
        self._raw(address, self.slot_size)[:] = self._buffer


class ChokesOnNothing(Plain):
    def perform(
        self, move: Any, ids: Ids, addresses: Addresses, after: Dependencies
    ) -> dict[int, BaseException]:
        return super().perform(move, ids, addresses, after) if len(ids) else {0: ValueError("none")}


class BeginsAnewWhenResized(Plain):
    def resize(self, slots: int) -> None:
        self._held.clear()
        self.slots = slots


class ForgetsWhenItShrinks(Plain):
    def resize(self, slots: int) -> None:
        if slots < self.slots:
            self._held.clear()
        self.slots = slots


class ForgetsWhenItGrows(Plain):
    def resize(self, slots: int) -> None:
        if slots > self.slots:
            self._held.clear()
        self.slots = slots


class DoesNotSayItsSize(Plain):
    def resize(self, slots: int) -> None:
        pass


class ClosesTooSoon(Plain):
    def close(self) -> None:
        self._closed = True


class GivesUpWhenItCloses(Plain):
    def perform(
        self, move: Any, ids: Ids, addresses: Addresses, after: Dependencies
    ) -> dict[int, BaseException]:
        after.wait_finished()
        if self._closed:
            return dict.fromkeys(range(len(ids)), ClosedError("too late"))
        return super().perform(move, ids, addresses, after)


class ClosesOnlyOnce(Plain):
    def close(self) -> None:
        if self._closed:
            raise ClosedError("closed already")
        super().close()


class TakesWorkWhenClosed(Plain):
    def refuse(self) -> None:
        pass


FLAWS: Sequence[type[Plain]] = [
    WaitsForNothing,
    OverlooksFences,
    OverlooksData,
    MakesTheCallerWait,
    OverlooksThatMemoryIsUnusable,
    FailsForOthersFences,
    FailsTheWholeBatch,
    OverlooksFailedData,
    FailsAtTheWrongPlace,
    FailsTooSoon,
    LosesTheErrors,
    FinishesBeforeItIsDone,
    Raises,
    ReadsOneByteTooMany,
    ReadsOneByteTooFew,
    KeepsTheFirst,
    SortsTheSlots,
    WritesTheNeighbourToo,
    ChangesTheSource,
    SharesOneBuffer,
    ChokesOnNothing,
    BeginsAnewWhenResized,
    ForgetsWhenItShrinks,
    ForgetsWhenItGrows,
    DoesNotSayItsSize,
    ClosesTooSoon,
    GivesUpWhenItCloses,
    ClosesOnlyOnce,
    TakesWorkWhenClosed,
]


def failing(
    store: type[Plain], raw: Callable[[int, int], Any], patience: float = 30
) -> Iterator[str]:
    """Run all tests over a store; name those that fail."""

    class Conformance(LevelConformance):
        n_slots = 16

        def make(self, slot_size: int, slots: int) -> SlotStore:
            made = store(slot_size, slots, raw)
            self._undo.callback(made.join)
            return made

        def damage(self, store: Plain, slot: int) -> None:
            del store._held[slot]

    Conformance.patience = patience
    for name in sorted(name for name in dir(LevelConformance) if name.startswith("test_")):
        case = Conformance()
        case.setup_method()
        right = False
        try:
            getattr(case, name)()
            right = True
        except Exception:
            gc.collect()  # what failed refers to the memory, in circles
        try:
            case.teardown_method()
        except Exception:
            right = False
        if not right:
            yield name


def test_a_store_that_is_right_passes(tiers: Tiers) -> None:
    assert list(failing(Plain, tiers.raw)) == []


@pytest.mark.parametrize("flaw", FLAWS, ids=lambda flaw: flaw.__name__)
def test_a_store_that_is_wrong_fails(tiers: Tiers, flaw: type[Plain]) -> None:
    assert next(failing(flaw, tiers.raw, patience=2), None)


def test_a_store_that_cannot_be_damaged_skips_what_needs_it(tiers: Tiers) -> None:
    class Conformance(LevelConformance):
        def make(self, slot_size: int, slots: int) -> SlotStore:
            return Plain(slot_size, slots, tiers.raw)

    case = Conformance()
    case.setup_method()
    try:
        with pytest.raises(unittest.SkipTest, match="damage"):
            case.test_a_slot_that_cannot_be_read_fails_alone()
    finally:
        case.teardown_method()
