"""Large copies by several threads: every byte once, in the stream's order, whoever helps."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostmem import CpuDevice
from hostmem._sys import linux
from hostmem.device import copy_threads as module
from hostmem.device.copy_threads import CopyThreads
from hostmem.testing import FaultPlan
from tests.threads import Spawn, Until

MIB = 1 << 20
Addresses = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
Child = Callable[..., subprocess.CompletedProcess[str]]

team = CopyThreads(3)
alone = CopyThreads(1)


def address_of(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


def numbers(nbytes: int) -> Bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def ranges(
    source: Bytes, result: Bytes, sizes: list[int], gap: int = 1
) -> tuple[Addresses, Addresses, Addresses]:
    """Lay ranges out one behind the other with a gap, the last one first."""
    lengths = np.array(sizes, np.uint64)
    offsets = np.cumsum(lengths + np.uint64(gap)) - lengths - np.uint64(gap)
    at = [np.uint64(address_of(array)) + offsets for array in (result, source)]
    return at[0][::-1].copy(), at[1][::-1].copy(), lengths[::-1].copy()


def expected(source: Bytes, sizes: list[int], gap: int = 1) -> Bytes:
    found = np.zeros_like(source)
    start = 0
    for size in sizes:
        found[start : start + size] = source[start : start + size]
        start += size + gap
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        [16 * MIB],
        [16 * MIB + 1],
        [5 * MIB, 1, 5 * MIB + 7],
        [1, 2 * MIB, 2 * MIB + 1, 4 * MIB - 1, 3],
        [4096] * 3000,
        [1] * 3000,
        [1] * 1500 + [9 * MIB] + [1] * 1500,
    ],
    ids=str,
)
def test_every_byte_arrives_and_none_beside_it(sizes: list[int]) -> None:
    source = numbers(sum(sizes) + len(sizes))
    result = np.zeros_like(source)
    team.copy(linux.copy, *ranges(source, result, sizes))
    assert np.array_equal(result, expected(source, sizes))


@given(
    sizes=st.lists(st.integers(1, 12 * MIB) | st.integers(1, 99), min_size=1, max_size=30),
    parts=st.integers(1, 40),
)
def test_parts_cover_the_ranges_once(sizes: list[int], parts: int) -> None:
    lengths = np.array(sizes, np.uint64)
    starts = np.cumsum(lengths) - lengths
    cut = list(module._cut(starts + np.uint64(1 << 40), starts, lengths, parts))
    assert 1 <= len(cut) <= parts
    to, source, size = (np.concatenate(arrays) for arrays in zip(*cut, strict=True))
    assert (size > 0).all()
    assert (to - source == 1 << 40).all()
    assert source[0] == 0
    assert np.array_equal(source[1:], (source + size)[:-1])
    assert source[-1] + size[-1] == lengths.sum()
    # No part is more than its share by more than the piece that ends it.
    largest = min(max(sizes), module._PART) + module._RANGE
    work = [int(part[2].sum()) + len(part[2]) * module._RANGE for part in cut]
    assert max(work) <= -(-sum(work) // parts) + largest


class Recorder:
    """Copies, and notes which thread did; may wait until several threads are at it."""

    def __init__(self, together: int = 1) -> None:
        self.threads: list[threading.Thread] = []
        self._met = threading.Barrier(together)
        self._meeting = set[threading.Thread]()

    def __call__(self, to: Addresses, source: Addresses, sizes: Addresses) -> None:
        me = threading.current_thread()
        self.threads.append(me)
        if me not in self._meeting:
            self._meeting.add(me)
            self._met.wait(20)
        linux.copy(to, source, sizes)


def large(nbytes: int = 16 * MIB) -> tuple[Bytes, Bytes, tuple[Addresses, Addresses, Addresses]]:
    source = numbers(nbytes)
    result = np.zeros_like(source)
    return source, result, ranges(source, result, [nbytes])


def test_several_threads_copy_a_large_batch() -> None:
    source, result, arrays = large()
    recorder = Recorder(together=3)  # would not go on before three threads have met
    team.copy(recorder, *arrays)
    assert threading.current_thread() in recorder.threads
    assert len(set(recorder.threads)) == 3
    assert np.array_equal(result, source)


def test_helpers_stay() -> None:
    first, second = Recorder(together=3), Recorder(together=3)
    _source, _result, arrays = large()
    for recorder in (first, second):
        team.copy(recorder, *arrays)
    assert set(first.threads) == set(second.threads)


@pytest.mark.parametrize(
    ("who", "sizes"), [(team, [5 * MIB]), (team, [1024] * 500), (alone, [32 * MIB])]
)
def test_what_does_not_pay_is_copied_by_the_caller_in_one_piece(
    who: CopyThreads, sizes: list[int]
) -> None:
    source = numbers(sum(sizes) + len(sizes))
    recorder = Recorder()
    result = np.zeros_like(source)
    who.copy(recorder, *ranges(source, result, sizes))
    assert recorder.threads == [threading.current_thread()]


def test_a_batch_does_not_wait_for_helpers_that_are_busy(spawn: Spawn, until: Until) -> None:
    mine = CopyThreads(2)
    stuck, gate = list[str](), threading.Event()

    def hold(*_: Addresses) -> None:
        stuck.append(threading.current_thread().name)
        assert gate.wait(20)

    source, result, arrays = large()
    first = spawn(mine.copy, hold, *arrays)
    until(lambda: len(stuck) == 2)  # the caller and the only helper
    recorder = Recorder()
    mine.copy(recorder, *arrays)
    assert set(recorder.threads) == {threading.current_thread()}
    assert np.array_equal(result, source)
    gate.set()
    first.result(20)


def test_a_batch_waits_for_the_parts_that_helpers_have_begun(spawn: Spawn, until: Until) -> None:
    source, result, arrays = large()
    begun, gate, done = threading.Event(), threading.Event(), list[int]()
    callers: list[threading.Thread] = []

    def copy(to: Addresses, start: Addresses, sizes: Addresses) -> None:
        if threading.current_thread() in callers:
            assert begun.wait(20)
        else:
            begun.set()
            assert gate.wait(20)
        linux.copy(to, start, sizes)
        done.append(int(sizes.sum()))

    def submit() -> bool:
        callers.append(threading.current_thread())
        CopyThreads(2).copy(copy, *arrays)
        return np.array_equal(result, source)

    whole = spawn(submit)
    until(lambda: sum(done) == len(source) - module._PART)
    assert not whole.done()
    gate.set()
    assert whole.result(20)


def test_a_batch_is_copied_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    mine = CopyThreads(4)
    source, result, arrays = large()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        mine.copy(linux.copy, *arrays)
    assert np.array_equal(result, source)
    recorder = Recorder(together=4)  # and they are there once they can be
    mine.copy(recorder, *arrays)
    assert len(set(recorder.threads)) == 4


def test_the_first_part_that_fails_is_raised_once_all_have_ended() -> None:
    source, result, arrays = large()
    ends = int(arrays[1][0]) + len(source)

    def copy(to: Addresses, start: Addresses, sizes: Addresses) -> None:
        if start[0] == arrays[1][0]:
            raise OSError(errno.EFAULT, "first")
        linux.copy(to, start, sizes)
        if int(start[-1] + sizes[-1]) == ends:
            raise OSError(errno.EIO, "last")

    with pytest.raises(OSError, match="first"):
        team.copy(copy, *arrays)
    assert np.array_equal(result[len(result) // 2 :], source[len(source) // 2 :])


# --------------------------------------------------------------------------- in streams


def test_a_stream_goes_on_when_all_parts_have_been_copied(until: Until) -> None:
    source, result, arrays = large()
    stream = CpuDevice().stream()
    seen: list[bool] = []
    with FaultPlan() as plan:
        held = plan.hold("process_vm_readv", at=3)
        stream.copy(*arrays)
        stream.call(lambda: seen.append(np.array_equal(result, source)))
        event = stream.record()
        held.wait_reached()
        if len(os.sched_getaffinity(0)) > 1:  # the other parts are copied by somebody else
            until(lambda: len(plan.calls("process_vm_readv")) == 8)
        assert not event.query()
        held.release()
        event.synchronize(20)
    assert seen == [True]
    stream.close()


def test_the_error_of_a_part_belongs_to_the_next_event() -> None:
    source, result, arrays = large()
    stream = CpuDevice().stream()
    before = stream.record()
    with FaultPlan() as plan:
        plan.fail("process_vm_readv", errno.EFAULT, at=5)
        stream.copy(*arrays)
        after, later = stream.record(), stream.record()
        with pytest.raises(OSError, match="process_vm_readv"):
            after.synchronize(20)
        for other in (before, later):
            other.synchronize(20)
    stream.copy(*arrays)
    stream.synchronize()
    assert np.array_equal(result, source)
    stream.close()


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS])
def test_a_large_batch_is_copied_where_the_system_call_is_refused(refusal: int) -> None:
    source, result, arrays = large()
    stream = CpuDevice().stream()
    with FaultPlan() as plan:
        plan.fail("process_vm_readv", refusal, times=None)
        stream.copy(*arrays)
        stream.synchronize()
        tried = len(plan.calls("process_vm_readv"))
        stream.copy(*arrays)
        stream.synchronize()
        assert len(plan.calls("process_vm_readv")) == tried
    assert np.array_equal(result, source)
    stream.close()


def test_many_streams_with_large_batches_all_finish() -> None:
    device = CpuDevice()
    work = [large(8 * MIB + n) for n in range(6)]
    streams = [device.stream() for _ in work]
    for _ in range(3):
        for stream, (_, _, arrays) in zip(streams, work, strict=True):
            stream.copy(*arrays)
    for stream, (source, result, _) in zip(streams, work, strict=True):
        stream.synchronize()
        assert np.array_equal(result, source)
        stream.close()


CHILD = """
    import os, threading
    import numpy as np
    from hostmem import CpuDevice
    from hostmem.device import copy_threads as module

    module._shared = module.CopyThreads(2)

    def copy():
        source = np.arange(2 << 20, dtype=np.uint64)
        result = np.zeros_like(source)
        at = [np.array([a.__array_interface__["data"][0]], np.uint64) for a in (result, source)]
        stream = CpuDevice().stream()
        stream.copy(*at, np.array([source.nbytes], np.uint64))
        stream.synchronize()
        stream.close()
        return np.array_equal(result, source)

    assert copy()
    assert any(t.name.startswith("hostmem-copy") for t in threading.enumerate())
    """


def test_a_forked_child_copies_with_threads_of_its_own(child: Child) -> None:
    done = child(
        CHILD
        + """
    import faulthandler, warnings
    warnings.simplefilter("ignore")  # Python 3.12 warns of forks under threads
    module._shared._lock.acquire()  # as some thread may hold it just then
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(20, exit=True)
        os._exit(0 if copy() else 3)
    assert os.waitpid(pid, 0)[1] == 0
    """
    )
    assert done.returncode == 0, done.stderr


def test_the_interpreter_ends_while_helpers_wait(child: Child) -> None:
    done = child(CHILD)
    assert (done.returncode, done.stderr) == (0, "")
