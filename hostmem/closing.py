"""Objects that are closed when a ``with`` block ends."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import NoReturn, Self

__all__ = ["Closable"]


class Closable(abc.ABC):
    """Something with a `close`, which the end of a ``with`` block calls.

    Where closing is refused under a live view (`BufferError`), that is raised only if the body
    raised nothing; else the body's error says so in a note.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} owns what it holds: it is not copied or pickled")

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BufferError as held:
            if error is None:
                raise
            error.add_note(f"and the memory stays open: {held}")
