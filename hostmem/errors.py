"""The error tree: one type per cause, on every path.

Every error carries its facts as attributes (``call``, ``offset``, ``nbytes``, ``node`` and so on,
whichever apply), says in its message what was asked, what said no and what to do about it, and
survives pickling, so that it can cross from a worker process to the one that reports it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "ClosedError",
    "CorruptedError",
    "CuError",
    "CuOOMError",
    "DiskOOMError",
    "HostOOMError",
    "HostmemError",
    "OutOfMemoryError",
    "OutOfPagesError",
    "PeerInitError",
    "PlacementRefusedError",
    "RegistrationError",
    "ResourceBusyError",
]


class HostmemError(Exception):
    """Base of the errors of this project; carries the facts behind the message.

    Parameters
    ----------
    message : str
        One sentence or two: the call, the range, the limit that said no, the remedy.
    **facts
        What a program may want to read: they become attributes of the error and the
        ``facts`` dictionary.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = facts

    def __getattr__(self, name: str) -> Any:
        # Looked up only when ordinary lookup failed; ``facts`` itself may be missing
        # while pickle rebuilds the object.
        facts = self.__dict__.get("facts", {})
        try:
            return facts[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no fact {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(type(self), **self.facts), self.args)


class OutOfMemoryError(HostmemError, MemoryError):
    """Memory of some kind ran out; the subclass says which."""


class HostOOMError(OutOfMemoryError):
    """Host memory ran out: the node, the machine or a control group said no."""


class DiskOOMError(OutOfMemoryError):
    """The file system has no room for the bytes asked for."""


class CuOOMError(OutOfMemoryError):
    """The driver reported that GPU memory ran out."""


class OutOfPagesError(HostmemError):
    """A level has no slot left that could be freed; quota and leases, not memory, are the limit.

    Attributes
    ----------
    level, group : int
        Where there is no room: a level, and a pool group.
    wanted : int
        Slots that had to get free there.
    short : int
        How many of these could not be freed: so many pages fewer would have fitted.
    """


class CuError(HostmemError):
    """A driver call failed.

    Attributes
    ----------
    code : int
        The ``CUresult``.
    symbol : str
        Its name, such as ``CUDA_ERROR_INVALID_VALUE``.
    call : str
        The driver function.
    """


class PlacementRefusedError(HostmemError):
    """The placement that was asked for cannot be enforced here; nothing was downgraded silently."""


class RegistrationError(HostmemError):
    """The driver refused to page-lock a range; ``__cause__`` is its answer."""


class ClosedError(HostmemError):
    """The object was closed, or belongs to the parent of a forked process."""


class CorruptedError(HostmemError):
    """An invariant broke earlier; the message repeats the first reason."""


class ResourceBusyError(HostmemError):
    """The operation needs something that is in use: leased pages, slots in flight."""


class PeerInitError(HostmemError):
    """Another rank failed to build, so this one gave up what it had."""
