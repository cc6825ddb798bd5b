"""Which size of pages a reservation asks the kernel for."""

from __future__ import annotations

import enum
import os

from hostmem.machine import Machine

__all__ = ["PageMode", "resolve_page_mode"]

_BY_ENVIRONMENT = {"0": "small", "1": "huge", "auto": "auto"}


class PageMode(enum.StrEnum):
    """Page sizes to ask for; what was got is read back from the kernel, see `Placement`."""

    SMALL = "small"
    """The machine's base pages only (MADV_NOHUGEPAGE)."""
    HUGE = "huge"
    """Transparent huge pages (MADV_HUGEPAGE); the kernel falls back page by page."""


def resolve_page_mode(mode: str | None, machine: Machine) -> PageMode:
    """Turn the ``page_mode`` argument into what is asked of the kernel.

    Parameters
    ----------
    mode : str, optional
        ``"small"``, ``"huge"``, ``"auto"``, or None for the ``HOSTMEM_THP`` environment variable
        (0, 1, auto) and, where that is not set, small.
    machine : Machine
        Where. ``"auto"`` is huge where the kernel has transparent huge pages for those who ask and
        does not compact memory directly on the fault for everybody, and small elsewhere.

    Raises
    ------
    ValueError
        Another mode, or huge where the kernel has no huge pages.
    """
    if mode is None:
        setting = os.environ.get("HOSTMEM_THP", "0")
        if setting not in _BY_ENVIRONMENT:
            raise ValueError(f"HOSTMEM_THP: {setting!r}; give 0, 1 or auto")
        mode = _BY_ENVIRONMENT[setting]
    usable = bool(machine.huge_page_size) and machine.thp_enabled in ("always", "madvise")
    if mode == "auto":
        return PageMode.HUGE if usable and machine.thp_defrag != "always" else PageMode.SMALL
    if mode not in ("small", "huge"):
        raise ValueError(f"page_mode: {mode!r}; give 'small', 'huge' or 'auto'")
    if mode == "huge" and not usable:
        raise ValueError(
            "page_mode: 'huge', but transparent huge pages are "
            f"{machine.thp_enabled or 'not in this kernel'}; use 'auto' to take what there is"
        )
    return PageMode(mode)
