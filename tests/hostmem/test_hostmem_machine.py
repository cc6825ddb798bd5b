"""Everything at once, against a model that knows which bytes must still be there."""

from __future__ import annotations

import contextlib
import errno
import mmap

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hostmem import (
    CpuDevice,
    HostMem,
    HostmemError,
    HostOOMError,
    RegistrationError,
    ResourceBusyError,
    placement_of,
    resolve_device,
)
from hostmem.testing import FaultPlan

PAGE = mmap.PAGESIZE
SLOTS = 400  # of capacity
POPULATE = "madvise(MADV_POPULATE_WRITE)"


class MemoryMachine(RuleBasedStateMachine):
    """Resizes, writes, pauses, holds views, releases, suspends, and lets steps fail.

    The model is a list with one entry for each slot of the size: the byte it was filled with, or
    None where nothing was written since the slot last came to be.
    """

    slot: int
    memory: HostMem
    plan: FaultPlan

    @initialize(
        layout=st.sampled_from([(6000, None), (6000, 12_000), (PAGE, 3 * PAGE), (576, 576 * 50)]),
        slots=st.integers(0, SLOTS),
        threads=st.sampled_from([1, 3]),
        calm=st.booleans(),
    )
    def build(self, layout: tuple[int, int | None], slots: int, threads: int, calm: bool) -> None:
        self.slot, unit = layout
        self.calm = calm  # each fill ends before the next rule, so that it is known what fails
        self.plan = FaultPlan().__enter__()
        self.memory = HostMem(
            SLOTS * self.slot,
            slots * self.slot,
            device="cpu",
            slot_size=self.slot,
            commit_unit=unit,
            fill_threads=threads,
        )
        self.address = self.memory.address
        self.written: list[int | None] = [None] * slots
        self.views: list[tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = []
        self.released: set[tuple[int, int]] = set()
        self.paused = self.suspended = self.consolidated = self.unfinished = False
        self.settle()

    def settle(self) -> None:
        worker = self.memory._core.filler._worker
        if self.calm and self.fills and worker is not None:
            worker.join()

    @property
    def slots(self) -> int:
        return len(self.written)

    @property
    def fills(self) -> bool:
        return not self.paused and not self.suspended

    @property
    def present(self) -> list[int]:
        """Slots that are not released."""
        gone = {slot for start, end in self.released for slot in range(start, end)}
        return [slot for slot in range(self.slots) if slot not in gone]

    def retry_until_usable(self, end: int, start: int = 0) -> None:
        """Wait, and try again for each step that was made to fail."""
        for _ in range(100):
            try:
                self.memory.wait_usable(end, 20, start=start)
            except HostmemError:
                self.memory.resize(self.memory.size)
            else:
                return
        pytest.fail("more failures than were planned")

    @rule(slots=st.integers(0, SLOTS))
    def resize(self, slots: int) -> None:
        if slots < self.slots and any(slot >= slots for slot, _ in self.views):
            before = self.memory.registrations if self.paused else None
            with pytest.raises(BufferError):
                self.memory.resize(slots * self.slot)
            if before is not None:
                assert self.memory.registrations[: len(before)] == before
            return
        try:
            self.memory.resize(slots * self.slot)
        except RegistrationError:  # what was consolidated is cut, and a part of it stays pageable
            assert self.consolidated
        except HostOOMError:  # what goes is not given back, until it is tried again
            assert slots < self.slots or self.unfinished
            self.unfinished = True
        else:
            self.unfinished = False
        self.settle()
        self.written = self.written[:slots] + [None] * (slots - self.slots)
        self.released = {(start, end) for start, end in self.released if end <= slots}

    # -------------------------------------------------------------- holes, and what is registered

    @precondition(lambda self: self.slots and self.fills)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        per_unit = self.memory.commit_unit // self.slot
        first = data.draw(st.integers(0, (self.slots - 1) // per_unit)) * per_unit
        last = min(first + per_unit, self.slots)
        self.retry_until_usable(last * self.slot, last * self.slot)
        call = (first * self.slot, (last - first) * self.slot)
        gone = [(start, end) for start, end in self.released if start < last and first < end]
        if gone:
            with pytest.raises(ValueError, match="are released"):
                self.memory.release(*call)
        elif any(first <= slot < last for slot, _ in self.views):
            with pytest.raises(BufferError):
                self.memory.release(*call)
        else:
            try:
                self.memory.release(*call)
            except (RegistrationError, HostOOMError):
                return  # and all is as it was: the invariants look
            self.released.add((first, last))
            self.written[first:last] = [None] * (last - first)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def recommit(self, data: st.DataObject) -> None:
        first, last = data.draw(st.sampled_from(sorted(self.released)))
        try:
            self.memory.recommit(first * self.slot, (last - first) * self.slot)
        except ResourceBusyError:
            assert self.suspended
        except HostmemError:
            return
        else:
            self.released.remove((first, last))

    @rule()
    def suspend_registration(self) -> None:
        with contextlib.suppress(RegistrationError):
            self.memory.suspend_registration()
            assert self.memory.registrations == []
        self.suspended = True

    @precondition(lambda self: self.suspended)
    @rule()
    def resume_registration(self) -> None:
        for _ in range(100):
            with contextlib.suppress(RegistrationError):
                self.memory.resume_registration()
                self.suspended = False
                self.settle()
                return
        pytest.fail("more failures than were planned")

    @precondition(lambda self: self.fills)
    @rule()
    def consolidate(self) -> None:
        self.retry_until_usable(self.memory.size, self.memory.size)
        self.consolidated = True
        with contextlib.suppress(RegistrationError):
            self.memory.consolidate()
            ends = {start for start, _ in self.memory.quarantined} | {self.memory.size}
            ends |= {start for start, _ in self.memory.released}
            if not self.calm:  # else a range may have been refused, and taken in halves
                for start, nbytes in self.memory.registrations[:-1]:
                    assert start + nbytes in ends  # nothing but a hole is between two

    # ------------------------------------------------------------------------------------- bytes

    @precondition(lambda self: self.present and self.fills)
    @rule(data=st.data(), byte=st.integers(1, 255))
    def write(self, data: st.DataObject, byte: int) -> None:
        slot = data.draw(st.sampled_from(self.present))
        self.retry_until_usable((slot + 1) * self.slot, slot * self.slot)
        view = self.memory.view(slot * self.slot, self.slot, timeout=0)
        view[:] = byte
        self.written[slot] = byte

    @precondition(lambda self: self.present and self.fills and len(self.views) < 3)
    @rule(data=st.data())
    def hold_a_view(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.present))
        self.retry_until_usable((slot + 1) * self.slot, slot * self.slot)
        view = self.memory.view(slot * self.slot, self.slot, timeout=0)
        self.views.append((slot, view))

    @precondition(lambda self: self.views)
    @rule()
    def drop_a_view(self) -> None:
        self.views.pop()

    @rule()
    def pause(self) -> None:
        self.memory.pause_fill()
        self.paused = True

    @rule()
    def resume(self) -> None:
        self.memory.resume_fill()
        self.paused = False
        self.settle()

    @precondition(lambda self: self.calm)
    @rule(
        step=st.sampled_from(
            [
                (POPULATE, errno.ENOMEM),
                (POPULATE, errno.EINVAL),
                (POPULATE, errno.EINTR),
                ("cuMemHostRegister", 1),
                ("cuMemHostRegister", 801),
                ("cuMemHostUnregister", 999),
                ("mprotect", errno.ENOMEM),
            ]
        )
    )
    def let_the_next_step_fail(self, step: tuple[str, int]) -> None:
        self.plan.fail(*step)

    @precondition(lambda self: self.fills)
    @rule()
    def wait(self) -> None:
        size = self.memory.size
        self.retry_until_usable(size, size)
        assert self.memory.failure is None
        assert self.memory.progress.filled == size

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        memory = self.memory
        assert memory.address == self.address
        assert memory.size == self.slots * self.slot
        committed = memory.committed
        filled = memory.progress.filled  # before the tables: the fill goes on meanwhile
        assert committed % self.slot == 0
        assert 0 <= committed <= filled <= memory.size
        gone = [(start * self.slot, (end - start) * self.slot) for start, end in self.released]
        assert sum(n for _, n in memory.released) == sum(n for _, n in gone)
        registered = memory.registrations
        parts = [*registered, *memory.quarantined, *gone, *memory._core.registrations.suspended]
        end = 0
        for start, nbytes in sorted(parts):
            assert start == end
            assert nbytes % self.slot == 0
            end = start + nbytes
        assert end >= filled
        if not self.consolidated:
            unit = memory.commit_unit
            assert all(s // unit == (s + n - 1) // unit for s, n in registered)

    @invariant()
    def what_was_written_is_there(self) -> None:
        memory, known = self.memory, self.written
        for slot in self.present:
            if known[slot] is not None:
                offset = slot * self.slot
                view = memory.view(offset, self.slot, timeout=0)
                assert (slot, view[0], view[-1]) == (slot, known[slot], known[slot])

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.views.clear()
        self.plan.__exit__(None, None, None)  # a step that failed now would leak on purpose
        self.memory.close()
        device = resolve_device("cpu")
        assert isinstance(device, CpuDevice)
        assert list(device.registered) == []
        assert placement_of(self.address, PAGE).resident == 0


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
