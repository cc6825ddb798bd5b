"""A trace dealt to two processes that share a real store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.remote.cluster import Cluster


def test_what_one_computed_is_a_hit_of_the_other(cluster: Cluster, tmp_path: Path) -> None:
    trace, found = tmp_path / "trace.jsonl", tmp_path / "found.json"
    command = [sys.executable, "-m", "kvtier"]
    subprocess.run(
        [*command, "trace", "--seed", "7", "--requests", "200", "--out", str(trace)], check=True
    )
    options = ["--device", "cpu", "--gpu-quota", "8MiB", "--host-quota", "32MiB"]
    store = ["--remote", cluster.master.address, "--remote-metadata", cluster.master.metadata]
    done = subprocess.run(
        [*command, "replay", str(trace), *options, *store, "--json", str(found)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(found.read_text())
    cross = result["hits_by_level"]["remote"]
    assert cross > 0
    assert f"2 processes: {cross:,} cross-host hits" in done.stdout
    assert result["corrupt_blocks"] == 0
    assert result["verified_blocks"] >= cross
    assert result["requests"] == 200
    assert result["hits"] == sum(result["hits_by_level"].values())
