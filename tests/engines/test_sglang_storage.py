"""The disk level behind SGLang's own pools, factory, fault injector and controller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")

from hostmem import DiskOOMError, ResourceBusyError  # noqa: E402
from hostmem.testing import FaultPlan  # noqa: E402
from tests.engines.sglang_pools import import_sglang, mha_pool, storage_config  # noqa: E402

if TYPE_CHECKING:
    from tests.threads import Spawn, Until

hicache = import_sglang("sglang.srt.mem_cache.hicache_storage")
controllers = import_sglang("sglang.srt.managers.cache_controller")
factory = import_sglang("sglang.srt.mem_cache.storage.backend_factory")

from kvtier.integrations.sglang import KvtierHiCacheStorage  # noqa: E402

PAGE = 16  # tokens
KEYS = [f"{n:064x}" for n in range(16)]
Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Build storage as SGLang's controller does; closed at the end."""
    made: list[Any] = []

    def build(pools: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {
            "backend_name": "kvtier",
            "module_path": "kvtier.integrations.sglang",
            "class_name": "KvtierHiCacheStorage",
            "path": str(tmp_path),
            "quota": "4MiB",
        }
        ours = {k: options.pop(k) for k in list(options) if k not in vars(storage_config())}
        pools = {"kv": mha_pool()} if pools is None else pools
        given = storage_config(extra_config={**config, **ours}, **options)
        storage = factory.StorageBackendFactory.create_backend("dynamic", given, pools.get("kv"))
        made.append(storage)
        if "kv" in pools:
            storage.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, hicache.PoolName(name))
        storage.on_host_pools_registered()
        return storage

    yield build
    for storage in made:
        storage.close()


def fill(pool: Any, seed: int = 1) -> Any:
    """Give a pool random bytes; a copy of them."""
    random = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        flat = buffer.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=random))
    return [buffer.clone() for buffer in buffers(pool)]


def buffers(pool: Any) -> list[Any]:
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]


def wipe(pool: Any) -> None:
    for buffer in buffers(pool):
        buffer.zero_()


def same(pool: Any, before: Any) -> bool:
    return all(
        torch.equal(now.view(torch.uint8), was.view(torch.uint8))
        for now, was in zip(buffers(pool), before, strict=True)
    )


def page_bytes(pool: Any, page: int) -> bytes:
    data: bytes = pool.get_data_page(page * PAGE).view(torch.uint8).numpy().tobytes()
    return data


def indices(*pages: int) -> Any:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def damage(path: Path) -> None:
    """Change a byte of every slot of a file."""
    data = bytearray(path.read_bytes())
    for at in range(100, len(data), 4096):
        data[at] ^= 1
    path.write_bytes(data)


# ------------------------------------------------------------------- pages where they are in a pool


@pytest.mark.parametrize(
    ("layout", "v_dim"),
    [
        ("page_first", 64),
        ("page_first", 96),
        ("page_first_direct", 64),
        ("page_first_direct", 96),
        ("page_head", 64),
        ("layer_first", 64),
    ],
)
def test_pages_come_back_to_where_they_belong(build: Build, layout: str, v_dim: int) -> None:
    pool = mha_pool(layout, v_dim=v_dim)
    storage = build({"kv": pool}, quota="8MiB")
    before = fill(pool)
    every = indices(*range(16))
    assert storage.batch_set_v1(KEYS, every) == [True] * 16
    wipe(pool)
    order = [3, 0, 15, 7, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]
    assert storage.batch_get_v1([KEYS[n] for n in order], indices(*order)) == [True] * 16
    assert same(pool, before)
    assert storage.stats()["kv"].bytes_read == sum(b.nbytes for b in before)


def test_what_is_absent_is_a_miss_and_leading_pages_are_counted(build: Build) -> None:
    pool = mha_pool()
    storage = build({"kv": pool})
    fill(pool)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_exists([]) == 0
    assert storage.batch_set_v1([KEYS[0], KEYS[1], KEYS[3]], indices(0, 1, 3)) == [True] * 3
    assert storage.batch_exists(KEYS) == 2
    assert storage.exists(KEYS[3])
    assert storage.batch_get_v1(KEYS[:4], indices(4, 5, 6, 7)) == [True, True, False, True]
    assert page_bytes(pool, 7) == page_bytes(pool, 3)


