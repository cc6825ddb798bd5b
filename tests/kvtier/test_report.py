"""The page of a replay: whole, of itself, and with the figures that ``--json`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvtier.__main__ import main
from kvtier.replay import Latency, LevelUse, ReplayOptions, ReplayResult, generate, write_trace
from kvtier.replay.recording import Histogram, Moment, Recording
from kvtier.replay.report import render_report, write_report
from kvtier.stats import Waits

VOID = {"meta", "link", "br", "wbr", "img", "hr", "input"}
NASTY = "</script><b>\"x\" & 'y'</b>.jsonl"


class Page(HTMLParser):
    """Reads a page and refuses one whose elements do not close in the order they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: dict[str, str] = {}
        self.data: dict[str, Any] = {}
        self.texts: list[str] = []
        self._within: dict[str, str | None] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within = dict(attrs)
        self.tags.append((tag, self._within))
        if tag not in VOID:
            self.open.append(tag)
        if "data-figure" in self._within:
            self.figures[self._within["data-figure"] or ""] = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._within = {}

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data[self._within["id"] or ""] = json.loads(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)
            if name := self._within.get("data-figure"):
                self.figures[name] += data


def leaves(value: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the figures of JSON by path."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from leaves(each, f"{before}{name}.")
        else:
            yield before + name, each


def same(shown: str, figure: Any) -> bool:
    """Say whether a figure is shown as it is, floats to six digits."""
    if isinstance(figure, float):
        return float(shown) == pytest.approx(figure, rel=1e-5)
    return shown == figure if isinstance(figure, str) else json.loads(shown) == figure


RESULT = ReplayResult(
    mode="bytes",
    trace=f"/data/{NASTY}",
    policy="lru",
    device="cpu",
    requests=40,
    block_refs=1_000,
    hits=250,
    hits_by_level={"gpu": 150, "host": 100},
    verified_blocks=120,
    corrupt_blocks=0,
    lost_blocks=0,
    bytes_moved={"gpu->host": 3 << 20, "host->gpu": 1 << 20},
    seconds=2.0,
    first_request_done_seconds=0.0125,
    host_tier_filled_seconds=1.5,
    levels={
        "gpu": LevelUse(slots=1_024, quota=64 << 20, used=1_024),
        "host": LevelUse(slots=8_192, quota=512 << 20, used=700),
    },
    latency_us=Latency(p50=800.0, p99=12_500.0),
)


@pytest.fixture
def recording() -> Recording:
    """Give the course of RESULT."""
    found = Recording()
    for n in range(1, 40):
        found.note(n / 20, lambda s, n=n: moment(s, n))  # type: ignore[misc]
    found.end(moment(2.0, 40))
    found.latencies = Histogram.of([800_000] * 20 + [12_500_000] * 20)
    found.waits = {"blocks": Waits(3, 0.5, 0.25)}
    return found


def moment(seconds: float, n: int) -> Moment:
    return Moment(
        seconds=seconds,
        requests=n,
        block_refs=25 * n,
        hits={"gpu": 15 * n // 4, "host": 5 * n // 2},
        host_filled=min(seconds / 1.5, 1.0),
        moved={"gpu->host": n * (3 << 20) // 40, "host->gpu": n * (1 << 20) // 40},
        waited={"blocks": n / 80},
    )


def test_the_page_is_well_formed_and_shows_every_figure(recording: Recording) -> None:
    page = Page(render_report(RESULT, recording))
    expected = json.loads(json.dumps(RESULT.to_json()))
    assert page.data["summary"] == expected
    assert set(page.figures) == {name for name, _ in leaves(expected)}
    for name, figure in leaves(expected):
        assert same(page.figures[name], figure), name


def test_the_course_is_embedded(recording: Recording) -> None:
    page = Page(render_report(RESULT, recording))
    assert page.data["course"] == json.loads(json.dumps(recording.to_json()))
    assert len(page.data["course"]["course"]) == 40


def test_what_matters_is_said_in_sentences(recording: Recording) -> None:
    text = " ".join(Page(render_report(RESULT, recording)).texts)
    for said in (
        "The first request was served after 12.5 ms. The host tier was filled after 1.50 s,"
        " when 30 requests had been served.",
        "25.0% of 1,000 block references were found",
        "gpu 15.0%",
        "4 MiB in all.",
        "gpu → host: 3 MiB",
        "500 ms of 2.00 s were spent waiting.",
        "Half of the requests took at most 800 µs, 99 in 100 at most 12.5 ms.",
    ):
        assert said in text


def test_every_picture_is_described_and_has_a_table(recording: Recording) -> None:
    page = Page(render_report(RESULT, recording))
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("figure") == tags.count("details") == 5
    assert [ids.index(name) for name in ("filling", "hits", "moved", "waits", "latency")]


def test_the_page_needs_nothing_from_elsewhere(recording: Recording) -> None:
    text = render_report(RESULT, recording, command="python -m kvtier replay")
    for tag, attributes in Page(text).tags:
        if tag == "script":
            assert attributes["type"] == "application/json"
        for name in ("src", "href", "xlink:href", "action", "srcset", "data"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"@import|url\(", text)
    assert "default-src 'none'" in text


def test_a_name_cannot_become_markup(recording: Recording) -> None:
    page = Page(render_report(RESULT, recording, command=f"python -m kvtier replay {NASTY}"))
    assert "b" not in {tag for tag, _ in page.tags}
    assert NASTY.split()[0] in page.texts  # of the command, as it is


def test_wrong_bytes_are_said_at_the_head(recording: Recording) -> None:
    assert 'class="alarm"' not in render_report(RESULT, recording)
    text = render_report(replace(RESULT, corrupt_blocks=2, lost_blocks=1), recording)
    assert "wrong bytes: 2. Blocks lost to copies that failed: 1." in text
    assert text.index('class="alarm"') < text.index('class="tiles"')


def test_a_host_tier_that_was_never_filled_is_said_to(recording: Recording) -> None:
    text = render_report(replace(RESULT, host_tier_filled_seconds=None), recording)
    assert "The host tier was never filled." in text


def test_a_replay_of_nothing_is_a_page() -> None:
    nothing = replace(
        RESULT, requests=0, block_refs=0, hits=0, hits_by_level={}, verified_blocks=0,
        bytes_moved={}, first_request_done_seconds=None, latency_us=None,
    )  # fmt: skip
    recording = Recording()
    recording.end(Moment(seconds=0.1, requests=0, block_refs=0, hits={}, host_filled=0.5))
    page = Page(render_report(nothing, recording))
    assert [tag for tag, _ in page.tags].count("figure") == 1  # the filling


def test_the_configuration_is_shown(recording: Recording, tmp_path: Path) -> None:
    options = ReplayOptions(trace="t", host_quota=None, block_bytes=4096, policy="arc")
    text = render_report(RESULT, recording, options=options)
    for name, value in (("host_quota", "none"), ("gpu_quota", "64 MiB"), ("block_bytes", "4 KiB")):
        assert f'<th scope="row">{name}</th><td>{value}</td>' in text


def test_it_is_written_whole(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with path.open() as reader:
        write_report(RESULT, recording, path)
        assert reader.read() == "old"
    assert path.read_text() == render_report(RESULT, recording)
    assert list(tmp_path.iterdir()) == [path]


# --------------------------------------------------------------------------- command line


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        write_trace(generate(7, 60), file)
    return path


def test_the_page_and_the_json_have_the_same_figures(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["--gpu-quota", "2MiB", "--host-quota", "2MiB", "--disk-quota", "4MiB"]
    words += ["--disk-path", str(folder), "--block-bytes", "16KiB", "--device", "cpu"]
    pair = {"--json": tmp_path / "r.json", "--html": tmp_path / "r.html"}
    outs = [word for flag, path in pair.items() for word in (flag, str(path))]
    assert main(["replay", str(trace), *words, *outs]) == 0
    page = Page(pair["--html"].read_text())
    written = json.loads(pair["--json"].read_text())
    assert page.data["summary"] == written
    assert all(same(page.figures[name], figure) for name, figure in leaves(written))
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"filling", "hits", "moved", "waits", "latency"} <= ids
    assert {"placement-gpu", "placement-host"} <= ids
    last = page.data["course"]["course"][-1]
    assert last["moved"] == written["bytes_moved"]
    assert any("node 0" in text for text in page.texts)


def test_a_replay_of_metadata_has_a_page(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    assert main(["replay", str(trace), "--metadata-only", "--html", str(path)]) == 0
    page = Page(path.read_text())
    assert page.data["summary"]["mode"] == "metadata"
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert "hits" in ids
    assert not {"filling", "moved", "waits", "latency"} & ids


def test_the_page_is_written_before_wrong_bytes_are_status_1(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.replay import engine

    monkeypatch.setattr(engine, "replay_bytes", lambda *_: replace(RESULT, corrupt_blocks=2))
    path = tmp_path / "r.html"
    assert main(["replay", str(trace), "--html", str(path)]) == 1
    assert "Blocks that came back with wrong bytes: 2." in path.read_text()


def test_how_the_memory_was_filled_is_beside_where_it_is(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    assert main(["replay", str(trace), "--host-quota", "2MiB", "--html", str(path)]) == 0
    section = path.read_text().partition('id="placement-host"')[2].partition("</section>")[0]
    assert '<th scope="row">found</th><td>2 MiB on node 0</td>' in section
    assert '<th scope="row">filled at</th>' in section
