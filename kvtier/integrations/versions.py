"""Which version of an engine is installed, and whether its plug-in was made for it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["check_version"]


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
    wanted = " or ".join(f"{each}.x" for each in known)
    try:
        found = version(engine)
    except PackageNotFoundError:
        raise ImportError(
            f"{plugin} needs {engine} {wanted}, which is not installed", name=engine
        ) from None
    public, _, _ = found.partition("+")  # what is behind says only who built it
    if not any(f"{public}.".startswith(f"{each}.") for each in known):
        raise ImportError(
            f"{plugin} knows {engine} {wanted}, and {engine} {found} is installed: install one "
            f"that it knows, or a release of hostmem that knows {found}",
            name=engine,
        )
    return found
