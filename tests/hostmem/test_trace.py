"""HOSTMEM_DEBUG=1: every call of the seam leaves a line that says how it went."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from hostmem._sys import linux, seam, trace
from tests.hostmem.conftest import Child

LINE = re.compile(
    r"hostmem (?P<process>\d+) (?P<thread>[^:]+): (?P<call>\w+)\((?P<args>.*)\) = (?P<answer>.*?)"
    r"( <\d+\.\d{6} s>|)"
)


@pytest.fixture
def traced(child: Child, monkeypatch: pytest.MonkeyPatch) -> Child:
    monkeypatch.setenv("HOSTMEM_DEBUG", "1")
    return child


def lines(text: str) -> list[re.Match[str]]:
    """Read the trace; a line that is torn, or that is none of it, fails the test."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [match for match in found if match]


def seam_name(match: re.Match[str]) -> str:
    """Give the name that a fault plan has for a call."""
    call, words = match["call"], match["args"].split(", ")
    if call == "syscall":
        return words[0]
    if call in ("madvise", "fcntl"):
        return f"{call}({words[2 if call == 'madvise' else 1]})"
    return call


EVERYTHING = """
    import errno, json, os
    import numpy as np
    from hostmem import CudaDevice, HostMem, StaticHostMem
    from hostmem._sys import linux
    from hostmem.testing import FakeDriver, FaultPlan
    from hostmem.turns import FileTurns

    plan = FaultPlan().fail("mbind", errno.EPERM, when=lambda address, *_: address == 4096)
    with plan:
        with HostMem("8MiB", device="cpu", commit_unit="4MiB", wait=True) as memory:
            memory.placement()
            memory.release(0, 4 << 20)
            memory.recommit(0, 4 << 20)
            linux.set_policy(memory.address, 4096, linux.Policy.PREFERRED, [0])
            linux.get_policy(memory.address)
            linux.resident_by_page_kind(memory.address, 8 << 20)
            at = np.array([memory.address], np.uint64)
            linux.copy(at + np.uint64(4096), at, np.array([4096], np.uint64))
            file = os.open("file", os.O_RDWR | os.O_CREAT)
            linux.fallocate(file, 0, 4096)
            linux.pwritev(file, linux.iovecs(at, 4096), 0)
            linux.preadv(file, linux.iovecs(at, 4096), 0)
        try:
            linux.set_policy(4096, 4096, linux.Policy.BIND, [0])
        except PermissionError:
            pass
        device = CudaDevice(0, FakeDriver(numa_node=0))
        with HostMem("4MiB", page_mode="huge", device=device, wait=True):
            pass
        turns = FileTurns(os.path.abspath("turns"), create=True, look_interval=0)
        other = FileTurns(os.path.abspath("turns"), look_interval=0)
        with other:
            pass
        with turns:
            pass
    print(json.dumps([name for name, _ in plan.log]))
"""


def test_every_call_that_a_plan_sees_is_in_the_trace(traced: Child) -> None:
    done = traced(EVERYTHING)
    assert done.returncode == 0, done.stderr
    seen, told = Counter(json.loads(done.stdout)), Counter(map(seam_name, lines(done.stderr)))
    assert len(seen) > 20
    assert seen - told == Counter()  # the trace has more: what no plan may refuse
    assert told["munmap"] > seen["munmap"]


def test_a_call_is_told_with_its_arguments_and_its_answer(traced: Child) -> None:
    done = traced(
        """
        from hostmem._sys import linux
        address = linux.reserve(8192, 4096)
        linux.allow(address, 8192)
        linux.populate(address, 8192)
        print(hex(address))
        """
    )
    address = done.stdout.strip()
    first, *others = lines(done.stderr)
    assert (first["call"], first["args"]) == ("mmap", "NULL, 8192, 0, 16418, -1, 0")
    assert first["answer"] == address
    assert [f"{m['call']}({m['args']}) = {m['answer']}" for m in others] == [
        f"mprotect({address}, 8192, 3) = 0",
        f"madvise({address}, 8192, MADV_POPULATE_WRITE) = 0",
    ]
    assert {match["thread"] for match in (first, *others)} == {"MainThread"}


