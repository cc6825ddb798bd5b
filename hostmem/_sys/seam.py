"""Where a test may step between us and the kernel or the driver.

Each call of the seam asks `intercept` first. Outside tests there is no plan and the question is
one comparison; `hostmem.testing.FaultPlan` installs one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hostmem._sys import trace

__all__ = ["Plan", "StatusPlan", "install", "install_statuses", "intercept", "restate"]

Plan = Callable[[str, tuple[int, ...]], int]
"""Called with the name of a call and its integer arguments before it is made; returns the error
(errno, CUresult) to answer with instead of making the call, or 0. A negative number lets preadv and
pwritev move no more than so many bytes. It may block, to make the order of events explicit."""

StatusPlan = Callable[[NDArray[np.uint64], NDArray[np.int32]], None]
"""Called with the addresses that move_pages was asked about and what it answered for each; may
change the answers."""

_plan: Plan | None = None
_statuses: StatusPlan | None = None


def install(plan: Plan | None) -> Plan | None:
    """Make ``plan`` the one every call asks (None: no plan); return the one before."""
    global _plan
    before, _plan = _plan, plan
    return before


@trace.intercepted
def intercept(name: str, *args: int) -> int:
    """Return the error to answer with, or 0 to make the call."""
    return 0 if _plan is None else _plan(name, args)


def install_statuses(plan: StatusPlan | None) -> StatusPlan | None:
    """Let ``plan`` change what pages answer (None: nobody); return the one before."""
    global _statuses
    before, _statuses = _statuses, plan
    return before


def restate(addresses: NDArray[np.uint64], statuses: NDArray[np.int32]) -> None:
    """Let the plan change what single pages answered."""
    if _statuses is not None:
        _statuses(addresses, statuses)
