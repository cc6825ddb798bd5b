"""What a test may need of the machine, and the account of what did not run.

A test that is marked with the name of a requirement (``gpu``, ``numa2``, ``cgroup``, ``odirect``,
``seccomp``, ``chromium``) is skipped with the reason that its probe found. A probe runs when the
first such test is set up, once a run; nothing here touches the machine at import or collection.
``--require gpu,numa2`` turns those tests' skips into failures, for a machine that is known to
have what they need.
"""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

from tests.kvtier.chromium import find_chromium

pytest_plugins = ["tests.threads"]

# ------------------------------------------------------------------------------ hypothesis

# Deadlines measure the machine. On CI the examples are the same each time; elsewhere new ones
# are tried and failures remembered.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


# ---------------------------------------------------------------------------------- probes
# A probe returns None where the requirement is met, otherwise the reason why it is not.


def _probe_gpu(config: pytest.Config) -> str | None:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"no cuda.bindings: {error}"
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # there is no libcuda
        return f"no CUDA driver: {error}"
    if code != driver.CUresult.CUDA_SUCCESS:
        return f"cuInit said {code.name}"
    code, count = driver.cuDeviceGetCount()
    if code != driver.CUresult.CUDA_SUCCESS:
        return f"cuDeviceGetCount said {code.name}"
    return None if count else "the CUDA driver shows no device"


def _numbers(text: str) -> set[int]:
    """Parse the kernel's list format, such as ``0-1,4``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _probe_numa2(config: pytest.Config) -> str | None:
    try:
        with_memory = _numbers(Path("/sys/devices/system/node/has_memory").read_text())
    except FileNotFoundError:
        return "the kernel shows no NUMA nodes"
    if len(with_memory) < 2:
        return f"{len(with_memory)} NUMA node with memory"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Mems_allowed_list:"):
            allowed = with_memory & _numbers(line.partition(":")[2])
            if len(allowed) < 2:
                return f"the cpuset allows {len(allowed)} of {len(with_memory)} NUMA nodes"
    return None


def _probe_cgroup(config: pytest.Config) -> str | None:
    # Lines are "id:controllers:path"; version 2 is id 0 with no controllers (cgroups(7)).
    parents: list[tuple[Path, str]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parents.append((Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"))
        elif not controllers:
            parents.append((Path("/sys/fs/cgroup" + path), "memory.max"))
    reason = "no cgroup has the memory controller"
    for parent, limit in parents:
        child = parent / f"hostmem-probe-{os.getpid()}"
        try:
            child.mkdir()
        except OSError as error:
            reason = f"no cgroup can be made in {parent}: {error.strerror}"
            continue
        try:
            if os.access(child / limit, os.W_OK):
                return None
            reason = f"a cgroup made in {parent} has no {limit} to write"
        finally:
            child.rmdir()
    return reason


def _probe_odirect(config: pytest.Config) -> str | None:
    # Where tmp_path will be: --basetemp, or below the temporary directory.
    basetemp = config.getoption("basetemp")
    where = Path(basetemp).parent if basetemp else Path(tempfile.gettempdir())
    descriptor, name = tempfile.mkstemp(prefix="hostmem-probe-", dir=where)
    os.close(descriptor)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 4096) as page:  # page aligned; some systems refuse only here
                os.pwrite(descriptor, page, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return f"no O_DIRECT in {where}: {error.strerror}"
    finally:
        os.unlink(name)
    return None


# Installs a filter that allows everything and exits with errno; a filter is for life, hence a
# child. The program is one instruction, BPF_RET | BPF_K with SECCOMP_RET_ALLOW (seccomp(2)).
_SECCOMP_CHILD = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
program = ctypes.create_string_buffer(struct.pack("HP", 1, ctypes.addressof(code)))
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
ok = libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
ok = ok and libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0
sys.exit(0 if ok else ctypes.get_errno())
"""


def _probe_seccomp(config: pytest.Config) -> str | None:
    code = subprocess.run([sys.executable, "-I", "-c", _SECCOMP_CHILD], timeout=30).returncode
    return None if code == 0 else f"seccomp filters are refused: {os.strerror(code)}"


def _probe_chromium(config: pytest.Config) -> str | None:
    return find_chromium()[1] or None


_PROBES: dict[str, Callable[[pytest.Config], str | None]] = {
    "gpu": _probe_gpu,
    "numa2": _probe_numa2,
    "cgroup": _probe_cgroup,
    "odirect": _probe_odirect,
    "seccomp": _probe_seccomp,
    "chromium": _probe_chromium,
}
_FOUND = pytest.StashKey[dict[str, str | None]]()
_REQUIRED = pytest.StashKey[frozenset[str]]()


# ----------------------------------------------------------------------------------- hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help=f"fail instead of skipping tests that need one of {', '.join(_PROBES)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    named = {name for names in config.getoption("--require") for name in names.split(",") if name}
    if unknown := named - _PROBES.keys():
        raise pytest.UsageError(
            f"--require knows {', '.join(_PROBES)}; not {', '.join(sorted(unknown))}"
        )
    config.stash[_REQUIRED] = frozenset(named)
    config.stash[_FOUND] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    found = item.config.stash[_FOUND]
    for name, probe in _PROBES.items():
        if item.get_closest_marker(name) is None:
            continue
        if name not in found:
            found[name] = probe(item.config)
        if (reason := found[name]) is not None:
            pytest.skip(f"{name}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        required = item.config.stash[_REQUIRED] & {mark.name for mark in item.iter_markers()}
        if required:
            report.outcome = "failed"
            report.longrepr = f"--require {','.join(sorted(required))}: {_skip_reason(report)}"
    return report


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: dict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.stats.get("skipped", []):
        # Cases of one parametrised test are one name with a count.
        skipped[_skip_reason(report)][report.nodeid.partition("[")[0]] += 1
    if not skipped:
        return
    terminalreporter.section("did not run")
    for reason, tests in sorted(skipped.items()):
        terminalreporter.line(f"{tests.total():4d}  {reason}")
        for name, count in sorted(tests.items()):
            terminalreporter.line(f"        {name}" + (f" ({count} cases)" if count > 1 else ""))
