"""Whether the fill may take more memory now, and in which pages."""

from __future__ import annotations

import logging
import time
from functools import cached_property

from hostmem import huge_pages
from hostmem.errors import HostOOMError
from hostmem.headroom import HeadroomGauge
from hostmem.numa import PlacementRequest
from hostmem.page_mode import PageJudge
from hostmem.pressure import PressureGauge
from hostmem.reservation import Reservation
from hostmem.units import format_size

__all__ = ["Admission"]

log = logging.getLogger("hostmem")

_SHARE = 16  # of the headroom is granted at once: others take from it, too
_REST = 0.1  # seconds
_LONGEST_REST = 5.0  # seconds, after which a piece is taken all the same: nothing waits for ever


class Admission:
    """Stands between a fill and the memory of the machine.

    It is asked before every grant, and says no with `HostOOMError` rather than let the kernel's
    OOM killer choose a process. Under memory pressure it lets the fill rest, and it gives up huge
    pages where they cost more than they bring. One lock of the caller's guards all calls.

    Parameters
    ----------
    reservation : Reservation
        What is filled.
    placement : PlacementRequest
        Whose nodes' memory counts.
    page_mode : str
        Pages that are asked for.
    judge : PageJudge, optional
        Decides on the page size while filling; None: it stays as it is.
    """

    def __init__(
        self,
        reservation: Reservation,
        placement: PlacementRequest,
        page_mode: str,
        judge: PageJudge | None,
    ) -> None:
        self._reservation = reservation
        self._placement = placement
        self._judge = judge
        self._resting_since: float | None = None
        self.page_mode = page_mode
        """Pages asked for now."""
        self.resting: str | None = None
        """Why the fill rests now, or None."""
        self.rests = 0
        """Times it began to rest."""

    @cached_property  # not by who constructs the memory: looking the limits up takes a millisecond
    def _headroom(self) -> HeadroomGauge:
        return HeadroomGauge(self._placement.nodes, self._placement.strict)

    @cached_property
    def _pressure(self) -> PressureGauge:
        return PressureGauge()

    def grant(self, offset: int, least: int, wanted: int) -> int:
        """Say how many bytes from ``offset`` may be taken now: ``least`` to ``wanted``.

        Raises
        ------
        HostOOMError
            Not even ``least``; the message names the limit.
        """
        available, limit = self._available()
        if available < least:
            raise HostOOMError(
                f"{format_size(least)} more at offset {offset} do not fit: {limit} leaves "
                f"{format_size(available)}; lower the size, or raise the limit",
                offset=offset,
                nbytes=least,
                available=available,
                limit=limit,
            )
        return min(max(available // _SHARE, least), wanted)

    def _available(self) -> tuple[int, str]:
        size = self._reservation.hugetlb_size
        if size is None:
            found = self._headroom.read()
            return found.nbytes, found.limit
        pool = huge_pages.pools().get(size)  # its memory is in no other account
        return (pool.free * size if pool else 0), f"the hugetlb pool of {format_size(size)} pages"

    def rest(self) -> float:
        """Seconds that the fill should rest because memory is short; 0.0 to go on."""
        try:
            why = self._pressure.pressed()
        except OSError:  # no descriptors left: no reason to rest, and the next grant says so
            why = None
        if why is None:
            self.resting = self._resting_since = None
            return 0.0
        now = time.monotonic()
        if self._resting_since is None:
            self._resting_since = now
            self.rests += 1
            log.info("the fill rests: %s", why)
        elif now - self._resting_since > _LONGEST_REST:
            self._resting_since = now
            return 0.0
        self.resting = why
        return _REST

    def choose_pages(self, offset: int, nbytes: int) -> None:
        """Give up huge pages from ``offset`` on, once and for all, where they do not pay."""
        if self._judge is None:
            return
        why = self._judge.still_huge(nbytes)
        if why is not None:
            self._judge, self.page_mode = None, "small"
            log.warning("small pages from offset %d on: %s", offset, why)
            self._reservation.use_small_pages_from(offset)

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn how long one thread took to populate ``nbytes``."""
        if self._judge is not None:
            self._judge.note(nbytes, seconds)
