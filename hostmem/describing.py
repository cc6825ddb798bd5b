"""How objects show themselves: one line at the prompt, tables in a terminal and in a notebook."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["Facts", "Table", "html_of", "named", "notebook", "one_line", "percent"]

# No colours but the page's own, and lines that are faint on any: for light and dark notebooks.
_TABLE = "border-collapse:collapse;margin:.5em 0"
_CELL = "padding:.15em .8em;border-bottom:1px solid rgba(128,128,128,.4)"
_MOST_NAMES = 4


def one_line(shown: Callable[[Any], str]) -> Callable[[Any], str]:
    """Let a ``__repr__`` give one line, whatever the state of the object.

    An object whose constructor raised, or one that the garbage collector has begun to take apart,
    lacks some of its parts; it is shown to people who look for another error.
    """

    @functools.wraps(shown)
    def __repr__(self: Any) -> str:
        try:
            return " ".join(shown(self).split("\n"))
        except Exception:
            return f"<{type(self).__name__}, incomplete>"

    return __repr__


def notebook(shown: Callable[[Any], str]) -> Callable[[Any], str]:
    """Let a ``_repr_html_`` fall back to the ``repr``, where there is nothing to lay out."""

    @functools.wraps(shown)
    def _repr_html_(self: Any) -> str:
        try:
            return shown(self)
        except Exception:
            return f"<div><code>{escape(repr(self))}</code></div>"

    return _repr_html_


def percent(share: float) -> str:
    """Show a share, ``"19 %"``; only what is whole is 100 %."""
    return f"{int(share * 100)} %" if 0.99 < share < 1 else f"{share * 100:.0f} %"


def named(things: Sequence[object]) -> str:
    """Name some things, and say how many more there are."""
    more = len(things) - _MOST_NAMES
    shown = ", ".join(map(repr, things[:_MOST_NAMES]))
    return f"{shown} and {more} more" if more > 0 else shown


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the first of which names the columns."""

    rows: Sequence[tuple[str, ...]]
    """All of one length; the first column is of names, the others are of figures."""
    title: str = ""
    """Stands above it in a notebook."""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        return "\n".join(
            f"{name:<{widths[0]}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            for name, *cells in self.rows
        )

    def html(self) -> str:
        """Lay it out for a notebook."""
        head, *rows = self.rows
        title = f'<caption style="text-align:left">{escape(self.title)}</caption>'
        return (
            f'<table style="{_TABLE}">{title if self.title else ""}'
            f"<thead>{_row('th', head, 'right')}</thead>"
            f"<tbody>{''.join(_row('td', row, 'right') for row in rows)}</tbody></table>"
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """Rows of a name and what it is; those without a name go on with the one above."""

    rows: Sequence[tuple[str, str]]
    """At least one."""
    width: int = 0
    """Characters that names take, at least."""

    def __str__(self) -> str:
        width = max(self.width, *(len(name) + 1 for name, _ in self.rows))
        return "\n".join(f"{name:<{width}}{text}" for name, text in self.rows)

    def html(self) -> str:
        """Lay it out for a notebook."""
        rows = "".join(_row("td", row, "left") for row in self.rows)
        return f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>'


def html_of(title: str, parts: Iterable[Table | Facts | str], drawn: str = "") -> str:
    """Lay something out for a notebook: a line, and below it tables or text.

    All is escaped, but for ``drawn``: HTML that comes last.
    """
    shown = (f"<pre>{escape(p)}</pre>" if isinstance(p, str) else p.html() for p in parts)
    return f"<div><code>{escape(title)}</code>{''.join(shown)}{drawn}</div>"


def _row(kind: str, cells: Sequence[str], side: str) -> str:
    first, *others = cells
    rest = "".join(
        f'<{kind} style="text-align:{side};{_CELL}">{escape(cell)}</{kind}>' for cell in others
    )
    return f'<tr><th style="text-align:left;{_CELL}">{escape(first)}</th>{rest}</tr>'
