"""How long calls of the CUDA driver take while this process does something else.

A small C library, compiled here, makes them on threads that hold no Python lock: a pointer's
attribute, a memset with its synchronisation, the free memory, and a kernel's launch with its
synchronisation, each again every 0.2 ms. `Probe.read` says what they took since `Probe.reset`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import cffi

__all__ = [
    "CALLS",
    "NoCompilerError",
    "Probe",
    "ProbeError",
    "Stalls",
    "built",
    "calls_of",
    "most_blocked",
    "worst_call",
]

CALLS = ("attribute", "memset", "memory", "launch")
"""Kinds of calls, in the order of probe.c: cuPointerGetAttribute, cuMemsetD8Async with
cuStreamSynchronize, cuMemGetInfo, cuLaunchKernel with cuStreamSynchronize."""

_SOURCE = Path(__file__).with_name("probe.c")
_COMPILERS = ("cc", "gcc", "clang")
_MESSAGE = 512  # bytes
_DECLARATIONS = """
typedef struct {
    uint64_t calls;
    uint64_t long_calls;
    double worst;
    double blocked;
    double seconds;
    int answer;
} stalls_t;
int probe_start(const char *library, int ordinal, unsigned kinds, char *message, size_t room);
void probe_stop(void);
void probe_reset(void);
void probe_read(int kind, stalls_t *seen);
"""


class ProbeError(Exception):
    """The probe cannot be built, or the driver refused one of its calls; it says why."""


class NoCompilerError(ProbeError):
    """There is no C compiler on this machine."""


@dataclass(frozen=True, slots=True)
class Stalls:
    """What the calls of one kind took in a window."""

    calls: int
    """Calls that ended in the window."""
    long_calls: int
    """Calls of more than 0.5 ms, one that still ran included."""
    worst: float
    """Seconds of the longest call, as far as it lies in the window."""
    blocked: float
    """Seconds in calls of more than 0.5 ms."""
    seconds: float
    """Length of the window."""

    @property
    def share(self) -> float:
        """Share of the window spent in calls of more than 0.5 ms, 0 to 1."""
        return self.blocked / self.seconds if self.seconds else 0.0


def worst_call(seen: dict[str, Stalls]) -> float:
    """Return the seconds of the longest call of all kinds."""
    return max(stalls.worst for stalls in seen.values())


def most_blocked(seen: dict[str, Stalls]) -> float:
    """Return the share of the window, 0 to 1, of the kind that was blocked most."""
    return max(stalls.share for stalls in seen.values())


def calls_of(text: str) -> list[str]:
    """Turn ``"attribute,launch"`` into the kinds of calls; ValueError for one that is none."""
    names = text.split(",")
    if unknown := set(names) - set(CALLS):
        raise ValueError(f"calls: {', '.join(sorted(unknown))}; give some of {','.join(CALLS)}")
    return [name for name in CALLS if name in names]


@contextlib.contextmanager
def built() -> Iterator[Path]:
    """Compile the probe into a folder that is there for a ``with`` block; yields its path.

    Raises
    ------
    NoCompilerError
        There is none.
    ProbeError
        It failed.
    """
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="hostmem-probe-") as folder:
        library = Path(folder) / "probe.so"
        options = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library)]
        done = subprocess.run(
            [*compiler, *options, str(_SOURCE), "-ldl"], capture_output=True, text=True
        )
        if done.returncode:
            raise ProbeError(f"{shlex.join(compiler)} cannot compile the probe:\n{done.stderr}")
        yield library


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    names = shlex.join(chosen) if chosen else ", ".join(_COMPILERS)
    raise NoCompilerError(
        f"the probe needs a C compiler, and there is no {names}: install one with the C library's "
        "headers (gcc and libc6-dev on Debian), or name it in CC"
    )


class Probe:
    """Threads that call the driver until the end of a ``with`` block; one a process at a time.

    Entering it retains the primary context of the device and makes each call once. Leaving it
    waits for the calls that run.

    Parameters
    ----------
    library : Path
        What `built` yields.
    ordinal : int
        The device, as the driver numbers the visible ones.
    calls : sequence of str
        Some of `CALLS`.
    driver : str
        The driver's library.

    Raises
    ------
    ProbeError
        On entering: the driver is not there or refused a call, or there is a probe already.
    """

    def __init__(
        self,
        library: Path,
        ordinal: int,
        calls: Sequence[str] = CALLS,
        *,
        driver: str = "libcuda.so.1",
    ) -> None:
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        self._library: Any = self._ffi.dlopen(str(library))
        self._ordinal = ordinal
        self._driver = driver
        self.calls = tuple(calls)

    def __enter__(self) -> Self:
        message = self._ffi.new("char[]", _MESSAGE)
        kinds = sum(1 << CALLS.index(name) for name in self.calls)
        failed = self._library.probe_start(
            self._driver.encode(), self._ordinal, kinds, message, _MESSAGE
        )
        if failed:
            text = self._ffi.string(message)
            raise ProbeError(f"the probe cannot start: {text.decode()}")  # type: ignore[union-attr]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._library.probe_stop()

    def reset(self) -> None:
        """Begin a window; of a call that runs now, only the rest counts."""
        self._library.probe_reset()

    def read(self) -> dict[str, Stalls]:
        """Return what the calls took since the window began, by kind; the window goes on.

        A call that runs now counts with what it took so far.

        Raises
        ------
        ProbeError
            The driver refused a call.
        """
        found: dict[str, Stalls] = {}
        for name in self.calls:
            seen: Any = self._ffi.new("stalls_t *")
            self._library.probe_read(CALLS.index(name), seen)
            if seen.answer:
                raise ProbeError(f"the driver answered {seen.answer} to the probe's call: {name}")
            found[name] = Stalls(
                calls=seen.calls,
                long_calls=seen.long_calls,
                worst=seen.worst,
                blocked=seen.blocked,
                seconds=seen.seconds,
            )
        return found
