"""Vectored file I/O: many pieces, short transfers, files that end."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostmem import procfs
from hostmem._sys import linux
from hostmem.files import (
    checksums,
    lock,
    lock_holder,
    read_ranges,
    set_room_aside,
    write_at,
    write_ranges,
)
from hostmem.testing import FaultPlan

Bytes = NDArray[np.uint8]
Call = Callable[[int, NDArray[np.uint64], int], int]


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def pieces(memory: Bytes, order: NDArray[np.int64], size: int) -> NDArray[np.uint64]:
    """Give the addresses of pieces of a memory, in an order."""
    base = int(memory.__array_interface__["data"][0])
    return np.uint64(base) + order.astype(np.uint64) * np.uint64(size)


def numbered(nbytes: int) -> Bytes:
    return np.arange(nbytes, dtype=np.uint32).view(np.uint8)[:nbytes].copy()


def test_more_pieces_than_one_call_takes_go_in_several(fd: int) -> None:
    # 2,500 pieces are 1,024 and 1,024 and 452.
    source, back = numbered(2500 * 64), np.zeros(2500 * 64, np.uint8)
    order = np.arange(2500)[::-1]
    with FaultPlan() as plan:
        write_ranges(fd, 128, pieces(source, order, 64), 64)
        read_ranges(fd, 128, pieces(back, order, 64), 64)
        for name in ("pwritev", "preadv"):
            assert [(n, offset) for _, n, offset in plan.calls(name)] == [
                (1024, 128),
                (1024, 128 + 1024 * 64),
                (452, 128 + 2048 * 64),
            ]
    assert np.array_equal(back, source)
    # Piece i of the file is where the i-th address pointed: the last piece of the memory first.
    assert os.pread(fd, 64, 128) == source[-64:].tobytes()
    assert os.fstat(fd).st_size == 128 + 2500 * 64


def test_no_pieces_are_no_call(fd: int) -> None:
    with FaultPlan() as plan:
        write_ranges(fd, 0, np.empty(0, np.uint64), 64)
        assert plan.calls("pwritev") == []


def cut(call: Call, most: int) -> Call:
    """Make a call that transfers no more than so many bytes, as the kernel may."""

    def short(fd: int, table: NDArray[np.uint64], offset: int) -> int:
        ends = np.cumsum(table[:, 1])
        n = int(np.searchsorted(ends, most, side="left")) + 1
        part = table[:n].copy()
        over = int(part[:, 1].sum()) - most
        if over > 0:
            part[-1, 1] -= np.uint64(over)
        return call(fd, part, offset)

    return short


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 12), size=st.integers(1, 50), most=st.integers(1, 120), start=st.integers(0, 9)
)
def test_short_transfers_are_continued_where_they_ended(
    fd: int, monkeypatch: pytest.MonkeyPatch, n: int, size: int, most: int, start: int
) -> None:
    source, back = numbered(n * size), np.zeros(n * size, np.uint8)
    order = np.arange(n)
    with monkeypatch.context() as patch:
        patch.setattr(linux, "pwritev", cut(linux.pwritev, most))
        patch.setattr(linux, "preadv", cut(linux.preadv, most))
        write_ranges(fd, start, pieces(source, order, size), size)
        read_ranges(fd, start, pieces(back, order, size), size)
    assert np.array_equal(back, source)
    assert os.pread(fd, n * size, start) == source.tobytes()


def test_a_file_that_ends_too_early_is_an_error(fd: int) -> None:
    os.pwrite(fd, b"x" * 100, 0)
    with pytest.raises(OSError, match="the file ends at 100") as caught:
        read_ranges(fd, 0, pieces(np.zeros(128, np.uint8), np.arange(2), 64), 64)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_the_kernel_says_is_passed_on(fd: int, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("pwritev", number)
        with pytest.raises(OSError, match="pwritev of 64 bytes at file offset 192") as caught:
            write_ranges(fd, 192, pieces(numbered(64), np.arange(1), 64), 64)
    assert caught.value.errno == number


def test_an_interrupted_call_is_made_again(fd: int) -> None:
    source: Any = numbered(64)
    with FaultPlan() as plan:
        plan.fail("pwritev", errno.EINTR, times=3)
        write_ranges(fd, 0, pieces(source, np.arange(1), 64), 64)
        assert len(plan.calls("pwritev")) == 4
    assert os.pread(fd, 64, 0) == source.tobytes()


# ---------------------------------------------------------------------------- room, checksums


def test_room_is_set_aside_and_what_is_there_stays(fd: int) -> None:
    os.pwrite(fd, b"x" * 100, 0)
    assert set_room_aside(fd, 50, 1 << 20)
    found = os.fstat(fd)
    assert found.st_size == 50 + (1 << 20)
    assert found.st_blocks * 512 >= found.st_size
    assert os.pread(fd, 101, 0) == b"x" * 100 + b"\0"


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_sets_no_room_aside_makes_the_file_as_long(fd: int, number: int) -> None:
    with FaultPlan() as plan:
        plan.fail("fallocate", number, times=2)
        assert not set_room_aside(fd, 50, 4096)
        assert os.fstat(fd).st_size == 4146
        assert not set_room_aside(fd, 0, 100)  # and never shorter
    assert os.fstat(fd).st_size == 4146


def test_an_interrupted_allocation_is_made_again(fd: int) -> None:
    with FaultPlan() as plan:
        plan.fail("fallocate", errno.EINTR, times=2)
        assert set_room_aside(fd, 0, 4096)
        assert len(plan.calls("fallocate")) == 3


def test_other_errors_of_an_allocation_are_passed_on(fd: int) -> None:
    with FaultPlan() as plan:
        plan.fail("fallocate", errno.ENOSPC)
        with pytest.raises(OSError, match="fallocate of 4096 bytes at file offset 64") as caught:
            set_room_aside(fd, 64, 4096)
    assert caught.value.errno == errno.ENOSPC


def test_checksums_are_those_of_the_ranges() -> None:
    memory = numbered(3 * 10_000)
    found = checksums(pieces(memory, np.array([2, 0]), 10_000), 10_000)
    assert found.dtype == np.uint32
    data = memory.tobytes()
    assert found.tolist() == [zlib.crc32(data[20_000:]), zlib.crc32(data[:10_000])]
    assert checksums(pieces(memory, np.arange(0), 10_000), 10_000).tolist() == []


# ----------------------------------------------------------------------------- bytes and locks


def test_bytes_are_written_whole_at_their_place(fd: int) -> None:
    with FaultPlan() as plan:
        plan.short("pwritev", 3)
        write_at(fd, 10, b"0123456789")
        assert [at for _, _, at in plan.calls("pwritev")] == [10, 13]
    assert os.pread(fd, 99, 0) == bytes(10) + b"0123456789"


def list_locks(fd: int, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Let the kernel list these locks; they speak of a file, or of the one beside it."""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    text = lines.format(device=device, inode=found.st_ino, other=found.st_ino + 1)
    monkeypatch.setattr(procfs, "read", lambda path: text)


