"""A job: copies of blocks that were submitted, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Generic

from hostmem import Event
from hostmem.describing import one_line
from hostmem.device import DONE
from hostmem.spans import span
from kvtier.block import Key
from kvtier.transfer.page_events import gathered

__all__ = ["BlockJob"]


class BlockJob(Generic[Key]):
    """Copies of blocks that go on in the background. May be asked from any thread.

    Nothing has to be done with it: what was submitted takes place without.

    Parameters
    ----------
    keys : sequence
        The blocks that are copied.
    events : sequence of sequence of Event
        Of each block's pages.
    waiting : callable
        Gives a context manager that measures the time in it.
    behind : Event
        Of blocks that come from a remote store, if it has them: not among the keys.
    """

    __slots__ = ("_events", "_waiting", "event", "keys")

    def __init__(
        self,
        keys: Sequence[Key],
        events: Sequence[Sequence[Event]],
        waiting: Callable[[str], AbstractContextManager[None]],
        behind: Event = DONE,
    ) -> None:
        self.keys = list(keys)
        """The blocks that are copied, in order."""
        every = [one for some in events for one in some]
        self.event: Event = next(iter(gathered([*every, behind])), DONE)
        """Of all the copies: a stream may wait for it. It has failed if one of them has."""
        self._events = events
        self._waiting = waiting

    @property
    def done(self) -> bool:
        """Whether all copies have finished, well or not."""
        return self.event.query()

    @property
    def failed(self) -> Mapping[Key, BaseException]:
        """The blocks whose copy failed, and why; all of them once it is done."""
        failed: dict[Key, BaseException] = {}
        if self.event.error is not None:
            for key, events in zip(self.keys, self._events, strict=True):
                errors = (event.error for event in events if event.query())
                if error := next((e for e in errors if e is not None), None):
                    failed[key] = error
        return failed

    @property
    def error(self) -> BaseException | None:
        """What made the first block fail that did, or None."""
        return next(iter(self.failed.values()), None)

    @span("wait for jobs", "wait", domain="kvtier")
    def wait(self, timeout: float | None = None) -> None:
        """Block until all copies have finished.

        Parameters
        ----------
        timeout : float, optional
            Seconds; 0 polls.

        Raises
        ------
        TimeoutError
            They have not finished by then; they go on.
        OSError, CuError
            A copy failed; `failed` names the blocks, the others are copied.
        """
        if self.done and self.error is None:
            return
        with self._waiting("jobs"):
            self.event.synchronize(timeout)

    @one_line
    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self.error else "done"
        return f"<BlockJob of {len(self.keys)} blocks, {state}>"
