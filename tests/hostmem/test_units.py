"""Sizes are read and shown exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostmem.units import align_down, align_up, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("64GiB", 64 * 1024**3),
        ("64 gib", 64 * 1024**3),
        ("  2MB ", 2 * 1000**2),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("0.5KiB", 512),
        ("1TiB", 1024**4),
        ("1PB", 1000**5),
        ("1EiB", 1024**6),
        ("+3KiB", 3072),
        ("-1KiB", -1024),
    ],
)
def test_text_is_read_as_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_a_fraction_is_exact_where_a_float_would_not_be() -> None:
    # 0.1 GB is a hundred million bytes; as floats, 0.1 * 3 GB is not 300,000,000 exactly.
    assert parse_size("0.3GB") == 300_000_000
    assert parse_size("1152921504606846975") == (1 << 60) - 1


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "12 parsecs", "1.GiB", ".5GiB", "1e9", "1,5GiB", "0x10", "1 2", "٣ furlongs"],
)
def test_text_that_is_no_size_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="quota: "):
        parse_size(text, "quota")


def test_a_part_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        parse_size("0.3B")


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint32(7)])
def test_integers_of_any_kind_are_bytes(value: Any) -> None:
    assert parse_size(value) == 7
    assert type(parse_size(value)) is int


@pytest.mark.parametrize("value", [1.5, 1.0, None, b"1GiB", True, [1]])
def test_what_is_neither_integer_nor_text_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="capacity: "):
        parse_size(value, "capacity")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),  # 1023.999 KiB would be four digits
        (12 * 1024**3 + 512 * 1024**2, "12.5 GiB"),
        (100 * 1024**3, "100 GiB"),
        (1024**4, "1 TiB"),
        (-2048, "-2 KiB"),
        (5000 * 1024**6, "5000 EiB"),
    ],
)
def test_bytes_are_shown_with_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, 1 << 62))
def test_what_is_shown_is_within_half_a_percent(nbytes: int) -> None:
    shown = parse_size(format_size(nbytes)) if nbytes < 1024 else None
    if shown is not None:
        assert shown == nbytes
    else:
        number, unit = format_size(nbytes).split()
        scale = parse_size(f"1{unit}")
        assert abs(float(number) * scale - nbytes) <= nbytes * 0.005
        assert float(number) < 1000


@given(st.integers(-(1 << 62), 1 << 62), st.integers(1, 1 << 40))
def test_rounding_lands_on_the_nearest_multiple_on_its_side(value: int, unit: int) -> None:
    below, above = align_down(value, unit), align_up(value, unit)
    assert below % unit == above % unit == 0
    assert value - unit < below <= value <= above < value + unit
