"""What README and docs say runs, leads somewhere, and is what the code says."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import hostmem.errors
from tests.snippets import DOCS, FENCE, PAGES, ROOT, blocks, run

README, INDEX = ROOT / "README.md", DOCS / "README.md"
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ------------------------------------------------------------------------------------ what runs

PROGRAMS = [page for page in PAGES if any(b.kind in ("python", "pycon") for b in blocks(page))]


@pytest.mark.parametrize("page", PROGRAMS, ids=title)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it may write files
    run(page)  # what imports torch and the like runs in tests/engines


# What ends processes, by fork and by signals: a process for each block, and what it prints.
SCRIPTS = {
    "fork-signals-teardown.md": [
        "the memory was closed\nthe child died of signal 11\n",
        "closed\n",
    ]
}


@pytest.mark.parametrize("page", SCRIPTS)
def test_a_block_is_a_script(page: str, tmp_path: Path) -> None:
    said = []
    for block in blocks(DOCS / page):
        if block.kind == "py":
            done = subprocess.run(
                [sys.executable, "-c", block.code],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)
    assert said == SCRIPTS[page]


def test_what_does_not_run_here_is_run_by_another_test() -> None:
    tests = "\n".join(
        path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)
    )
    pages = {page for page in PAGES for block in blocks(page) if block.kind == "py"}
    without = {page.name for page in pages if f'"{page.name}"' not in tests}
    assert without - SCRIPTS.keys() == set()


@pytest.mark.parametrize("name", ["HostMem", "BlockCache"])
def test_the_readme_shows(name: str) -> None:
    assert any(name in block.code for block in blocks(README) if block.kind == "python")


# ---------------------------------------------------------------------------------- at the shell

COMMANDS = {
    (match[1], match[2], option)
    for page in PAGES
    for match in re.finditer(
        r"python -m (hostmem|kvtier) (\w+)([^`#\n]*(?:\\\n[^`#\n]*)*)", page.read_text()
    )
    for option in ("--help", *re.findall(r"--[\w-]+", match[3]))
}


@cache
def usage(package: str, command: str) -> str:
    main = importlib.import_module(f"{package}.__main__").main
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    return said.getvalue()


@pytest.mark.parametrize(("package", "command", "option"), sorted(COMMANDS))
def test_a_command_exists_and_takes_its_option(package: str, command: str, option: str) -> None:
    assert re.search(rf"{option}\b(?!-)", usage(package, command))


def test_a_module_that_is_run_exists() -> None:
    runs = re.compile(r"python -m (bench|docs)\.(\w+)")
    named = {ROOT / x / f"{y}.py" for page in PAGES for x, y in runs.findall(page.read_text())}
    assert {path for path in named if not path.exists()} == set()


def test_what_make_is_asked_for_is_a_target() -> None:
    asked = {x for page in PAGES for x in re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text())}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert asked - targets == set()


# --------------------------------------------------------------------------------- the reference

REFERENCES = {
    "api.md": ["hostmem", "hostmem.testing"],
    "api-kvtier.md": [
        "kvtier",
        "kvtier.config",
        "kvtier.config_file",
        "kvtier.eviction",
        "kvtier.stats",
        "kvtier.testing",
    ],
}
ENTRY = re.compile(r"^\.\. auto(?:class|exception|function|data):: (\S+)$", re.MULTILINE)


def entries(page: str) -> list[tuple[str, object]]:
    """Return the full names that a reference describes, and what they are."""
    found = []
    for entry in ENTRY.findall((DOCS / page).read_text()):
        module, _, name = entry.rpartition(".")
        found.append((entry, getattr(importlib.import_module(module), name)))
    return found


@pytest.mark.parametrize("page", REFERENCES)
def test_the_reference_has_every_public_name_once(page: str) -> None:
    described = {name.rpartition(".")[2] for name, _ in entries(page)}
    if page != "api.md":  # what is in both packages is told once
        described |= {name.rpartition(".")[2] for name, _ in entries("api.md")}
    modules: list[ModuleType] = [importlib.import_module(name) for name in REFERENCES[page]]
    public = {name for module in modules for name in module.__all__} - {"__version__"}
    assert public - described == set()
    names = [name for name, _ in entries(page)]
    assert len(names) == len(set(names))


def docstring_examples() -> Iterator[object]:
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    modules = [importlib.import_module(name) for names in REFERENCES.values() for name in names]
    for page in REFERENCES:
        for name, thing in entries(page):
            names = {key: value for module in modules for key, value in vars(module).items()}
            parts = [(name, thing)]
            if inspect.isclass(thing):
                parts += [
                    (f"{name}.{member}", getattr(value, "__func__", value))
                    for member, value in vars(thing).items()
                    if inspect.isroutine(getattr(value, "__func__", value))
                ]
            for full, part in parts:
                for test in finder.find(part, full, globs=names):
                    if test.examples:
                        yield pytest.param(test, id=full)


@pytest.mark.parametrize("test", list(docstring_examples()))
def test_the_example_of_a_docstring_runs(test: doctest.DocTest) -> None:
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


# ------------------------------------------------------------------------------------ what leads


def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of the page may end with."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_the_index_names_every_page() -> None:
    # `docs/conf.py` makes the tables of contents from the links of its sections.
    _, *sections = re.split(r"^## ", INDEX.read_text(), flags=re.MULTILINE)
    named = {link.partition("#")[0] for link in LINK.findall("".join(sections))}
    missing = {page.name for page in DOCS.glob("*.md")} - named - {INDEX.name}
    assert not missing, f"add a row to a table of docs/README.md for: {sorted(missing)}"


# --------------------------------------------------------------------------- what the code says


def strings(*packages: str) -> Iterator[tuple[Path, str]]:
    """Yield all the text in the sources of packages, and the driver's names for its answers."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                match node:
                    case ast.Constant(str(text)) | ast.Name(text):
                        yield path, text


