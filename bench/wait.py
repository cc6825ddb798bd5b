"""What waiting costs: below the watermark, above it, and for many at once.

    python -m bench.wait [--rounds 7] [--calls 200000] [--waiters 1,100,1000] [--json FILE]

- Below the watermark, `HostMem.wait_usable` and `is_usable` beside a bare method that takes an
  argument and compares two attributes. Exit status 1 when `wait_usable` costs more than three
  times that.
- Above it, threads are parked at distinct ends and the watermark reaches one after another: what
  one step costs the fill's thread, and how long until the thread it reaches runs. The peers do the
  same with one `threading.Condition` (each step wakes all) and with a `threading.Event` for each
  end. Callbacks beside events, too.
- `wait_usable_async` of what is usable beside handing the blocking call to asyncio's threads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from bench.measure import Pairs, compare, in_turn, machine_line, pairs, write_json
from hostmem import HostMem
from hostmem.courier import callbacks
from hostmem.watermark import Watermark

LIMIT = 3.0
STEPS = 20  # a round: with 1,000 threads the condition takes tens of milliseconds for each
SETTLE = 0.01  # seconds for started threads to be parked


class Bare:
    """A method that takes an argument and does no more than compare two attributes."""

    __slots__ = ("high", "low")

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def compare(self, end: int) -> bool:
        return self.low <= self.high


def calls(function: Callable[[int], object], count: int) -> Callable[[], float]:
    """Return an arm: the seconds of one of ``count`` calls, ten in each turn of the loop.

    Seconds of this thread, which the neighbours of a busy machine do not lengthen.
    """

    def run() -> float:
        f, end = function, 4096
        start = time.thread_time()
        for _ in repeat(None, count // 10):
            f(end), f(end), f(end), f(end), f(end), f(end), f(end), f(end), f(end), f(end)
        return (time.thread_time() - start) / (count // 10 * 10)

    return run


def below(rounds: int, count: int) -> dict[str, Pairs]:
    bare = Bare(0, 1 << 20).compare
    event = threading.Event()
    event.set()
    with HostMem("1MiB", device="cpu", wait=True) as memory:
        times = in_turn(
            {
                "wait_usable": calls(memory.wait_usable, count),
                "is_usable": calls(memory.is_usable, count),
                "set Event.wait": calls(event.wait, count),
                "bare": calls(bare, count),
            },
            rounds,
        )
    return {
        f"below the watermark: {name} / bare method": compare(times[name], times["bare"])
        for name in ("wait_usable", "is_usable", "set Event.wait")
    }


# --------------------------------------------------------------------------- parked threads


class Mark(Protocol):
    """Something that moves, and for whose passing an end threads wait."""

    def wait(self, end: int) -> object: ...

    def advance(self, end: int) -> object: ...


class Ours:
    def __init__(self, waiters: int) -> None:
        self.mark = Watermark(waiters)
        self.advance = self.mark.advance

    def wait(self, end: int) -> None:
        self.mark.wait(end, None)


class OurCallbacks(Ours):
    """A thread of ours calls back; `wait` returns at once."""

    def __init__(self, waiters: int, told: Callable[[], object]) -> None:
        super().__init__(waiters)
        self.told = told
        callbacks.start()

    def wait(self, end: int) -> None:
        self.mark.add_callback(end, lambda error: self.told())


class OneCondition:
    def __init__(self, waiters: int) -> None:
        self.reached = 0
        self.condition = threading.Condition()

    def wait(self, end: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.reached >= end)

    def advance(self, end: int) -> None:
        with self.condition:
            self.reached = end
            self.condition.notify_all()


class EventEach:
    def __init__(self, waiters: int) -> None:
        self.reached = 0
        self.events = [threading.Event() for _ in range(waiters + 1)]

    def wait(self, end: int) -> None:
        self.events[end].wait()

    def advance(self, end: int) -> None:
        for passed in range(self.reached + 1, end + 1):
            self.events[passed].set()
        self.reached = end


class Wakes:
    """An arm: parks threads, moves the mark past one after another, lets all go.

    A run returns the mean seconds from a step to the moment when the thread it reaches runs; the
    mean seconds of the step itself are added to ``steps``.
    """

    def __init__(self, make: Callable[[int], Mark], waiters: int) -> None:
        self.make = make
        self.waiters = waiters
        self.steps: list[float] = []
        self.awake: SimpleQueue[float] = SimpleQueue()

    def told(self) -> None:
        self.awake.put(time.perf_counter())

    def __call__(self) -> float:
        repeats = max(1, STEPS // self.waiters)
        before = len(self.steps)
        latency = sum(self._once() for _ in range(repeats)) / repeats
        self.steps[before:] = [sum(self.steps[before:]) / repeats]
        return latency

    def _once(self) -> float:
        mark = self.make(self.waiters)
        ready: SimpleQueue[None] = SimpleQueue()

        def park(end: int) -> None:
            ready.put(None)
            mark.wait(end)
            self.told()

        threads = [threading.Thread(target=park, args=(end,)) for end in range(1, self.waiters + 1)]
        for thread in threads:
            thread.start()
        for _ in threads:
            ready.get()
        time.sleep(SETTLE)
        latency = self._measure(mark)
        mark.advance(self.waiters)
        for thread in threads:
            thread.join()
        while not self.awake.empty():
            self.awake.get()
        return latency

    def _measure(self, mark: Mark) -> float:
        count = min(self.waiters, STEPS)
        latency = step = 0.0
        for end in range(1, count + 1):
            start = time.perf_counter()
            mark.advance(end)
            step += time.perf_counter() - start
            latency += self.awake.get() - start
        self.steps.append(step / count)
        return latency / count


class Calls(Wakes):
    """The same with callbacks, which need no thread each."""

    def __init__(self, waiters: int) -> None:
        super().__init__(lambda n: OurCallbacks(n, self.told), waiters)

    def _once(self) -> float:
        mark = self.make(self.waiters)
        for end in range(1, self.waiters + 1):
            mark.wait(end)
        latency = self._measure(mark)
        mark.advance(self.waiters)
        for _ in range(self.waiters - min(self.waiters, STEPS)):
            self.awake.get()
        return latency


def above(rounds: int, waiters: int) -> dict[str, Pairs]:
    arms = {
        "threads": Wakes(Ours, waiters),
        "callbacks": Calls(waiters),
        "Condition": Wakes(OneCondition, waiters),
        "Events": Wakes(EventEach, waiters),
    }
    latency = in_turn(arms, rounds)
    step = {name: arm.steps[-rounds:] for name, arm in arms.items()}
    return {
        f"{what}, {waiters} waiters: {ours} / {peer}": compare(times[ours], times[peer])
        for what, times in (("wake", latency), ("step", step))
        for ours, peer in (
            ("threads", "Condition"),
            ("threads", "Events"),
            ("callbacks", "Events"),
        )
    }


# ---------------------------------------------------------------------------------- asyncio


def awaiting(rounds: int, count: int = 200) -> Pairs:
    with HostMem("1MiB", device="cpu", wait=True) as memory:

        async def ours() -> None:
            for _ in range(count):
                await memory.wait_usable_async(4096)

        async def peer() -> None:
            for _ in range(count):
                await asyncio.to_thread(memory.wait_usable, 4096)

        def timed(run: Callable[[], object]) -> float:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / count

        return pairs(
            lambda: timed(lambda: asyncio.run(ours())),
            lambda: timed(lambda: asyncio.run(peer())),
            rounds,
        )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.wait", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--waiters", type=numbers, default="1,100,1000")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds: int = arguments.rounds

    results = below(rounds, arguments.calls)
    for waiters in arguments.waiters:
        results |= above(rounds, waiters)
    results["asyncio: wait_usable_async / to_thread"] = awaiting(rounds)

    print(machine_line())
    print("microseconds a call, a wake or a step of the watermark (medians)")
    for name, result in results.items():
        low, high = result.ratio_quartiles
        print(
            f"  {name:<58} {result.ours_median * 1e6:10.3f} {result.peer_median * 1e6:10.3f}"
            f"   ratio {result.ratio:.3f} ({low:.3f}-{high:.3f})"
        )
    if arguments.json:
        write_json(arguments.json, results, calls=arguments.calls, limit=LIMIT)
    return int(results["below the watermark: wait_usable / bare method"].ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
