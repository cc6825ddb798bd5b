"""What LMCache's configuration says for one of its storage plugins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["plugin_options"]

_PREFIX = "storage_plugin."
_LOADING = {"module_path", "class_name"}


def plugin_options(
    plugins: Collection[str], extra: Mapping[str, Any], class_name: str, known: Collection[str]
) -> dict[str, Any]:
    """Find the options of a storage plugin, which LMCache does not tell its name.

    Parameters
    ----------
    plugins : collection of str
        ``storage_plugins`` of the configuration.
    extra : mapping
        Its ``extra_config``: options are under ``storage_plugin.<name>.<option>``.
    class_name : str
        Of the plugin: its name is the one that is loaded from this class.
    known : collection of str
        The options there are.

    Returns
    -------
    dict
        Options by name.

    Raises
    ------
    ValueError
        None or several plugins are of this class, or there is no such option.
    """
    names = [name for name in plugins if extra.get(f"{_PREFIX}{name}.class_name") == class_name]
    if len(names) != 1:
        raise ValueError(
            f"{class_name}: one plugin of this class is needed in storage_plugins, which has "
            f"{len(names)}"
        )
    prefix = f"{_PREFIX}{names[0]}."
    found = {key[len(prefix) :]: value for key, value in extra.items() if key.startswith(prefix)}
    options = {key: value for key, value in found.items() if key not in _LOADING}
    if strange := sorted(set(options) - set(known)):
        raise ValueError(
            f"{class_name}: there is no option {prefix}{strange[0]}; "
            f"known are {', '.join(sorted(known))}"
        )
    return options
