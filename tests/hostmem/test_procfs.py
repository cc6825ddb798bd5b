"""Files of proc and sys, in the formats the kernel writes them in, and in none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostmem import procfs


def test_a_file_is_read_whole_and_stripped(tmp_path: Path) -> None:
    lines = "".join(f"line {n}\n" for n in range(100_000))  # more than one read() returns
    (tmp_path / "file").write_text(lines)
    assert procfs.read(tmp_path / "file") == lines.strip()


@pytest.mark.parametrize("name", ["absent", "folder", "absent/absent"])
def test_what_cannot_be_read_is_empty(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert procfs.read(tmp_path / name) == ""


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"cache 1\n\xff\xfe 2\nrss 3")
    assert procfs.fields(procfs.read(tmp_path / "file")) == {"cache": 1, "rss": 3}


@pytest.mark.parametrize(
    ("text", "found"), [("0", 0), ("17", 17), ("max", None), ("-1", None), ("", None), ("²", None)]
)
def test_a_number_is_read(text: str, found: int | None) -> None:
    assert procfs.number(text) == found


def test_fields_of_meminfo_are_bytes() -> None:
    text = "MemTotal:       24 kB\nActive(file):    3 kB\nHugePages_Total:       5"
    assert procfs.fields(text) == {
        "MemTotal": 24 << 10,
        "Active(file)": 3 << 10,
        "HugePages_Total": 5,
    }


def test_fields_of_a_nodes_meminfo_are_named_as_the_machines() -> None:
    assert procfs.fields("Node 12 MemFree:  24 kB\nNode 12 Dirty: 0 kB") == {
        "MemFree": 24 << 10,
        "Dirty": 0,
    }


def test_lines_that_are_no_fields_are_passed_over() -> None:
    text = (
        "what is this\nname\nVmPin: x kB\n17\ncache 4\nMems_allowed_list:\t0-1\nhigh 2 kB and more"
    )
    assert procfs.fields(text) == {"cache": 4}


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ()), ("0", (0,)), ("0-2", (0, 1, 2)), ("0,4-5,9", (0, 4, 5, 9)), ("(none)", ())],
)
def test_lists_are_read(text: str, found: tuple[int, ...]) -> None:
    assert procfs.numbers(text) == found
