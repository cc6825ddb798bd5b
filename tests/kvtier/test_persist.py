"""Named files of slots: what comes back, what does not, and who may open them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CpuDevice, DiskOOMError, ResourceBusyError, StaticHostMem
from hostmem.testing import FaultPlan
from kvtier.transfer import slot_index
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import PageEvents
from kvtier.transfer.slot_record import HEADER_BYTES, RECORD_BYTES, Header, Record
from tests.kvtier.persist_writer import LAYOUT, NAME, content

SIZE = 4096
SLOTS = 12


class Kit:
    """Opens a named file again and again, and moves slots by the names they hold."""

    def __init__(self, folder: Path, cpu: CpuDevice, stack: ExitStack) -> None:
        self.folder = folder
        self.data, self.index = folder / "x.slots", folder / "x.slots.index"
        self._stack = stack
        self.memory = StaticHostMem(64 * 2 * SIZE, device=cpu)
        stack.callback(self.memory.close)
        self.file: SlotFile = None  # type: ignore[assignment]

    def open(
        self,
        slots: int = SLOTS,
        *,
        size: int = SIZE,
        layout: bytes = b"\x0a\x0b",
        folder: Path | None = None,
    ) -> SlotFile:
        """Open it, after closing what is open."""
        if self.file is not None:
            self.file.close()
        self.file = SlotFile(str(folder or self.folder), size, slots, name="x.slots", layout=layout)
        self._stack.callback(self.file.close)
        return self.file

    def page(self, slot: int) -> NDArray[np.uint8]:
        """Give the memory that belongs to a slot."""
        size = self.file.slot_size
        return self.memory.view(slot * size, size)

    def _addresses(self, slots: list[int]) -> NDArray[np.uint64]:
        at = np.array(slots, np.uint64) * np.uint64(self.file.slot_size)
        return np.uint64(self.memory.address) + at

    def submit(
        self, names: dict[int, bytes], after: Dependencies | None = None, named: bool = True
    ) -> PageEvents:
        """Begin to write slots with what their names say."""
        slots = list(names)
        for slot, name in names.items():
            self.page(slot)[:] = content(name, self.file.slot_size)
        return self.file.write(
            np.array(slots, np.int32),
            self._addresses(slots),
            after or Dependencies(),
            list(names.values()) if named else None,
        )

    def write(self, names: dict[int, bytes], named: bool = True) -> None:
        self.submit(names, named=named).synchronize()

    def forget(self, *slots: int) -> None:
        self.file.forget(np.array(slots, np.int32))

    def read(self, *slots: int) -> dict[int, BaseException]:
        for slot in slots:
            self.page(slot)[:] = 0xEE
        event = self.file.read(
            np.array(slots, np.int32), self._addresses(list(slots)), Dependencies()
        )
        event.wait_finished()
        return {slots[n]: error for n, error in event.failures.items()}

    def came_back(self) -> dict[int, bytes]:
        """Read all that was restored; every byte of it must be right."""
        restored = dict(self.file.restored)
        assert self.read(*restored) == {}
        for slot, name in restored.items():
            assert np.array_equal(self.page(slot), content(name, self.file.slot_size))
        return restored

    def at(self, slot: int) -> int:
        """Say where a slot's record is."""
        return HEADER_BYTES + slot * RECORD_BYTES

    def record(self, slot: int) -> bytes:
        with open(self.index, "rb") as file:
            return os.pread(file.fileno(), RECORD_BYTES, self.at(slot))

    def poke(self, path: Path, at: int, data: bytes) -> None:
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), data, at)

    def of_index(self, fd: int, n: int, at: int) -> bool:
        """Choose the calls on the side file."""
        return os.path.realpath(f"/proc/self/fd/{fd}") == str(self.index)

    def of_record(self, slot: int, byte: int = 0) -> Callable[..., bool]:
        """Choose writes that begin at a byte of a slot's record."""
        return lambda fd, n, at: self.of_index(fd, n, at) and at == self.at(slot) + byte

    def of_data(self, fd: int, n: int, at: int) -> bool:
        return os.path.realpath(f"/proc/self/fd/{fd}") == str(self.data)


