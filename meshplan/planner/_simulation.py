"""The replicas after a sequence of reductions, if the backend adds in the order of the NCCL model.

Every rank's tensor is drawn, and added in the order of `nccl_order` with every addition rounded to
the dtype. Then the ranks that should hold one replica are compared by bits. It certifies nothing:
NCCL has more channels, other algorithms and other orders. A first pass, with a number in place of
each tensor, finds the ranks that add the same inputs in the same order; each sum is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from meshplan._dtypes import itemsize, name_of
from meshplan.errors import PlacementError, PolicyError, TopologyError
from meshplan.layout import Integers, Layout
from meshplan.planner import nccl_order as order
from meshplan.planner._hazards import (
    ALGORITHMS,
    Algorithm,
    Siblings,
    find_distinct_rows,
)
from meshplan.planner._path_costs import Cost
from meshplan.planner._problem import Problem, Spec, check_reach, check_steps
from meshplan.topology import Link, Links, Topology

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.placement_types import Placement

    from meshplan.planner._group_facts import GroupFacts


# Sums of rows in the order of a group, every addition rounded to the dtype; and their bits.
#
# A row has the elements of one rank. numpy has no bfloat16: such a row holds float32 values whose
# lower 16 bits are zero.

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
) -> dict[Algorithm, float]:
    """The largest share of elements of float32 in which two siblings with the same inputs along
    ``along`` differ in bits, for each algorithm: 0 if all add in one order. ``numel`` is the most
    elements, spread evenly over a large message of N(0, 1), the same draws in each call. Empty if
    the nodes are unknown, or for groups of more than ``MAX_MEMBERS`` ranks.
    """
    # Every element is added as in the first channel. In each set of siblings the first is compared
    # with one sibling of each other node placement. The work grows with the size of a group, not of
    # the mesh: groups of thousands of ranks are compared in fewer elements and placements.
    reduced, name = layout.axis_indices(axes), "float32"
    size = math.prod(layout.sizes[i] for i in reduced)
    if not topology.known or size > MAX_MEMBERS:
        return {}
    siblings = Siblings(layout, reduced, topology, channels=1)
    pairs = _pair_patterns(siblings, layout.axis_indices(along)) if size > 2 else []
    # Limit the work: keep the pairs of the first patterns, at least two patterns.
    allowed = max(_MAX_ROWS // size, 2)
    chosen = list(dict.fromkeys(pattern for pair in pairs for pattern in pair))[:allowed]
    pairs = [pair for pair in pairs if set(pair) <= set(chosen)]
    numel = min(numel, max(_MAX_ELEMENTS // (size * max(len(chosen), 1)), 64))
    random = np.random.RandomState()
    rows = [draw_row(0, number, numel, name, random) for number in range(size if pairs else 0)]
    found: dict[Algorithm, float] = {}
    pieces = spread_elements(numel, size)
    firsts = {pattern: int((siblings.pattern == pattern).argmax()) for pattern in chosen}
    for algorithm in ALGORITHMS:
        sums = {
            pattern: add_rows(siblings, algorithm, group, rows, pieces, name)
            for pattern, group in firsts.items()
        }
        found[algorithm] = max(
            (measure_share(sums[a], sums[b], name) for a, b in pairs), default=0.0
        )
    return found


def draw_row(
    seed: int,
    number: int,
    numel: int,
    dtype: str,
    random: np.random.RandomState | None = None,
) -> Row:
    # ``random`` is seeded again: another generator would cost ten times as much as a short row.
    # The only generator with the same numbers in all versions of numpy. Its seed has 32 bits.
    random = np.random.RandomState() if random is None else random
    random.seed((seed * 0x9E3779B1 + number) % (1 << 32))
    return _round(random.standard_normal(numel), dtype)


def spread_elements(numel: int, size: int) -> list[Piece]:
    """``numel`` elements, taken evenly from a message in which all ``size`` chunks are equal."""
    count = min(numel, size)
    return [(i * numel // count, (i + 1) * numel // count, i * size // count) for i in range(count)]


def add_rows(
    siblings: Siblings,
    algorithm: Algorithm,
    group: int,
    rows: Sequence[Row],
    pieces: Sequence[Piece],
    dtype: str,
) -> Row:
    """Add ``rows``, by mesh coordinate, in the order of a group. ``pieces`` are the chunks of a
    ring; a tree ignores them.
    """

    def add(one: Row, other: Row) -> Row:
        return _round(one + other, dtype)

    if algorithm == "tree":
        return siblings.fold_tree(group, rows.__getitem__, add)
    # Permute each chunk by its own sequence, so that row j has the j-th summand of every chunk.
    # Then one addition of whole rows is one hop of all chunks.
    along = np.stack([rows[place] for place in siblings.ring(group)])
    for start, stop, chunk in pieces:
        sequence = order.ring_sequence(range(len(along)), chunk)
        along[:, start:stop] = along[sequence, start:stop]
    return reduce(add, along)


def count_distinct(rows: Sequence[Row], dtype: str) -> int:
    """The number of different bit patterns among ``rows``."""
    return len({_view_bits(row, dtype).tobytes() for row in rows})


def measure_share(one: Row, other: Row, dtype: str) -> float:
    return int((_view_bits(one, dtype) != _view_bits(other, dtype)).sum()) / one.size


def count_ulps(one: Row, other: Row, dtype: str) -> int:
    """The largest distance between two rows in units in the last place; 0 from -0.0 to 0.0."""
    return int(np.abs(_count_from_zero(one, dtype) - _count_from_zero(other, dtype)).max())


def _round(values: Any, dtype: str) -> Row:
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
    patterns = siblings.pattern[siblings.sets(along)]
    count = int(patterns.max()) + 1
    # With return_index, np.unique does not import numpy.ma.
    pairs = np.unique(patterns[:, :1] * count + patterns, return_index=True)[0].tolist()
    return [(n // count, n % count) for n in pairs if n // count != n % count]


MAX_BYTES = 1 << 30
# Elements of all inputs together, and rows that are added: some seconds each.
MAX_DRAWN = 1 << 27
MAX_ADDED = 1 << 18

_NOT_A_SUM = ("max", "min", "product")


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The result of one reduction."""

    axes: tuple[str, ...]  # labels of the reduced axes
    group_size: int  # ranks in a group
    groups: int  # groups of the reduction
    orders: int  # different orders of additions among the groups
    # Number of computed sums, one for all groups with the same inputs and order.
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
    stages = _Stages(problem, topology, algorithm, name)
    for axes in sequence:
        stages.append(axes)
    stages.check_size(numel)
    replicas, differing, distance = stages.compare(stages.compute_sums(numel, seed))
    per_step = tuple(stage.summary for stage in stages.stages)
    return Simulation(algorithm, name, numel, seed, replicas, differing, distance, per_step)


