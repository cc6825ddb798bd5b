"""The code that README and docs show, as programs: the blocks of a page run in its order.

They share what they define. Fences say what a block is: ``python`` runs, ``pycon`` is compared
with what the prompt says, ``py`` needs more than this process (a GPU, other processes) and has a
test elsewhere that reads it from the page.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "FENCE", "PAGES", "ROOT", "Block", "blocks", "foreign", "installed", "run"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]

FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOREIGN = frozenset(
    ("torch", "cupy", "jax", "numba", "vllm", "lmcache", "sglang", "cuda.core", "mooncake")
)
"""What the environment of the tests need not have."""


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: Path
    kind: str
    line: int  # of the page, before the block's first
    code: str

    @property
    def imports(self) -> set[str]:
        """The modules that it imports from outside, those of `FOREIGN`."""
        if self.kind not in ("python", "py"):
            return set()
        named: set[str] = set()
        for node in ast.walk(ast.parse(self.code)):
            match node:
                case ast.Import(names):
                    named |= {alias.name for alias in names}
                case ast.ImportFrom(str(module)):
                    named |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        return {x for x in FOREIGN if any(name == x or name.startswith(f"{x}.") for name in named)}


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in its order."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield Block(page, match[1], text.count("\n", 0, match.start(2)), match[2])


def foreign(page: Path) -> set[str]:
    """Return what a page's blocks import that may not be here."""
    return set().union(*(block.imports for block in blocks(page) if block.kind == "python"))


def installed(module: str) -> bool:
    """Tell whether a module of `FOREIGN` is here."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not
        return False


def run(page: Path, *, with_foreign: bool = False) -> None:
    """Run a page; without those blocks that import what may not be here, unless told.

    Raises
    ------
    AssertionError
        The prompt said something else.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.imports and not with_foreign:
            continue
        if block.kind == "python":  # padded, so that its lines have the numbers of the page's
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
        elif block.kind == "pycon":
            _compare(block, names)


def _compare(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(
        block.code, names, block.page.name, str(block.page), block.line
    )
    test.globs = names  # not a copy
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