@pytest.fixture
def kit(tmp_path: Path, cpu: CpuDevice) -> Iterator[Kit]:
    with ExitStack() as stack:
        yield Kit(tmp_path, cpu, stack)


EMPTY = bytes(RECORD_BYTES)

# ------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("size", [SIZE, 2 * SIZE, 5000, 1])
def test_slots_come_back_with_their_names(kit: Kit, size: int) -> None:
    assert kit.open(size=size).restored == ()
    kit.write({7: b"seven", 2: b"two", 3: b"three"})
    kit.open(size=size)
    assert kit.file.restored == ((2, b"two"), (3, b"three"), (7, b"seven"))
    kit.came_back()
    assert kit.file.slots == SLOTS
    # And once more, with what is new.
    kit.write({0: b"zero"})
    kit.open(size=size)
    assert sorted(kit.came_back()) == [0, 2, 3, 7]


def test_what_was_written_first_comes_back_first(kit: Kit) -> None:
    """A cache makes its order of eviction of it."""
    kit.open()
    for slot in (7, 2, 9, 4):
        kit.write({slot: b"%d" % slot})
    kit.write({2: b"again", 0: b"0"})
    kit.open()
    assert [slot for slot, _ in kit.file.restored] == [7, 9, 4, 0, 2]
    kit.write({1: b"later"})
    kit.open()
    assert [slot for slot, _ in kit.file.restored] == [7, 9, 4, 0, 2, 1]


@pytest.mark.parametrize("name", [b"\0", b"a\0\0", bytes(64), b"\xff" * 64])
def test_a_name_is_any_bytes(kit: Kit, name: bytes) -> None:
    kit.open()
    kit.write({1: name})
    assert kit.open().restored == ((1, name),)


def test_slots_without_a_name_do_not_come_back(kit: Kit) -> None:
    kit.open()
    kit.write({0: b"a", 1: b"", 2: b"c"})
    kit.write({4: b"d"}, named=False)
    assert not kit.read(0, 1, 2, 4)
    kit.open()
    assert sorted(kit.came_back()) == [0, 2]
    # Nor with the name of what was there before.
    kit.write({0: b"", 1: b"b"})
    kit.write({2: b"new"}, named=False)
    kit.open()
    assert kit.came_back() == {1: b"b"}


def test_a_slot_has_the_name_it_was_given_last(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"old", 2: b"other"})
    kit.write({1: b"new"})
    kit.open()
    assert kit.came_back() == {1: b"new", 2: b"other"}


def test_of_two_slots_of_a_name_the_newer_comes_back(kit: Kit) -> None:
    """A page moves within the file, and the process is killed before the old place is forgotten."""
    kit.open()
    kit.write({9: b"same", 3: b"other"})
    kit.write({1: b"same"})
    kit.open()
    assert kit.came_back() == {1: b"same", 3: b"other"}
    assert kit.record(9) == EMPTY  # and the other one never again
    # What is written now is newer than what was then, whatever the order of the slots.
    kit.write({11: b"same"})
    kit.open()
    assert kit.came_back() == {3: b"other", 11: b"same"}
    kit.forget(11)
    kit.open()
    assert kit.came_back() == {3: b"other"}


def test_a_slot_that_came_back_fails_where_its_bytes_have_changed(kit: Kit) -> None:
    kit.open()
    kit.write({4: b"four", 5: b"five"})
    kit.file.close()
    kit.poke(kit.data, 4 * SIZE + 99, b"?")
    kit.open()
    assert [slot for slot, _ in kit.file.restored] == [4, 5]
    failed = kit.read(4, 5)
    assert [(slot, error.errno) for slot, error in failed.items()] == [  # type: ignore[attr-defined]
        (4, errno.EBADMSG)
    ]


