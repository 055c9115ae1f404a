"""The contract's tree over absolute positions, cut anywhere.

The tree ``T(n)`` of ``meshplan.contract`` splits n leaves after the largest power of two smaller
than n. Each of its subtrees lies on a block of positions ``[i * 2^j, (i + 1) * 2^j)``, cut off at
n. So whoever holds the leaves ``[start, stop)`` can reduce the largest such blocks inside its own
range, and the values of these blocks (at most ``2 * log2(n)`` of them) are all that others need:
joined at their positions they give the bits of ``T(n)``, whatever the cuts were.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from meshplan.errors import ContractError

__all__ = ["Block", "covering", "tree_value", "range_blocks", "tensor_blocks", "joined"]

Block = tuple[int, int]
"""Positions ``(start, stop)`` with ``stop`` excluded."""

_T = TypeVar("_T")


def covering(start: int, stop: int) -> list[Block]:
    """The largest aligned blocks of a power of two that fill ``[start, stop)``, in order.

    A block is ``[i * 2^j, (i + 1) * 2^j)``. An empty range has none.

    Raises:
        ContractError: ``start`` is negative, or ``stop`` smaller than ``start``.
    """
    _check_range(start, stop)
    blocks = []
    while start < stop:
        fits = 1 << (stop - start).bit_length() - 1
        size = min(fits, start & -start) if start else fits
        blocks.append((start, start + size))
        start += size
    return blocks


def tree_value(leaves: Sequence[_T], combine: Callable[[_T, _T], _T]) -> _T:
    """``T(n)`` of all ``leaves``: neighbours are paired, an odd one out is carried up.

    Raises:
        ContractError: no leaves.
    """
    if not leaves:
        raise ContractError("a tree needs leaves, found none; give at least one leaf")
    level = list(leaves)
    while len(level) > 1:
        pairs = [combine(a, b) for a, b in zip(level[0::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def range_blocks(
    leaves: Sequence[_T], start: int, combine: Callable[[_T, _T], _T]
) -> list[tuple[Block, _T]]:
    """The blocks of ``covering`` with their subtree values; the first leaf is that of ``start``.

    Raises:
        ContractError: ``start`` is negative.
    """
    return [
        ((first, last), tree_value(leaves[first - start : last - start], combine))
        for first, last in covering(start, start + len(leaves))
    ]


def tensor_blocks(values: Tensor, start: int) -> list[tuple[Block, Tensor]]:
    """``range_blocks`` of sums along the last dim of a tensor, one addition of tensors per level.

    Args:
        values: [..., length], the leaves ``start`` to ``start + length - 1``; any dtype with an
            addition, in which all additions are done.
        start: position of the first.

    Returns:
        For each block of ``covering(start, start + length)``, in order, its sum [...].

    Raises:
        ContractError: ``start`` is negative, or ``values`` has no dim.
    """
    if values.dim() == 0:
        raise ContractError("a tensor of shape () has no last dim to sum over; give it one")
    _check_range(start, start + values.shape[-1])
    left: list[tuple[Block, Tensor]] = []
    right: list[tuple[Block, Tensor]] = []
    size, index = 1, start
    # At each level `values` are the sums of the blocks index, index + 1, ... of that size. A block
    # whose sibling lies outside the range cannot grow any more.
    while values.shape[-1]:
        if index % 2:
            left.append((_block(index, size), values[..., 0]))
            values, index = values[..., 1:], index + 1
        if values.shape[-1] % 2:
            last = index + values.shape[-1] - 1
            right.append((_block(last, size), values[..., -1]))
            values = values[..., :-1]
        values = torch.add(values[..., 0::2], values[..., 1::2])
        size, index = size * 2, index // 2
    return left + right[::-1]


def joined(
    blocks: Mapping[Block, _T] | Iterable[tuple[Block, _T]],
    n: int,
    combine: Callable[[_T, _T], _T] = operator.add,
    *,
    skip_gaps: bool = False,
) -> _T:
    """The value of ``T(n)`` from the values of blocks that fill the positions 0 to n - 1.

    Args:
        blocks: ``((start, stop), value)`` or a mapping of the same, in any order. Blocks are those
            of ``covering``: aligned, of a power of two.
        n: number of leaves.
        combine: of two values, the left one first.
        skip_gaps: positions that no block holds are left out: a node with one empty half has the
            value of its other half.

    Returns:
        The bits of ``tree_value`` over all n leaves.

    Raises:
        ContractError: a block that is not aligned, or not inside 0 to n - 1; blocks that overlap;
            positions that no block holds (unless ``skip_gaps``, and then: no blocks at all).
    """
    items = blocks.items() if isinstance(blocks, Mapping) else blocks
    ordered: list[tuple[Block, _T]] = sorted(items, key=lambda item: item[0])
    _check_blocks([block for block, _ in ordered], n, skip_gaps)
    starts = [start for (start, _), _ in ordered]

    def node(low: int, high: int, start: int, size: int) -> _T:
        """The value of ``[start, start + size)``, which holds ``ordered[low:high]``, not none."""
        while high - low > 1:
            size //= 2
            middle = bisect_left(starts, start + size, low, high)
            if low < middle < high:
                left = node(low, middle, start, size)
                return combine(left, node(middle, high, start + size, size))
            if middle == low:
                start += size
        return ordered[low][1]

    return node(0, len(ordered), 0, 1 << (n - 1).bit_length())


def _check_range(start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise ContractError(
            f"positions {start} to {stop} are no range; write 0 <= start <= stop, stop excluded"
        )


def _check_blocks(blocks: Sequence[Block], n: int, skip_gaps: bool) -> None:
    if not blocks:
        raise ContractError(f"no blocks for {n} positions; give the blocks of at least one range")
    end = 0
    for start, stop in blocks:
        size = stop - start
        if size < 1 or size & (size - 1) or start % size or start < 0:
            raise ContractError(
                f"[{start}, {stop}) is no subtree: its size must be a power of two and divide its "
                "start; give the blocks of covering()"
            )
        if stop > n:
            raise ContractError(f"block [{start}, {stop}) ends after the last of {n} positions")
        if start < end:
            raise ContractError(
                f"block [{start}, {stop}) overlaps one that ends at {end}; give each position once"
            )
        if start > end and not skip_gaps:
            raise ContractError(f"no block holds the positions {end} to {start - 1} of {n}")
        end = stop
    if end < n and not skip_gaps:
        raise ContractError(f"no block holds the positions {end} to {n - 1} of {n}")


def _block(index: int, size: int) -> Block:
    return (index * size, (index + 1) * size)
