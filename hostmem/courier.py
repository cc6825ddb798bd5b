"""A thread of ours that carries what must not run where it was caused.

Callbacks of users must not run on a fill's thread, and a dropped object must not be closed on
whatever thread the garbage collector happened to interrupt, which may hold the very lock that
closing needs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from hostmem.errors import ResourceBusyError

__all__ = ["Courier", "callbacks", "closings"]

log = logging.getLogger("hostmem")


class Courier:
    """One daemon thread, started with the first `start`, that runs jobs in order.

    A job that raises is logged and does not stop the others. After a fork the child starts its own.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._pid = 0
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()  # a thread that does not exist here may have held it

    def start(self) -> None:
        """Start the thread unless this process has it."""
        if self._pid == os.getpid():
            return
        with self._lock:
            if self._pid != os.getpid():
                self._jobs = SimpleQueue()
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise ResourceBusyError(
                        f"{error}: RLIMIT_NPROC, the control group's pids.max or RLIMIT_AS says "
                        "no; raise it, or end other threads",
                        call="pthread_create",
                    ) from error
                self._pid = os.getpid()

    def post(self, job: Callable[[], object]) -> None:
        """Queue a job; returns at once. Safe in a finalizer, provided `start` was called before."""
        self._jobs.put(job)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all that was posted before has run; False on timeout (seconds)."""
        done = threading.Event()
        self.post(done.set)
        return done.wait(timeout)

    def _run(self) -> None:
        jobs = self._jobs
        while True:
            job = jobs.get()
            try:
                job()
            except BaseException:  # also SystemExit: this thread serves everybody
                log.exception("a job of %s raised; the others go on", self._name)
            del job  # or the last callback would live until the next one


callbacks = Courier("hostmem-callbacks")
closings = Courier("hostmem-closings")
