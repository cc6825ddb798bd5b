"""What is to be expected of a key: learned chances that it is asked for again, by class and age.

A key that is kept costs room for as long as it stays, and pays a hit when it is asked for. So
what counts is not how likely a return is but how many hits the room will have given by the time
it is free again: chance of a return divided by the time until then, over the horizon that suits
the key best. A first message is worth little in the seconds in which nobody can have read the
answer yet, most when the answer has been read, and less and less when nobody came back. Recency
knows only the last part of that curve.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["AGES", "BODY", "BUCKETS", "CELLS", "LEFT", "TIP", "Outlook", "class_of"]

BODY, TIP, LEFT = range(3)
"""Kinds of runs: of a prompt; its last key, which is often cut short and then differs next time;
and what a later request that came the same way passed by."""

_STEPS = (0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7)
"""Levels by turns; they widen, because conversations of so many turns become few."""
_KINDS = (slice(0, 8), slice(8, 12), slice(12, 13))
"""Classes of each kind: a level each, the last one for all further turns."""
_CLASSES = 13
AGES = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, *(128 << octave for octave in range(11)))
"""Ages at which each bucket but the first begins, in epochs of a sixteenth of the capacity: two an
octave as far as it matters, then one."""
BUCKETS = len(AGES) + 1
CELLS = _CLASSES * BUCKETS
"""Combinations of class and age; cell ``class * BUCKETS + bucket``."""
_WIDTHS = [float(b - a) for a, b in pairwise((0, *AGES, 2 * AGES[-1]))]

_EVIDENCE = 30.0
"""Runs that a class must have shown before its own figures outweigh those of all classes."""
_LEARNED = 8.0
_PRIOR_CHANCE = 0.05
"""Of a return in one bucket of age, before anything was seen. The same in every one, and old ones
are wider, so an inexperienced policy keeps what was used last."""
_MEMORY = 16_384
"""Returns after which all counts are halved: what is learned follows the load."""


def class_of(kind: int, turns: int) -> int:
    """Give the class of a run: its kind and how many turns it has seen."""
    return _CLASS_OF[kind][turns if turns < len(_STEPS) else -1]


_CLASS_OF = [[min(of.start + step, of.stop - 1) for step in _STEPS] for of in _KINDS]


class Outlook:
    """Counts what became of keys, and says what those in each cell are worth."""

    __slots__ = ("_returns", "returned", "waited")

    def __init__(self) -> None:
        self.returned = [0.0] * CELLS
        """Keys that were asked for again, by the cell they were in then."""
        self.waited = [0.0] * CELLS
        """Keys that came into the cell, whether they returned from it or not."""
        self._returns = 0.0

    def note_return(self, cell: int, keys: int) -> None:
        """Count keys that were asked for again."""
        self.returned[cell] += keys
        self._returns += 1

    def worth(self) -> list[float]:
        """Give the hits expected of a key per epoch that it stays, by cell.

        Notes
        -----
        Blocks for about 1 ms; halves the counts when they have become many.
        """
        returned = np.array(self.returned).reshape(_CLASSES, BUCKETS)
        waited = np.array(self.waited).reshape(_CLASSES, BUCKETS)
        # Keys of one run come and go together: evidence is counted in runs.
        run = max(returned.sum() / self._returns, 1.0) if self._returns else 1.0
        overall = (returned.sum(0) + _LEARNED * run * _PRIOR_CHANCE) / (
            waited.sum(0) + _LEARNED * run
        )
        rates: list[float] = []
        for of in _KINDS:
            kind = _refine(returned[of].sum(0), waited[of].sum(0), overall, _EVIDENCE * run)
            chances = _refine(returned[of], waited[of], kind, _EVIDENCE * run)
            for of_class in chances.tolist():
                rates += _best_rates(of_class, _WIDTHS)
        if self._returns > _MEMORY:
            self._returns /= 2
            self.returned = [count / 2 for count in self.returned]
            self.waited = [count / 2 for count in self.waited]
        return rates


def _refine(
    returned: NDArray[np.float64],
    waited: NDArray[np.float64],
    known: NDArray[np.float64],
    evidence: float,
) -> NDArray[np.float64]:
    """Estimate chances of a return by class and age from those of a larger class.

    A class is first taken to be like the larger one but for one factor, the same at every age,
    which needs few observations. Where it has been seen often, its own figures count.
    """
    doubt = evidence / 5
    factor = (returned.sum(-1, keepdims=True) + doubt) / (
        (waited * known).sum(-1, keepdims=True) + doubt
    )
    likely = np.minimum(known * factor, 0.9)
    chance: NDArray[np.float64] = np.minimum(
        (returned + evidence * likely) / (waited + evidence), 0.95
    )
    return chance


def _best_rates(chances: list[float], widths: list[float]) -> list[float]:
    """Give, for each age, the best ratio of expected hits to expected stay over all horizons.

    This is the index of Gittins for a job that may end at any age: it needs no knowledge of what
    else is in the cache. From the oldest age down, a stretch is joined to the one behind it while
    that promises more: whoever waits for the near one may as well wait for the far one.
    """
    rates: list[float] = []
    behind: list[tuple[float, float, float, float]] = []  # rate, hits, stay, chance to pass
    for chance, width in zip(reversed(chances), reversed(widths), strict=True):
        hits, stay, passes = chance, width * (1 - chance / 2), 1 - chance
        while behind and behind[-1][0] * stay > hits:
            _, more_hits, more_stay, also_passes = behind.pop()
            hits += passes * more_hits
            stay += passes * more_stay
            passes *= also_passes
        behind.append((hits / stay, hits, stay, passes))
        rates.append(hits / stay)
    rates.reverse()
    return rates
