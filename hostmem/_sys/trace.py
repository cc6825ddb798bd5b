"""A trace of the calls of the seam: each with its arguments, its answer and how long it took.

It is on where ``HOSTMEM_DEBUG`` is set to anything but 0 when the library is imported, and cannot
be switched later: where it is off, everything here gives back what it was given, so that calls
cost nothing more. Lines go to the logger ``hostmem.calls`` at DEBUG. They reach the handlers of
the application, or standard error where it has none.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from types import SimpleNamespace
from typing import Any, TypeVar

__all__ = [
    "ON",
    "SYMBOLS",
    "bindings",
    "c_call",
    "call",
    "entries",
    "intercepted",
    "library",
    "played",
]

ON = os.environ.get("HOSTMEM_DEBUG", "0") not in ("", "0")
"""Whether calls are traced, in this process and in those that it forks."""

SYMBOLS: dict[int, str] = {}
"""Names of the driver's answers, which the module of the driver fills in."""

Words = Mapping[int, Mapping[int, str]]
"""By the position of an argument, what its values are called."""

F = TypeVar("F", bound=Callable[..., Any])

_ADDRESS = 1 << 40  # larger integers are addresses, or better read like them
_LONGEST = 60  # characters of an argument
_POINTER = re.compile(r"<cdata .* (0x[0-9a-f]+|NULL)>")

log = logging.getLogger("hostmem.calls")


class _StandardError(logging.Handler):
    """Writes each line by one system call.

    That is safe in signal handlers, beside other threads, in a forked child and at the end of the
    interpreter, where a text stream may be locked or gone.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Leave the line to the application's handlers, if there are any."""
        heard = (h for name in ("hostmem", None) for h in logging.getLogger(name).handlers)
        return all(isinstance(handler, logging.NullHandler) for handler in heard)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; what cannot be written is lost."""
        with contextlib.suppress(OSError):
            os.write(2, f"{self.format(record)}\n".encode(errors="backslashreplace"))


_telling = threading.local()  # its ``now`` says that the thread tells of a call

if ON:
    log.setLevel(logging.DEBUG)
if ON and sys.__stderr__ is not None:  # else descriptor 2 is whatever is opened next
    _handler = _StandardError()
    _handler.setFormatter(logging.Formatter("hostmem %(process)d %(threadName)s: %(message)s"))
    log.addHandler(_handler)


def call(
    name: str,
    function: Callable[..., Any],
    answer: Callable[[Any], str],
    words: Words | None = None,
) -> Callable[..., Any]:
    """Let a function tell of each call; the function itself where the trace is off.

    Parameters
    ----------
    name : str
        What it is called in the trace.
    function : callable
        A system call that raises `OSError`, or one whose result says how it went.
    answer : callable
        Puts the result in words.
    words : mapping, optional
        What values of arguments are called, by position.
    """
    if not ON:
        return function

    def traced(*args: Any) -> Any:
        began = perf_counter()
        try:
            result = function(*args)
        except BaseException as error:
            _tell(name, args, _failure(error), perf_counter() - began, words)
            raise
        _tell(name, args, answer(result), perf_counter() - began, words)
        return result

    return traced


def library(lib: Any, ffi: Any, names: Iterable[str], words: Mapping[str, Words]) -> Any:
    """Let functions of the C library tell of each call, with the errno where it answers -1."""
    if not ON:
        return lib
    return SimpleNamespace(
        **{name: c_call(name, getattr(lib, name), ffi, words.get(name)) for name in names}
    )


def c_call(
    name: str, function: Callable[..., Any], ffi: Any, words: Words | None = None
) -> Callable[..., Any]:
    """Let one function of C tell of each call, with the errno where it answers -1."""
    if not ON:
        return function

    def traced(*args: Any) -> Any:
        began = perf_counter()
        result = function(*args)
        number, seconds = ffi.errno, perf_counter() - began
        value = int(ffi.cast("intptr_t", result))
        answer = f"-1 {_meaning(number)}" if value == -1 else _shown(value)
        _tell(name, args, answer, seconds, words)
        ffi.errno = number  # telling may run anybody's code, which makes calls of its own
        return result

    return traced


def entries(table: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Let the entry points of the driver tell of each call."""
    if not ON:
        return table
    return {
        key: found and call(names[key], found, lambda code: _code(int(code)))
        for key, found in table.items()
    }


class _Bindings:
    """The bindings of the driver, whose functions tell of each call."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return call(name, found, _tuple) if name.startswith("cu") else found  # types begin with CU


def bindings(module: Any) -> Any:
    """Let the functions of ``cuda.bindings.driver`` tell of each call."""
    return _Bindings(module) if ON else module


def intercepted(function: F) -> F:
    """Let `seam.intercept` tell of the calls that a test's plan answers in the kernel's place."""
    if not ON:
        return function

    @functools.wraps(function)
    def traced(name: str, *args: int) -> int:
        number: int = function(name, *args)
        if number > 0:
            answer = _code(number) if name.startswith("cu") else f"-1 {_meaning(number)}"
            _tell(name, args, f"{answer}, by a plan", None, None)
        return number

    return traced  # type: ignore[return-value]


def played(function: F) -> F:
    """Let `driver.stand_in` tell of the calls that something plays for the driver."""
    if not ON:
        return function

    @functools.wraps(function)
    def traced(name: str, *args: int, **options: Any) -> None:
        function(name, *args, **options)
        _tell(name, args, "played", None, None)

    return traced  # type: ignore[return-value]


def _tell(
    name: str, args: tuple[Any, ...], answer: str, seconds: float | None, words: Words | None
) -> None:
    if getattr(_telling, "now", False):
        return  # a handler of the application makes calls: telling of them would never end
    named = words or {}
    shown = ", ".join(
        named.get(at, {}).get(arg) or _shown(arg) if isinstance(arg, int) else _shown(arg)
        for at, arg in enumerate(args)
    )
    took = "" if seconds is None else f" <{seconds:.6f} s>"
    try:
        _telling.now = True
        log.debug("%s(%s) = %s%s", name, shown, answer, took)
    finally:
        _telling.now = False


def _shown(value: Any) -> str:
    """Put an argument or a result in a few characters of one line."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return f"{value:#x}" if value >= _ADDRESS else str(int(value))
    if isinstance(value, bytes) and len(value) > _LONGEST:
        return f"<{len(value)} bytes>"
    text = " ".join(repr(value).split())
    if pointer := _POINTER.fullmatch(text):
        return pointer[1]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _meaning(number: int) -> str:
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"


def _code(code: int) -> str:
    return f"{code} {SYMBOLS.get(code, 'UNKNOWN')}" if code else "0"


def _tuple(result: tuple[Any, ...]) -> str:
    code, *rest = result
    return ", ".join([_code(int(code)), *map(_shown, rest)])


def _failure(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"-1 {_meaning(error.errno)}"
    return f"raised {error!r}"
