"""Routes: the plan and the carriers of a redistribution, cached by mesh, source and target."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshplan._spans import span
from meshplan._torch import disable_current_modes, flattened_meshes_of, root_mesh_of
from meshplan.dtensor._config import Config
from meshplan.dtensor._meshes import MeshEntry, mesh_entry
from meshplan.dtensor._partial import PlannedPartial
from meshplan.errors import FallbackRefusedError, TopologyError
from meshplan.execute import Event
from meshplan.layout import Layout
from meshplan.planner import (
    Plan,
    Problem,
    Step,
    find_uncovered_reductions,
    plan,
    refuse_unpinned_scatter,
)
from meshplan.topology import Links, Topology
from meshplan.topology._links import CPU_LINKS

MAX_ROUTES_PER_MESH = 1024

KEPT_ORDER = (
    "the shards of a dim are not nested in the default order: torch's moves stay in torch's order, "
    "around the reduction"
)
PLAIN = (Partial, Replicate, Shard)


@dataclass(frozen=True, slots=True)
class Carrier:
    """One planned reduction and all axes that it finishes, those of size 1 included."""

    placement: PlannedPartial
    axes: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Route:
    """The execution of one (source, target) on one mesh.

    Attributes:
        plan: of the planner.
        carriers: of the planned reductions, by axis.
        torch_events: report entries of the steps that fall through to PyTorch.
        whole: the carrier, if it alone is the whole redistribution.
        scatters: whether a reduction returns only this rank's shard.
    """

    plan: Plan
    carriers: dict[int, Carrier]
    torch_events: tuple[Event, ...]
    whole: Carrier | None
    scatters: bool


def find_route(
    mesh: MeshEntry,
    config: Config,
    device_mesh: DeviceMesh,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
) -> Route:
    """The route of a redistribution; checked and planned the first time.

    Raises:
        AxisNameError, PolicyError, TopologyError: the configuration does not fit the mesh, the job
            or the environment.
        FallbackRefusedError: ``strict``, and a reduction would fall through to PyTorch.
    """
    by_placement = (src_placements, dst_placements, config.key)
    route: Route | None = mesh.by_placement.get(by_placement)
    if route is None:
        _check_named_axes(config, device_mesh, mesh.layout)
        _check_world(config)
        route = plan_route(mesh, config, src_placements, dst_placements)
        _check_scatters(route.plan, device_mesh)
        if all(type(p) in PLAIN for p in (*src_placements, *dst_placements)):
            mesh.by_placement[by_placement] = route
    return route


def _check_named_axes(config: Config, device_mesh: DeviceMesh, layout: Layout) -> None:
    """Refuse a policy for an axis that neither the mesh nor its root nor a flattened mesh has."""
    root = root_mesh_of(device_mesh)
    for name in config.named_axes:
        if name not in layout.axes and name not in flattened_meshes_of(root):
            mesh_entry(root).layout.axis_index(name)


def _check_scatters(planned: Plan, device_mesh: DeviceMesh) -> None:
    """Refuse a reduce-scatter of NCCL for which ``NCCL_ALGO`` does not pin one algorithm."""
    listed = os.environ.get("NCCL_ALGO")
    if listed and _reduces_over_nccl(device_mesh):
        refuse_unpinned_scatter(planned, listed)


def _reduces_over_nccl(device_mesh: DeviceMesh) -> bool:
    if device_mesh.get_coordinate() is None:
        return False
    # For example "cpu:gloo,cuda:nccl"; the same for all groups of a mesh.
    backends = c10d.get_backend_config(device_mesh.get_group(0)).split(",")
    return f"{device_mesh.device_type}:nccl" in backends


def _check_world(config: Config) -> None:
    """Refuse a topology of another number of ranks than the job's."""
    topology = config.topology
    if topology is None:
        return
    world = dist.get_world_size()
    if topology.world_size != world:
        raise TopologyError(
            f"the topology given to meshplan.install describes {topology.world_size} ranks, the "
            f"job has {world}; install with a topology of all {world} ranks"
        )


def plan_route(
    mesh: MeshEntry,
    config: Config,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
    scatter: bool = True,
) -> Route:
    """The route, cached by the text of the problem; ``scatter`` allows reduce-scatters."""
    pending = [
        i
        for i, (src, dst) in enumerate(zip(src_placements, dst_placements, strict=True))
        if src.is_partial() and not dst.is_partial()
    ]
    problem = Problem.of(
        mesh.layout,
        src_placements,
        dst_placements,
        policy=config.policy_over(mesh.layout, pending),
        contract=config.contract,
        path=config.contract_path,
        scatter=scatter,
        topology=_with_links(config.topology, mesh),
    )
    # By text: a placement may hold a buffer, which the cache must not keep alive.
    key = (problem.src, problem.dst, config.key, scatter)
    route: Route | None = mesh.routes.get(key)
    if route is None:
        # If torch traces, tensors are fake, and a topology caches values that it computes.
        with disable_current_modes():
            with span("plan"):
                planned = plan(problem)
            route = _new_route(planned, config)
        if len(mesh.routes) >= MAX_ROUTES_PER_MESH:
            mesh.routes.clear()
            mesh.by_placement.clear()
        mesh.routes[key] = route
    return route


def _with_links(topology: Topology | None, mesh: MeshEntry) -> Topology | None:
    """``topology``, with the links of processes on CPUs where they were not measured there."""
    if mesh.device_type != "cpu" or (topology is not None and topology.links != Links()):
        return topology
    if topology is None:
        return Topology.unknown(mesh.layout.highest_rank + 1, links=CPU_LINKS)
    return replace(topology, links=CPU_LINKS)


def _new_route(planned: Plan, config: Config) -> Route:
    problem = planned.problem
    asked = str(problem)
    short = find_uncovered_reductions(planned)
    if short and config.strict:
        raise FallbackRefusedError(
            f"{asked}: policy {problem.policy} requires the contract, and this reduction would "
            f"fall through to PyTorch: {short[0].line(problem.layout)}; redistribute to Replicate "
            "on every axis at once, without another sum, use plain Partial, or pass strict=False"
        )
    carriers: dict[int, Carrier] = {}
    for step in planned.reductions:
        axes = _finished_axes(problem, step, [s for s in planned.reductions if s is not step])
        carrier = Carrier(
            placement=PlannedPartial(step, problem.layout, asked, config),
            axes=axes,
            first=step.axes[0],
        )
        carriers.update(dict.fromkeys(axes, carrier))
    torch_events = [
        torch_event(asked, step.line(problem.layout), step.why, fallback=step in short)
        for step in planned.steps
        if step.kind == "torch"
    ]
    if planned.reductions and any(spec.kind == "other" for spec in (*problem.src, *problem.dst)):
        torch_events.append(torch_event(asked, KEPT_ORDER, KEPT_ORDER))
    only = next(iter(carriers.values()), None)
    changed = {i for i, (s, d) in enumerate(zip(problem.src, problem.dst, strict=True)) if s != d}
    whole = (
        only is not None
        and set(only.axes) == changed
        and all(problem.dst[i].kind == "replicate" for i in changed)
    )
    return Route(
        plan=planned,
        carriers=carriers,
        torch_events=tuple(torch_events),
        whole=only if whole else None,
        scatters=any(step.scatter for step in planned.reductions),
    )


def _finished_axes(problem: Problem, step: Step, others: Sequence[Step]) -> tuple[int, ...]:
    """The step's axes, and those of size 1 that it finishes as well."""
    if others:
        # An axis of size 1 would have to belong to one of them; torch moves it without a message.
        return step.axes
    changed = (i for i, (s, d) in enumerate(zip(problem.src, problem.dst, strict=True)) if s != d)
    kind = problem.src[step.axes[0]].kind
    return tuple(
        i
        for i in changed
        if i in step.axes or (problem.layout.sizes[i] == 1 and problem.src[i].kind == kind)
    )


def torch_event(asked: str, planned: str, why: str, *, fallback: bool = False) -> Event:
    """A report entry of a step that falls through to PyTorch."""
    return Event(
        asked=asked,
        planned=planned,
        ran="torch",
        sends=(),
        group="",
        dtype="",
        why=why,
        fallback=fallback,
    )