def test_a_page_that_is_there_is_not_written_again(build: Build) -> None:
    pool = mha_pool()
    storage = build({"kv": pool})
    fill(pool)
    assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]
    written = storage.stats()["kv"].bytes_written
    assert storage.batch_set_v1(KEYS[:3], indices(0, 1, 2)) == [True] * 3
    assert storage.stats()["kv"].bytes_written == written * 3 // 2


def test_indices_that_are_too_few_move_nothing(build: Build) -> None:
    storage = build()
    assert storage.batch_set_v1(KEYS[:2], indices(0)) == [False, False]
    assert storage.batch_set_v1(KEYS[:1], indices(0)[:8]) == [False]
    assert storage.batch_get_v1(KEYS[:1], indices(0, 1)) == [False]
    assert storage.batch_exists(KEYS) == 0


@pytest.mark.parametrize("first", [-1, 15 * PAGE + 1, 16 * PAGE])
def test_indices_outside_the_pool_move_nothing(build: Build, first: int) -> None:
    storage = build()
    storage.batch_set_v1(KEYS[:1], indices(0))
    outside = torch.arange(first, first + PAGE)
    assert storage.batch_get_v1(KEYS[:1], outside) == [False]
    assert storage.batch_set_v1(KEYS[1:2], outside) == [False]
    assert storage.batch_get_v1(KEYS[:1], indices(15)) == [True]


def test_a_full_file_keeps_what_was_used_last(build: Build) -> None:
    pool = mha_pool(pages=64)
    storage = build({"kv": pool}, quota=8 * 24576)  # eight pages
    fill(pool)
    for n in range(16):
        assert storage.batch_set_v1([KEYS[n]], indices(n)) == [True]
    assert storage.exists(KEYS[15])
    there = [n for n in range(16) if storage.exists(KEYS[n])]
    assert len(there) <= 8
    wanted = {n: page_bytes(pool, n) for n in there}
    assert storage.batch_get_v1([KEYS[n] for n in there], indices(*range(20, 20 + len(there))))
    for place, n in enumerate(there, 20):
        assert page_bytes(pool, place) == wanted[n]


def test_more_than_fits_is_stored_as_far_as_it_goes(build: Build) -> None:
    pool = mha_pool()
    storage = build({"kv": pool}, quota=4 * 24576)
    fill(pool)
    done = storage.batch_set_v1(KEYS, indices(*range(16)))
    assert done == [True] * 4 + [False] * 12
    assert storage.batch_exists(KEYS) == 4


def test_clear_forgets_all_of_it(build: Build) -> None:
    pool = mha_pool()
    storage = build({"kv": pool})
    storage.batch_set_v1(KEYS, indices(*range(16)))
    assert storage.clear() is True
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert storage.batch_set_v1(KEYS, indices(*range(16))) == [True] * 16


def test_closed_it_finds_and_keeps_nothing(build: Build) -> None:
    storage = build()
    storage.batch_set_v1(KEYS[:1], indices(0))
    storage.close()
    storage.close()
    assert storage.batch_exists(KEYS[:1]) == 0
    assert storage.batch_get_v1(KEYS[:1], indices(0)) == [False]
    assert storage.batch_set_v1(KEYS[:1], indices(0)) == [False]
    assert storage.get(KEYS[0], torch.zeros(24576, dtype=torch.uint8)) is None
    assert storage.clear() is True


# ------------------------------------------------------------------------------ what goes wrong


def test_a_page_that_is_not_what_was_written_is_a_miss_and_forgotten(
    build: Build, tmp_path: Path
) -> None:
    pool = mha_pool()
    storage = build({"kv": pool}, persist=True)
    fill(pool)
    storage.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3))
    (path,) = tmp_path.glob("*.slots")
    with path.open("r+b") as file:
        file.seek(24576 * 2 + 12288 + 5)  # the second half of the third page
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert storage.batch_get_v1(KEYS[:4], indices(4, 5, 6, 7)) == [True, True, False, True]
    assert storage.stats()["kv"].corrupt == 1
    assert storage.batch_exists(KEYS[:4]) == 2
    assert storage.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert storage.batch_get_v1(KEYS[:4], indices(4, 5, 6, 7)) == [True] * 4
    assert page_bytes(pool, 6) == page_bytes(pool, 2)