def _make_problem(
    layout: Layout,
    steps: Sequence[Sequence[int | str]],
    src: Sequence[Placement | str] | None,
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
        dtype: str,
    ) -> None:
        self.problem = problem
        self.layout = problem.layout
        self.topology = topology
        self.algorithm = algorithm
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
        sizes, labels = self.layout.sizes, self.layout.axes
        siblings = Siblings(self.layout, axes, self.topology, channels=1)
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
        self.stages.append(_Stage(summary, siblings, rows[first], groups, factor))
        shared = [1 if i in axes else size for i, size in enumerate(sizes)]
        self.held = np.broadcast_to(number.reshape(shared), sizes)

    def check_size(self, numel: int) -> None:
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
        rows: list[Row] = []
        for step, stage in enumerate(self.stages):
            pieces = order.ring_chunks(numel, stage.siblings.size, itemsize(self.dtype))
            found: dict[int, Row] = {}
            inputs, last = list[Row](), list[int]()
            # In the order of their inputs, so that inputs are drawn once.
            for number in stage.inputs[:, 0].argsort(kind="stable").tolist():
                numbers = stage.inputs[number].tolist()
                if numbers != last:
                    last = numbers
                    inputs = [
                        rows[one] if step else draw_row(seed, one, numel, self.dtype)
                        for one in numbers
                    ]
                    if stage.factor is not None:
                        factor = _round(np.float64(stage.factor), self.dtype)
                        inputs = [_round(one * factor, self.dtype) for one in inputs]
                found[number] = add_rows(
                    stage.siblings,
                    self.algorithm,
                    stage.groups[number],
                    inputs,
                    pieces,
                    self.dtype,
                )
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
                differing,
                *(measure_share(first, other, self.dtype) for other in others),
            )
            distance = max(
                distance,
                *(count_ulps(first, other, self.dtype) for other in others),
            )
        return replicas, differing, distance


