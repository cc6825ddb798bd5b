"""The manager: what it is built from, and how it ends with its sequences."""

from __future__ import annotations

import doctest
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostmem import ClosedError
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    manager,
)
from kvtier.keys import chain_keys, layout_fingerprint
from kvtier.manager import KVCacheManager
from tests.kvtier.sequence_engine import Engine, T, config_of


def test_the_example_is_right() -> None:
    assert doctest.testmod(manager).failed == 0


def test_keys_have_the_layout_and_the_salt_in_them() -> None:
    config = config_of()
    with KVCacheManager(config, device="cpu") as one:
        assert one.tokens_per_block == T
        layout = layout_fingerprint(config)
        assert one.keys(range(9)) == chain_keys(range(9), T, layout=layout)
        assert one.keys(range(9), salt=b"s") == chain_keys(range(9), T, salt=b"s", layout=layout)


def test_the_cache_can_be_asked_for_what_a_sequence_left() -> None:
    with KVCacheManager(config_of(), device="cpu") as one:
        Engine(one).run(range(9))
        assert one.cache.match(one.keys(range(20))) == 2
        assert one.match(range(8)) == 4
        assert one.match([]) == 0


def test_matching_brings_nothing() -> None:
    with KVCacheManager(config_of(2, 2), device="cpu") as one:
        engine = Engine(one)
        engine.run(range(9))
        engine.run(range(1000, 1064))
        before = one.stats().bytes_moved
        assert one.match(range(9)) == 8
        assert one.stats().bytes_moved == before


def test_the_next_manager_finds_what_a_persistent_level_holds(tmp_path: Path) -> None:
    config = config_of(
        4, 4, (8, tmp_path), windows=[(None, None), (6, 5)], initial_pool_ratio=[1, 1]
    )
    *memory, disk = config.cache_tiers
    assert isinstance(disk, DiskCacheTierConfig)
    config = replace(config, cache_tiers=[*memory, replace(disk, persist=True)])
    with KVCacheManager(config, device="cpu") as one:
        engine = Engine(one)
        sequence = engine.start(range(30))
        sequence.suspend()  # what is private to it is of no use to the next manager
        engine.run(range(1000, 1064))
        engine.run(range(2000, 2064))
    with KVCacheManager(config, device="cpu") as one:
        engine = Engine(one)
        assert one.match(range(2000, 2064)) == 0  # it had not left the memory
        with engine.start(range(30)) as sequence:
            assert sequence.num_cached_tokens == 28
        one.cache._check()


@pytest.mark.parametrize("tokens", [[-1], [2**64], ["a"], b"abcdefgh", 3])
def test_a_prompt_of_no_tokens_is_refused(tokens: Any) -> None:
    with KVCacheManager(config_of(), device="cpu") as one:
        with pytest.raises((ValueError, TypeError)):
            one.create_sequence(tokens)
        assert len(one._sequences) == 0


def test_hot_pages_that_the_engine_owns_are_not_for_sequences(tmp_path: Path) -> None:
    layers = [AttentionLayerConfig(0, [BufferConfig("kv", 4096)])]
    tiers = [HostCacheTierConfig("2MiB", "2MiB"), DiskCacheTierConfig("2MiB", tmp_path, "2MiB")]
    with pytest.raises(ValueError, match="the first is host, but sequences have their pages in"):
        KVCacheManager(KVCacheManagerConfig(T, tiers, layers), device="cpu")


def test_a_configuration_that_is_not_valid_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_block"):
        KVCacheManager(KVCacheManagerConfig(0, [], []), device="cpu")
    with pytest.raises(ValueError, match="best"):
        KVCacheManager(config_of(), device="cpu", policy="best")


def test_it_says_how_it_stands() -> None:
    with KVCacheManager(config_of(), device="cpu") as one, one.create_sequence() as sequence:
        assert repr(one).startswith("<KVCacheManager of 1 sequences over <TierStorage on ")
        assert one.describe() == one.storage.describe()
        assert one.stats().levels == one.storage.stats().levels
        sequence.grow(5)
    assert repr(one).endswith(", closed>")


@pytest.mark.parametrize("suspended", [False, True])
def test_closing_closes_the_sequences_first(suspended: bool) -> None:
    one = KVCacheManager(config_of(), device="cpu")
    sequence = Engine(one).start(range(6))
    if suspended:
        sequence.suspend()
    one.close()
    assert sequence.closed
    with pytest.raises(ClosedError):
        sequence.grow(1)
    with pytest.raises(ClosedError):
        one.create_sequence()
    sequence.close()
    one.close()


def test_a_view_that_holds_memory_is_told_and_the_close_can_be_repeated() -> None:
    one = KVCacheManager(config_of(2, 2), device="cpu")
    (pool,) = one.storage.levels[1].groups[0].memory.pools
    view = pool.memory.view()  # type: ignore[attr-defined]
    with pytest.raises(BufferError):
        one.close()
    del view
    one.close()


def test_a_forked_child_has_no_sequences() -> None:
    code = """
        import os
        from hostmem import ClosedError
        from kvtier import AttentionLayerConfig, BufferConfig, GpuCacheTierConfig
        from kvtier import KVCacheManagerConfig
        from kvtier.manager import KVCacheManager

        layers = [AttentionLayerConfig(0, [BufferConfig("kv", 4096)])]
        config = KVCacheManagerConfig(4, [GpuCacheTierConfig("2MiB", "2MiB")], layers)
        manager = KVCacheManager(config, device="cpu")
        sequence = manager.create_sequence()
        sequence.grow(6)
        sequence.commit(range(6))
        with sequence._lock, manager._lock:  # as another thread may, at the moment of the fork
            child = os.fork()
        if not child:
            for call in (sequence.page_table, sequence.suspend, manager.create_sequence):
                try:
                    call()
                except ClosedError:
                    print("closed", flush=True)
            sequence.close()
            manager.close()
            del sequence
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(manager.match(range(6)), len(sequence.page_table()))
        sequence.close()
        manager.close()
    """
    done = subprocess.run(
        [sys.executable, "-Wignore::DeprecationWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["closed"] * 3 + ["4", "2"]
