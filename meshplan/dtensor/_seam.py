"""The one function that torch calls on every redistribution, in meshplan's version.

It takes torch's steps and gives steps back: the plain partial axes become one step that carries a
planned reduction, what was to be scattered is sliced from the finished value, and all the rest is
torch's, under the guards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from meshplan.collectives import Event, record
from meshplan.dtensor._config import Config
from meshplan.dtensor._guards import merge_safely
from meshplan.dtensor._partial import AlreadyCut, PlannedPartial
from meshplan.flatten import this_rank
from meshplan.layout import Layout
from meshplan.planner import Plan, Problem, Step, plan

__all__ = ["layout_of", "planned_steps"]

MAX_ROUTES_PER_MESH = 1024

_REPLICATE = Replicate()
_PLAIN = (Partial, Replicate, Shard)

TransformInfo = Any
Optimize = Callable[..., list[TransformInfo]]


@dataclass(frozen=True, slots=True)
class _Carrier:
    """One planned reduction and the axes that it answers for, those of size 1 included."""

    placement: PlannedPartial
    axes: tuple[int, ...]
    first: int
    # Mesh axes that the reduction itself cuts, outermost first.
    cut: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Route:
    """What becomes of one (source, target) on one mesh."""

    carriers: dict[int, _Carrier]
    left: tuple[Event, ...]
    # The one carrier, where it alone is the whole redistribution.
    whole: _Carrier | None
    cuts: bool


@dataclass(slots=True)
class _Mesh:
    layout: Layout
    routes: dict[tuple[Any, ...], _Route] = field(default_factory=dict)
    # The same by torch's own placements, for those that are plain values.
    by_placement: dict[tuple[Any, ...], _Route] = field(default_factory=dict)


# Owned by this module; an entry goes with its mesh, and holds no mesh itself.
_MESHES: weakref.WeakKeyDictionary[DeviceMesh, _Mesh] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def planned_steps(
    config: Config,
    original: Optimize,
    transform_infos: list[TransformInfo],
    device_mesh: DeviceMesh,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
) -> list[TransformInfo]:
    """Torch's steps with the reductions planned by meshplan.

    Args:
        config: what is installed.
        original: torch's ``_optimize_transform_infos``.
        transform_infos, device_mesh, src_placements, dst_placements: as torch gives them.
    """
    mesh = _mesh_entry(device_mesh)
    by_placement = (src_placements, dst_placements, config.key)
    route = mesh.by_placement.get(by_placement)
    if route is None:
        _check_named_axes(config, device_mesh, mesh.layout)
        route = _route(mesh, config, src_placements, dst_placements)
        if all(type(p) in _PLAIN for p in (*src_placements, *dst_placements)):
            mesh.by_placement[by_placement] = route
    if route.whole is not None and transform_infos:
        return [_carried(route.whole, transform_infos[0].logical_shape, device_mesh)]
    if route.cuts and not _may_cut(route, transform_infos):
        route = _route(mesh, config, src_placements, dst_placements, scatter=False)
    for event in route.left:
        record(event)
    steps = _place(route, transform_infos, device_mesh) if route.carriers else transform_infos
    if len(steps) < 2:
        return list(steps)

    def merge(run: list[TransformInfo]) -> list[TransformInfo]:
        return original(run, device_mesh, src_placements, dst_placements)

    flattened = bool(device_mesh._get_root_mesh()._flatten_mapping)
    merged, reasons = merge_safely(steps, mesh.layout, this_rank(), merge, flattened)
    for reason in reasons:
        record(_torch_event(_text(mesh.layout, src_placements, dst_placements), reason, reason))
    return merged


def layout_of(device_mesh: DeviceMesh) -> Layout:
    """The layout of a mesh, read once while the mesh lives."""
    return _mesh_entry(device_mesh).layout


def _mesh_entry(device_mesh: DeviceMesh) -> _Mesh:
    with _LOCK:
        entry = _MESHES.get(device_mesh)
        if entry is None:
            # While tracing, the mesh's rank tensor must be read for real.
            with _disable_current_modes():
                entry = _Mesh(Layout.from_mesh(device_mesh))
            _MESHES[device_mesh] = entry
        return entry


def _check_named_axes(config: Config, device_mesh: DeviceMesh, layout: Layout) -> None:
    """Refuse a policy for an axis that neither the mesh nor its root nor a flattened mesh has."""
    root = device_mesh._get_root_mesh()
    for name in config.named_axes:
        if name not in layout.axes and name not in root._flatten_mapping:
            layout_of(root).axis_index(name)


def _route(
    mesh: _Mesh,
    config: Config,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
    scatter: bool = True,
) -> _Route:
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
        path=config.path,
        scatter=scatter,
    )
    # By text: placements that hold buffers must not be kept alive here.
    key = (problem.src, problem.dst, config.key, scatter)
    route = mesh.routes.get(key)
    if route is None:
        route = _new_route(plan(problem), config)
        if len(mesh.routes) >= MAX_ROUTES_PER_MESH:
            mesh.routes.clear()
            mesh.by_placement.clear()
        mesh.routes[key] = route
    return route


def _new_route(planned: Plan, config: Config) -> _Route:
    problem = planned.problem
    asked = str(problem)
    carriers: dict[int, _Carrier] = {}
    for step in planned.reductions:
        axes = _covered(problem, step, [s for s in planned.reductions if s is not step])
        carrier = _Carrier(
            placement=PlannedPartial(step, problem.layout, asked, config),
            axes=axes,
            first=step.axes[0],
            cut=tuple(axis for axis, _ in step.scatter),
        )
        carriers.update(dict.fromkeys(axes, carrier))
    left = tuple(
        _torch_event(asked, step.line(problem.layout), step.why)
        for step in planned.steps
        if step.kind == "torch"
    )
    only = next(iter(carriers.values()), None)
    changed = {i for i, (s, d) in enumerate(zip(problem.src, problem.dst, strict=True)) if s != d}
    whole = (
        only is not None
        and set(only.axes) == changed
        and all(problem.dst[i].kind == "replicate" for i in changed)
    )
    cuts = any(carrier.cut for carrier in carriers.values())
    return _Route(carriers=carriers, left=left, whole=only if whole else None, cuts=cuts)


def _covered(problem: Problem, step: Step, others: Sequence[Step]) -> tuple[int, ...]:
    """The step's axes, and those of size 1 that become finished with it."""
    if others:
        return step.axes
    changed = (i for i, (s, d) in enumerate(zip(problem.src, problem.dst, strict=True)) if s != d)
    kind = problem.src[step.axes[0]].kind
    return tuple(
        i
        for i in changed
        if i in step.axes or (problem.layout.sizes[i] == 1 and problem.src[i].kind == kind)
    )


