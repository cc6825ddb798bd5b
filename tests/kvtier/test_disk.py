"""Slots in a file: the bytes that come back, the requests they become, and what fails alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import ClosedError, CpuDevice, DiskOOMError, HostEvent, StaticHostMem
from hostmem.testing import FaultPlan, Hold
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.workers import Workers

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

NOTHING = Dependencies()
Bytes = NDArray[np.uint8]


class Memory:
    """Page-aligned memory for slots of one size."""

    def __init__(self, device: CpuDevice, nbytes: int, raw: Callable[[int, int], Bytes]) -> None:
        self.memory = StaticHostMem(nbytes, device=device)
        self._raw = raw

    def slots(self, size: int) -> Bytes:
        """Show it as slots."""
        n = self.memory.nbytes // size
        return self._raw(self.memory.address, n * size).reshape(n, size)

    def addresses(self, size: int, *slots: int) -> NDArray[np.uint64]:
        return np.uint64(self.memory.address) + np.array(slots, np.uint64) * np.uint64(size)


@pytest.fixture
def memory(cpu: CpuDevice, tiers: Tiers) -> Iterator[Memory]:
    memory = Memory(cpu, 6 << 20, tiers.raw)
    yield memory
    memory.memory.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., SlotFile]]:
    files: list[SlotFile] = []

    def build(slot_size: int, slots: int) -> SlotFile:
        files.append(SlotFile(str(tmp_path), slot_size, slots))
        return files[-1]

    yield build
    for file in files:
        file.close()


def ids(*slots: int) -> NDArray[np.int32]:
    return np.array(slots, np.int32)


def in_file(file: SlotFile, slot: int) -> bytes:
    """Read a slot past everything."""
    with open(f"/proc/self/fd/{file._fd}", "rb", buffering=0) as raw:
        return os.pread(raw.fileno(), file.slot_size, slot * file.slot_size)


def fill(slots: Bytes, *which: int) -> None:
    """Write something of its own into each of the slots."""
    for slot in which:
        slots[slot] = np.arange(slots.shape[1], dtype=np.uint32).astype(np.uint8) + slot + 1


def at(offset: int) -> Callable[..., bool]:
    """Choose the calls at one offset of the file."""
    return lambda fd, n, where: where == offset


# ------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("size", [4096, 65536, 5000, 512, 1])
def test_what_was_written_comes_back(
    make: Callable[..., SlotFile], memory: Memory, size: int
) -> None:
    file, slots = make(size, 64), memory.slots(size)
    fill(slots, 0, 1, 2, 3)
    wanted = slots[:4].copy()
    file.write(ids(63, 5, 0, 6), memory.addresses(size, 0, 1, 2, 3), NOTHING).synchronize()
    file.read(ids(5, 63, 6, 0), memory.addresses(size, 11, 10, 13, 12), NOTHING).synchronize()
    assert np.array_equal(slots[10:14], wanted)
    assert in_file(file, 5) == wanted[1].tobytes()


def test_slots_that_were_not_asked_for_stay_as_they_are(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file, slots = make(4096, 8), memory.slots(4096)
    fill(slots, 0, 1)
    file.write(ids(2, 4), memory.addresses(4096, 0, 1), NOTHING).synchronize()
    assert [any(in_file(file, slot)) for slot in range(8)] == [slot in (2, 4) for slot in range(8)]


def test_no_slots_are_done_at_once(make: Callable[..., SlotFile]) -> None:
    event = make(4096, 8).write(ids(), np.empty(0, np.uint64), NOTHING)
    assert event.query()
    event.synchronize()


# ---------------------------------------------------------------------------------- the file


@pytest.mark.odirect
@pytest.mark.parametrize(("size", "direct"), [(4096, True), (8192, True), (5000, False)])
def test_slots_of_whole_blocks_bypass_the_page_cache(
    make: Callable[..., SlotFile], size: int, direct: bool
) -> None:
    file = make(size, 4)
    assert file.direct is direct
    assert bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT) is direct


def test_a_directory_without_direct_io_goes_through_the_page_cache(
    make: Callable[..., SlotFile], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_open(monkeypatch, os.O_DIRECT, errno.EINVAL)
    file, slots = make(4096, 4), memory.slots(4096)
    assert not file.direct
    fill(slots, 0)
    file.write(ids(3), memory.addresses(4096, 0), NOTHING).synchronize()
    assert in_file(file, 3) == slots[0].tobytes()


@pytest.mark.odirect
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_io_that_is_refused_only_when_it_is_used_goes_through_the_page_cache(
    make: Callable[..., SlotFile], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", refused)
    file = make(4096, 4)
    assert not file.direct
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert os.fstat(file._fd).st_size == 4 * 4096


def refuse_open(monkeypatch: pytest.MonkeyPatch, flag: int, error: int) -> None:
    """Answer like a file system that does not know a flag."""
    real = os.open

    def opens(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & flag == flag:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opens)


def test_the_file_has_no_name_and_room_for_every_slot(
    make: Callable[..., SlotFile], tmp_path: Path
) -> None:
    file = make(4096, 100)
    assert os.listdir(tmp_path) == []
    found = os.fstat(file._fd)
    assert (found.st_nlink, found.st_size) == (0, 409_600)
    assert found.st_blocks * 512 >= 409_600


@pytest.mark.parametrize("size", [4096, 5000])
def test_where_there_are_no_unnamed_files_a_name_is_gone_at_once(
    make: Callable[..., SlotFile],
    memory: Memory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    refuse_open(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    file, slots = make(size, 4), memory.slots(size)
    assert os.listdir(tmp_path) == []
    assert os.fstat(file._fd).st_nlink == 0
    fill(slots, 0)
    file.write(ids(3), memory.addresses(size, 0), NOTHING).synchronize()
    assert in_file(file, 3) == slots[0].tobytes()


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SlotFile(str(tmp_path / "missing"), 4096, 4)


# --------------------------------------------------------------------------------- requests


def test_neighbours_in_the_file_are_one_request(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file = make(4096, 16)
    with FaultPlan() as plan:
        # Slots 2, 3, 4, 5 and 9, 10 and 12, in whatever order.
        event = file.write(
            ids(9, 4, 2, 12, 3, 10, 5), memory.addresses(4096, 0, 1, 2, 3, 4, 5, 6), NOTHING
        )
        event.synchronize()
        assert sorted((offset // 4096, n) for _, n, offset in plan.calls("pwritev")) == [
            (2, 4),
            (9, 2),
            (12, 1),
        ]


def test_a_small_batch_makes_no_request_larger_than_two_mebibytes(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file, size = make(768 << 10, 5), 768 << 10
    with FaultPlan() as plan:
        file.read(ids(0, 1, 2, 3, 4), memory.addresses(size, *range(5)), NOTHING).synchronize()
        # Two slots are 1.5 MiB, three would be 2.25.
        assert sorted((offset // size, n) for _, n, offset in plan.calls("preadv")) == [
            (0, 2),
            (2, 2),
            (4, 1),
        ]


@pytest.mark.parametrize(
    ("mib", "requests"), [(8, [2] * 4), (12, [3] * 4), (48, [8] * 6)], ids=["2", "3", "8"]
)
def test_a_large_batch_is_one_request_a_worker_of_at_most_eight_mebibytes(
    make: Callable[..., SlotFile], memory: Memory, mib: int, requests: list[int]
) -> None:
    file, size = make(1 << 20, mib), 1 << 20
    addresses = np.resize(memory.addresses(size, *range(6)), mib)
    with FaultPlan() as plan:
        file.write(np.arange(mib, dtype=np.int32), addresses, NOTHING).synchronize()
        assert [n for _, n, _ in plan.calls("pwritev")] == requests


def test_a_slot_larger_than_a_request_is_one_by_itself(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file = make(3 << 20, 2)
    with FaultPlan() as plan:
        file.read(ids(0, 1), memory.addresses(3 << 20, 0, 1), NOTHING).synchronize()
        assert sorted((offset >> 20, n) for _, n, offset in plan.calls("preadv")) == [
            (0, 1),
            (3, 1),
        ]


def test_four_requests_are_in_flight_at_once(make: Callable[..., SlotFile], memory: Memory) -> None:
    file = make(4096, 16)
    with FaultPlan() as plan:
        holds = [plan.hold("preadv", when=at(slot * 4096)) for slot in (0, 2, 4, 6)]
        event = file.read(ids(0, 2, 4, 6), memory.addresses(4096, 0, 1, 2, 3), NOTHING)
        for hold in holds:
            hold.wait_reached()
        assert not event.query()
        for hold in holds:
            hold.release()
        event.synchronize()


def test_a_scattered_batch_is_one_piece_of_work_a_worker(
    make: Callable[..., SlotFile], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a turn at the interpreter for a thread that wakes up."""
    jobs: list[Any] = []
    put = Workers.put

    def counted(self: Workers, job: Callable[[], None]) -> None:
        jobs.append(job)
        put(self, job)

    monkeypatch.setattr(Workers, "put", counted)
    file = make(4096, 64)
    with FaultPlan() as plan:
        scattered = np.arange(0, 60, 4, dtype=np.int32)
        file.write(scattered, memory.addresses(4096, *range(15)), NOTHING).synchronize()
        assert len(plan.calls("pwritev")) == 15
        assert len(jobs) == 4
        # Neighbours are not separated for it: 0-4 is more than a share.
        jobs.clear()
        mixed = ids(9, 0, 1, 2, 3, 4, 7)
        file.write(mixed, memory.addresses(4096, *range(7)), NOTHING).synchronize()
        assert sorted(n for _, n, _ in plan.calls("pwritev")[15:]) == [1, 1, 5]
        assert len(jobs) == 2


