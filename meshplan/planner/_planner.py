"""Plan one redistribution: all its plain partial axes become one reduction.

Pure: no process group, no device, no environment. The same problem returns the same object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

from meshplan.contract import OPS, Op
from meshplan.errors import PolicyError, ShardOrderError
from meshplan.planner._group_facts import find_groups
from meshplan.planner._hazards import hazards
from meshplan.planner._path_costs import (
    ReductionStrategy,
    find_chunk_unit,
)
from meshplan.planner._plan import (
    MAX_CANDIDATES,
    NOMINAL_ELEMENTS,
    Candidate,
    Path,
    Plan,
    Step,
)
from meshplan.planner._problem import Problem, Spec, is_exact
from meshplan.planner._search import REPLICATE, MoveSequence, search
from meshplan.topology import Topology
from meshplan.topology._nccl_algo import (
    ALGORITHMS,
    PROTOCOLS,
    list_allowed_algorithms,
    parse_choice,
)

MAX_CACHED_PLANS = 4096

_ALL_PROTOCOLS = parse_choice("", PROTOCOLS)
_REPLICATED = Spec("replicate", "R")


@lru_cache(maxsize=MAX_CACHED_PLANS)
def plan(problem: Problem) -> Plan:
    """The plan for ``problem``.

    Under ``deterministic`` every plain ``Partial`` that is to become something else takes part in
    one reduction under the contract. The cheapest plan decides its position among the moves of
    other axes, whether each rank reduces its own shard only, and whether ranks of a node combine
    their summands first. None of these changes a bit.
    Under ``fast`` only two or more ``P -> R`` axes become one all-reduce of the backend.
    ``consistent`` does the same if no other group must have the same result, whatever the
    topology, and is ``deterministic`` otherwise: replicas agree, but runs may differ.
    Transitions that start from anything else fall through to torch.

    The cache holds the ``MAX_CACHED_PLANS`` plans that were used last; plans hold no mesh and no
    tensor.

    Raises:
        ShardOrderError: the redistribution also gathers shards along an axis whose ranks do not
            ascend, and torch would gather them in the order of sorted ranks.
    """
    changed = [i for i, (s, d) in enumerate(zip(problem.src, problem.dst, strict=True)) if s != d]
    groups = _group_reductions(problem, changed)
    if len(groups) == 1 and _is_plain(problem):
        axes = _drop_short_axes(problem, groups[0])
        if axes and not may_be_native(problem, groups[0]):
            return _plan_ordered(problem, changed, axes)
    return _plan_unordered(problem, changed, groups)


def _plan_ordered(
    problem: Problem,
    changed: Sequence[int],
    axes: tuple[int, ...],
) -> Plan:
    found, compared = search(problem, axes, MAX_CANDIDATES)
    rest = tuple(_list_other_moves(problem, changed))
    candidates = tuple(Candidate((*_make_steps(problem, one), *rest), one.cost) for one in found)
    steps = candidates[0].steps
    layout = problem.layout
    for step in steps:
        axis = step.axes[0]
        gathers = step.kind == "torch" and step.src is not None and step.src.kind == "shard"
        if gathers and layout.sizes[axis] > 1 and not layout.ascends(axis):
            raise ShardOrderError(
                f"{problem} moves shards along axis {layout.axes[axis]}, whose ranks do not "
                "ascend: torch would put them in the order of sorted ranks, not of mesh "
                "coordinates; make a mesh whose ranks ascend along each axis"
            )
    return Plan(
        problem=problem,
        steps=steps,
        ordered=True,
        candidates=candidates,
        compared=compared,
    )


def _plan_unordered(
    problem: Problem,
    changed: Sequence[int],
    groups: Sequence[tuple[int, ...]],
) -> Plan:
    steps: list[Step] = []
    taken: set[int] = set()
    for axes in groups:
        wide = _drop_short_axes(problem, axes)
        native = may_be_native(problem, axes)
        # torch already reduces a single axis with the backend's own all-reduce.
        if wide and not (native and len(wide) < 2):
            steps.append(_make_reduction(problem, ReductionStrategy(wide), native=native))
            taken.update(axes)
    for i in changed:
        dst = problem.dst[i]
        if i not in taken:
            steps.append(_fall_through(problem, i, problem.src[i], dst))
        elif dst.kind != "replicate":
            steps.append(_slice(problem, i, dst))
    return Plan(problem=problem, steps=tuple(steps))


def _group_reductions(problem: Problem, changed: Sequence[int]) -> list[tuple[int, ...]]:
    """The axes of each reduction. Reductions of different arithmetic are never merged."""
    pending = [i for i in changed if not problem.dst[i].is_partial]
    partial = [i for i in pending if problem.src[i].kind == "partial"]
    others = [i for i, s in enumerate(problem.src) if s.kind in ("norm", "opaque")]
    if others and partial:
        # A norm is not linear and a mask has side effects: a sum must not move past either. So
        # each axis is a reduction of its own, in torch's place.
        return [(i,) for i in partial]
    if others:
        # Axes of one p-norm are one reduction. Other combinations fall through to torch.
        one_norm = len({problem.src[i] for i in others}) == 1
        one_norm &= problem.src[others[0]].kind == "norm"
        whole = all(i in pending and problem.dst[i].kind == "replicate" for i in others)
        return [tuple(others)] if one_norm and whole else []
    if problem.policy == "fast":
        partial = [i for i in partial if problem.dst[i].kind == "replicate"]
    return [tuple(partial)] if partial else []


def _drop_short_axes(problem: Problem, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in axes if problem.layout.sizes[i] > 1)


def _is_plain(problem: Problem) -> bool:
    """Whether the search supports every move of every axis."""
    return all(
        src.kind in ("replicate", "shard", "partial")
        and dst.kind in ("replicate", "shard", "partial")
        and (dst.kind != "partial" or src.kind == "replicate" or src == dst)
        for src, dst in zip(problem.src, problem.dst, strict=True)
    )


def may_be_native(problem: Problem, axes: Sequence[int]) -> bool:
    """Whether the policy permits the backend's own order."""
    if problem.policy != "consistent":
        return problem.policy == "fast"
    every = [i for i, s in enumerate(problem.src) if s.is_partial]
    gathered = any(
        s.kind in ("shard", "other") and d.kind == "replicate"
        for s, d in zip(problem.src, problem.dst, strict=True)
    )
    # torch may gather before it reduces. Then ranks along that axis hold the same inputs and must
    # agree.
    whole = set(every) == set(axes) and all(problem.dst[i].kind == "replicate" for i in axes)
    # With an unknown topology, every reduction whose siblings must agree is a hazard.
    nowhere = Topology.unknown(problem.layout.highest_rank + 1)
    return whole and not gathered and not hazards(problem, nowhere)


