"""How Sphinx makes the documentation of these pages: `make docs`. Nothing is fetched."""

from __future__ import annotations

import pydoc
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from hostmem import __version__

project = "hostmem and kvtier"
version = release = __version__
project_copyright = "the authors of hostmem, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc"]
root_doc = "README"  # which a forge shows, too
myst_heading_anchors = 4  # links to headings are those that a forge understands
html_theme = "furo"
html_title = f"hostmem {release}"

autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    # What a class gets from private bases belongs to it; what from these is told elsewhere.
    "inherited-members": "object, Exception, str, tuple, Enum, Device, Stream, Event",
}
autodoc_typehints = "none"  # the types are in the text, with their units
numpydoc_show_class_members = False  # autodoc shows them
autosummary_generate = False
smartquotes = False  # defaults are shown as they are written
default_role = "py:obj"  # of names in docstrings: a dead one is an error

LINK = re.compile(r"\]\(([\w-]+)\.md\)")
NAMED = re.compile(r"\[[\w-]+\.md\](?=\([\w-]+\.md)")


def add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Make a table of contents of each section of the index, from the links to pages in it."""
    if page != root_doc:
        return
    first, *sections = re.split(r"^## ", source[0], flags=re.MULTILINE)
    told: set[str] = set()
    parts = [first]
    for section in sections:
        heading, _, text = section.partition("\n")
        pages = [name for name in dict.fromkeys(LINK.findall(text)) if name not in told]
        told.update(pages)
        parts.append(f"## {heading}\n{text}")
        if pages:
            names = "\n".join(pages)
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{names}\n```\n\n")
    source[0] = "".join(parts)


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Give a web server the page that it looks for."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def name_titles(app: Sphinx, page: str, source: list[str]) -> None:
    """Show a page's title where a forge shows the name of its file."""
    source[0] = NAMED.sub("[]", source[0])


def find_elsewhere(
    app: Sphinx, env: BuildEnvironment, name: pending_xref, text: nodes.TextElement
) -> nodes.Element | None:
    """Find a name that is described in the other package, or that exists and is not described."""
    if name.get("refdomain") != "py" or "refspecific" in name:
        return None
    name["refspecific"] = True  # in any module
    python = env.get_domain("py")
    found = python.resolve_xref(
        env, name["refdoc"], app.builder, "obj", name["reftarget"], name, text
    )
    if found is not None:
        return found
    file = Path(app.confdir).parent / name["reftarget"]
    return text if file.is_file() or pydoc.locate(name["reftarget"]) is not None else None


def setup(app: Sphinx) -> None:
    """Connect them."""
    app.connect("source-read", name_titles)
    app.connect("missing-reference", find_elsewhere)
    app.connect("source-read", add_toctrees)
    app.connect("build-finished", add_index)
