"""A driver to measure on machines without one, built with the machine's compiler."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.probe import NoCompilerError, built


@pytest.fixture(scope="session")
def probe_library() -> Iterator[Path]:
    """Build the probe, or skip because that cannot be done here."""
    try:
        with built() as library:
            yield library
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def stub_driver(tmp_path_factory: pytest.TempPathFactory, probe_library: Path) -> Path:
    """Build a ``libcuda.so.1`` that answers yes, see driver.c."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    options = ["-O1", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).with_name("driver.c")
    subprocess.run([*compiler, *options, "-o", library, source], check=True)
    return library
