"""The contract's tree over absolute positions, split anywhere.

Each subtree of the tree ``T(n)`` of ``meshplan.contract`` covers a block of positions ``[i * 2^j,
(i + 1) * 2^j)``, truncated at n. So the owner of the leaves ``[start, stop)`` reduces the largest
such blocks inside its own range, at most ``2 * log2(n)``, whose values are all that others need:
joined at their positions they have the bits of ``T(n)``, for any ranges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from meshplan.errors import ContractError

LeafRange = tuple[int, int]
"""Positions ``(start, stop)`` of leaves, with ``stop`` excluded."""

_T = TypeVar("_T")


def sum_blocks(values: Tensor, start: int) -> list[tuple[LeafRange, Tensor]]:
    """Sums along the last dim for each block of the range, one addition of tensors per level.
    ``values``: [..., length]. The blocks are those of ``cover_range(start, start + length)``.
    """
    left: list[tuple[LeafRange, Tensor]] = []
    right: list[tuple[LeafRange, Tensor]] = []
    size, index = 1, start
    # At each level `values` are the sums of the blocks index, index + 1, ... of that size. A block
    # whose sibling is outside the range cannot grow any more.
    while values.shape[-1]:
        if index % 2:
            left.append(((index * size, (index + 1) * size), values[..., 0]))
            values, index = values[..., 1:], index + 1
        if values.shape[-1] % 2:
            last = index + values.shape[-1] - 1
            right.append(((last * size, (last + 1) * size), values[..., -1]))
            values = values[..., :-1]
        values = torch.add(values[..., 0::2], values[..., 1::2])
        size, index = size * 2, index // 2
    return left + right[::-1]


def join_blocks(
    blocks: Iterable[tuple[LeafRange, _T]],
    n: int,
    combine: Callable[[_T, _T], _T],
    *,
    skip_gaps: bool = False,
) -> _T:
    """The value of ``T(n)`` from the values of blocks that fill the positions 0 to n - 1.
    With ``skip_gaps`` a node with one empty half has the value of its other half.
    """
    # A generator is read once. Sorted, the blocks of any subtree are neighbours.
    ordered = sorted(blocks, key=lambda item: item[0])
    _check_blocks([block for block, _ in ordered], n, skip_gaps)
    starts = [start for (start, _), _ in ordered]

    def node(low: int, high: int, start: int, size: int) -> _T:
        """The value of ``[start, start + size)``, which holds ``ordered[low:high]``, not empty."""
        # Descends to the smallest subtree with blocks in both halves: a half without blocks is a
        # gap, or beyond n, and its sibling's value passes up unchanged. So does a single block.
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


def _check_blocks(blocks: Sequence[LeafRange], n: int, skip_gaps: bool) -> None:
    if not blocks:
        raise ContractError(f"no blocks for {n} positions; pass the blocks of at least one range")
    end = 0
    for start, stop in blocks:
        size = stop - start
        if size < 1 or size & (size - 1) or start % size or not end <= start < stop <= n:
            raise ContractError(
                f"block [{start}, {stop}) is not a subtree of {n} positions, or overlaps the block "
                "before it; pass each block of cover_range() once"
            )
        if start > end and not skip_gaps:
            raise ContractError(f"no block holds the positions {end} to {start - 1} of {n}")
        end = stop
    if end < n and not skip_gaps:
        raise ContractError(f"no block holds the positions {end} to {n - 1} of {n}")
