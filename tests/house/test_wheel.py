"""The wheel is pure, holds the two packages and nothing else, and works where only it is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from hostmem._version import __version__

ROOT = Path(__file__).parents[2]

# Packages come from the index, by whatever network there is.
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(300)]


def run(*command: object, cwd: Path, path: str | None = None) -> str:
    environment = {**os.environ, **({} if path is None else {"PATH": path})}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give the interpreter of an environment that has only the wheel, and an empty folder."""
    venv = tmp_path_factory.mktemp("venv")
    empty = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=empty)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    # No compiler can be found, and none is asked for.
    run(*pip, "install", "--only-binary", ":all:", wheel, cwd=empty, path=str(empty))
    return python, empty


def test_its_name_says_that_it_is_pure(wheel: Path) -> None:
    assert wheel.name == f"hostmem-{__version__}-py3-none-any.whl"


def test_it_holds_the_two_packages_whole_and_nothing_else(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for package in ("hostmem", "kvtier")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"hostmem/py.typed", "kvtier/py.typed"} <= expected
    info = f"hostmem-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if not name.startswith(f"{info}/")} == expected
    assert f"{info}/licenses/LICENSE" in names


def test_its_metadata_name_the_licence_and_four_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = BytesParser().parsebytes(
            archive.read(f"hostmem-{__version__}.dist-info/METADATA")
        )
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    wanted = [text.partition(";") for text in metadata.get_all("Requires-Dist", [])]
    required = {text.partition(">")[0] for text, _, marker in wanted if "extra" not in marker}
    assert required == {"cffi", "cuda-bindings", "numpy", "psutil"}


def test_it_imports_in_an_empty_folder_without_torch_or_cuda(installed: tuple[Path, Path]) -> None:
    python, empty = installed
    code = "import hostmem, kvtier, sys; print(hostmem.__file__, *sys.modules, sep='\\n')"
    where, *loaded = run(python, "-I", "-c", code, cwd=empty, path=str(empty)).splitlines()
    assert Path(where).is_relative_to(python.parents[1])
    assert not {"torch", "cuda", "cuda.bindings"} & set(loaded)


def test_it_gives_memory_there(installed: tuple[Path, Path]) -> None:
    python, empty = installed
    code = (
        "import hostmem\n"
        "with hostmem.HostMem('1MiB', device='cpu', wait=True) as memory:\n"
        "    memory.view(0, 4096)[:] = 7\n"
        "    print(memory.view(0, 4096).sum())\n"
    )
    assert int(run(python, "-I", "-W", "error", "-c", code, cwd=empty, path=str(empty))) == 7 * 4096