def test_a_slot_that_did_not_come_back_is_not_read_as_something(kit: Kit) -> None:
    kit.open()
    kit.write({4: b"four"}, named=False)
    kit.open()
    assert list(kit.read(3, 4)) == [4]  # slot 3 holds zeros, as it always did
    kit.write({4: b"again"})
    assert not kit.read(4)


def test_forgotten_slots_do_not_come_back_and_can_be_read_until_then(kit: Kit) -> None:
    kit.open()
    kit.write({slot: b"%d" % slot for slot in range(8)})
    kit.forget(1, 6, 2, 11)  # slot 11 was never written
    kit.forget()
    kit.forget(SLOTS, SLOTS + 5)  # nor is there a slot 12
    assert not kit.read(1, 2, 6)
    kit.open()
    assert sorted(kit.came_back()) == [0, 3, 4, 5, 7]
    kit.forget(0, 3)
    kit.write({3: b"three"})
    kit.open()
    assert kit.came_back() == {3: b"three", 4: b"4", 5: b"5", 7: b"7"}


def test_a_slot_forgotten_while_it_is_written_does_not_come_back(kit: Kit) -> None:
    kit.open()
    with FaultPlan() as plan:
        held = plan.hold("pwritev", when=kit.of_data)
        event = kit.submit({1: b"one", 2: b"two"})
        held.wait_reached()
        kit.forget(2)
        held.release()
        event.synchronize()
    assert not kit.read(1, 2)
    kit.open()
    assert kit.came_back() == {1: b"one"}


def test_a_slot_written_after_it_was_forgotten_comes_back_whoever_is_slow(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"old"})
    with FaultPlan() as plan:
        held = plan.hold("pwritev", when=kit.of_index)
        kit.forget(1)
        held.wait_reached()
        event = kit.submit({1: b"new"})
        held.release()
        event.synchronize()
        # A worker that is even slower finds that the slot is another's now.
        late = kit.file._index
        assert late is not None
        late.forget(np.array([1], np.int32), 2)
    assert kit.record(1) != EMPTY
    kit.open()
    assert kit.came_back() == {1: b"new"}


def test_a_slot_stays_forgotten_if_what_comes_next_never_comes(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"one", 2: b"two"})
    late = kit.file._index
    assert late is not None
    claim = late.claim(np.array([1], np.int32))
    late.claim(np.array([1], np.int32))  # by a write that fails before it begins
    late.forget(np.array([1], np.int32), claim)
    kit.open()
    assert kit.came_back() == {2: b"two"}


# ------------------------------------------------------------------------------ sizes and room


