"""The plug-ins' ways in: what is imported when, and which engine is refused."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import kvtier.integrations.vllm as plugin
from kvtier.integrations.versions import check_version


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("kvtier.integrations.versions.version", version)


@pytest.mark.parametrize("found", ["0.33.0", "0.33.0+cpu", "0.33", "0.33+cpu", "0.40.2"])
def test_a_known_version_is_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    installed(monkeypatch, {"engine": found})
    assert check_version("plugin", "engine", ["0.33", "0.40"]) == found


@pytest.mark.parametrize("found", ["0.32.9", "0.34.0", "0.330.0", "1.33.0", "0.3"])
def test_another_version_is_refused_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    installed(monkeypatch, {"engine": found})
    with pytest.raises(ImportError) as refused:
        check_version("our.plugin", "engine", ["0.33", "0.40"])
    for part in ("our.plugin", "0.33.x or 0.40.x", f"engine {found} is installed"):
        assert part in str(refused.value)
    assert refused.value.name == "engine"


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    with pytest.raises(ImportError, match=r"our.plugin needs engine 0.33.x, which is not install"):
        check_version("our.plugin", "engine", ["0.33"])


@pytest.mark.parametrize("name", [n for n in plugin.__all__ if n != "KNOWN_VERSIONS"])
def test_no_plugin_is_had_with_another_vllm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    installed(monkeypatch, {"vllm": "0.34.0"})
    with pytest.raises(ImportError, match=r"knows vllm 0\.33\.x, and vllm 0\.34\.0 is installed"):
        getattr(plugin, name)


def test_a_name_that_there_is_not_is_no_import_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KvtierSpec'"):
        _ = plugin.KvtierSpec


CHILD = """
import sys
import hostmem, kvtier
assert not [name for name in sys.modules if name.startswith("kvtier.integrations")]
import kvtier.integrations.vllm
import kvtier.integrations.lmcache
from kvtier.integrations import slot_directory, slot_store
from kvtier.integrations.vllm import chunk_memory, chunk_transfers
assert not {"vllm", "torch", "lmcache", "sglang"} & set(sys.modules)
"""


def test_imports_bring_no_engine() -> None:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
