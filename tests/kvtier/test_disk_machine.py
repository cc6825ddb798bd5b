"""Files of slots under every order of their operations, beside a model of what each slot holds.

A few seconds a machine; ``KVTIER_MACHINE_EXAMPLES=2000`` makes it many more examples.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from hostmem import ClosedError, DiskOOMError, HostEvent, StaticHostMem
from hostmem.testing import FaultPlan
from kvtier.transfer.disk import SlotFile
from kvtier.transfer.jobs import Dependencies
from kvtier.transfer.page_events import PageEvents

EXAMPLES = int(os.environ.get("KVTIER_MACHINE_EXAMPLES", "60"))
STEPS = 40
SIZE = 8192
MOST = 24  # slots
PLACES = 64  # for slots in memory
BESIDE = 3  # in place of a residue: the file beside a named one
JOINED = -1  # a fault of requests for several slots at once
Bytes = NDArray[np.uint8]

# Draws do not depend on what the file does: threads may be faster or slower in the next run.
PICKS = st.lists(st.integers(0, MOST - 1), min_size=1, max_size=8, unique=True)
_WORDS = np.arange(SIZE // 8, dtype=np.uint64)


def content(version: int) -> Bytes:
    """Say what a slot of a version holds; version 0 is one that was never written."""
    words = _WORDS * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version * 1_000_003)
    return (words if version else words & np.uint64(0)).view(np.uint8)


@dataclass(eq=False)
class Slot:
    """What is known of a slot."""

    holds: set[int] = field(default_factory=lambda: {0})
    """Versions of which it may be read as one."""
    sound: bool = True
    """Whether it can be read."""
    names: set[bytes] = field(default_factory=lambda: {b""})
    """Under which it may come back; empty: it does not."""


@dataclass(eq=False)
class Op:
    """What was submitted: its slots, and the places in memory that it reads or writes."""

    slots: list[int]
    places: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Slots that the bytes come from, where they are moved."""
    versions: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    read: PageEvents | None = None
    write: PageEvents | None = None

    @property
    def events(self) -> tuple[PageEvents, ...]:
        return tuple(event for event in (self.read, self.write) if event is not None)


