"""The page of a replay in a headless Chromium: what a reader gets on a phone and on a desk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.__main__ import main
from kvtier.replay import generate, write_trace
from tests.kvtier.chromium import Chromium, find_chromium
from tests.kvtier.test_report import leaves, same

pytestmark = pytest.mark.chromium

FIGURES = """Object.fromEntries(Array.from(
  document.querySelectorAll("[data-figure]"), e => [e.dataset.figure, e.innerText.trim()]))"""
HIDDEN = """Array.from(document.querySelectorAll("[data-figure], figure > svg, h2, .map"))
  .filter(e => !e.checkVisibility() || !e.getBoundingClientRect().width)
  .map(e => e.outerHTML.slice(0, 80))"""
# What sticks out of the screen, but for what is in a box that scrolls by itself.
BEYOND = """Array.from(document.querySelectorAll("main *"))
  .filter(e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => e.outerHTML.slice(0, 80))"""
# Text of a picture that is cut off, or that is set too small to be read.
CUT = """Array.from(document.querySelectorAll("figure > svg")).flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return Array.from(svg.querySelectorAll("text")).filter(text => {
    const box = text.getBoundingClientRect();
    const out = box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    return out || box.height < 9;
  }).map(text => svg.querySelector("title").textContent + ": " + text.textContent)})"""
# The least contrast between text and what is behind it, as WCAG 2 counts it.
CONTRAST = """(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b };
  const colour = e => getComputedStyle(e).backgroundColor;
  const back = e => / 0\\)$/.test(colour(e)) ? back(e.parentElement) : colour(e);
  const all = Array.from(document.querySelectorAll("main *:not(.map *)"))
    .filter(e => Array.from(e.childNodes).some(n => n.nodeType == 3 && n.data.trim()))
    .filter(e => !e.closest("title, desc"))
    .map(e => { const style = getComputedStyle(e), svg = e.closest("svg");
      const pair = [light(svg ? style.fill : style.color), light(back(e))].sort((a, b) => b - a);
      return (pair[0] + .05) / (pair[1] + .05) });
  return Math.min(...all) })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program, _ = find_chromium()
    with Chromium(program, tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replay a trace with a name that does not break, over three levels; return the page's path."""
    folder = tmp_path_factory.mktemp("replay")
    trace = folder / f"{'trace' * 20}.jsonl"
    with trace.open("w") as file:
        write_trace(generate(7, 200), file)
    # fmt: off
    words = [
        "--gpu-quota", "4MiB", "--host-quota", "4MiB", "--disk-quota", "16MiB", "--device", "cpu",
        "--disk-path", str(folder), "--block-bytes", "16KiB",
        "--json", str(folder / "report.json"), "--html", str(folder / "report.html"),
    ]
    # fmt: on
    assert main(["replay", str(trace), *words]) == 0
    return folder / "report.html"


SCREENS = {
    "phone-light": (360, False),
    "phone-dark": (360, True),
    "tablet-light": (768, False),
    "desk-light": (1280, False),
    "desk-dark": (1280, True),
}


@pytest.fixture(params=list(SCREENS.values()), ids=list(SCREENS))
def shown(request: pytest.FixtureRequest, browser: Chromium, page: Path) -> Chromium:
    width, dark = request.param
    browser.open(page.as_uri(), width=width, dark=dark)
    assert browser.evaluate("innerWidth") == width  # laid out for this screen, not for a wider one
    return browser


def test_nothing_is_complained_of_and_nothing_is_fetched(shown: Chromium, page: Path) -> None:
    assert shown.told("Log.entryAdded") == []
    assert shown.told("Runtime.consoleAPICalled") == []
    assert shown.told("Runtime.exceptionThrown") == []
    asked = [each["request"]["url"] for each in shown.told("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]


def test_the_figures_are_those_of_the_json(shown: Chromium, page: Path) -> None:
    figures: dict[str, Any] = shown.evaluate(FIGURES)
    written = dict(leaves(json.loads(page.with_suffix(".json").read_text())))
    assert set(figures) == set(written)
    assert [name for name, value in written.items() if not same(figures[name], value)] == []
    embedded = shown.evaluate("document.getElementById('summary').textContent")
    assert json.loads(embedded) == json.loads(page.with_suffix(".json").read_text())


def test_everything_is_seen_without_scrolling_sideways(shown: Chromium) -> None:
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert shown.evaluate(BEYOND) == []
    assert shown.evaluate(HIDDEN) == []


def test_nothing_in_a_picture_is_cut_off_or_too_small(shown: Chromium) -> None:
    assert shown.evaluate("document.querySelectorAll('figure > svg').length") >= 8
    assert shown.evaluate(CUT) == []


def test_text_stands_out_from_what_is_behind_it(shown: Chromium) -> None:
    assert shown.evaluate(CONTRAST) >= 4.5


def test_the_colours_follow_the_scheme(browser: Chromium, page: Path) -> None:
    def looks(dark: bool) -> tuple[Any, ...]:
        browser.open(page.as_uri(), dark=dark)
        colour = "getComputedStyle(document.querySelector('{}')).{}"
        places = (
            ("body", "backgroundColor"),
            ("body", "color"),
            (".area", "fill"),
            (".card", "backgroundColor"),
        )
        return tuple(browser.evaluate(colour.format(*place)) for place in places)

    assert all(light != dark for light, dark in zip(looks(False), looks(True), strict=True))


def test_the_tables_open(shown: Chromium) -> None:
    shown.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert shown.evaluate("document.querySelectorAll('details td').length") > 20
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_check_of_requests_sees_one(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<!DOCTYPE html><title>x</title><img src='missing.png'><script>console.error('no')</script>"
    )
    browser.open((tmp_path / "bad.html").as_uri())
    assert len(browser.told("Network.requestWillBeSent")) == 2
    assert browser.told("Log.entryAdded")
    assert browser.told("Runtime.consoleAPICalled")