def test_a_failure_is_told_with_the_name_of_its_errno(traced: Child) -> None:
    done = traced(
        """
        import contextlib, errno, fcntl, logging
        import numpy as np
        from hostmem import HostOOMError
        from hostmem._sys import file_lock, linux

        class Clumsy(logging.Handler):
            def emit(self, record):
                linux._libc.munmap(linux._pointer(1), 1)  # EINVAL, which is nobody's business

        logging.getLogger("hostmem.calls").addHandler(Clumsy())
        with contextlib.suppress(HostOOMError):
            linux.reserve(1 << 62, 4096)
        for call, number in (
            (lambda: linux.set_policy(1 << 30, 4096, linux.Policy.BIND, [0]), errno.EFAULT),
            (lambda: linux.preadv(99, np.zeros((1, 2), np.uint64), 0), errno.EBADF),
            (lambda: linux.fallocate(99, 0, 1), errno.EBADF),
            (lambda: file_lock.lock(99), errno.EBADF),
        ):
            try:
                call()
            except OSError as error:
                assert error.errno == number, error
            else:
                raise AssertionError(number)
        assert not file_lock.say_present(99)
        """
    )
    assert done.returncode == 0, done.stderr
    answers = [(m["call"], m["answer"].split(" (")[0]) for m in lines(done.stderr)]
    assert answers == [
        ("mmap", "-1 ENOMEM"),
        ("syscall", "-1 EFAULT"),
        ("preadv", "-1 EBADF"),
        ("syscall", "-1 EBADF"),
        ("flock", "-1 EBADF"),
        ("fcntl", "-1 EBADF"),
    ]


def test_what_a_plan_answers_is_told_as_such(traced: Child) -> None:
    done = traced(
        """
        import errno
        from hostmem import HostMem, HostmemError
        from hostmem.testing import FaultPlan
        with FaultPlan() as plan:
            plan.fail("madvise(MADV_POPULATE_WRITE)", errno.ENOMEM)
            plan.fail("cuMemHostRegister", 801, times=None)
            for _ in range(2):
                with HostMem("1MiB", device="cpu", fill_threads=1) as memory:
                    try:
                        memory.wait_usable(1)
                    except HostmemError:
                        continue
                    raise AssertionError
        """
    )
    assert done.returncode == 0, done.stderr
    assert "-1 ENOMEM (Cannot allocate memory), by a plan" in done.stderr
    assert "= 801 CUDA_ERROR_NOT_SUPPORTED, by a plan" in done.stderr


def test_lines_of_threads_and_of_forked_children_are_whole(traced: Child) -> None:
    done = traced(
        """
        import os, threading
        from hostmem._sys import linux
        address = linux.reserve(4096, 4096)

        def work():
            for _ in range(200):
                linux.allow(address, 4096)

        threads = [threading.Thread(target=work, name=f"worker-{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        child = os.fork()  # while some thread is in the middle of a line
        if child == 0:
            work()
            os._exit(0)
        for thread in threads:
            thread.join()
        assert os.waitpid(child, 0)[1] == 0
        print(child)
        """
    )
    assert done.returncode == 0, done.stderr
    told = Counter((m["process"], m["thread"]) for m in lines(done.stderr) if m["call"] != "mmap")
    threads = {f"worker-{n}": 200 for n in range(4)}
    assert {thread: n for (_, thread), n in told.items() if thread in threads} == threads
    assert told[done.stdout.strip(), "MainThread"] == 200


def test_the_handlers_of_the_application_have_the_lines_alone(traced: Child) -> None:
    done = traced(
        """
        import logging, sys
        from hostmem._sys import linux
        logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
        linux.reserve(4096, 4096)
        """
    )
    assert done.stdout.startswith("hostmem.calls DEBUG mmap(NULL, 4096, ")
    assert done.stderr == ""


