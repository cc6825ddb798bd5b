"""Storages whose copies fail, whose files are damaged and whose calls take their time.

The machine of `test_storage_machine`, with faults.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from hostmem import DiskOOMError
from hostmem.testing import FaultPlan
from kvtier.transfer.memory import DiskPool
from tests.kvtier.test_storage_machine import (
    DISK,
    EXAMPLES,
    KIB,
    PICKS,
    Entry,
    StorageMachine,
    check,
)

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

COPY = "process_vm_readv"
JOINED = -1  # a fault of requests for several slots at once


class FaultyMachine(StorageMachine):
    """The same while copies fail, files are damaged and calls take their time.

    Whatever fails may cost pages, and no slot; it never costs kept pages but where their only
    bytes cannot be read, and never gives wrong bytes.
    """

    def __init__(self) -> None:
        self.plan = FaultPlan().__enter__()
        self.armed: dict[str, tuple[int, int]] = {}
        """What strikes now: calls of a name, with an error, for slots of a residue modulo 3."""
        self.struck: set[str] = set()
        """What may have struck since nothing was in flight."""
        try:
            super().__init__()
            self.slot_sizes = {
                pool.file._fd: pool.slot_size
                for group in self.storage.levels[DISK].groups
                for pool in cast(Iterable[DiskPool], group.memory.pools)
            }
            for call in ("preadv", "pwritev"):
                for error in (errno.EIO, errno.ENOSPC):
                    when = partial(self.strikes, call, error)
                    self.plan.fail(call, error, times=None, when=when)
                self.plan.fail(call, errno.EIO, times=None, when=partial(self.joined, call))
                self.plan.short(call, 64 * KIB, times=None, when=partial(self.strikes, call, 0))
            files = [*self.slot_sizes]
            self.plan.fail(
                "fallocate",
                errno.ENOSPC,
                times=None,
                when=lambda fd, *_: self.armed.get("fallocate") == (errno.ENOSPC, files.index(fd)),
            )
            self.plan.fail(COPY, errno.EFAULT, times=None, when=lambda *_: COPY in self.armed)
        except BaseException:
            self.plan.__exit__(None, None, None)
            raise

    def strikes(self, call: str, error: int, fd: int, n: int, offset: int) -> bool:
        armed, residue = self.armed.get(call, (-1, 0))
        first = offset // self.slot_sizes[fd]
        return armed == error and any(slot % 3 == residue for slot in range(first, first + n))

    def joined(self, call: str, fd: int, n: int, offset: int) -> bool:
        """Strike requests of several slots: each slot alone can be had."""
        return self.armed.get(call, (0, 0))[0] == JOINED and n > 1

    # ------------------------------------------------------------------------------ the model

    def may_lose(self, entry: Entry) -> bool:
        return (
            entry.spoilt
            or entry.doubtful
            or bool(self.struck - {"pwritev"} if entry.kept else self.struck)
        )

    def tolerate(self, error: Exception) -> None:
        if not (isinstance(error, OSError | DiskOOMError) and self.armed):
            super().tolerate(error)

    def quiesce(self) -> None:
        super().quiesce()
        # Pages that are leased are seen to when they are let go.
        for entry in self.live.values():
            entry.doubtful = entry.page.lost
        self.struck = {call for call, (error, _) in self.armed.items() if error not in (0, JOINED)}
        self.certain = not self.struck and not any(e.spoilt for e in self.live.values())

    def run_steps(self, n: int, failing: int) -> None:
        if self.holds and self.steps[:n]:
            self.let_go()  # a step may wait for what is held
        super().run_steps(n, failing)

    # ---------------------------------------------------------------------------------- rules

    @rule(
        call=st.sampled_from(["preadv", "preadv", "pwritev", "pwritev", COPY, "fallocate"]),
        error=st.sampled_from([errno.EIO, errno.EIO, errno.ENOSPC, JOINED, 0]),
        residue=st.integers(0, 2),
    )
    def arm(self, call: str, error: int, residue: int) -> None:
        """Let calls fail: all copies, growth of one file, reads and writes of some slots."""
        if call in (COPY, "fallocate"):
            error = errno.ENOSPC
        self.armed[call] = error, residue
        if error not in (0, JOINED):
            self.struck.add(call)
            self.certain = False

    @rule(wait=st.booleans())
    def disarm(self, wait: bool) -> None:
        self.armed.clear()
        if wait:
            self.quiesce()

    @rule(call=st.sampled_from(["preadv", "pwritev", COPY]))
    def hold(self, call: str) -> None:
        self.holds.append(self.plan.hold(call))

    @rule(picks=PICKS, fails=st.booleans())
    def chase(self, picks: list[int], fails: bool) -> None:
        """Hold the read of a page until others have had its slot, and left it, too."""
        entries = self.some(picks[:1], level=DISK)
        if self.would_block() or not entries:
            return
        group, slot = entries[0].page.group, entries[0].page.slot
        if fails:
            self.arm("preadv", errno.EIO, slot % 3)
        self.hold("preadv")
        self.bring(entries, stay=True)
        for _ in range(3):
            self.make(group, 1, 0, "later")
        followers = [entry for entry in self.at(DISK, group) if entry.page.slot == slot]
        self.bring(followers, stay=True)

    @rule()
    def let_go(self) -> None:
        for hold in self.holds:
            hold.release()
        self.holds.clear()

    @rule(
        pick=st.integers(0, 63),
        how=st.sampled_from(["flip", "zero", "swap", "cut"]),
        at=st.integers(0, 256 * KIB - 1),
    )
    def damage(self, pick: int, how: str, at: int) -> None:
        """Change what is on disk behind everybody's back."""
        self.quiesce()
        there = [e for e in self.live.values() if e.page.level == DISK]
        if not there or any(entry.page.lost for entry in self.live.values()):
            return  # where a lost page goes back to is not known here
        hit = there[pick % len(there)]
        same = self.at(DISK, hit.page.group)
        other = same[at % len(same)]
        (pool,) = self.storage.levels[DISK].groups[hit.page.group].memory.pools
        file, size = cast(DiskPool, pool).file, pool.slot_size
        first, second = hit.page.slot * size, other.page.slot * size
        with open(f"/proc/self/fd/{file._fd}", "r+b", buffering=0) as raw:
            fd = raw.fileno()
            if how == "flip":
                (byte,) = os.pread(fd, 1, first + at) or b"\0"
                os.pwrite(fd, bytes([byte ^ 1 << at % 8]), first + at)
                spoilt = [hit]
            elif how == "zero":
                os.pwrite(fd, bytes(size), first)
                spoilt = [hit]
            elif how == "swap":
                ours, theirs = os.pread(fd, size, first), os.pread(fd, size, second)
                os.pwrite(fd, theirs, first)
                os.pwrite(fd, ours, second)
                spoilt = [hit, other] if other is not hit else []
            else:
                os.ftruncate(fd, min(first + at, os.fstat(fd).st_size))
                spoilt = [entry for entry in same if entry.page.slot >= hit.page.slot]
        for entry in spoilt:
            entry.spoilt = True
            self.certain = False  # copies of these will fail

    def teardown(self) -> None:
        self.armed.clear()
        try:
            super().teardown()
        finally:
            self.plan.__exit__(None, None, None)


@pytest.mark.timeout(EXAMPLES * 4)
def test_faults_cost_pages_and_no_slots_and_never_give_wrong_bytes(tiers: Tiers) -> None:
    check(FaultyMachine, tiers)
