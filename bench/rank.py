"""One process of several that get host memory at the same time, and how its benchmark leads it.

`Rank` starts ``python -m bench.rank`` and sends it orders as lines of JSON; it answers each with a
line. It ends with its parent, whose end it reads from the closed pipe. While it runs, a probe makes
driver calls (see bench.probe).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from bench.fill import touched_zeros
from bench.probe import Probe, Stalls
from hostmem import CudaDevice, HostMem, close_on_signal
from hostmem.turns import NO_TURNS

__all__ = ["ARMS", "DEFAULT", "LEAVES", "Rank", "RankFailedError", "together"]

MIB = 1 << 20
UNIT = 32 * MIB  # of cuMemCreate
PATIENCE = 120.0  # seconds: the slowest arm on a slow machine, or a start
LOOK = 0.05  # seconds between two looks for a signal

Answer = dict[str, Any]


class Held(Protocol):
    """Host memory that a rank has got."""

    def close(self) -> None: ...


class RefusedError(Exception):
    """The driver refused a call of a peer's."""


# ------------------------------------------------------------------------------ ways to get memory


def _ours(device: CudaDevice, size: int, **options: Any) -> Held:
    memory = HostMem(size, device=device, **options)
    memory.wait_usable(memory.size)
    return memory


def _no_turns(device: CudaDevice, size: int, **options: Any) -> Held:
    return _ours(_without_turns(device), size, **options)


def _unbound(device: CudaDevice, size: int, **options: Any) -> Held:
    return _ours(_without_turns(device), size, stall_budget=None, **options)


def _without_turns(device: CudaDevice) -> CudaDevice:
    other = CudaDevice(device.ordinal, device.driver)
    other.turns = NO_TURNS
    return other


class _HostNuma:
    """Physical memory of the device's node by cuMemCreate, mapped for the GPU and the CPUs."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        from cuda.bindings import driver as cu

        self._undo = contextlib.ExitStack()
        kind = cu.CUmemLocationType
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = kind.CU_MEM_LOCATION_TYPE_HOST_NUMA
        properties.location.id = device.numa_node or 0
        access = [cu.CUmemAccessDesc(), cu.CUmemAccessDesc()]
        access[0].location.type = kind.CU_MEM_LOCATION_TYPE_DEVICE
        access[0].location.id = device.ordinal
        access[1].location = properties.location
        for one in access:
            one.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        base = int(_ask("cuMemAddressReserve", size, UNIT, 0, 0))
        self._undo.callback(_ask, "cuMemAddressFree", base, size)
        try:
            for at in range(base, base + size, UNIT):
                nbytes = min(UNIT, base + size - at)
                handle = _ask("cuMemCreate", nbytes, properties, 0)
                self._undo.callback(_ask, "cuMemRelease", handle)
                _ask("cuMemMap", at, nbytes, 0, handle, 0)
                self._undo.callback(_ask, "cuMemUnmap", at, nbytes)
                _ask("cuMemSetAccess", at, nbytes, access, len(access))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._undo.close()


class _HostAlloc:
    """The driver's own allocation."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._address = _ask("cuMemHostAlloc", size, 0)

    def close(self) -> None:
        _ask("cuMemFreeHost", self._address)


def _ask(call: str, *arguments: Any) -> Any:
    from cuda.bindings import driver as cu

    code, *results = getattr(cu, call)(*arguments)
    if code != cu.CUresult.CUDA_SUCCESS:
        raise RefusedError(f"{call}: {code.name}")
    return results[0] if results else None


DEFAULT = "registered"
"""The arm that is ours at its default setting."""
ARMS: dict[str, Callable[..., Held]] = {
    DEFAULT: _ours,
    "registered, no turns": _no_turns,
    "registered, no turns, unbound": _unbound,
    "cuMemCreate(HOST_NUMA)": _HostNuma,
    "cuMemHostAlloc": _HostAlloc,
}
"""Each takes the device, the size in bytes and, those that register, options of HostMem."""


# -------------------------------------------------------------------------------- the rank itself


class _Worker:
    """What a rank does for each order, by the order's name."""

    def __init__(self, device: CudaDevice, probe: Probe) -> None:
        self._device = device
        self._probe = probe
        self.held: Held = contextlib.ExitStack()  # nothing

    def touch(self, size: int) -> Answer:
        """Use so much memory once: a virtual machine's is often backed only then."""
        touched_zeros(size)
        return {}

    def fill(self, arm: str, size: int, at: float, options: Answer) -> Answer:
        """Get memory, from a moment of time.monotonic on, and hold it; or say who refused it."""
        time.sleep(max(at - time.monotonic(), 0))
        self._probe.reset()
        try:
            self.held = ARMS[arm](self._device, size, **options)
        except RefusedError as error:
            return {"refused": str(error)}
        finish = time.monotonic()
        return {"finish": finish, "seen": self._seen()}

    def fill_slowly(self, size: int, rate: float, options: Answer) -> Answer:
        """Begin to fill, in the background."""
        self.held = HostMem(size, device=self._device, fill_rate=rate, **options)
        return {}

    def reset(self) -> Answer:
        self._probe.reset()
        return {}

    def read(self) -> Answer:
        """Say what the probe has seen since the reset, and whether a fill still runs."""
        seen = self._seen()
        filling = isinstance(self.held, HostMem) and self.held.progress.state == "filling"
        return {"seen": seen, "filling": filling}

    def free(self) -> Answer:
        """Give the memory back, and say what the probe saw meanwhile."""
        self._probe.reset()
        self.held.close()
        self.held = contextlib.ExitStack()
        return {"seen": self._seen()}

    def turns(self) -> Answer:
        """Say how turns with the other ranks went."""
        return {"turns": self._device.turns.state}

    def _seen(self) -> Answer:
        return {name: dataclasses.asdict(one) for name, one in self._probe.read().items()}

    def leave(self, how: str) -> NoReturn:
        """End the process in one of the ways."""
        if how == "close()":
            self.held.close()
        if how == "an exception":
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # this traceback is no news
            raise RuntimeError("the end that was asked for")
        sys.exit()


