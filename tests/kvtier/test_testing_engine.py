"""The fake engine: what it writes, that it finds every wrong byte, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostmem import (
    ClosedError,
    CpuDevice,
    CudaDevice,
    CuOOMError,
    Device,
    HostEvent,
    RegistrationError,
    resolve_device,
)
from hostmem._sys.driver import Result
from hostmem.testing import FakeDriver, FaultPlan
from kvtier import AttentionLayerConfig, BufferConfig, GpuCacheTierConfig, KVCacheManagerConfig
from kvtier.plan import CachePlan
from kvtier.testing import FakeEngine

if TYPE_CHECKING:
    from tests.kvtier.conftest import Gate, Tiers
    from tests.threads import Spawn

TOKENS = 16
# Whole words a token; odd bytes, the last token with a rest; fewer bytes than tokens.
SIZES = {"words": 1024, "rest": 1000, "one-byte": 16, "scraps": 10}
Bytes = NDArray[np.uint8]


def plan(*sizes: int, layers: int = 2, windowed: int = 0) -> CachePlan:
    """Plan layers with a key and a value of each size, the last ones with a window."""
    buffers = [BufferConfig(f"{role}{size}", size) for size in sizes for role in ("k", "v")]
    found = [AttentionLayerConfig(n, buffers) for n in range(layers)]
    found += [AttentionLayerConfig(layers + n, buffers, 64) for n in range(windowed)]
    return KVCacheManagerConfig(TOKENS, [GpuCacheTierConfig("64MiB", "64MiB")], found).plan()


class Bench:
    """An engine with pages of its own, and its bytes."""

    def __init__(self, engine: FakeEngine, raw: Callable[[int, int], Bytes]) -> None:
        self.engine = engine
        self._raw = raw

    def bytes(self, layer: int, role: str, page: int, size: int) -> Bytes:
        base, stride = self.engine.buffers[layer, role]
        return self._raw(base + page * stride, size)


@pytest.fixture(params=["cpu", "gpu-like"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return cpu if request.param == "cpu" else CudaDevice(0, driver=FakeDriver())


@pytest.fixture
def make(device: Device, tiers: Tiers) -> Iterator[Callable[..., Bench]]:
    with ExitStack() as stack:

        def build(what: CachePlan, n_pages: int = 8, **options: Any) -> Bench:
            engine = FakeEngine.with_pages(what, n_pages, device=device, **options)
            stack.callback(engine.close)
            return Bench(engine, tiers.raw)

        yield build


def sequence(n: int, seed: int = 1) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 50_000, n)


# ------------------------------------------------------------------------------ what it writes


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("n", [TOKENS, 3 * TOKENS, 2 * TOKENS + 5, 1])
def test_what_was_computed_is_known_again(make: Callable[..., Bench], size: int, n: int) -> None:
    engine = make(plan(size)).engine
    pages = [5, 0, 7][: math.ceil(n / TOKENS)]
    engine.scrub(pages)
    engine.write(sequence(n), pages).synchronize()
    engine.verify(sequence(n), pages)


def test_a_small_staging_buffer_makes_the_same_bytes(make: Callable[..., Bench]) -> None:
    what, n = plan(1024, 1000, windowed=1), 5 * TOKENS - 3
    pages = [[4, 2, 0, 1, 3], [0, -1, 2, 3, 4]]
    found = []
    for staging in (1, "8MiB"):
        bench = make(what, staging=staging, padding=24)
        bench.engine.scrub(np.arange(8))
        bench.engine.write(sequence(n), pages).synchronize()
        bench.engine.verify(sequence(n), pages)
        base, stride = bench.engine.buffers[2, "v1000"]
        found.append(bench._raw(base, 5 * stride).copy())
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_write_touches_the_bytes_of_its_tokens_alone(
    make: Callable[..., Bench], size: int
) -> None:
    bench = make(plan(size), padding=8)
    bench.engine.scrub([0, 1, 2])
    bench.engine.write(sequence(TOKENS + 5), [-1, 1], start=TOKENS + 2).synchronize()
    each = size // TOKENS
    for layer, role in bench.engine.buffers:
        base, stride = bench.engine.buffers[layer, role]
        assert stride == size + 8
        everything = bench._raw(base, 3 * stride)
        written = np.flatnonzero(everything != 0xA5)
        assert ((written % stride >= size) | (written >= stride + 2 * each)).all()
        assert ((written % stride >= size) | (written < stride + 5 * each)).all()
        # Nothing between pages was touched: it is as the kernel or driver gave it.
        assert not everything.reshape(3, stride)[:, size:].any()


def test_tokens_that_are_appended_complete_the_block(make: Callable[..., Bench]) -> None:
    engine = make(plan(1000)).engine
    tokens, engine_pages = sequence(2 * TOKENS), [3, 6]
    engine.scrub(engine_pages)
    for n in range(1, len(tokens) + 1):
        pages = engine_pages[: math.ceil(n / TOKENS)]
        engine.write(tokens[:n], pages, start=n - 1).synchronize()
        engine.verify(tokens[:n], pages)


def test_later_blocks_may_be_written_and_verified_alone(make: Callable[..., Bench]) -> None:
    engine = make(plan(1024)).engine
    tokens = sequence(4 * TOKENS - 3)
    engine.write(tokens, [0, 1, 2, 3]).synchronize()
    engine.scrub([1, 3])
    engine.write(tokens, [5, 6], first_block=2).synchronize()
    engine.verify(tokens, [2, 6], first_block=2)
    wrong = engine.find_wrong(tokens, [2, 3], first_block=2)
    assert wrong is not None
    assert (wrong.block, wrong.token, wrong.page) == (3, 3 * TOKENS, 3)
    assert wrong.blocks == (3,)
    assert 0.95 < wrong.nbytes / (4 * (1024 - 3 * 64)) <= 1  # some bytes are alike by chance


def test_each_pool_group_has_pages_of_its_own_and_may_lack_some(
    make: Callable[..., Bench],
) -> None:
    engine = make(plan(1024, windowed=2)).engine
    tokens = sequence(3 * TOKENS)
    pages = np.array([[0, 1, 2], [-1, 7, 0]], np.int32)
    engine.scrub(np.arange(8))
    engine.write(tokens, pages).synchronize()
    engine.verify(tokens, pages)
    pages[1] = [-1, 0, 7]
    wrong = engine.find_wrong(tokens, pages)
    assert wrong is not None
    assert (wrong.group, wrong.layer_id, wrong.block, wrong.page) == (1, 2, 1, 0)


@pytest.fixture(scope="module")
def gpu() -> Device:
    """Give a GPU that has been used: its driver keeps files open from then on."""
    device = resolve_device(0)
    FakeEngine.with_pages(plan(1024), 1, device=device, staging="4KiB").close()
    return device


@pytest.mark.gpu
def test_pages_in_the_memory_of_a_gpu(gpu: Device) -> None:
    what, tokens = plan(4096, 1000, windowed=1), sequence(5 * TOKENS + 7)
    pages = np.array([[5, 0, 3, 1, 7, 2], [-1, 6, 4, 2, 0, 1]])
    with FakeEngine.with_pages(what, 8, device=gpu, padding=24, staging="64KiB") as engine:
        engine.scrub(np.arange(8))
        engine.write(tokens[:70], pages[:, :5]).synchronize()
        ready = engine.write(tokens, pages, start=70)
        engine.verify(tokens, pages, after=[ready])
        pages[0, [1, 2]] = pages[0, [2, 1]]
        wrong = engine.find_wrong(tokens, pages)
        assert wrong is not None
        assert (wrong.block, wrong.blocks) == (1, (1, 2))
        assert wrong.origin == "that is token 32 of layer 0 'k4096'"


# ------------------------------------------------------------------------------- what it finds


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # it only reads addresses
@given(data=st.data())
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_changed_byte_is_found_and_named(
    tiers: Tiers, size: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 3 * TOKENS))
    each = size // TOKENS
    pages = [2, 0, 1][: math.ceil(n / TOKENS)]
    block = data.draw(st.integers(0, len(pages) - 1))
    full = n >= (block + 1) * TOKENS
    end = size if full else (n - block * TOKENS) * each
    if not end:
        return  # the block has no byte of these tokens yet
    layer, role = data.draw(st.sampled_from([(0, "k"), (0, "v"), (1, "k"), (1, "v")]))
    role, offset = f"{role}{size}", data.draw(st.integers(0, end - 1))
    with FakeEngine.with_pages(plan(size), 3, device="cpu") as engine:
        engine.write(sequence(n), pages).synchronize()
        base, stride = engine.buffers[layer, role]
        place = tiers.raw(base + pages[block] * stride + offset, 1)
        place ^= np.uint8(data.draw(st.integers(1, 255)))
        wrong = engine.find_wrong(sequence(n), pages)
        assert wrong is not None
        assert (wrong.block, wrong.page, wrong.group) == (block, pages[block], 0)
        assert (wrong.layer_id, wrong.role, wrong.offset) == (layer, role, offset)
        token = block * TOKENS + (min(offset // each, TOKENS - 1) if each else TOKENS - 1)
        assert wrong.token == token
        assert (wrong.nbytes, wrong.blocks) == (1, (block,))
        assert wrong.found == place[0] != wrong.expected


def test_what_is_left_at_the_end_of_a_block_is_of_the_last_token(
    make: Callable[..., Bench],
) -> None:
    bench = make(plan(1000))
    bench.engine.write(sequence(TOKENS), [0]).synchronize()
    bench.bytes(1, "k1000", 0, 1000)[-1] ^= 1
    wrong = bench.engine.find_wrong(sequence(TOKENS), [0])
    assert wrong is not None
    assert (wrong.token, wrong.offset) == (TOKENS - 1, 999)
    bench.engine.write(sequence(TOKENS), [0], start=TOKENS - 1).synchronize()
    bench.engine.verify(sequence(TOKENS), [0])


@pytest.mark.parametrize("size", [1024, 1000, 16 * 9])
def test_it_is_said_whose_bytes_are_there_instead(make: Callable[..., Bench], size: int) -> None:
    engine = make(plan(size)).engine
    engine.write(sequence(3 * TOKENS), [0, 1, 2]).synchronize()
    wrong = engine.find_wrong(sequence(3 * TOKENS), [0, 2, 1])
    assert wrong is not None
    assert wrong.origin == f"that is token 32 of layer 0 'k{size}'"


def test_bytes_behind_the_last_token_do_not_matter(make: Callable[..., Bench]) -> None:
    bench = make(plan(1024))
    bench.engine.write(sequence(TOKENS + 3), [0, 1]).synchronize()
    bench.bytes(1, "v1024", 1, 1024)[3 * 64 :] ^= 0xFF
    bench.engine.verify(sequence(TOKENS + 3), [0, 1])
    bench.engine.verify(sequence(TOKENS), [0])
    wrong = bench.engine.find_wrong(sequence(TOKENS + 4), [0, 1])
    assert wrong is not None
    assert (wrong.token, wrong.offset) == (TOKENS + 3, 3 * 64)  # nobody wrote it


def test_the_first_wrong_byte_is_that_of_the_first_block_layer_and_role(
    make: Callable[..., Bench],
) -> None:
    bench = make(plan(1024, 512))
    bench.engine.write(sequence(3 * TOKENS), [0, 1, 2]).synchronize()
    places = [(2, 0, "k1024", 0), (1, 1, "v512", 9), (1, 1, "k1024", 700), (1, 1, "k1024", 99)]
    for nbytes, (page, layer, role, offset) in enumerate(places, 1):
        bench.bytes(layer, role, page, 512 if "512" in role else 1024)[offset] ^= 1
        wrong = bench.engine.find_wrong(sequence(3 * TOKENS), [0, 1, 2])
        assert wrong is not None
        assert (wrong.page, wrong.layer_id, wrong.role, wrong.offset) == (page, layer, role, offset)
        assert (wrong.nbytes, wrong.blocks) == (nbytes, (2,) if nbytes == 1 else (1, 2))


def refused(bench: Bench, n: int, pages: list[int], **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        bench.engine.verify(sequence(n), pages, **options)
    return str(caught.value)


@pytest.fixture
def filled(make: Callable[..., Bench]) -> Bench:
    """Give pages 0 to 3 four blocks of one sequence."""
    bench = make(plan(1024))
    bench.engine.write(sequence(4 * TOKENS), [0, 1, 2, 3]).synchronize()
    return bench


def test_swapped_layers_are_found(filled: Bench) -> None:
    one, other = (filled.bytes(layer, "k1024", 1, 1024) for layer in (0, 1))
    one[:], other[:] = other.copy(), one.copy()
    said = refused(filled, 4 * TOKENS, [0, 1, 2, 3])
    assert "block 1 (page 1 of group 0), layer 0 'k1024', token 16: byte 0 is" in said
    assert "(that is token 16 of layer 1 'k1024')" in said


def test_swapped_roles_are_found(filled: Bench) -> None:
    one, other = (filled.bytes(1, role, 1, 1024) for role in ("k1024", "v1024"))
    one[:], other[:] = other.copy(), one.copy()
    said = refused(filled, 4 * TOKENS, [0, 1, 2, 3])
    assert "layer 1 'k1024'" in said
    assert "(that is token 16 of layer 1 'v1024')" in said


def test_swapped_blocks_are_found(filled: Bench) -> None:
    said = refused(filled, 4 * TOKENS, [0, 2, 1, 3])
    assert "block 1 (page 2" in said
    assert "(that is token 32 of layer 0 'k1024')" in said
    assert "in 2 blocks: 1, 2" in said


@pytest.mark.parametrize("by", [1, -1])
def test_a_block_moved_by_a_token_is_found(filled: Bench, by: int) -> None:
    for layer in (0, 1):
        for role in ("k1024", "v1024"):
            block = filled.bytes(layer, role, 2, 1024)
            block[:] = np.roll(block, 64 * by)
    said = refused(filled, 4 * TOKENS, [0, 1, 2, 3])
    assert "token 32: byte 0 is" in said
    assert f"(that is token {47 if by == 1 else 33} of layer 0 'k1024')" in said


def test_a_token_moved_by_a_byte_is_found(filled: Bench) -> None:
    token = filled.bytes(0, "k1024", 0, 1024)[64:128]
    token[:] = np.roll(token, 1)
    assert "token 1: byte" in refused(filled, 4 * TOKENS, [0, 1, 2, 3])


def test_stale_bytes_of_another_sequence_are_found(filled: Bench) -> None:
    tokens = sequence(2 * TOKENS)
    tokens[0] += 1  # the first token differs, and so does every byte of all that follow
    wrong = filled.engine.find_wrong(tokens, [0, 1])
    assert wrong is not None
    assert wrong.nbytes > 0.99 * 2 * 4 * 1024
    assert wrong.origin == ""


def test_a_different_later_token_leaves_those_before_it_alone(filled: Bench) -> None:
    tokens = sequence(2 * TOKENS)
    tokens[20] += 1
    wrong = filled.engine.find_wrong(tokens, [0, 1])
    assert wrong is not None
    assert (wrong.token, wrong.blocks) == (20, (1,))


def test_equal_tokens_in_another_order_are_other_ones(filled: Bench) -> None:
    tokens = sequence(2 * TOKENS)
    tokens[[3, 4]] = tokens[[4, 3]]
    wrong = filled.engine.find_wrong(tokens, [0, 1])
    assert wrong is not None
    assert (wrong.token, wrong.blocks) == (3, (0, 1))


def test_a_sequence_of_one_token_repeated_has_no_two_equal_blocks(
    make: Callable[..., Bench],
) -> None:
    engine = make(plan(1024)).engine
    tokens = np.zeros(2 * TOKENS, np.int64)
    engine.write(tokens, [0, 1]).synchronize()
    assert engine.find_wrong(tokens, [0, 0]) is not None


def test_another_tenants_block_is_found(filled: Bench) -> None:
    filled.engine.write(sequence(4 * TOKENS), [4, 5, 6, 7], salt=b"b").synchronize()
    filled.engine.verify(sequence(4 * TOKENS), [4, 5, 6, 7], salt=b"b")
    said = refused(filled, 4 * TOKENS, [0, 5, 2, 3])
    assert "block 1 (page 5 of group 0), layer 0 'k1024', token 16: byte" in said
    assert "in 1 blocks: 1" in said
    assert "block 0" in refused(filled, 4 * TOKENS, [0, 1, 2, 3], salt=b"b")


def test_pages_that_nobody_wrote_are_found_and_said_to_be_empty(filled: Bench) -> None:
    filled.engine.scrub([2])
    said = refused(filled, 4 * TOKENS, [0, 1, 2, 3])
    assert "token 32" in said
    assert "(each byte of the token is 0xa5)" in said


def test_a_copy_that_does_not_happen_is_no_match(
    filled: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging buffer holds what was written last, which must not stand for what is there."""
    filled.engine.write(sequence(TOKENS), [0]).synchronize()
    stream = filled.engine._stream
    monkeypatch.setattr(type(stream), "copy", lambda *_: None)
    wrong = filled.engine.find_wrong(sequence(TOKENS), [0])
    assert wrong is not None
    assert wrong.nbytes == 4 * 1024


