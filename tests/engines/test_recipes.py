"""Pages of the docs that import torch, or an engine, run where these are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets import PAGES, foreign, installed, run


@pytest.mark.parametrize(
    "page", [page for page in PAGES if foreign(page)], ids=lambda page: str(page.name)
)
def test_a_page_runs_beside_others(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent := [name for name in sorted(foreign(page)) if not installed(name)]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    monkeypatch.chdir(tmp_path)  # it may write files
    run(page, with_foreign=True)
