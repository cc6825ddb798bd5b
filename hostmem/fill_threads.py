"""How many threads of this process populate memory at once, and how they share that."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable

from hostmem.machine import machine

__all__ = ["Populating", "bind_to", "default_fill_threads", "fill_thread_budget"]

log = logging.getLogger("hostmem")

_MOST_THREADS = 12  # the kernel's page allocation does not scale past this
_BEFORE_ONE_WHO_REGISTERS = 8  # it keeps up with no more, and more of them slow it down
_PATIENCE = 0.05  # seconds between two looks whether the fill has ended meanwhile


@functools.cache
def fill_thread_budget() -> int:
    """Say how many threads populate at once in this process, over all objects."""
    return max(1, min(len(machine().allowed_cpus), _MOST_THREADS))


def default_fill_threads(registers: bool) -> int:
    """Say how many threads of one object populate where nobody says.

    Parameters
    ----------
    registers : bool
        Whether what they populate is then registered with a driver, by one thread.
    """
    budget = fill_thread_budget()
    return min(budget, _BEFORE_ONE_WHO_REGISTERS) if registers else budget


@functools.cache
def _budget() -> threading.BoundedSemaphore:
    return threading.BoundedSemaphore(fill_thread_budget())


# The parent's threads that hold a part of the budget are not in the child to give it back.
os.register_at_fork(after_in_child=_budget.cache_clear)


class Populating:
    """Take one thread's share of the budget, for a ``with`` block.

    Blocks while all shares are taken. Yields False, having taken none, when ``is_over`` comes true
    meanwhile: another object's threads may be stuck for long.
    """

    __slots__ = ("_budget", "_is_over", "_taken")

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._budget = _budget()
        self._taken = False

    def __enter__(self) -> bool:
        while not self._budget.acquire(timeout=_PATIENCE):
            if self._is_over():
                return False
        self._taken = True
        return True

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._budget.release()


def bind_to(cpus: tuple[int, ...]) -> None:
    """Let the calling thread run on these CPUs only; anywhere, with a warning, where refused."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.warning("fill threads run anywhere: CPUs %s are refused: %s", cpus, error)
