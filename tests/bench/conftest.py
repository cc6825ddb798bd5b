"""A driver to measure on machines without one, built with the machine's compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.probe import NoCompilerError, built
from tests.threads import DEADLINE


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
    source = Path(__file__).with_name("driver.c")
    options = ["-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*compiler, *options, "-o", library, source], check=True)
    return library


@pytest.fixture(scope="session")
def stub_here(tmp_path_factory: pytest.TempPathFactory, stub_driver: Path) -> Path:
    """The same for this process, by a name under which nobody else looks for a driver."""
    return Path(shutil.copy(stub_driver, tmp_path_factory.mktemp("driver") / "stub.so"))


class Stub:
    """What the stub drivers of this test and its children do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, call: str) -> None:
        """Let calls last from now on until `release`."""
        (self._folder / f"hold.{call}").touch()

    def release(self, call: str) -> None:
        """Let held calls go on."""
        (self._folder / f"hold.{call}").unlink()

    def is_held(self, call: str) -> bool:
        """Tell whether a call was ever held."""
        return (self._folder / f"held.{call}").exists()

    def wait_held(self, call: str) -> None:
        """Wait until a call is held."""
        deadline = time.monotonic() + DEADLINE
        while not self.is_held(call):
            assert time.monotonic() < deadline, f"nobody called {call}"
            os.sched_yield()

    def refuse(self, call: str, answer: int) -> None:
        """Let calls fail from now on."""
        path = self._folder / f"refuse.{call}"
        path.with_suffix(".new").write_text(str(answer))
        path.with_suffix(".new").rename(path)


@pytest.fixture
def stub(tmp_path: Path, stub_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Lead the stub driver, which children of this test find as the driver."""
    folder = tmp_path / "stub"
    folder.mkdir()
    monkeypatch.setenv("STUB_FOLDER", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_driver.parent))
    yield Stub(folder)
    for path in folder.glob("hold.*"):  # a test that failed leaves nobody waiting
        path.unlink()
