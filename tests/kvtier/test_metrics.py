"""The statistics as Prometheus scrapes them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from hostmem.errors import ClosedError
from kvtier.stats import LevelStats, Meter, StorageStats

prometheus = pytest.importorskip(
    "prometheus_client", reason="needs the module prometheus_client, an extra of this package"
)


def stats() -> StorageStats:
    """Give figures that are all different."""
    meter = Meter()
    meter.occupied("gpu", 5, 500)
    meter.occupied("gpu", -2, -200)
    meter.moved("gpu->host", 7, 700)
    meter.arrived("gpu->host", 3, 300, failed=1)
    meter.moved("gpu->host", 1, 100)
    meter.found("host", 11)
    meter.missed(13)
    meter.waited("memory", 0.5)
    meter.waited("memory", 2.0)
    levels = {"gpu": LevelStats(8, 3, 1 << 20), "host": LevelStats(16, 0, 2 << 20)}
    return StorageStats(levels, {}, 17, meter.activity())


def scraped(registry: object) -> list[str]:
    """Give the samples of a scrape, without comments."""
    text: str = prometheus.generate_latest(registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


Storages = dict[str, Callable[[], StorageStats]]


def registered(storages: Storages) -> object:
    from kvtier.metrics import StorageCollector

    registry = prometheus.CollectorRegistry()
    registry.register(StorageCollector(storages))
    return registry


def test_every_figure_has_a_name_and_labels() -> None:
    assert scraped(registered({"a": stats})) == [
        'kvtier_level_slots{level="gpu",storage="a"} 8.0',
        'kvtier_level_slots{level="host",storage="a"} 16.0',
        'kvtier_level_quota_bytes{level="gpu",storage="a"} 1.048576e+06',
        'kvtier_level_quota_bytes{level="host",storage="a"} 2.097152e+06',
        'kvtier_level_pages{level="gpu",storage="a"} 3.0',
        'kvtier_level_pages{level="host",storage="a"} 0.0',
        'kvtier_level_bytes{level="gpu",storage="a"} 300.0',
        'kvtier_level_bytes{level="host",storage="a"} 0.0',
        'kvtier_level_peak_bytes{level="gpu",storage="a"} 500.0',
        'kvtier_level_peak_bytes{level="host",storage="a"} 0.0',
        'kvtier_copying_pages{destination="host",source="gpu",storage="a"} 5.0',
        'kvtier_copying_bytes{destination="host",source="gpu",storage="a"} 500.0',
        'kvtier_copying_peak_bytes{destination="host",source="gpu",storage="a"} 700.0',
        'kvtier_wait_longest_seconds{storage="a",what="memory"} 2.0',
        'kvtier_level_arrived_pages_total{level="gpu",storage="a"} 5.0',
        'kvtier_level_arrived_pages_total{level="host",storage="a"} 0.0',
        'kvtier_level_arrived_bytes_total{level="gpu",storage="a"} 500.0',
        'kvtier_level_arrived_bytes_total{level="host",storage="a"} 0.0',
        'kvtier_copied_pages_total{destination="host",source="gpu",storage="a"} 8.0',
        'kvtier_copied_bytes_total{destination="host",source="gpu",storage="a"} 800.0',
        'kvtier_failed_pages_total{destination="host",source="gpu",storage="a"} 1.0',
        'kvtier_hit_blocks_total{level="gpu",storage="a"} 0.0',
        'kvtier_hit_blocks_total{level="host",storage="a"} 11.0',
        'kvtier_missed_blocks_total{storage="a"} 13.0',
        'kvtier_dropped_pages_total{storage="a"} 17.0',
        'kvtier_waits_total{storage="a",what="memory"} 2.0',
        'kvtier_wait_seconds_total{storage="a",what="memory"} 2.5',
    ]


def test_storages_differ_by_a_label_and_may_come_and_go() -> None:
    storages: Storages = {"a": stats}
    registry = registered(storages)
    storages["b"] = stats
    both = [line for line in scraped(registry) if line.startswith("kvtier_missed_blocks_total")]
    assert both == [
        'kvtier_missed_blocks_total{storage="a"} 13.0',
        'kvtier_missed_blocks_total{storage="b"} 13.0',
    ]
    storages.clear()
    assert scraped(registry) == []


def test_a_closed_storage_does_not_spoil_a_scrape() -> None:
    def closed() -> StorageStats:
        raise ClosedError("the storage was closed")

    found = scraped(registered({"a": closed, "b": stats}))
    assert found
    assert not [line for line in found if 'storage="a"' in line]


def test_another_error_is_told_to_the_scraper() -> None:
    def broken() -> StorageStats:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        scraped(registered({"a": broken}))


def test_registering_asks_no_storage_and_finds_names_taken() -> None:
    from kvtier.metrics import StorageCollector

    registry = prometheus.CollectorRegistry(auto_describe=True)
    registry.register(StorageCollector({"a": lambda: pytest.fail("asked")}))
    with pytest.raises(ValueError, match="kvtier_level_slots"):
        registry.register(StorageCollector({}))


def test_without_the_module_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvtier.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ImportError, match=r"pip install hostmem\[prometheus\]"):
        import kvtier.metrics  # noqa: F401