# Predicted costs of all-reduces: meshplan's plan, and a backend's rings and trees.
#
# The model of a backend is the one by which NCCL chooses between its algorithms (NCCL 2.21 to 2.30,
# src/graph/tuning.cc): a latency for each hop and one bandwidth. Over a group of p ranks on m
# nodes, with at least g of its ranks on each node, n bytes take
#
#     ring: launch + (2 (p - 1) - h) near + h far + 2 n (p - 1) / p / bus
#     tree: launch + 2 ((p / m - 1) near + floor(log2 m) far) + 2 n / bus
#
# with h = 2 m hops between nodes, none if m = 1. Near and far are the latencies inside and between
# nodes, and bus is the slowest link: inside a node the link of one rank, between nodes the links of
# g ranks, each with its own adapter. A tree over two nodes sends each byte over the network once.
# Arithmetic is omitted in all predictions. The cost of meshplan's plan is that of the planner.


class Protocol(NamedTuple):
    """Seconds before the first hop, of a hop inside a node and of one between nodes, and the part
    of the bandwidth that carries data.
    """

    launch: float
    near: float
    far: float
    share: float


# NCCL's own figures for LL, LL128 and Simple. Between nodes, those of its rings: the longer times
# that it has for trees are not seen in published ones.
_PROTOCOLS: dict[Algorithm, tuple[Protocol, ...]] = {
    "ring": (
        Protocol(6.6e-6, 0.6e-6, 2.7e-6, 0.5),
        Protocol(14e-6, 1.9e-6, 4e-6, 0.94),
        Protocol(8.4e-6, 3.4e-6, 14e-6, 1.0),
    ),
    "tree": (
        Protocol(6.8e-6, 0.6e-6, 2.7e-6, 0.46),
        Protocol(14e-6, 1.25e-6, 4e-6, 0.86),
        Protocol(8.4e-6, 4e-6, 14e-6, 0.92),
    ),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Links that are fitted to published all-reduces of NCCL."""

    # domain, network: bandwidths of a GPU in bytes per s.
    domain: float
    network: float
    # Times between nodes as multiples of NCCL's figures; inside a node they are 1.4.
    far: float
    largest: int  # GPUs of the largest published all-reduce
    # Between nodes, the largest ratio of a predicted and a published time.
    across: float = 1.7
    simple: bool = False  # the network has no low-latency protocols

    @property
    def links(self) -> Links:
        # A message of meshplan is a hop of a ring in the protocol of the lowest latency.
        first = self.protocols("ring")[0]
        return Links(
            domain=Link(first.near, self.domain),
            network=Link(first.far, self.network),
            launch=first.launch,
        )

    def protocols(self, algorithm: Algorithm) -> list[Protocol]:
        return [
            one._replace(near=one.near * 1.4, far=one.far * self.far)
            for one in _PROTOCOLS[algorithm][-1 if self.simple else 0 :]
        ]

    def widen(self, cost: Cost) -> tuple[float, float]:
        """The lowest and the highest time in nanoseconds that ``cost`` stands for."""
        error = self.across if cost.network else _WITHIN
        return cost.nanoseconds / error, cost.nanoseconds * error


# Inside one NVLink domain, the largest ratio of a predicted and a published time.
_WITHIN = 1.15
# tests/published_all_reduces.csv has the times. Of a GB200, those of small messages over NVLink and
# all between racks are unknown: those of B200 over InfiniBand and EFA stand for them.
CALIBRATIONS = {
    "h100": Calibration(390e9, 49e9, 8.0, 40),
    "a100": Calibration(233e9, 25e9, 6.0, 24),
    "a100-efa": Calibration(233e9, 2.8e9, 5.0, 32, 1.85, simple=True),
    "gb200": Calibration(790e9, 50e9, 8.0, 72),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    steps: tuple[tuple[str, ...], ...]  # labels of the axes of each reduction, in order
    how: tuple[str, ...]  # for each step, ``"ring"``, ``"tree"``, or the path of meshplan in words
    # Time in nanoseconds, messages in bytes that leave a rank; no creation of groups, and no memory
    # where the backend reduces in place.
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        steps = [
            {"axes": list(axes), "how": how} for axes, how in zip(self.steps, self.how, strict=True)
        ]
        return {"steps": steps, "cost": self.cost.to_json()}


def predict_plan(problem: Problem) -> Prediction:
    """The cost of meshplan's plan, under policy ``deterministic``, once its groups exist;
    ``PlacementError`` unless every axis is replicated, or goes from partial to replicated.
    """
    # Imported here: the linter simulates, and predicts no cost.
    from meshplan.planner._group_facts import find_groups
    from meshplan.planner._planner import plan

    _check(problem)
    planned = plan(problem)
    if not planned.candidates:  # nothing to reduce
        return predict_backend(problem, [])
    cost = planned.candidates[0].cost
    groups = find_groups(problem.layout, problem.topology)
    share = groups.predict_creation(cost.creates).nanoseconds
    labels = problem.layout.axes
    return Prediction(
        steps=tuple(tuple(labels[i] for i in step.axes) for step in planned.reductions),
        how=tuple(step.describe_path() for step in planned.reductions),
        cost=replace(cost, nanoseconds=cost.nanoseconds - share),
    )


def predict_backend(
    problem: Problem,
    steps: Sequence[Sequence[int | str]],
    algorithm: Algorithm | Literal["best"] = "best",
    calibration: Calibration | None = None,
) -> Prediction:
    """The cost of the backend's all-reduces over the axes of ``steps``, each by ``algorithm``;
    ``"best"`` takes the faster one for each step. With ``calibration``, NCCL's by its fastest
    protocol. ``AxisNameError``, and ``PlacementError`` if the redistribution is not an all-reduce
    or the steps do not complete it.
    """
    from meshplan.planner._group_facts import find_groups
    from meshplan.planner._plan import NOMINAL_ELEMENTS

    _check(problem)
    groups = find_groups(problem.layout, problem.topology)
    elements = NOMINAL_ELEMENTS if problem.shape is None else math.prod(problem.shape)
    size = elements * itemsize(problem.dtype or "float32")
    tried: tuple[Algorithm, ...] = ALGORITHMS if algorithm == "best" else (algorithm,)
    axes = check_steps(problem, steps)
    chosen = list[tuple[Cost, Algorithm]]()
    for step in axes:
        found = (
            (_predict_all_reduce(groups, step, name, size, one), name)
            for name in tried
            for one in (calibration.protocols(name) if calibration else [None])
        )
        chosen.append(min(found, key=lambda each: each[0].nanoseconds))
    labels = problem.layout.axes
    return Prediction(
        steps=tuple(tuple(labels[i] for i in step) for step in axes),
        how=tuple(name for _, name in chosen),
        cost=Cost.total([cost for cost, _ in chosen]),
    )


def _check(problem: Problem) -> None:
    for axis, src, dst in zip(problem.layout.axes, problem.src, problem.dst, strict=True):
        if dst.kind != "replicate" or src.kind not in ("partial", "replicate"):
            raise PlacementError(
                f"only all-reduces are predicted, got {src.text} -> {dst.text} on axis {axis}; "
                "use P or R before, and R after"
            )


def _predict_all_reduce(
    groups: GroupFacts,
    axes: tuple[int, ...],
    algorithm: Algorithm,
    size: int,
    protocol: Protocol | None,
) -> Cost:
    """Of ``size`` bytes in the slowest group; without a protocol, with the latencies of links."""
    links, peers, nodes = groups.links, groups.peers(axes), groups.nodes(axes)
    on_node = 1 + peers.domain + peers.node
    ranks = on_node + peers.network
    # A rank that is alone on its node limits the bus, although others may share a node.
    inside = links.node if peers.node else links.domain
    one = protocol or Protocol(links.launch, inside.latency, links.network.latency, 1.0)
    # Hops, and bytes through every rank and through one to other nodes.
    if algorithm == "ring":
        hops = 2 * (ranks - 1)
        far = min(2 * nodes, hops) if nodes > 1 else 0
        near = hops - far
        moved = between = hops * -(-size // ranks)
    else:
        near, far = 2 * (ranks // nodes - 1), 2 * (nodes.bit_length() - 1)
        moved, between = 2 * size, size if nodes == 2 else 2 * size
    # The latter use the adapters of all ranks of the node.
    network = -(-between // on_node) if nodes > 1 else 0
    moved = moved if on_node > 1 else 0
    seconds = max(moved / inside.bandwidth, network / links.network.bandwidth) / one.share
    return Cost(
        nanoseconds=round((one.launch + (near * one.near + far * one.far) + seconds) * 1e9),
        collectives=1,
        domain=0 if peers.node else moved,
        node=moved if peers.node else 0,
        network=network,
    )