# ------------------------------------------------------------------------------ asynchronous work


def test_a_write_is_behind_what_uses_the_pages_and_its_event_stands_for_it(
    cpu: CpuDevice, gate: Callable[[], Gate]
) -> None:
    with FakeEngine.with_pages(plan(1024), 2, device=cpu) as engine:
        before = gate()
        event = engine.write(sequence(TOKENS), [1], after=[before])
        before.wait_asked()
        assert not event.query()
        before.set(OSError("it belongs to others"))
        event.synchronize()
        engine.verify(sequence(TOKENS), [1])


def test_nobody_waits_where_all_fits_in_the_staging_buffer(
    cpu: CpuDevice, gate: Callable[[], Gate]
) -> None:
    """Neither for buffers of several sizes nor for several pool groups."""
    what, tokens = plan(1000, 512, windowed=1), sequence(2 * TOKENS + 3)
    with FakeEngine.with_pages(what, 3, device=cpu) as engine:
        before = gate()
        event = engine.write(tokens, [1, 2, 0], after=[before])
        assert not event.query()
        before.set()
        event.synchronize()
        engine.verify(tokens, [1, 2, 0])


def test_what_failed_to_bring_the_bytes_is_raised(cpu: CpuDevice) -> None:
    failed = HostEvent()
    failed.set(OSError("the disk is gone"))
    with FakeEngine.with_pages(plan(1024), 2, device=cpu) as engine:
        engine.write(sequence(TOKENS), [1]).synchronize()
        with pytest.raises(OSError, match="the disk is gone"):
            engine.verify(sequence(TOKENS), [1], after=[failed])