def test_a_failed_write_is_told_and_leaves_the_others(build: Build) -> None:
    pool = mha_pool()
    storage = build({"kv": pool})
    fill(pool)
    with FaultPlan() as plan:
        plan.fail("pwritev", 5, times=None)
        assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS[:2], indices(0, 1)) == [True, True]


def test_a_failed_read_is_a_miss(build: Build) -> None:
    pool = mha_pool()
    storage = build({"kv": pool})
    storage.batch_set_v1(KEYS[:2], indices(0, 1))
    with FaultPlan() as plan:
        plan.fail("preadv", 5, times=None)
        assert storage.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert storage.batch_exists(KEYS[:2]) == 0


def test_who_stores_what_another_is_storing_waits_for_it(
    build: Build, spawn: Spawn, until: Until
) -> None:
    pool = mha_pool()
    storage = build({"kv": pool})
    fill(pool)
    with FaultPlan() as plan:
        hold = plan.hold("pwritev")
        first = spawn(storage.batch_set_v1, KEYS[:1], indices(0))
        hold.wait_reached()
        assert storage.batch_exists(KEYS[:1]) == 0  # not before all of it is there
        assert storage.batch_get_v1(KEYS[:1], indices(1)) == [False]
        second = spawn(storage.batch_set_v1, KEYS[:2], indices(0, 1))
        until(lambda: storage.exists(KEYS[1]))
        hold.release()
        assert first.result() == [True]
        assert second.result() == [True, True]


def test_a_disk_without_room_is_told_when_the_pools_are_registered(build: Build) -> None:
    with pytest.raises(DiskOOMError):
        build(quota="1000TiB")


# ------------------------------------------------------------------------------------ persistence


def test_pages_are_found_again_after_a_restart(build: Build) -> None:
    pool = mha_pool()
    first = build({"kv": pool}, persist=True)
    before = fill(pool)
    first.batch_set_v1(KEYS, indices(*range(16)))
    first.close()
    wipe(pool)
    second = build({"kv": pool}, persist=True)
    assert second.batch_exists(KEYS) == 16
    assert second.batch_get_v1(KEYS, indices(*range(16))) == [True] * 16
    assert same(pool, before)
    second.clear()
    second.close()
    assert build({"kv": pool}, persist=True).batch_exists(KEYS) == 0


def test_pages_that_were_damaged_meanwhile_are_a_miss(build: Build, tmp_path: Path) -> None:
    pool = mha_pool()
    first = build({"kv": pool}, persist=True)
    fill(pool)
    first.batch_set_v1(KEYS, indices(*range(16)))
    first.close()
    (path,) = tmp_path.glob("*.slots")
    damage(path)
    second = build({"kv": pool}, persist=True)
    assert second.batch_get_v1(KEYS, indices(*range(16))) == [False] * 16
    assert second.batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    "changed", [{"model_name": "org/other"}, {"layout": "layer_first"}, {"page_size": 32}]
)
def test_a_file_of_another_model_or_layout_is_refused_and_kept(
    build: Build, tmp_path: Path, changed: dict[str, Any]
) -> None:
    build(persist=True).close()
    pool = mha_pool(changed.pop("layout", "page_first"), page_size=changed.pop("page_size", PAGE))
    (path,) = tmp_path.glob("*.slots")
    before = path.stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"layout|slots of"):
        build({"kv": pool}, persist=True, **changed)
    assert path.stat().st_mtime_ns == before


def test_every_rank_has_a_file_of_its_own(build: Build, tmp_path: Path) -> None:
    pool = mha_pool()
    ranks = [
        build({"kv": pool}, persist=True, **changed)
        for changed in (
            {},
            {"tp_size": 2},
            {"tp_size": 2, "tp_rank": 1},
            {"pp_size": 2, "pp_rank": 1},
            {"attn_cp_size": 2, "attn_cp_rank": 1},
            {"dp_rank": 1},
        )
    ]
    assert len(list(tmp_path.glob("*.slots"))) == 6
    ranks[1].batch_set_v1(KEYS[:1], indices(0))
    assert [rank.batch_exists(KEYS[:1]) for rank in ranks] == [0, 1, 0, 0, 0, 0]
    with pytest.raises(ResourceBusyError):
        build({"kv": pool}, persist=True, tp_size=2)


