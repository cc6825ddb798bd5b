"""The command line: ``python -m kvtier replay``, ``trace`` and ``plan``.

Exit status: 0 done; 1 a block came back with wrong bytes; 2 the request was refused, with one line
on standard error that says why; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import NoReturn

from hostmem import resolve_device
from hostmem.errors import CorruptedError, HostmemError
from hostmem.units import parse_size
from kvtier.config_file import load_config
from kvtier.eviction import POLICIES, make_policy
from kvtier.levels import default_max_quota
from kvtier.plan import make_plan
from kvtier.replay.destination import check_destination, same_destination
from kvtier.replay.generator import generate, write_trace
from kvtier.replay.metadata import replay_metadata
from kvtier.replay.options import ReplayOptions
from kvtier.replay.progress import Progress
from kvtier.replay.recording import Recording
from kvtier.replay.summary import (
    LevelUse,
    ReplayResult,
    format_summary,
    write_json,
)
from kvtier.replay.trace import Request, read_trace

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; ``--help`` has the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        The exit status, as the head of this module lists them.

    Raises
    ------
    SystemExit
        After ``--help``, and with status 2 for arguments that cannot be parsed.
    """
    arguments, unknown = _parser().parse_known_args(argv)
    name = f"kvtier {arguments.command}"
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        if unknown:
            raise ValueError(f"unrecognized arguments: {' '.join(unknown)}")
        arguments.run(arguments)
        print(end="", flush=True)  # here, where a reader that went away is no surprise
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at exit; give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except CorruptedError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, HostmemError, ImportError) as error:
        print(f"{name}: error: {_reason(error)}", file=sys.stderr)
        return 2
    return 0


def _replay(arguments: argparse.Namespace) -> None:
    """Replay a trace; everything that can be refused is refused before the trace is read."""
    options = _options(arguments)
    for flag, path in (("--json", arguments.json), ("--html", arguments.html)):
        if path is not None:
            check_destination(path)
            if same_destination(path, arguments.trace):
                raise ValueError(f"{flag} would replace the trace")
    if None not in (arguments.json, arguments.html) and same_destination(
        arguments.json, arguments.html
    ):
        raise ValueError("--json and --html name the same file")
    shared = options is not None and options.remote is not None
    if shared and arguments.html is not None:
        raise ValueError("--html shows one process; with --remote there are two")
    recording = None if arguments.html is None else Recording()
    requests = read_trace(arguments.trace)[: arguments.limit]
    with Progress(len(requests)) as progress:
        if options is None:
            result = _metadata(arguments, requests, progress, recording)
        elif shared:
            from kvtier.replay.shared import replay_shared

            result = replay_shared(requests, options)
        else:
            from kvtier.replay.engine import replay_bytes

            result = replay_bytes(requests, options, progress, recording)
    try:
        if arguments.json is not None:
            write_json(result, arguments.json)
        if recording is not None:
            from kvtier.replay.report import write_report

            command = shlex.join(["python", *sys.orig_argv[1:]])
            write_report(result, recording, arguments.html, options=options, command=command)
    finally:  # a file that cannot be written costs nobody the figures
        _show(format_summary(result))
    if shared:
        from kvtier.replay.shared import format_sharing

        print("\n" + format_sharing(result))
    if result.corrupt_blocks:
        raise CorruptedError(
            f"{result.corrupt_blocks} of {result.verified_blocks} blocks came back with "
            "bytes other than those stored"
        )


