"""A map of a range: one character for each stretch of it, for terminals and for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from string import ascii_lowercase, digits

from hostmem.units import format_size

__all__ = ["Stretch", "draw", "draw_html"]

_NODES = digits + ascii_lowercase
_LEGEND = {
    "#": "quarantined: usable, not registered",
    "_": "released",
    ".": "reserved",
    "-": "nothing resident",
    "~": "less than half resident",
    "*": "several nodes",
    "?": "where it is is not known",
    "+": "a node above 35",
}
# Colours of nodes that tell on white and on black; further nodes begin anew, the letter tells.
_COLOURS = ("#4c8bf5", "#e8871e", "#2fa36b", "#b565c9", "#c9a227", "#d9534f", "#20a4b8", "#8a7b6c")


@dataclass(frozen=True, slots=True)
class Stretch:
    """One of the equal parts of a range."""

    offset: int
    """Bytes from the first byte of the range."""
    nbytes: int
    """Its bytes."""
    bytes_by_node: dict[int, int] | None
    """Resident bytes by memory node; None where that is not known."""
    bytes_by_page_size: dict[int, int] = field(default_factory=dict)
    """Resident bytes by the size of the page that maps them."""
    bytes_by_state: dict[str, int] = field(default_factory=dict)
    """Bytes in each of the states that its owner knows: registered, quarantined, released..."""

    @property
    def resident(self) -> int | None:
        """Resident bytes; None where that is not known."""
        return None if self.bytes_by_node is None else sum(self.bytes_by_node.values())

    @property
    def state(self) -> str:
        """The state that most of it is in; empty where its owner names none."""
        states = self.bytes_by_state
        return max(states, key=lambda name: states[name], default="")

    @property
    def symbol(self) -> str:
        """The character that stands for it in a map."""
        if self.bytes_by_state.get("quarantined"):
            return "#"
        if not self.resident:
            if self.state in ("released", "reserved"):
                return "_" if self.state == "released" else "."
            return "?" if self.bytes_by_node is None else "-"
        nodes = [node for node, nbytes in (self.bytes_by_node or {}).items() if nbytes]
        if len(nodes) > 1:
            return "*"
        if 2 * self.resident < self.nbytes:
            return "~"
        return _NODES[nodes[0]] if nodes[0] < len(_NODES) else "+"


def draw(stretches: Sequence[Stretch], width: int) -> str:
    """Draw a map in lines of ``width`` characters, each after the offset that it begins at.

    Raises
    ------
    ValueError
        A width below 1.
    """
    if width < 1:
        raise ValueError(f"width: {width}; give at least 1 character")
    if not stretches:
        return "nothing to draw"
    symbols = "".join(stretch.symbol for stretch in stretches)
    offsets = [format_size(s.offset) for s in stretches[::width]]
    margin = max(map(len, offsets))
    lines = [
        f"{offset:>{margin}} |{symbols[n * width : (n + 1) * width]}|"
        for n, offset in enumerate(offsets)
    ]
    each = format_size(max(stretch.nbytes for stretch in stretches))
    return "\n".join([*lines, f"{'':{margin}}  each {each}; {'; '.join(_legend(symbols))}"])


def _legend(symbols: str) -> Iterator[str]:
    for symbol in sorted(set(symbols)):
        node = _NODES.find(symbol)
        yield f"{symbol} {f'node {node}' if node >= 0 else _LEGEND[symbol]}"


def draw_html(stretches: Sequence[Stretch]) -> str:
    """Draw a map as a row of HTML boxes, which say what they are when pointed at."""
    boxes = []
    for stretch in stretches:
        symbol = stretch.symbol
        node = _NODES.find(symbol)
        colour = _COLOURS[node % len(_COLOURS)] if node >= 0 else "transparent"
        nodes = stretch.bytes_by_node or {}
        found = ", ".join(f"{format_size(n)} on node {k}" for k, n in sorted(nodes.items()))
        title = " · ".join(
            filter(
                None, (f"{format_size(stretch.nbytes)} at {stretch.offset}", stretch.state, found)
            )
        )
        boxes.append(
            f'<span title="{escape(title)}" style="display:inline-block;width:1ch;'
            f'text-align:center;background:{colour}">{escape(symbol)}</span>'
        )
    legend = "; ".join(_legend("".join(stretch.symbol for stretch in stretches)))
    return (
        '<div style="font-family:monospace;line-height:1.3;max-width:66ch;'
        'overflow-wrap:anywhere;border:1px solid;padding:2px">'
        f"{''.join(boxes)}</div><small>{escape(legend)}</small>"
    )