# ------------------------------------------------------------------------------ several pools


def transfer(name: str, keys: list[str], pages: Any, **fields: Any) -> Any:
    return hicache.PoolTransfer(
        name=hicache.PoolName(name), keys=keys, host_indices=pages, **fields
    )


def test_pools_have_files_of_their_own_and_share_the_quota(build: Build, tmp_path: Path) -> None:
    kv, draft = mha_pool(), mha_pool("layer_first", v_dim=64)
    storage = build({"kv": kv, "draft": draft}, persist=True)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.slots")]
    assert len(sizes) == 2
    assert 3 << 20 < sum(sizes) <= 4 << 20
    before = fill(kv, 1), fill(draft, 2)
    every = indices(*range(16))
    done = storage.batch_set_v2(
        [transfer("kv", KEYS, every), transfer("draft", KEYS[:8], every[:128])]
    )
    assert done == {"kv": [True] * 16, "draft": [True] * 8}
    kept = draft.kv_buffer[:, :, :128].clone()
    wipe(kv)
    wipe(draft)
    got = storage.batch_get_v2([transfer("kv", KEYS, every), transfer("draft", KEYS, every)])
    assert got == {"kv": [True] * 16, "draft": [True] * 8 + [False] * 8}
    assert same(kv, before[0])
    assert torch.equal(
        draft.kv_buffer[:, :, :128].contiguous().view(torch.uint8),
        kept.contiguous().view(torch.uint8),
    )
    assert storage.batch_get_v2([transfer("swa", KEYS[:2], every[:32])]) == {"swa": [False] * 2}
    assert storage.batch_get_v2([transfer("draft", KEYS[:2], None)]) == {"draft": [False] * 2}


def test_prefixes_that_every_pool_can_restore_are_those_of_sglangs_own_file_backend(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "theirs"))
    pools = {name: mha_pool() for name in ("kv", "swa", "draft")}
    ours, theirs = build(pools), hicache.HiCacheFile(storage_config())
    for name, pool in pools.items():
        theirs.register_mem_host_pool_v2(pool, hicache.PoolName(name))
    policy = hicache.PoolHitPolicy
    stored = {"kv": range(12), "swa": (0, 2, 3, 4, 8, 9, 13), "draft": range(10)}
    for name, pages in stored.items():
        for storage in (ours, theirs):
            storage.batch_set_v2([transfer(name, [KEYS[n] for n in pages], indices(*pages))])
    for trailing in (1, 2, 3):
        for names in (["swa"], ["draft"], ["swa", "draft"], ["draft", "swa"]):
            asked = [
                hicache.PoolTransfer(
                    name=hicache.PoolName(name),
                    keys=KEYS[:trailing],
                    hit_policy=policy.TRAILING_PAGES if name == "swa" else policy.ALL_PAGES,
                )
                for name in names
            ]
            assert ours.batch_exists_v2(KEYS, asked) == theirs.batch_exists_v2(KEYS, asked)
    assert ours.batch_exists_v2(KEYS) == theirs.batch_exists_v2(KEYS)
    assert ours.batch_exists_v2(["x"]) == theirs.batch_exists_v2(["x"])
    unknown = [hicache.PoolTransfer(name=hicache.PoolName.SWA, hit_policy=policy.BLOCK_GROUPS)]
    with pytest.raises(ValueError, match="hit_policy"):
        ours.batch_exists_v2(KEYS, unknown)


def test_a_pool_that_comes_late_is_a_miss(build: Build) -> None:
    storage = build()
    storage.register_mem_host_pool_v2(mha_pool(), hicache.PoolName.DRAFT)
    asked = [transfer("draft", KEYS[:1], indices(0))]
    assert storage.batch_set_v2(asked) == {"draft": [False]}


def test_a_pool_whose_pages_have_no_address_is_refused_by_name(build: Build) -> None:
    with pytest.raises(ValueError, match=r"host pool kv .*layout page_unified.* cannot be stored"):
        build({"kv": mha_pool("page_unified")})


