"""Executes a plan over arrays of all ranks.

An independent reading of DTensor's placements: it asserts what a real executor relies on, and knows
nothing of process groups. Steps add by the definition of the contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from meshplan.definition import combine_leaves, finish_partials, reduce_leaves
from meshplan.planner import Plan, Step

Array = np.ndarray[Any, Any]


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
    rows = [torch.from_numpy(leaf.copy()) for leaf in leaves]
    op, contract, divisor = step.op, step.contract, step.divisor if step.op == "avg" else None
    assert op is not None
    assert contract is not None
    if step.inner == 1:
        return reduce_leaves(rows, op, step.sizes, contract, divisor=divisor).numpy()
    blocks = [rows[i : i + step.inner] for i in range(0, len(rows), step.inner)]
    partials = [combine_leaves(block, op, step.inner_sizes, contract) for block in blocks]
    how = op, step.outer_sizes, contract, rows[0].dtype
    return finish_partials(partials, *how, divisor=divisor).numpy()


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
