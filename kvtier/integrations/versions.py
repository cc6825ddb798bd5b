"""Which version of an engine is installed, and whether its plug-in was made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hostmem.integrations.known import check_known, named

__all__ = ["check_version", "on_demand"]


def check_version(plugin: str, engine: str, known: Sequence[str]) -> str:
    """Refuse an engine whose interfaces a plug-in was not made for.

    Parameters
    ----------
    plugin : str
        Module of the plug-in, for the message.
    engine : str
        Name of the engine's distribution.
    known : sequence of str
        Leading parts of the versions that the plug-in knows, such as ``"0.33"``.

    Returns
    -------
    str
        The version that is installed.

    Raises
    ------
    ImportError
        The engine is not installed, or of another version; the message names both versions.
    """
    try:
        found = version(engine)
    except PackageNotFoundError:
        raise ImportError(
            f"{plugin} needs {engine} {named(known)}, which is not installed", name=engine
        ) from None
    check_known(plugin, engine, found, known)
    return found


def on_demand(
    plugin: str, engine: str, known: Sequence[str], places: Mapping[str, str]
) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a plug-in that imports its engine when a name is asked for.

    Parameters
    ----------
    plugin, engine, known
        As of `check_version`, which comes first.
    places : mapping of str to str
        The module below the plug-in that each of its names is in.
    """

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {plugin!r} has no attribute {name!r}")
        check_version(plugin, engine, known)
        return getattr(import_module(f"{plugin}.{places[name]}"), name)

    return __getattr__
