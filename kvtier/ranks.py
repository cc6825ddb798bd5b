"""One object on every rank, or on none.

The ranks of a job go through the same stages side by side. After each, every rank tells all others
how it went, and all decide from the same answers: so they go on together or give up together, and
no rank waits in a round that another one does not come to.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from hostmem.errors import PeerInitError

__all__ = ["create_on_all_ranks"]

log = logging.getLogger("kvtier")

# An error may hold an array, or a message of any length; what a rank sends of it is small.
_MOST_TEXT = 4_000  # characters
_MOST_PICKLED = 65_536  # bytes

# How much of that is in the message of the error that is raised.
_MOST_REPORTS = 4
_MOST_NAMES = 8
_MOST_EACH = 400  # characters
_LEAD = 60  # characters before the first that differs


class _Closes(Protocol):
    def close(self) -> object: ...


T = TypeVar("T", bound=_Closes)


def create_on_all_ranks(
    factory: Callable[[], T],
    allgather: Callable[[Any], list[Any]],
    *,
    plan: object = None,
    ready: Callable[[T], object] | None = None,
) -> T:
    """Build an object on every rank; if one rank cannot, all raise and none keeps anything.

    Every rank calls this at the same point with an ``allgather`` of its own. There are three
    stages, each ended by one ``allgather``: the plans are compared, before anything is allocated;
    the objects are built; they are made ready. When a stage fails on one rank, all ranks close
    what they have built, say so in one more ``allgather``, and raise.

    Parameters
    ----------
    factory : callable
        Builds this rank's object, something with a ``close()``.
    allgather : callable
        Takes one object and returns the list of what all ranks gave, in rank order, on each. It
        gets a tuple of three strings and bytes, at most some 80 KiB besides the ``repr`` of what
        ``plan`` and ``ready`` give. It must raise, not wait for ever, when a rank is gone.
    plan : object or callable, optional
        What must be the same everywhere before building starts, or a function that works it out,
        whose error then counts as this rank's. Ranks agree when its ``repr`` is the same: use
        numbers, strings, tuples, dataclasses of them such as a `CachePlan`, but no sets.
    ready : callable, optional
        Called with the object when all ranks have theirs. It may wait, and raises to refuse; what
        it returns must be the same everywhere, as with ``plan``, and is not judged otherwise.

    Returns
    -------
    object
        What ``factory`` built here.

    Raises
    ------
    PeerInitError
        A rank failed, the ranks do not agree, or ``allgather`` raised or returned what it should
        not. ``stage`` is ``"plan"``, ``"build"`` or ``"ready"``; ``ranks`` are those to blame, and
        ``rank`` the first of them; ``reports`` has their errors as text by rank (``"ValueError:
        too small"``), or what each rank said where they differ. These are equal on all ranks; but
        where ``allgather`` is to blame no rank is named, and no further round was tried. The
        cause is this rank's own error; where it has none, that of ``rank``, if it could be
        pickled; or the error of ``allgather``. Notes name the ranks that could not close.
    BaseException
        What is not an `Exception`, such as `KeyboardInterrupt`, takes part in the rounds like any
        error and is then raised as it is, by the rank that it came to; the others raise
        `PeerInitError`. Where it comes during ``allgather``, the others are left to the error
        that their ``allgather`` raises.

    Notes
    -----
    Blocks until the slowest rank is done with each stage. The local variables of a failed call of
    ``factory`` or ``ready`` are dropped at once, so that nothing half built lives on in a
    traceback. Where ``allgather`` fails for some ranks only, and in the last round, the others do
    return their objects: no protocol avoids that.
    """
    built: list[T] = []
    rounds = _Rounds(allgather)
    try:
        rounds.stage("plan", lambda: plan() if callable(plan) else plan)
        rounds.stage("build", lambda: built.append(factory()))
        rounds.stage("ready", lambda: ready(built[0]) if ready is not None else None)
    except BaseException as error:
        rounds.give_up(lambda: [one.close() for one in built], error)
        raise
    return built[0]


class _Word(NamedTuple):
    """What a rank tells the others after a step, sent as a plain tuple."""

    step: str
    """Which one: ranks that are not at the same one have lost each other."""
    value: str
    """What the step returned."""
    failure: str
    """What it raised; empty if nothing."""
    pickled: bytes
    """The error itself; empty where it cannot be had."""


class _Rounds:
    """The rounds of one attempt, as one rank goes through them."""

    def __init__(self, allgather: Callable[[Any], list[Any]]) -> None:
        self._allgather = allgather
        self._n_ranks = 0  # not known before the first round
        self._all_know = False  # that it has failed, and so come to one more round

    def stage(self, name: str, step: Callable[[], object]) -> None:
        """Take a step and hear how the others did; raise unless all did, and alike."""
        mine, error = _take(name, step)
        words = self._exchange(mine, error)
        failures = {rank: word.failure for rank, word in enumerate(words) if word.failure}
        values = {rank: word.value for rank, word in enumerate(words)}
        if failures:
            self._all_know = True
            if error is None:
                error = _unpickled(words[min(failures)].pickled)
            elif not isinstance(error, Exception):
                raise error
            told = {rank: _cut(text) for rank, text in failures.items()}
            self._refuse(name, "failed on", list(failures), failures, told, error)
        if odd := _minority(values):
            self._all_know = True
            self._refuse(name, "gave something else on", odd, values, _parting(values))

    def give_up(self, close: Callable[[], object], error: BaseException) -> None:
        """Close what this rank has; note on ``error`` which ranks could not do so."""
        mine, failure = _take("close", close)
        if failure is not None:
            log.error("what this rank had built could not be closed", exc_info=failure)
        if self._all_know:
            try:
                words = self._exchange(mine, failure)
            except PeerInitError as broken:
                error.add_note(f"whether the other ranks have closed is not known: {broken}")
                words = [mine]
        else:
            words = [mine]
        for rank, word in enumerate(words):
            if word.failure:
                who = f"rank {rank}" if len(words) > 1 else "this rank"
                error.add_note(f"{who} could not close what it had built: {word.failure}")
        if failure is not None and not isinstance(failure, Exception):
            raise failure from error

    def _exchange(self, mine: _Word, error: BaseException | None) -> list[_Word]:
        """Hear what every rank says; ``error`` is what this rank's step raised."""
        try:
            return self._understood(self._allgather(tuple(mine)), mine)
        except Exception as broken:
            if error is not None and not isinstance(error, Exception):
                error.add_note(f"and the other ranks could not be told: {_text(broken)}")
                raise error from broken
            before = f"; this rank had failed itself: {mine.failure}" if mine.failure else ""
            raise PeerInitError(
                f"{mine.step}: allgather failed, another rank may be gone: {_text(broken)}{before}",
                stage=mine.step,
                rank=None,
                ranks=[],
                reports={},
            ) from broken

    def _understood(self, heard: object, mine: _Word) -> list[_Word]:
        """Check that an answer of ``allgather`` is one word of each rank, all of the same step."""
        if not isinstance(heard, list):
            raise TypeError(
                f"it returned {type(heard).__name__}, not the list of what every rank gave"
            )
        if self._n_ranks not in (0, len(heard)):
            raise ValueError(f"it returned {len(heard)} items, and {self._n_ranks} before")
        self._n_ranks = len(heard)
        words = []
        for rank, item in enumerate(heard):
            if not isinstance(item, tuple | list) or len(item) != 4 or item[0] != mine.step:
                raise ValueError(f"rank {rank} is elsewhere: it gave {_cut(repr(item))}")
            words.append(_Word(*item))
        if mine not in words:
            raise ValueError(f"what this rank gave is not among the {len(words)} items it returned")
        return words

    def _refuse(
        self,
        stage: str,
        what: str,
        ranks: list[int],
        reports: dict[int, str],
        told: Mapping[int, str],
        cause: BaseException | None = None,
    ) -> NoReturn:
        raise PeerInitError(
            f"{stage} {what} {_names(ranks)} of {self._n_ranks}, so no rank keeps what it built: "
            f"{_told(told)}",
            stage=stage,
            rank=ranks[0],
            ranks=ranks,
            reports=reports,
        ) from cause


def _take(name: str, step: Callable[[], object]) -> tuple[_Word, BaseException | None]:
    """Take a step; its error is returned, whatever it is: the others wait to hear of it."""
    try:
        return _Word(name, repr(step()), "", b""), None
    except BaseException as error:
        _let_go(error)
        return _Word(name, "", _text(error), _pickled(error)), error


def _let_go(error: BaseException) -> None:
    """Drop what the frames of an error hold: a view there would keep memory from being closed."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _text(error: BaseException) -> str:
    """Give the type and the text of an error, even of one that cannot be printed."""
    return "".join(traceback.format_exception_only(error)).strip()[:_MOST_TEXT]


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
    except Exception:
        return b""
    return data if len(data) <= _MOST_PICKLED else b""


def _unpickled(data: bytes) -> BaseException | None:
    """Rebuild another rank's error; None where it cannot be: some classes pickle, and no more."""
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


# ------------------------------------------------------------------------------ what is said


def _by_text(reports: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, text in reports.items():
        groups.setdefault(text, []).append(rank)
    return groups


def _minority(values: Mapping[int, str]) -> list[int]:
    """Give the ranks that are not of the largest group that says the same."""
    groups = list(_by_text(values).values())
    largest = max(groups, key=len)
    return sorted(rank for group in groups if group is not largest for rank in group)


def _parting(values: Mapping[int, str]) -> dict[int, str]:
    """Cut values down to where they begin to differ."""
    texts = sorted(set(values.values()))
    columns = enumerate(zip(*texts, strict=False))
    alike = next((at for at, column in columns if len(set(column)) > 1), min(map(len, texts)))
    return {rank: _cut(text, max(0, alike - _LEAD)) for rank, text in values.items()}


def _cut(text: str, start: int = 0) -> str:
    end = start + _MOST_EACH
    return f"{'...' * (start > 0)}{text[start:end]}{'...' * (end < len(text))}"


def _told(reports: Mapping[int, str]) -> str:
    groups = list(_by_text(reports).items())
    parts = [f"{_names(ranks)}: {text}" for text, ranks in groups[:_MOST_REPORTS]]
    if more := len(groups[_MOST_REPORTS:]):
        parts.append(f"{more} more in .reports")
    return "; ".join(parts)


def _names(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MOST_NAMES]))
    more = f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else ""
    return f"rank{'s' * (len(ranks) > 1)} {listed}{more}"
