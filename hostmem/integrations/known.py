"""Which version of a library is here, and whether a module of ours was made for it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

__all__ = ["check_known", "import_known", "named"]


def import_known(plugin: str, library: str, known: Sequence[str]) -> Any:
    """Import a library, and refuse one whose interface a module of ours was not made for.

    Parameters
    ----------
    plugin : str
        Our module, for the message.
    library : str
        Name of the library's module, which has a ``__version__``.
    known : sequence of str
        Leading parts of the versions that our module knows, such as ``"14"``.

    Returns
    -------
    module
        The library.

    Raises
    ------
    ImportError
        The library is not there, or of another version; the message names both versions.
    """
    try:
        module = import_module(library)
    except ImportError as error:
        raise ImportError(
            f"{plugin} needs {library} {named(known)}, which cannot be imported: {error}",
            name=library,
        ) from error
    check_known(plugin, library, module.__version__, known)
    return module


def check_known(plugin: str, name: str, found: str, known: Sequence[str]) -> None:
    """Refuse a version that a module of ours was not made for.

    Parameters
    ----------
    plugin : str
        Our module, for the message.
    name : str
        Of the library.
    found : str
        The version that is here.
    known : sequence of str
        Leading parts of the versions that our module knows, such as ``"14"``.

    Raises
    ------
    ImportError
        It is none of them; the message names both versions.
    """
    public, _, _ = found.partition("+")  # what is behind says only who built it
    if not any(f"{public}.".startswith(f"{each}.") for each in known):
        raise ImportError(
            f"{plugin} knows {name} {named(known)}, and {name} {found} is installed: install one "
            f"that it knows, or a release of hostmem that knows {found}",
            name=name,
        )


def named(known: Sequence[str]) -> str:
    """Name versions by their leading parts, for a message: ``"13.x or 14.x"``."""
    return " or ".join(f"{each}.x" for each in known)
