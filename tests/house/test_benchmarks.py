"""The page of benchmarks is made of the results; `bench.gpu` runs what makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.gpu import main
from bench.measure import Finding, Pairs, Table, compare, write_json, write_tables
from docs.build_benchmarks import IMAGES, PAGE, RESULTS, draw, render, write

TABLE = Table("Rates", ["pages", "GiB/s"], [["small | huge", "5 (4-6)"]], "With 8 threads.")
HELD = Finding("as fast as it gets", "5 GiB/s", ">= 4 GiB/s", "torch: 2 GiB/s", "2.5", True)
MISSED = Finding("first slot at once", "12 ms", "<= 10 ms", held=False)
UNKNOWN = Finding("fill beside CuPy", "5 GiB/s", ">= 2 x")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write_tables(
        tmp_path / "stalls-x1.json",
        [TABLE],
        [HELD, MISSED, UNKNOWN],
        size=6 << 30,
        calls=3,
        not_measured=["CuPy", "torch"],
        seconds={"small": [1.5, 2.5]},
    )
    pairs: Pairs = compare([0.002, 0.002, 0.002], [0.001, 0.001, 0.001])
    write_json(tmp_path / "wait-x1.json", {"ours / theirs": pairs})
    write_tables(tmp_path / "fill-x1.json", [TABLE])
    return tmp_path


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run: python -m docs.build_benchmarks"


def test_the_page_names_every_result() -> None:
    text = PAGE.read_text()
    assert [path.name for path in RESULTS.glob("*.json") if f"/{path.name})" not in text] == []


def test_the_pictures_are_current() -> None:
    kept = {path.name: path.read_text() for path in IMAGES.iterdir()}
    assert kept == draw(), "run: python -m docs.build_benchmarks"


def test_the_page_shows_every_picture_once() -> None:
    shown = re.findall(r"^!\[.+\]\(images/(.+)\)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(draw())


@pytest.fixture
def stalls(tmp_path: Path) -> Path:
    columns = ["", "GiB/s", "attribute", "launch"]
    rows = [
        ["nothing", "-", "0.00 (0.00-0.01)", "0.03 (0.02-0.03)"],
        ["default, <small>", "27.5 (27.0-28.0)", "1.00 (0.90-1.10)", "0.50 (0.40-0.60)"],
        ["cuMemHostAlloc", "3.5 (3.4-3.6)", "4500.00 (4499-4501)", "4400.00 (4399-4401)"],
    ]
    write_tables(
        tmp_path / "stalls-x1.json", [Table("Longest call while filling, ms", columns, rows)]
    )
    return tmp_path


def test_a_picture_says_the_figures_of_its_table(stalls: Path) -> None:
    drawn = {name: ElementTree.fromstring(text) for name, text in draw(stalls).items()}
    said = {name: svg.findtext("{*}desc") for name, svg in drawn.items()}
    assert said == {
        "stalls-x1-rates.svg": "hostmem, <small>: 27.5; cuMemHostAlloc: 3.5",
        # The kind of call that fares worst.
        "stalls-x1-waits.svg": (
            "nothing: 30.0 µs; hostmem, <small>: 1.00 ms; cuMemHostAlloc: 4.50 s"
        ),
    }
    for svg in drawn.values():
        assert "prefers-color-scheme: dark" in (svg.findtext("{*}style") or "")


def test_a_picture_of_a_former_run_goes(stalls: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "old-x1-rates.svg").write_text("old")
    write(images, stalls)
    assert {path.name: path.read_text() for path in images.iterdir()} == draw(stalls)


def test_a_table_without_a_picture_has_none(results: Path) -> None:
    assert draw(results) == {}
    assert "![" not in render(results)


def test_a_run_is_shown_with_its_circumstances(results: Path) -> None:
    section = render(results).partition("## Stalls, x1")[2].partition("\n## ")[0]
    for line in (
        "- size: 6 GiB",
        "- calls: 3",
        "- not measured: CuPy; torch",
        "**Rates**",
        "| small \\| huge | 5 (4-6) |",
        "With 8 threads.",
        "| held | as fast as it gets | 5 GiB/s | >= 4 GiB/s | torch: 2 GiB/s | 2.5 |",
        "| **missed** | first slot at once | 12 ms | <= 10 ms |  |  |",
        "| not measured | fill beside CuPy | 5 GiB/s | >= 2 x |  |  |",
    ):
        assert line in section.splitlines()
    assert "- command: `python " in section
    assert "1.5" not in section  # raw times stay in the file


def test_what_was_missed_is_collected(results: Path) -> None:
    section = render(results).partition("## Where we lose")[2].partition("\n## ")[0]
    assert "| first slot at once | 12 ms | <= 10 ms |  |  | [Stalls, x1](#stalls-x1) |" in section
    assert HELD.question not in section
    assert UNKNOWN.question not in section
    assert "no results here of: first_slot, contention, pages, tier." in section


def test_pairs_are_shown(results: Path) -> None:
    assert "| ours / theirs | 2 ms | 1 ms | 2 (2-2) |" in render(results)


def test_runs_are_in_the_order_of_the_benchmarks(results: Path) -> None:
    text = render(results)
    places = [text.index(f"\n## {title}") for title in ("Fill, x1", "Stalls, x1", "Wait, x1")]
    assert places == sorted(places)


# ---------------------------------------------------------------------------- all, one by one

WRITES = """
import json, sys
found = {"findings": [FINDING]}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(found))
"""
FINDING = {
    "question": "is it there",
    "ours": "1 s",
    "bound": "<= 2 s",
    "peer": "",
    "ratio": "0.5",
    "held": True,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose benchmarks are found before ours."""
    folder = tmp_path / "bench"
    folder.mkdir()
    for name, text in {
        "__init__": "",
        "good": WRITES.replace("FINDING", repr(FINDING)),
        "bad": "raise SystemExit(3)",
        "silent": "",
        "endless": "import threading; threading.Event().wait()",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_benchmark_that_fails_does_not_stop_the_next(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "bad,silent,good"]) == 1
    shown = capfd.readouterr().out
    head, _, tail = shown.partition("\nfindings\n")
    assert [line for line in head.splitlines() if line.startswith("==")] == [
        "== bench.bad",
        "== bench.silent",
        "== bench.good",
    ]
    assert "is it there" in tail
    assert "held" in tail
    assert "bad: exit status 3" in tail
    assert "silent: measured nothing" in tail
    (written,) = (package / "build" / "gpu").iterdir()
    assert written.name.startswith("good-")
    assert json.loads(written.read_text())["findings"] == [FINDING]


def test_an_old_result_is_none(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "good", "--out", "out"]) == 0
    (written,) = (package / "out").iterdir()
    (package / "bench" / "good.py").write_text("")
    assert main(["--only", "good", "--out", "out"]) == 1
    assert not written.exists()


def test_a_benchmark_that_does_not_end_is_stopped(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "endless", "--limit", "0.1"]) == 1
    assert "endless: took longer than 0.1 s" in capfd.readouterr().out


def test_what_is_missing_is_said_first(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")
    main(["--only", "good"])
    head = capfd.readouterr().out.partition("== bench.good")[0]
    assert "missing: a C compiler" in head
