"""Find the cheapest sequences of moves for a redistribution.

A state has one entry for each mesh axis: the tensor dim that the axis shards, or ``REPLICATE``,
``PENDING`` (a partial axis of the one reduction), ``APART`` (no move changes it). Axes that shard
the same dim are nested, lower positions outside: DTensor's default order. An axis can start or stop
sharding a dim only if no later axis shards that dim inside it. A sharded axis keeps its dim only if
the axes outside it shard the dim as in the target. The states are the nodes of a graph. Its edges
are moves of single axes, and, each through its own node, the strategies of the one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshplan.planner._group_facts import find_groups
from meshplan.planner._path_costs import (
    MIN_HALVING_RANKS,
    Between,
    Cost,
    ElementWidth,
    PlannedReduction,
    ReductionStrategy,
    find_margin,
    predict_collective,
    predict_cost,
)
from meshplan.planner._plan import NOMINAL_ELEMENTS
from meshplan.planner._problem import Problem, Spec

REPLICATE, PENDING, APART = -1, -2, -3

State = tuple[int, ...]
_Node = tuple[bool, State] | tuple[State, ReductionStrategy]


@dataclass(frozen=True, slots=True)
class Move:
    """The transition of one axis between two entries of states."""

    axis: int
    held: int
    then: int


@dataclass(frozen=True, slots=True)
class MoveSequence:
    path: tuple[Move | ReductionStrategy, ...]
    cost: Cost


def search(
    problem: Problem,
    axes: tuple[int, ...],
    best: int,
) -> tuple[list[MoveSequence], int]:
    """The ``best`` candidates that reduce over ``axes`` at once, and the number of candidates. The
    result is the same on all ranks.
    """
    # Ordered by time, to which halving adds find_margin, then memory, then number of collectives,
    # then a fixed order.
    return _StateGraph(problem, axes).run(best)


class _StateGraph:
    def __init__(self, problem: Problem, axes: tuple[int, ...]) -> None:
        self.problem = problem
        self.axes = axes
        self.groups = find_groups(problem.layout, problem.topology)
        self.width = ElementWidth.of(problem.dtype, problem.contract)
        self.first, self.goal = find_ends(problem, axes)
        # Imported here: the import takes longer than most runs of the linter.
        import networkx

        self.dijkstra = networkx.single_source_dijkstra
        self.graph = networkx.DiGraph()

    def run(self, best: int) -> tuple[list[MoveSequence], int]:
        reductions = self._grow()
        # Two searches serve all candidates: from the start to each reduction, and, on the reversed
        # graph, from the goal back to it.
        start, end = (False, self.first), (True, self.goal)
        before, heads = self.dijkstra(self.graph, start)
        after, tails = self.dijkstra(self.graph.reverse(copy=False), end)
        times = {one: before[one] + after[one] for one in reductions if one in after}
        last = sorted(times.values())[:best][-1]
        found = []
        for one, time in times.items():
            # Full costs are summed only for candidates that may be among the best; ties at the
            # last place stay in, because memory and collectives decide between them.
            if time <= last:
                nodes = [*heads[one], *reversed(tails[one][:-1])]
                steps = [self.graph.edges[edge] for edge in pairwise(nodes)]
                cost = Cost.total([step["cost"] for step in steps])
                path = tuple(step["step"] for step in steps if step["step"] is not None)
                found.append((time, MoveSequence(path, cost)))
        # Sorting is stable: equal candidates stay in a fixed order.
        found.sort(key=lambda one: (one[0], one[1].cost.peak, one[1].cost.collectives))
        return [one for _, one in found[:best]], len(times)

    def _grow(self) -> list[_Node]:
        """Add all reachable states; returns the nodes of the reductions."""
        reductions: list[_Node] = []
        seen: set[tuple[bool, State]] = {(False, self.first)}
        front = [(False, self.first)]
        while front:
            node = front.pop(0)
            reduced, state = node
            reached = [self._move(node, axis, then) for axis, then in list_moves(state, self.goal)]
            if not reduced:
                for strategy in self._list_strategies(state):
                    reductions.append((state, strategy))
                    reached.append(self._reduce(node, strategy))
            for following in reached:
                if following not in seen:
                    seen.add(following)
                    front.append(following)
        return reductions

    def _list_strategies(self, state: State) -> Iterator[ReductionStrategy]:
        problem, axes = self.problem, self.axes
        exchange = problem.path in ("auto", "exchange")
        # Not every order permits blocks. float32 stands for all dtypes: plans do not use the
        # greater freedom of integers.
        nests = problem.contract.has_parts(problem.src[axes[0]].op or "", "float32")
        inners = (1, *(self.groups.blocks(axes) if exchange and nests else ()))
        sharded = find_scatter_axes(state, self.goal) if problem.scatter else ()
        halving = problem.path == "auto" and nests and problem.contract.order == "tree"
        for inner in inners:
            both = halving and (inner > 1 or self.groups.count_ranks(axes) >= MIN_HALVING_RANKS)
            betweens: tuple[Between, ...] = ("exchange", "halving") if both else ("exchange",)
            for between in betweens:
                yield ReductionStrategy(axes, (), inner, between)
                if sharded:
                    yield ReductionStrategy(axes, sharded, inner, between)

    def _move(self, node: tuple[bool, State], axis: int, then: int) -> tuple[bool, State]:
        reduced, state = node
        following = (reduced, (*state[:axis], then, *state[axis + 1 :]))
        move = Move(axis, state[axis], then)
        cost = self._move_cost(state, following[1], move)
        self.graph.add_edge(node, following, weight=cost.nanoseconds, cost=cost, step=move)
        return following

    def _reduce(self, node: tuple[bool, State], strategy: ReductionStrategy) -> tuple[bool, State]:
        _, state = node
        following = (True, apply_reduction(state, self.goal, strategy.sharded))
        here = self.count_elements(state)
        there = self.count_elements(following[1])
        reach = self.groups.find_reach(strategy)
        reduction = PlannedReduction(
            reach, here, there, self.width, strategy.inner, strategy.between
        )
        created = self.groups.predict_creation(self.groups.list_missing(strategy))
        cost = Cost.total((predict_cost(self.problem.path, reduction), created))
        node_of_reduction = (state, strategy)
        # The extra node makes a shortest path through this strategy a query of its own.
        self.graph.add_edge(node, node_of_reduction, weight=0, cost=Cost(), step=None)
        weight = cost.nanoseconds * (100 + find_margin(strategy)) // 100
        self.graph.add_edge(node_of_reduction, following, weight=weight, cost=cost, step=strategy)
        return following

    def _move_cost(self, state: State, following: State, move: Move) -> Cost:
        size = self.problem.layout.sizes[move.axis]
        here = self.count_elements(state) * self.width.wire
        there = self.count_elements(following) * self.width.wire
        # A replicated tensor is sliced locally. A gather sends the whole shard to each peer, an
        # all-to-all to another dim sends each peer its piece.
        if move.held == REPLICATE:
            return Cost(peak=there)
        piece = here if move.then == REPLICATE else -(-here // size)
        peers = self.groups.peers((move.axis,))
        return replace(predict_collective(self.groups.links, peers, piece), peak=there + here)

    def count_elements(self, state: State) -> int:
        shards = [
            (size, held)
            for size, held in zip(self.problem.layout.sizes, state, strict=True)
            if held >= 0
        ]
        if self.problem.shape is None:
            return -(-NOMINAL_ELEMENTS // math.prod(size for size, _ in shards))
        local = list(self.problem.shape)
        for size, dim in shards:
            local[dim] = -(-local[dim] // size)
        return math.prod(local)


def find_ends(problem: Problem, reduced: Sequence[int]) -> tuple[State, State]:
    # Axes of size 1 are APART: their placement does not matter.

    def read_entry(axis: int, spec: Spec, other: Spec) -> int:
        if problem.layout.sizes[axis] == 1 or "partial" in (spec.kind, other.kind):
            return APART
        return REPLICATE if spec.dim is None else spec.dim

    first, last = [], []
    for i, (src, dst) in enumerate(zip(problem.src, problem.dst, strict=True)):
        if i in reduced:
            first.append(PENDING)
            last.append(REPLICATE if dst.dim is None else dst.dim)
        else:
            first.append(read_entry(i, src, dst))
            last.append(read_entry(i, dst, src))
    return tuple(first), tuple(last)


def list_moves(state: State, goal: State) -> Iterator[tuple[int, int]]:
    """(axis, its next entry) of all useful moves: first those that unshard, inner axes first."""
    for axis in range(len(state) - 1, -1, -1):
        held, wanted = state[axis], goal[axis]
        if held < 0 or (held == wanted and _is_in_place(state, goal, axis, held)):
            continue
        if _is_inside(state, axis, held):
            direct = wanted >= 0 and wanted != held and _may_shard(state, goal, axis, wanted)
            yield axis, wanted if direct else REPLICATE
    for axis, (held, wanted) in enumerate(zip(state, goal, strict=True)):
        if held == REPLICATE and wanted >= 0 and _may_shard(state, goal, axis, wanted):
            yield axis, wanted


def find_scatter_axes(state: State, goal: State) -> tuple[int, ...]:
    """The pending axes that the reduction itself can shard as in the target, outermost first."""
    found: list[int] = []
    for axis, held in enumerate(state):
        if held == PENDING and goal[axis] >= 0:
            now = apply_reduction(state, goal, found)
            if _may_shard(now, goal, axis, goal[axis]):
                found.append(axis)
    return tuple(found)


def apply_reduction(state: State, goal: State, sharded: Sequence[int]) -> State:
    return tuple(
        held if held != PENDING else goal[axis] if axis in sharded else REPLICATE
        for axis, held in enumerate(state)
    )


def follows_default_order(
    problem: Problem, steps: Sequence[tuple[int, int | None, int | None]]
) -> bool:
    """Whether moves (axis, tensor dim sharded before or ``None``, and after or ``None``) keep the
    axes that shard a dim in DTensor's default order of nesting. ``problem`` has the state before
    them.
    """
    # Placements do not encode other orders of nesting, but torch's moves reveal them: an axis
    # starts or stops sharding a dim while an axis that is inside it by default shards the same dim.
    sizes = problem.layout.sizes
    dims = [spec.dim for spec in problem.src]
    for axis, before, after in steps:
        inside = [dims[i] for i in range(axis + 1, len(sizes)) if sizes[i] > 1]
        wrong = any(dim is not None and dim in inside for dim in (before, after))
        if sizes[axis] > 1 and (wrong or dims[axis] != before):
            return False
        dims[axis] = after
    return True


def _may_shard(state: State, goal: State, axis: int, dim: int) -> bool:
    return _is_inside(state, axis, dim) and _is_in_place(state, goal, axis, dim)


def _is_inside(state: State, axis: int, dim: int) -> bool:
    return dim not in state[axis + 1 :]


def _is_in_place(state: State, goal: State, axis: int, dim: int) -> bool:
    """Whether the axes outside this one shard ``dim`` as in the target."""
    return all((state[i] == dim) == (goal[i] == dim) for i in range(axis))
