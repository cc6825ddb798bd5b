"""Write docs/api.md and docs/api-kvtier.md, the references of public names, from their docstrings.

python -m docs.build_api
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import hostmem
import hostmem.testing
import kvtier
import kvtier.config
import kvtier.config_file
import kvtier.eviction
import kvtier.stats
import kvtier.testing


@dataclasses.dataclass(frozen=True)
class Reference:
    """One page: what it says first, and the names of its sections."""

    path: Path
    modules: tuple[ModuleType, ...]
    introduction: str
    groups: dict[str, str]

    def names(self) -> list[str]:
        """Return the names that the page describes, in its order."""
        return " ".join(self.groups.values()).split()

    def public(self) -> set[str]:
        """Return the names that it has to describe: those that no other page does."""
        everything = {
            name
            for module in self.modules
            for name in module.__all__
            if callable(getattr(module, name))  # a version or a table of names is no entry
        }
        return everything if self is HOSTMEM else everything - set(HOSTMEM.names())

    def render(self) -> str:
        """Return the text of the page."""
        anchors = {title: title.lower().replace(" ", "-") for title in self.groups}
        contents = "\n".join(f"- [{title}](#{at})" for title, at in anchors.items())
        parts = [self.introduction, contents]
        for title, names in self.groups.items():
            parts.append(f"## {title}")
            for name in names.split():
                parts += _name(name, self._find(name))
        return "\n\n".join(parts) + "\n"

    def _find(self, name: str) -> Any:
        return next(getattr(module, name) for module in self.modules if hasattr(module, name))


HOSTMEM = Reference(
    Path(__file__).with_name("api.md"),
    (hostmem, hostmem.testing),
    """# API reference of hostmem

Made from the docstrings by `python -m docs.build_api`; do not edit. Methods without a text are
described at the class that they come from. Sizes are bytes, or text such as `"64GiB"`; offsets are
numbers; times are seconds. All names are in `hostmem`, those of the test kit in
`hostmem.testing`. The tiers have [a page of their own](api-kvtier.md).""",
    {
        "Memory": "HostMem FillProgress StaticHostMem close_on_signal",
        "What can be had here": "preflight Preflight machine Machine Node capabilities "
        "Capabilities Capability",
        "Where memory is": "placement_of Placement Stretch",
        "Devices": "resolve_device Device CpuDevice CudaDevice CudaMemory Stream Event HostEvent",
        "Errors": "HostmemError OutOfMemoryError HostOOMError CuOOMError DiskOOMError CuError "
        "RegistrationError PlacementRefusedError ResourceBusyError ClosedError OutOfPagesError "
        "CorruptedError PeerInitError",
        "Test kit": "FaultPlan Hold FakeDriver",
    },
)
KVTIER = Reference(
    Path(__file__).with_name("api-kvtier.md"),
    (
        kvtier,
        kvtier.config,
        kvtier.config_file,
        kvtier.stats,
        kvtier.eviction,
        kvtier.testing,
    ),
    """# API reference of kvtier

