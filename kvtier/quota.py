"""Quotas in exact integers: how a level's bytes become whole grains, and grains become slots.

Everything here is a pure function of integers. A level's *grain* follows from its first quota and
is kept for life; every quota of the level is then rounded up to it and split over the pool groups
in whole grains. No floating-point number takes part: ratios are read as exact fractions first.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from hostmem.units import align_up, format_size

__all__ = [
    "exact_size",
    "exact_weights",
    "grain_of",
    "minimum_quota",
    "quota_holding",
    "slots_in",
    "split_quota",
]

_MIB = 1 << 20
_GIB = 1 << 30

_GRAINS = (
    (16 * _GIB, 32 * _MIB),
    (8 * _GIB, 16 * _MIB),
    (4 * _GIB, 8 * _MIB),
    (2 * _GIB, 4 * _MIB),
)
"""(from this quota on, this grain); below the last one the grain is 2 MiB."""


def grain_of(quota: int) -> int:
    """Give the grain, in bytes, of a level whose first quota is ``quota`` bytes.

    2 MiB below 2 GiB, then 4 MiB from 2 GiB, 8 MiB from 4 GiB, 16 MiB from 8 GiB and 32 MiB from
    16 GiB: between 512 and 1,024 grains a level in the middle range.
    """
    return next((grain for start, grain in _GRAINS if quota >= start), 2 * _MIB)


def minimum_quota(n_groups: int, grain: int) -> int:
    """Give the least quota, in bytes, of a level: one grain for each pool group."""
    return n_groups * grain


def exact_weights(ratio: Sequence[float]) -> tuple[int, ...]:
    """Turn ratios into integer weights in exactly the same proportion.

    Parameters
    ----------
    ratio : sequence of float
        Positive and finite. A float stands for the shortest decimal that reads back as it, so
        ``(0.7, 0.3)`` is 7 to 3 and not the two binary fractions beside it.

    Returns
    -------
    tuple of int
        The smallest integers with a common denominator; their sum has no meaning of its own.

    Raises
    ------
    ValueError
        If a ratio is not finite or not above zero.
    """
    if not all(0 < value < float("inf") for value in ratio):
        raise ValueError(f"ratios must be finite numbers above 0, not {tuple(ratio)}")
    exact = [Fraction(repr(float(value))) for value in ratio]
    common = lcm(*(value.denominator for value in exact))
    return tuple(int(value * common) for value in exact)


def split_quota(quota: int, weights: Sequence[int], grain: int) -> tuple[int, ...]:
    """Split a level's quota over its pool groups, in whole grains.

    The quota is rounded up to the grain. Every group gets one grain; the grains that remain go by
    largest remainder: each group gets the whole part of its ideal share of *those* grains, by
    weight, and the few left over go one each to the largest fractional parts, ties to the lowest
    index.

    Parameters
    ----------
    quota : int
        Bytes; at least ``minimum_quota(len(weights), grain)`` as given, before rounding.
    weights : sequence of int
        One positive weight a group; by default of the library, the group's page bytes.
    grain : int
        Bytes.

    Returns
    -------
    tuple of int
        Bytes of each group, multiples of the grain; their sum is the rounded quota.

    Raises
    ------
    ValueError
        If the quota is below the minimum, or a weight is not above zero.

    Notes
    -----
    What is monotone: the sum always; each share where there are one or two groups. From three
    groups on largest remainder has the Alabama paradox: one grain more in total may take one grain
    from a group and give two to others. It is never more than one: a share lies within one grain
    of its ideal, and the ideal grows with the quota. A caller that grows a level must therefore be
    ready to shrink a group by one grain. O(g log g) for g groups.
    """
    least = minimum_quota(len(weights), grain)
    if quota < least:
        raise ValueError(
            f"quota: {exact_size(quota)} is below the minimum of {exact_size(least)}, "
            f"{len(weights)} pool groups of one {exact_size(grain)} grain each"
        )
    total = sum(weights)
    if min(weights) <= 0:
        raise ValueError(f"weights must be above 0, not {tuple(weights)}")
    rest = align_up(quota, grain) // grain - len(weights)
    wholes, parts = zip(*(divmod(rest * weight, total) for weight in weights), strict=True)
    by_part = sorted(range(len(weights)), key=lambda group: -parts[group])
    lucky = set(by_part[: rest - sum(wholes)])
    return tuple(grain * (1 + whole + (group in lucky)) for group, whole in enumerate(wholes))


def quota_holding(pages: Sequence[int], weights: Sequence[int], grain: int) -> int:
    """Give a quota from which on every group's share holds at least one of its pages.

    Parameters
    ----------
    pages : sequence of int
        Page bytes of each group.
    weights : sequence of int
        As for `split_quota`.
    grain : int
        Bytes.

    Returns
    -------
    int
        Bytes, a multiple of the grain. Every quota from here on suffices; because a share may
        lose a grain when a quota grows, a smaller one may happen to.
    """
    total = sum(weights)
    rest = max(
        -(-(align_up(page, grain) // grain - 1) * total // weight)
        for page, weight in zip(pages, weights, strict=True)
    )
    return (len(pages) + rest) * grain


def slots_in(share: int, slot_bytes: int) -> int:
    """Give how many slots of ``slot_bytes`` bytes fit in ``share`` bytes."""
    return share // slot_bytes


def exact_size(nbytes: int) -> str:
    """Show bytes for a person and to the byte: ``"1.5 MiB (1,572,864 B)"``."""
    return f"{nbytes} B" if abs(nbytes) < 1024 else f"{format_size(nbytes)} ({nbytes:,} B)"
