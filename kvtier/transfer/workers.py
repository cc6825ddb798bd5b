"""Threads that work a queue off and live as long as what they serve."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Workers"]


class Workers:
    """Several threads for one queue of calls, which begin in the order they were put.

    Parameters
    ----------
    name : str
        Of the threads, with a number behind.
    count : int
        Threads; as many calls are at work at once.
    """

    def __init__(self, name: str, count: int) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        try:
            for number in range(count):
                thread = threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def put(self, job: Callable[[], None]) -> None:
        """Let a thread call ``job``, which raises nothing. Not after `close`."""
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
        self._jobs.put(None)  # for the next thread, whether or not anybody knows of it

    def close(self) -> None:
        """Finish what was put and end the threads. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)  # goes from thread to thread
        for thread in self._threads:  # also after an earlier close was interrupted here
            thread.join()