def test_a_lock_is_one_open_files_until_it_is_closed(fd: int, tmp_path: Path) -> None:
    other = os.open(tmp_path / "file", os.O_RDWR)
    try:
        assert lock_holder(fd) is None
        assert lock(other)
        assert not lock(fd)
        assert lock_holder(fd) in (os.getpid(), None)  # btrfs tells stat of another device
    finally:
        os.close(other)
    assert lock(fd)


def test_who_has_a_lock_is_what_the_kernel_lists(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    list_locks(
        fd,
        monkeypatch,
        "1: FLOCK  ADVISORY  WRITE 78 {device}:{other} 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 77 {device}:{inode} 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 79 {device}:{inode} 0 EOF\n",
    )
    assert lock_holder(fd) == 77


@pytest.mark.parametrize(
    "line",
    [
        "1: FLOCK  ADVISORY  WRITE 77 {device}:{other} 0 EOF",
        "1: POSIX  ADVISORY  WRITE 77 {device}:{inode} 0 EOF",
        "1: FLOCK  ADVISORY  WRITE -1 {device}:{inode} 0 EOF",
        "1: -> FLOCK  ADVISORY  WRITE 77 {device}:{inode} 0 EOF",
        "",
    ],
    ids=["another file", "another kind", "another machine", "waits", "nothing"],
)
def test_who_has_a_lock_is_not_guessed(fd: int, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    list_locks(fd, monkeypatch, line)
    assert lock_holder(fd) is None


def test_a_file_system_without_locks_says_which_call(fd: int) -> None:
    with FaultPlan() as plan:
        plan.fail("flock", errno.ENOLCK)
        with pytest.raises(OSError, match=r"flock: No locks available \(ENOLCK\)") as caught:
            lock(fd)
    assert caught.value.errno == errno.ENOLCK