def test_short_transfers_are_continued(make: Callable[..., SlotFile], memory: Memory) -> None:
    """The kernel may stop anywhere; with direct I/O at a block, which is what is done here."""
    file, slots = make(8192, 4), memory.slots(8192)
    fill(slots, 0, 1)
    wanted = slots[:2].copy()
    with FaultPlan() as plan:
        for name in ("pwritev", "preadv"):
            plan.short(name, 4096, times=None)
        file.write(ids(1, 2), memory.addresses(8192, 0, 1), NOTHING).synchronize()
        file.read(ids(1, 2), memory.addresses(8192, 2, 3), NOTHING).synchronize()
        for name in ("pwritev", "preadv"):
            assert [offset for _, _, offset in plan.calls(name)] == [8192, 12288, 16384, 20480]
    assert np.array_equal(slots[2:4], wanted)


# ----------------------------------------------------------------------------- dependencies


def test_nothing_is_written_before_its_dependencies(
    make: Callable[..., SlotFile], memory: Memory, gate: Callable[[], Gate]
) -> None:
    file, slots = make(4096, 4), memory.slots(4096)
    data, fence = gate(), gate()
    with FaultPlan() as plan:
        event = file.write(ids(1), memory.addresses(4096, 0), Dependencies((data,), (fence,)))
        fence.wait_asked()
        fence.set(OSError(errno.EIO, "a fence may fail"))
        data.wait_asked()
        assert plan.calls("pwritev") == []
        fill(slots, 0)  # what the data event stands for
        data.set()
        event.synchronize()
    assert in_file(file, 1) == slots[0].tobytes()


