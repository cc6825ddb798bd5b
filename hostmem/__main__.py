"""The command line: ``python -m hostmem doctor``, ``fill`` and ``placement``.

Exit status: 0, or 2 for arguments or a machine that cannot do it, or 130 when interrupted.
Warnings of the library go to standard error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from hostmem.capabilities import capabilities
from hostmem.errors import HostmemError
from hostmem.live_line import LiveLine, clock
from hostmem.machine import machine
from hostmem.placement import Placement
from hostmem.preflight import preflight
from hostmem.process_report import report_process
from hostmem.progress import FillProgress
from hostmem.progressive import HostMem
from hostmem.units import Size, format_size, parse_size

__all__ = ["main"]

_REDRAWN_EVERY = 0.1  # seconds, on a terminal
_SAID_EVERY = 5.0  # seconds, elsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        arguments.run(arguments)
        print(end="", flush=True)  # what cannot be written is told here
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        how_far = "; ".join(["", *getattr(interrupt, "__notes__", ())])
        print(f"hostmem {arguments.command}: interrupted{how_far}", file=sys.stderr)
        return 130
    except (ValueError, OSError, HostmemError) as error:
        print(f"hostmem {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _doctor(arguments: argparse.Namespace) -> None:
    """Print what this machine is, what works on it, and what becomes of a memory on it."""
    print(f"{machine()}\n\n{capabilities()}\n")
    print(preflight(arguments.size, device=arguments.device, ranks=arguments.ranks))


def _fill(arguments: argparse.Namespace) -> None:
    """Fill memory, and say how that goes, how it went and where it is."""
    start = time.perf_counter()
    with HostMem(
        arguments.size,
        device=arguments.device,
        numa_node=arguments.node,
        page_mode=arguments.pages,
        fill_threads=arguments.threads,
    ) as memory:
        built = time.perf_counter() - start
        try:
            with _shown(arguments.json) as (show, period):
                for progress in memory.iter_progress(period):
                    show(progress)
            memory.wait_usable(memory.size)  # raises why it stopped short
        except BaseException as error:
            how_far = memory.progress
            error.add_note(f"{_amount(how_far)} was filled, at {_rate(how_far)}")
            if arguments.json:
                _say(how_far, error=type(error).__name__)
            raise
        placement = memory.placement()
        if arguments.json:
            _say(memory.progress, constructed_seconds=built, **_found(placement))
        else:
            _print_fill(memory.progress, built, placement)


def _print_fill(progress: FillProgress, built: float, placement: Placement) -> None:
    first = progress.first_usable_seconds or 0.0
    print(
        f"{format_size(progress.size)} filled in {progress.filled_seconds:.2f} s: "
        f"{_rate(progress)} with {progress.threads} threads\n"
        f"constructed in {built * 1e3:.1f} ms, first bytes usable {first * 1e3:.1f} ms "
        f"after the fill began\n\n{placement}\n\n"
        f"{placement.map()}"
    )


@contextmanager
def _shown(as_json: bool) -> Iterator[tuple[Callable[[FillProgress], None], float]]:
    """Give what shows how far a fill is, and the seconds between two times."""
    if as_json:
        yield _say, _SAID_EVERY
    elif sys.stderr is None:  # it was closed, and print() would take the standard output
        yield lambda progress: None, _SAID_EVERY
    elif sys.stderr.isatty():
        line = LiveLine(sys.stderr)
        try:
            yield lambda progress: line.draw(_parts(progress)), _REDRAWN_EVERY
        finally:
            line.end()
    else:
        yield lambda progress: print(progress, file=sys.stderr, flush=True), _SAID_EVERY


def _parts(progress: FillProgress) -> list[str]:
    """Put the progress in parts of a line, the most important first."""
    parts = [_amount(progress), _rate(progress)]
    if progress.state != "filling":
        parts.append(progress.state + (f": {progress.resting}" if progress.resting else ""))
    elif progress.eta is not None:
        parts.append(f"ETA {clock(progress.eta)}")
    return [*parts, f"{progress.threads} threads", f"{progress.registrations} registrations"]


def _amount(progress: FillProgress) -> str:
    filled, size = format_size(progress.filled), format_size(progress.size)
    return f"{filled} of {size} ({progress.fraction:.0%})"


def _rate(progress: FillProgress) -> str:
    return f"{format_size(int(progress.rate))}/s"


def _say(progress: FillProgress, **more: Any) -> None:
    """Print the progress as one line of JSON: sizes in bytes, times in seconds."""
    line = json.dumps({**asdict(progress), "fraction": progress.fraction, **more})
    # print() writes the end of the line by itself, and Ctrl-C may come between the two.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _found(placement: Placement) -> dict[str, Any]:
    names = ("asked", "accepted", "method", "bytes_by_node", "bytes_by_page_size")
    return {"placement": {name: getattr(placement, name) for name in names}}


def _placement(arguments: argparse.Namespace) -> None:
    """Print where the memory of a process is."""
    process = _number_or_word(arguments.process)
    if isinstance(process, str) and process != "self":
        raise ValueError(f"{process!r} is no number of a process and not 'self'")
    report = report_process(process)
    if arguments.json:
        print(json.dumps(report.as_json(arguments.limit), indent=2))
    else:
        print(report.table(arguments.limit))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostmem", description="Host memory that is usable while it is being committed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what this machine is and what works on it")
    doctor.set_defaults(run=_doctor)
    doctor.add_argument(
        "--size", type=_size, default="1GiB", help="of each process (default %(default)s)"
    )
    doctor.add_argument("--ranks", type=_positive, default=1, help="processes (default 1)")
    doctor.add_argument(
        "--device", type=_number_or_word, default="auto", help="cpu, auto or an ordinal"
    )
    fill = commands.add_parser("fill", help="fill memory, and say how fast and where")
    fill.set_defaults(run=_fill)
    fill.add_argument("--size", type=_size, default="1GiB", help="(default %(default)s)")
    fill.add_argument(
        "--device", type=_number_or_word, default="auto", help="cpu, auto or an ordinal"
    )
    fill.add_argument("--node", type=_node, default="auto", help="NUMA node, 'auto' or 'none'")
    fill.add_argument("--pages", help="small, huge, auto, hugetlb or hugetlb-SIZE")
    fill.add_argument(
        "--json", action="store_true", help="a line of JSON every few seconds, and a last one"
    )
    fill.add_argument("--threads", type=_number_or_word, default="auto", help="populating threads")
    placement = commands.add_parser("placement", help="say where the memory of a process is")
    placement.set_defaults(run=_placement)
    placement.add_argument("process", metavar="PID", help="a number or 'self'")
    placement.add_argument("--limit", type=_positive, default=20, help="mappings (default 20)")
    placement.add_argument("--json", action="store_true", help="for programs, sizes in bytes")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _size(text: str) -> Size:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _node(text: str) -> int | str | None:
    return None if text == "none" else _number_or_word(text)


if __name__ == "__main__":
    sys.exit(main())
