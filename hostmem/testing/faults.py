"""Fault plans: which call of the seam fails, and which one waits until the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import seam

__all__ = ["FaultPlan", "Hold"]

_PATIENCE = 30.0  # seconds before a test that waits for ever is told so


class Hold:
    """One call that stops at the seam until it is let go."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._released = threading.Event()

    def wait_reached(self, timeout: float = _PATIENCE) -> None:
        """Block until the call is there; TimeoutError if it does not come."""
        if not self._reached.wait(timeout):
            raise TimeoutError("the held call was never made")

    @property
    def reached(self) -> bool:
        """Whether the call is there, or was."""
        return self._reached.is_set()

    def release(self) -> None:
        """Let the call go on."""
        self._released.set()

    def _pass(self) -> None:
        self._reached.set()
        if not self._released.wait(_PATIENCE):
            raise TimeoutError("a held call was never released")


class _Rule:
    def __init__(
        self,
        name: str,
        at: int,
        times: int | None,
        when: Callable[..., bool] | None,
        error: int,
        hold: Hold | None,
    ) -> None:
        self.name = name
        self.first = at
        self.last = None if times is None else at + times - 1
        self.when = when
        self.error = error
        self.hold = hold
        self.seen = 0

    def applies(self, args: tuple[int, ...]) -> bool:
        """Count a call of this name; tell whether it is one of those meant."""
        if self.when is not None and not self.when(*args):
            return False
        self.seen += 1
        return self.first <= self.seen and (self.last is None or self.seen <= self.last)


class FaultPlan:
    """Steps in between the library and the kernel or driver, while it is entered.

    Calls are named as in error messages: ``mmap``, ``mprotect``, ``madvise(MADV_POPULATE_WRITE)``,
    ``mbind``, ``get_mempolicy``, ``move_pages``, ``process_vm_readv``, ``preadv``, ``pwritev``,
    ``fallocate``, ``cuMemHostRegister``, ``cuMemHostUnregister``, ``cuMemcpyBatchAsync``... Every
    call is logged.

    Examples
    --------
    >>> import errno
    >>> with FaultPlan() as plan:
    ...     _ = plan.fail("madvise(MADV_POPULATE_WRITE)", errno.ENOMEM, at=3)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._log: list[tuple[str, tuple[int, ...]]] = []
        self._holds: list[Hold] = []
        self._pages: list[tuple[int, Callable[[int], bool]]] = []
        self._before: seam.Plan | None = None
        self._statuses_before: seam.StatusPlan | None = None

    def fail(
        self,
        name: str,
        error: int,
        *,
        at: int = 1,
        times: int | None = 1,
        when: Callable[..., bool] | None = None,
    ) -> Self:
        """Let calls of ``name`` answer ``error`` without being made.

        Parameters
        ----------
        name : str
            The call.
        error : int
            An errno, or a ``CUresult`` for driver calls.
        at, times : int
            The first call that fails, counted from 1, and how many; None for all from there.
        when : callable, optional
            Given the call's integer arguments; only calls it accepts are counted.
        """
        with self._lock:
            self._rules.append(_Rule(name, at, times, when, error, None))
        return self

    def short(
        self,
        name: str,
        nbytes: int,
        *,
        at: int = 1,
        times: int | None = 1,
        when: Callable[..., bool] | None = None,
    ) -> Self:
        """Let calls of ``name`` move no more than ``nbytes``, as the kernel may; see `fail`.

        Parameters
        ----------
        name : str
            ``preadv`` or ``pwritev``.
        nbytes : int
            At least 1; with direct I/O a multiple of its block, as the kernel's own short counts
            are.
        """
        if name not in ("preadv", "pwritev") or nbytes < 1:
            raise ValueError(f"{name}, {nbytes}: only preadv and pwritev, and to 1 byte or more")
        with self._lock:
            self._rules.append(_Rule(name, at, times, when, -nbytes, None))
        return self

    def answer_for_pages(self, status: int, *, when: Callable[[int], bool]) -> Self:
        """Let move_pages succeed and say ``status`` for the pages that ``when`` accepts.

        Parameters
        ----------
        status : int
            A node, or a negative errno, such as ``-errno.EBUSY``.
        when : callable
            Given the address that was asked about.
        """
        with self._lock:
            self._pages.append((status, when))
        return self

    def _restate(self, addresses: NDArray[np.uint64], statuses: NDArray[np.int32]) -> None:
        for at, address in enumerate(addresses.tolist() if self._pages else ()):
            for status, when in self._pages:
                if when(address):
                    statuses[at] = status

    def hold(self, name: str, *, at: int = 1, when: Callable[..., bool] | None = None) -> Hold:
        """Stop call number ``at`` of ``name`` at the seam until the returned hold is released."""
        hold = Hold()
        with self._lock:
            self._rules.append(_Rule(name, at, 1, when, 0, hold))
            self._holds.append(hold)
        return hold

    def calls(self, name: str) -> list[tuple[int, ...]]:
        """Arguments of the calls of ``name`` so far, in order."""
        with self._lock:
            return [args for called, args in self._log if called == name]

    @property
    def log(self) -> list[tuple[str, tuple[int, ...]]]:
        """All calls so far, in order: (name, arguments)."""
        with self._lock:
            return list(self._log)

    def _answer(self, name: str, args: tuple[int, ...]) -> int:
        with self._lock:
            self._log.append((name, args))
            chosen = [r for r in self._rules if r.name == name and r.applies(args)]
        for rule in chosen:
            if rule.hold is not None:
                rule.hold._pass()
        return next((rule.error for rule in chosen if rule.error), 0)

    def __enter__(self) -> Self:
        self._before = seam.install(self._answer)
        self._statuses_before = seam.install_statuses(self._restate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hold in self._holds:
            hold.release()
        seam.install(self._before)
        seam.install_statuses(self._statuses_before)