def test_failed_data_is_never_written(make: Callable[..., SlotFile], memory: Memory) -> None:
    file, data = make(4096, 4), HostEvent()
    data.set(OSError(errno.EFAULT, "the copy failed"))
    with FaultPlan() as plan:
        event = file.write(ids(1), memory.addresses(4096, 0), Dependencies((data,)))
        with pytest.raises(OSError, match="the copy failed"):
            event.synchronize()
        assert plan.calls("pwritev") == []


def test_memory_that_will_not_be_usable_fails_the_transfer(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    def never() -> None:
        raise MemoryError("the node is full")

    event = make(4096, 4).write(ids(1), memory.addresses(4096, 0), Dependencies(usable=never))
    with pytest.raises(MemoryError, match="the node is full"):
        event.synchronize()


# ----------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_fails_its_event_and_no_other_slot(
    make: Callable[..., SlotFile], memory: Memory, number: int
) -> None:
    file, slots = make(4096, 8), memory.slots(4096)
    fill(slots, 0, 1, 2)
    with FaultPlan() as plan:
        plan.fail("pwritev", number, when=at(4 * 4096))
        bad = file.write(ids(4), memory.addresses(4096, 0), NOTHING)
        good = file.write(ids(2, 6), memory.addresses(4096, 1, 2), NOTHING)
        with pytest.raises(
            DiskOOMError if number == errno.ENOSPC else OSError,
            match="pwritev of 4096 bytes at file offset 16384",
        ) as caught:
            bad.synchronize()
        assert caught.value.__cause__ is bad.error
        good.synchronize()
    assert (in_file(file, 2), in_file(file, 6)) == (slots[1].tobytes(), slots[2].tobytes())
    file.write(ids(4), memory.addresses(4096, 0), NOTHING).synchronize()
    assert in_file(file, 4) == slots[0].tobytes()