# Errors that say something to a user beside bad arguments; a plug-in's page explains its own.
CLASSES = {*hostmem.errors.__all__, "BufferError", "TimeoutError", "ImportError", "SlotReadError"}
LOGGED = {"warning", "error", "critical", "exception"}
APART = ("testing", "integrations")
GAP = "…"


def pattern(message: ast.expr) -> str:
    """Return the text of a message, with a gap in place of each value."""
    match message:
        case ast.Constant(str(text)):
            return re.sub(r"%[#\w]+", GAP, text)
        case ast.JoinedStr(values):
            return "".join(map(pattern, values))
        case ast.BinOp(left, ast.Add(), right):
            return pattern(left) + pattern(right)
    return GAP


def told() -> dict[str, str]:
    """Return what errors and log lines say, and where; without those of values alone."""
    found = {}
    for package in ("hostmem", "kvtier"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if set(APART) & set(path.parts) and path.name != "versions.py":
                continue
            for node in ast.walk(ast.parse(path.read_bytes())):
                match node:
                    case ast.Call(ast.Name(name), [message, *_]) if name in CLASSES:
                        pass
                    case ast.Call(ast.Attribute(ast.Name("log"), name), [message, *_]) if (
                        name in LOGGED
                    ):
                        pass
                    case _:
                        continue
                if re.search(r"\w", text := pattern(message)):
                    found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


@cache
def explained() -> list[list[str]]:
    """Return the messages of the page's tables, each as the parts between its gaps."""
    text = (DOCS / "troubleshooting.md").read_text()
    _, _, tables = text.partition("## The fill")
    tables, _, _ = tables.partition("## Symptoms")
    cells = [row.split("|")[1] for row in tables.splitlines() if row.startswith("| `")]
    return [
        [part.strip() for part in message.split(GAP) if part.strip()]
        for cell in cells
        for message in re.findall(r"`([^`]+)`", cell)
    ]


def test_every_message_is_explained() -> None:
    missing = {
        where: text
        for text, where in told().items()
        if not any(all(part in text for part in parts) for parts in explained())
    }
    assert not missing, f"add a row to docs/troubleshooting.md for: {missing}"


def test_the_messages_explained_are_those_of_the_code() -> None:
    said = "\n".join(text for _, text in strings("hostmem", "kvtier"))
    said = re.sub(r"%[#\w]+", GAP, said)
    assert len(explained()) > 80
    assert [part for parts in explained() for part in parts if part not in said] == []


def test_every_type_of_error_is_explained() -> None:
    _, _, text = (DOCS / "troubleshooting.md").read_text().partition("## By type")
    table, _, _ = text.partition("\n## ")
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row[:60])}
    assert set(hostmem.errors.__all__) - named == set()


def test_the_table_of_environment_variables_is_complete() -> None:
    table = (DOCS / "environment.md").read_text()
    described = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    read = {
        name
        for _, text in strings("hostmem", "kvtier")
        for name in re.findall(r"(?:HOSTMEM|KVTIER)_[A-Z_]+", text)
    }
    assert described == read


def test_an_extra_that_is_named_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*PAGES, *(ROOT / "hostmem").rglob("*.py"), *(ROOT / "kvtier").rglob("*.py")]
    named = {x for text in texts for x in re.findall(r"hostmem\[(\w+)\]", text.read_text())}
    assert named == set(project["optional-dependencies"])