def test_slots_are_forgotten_while_the_file_gets_smaller(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = kit.open()._index
    assert index is not None
    kit.write({2: b"two", 3: b"three", 9: b"nine"})
    resize = index.resize

    def resized(slots: int) -> None:
        resize(slots)
        kit.forget(2, 9)  # by a thread that knows of no change yet

    monkeypatch.setattr(index, "resize", resized)
    kit.file.resize(4)
    kit.open(slots=4)
    assert kit.came_back() == {3: b"three"}


def test_slots_beyond_a_smaller_size_are_gone(kit: Kit) -> None:
    kit.open()
    kit.write({2: b"two", 8: b"eight"})
    kit.open(6)
    assert kit.came_back() == {2: b"two"}
    assert os.stat(kit.data).st_size == 6 * SIZE
    kit.open()
    assert kit.came_back() == {2: b"two"}
    assert not kit.read(8)
    assert not kit.page(8).any()


def test_a_larger_size_keeps_what_is_there_and_has_room(kit: Kit) -> None:
    kit.open(4)
    kit.write({2: b"two"})
    kit.open(20)
    kit.write({19: b"last"})
    assert os.stat(kit.data).st_size == 20 * SIZE
    assert os.stat(kit.index).st_size == kit.at(20)
    assert os.stat(kit.index).st_blocks * 512 >= kit.at(20)
    kit.open(20)
    assert kit.came_back() == {2: b"two", 19: b"last"}


def test_a_file_with_holes_gets_its_room_when_it_is_opened(kit: Kit) -> None:
    """A copy of a file, and a file of a file system that lost some of it, may have them."""
    kit.open()
    kit.write({2: b"two"})
    kit.file.close()
    os.truncate(kit.data, 0)
    os.truncate(kit.data, SLOTS * SIZE)
    with FaultPlan() as plan:
        plan.fail("fallocate", errno.ENOSPC)
        with pytest.raises(DiskOOMError, match="no room for 48 KiB"):
            kit.open()
    kit.open()
    assert os.stat(kit.data).st_blocks * 512 >= SLOTS * SIZE
    assert list(kit.read(2)) == [2]  # its record says what should be there


def test_resizing_at_work_keeps_what_is_below(kit: Kit) -> None:
    kit.open()
    kit.write({2: b"two", 8: b"eight"})
    kit.file.resize(6)
    kit.write({3: b"three"})
    kit.file.resize(30)
    assert not kit.read(8)
    assert not kit.page(8).any()
    kit.write({29: b"last"})
    kit.forget(2)
    kit.open(30)
    assert kit.came_back() == {3: b"three", 29: b"last"}


def test_a_size_for_which_there_is_no_room_changes_nothing(kit: Kit) -> None:
    kit.open()
    kit.write({2: b"two"})
    for path in (kit.data, kit.index):
        with FaultPlan() as plan:
            chosen = kit.of_data if path == kit.data else kit.of_index
            plan.fail("fallocate", errno.ENOSPC, when=lambda fd, _, at, n, c=chosen: c(fd, n, at))
            with pytest.raises(DiskOOMError, match="no room for 160 KiB"):
                kit.file.resize(40)
        assert (os.stat(kit.data).st_size, os.stat(kit.index).st_size) == (SLOTS * SIZE, kit.at(12))
        with FaultPlan() as plan:
            plan.fail("fallocate", errno.ENOSPC)
            with pytest.raises(DiskOOMError, match="no room for 160 KiB"):
                kit.open(40)
        kit.open()
        assert kit.came_back() == {2: b"two"}


def test_a_file_system_that_is_full_from_the_start_is_the_same_error(kit: Kit) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.ENOSPC)
        with pytest.raises(DiskOOMError) as caught:
            kit.open()
    assert isinstance(caught.value.__cause__, OSError)
    assert len(os.listdir("/proc/self/fd")) == before
    kit.open()


