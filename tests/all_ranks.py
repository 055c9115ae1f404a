"""Executes a plan over numpy arrays of all ranks, without torch and without meshplan's arithmetic.

An independent reading of the contract and of DTensor's placements: it asserts what a real executor
relies on, and knows nothing of process groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from meshplan.contract import Contract
from meshplan.planner import Plan, Step

Array = np.ndarray[Any, Any]
Cut = tuple[int, int]

NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "float64": 0x7FF8000000000000}


def bits(array: Array) -> Array:
    """The array as integers of its width."""
    return np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}")


def split_part(array: Array, dim: int, parts: int, index: int) -> Array:
    """Part ``index`` of ``parts``, as ``torch.chunk`` makes them, empty ones at the end."""
    width = -(-array.shape[dim] // parts)
    chosen = [slice(None)] * array.ndim
    chosen[dim] = slice(min(index * width, array.shape[dim]), (index + 1) * width)
    return array[tuple(chosen)]


def fold_step(leaves: Sequence[Array], step: Step) -> Array:
    """The step's contract over ``leaves``; in two stages where the step is hierarchical."""
    dtype, contract = leaves[0].dtype, step.contract
    assert contract is not None
    wide = _accumulator(dtype, contract)
    assert step.op is not None
    if step.op in ("max", "min"):
        wide = dtype
    node = _node(step.op, dtype, wide, contract)
    with np.errstate(all="ignore"):
        rows = [leaf.astype(wide) for leaf in leaves]
        if contract.order == "exact" and step.op in ("sum", "avg") and wide.kind == "f":
            total = np.array(
                [_exact_sum(column, wide) for column in np.stack(rows).reshape(len(rows), -1).T],
                dtype=wide,
            )
        elif step.inner > 1:
            blocks = [rows[i : i + step.inner] for i in range(0, len(rows), step.inner)]
            partials = [_fold(block, step.inner_sizes, contract, node) for block in blocks]
            total = _fold(partials, step.outer_sizes, contract, node)
        else:
            total = _fold(rows, step.sizes, contract, node)
        if step.op == "avg":
            assert step.divisor is not None
            total = total / wide.type(step.divisor)
        out: Array = np.array(total, ndmin=1).astype(dtype).reshape(-1)
    if dtype.kind == "f":
        bits(out)[np.isnan(out)] = NAN[dtype.name]
    return out.reshape(leaves[0].shape)


def _accumulator(dtype: np.dtype[Any], contract: Contract) -> np.dtype[Any]:
    if dtype == np.float16:
        return np.dtype(np.float32)
    if dtype == np.float32 and contract.accumulate == "float64":
        return np.dtype(np.float64)
    return dtype


def _node(
    op: str, dtype: np.dtype[Any], wide: np.dtype[Any], contract: Contract
) -> Callable[[Array, Array], Array]:
    if op in ("max", "min"):
        return lambda a, b: _extremum(op, a, b)
    combine = np.multiply if op == "product" else np.add

    def node(a: Array, b: Array) -> Array:
        value: Array = combine(a, b)
        return value.astype(dtype).astype(wide) if contract.rounding == "node" else value

    return node


def _exact_sum(column: Array, dtype: np.dtype[Any]) -> Any:
    """The sum of rationals, rounded once to nearest even."""
    special = column[~np.isfinite(column)]
    if special.size:
        return special.sum()
    if not column.any():
        return dtype.type(-0.0 if np.signbit(column).all() else 0.0)
    total = sum(map(Fraction, column.tolist()), Fraction())
    # Infinity stands for the number that would follow the largest one.
    above = 2 * Fraction(2) ** (np.finfo(dtype).maxexp - 1)
    try:
        near = dtype.type(float(total))
    except OverflowError:
        near = dtype.type(math.copysign(math.inf, total))

    def distance(number: Any) -> tuple[Fraction, int]:
        value = Fraction(float(number)) if np.isfinite(number) else above * int(np.sign(number))
        return abs(value - total), int(bits(np.array([number]))[0] & 1)

    return min(
        (near, *(np.nextafter(near, dtype.type(end)) for end in (-np.inf, np.inf))), key=distance
    )


