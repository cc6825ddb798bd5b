"""Importing a package costs nothing but the import: no thread, no descriptor, no CUDA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# numpy is imported before the count begins: its linear algebra starts threads of its own.
CHILD = """
import json, os, signal, sys
import _cffi_backend, numpy, psutil

def state():
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the directory
            pass
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": descriptors,
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "environment": dict(os.environ),
    }

before, already = state(), set(sys.modules)  # a .pth file may load modules at start-up
__import__(sys.argv[1])
loaded = sorted(set(sys.modules) - already)
json.dump({"before": before, "after": state(), "loaded": loaded}, sys.stdout)
"""


@pytest.fixture(scope="module", params=["hostmem", "kvtier"])
def report(request: pytest.FixtureRequest) -> dict[str, dict[str, object]]:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, request.param],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    result: dict[str, dict[str, object]] = json.loads(child.stdout)
    return result


@pytest.mark.parametrize("what", ["threads", "descriptors", "signals", "environment"])
def test_an_import_leaves_alone(report: dict[str, dict[str, object]], what: str) -> None:
    assert report["after"][what] == report["before"][what]


@pytest.mark.parametrize("module", ["cuda.bindings", "torch", "hostmem.testing", "kvtier.testing"])
def test_an_import_does_not_load(report: dict[str, dict[str, object]], module: str) -> None:
    assert module not in report["loaded"]