class SlotFileMachine(RuleBasedStateMachine):
    """A slot is read as what was written to it last, or not at all.

    A shut gate keeps what is submitted in flight.
    """

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.plan = FaultPlan().__enter__()
        self.armed: dict[str, tuple[int, int]] = {}
        """What strikes now: calls of a name, with an error, for slots of a residue modulo 3."""
        self.struck: set[tuple[str, int]] = set()
        """What may have struck what is in flight: calls, and residues."""
        self.ops: list[Op] = []
        self.gate: HostEvent | None = None
        self.slots: list[Slot] = []
        self.version = count(1)
        self.free = list(range(PLACES))
        self.memory = StaticHostMem(PLACES * SIZE, device="cpu")
        self.pages = self.memory.view(0, PLACES * SIZE).reshape(PLACES, SIZE)
        for call in ("preadv", "pwritev"):
            for error in (errno.EIO, errno.ENOSPC):
                when = partial(self.strikes, call, error)
                self.plan.fail(call, error, times=None, when=when)
            self.plan.fail(call, errno.EIO, times=None, when=partial(self.joined, call))
            self.plan.short(call, 4096, times=None, when=partial(self.strikes, call, 0))
        for error in (errno.ENOSPC, errno.EOPNOTSUPP):
            when = partial(self.refuses_room, error)
            self.plan.fail("fallocate", error, times=None, when=when)

    @initialize(slots=st.integers(1, MOST))
    def begin(self, slots: int) -> None:
        self.file = self.open(slots)
        self.slots = [Slot() for _ in range(slots)]

    def open(self, slots: int) -> SlotFile:
        return SlotFile(str(self.folder), SIZE, slots)

    # ------------------------------------------------------------------------------ the faults

    def strikes(self, call: str, error: int, fd: int, n: int, offset: int) -> bool:
        armed, residue = self.armed.get(call, (-1, 0))
        if armed != error:
            return False
        if fd != self.file._fd:
            return residue == BESIDE
        first = offset // SIZE
        return any(slot % 3 == residue for slot in range(first, first + n))

    def joined(self, call: str, fd: int, n: int, offset: int) -> bool:
        """Strike requests of several slots: each slot alone can be had."""
        return self.armed.get(call, (0, 0))[0] == JOINED and n > 1

    def refuses_room(self, error: int, *_: int) -> bool:
        return self.armed.get("fallocate", (0, 0))[0] == error

    def excused(self, call: str, slot: int) -> bool:
        """Tell whether a transfer of a slot may fail."""
        return (call, slot % 3) in self.struck or (call, BESIDE) in self.struck

    # ------------------------------------------------------------------------- what is in flight

    def submit(self, op: Op, start: Callable[[Dependencies], None]) -> None:
        """Let an operation follow those in flight that use its slots."""
        mine = {*op.slots, *op.sources}
        before = [
            e for other in self.ops if mine & {*other.slots, *other.sources} for e in other.events
        ]
        start(Dependencies((), (*before, *((self.gate,) if self.gate is not None else ()))))
        self.ops.append(op)
        if self.gate is None and not before:
            self.finish()

    def finish(self) -> None:
        """Let everything be done, and see how it ended."""
        if self.gate is not None:
            self.gate.set()
            self.gate = None
        for op in self.ops:
            for event in op.events:
                event.wait_finished()
        ops, self.ops = self.ops, []
        for op in ops:
            self.done(op)
            self.free += op.places
        self.struck = {
            (call, residue) for call, (error, residue) in self.armed.items() if error > 0
        }

    def done(self, op: Op) -> None:
        if op.read is None and op.write is None:  # forgotten
            for slot in (self.slots[n] for n in op.slots if n < len(self.slots)):
                certain = not self.excused("pwritev", BESIDE)
                slot.names = {b""} if certain else slot.names | {b""}
            return
        for n, number in enumerate(op.slots):
            version = op.versions[n] if op.versions else 0
            if op.read is not None:
                source = (op.sources or op.slots)[n]
                if (error := op.read.failure(n)) is not None:
                    sound = self.slots[source].sound
                    assert not sound or self.excused("preadv", source), f"slot {source}: {error}"
                    if op.write is not None:
                        assert op.write.failure(n) is not None, "what was not read was written"
                    continue
                page = self.pages[op.places[n]]
                found = [v for v in self.slots[source].holds if np.array_equal(page, content(v))]
                assert found, f"slot {source} was read as something else"
                version = found[0]
            if op.write is not None:
                name = op.names[n] % version if op.names and op.names[n] else b""
                self.written(number, version, name, op.write.failure(n))

    def written(self, number: int, version: int, name: bytes, error: BaseException | None) -> None:
        slot = self.slots[number]
        if error is None:
            slot.holds, slot.sound, slot.names = {version}, True, {name}
        else:
            assert self.excused("pwritev", number), f"slot {number}: {error}"
            slot.sound = False
            slot.holds.add(version)
            slot.names |= {b"", name}

    def places(self, n: int) -> list[int]:
        if len(self.free) < n:
            self.finish()
        taken, self.free = self.free[:n], self.free[n:]
        self.pages[taken] = 0xEE
        return taken

    def addresses(self, places: list[int]) -> NDArray[np.uint64]:
        return np.uint64(self.memory.address) + np.array(places, np.uint64) * np.uint64(SIZE)

    def some(self, picks: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(n % len(self.slots) for n in picks))

    # ---------------------------------------------------------------------------------- rules

    @rule(picks=PICKS)
    def write(self, picks: list[int]) -> None:
        self.write_named(picks, [])

    def write_named(self, picks: list[int], names: list[bytes]) -> None:
        slots = self.some(picks)
        versions = [next(self.version) for _ in slots]
        op = Op(slots, self.places(len(slots)), [], versions, names[: len(slots)])
        for place, version in zip(op.places, versions, strict=True):
            self.pages[place] = content(version)

        def start(after: Dependencies) -> None:
            called = [name % v if name else b"" for name, v in zip(op.names, versions)]  # noqa: B905
            op.write = self.file.write(*self.where(slots, op), after, called or None)

        self.submit(op, start)

    def where(self, slots: list[int], op: Op) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        return np.array(slots, np.int32), self.addresses(op.places)

    @rule(picks=PICKS)
    def read(self, picks: list[int]) -> None:
        slots = self.some(picks)
        op = Op(slots, self.places(len(slots)))

        def start(after: Dependencies) -> None:
            op.read = self.file.read(*self.where(slots, op), after)

        self.submit(op, start)

    @rule(picks=PICKS)
    def move(self, picks: list[int]) -> None:
        """Read slots and write them to others: what is not read is not written."""
        slots = self.some(picks)
        half = len(slots) // 2
        op = Op(slots[half : 2 * half], self.places(half), slots[:half])

        def start(after: Dependencies) -> None:
            op.read = self.file.read(*self.where(op.sources, op), after)
            behind = Dependencies((op.read,), after.fences)
            op.write = self.file.write(*self.where(op.slots, op), behind)

        if half:
            self.submit(op, start)

    @rule()
    def shut(self) -> None:
        """Keep what is submitted from now on in flight."""
        if self.gate is None:
            self.gate = HostEvent()

    @rule()
    def let_go(self) -> None:
        self.finish()

    @rule(slots=st.integers(1, MOST))
    def resize(self, slots: int) -> None:
        if any(n >= slots for op in self.ops for n in (*op.slots, *op.sources)):
            self.finish()  # as whoever owns the slots has to
        before = len(self.slots)
        try:
            self.file.resize(slots)
        except DiskOOMError:
            assert self.armed.get("fallocate", (0, 0))[0] == errno.ENOSPC
            assert self.file.slots == before
            return
        self.slots = self.slots[:slots] + [Slot() for _ in range(slots - before)]

    @rule(
        call=st.sampled_from(["preadv", "pwritev"]),
        error=st.sampled_from([errno.EIO, errno.EIO, errno.ENOSPC, JOINED, 0]),
        residue=st.integers(0, BESIDE),
    )
    def arm(self, call: str, error: int, residue: int) -> None:
        """Let calls fail, for some slots; see `BESIDE`."""
        self.armed[call] = error, residue
        if error > 0:
            self.struck.add((call, residue))

    @rule(error=st.sampled_from([errno.ENOSPC, errno.EOPNOTSUPP]))
    def arm_growth(self, error: int) -> None:
        self.armed["fallocate"] = error, -1

    @rule()
    def disarm(self) -> None:
        self.armed.clear()

    @rule(
        pick=st.integers(0, MOST - 1),
        how=st.sampled_from(["flip", "zero", "swap", "cut"]),
        at=st.integers(0, SIZE - 1),
    )
    def damage(self, pick: int, how: str, at: int) -> None:
        """Change what is on disk behind everybody's back."""
        self.finish()
        (hit,) = self.some([pick])
        other = at % len(self.slots)
        spoilt = [hit]
        with open(f"/proc/self/fd/{self.file._fd}", "r+b", buffering=0) as raw:
            fd = raw.fileno()
            if how == "flip":
                (byte,) = os.pread(fd, 1, hit * SIZE + at) or b"\0"
                os.pwrite(fd, bytes([byte ^ 1 << at % 8]), hit * SIZE + at)
            elif how == "zero":
                os.pwrite(fd, bytes(SIZE), hit * SIZE)
            elif how == "swap":
                ours, theirs = (os.pread(fd, SIZE, n * SIZE) for n in (hit, other))
                os.pwrite(fd, theirs.ljust(SIZE, b"\0"), hit * SIZE)
                os.pwrite(fd, ours.ljust(SIZE, b"\0"), other * SIZE)
                spoilt = [hit, other]
            else:
                os.ftruncate(fd, min(hit * SIZE + at, os.fstat(fd).st_size))
                spoilt = list(range(hit, len(self.slots)))
        for n in spoilt:
            self.slots[n].sound = False
            if how == "cut":
                self.slots[n].names.add(b"")

    # ------------------------------------------------------------------------------ at the end

    @invariant()
    def is_as_large_as_the_model(self) -> None:
        if self.slots:
            assert self.file.slots == len(self.slots)

    def close(self) -> None:
        """Close with everything in flight: it is done all the same."""
        if self.gate is not None:
            self.gate.set()
        self.file.close()
        assert all(event.query() for op in self.ops for event in op.events)
        self.finish()
        with pytest.raises(ClosedError):
            self.file.read(np.zeros(1, np.int32), self.addresses([0]), Dependencies())

    def teardown(self) -> None:
        try:
            if self.slots:
                self.finish()
                self.armed.clear()
                self.struck.clear()
                for first in range(0, len(self.slots), 8):
                    self.read(list(range(first, min(first + 8, len(self.slots)))))
                self.close()
        finally:
            if self.gate is not None:
                self.gate.set()
            if self.slots:
                self.file.close()
            del self.pages
            self.memory.close()
            self.plan.__exit__(None, None, None)


