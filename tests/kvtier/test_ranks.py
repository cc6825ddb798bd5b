"""Ranks that are real processes, joined by pipes: all of them build, or none keeps anything."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hostmem import CpuDevice, HostMem, PeerInitError, resolve_device
from hostmem.testing import FaultPlan
from kvtier import (
    AttentionLayerConfig,
    BufferConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    TierStorage,
    create_on_all_ranks,
)

MIB = 1 << 20
DEADLINE = 15.0  # seconds: a safety net, never part of what a test shows
PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"
GONE = ("EOFError", "BrokenPipeError", "ConnectionResetError")  # how a pipe says so
THREADS = ("kvtier-", "hostmem-fill", "hostmem-populate", "hostmem-cpu-stream")

# A process without threads that has imported everything: its children start at once.
CONTEXT = multiprocessing.get_context("forkserver")


# -------------------------------------------------------------------------------- in a rank


class Mesh:
    """An allgather over a pipe between every two ranks; it raises when a rank is gone."""

    def __init__(self, links: Sequence[Connection | None]) -> None:
        self.links = links  # None at this rank's own place
        self.rounds = 0

    def __call__(self, item: object) -> list[Any]:
        self.rounds += 1
        for link in self.links:
            if link is not None:
                link.send(item)
        return [item if link is None else self._receive(link) for link in self.links]

    def _receive(self, link: Connection) -> Any:
        if not link.poll(DEADLINE):
            raise TimeoutError("a rank does not come")
        return link.recv()


class Thing:
    """Something to build, which writes down what becomes of it."""

    def __init__(self, events: list[str], refusal: BaseException | None = None) -> None:
        events.append("built")
        self.events = events
        self.refusal = refusal

    def close(self) -> None:
        self.events.append("closed")
        if self.refusal is not None:
            raise self.refusal


@dataclass
class Outcome:
    """What one attempt came to on one rank."""

    events: list[str] = field(default_factory=list)
    raised: str = ""
    cause: str = ""
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rounds: int = 0
    left: list[str] = field(default_factory=list)


def attempt(mesh: Mesh, events: list[str], create: Callable[[], Any]) -> Outcome:
    """Create and close again; or write down the error, in words that every process knows."""
    outcome = Outcome(events)
    before = mesh.rounds
    try:
        create().close()
    except BaseException as error:
        outcome.raised = type(error).__name__
        outcome.cause = type(error.__cause__).__name__ if error.__cause__ else ""
        outcome.text = str(error)
        outcome.facts = getattr(error, "facts", {})
        outcome.notes = getattr(error, "__notes__", [])
    outcome.rounds = mesh.rounds - before
    return outcome


Case = Callable[[int, Mesh], list[Outcome]]


def as_rank(rank: int, links: Sequence[Connection | None], answer: Connection, case: Case) -> None:
    """Be a rank: send what its attempts came to, the last with what is left of all of them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = set(os.listdir("/proc/self/fd"))
    *others, last = case(rank, Mesh(links))
    answer.send([*others, replace(last, left=leftovers(before))])


def leftovers(before: set[str]) -> list[str]:
    """List threads, registrations and open files that were not there before."""
    deadline = time.monotonic() + DEADLINE
    while running() and time.monotonic() < deadline:
        gc.collect()  # a stream's thread ends on its own, when nothing refers to the stream
    cpu = resolve_device("cpu")
    assert isinstance(cpu, CpuDevice)
    files = [fd for fd in os.listdir("/proc/self/fd") if fd not in before]
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in files if os.path.exists(f"/dev/fd/{fd}")]
    return [*running(), *(f"registered: {part}" for part in cpu.registered), *links]


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


# --------------------------------------------------------------------------------- the world


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    """Start the process that makes the ranks; what it keeps open stays for the module."""
    CONTEXT.set_forkserver_preload([__name__])
    forkserver.ensure_running()


