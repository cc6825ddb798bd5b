"""Ranges for profilers: what is wrapped where the package is there, and nothing elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from hostmem.spans import span
from tests.hostmem.conftest import Child

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
LISTENER = Path(__file__).parent / "nvtx_listener.c"

STAND_IN = """
import functools, threading

defined, seen = [], []
lock = threading.Lock()


class annotate:
    def __init__(self, message, *, domain, category):
        self.what = domain, category, message
        defined.append(self.what)

    def __call__(self, function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            note("begin", self.what)
            try:
                return function(*args, **kwargs)
            finally:
                note("end", self.what)
        return inner


def note(kind, what):
    with lock:
        seen.append((threading.get_ident(), kind, what))
"""

WORK = """
    import json, sys
    import nvtx
    from hostmem import HostMem, RegistrationError
    from hostmem.testing import FaultPlan
    from kvtier import (
        AttentionLayerConfig, BlockCache, BufferConfig, DiskCacheTierConfig, GpuCacheTierConfig,
        HostCacheTierConfig, KVCacheManagerConfig, TierStorage,
    )

    tiers = [
        GpuCacheTierConfig("2MiB", "2MiB"),
        HostCacheTierConfig("2MiB", "2MiB"),
        DiskCacheTierConfig("4MiB", ".", "4MiB"),
    ]
    layers = [AttentionLayerConfig(0, [BufferConfig("kv", "512KiB")])]
    with TierStorage(KVCacheManagerConfig(16, tiers, layers), device="cpu") as storage:
        cache = BlockCache(storage)
        for key in range(10):
            with cache.reserve([key]) as room:
                room.wait()
                room.commit()
        with cache.acquire([0]) as lease:
            lease.wait()
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 801, times=None)
        with HostMem("1MiB", device="cpu") as memory:
            try:
                memory.wait_usable(1)
            except RegistrationError:
                pass
    print(json.dumps([nvtx.defined, nvtx.seen]))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    file = tmp_path / "nvtx.py"  # in the folder where the child runs
    file.write_text(STAND_IN)
    return file


def test_what_is_wrapped_is_what_the_page_says(child: Child, stand_in: Path) -> None:
    done = child(WORK)
    assert done.returncode == 0, done.stderr
    defined, _ = json.loads(done.stdout)
    rows = re.findall(r"^\| (hostmem|kvtier) \| (\w+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    described = {(d, c, name) for d, c, names in rows for name in names.split(", ")}
    assert {tuple(what) for what in defined} == described


def test_fills_copies_moves_and_waits_are_ranges(child: Child, stand_in: Path) -> None:
    _, seen = json.loads(child(WORK).stdout)
    names = {what[2] for _, kind, what in seen if kind == "begin"}
    assert names >= {
        *("populate", "register", "unregister", "wait for the fill", "copy"),
        *("copy pages", "move pages", "make room", "read or write slots"),
        *("wait for blocks", "wait for slots"),
    }


def test_ranges_of_a_thread_are_nested_and_all_end(child: Child, stand_in: Path) -> None:
    _, seen = json.loads(child(WORK).stdout)  # one registration of it fails
    open_ranges: dict[int, list[list[str]]] = {}
    for thread, kind, what in seen:
        stack = open_ranges.setdefault(thread, [])
        if kind == "begin":
            stack.append(what)
        else:
            assert stack.pop() == what
    assert not any(open_ranges.values())


def test_a_package_that_does_not_load_is_as_if_it_were_not_there(
    child: Child, tmp_path: Path
) -> None:
    (tmp_path / "nvtx.py").write_text("raise ImportError('no library')")
    done = child("import hostmem, kvtier; print(hasattr(hostmem.HostMem.close, '__wrapped__'))")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_directory_of_that_name_is_not_the_package(child: Child, tmp_path: Path) -> None:
    (tmp_path / "nvtx").mkdir()  # where the sources of NVTX lie, for example
    done = child("import hostmem, kvtier; print('imported')")
    assert (done.stdout, done.stderr) == ("imported\n", "")


@pytest.mark.skipif(find_spec("nvtx") is not None, reason="the package nvtx is installed")
def test_without_the_package_a_function_stays_itself() -> None:
    def function() -> None: ...

    assert span("x", "copy")(function) is function


NVTX = pytest.mark.skipif(
    find_spec("nvtx") is None, reason="needs the package nvtx, an extra of ours"
)


@NVTX
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_who_listens_hears_of_the_ranges_by_the_real_package(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = tmp_path / "listener.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", listener, LISTENER], check=True, timeout=60)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(listener))
    done = child(
        """
        import kvtier
        from hostmem import HostMem
        with HostMem("2MiB", device="cpu", fill_threads=1, wait=True):
            pass
        """
    )
    assert done.returncode == 0, done.stderr
    said = Counter(done.stderr.splitlines())
    assert said["begin hostmem: populate"] == 4
    assert said["begin hostmem: register"] == said["begin hostmem: unregister"] == 2
    begun = sum(n for line, n in said.items() if line.startswith("begin"))
    assert said["end hostmem"] == begun == said.total() / 2


@NVTX
def test_the_real_package_is_asked_as_it_wants_to_be(child: Child) -> None:
    done = child(
        """
        from hostmem.spans import span

        def function(): ...

        # No profiler listens: the package gives the function back as it is.
        assert span("x", "copy", domain="kvtier")(function) is function

        from hostmem import HostMem
        with HostMem("1MiB", device="cpu", wait=True):
            pass
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
