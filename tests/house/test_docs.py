"""What README and docs say runs, leads somewhere, and is what the code says."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from docs.build_api import REFERENCES, Reference

ROOT = Path(__file__).parents[2]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def examples() -> list[object]:
    """Return the python blocks of the pages, each padded so that its lines keep their numbers."""
    found: list[object] = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2))
            if match[1] == "python":
                name = f"{page.relative_to(ROOT)}:{line + 1}"
                found.append(pytest.param(page, "\n" * line + match[2], id=name))
    return found


@pytest.mark.parametrize(("page", "code"), examples())
def test_an_example_runs(
    page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write files
    exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ["HostMem", "BlockCache"])
def test_the_readme_shows(name: str) -> None:
    blocks = [block[2] for block in FENCE.finditer(README.read_text()) if block[1] == "python"]
    assert any(name in block for block in blocks)


def docstring_examples() -> list[object]:
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    found: list[object] = []
    for reference in REFERENCES:
        everything = {k: v for module in reference.modules for k, v in vars(module).items()}
        for name in sorted(reference.public()):
            tests = finder.find(everything[name], name, globs=dict(everything))
            found += [pytest.param(test, id=name) for test in tests if test.examples]
    return found


@pytest.mark.parametrize("test", docstring_examples())
def test_the_example_of_a_docstring_runs(test: doctest.DocTest) -> None:
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.path.name)
def test_the_api_reference_is_current(reference: Reference) -> None:
    assert reference.path.read_text() == reference.render(), "run: python -m docs.build_api"


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.path.name)
def test_the_api_reference_has_every_public_name(reference: Reference) -> None:
    described = set(re.findall(r"^### (\w+)$", reference.path.read_text(), re.MULTILINE))
    assert described == reference.public()


def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of the page may end with."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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
    named = {link.partition("#")[0] for link in LINK.findall(INDEX.read_text())}
    pages = {page.name for page in INDEX.parent.glob("*.md")} - {INDEX.name}
    assert pages <= named


COMMANDS = {
    found for page in PAGES for found in re.findall(r"python -m (\w+) (\w+)", page.read_text())
}


@pytest.mark.parametrize(("package", "command"), sorted(COMMANDS))
def test_a_command_exists(package: str, command: str) -> None:
    main = importlib.import_module(f"{package}.__main__").main
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0


def messages() -> str:
    """Return all the text in the sources of hostmem, and the driver's names for its answers."""
    found = []
    for path in sorted((ROOT / "hostmem").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Constant(str(text)) | ast.Name(text):
                    found.append(text)
    return "\n".join(found)


def test_the_messages_explained_are_those_of_the_code() -> None:
    text, said = (ROOT / "docs" / "failure-and-retry.md").read_text(), messages()
    _, _, table = text.partition("| Message |")
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    parts = [
        part.strip()
        for row in rows
        for message in re.findall(r"`([^`]+)`", row)
        for part in message.split("…")
    ]
    assert len(rows) > 20
    assert [part for part in parts if part not in said] == []


def test_an_extra_that_is_named_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*PAGES, *(ROOT / "hostmem").rglob("*.py"), *(ROOT / "kvtier").rglob("*.py")]
    named = {x for text in texts for x in re.findall(r"hostmem\[(\w+)\]", text.read_text())}
    assert named == set(project["optional-dependencies"])