def test_several_threads_take_turns(make: Callable[..., Bench], spawn: Spawn) -> None:
    engine = make(plan(1024), staging=4096).engine

    def serve(me: int) -> None:
        for turn in range(10):
            tokens = sequence(2 * TOKENS, seed=100 * me + turn)
            engine.write(tokens, [2 * me, 2 * me + 1]).synchronize()
            engine.verify(tokens, [2 * me, 2 * me + 1])

    for running in [spawn(serve, me) for me in range(4)]:
        running.result()


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("pages", "odd"), [([8], 8), ([[0], [8]], 8), ([[-1], [-2]], -2)])
def test_a_page_that_there_is_not_is_refused(
    make: Callable[..., Bench], pages: Any, odd: int
) -> None:
    engine = make(plan(1024, windowed=1)).engine
    with pytest.raises(ValueError, match=rf"pages: {odd} of pool group \d, which has 8"):
        engine.write(sequence(TOKENS), pages)


def test_a_page_of_which_no_token_would_be_verified_is_refused(filled: Bench) -> None:
    with pytest.raises(ValueError, match="behind the last of 16 tokens"):
        filled.engine.verify(sequence(TOKENS), [0, 1])
    filled.engine.verify(sequence(TOKENS), [0, -1])


def test_buffers_that_are_not_the_plans_are_refused(cpu: CpuDevice) -> None:
    with pytest.raises(ValueError, match=r"\(0, 'v1024'\), \(7, 'k'\)"):
        FakeEngine(plan(1024, layers=1), {(0, "k1024"): (0, 1024), (7, "k"): (0, 9)}, 1, device=cpu)


