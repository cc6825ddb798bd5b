"""Configurations in files: what is read, and how each slip of the pen is named."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTier,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
)
from kvtier.config_file import load_config, parse_config

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

WHOLE = """
tokens_per_block = 16
max_util_for_resume = 0.9
initial_pool_ratio = [3, 1.5]

[[cache_tiers]]
tier = "gpu"
quota = "8MiB"
max_quota = 16777216

[[cache_tiers]]
tier = "host"
quota = "1GiB"
allow_remote_numa_fallback = false
page_mode = "hugetlb-1GiB"

[[cache_tiers]]
tier = "disk"
quota = "2GiB"
path = "/missing"
persist = true
compression = "blosc2"

[[layers]]
count = 3
buffers = { key = "64KiB", value = 65536 }

[[layers]]
layer_ids = [9, 5]
sliding_window_size = 64
num_sink_tokens = 4
buffers = { kv = "1KiB" }

[[layers]]
buffers = { key = "64KiB" }
"""

TIER = "cache_tiers[1].tier: expected 'gpu' or 'host' or 'disk' or 'remote'"
KEY_VALUE = [BufferConfig("key", 64 * KIB), BufferConfig("value", 64 * KIB)]
EXPECTED = KVCacheManagerConfig(
    16,
    [
        GpuCacheTierConfig(8 * MIB, 16 * MIB),
        HostCacheTierConfig(GIB, None, False, "hugetlb-1GiB"),
        DiskCacheTierConfig(2 * GIB, "/missing", persist=True, compression="blosc2"),
    ],
    [
        *(AttentionLayerConfig(layer_id, KEY_VALUE) for layer_id in range(3)),
        *(AttentionLayerConfig(i, [BufferConfig("kv", KIB)], 64, 4) for i in (9, 5)),
        AttentionLayerConfig(10, KEY_VALUE[:1]),
    ],
    max_util_for_resume=0.9,
    initial_pool_ratio=[3, 1.5],
)


def simple(**changes: Any) -> dict[str, Any]:
    """Give a sound file as a table, with other values for some keys; ... leaves one out."""
    table: dict[str, Any] = {
        "tokens_per_block": 16,
        "cache_tiers": [{"tier": "gpu", "quota": "8MiB"}],
        "layers": [{"buffers": {"key": 1024}}],
    }
    return {key: value for key, value in (table | changes).items() if value is not ...}


def tier(**changes: Any) -> dict[str, Any]:
    return simple(cache_tiers=[{"tier": "gpu", "quota": 8 * MIB}, changes])


def layer(**changes: Any) -> dict[str, Any]:
    return simple(layers=[{"buffers": {"key": 1024}}, changes])


def test_toml_has_every_field(tmp_path: Path) -> None:
    path = tmp_path / "cache.toml"
    path.write_text(WHOLE)
    assert load_config(path) == EXPECTED
    assert load_config(str(path)) == EXPECTED


def test_json_has_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_text(json.dumps(tomllib.loads(WHOLE)))
    assert load_config(path) == EXPECTED


def test_what_is_left_out_has_the_defaults_of_the_classes() -> None:
    buffers = [BufferConfig("key", 1024)]
    assert parse_config(simple()) == KVCacheManagerConfig(
        16, [GpuCacheTierConfig(8 * MIB)], [AttentionLayerConfig(0, buffers)]
    )


def test_eighty_equal_layers_are_one_entry() -> None:
    config = parse_config(simple(layers=[{"count": 80, "buffers": {"key": 1024}}]))
    assert [layer.layer_id for layer in config.layers] == list(range(80))


def test_buffers_keep_the_order_of_the_file() -> None:
    config = parse_config(simple(layers=[{"buffers": {"value": 8, "key": 16, "scale": 4}}]))
    assert [buffer.role for buffer in config.layers[0].buffers] == ["value", "key", "scale"]


@pytest.mark.parametrize("place", ["docs/configuration.md", "kvtier/config_file.py"])
def test_the_file_that_is_shown_can_be_read(place: str) -> None:
    text = (Path(__file__).parents[2] / place).read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    config = parse_config(tomllib.loads(shown))
    config.validate(here=False)
    assert config.remote is not None
    assert [tier.tier for tier in (*config.cache_tiers, config.remote)] == list(CacheTier)


def test_a_file_is_read_whether_it_makes_sense_or_not() -> None:
    config = parse_config(simple(tokens_per_block=-1))
    with pytest.raises(ValueError, match="tokens_per_block: -1 is below the minimum"):
        config.plan()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        # Keys that are not there, or that nobody knows.
        (simple(tokens_per_block=...), "tokens_per_block: missing"),
        (simple(cache_tiers=...), "cache_tiers: missing"),
        (simple(layers=...), "layers: missing"),
        (tier(quota=1), "cache_tiers[1].tier: missing"),
        (tier(tier="host"), "cache_tiers[1].quota: missing"),
        (tier(tier="disk", quota=1), "cache_tiers[1].path: missing"),
        (layer(count=1), "layers[1].buffers: missing"),
        (
            simple(max_util=0.9),
            "max_util: unknown key; known here are tokens_per_block, cache_tiers, layers, "
            "max_util_for_resume, initial_pool_ratio",
        ),
        (
            tier(tier="gpu", quota=1, path="/"),
            "cache_tiers[1].path: unknown key; known here are tier, quota, max_quota",
        ),
        (tier(tier="host", quota=1, persist=True), "cache_tiers[1].persist: unknown key"),
        (tier(tier="disk", quota=1, path="/", page_mode="huge"), "cache_tiers[1].page_mode: "),
        (layer(layer_id=3, buffers={}), "layers[1].layer_id: unknown key; known here are"),
        # Values of the wrong type.
        (simple(tokens_per_block="16"), 'tokens_per_block: expected a whole number, not "16"'),
        (simple(tokens_per_block=16.0), "tokens_per_block: expected a whole number, not 16.0"),
        (simple(tokens_per_block=True), "tokens_per_block: expected a whole number, not true"),
        (simple(max_util_for_resume="1"), 'max_util_for_resume: expected a number, not "1"'),
        (simple(max_util_for_resume=True), "max_util_for_resume: expected a number, not true"),
        (simple(initial_pool_ratio=1), "initial_pool_ratio: expected a list, not 1"),
        (simple(initial_pool_ratio=[1, "2"]), 'initial_pool_ratio[1]: expected a number, not "2"'),
        (simple(cache_tiers={}), "cache_tiers: expected a list, not {}"),
        (simple(cache_tiers=["gpu"]), 'cache_tiers[0]: expected a table, not "gpu"'),
        (tier(tier="tape"), f"{TIER}, not "),
        (tier(tier=1), f"{TIER}, not 1"),
        (tier(tier="host", quota=[1]), "cache_tiers[1].quota: expected bytes or text such"),
        (tier(tier="host", quota=1.5), "cache_tiers[1].quota: expected bytes or text such"),
        (tier(tier="host", quota=True), "cache_tiers[1].quota: expected bytes or text such"),
        (tier(tier="host", quota="1 banana"), "cache_tiers[1].quota: '1 banana' is no size"),
        (tier(tier="host", quota=1, max_quota={}), "cache_tiers[1].max_quota: expected bytes"),
        (tier(tier="host", quota=1, page_mode=2), "cache_tiers[1].page_mode: expected text, not 2"),
        (
            tier(tier="host", quota=1, allow_remote_numa_fallback="no"),
            'cache_tiers[1].allow_remote_numa_fallback: expected true or false, not "no"',
        ),
        (tier(tier="disk", quota=1, path=1), "cache_tiers[1].path: expected text, not 1"),
        (
            tier(tier="disk", quota=1, path="/", persist=1),
            "cache_tiers[1].persist: expected true or false, not 1",
        ),
        (
            tier(tier="disk", quota=1, path="/", compression=None),
            "cache_tiers[1].compression: expected text, not null",
        ),
        (simple(layers=[3]), "layers[0]: expected a table, not 3"),
        (layer(buffers=[1]), "layers[1].buffers: expected a table of roles and sizes, not [1]"),
        (layer(buffers={"key": None}), "layers[1].buffers.key: expected bytes or text such"),
        (layer(buffers={"key": "x"}), "layers[1].buffers.key: 'x' is no size"),
        (layer(layer_ids=3, buffers={}), "layers[1].layer_ids: expected a list, not 3"),
        (layer(layer_ids=[1, "2"], buffers={}), 'layers[1].layer_ids[1]: expected a whole number'),
        (layer(count=0, buffers={}), "layers[1].count: 0 layers; the least is 1, the most 65,536"),
        (layer(count=10**12, buffers={}), "layers[1].count: 1,000,000,000,000 layers; the least"),
        (layer(count=1, layer_ids=[1], buffers={}), "layers[1]: give layer_ids or count, not both"),
        (layer(sliding_window_size=1.5, buffers={}), "layers[1].sliding_window_size: expected a"),
        (layer(num_sink_tokens="1", buffers={}), "layers[1].num_sink_tokens: expected a whole"),
        (simple(layers="x" * 100), f'layers: expected a list, not "{"x" * 56}...'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_place(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is looked at
        parse_config(table)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "tokens_per_block = ", "Invalid value (at end of document)"),
        ("a.toml", "a = 1\na = 2", "Cannot overwrite a value"),
        ("a.json", "{", "Expecting property name enclosed in double quotes: line 1 column 2"),
        ("a.json", "[1]", "expected a table, not [1]"),
        ("a.json", '{"layers": [], "layers": []}', "key 'layers' is given twice"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.toml", "a = " + "[" * 100_000, "nested too deeply"),
        ("a.yaml", "a: 1", "the name must end in .toml or .json"),
        ("a", "", "the name must end in .toml or .json"),
        ("a.toml", "", "tokens_per_block: missing"),
    ],
    ids=lambda value: value[:24],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is looked at
        load_config(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: {message}")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.toml: 'utf-8' codec can't decode"):
        load_config(tmp_path / "a.toml")


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / "a.toml")


names = st.sampled_from(
    ["tokens_per_block", "cache_tiers", "layers", "tier", "quota", "path", "buffers", "layer_ids"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(names, values))
def test_whatever_is_in_a_file_is_a_configuration_or_a_value_error(table: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_config({**simple(), **table}), KVCacheManagerConfig)
