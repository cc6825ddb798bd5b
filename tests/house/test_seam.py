"""The house's walls: who may name C, and who may import whom.

The tests parse the sources; nothing of ours is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hostmem", "kvtier")
FOREIGN = {"cffi", "_cffi_backend", "ctypes", "ffi"}

# Each package from the ground up: a module imports from its own row and from those below it.
# A name stands for the module or for the whole subpackage.
ROWS: dict[str, list[set[str]]] = {
    "hostmem": [
        {"describing", "live_line", "spans"},
        {"errors", "units", "ranges", "courier", "closing", "procfs", "_version"},
        {"_sys"},
        {"device", "machine", "cgroup", "capabilities", "huge_pages", "turns"},
        {"headroom", "pressure", "stall_budget", "fill_threads"},
        {"files", "numa", "page_mode", "watermark", "views", "lifetime", "progress"},
        {"extent", "process_maps", "page_survey", "placement_map"},
        {"registration", "reservation", "placement", "preflight", "process_report", "route"},
        {"admission", "fill_options"},
        {"filler", "core"},
        {"progressive", "static"},
        {"__init__"},
        {"__main__", "integrations", "metrics", "testing"},
    ],
    "kvtier": [
        {"transfer", "slots", "quota", "plan", "layout", "config", "config_file", "keys", "tiers"},
        {"page", "pools", "eviction", "latch", "page_tables"},
        {"levels", "stats"},
        {"records"},
        {"mover"},
        {"resizer"},
        {"storage", "arguments", "block", "windows", "events"},
        {"block_index", "block_job", "engine_pages", "leases", "ranks"},
        {"remote"},
        {"blocks"},
        {"holding", "sequence"},
        {"manager"},
        {"__init__"},
        {"__main__", "integrations", "metrics", "replay", "testing"},
    ],
}


def part_of(name: str) -> str:
    """Return a module's name in ROWS: the first component below the package."""
    _, _, below = name.partition(".")
    return below.partition(".")[0] or "__init__"


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, the line, and when the import happens."""

    target: str
    line: int
    at_import: bool  # at module level, so it runs with the module
    for_types: bool  # under ``if TYPE_CHECKING``, so it never runs


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def place(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def part(self) -> str:
        return part_of(self.name)

    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, at_import=True, for_types=False))

    def _imports(self, node: ast.AST, at_import: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, at_import, for_types)
            elif isinstance(child, ast.ImportFrom):
                base = self._base(child)
                for alias in child.names:
                    # ``from package import name``: name is a submodule, or something of package.
                    full = f"{base}.{alias.name}"
                    target = full if full in sources() else base
                    yield Import(target, child.lineno, at_import, for_types)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._imports(child, False, for_types)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from self._imports(ast.Module([statement], []), at_import, True)
                for statement in child.orelse:
                    yield from self._imports(ast.Module([statement], []), at_import, for_types)
            else:
                yield from self._imports(child, at_import, for_types)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        if self.path.name == "__init__.py":
            parts.append("")
        parts = parts[: len(parts) - node.level]
        return ".".join([*parts, *filter(None, [node.module])])


@cache
def sources() -> dict[str, Path]:
    """Every module of ours by its dotted name; a package stands for its ``__init__``."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules() -> dict[str, Module]:
    return {
        name: Module(name, path, ast.parse(path.read_bytes(), str(path)))
        for name, path in sources().items()
    }


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(package: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{module.place}:{imported.line} imports {imported.target}"
        for module in modules().values()
        if within(module.name, package)
        for imported in module.imports()
        if any(within(imported.target, name) for name in forbidden)
    ]


def foreign_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each place that names the C interface, as an import, a name or an attribute."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [part for alias in node.names for part in (alias.name, alias.asname or "")]
            case ast.ImportFrom():
                names = [node.module or ""]
                names += [part for alias in node.names for part in (alias.name, alias.asname or "")]
            case ast.Name():
                names = [node.id]
            case ast.Attribute():
                names = [node.attr]
            case ast.arg() | ast.keyword():
                names = [node.arg or ""]
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="__import__")):
                names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        for name in names:
            if name.partition(".")[0] in FOREIGN:
                yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize(
    "text",
    [
        "import cffi",
        "import ctypes.util as util",
        "from _cffi_backend import FFI",
        "from hostmem._sys._linux_abi import ffi",
        "def f(ffi): ...",
        "seam.ffi.new('int *')",
        "address = array.ctypes.data",
        "importlib.import_module('cffi')",
    ],
)
def test_the_seam_check_sees(text: str) -> None:
    assert list(foreign_names(ast.parse(text)))


def test_the_seam_check_overlooks_prose_and_longer_names() -> None:
    text = '"""Uses cffi."""\ndiffie = "ffi"  # ctypes\n'
    assert not list(foreign_names(ast.parse(text)))


def test_only_the_seam_names_c() -> None:
    found = [
        f"{module.place}:{line} names {name}"
        for module in modules().values()
        if not within(module.name, "hostmem._sys")
        for line, name in foreign_names(module.tree)
    ]
    assert not found, "\n".join(found)


def test_kvtier_does_not_reach_into_the_seam() -> None:
    found = violations("kvtier", ("hostmem._sys",))
    assert not found, "\n".join(found)


def test_hostmem_does_not_know_kvtier() -> None:
    found = violations("hostmem", ("kvtier",))
    assert not found, "\n".join(found)


def test_the_seam_imports_nothing_of_ours_but_errors() -> None:
    found = [
        f"{module.place}:{imported.line} imports {imported.target}"
        for module in modules().values()
        if within(module.name, "hostmem._sys")
        for imported in module.imports()
        if within(imported.target, "hostmem") or within(imported.target, "kvtier")
        if not within(imported.target, "hostmem._sys") and imported.target != "hostmem.errors"
    ]
    assert not found, "\n".join(found)


def test_no_module_imports_torch_at_its_top() -> None:
    found = [
        f"{module.place}:{imported.line}"
        for module in modules().values()
        for imported in module.imports()
        if within(imported.target, "torch") and imported.at_import and not imported.for_types
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_place_in_the_rows(package: str) -> None:
    placed = set().union(*ROWS[package])
    homeless = [
        module.place
        for module in modules().values()
        if within(module.name, package) and module.part not in placed
    ]
    assert not homeless, f"not in ROWS of this file: {', '.join(homeless)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_point_down(package: str) -> None:
    row = {part: height for height, parts in enumerate(ROWS[package]) for part in parts}
    found = []
    for module in modules().values():
        if not within(module.name, package) or module.part not in row:
            continue
        for imported in module.imports():
            if imported.for_types or not within(imported.target, package):
                continue
            if row.get(part_of(imported.target), -1) > row[module.part]:
                found.append(f"{module.place}:{imported.line} imports {imported.target}")
    assert not found, "\n".join(found)


def test_no_imports_go_in_a_circle() -> None:
    graph = {
        module.name: {
            imported.target
            for imported in module.imports()
            if imported.at_import and not imported.for_types and imported.target != module.name
        }
        for module in modules().values()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]), pytrace=False)