def test_a_pool_without_bytes_is_refused_by_name(build: Build) -> None:
    pools = import_sglang("sglang.srt.mem_cache.memory_pool_host")
    with pytest.raises(ValueError, match=r"host pool kv \(LogicalHostPool.* at least one part"):
        build({"kv": pools.LogicalHostPool(64, PAGE)})


# ------------------------------------------------------------------------ pages as one tensor


def flat(nbytes: int = 24576, value: int = 1, shift: int = 0) -> Any:
    return torch.full((nbytes + shift,), value, dtype=torch.uint8)[shift:]


@pytest.mark.parametrize("shift", [0, 1])  # past the page cache, and through a copy
def test_tensors_are_stored_and_found(build: Build, shift: int) -> None:
    storage = build()
    assert storage.set(KEYS[0], flat(value=1))
    assert storage.batch_set(KEYS[1:3], [flat(value=2, shift=shift), flat(value=3)])
    assert storage.batch_exists(KEYS) == 3
    targets = [flat(value=0, shift=shift) for _ in range(4)]
    got = storage.batch_get(KEYS[:4], targets)
    assert [t is g for t, g in zip(targets[:3], got[:3], strict=True)] == [True] * 3
    assert got[3] is None
    assert [set(t.tolist()) for t in targets] == [{1}, {2}, {3}, {0}]
    assert storage.get(KEYS[1], flat(value=0)).unique().tolist() == [2]


def test_tensors_of_other_sizes_are_not_stored(build: Build) -> None:
    storage = build()
    assert not storage.set(KEYS[0], flat(100))
    assert not storage.set(KEYS[0], None)
    assert storage.set(KEYS[0], flat())
    assert storage.get(KEYS[0], flat(100)) is None
    assert storage.get(KEYS[0]) is None


def test_the_two_forms_of_a_page_are_not_taken_for_each_other(build: Build) -> None:
    pool = mha_pool("layer_first")
    storage = build({"kv": pool})
    fill(pool)
    storage.batch_set_v1(KEYS[:1], indices(0))
    assert storage.get(KEYS[0], flat()) is None
    storage.set(KEYS[1], flat())
    assert storage.batch_get_v1(KEYS[1:2], indices(0)) == [False]


def test_without_pools_the_first_page_says_the_size(build: Build) -> None:
    storage = build({})
    assert not storage.exists(KEYS[0])
    assert storage.get(KEYS[0], flat(5000)) is None
    assert not storage.set(KEYS[0], flat(0))
    assert storage.set(KEYS[0], flat(5000))
    assert not storage.set(KEYS[1], flat(6000))
    assert storage.get(KEYS[0], flat(5000, 0)).unique().tolist() == [1]


# -------------------------------------------------------------------------------- SGLang's own


def controller(storage: Any, pool: Any, *, zero_copy: bool) -> Any:
    """SGLang's controller with what its transfers to and from storage use, and no GPU."""
    made = controllers.HiCacheController.__new__(controllers.HiCacheController)
    made.storage_backend, made.storage_host_pool, made.page_size = storage, pool, PAGE
    made.prefetch_sync_queue = controllers.Queue()
    if zero_copy:
        made.page_get_func, made.page_set_func = made._page_get_zero_copy, made._page_set_zero_copy
    else:
        made.page_get_func, made.page_set_func = made._generic_page_get, made._generic_page_set
    return made


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_head"])
def test_sglangs_controller_backs_up_finds_and_prefetches(
    build: Build, layout: str, zero_copy: bool
) -> None:
    pool = mha_pool(layout, pages=300)
    storage = build({"kv": pool}, quota="16MiB")
    made = controller(storage, pool, zero_copy=zero_copy)
    fill(pool)
    tokens = list(range(140 * PAGE))  # more than one batch of 128 pages
    hashes = controllers.get_storage_hash_str(tokens, None, page_size=PAGE)
    backup = controllers.StorageOperation(torch.arange(140 * PAGE), tokens, hash_value=hashes)
    made._page_backup(backup)
    assert backup.completed_tokens == 140 * PAGE
    prefetch = controllers.PrefetchOperation("r", tokens + [1] * PAGE, None, None)
    found, hit = made._storage_hit_query(prefetch)
    assert (found, hit) == (hashes, 140 * PAGE)
    prefetch.hash_value = found
    prefetch.host_indices = torch.arange(150 * PAGE, 290 * PAGE)
    assert made._page_transfer(prefetch) == 140
    for page in range(140):
        assert page_bytes(pool, 150 + page) == page_bytes(pool, page)


