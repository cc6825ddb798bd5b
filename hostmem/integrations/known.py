"""Which version of a library is here, and whether a module of ours was made for it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

__all__ = ["import_known"]


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
    wanted = " or ".join(f"{each}.x" for each in known)
    try:
        module = import_module(library)
    except ImportError as error:
        raise ImportError(
            f"{plugin} needs {library} {wanted}, which cannot be imported: {error}", name=library
        ) from error
    found = module.__version__
    public, _, _ = found.partition("+")  # what is behind says only who built it
    if not any(f"{public}.".startswith(f"{each}.") for each in known):
        raise ImportError(
            f"{plugin} knows {library} {wanted}, and {library} {found} is installed: install one "
            f"that it knows, or a release of hostmem that knows {found}",
            name=library,
        )
    return module
