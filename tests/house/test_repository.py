"""What the repository says about itself is true."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import hostmem
from hostmem._version import __version__

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_version_is_kept_in_one_place() -> None:
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    holders = [
        str(path.relative_to(ROOT))
        for package in ("hostmem", "kvtier")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and node.value == __version__
    ]
    assert holders == ["hostmem/_version.py"]


def test_the_package_and_its_metadata_give_the_version() -> None:
    assert hostmem.__version__ == __version__
    assert importlib.metadata.version("hostmem") == __version__


def test_the_changelog_has_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert __version__ in headings


def readme_examples() -> list[object]:
    """Return the python blocks of the README, each padded so that its lines keep their numbers."""
    text = README.read_text() if README.exists() else ""
    return [
        pytest.param("\n" * line + match[1], id=f"line{line + 1}")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in [text.count("\n", 0, match.start(1))]
    ]


@pytest.mark.parametrize("code", readme_examples())
def test_the_readme_example_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write files
    exec(compile(code, str(README), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ["HostMem", "BlockCache"])
def test_the_readme_shows(name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert any(name in block for block in blocks)