def run(n: int, case: Case, killed: int | None = None) -> list[list[Outcome]]:
    """Run a case in n processes; returns the outcomes of each rank, none of a killed one."""
    with ExitStack() as stack:
        links: list[list[Connection | None]] = [[None] * n for _ in range(n)]
        for one, other in combinations(range(n), 2):
            links[one][other], links[other][one] = CONTEXT.Pipe()
        answers = [CONTEXT.Pipe(duplex=False) for _ in range(n)]
        ranks = []
        for rank in range(n):
            args = (rank, links[rank], answers[rank][1], case)
            process = CONTEXT.Process(target=as_rank, args=args)
            process.start()
            stack.callback(process.close)
            stack.callback(process.join)
            stack.callback(process.kill)
            ranks.append(process)
        for link in [*(link for row in links for link in row), *(there for _, there in answers)]:
            if link is not None:
                link.close()  # or no rank would see that another is gone
        outcomes: list[list[Outcome]] = []
        for here, _ in answers:
            stack.callback(here.close)
            assert here.poll(DEADLINE), f"rank {len(outcomes)} does not answer"
            try:
                outcomes.append(here.recv())
            except EOFError:
                outcomes.append([])
        for rank, process in enumerate(ranks):
            process.join(DEADLINE)
            assert process.exitcode == (-signal.SIGKILL if rank == killed else 0)
        for rank, found in enumerate(outcomes):
            assert not found or found[-1].left == [], f"rank {rank}"
        return outcomes


def agreed(outcomes: Sequence[Outcome]) -> Outcome:
    """Return one outcome after checking that all ranks say the same and took part alike."""
    told = [(o.text, o.facts, o.notes, o.rounds) for o in outcomes]
    assert told == [told[0]] * len(told)
    return outcomes[0]


sizes = pytest.mark.parametrize("n", [2, 8])


# ------------------------------------------------------------------------------- the stages


