"""The command line: ``python -m hostmem doctor`` and ``python -m hostmem fill``.

Exit status: 0, or 2 for arguments or a machine that cannot do it, or 130 when interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from hostmem.capabilities import capabilities
from hostmem.errors import HostmemError
from hostmem.machine import machine
from hostmem.progressive import HostMem
from hostmem.units import Size, format_size, parse_size

__all__ = ["main"]

_PERIOD = 0.1  # seconds between two drawings


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"hostmem {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, HostmemError) as error:
        print(f"hostmem {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _doctor(_: argparse.Namespace) -> None:
    """Print what this machine is and what works on it."""
    print(f"{machine()}\n\n{capabilities()}")


def _fill(arguments: argparse.Namespace) -> None:
    """Fill memory, and say how that went and where it is."""
    start = time.perf_counter()
    with HostMem(
        arguments.size,
        device=arguments.device,
        numa_node=arguments.node,
        page_mode=arguments.pages,
        fill_threads=arguments.threads,
    ) as memory:
        built = time.perf_counter() - start
        _follow(memory)
        progress = memory.progress
        first = progress.first_usable_seconds or 0.0
        print(
            f"{format_size(memory.size)} filled in {progress.filled_seconds:.2f} s: "
            f"{format_size(int(progress.rate))}/s with {progress.threads} threads\n"
            f"constructed in {built * 1e3:.1f} ms, first bytes usable {first * 1e3:.1f} ms "
            f"after the fill began\n\n{memory.placement()}"
        )


def _follow(memory: HostMem) -> None:
    """Wait until the memory is full; on a terminal, say how far it is."""
    live = sys.stderr.isatty()
    while not memory.is_usable(memory.size):
        if live:
            print(f"\r{memory.progress!s:<72}", end="", file=sys.stderr, flush=True)
        try:
            memory.wait_usable(memory.size, timeout=_PERIOD if live else None)
        except TimeoutError:
            continue
    if live:
        print(f"\r{'':<72}\r", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostmem", description="Host memory that is usable while it is being committed."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what this machine is and what works on it")
    doctor.set_defaults(run=_doctor)
    fill = commands.add_parser("fill", help="fill memory, and say how fast and where")
    fill.set_defaults(run=_fill)
    fill.add_argument("--size", type=_size, default="1GiB", help="(default %(default)s)")
    fill.add_argument(
        "--device", type=_number_or_word, default="auto", help="cpu, auto or an ordinal"
    )
    fill.add_argument("--node", type=_node, default="auto", help="NUMA node, 'auto' or 'none'")
    fill.add_argument("--pages", choices=("small", "huge", "auto"), help="page mode")
    fill.add_argument("--threads", type=_number_or_word, default="auto", help="populating threads")
    return parser


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
