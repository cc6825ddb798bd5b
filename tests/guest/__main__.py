"""Run the tests that need several memory nodes and control groups in a guest that has them.

``python -m tests.guest`` takes further arguments of pytest, such as ``-k interleave``. Exit
status 0 when every such test ran in the guest and passed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.debian import Unavailable
from tests.guest.emulator import run_guest
from tests.guest.image import write_image
from tests.guest.packages import virtual_machine

_PROJECT = Path(__file__).resolve().parents[2]
_BUILD = _PROJECT / "build" / "guest"
_REQUIRED = ("numa2", "cgroup")
_LIMIT = 600.0  # seconds


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", "-m", " or ".join(_REQUIRED), *arguments]
    files = _files_with_tests(pytest)
    try:
        virtual = virtual_machine(_BUILD)
    except Unavailable as error:
        print(f"no guest can be made here, so no test ran: {error}", file=sys.stderr)
        return 1
    image = _BUILD / "image.cpio"
    options = [
        "-v",
        f"--color={'yes' if sys.stdout.isatty() else 'no'}",
        f"--require={','.join(_REQUIRED)}",
        "-pno:cacheprovider",
        "-otmp_path_retention_policy=none",  # files are page cache, and that is memory of a node
    ]
    command = [*pytest, *options, *files]
    write_image(image, _PROJECT, command)
    print(f"starting the guest, of {image.stat().st_size >> 20} MiB", flush=True)
    began = time.monotonic()
    status = run_guest(virtual, image, _BUILD, _LIMIT)
    seconds = time.monotonic() - began
    if status is None:
        print(f"the guest ended without a result after {seconds:.0f} s (limit {_LIMIT:.0f} s)")
        return 1
    print(f"the guest ran {seconds:.0f} s; pytest's exit status was {status}")
    return min(abs(status), 1)


def _files_with_tests(pytest: list[str]) -> list[str]:
    """Return the files with tests to run: collecting all the others takes the guest a minute.

    Compiles them on the way, which saves the guest the time.
    """
    done = subprocess.run(
        [*pytest, "--collect-only", "-q"], cwd=_PROJECT, capture_output=True, text=True
    )
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    if done.returncode or not files:
        sys.exit(f"no tests were collected:\n{done.stdout}{done.stderr}")
    return sorted(files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
