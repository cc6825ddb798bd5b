"""Everything at once, against a model that knows which bytes must still be there."""

from __future__ import annotations

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

from hostmem import CpuDevice, HostMem, HostmemError, placement_of, resolve_device
from hostmem.testing import FaultPlan

PAGE = mmap.PAGESIZE
SLOTS = 400  # of capacity
POPULATE = "madvise(MADV_POPULATE_WRITE)"


class MemoryMachine(RuleBasedStateMachine):
    """Resizes, writes, pauses, holds views, and lets steps fail.

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
    )
    def build(self, layout: tuple[int, int | None], slots: int, threads: int) -> None:
        self.slot, unit = layout
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
        self.paused = False

    @property
    def slots(self) -> int:
        return len(self.written)

    def retry_until_usable(self, end: int) -> None:
        """Wait, and try again for each step that was made to fail."""
        for _ in range(100):
            try:
                self.memory.wait_usable(end, 20)
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
        self.memory.resize(slots * self.slot)
        self.written = self.written[:slots] + [None] * (slots - self.slots)

    @precondition(lambda self: self.written and not self.paused)
    @rule(data=st.data(), byte=st.integers(1, 255))
    def write(self, data: st.DataObject, byte: int) -> None:
        slot = data.draw(st.integers(0, self.slots - 1))
        self.retry_until_usable((slot + 1) * self.slot)
        view = self.memory.view(slot * self.slot, self.slot, timeout=0)
        view[:] = byte
        self.written[slot] = byte

    @precondition(lambda self: self.written and not self.paused and len(self.views) < 3)
    @rule(data=st.data())
    def hold_a_view(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.slots - 1))
        self.retry_until_usable((slot + 1) * self.slot)
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

    @rule(
        step=st.sampled_from(
            [
                (POPULATE, errno.ENOMEM),
                (POPULATE, errno.EINVAL),
                (POPULATE, errno.EINTR),
                ("cuMemHostRegister", 1),
                ("cuMemHostRegister", 801),
            ]
        )
    )
    def let_the_next_step_fail(self, step: tuple[str, int]) -> None:
        self.plan.fail(*step)

    @precondition(lambda self: not self.paused)
    @rule()
    def wait(self) -> None:
        self.retry_until_usable(self.memory.size)
        assert self.memory.failure is None
        assert self.memory.committed == self.memory.size

    @invariant()
    def the_prefix_is_sound(self) -> None:
        memory = self.memory
        assert memory.address == self.address
        assert memory.size == self.slots * self.slot
        committed = memory.committed
        assert committed % self.slot == 0
        assert 0 <= committed <= memory.size
        end = 0
        for start, nbytes in memory.registrations:
            assert start == end
            assert nbytes % self.slot == 0
            assert start // memory.commit_unit == (start + nbytes - 1) // memory.commit_unit
            end = start + nbytes
        assert end >= committed

    @invariant()
    def what_was_written_is_there(self) -> None:
        table = self.memory.view(0, self.memory.committed).reshape(-1, self.slot)
        firsts, lasts = table[:, 0].tolist(), table[:, -1].tolist()
        known = [(n, b) for n, b in enumerate(self.written[: len(firsts)]) if b is not None]
        assert [(n, firsts[n], lasts[n]) for n, _ in known] == [(n, b, b) for n, b in known]

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        try:
            self.views.clear()
            self.memory.close()
            device = resolve_device("cpu")
            assert isinstance(device, CpuDevice)
            assert list(device.registered) == []
            assert placement_of(self.address, PAGE).resident == 0
        finally:
            self.plan.__exit__(None, None, None)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