def test_pages_that_overlap_are_refused(cpu: CpuDevice) -> None:
    places = {(0, "k1024"): (4096, 1024), (0, "v1024"): (65536, 1023)}
    with pytest.raises(ValueError, match=r"\(0, 'v1024'\) has a stride of 1023 B, below 1024 B"):
        FakeEngine(plan(1024, layers=1), places, 1, device=cpu)


def test_a_closed_engine_refuses(make: Callable[..., Bench]) -> None:
    engine = make(plan(1024)).engine
    engine.close()
    engine.close()
    for call in (engine.write, engine.verify):
        with pytest.raises(ClosedError):
            call(sequence(TOKENS), [0])
    with pytest.raises(ClosedError):
        engine.scrub([0])


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_engine_that_cannot_be_built_keeps_nothing(at: int) -> None:
    device = CudaDevice(0, driver=FakeDriver())
    with FaultPlan() as faults:
        faults.fail("cuMemCreate", Result.OUT_OF_MEMORY, at=at)
        faults.fail("cuMemHostRegister", Result.OUT_OF_MEMORY)
        with pytest.raises(CuOOMError if at < 5 else RegistrationError):
            FakeEngine.with_pages(plan(1024), 8, device=device)
    assert device.driver.memory_info(0)[0] == device.memory_total
