"""The sizes of a summand for which one path is predicted to cost less than another."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from meshplan.planner._cost import Cost
from meshplan.planner._path_costs import (
    PlannedReduction,
    ReductionStrategy,
    exchange_cost,
    halving_cost,
    reference_cost,
)
from meshplan.planner._reach import ElementWidth, Reach
from meshplan.topology import Links

MAX_LIMITS = 256
# An all-to-all among fewer ranks is under way at once, and costs less than the model says.
MIN_HALVING_RANKS = 9
MARGIN = 10  # Percent: of flat halving; see ``find_margin``.
_TRIES = 8  # Of the size at which two costs are equal.
_MANY = 1 << 40  # Bytes that take long on any link, without an overflow.

SizeRange = tuple[int, int]
"""Sizes in bytes: above the first number, and up to the second."""
_NONE: SizeRange = (0, 0)


@lru_cache(maxsize=MAX_LIMITS)
def one_message_bytes(sizes: tuple[int, ...], links: Links) -> int:
    """The largest summand in bytes for which one all-gather over axes of ``sizes`` costs no more
    than other paths, if each rank is on a node of its own.
    """
    reach = Reach.unknown(sizes, links)
    halves = math.prod(sizes) >= MIN_HALVING_RANKS
    others = (exchange_cost, halving_cost) if halves else (exchange_cost,)
    found = (_find_sizes(reach, reference_cost, other, 1) for other in others)
    return min(most if least == 0 else 0 for least, most in found)


def find_margin(strategy: ReductionStrategy) -> int:
    """Percent of its time by which halving must be predicted to cost less than an exchange."""
    # Links are measured to about 10 %, and the exchange has fewer rounds. Of blocks half as much:
    # the times inside them are part of both.
    if strategy.between != "halving":
        return 0
    return MARGIN if strategy.inner == 1 else MARGIN // 2


@lru_cache(maxsize=MAX_LIMITS)
def find_halving_sizes(reach: Reach) -> tuple[SizeRange, SizeRange]:
    """The summands for which flat halving saves ``MARGIN`` of an exchange: for dtypes whose
    partials are as wide, and for those whose partials are twice as wide.
    """
    if math.prod(reach.sizes) < MIN_HALVING_RANKS:
        return _NONE, _NONE

    def halve(reduction: PlannedReduction) -> Cost:
        cost = halving_cost(reduction)
        return replace(cost, nanoseconds=cost.nanoseconds * (100 + MARGIN) // 100)

    same, wider = (_find_sizes(reach, halve, exchange_cost, ratio) for ratio in (1, 2))
    return same, wider


def _find_sizes(
    reach: Reach,
    one: Callable[[PlannedReduction], Cost],
    other: Callable[[PlannedReduction], Cost],
    ratio: int,
) -> SizeRange:
    """The sizes for which ``one`` costs less than ``other``; ``sys.maxsize``: without end."""
    # It does so up to some size, or from some size on. The costs are nearly linear in bytes, so the
    # line between two sizes shows where they are equal.

    def compare(n: int) -> int:
        """By how many nanoseconds ``one`` costs more."""
        planned = PlannedReduction(reach, n, n, ElementWidth(1, ratio))
        return one(planned).nanoseconds - other(planned).nanoseconds

    at_none, at_many = compare(0), compare(_MANY)
    # A thousandth of the time is within the rounding to nanoseconds.
    if at_none < 0 and at_many - at_none <= -at_none * 1e-3:
        return 0, sys.maxsize
    if (at_none < 0) == (at_many < 0):
        return _NONE
    less, more = ((0, at_none), (_MANY, at_many))[:: 1 if at_none < 0 else -1]
    for _ in range(_TRIES):
        end = less[0] + (more[0] - less[0]) * less[1] // (less[1] - more[1])
        if (by := compare(end)) <= 0:
            return (0, end) if at_none < 0 else (end, sys.maxsize)
        more = end, by
    return _NONE
