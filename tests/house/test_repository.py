"""What the repository says about itself is true."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import hostmem
from hostmem._version import __version__

ROOT = Path(__file__).parents[2]


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
