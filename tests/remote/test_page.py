"""What the page of the remote level shows, against a real store."""

from __future__ import annotations

import subprocess
import sys

from tests.remote.cluster import Cluster
from tests.snippets import DOCS, ROOT, blocks


def test_the_block_of_the_page_runs(cluster: Cluster) -> None:
    (block,) = (block for block in blocks(DOCS / "remote.md") if block.kind == "py")
    code = block.code.replace("64GiB", "4MiB").replace("32GiB", "16MiB")
    code = code.replace("kv-master:50051", cluster.master.address)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "0 blocks are here or in the store\n0 blocks are here\n"