def _make_steps(problem: Problem, found: MoveSequence) -> list[Step]:
    steps = []
    for move in found.path:
        if isinstance(move, ReductionStrategy):
            steps.append(_make_reduction(problem, move))
        elif move.held == REPLICATE:
            steps.append(_slice(problem, move.axis, problem.dst[move.axis]))
        else:
            src, dst = problem.src[move.axis], problem.dst[move.axis]
            dst = _REPLICATED if move.then == REPLICATE else dst
            steps.append(_fall_through(problem, move.axis, src, dst))
    return steps


def _list_other_moves(problem: Problem, changed: Sequence[int]) -> list[Step]:
    """The moves outside the search: axes of size 1, and values that become partial."""
    return [
        _fall_through(problem, i, problem.src[i], problem.dst[i])
        for i in changed
        if problem.dst[i].kind == "partial"
        or (problem.layout.sizes[i] == 1 and problem.src[i].kind != "partial")
    ]


def _make_reduction(
    problem: Problem,
    strategy: ReductionStrategy,
    *,
    native: bool = False,
) -> Step:
    layout, wide = problem.layout, strategy.axes
    op, divisor = _find_operation(problem, wide)
    path: Path = "native" if native else "exchange" if problem.path == "auto" else problem.path
    count = f"{len(wide)} axes in one reduction" if len(wide) > 1 else "one axis"
    order = "in the backend's own order" if native else "in one order for all siblings"
    blocks = f", hierarchical, {strategy.inner} ranks per block" if strategy.inner > 1 else ""
    if not native and problem.contract.ordering.exact and not is_exact(problem, wide):
        order = "exact sums, the same in any order"
        if strategy.inner > 1:
            blocks += ", exact partials between blocks"
        elif problem.path in ("auto", "exchange") and find_groups(
            problem.layout, problem.topology
        ).blocks(wide):
            blocks = ", no blocks: exact partials cost more than they save"
    if strategy.inner > 1 and problem.shape is None:
        blocks += f", cheapest for {NOMINAL_ELEMENTS} elements"
    reach, chunk = None, 0
    if problem.path == "auto" or strategy.inner > 1:
        reach = find_groups(layout, problem.topology).find_reach(strategy)
        chunk = find_chunk_unit(reach, strategy.inner, strategy.between)
    to = ", ".join(problem.dst[i].text if i in strategy.sharded else "R" for i in wide)
    return Step(
        kind="reduce_scatter" if strategy.sharded else "all_reduce",
        axes=wide,
        sizes=tuple(layout.sizes[i] for i in wide),
        move=f"{', '.join(problem.src[i].text for i in wide)} -> {to if strategy.sharded else 'R'}",
        why=f"{count}, {order}{blocks}",
        op=op,
        divisor=divisor,
        path=path,
        contract=None if native else problem.contract,
        norm=problem.src[wide[0]].norm,
        scatter=tuple((i, problem.dst[i].dim or 0) for i in strategy.sharded),
        inner=strategy.inner,
        between=strategy.between,
        # Decides about paths when the size is known, where nothing else has decided.
        reach=reach if strategy.inner == 1 else None,
        chunk=chunk,
    )