Made from the docstrings by `python -m docs.build_api`; do not edit. Sizes are bytes, or text such
as `"64GiB"`; times are seconds. Names are in `kvtier`, or in its modules `config`, `config_file`,
`stats`, `eviction` and `testing`. The errors are those [of hostmem](api.md#errors), in `kvtier` as
well.""",
    {
        "Configuration": "KVCacheManagerConfig GpuCacheTierConfig HostCacheTierConfig "
        "DiskCacheTierConfig AttentionLayerConfig BufferConfig CacheTier CacheTierConfig "
        "load_config parse_config",
        "Plans": "CachePlan LevelPlan",
        "Sequences": "KVCacheManager KVSequence",
        "Blocks": "BlockCache BlockLease BlockReservation BlockEvent BlockJob EnginePages",
        "Storage": "TierStorage Page",
        "Statistics": "StorageStats LevelStats Activity Usage Traffic Waits Meter Scope",
        "Ranks": "create_on_all_ranks",
        "Keys": "chain_keys layout_fingerprint",
        "Parts": "SlotAllocator PageCopier StagingBuffer ColdPageCodec Concatenate",
        "Test kit": "FakeEngine WrongBytes LevelConformance SlotStore SimulatedClock prompts",
        "Eviction": "make_policy EvictionPolicy LRU ARC S3FIFO Prospect",
    },
)
REFERENCES = (HOSTMEM, KVTIER)
MADE_BY_USERS = KVTIER.groups["Configuration"].split()
"""Data whose fields are arguments; those of other data are results, listed as attributes."""
BOUND = ("self", "cls")
SILENT = ("object", "ABC", "Protocol", "Closable")
WITHOUT_METHODS = ("FakeDriver",)  # they are the driver's
SECTION = re.compile(r"^(\w+)\n-{3,}\n", re.MULTILINE)
ENTRY = re.compile(r"^(\S.*?)(?: : (.*))?$\n?((?:^ .*$\n?|^\n)*)", re.MULTILINE)

REPR = re.compile(r"<(?:class ')?([\w.]+)[^>]*>")  # of a default that is a type or an enum


def _name(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}"
    if not inspect.isclass(thing):
        yield from _function(name, thing)
        return
    named = [base.__name__ for base in thing.__bases__ if base.__name__[0] != "_"]
    if bases := [f"`{base}`" for base in named if base not in SILENT]:
        yield f"A kind of {' and '.join(bases)}."
    if "__init__" in vars(thing) and (not dataclasses.is_dataclass(thing) or name in MADE_BY_USERS):
        yield _signature(name, thing)
    yield _markdown(thing.__doc__)
    # What a private base brings along belongs to the class itself.
    parts = [thing, *(base for base in thing.__bases__ if base.__name__[0] == "_")]
    fields = [f"- `{field}`: {_line(text)}" for part in parts for field, text in _attributes(part)]
    if fields:
        yield "**Attributes**\n\n" + "\n".join(fields)
    for member, value in {k: v for part in reversed(parts) for k, v in vars(part).items()}.items():
        method = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        public = inspect.isfunction(method) and method.__doc__ and not member.startswith("_")
        if public and name not in WITHOUT_METHODS:
            yield f"#### {name}.{member}"
            yield from _function(member, method)


def _attributes(thing: type) -> Iterator[tuple[str, str]]:
    """Yield what has a text below its assignment, in the class or its constructor; properties."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) or getattr(node, "name", "") == "__init__":
            body: list[ast.stmt] = getattr(node, "body", [])
            for before, after in itertools.pairwise(body):
                match before, after:
                    case (
                        ast.Assign([target]) | ast.AnnAssign(target),
                        ast.Expr(ast.Constant(str(text))),
                    ):
                        yield ast.unparse(target).removeprefix("self."), text
    for member, value in vars(thing).items():
        if isinstance(value, property | cached_property) and value.__doc__ and member[0] != "_":
            yield member, value.__doc__


def _function(name: str, function: Any) -> Iterator[str]:
    yield _signature(name, function)
    yield _markdown(function.__doc__)


def _signature(name: str, function: Any) -> str:
    """Show names and defaults; the types are in the text."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for n, p in found.parameters.items() if n not in BOUND]
    text = name + REPR.sub(r"\1", str(inspect.Signature(plain)))
    if found.return_annotation not in (found.empty, "None", None):
        text += f" -> {found.return_annotation}"
    if inspect.iscoroutinefunction(function):
        text = f"async {text}"
    lines = textwrap.wrap(text, 96, subsequent_indent=" " * (len(name) + 1))
    return "```text\n" + "\n".join(lines) + "\n```"


def _markdown(docstring: str | None) -> str:
    """Turn a numpydoc docstring into Markdown."""
    first, *sections = SECTION.split(inspect.cleandoc(docstring or ""))
    parts = [first.strip().replace("``", "`")]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in ("Notes", "Examples"):
            body = ENTRY.sub(_entry, body)
        body = body.strip().replace("``", "`")
        parts.append(f"**{title}**")
        parts.append(f"```pycon\n{body}\n```" if title == "Examples" else body)
    return "\n\n".join(parts)


def _entry(match: re.Match[str]) -> str:
    kind = f" ({match[2]})" if match[2] else ""
    return f"- `{match[1]}`{kind}: {_line(match[3])}\n"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


if __name__ == "__main__":
    for reference in REFERENCES:
        reference.path.write_text(reference.render())
