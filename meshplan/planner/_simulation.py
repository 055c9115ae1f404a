"""The replicas after a sequence of reductions, if the backend adds in the order of the NCCL model.

Every rank's tensor is drawn, and added in the order of `nccl_order` with every addition rounded to
the dtype. Then the ranks that should hold one replica are compared by bits. A simulation shows a
possible result; it certifies nothing: NCCL has more channels, other algorithms and other orders.

Ranks that add the same inputs in the same order have the same sum. A first pass finds these ranks,
with a number in place of each tensor; then each sum is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshplan._dtypes import itemsize, name_of
from meshplan.errors import PlacementError, PolicyError, TopologyError
from meshplan.layout import Integers, Layout
from meshplan.planner import nccl_order as order
from meshplan.planner._arithmetic import (
    SIMULATED,
    Adder,
    Row,
    count_distinct,
    count_ulps,
    draw_row,
    measure_share,
    scale,
)
from meshplan.planner._problem import Problem, Spec, check_reach, check_steps
from meshplan.planner._siblings import ALGORITHMS, Algorithm, Siblings, find_distinct_rows
from meshplan.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.placement_types import Placement

MAX_BYTES = 1 << 30
# Elements of all inputs together, and rows that are added: some seconds each.
MAX_DRAWN = 1 << 27
MAX_ADDED = 1 << 18

_NOT_A_SUM = ("max", "min", "product")


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The result of one reduction.

    Attributes:
        axes: labels of the reduced axes.
        group_size: ranks in a group.
        groups: groups of the reduction.
        orders: different orders of additions among the groups.
        sums: number of computed sums, one for all groups with the same inputs and order.
    """

    axes: tuple[str, ...]
    group_size: int
    groups: int
    orders: int
    sums: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The replicas after the last step.

    Attributes:
        algorithm, dtype, numel, seed: of the simulation; the dtype by name.
        replicas: different bit patterns among ranks that should hold one replica, the largest
            number if there are several such sets of ranks; 1 if all agree.
        differing: the largest share of elements in which a rank differs from the first rank of
            the mesh that should hold the same replica.
        ulps: the largest of these differences, in units in the last place.
        per_step: one for each step, without steps over axes of size 1.
    """

    algorithm: Algorithm
    dtype: str
    numel: int
    seed: int
    replicas: int
    differing: float
    ulps: int
    per_step: tuple[SimulatedStep, ...]


def simulate(
    layout: Layout,
    topology: Topology,
    steps: Sequence[Sequence[int | str]],
    *,
    algorithm: Algorithm,
    dtype: torch.dtype | str = "float32",
    numel: int = 4096,
    seed: int = 0,
    sort_ranks: bool = True,
    src: Sequence[Placement | str] | None = None,
) -> Simulation:
    """Run all-reduces sequentially in the order of the NCCL model, on one channel.

    Args:
        layout: the mesh.
        topology: rank placement; its nodes must be known.
        steps: the axes of each all-reduce, in the order of execution; several axes are one
            flattened all-reduce.
        algorithm: ``ring`` or ``tree``.
        dtype: float32, bfloat16, float16 or float64; torch's, or a name.
        numel: elements of the message. The order in a ring depends on the position of an element.
        seed: of the inputs, which are N(0, 1) and do not depend on the order of the steps.
        sort_ranks: as in `hazards`.
        src: the placement on each axis before the first step: ``P`` or ``P(avg)`` on every axis
            that is reduced. Ranks along ``R`` hold equal inputs and should agree; along any other
            axis that no step names, every rank has inputs and a result of its own. By default, the
            axes that no step names are ``R``.

    Raises:
        TopologyError: the nodes are unknown, or the layout has a rank that the topology lacks.
        PlacementError: placements that do not fit the mesh, an axis that is not partial or is
            named twice, a reduction that is neither a sum nor an average.
        AxisNameError: ``steps`` names an axis that the mesh does not have.
        PolicyError: an unknown algorithm or dtype, or more elements than ``MAX_BYTES`` and
            ``MAX_DRAWN`` allow; the message has the number that can be simulated.
    """
    if algorithm not in ALGORITHMS:
        known = " or ".join(ALGORITHMS)
        raise PolicyError(f"unknown algorithm {algorithm!r}; use {known}")
    name = name_of(dtype)
    if name not in SIMULATED:
        raise PolicyError(f"dtype {dtype} cannot be simulated; use one of {', '.join(SIMULATED)}")
    if numel < 1 or seed < 0:
        raise PolicyError(
            f"numel must be at least 1 and seed at least 0, got numel={numel} "
            f"and seed={seed}; use, for example, numel=4096, seed=0"
        )
    check_reach(topology, layout)
    if not topology.known:
        raise TopologyError(
            "a simulation needs the node of every rank, and none is known; "
            f"use, for example, Topology.uniform({topology.world_size}, node_size=8)"
        )
    problem = _make_problem(layout, steps, src)
    sequence = check_steps(problem, steps)
    stages = _Stages(problem, topology, algorithm, sort_ranks, name)
    for axes in sequence:
        stages.append(axes)
    stages.check_size(numel)
    replicas, differing, distance = stages.compare(stages.compute_sums(numel, seed))
    per_step = tuple(stage.summary for stage in stages.stages)
    return Simulation(algorithm, name, numel, seed, replicas, differing, distance, per_step)


def _make_problem(
    layout: Layout, steps: Sequence[Sequence[int | str]], src: Sequence[Placement | str] | None
) -> Problem:
    named = {layout.axis_index(axis) for step in steps for axis in step}
    if src is None:
        src = ["P" if i in named else "R" for i in range(len(layout.sizes))]
    before = tuple(Spec.of(placement) for placement in src)
    for spec in before:
        if spec.kind in ("norm", "opaque") or spec.op in _NOT_A_SUM:
            raise PlacementError(f"{spec.text} cannot be simulated, only sums; use P or P(avg)")
    finished = Spec.of("R")
    after = tuple(
        finished if i in named and spec.kind == "partial" else spec for i, spec in enumerate(before)
    )
    return Problem(layout, before, after)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One step. Sums are numbered, as the rows that they add."""

    summary: SimulatedStep
    axes: tuple[int, ...]
    siblings: Siblings
    # Numbers of the rows that each sum adds by mesh coordinate, int64 [sums, group size].
    inputs: Integers
    groups: tuple[int, ...]  # a group that computes it, for each sum
    factor: float | None  # multiplies rows before an average