def _place(
    route: _Route, transform_infos: Sequence[TransformInfo], device_mesh: DeviceMesh
) -> list[TransformInfo]:
    """Put each reduction where torch's first step of its axes stood.

    Reductions commute with the movements of other axes, and the earliest place is never after a
    gather of values that are not finished yet.
    """
    steps: list[TransformInfo] = []
    placed: list[_Carrier] = []
    finished: set[int] = set()
    for info in transform_infos:
        carrier = route.carriers.get(info.mesh_dim)
        if carrier is None or info.mesh_dim in finished:
            steps.append(info)
            continue
        finished.add(info.mesh_dim)
        if carrier not in placed:
            placed.append(carrier)
            steps.append(_carried(carrier, info.logical_shape, device_mesh))
        target = info.src_dst_placements[1]
        if info.mesh_dim in carrier.cut:
            target = AlreadyCut(target.dim)
        if not target.is_replicate():
            steps.append(
                _redistribute._TransformInfo(
                    mesh_dim=info.mesh_dim,
                    src_dst_placements=(Replicate(), target),
                    logical_shape=info.logical_shape,
                )
            )
    return steps


def _may_cut(route: _Route, transform_infos: Sequence[TransformInfo]) -> bool:
    """Whether the planned cuts are those that torch would make, on this very rank."""
    if local_tensor_mode() is not None:
        # One process plays all ranks: there is no rank of its own whose shard it could compute.
        return False
    for carrier in route.carriers.values():
        order = [info.mesh_dim for info in transform_infos if info.mesh_dim in carrier.cut]
        if tuple(order) != carrier.cut:
            return False
    return True


def _carried(carrier: _Carrier, logical_shape: Any, device_mesh: DeviceMesh) -> TransformInfo:
    return _redistribute._FlattenedTransformInfo(
        mesh_dim=carrier.first,
        src_dst_placements=(carrier.placement, _REPLICATE),
        logical_shape=logical_shape,
        mesh=device_mesh,
        original_mesh_dims=carrier.axes,
    )


def _torch_event(asked: str, planned: str, why: str) -> Event:
    return Event(asked=asked, planned=planned, ran="torch", sends=(), group="", dtype="", why=why)


def _text(layout: Layout, src: Sequence[Placement], dst: Sequence[Placement]) -> str:
    return f"({', '.join(map(str, src))}) -> ({', '.join(map(str, dst))}) on {layout}"
