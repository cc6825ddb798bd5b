"""What these tests share: a real Mooncake Store on the loopback.

They run in an environment of their own, `make test-remote`; elsewhere they are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.cluster import Cluster

try:
    import mooncake.store  # noqa: F401
except ImportError as missing:
    _REASON: str | None = f"Mooncake Store cannot be used here: {missing}"
else:
    _REASON = None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if _REASON is not None:
        pytest.skip(_REASON)
    with Cluster.running(tmp_path) as cluster:
        yield cluster
