"""Block caches of an engine that has pages of its own, and those whose copies fail.

The machine of `test_block_machine`, with stores and loads, and with faults.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from numpy.typing import NDArray

from hostmem import OutOfPagesError, StaticHostMem
from hostmem.testing import FaultPlan
from kvtier import EnginePages, Page
from tests.kvtier.block_model import (
    CHAINS,
    COUNT,
    EXAMPLES,
    FIRST,
    KIB,
    LAYERS,
    Bytes,
    check,
)
from tests.kvtier.test_block_machine import BlockMachine

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

COPY = "process_vm_readv"
HOMES = 24  # pages of the engine


class EngineMachine(BlockMachine):
    """The same with an engine that has pages of its own, over host memory and a disk."""

    hot = False

    def engine(self) -> EnginePages:
        self.arrays: dict[tuple[int, str], NDArray[np.uint8]] = {}
        buffers = {}
        for layer in LAYERS:
            for buffer in layer.buffers:
                name, stride = (layer.layer_id, buffer.role), buffer.size + 4 * KIB
                memory = self.stack.enter_context(StaticHostMem(HOMES * stride, device="cpu"))
                buffers[name] = memory.address, stride
                rows = self.tiers.raw(memory.address, HOMES * stride).reshape(HOMES, stride)
                rows[:] = 0x77
                self.arrays[name] = rows
        self.free = list(range(HOMES))
        return EnginePages(self.storage, buffers, HOMES)

    def pieces(self, group: int, home: int) -> Iterator[tuple[int, Bytes]]:
        offset = 0
        for pool in self.layouts[group].pools:
            for place in pool.buffers:
                row = self.arrays[place.layer_id, place.role][home]
                assert (row[place.size :] == 0x77).all(), "bytes between the pages were written"
                yield offset, row[: place.size]
                offset += place.size

    def fill(self, key: int | None, home: int) -> None:
        for group in range(len(self.layouts)):
            for offset, piece in self.pieces(group, home):
                piece[:] = (
                    0xEE if key is None else self.content(key, group)[offset : offset + len(piece)]
                )

    @rule(
        chain=CHAINS,
        first=FIRST,
        count=COUNT,
        how=st.sampled_from(["now", "now", "later", "failed"]),
        shown=st.integers(0, 255),
        priority=st.integers(-1, 1),
    )
    def store(
        self, chain: int, first: int, count: int, how: str, shown: int, priority: int
    ) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, first, count)
        if len(self.free) < len(keys):
            self.quiesce()
        homes, self.free = self.free[: len(keys)], self.free[len(keys) :]
        pages = np.array([homes, homes])
        pages[1, [not shown >> n & 1 for n in range(len(keys))]] = -1
        missing = [
            key
            for n, key in enumerate(keys)
            if key not in self.cache
            or self.cache._index.is_unread(key)
            or (self.cache._index.blocks[key].pages[1] is None and pages[1, n] >= 0)
        ]
        copied: list[Page] = []

        def run(fails: bool) -> None:
            for key, home in zip(keys, homes, strict=True):
                self.fill(None if fails else key, home)
            if fails:
                self.spoilt.update(copied)

        step = self.later(run)
        step.may_fail = how == "failed"
        if how == "now":
            self.unblock()
        certain, accepted = self.certain, False
        with self.refusing(OutOfPagesError):
            before = {p for b in self.cache._index.blocks.values() for p in b.pages}
            job = self.cache.store(keys, pages, ready=step.ready, priority=priority)
            after = {p for b in self.cache._index.blocks.values() for p in b.pages}
            copied.extend(page for page in after - before if page is not None)
            if certain:
                assert job.keys == missing
            assert self.failing or all(key in self.cache for key in missing)

            def done() -> None:
                for home in homes:
                    self.fill(None, home)
                self.free.extend(homes)

            self.jobs.append((job, done))
            accepted = True
        if not accepted:
            self.unblock()
            self.free.extend(homes)

    @rule(chain=CHAINS, count=COUNT, some=st.integers(0, 255), reading=st.booleans())
    def load(self, chain: int, count: int, some: int, reading: bool) -> None:
        if self.kept:
            self.unblock()
        keys = self.keys(chain, 0, count)
        keys = keys[: self.cache.match(keys)]
        if len(self.free) < len(keys):
            self.quiesce()
        homes, self.free = self.free[: len(keys)], self.free[len(keys) :]
        pages = np.array([homes, homes])
        for n, key in enumerate(keys):
            if n in self.hidden(1, len(keys)) or not self.cache._index.blocks.get(key):
                pages[1, n] = -1
            elif some >> n & 1:
                pages[n & 2 and 1, n] = -1
        for home in homes:
            self.fill(None, home)
        step = self.later(lambda _: None)
        if not reading:
            self.unblock()
        certain, accepted = self.certain, False
        with self.refusing(*([OutOfPagesError] if certain else [OutOfPagesError, KeyError])):
            job = self.cache.load(keys, pages, ready=step.ready)

            def done() -> None:
                wrong = dict(job.failed)
                assert not wrong or self.failing or not certain, wrong
                for n, (key, home) in enumerate(zip(keys, homes, strict=True)):
                    for group in range(len(self.layouts)):
                        content = self.content(key, group)
                        for offset, piece in self.pieces(group, home):
                            if pages[group, n] < 0:
                                assert (piece == 0xEE).all()
                            elif key not in wrong:
                                part = content[offset : offset + len(piece)]
                                assert np.array_equal(piece, part), f"{key} was loaded wrong"
                self.free.extend(homes)

            self.jobs.append((job, done))
            accepted = True
        if not accepted:
            self.unblock()
            self.free.extend(homes)


def faulty(machine: type[BlockMachine]) -> type[BlockMachine]:
    class Faulty(machine):  # type: ignore[valid-type,misc]
        """The same while copies fail: blocks may be lost; bytes are right, and no slot is lost."""

        def __init__(self) -> None:
            self.plan = FaultPlan().__enter__()
            self.armed: dict[str, int] = {}
            try:
                super().__init__()
                for call in ("preadv", "pwritev", COPY):
                    self.plan.fail(
                        call, errno.EIO, times=None, when=lambda *_, call=call: self.strikes(call)
                    )
            except BaseException:
                self.plan.__exit__(None, None, None)
                raise

        def strikes(self, call: str) -> bool:
            left = self.armed.get(call, 0)
            if left > 0:
                self.armed[call] = left - 1
            return left > 0

        @rule(call=st.sampled_from(["preadv", "pwritev", COPY]), times=st.integers(1, 6))
        def arm(self, call: str, times: int) -> None:
            self.armed[call] = times
            self.failing = True

        @rule()
        def disarm(self) -> None:
            self.armed.clear()
            self.quiesce()
            self.failing = any(
                page.lost
                for level in self.storage.levels
                for policy in level.policies
                for page in policy.victims()
            )

        def teardown(self) -> None:
            self.armed.clear()
            try:
                super().teardown()
            finally:
                self.plan.__exit__(None, None, None)

    return Faulty


@pytest.mark.timeout(max(EXAMPLES * 3, 120))
def test_what_an_engine_stores_and_loads_has_the_bytes_of_its_key(tiers: Tiers) -> None:
    check(EngineMachine, tiers)


@pytest.mark.timeout(max(EXAMPLES * 3, 120))
@pytest.mark.parametrize("machine", [BlockMachine, EngineMachine], ids=["hot", "engine"])
def test_failed_copies_cost_blocks_and_never_give_wrong_bytes(
    machine: type[BlockMachine], tiers: Tiers
) -> None:
    check(faulty(machine), tiers)