def _show(text: str) -> None:
    """Print a text with escapes for what the output cannot encode, such as a file's odd name."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _options(arguments: argparse.Namespace) -> ReplayOptions | None:
    """Check the options against each other; return those of a replay with bytes, or None."""
    names = {field.name for field in fields(ReplayOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if arguments.metadata_only:
        if stray := given.keys() - {"trace", "policy"}:
            flags = ", ".join(sorted("--" + name.replace("_", "-") for name in stray))
            raise ValueError(f"{flags}: without meaning in --metadata-only")
        return None
    if arguments.capacity_blocks is not None:
        raise ValueError("--capacity-blocks needs --metadata-only; with bytes, give quotas")
    options = ReplayOptions(**given)
    options.config()
    return options


def _metadata(
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    progress: Progress,
    recording: Recording | None,
) -> ReplayResult:
    """Replay without bytes."""
    capacity = arguments.capacity_blocks
    policy = make_policy(arguments.policy, capacity)
    counts = replay_metadata(requests, policy, progress, recording)
    return ReplayResult(
        mode="metadata",
        trace=arguments.trace,
        policy=arguments.policy,
        capacity_blocks=capacity,
        requests=counts.requests,
        block_refs=counts.block_refs,
        hits=counts.hits,
        hits_by_level={"gpu": counts.hits},
        seconds=counts.seconds,
        levels={"gpu": LevelUse(slots=capacity, quota=None, used=len(policy))},
    )


def _trace(arguments: argparse.Namespace) -> None:
    """Generate a trace."""
    requests = generate(arguments.seed, arguments.requests)
    if arguments.out == "-":
        write_trace(requests, sys.stdout)
    else:
        with open(arguments.out, "w", encoding="utf-8") as file:
            write_trace(requests, file)


def _plan(arguments: argparse.Namespace) -> None:
    """Print what the quotas of a configuration amount to."""
    if arguments.device is not None and not arguments.check:
        raise ValueError("--device needs --check; without it no device is asked")
    config = load_config(arguments.config)
    plan = make_plan(config)
    if arguments.check:
        device = resolve_device("auto" if arguments.device is None else arguments.device)
        config.validate()
        make_plan(config, default_max_quota=lambda tier: default_max_quota(tier, device))
    print(json.dumps(plan.as_json(), indent=2) if arguments.json else plan)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvtier", description="Tiers for attention keys and values.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    replay = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="serve a trace from gpu, host and disk tiers and compare every block",
        description="Serve a trace of requests from tiers and say what hit, where and how fast. "
        "Sizes are bytes or text such as 64GiB.",
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("trace", metavar="TRACE", help="JSON lines in Mooncake's format")
    # Suppressed defaults: what was not given is not there, and `ReplayOptions` has the default.
    tiers = replay.add_argument_group("with real bytes", argument_default=argparse.SUPPRESS)
    size = partial(tiers.add_argument, metavar="SIZE", type=_size)
    size("--gpu-quota", help="level 0 (default 64MiB)")
    size(
        "--host-quota",
        type=_size_or_none,
        help="host tier, 'none' for no such tier (default 512MiB)",
    )
    size("--disk-quota", help="disk tier, with --disk-path (default: no such tier)")
    tiers.add_argument("--disk-path", metavar="DIR", help="existing directory for the disk tier")
    size("--block-bytes", help="bytes of a block (default 64KiB)")
    tiers.add_argument(
        "--tokens-per-block", metavar="N", type=_positive, help="tokens of a block (default 512)"
    )
    tiers.add_argument(
        "--device", metavar="DEVICE", type=_device, help="cpu, auto or a GPU ordinal (default auto)"
    )
    tiers.add_argument(
        "--remote",
        metavar="MASTER",
        help="deal the requests to two processes that share the Mooncake Store of this master, "
        "host:port; each has all the tiers",
    )
    tiers.add_argument(
        "--remote-metadata", metavar="URL", help="its metadata server (default P2PHANDSHAKE)"
    )
    size("--remote-segment", help="bytes that each process lends the store (default 512MiB)")
    metadata = replay.add_argument_group("without bytes")
    metadata.add_argument(
        "--metadata-only", action="store_true", help="count hits on one level, move nothing"
    )
    metadata.add_argument(
        "--capacity-blocks",
        metavar="N",
        type=_positive,
        help="blocks of that level (default: unbounded)",
    )
    replay.add_argument(
        "--policy", choices=list(POLICIES), default="lru", help="eviction (default %(default)s)"
    )
    replay.add_argument("--limit", metavar="N", type=_positive, help="first N requests only")
    replay.add_argument("--json", metavar="FILE", help="write the figures there as well")
    replay.add_argument("--html", metavar="FILE", help="and as a page with pictures")

    trace = commands.add_parser(
        "trace",
        allow_abbrev=False,
        help="generate a trace of conversations and documents",
        description="Generate a trace; the same seed gives the same trace everywhere.",
    )
    trace.set_defaults(run=_trace)
    trace.add_argument("--seed", metavar="N", type=int, default=0, help="(default %(default)s)")
    trace.add_argument(
        "--requests", metavar="N", type=_positive, default=200, help="(default %(default)s)"
    )
    trace.add_argument("--out", metavar="FILE", default="-", help="(default: standard output)")

    plan = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="say what the quotas of a configuration amount to, without allocating",
        description="Print slots, padding, memory and address space of every level and pool group. "
        "Nothing is allocated and nothing is asked of this machine, so that a plan can be made for "
        "another one; a max_quota that is not given counts as the quota. Two ranks whose plans "
        "have the same digest put the same bytes in the same places.",
    )
    plan.set_defaults(run=_plan)
    plan.add_argument("config", metavar="CONFIG", help="a .toml or .json file, see the docs")
    plan.add_argument("--json", action="store_true", help="for programs, sizes in bytes")
    plan.add_argument(
        "--check",
        action="store_true",
        help="refuse what this machine does not have as well: directories, page modes, modules, "
        "as much memory or disk space as the quotas",
    )
    plan.add_argument(
        "--device",
        metavar="DEVICE",
        type=_device,
        help="whose memory --check compares with: cpu, auto or a GPU ordinal (default auto)",
    )
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from None


def _size_or_none(text: str) -> int | None:
    return None if text == "none" else _size(text)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, not {text!r}")
    return number


def _device(text: str) -> str | int:
    if text in ("cpu", "auto"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"expected cpu, auto or a GPU ordinal, not {text!r}")


def _reason(error: Exception) -> str:
    """Say what went wrong; of a file, its name instead of the error number."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
