"""DLPack exports of views: the label that the consumer asks for, and when pinned is refused."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostmem import CudaDevice, Device, HostMem, StaticHostMem
from hostmem._sys import dlpack
from hostmem._sys.driver import HOST_POINTERS, load_driver
from hostmem.testing import FakeDriver, FaultPlan

if TYPE_CHECKING:
    from tests.hostmem.conftest import Child

MIB = 1 << 20
CPU, PINNED = (1, 0), (3, 0)
REGISTER = "cuMemHostRegister"


@dataclass
class Consumer:
    """An importer: what it asks for, and nothing that it does not name."""

    array: Any
    asks: dict[str, Any]

    def __dlpack__(self, **_: object) -> Any:
        return self.array.__dlpack__(**self.asks)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.asks.get("dl_device") or CPU


def imported(array: Any, **asks: Any) -> NDArray[Any]:
    found: NDArray[Any] = np.from_dlpack(Consumer(array, asks))
    return found


def label(capsule: Any) -> tuple[bytes, tuple[int, int]]:
    """Read (name, device) in a capsule, by the offsets of dlpack.h."""
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
        ("PyCapsule_GetName", ctypes.pythonapi)
    )
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    name: bytes = name_of(capsule)
    at = pointer(capsule, name) + {b"dltensor": 8, b"dltensor_versioned": 40}[name]
    kind, number = (ctypes.c_int32 * 2).from_address(at)
    return name, (kind, number)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    driver = FakeDriver() if request.param == "fake" else load_driver()
    yield CudaDevice(0, driver=driver)
    if isinstance(driver, FakeDriver):
        assert list(driver.registered) == []


@pytest.fixture
def memory(device: CudaDevice) -> Iterator[HostMem]:
    """8 MiB in several registrations, the first of which ends at 1 MiB."""
    with HostMem(8 * MIB, device=device, wait=True) as memory:
        assert memory.boundary_after(0) == MIB
        yield memory
        gc.collect()  # a refusal that pytest caught holds the view that was refused


# ------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 3), b"dltensor_versioned"),
    ],
)
@pytest.mark.parametrize(
    ("asked", "answer"), [(None, CPU), (CPU, CPU), (PINNED, PINNED), ((3, 1), PINNED)]
)
def test_the_consumer_chooses_label_and_version(
    memory: HostMem,
    max_version: tuple[int, int] | None,
    name: bytes,
    asked: tuple[int, int] | None,
    answer: tuple[int, int],
) -> None:
    view = memory.view(100, 5000)
    view[:] = np.arange(5000) % 251
    assert label(view.__dlpack__(dl_device=asked, max_version=max_version)) == (name, answer)
    tensor = imported(view, dl_device=asked, max_version=max_version)
    assert tensor.__dlpack_device__() == answer
    assert np.array_equal(tensor, view)
    if max_version and max_version >= (1, 0):  # numpy takes old capsules for read-only
        tensor[3] = 255
        assert memory.view(103, 1)[0] == 255
    view[4] = 254
    assert tensor[4] == 254


def test_who_asks_for_nothing_gets_what_every_importer_takes(memory: HostMem) -> None:
    view = memory.view(0, 4096)
    assert view.__dlpack_device__() == CPU
    assert label(view.__dlpack__()) == (b"dltensor", CPU)
    assert np.from_dlpack(view).__dlpack_device__() == CPU


@pytest.mark.parametrize("asked", [(2, 0), (1, 1), (13, 0)])
def test_another_device_is_refused(memory: HostMem, asked: tuple[int, int]) -> None:
    with pytest.raises(BufferError):
        memory.view(0, 4096).__dlpack__(dl_device=asked)


def test_a_copy_is_on_the_cpu(memory: HostMem) -> None:
    view = memory.view(0, 4096)
    tensor = imported(view, copy=True, max_version=(1, 0))
    assert tensor.__dlpack_device__() == CPU
    assert not np.shares_memory(tensor, view)
    with pytest.raises(BufferError, match="a copy is not pinned memory"):
        view.__dlpack__(dl_device=PINNED, copy=True)
    assert label(view.__dlpack__(dl_device=PINNED, copy=False))[1] == PINNED


def test_static_memory_has_one_registration(device: CudaDevice) -> None:
    with StaticHostMem(3 * MIB, device=device) as memory:
        view = memory.view(dtype=np.float32, shape=(3, -1))
        tensor = imported(view, dl_device=PINNED)
        assert tensor.__dlpack_device__() == PINNED
        assert tensor.shape == view.shape
        del tensor, view


def test_the_label_does_not_depend_on_the_name_the_device_has_for_the_memory() -> None:
    device = CudaDevice(0, driver=FakeDriver(attributes={HOST_POINTERS: 0}))
    with StaticHostMem(MIB, device=device) as memory:
        assert label(memory.view().__dlpack__(dl_device=PINNED))[1] == PINNED


DERIVED: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda view: view[100:200],
    "a slice of a slice": lambda view: view[100:][50:60],
    "every second": lambda view: view[::2],
    "backwards": lambda view: view[::-1],
    "another type": lambda view: view.view(np.float64),
    "another shape": lambda view: view.reshape(64, 64).T[3:9, ::5],
    "no dimension": lambda view: view[7:8].reshape(()),
    "no bytes": lambda view: view[5:5],
    "a broadcast row": lambda view: np.broadcast_to(view[:8], (3, 8), subok=True),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_what_is_made_from_a_view_is_exported_as_it_is(
    memory: HostMem, derive: Callable[[Any], Any]
) -> None:
    view = memory.view(0, 4096)
    view[:] = np.arange(4096) % 249
    derived = derive(view)
    tensor = imported(derived, dl_device=PINNED, max_version=(1, 0))
    assert tensor.__dlpack_device__() == PINNED
    assert (tensor.shape, tensor.dtype) == (derived.shape, derived.dtype)
    assert tensor.strides == derived.strides or tensor.size < 2
    assert tensor.tobytes() == derived.tobytes()


def test_a_capsule_of_an_unknown_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(8)
    address = array.__array_interface__["data"][0]
    for version in (None, (1, 0)):
        capsule = dlpack.capsule_of(array, max_version=version)
        before = label(capsule)
        with pytest.raises(BufferError, match="unknown layout"):
            dlpack.label_pinned(capsule, address + 8)
        assert label(capsule) == before
        dlpack.label_pinned(capsule, address)
        with pytest.raises(BufferError, match="unknown layout"):
            dlpack.label_pinned(capsule, address)  # it is kDLCPU no longer
    monkeypatch.setattr(dlpack, "_MAJOR", 2)
    with pytest.raises(BufferError, match="unknown layout"):
        dlpack.label_pinned(dlpack.capsule_of(array, max_version=(1, 0)), address)


def test_a_numpy_that_negotiates_nothing_is_asked_for_what_it_knows(
    memory: HostMem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlpack, "_NEGOTIATES", False)
    view = memory.view(0, 4096)
    assert label(view.__dlpack__(dl_device=PINNED, max_version=(1, 0))) == (b"dltensor", PINNED)
    assert label(view.__dlpack__(dl_device=CPU)) == (b"dltensor", CPU)
    assert not np.shares_memory(imported(view, copy=True), view)
    with pytest.raises(BufferError, match=r"\(2, 0\)"):
        view.__dlpack__(dl_device=(2, 0))


# ----------------------------------------------------------------------------------- refusals


def test_a_view_across_a_boundary_is_pinned_after_consolidate_only(memory: HostMem) -> None:
    view = memory.view(MIB - 100, 200)
    with pytest.raises(BufferError, match=rf"ends at {MIB}, inside .* consolidate\(\)"):
        view.__dlpack__(dl_device=PINNED)
    assert label(view.__dlpack__())[1] == CPU
    memory.consolidate()
    assert label(view.__dlpack__(dl_device=PINNED))[1] == PINNED


@pytest.mark.parametrize(
    ("part", "crosses"),
    [
        (np.s_[:100], False),
        (np.s_[100:], False),
        (np.s_[99:101], True),
        (np.s_[::-1], True),
        (np.s_[99::-1], False),
        (np.s_[:99:-1], False),
        (np.s_[:100:7], False),
        (np.s_[::150], True),
    ],
)
def test_the_bytes_of_the_very_array_decide(memory: HostMem, part: slice, crosses: bool) -> None:
    array = memory.view(MIB - 100, 200)[part]
    if crosses:
        with pytest.raises(BufferError, match=f"ends at {MIB}"):
            array.__dlpack__(dl_device=PINNED)
    else:
        assert label(array.__dlpack__(dl_device=PINNED))[1] == PINNED


def test_the_last_byte_of_an_item_counts(memory: HostMem) -> None:
    items = memory.view(MIB - 12, 16, dtype=np.uint64)
    assert label(items[:1].__dlpack__(dl_device=PINNED))[1] == PINNED
    with pytest.raises(BufferError, match=f"ends at {MIB}"):
        items[1:].__dlpack__(dl_device=PINNED)


def test_quarantined_bytes_are_not_pinned() -> None:
    device = CudaDevice(0, driver=FakeDriver())
    with FaultPlan() as plan:
        # The second registration, of 1 MiB, is refused, and so is every part of it.
        plan.fail(REGISTER, 1, when=lambda address, nbytes: nbytes == MIB, at=2)
        plan.fail(REGISTER, 1, when=lambda address, nbytes: nbytes < MIB, times=None)
        with HostMem(4 * MIB, device=device, on_register_failure="pageable", wait=True) as memory:
            assert memory.quarantined == [(MIB, MIB)]
            view = memory.view()
            assert label(view[:MIB].__dlpack__(dl_device=PINNED))[1] == PINNED
            for part in (view[MIB : MIB + 1], view[: MIB + 1], view):
                with pytest.raises(BufferError, match=rf"byte {MIB} .* `quarantined`"):
                    part.__dlpack__(dl_device=PINNED)
            assert label(view.__dlpack__(dl_device=CPU))[1] == CPU
            del view, part
            gc.collect()


def test_suspended_bytes_are_not_pinned(memory: HostMem) -> None:
    view = memory.view(0, 4096)
    memory.suspend_registration()
    with pytest.raises(BufferError, match=r"byte 0 .* suspended"):
        view.__dlpack__(dl_device=PINNED)
    assert label(view.__dlpack__())[1] == CPU
    memory.resume_registration()
    assert label(view.__dlpack__(dl_device=PINNED))[1] == PINNED


@pytest.mark.parametrize("kind", [HostMem, StaticHostMem])
def test_the_cpu_device_pins_nothing_for_cuda(
    kind: type[HostMem] | type[StaticHostMem], cpu: Device
) -> None:
    with kind(MIB, device=cpu) as memory:
        view = memory.view()
        for part in (view, view[:0]):
            with pytest.raises(BufferError, match="registers nothing with a CUDA driver"):
                part.__dlpack__(dl_device=PINNED)
        assert label(view.__dlpack__(dl_device=CPU, max_version=(1, 0)))[1] == CPU
        del view, part
        gc.collect()


def test_closed_static_memory_is_not_pinned(device: CudaDevice) -> None:
    memory = StaticHostMem(MIB, device=device)
    view = memory.view()
    memory._core.shut_down()  # as on a signal: unregistered, and left mapped
    with pytest.raises(BufferError, match="is not registered"):
        view.__dlpack__(dl_device=PINNED)
    memory._finalizer.detach()
    memory._core.reservation.release()


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda view: view.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "fancy index": lambda view: view[[1, 2]],
    "another type": lambda view: view.astype(np.float32),
    "empty_like": np.empty_like,
    "sort": np.sort,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_a_copy_is_not_pinned(memory: HostMem, make: Callable[[Any], Any]) -> None:
    copied = make(memory.view(0, 4096))
    if type(copied) is not np.ndarray:
        with pytest.raises(BufferError, match="these bytes are a copy"):
            copied.__dlpack__(dl_device=PINNED)
    assert imported(copied, max_version=(1, 0)).__dlpack_device__() == CPU
    memory.resize(0)  # and nothing holds the memory


# ------------------------------------------------------------------------- an array like others


PLAIN: dict[str, Callable[[Any], Any]] = {
    "sum of arrays": lambda view: view + view,
    "sum with a number": lambda view: view + 1,
    "sum with a plain array": lambda view: np.ones(64) + view,
    "comparison": lambda view: view == 3,
    "row sums": lambda view: view.reshape(8, 8).sum(axis=0),
    "two results": lambda view: np.divmod(view, 7)[1],
    "product": lambda view: view.view(np.float32).reshape(4, 4) @ np.eye(4, dtype=np.float32),
    "product with a plain array": lambda view: np.dot(view.reshape(8, 8), np.ones((8, 8))),
    "concatenation": lambda view: np.concatenate([view, view]),
    "where": lambda view: np.where(view > 3, view, 0),
    "asarray": np.asarray,
    "pickle": lambda view: pickle.loads(pickle.dumps(view, 2)),
    "pickle 5": lambda view: pickle.loads(pickle.dumps(view, 5)),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN.keys())
def test_results_are_plain_arrays(make: Callable[[Any], Any], cpu: Device) -> None:
    data = np.arange(64, dtype=np.uint8)
    with HostMem(MIB, device=cpu) as memory:
        view = memory.view(0, 64)
        view[:] = data
        result = make(view)
        assert type(result) is np.ndarray
        assert np.array_equal(result, make(data))
        del view, result


SCALARS: dict[str, Callable[[Any], Any]] = {
    "an item": lambda view: view[3],
    "sum": lambda view: view.sum(),
    "mean": lambda view: view.mean(),
    "any": lambda view: view.any(),
    "no dimension": lambda view: view[0:1].reshape(()) + 1,
}


@pytest.mark.parametrize("make", SCALARS.values(), ids=SCALARS.keys())
def test_scalars_stay_scalars(make: Callable[[Any], Any], cpu: Device) -> None:
    data = np.arange(64, dtype=np.uint8)
    with HostMem(MIB, device=cpu) as memory:
        memory.view(0, 64)[:] = data
        result = make(memory.view(0, 64))
        assert type(result) is type(make(data))
        assert result == make(data)


def test_results_in_place_are_in_the_memory(memory: HostMem) -> None:
    view = same = memory.view(0, 64)
    view += 3
    assert view is same
    assert np.add(view, 1, out=view) is view
    assert memory.view(0, 64).tolist() == [4] * 64
    assert label(view.__dlpack__(dl_device=PINNED))[1] == PINNED


def test_a_view_is_saved_and_shown_like_an_array(cpu: Device) -> None:
    with HostMem(MIB, device=cpu) as memory:
        view: Any = memory.view(0, 4)
        view[:] = [1, 2, 3, 4]
        file = io.BytesIO()
        np.save(file, view)
        file.seek(0)
        assert np.load(file).tolist() == [1, 2, 3, 4]
        assert str(view) == "[1 2 3 4]"
        assert "[1, 2, 3, 4]" in repr(view)
        assert bytes(memoryview(view)) == b"\1\2\3\4"
        buffers: list[pickle.PickleBuffer] = []
        pickle.dumps(view, 5, buffer_callback=buffers.append)
        assert len(buffers) == 1, "large arrays travel beside the pickle, uncopied"
        del view, buffers


# ----------------------------------------------------------------------------------- lifetime


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_an_export_holds_the_memory(
    device: CudaDevice, max_version: tuple[int, int] | None, consumed: bool
) -> None:
    memory = HostMem(MIB, device=device, wait=True)
    asks: dict[str, Any] = {"dl_device": PINNED, "max_version": max_version}
    view = memory.view(0, 4096)
    export = imported(view, **asks) if consumed else view.__dlpack__(**asks)
    del view
    with pytest.raises(BufferError, match=r"\[0, 4096\)"):
        memory.close()
    del export
    memory.close()


# What other libraries do is played here: C code drops a tensor after the interpreter's end.
OUTLIVING = """
    import ctypes, sys
    import numpy as np
    from hostmem import CudaDevice, HostMem
    from hostmem.testing import FakeDriver

    label, version, how = eval(sys.argv[1])
    memory = HostMem(1 << 20, device=CudaDevice(0, driver=FakeDriver()), wait=True)
    capsule = memory.view(0, 4096).__dlpack__(dl_device=label, max_version=version)
    if how == "consumed":
        class Consumer:
            def __dlpack__(self, **asks): return capsule
            def __dlpack_device__(self): return label
        sys.kept = np.from_dlpack(Consumer())
    elif how == "unconsumed":
        sys.kept = capsule
    else:
        name, used = ((b"dltensor", b"used_dltensor") if version is None else
                      (b"dltensor_versioned", b"used_dltensor_versioned"))
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        at = api.PyCapsule_GetPointer(ctypes.py_object(capsule), name)
        assert api.PyCapsule_SetName(ctypes.py_object(capsule), used) == 0
        deleter = ctypes.c_void_p.from_address(at + (56 if version is None else 16)).value
        ctypes.CDLL(None).__cxa_atexit(ctypes.c_void_p(deleter), ctypes.c_void_p(at), None)
    print("ready")
"""


@pytest.mark.parametrize("how", ["consumed", "unconsumed", "dropped by C code"])
@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("asked", [CPU, PINNED])
def test_an_export_may_outlive_the_interpreter(
    child: Child, asked: tuple[int, int], version: tuple[int, int] | None, how: str
) -> None:
    code = OUTLIVING.replace("sys.argv[1]", repr(repr((asked, version, how))))
    done = child(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")
