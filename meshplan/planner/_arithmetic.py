"""Sums of rows in the order of a group, every addition rounded to the dtype; and their bits.

A row is the tensor that one rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.layout import Layout
from meshplan.planner import _nccl_order as order
from meshplan.planner._siblings import Algorithm, Siblings

__all__ = ["INTEGERS", "Adder", "Piece", "different", "draw_row", "share", "spread", "ulps"]

INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}
"""The dtypes that are simulated, each with the integer of its size."""

Piece = tuple[int, int, int]
"""Elements from, elements to, and the ring chunk they belong to; as of `ring_chunks`."""


def draw_row(seed: int, number: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Row ``number`` of the inputs: N(0, 1), ``numel`` elements of ``dtype`` on the CPU."""
    # Drawn as float64, whose code in torch is the same on all CPUs; rounding to fewer bits hides
    # what mathematical libraries differ in. A generator looks at 32 bits of its seed.
    random = torch.Generator(device="cpu").manual_seed((seed * 0x9E3779B1 + number) % (1 << 32))
    return torch.randn(numel, generator=random, dtype=torch.float64, device="cpu").to(dtype)


def spread(numel: int, size: int) -> list[Piece]:
    """``numel`` elements, taken evenly from a message in which all ``size`` chunks are alike."""
    count = min(numel, size)
    return [(i * numel // count, (i + 1) * numel // count, i * size // count) for i in range(count)]


class Adder:
    """Adds the rows of a group as the group would.

    Args:
        layout, axes, siblings: the groups; ``siblings`` is over ``axes``.
        algorithm: what they follow.
        pieces: the chunks of a ring; a tree does not look at them.
    """

    def __init__(
        self,
        layout: Layout,
        axes: tuple[int, ...],
        siblings: Siblings,
        algorithm: Algorithm,
        pieces: Sequence[Piece],
    ) -> None:
        self._groups = layout.siblings(axes)
        self._siblings = siblings
        self._algorithm = algorithm
        self._pieces = pieces
        self._trees: dict[int, order.Tree] = {}

    def add(self, rows: Sequence[Tensor], group: int) -> Tensor:
        """The sum in ``group`` (a position in ``siblings``) of ``rows``, by mesh coordinate."""
        if self._algorithm == "ring":
            return self._along_ring(rows, self._siblings.ring(group))
        return order.fold(self._tree(group), rows.__getitem__, torch.add)

    def _along_ring(self, rows: Sequence[Tensor], ring: Sequence[int]) -> Tensor:
        along = torch.stack([rows[place] for place in ring])
        for start, stop, chunk in self._pieces:
            # A chunk starts behind the place of its own number: row j becomes what is added j-th.
            part = along[:, start:stop]
            part.copy_(part.roll(-(chunk + 1), 0))
        total = along[0].clone()
        for own in along[1:].unbind():
            torch.add(own, total, out=total)
        return total

    def _tree(self, group: int) -> order.Tree:
        pattern = int(self._siblings.pattern[group])
        if pattern not in self._trees:
            places = {rank: place for place, rank in enumerate(self._groups[group].tolist())}

            def leaf(rank: int) -> order.Tree:
                return places[rank]

            def join(left: order.Tree, right: order.Tree) -> order.Tree:
                return left, right

            self._trees[pattern] = order.fold(self._siblings.tree("tree", group, 0), leaf, join)
        return self._trees[pattern]


def different(rows: Sequence[Tensor]) -> int:
    """How many different bit patterns there are among ``rows``."""
    # A product with odd weights keeps every bit; that equal sums have equal rows is checked.
    weights = torch.arange(1, 2 * rows[0].numel(), 2, device="cpu")
    found: dict[int, list[Tensor]] = {}
    for row in rows:
        pattern = row.view(INTEGERS[row.dtype])
        alike = found.setdefault(int((pattern * weights).sum()), [])
        if not any(torch.equal(pattern, other) for other in alike):
            alike.append(pattern)
    return sum(map(len, found.values()))


def share(one: Tensor, other: Tensor) -> float:
    """The share of elements in which two rows have different bits."""
    integer = INTEGERS[one.dtype]
    return int((one.view(integer) != other.view(integer)).sum()) / one.numel()


def ulps(one: Tensor, other: Tensor) -> int:
    """The largest distance between two rows in units in the last place; 0 from -0.0 to 0.0."""
    return int((_ordinal(one) - _ordinal(other)).abs().max())


def _ordinal(row: Tensor) -> Tensor:
    # Sign and magnitude as an integer that counts the floats from zero.
    pattern = row.view(INTEGERS[row.dtype])
    lowest = torch.iinfo(pattern.dtype).min
    wide = pattern.to(torch.int64)
    return torch.where(wide < 0, lowest - wide, wide)