LEAVES = {
    "exit": 0,
    "an exception": 1,
    "SIGTERM": -signal.SIGTERM,
    "close()": 0,
    "SIGKILL": -signal.SIGKILL,
}
"""Ways in which a rank leaves with its memory open (or closes it), and the status of its end."""


def _main(library: str, ordinal: str, *calls: str) -> None:
    device = CudaDevice(int(ordinal))
    probe = Probe(Path(library), device.ordinal, calls)
    with probe if calls else contextlib.nullcontext():
        _obey(device, probe)


def _obey(device: CudaDevice, probe: Probe) -> None:
    context = _ask("cuDevicePrimaryCtxRetain", device.ordinal)
    _ask("cuCtxSetCurrent", context)
    close_on_signal(signal.SIGTERM)
    worker = _Worker(device, probe)
    _keep.append(worker)
    print(json.dumps({}), flush=True)
    for order in _orders():
        print(json.dumps(getattr(worker, order.pop("do"))(**order)), flush=True)
    worker.held.close()  # the parent has gone, or has no more orders


def _orders() -> Iterator[Answer]:
    """Yield what the parent says, one after the other's answer, until it says no more."""
    while True:
        # With a limit: Python would not see a signal that comes just before an endless wait.
        if not select.select([sys.stdin], [], [], LOOK)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        yield json.loads(line)


_keep: list[_Worker] = []  # so that memory is open until the interpreter's end


# -------------------------------------------------------------------------- who gives the orders


class RankFailedError(Exception):
    """A rank ended, or did not answer in time; it says which one, and when."""


class Rank:
    """A process that gets memory by order; killed and reaped at the end of a ``with`` block.

    Parameters
    ----------
    name : str
        What errors call it.
    library : Path
        The probe, as `bench.probe.built` yields it.
    ordinal : int
        The device.
    calls : sequence of str
        Calls that its probe makes; none for no probe.
    """

    def __init__(self, name: str, library: Path, ordinal: int, calls: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.rank", str(library), str(ordinal), *calls],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # nothing is left to write when it is closed
        )
        self._doing = "start"
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        asked = process.returncode is not None  # to leave, and it did
        if kind is not None:
            process.kill()
        assert process.stdin is not None
        with process:  # closes the pipes, and waits
            process.stdin.close()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        if kind is None and not asked and process.returncode:
            raise RankFailedError(f"{self.name}: ended with status {process.returncode} at last")

    def leave(self, how: str) -> None:
        """Have it leave in one of `LEAVES`; `reap` waits for that."""
        if how.startswith("SIG"):
            self._process.send_signal(getattr(signal, how))
        else:
            self.tell("leave", how=how)

    def tell(self, what: str, **arguments: Any) -> None:
        """Send an order; `hear` has the answer."""
        self._doing = what
        line = json.dumps({"do": what, **arguments}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            self._failed()

    def hear(self, patience: float = PATIENCE) -> Answer:
        """Wait so many seconds for the answer to the last order, or for the first sign of life.

        Raises
        ------
        RankFailedError
            It ended, or there is no answer yet.
        """
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + patience
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise RankFailedError(f"{self.name}: no answer to {self._doing} in {patience:g} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                self._failed()
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        answer: Answer = json.loads(line)
        if "seen" in answer:
            answer["seen"] = {name: Stalls(**one) for name, one in answer["seen"].items()}
        return answer

    def reap(self, patience: float = PATIENCE) -> int:
        """Wait for its end, and return its status as `subprocess` gives it.

        Raises
        ------
        RankFailedError
            It runs on.
        """
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            raise RankFailedError(f"{self.name}: it still runs after {patience:g} s") from None

    def _failed(self) -> NoReturn:
        raise RankFailedError(f"{self.name}: ended with status {self.reap()} during {self._doing}")


@contextlib.contextmanager
def together(
    count: int, library: Path, ordinal: int, calls: Sequence[str], name: str = "rank"
) -> Iterator[list[Rank]]:
    """Start some ranks at once, and yield them when all are there.

    Raises
    ------
    RankFailedError
        One of them did not come up.
    """
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Rank(f"{name} {number} of {count}", library, ordinal, calls))
            for number in range(count)
        ]
        for rank in ranks:
            rank.hear()
        yield ranks


if __name__ == "__main__":
    _main(*sys.argv[1:])
