"""Sizes: bytes as integers, read from and shown as text such as ``"64GiB"``."""

from __future__ import annotations

import re
from operator import index
from typing import SupportsIndex

__all__ = ["Size", "align_down", "align_up", "format_size", "parse_size"]

Size = SupportsIndex | str
"""What a size argument takes: bytes as an integer, or text with a binary or decimal unit."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTPE", start=1):
    _UNITS[f"{_letter}IB"] = 1 << (10 * _power)
    _UNITS[f"{_letter}B"] = 1000**_power

_TEXT = re.compile(r"\s*([+-]?)(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*")


def parse_size(value: Size, name: str = "size") -> int:
    """Read a size in bytes.

    Parameters
    ----------
    value : int or str
        Bytes, or text: a decimal number and one of B, KiB, MiB, GiB, TiB, PiB, EiB (powers of
        1024) or kB, MB, GB, TB, PB, EB (powers of 1000), in any case. Fractions are exact:
        ``"1.5GiB"`` is 1,610,612,736 and ``"0.3B"`` is refused.
    name : str
        What the argument is called in the error.

    Returns
    -------
    int
        Bytes; negative when the text or number is (the caller knows its own bounds).

    Raises
    ------
    ValueError
        If the text is no size or not a whole number of bytes.
    TypeError
        If the value is neither an integer nor text.
    """
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        unit = _UNITS.get(match[4].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(
                f"{name}: {value!r} is no size; write bytes or a number with a unit, such as 64GiB"
            )
        sign, whole, fraction, _ = match.groups()
        digits = fraction or ""
        scaled, rest = divmod(int(whole + digits) * unit, int(10 ** len(digits)))
        if rest:
            raise ValueError(f"{name}: {value!r} is not a whole number of bytes")
        return -scaled if sign == "-" else scaled
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected bytes or text such as '64GiB', not {value!r}")
    try:
        return index(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected whole bytes or text such as '64GiB', "
            f"not {type(value).__name__} {value!r}"
        ) from None


def format_size(nbytes: int) -> str:
    """Show bytes for a person: three significant digits and a binary unit, ``"12.5 GiB"``."""
    sign, left = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if left < 1024:
        return f"{sign}{left} B"
    value = float(left)
    for letter in "KMGTPE":
        value /= 1024
        if value < 999.5 or letter == "E":
            break
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return f"{sign}{text.rstrip('0').rstrip('.') if '.' in text else text} {letter}iB"


def align_down(value: int, unit: int) -> int:
    """Round down to a multiple of ``unit``."""
    return value // unit * unit


def align_up(value: int, unit: int) -> int:
    """Round up to a multiple of ``unit``."""
    return -(-value // unit) * unit