class NamedMachine(SlotFileMachine):
    """The same of a file that stays: slots come back as what they were called, or not at all."""

    files = count()

    def __init__(self) -> None:
        super().__init__()
        self.name = f"slots-{next(self.files)}"

    def open(self, slots: int) -> SlotFile:
        return SlotFile(str(self.folder), SIZE, slots, name=self.name, layout=b"machine")

    @rule(picks=PICKS, named=st.lists(st.booleans(), min_size=8, max_size=8))
    def write_under_names(self, picks: list[int], named: list[bool]) -> None:
        self.write_named(picks, [b"%d" if one else b"" for one in named])

    @rule(picks=PICKS)
    def forget(self, picks: list[int]) -> None:
        op = Op(self.some(picks))
        self.file.forget(np.array(op.slots, np.int32))
        self.ops.append(op)

    @rule(slots=st.integers(1, MOST))
    def reopen(self, slots: int) -> None:
        self.close()
        self.armed.clear()
        self.struck.clear()
        self.file = self.open(slots)
        restored = dict(self.file.restored)
        assert len(restored) == len(self.file.restored)
        known, self.slots = self.slots, [Slot(sound=False) for _ in range(slots)]
        for n, slot in enumerate(known):
            name = restored.pop(n, b"")
            assert name in slot.names or (n >= slots and not name), (
                f"slot {n} came back as {name!r}"
            )
            if name:
                self.slots[n] = Slot({int(name)}, slot.sound, {name})
        assert not restored, "slots came back that nobody wrote"


def check(machine: type[SlotFileMachine], folder: Path) -> None:
    run_state_machine_as_test(
        type(machine.__name__, (machine,), {"folder": folder}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(EXAMPLES * 3)
def test_a_slot_is_read_as_what_was_written_or_not_at_all(tmp_path: Path) -> None:
    check(SlotFileMachine, tmp_path)


@pytest.mark.timeout(EXAMPLES * 3)
def test_slots_come_back_as_what_they_were_called_or_not_at_all(tmp_path: Path) -> None:
    check(NamedMachine, tmp_path)