def everybody_builds(rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []

    def create() -> Thing:
        thing = create_on_all_ranks(
            lambda: Thing(events), mesh, plan=("the same",), ready=lambda thing: len(thing.events)
        )
        events.append("returned")
        return thing

    return [attempt(mesh, events, create)]


@sizes
def test_all_ranks_build(n: int) -> None:
    for (outcome,) in run(n, everybody_builds):
        assert outcome == Outcome(["built", "returned", "closed"], rounds=3)


def fails_in_turn(stage: str, n: int, rank: int, mesh: Mesh) -> list[Outcome]:
    """Attempt n times, each time with another rank that fails at the stage."""
    outcomes = []
    for failing in range(n):
        events: list[str] = []

        def fail_at(at: str, failing: int = failing) -> None:
            if (at, rank) == (stage, failing):
                raise LookupError(f"rank {rank} has none")

        def factory(events: list[str] = events, fail: Callable[[str], None] = fail_at) -> Thing:
            fail("build")
            return Thing(events)

        def create(
            factory: Callable[[], Thing] = factory, fail: Callable[[str], None] = fail_at
        ) -> Thing:
            return create_on_all_ranks(
                factory, mesh, plan=lambda: fail("plan"), ready=lambda thing: fail("ready")
            )

        outcomes.append(attempt(mesh, events, create))
    return outcomes


@sizes
@pytest.mark.parametrize(("stage", "rounds"), [("plan", 2), ("build", 3), ("ready", 4)])
def test_each_rank_may_fail_at_each_stage(n: int, stage: str, rounds: int) -> None:
    outcomes = run(n, partial(fails_in_turn, stage, n))
    for failing in range(n):
        attempts = [of_rank[failing] for of_rank in outcomes]
        said = f"LookupError: rank {failing} has none"
        assert agreed(attempts).facts == {
            "stage": stage,
            "rank": failing,
            "ranks": [failing],
            "reports": {failing: said},
        }
        assert attempts[0].text.startswith(f"{stage} failed on rank {failing} of {n}, ")
        assert attempts[0].text.endswith(f"rank {failing}: {said}")
        assert attempts[0].rounds == rounds
        for rank, outcome in enumerate(attempts):
            assert (outcome.raised, outcome.cause) == ("PeerInitError", "LookupError")
            if stage == "plan" or (stage == "build" and rank == failing):
                assert outcome.events == []
            else:
                assert outcome.events == ["built", "closed"]


def several_fail(rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []

    def factory() -> Thing:
        if rank in (2, 3):
            raise LookupError("none")
        if rank == 5:
            raise PermissionError("not you")
        return Thing(events)

    return [attempt(mesh, events, lambda: create_on_all_ranks(factory, mesh))]


def test_several_that_fail_are_all_named() -> None:
    outcomes = [outcome for (outcome,) in run(8, several_fail)]
    first = agreed(outcomes)
    assert first.facts["ranks"] == [2, 3, 5]
    assert first.text.endswith("ranks 2, 3: LookupError: none; rank 5: PermissionError: not you")
    # A rank that failed has its own error as the cause, the others have the first.
    causes = ["LookupError"] * 8
    causes[5] = "PermissionError"
    assert [outcome.cause for outcome in outcomes] == causes


# ------------------------------------------------------------------------------- agreement


def config(quota: int, most: int, folder: str = "") -> KVCacheManagerConfig:
    tiers: list[Any] = [GpuCacheTierConfig(2 * MIB, 2 * MIB), HostCacheTierConfig(quota, most)]
    if folder:
        tiers.append(DiskCacheTierConfig(2 * MIB, folder, 2 * MIB))
    layer = AttentionLayerConfig(0, [BufferConfig("kv", MIB // 2)])
    return KVCacheManagerConfig(16, tiers, [layer])


def plans_differ(rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []
    mine = config((6 if rank in (1, 6) else 4) * MIB, 8 * MIB)
    return [
        attempt(
            mesh, events, lambda: create_on_all_ranks(lambda: Thing(events), mesh, plan=mine.plan)
        )
    ]


def test_nothing_is_built_where_the_plans_differ() -> None:
    outcomes = [outcome for (outcome,) in run(8, plans_differ)]
    first = agreed(outcomes)
    assert {(o.raised, o.cause, *o.events) for o in outcomes} == {("PeerInitError", "")}
    assert (first.facts["stage"], first.facts["ranks"]) == ("plan", [1, 6])
    assert first.facts["reports"] == {
        rank: repr(config((6 if rank in (1, 6) else 4) * MIB, 8 * MIB).plan()) for rank in range(8)
    }
    assert first.text.startswith("plan gave something else on ranks 1, 6 of 8, ")
    assert re.search(r"ranks 0, 2, 3, 4, 5, 7: \.\.\..*quota=4194304", first.text)
    assert re.search(r"; ranks 1, 6: \.\.\..*quota=6291456", first.text)


def one_is_pageable(pageable: Sequence[int], rank: int, mesh: Mesh) -> list[Outcome]:
    """Decide together whether memory is page-locked everywhere, or nowhere."""

    def factory() -> HostMem:
        with FaultPlan() as plan:
            if rank in pageable:
                plan.fail("cuMemHostRegister", 1, times=None)
            return HostMem(2 * MIB, device="cpu", on_register_failure="pageable", wait=True)

    def create() -> HostMem:
        return create_on_all_ranks(
            factory, mesh, ready=lambda memory: "pageable" if memory.quarantined else "pinned"
        )

    return [attempt(mesh, [], create)]


def test_no_rank_is_slower_than_the_others_without_a_word() -> None:
    outcomes = [outcome for (outcome,) in run(2, partial(one_is_pageable, [1]))]
    first = agreed(outcomes)
    assert first.facts == {
        "stage": "ready",
        "rank": 1,
        "ranks": [1],
        "reports": {0: "'pinned'", 1: "'pageable'"},
    }
    assert first.rounds == 4


def test_what_all_ranks_say_alike_is_agreed() -> None:
    for (outcome,) in run(2, partial(one_is_pageable, [0, 1])):
        assert outcome == Outcome(rounds=3)


# ------------------------------------------------------------------------- odd errors, signals


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Fussy(Exception):
    """Is pickled, but cannot be rebuilt from that."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Silent(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no bytes")


def odd_error(make: Callable[[], Exception], rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []

    def factory() -> Thing:
        if rank == 0:
            raise make()
        return Thing(events)

    return [attempt(mesh, events, lambda: create_on_all_ranks(factory, mesh))]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(Locked, "held"), "Locked: held"),
        (partial(Fussy, "no", "so"), "Fussy: no: so"),
        (Silent, "Silent: <exception str() failed>"),
        (partial(ValueError, "x" * MIB), "ValueError: xxxxxx"),
    ],
    ids=["locked", "fussy", "silent", "huge"],
)
def test_an_error_that_cannot_travel_is_told(make: Callable[[], Exception], text: str) -> None:
    (failed,), (told,) = run(2, partial(odd_error, make))
    assert agreed([failed, told]).raised == told.raised == "PeerInitError"
    assert (failed.cause, told.cause) == (type(make()).__name__, "")
    assert told.facts["rank"] == 0
    assert text in told.facts["reports"][0]
    assert text in told.text
    assert len(told.text) < 1000
    assert told.events == ["built", "closed"]


def killed_while_building(victim: int, rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []

    def factory() -> Thing:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return Thing(events)

    return [attempt(mesh, events, lambda: create_on_all_ranks(factory, mesh))]


@sizes
@pytest.mark.parametrize("victim", [0, -1])
def test_a_rank_that_is_killed_leaves_nobody_waiting(n: int, victim: int) -> None:
    victim %= n
    outcomes = run(n, partial(killed_while_building, victim), killed=victim)
    assert outcomes.pop(victim) == []
    for (outcome,) in outcomes:
        assert outcome.raised == "PeerInitError"
        assert outcome.cause in GONE
        assert outcome.events == ["built", "closed"]
        assert outcome.facts == {"stage": "build", "rank": None, "ranks": [], "reports": {}}
        assert outcome.text.startswith("build: allgather failed, another rank may be gone: ")
        assert outcome.rounds == 2  # no further one was tried


def interrupted(where: str, n: int, rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []
    unlucky = rank == n - 1

    def factory() -> Thing:
        if unlucky and where == "factory":
            signal.raise_signal(signal.SIGINT)
        return Thing(events)

    def close() -> None:
        events.append("closed")
        if unlucky and where == "close":
            signal.raise_signal(signal.SIGINT)

    def allgather(item: object) -> list[Any]:
        if unlucky and where == "allgather" and mesh.rounds == 1:
            signal.raise_signal(signal.SIGINT)
        return mesh(item)

    def ready(thing: Thing) -> None:
        thing.close = close  # type: ignore[method-assign]
        if where == "close":
            raise LookupError("none")

    outcome = attempt(mesh, events, lambda: create_on_all_ranks(factory, allgather, ready=ready))
    for link in mesh.links:
        if link is not None:
            link.close()
    return [outcome]


@sizes
def test_an_interrupted_rank_takes_part_before_it_ends(n: int) -> None:
    *others, last = [outcome for (outcome,) in run(n, partial(interrupted, "factory", n))]
    assert (last.raised, last.events, last.rounds) == ("KeyboardInterrupt", [], 3)
    for outcome in others:
        assert (outcome.raised, outcome.cause) == ("PeerInitError", "KeyboardInterrupt")
        assert outcome.facts["reports"] == {n - 1: "KeyboardInterrupt"}
        assert (outcome.events, outcome.rounds) == (["built", "closed"], 3)


def test_a_rank_interrupted_in_allgather_frees_what_it_has() -> None:
    (told,), (last,) = run(2, partial(interrupted, "allgather", 2))
    assert (last.raised, last.events) == ("KeyboardInterrupt", ["built", "closed"])
    assert (told.raised, told.cause in GONE) == ("PeerInitError", True)
    assert told.events == ["built", "closed"]


def test_an_interrupted_close_is_told_and_raised() -> None:
    (told,), (last,) = run(2, partial(interrupted, "close", 2))
    assert (last.raised, last.cause) == ("KeyboardInterrupt", "PeerInitError")
    assert told.raised == "PeerInitError"
    assert told.notes == ["rank 1 could not close what it had built: KeyboardInterrupt"]
    assert last.rounds == told.rounds == 4


# -------------------------------------------------------------------------------- giving back


def close_fails(rank: int, mesh: Mesh) -> list[Outcome]:
    events: list[str] = []

    def ready(thing: Thing) -> None:
        if rank == 0:
            raise LookupError("none")

    def factory() -> Thing:
        return Thing(events, BufferError("a view lives") if rank == 1 else None)

    return [attempt(mesh, events, lambda: create_on_all_ranks(factory, mesh, ready=ready))]


def test_every_rank_hears_which_one_could_not_close() -> None:
    outcomes = [outcome for (outcome,) in run(8, close_fails)]
    assert agreed(outcomes).notes == [
        "rank 1 could not close what it had built: BufferError: a view lives"
    ]
    assert [outcome.events for outcome in outcomes] == [["built", "closed"]] * 8


def a_view_in_the_error(rank: int, mesh: Mesh) -> list[Outcome]:
    """Refuse readiness from a function whose frame, in the error, holds a view of the memory."""

    def look(memory: HostMem) -> None:
        view = memory.view()
        raise LookupError(f"not {len(view)}")

    def ready(memory: HostMem) -> None:
        if rank == 1:
            try:
                look(memory)
            except LookupError as error:
                raise ValueError("not ready") from error

    return [
        attempt(
            mesh,
            [],
            lambda: create_on_all_ranks(lambda: HostMem(MIB, device="cpu"), mesh, ready=ready),
        )
    ]


def test_an_error_does_not_keep_the_memory() -> None:
    outcomes = [outcome for (outcome,) in run(2, a_view_in_the_error)]
    assert agreed(outcomes).notes == []
    assert outcomes[0].raised == "PeerInitError"


def storages(folder: str, n: int, rank: int, mesh: Mesh) -> list[Outcome]:
    """Ask too much on one rank; let the system refuse its last level; then do neither."""

    def create(quota: int = 4 * MIB, file_size: int = 2 * MIB) -> TierStorage:
        def factory() -> TierStorage:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
            return TierStorage(config(quota, 4 * MIB, folder), device="cpu")

        return create_on_all_ranks(
            factory, mesh, ready=lambda storage: storage.levels[1].groups[0].memory.wait_usable()
        )

    last = rank == n - 1
    return [
        attempt(mesh, [], lambda: create(8 * MIB if last else 4 * MIB)),
        attempt(mesh, [], lambda: create(file_size=MIB if last else 2 * MIB)),
        attempt(mesh, [], create),
    ]


@sizes
def test_storages_are_built_everywhere_or_nowhere(n: int, tmp_path: Path) -> None:
    outcomes = run(n, partial(storages, str(tmp_path), n))
    too_much, refused, built = zip(*outcomes, strict=True)
    assert agreed(too_much).facts["ranks"] == [n - 1]
    assert "host.max_quota: 4 MiB (4,194,304 B) is below the quota" in too_much[0].text
    assert {outcome.cause for outcome in too_much} == {"ValueError"}
    assert agreed(refused).facts["ranks"] == [n - 1]
    assert {outcome.cause for outcome in refused} <= {"DiskOOMError", "OSError"}
    assert agreed(built) == Outcome(rounds=3)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- a bad allgather


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda item: None, "TypeError: it returned NoneType, not the list"),
        (lambda item: (item,), "TypeError: it returned tuple, not the list"),
        (lambda item: [], "ValueError: it returned 0 items, and 1 before"),
        (lambda item: [item, item], "ValueError: it returned 2 items, and 1 before"),
        (lambda item: [("build", "None", "", b"other")], "ValueError: what this rank gave is not"),
        (lambda item: [("close", "None", "", b"")], "ValueError: rank 0 is elsewhere: it gave ('"),
        (lambda item: ["hello"], "ValueError: rank 0 is elsewhere: it gave 'hello'"),
    ],
)
def test_what_allgather_returns_is_checked(answer: Callable[[Any], Any], text: str) -> None:
    events: list[str] = []
    with pytest.raises(PeerInitError, match=re.escape(text)) as raised:
        create_on_all_ranks(
            lambda: Thing(events), lambda item: answer(item) if item[0] == "build" else [item]
        )
    assert raised.value.stage == "build"
    assert isinstance(raised.value.__cause__, TypeError | ValueError)
    assert events == ["built", "closed"]


def test_an_allgather_without_this_rank_is_refused_at_once() -> None:
    events: list[str] = []
    with pytest.raises(PeerInitError, match="is not among the 0 items it returned") as raised:
        create_on_all_ranks(lambda: Thing(events), lambda item: [])
    assert (raised.value.stage, events) == ("plan", [])


def gone(item: object) -> list[Any]:
    raise ConnectionError("nobody there")


def fails() -> Thing:
    raise LookupError("none")


def test_two_troubles_are_both_told() -> None:
    with pytest.raises(PeerInitError, match=r"nobody there; .* LookupError: none") as raised:
        create_on_all_ranks(fails, lambda item: gone(item) if item[0] == "build" else [item])
    assert isinstance(raised.value.__cause__, ConnectionError)


def test_what_cannot_be_closed_is_told_without_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def factory() -> Thing:
        return Thing([], BufferError("a view lives"))

    with pytest.raises(PeerInitError) as raised:
        create_on_all_ranks(factory, lambda item: gone(item) if item[0] == "build" else [item])
    assert raised.value.__notes__ == [
        "this rank could not close what it had built: BufferError: a view lives"
    ]
    assert "BufferError: a view lives" in caplog.text


def test_the_first_failure_is_raised_though_the_last_round_fails() -> None:
    events: list[str] = []
    with pytest.raises(PeerInitError, match="LookupError: none") as raised:
        create_on_all_ranks(
            lambda: Thing(events, BufferError("a view lives")),
            lambda item: gone(item) if item[0] == "close" else [item],
            ready=lambda thing: fails(),
        )
    assert events == ["built", "closed"]
    others, own = raised.value.__notes__
    assert others.startswith("whether the other ranks have closed is not known: close: allgather")
    assert own == "this rank could not close what it had built: BufferError: a view lives"


def test_an_interrupt_is_raised_though_nobody_can_be_told() -> None:
    def interrupt() -> Thing:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        create_on_all_ranks(interrupt, lambda item: gone(item) if item[0] == "build" else [item])
    assert "nobody there" in raised.value.__notes__[0]


@pytest.mark.parametrize("error", [ValueError("x" * MIB), LookupError("x" * MIB, [0] * MIB)])
def test_what_allgather_gets_is_small(error: Exception) -> None:
    sent: list[int] = []

    def allgather(item: object) -> list[Any]:
        sent.append(len(pickle.dumps(item)))
        return [item]

    def factory() -> Thing:
        raise error

    with pytest.raises(PeerInitError) as raised:
        create_on_all_ranks(factory, allgather)
    assert max(sent) < 80 << 10
    assert raised.value.__cause__ is error


def test_an_error_crosses_processes_with_its_facts() -> None:
    with pytest.raises(PeerInitError) as raised:
        create_on_all_ranks(fails, lambda item: [item])
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.stage, copy.rank, copy.ranks) == ("build", 0, [0])
    assert copy.reports == {0: "LookupError: none"}


def test_an_error_that_is_its_own_cause_is_told() -> None:
    error = LookupError("none")
    error.__cause__ = KeyError("circle")
    error.__cause__.__cause__ = error

    def factory() -> Thing:
        raise error

    with pytest.raises(PeerInitError, match="LookupError: none"):
        create_on_all_ranks(factory, lambda item: [item])


# ------------------------------------------------------------------------------ the document


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    # Its processes are spawned, so it must be a file.
    (script,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "ranks.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "ranks.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # Two processes print; their lines may run into each other.
    said = r"rank \d: stopped by rank 1: ValueError: too much for this one"
    assert sorted(re.findall(said, done.stdout)) == [said.replace(r"\d", n) for n in "01"]
