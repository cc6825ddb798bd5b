"""Threads of the tests: started with their outcome kept, waited for without sleeping."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import pytest

from hostmem import CpuDevice, resolve_device

__all__ = ["DEADLINE", "Spawn", "Until", "cpu", "spawn", "until"]

T = TypeVar("T")
Until = Callable[[Callable[[], object]], None]

DEADLINE = 20.0  # seconds: a safety net, never part of what a test shows


class Spawn(Protocol):
    """Run a function on a thread of its own; its outcome is in the future."""

    def __call__(self, function: Callable[..., T], *args: Any) -> Future[T]: ...


@pytest.fixture
def cpu() -> CpuDevice:
    device = resolve_device("cpu")
    assert isinstance(device, CpuDevice)
    return device


@pytest.fixture
def until() -> Until:
    """Wait for a condition that another thread makes true."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            os.sched_yield()

    return wait


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    threads: list[threading.Thread] = []

    def start(function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="spawned", daemon=True)
        threads.append(thread)
        thread.start()
        return future

    yield start
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a spawned thread hangs"