@pytest.mark.parametrize("cut", [5 * SIZE, 5 * SIZE + 512, 0])
def test_slots_beyond_the_end_of_a_truncated_file_do_not_come_back(kit: Kit, cut: int) -> None:
    kit.open()
    kit.write({slot: b"%d" % slot for slot in range(8)})
    kit.file.close()
    os.truncate(kit.data, cut)
    kit.open()
    assert sorted(kit.came_back()) == list(range(cut // SIZE))
    # Nor do they later, when the file is as long again.
    kit.open()
    assert sorted(kit.came_back()) == list(range(cut // SIZE))
    assert not kit.read(5, 6)
    assert not kit.page(5).any()


@pytest.mark.parametrize("which", ["data", "index"])
def test_one_file_without_the_other_holds_nothing(kit: Kit, which: str) -> None:
    kit.open()
    kit.write({1: b"one"})
    kit.file.close()
    os.unlink(getattr(kit, which))
    kit.open()
    assert kit.file.restored == ()
    kit.write({2: b"two"})
    kit.open()
    assert kit.came_back() == {2: b"two"}


# --------------------------------------------------------------------------- who may open them


def test_the_files_are_two_and_the_owners_alone(kit: Kit) -> None:
    kit.open()
    assert sorted(os.listdir(kit.folder)) == ["x.slots", "x.slots.index"]
    for path in (kit.data, kit.index):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_another_layout_or_size_is_refused_and_nothing_changes(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"one"})
    kit.file.close()
    before = kit.data.read_bytes(), kit.index.read_bytes()
    with pytest.raises(ValueError, match=r"x\.slots\.index is of layout 0a0b, not of layout 0c"):
        kit.open(layout=b"\x0c")
    with pytest.raises(ValueError, match="layout 0a0b, not of layout none"):
        kit.open(layout=b"")
    with pytest.raises(ValueError, match="slots of 4096 bytes, not of slots of 8192 bytes"):
        kit.open(size=2 * SIZE)
    assert (kit.data.read_bytes(), kit.index.read_bytes()) == before
    kit.open()
    assert kit.came_back() == {1: b"one"}


def test_a_file_of_something_else_is_refused_and_nothing_changes(kit: Kit) -> None:
    kit.index.write_text("dear diary")
    kit.data.write_text("as well")
    with pytest.raises(ValueError, match=r"x\.slots\.index is a file of something else"):
        kit.open()
    assert (kit.index.read_text(), kit.data.read_text()) == ("dear diary", "as well")


def test_another_format_is_refused_by_its_number(kit: Kit) -> None:
    kit.open().close()
    kit.poke(kit.index, 12, b"\x02")
    with pytest.raises(ValueError, match="has format 2, and this release reads format 1"):
        kit.open()


@pytest.mark.parametrize("damage", ["a bit", "cut", "zeros"])
def test_a_damaged_header_means_that_nothing_comes_back(
    kit: Kit, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    kit.open()
    kit.write({1: b"one"})
    kit.file.close()
    if damage == "a bit":
        kit.poke(kit.index, 99, b"\x01")
    elif damage == "cut":
        os.truncate(kit.index, 100)
    else:  # the file system lost the page, and says nothing of it
        kit.poke(kit.index, 0, bytes(HEADER_BYTES))
    kit.open()
    assert kit.file.restored == ()
    assert ("the header of" in caplog.text) is (damage != "zeros")
    kit.write({2: b"two"})
    kit.open()
    assert kit.came_back() == {2: b"two"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a"])
def test_a_name_with_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a file name"):
        SlotFile(str(tmp_path), SIZE, 4, name=name)
    assert os.listdir(tmp_path) == []


def test_a_layout_that_is_too_long_is_refused(kit: Kit) -> None:
    kit.open(layout=bytes(256)).close()
    with pytest.raises(ValueError, match="layout: 257 bytes, above the bound of 256"):
        kit.open(layout=bytes(257))


@pytest.mark.parametrize("which", ["data", "index"])
def test_symbolic_links_are_not_followed(kit: Kit, which: str) -> None:
    victim = kit.folder / "victim"
    victim.write_text("precious")
    os.symlink(victim, getattr(kit, which))
    with pytest.raises(OSError, match="symbolic links"):
        kit.open()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("pid", [4711, None])
def test_a_file_in_use_is_refused_with_who_uses_it(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, pid: int | None
) -> None:
    first = kit.open()
    kit.write({1: b"one"})
    who = "another process" if pid is None else f"process {pid}"
    with monkeypatch.context() as patch:
        patch.setattr(slot_index, "lock_holder", lambda fd: pid)
        with pytest.raises(ResourceBusyError, match=rf"is in use by {who};") as caught:
            SlotFile(str(kit.folder), SIZE, SLOTS, name="x.slots", layout=b"\x0c")
    assert (caught.value.pid, caught.value.path) == (pid, str(kit.index))
    assert not kit.read(1)
    first.close()
    kit.open()
    assert kit.came_back() == {1: b"one"}


def test_a_process_that_has_it_is_named_and_leaves_it_behind_when_it_dies(kit: Kit) -> None:
    with writer(kit.folder, seed=1) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline()
            with pytest.raises(
                ResourceBusyError, match=f"in use by (process {child.pid}|another process);"
            ):
                written(kit.folder)
        finally:
            child.kill()
    written(kit.folder).close()


def test_a_forked_child_does_not_hold_the_file(kit: Kit) -> None:
    """Else a worker process that outlives a server would keep the next server out."""
    kit.open()
    kit.write({1: b"one"})
    out, into = os.pipe()
    ready, say = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(into)
        os.write(say, b"!")
        os.read(out, 1)  # until the parent closes its end, or dies
        os._exit(0)
    try:
        assert os.read(ready, 1)
        # As the kernel does it when the parent is killed: without a word to the child.
        assert kit.file._index is not None
        kit.file._index.abandon()
        other = SlotFile(str(kit.folder), SIZE, SLOTS, name="x.slots", layout=b"\x0a\x0b")
        assert other.restored == ((1, b"one"),)
        other.close()
    finally:
        for fd in (out, into, ready, say):
            os.close(fd)
        os.waitpid(pid, 0)


def test_a_closed_file_is_free_even_if_a_child_still_has_it(kit: Kit) -> None:
    """A child that is between its fork and its exec has all files of its parent."""
    kit.open()
    index = kit.file._index
    assert index is not None
    inherited = os.dup(index._fd)  # as good as a child's: of the same open file
    try:
        kit.open()
    finally:
        os.close(inherited)


# ------------------------------------------------------------------------ what a call is given


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        ([b"a"], ValueError, "names: 1 for 2 slots"),
        ([b"a", "b"], TypeError, "bytes are needed, not str"),
        ([b"a", bytes(65)], ValueError, "has 65 bytes, above the bound of 64"),
    ],
)
def test_wrong_names_are_refused_and_nothing_is_written(
    kit: Kit, names: Any, error: type[Exception], text: str
) -> None:
    kit.open()
    with FaultPlan() as plan:
        with pytest.raises(error, match=text):
            kit.file.write(
                np.array([0, 1], np.int32),
                np.full(2, kit.memory.address, np.uint64),
                Dependencies(),
                names,
            )
        assert plan.log == []


def test_a_file_without_a_name_has_no_use_for_names(tmp_path: Path, kit: Kit) -> None:
    kit.file = SlotFile(str(tmp_path), SIZE, SLOTS)
    kit.write({1: b"one"})
    kit.forget(1)
    assert not kit.read(1)
    assert kit.file.restored == ()
    kit.file.close()
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------- what goes wrong


def test_a_record_that_cannot_be_taken_away_keeps_its_slot_as_it_was(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"one", 2: b"two", 3: b"three"})
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, when=kit.of_record(1))  # of all three at once
        plan.fail("pwritev", errno.EIO, times=None, when=kit.of_record(2))
        event = kit.submit({1: b"uno", 2: b"due", 3: b"tre"})
        event.wait_finished()
        assert list(event.failures) == [1]
        assert 2 * SIZE not in [at for _, _, at in plan.calls("pwritev")]  # nor was it touched
    assert kit.file.stats().write_failures == 1
    assert list(kit.read(1, 2, 3)) == [2]  # not to be mistaken for what it should be
    kit.open()
    assert kit.came_back() == {1: b"uno", 2: b"two", 3: b"tre"}


@pytest.mark.parametrize("torn", [False, True])
def test_a_record_that_cannot_be_written_fails_its_page_alone(
    kit: Kit, caplog: pytest.LogCaptureFixture, torn: bool
) -> None:
    """The page stays where it was, and who moves it knows."""
    kit.open()
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, when=kit.of_record(1))  # of both at once
        if torn:  # once it was taken away, in case there is something of it
            plan.short("pwritev", 20, at=2, when=kit.of_record(2))
            plan.fail("pwritev", errno.EIO, when=kit.of_record(2, 20))
        else:
            plan.fail("pwritev", errno.EIO, at=2, when=kit.of_record(2))
        event = kit.submit({1: b"one", 2: b"two", 5: b"five"})
        event.wait_finished()
    assert [(place, error.errno) for place, error in event.failures.items()] == [  # type: ignore[attr-defined]
        (1, errno.EIO)
    ]
    assert kit.file.stats().write_failures == 1
    assert "1 of 2 slots in" in caplog.text
    kit.open()
    assert kit.came_back() == {1: b"one", 5: b"five"}
    assert kit.file.stats().torn == torn
    assert ("1 records in" in caplog.text) is torn
    # What was torn is taken away before its slot is overwritten, like any other.
    kit.write({1: b"", 2: b""})
    kit.open()
    assert kit.came_back() == {5: b"five"}
    assert kit.file.stats().torn == 0


