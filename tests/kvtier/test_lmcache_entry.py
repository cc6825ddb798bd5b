"""The way into the LMCache plug-ins, and their options: without LMCache."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

import kvtier.integrations.lmcache as plugin
from kvtier.integrations.lmcache.options import plugin_options


def installed(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("kvtier.integrations.versions.version", version)


@pytest.mark.parametrize("name", [n for n in plugin.__all__ if n != "KNOWN_VERSIONS"])
def test_no_plugin_is_had_with_another_lmcache(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    installed(monkeypatch, "0.6.0")
    with pytest.raises(ImportError, match=r"knows lmcache 0\.5\.x, and lmcache 0\.6\.0 is install"):
        getattr(plugin, name)


def test_an_lmcache_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(ImportError, match=r"needs lmcache 0\.5\.x, which is not installed"):
        _ = plugin.HostMemAllocator


def test_a_name_that_there_is_not_is_no_import_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KvtierBackend'"):
        _ = plugin.KvtierBackend


EXTRA: dict[str, Any] = {
    "use_odirect": True,
    "storage_plugin.disk.module_path": "kvtier.integrations.lmcache",
    "storage_plugin.disk.class_name": "Disk",
    "storage_plugin.disk.path": "/nvme",
    "storage_plugin.disk.quota": 5,
    "storage_plugin.disk2.class_name": "Other",
    "storage_plugin.disk2.path": "/elsewhere",
}


def test_a_plugin_finds_its_options_by_its_class() -> None:
    found = plugin_options(["disk", "disk2"], EXTRA, "Disk", ["path", "quota", "persist"])
    assert found == {"path": "/nvme", "quota": 5}


@pytest.mark.parametrize(
    ("plugins", "count"), [([], 0), (["disk2"], 0), (["disk", "again"], 2)], ids=str
)
def test_a_class_is_one_plugin(plugins: list[str], count: int) -> None:
    extra = {**EXTRA, "storage_plugin.again.class_name": "Disk"}
    with pytest.raises(ValueError, match=f"Disk: one plugin .* which has {count}"):
        plugin_options(plugins, extra, "Disk", ["path", "quota"])


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no option storage_plugin\.disk\.quota; known are path, size"
    ):
        plugin_options(["disk"], EXTRA, "Disk", ["size", "path"])