def _find_operation(problem: Problem, axes: Sequence[int]) -> tuple[Op, int | None]:
    sizes = problem.layout.sizes
    averaged = math.prod(sizes[i] for i in axes if problem.src[i].op == "avg")
    if averaged > 1:
        return "avg", averaged
    # An average over axes of size 1 is a sum, and so is the sum of powers of a norm.
    ops = (op for op in OPS if op != "avg" and op == problem.src[axes[0]].op)
    return next(ops, "sum"), None


def _slice(problem: Problem, axis: int, dst: Spec) -> Step:
    why = "every rank has the whole value"
    if problem.src[axis].kind == "partial":
        why = f"after the reduction of {problem.src[axis].text}"
    return _change(problem, "slice", axis, _REPLICATED, dst, why)


def _fall_through(problem: Problem, axis: int, src: Spec, dst: Spec) -> Step:
    return _change(problem, "torch", axis, src, dst, _explain_fall_through(problem, src, axis))


def _change(
    problem: Problem,
    kind: Literal["slice", "torch"],
    axis: int,
    src: Spec,
    dst: Spec,
    why: str,
) -> Step:
    sizes, move = (problem.layout.sizes[axis],), f"{src.text} -> {dst.text}"
    return Step(kind, (axis,), sizes, move, why, src=src, dst=dst)


def _explain_fall_through(problem: Problem, src: Spec, axis: int) -> str:
    if problem.layout.sizes[axis] == 1:
        return "axis of size 1, no communication"
    if src.kind == "partial" and problem.policy == "consistent":
        return "siblings agree in any order of the backend"
    if src.kind == "partial":
        return f"policy {problem.policy} merges two or more P -> R axes only"
    if src.any_order:
        return f"{src.any_order}: every order gives the same bits"
    if src.kind in ("norm", "opaque"):
        return f"{src.text} has its own arithmetic"
    return "no reduction"


def find_uncovered_reductions(plan: Plan) -> tuple[Step, ...]:
    # Without reductions whose bits do not depend on the order: bitwise ones, and those with at most
    # one nonzero summand per element.
    steps = tuple(_find_torch_reductions(plan))
    if may_be_native(plan.problem, [step.axes[0] for step in steps]):
        return ()
    return tuple(
        step
        for step in steps
        if step.src is not None and step.src.kind in ("norm", "opaque") and not step.src.any_order
    )


def refuse_unpinned_scatter(plan: Plan, nccl_algo: str) -> None:
    """Refuse a reduction to a shard that falls through to torch if the value of ``NCCL_ALGO`` pins
    all-reduce only: ``PolicyError``. An empty or unreadable value pins nothing.
    """
    # NCCL has no tree for reduce-scatter, and a list for all-reduce does not pin it: NCCL chooses a
    # ring, PAT or NVLS by size and placement (MP304). If the list for all collectives permits no
    # algorithm, NCCL fails in the first call.
    scatters = [
        step for step in _find_torch_reductions(plan) if step.dst and step.dst.kind == "shard"
    ]
    if not nccl_algo or not scatters:
        return
    try:
        choice = parse_choice(nccl_algo, ALGORITHMS)
    except PolicyError:
        return
    possible = list_allowed_algorithms("ReduceScatter", choice, _ALL_PROTOCOLS)
    if "AllReduce" not in choice.named or ("ReduceScatter" in choice.named and possible):
        return
    problem = plan.problem
    left = "is NCCL's choice" if possible else "has no algorithm left"
    remedy = "NCCL_ALGO='ring,tree;allreduce:tree' before the job starts, which gives it a ring"
    if problem.policy != "deterministic":
        remedy += (
            ", or meshplan.install(policy='deterministic'), whose contract does not use NCCL's "
            "reduce-scatter"
        )
    raise PolicyError(
        f"{problem}: {scatters[0].brief(problem.layout)} is a reduce-scatter of NCCL's own. Under "
        f"NCCL_ALGO={' '.join(nccl_algo.split())[:60]} all-reduce is pinned, and reduce-scatter, "
        f"which has no tree, {left}; use {remedy}"
    )


def _find_torch_reductions(plan: Plan) -> Iterator[Step]:
    """The reductions that torch runs itself, over axes larger than 1."""
    for step in plan.steps:
        ends = step.dst is not None and not step.dst.is_partial
        starts = step.src is not None and step.src.is_partial
        if step.kind == "torch" and starts and ends and step.sizes[0] > 1:
            yield step
