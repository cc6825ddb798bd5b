"""Blocks that outlive the process: what comes back, what must not, and that its bytes are right."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hostmem import HostEvent, ResourceBusyError
from kvtier import (
    AttentionLayerConfig,
    BlockCache,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
    chain_keys,
)
from kvtier.testing import FakeEngine
from kvtier.transfer.memory import DiskPool

T = 4  # tokens of a block
KIB = 1 << 10
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", 64 * KIB), BufferConfig("value", 64 * KIB)]),
    AttentionLayerConfig(1, [BufferConfig("kv", 128 * KIB)], sliding_window_size=6),
]
ONE = LAYERS[:1]


def config(
    folder: Path, layers: Sequence[AttentionLayerConfig] = ONE, **options: object
) -> KVCacheManagerConfig:
    """Describe levels of 16 hot pages, 16 in host memory and 64 on disk, of each group."""
    unit = len(layers) * 2
    options = {"persist": True, **options}
    tiers = [
        GpuCacheTierConfig(f"{unit}MiB", f"{unit}MiB"),
        HostCacheTierConfig(f"{unit}MiB", f"{unit}MiB"),
        DiskCacheTierConfig(f"{4 * unit}MiB", folder, f"{4 * unit}MiB", **options),  # type: ignore[arg-type]
    ]
    return KVCacheManagerConfig(T, tiers, layers)


class Model:
    """A cache, and an engine that computes and verifies what is in it."""

    def __init__(self, config: KVCacheManagerConfig, max_events: int = 0) -> None:
        with contextlib.ExitStack() as undo:
            self.storage = undo.enter_context(TierStorage(config, device="cpu"))
            self.engine = undo.enter_context(FakeEngine.over(self.storage))
            self.cache: BlockCache[bytes] = BlockCache(self.storage, max_events=max_events)
            self._undo = undo.pop_all()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def serve(self, prompt: int, blocks: int = 4) -> int:
        """Verify the leading blocks that are there, and compute the others; how many there were."""
        tokens = [prompt * 1000 + n for n in range(blocks * T)]
        keys = chain_keys(tokens, T)
        groups = range(len(self.storage.plan.groups))
        with self.cache.acquire(keys) as lease:
            lease.wait()
            found = len(lease)
            if found:
                pages = [lease.slots(group) for group in groups]
                shown = [page.min() >= 0 for page in pages]
                for first in range(found):  # what the window shows, and all of the other groups
                    some = [page[first : first + 1] for page in pages]
                    self.engine.verify(tokens[: (first + 1) * T], some, first_block=first)
                assert shown[0]
            if found < blocks:
                with self.cache.reserve([None] * (blocks - found)) as fresh:
                    fresh.wait()
                    pages = [fresh.slots(group) for group in groups]
                    self.engine.write(
                        tokens, pages, first_block=found, start=found * T
                    ).synchronize()
                    fresh.commit(keys=keys[found:])  # some may be there, behind a gap
        return found


@pytest.mark.parametrize("layers", [ONE, LAYERS], ids=["one", "windows"])
@pytest.mark.parametrize("compression", [None, "blosc2"])
def test_what_is_on_disk_comes_back_with_its_bytes(
    tmp_path: Path, layers: Sequence[AttentionLayerConfig], compression: str | None
) -> None:
    what = config(tmp_path, layers, compression=compression)
    with Model(what) as model:
        for prompt in range(20):
            assert model.serve(prompt) == 0
        held = model.storage.stats().levels["disk"].used
    with Model(what, max_events=1000) as model:
        assert model.storage.stats().levels["disk"].used == held
        assert {event.kind for event in model.cache.take_events()} == {"stored"}
        found = [model.serve(prompt) for prompt in range(20)]
        assert found[:8] == [4] * 8
        model.storage._check()
        assert model.cache.lost == 0


def test_levels_are_told_in_their_order_whichever_was_used_first(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        for prompt in range(12):
            model.serve(prompt)
    with Model(config(tmp_path)) as model:
        for prompt in range(12):
            model.serve(prompt)
        assert list(model.storage.stats().activity.levels) == ["gpu", "host", "disk"]


def test_without_persist_nothing_comes_back(tmp_path: Path) -> None:
    for _ in range(2):
        with Model(config(tmp_path, persist=False)) as model:
            assert not model.storage.persistent
            assert [model.serve(prompt) for prompt in range(12)] == [0] * 12


def test_blocks_come_back_in_the_order_in_which_they_went_down(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        for prompt in range(27):  # more than the disk holds: the first slots are written again
            model.serve(prompt)
        before = [page.content for page in model.storage.levels[2].policies[0].victims()]
    with Model(config(tmp_path)) as model:
        after = [page.content for page in model.storage.levels[2].policies[0].victims()]
    assert after == before


def test_blocks_that_are_dropped_do_not_come_back_wherever_they_are(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        for prompt in range(16):
            model.serve(prompt)  # 0 to 7 are on disk by now
        assert model.serve(1) == 4  # is hot again, and its bytes on disk are left behind
        for prompt in (0, 1):
            keys = chain_keys([prompt * 1000 + n for n in range(4 * T)], T)
            assert model.cache.drop(keys) == 4
    with Model(config(tmp_path)) as model:
        assert [model.serve(prompt) for prompt in range(4)] == [0, 0, 4, 4]


def test_only_the_last_of_several_copies_on_disk_counts(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        for prompt in range(16):
            model.serve(prompt)
        for prompt in (0, *range(20, 28)):  # up, and down again into other slots
            model.serve(prompt)
        keys = chain_keys(list(range(4 * T)), T)
        assert [model.cache._index.pages(key)[0].level for key in keys] == [2] * 4
        model.cache.drop(keys)
    with Model(config(tmp_path)) as model:
        assert model.serve(0) == 0


def test_pages_that_moved_up_come_back_too_while_their_slot_is_free(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        for prompt in range(16):
            model.serve(prompt)
        assert model.serve(0) == 4  # hot; what made room for it went into other slots
    with Model(config(tmp_path)) as model:
        assert model.serve(0) == 4


def test_a_block_that_lacks_a_page_does_not_come_back(tmp_path: Path) -> None:
    layers = [ONE[0], AttentionLayerConfig(1, [BufferConfig("kv", 64 * KIB)], 6)]
    what = config(tmp_path, layers)
    with Model(what) as model:
        for prompt in range(20):
            model.serve(prompt)
        keys = chain_keys(list(range(4 * T)), T)
        pages = [model.cache._index.pages(key) for key in keys]
        assert all(page.level == 2 for some in pages for page in some)
        (pool,) = model.storage.levels[2].groups[0].memory.pools
        assert isinstance(pool, DiskPool)
        model.storage._records.forget([pages[2][0]])  # type: ignore[union-attr]
    with Model(what) as model:
        assert model.cache.match(keys) == 2
        assert keys[2] not in model.cache
        assert keys[3] in model.cache
        model.storage._check()
        assert model.serve(0) == 2


def test_other_layers_are_refused(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        model.serve(0)
    other = [AttentionLayerConfig(0, [BufferConfig("value", 64 * KIB), *ONE[0].buffers[:1]])]
    with pytest.raises(ValueError, match="layout"):
        TierStorage(config(tmp_path, other), device="cpu")


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with Model(config(tmp_path)), pytest.raises(ResourceBusyError):
        TierStorage(config(tmp_path), device="cpu")


def test_keys_that_cannot_be_stored_are_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    with TierStorage(config(tmp_path), device="cpu") as storage:
        cache: BlockCache[object] = BlockCache(storage)
        with pytest.raises(TypeError, match="tuple"):
            cache.reserve(["fine", ("not", "fine")])
        with pytest.raises(ValueError, match="64"):
            cache.reserve([b"x" * 64])
        with cache.reserve(["fine", None]) as fresh:
            with pytest.raises(TypeError, match="float"):
                fresh.commit(keys=["fine", 0.5])
            fresh.commit(keys=["fine", 5])
        assert sorted(map(str, cache)) == ["5", "fine"]
        storage._check()


def test_what_a_failed_step_should_have_computed_does_not_come_back(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        failed = HostEvent()
        keys = chain_keys(list(range(4 * T)), T)
        with model.cache.reserve(keys) as fresh:
            fresh.commit(failed)
        for prompt in range(1, 5):  # sends them down, as far as they come
            with model.cache.reserve(chain_keys([prompt * 1000 + n for n in range(16)], T)) as some:
                if prompt == 2:
                    failed.set(OSError("the kernel failed"))
                some.wait()
                some.commit()
    with Model(config(tmp_path)) as model:
        assert model.serve(0) == 0


def serve_until_killed(folder: str, seed: int) -> None:
    """Be the process that is killed."""
    random.seed(seed)
    with Model(config(Path(folder), LAYERS)) as model:
        while True:
            model.serve(random.randrange(30), random.randint(2, 5))
            os.write(1, b".")


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_leaves_right_bytes_or_none(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    code = f"from {__name__} import serve_until_killed as s; s({str(tmp_path)!r}, {{}})"
    found = []
    for n in range(3):
        command = [sys.executable, "-c", code.format(seed * 100 + n)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(chance.randint(60, 200))  # in the middle of one or another write
            process.send_signal(signal.SIGKILL)
        with Model(config(tmp_path, LAYERS)) as model:
            found.append(sum(model.serve(prompt, 5) for prompt in range(30)))
            model.storage._check()
            assert model.cache.lost == 0  # no record names bytes that were not there
    assert sum(found) > 0


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])  # where the killed process finds this module


def test_a_dropped_block_does_not_come_back_though_it_was_computed_again(tmp_path: Path) -> None:
    with Model(config(tmp_path)) as model:
        for prompt in range(16):
            model.serve(prompt)  # 0 to 7 are on disk by now
        keys = chain_keys(list(range(4 * T)), T)
        with model.cache.reserve([None] * 4) as fresh:
            fresh.wait()
            pages = [fresh.slots()]
            model.engine.write(list(range(4 * T)), pages).synchronize()
            fresh.commit(keys=keys)  # takes the place of the pages on disk
    with Model(config(tmp_path)) as model:
        assert model.serve(0) == 4  # whose bytes are there still
        model.cache.drop(keys)
    with Model(config(tmp_path)) as model:
        assert model.serve(0) == 0
        assert model.serve(1) == 4
        with model.cache.reserve([None] * 4) as fresh:
            fresh.commit(keys=chain_keys([1000 + n for n in range(4 * T)], T))
        model.cache.drop(chain_keys([1000 + n for n in range(4 * T)], T))
    with Model(config(tmp_path)) as model:
        assert model.serve(1) == 0
