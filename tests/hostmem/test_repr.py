"""Every public object says its state in one line, whatever the state; some show tables."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

import hostmem
from hostmem import (
    Capabilities,
    Capability,
    CudaDevice,
    CudaMemory,
    HostEvent,
    HostMem,
    HostmemError,
    HostOOMError,
    Machine,
    Node,
    Placement,
    Preflight,
    StaticHostMem,
    Stretch,
    capabilities,
    machine,
    placement_of,
    preflight,
    resolve_device,
)
from hostmem._sys import linux
from hostmem.process_report import report_process
from hostmem.testing import FakeDriver, FaultPlan
from tests.hostmem.conftest import Child
from tests.threads import Spawn, Until

MIB = 1 << 20
Make = Callable[[ExitStack], Any]
Addresses = NDArray[np.uint64]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def memory(stack: ExitStack, **options: Any) -> HostMem:
    made = HostMem("4MiB", **{"device": "cpu", "wait": True, **options})
    stack.callback(made.close)
    return made


def gpu() -> CudaDevice:
    return CudaDevice(0, FakeDriver(numa_node=0))


def closed(thing: Any) -> Any:
    thing.close()
    return thing


def filling(stack: ExitStack, call: str, **options: Any) -> HostMem:
    """Make a memory whose fill stands still at a call."""
    plan = stack.enter_context(FaultPlan())
    hold = plan.hold(call)
    made = HostMem("4MiB", **{"device": "cpu", "fill_threads": 1, **options})
    stack.callback(made.close)
    stack.callback(hold.release)
    hold.wait_reached()
    return made


def failed(stack: ExitStack) -> HostMem:
    plan = stack.enter_context(FaultPlan())
    plan.fail("madvise(MADV_POPULATE_WRITE)", errno.ENOMEM, at=3)
    made = memory(stack, wait=False, fill_threads=1)
    with pytest.raises(HostOOMError):
        made.wait_usable(4 * MIB)
    return made


def suspended(stack: ExitStack) -> HostMem:
    made = memory(stack)
    made.suspend_registration()
    made.resize(2 * MIB)
    made.resize(4 * MIB)
    return made


def released(stack: ExitStack) -> HostMem:
    made = memory(stack, commit_unit="1MiB")
    made.release(MIB, MIB)
    return made


def quarantined(stack: ExitStack) -> HostMem:
    plan = stack.enter_context(FaultPlan())
    plan.fail("cuMemHostRegister", 801, times=None)
    return memory(stack, on_register_failure="pageable")


def done(error: Exception | None = None) -> HostEvent:
    event = HostEvent()
    event.set(error)
    return event


def stream(stack: ExitStack, device: Any) -> Any:
    made = device.stream()
    stack.callback(made.close)
    return made


def cuda_event(stack: ExitStack, finished: bool) -> Any:
    device = gpu()
    made = stream(stack, device)
    event = made.record()
    if finished:
        event.synchronize()
    else:  # it is, and nobody has asked the driver about it
        device.driver.stream_synchronize(0, made.handle)
    return event


STATES: dict[str, list[tuple[Make, str]]] = {
    "HostMem": [
        (lambda s: memory(s), "4 MiB usable (100 %), cpu, no node, small pages>"),
        (lambda s: HostMem.__new__(HostMem), "<HostMem, incomplete>"),
        (lambda s: closed(memory(s)), "<HostMem 4 MiB, closed>"),
        (lambda s: memory(s, size=0), "0 B usable, cpu, no node, small pages, may grow to 4 MiB>"),
        (lambda s: filling(s, "madvise(MADV_POPULATE_WRITE)"), "0 B usable (0 %), cpu"),
        (lambda s: filling(s, "madvise(MADV_POPULATE_WRITE)"), "small pages, filling>"),
        (failed, "1 MiB usable (25 %), cpu, no node, small pages, failed>"),
        (suspended, "2 MiB usable (50 %), cpu, no node, small pages, suspended>"),
        (released, "1 MiB usable (25 %), cpu, no node, small pages, 1 MiB released>"),
        (quarantined, "4 MiB usable (100 %), cpu, no node, small pages, 4 MiB quarantined>"),
        (lambda s: memory(s, device=gpu()), "cuda:0 Fake GPU 0, node 0, small pages>"),
    ],
    "StaticHostMem": [
        (lambda s: s.enter_context(StaticHostMem("1MiB", device="cpu")), "1 MiB, at 0x"),
        (lambda s: closed(StaticHostMem("1MiB", device="cpu")), "closed, cpu>"),
        (lambda s: StaticHostMem.__new__(StaticHostMem), "<StaticHostMem, incomplete>"),
    ],
    "FillProgress": [
        (lambda s: memory(s).progress, "<FillProgress filled: 4 MiB of 4 MiB (100%), "),
        (lambda s: closed(memory(s)).progress, "<FillProgress closed: "),
    ],
    "CpuDevice": [(lambda s: resolve_device("cpu"), "<cpu>")],
    "CudaDevice": [(lambda s: gpu(), "<cuda:0 Fake GPU 0>")],
    "CudaMemory": [
        (
            lambda s: s.enter_context(_closing(CudaMemory(gpu(), 4 * MIB, 2 * MIB, 2 * MIB))),
            "<CudaMemory 2 MiB of 4 MiB at 0x",
        ),
        (lambda s: closed(CudaMemory(gpu(), 4 * MIB, 0, 2 * MIB)), " of 4 MiB on cuda:0 Fake GPU"),
        (lambda s: CudaMemory.__new__(CudaMemory), "<CudaMemory, incomplete>"),
    ],
    "Stream": [
        (lambda s: stream(s, resolve_device("cpu")), "<CpuStream, 0 jobs queued>"),
        (lambda s: closed(stream(s, resolve_device("cpu"))), "<CpuStream, closed>"),
        (lambda s: stream(s, gpu()), " of cuda:0 Fake GPU 0>"),
        (lambda s: closed(stream(s, gpu())), "Fake GPU 0, closed>"),
    ],
    "Event": [
        (lambda s: cuda_event(s, False), "<CudaEvent of cuda:0 Fake GPU 0, not known to be done>"),
        (lambda s: cuda_event(s, True), "<CudaEvent of cuda:0 Fake GPU 0, done>"),
    ],
    "HostEvent": [
        (lambda s: HostEvent(), "<HostEvent, under way>"),
        (lambda s: done(), "<HostEvent, done>"),
        (lambda s: done(OSError("a\nb")), "<HostEvent, failed: a b>"),
    ],
    "Machine": [(lambda s: machine(), "<Machine Linux ")],
    "Node": [(lambda s: Node(1, (4, 5, 6), 64 << 30), "<Node 1: 64 GiB, 3 cpus>")],
    "Capabilities": [
        (lambda s: capabilities(), "<Capabilities: "),
        (
            lambda s: Capabilities(*[Capability(n > 4, "x\ny") for n in range(7)]),
            "<Capabilities: copy_list, cuda; not populate_write, set_policy, get_policy, ",
        ),
    ],
    "Capability": [(lambda s: Capability(False, "a\nb"), "reason='a\\nb'")],
    "Placement": [(lambda s: memory(s).placement(), "<Placement of 4 MiB at 0x")],
    "Stretch": [(lambda s: memory(s).placement().stretches[0], "Stretch(offset=0, nbytes=65536,")],
    "Preflight": [(lambda s: preflight("1MiB", device="cpu"), "<Preflight 1 x 1 MiB on cpu: ")],
}
FURTHER: list[tuple[Make, str]] = [  # not public by name, and got from public objects
    (lambda s: report_process(), "<ProcessReport of self: "),
    (lambda s: resolve_device("cpu").borrow([]), "<Loan, closed>"),
    (lambda s: gpu().copies, "<CopyChoice of cuda:0 Fake GPU 0: "),
    (
        lambda s: CudaDevice(0, FakeDriver(), copy_kernel=0).copies,
        ": all through the copy engines>",
    ),
    (
        lambda s: CudaDevice(0, FakeDriver(kernels=True), copy_kernel="64KiB").copies,
        ": by the copy kernel up to 64 KiB, down to 64 KiB, within to 64 KiB>",
    ),
]
CASES = [case for cases in STATES.values() for case in cases] + FURTHER


class _closing(ExitStack):
    """Close something that is no context manager at the end of a block, and give it."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self._thing = thing
        self.callback(thing.close)

    def __enter__(self) -> Any:
        return self._thing


