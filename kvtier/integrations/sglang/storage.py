"""Our disk level as a storage backend of SGLang's hierarchical cache."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from hostmem import ClosedError
from hostmem.units import parse_size
from kvtier.eviction import make_policy
from kvtier.integrations.sglang.page_store import PageShape, PageStore
from kvtier.transfer.slot_io import SlotIOStats

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.pool_host import HostKVCache

__all__ = ["KvtierHiCacheStorage"]

log = logging.getLogger("kvtier")

_REQUIRED = ("path", "quota")
_OPTIONS = (*_REQUIRED, "persist", "compression", "eviction_policy")
# What SGLang itself reads in the same dictionary, and takes out of it or not.
_THEIRS = {
    "backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
}  # fmt: skip
_FLAT = "flat "  # pages as one tensor: their bytes may be in another order than those of parts


class KvtierHiCacheStorage(HiCacheStorage):
    """A disk level of one file for each host pool, past the page cache, with checksums.

    Pages are read to and written from where they are in the host pools, without a copy. What is
    stored stays until the file is full; then pages that nobody reads give way, the ends of prompts
    first. A page that cannot be read, or is not what was written, is forgotten: a miss. Calls may
    come from any thread, and block until their pages are moved.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        Its ``extra_config`` has, beside what names this class: ``path`` (an existing directory);
        ``quota`` (bytes of the files of this rank, or text such as ``"200GiB"``, set aside at
        once); ``persist`` (whether pages are found after a restart, with the same model and
        layout; false where omitted); ``compression`` (see `kvtier.DiskCacheTierConfig`);
        ``eviction_policy`` (a name in `kvtier.eviction.POLICIES`; ``"prospect"``).
    kwargs : mapping, optional
        What SGLang's factory passes on; not used.

    Raises
    ------
    ValueError
        An option that there is not, or is missing; a policy that there is not; a model whose ranks
        share their pages (MLA), on more than one rank.

    Notes
    -----
    The files are made when the host pools have been registered. That raises what
    `kvtier.integrations.sglang.page_store.PageStore` says.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        options = dict(storage_config.extra_config or {})
        if unknown := set(options) - {*_OPTIONS, *_THEIRS}:
            raise ValueError(
                f"extra_config: there is no option {min(unknown)!r}; those of "
                f"KvtierHiCacheStorage are {', '.join(_OPTIONS)}"
            )
        if missing := [name for name in _REQUIRED if name not in options]:
            raise ValueError(f"extra_config: the option {missing[0]!r} is missing")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError(
                f"tp_size: {storage_config.tp_size} ranks would share the pages that one of them "
                "writes (MLA), and here each rank has a file of its own: use one rank, or another "
                "storage backend"
            )
        self._path: str = options["path"]
        self._quota = parse_size(options["quota"], "quota")
        self._persist = bool(options.get("persist", False))
        self._compression: str | None = options.get("compression")
        self._policy: str = options.get("eviction_policy", "prospect")
        make_policy(self._policy)  # an unknown one is told before there is a file
        self._rank, self._model = _rank(storage_config), storage_config.model_name or ""
        self._pools: dict[str, HostKVCache] = {}
        self._stores: dict[str, PageStore] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._moved: list[tuple[str, int, float]] = []
        self._measured = storage_config.enable_storage_metrics

    # -------------------------------------------------------------------------------- the pools

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Note the pool that keys without further name are of."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[PoolName.KV.value] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Note a pool by its name. One that comes when the files are there gets no file."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if self._stores and name not in self._stores:
            log.warning("the host pool %s came late: nothing of it is stored", name)
        self._pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """Make the files: the quota is shared as the host's memory is.

        Raises
        ------
        ValueError
            A pool whose pages are not addressable in its layout; a share that holds no page.
        """
        with self._lock:
            self._make_stores()

    def _make_stores(self) -> None:
        if self._closed:
            raise ClosedError("the storage was closed")
        if self._stores:
            return
        shapes = {name: _shape(name, pool) for name, pool in self._pools.items()}
        sizes = {
            name: shape.nbytes * (self._pools[name].size // self._pools[name].page_size)
            for name, shape in shapes.items()
        }
        try:
            for name, shape in shapes.items():
                share = self._quota * sizes[name] // sum(sizes.values())
                self._stores[name] = self._store(name, shape, share)
        except BaseException:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
            raise

    def _store(self, name: str, shape: PageShape, quota: int) -> PageStore:
        pool = self._pools.get(name)
        meaning = [
            name, self._model, self._rank, str(getattr(pool, "dtype", "")),
            getattr(pool, "layout", ""), getattr(pool, "storage_format_tag", None),
            getattr(pool, "page_size", 0), getattr(pool, "layer_num", 0),
        ]  # fmt: skip
        return PageStore(
            self._path,
            shape,
            quota,
            scope=repr(meaning).encode(),
            name=f"sglang-{self._rank}-{name}.slots" if self._persist else None,
            compression=self._compression,
            policy=self._policy,
        )

    def _store_of(self, name: str) -> PageStore | None:
        """Give the store of a pool; None for one that has none, and after `close`."""
        with self._lock:
            if not self._stores and not self._closed and self._pools:
                self._make_stores()
            return None if self._closed else self._stores.get(name)

    # ------------------------------------------------------------------------------- looking up

    def exists(self, key: str) -> bool:
        """Tell whether a page can be read by now."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Count the leading pages that can be read by now."""
        return self._leading(PoolName.KV.value, keys)

    def _leading(self, name: str, keys: Sequence[str]) -> int:
        store = self._store_of(name)
        if store is None:
            return 0
        # A server stores its pages in one of the two forms.
        return store.leading(keys) or store.leading([_FLAT + key for key in keys])

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find the longest prefix of pages that every pool can restore.

        Raises
        ------
        ValueError
            A hit policy that is not known.
        """
        pages = self._leading(PoolName.KV.value, keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            there = self._ends(transfer, keys[:pages])
            if there:
                hits[transfer.name] = max(there)
            restorable &= there
        ascending = sorted(restorable)
        return PoolTransferResult(ascending[-1] if ascending else 0, hits, ascending)

    def _ends(self, transfer: PoolTransfer, keys: Sequence[str]) -> set[int]:
        """Give the lengths of the prefixes for which a pool has what it needs."""
        name = str(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, self._leading(name, keys) + 1))
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            raise ValueError(f"hit_policy: {transfer.hit_policy} is not known")
        wanted = max(1, len(transfer.keys or ()))
        ends, run = set(), 0
        for end, key in enumerate(keys, 1):
            run = run + 1 if self._leading(name, [key]) else 0
            if run >= min(wanted, end):
                ends.add(end)
        return ends

    # ------------------------------------------------------------- pages where they are in a pool

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the host pool; which were read, and are what was written."""
        return self._move(PoolName.KV.value, keys, host_indices, writes=False)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Have pages of the host pool in the file; which are there now."""
        return self._move(PoolName.KV.value, keys, host_indices, writes=True)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Read pages into each transfer's pool; see `batch_get_v1`."""
        return {t.name: self._transfer(t, writes=False) for t in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Have pages of each transfer's pool in its file; see `batch_set_v1`."""
        return {t.name: self._transfer(t, writes=True) for t in transfers}

    def _transfer(self, transfer: PoolTransfer, *, writes: bool) -> list[bool]:
        keys = transfer.keys or []
        return self._move(str(transfer.name), keys, transfer.host_indices, writes=writes)

    def _move(
        self, name: str, keys: Sequence[str], indices: torch.Tensor | None, *, writes: bool
    ) -> list[bool]:
        store, pool = self._store_of(name), self._pools.get(name)
        slots = len(keys) * pool.page_size if pool is not None else 0
        if not keys or store is None or pool is None:
            return [False] * len(keys)
        if indices is None or indices.numel() != slots:
            log.error(
                "%d pages of the host pool %s need %d indices, and have %d: not moved",
                len(keys), name, slots, 0 if indices is None else indices.numel(),
            )  # fmt: skip
            return [False] * len(keys)
        starts = indices[:: pool.page_size]  # the pool would give addresses outside its memory
        if int(starts.min()) < 0 or int(starts.max()) + pool.page_size > pool.size:
            log.error("pages of the host pool %s are to be where it has none: not moved", name)
            return [False] * len(keys)
        pointers, sizes = pool.get_page_buffer_meta(indices)
        parts = len(store.shape.parts)
        if tuple(sizes[:parts]) != store.shape.parts or len(pointers) != len(keys) * parts:
            log.error("pages of the host pool %s have another shape than before: not moved", name)
            return [False] * len(keys)
        pages = [pointers[at : at + parts] for at in range(0, len(pointers), parts)]
        return self._timed(store, keys, pages, writes=writes)

    def _timed(
        self,
        store: PageStore,
        keys: Sequence[str],
        pages: Sequence[Sequence[int]],
        *,
        writes: bool,
    ) -> list[bool]:
        began = perf_counter()
        done = store.write(keys, pages) if writes else store.read(keys, pages)
        if self._measured and (moved := sum(done)):
            rate = moved * store.shape.nbytes / (perf_counter() - began) / 1e9
            with self._lock:
                self._moved.append(("backup" if writes else "prefetch", moved, rate))
        return done

    # ------------------------------------------------------------------ pages as tensors of a page

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,
    ) -> torch.Tensor | None:
        """Read a page into a tensor; None if it is absent or was not read. See `set`."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Read pages into tensors, each of the bytes that it was stored with; see `get`."""
        targets = list(target_locations or [None] * len(keys))
        done = self._flat(keys, targets, writes=False)
        return [target if good else None for target, good in zip(targets, done, strict=True)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Have a page in the file, as one tensor; whether it is there now.

        Pages of this form and those of `batch_set_v1` are not read as each other: their bytes may
        be in another order. Where no host pool was registered, the first page says how many bytes
        every page has.
        """
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Have pages in the file, each as one tensor; whether all are there now."""
        given = [None if v is None else v.contiguous() for v in values or [None] * len(keys)]
        if given and not self._pools and given[0] is not None and given[0].nbytes:
            self._open_for(given[0].nbytes)
        return all(self._flat(keys, given, writes=True))

    def _open_for(self, nbytes: int) -> None:
        with self._lock:
            if not self._stores and not self._closed:
                name = PoolName.KV.value
                self._stores[name] = self._store(name, PageShape((nbytes,)), self._quota)

    def _flat(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor | None], *, writes: bool
    ) -> list[bool]:
        store = self._store_of(PoolName.KV.value)
        done = [False] * len(keys)
        if store is None:
            return done
        fitting = [
            (n, tensor)
            for n, tensor in enumerate(tensors)
            if tensor is not None
            and tensor.nbytes == store.shape.nbytes
            and tensor.is_contiguous()
            and tensor.device.type == "cpu"
        ]
        pages = []
        for _, tensor in fitting:
            starts = [sum(store.shape.parts[:n]) for n in range(len(store.shape.parts))]
            pages.append([tensor.data_ptr() + start for start in starts])
        named = [_FLAT + keys[n] for n, _ in fitting]
        moved = self._timed(store, named, pages, writes=writes)
        for (n, _), good in zip(fitting, moved, strict=True):
            done[n] = good
        return done

    # ------------------------------------------------------------------------------- the whole

    def clear(self) -> bool:
        """Forget every page. Blocks while some are being written."""
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            store.clear()
        return True

    def stats(self) -> dict[str, SlotIOStats]:
        """Say, for each pool, what was moved and what went wrong so far."""
        with self._lock:
            return {name: store.stats() for name, store in self._stores.items()}

    def get_stats(self) -> Any:
        """Give pages and GB/s of the transfers since the last call, as SGLang's metrics take them.

        Returns
        -------
        StorageMetrics or None
            None where storage metrics are not enabled.
        """
        if not self._measured:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._moved = self._moved, []
        metrics = StorageMetrics()
        for kind, pages, rate in moved:
            getattr(metrics, f"{kind}_pgs").append(pages)
            getattr(metrics, f"{kind}_bandwidth").append(rate)
        return metrics

    def close(self) -> None:
        """Finish what was begun and close the files. Idempotent; everything is a miss then."""
        with self._lock:
            self._closed = True
            stores = list(self._stores.values())
        for store in stores:
            store.close()


def _rank(config: HiCacheStorageConfig) -> str:
    """Name the part of the model whose pages these are, among the ranks that run it."""
    return (
        f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}"
        f"-cp{config.attn_cp_rank}of{config.attn_cp_size}-dp{config.dp_rank}"
    )


def _shape(name: str, pool: HostKVCache) -> PageShape:
    import torch

    layout = getattr(pool, "layout", "unknown")
    what = f"the host pool {name} ({type(pool).__name__}, layout {layout})"
    try:
        found = pool.get_page_buffer_meta(torch.zeros(pool.page_size, dtype=torch.int64))
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"{what} cannot be stored from where it is: {error}") from error
    shape = PageShape(tuple(int(nbytes) for nbytes in found[1]) if found else ())
    shape.check(what)
    return shape
