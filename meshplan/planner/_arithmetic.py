"""Sums of rows in the order of a group, every addition rounded to the dtype; and their bits.

A row has the elements of one rank. numpy has no bfloat16: such a row holds float32 values whose
lower 16 bits are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from meshplan._dtypes import name_of
from meshplan.errors import PlacementError, PolicyError
from meshplan.layout import Integers, Layout
from meshplan.planner import nccl_order as order
from meshplan.planner._problem import check_reach
from meshplan.planner._siblings import ALGORITHMS, Algorithm, Siblings
from meshplan.topology import Topology

if TYPE_CHECKING:
    import torch

SIMULATED = ("float32", "bfloat16", "float16", "float64")
"""Names of the dtypes that are simulated."""
MAX_MEMBERS = 1 << 14
# Rows that are added under one algorithm, each some microseconds of Python; and elements.
_MAX_ROWS = 1 << 15
_MAX_ELEMENTS = 1 << 23

Row: TypeAlias = npt.NDArray[Any]
"""Elements of one rank; of ``bfloat16`` as float32."""

Piece = tuple[int, int, int]
"""Elements from, elements to, and the ring chunk they belong to; as of `ring_chunks`."""


def predict_divergence(
    layout: Layout,
    axes: Sequence[int | str],
    along: Sequence[int | str],
    topology: Topology,
    *,
    numel: int = 4096,
    dtype: torch.dtype | str = "float32",
    sort_ranks: bool = True,
) -> dict[Algorithm, float]:
    """The largest share of elements in which two siblings with the same inputs along ``along``
    differ in bits, for each algorithm: 0 if all add in one order. ``numel`` is the most elements,
    spread evenly over a large message of N(0, 1), the same draws in each call; ``sort_ranks`` is as
    in `hazards`. Empty if the nodes are unknown, or for groups of more than ``MAX_MEMBERS`` ranks.
    Raises ``AxisNameError``, ``PlacementError`` for an axis in both ``axes`` and ``along``,
    ``PolicyError`` for a dtype that is not simulated or ``numel`` below 1, and ``TopologyError``.
    """
    # Every element is added as in the first channel. In each set of siblings the first is compared
    # with one sibling of each other node placement. The work grows with the size of a group, not of
    # the mesh: groups of thousands of ranks are compared in fewer elements and placements.
    reduced, others = layout.axis_indices(axes), layout.axis_indices(along)
    both = [layout.axes[i] for i in reduced if i in others]
    if both:
        raise PlacementError(
            f"axis {both[0]} is in both axes and along; siblings differ along axes that are not "
            "reduced"
        )
    name = name_of(dtype)
    if name not in SIMULATED or numel < 1:
        raise PolicyError(
            f"use 1 element or more of {', '.join(SIMULATED)}, got numel={numel} of {dtype}"
        )
    check_reach(topology, layout)
    size = math.prod(layout.sizes[i] for i in reduced)
    if not topology.known or size > MAX_MEMBERS:
        return {}
    siblings = Siblings(layout, reduced, topology, sort_ranks=sort_ranks, channels=1)
    pairs = _pair_patterns(siblings, others) if size > 2 else []
    # Limit the work: keep the pairs of the first patterns, at least two patterns.
    allowed = max(_MAX_ROWS // size, 2)
    chosen = list(dict.fromkeys(pattern for pair in pairs for pattern in pair))[:allowed]
    pairs = [pair for pair in pairs if set(pair) <= set(chosen)]
    numel = min(numel, max(_MAX_ELEMENTS // (size * max(len(chosen), 1)), 64))
    random = np.random.RandomState()
    rows = [draw_row(0, number, numel, name, random) for number in range(size if pairs else 0)]
    found: dict[Algorithm, float] = {}
    for algorithm in ALGORITHMS:
        adder = Adder(layout, reduced, siblings, algorithm, spread_elements(numel, size), name)
        sums = {
            pattern: adder.add(rows, int((siblings.pattern == pattern).argmax()))
            for pattern in chosen
        }
        found[algorithm] = max(
            (measure_share(sums[a], sums[b], name) for a, b in pairs), default=0.0
        )
    return found


def draw_row(
    seed: int, number: int, numel: int, dtype: str, random: np.random.RandomState | None = None
) -> Row:
    """Row ``number`` of the inputs: N(0, 1), ``numel`` elements of ``dtype``."""
    # ``random`` is seeded again: another generator would cost ten times as much as a short row.
    # The only generator with the same numbers in all versions of numpy. Its seed has 32 bits.
    random = np.random.RandomState() if random is None else random
    random.seed((seed * 0x9E3779B1 + number) % (1 << 32))
    return _round(random.standard_normal(numel), dtype)


def scale(row: Row, factor: float, dtype: str) -> Row:
    """``row`` times ``factor``, both of ``dtype``."""
    return _round(row * _round(np.float64(factor), dtype), dtype)


def spread_elements(numel: int, size: int) -> list[Piece]:
    """``numel`` elements, taken evenly from a message in which all ``size`` chunks are equal."""
    count = min(numel, size)
    return [(i * numel // count, (i + 1) * numel // count, i * size // count) for i in range(count)]


class Adder:
    """Adds rows of ``dtype`` in the order of a group of ``siblings``, which are over ``axes``.

    ``pieces`` are the chunks of a ring; a tree ignores them.
    """

    def __init__(
        self,
        layout: Layout,
        axes: tuple[int, ...],
        siblings: Siblings,
        algorithm: Algorithm,
        pieces: Sequence[Piece],
        dtype: str,
    ) -> None:
        self._groups = layout.siblings(axes)
        self._siblings = siblings
        self._algorithm = algorithm
        self._pieces = pieces
        self._dtype = dtype
        self._trees: dict[int, order.Tree] = {}

    def add(self, rows: Sequence[Row], group: int) -> Row:
        """The sum in ``group`` (a position in ``siblings``) of ``rows``, by mesh coordinate."""
        if self._algorithm == "ring":
            return self._add_along_ring(rows, self._siblings.ring(group))
        return order.fold(self._find_tree(group), rows.__getitem__, self._sum)

    def _sum(self, one: Row, other: Row) -> Row:
        return _round(one + other, self._dtype)

    def _add_along_ring(self, rows: Sequence[Row], ring: Sequence[int]) -> Row:
        # Permute each chunk by its own sequence, so that row j has the j-th summand of every chunk.
        # Then one addition of whole rows is one hop of all chunks.
        along = np.stack([rows[place] for place in ring])
        for start, stop, chunk in self._pieces:
            sequence = order.ring_sequence(range(len(ring)), chunk)
            along[:, start:stop] = along[sequence, start:stop]
        total: Row = along[0]
        for own in along[1:]:
            total = self._sum(total, own)
        return total

    def _find_tree(self, group: int) -> order.Tree:
        pattern = int(self._siblings.pattern[group])
        if pattern not in self._trees:
            places = {rank: place for place, rank in enumerate(self._groups[group].tolist())}
            tree = self._siblings.tree("tree", group, 0)
            self._trees[pattern] = order.relabel(tree, places.__getitem__)
        return self._trees[pattern]


def count_distinct(rows: Sequence[Row], dtype: str) -> int:
    """The number of different bit patterns among ``rows``."""
    return len({_view_bits(row, dtype).tobytes() for row in rows})


def measure_share(one: Row, other: Row, dtype: str) -> float:
    """The share of elements in which two rows have different bits."""
    return int((_view_bits(one, dtype) != _view_bits(other, dtype)).sum()) / one.size


def count_ulps(one: Row, other: Row, dtype: str) -> int:
    """The largest distance between two rows in units in the last place; 0 from -0.0 to 0.0."""
    return int(np.abs(_count_from_zero(one, dtype) - _count_from_zero(other, dtype)).max())


def _round(values: Any, dtype: str) -> Row:
    """Finite values in ``dtype``, to nearest even."""
    if dtype != "bfloat16":
        return np.asarray(values, dtype)
    wide = np.asarray(values, np.float32).view(np.uint32)
    # Add half a unit in the last kept place, less one bit if that place is even: ties to even.
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def _view_bits(row: Row, dtype: str) -> npt.NDArray[Any]:
    whole = row.view({2: np.int16, 4: np.int32, 8: np.int64}[row.dtype.itemsize])
    return whole >> 16 if dtype == "bfloat16" else whole


def _count_from_zero(row: Row, dtype: str) -> Integers:
    # Map sign and magnitude to an integer that counts the floats from zero.
    wide = _view_bits(row, dtype).astype(np.int64)
    width = 16 if dtype == "bfloat16" else 8 * row.dtype.itemsize
    found: Integers = np.where(wide < 0, -(1 << (width - 1)) - wide, wide)
    return found


def _pair_patterns(siblings: Siblings, along: Sequence[int]) -> list[tuple[int, int]]:
    """The pattern of the first sibling and another one in some set, each pair once."""
    patterns = siblings.pattern[siblings.sets(along)]
    count = int(patterns.max()) + 1
    # With return_index, np.unique does not import numpy.ma.
    pairs = np.unique(patterns[:, :1] * count + patterns, return_index=True)[0].tolist()
    return [(n // count, n % count) for n in pairs if n // count != n % count]
