"""Write docs/benchmarks.md, the page of measured figures, and its pictures, from bench/results.

python -m docs.build_benchmarks
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.gpu import BENCHES
from bench.measure import Finding
from docs.benchmark_pictures import Picture, pictures
from hostmem.units import format_size

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
INTRODUCTION = """# Benchmarks

Made from the files of `bench/results` by `python -m docs.build_benchmarks`; do not edit.

Each section is one run: what was asked, on which machine, by which command, what came out, and
which bounds were held. `python -m bench.gpu` does all that want a GPU and says what is missing on
yours; `make bench` does the rest; one by itself is `python -m bench.fill --json FILE`.

How they measure: what is compared runs in turn within one process or one run, so that a slow minute
of the machine hits all; every round gives a ratio, and a figure is the median with its quartiles in
brackets. Trust the ratios: seconds are those of one virtual machine in one hour. The raw times are
in the files."""
LOSSES = """## Where we lose

The bounds that were missed. They are the project's own aims; a run on another machine may keep
them."""
HEAD = ("machine", "driver", "command")
PARTS = (*HEAD, "results", "tables", "findings")
MIB = 1 << 20


class Result:
    """One file of bench/results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text())
        self.findings = [Finding(**fields) for fields in self.content.get("findings", [])]

    @cached_property
    def bench(self) -> str:
        """Name of the benchmark: its module's, which the name of the file begins with."""
        known = {path.stem for path in (ROOT / "bench").glob("*.py")}
        name = self.path.stem.partition("-")[0]
        return name if name in known else self.path.stem

    @property
    def order(self) -> tuple[int, str]:
        """Those of `bench.gpu` first, as they run, then by name."""
        place = BENCHES.index(self.bench) if self.bench in BENCHES else len(BENCHES)
        return place, self.path.stem

    @property
    def title(self) -> str:
        """The heading: benchmark and machine, which the name of the file says."""
        name, _, machine = self.path.stem.partition("-")
        words = name.replace("_", " ").capitalize()
        return f"{words}, {machine}" if machine else words

    @property
    def anchor(self) -> str:
        """What a link to the heading ends with."""
        return self.title.lower().replace(",", "").replace(" ", "-")

    def render(self) -> Iterator[str]:
        """Yield the paragraphs of the section."""
        yield f"## {self.title}"
        if question := _question(self.bench):
            yield question
        yield "\n".join(f"- {line}" for line in self._circumstances())
        for table in self.content.get("tables", []):
            yield f"**{table['title']}**"
            for picture in self.pictures(table):
                yield f"*{picture.title}*"
                yield f"![{picture.title}]({IMAGES.name}/{picture.name})"
            yield _table(table["columns"], table["rows"])
            if table["note"]:
                yield table["note"]
        if pairs := self.content.get("results"):
            yield _pairs(pairs)
        if self.findings:
            yield _table(
                ["", "question", "ours", "bound", "beside", "ratio"],
                [[_verdict(one), *_cells(one)] for one in self.findings],
            )

    def pictures(self, table: Mapping[str, Any]) -> list[Picture]:
        """Draw a table, where a picture helps."""
        return list(pictures(self.path.stem, table, self.content["tables"]))

    def _circumstances(self) -> Iterator[str]:
        for name in HEAD:
            value = self.content.get(name)
            if value:
                yield f"{name}: `{value}`" if name == "command" else f"{name}: {value}"
        for name, value in self.content.items():
            if name not in PARTS and (shown := _fact(value)):
                yield f"{name.replace('_', ' ')}: {shown}"
        yield f"file: [{self.path.name}](../bench/results/{self.path.name})"


def render(folder: Path = RESULTS) -> str:
    """Return the text of the page."""
    results = sorted(map(Result, folder.glob("*.json")), key=lambda one: one.order)
    contents = [f"- [{one.title}](#{one.anchor})" for one in results]
    missed = [
        [*_cells(finding), f"[{one.title}](#{one.anchor})"]
        for one in results
        for finding in one.findings
        if finding.held is False
    ]
    parts = [INTRODUCTION, "\n".join(["- [Where we lose](#where-we-lose)", *contents]), LOSSES]
    if missed:
        parts.append(_table(["question", "ours", "bound", "beside", "ratio", "run"], missed))
    else:
        parts.append("None in these runs.")
    if absent := [name for name in BENCHES if name not in {one.bench for one in results}]:
        parts.append(f"Of `bench.gpu` there are no results here of: {', '.join(absent)}.")
    for one in results:
        parts += one.render()
    return "\n\n".join(parts) + "\n"


def draw(folder: Path = RESULTS) -> dict[str, str]:
    """Return the text of every picture by the name of its file."""
    return {
        picture.name: picture.svg
        for result in map(Result, sorted(folder.glob("*.json")))
        for table in result.content.get("tables", [])
        for picture in result.pictures(table)
    }


def write(images: Path = IMAGES, folder: Path = RESULTS) -> None:
    """Write the pictures, and no others of a former run are left."""
    images.mkdir(exist_ok=True)
    drawn = draw(folder)
    for old in images.glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, text in drawn.items():
        (images / name).write_text(text)


def _question(bench: str) -> str:
    """Return the first paragraph of the benchmark's own description."""
    path = ROOT / "bench" / f"{bench}.py"
    if not path.exists():
        return ""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _verdict(finding: Finding) -> str:
    return "**missed**" if finding.held is False else finding.verdict


def _cells(finding: Finding) -> list[str]:
    return [finding.question, finding.ours, finding.bound, finding.peer, finding.ratio]


def _fact(value: object) -> str:
    """Show an option or a remark; raw figures are in lists and mappings of numbers, and stay."""
    match value:
        case bool() | float() | str():
            return str(value)
        case int() if value >= MIB and value % MIB == 0:
            return format_size(value)
        case int():
            return str(value)
        case list() if all(isinstance(one, str) for one in value):
            return "; ".join(value)
    return ""


def _pairs(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Show what `bench.measure.write_json` wrote."""
    rows = []
    for name, pair in results.items():
        low, high = pair["ratio_quartiles"]
        ratio = f"{pair['ratio']:.3g} ({low:.3g}-{high:.3g})"
        rows.append([name, _seconds(pair["ours_median"]), _seconds(pair["peer_median"]), ratio])
    return _table(["ours / peer", "ours", "peer", "time as a ratio"], rows)


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * scale >= 1:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *["--:"] * (len(columns) - 1)]
    lines = [columns, ruler, *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines
    )


if __name__ == "__main__":
    PAGE.write_text(render())
    write()
