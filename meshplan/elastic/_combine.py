"""Sums in the contract's tree over all micro-batches of a step, by a binary counter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor

from meshplan.contract import Contract
from meshplan.definition import refuse_flushed_subnormals
from meshplan.kernel import combine_leaves


class TreeSum:
    """The sums of aligned subtrees of the contract's tree, which come in order.

    At most ``log2(n) + 1`` sums over n leaves are kept, the new one included: a subtree waits until
    a neighbour of its size is there, like the digits of a binary counter. If ``start`` is not 0,
    the tree is the part of another one from that leaf on.
    """

    def __init__(self, contract: Contract, start: int = 0) -> None:
        self._contract, self._end = contract, start
        # The first leaf, the number of leaves, and the sum.
        self._kept: list[tuple[int, int, Tensor]] = []

    def add(self, part: Tensor, size: int = 1) -> None:
        """Add the sum of the next ``size`` leaves, a power of two that divides the number of the
        first one. It is copied, as its memory may be that of a message.
        """
        refuse_flushed_subnormals(part)
        start, self._end, added = self._end, self._end + size, part
        while self._kept and self._kept[-1][1] == size and self._kept[-1][0] % (2 * size) == 0:
            start, _, left = self._kept.pop()
            added, size = self._node(left, added), 2 * size
        self._kept.append((start, size, part.clone() if added is part else added))

    def take_blocks(self) -> list[tuple[int, Tensor]]:
        """The largest aligned subtrees, in order, with their sizes; none are left then."""
        found, self._kept = [(size, total) for _, size, total in self._kept], []
        return found

    def take(self) -> Tensor:
        """The sum of all subtrees, neither divided nor rounded; none are left then."""
        *blocks, (_, total) = self.take_blocks()
        # The tree of n leaves splits after the largest power of two, so the last ones come first.
        for _, left in reversed(blocks):
            total = self._node(left, total)
        return total

    def _node(self, left: Tensor, right: Tensor) -> Tensor:
        if self._contract.rounding == "node":
            return combine_leaves([left, right], "sum", (2,), self._contract)
        return left.add_(right)


def block_sizes(start: int, count: int) -> list[int]:
    """The sizes of ``TreeSum.take_blocks`` after so many leaves from ``start`` on."""
    sizes, end = [], start + count
    while start < end:
        # The largest power of two that divides the start, if so many are left.
        aligned, left = start & -start or end, end - start
        sizes.append(1 << min(aligned, left).bit_length() - 1)
        start += sizes[-1]
    return sizes


def exact_sum(numbers: Sequence[float]) -> float:
    """The sum of numbers, rounded once; infinite if it exceeds float64."""
    others = [one for one in numbers if not math.isfinite(one)]
    if others:
        return sum(others)
    total = sum(map(Fraction, numbers), Fraction())
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
