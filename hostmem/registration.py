"""Registering committed memory with a device, range by range, and remembering which."""

from __future__ import annotations

import enum
import logging

from hostmem.device.base import Device
from hostmem.errors import CuError, CuOOMError, HostmemError, RegistrationError
from hostmem.ranges import RangeTable
from hostmem.units import align_up, format_size

__all__ = ["OnRegisterFailure", "Registrations"]

log = logging.getLogger("hostmem")

_NEVER = {800, 801}  # NOT_PERMITTED, NOT_SUPPORTED: a smaller range fares no better
_HOPELESS = 256  # smallest ranges refused in a row, after which refused ranges are not halved


class OnRegisterFailure(enum.StrEnum):
    """What becomes of the fill when the driver refuses a range even a slot at a time."""

    RAISE = "raise"
    """It stops there, which is logged as an error; whoever waits beyond is told."""
    STOP = "stop"
    """It stops there; only who asks beyond is told."""
    PAGEABLE = "pageable"
    """The range is usable unregistered, listed as quarantined, and the fill goes on."""


class Registrations:
    """The registered ranges of one reservation, as offsets in bytes from its base.

    They cover a prefix, without holes but for the quarantined ranges. One thread registers at a
    time; any thread may look.

    Parameters
    ----------
    device : Device
        Who registers.
    base : int
        Address of offset 0.
    smallest : int
        Bytes below which a refused range is not halved any more: a multiple of the slot size.
    """

    def __init__(self, device: Device, base: int, smallest: int) -> None:
        self._device = device
        self._base = base
        self._smallest = smallest
        self.registered = RangeTable()
        self.quarantined = RangeTable()
        self.end = 0
        """Bytes from 0 that are registered or quarantined."""
        self._refused_in_a_row = 0

    def register(self, end: int, policy: OnRegisterFailure) -> None:
        """Register from the present end up to ``end``: in one call, or in halves where refused.

        Raises
        ------
        RegistrationError
            The smallest range was refused, and the policy is not PAGEABLE. What was registered
            before it stays registered: `end` says how far.
        """
        first, ahead, pageable = self.end, [end], 0
        why = ""
        while ahead:
            start, stop = self.end, ahead[-1]
            try:
                self._device.register(self._base + start, stop - start)
            except (CuError, CuOOMError) as cause:
                hopeless = cause.code in _NEVER or self._refused_in_a_row >= _HOPELESS
                if stop - start > self._smallest and not hopeless:
                    half = align_up((stop - start) // 2, self._smallest)
                    ahead.append(start + half)
                    continue
                if policy is not OnRegisterFailure.PAGEABLE:
                    raise self._refused(start, stop, cause) from cause
                self._quarantine(first, start, stop)
                pageable, why = pageable + stop - start, why or str(cause)
            else:
                self.registered.add(start, stop - start)
                self._refused_in_a_row = 0
            self.end = stop
            ahead.pop()
        if pageable:
            log.warning(
                "%d of the %d bytes at offset %d stay pageable: %s",
                pageable,
                end - first,
                first,
                why,
            )

    def _quarantine(self, first: int, start: int, stop: int) -> None:
        """Note a refused range; one with its neighbour if that begins at ``first`` or later."""
        self._refused_in_a_row += 1
        before = self.quarantined.at(start - 1)
        if before is not None and before[0] >= first:
            start = before[0]
            self.quarantined.remove(start)
        self.quarantined.add(start, stop - start)

    def unregister_down_to(self, size: int) -> None:
        """Unregister the ranges that begin at or past ``size``, from the top, and move the end.

        A range that reaches over ``size`` stays whole. Where the driver refuses, it stops, logs why
        and leaves the rest registered: memory that a device may still reach is never given back.
        """
        ranges = [(s, n, self.registered) for s, n in self.registered if s >= size]
        ranges += [(s, n, self.quarantined) for s, n in self.quarantined if s >= size]
        for start, nbytes, table in sorted(ranges, key=lambda r: r[0], reverse=True):
            if table is self.registered:
                try:
                    self._device.unregister(self._base + start)
                except (CuError, CuOOMError) as error:
                    log.error("%d bytes at offset %d stay registered: %s", nbytes, start, error)
                    return
            table.remove(start)
            self.end = start

    def abandon(self) -> None:
        """Forget all, in a forked child: the ranges and whoever holds a lock are the parent's."""
        self.registered.abandon()
        self.quarantined.abandon()
        self.end = 0

    def _refused(self, start: int, stop: int, cause: HostmemError) -> RegistrationError:
        return RegistrationError(
            f"the driver refused to register {format_size(stop - start)} at offset {start}: "
            f"{cause}; what is below stays usable",
            offset=start,
            nbytes=stop - start,
            code=cause.facts.get("code"),
        )
