"""Statistics for Prometheus; takes the extra ``pip install hostmem[prometheus]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hostmem.errors import ClosedError
from kvtier.stats import StorageStats, Usage

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "kvtier.metrics needs the module prometheus_client; pip install hostmem[prometheus]"
    ) from error

__all__ = ["StorageCollector"]

_LEVEL, _PAIR, _WHAT = ("level",), ("source", "destination"), ("what",)
_FILE = ("group",)
_REASON = ("reason",)

_GAUGES = {
    "level_slots": (_LEVEL, "Pages that a level can hold."),
    "level_quota_bytes": (_LEVEL, "Bytes that a level may use."),
    "level_pages": (_LEVEL, "Pages that a level holds."),
    "level_bytes": (_LEVEL, "Bytes of the pages that a level holds."),
    "level_peak_bytes": (_LEVEL, "Most bytes that a level held at one time."),
    "copying_pages": (_PAIR, "Pages on their way between two levels."),
    "copying_bytes": (_PAIR, "Bytes on their way between two levels."),
    "copying_peak_bytes": (_PAIR, "Most bytes on their way between two levels at one time."),
    "wait_longest_seconds": (_WHAT, "Longest wait."),
    "remote_up": ((), "1 if the remote store answers, 0 if not."),
}
_COUNTERS = {
    "level_arrived_pages": (_LEVEL, "Pages that came to a level."),
    "level_arrived_bytes": (_LEVEL, "Bytes that came to a level."),
    "copied_pages": (_PAIR, "Pages submitted to be copied between two levels."),
    "copied_bytes": (_PAIR, "Bytes submitted to be copied between two levels."),
    "failed_pages": (_PAIR, "Pages whose copy between two levels failed."),
    "hit_blocks": (_LEVEL, "Blocks that were asked for and found, by the level they were in."),
    "missed_blocks": ((), "Blocks that were asked for and not found."),
    "dropped_pages": ((), "Pages evicted from the last level."),
    "disk_written_bytes": (_FILE, "Bytes written to the file of a pool group."),
    "disk_read_bytes": (_FILE, "Bytes read from the file of a pool group."),
    "disk_failed_writes": (_FILE, "Pages that could not be written to disk."),
    "disk_failed_reads": (_FILE, "Pages that could not be read from disk, corrupt ones included."),
    "disk_corrupt_pages": (_FILE, "Pages read from disk that were not what had been written."),
    "remote_sent_pages": ((), "Pages that the remote store has taken, or had already."),
    "remote_sent_bytes": ((), "Bytes of pages that the remote store has taken, or had already."),
    "remote_fetched_pages": ((), "Pages that came from the remote store."),
    "remote_fetched_bytes": ((), "Bytes of pages that came from the remote store."),
    "remote_unsent_pages": (_REASON, "Pages that did not get to the remote store."),
    "remote_missed_blocks": (_REASON, "Blocks that did not come from the remote store."),
    "remote_degradations": ((), "Times that the remote store stopped answering."),
    "waits": (_WHAT, "Times that somebody waited."),
    "wait_seconds": (_WHAT, "Seconds that were waited."),
}


class StorageCollector(Collector):
    """Gives the statistics of storages to a registry of ``prometheus_client``.

    The names begin with ``kvtier_``. Each scrape calls the functions once, on its own thread; a
    storage that was closed is left out.

    Parameters
    ----------
    storages : mapping of str to callable
        What each storage of this process is called in the label ``storage``, and the function that
        gives its `StorageStats`, such as `TierStorage.stats`. It may be changed later on.

    Examples
    --------
    ::

        from prometheus_client import REGISTRY
        REGISTRY.register(StorageCollector({"rank0": storage.stats}))
    """

    def __init__(self, storages: Mapping[str, Callable[[], StorageStats]]) -> None:
        self._storages = storages

    def describe(self) -> Iterator[Metric]:
        """Give the names, without asking any storage."""
        yield from _families().values()

    def collect(self) -> Iterator[Metric]:
        """Give the figures of this moment."""
        families = _families()
        for storage, stats in list(self._storages.items()):
            try:
                found = stats()
            except ClosedError:
                continue
            for name, labels, value in _samples(found):
                families[name].add_metric((storage, *labels), value)
        yield from families.values()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    """Make all families, without samples, by the name that `_samples` has for them."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for name, (labels, text) in _GAUGES.items():
        families[name] = GaugeMetricFamily(f"kvtier_{name}", text, labels=("storage", *labels))
    for name, (labels, text) in _COUNTERS.items():
        families[name] = CounterMetricFamily(f"kvtier_{name}", text, labels=("storage", *labels))
    return families


def _samples(stats: StorageStats) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield names, values of labels and figures."""
    activity = stats.activity
    for level, at in stats.levels.items():
        yield "level_slots", (level,), at.slots
        yield "level_quota_bytes", (level,), at.quota
        yield "hit_blocks", (level,), activity.hits.get(level, 0)
        use = activity.levels.get(level, Usage())  # a rate needs the 0 before the first one
        yield "level_pages", (level,), use.pages
        yield "level_bytes", (level,), use.nbytes
        yield "level_peak_bytes", (level,), use.peak_bytes
        yield "level_arrived_pages", (level,), use.total_pages
        yield "level_arrived_bytes", (level,), use.total_bytes
    for pair, traffic in activity.pairs.items():
        source, _, destination = pair.partition("->")
        labels = (source, destination)
        yield "copying_pages", labels, traffic.pages
        yield "copying_bytes", labels, traffic.nbytes
        yield "copying_peak_bytes", labels, traffic.peak_bytes
        yield "copied_pages", labels, traffic.total_pages
        yield "copied_bytes", labels, traffic.total_bytes
        yield "failed_pages", labels, traffic.failed_pages
    for what, waits in activity.waits.items():
        yield "waits", (what,), waits.count
        yield "wait_seconds", (what,), waits.seconds
        yield "wait_longest_seconds", (what,), waits.longest
    for group, found in enumerate(stats.files):
        yield "disk_written_bytes", (str(group),), found.bytes_written
        yield "disk_read_bytes", (str(group),), found.bytes_read
        yield "disk_failed_writes", (str(group),), found.write_failures
        yield "disk_failed_reads", (str(group),), found.read_failures
        yield "disk_corrupt_pages", (str(group),), found.corrupt
    if (remote := stats.remote) is not None:
        yield "remote_up", (), remote.state == "up"
        yield "remote_sent_pages", (), remote.sent_pages
        yield "remote_sent_bytes", (), remote.sent_bytes
        yield "remote_fetched_pages", (), remote.fetched_pages
        yield "remote_fetched_bytes", (), remote.fetched_bytes
        yield "remote_degradations", (), remote.degradations
        for reason, pages in remote.unsent.items():
            yield "remote_unsent_pages", (reason,), pages
        for reason, blocks in remote.misses.items():
            yield "remote_missed_blocks", (reason,), blocks
    yield "missed_blocks", (), activity.misses
    yield "dropped_pages", (), stats.pages_dropped
