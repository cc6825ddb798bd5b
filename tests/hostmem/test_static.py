"""The small, fixed buffer beside it."""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hostmem import (
    ClosedError,
    CpuDevice,
    HostOOMError,
    PlacementRefusedError,
    RegistrationError,
    StaticHostMem,
)
from hostmem._sys import linux
from hostmem.courier import closings
from hostmem.testing import FaultPlan

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child, Maps

PAGE = mmap.PAGESIZE
POPULATE = "madvise(MADV_POPULATE_WRITE)"


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 100_000])
def test_the_size_is_as_asked_and_the_mapping_is_whole_pages(nbytes: int, maps: Maps) -> None:
    pages = -(-nbytes // PAGE) * PAGE
    with FaultPlan() as plan, StaticHostMem(nbytes, device="cpu") as memory:
        assert memory.nbytes == nbytes
        assert memory.view().nbytes == nbytes
        assert maps(memory.address, pages) == [(0, pages, "rw-p")]
    assert plan.calls("munmap") == [(memory.address, pages)]


def test_it_is_one_registration_of_any_size(cpu: CpuDevice) -> None:
    with StaticHostMem("20MiB", device="cpu") as memory:
        assert list(cpu.registered) == [(memory.address, 20 << 20)]


def test_it_needs_no_worker() -> None:
    before = threading.active_count()
    with StaticHostMem(PAGE, device="cpu"):
        names = {thread.name for thread in threading.enumerate()}
        assert not any(name.startswith("hostmem-fill") for name in names)
        assert threading.active_count() <= before + 1  # the one that closes what was dropped


@pytest.mark.parametrize("nbytes", [0, -1, "0B", "-1MiB"])
def test_no_bytes_are_refused(nbytes: Any) -> None:
    with FaultPlan() as plan, pytest.raises(ValueError, match="give at least 1 byte"):
        StaticHostMem(nbytes, device="cpu")
    assert plan.calls("mmap") == []


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    [
        ("mprotect", errno.ENOMEM, HostOOMError),
        (POPULATE, errno.ENOMEM, HostOOMError),
        (POPULATE, errno.EFAULT, OSError),
        ("cuMemHostRegister", 1, RegistrationError),
        ("cuMemHostRegister", 2, RegistrationError),
        ("cuMemHostRegister", 801, RegistrationError),
    ],
)
def test_a_step_that_fails_keeps_nothing(
    name: str, error: int, kind: type[Exception], cpu: CpuDevice
) -> None:
    with FaultPlan() as plan:
        plan.fail(name, error)
        with pytest.raises(kind):
            StaticHostMem(3 * PAGE, device="cpu")
    assert [nbytes for _, nbytes in plan.calls("munmap")] == [3 * PAGE]
    assert list(cpu.registered) == []


def test_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlacementRefusedError):
        StaticHostMem(PAGE, device="cpu", numa_node=1000)


def test_a_view_is_typed_shaped_and_writable() -> None:
    with StaticHostMem(64, device="cpu") as memory:
        view = memory.view(16, 32, dtype=np.int32, shape=(2, 4))
        view[:] = 5
        assert memory.view(16, 32).tolist() == [5, 0, 0, 0] * 8
        del view


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 65), (65, None), (8, -1)])
def test_a_view_outside_is_refused(offset: int, nbytes: int | None) -> None:
    with (
        StaticHostMem(64, device="cpu") as memory,
        pytest.raises(ValueError, match=r"outside 0\.\.64"),
    ):
        memory.view(offset, nbytes)


def test_a_close_under_a_view_changes_nothing() -> None:
    memory = StaticHostMem(64, device="cpu")
    part = memory.view()[3:5]
    with FaultPlan() as plan, pytest.raises(BufferError, match="1 live views"):
        memory.close()
    assert plan.log == []
    part[0] = 4
    assert int(memory.view(3, 1)[0]) == 4
    del part
    memory.close()


def test_closing_is_idempotent_and_final() -> None:
    memory = StaticHostMem(64, device="cpu")
    with FaultPlan() as plan:
        memory.close()
        memory.close()
    assert len(plan.calls("munmap")) == 1
    assert memory.closed
    with pytest.raises(ClosedError):
        memory.view()


def test_leaving_the_block_under_a_view_is_an_error_of_its_own() -> None:
    memory = StaticHostMem(64, device="cpu")
    with pytest.raises(BufferError), memory:
        view = memory.view()
    del view
    memory.close()


def test_an_error_in_the_block_gets_a_note_when_a_view_keeps_it_open() -> None:
    memory = StaticHostMem(64, device="cpu")
    view = memory.view()
    with pytest.raises(KeyError) as caught, memory:
        raise KeyError("mine")
    assert ["the memory stays open" in note for note in caught.value.__notes__] == [True]
    del view
    memory.close()


@pytest.fixture
def leaked(cpu: CpuDevice) -> Iterator[None]:
    yield
    for start, nbytes in list(cpu.registered):
        cpu.unregister(start)
        linux.unmap(start, nbytes)


@pytest.mark.usefixtures("leaked")
def test_memory_that_the_driver_does_not_let_go_is_left_mapped_and_reported(
    maps: Maps, caplog: pytest.LogCaptureFixture
) -> None:
    memory = StaticHostMem(PAGE, device="cpu")
    with FaultPlan() as plan, caplog.at_level(logging.ERROR, "hostmem"):
        plan.fail("cuMemHostUnregister", 1)
        memory.close()
    assert plan.calls("munmap") == []
    assert maps(memory.address, PAGE) == [(0, PAGE, "rw-p")]
    assert "leaked on purpose" in caplog.text


def test_one_that_is_dropped_is_closed_with_a_warning(cpu: CpuDevice) -> None:
    memory = StaticHostMem(PAGE, device="cpu")
    gone = weakref.ref(memory)
    with pytest.warns(ResourceWarning, match=r"StaticHostMem 4 KiB.* was dropped without close"):
        del memory
    assert gone() is None
    assert closings.drain(10)
    assert list(cpu.registered) == []


def test_at_exit_it_is_unregistered_and_left_mapped(child: Child) -> None:
    done = child(
        """
        import atexit

        def check():  # hooks run last in, first out: this one after the library's
            print("cuMemHostUnregister" in calls, "munmap" in calls, int(view.sum()))

        atexit.register(check)
        from hostmem import StaticHostMem
        from hostmem._sys import seam
        calls = []
        seam.install(lambda name, args: calls.append(name) or 0)
        memory = StaticHostMem(4096, device="cpu")
        view = memory.view()
        """,
        "-Wdefault::ResourceWarning",
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True False 0\n", "", 0)


def test_in_a_forked_child_it_is_closed(child: Child) -> None:
    done = child(
        """
        import os
        from hostmem import ClosedError, StaticHostMem
        memory = StaticHostMem(4096, device="cpu")
        memory.view()[:] = 7
        pid = os.fork()
        if pid == 0:
            assert memory.closed
            memory.close()
            try:
                memory.view()
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert int(memory.view().sum()) == 7 * 4096
        memory.close()
        """,
    )
    assert (done.stderr, done.returncode) == ("", 0)