def test_wrong_bytes_never_pass_sglangs_random_faults(
    build: Build, monkeypatch: pytest.MonkeyPatch, spawn: Spawn
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.0002")
    pool = mha_pool(pages=96)
    storage = build({"kv": pool}, quota=40 * 24576)
    assert isinstance(storage, hicache.HiCacheStorageFailureInjector)
    fill(pool)
    keys = [f"page {n}" for n in range(64)]
    wanted = [page_bytes(pool, n) for n in range(64)]

    def back_up(start: int) -> int:
        done = 0
        for n in range(200):
            first = (start + n * 5) % 60
            done += sum(
                storage.batch_set_v1(keys[first : first + 4], indices(*range(first, first + 4)))
            )
        return done

    def prefetch(start: int, room: int) -> int:
        found = 0
        for n in range(200):
            first = (start + n * 7) % 60
            pages = list(range(room, room + 4))
            hits = storage.batch_exists(keys[first : first + 4])
            got = (
                storage.batch_get_v1(keys[first : first + hits], indices(*pages[:hits]))
                if hits
                else []
            )
            for place, (page, good) in enumerate(zip(pages, got, strict=False)):
                assert not good or page_bytes(pool, page) == wanted[first + place]
                found += good
        return found

    threads = [
        spawn(back_up, 0),
        spawn(back_up, 31),
        spawn(prefetch, 3, 70),
        spawn(prefetch, 11, 80),
    ]
    assert all(thread.result() > 0 for thread in threads)


def test_metrics_are_those_of_sglang_and_begin_anew(build: Build) -> None:
    metrics = import_sglang("sglang.srt.observability.metrics_collector")
    assert build().get_stats() is None
    storage = build(enable_storage_metrics=True)
    storage.batch_set_v1(KEYS[:3], indices(0, 1, 2))
    storage.batch_get_v1(KEYS[:4], indices(0, 1, 2, 3))
    found = storage.get_stats()
    assert isinstance(found, metrics.StorageMetrics)
    assert (found.backup_pgs, found.prefetch_pgs) == ([3], [3])
    assert len(found.backup_bandwidth) == len(found.prefetch_bandwidth) == 1
    assert found.backup_bandwidth[0] > 0
    assert storage.get_stats().backup_pgs == []


# ------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"quata": 1}, "quata"),
        ({"quota": "10KiB"}, "hold no page, which takes 24576 B"),
        ({"quota": "many"}, "quota"),
        ({"eviction_policy": "best"}, "best"),
        ({"compression": "zip"}, "zip"),
        ({"is_mla_model": True, "tp_size": 2}, "tp_size: 2 ranks"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    build: Build, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        build(**changed)


@pytest.mark.parametrize("missing", ["path", "quota"])
def test_an_option_that_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    options = {"path": str(tmp_path), "quota": "4MiB"}
    del options[missing]
    with pytest.raises(ValueError, match=f"'{missing}' is missing"):
        KvtierHiCacheStorage(storage_config(extra_config=options))


def test_a_directory_that_is_not_there_is_told(build: Build, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build(path=str(tmp_path / "absent"))


def test_an_mla_model_on_one_rank_is_taken(build: Build) -> None:
    assert build(is_mla_model=True).batch_set_v1(KEYS[:1], indices(0)) == [True]


def test_packed_pages_are_the_same_pages(build: Build) -> None:
    pytest.importorskip("blosc2")
    pool = mha_pool()
    storage = build({"kv": pool}, compression="blosc2")
    pool.kv_buffer[:] = 0.5
    before = [pool.kv_buffer.clone()]
    storage.batch_set_v1(KEYS, indices(*range(16)))
    wipe(pool)
    assert storage.batch_get_v1(KEYS, indices(*range(16))) == [True] * 16
    assert same(pool, before)
    assert storage.stats()["kv"].bytes_written < before[0].nbytes / 2
