"""What the tests of this package share: threads, children, maps; and nothing may be left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

import hostmem
from hostmem import CpuDevice
from hostmem._sys import seam

Maps = Callable[[int, int], list[tuple[int, int, str]]]


_FILL_THREADS = ("hostmem-fill", "hostmem-populate")


class Child(Protocol):
    """Run Python code in a process of its own."""

    def __call__(self, code: str, *options: str) -> subprocess.CompletedProcess[str]: ...


def fill_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(_FILL_THREADS))


@pytest.fixture(autouse=True)
def nothing_is_left(cpu: CpuDevice) -> Iterator[None]:
    """After each test nothing is registered, no fill runs and no fault plan is installed."""
    yield
    assert list(cpu.registered) == []
    assert fill_threads() == []
    assert seam.install(None) is None


_FORKS = "-Wignore::DeprecationWarning"  # Python 3.12 warns of forks beside threads


@pytest.fixture
def child(tmp_path: Path) -> Child:
    already = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the packages that we need, too
    where = os.pathsep.join([str(Path(hostmem.__file__).parents[1]), *filter(None, already)])

    def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, _FORKS, *options, "-c", textwrap.dedent(code)],
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
