"""Registering committed memory with a device, range by range, and remembering which."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Iterator

from hostmem.device.base import Device
from hostmem.errors import CuError, CuOOMError, HostmemError, RegistrationError
from hostmem.ranges import RangeTable
from hostmem.spans import span
from hostmem.stall_budget import StallBudget
from hostmem.units import align_down, align_up, format_size

__all__ = ["OnRegisterFailure", "Registrations", "registration_limit"]

log = logging.getLogger("hostmem")

_NEVER = {800, 801}  # NOT_PERMITTED, NOT_SUPPORTED: a smaller range fares no better
_NOT_REGISTERED = 713
_HOPELESS = 256  # smallest ranges refused in a row, after which refused ranges are not halved
_FIRST = 1 << 20
_GIB = 1 << 30


class OnRegisterFailure(enum.StrEnum):
    """What becomes of the fill when the driver refuses a range even a slot at a time."""

    RAISE = "raise"
    """It stops there, which is logged as an error; whoever waits beyond is told."""
    STOP = "stop"
    """It stops there; only who asks beyond is told."""
    PAGEABLE = "pageable"
    """The range is usable unregistered, listed as quarantined, and the fill goes on."""


def registration_limit(kernel: str, slot_size: int) -> int:
    """Say how many bytes, in whole slots, one registration may have at most.

    Parameters
    ----------
    kernel : str
        Release of the kernel: 6.11 to 6.13 pin less than 2 GiB in a call. The driver's tables end
        at 512 GiB everywhere.
    slot_size : int
        Bytes of a slot.
    """
    version = tuple(int(part) for part in kernel.split(".")[:2] if part.isdecimal())
    largest = 2 * _GIB if (6, 11) <= version <= (6, 13) else 512 * _GIB
    return max(align_down(largest - 1, slot_size), slot_size)


class Registrations:
    """The registered ranges of one reservation, as offsets in bytes from its base.

    Below `end` every byte is registered, quarantined or suspended, or was dropped by its owner.
    One thread changes the end at a time, and one at a time what is below it; any thread may look.

    Parameters
    ----------
    device : Device
        Who registers, and whose turns with other processes every call keeps.
    base : int
        Address of offset 0.
    slot_size, commit_unit : int
        Bytes; ranges of the fill are whole slots and never cross a multiple of the unit.
    smallest : int
        Bytes below which a refused range is not halved any more: a multiple of the slot size.
    policy : OnRegisterFailure
        What a refusal of the smallest range means.
    budget : StallBudget
        Is told how long calls take.
    """

    def __init__(
        self,
        device: Device,
        base: int,
        *,
        slot_size: int,
        commit_unit: int,
        smallest: int,
        policy: OnRegisterFailure,
        budget: StallBudget,
    ) -> None:
        self._device = device
        self._base = base
        self._slot_size = slot_size
        self._unit = commit_unit
        self._smallest = smallest
        self.policy = policy
        self.budget = budget
        self.registered = RangeTable()
        self.quarantined = RangeTable()
        self.suspended = RangeTable()
        self.end = 0
        """Bytes from 0 that have been through `register`."""
        self._is_suspended = False
        self._refused_in_a_row = 0

    # ------------------------------------------------------------------------------- registering

    def next_end(self, start: int, limit: int) -> int:
        """Say where a registration that begins at ``start`` is to end, at most at ``limit``."""
        size = min(max(start, _FIRST), self.budget.size)  # small at first, then larger
        size = max(align_down(size, self._slot_size), self._slot_size)
        return min(start + size, align_down(start, self._unit) + self._unit, limit)

    def register(self, end: int) -> None:
        """Register from the present end up to ``end``: in one call, or in halves where refused.

        Raises
        ------
        RegistrationError
            The smallest range was refused, and the policy is not PAGEABLE. What was registered
            before it stays registered: `end` says how far.
        """
        self.register_range(self.end, end)

    def register_range(self, first: int, end: int) -> None:
        """Register ``[first, end)``, of which nothing is registered; as `register`."""
        ahead, start, pageable, why = [end], first, 0, ""
        while ahead:
            stop = ahead[-1]
            try:
                self._register(start, stop)
            except (CuError, CuOOMError) as cause:
                hopeless = cause.code in _NEVER or self._refused_in_a_row >= _HOPELESS
                if stop - start > self._smallest and not hopeless:
                    half = align_up((stop - start) // 2, self._smallest)
                    ahead.append(start + half)
                    continue
                if self.policy is not OnRegisterFailure.PAGEABLE:
                    raise self._refused(start, stop, cause) from cause
                self._refused_in_a_row += 1
                self._quarantine(first, start, stop)
                pageable, why = pageable + stop - start, why or str(cause)
            start = stop
            if start > self.end:  # never for what is below: the end is another thread's to move
                self.end = start
            ahead.pop()
        if pageable:
            log.warning(
                "%d of the %d bytes at offset %d stay pageable: %s",
                pageable,
                end - first,
                first,
                why,
            )

    @span("register", "fill")
    def _register(self, start: int, stop: int) -> None:
        # Noted first: Ctrl-C must not end with a registration that nobody knows of.
        self.registered.add(start, stop - start)
        try:
            with self._device.turns:
                began = time.perf_counter()
                self._device.register(self._base + start, stop - start)
                seconds = time.perf_counter() - began
        except (CuError, CuOOMError):
            self.registered.remove(start)
            raise
        except BaseException:
            self._unregister(start)  # whether it came to be or not
            raise
        if self._device.stalls:
            self.budget.note(stop - start, seconds)
        self._refused_in_a_row = 0

    @span("unregister", "fill")
    def _unregister(self, start: int) -> None:
        try:
            with self._device.turns:
                self._device.unregister(self._base + start)
        except CuError as error:
            if error.code != _NOT_REGISTERED:
                raise
            # Ctrl-C came between the driver's answer and the note of it.
        self.registered.remove(start)

    def _let_go(self, start: int, nbytes: int) -> None:
        try:
            self._unregister(start)
        except (CuError, CuOOMError) as cause:
            raise RegistrationError(
                f"the driver refused to unregister {format_size(nbytes)} at offset {start}: "
                f"{cause}; they stay registered",
                offset=start,
                nbytes=nbytes,
                code=cause.facts.get("code"),
            ) from cause

    def _quarantine(self, first: int, start: int, stop: int) -> None:
        """Note a range as pageable, as one with its neighbour that begins at ``first`` or later."""
        before = self.quarantined.at(start - 1)
        if before is not None and before[0] >= first:
            start = before[0]
            self.quarantined.remove(start)
        self.quarantined.add(start, stop - start)

    # ----------------------------------------------------------------------------- giving it back

    def unregister_down_to(self, size: int) -> None:
        """Unregister the ranges that begin at or past ``size``, from the top, and move the end.

        A range that reaches over ``size`` stays whole; `cut` it before. Where the driver refuses,
        it stops, logs why and leaves the rest registered: memory that a device may still reach is
        never given back.
        """
        for start, nbytes, table in self._ranges(size, self.end):
            if start < size:
                continue
            if table is self.registered:
                try:
                    self._unregister(start)
                except (CuError, CuOOMError) as error:
                    log.error("%d bytes at offset %d stay registered: %s", nbytes, start, error)
                    return
            else:
                table.remove(start)
            self.end = start
        over = [start + nbytes for start, nbytes, _ in self._ranges(size - 1, size)]
        self.end = min(self.end, max(size, *over, 0))

    def drop(self, start: int, stop: int) -> None:
        """Unregister what is in ``[start, stop)`` and forget it.

        Raises
        ------
        RegistrationError
            The driver refused to unregister a range; `mend` undoes the rest.
        """
        self.cut(start)
        self.cut(stop)
        for first, nbytes, table in self._ranges(start, stop):
            if table is self.registered:
                self._let_go(first, nbytes)
            else:
                table.remove(first)

    def cut(self, offset: int) -> None:
        """Make ``offset`` a boundary, by registering what spans it again in two parts.

        Nothing may be copying there meanwhile.
        """
        for start, nbytes, table in self._ranges(offset - 1, offset + 1):
            stop = start + nbytes
            if not start < offset < stop:
                continue
            if table is self.registered:
                self._replace([(start, stop)], [(start, offset), (offset, stop)])
            else:
                table.remove(start)
                table.add(start, offset - start)
                table.add(offset, stop - offset)

    # ------------------------------------------------------------- the same memory, other ranges

    def consolidate(self, limit: int) -> None:
        """Register neighbours as one, in ranges of at most ``limit`` bytes.

        Nothing may be copying meanwhile.

        Raises
        ------
        RegistrationError
            The driver refused. What it does not take is quarantined: usable, not registered.
        """
        for group in list(self._neighbours(limit)):
            self._replace(group, [(group[0][0], group[-1][1])])

    def _neighbours(self, limit: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the (start, stop) of two or more adjacent ranges that are one within the limit."""
        group: list[tuple[int, int]] = []
        for start, nbytes in self.registered:
            stop = start + nbytes
            if group and (group[-1][1] != start or stop - group[0][0] > limit):
                if len(group) > 1:
                    yield group
                group = []
            group.append((start, stop))
        if len(group) > 1:
            yield group

    def _replace(self, old: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
        try:
            for start, stop in reversed(old):
                self._let_go(start, stop - start)
            for start, stop in new:
                self.register_range(start, stop)
        except BaseException:
            self.mend(old[0][0], old[-1][1])
            raise

    def mend(self, start: int, stop: int) -> None:
        """Register what no table holds of ``[start, stop)``; quarantine what is refused."""
        for first, end in self._gaps(start, stop):
            if self._is_suspended:
                self.suspended.add(first, end - first)
                continue
            try:
                self.register_range(first, end)
            except RegistrationError as error:
                at = error.facts["offset"]
                log.error("%d bytes at offset %d stay pageable: %s", end - at, at, error)
                self._quarantine(first, at, end)

    def _gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) of what no table holds of a range."""
        for first, nbytes, _ in [*reversed(self._ranges(start, stop)), (stop, 0, None)]:
            if start < first:
                yield start, first
            start = max(start, first + nbytes)

    def suspend(self) -> None:
        """Unregister everything, from the top, and remember it as suspended.

        Raises
        ------
        RegistrationError
            The driver refused; the ranges from there down are still registered.
        """
        self._is_suspended = True
        for start, nbytes in reversed(list(self.registered)):
            try:
                self._let_go(start, nbytes)
            finally:
                if self.registered.at(start) is None:
                    self.suspended.add(start, nbytes)

    def resume(self) -> None:
        """Register what is suspended again.

        Raises
        ------
        RegistrationError
            A range was refused, and the policy is not PAGEABLE; it and those after it are still
            suspended.
        """
        for start, nbytes in self.suspended:
            self.suspended.remove(start)
            try:
                self.register_range(start, start + nbytes)
            except BaseException:
                for first, end in list(self._gaps(start, start + nbytes)):
                    self.suspended.add(first, end - first)
                raise
        self._is_suspended = False

    # -------------------------------------------------------------------------------- looking

    def at(self, offset: int) -> tuple[int, int] | None:
        """Return the (start, nbytes) of the range that holds ``offset``, whatever became of it."""
        for table in (self.registered, self.quarantined, self.suspended):
            if (found := table.at(offset)) is not None:
                return found
        return None

    def _ranges(self, start: int, stop: int) -> list[tuple[int, int, RangeTable]]:
        """Return (start, nbytes, table) of all that shares a byte with a range, from the top."""
        tables = (self.registered, self.quarantined, self.suspended)
        found = [(*r, table) for table in tables for r in table.overlapping(start, stop)]
        return sorted(found, key=lambda r: r[0], reverse=True)

    def abandon(self) -> None:
        """Forget all, in a forked child: the ranges and whoever holds a lock are the parent's."""
        for table in (self.registered, self.quarantined, self.suspended):
            table.abandon()
        self.end = 0

    def _refused(self, start: int, stop: int, cause: HostmemError) -> RegistrationError:
        return RegistrationError(
            f"the driver refused to register {format_size(stop - start)} at offset {start}: "
            f"{cause}; what is below stays usable",
            offset=start,
            nbytes=stop - start,
            code=cause.facts.get("code"),
        )
