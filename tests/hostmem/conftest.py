"""What the tests of this package share: threads, children, maps; and nothing may be left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

import hostmem
from hostmem import CpuDevice, resolve_device
from hostmem._sys import seam

T = TypeVar("T")
Until = Callable[[Callable[[], object]], None]
Maps = Callable[[int, int], list[tuple[int, int, str]]]

_DEADLINE = 20.0  # seconds: a safety net, never part of what a test shows
_FILL_THREADS = ("hostmem-fill", "hostmem-populate")


class Spawn(Protocol):
    """Run a function on a thread of its own; its outcome is in the future."""

    def __call__(self, function: Callable[..., T], *args: Any) -> Future[T]: ...


class Child(Protocol):
    """Run Python code in a process of its own."""

    def __call__(self, code: str, *options: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def cpu() -> CpuDevice:
    device = resolve_device("cpu")
    assert isinstance(device, CpuDevice)
    return device


def fill_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(_FILL_THREADS))


@pytest.fixture(autouse=True)
def nothing_is_left(cpu: CpuDevice) -> Iterator[None]:
    """After each test nothing is registered, no fill runs and no fault plan is installed."""
    yield
    assert list(cpu.registered) == []
    assert fill_threads() == []
    assert seam.install(None) is None


@pytest.fixture
def until() -> Until:
    """Wait for a condition that another thread makes true."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _DEADLINE
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
        thread.join(_DEADLINE)
        assert not thread.is_alive(), "a spawned thread hangs"


@pytest.fixture
def child(tmp_path: Path) -> Child:
    where = str(Path(hostmem.__file__).parents[1])

    def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *options, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": where},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def maps() -> Maps:
    """Read the mappings inside a range: (offset, end offset, permissions)."""

    def read(address: int, nbytes: int) -> list[tuple[int, int, str]]:
        found: list[tuple[int, int, str]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, *_ = line.split()
            start, end = (int(part, 16) - address for part in span.split("-"))
            if start < nbytes and end > 0:
                found.append((max(start, 0), min(end, nbytes), permissions))
        return found

    return read
