"""Pages of several parts in a file of slots, without SGLang; and which SGLang is refused."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

import kvtier.integrations.sglang as plugin
from hostmem.testing import FaultPlan
from kvtier.integrations.sglang.direct_memory import DirectMemory
from kvtier.integrations.sglang.page_store import PageShape, PageStore

if TYPE_CHECKING:
    from tests.threads import Spawn

PARTS = (8192, 12288)  # two and three slots of 4 KiB
Build = Callable[..., PageStore]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made: list[PageStore] = []

    def build(pages: int = 8, scope: bytes = b"model", name: str | None = None) -> PageStore:
        shape = PageShape(PARTS)
        made.append(PageStore(str(tmp_path), shape, pages * shape.nbytes, scope=scope, name=name))
        return made[-1]

    yield build
    for store in made:
        store.close()


def memory(pages: int, seed: int | None = None) -> tuple[list[NDArray[np.uint8]], list[list[int]]]:
    """Memory of so many pages, their parts apart, and the addresses of the parts."""
    buffers = [np.zeros(pages * part + 4096, np.uint8) for part in PARTS]
    starts = [-b.__array_interface__["data"][0] % 4096 for b in buffers]
    parts = [
        b[start : start + pages * size]
        for b, start, size in zip(buffers, starts, PARTS, strict=True)
    ]
    if seed is not None:
        random = np.random.default_rng(seed)
        for part in parts:
            part[:] = random.integers(0, 256, len(part), np.uint8)
    bases = [part.__array_interface__["data"][0] for part in parts]
    places = [
        [base + page * size for base, size in zip(bases, PARTS, strict=True)]
        for page in range(pages)
    ]
    return parts, places


@pytest.mark.parametrize(
    ("parts", "piece", "pieces"),
    [((4096,), 4096, 1), ((12288, 12288), 12288, 2), ((12288, 18432), 6144, 5), ((6, 4), 2, 5)],
)
def test_slots_are_the_largest_pieces_that_fit_all_parts(
    parts: tuple[int, ...], piece: int, pieces: int
) -> None:
    shape = PageShape(parts)
    assert (shape.piece, shape.pieces, shape.nbytes) == (piece, pieces, sum(parts))


def test_places_of_pieces_follow_those_of_the_parts() -> None:
    assert PageShape((4, 6)).places([100, 200]) == [100, 102, 200, 202, 204]


@pytest.mark.parametrize("parts", [(), (0, 4096), (1025, 1024)])
def test_pages_that_a_file_of_slots_cannot_hold_are_refused(parts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the pool"):
        PageShape(parts).check("the pool")


def test_parts_of_other_sizes_come_back_to_their_places(build: Build) -> None:
    store = build()
    source, places = memory(8, seed=1)
    target, others = memory(8)
    keys = [str(n) for n in range(8)]
    assert store.write(keys, places) == [True] * 8
    assert store.leading([*keys, "8"]) == 8
    assert store.read(keys, others) == [True] * 8
    assert all((a == b).all() for a, b in zip(source, target, strict=True))


def test_no_memory_for_a_copy_leaves_nobody_waiting(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = build()
    _, places = memory(2, seed=1)
    shifted = [[place + 1 for place in places[0]]]  # not where direct I/O can be from

    def no_memory(*_: object) -> None:
        raise MemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr("kvtier.integrations.sglang.direct_memory.mmap.mmap", no_memory)
        with pytest.raises(MemoryError, match="no"):
            store.write(["a"], shifted)
    assert store.used == 0
    store.clear()
    assert store.write(["a"], shifted) == [True]


def test_a_page_that_lost_one_piece_is_a_miss_and_comes_whole_again(build: Build) -> None:
    store = build()
    source, places = memory(2, seed=1)
    store.write(["a", "b"], places)
    with FaultPlan() as plan:
        # One request of ten slots, then slot by slot: the fourth of these is of the first page.
        plan.fail("preadv", 5, at=1)
        plan.fail("preadv", 5, at=5)
        read = store.read(["a", "b"], memory(2)[1])
    assert read.count(False) == 1
    lost = ["a", "b"][read.index(False)]
    assert store.leading([lost]) == 0
    before = store.stats().bytes_written
    assert store.write(["a", "b"], places) == [True, True]
    assert store.stats().bytes_written == before + 4096  # that piece alone
    target, others = memory(1)
    assert store.read([lost], others) == [True]
    at = 0 if lost == "a" else 1
    assert (target[1] == source[1][at * 12288 : (at + 1) * 12288]).all()


def test_evicted_pages_are_not_remembered(build: Build) -> None:
    store = build(pages=2)
    _, places = memory(6, seed=1)
    for n in range(6):
        assert store.write([str(n)], places[n : n + 1]) == [True]
    assert store.leading(["5"]) == 1
    assert store.used == 2 * store.shape.pieces
    store.clear()
    assert [store.leading([str(n)]) for n in range(6)] == [0] * 6
    assert store.write(["a", "b"], places[:2]) == [True, True]


def test_a_clear_waits_for_what_is_being_written(build: Build, spawn: Spawn) -> None:
    store = build()
    _, places = memory(1, seed=1)
    with FaultPlan() as plan:
        hold = plan.hold("pwritev")
        written = spawn(store.write, ["a"], places)
        hold.wait_reached()
        cleared = spawn(store.clear)
        hold.release()
        written.result()
        cleared.result()
    assert store.leading(["a"]) == 0


def test_a_close_ends_what_was_begun_and_refuses_the_rest(build: Build, spawn: Spawn) -> None:
    store = build(name="x.slots")
    _, places = memory(1, seed=1)
    with FaultPlan() as plan:
        hold = plan.hold("pwritev")
        written = spawn(store.write, ["a"], places)
        hold.wait_reached()
        closed = spawn(store.close)
        hold.release()
        closed.result()
        written.result()
    assert store.write(["b"], places) == [False]
    assert store.read(["a"], places) == [False]
    assert build(name="x.slots").leading(["a"]) == 1


def test_another_scope_is_another_file(build: Build) -> None:
    build(name="x.slots").close()
    with pytest.raises(ValueError, match="layout"):
        build(name="x.slots", scope=b"other model")


@pytest.mark.parametrize("shift", [0, 8])
def test_memory_that_direct_transfers_cannot_use_is_copied(shift: int) -> None:
    parts, places = memory(2)
    shifted = [places[0][0] + shift]
    direct = DirectMemory(shifted, 4096)
    assert (direct.places == shifted) == (shift == 0)
    parts[0][shift : shift + 4096] = 7
    direct.fill()
    parts[0][:] = 0
    direct.empty()
    assert int(parts[0].sum()) == (7 * 4096 if shift else 0)


# ------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize("name", [n for n in plugin.__all__ if n != "KNOWN_VERSIONS"])
def test_nothing_is_had_with_another_sglang(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("kvtier.integrations.versions.version", lambda _: "0.5.24")
    with pytest.raises(ImportError, match=r"knows sglang 0\.5\.23\.x, and sglang 0\.5\.24 is inst"):
        getattr(plugin, name)


def test_an_sglang_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("kvtier.integrations.versions.version", version)
    with pytest.raises(ImportError, match=r"sglang 0\.5\.23\.x, which is not installed"):
        _ = plugin.install


def test_a_name_that_there_is_not_is_no_import_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Storage'"):
        _ = plugin.Storage


CHILD = """
import sys
import kvtier.integrations.sglang
from kvtier.integrations.sglang import direct_memory, page_store
assert not {"vllm", "torch", "lmcache", "sglang"} & set(sys.modules)
"""


def test_imports_bring_no_engine() -> None:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