def test_a_failed_read_fails_its_event(make: Callable[..., SlotFile], memory: Memory) -> None:
    file = make(4096, 8)
    with FaultPlan() as plan:
        plan.fail("preadv", errno.EIO)
        event = file.read(ids(4), memory.addresses(4096, 0), NOTHING)
        with pytest.raises(OSError, match="preadv of 4096 bytes"):
            event.synchronize()


def test_an_event_with_a_failed_request_waits_for_the_other_requests(
    make: Callable[..., SlotFile], memory: Memory, until: Callable[[Callable[[], object]], None]
) -> None:
    """Until then the memory and the slots are in use."""
    file = make(4096, 8)
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EIO, when=at(0))
        held = plan.hold("pwritev", when=at(4 * 4096))
        event = file.write(ids(0, 4), memory.addresses(4096, 0, 1), NOTHING)
        held.wait_reached()
        until(lambda: len(plan.calls("pwritev")) == 2)
        assert not event.query()
        held.release()
        with pytest.raises(OSError, match="at file offset 0"):
            event.synchronize()


@pytest.mark.parametrize("size", [4096, 5000])
def test_a_truncated_file_is_an_error_and_not_garbage(
    make: Callable[..., SlotFile], memory: Memory, size: int
) -> None:
    file = make(size, 8)
    os.ftruncate(file._fd, 4 * size)
    whole = file.read(ids(3), memory.addresses(size, 0), NOTHING)
    beyond = file.read(ids(2, 3, 4), memory.addresses(size, 1, 2, 3), NOTHING)
    whole.synchronize()
    with pytest.raises(OSError, match=f"the file ends at {4 * size}") as caught:
        beyond.synchronize()
    assert caught.value.errno == errno.EIO
    assert list(beyond.failures) == [2]


# ---------------------------------------------------------------------------- room and size


