"""Ranges on the time line of a profiler (NVTX), where ``pip install hostmem[nvtx]`` was done.

Functions are decorated when they are defined. Without the package, with ``NVTX_DISABLE`` in the
environment, and where no profiler has attached itself to the process, a decorated function is the
function itself and costs nothing more.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["span"]

F = TypeVar("F", bound=Callable[..., Any])

try:
    _annotate: Any = importlib.import_module("nvtx").annotate  # it is optional, and has no types
except (ImportError, AttributeError):  # a directory of that name can be imported, too
    _annotate = None


def span(message: str, category: str, *, domain: str = "hostmem") -> Callable[[F], F]:
    """Decorate a function, whose calls are then ranges on the thread that makes them.

    Parameters
    ----------
    message : str
        What the range is called.
    category : str
        ``"fill"``, ``"copy"``, ``"move"``, ``"disk"`` or ``"wait"``.
    domain : str
        ``"hostmem"`` or ``"kvtier"``.
    """
    if _annotate is None:
        return lambda function: function
    annotated: Callable[[F], F] = _annotate(message, domain=domain, category=category)
    return annotated
