"""What is known of a block cache, and what must hold whatever is done to it.

State machines add rules: see `test_block_machine`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from hostmem import (
    DiskOOMError,
    Event,
    HostEvent,
)
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BlockJob,
    BlockLease,
    BlockReservation,
    BufferConfig,
    DiskCacheTierConfig,
    EnginePages,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    Page,
    TierStorage,
)
from kvtier.block import failed
from kvtier.transfer.memory import MemoryPool

if TYPE_CHECKING:
    from tests.kvtier.conftest import Tiers

EXAMPLES = int(os.environ.get("KVTIER_MACHINE_EXAMPLES", "40"))
STEPS = 40
KIB, MIB = 1 << 10, 1 << 20
QUOTAS = (4, 10)  # MiB that each level may have
TOKENS = 16
CHAIN = 8  # blocks of a sequence
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("kv", 512 * KIB)]),
    AttentionLayerConfig(
        1,
        [BufferConfig("key", 192 * KIB), BufferConfig("value", 64 * KIB)],
        sliding_window_size=2 * TOKENS,
        num_sink_tokens=TOKENS,
    ),
]
Bytes = NDArray[np.uint8]
State = tuple[object, ...]

CHAINS, FIRST, COUNT = st.integers(0, 2), st.integers(0, 3), st.integers(1, 8)
PICK, GROUP = st.integers(0, 63), st.sampled_from([0, 1])


class StepError(Exception):
    """A step of the model that failed: its blocks never held what they should."""


@dataclass(eq=False)
class Step:
    """Work of the engine that was submitted and is not done."""

    run: Callable[[bool], None]
    fences: Sequence[Event] = ()
    ready: HostEvent = field(default_factory=HostEvent)
    may_fail: bool = False


class BlockModel(RuleBasedStateMachine):
    """What is found has the bytes of its key, and nothing is lost but by eviction.

    Steps that are submitted and not done keep all copies behind them in flight.
    """

    tiers: Tiers
    hot = True
    """Whether the first level is the hot one; otherwise the engine has pages of its own."""

    def __init__(self) -> None:
        super().__init__()
        least, most = (quota * MIB for quota in QUOTAS)
        levels = [
            GpuCacheTierConfig(least, most),
            HostCacheTierConfig(least, most),
            DiskCacheTierConfig(least, str(self.tiers.folder), most),
        ]
        config = KVCacheManagerConfig(TOKENS, levels[not self.hot :], LAYERS)
        self.stack = contextlib.ExitStack()
        self.storage = self.stack.enter_context(TierStorage(config, device="cpu"))
        self.cache: BlockCache[int] = BlockCache(
            self.storage, engine=self.engine(), max_events=100_000
        )
        self.layouts = self.storage.plan.groups
        self.contents: dict[tuple[int, int], Bytes] = {}
        self.leases: list[BlockLease[int]] = []
        self.reservations: list[tuple[BlockReservation[int], list[int]]] = []
        self.jobs: list[tuple[BlockJob[int], Callable[[], None]]] = []
        self.steps: list[Step] = []
        self.spoilt: set[Page] = set()
        """Pages that a failed step was to write."""
        self.kept: set[int] = set()
        self.picture: dict[tuple[int, int], str] = {}
        """The level of each page of each key, as events tell it."""
        self.failing = False
        """Whether copies fail now, or have since nothing was in flight."""

    def engine(self) -> EnginePages | None:
        return None

    # ------------------------------------------------------------------------------ the model

    def keys(self, chain: int, first: int, count: int) -> list[int]:
        return list(range(chain * CHAIN, (chain + 1) * CHAIN))[first : first + count]

    def content(self, key: int, group: int) -> Bytes:
        if (key, group) not in self.contents:
            nbytes = self.layouts[group].page_bytes
            self.contents[key, group] = self.tiers.content(key * 2 + group, nbytes)
        return self.contents[key, group]

    def slot(self, group: int, slot: int) -> list[tuple[int, Bytes]]:
        """Give the pieces of a slot of the first level, each with its place in the page."""
        memory = self.storage.levels[0].groups[group].memory
        return [
            (offset, self.tiers._slot(cast(MemoryPool, pool), slot))
            for pool, offset in zip(memory.pools, memory.offsets, strict=True)
        ]

    def write(self, key: int, page: Page, slot: int) -> None:
        content = self.content(key, page.group)
        for offset, piece in self.slot(page.group, slot):
            piece[:] = content[offset : offset + len(piece)]

    def scribble(self, group: int, slot: int) -> None:
        for _, piece in self.slot(group, slot):
            piece[:] = 0xEE

    def assert_holds(self, key: int, group: int, slot: int) -> None:
        content = self.content(key, group)
        for offset, piece in self.slot(group, slot):
            same = np.array_equal(piece, content[offset : offset + len(piece)])
            assert same, f"block {key}, group {group}: wrong bytes"

    def usable(self, keys: Sequence[int]) -> int:
        """Count the leading blocks that can be used, the long way."""
        rows = []
        for key in keys:
            block = self.cache._index.blocks.get(key)
            if block is None:
                break
            rows.append([page is not None and not failed(page) for page in block.pages])
        count = len(rows)
        while count and not all(
            rows[n][group] or n in self.hidden(group, count)
            for group in range(len(self.layouts))
            for n in range(count)
        ):
            count -= 1
        return count

    def hidden(self, group: int, count: int) -> range:
        return range(*self.layouts[group].stale_blocks(count * TOKENS, TOKENS))

    def state(self) -> State:
        """Everything that a refusal must leave as it was."""
        return (
            {key: self.places(block.pages) for key, block in self.cache._index.blocks.items()},
            set(self.cache._reserved),
            [
                (level.quota, self.places(policy.victims()), group.slots.in_use)
                for level in self.storage.levels
                for group, policy in zip(level.groups, level.policies, strict=True)
            ],
        )

    def places(self, pages: Iterable[Page | None]) -> list[object]:
        return [p and (p, p.level, p.slot, p.leases, p.kept, p.priority) for p in pages]

    @property
    def certain(self) -> bool:
        """Whether nothing is known to fail, or may still."""
        return not (self.failing or self.steps or any(p.lost for p in self.spoilt if not p.freed))

    @contextlib.contextmanager
    def refusing(self, *errors: type[Exception]) -> Iterator[None]:
        """Let a call be refused, with nothing changed."""
        certain = self.certain
        before = self.state() if certain else ()
        try:
            yield
        except errors:
            assert not certain or self.state() == before, "a refusal changed something"
        except (OSError, DiskOOMError):
            if not self.failing:
                raise

    # ------------------------------------------------------------------------- what is in flight

    def later(self, run: Callable[[bool], None], fences: Sequence[Event] = ()) -> Step:
        self.steps.append(Step(run, fences))
        return self.steps[-1]

    def do(self, step: Step, *, fails: bool = False) -> None:
        """Do a step, once nothing uses what it writes."""
        for fence in step.fences:
            fence.wait_finished()
        fails &= step.may_fail
        step.run(fails)
        step.ready.set(StepError("a step failed") if fails else None)

    def unblock(self) -> None:
        """Let everything go on that waits for the engine."""
        while self.steps:
            self.do(self.steps.pop(0))

    def quiesce(self) -> None:
        """Wait until nothing is in flight, and let the cache know."""
        self.unblock()
        for job, done in self.jobs:
            with contextlib.suppress(StepError, OSError, DiskOOMError):
                job.wait(20)
            assert job.done
            done()
        self.jobs.clear()
        for queue in self.storage._mover._moving.values():
            for moving in queue:
                moving.event.wait_finished()
        self.storage.settle()
        for key in list(self.cache):
            with self.storage.lock:
                self.cache._index.readable(key)
        self.spoilt = {page for page in self.spoilt if not page.freed}

    def came(self, held: BlockLease[int] | BlockReservation[int]) -> bool:
        """Wait for pages; tell whether they came, as they must unless something may have failed."""
        try:
            held.wait()
        except (StepError, OSError, DiskOOMError):
            if not (self.failing or self.spoilt.intersection(held._pages())):
                raise
            return False
        return True

    def verify(self, lease: BlockLease[int]) -> None:
        """Compare every byte of blocks that are held."""
        self.unblock()
        pages = lease._pages()
        if not self.came(lease):
            return
        assert not self.spoilt.intersection(pages), "a block was served that was never computed"
        for group in range(len(self.layouts)):
            for key, slot in zip(lease.keys, lease.slots(group).tolist(), strict=True):
                if slot >= 0:
                    self.assert_holds(key, group, slot)

    # ------------------------------------------------------------------------------- invariants

    @invariant()
    def books_balance(self) -> None:
        storage, blocks = self.storage, self.cache._index.blocks
        self.cache._check()
        assert storage.latch.reason is None
        held = {page for lease in self.leases for page in lease._pages()}
        held.update(page for fresh, _ in self.reservations for page in fresh._pages())
        for group in range(len(self.layouts)):
            assert storage.leased(group) == sum(page.group == group for page in held)
        found = {page for block in blocks.values() for page in block.pages if page is not None}
        assert all(page.leases for page in held)
        assert not any(page.leases for page in found - held)
        for level in storage.levels:
            for group, at in enumerate(level.groups):
                live = [p.slot for p in found | held if (p.level, p.group) == (level.index, group)]
                assert sorted(live) == sorted(at.slots.live_above(0).tolist()), "slots leaked"

    @invariant()
    def blocks_are_whole(self) -> None:
        for key, block in self.cache._index.blocks.items():
            assert block.key == key
            assert block.pages[0] is not None, f"{block} lacks what no window lets it lack"
            for page in block.pages:
                assert page is None or page.owner is block
        names = {key for fresh, _ in self.reservations for key in fresh.keys}
        assert self.cache._reserved == names

    @invariant()
    def kept_blocks_stay(self) -> None:
        if self.failing or self.spoilt:
            self.kept.intersection_update(self.cache)  # they may have been lost
        else:
            assert self.kept <= self.cache._index.blocks.keys()

    @invariant()
    def events_tell_what_happened(self) -> None:
        for event in self.cache.take_events():
            for key in event.keys:
                place = key, event.group
                if event.kind == "removed":
                    assert self.picture.pop(place) == event.source
                    continue
                assert self.picture.get(place) == event.source, f"{event} of {place}"
                assert event.level is not None
                self.picture[place] = event.level
        assert self.picture == {
            (key, page.group): self.storage.levels[page.level].name
            for key, block in self.cache._index.blocks.items()
            for page in block.pages
            if page is not None
        }

    def teardown(self) -> None:
        try:
            self.quiesce()
            for lease in self.leases:
                self.verify(lease)
                lease.release()
            for fresh, _ in self.reservations:
                fresh.cancel()
            self.leases.clear()
            self.reservations.clear()
            self.quiesce()
            self.books_balance()
            self.events_tell_what_happened()
            if not self.failing:
                for key, block in self.cache._index.blocks.items():
                    for page in block.pages:
                        if page is not None:
                            word = key * 2 + page.group
                            assert self.tiers.intact(self.storage, page, word), page
            self.cache.drop(list(self.cache))
            assert [level.used for level in self.storage.stats().levels.values()] == [0] * len(
                self.storage.levels
            )
            self.events_tell_what_happened()
        finally:
            with contextlib.suppress(Exception):
                self.unblock()
            self.stack.close()


def check(machine: type[BlockModel], tiers: Tiers) -> None:
    run_state_machine_as_test(
        type(machine.__name__, (machine,), {"tiers": tiers}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )
