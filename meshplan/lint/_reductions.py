"""The reductions of a job that follow from its mesh and its framework, and whether the groups that
must agree on them have the same placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.layout import Layout
from meshplan.lint._job import Job
from meshplan.lint._orders import number_domains
from meshplan.planner import Problem, are_uniform
from meshplan.topology import Topology


@dataclass(frozen=True, slots=True)
class Reductions:
    """One redistribution and its reductions."""

    what: str  # in words, e.g. ``gradients: ddp, then fsdp``.
    problem: Problem  # from partial values to the placements after the last reduction
    # Axis positions of each reduction, in the order of execution
    steps: tuple[tuple[int, ...], ...]


def find_gradient_axes(job: Job) -> tuple[int, ...]:
    """Positions of the axes along which gradients are summed, without axes of size 1."""
    return _find_axes(job, "replicate", "shard")


def list_reductions(job: Job) -> tuple[Reductions, ...]:
    """The reductions of a job that the linter checks.

    Gradients are summed along replicate and shard axes. Along model axes, small parameters (norms,
    biases) and their gradients are replicas. Along expert and pipeline axes, ranks hold different
    parameters. The gradient norm is summed along all axes that shard parameters, and scales the
    gradients of all replicas. Activations are summed along model axes; along all others they
    belong to different samples.

    Under ``dtensor`` each axis is also reduced alone, with replicas along the others, as a norm, a
    metric or a second redistribution does. A job with a specified order has no such reductions.
    None is listed for a mesh with an axis of unknown role, nor for sums that no order changes.

    Sources: DTensor reduces from the outermost axis inward (torch 2.11 to 2.15,
    distributed/tensor/_redistribute.py), and merges axes only if the job flattened them. FSDP2
    reduce-scatters along the shard axes and then all-reduces along the replicate axis.
    """
    if job.exact or job.find_unknown_axes():
        return ()
    found = []
    axes, names = find_gradient_axes(job), job.layout.axes
    if axes:
        found.append(_reduce_gradients(job))
        if job.framework == "dtensor" and not job.reduce_order and len(axes) > 1:
            found += [
                Reductions(
                    f"a reduction over {names[axis]} alone",
                    _make_problem(job, (axis,)),
                    ((axis,),),
                )
                for axis in axes
            ]
        if job.framework == "fsdp2":
            loss = f"the loss: {_format_axes(job, axes)}"
            found.append(Reductions(loss, _make_problem(job, axes), (axes,)))
    found += _reduce_norm(job)
    found += [_reduce_activations(job, axis) for axis in _find_axes(job, "model")]
    return tuple(found)


def _reduce_gradients(job: Job) -> Reductions:
    axes = find_gradient_axes(job)
    shards = _find_axes(job, "shard") if job.framework == "fsdp2" else ()
    if job.framework == "ddp":
        steps = [axes]
    elif job.framework == "fsdp2":
        steps = [step for step in (shards, tuple(i for i in axes if i not in shards)) if step]
    else:
        steps = _merge_steps(job, _order_axes(job, axes))
    what = f"gradients: {', then '.join(_format_axes(job, step) for step in steps)}"
    return Reductions(what, _make_problem(job, axes, sharded=shards), tuple(steps))


def _reduce_norm(job: Job) -> list[Reductions]:
    """The gradient norm, over the axes that shard parameters. Every rank scales by it."""
    shards = _find_axes(job, "shard") if job.framework == "fsdp2" else ()
    steps = [step for step in (shards, *((i,) for i in _find_axes(job, "model"))) if step]
    if not steps:
        return []
    what = f"the gradient norm: {', then '.join(_format_axes(job, step) for step in steps)}"
    return [
        Reductions(
            what,
            _make_problem(job, [i for s in steps for i in s]),
            tuple(steps),
        )
    ]


def _reduce_activations(job: Job, axis: int) -> Reductions:
    src = ["R" if role == "model" else "S(0)" for role in job.roles]
    dst = list(src)
    src[axis] = "P"
    problem = Problem.of(job.layout, src, dst)
    return Reductions(f"activations: {_format_axes(job, (axis,))}", problem, ((axis,),))


def _make_problem(job: Job, axes: Sequence[int], sharded: Sequence[int] = ()) -> Problem:
    src = ["S(0)" if role in ("experts", "apart") else "R" for role in job.roles]
    dst = list(src)
    for axis in axes:
        src[axis] = "P"
        dst[axis] = "S(0)" if axis in sharded else "R"
    return Problem.of(job.layout, src, dst)


def _order_axes(job: Job, axes: Sequence[int]) -> list[int]:
    if not job.reduce_order:
        return list(axes)
    named = [job.layout.axis_index(axis) for axis in job.reduce_order]
    first = [axis for axis in dict.fromkeys(named) if axis in axes]
    return first + [axis for axis in axes if axis not in first]


def _merge_steps(job: Job, order: Sequence[int]) -> list[tuple[int, ...]]:
    """One step for consecutive axes that the job flattened, the longest match first."""
    layout = job.layout
    meshes = [frozenset(layout.axis_indices(axes)) for axes in job.flattened]
    steps: list[tuple[int, ...]] = []
    at = 0
    while at < len(order):
        width = next(
            (
                n
                for n in range(len(order) - at, 1, -1)
                if any(
                    {i for i in mesh if layout.sizes[i] > 1} == set(order[at : at + n])
                    for mesh in meshes
                )
            ),
            1,
        )
        steps.append(tuple(sorted(order[at : at + width])))
        at += width
    return steps


def _find_axes(job: Job, *roles: str) -> tuple[int, ...]:
    return tuple(i for i, role in enumerate(job.roles) if role in roles and job.layout.sizes[i] > 1)


def _format_axes(job: Job, axes: Sequence[int]) -> str:
    names = [job.layout.axes[i] for i in axes]
    return names[0] if len(names) == 1 else f"({', '.join(names)}) as one"


_SMALL = 1 << 14  # ranks


def is_uniform(job: Job, topology: Topology) -> bool:
    """Whether all groups of this job that must agree have the same node and domain placement.

    Stricter than the rules: advice should not rely on two placements whose orders of additions
    happen to return the same bits.
    """
    topologies = [topology, find_islands(topology)]
    found = [(r, t) for r in list_reductions(job) for t in topologies if t is not None]
    return not any(_part_differs(r, t) for r, t in found) and all(
        are_uniform(r.problem, t, steps=r.steps) for r, t in found
    )


def find_islands(topology: Topology) -> Topology | None:
    """Domains as if they were nodes; ``None`` unless some node has several of them."""
    domains, nodes = topology.domains, topology.nodes
    if domains is None or nodes is None or topology.node_map == topology.domain_map:
        return None
    if isinstance(topology.node_map, int) and isinstance(topology.domain_map, int):
        per_node, left = divmod(topology.node_map, topology.domain_map)
        if not left and per_node > 1:
            return Topology.uniform(topology.world_size, node_size=topology.domain_map)
    found, number = np.unique(number_domains(topology), return_inverse=True)
    if len(found) == len(np.unique(nodes, return_index=True)[0]):
        return None
    return Topology.of(number.tolist())


def _part_differs(reductions: Reductions, topology: Topology) -> bool:
    """Whether a small part of a large mesh already shows different placements.

    If the parts of two groups differ, the groups differ. This holds for ascending ranks, where the
    part of a group has its lowest ranks.
    """
    layout = reductions.problem.layout
    if layout.world_size <= _SMALL or not isinstance(layout.ranks, range):
        return False
    for whole in range(len(layout.sizes)):
        part = _take_part(layout, whole)
        problem = reductions.problem
        small = Problem(part, problem.src, problem.dst)
        if not are_uniform(small, topology, steps=reductions.steps):
            return True
    return False


def _take_part(layout: Layout, whole: int) -> Layout:
    """The first coordinates of each axis, as many as possible of the axis ``whole``."""
    sizes = [1] * len(layout.sizes)
    sizes[whole] = min(layout.sizes[whole], _SMALL)
    grown = True
    while grown:
        grown = False
        for i, size in enumerate(layout.sizes):
            if sizes[i] < size and math.prod(sizes) * 2 <= _SMALL:
                sizes[i], grown = min(sizes[i] * 2, size), True
    ranks: list[int] = layout.grid[tuple(slice(size) for size in sizes)].flatten().tolist()
    return Layout(tuple(sizes), layout.names, tuple(ranks))
