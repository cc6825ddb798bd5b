"""How far memories are filled and where they are, for Prometheus; takes ``hostmem[prometheus]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hostmem.errors import ClosedError
from hostmem.progress import FillProgress
from hostmem.progressive import HostMem

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "hostmem.metrics needs the module prometheus_client; pip install hostmem[prometheus]"
    ) from error

__all__ = ["MemoryCollector"]

_LOOKED_AT = 1024  # pages: a scrape takes some milliseconds, whatever the size
_STATES = ("idle", "filling", "paused", "resting", "suspended", "failed", "filled")

_GAUGES = {
    "capacity_bytes": ((), "Address space, in bytes."),
    "size_bytes": ((), "Bytes that are usable or meant to be."),
    "filled_bytes": ((), "Bytes that are filled, those that were released later included."),
    "committed_bytes": ((), "Bytes from 0 that are usable without a hole."),
    "released_bytes": ((), "Bytes that were filled and released."),
    "quarantined_bytes": ((), "Bytes that are usable, and that the driver refused to page-lock."),
    "fill_bytes_per_second": ((), "Rate of the fill since it began."),
    "fill_seconds": ((), "Time spent filling, pauses included."),
    "fill_left_seconds": ((), "Time until the size is reached, where the rate says so."),
    "first_usable_seconds": ((), "From the start of the fill to the first usable bytes."),
    "fill_threads": ((), "Threads that populate."),
    "registrations": ((), "Registered ranges."),
    "registration_size_bytes": ((), "Bytes of the next registration, as the stall budget allows."),
    "registration_longest_seconds": (
        (),
        "Longest registration: others' driver calls wait for it.",
    ),
    "waiting": ((), "Threads and callbacks that wait for bytes."),
    "state": (("state",), "1 for the state that the fill is in, 0 for the others."),
    "resident_bytes": (("node",), "Resident bytes by memory node, scaled up from a sample."),
    "resident_page_bytes": (("page_size",), "Resident bytes by bytes of a page, from a sample."),
}
_COUNTERS = {
    "pauses": ((), "Times that the fill was paused."),
    "rests": ((), "Times that the fill rested because memory was short."),
}


class MemoryCollector(Collector):
    """Gives the state of memories to a registry of ``prometheus_client``.

    The names begin with ``hostmem_``. Each scrape looks at every memory once, on its own thread,
    and asks the kernel about a sample of its pages; one that was closed is left out.

    Parameters
    ----------
    memories : mapping of str to HostMem
        What each memory of this process is called in the label ``memory``. It may be changed later
        on.

    Examples
    --------
    ::

        from prometheus_client import REGISTRY
        REGISTRY.register(MemoryCollector({"kv": memory}))
    """

    def __init__(self, memories: Mapping[str, HostMem]) -> None:
        self._memories = memories

    def describe(self) -> Iterator[Metric]:
        """Give the names, without looking at any memory."""
        yield from _families().values()

    def collect(self) -> Iterator[Metric]:
        """Give the figures of this moment."""
        families = _families()
        for name, memory in list(self._memories.items()):
            try:
                found = list(_samples(memory))
            except ClosedError:
                continue
            for family, labels, value in found:
                families[family].add_metric((name, *labels), value)
        yield from families.values()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """Make all families, without samples, by the name that `_samples` has for them."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, (labels, text) in _GAUGES.items():
        families[name] = GaugeMetricFamily(f"hostmem_{name}", text, labels=("memory", *labels))
    for name, (labels, text) in _COUNTERS.items():
        families[name] = CounterMetricFamily(f"hostmem_{name}", text, labels=("memory", *labels))
    return families


def _samples(memory: HostMem) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield names, values of labels and figures."""
    placement = memory.placement(sample=_LOOKED_AT)
    progress = memory.progress
    yield "capacity_bytes", (), memory.capacity
    yield "quarantined_bytes", (), sum(nbytes for _, nbytes in memory.quarantined)
    yield "waiting", (), memory.waiting
    for name, value in _of(progress).items():
        if value is not None:
            yield name, (), value
    for state in _STATES:
        yield "state", (state,), state == progress.state
    for node, nbytes in placement.bytes_by_node.items():
        yield "resident_bytes", (str(node),), nbytes
    for size, nbytes in placement.bytes_by_page_size.items():
        yield "resident_page_bytes", (str(size),), nbytes


def _of(progress: FillProgress) -> dict[str, float | None]:
    return {
        "size_bytes": progress.size,
        "filled_bytes": progress.filled,
        "committed_bytes": progress.committed,
        "released_bytes": progress.released,
        "fill_bytes_per_second": progress.rate,
        "fill_seconds": progress.seconds,
        "fill_left_seconds": progress.eta,
        "first_usable_seconds": progress.first_usable_seconds,
        "fill_threads": progress.threads,
        "registrations": progress.registrations,
        "registration_size_bytes": progress.registration_size,
        "registration_longest_seconds": progress.longest_registration_seconds,
        "pauses": progress.pauses,
        "rests": progress.rests,
    }