def test_what_is_forgotten_and_cannot_be_is_counted(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    kit.open()
    kit.write({1: b"one", 2: b"two"})
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, when=kit.of_index)
        kit.forget(1, 2)
        kit.file.close()
    assert kit.file.stats().forget_failures == 2
    assert "may come back, though forgotten" in caplog.text
    kit.open()
    assert sorted(kit.came_back()) == [1, 2]


def test_a_slot_that_could_not_be_written_does_not_come_back(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"one", 2: b"two"})
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, times=None, when=lambda *a: kit.of_data(*a) and a[1] == 1)
        plan.fail("pwritev", errno.EIO, when=lambda *a: kit.of_data(*a) and a[1] == 2)
        event = kit.submit({1: b"uno", 2: b"due"})
        event.wait_finished()
    assert len(event.failures) == 2
    kit.open()
    assert kit.came_back() == {}


def test_torn_and_foreign_records_are_left_out_and_counted_once(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    kit.open()
    kit.write({slot: b"%d" % slot for slot in range(8)})
    kit.file.close()
    stranger = Record(6, 0, 1, 99, b"6").pack(b"otherone")
    one, two = kit.record(1), kit.record(2)
    kit.poke(kit.index, kit.at(0), bytes(16))  # torn
    kit.poke(kit.index, kit.at(1), two + one)  # of each other
    kit.poke(kit.index, kit.at(3) + 20, b"\xff")  # a bit
    kit.poke(kit.index, kit.at(6), stranger)  # of a file that was here before
    kit.poke(kit.index, kit.at(9), b"garbage")  # where there was nothing
    with caplog.at_level(logging.WARNING, "kvtier"):
        kit.open()
    assert [r.getMessage()[:12] for r in caplog.records] == ["6 records in"]
    assert (kit.file.stats().torn, kit.file.stats().restored) == (6, 3)
    assert kit.came_back() == {4: b"4", 5: b"5", 7: b"7"}
    caplog.clear()
    kit.open()
    assert kit.came_back() == {4: b"4", 5: b"5", 7: b"7"}
    assert not caplog.records


def test_a_record_that_lies_about_the_bytes_never_serves_them(kit: Kit) -> None:
    kit.open()
    kit.write({1: b"one"})
    kit.file.close()
    header = Header.unpack(kit.index.read_bytes()[:HEADER_BYTES])
    assert header is not None
    wrong = Record(2, 0, zlib.crc32(b"something else"), 7, b"two").pack(header.identity)
    kit.poke(kit.index, kit.at(2), wrong)
    kit.open()
    assert dict(kit.file.restored) == {1: b"one", 2: b"two"}
    assert list(kit.read(1, 2)) == [2]


# -------------------------------------------------------------------------------------- closing


def test_closing_brings_both_files_to_the_disk_after_all_that_was_submitted(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fdatasync
    kit.open()
    with FaultPlan() as plan:

        def sync(fd: int) -> None:
            calls = len(plan.calls("pwritev"))
            synced.append(f"{os.path.realpath(f'/proc/self/fd/{fd}')} {calls}")
            real(fd)

        monkeypatch.setattr(os, "fdatasync", sync)
        kit.submit({1: b"one", 3: b"three"})
        kit.forget(5)
        kit.file.close()
        assert synced == [f"{kit.data} 4", f"{kit.index} 4"]
        kit.file.close()
        assert len(synced) == 2
    kit.open()
    assert sorted(kit.came_back()) == [1, 3]


def test_a_disk_that_cannot_be_brought_up_to_date_is_reported_and_closed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refused(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    kit.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refused)
        kit.file.close()
    assert "may not outlive a power failure: [Errno 5]" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    kit.open()


def test_a_closed_file_forgets_nothing(kit: Kit) -> None:
    kit.open().close()
    with pytest.raises(ClosedError):
        kit.forget(1)


# ---------------------------------------------------------------------------- whenever it is killed


def copies(kit: Kit, work: Callable[[], None], short: int | None = None) -> list[Path]:
    """Copy both files before each call that changes one of them, and at the end.

    What a process that is killed leaves is what the calls before have done, and maybe a part of
    what the last one does, which ``short`` (bytes) makes calls of their own.
    """
    found: list[Path] = []

    def take(*_: int) -> bool:
        found.append(kit.folder / f"copy-{len(found)}")
        found[-1].mkdir()
        for path in (kit.data, kit.index):
            shutil.copy(path, found[-1])
        return False

    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, when=take)
        if short is not None:
            plan.short("pwritev", short, times=None)
        work()
    take()
    return found


@pytest.mark.parametrize("short", [None, 64, 512])
def test_at_no_call_can_it_be_killed_so_that_a_slot_comes_back_wrong(
    kit: Kit, short: int | None
) -> None:
    size = 1024
    kit.open(size=size)
    kit.write({1: b"one", 2: b"two", 3: b"three", 5: b"five"})

    def work() -> None:
        kit.write({1: b"uno", 2: b"due", 3: b"tre"})
        kit.write({8: b"five"})  # the page of slot 5 moves
        kit.forget(5, 2)
        kit.file.close()

    names = {
        1: {b"one", b"uno"},
        2: {b"two", b"due"},
        3: {b"three", b"tre"},
        5: {b"five"},
        8: {b"five"},
    }
    seen = []
    for folder in copies(kit, work, short):
        kit.open(size=size, folder=folder)
        found = kit.came_back()
        assert all(name in names[slot] for slot, name in found.items())
        assert len(set(found.values())) == len(found)
        assert b"five" in found.values()  # no page is lost that only moves
        seen.append(found)
    assert seen[0] == {1: b"one", 2: b"two", 3: b"three", 5: b"five"}
    assert {5: b"five"} in seen  # while the others are overwritten
    assert seen[-1] == {1: b"uno", 3: b"tre", 8: b"five"}


def writer(
    folder: Path, seed: int, size: int = SIZE, compression: str | None = None
) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    arguments = [folder, size, SLOTS, seed, *([compression] if compression else [])]
    return subprocess.Popen(
        [
            sys.executable,
            str(root / "tests" / "kvtier" / "persist_writer.py"),
            *map(str, arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )


def written(folder: Path, size: int = SIZE, compression: str | None = None) -> SlotFile:
    """Open what a writer left."""
    return SlotFile(str(folder), size, SLOTS, name=NAME, layout=LAYOUT, compression=compression)


@pytest.mark.parametrize(("size", "compression"), [(SIZE, None), (4 * SIZE, "blosc2")])
def test_killed_at_random_it_leaves_what_was_written_and_nothing_wrong(
    kit: Kit, size: int, compression: str | None
) -> None:
    if compression:
        pytest.importorskip(compression, reason="the extra is not installed")
    random = np.random.default_rng(35)
    expected: dict[int, bytes | None] = {}  # what must come back; None: whatever it is
    for seed in range(6):
        lines = int(random.integers(1, 400))
        with writer(kit.folder, seed, size, compression) as child:
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(lines)]
            child.kill()
            said += child.stdout.readlines()
        assert child.returncode == -9
        for line in said:
            what, number, *name = line.split()
            expected[int(number)] = name[0].encode() if what == "d" else None
        kit.file = written(kit.folder, size, compression)
        try:
            found = kit.came_back()
            for slot, wanted in expected.items():
                assert wanted is None or found.get(slot) == wanted
            expected = {slot: found.get(slot) for slot in range(SLOTS)}
            stats = kit.file.stats()
            assert (stats.read_failures, stats.restored) == (0, len(found))
            assert stats.bytes_read == len(found) * (size * 3 // 4 if compression else size)
            assert stats.torn == 0  # a process that is killed has no half of a system call
        finally:
            kit.file.close()
    assert any(expected.values())
