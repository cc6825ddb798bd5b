"""Memories as Prometheus scrapes them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hostmem import HostMem
from hostmem.testing import FaultPlan

prometheus = pytest.importorskip(
    "prometheus_client", reason="needs the module prometheus_client, an extra of this package"
)

MIB = 1 << 20
PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def scrape(**memories: HostMem) -> dict[str, float]:
    """Give the samples of a scrape."""
    from hostmem.metrics import MemoryCollector

    registry = prometheus.CollectorRegistry()
    registry.register(MemoryCollector(memories))
    text: str = prometheus.generate_latest(registry).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_a_scrape_has_the_figures_of_each_memory() -> None:
    with (
        HostMem("8MiB", "4MiB", device="cpu", commit_unit="1MiB", wait=True) as one,
        HostMem("1MiB", device="cpu", wait=True) as other,
    ):
        one.release(MIB, 2 * MIB)
        found = scrape(kv=one, other=other)
        nodes = one.placement().bytes_by_node
    expected = {
        "capacity_bytes": 8 * MIB,
        "size_bytes": 4 * MIB,
        "filled_bytes": 4 * MIB,
        "committed_bytes": MIB,
        "released_bytes": 2 * MIB,
        "quarantined_bytes": 0,
        "fill_left_seconds": 0,
        "registrations": 2,
        "waiting": 0,
        "pauses_total": 0,
        "rests_total": 0,
    }
    names = {name: found[f'hostmem_{name}{{memory="kv"}}'] for name in expected}
    assert names == expected
    assert found['hostmem_state{memory="kv",state="filled"}'] == 1
    assert found['hostmem_state{memory="kv",state="filling"}'] == 0
    assert sum(nodes.values()) == 2 * MIB
    for node, nbytes in nodes.items():
        assert found[f'hostmem_resident_bytes{{memory="kv",node="{node}"}}'] == nbytes
    assert found['hostmem_committed_bytes{memory="other"}'] == MIB


def test_what_has_not_happened_is_left_out() -> None:
    with FaultPlan() as plan:
        hold = plan.hold("madvise(MADV_POPULATE_WRITE)")
        with HostMem("1MiB", device="cpu") as memory:
            hold.wait_reached()
            found = scrape(kv=memory)
            hold.release()
    assert found['hostmem_state{memory="kv",state="filling"}'] == 1
    assert not any(name.startswith(("hostmem_first_usable", "hostmem_fill_left")) for name in found)


def test_quarantined_bytes_are_seen() -> None:
    with FaultPlan() as plan:
        plan.fail("cuMemHostRegister", 801, times=None)
        with HostMem("1MiB", device="cpu", wait=True, on_register_failure="pageable") as memory:
            assert scrape(kv=memory)['hostmem_quarantined_bytes{memory="kv"}'] == MIB


def test_a_closed_memory_is_left_out() -> None:
    with HostMem("1MiB", device="cpu", wait=True) as memory:
        pass
    assert scrape(kv=memory) == {}


def test_memories_may_come_and_go() -> None:
    from hostmem.metrics import MemoryCollector

    memories: dict[str, HostMem] = {}
    collector = MemoryCollector(memories)
    assert not any(family.samples for family in collector.collect())
    with HostMem("1MiB", device="cpu", wait=True) as memory:
        memories["kv"] = memory
        assert any(family.samples for family in collector.collect())


def names(collector: Any) -> set[str]:
    """Give the names of a collector's metrics, as a scrape has them."""
    suffix = {"counter": "_total"}
    return {family.name + suffix.get(family.type, "") for family in collector.describe()}


def test_every_metric_is_on_the_page_and_every_one_on_the_page_is_there() -> None:
    from hostmem.metrics import MemoryCollector
    from kvtier.metrics import StorageCollector

    described = set(re.findall(r"`((?:hostmem|kvtier)_\w+)`", PAGE.read_text()))
    assert names(MemoryCollector({})) | names(StorageCollector({})) == described


def test_without_the_module_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus_client", "prometheus_client.core", "prometheus_client.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "hostmem.metrics", raising=False)
    with pytest.raises(ImportError, match=r"pip install hostmem\[prometheus\]"):
        import hostmem.metrics  # noqa: F401