def _extremum(op: str, a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.maximum(a, b) if op == "max" else np.minimum(a, b)
    # The sign of zero decides between zeros; NaN wins.
    less = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
    found = np.where(less, b, a) if op == "max" else np.where(less, a, b)
    return np.where(np.isnan(a), a, np.where(np.isnan(b), b, found))


def _fold(
    rows: Sequence[Array],
    sizes: Sequence[int],
    contract: Contract,
    node: Callable[[Array, Array], Array],
) -> Array:
    if contract.order == "rank":
        total = rows[0]
        for row in rows[1:]:
            total = node(total, row)
        return total
    # Axis by axis, the last one first.
    values = list(rows)
    for size in reversed(sizes):
        values = [_tree(values[i : i + size], node) for i in range(0, len(values), size)]
    (total,) = values
    return total


def _tree(rows: Sequence[Array], node: Callable[[Array, Array], Array]) -> Array:
    if len(rows) == 1:
        return rows[0]
    split = 1
    while 2 * split < len(rows):
        split *= 2
    return node(_tree(rows[:split], node), _tree(rows[split:], node))


class AllRanks:
    """The local arrays of all ranks of a mesh, by coordinate, and the dim that each axis shards."""

    def __init__(self, plan: Plan, local: dict[tuple[int, ...], Array]) -> None:
        assert plan.ordered, plan
        self.sizes = plan.problem.layout.sizes
        self.local = local
        self.cuts: list[int | None] = [spec.dim for spec in plan.problem.src]

    def run(self, steps: Sequence[Step]) -> dict[tuple[int, ...], Array]:
        """All steps, one after the other."""
        for step in steps:
            if step.kind in ("all_reduce", "reduce_scatter"):
                self._reduce(step)
            else:
                self._move(step)
        return self.local

    def _group(self, where: tuple[int, ...], axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The coordinates that differ from ``where`` along ``axes`` only, row-major."""
        ranges = [range(n) if i in axes else (where[i],) for i, n in enumerate(self.sizes)]
        return list(itertools.product(*ranges))

    def _reduce(self, step: Step) -> None:
        found = {}
        for where in self.local:
            first, *others = members = self._group(where, step.axes)
            if where != first:
                continue
            leaves = [self.local[member] for member in members]
            assert len({leaf.shape for leaf in leaves}) == 1
            total = fold_step(leaves, step)
            found.update(dict.fromkeys([first, *others], total))
        for axis, dim in step.scatter:
            self._check_nesting(axis, dim)
            assert axis in step.axes
            self.cuts[axis] = dim
            found = {w: split_part(a, dim, self.sizes[axis], w[axis]) for w, a in found.items()}
        self.local = found

    def _move(self, step: Step) -> None:
        (axis,) = step.axes
        assert step.src is not None
        assert step.dst is not None
        if step.dst.kind == "partial":
            self.local = {w: a if w[axis] == 0 else np.zeros_like(a) for w, a in self.local.items()}
            return
        if self.sizes[axis] == 1:
            self.cuts[axis] = step.dst.dim
            return
        assert self.cuts[axis] == step.src.dim
        if step.src.dim is not None:
            self._check_nesting(axis, step.src.dim)
            self.local = {
                w: np.concatenate([self.local[m] for m in self._group(w, (axis,))], step.src.dim)
                for w in self.local
            }
        if step.dst.dim is not None:
            self._check_nesting(axis, step.dst.dim)
            dim = step.dst.dim
            self.local = {
                w: split_part(a, dim, self.sizes[axis], w[axis]) for w, a in self.local.items()
            }
        self.cuts[axis] = step.dst.dim

    def _check_nesting(self, axis: int, dim: int) -> None:
        inside = [self.cuts[i] for i in range(axis + 1, len(self.sizes)) if self.sizes[i] > 1]
        assert dim not in inside, f"axis {axis} cuts dim {dim} outside of a cut that is there"


def shard(whole: Array, dims: Sequence[int | None], sizes: Sequence[int], where: Any) -> Array:
    """The shard of the rank at ``where``, for placements that shard ``dims``."""
    for dim, size, index in zip(dims, sizes, where, strict=True):
        if dim is not None:
            whole = split_part(whole, dim, size, index)
    return whole


def coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All coordinates of a mesh, row-major."""
    return list(itertools.product(*map(range, sizes)))


def world(sizes: Sequence[int]) -> int:
    """Ranks in a mesh."""
    return math.prod(sizes)
