"""One line at the prompt, tables in a terminal and in a notebook."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from hostmem.describing import Facts, Table, html_of, named, notebook, one_line, percent


class Thing:
    def __init__(self, text: str | None = None) -> None:
        if text is not None:
            self.text = text

    @one_line
    def __repr__(self) -> str:
        return f"<Thing {self.text}>"

    @notebook
    def _repr_html_(self) -> str:
        return html_of(repr(self), [Facts([("text", self.text)])])


def test_a_repr_is_one_line() -> None:
    assert repr(Thing("a\nb\n c")) == "<Thing a b  c>"


def test_what_is_only_half_there_says_so() -> None:
    assert repr(Thing()) == "<Thing, incomplete>"
    assert Thing()._repr_html_() == "<div><code>&lt;Thing, incomplete&gt;</code></div>"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.194, "19 %"), (0.999, "99 %"), (1, "100 %"), (0.001, "0 %"), (0.505, "50 %")],
)
def test_only_what_is_whole_is_100_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_many_things_are_named_in_part() -> None:
    assert named([]) == ""
    assert named(["a", 2, "c", 4]) == "'a', 2, 'c', 4"
    assert named(range(9)) == "0, 1, 2, 3 and 5 more"


def test_a_table_has_names_to_the_left_and_figures_to_the_right() -> None:
    assert str(Table([("level", "slots"), ("gpu", "8"), ("host", "1,024")])) == (
        "level  slots\ngpu        8\nhost   1,024"
    )


def test_facts_stand_in_two_columns() -> None:
    facts = [("fill", "done"), ("", "at last"), ("device", "cpu")]
    assert str(Facts(facts)) == "fill   done\n       at last\ndevice cpu"
    assert str(Facts(facts, 8)).splitlines()[0] == "fill    done"


def test_html_is_whole_and_escaped_and_has_no_colours_of_its_own() -> None:
    evil = "<script>&\"'"
    page = html_of(evil, [Table([(evil, evil), (evil, evil)], evil), Facts([(evil, evil)]), evil])
    root = ElementTree.fromstring(page)  # every tag is closed
    assert {node.tag for node in root.iter()} == {
        *("div", "code", "table", "caption", "thead", "tbody", "tr", "th", "td", "pre")
    }
    assert [node.text for node in root.iter() if node.text] == [evil] * 9
    styles = " ".join(node.get("style", "") for node in root.iter())
    assert "background" not in styles
    assert "rgba(128,128,128" in styles  # as faint on white as on black


def test_a_table_without_a_title_has_no_caption() -> None:
    assert "caption" not in html_of("x", [Table([("a",), ("b",)])])
