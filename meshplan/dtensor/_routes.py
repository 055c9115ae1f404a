"""Routes: the plan and the carriers of a redistribution, cached by mesh, source and target."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
)
from torch.utils.weak import WeakIdKeyDictionary

from meshplan._spans import span
from meshplan._torch import (
    default_store,
    device_types_of,
    disable_current_modes,
    flattened_meshes_of,
    local_tensor_mode,
    root_mesh_of,
    thread_of_mesh,
)
from meshplan.dtensor._config import Config
from meshplan.dtensor._partial import PlannedPartial, unplanned_calls
from meshplan.errors import FallbackRefusedError, TopologyError
from meshplan.execute import Event
from meshplan.flatten import default_timeout, discover, is_worker_thread, this_rank
from meshplan.flatten._threads import refuse_forked
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
from meshplan.topology._model import Cluster

# The topology of the job, gathered once for each default group if ``install`` got none, and only
# where all ranks wait for each other anyway (docs/adr/0007).

_LOG = logging.getLogger("meshplan")


@dataclass(slots=True)
class _GatheredCluster:
    """The gathered cluster of one default group; ``None`` if the ranks are simulated."""

    cluster: Cluster | None
    by_request: bool  # in ``prepare`` or ``install``, and not in some reduction


# Owned by this module; an entry goes with its default group.
_GATHERED: weakref.WeakKeyDictionary[ProcessGroup, _GatheredCluster] = weakref.WeakKeyDictionary()
_GATHER_LOCK = threading.Lock()


def discovered_cluster() -> Cluster | None:
    world = dist.group.WORLD
    gathered = None if world is None else _GATHERED.get(world)
    return None if gathered is None else gathered.cluster


def with_gathered_topology(config: Config) -> Config:
    """``config`` with the gathered topology, if it has none of its own."""
    cluster = None if config.topology is not None else discovered_cluster()
    return config if cluster is None else replaced(config, topology=cluster.topology)


@lru_cache(maxsize=64)
def replaced(config: Config, **changed: Any) -> Config:
    return replace(config, **changed)


def with_topology_for(
    config: Config,
    device_mesh: DeviceMesh,
    src: Sequence[Placement],
    dst: Sequence[Placement],
) -> Config:
    """``with_gathered_topology``, which the ranks gather now if this redistribution makes each wait
    for all others. A worker thread uses it only if ``prepare`` or ``install`` gathered it: whether
    a redistribution of the main thread has by now differs between ranks.
    """
    world = dist.group.WORLD
    worker = is_worker_thread()
    if worker:
        config = replaced(config, worker_thread=True)
    if config.topology is not None or world is None:
        return config
    gathered = _GATHERED.get(world)
    if worker:
        return with_gathered_topology(config) if gathered and gathered.by_request else config
    if gathered is None:
        layout = mesh_entry(device_mesh).layout
        if layout.world_size != world.size() or not _reduces_over_all(layout, src, dst):
            return config
        made = unplanned_calls(device_mesh, layout, src, dst)
        # In words of all ranks. Along several axes they know the names of their own groups only:
        # equal meshes have equal words, and ranks find verdicts in the order of their calls.
        wide = [device_mesh.get_group(i) for i, size in enumerate(layout.sizes) if size > 1]
        name = wide[0].group_name if len(wide) == 1 else layout
        call = f"{name} {[(lane, calls.count(lane)) for calls, lane in made]}"
        _gather_once(world, config.timeout, "the first reduction", call)
    return with_gathered_topology(config)


def gather_topology(
    config: Config, layout: Layout | None, what: str, timeout: float | None = None
) -> Config:
    """``config`` with a topology, if it has none of its own; the ranks gather it if need be. Every
    rank of the default group calls it, or none where ``layout`` does not hold all of them.
    """
    world = dist.group.WORLD
    if config.topology is not None or world is None:
        return config
    gathered = _GATHERED.get(world)
    if gathered is None:
        if layout is not None and layout.world_size != world.size():
            return config
        wait = config.timeout if timeout is None else timeout
        gathered = _gather_once(world, wait, what, "")
    if not gathered.by_request:
        gathered.by_request = True
        change_facts()
    return with_gathered_topology(config)


def _gather_once(world: ProcessGroup, wait: float | None, what: str, call: str) -> _GatheredCluster:
    by_request = not call
    # One process simulates all ranks: there are no other hosts to ask.
    if local_tensor_mode() is not None:
        return _GatheredCluster(None, by_request)
    refuse_forked()
    with _GATHER_LOCK:
        gathered = _GATHERED.get(world)
        if gathered is None:
            simulated = dist.get_backend() == "fake"
            cluster = None if simulated else _gather(world, wait, what, call)
            gathered = _GATHERED[world] = _GatheredCluster(cluster, by_request)
            change_facts()
    return gathered


def _gather(world: ProcessGroup, timeout: float | None, what: str, call: str) -> Cluster:
    wait = default_timeout(device_types_of(world)[0].type) if timeout is None else timeout
    # Torch may be tracing, and these values must be computed outside of the trace.
    with disable_current_modes():
        cluster = discover(default_store(), this_rank(), world.size(), wait, what=what, call=call)
    if this_rank() == 0:
        _LOG.info("%s; %s", cluster.origin, cluster.topology)
        for one in cluster.notes:
            _LOG.log(logging.WARNING if one.note.code else logging.INFO, "%s", one.note)
    return cluster


def _reduces_over_all(layout: Layout, src: Sequence[Placement], dst: Sequence[Placement]) -> bool:
    """Whether every axis with several ranks is reduced, so that all ranks wait for all others."""
    return all(
        size == 1 or (before.is_partial() and not after.is_partial())
        for size, before, after in zip(layout.sizes, src, dst, strict=True)
    )


# Caches of each live mesh: its layout, and the routes planned for it. The seam has further ones for
# each thread, which are valid for one token of ``FACTS``.


@dataclass(slots=True, weakref_slot=True)
class MeshEntry:
    """The cached values of one mesh."""

    layout: Layout
    device_type: str
    descending: frozenset[int]  # axes along which ranks do not ascend in every group
    # Those along which tensors were sharded in the order of coordinates (``_guards``).
    by_coordinate: set[int] = field(default_factory=set)
    routes: dict[tuple[Any, ...], Any] = field(default_factory=dict)


# Neither table keeps a mesh alive. _MESHES finds the entry of a mesh by identity; _EQUAL lets equal
# meshes, which torch treats as one, share an entry. Meshes are not hashed for this: a mesh stores
# its hash, which differs between processes, and torch's cache of compiled graphs on disk includes
# every stored value of a mesh.
_MESHES = WeakIdKeyDictionary()
_EQUAL: weakref.WeakValueDictionary[tuple[Any, ...], MeshEntry] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class _Facts:
    """``token`` changes with the installation, the topology, and the order of shards."""

    __slots__ = ("token",)

    def __init__(self) -> None:
        self.token = object()


FACTS = _Facts()


def change_facts() -> None:
    """Invalidate every cached decision. Call it after the change."""
    FACTS.token = object()


def mesh_entry(device_mesh: DeviceMesh) -> MeshEntry:
    found: MeshEntry | None = _MESHES.get(device_mesh)
    if found is not None:
        return found
    with _LOCK:
        return _entry(device_mesh)


def _entry(device_mesh: DeviceMesh) -> MeshEntry:
    # While torch traces, the mesh's tensor of ranks must be read outside of the trace.
    with disable_current_modes():
        layout = Layout.from_mesh(device_mesh)
    # The values that torch compares; the thread counts only where threads simulate ranks.
    key = (layout, device_mesh.device_type, thread_of_mesh(device_mesh))
    entry = _EQUAL.get(key)
    if entry is None:
        wide = [i for i, size in enumerate(layout.sizes) if size > 1]
        descending = frozenset(i for i in wide if not layout.ascends(i))
        entry = MeshEntry(layout, device_mesh.device_type, descending)
        _EQUAL[key] = entry
    _MESHES[device_mesh] = entry
    return entry


MAX_ROUTES_PER_MESH = 1024

KEPT_ORDER = (
    "the shards of a dim are not nested in the default order: torch's moves stay in torch's order, "
    "around the reduction"
)
PLAIN = (Partial, Replicate, Shard)


@dataclass(frozen=True, slots=True)
class Route:
    """The execution of one (source, target) on one mesh."""

    plan: Plan
    carriers: dict[int, PlannedPartial]
    torch_events: tuple[Event, ...]  # of the steps that fall through to PyTorch
    whole: PlannedPartial | None  # if one reduction is the whole redistribution
    scatters: bool  # whether a reduction returns only this rank's shard


def find_route(
    mesh: MeshEntry,
    config: Config,
    device_mesh: DeviceMesh,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
) -> Route:
    """The route of a redistribution: checked, and planned the first time."""
    _check_named_axes(config, device_mesh, mesh.layout)
    _check_world(config)
    route = plan_route(mesh, config, src_placements, dst_placements)
    _check_scatters(route.plan, device_mesh)
    return route


def _check_named_axes(config: Config, device_mesh: DeviceMesh, layout: Layout) -> None:
    """Refuse a policy for an axis that neither the mesh nor its root nor a flattened mesh has."""
    root = root_mesh_of(device_mesh)
    for name in () if isinstance(config.policy, str) else dict(config.policy):
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
    carriers: dict[int, PlannedPartial] = {}
    for step in planned.reductions:
        axes = _finished_axes(problem, step, [s for s in planned.reductions if s is not step])
        carrier = PlannedPartial(step, problem.layout, asked, config, axes)
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