@contextlib.contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Limit the size of files (RLIMIT_FSIZE): the kernel answers as a full disk would.

    For a few lines only, and not until the test's end: pytest's own report is such a file too
    where a runner writes it to one, and pytest ends without a word when it cannot write.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_for_which_there_is_no_room_is_an_error_and_nothing_is_kept(
    tmp_path: Path,
) -> None:
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    no_room = pytest.raises(DiskOOMError, match=r"no room for 404 KiB in .*lower the quota")
    with no_room as caught, room(100 * 4096):
        SlotFile(str(tmp_path), 4096, 101)
    assert (caught.value.path, caught.value.nbytes) == (str(tmp_path), 101 * 4096)
    assert caught.value.free > 1 << 20
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_is_an_error_and_its_room_is_given_back(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(DiskOOMError, match="No space left on device"):
            SlotFile(str(tmp_path), 4096, 1000)
        free = os.statvfs(tmp_path)
        assert free.f_bavail == free.f_blocks
        SlotFile(str(tmp_path), 4096, 200).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_is_one_type_whatever_says_so(tmp_path: Path, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("fallocate", number)
        with pytest.raises(DiskOOMError):
            SlotFile(str(tmp_path), 4096, 4)


def test_another_error_of_setting_room_aside_stays_what_it_is(tmp_path: Path) -> None:
    with FaultPlan() as plan:
        plan.fail("fallocate", errno.EIO)
        with pytest.raises(OSError, match="fallocate of 16384 bytes at file offset 0") as caught:
            SlotFile(str(tmp_path), 4096, 4)
    assert not isinstance(caught.value, DiskOOMError)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_no_room_can_be_set_aside_the_file_says_so_and_works(
    make: Callable[..., SlotFile], memory: Memory, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    with FaultPlan() as plan:
        plan.fail("fallocate", number, times=None)
        file, slots = make(4096, 4), memory.slots(4096)
        assert not file.reserved
        file.resize(8)
    found = os.fstat(file._fd)
    assert (found.st_size, found.st_blocks) == (8 * 4096, 0)
    assert caplog.text.count("cannot set room aside") == 1
    fill(slots, 0)
    file.write(ids(7), memory.addresses(4096, 0), NOTHING).synchronize()
    assert in_file(file, 7) == slots[0].tobytes()


def test_a_thread_that_cannot_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "kvtier-disk-2":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        SlotFile(str(tmp_path), 4096, 4)
    assert [t.name for t in threading.enumerate() if t.name.startswith("kvtier")] == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_interrupt_between_starting_a_thread_and_noting_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        if thread.name == "kvtier-disk-2":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        SlotFile(str(tmp_path), 4096, 4)
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier"):
            thread.join(20)
            assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == before


def test_growing_keeps_the_slots_that_are_there(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file, slots = make(4096, 2), memory.slots(4096)
    fill(slots, 0, 1)
    file.write(ids(0, 1), memory.addresses(4096, 0, 1), NOTHING).synchronize()
    file.resize(6)
    assert (file.slots, os.fstat(file._fd).st_size) == (6, 6 * 4096)
    file.write(ids(5), memory.addresses(4096, 1), NOTHING).synchronize()
    found = [in_file(file, slot) for slot in (0, 1, 5)]
    assert found == [slots[0].tobytes(), slots[1].tobytes(), slots[1].tobytes()]


def test_shrinking_gives_the_room_back_and_keeps_what_is_below(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file, slots = make(4096, 6), memory.slots(4096)
    fill(slots, 0)
    file.write(ids(1), memory.addresses(4096, 0), NOTHING).synchronize()
    file.resize(2)
    assert (file.slots, os.fstat(file._fd).st_size) == (2, 2 * 4096)
    assert in_file(file, 1) == slots[0].tobytes()


def test_a_growth_without_room_changes_nothing(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file, slots = make(4096, 2), memory.slots(4096)
    fill(slots, 0)
    file.write(ids(1), memory.addresses(4096, 0), NOTHING).synchronize()
    with pytest.raises(DiskOOMError), room(3 * 4096):
        file.resize(4)
    assert (file.slots, os.fstat(file._fd).st_size) == (2, 2 * 4096)
    assert in_file(file, 1) == slots[0].tobytes()


# ------------------------------------------------------------------------------------- close


def test_closing_finishes_what_was_submitted(
    make: Callable[..., SlotFile], memory: Memory, spawn: Spawn
) -> None:
    file = make(4096, 16)
    with FaultPlan() as plan:
        held: Hold = plan.hold("pwritev")
        events = [
            file.write(ids(slot), memory.addresses(4096, slot), NOTHING) for slot in range(0, 16, 2)
        ]
        held.wait_reached()
        closing = spawn(file.close)
        assert not closing.done()
        held.release()
        closing.result(20)
        assert len(plan.calls("pwritev")) == 8
    assert [event.error for event in events if event.query()] == [None] * 8


def test_what_is_submitted_while_it_closes_is_done_or_refused(
    make: Callable[..., SlotFile], memory: Memory, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the end of the threads' queue nobody would ever do it."""
    file, put = make(4096, 2), Workers.put

    def late(self: Workers, job: Callable[[], None]) -> None:
        closing.append(spawn(file.close))
        with contextlib.suppress(TimeoutError):  # a moment for a file that does not wait
            closing[0].result(0.1)
        put(self, job)

    closing: list[Any] = []
    monkeypatch.setattr(Workers, "put", late)
    file.write(ids(1), memory.addresses(4096, 0), NOTHING).synchronize(20)
    closing[0].result(20)


def test_closing_twice_is_closing_once(make: Callable[..., SlotFile]) -> None:
    file = make(4096, 2)
    file.close()
    file.close()


def test_a_closed_file_refuses_work_that_nobody_would_do(
    make: Callable[..., SlotFile], memory: Memory
) -> None:
    file = make(4096, 2)
    file.close()
    with pytest.raises(ClosedError):
        file.write(ids(1), memory.addresses(4096, 0), NOTHING)