def test_a_standard_error_that_is_gone_is_no_error(traced: Child) -> None:
    done = traced(
        """
        import os
        os.close(2)
        from hostmem._sys import linux
        print(linux.reserve(4096, 4096) > 0)
        """
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_a_standard_error_that_never_was_is_not_a_file_of_somebody(traced: Child) -> None:
    done = traced(
        """
        import os, sys
        code = (
            "import os; assert os.open('file', os.O_RDWR | os.O_CREAT) == 2;"
            "from hostmem._sys import linux; linux.reserve(4096, 4096)"
        )
        os.close(2)
        os.execv(sys.executable, [sys.executable, "-c", f"{code}; print(os.fstat(2).st_size)"])
        """
    )
    assert (done.returncode, done.stdout) == (0, "0\n")


def test_calls_of_a_handler_are_not_told_to_it(traced: Child) -> None:
    done = traced(
        """
        import logging
        from hostmem import HostMem
        from hostmem._sys import linux

        class Eager(logging.Handler):
            def emit(self, record):
                told.append(record.args[0])
                with HostMem("1MiB", device="cpu"):
                    pass

        told = []
        logging.getLogger("hostmem").addHandler(Eager())
        address = linux.reserve(4096, 4096)
        told.clear()
        linux.allow(address, 4096)
        linux.discard(address, 4096)
        print([name for name in told if name in ("mprotect", "madvise")][:2], told[0])
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" mprotect\n")


def test_the_driver_is_traced_by_its_names(traced: Child) -> None:
    done = traced(
        """
        import enum, types
        from hostmem._sys import trace
        from hostmem._sys.driver import ffi

        class CUresult(enum.IntEnum):
            CUDA_SUCCESS = 0

        entries = trace.entries(
            {"register": lambda *_: 712, "push": lambda *_: 0, "batch": None},
            {"register": "cuMemHostRegister", "push": "cuCtxPushCurrent", "batch": "cuNone"},
        )
        assert entries["batch"] is None
        assert entries["register"](ffi.cast("void *", 0x7F0000001000), 4096, 3) == 712
        assert entries["push"](ffi.NULL) == 0
        module = types.SimpleNamespace(
            CUresult=CUresult,
            cuDeviceGetCount=lambda: (CUresult.CUDA_SUCCESS, 8),
            cuModuleLoadData=lambda program: (CUresult.CUDA_SUCCESS, 5),
            cuEventQuery=lambda event: (600,),
        )
        bindings = trace.bindings(module)
        assert bindings.CUresult is CUresult
        assert bindings.cuDeviceGetCount() == (0, 8)
        assert bindings.cuModuleLoadData(bytes(1000)) == (0, 5)
        assert bindings.cuEventQuery(7) == (600,)
        """
    )
    assert done.returncode == 0, done.stderr
    assert [f"{m['call']}({m['args']}) = {m['answer']}" for m in lines(done.stderr)] == [
        "cuMemHostRegister(0x7f0000001000, 4096, 3) = 712 "
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "cuCtxPushCurrent(NULL) = 0",
        "cuDeviceGetCount() = 0, 8",
        "cuModuleLoadData(<1000 bytes>) = 0, 5",
        "cuEventQuery(7) = 600 CUDA_ERROR_NOT_READY",
    ]


@pytest.mark.gpu
def test_calls_of_the_real_driver_are_traced(traced: Child) -> None:
    done = traced(
        """
        from hostmem import HostMem
        with HostMem("4MiB", device=0, wait=True) as memory:
            print(hex(memory.address), len(memory.registrations))
        """
    )
    assert done.returncode == 0, done.stderr
    address, registrations = done.stdout.split()
    told = lines(done.stderr)
    assert sum(m["call"] == "cuMemHostRegister" for m in told) == int(registrations)
    (first,) = (m for m in told if m["call"] == "cuMemHostUnregister" and m["args"] == address)
    assert first["answer"] == "0"
    assert {"cuInit", "cuGetProcAddress", "cuCtxPushCurrent", "cuCtxPopCurrent"} <= {
        m["call"] for m in told
    }


@pytest.mark.parametrize("value", ["", "0"])
def test_where_it_is_off_nothing_is_said(
    child: Child, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HOSTMEM_DEBUG", value)
    done = child(
        """
        import logging
        from hostmem import HostMem
        with HostMem("1MiB", device="cpu", wait=True) as memory:
            memory.placement()
        print(logging.getLogger("hostmem.calls").handlers)
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


@pytest.mark.skipif(trace.ON, reason="HOSTMEM_DEBUG is set for these tests")
def test_where_it_is_off_nothing_is_wrapped() -> None:
    assert linux._lib is linux._libc
    assert not hasattr(seam.intercept, "__wrapped__")

    def function() -> None: ...

    assert trace.call("x", function, str) is function
    assert trace.c_call("x", function, None) is function
    assert trace.played(function) is trace.intercepted(function) is function
    table: dict[str, object] = {}
    assert trace.entries(table, {}) is trace.bindings(table) is table
