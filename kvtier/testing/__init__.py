"""A kit for testing engines, levels and caches that are built on this library.

`FakeEngine` writes and verifies every byte of hot pages, `LevelConformance` says whether a store
of slots can be a level, `SimulatedClock` decides when work finishes, `prompts` are what to serve.
"""

from kvtier.testing.clock import SimulatedClock
from kvtier.testing.conformance import LevelConformance
from kvtier.testing.engine import FakeEngine
from kvtier.testing.slot_bench import SlotStore
from kvtier.testing.workload import prompts
from kvtier.testing.wrong_bytes import WrongBytes

__all__ = [
    "FakeEngine",
    "LevelConformance",
    "SimulatedClock",
    "SlotStore",
    "WrongBytes",
    "prompts",
]
