"""Plan one redistribution: all its plain partial axes become one reduction.

Pure: no process group, no device, no environment. The same problem gives the same object.
"""

from __future__ import annotations

import math
from functools import lru_cache

from meshplan.contract import Op
from meshplan.planner._hazards import hazards
from meshplan.planner._plan import Path, Plan, Step
from meshplan.planner._problem import Problem, Spec
from meshplan.topology import Topology

__all__ = ["MAX_CACHED_PLANS", "plan"]

MAX_CACHED_PLANS = 4096

_PARTIAL_KINDS = ("partial", "norm", "opaque")


@lru_cache(maxsize=MAX_CACHED_PLANS)
def plan(problem: Problem) -> Plan:
    """The plan for ``problem``.

    Under ``deterministic`` every plain ``Partial`` that is to become something else takes part in
    one reduction under the contract. Where some of these axes are to be sharded, each rank reduces
    its own shard only, if nothing else cuts the same tensor dims; else the shards are sliced from
    the finished value.
    Under ``fast`` only two or more ``P -> R`` axes are taken, as one all-reduce of the backend.
    ``consistent`` does the same where no other group must come to the same result, whatever the
    topology, and is ``deterministic`` everywhere else: all replicas agree, but not from run to run.
    Transitions that start from anything else stay with torch.

    The cache holds ``MAX_CACHED_PLANS`` plans, the least recently used leaves first; plans hold
    no mesh and no tensor.
    """
    changed = [i for i, (s, d) in enumerate(zip(problem.src, problem.dst, strict=True)) if s != d]
    groups = _reductions(problem, changed)
    steps: list[Step] = []
    taken: set[int] = set()
    cut: set[int] = set()
    for axes in groups:
        step = _reduce(problem, axes)
        if step is not None:
            steps.append(step)
            taken.update(axes)
            cut.update(axis for axis, _ in step.scatter)
    for i in changed:
        src, dst = problem.src[i], problem.dst[i]
        if i not in taken:
            steps.append(_left_to_torch(problem, i))
        elif dst.kind != "replicate" and i not in cut:
            steps.append(
                Step(
                    kind="slice",
                    axes=(i,),
                    sizes=(problem.layout.sizes[i],),
                    move=f"R -> {dst.text}",
                    why=f"the finished value of the {src.text} is there",
                )
            )
    return Plan(problem=problem, steps=tuple(steps))


def _reductions(problem: Problem, changed: list[int]) -> list[tuple[int, ...]]:
    """Which axes reduce together. Reductions of different arithmetic are never merged."""
    pending = [i for i in changed if problem.dst[i].kind not in _PARTIAL_KINDS]
    partial = [i for i in pending if problem.src[i].kind == "partial"]
    unlike = [i for i, s in enumerate(problem.src) if s.kind in ("norm", "opaque")]
    if unlike and partial:
        # A norm is not linear and a mask has side effects: a sum must not move past one, so each
        # axis stays alone, at the place that torch gives it.
        return [(i,) for i in partial]
    if unlike:
        alike = len({problem.src[i] for i in unlike}) == 1 and problem.src[unlike[0]].kind == "norm"
        whole = all(i in pending and problem.dst[i].kind == "replicate" for i in unlike)
        return [tuple(unlike)] if alike and whole else []
    if problem.policy == "fast":
        partial = [i for i in partial if problem.dst[i].kind == "replicate"]
    return [tuple(partial)] if partial else []


def _reduce(problem: Problem, axes: tuple[int, ...]) -> Step | None:
    """The reduction over ``axes``, or ``None`` if torch does as well (nothing to add up, ...)."""
    layout = problem.layout
    wide = tuple(i for i in axes if layout.sizes[i] > 1)
    native = _may_be_native(problem, axes)
    if not wide or (native and len(wide) < 2):
        return None
    specs = [problem.src[i] for i in axes]
    op, divisor = _operation(problem, wide)
    path: Path = "native" if native else problem.path
    count = f"{len(wide)} axes in one reduction" if len(wide) > 1 else "one axis"
    order = "in the backend's own order" if native else "in an order that all siblings share"
    scatter = _scatter(problem, wide)
    to = ", ".join(problem.dst[i].text for i in axes) if scatter else "R"
    return Step(
        kind="reduce_scatter" if scatter else "all_reduce",
        axes=wide,
        sizes=tuple(layout.sizes[i] for i in wide),
        move=f"{', '.join(s.text for s in specs)} -> {to}",
        why=f"{count}, {order}",
        op=op,
        divisor=divisor,
        path=path,
        contract=None if native else problem.contract,
        norm=specs[0].norm,
        scatter=scatter,
    )


def _may_be_native(problem: Problem, axes: tuple[int, ...]) -> bool:
    """Whether the policy lets the backend add in its own order."""
    if problem.policy != "consistent":
        return problem.policy == "fast"
    every = [i for i, s in enumerate(problem.src) if s.kind in _PARTIAL_KINDS]
    gathered = any(
        s.kind in ("shard", "other") and d.kind == "replicate"
        for s, d in zip(problem.src, problem.dst, strict=True)
    )
    # Torch may gather before it reduces, and then ranks along that axis hold the same inputs.
    whole = set(every) == set(axes) and all(problem.dst[i].kind == "replicate" for i in axes)
    nowhere = Topology.unknown(max(problem.layout.ranks) + 1)
    return whole and not gathered and not hazards(problem, nowhere)


def _scatter(problem: Problem, wide: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The cuts of a reduce-scatter, in torch's default order; empty if there is to be none."""
    cuts = []
    for i in wide:
        spec = problem.dst[i]
        if spec.kind == "other":
            return ()
        if spec.dim is not None:
            cuts.append((i, spec.dim))
    elsewhere = {
        spec.dim
        for i, size in enumerate(problem.layout.sizes)
        if size > 1 and i not in wide
        for spec in (problem.src[i], problem.dst[i])
        if spec.kind in ("shard", "other")
    }
    # A strided shard has no dim here: it may cut anything.
    blocked = None in elsewhere or any(dim in elsewhere for _, dim in cuts)
    if problem.policy == "fast" or not problem.scatter or blocked:
        return ()
    return tuple(cuts)


def _operation(problem: Problem, axes: tuple[int, ...]) -> tuple[Op, int | None]:
    sizes = problem.layout.sizes
    averaged = math.prod(sizes[i] for i in axes if problem.src[i].op == "avg")
    if averaged > 1:
        return "avg", averaged
    ops: dict[str | None, Op] = {"max": "max", "min": "min", "product": "product"}
    return ops.get(problem.src[axes[0]].op, "sum"), None


def _left_to_torch(problem: Problem, axis: int) -> Step:
    src, dst, size = problem.src[axis], problem.dst[axis], problem.layout.sizes[axis]
    return Step(
        kind="torch",
        axes=(axis,),
        sizes=(size,),
        move=f"{src.text} -> {dst.text}",
        why=_reason(problem, src, size),
    )


def _reason(problem: Problem, src: Spec, size: int) -> str:
    if size == 1:
        return "an axis of size 1, nothing is sent"
    if src.kind == "partial" and problem.policy == "consistent":
        return "its siblings agree whatever the backend's order is"
    if src.kind == "partial":
        return f"policy {problem.policy} takes two or more axes of P -> R only"
    if src.kind in ("norm", "opaque"):
        return f"{src.text} has arithmetic of its own"
    return "no reduction"
