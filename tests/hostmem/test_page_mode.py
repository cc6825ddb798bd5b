"""Which size of pages is asked for."""

from __future__ import annotations

import dataclasses

import pytest

from hostmem import HostMem, Machine, machine
from hostmem.page_mode import PageMode, resolve_page_mode


def kernel(
    enabled: str = "madvise", defrag: str = "madvise", huge: int | None = 1 << 21
) -> Machine:
    return dataclasses.replace(
        machine(), huge_page_size=huge, thp_enabled=enabled, thp_defrag=defrag
    )


NO_THP = kernel("", "", None)


@pytest.fixture(autouse=True)
def no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTMEM_THP", raising=False)


def test_small_pages_are_the_default() -> None:
    assert resolve_page_mode(None, kernel()) is PageMode.SMALL


@pytest.mark.parametrize(
    ("setting", "mode"), [("0", PageMode.SMALL), ("1", PageMode.HUGE), ("auto", PageMode.HUGE)]
)
def test_the_environment_sets_the_default(
    monkeypatch: pytest.MonkeyPatch, setting: str, mode: PageMode
) -> None:
    monkeypatch.setenv("HOSTMEM_THP", setting)
    assert resolve_page_mode(None, kernel()) is mode


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTMEM_THP", "1")
    assert resolve_page_mode("small", kernel()) is PageMode.SMALL


@pytest.mark.parametrize("setting", ["2", "yes", "huge", "", "AUTO"])
def test_another_setting_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("HOSTMEM_THP", setting)
    with pytest.raises(ValueError, match=f"HOSTMEM_THP: '{setting}'; give 0, 1 or auto"):
        resolve_page_mode(None, kernel())


def test_a_bad_setting_does_not_matter_to_who_says_what_they_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOSTMEM_THP", "yes")
    assert resolve_page_mode("huge", kernel()) is PageMode.HUGE


@pytest.mark.parametrize("here", [kernel(), kernel("never"), NO_THP], ids=["yes", "never", "none"])
def test_small_pages_are_everywhere(here: Machine) -> None:
    assert resolve_page_mode("small", here) is PageMode.SMALL


@pytest.mark.parametrize("enabled", ["always", "madvise"])
def test_huge_pages_are_where_one_may_ask_for_them(enabled: str) -> None:
    assert resolve_page_mode("huge", kernel(enabled)) is PageMode.HUGE


@pytest.mark.parametrize(
    ("here", "why"),
    [(kernel("never"), "are never"), (NO_THP, "are not in this kernel")],
    ids=["never", "none"],
)
def test_huge_pages_are_refused_where_there_are_none(here: Machine, why: str) -> None:
    with pytest.raises(ValueError, match=f"page_mode: 'huge'.*{why}; use 'auto'"):
        resolve_page_mode("huge", here)


@pytest.mark.parametrize(
    ("here", "mode"),
    [
        (kernel("always", "madvise"), PageMode.HUGE),
        (kernel("madvise", "madvise"), PageMode.HUGE),
        (kernel("madvise", "defer"), PageMode.HUGE),
        (kernel("madvise", "always"), PageMode.SMALL),  # compacts on every fault of everybody
        (kernel("never", "madvise"), PageMode.SMALL),
        (NO_THP, PageMode.SMALL),
    ],
    ids=lambda v: v.value if isinstance(v, PageMode) else f"{v.thp_enabled}-{v.thp_defrag}",
)
def test_auto_takes_huge_pages_where_they_cost_nobody_else(here: Machine, mode: PageMode) -> None:
    assert resolve_page_mode("auto", here) is mode


@pytest.mark.parametrize("junk", ["", "HUGE", "2MiB", "thp"])
def test_another_mode_is_refused(junk: str) -> None:
    with pytest.raises(ValueError, match=f"page_mode: '{junk}'"):
        resolve_page_mode(junk, kernel())


def test_a_memory_says_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostmem.progressive.machine", lambda: kernel("never"))
    with HostMem("1MiB", device="cpu", page_mode="auto") as memory:
        assert memory.page_mode == "small"