class _Stages:
    """The steps, the number of different inputs (``leaves``), and the row of each rank after the
    last step: ``held`` has its number, int64 of the shape of the mesh.
    """

    def __init__(
        self,
        problem: Problem,
        topology: Topology,
        algorithm: Algorithm,
        sort_ranks: bool,
        dtype: str,
    ) -> None:
        self.problem = problem
        self.layout = problem.layout
        self.topology = topology
        self.algorithm = algorithm
        self.sort_ranks = sort_ranks
        self.dtype = dtype
        self.stages: list[_Stage] = []
        own = [
            size if spec.kind != "replicate" else 1
            for size, spec in zip(self.layout.sizes, problem.src, strict=True)
        ]
        self.leaves = math.prod(own)
        self._check_rows(self.leaves)
        self.held = np.broadcast_to(np.arange(self.leaves).reshape(own), self.layout.sizes)

    def append(self, axes: tuple[int, ...]) -> None:
        """Add a step."""
        sizes, labels = self.layout.sizes, self.layout.axes
        siblings = Siblings(
            self.layout, axes, self.topology, sort_ranks=self.sort_ranks, channels=1
        )
        rows = self.held.transpose(*siblings.outer, *axes).reshape(-1, siblings.size)
        orders = siblings.associations(self.algorithm, np.arange(len(rows)))
        number, first = find_distinct_rows(np.concatenate([rows, orders[:, None]], axis=1))
        averaged = math.prod(sizes[i] for i in axes if self.problem.src[i].op == "avg")
        summary = SimulatedStep(
            axes=tuple(labels[i] for i in axes),
            group_size=siblings.size,
            groups=len(rows),
            orders=len(set(orders.tolist())),
            sums=len(first),
        )
        factor = 1 / averaged if averaged > 1 else None
        groups = tuple(first.tolist())
        self.stages.append(_Stage(summary, axes, siblings, rows[first], groups, factor))
        shared = [1 if i in axes else size for i, size in enumerate(sizes)]
        self.held = np.broadcast_to(number.reshape(shared), sizes)

    def check_size(self, numel: int) -> None:
        """Refuse a simulation that would take too much memory, or too long: ``PolicyError``."""
        kept, most = 0, 1
        for stage in self.stages:
            # Of one group: its rows, the same times a factor, the same in ring order.
            most = max(most, kept + stage.summary.sums + 3 * stage.summary.group_size)
            kept = stage.summary.sums
        # And some rows of float64 or int64 while drawing and comparing.
        room = MAX_BYTES // (most * itemsize(self.dtype) + 40)
        fit = min(room, MAX_DRAWN // self.leaves)
        self._check_rows(sum(stage.inputs.size for stage in self.stages))
        if numel > fit:
            raise PolicyError(
                f"{self.leaves} inputs of {numel} elements of {self.dtype} exceed the "
                f"limit ({MAX_DRAWN} elements, {MAX_BYTES >> 20} MiB at once); "
                f"use numel={fit} or less"
            )

    def _check_rows(self, rows: int) -> None:
        if rows > MAX_ADDED:
            raise PolicyError(
                f"{self.layout} needs {rows} additions, the limit is {MAX_ADDED}; "
                "simulate a smaller mesh on nodes of the same size"
            )

    def compute_sums(self, numel: int, seed: int) -> list[Row]:
        """The rows after the last step, by their numbers; none without a step."""
        rows: list[Row] = []

        def find_row(number: int, step: int) -> Row:
            return rows[number] if step else draw_row(seed, number, numel, self.dtype)

        for step, stage in enumerate(self.stages):
            pieces = order.ring_chunks(numel, stage.siblings.size, itemsize(self.dtype))
            adder = Adder(
                self.layout, stage.axes, stage.siblings, self.algorithm, pieces, self.dtype
            )
            found: dict[int, Row] = {}
            inputs, last = list[Row](), list[int]()
            # In the order of their inputs, so that inputs are drawn once.
            for number in stage.inputs[:, 0].argsort(kind="stable").tolist():
                numbers = stage.inputs[number].tolist()
                if numbers != last:
                    inputs, last = [find_row(one, step) for one in numbers], numbers
                    if stage.factor is not None:
                        inputs = [scale(one, stage.factor, self.dtype) for one in inputs]
                found[number] = adder.add(inputs, stage.groups[number])
            rows = [found[number] for number in range(len(found))]
        return rows

    def compare(self, rows: Sequence[Row]) -> tuple[int, float, int]:
        """Replicas, differing share and ulps, as in `Simulation`."""
        problem, axes = self.problem, range(len(self.layout.sizes))
        agree = [i for i in axes if problem.dst[i].kind == "replicate"]
        apart = [i for i in axes if i not in agree]
        width = math.prod(self.layout.sizes[i] for i in agree)
        sets = self.held.transpose(*apart, *agree).reshape(-1, width)
        replicas, differing, distance = 1, 0.0, 0
        for numbers in sets[(sets != sets[:, :1]).any(axis=1)]:
            first, *others = (rows[number] for number in dict.fromkeys(numbers.tolist()))
            replicas = max(replicas, count_distinct([first, *others], self.dtype))
            differing = max(
                differing, *(measure_share(first, other, self.dtype) for other in others)
            )
            distance = max(distance, *(count_ulps(first, other, self.dtype) for other in others))
        return replicas, differing, distance
