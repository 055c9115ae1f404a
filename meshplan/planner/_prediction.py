"""Predicted costs of all-reduces: meshplan's plan, and a backend's rings and trees.

The model of a backend is the one by which NCCL chooses between its algorithms (NCCL 2.21 to 2.30,
src/graph/tuning.cc): a latency for each hop and one bandwidth. Over a group of p ranks on m nodes,
with at least g of its ranks on each node, n bytes take

    ring: launch + (2 (p - 1) - h) near + h far + 2 n (p - 1) / p / bus
    tree: launch + 2 ((p / m - 1) near + floor(log2 m) far) + 2 n / bus

with h = 2 m hops between nodes, none if m = 1. Near and far are the latencies inside and between
nodes, and bus is the slowest link: inside a node the link of one rank, between nodes the links of g
ranks, each with its own adapter. NCCL's
further factors (protocols, a correction for trees of middle sizes) and arithmetic are omitted in
all predictions. The cost of meshplan's plan is that of the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshplan._dtypes import itemsize
from meshplan.errors import PlacementError
from meshplan.planner._cost import Cost
from meshplan.planner._group_facts import GroupFacts, find_groups
from meshplan.planner._plan import NOMINAL_ELEMENTS
from meshplan.planner._planner import plan
from meshplan.planner._problem import Problem, check_steps
from meshplan.planner._siblings import ALGORITHMS, Algorithm


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost of a sequence of all-reduces, on the rank with the highest cost."""

    steps: tuple[tuple[str, ...], ...]  # labels of the axes of each reduction, in order
    how: tuple[str, ...]  # for each step, ``"ring"``, ``"tree"``, or the path of meshplan in words
    # Time in nanoseconds, messages in bytes that leave a rank; no creation of groups, and no memory
    # where the backend reduces in place.
    cost: Cost

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; bytes and nanoseconds."""
        steps = [
            {"axes": list(axes), "how": how} for axes, how in zip(self.steps, self.how, strict=True)
        ]
        return {"steps": steps, "cost": self.cost.to_json()}


def predict_plan(problem: Problem) -> Prediction:
    """The cost of meshplan's plan once its groups exist; ``PlacementError`` unless every axis is
    replicated, or goes from partial to replicated.
    """
    _check(problem)
    planned = plan(problem)
    if not planned.candidates:
        # Nothing to reduce, or the policy permits the backend's own all-reduces.
        kinds, sizes = [spec.kind for spec in problem.src], problem.layout.sizes
        steps = (
            [i for i in step.axes if kinds[i] == "partial" and sizes[i] > 1]
            for step in planned.steps
        )
        return predict_backend(problem, [axes for axes in steps if axes])
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
) -> Prediction:
    """The cost of the backend's all-reduces over the axes of ``steps``, each by ``algorithm``;
    ``"best"`` takes the faster one for each step. ``AxisNameError``, and ``PlacementError`` if the
    redistribution is not an all-reduce or the steps do not complete it.
    """
    _check(problem)
    groups = find_groups(problem.layout, problem.topology)
    elements = NOMINAL_ELEMENTS if problem.shape is None else math.prod(problem.shape)
    size = elements * itemsize(problem.dtype or "float32")
    tried: tuple[Algorithm, ...] = ALGORITHMS if algorithm == "best" else (algorithm,)
    axes = check_steps(problem, steps)
    chosen = [
        min(
            ((_COSTS[name](_WorstGroup(groups, step), size), name) for name in tried),
            key=lambda found: found[0].nanoseconds,
        )
        for step in axes
    ]
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


def _predict_ring(group: _WorstGroup, size: int) -> Cost:
    hops = 2 * (group.ranks - 1)
    between = min(2 * group.nodes, hops) if group.nodes > 1 else 0
    latency = (hops - between) * group.near + between * group.far
    return group.cost(latency, hops * -(-size // group.ranks))


def _predict_tree(group: _WorstGroup, size: int) -> Cost:
    depth = group.ranks // group.nodes - 1
    latency = 2 * (depth * group.near + (group.nodes.bit_length() - 1) * group.far)
    return group.cost(latency, 2 * size)


_COSTS = {"ring": _predict_ring, "tree": _predict_tree}


class _WorstGroup:
    """The links of the slowest group: latencies in s, the bus in bytes per s."""

    def __init__(self, groups: GroupFacts, axes: tuple[int, ...]) -> None:
        links, peers = groups.links, groups.peers(axes)
        self._links = links
        self.ranks = 1 + peers.domain + peers.node + peers.network
        self.nodes = groups.nodes(axes)
        self.on_node = 1 + peers.domain + peers.node
        self.by_domain = peers.node == 0
        # A rank that is alone on its node limits the bus, although others may share a node.
        inside = links.domain if self.by_domain else links.node
        self.near, self.far = inside.latency, links.network.latency
        widths = [inside.bandwidth] if self.on_node > 1 else []
        if self.nodes > 1:
            widths.append(self.on_node * links.network.bandwidth)
        self.bus = min(widths)

    def cost(self, latency: float, moved: int) -> Cost:
        """Of ``moved`` bytes through every rank, a share of them on to another node."""
        network = -(-moved // self.on_node) if self.nodes > 1 else 0
        inside = moved if self.on_node > 1 else 0
        return Cost(
            nanoseconds=round((self._links.launch + latency + moved / self.bus) * 1e9),
            collectives=1,
            domain=inside if self.by_domain else 0,
            node=0 if self.by_domain else inside,
            network=network,
        )
