"""The guest's file system: this interpreter, its libraries, pytest and the project.

Every file is where it is on the host, so that paths, and the byte code that names them, hold.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from tests.guest.archive import Archive

__all__ = ["write_image"]

_PROJECT = ("hostmem", "kvtier", "tests", "bench", "pyproject.toml")
_TOOLS = ("hostmem", "pytest", "pytest-timeout", "hypothesis")
_NEEDS_A_GPU = {"cuda-bindings"}
# Of the standard library and of packages: large, and nothing that our tests import.
_LEFT_OUT = re.compile(
    r"(^|/)(site-packages|dist-packages|test|tests|idlelib|lib2to3|tkinter|turtledemo|ensurepip"
    r"|pydoc_data|f2py|config-[^/]*)/|/_(test|tkinter)[^/]*\.so$|\.(a|pyi|h)$|\.opt-[12]\.pyc$"
)
_LIBRARY_FOLDERS = {"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib"}


def write_image(path: Path, project: Path, command: Sequence[str]) -> None:
    """Write the file system as an archive that the kernel unpacks into memory at its start.

    Parameters
    ----------
    path : Path
        The archive.
    project : Path
        The project's folder: where the command runs.
    command : sequence of str
        What the guest runs, once, before it powers off.

    Raises
    ------
    FileNotFoundError
        A shared library that something in it needs is not on this machine.
    """
    with path.open("wb") as file, Archive(file) as archive:
        init = Path(__file__).with_name("init.py").read_bytes()
        archive.add_data("/init", 0o755, f"#!{sys.executable}\n".encode() + init)
        archive.add_data("/command.json", 0o644, json.dumps([str(project), *command]).encode())
        for found in _files(project):
            archive.add(found)
        for library in _libraries(archive.programs):
            archive.add(library)
            if str(library.parent) not in _LIBRARY_FOLDERS:
                # Found by the host's list of folders, which the guest has not, or by a path in
                # the program, which does no harm.
                archive.add_link(f"/lib/{library.name}", str(library))


def _files(project: Path) -> Iterator[Path]:
    yield Path(sys.executable)
    yield Path(sys.prefix, "pyvenv.cfg")
    paths = sysconfig.get_paths()
    for folder in sorted({paths["stdlib"], paths["platstdlib"]}):
        yield from _below(Path(folder))
    for name in sorted(_installed()):
        yield from _below(Path(paths["purelib"], name))
    for name in _PROJECT:
        yield from _below(project / name)


def _below(path: Path) -> Iterator[Path]:
    """Yield the file, or the folder's files but for what is left out."""
    if path.is_file():
        yield path
    for where, _, names in os.walk(path):
        for name in names:
            file = Path(where, name)
            if not _LEFT_OUT.search(str(file.relative_to(path))):
                yield file


def _installed() -> set[str]:
    """Return the names in site-packages of what the tests need, and of all that requires."""
    names: set[str] = set()
    seen = set(_NEEDS_A_GPU)
    waiting = list(_TOOLS)
    while waiting:
        distribution = waiting.pop().lower()
        if distribution in seen:
            continue
        seen.add(distribution)
        # The first parts only: byte code is not always listed. Scripts are outside, at "..".
        names |= {file.parts[0] for file in importlib.metadata.files(distribution) or ()} - {".."}
        for text in importlib.metadata.requires(distribution) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return names - {"__pycache__"}


def _libraries(programs: Sequence[Path]) -> list[Path]:
    """Return the shared libraries that programs and extension modules load."""
    # ldd fails where one of them loads none, and goes on.
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    if missing := re.findall(r"^\s(\S+) => not found", said, re.MULTILINE):
        raise FileNotFoundError(f"shared libraries not found: {', '.join(sorted(set(missing)))}")
    found = re.findall(r"^\s(?:\S+ => )?(/\S+) \(0x", said, re.MULTILINE)
    return sorted({Path(os.path.normpath(name)) for name in found})