def kinds(package: Any) -> set[str]:
    """Name what a package exports whose instances a user may have at the prompt."""
    things = {name: getattr(package, name) for name in package.__all__}
    return {
        name
        for name, thing in things.items()
        if inspect.isclass(thing) and not issubclass(thing, Exception)
    }


def test_every_public_kind_is_looked_at() -> None:
    assert kinds(hostmem) - {"Device"} == set(STATES)


@pytest.mark.parametrize(("make", "says"), CASES, ids=itertools.count())
def test_it_says_its_state_in_one_line(stack: ExitStack, make: Make, says: str) -> None:
    shown = repr(make(stack))
    assert says in shown
    assert len(shown.splitlines()) == 1
    assert " object at 0x" not in shown


@pytest.mark.parametrize("name", sorted(set(hostmem.__all__) - kinds(hostmem) - {"__version__"}))
def test_what_remains_is_functions_and_errors(name: str) -> None:
    thing: Any = getattr(hostmem, name)
    if isinstance(thing, type):
        assert len(repr(thing("two\nlines")).splitlines()) == 1
        assert issubclass(thing, HostmemError)
    else:
        assert inspect.isfunction(inspect.unwrap(thing))


def test_a_huge_part_is_counted(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    one = memory(stack, page_mode="huge")
    asked: list[Addresses] = []

    def half(addresses: Addresses) -> NDArray[np.bool_]:
        asked.append(addresses)
        return np.resize(np.array([True, False]), len(addresses))

    monkeypatch.setattr(linux, "are_huge", half)
    assert "no node, huge pages 50 %>" in repr(one)
    assert one.address <= asked[0].min() <= asked[0].max() < one.address + 4 * MIB

    def denied(addresses: Addresses) -> NDArray[np.bool_]:
        raise PermissionError(errno.EPERM, "no proc here")

    monkeypatch.setattr(linux, "are_huge", denied)
    assert "no node, huge pages>" in repr(one)


def test_who_waits_is_counted(stack: ExitStack, spawn: Spawn, until: Until) -> None:
    one = filling(stack, "madvise(MADV_POPULATE_WRITE)")
    waits = [spawn(one.wait_usable, 4 * MIB) for _ in range(3)]
    until(lambda: repr(one).endswith(", filling, 3 waiting>"))
    assert "0 B usable (0 %)" in repr(one)
    stack.close()
    for wait in waits:
        assert isinstance(wait.exception(), HostmemError)


def test_a_repr_waits_for_no_lock_that_is_held_for_long(stack: ExitStack, spawn: Spawn) -> None:
    one = filling(stack, "madvise(MADV_POPULATE_WRITE)")
    core = one._core
    with core.lock, core.view_lock, core.filler._lock:
        assert ", filling>" in spawn(repr, one).result(20)


def test_a_forked_child_can_look_at_everything(child: Child) -> None:
    done = child(
        """
        import os, threading
        from hostmem import CudaDevice, HostEvent, HostMem, StaticHostMem, resolve_device
        from hostmem.testing import FakeDriver

        device = CudaDevice(0, FakeDriver())
        stream = resolve_device("cpu").stream()
        things = [
            HostMem("4MiB", device="cpu"), StaticHostMem("1MiB", device="cpu"), HostEvent(),
            device, device.stream(), device.stream().record(), stream, stream.record(),
            device.copies, HostMem("4MiB", device="cpu").progress,
        ]
        things[0].wait_usable(4 << 20)
        gone = os.fork()
        if gone == 0:
            shown = list(map(repr, things))
            assert all(len(one.splitlines()) == 1 for one in shown), shown
            assert not any("incomplete" in one for one in shown), shown
            assert shown[0] == "<HostMem 4 MiB, closed>" == things[0].describe(), shown
            assert "<code>" in things[0]._repr_html_()
            os._exit(0)
        print(os.waitpid(gone, 0)[1])
        os._exit(0)
        """
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


SHOWN: list[Make] = [
    lambda s: memory(s),
    lambda s: closed(memory(s)),
    lambda s: HostMem.__new__(HostMem),
    failed,
    lambda s: machine(),
    lambda s: capabilities(),
    lambda s: preflight("1MiB", device="cpu"),
    lambda s: memory(s).placement(),
    lambda s: placement_of(b""),
    lambda s: report_process(),
    lambda s: gpu().copies,
    lambda s: dataclasses.replace(preflight("1MiB", device="cpu"), notes=("<b>&",)),
]


@pytest.mark.parametrize("make", SHOWN, ids=itertools.count())
def test_a_notebook_gets_whole_and_escaped_html(stack: ExitStack, make: Make) -> None:
    thing = make(stack)
    root = ElementTree.fromstring(thing._repr_html_())
    assert root[0].text == repr(thing)
    assert {node.tag for node in root.iter()} <= {
        *("div", "code", "table", "tbody", "tr", "th", "td", "pre", "span", "small")
    }


def test_every_kind_with_a_description_is_shown_in_notebooks() -> None:
    for kind in (HostMem, Machine, Capabilities, Preflight, Placement):
        assert callable(kind._repr_html_)
    assert not hasattr(Stretch, "describe")


def test_a_memory_describes_itself_alike_in_text_and_html(stack: ExitStack) -> None:
    one = failed(stack)
    text = one.describe()
    cells = [node.text for node in ElementTree.fromstring(one._repr_html_()).iter("td")]
    assert len(cells) == len(text.splitlines()) == 11
    assert all(cell and cell in text for cell in cells if cell and "MiB/s" not in cell)
    assert text.splitlines()[-1].startswith("failure        madvise(MADV_POPULATE_WRITE)")


@pytest.mark.gpu
def test_objects_of_a_real_gpu_say_their_state_also_in_a_forked_child(child: Child) -> None:
    done = child(
        """
        import os
        import numpy as np
        from hostmem import CudaMemory, HostMem, StaticHostMem, resolve_device
        from hostmem._sys import linux

        device = resolve_device(0)
        stream = device.stream()
        event = stream.record()
        event.synchronize()
        memory = HostMem("64MiB", device=device, page_mode="huge", wait=True)
        things = [
            memory, StaticHostMem("1MiB", device=device), device, device.copies, stream, event,
            stream.record(), CudaMemory(device, 4 << 20, 2 << 20, 2 << 20), device.borrow([]),
        ]
        shown = list(map(repr, things))
        assert all(len(one.splitlines()) == 1 for one in shown), shown
        assert not any("incomplete" in one or "object at" in one for one in shown), shown
        assert f", {device.name}, node " in shown[0] and "huge pages" in shown[0], shown[0]
        try:
            linux.are_huge(np.array([memory.address], np.uint64))
        except OSError:
            pass  # the kernel does not say
        else:
            assert "huge pages " in shown[0], shown[0]
        assert "done" in shown[5], shown[5]
        gone = os.fork()
        if gone == 0:
            shown = list(map(repr, things))
            assert not any("incomplete" in one for one in shown), shown
            assert shown[0] == "<HostMem 64 MiB, closed>", shown
            os._exit(0)
        print(os.waitpid(gone, 0)[1])
        memory.close()
        things[1].close()
        os._exit(0)
        """
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
