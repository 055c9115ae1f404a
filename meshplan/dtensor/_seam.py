"""meshplan's version of the one function that torch calls on every redistribution.

Steps that do not start from ``Partial`` are torch's own, under the guards of ``_guards``. The
others become steps that carry reductions (docs/adr/0002).

Torch caches its lists of steps, and passes the same list for the same redistribution. So each
thread caches its decision for a list, by the identity of the list. A decision is valid for one
mesh, which it does not keep alive, and until one of the facts changes that it depends on.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from meshplan._observing import OBSERVING
from meshplan._torch import (
    SEAM,
    TracingContext,
    TransformInfo,
    flattened_meshes_of,
    local_tensor_mode,
    merging_is_disabled,
    redistribute_module,
    root_mesh_of,
)
from meshplan._uncompiled import never_compiled
from meshplan.dtensor._config import Config
from meshplan.dtensor._graphs import TRACING, epoch, guard_on
from meshplan.dtensor._guards import (
    MovedShard,
    ScatteredShard,
    any_by_coordinate,
    check_moves,
    find_moved_dims,
    find_other_length,
    own_steps,
    split_runs,
    watch_shards,
)
from meshplan.dtensor._partial import (
    THREAD,
    PlannedPartial,
    TrackedSteps,
    check_last_plan,
    flattened_step,
    track_steps,
    unplanned_calls,
)
from meshplan.dtensor._routes import (
    FACTS,
    KEPT_ORDER,
    PLAIN,
    MeshEntry,
    Route,
    change_facts,
    find_route,
    mesh_entry,
    plan_route,
    replaced,
    torch_event,
    with_gathered_topology,
    with_topology_for,
)
from meshplan.execute import COUNTERS, Event, record
from meshplan.flatten import this_rank
from meshplan.planner import Policy, Problem, Step, follows_default_order

MAX_DECISIONS_PER_THREAD = 4096

Optimize = Callable[..., list[TransformInfo]]
Active = tuple[Config, Optimize]
PolicyByAxis = Policy | tuple[tuple[str, Policy], ...]
Placements = tuple[Placement, ...]

# The configuration and torch's own function. One value, so that a redistribution on another thread
# reads both or neither.
_active: Active | None = None
OVERRIDE: ContextVar[PolicyByAxis | None] = ContextVar("meshplan_policy", default=None)
"""The policy of a ``with policy(...)`` block."""
_read_override = OVERRIDE.get


def active() -> Active | None:
    return _active


def activate(now: Active | None) -> None:
    """Set what redistributions of all threads follow from now on."""
    global _active
    _active = now
    change_facts()


def current_config() -> Config | None:
    now = _active
    if now is None:
        return None
    override = OVERRIDE.get()
    return now[0] if override is None else replaced(now[0], policy=override)


class _CurrentConfig:
    """The current configuration as one string, which compiled code compares on every call."""

    @property
    def key(self) -> str:
        config = current_config()
        return "" if config is None else f"{with_gathered_topology(config).key}, epoch {epoch()}"


CURRENT = _CurrentConfig()


def _guard_graph() -> None:
    guard_on(__name__, "CURRENT", "key")


def current_key() -> str:
    # A graph that is loaded from disk is not traced, so it gets its guard here. Nothing else would
    # add one if only its backward reduces.
    _guard_graph()
    config = current_config()
    return "" if config is None else with_gathered_topology(config).key


@dataclass(slots=True)
class _Decision:
    """The steps that replace one list of torch's, and everything that they depend on. Torch's list
    stays in use unchanged where there is nothing to plan.
    """

    infos: list[TransformInfo]  # the reference keeps its identity from being reused
    # Valid if these are unchanged; if torch's list stays, only token and override count, and the
    # default group where shards are moved.
    token: object
    override: PolicyByAxis | None
    mesh: weakref.ref[DeviceMesh]
    src: Placements
    dst: Placements
    original: Optimize
    runs: list[list[TransformInfo]] | None = None  # which torch merges; ``None``: torch's list
    events: Sequence[Event] = ()
    carriers: list[PlannedPartial] = field(default_factory=list)
    scatters: bool = False  # a reduction returns only this rank's shard
    world: weakref.ref[ProcessGroup] | None = None
    cacheable: bool = True  # equal facts always lead to the same decision
    tracked: TrackedSteps | None = None  # if there are reductions to track
    unmerged: bool | None = None  # whether torch's switch kept it from merging steps
    moves: Container[int] = ()  # the dims whose shards are moved; each call checks their lengths

    def holds(self) -> bool:
        """Whether the default group is the same, and this process still computes one shard."""
        return (
            self.world is not None
            and self.world() is dist.group.WORLD
            and not (self.scatters and local_tensor_mode() is not None)
        )

    def steps(self, device_mesh: DeviceMesh) -> list[Any]:
        """The steps; torch merges each run, which depends on the meshes flattened by now."""
        steps: list[TransformInfo] = []
        for run in self.runs or ():
            merged = len(run) > 1
            steps += self.original(run, device_mesh, self.src, self.dst) if merged else run
        return steps


@never_compiled
def planned_transform_infos(
    transform_infos: list[TransformInfo],
    device_mesh: DeviceMesh,
    src_placements: Placements,
    dst_placements: Placements,
) -> list[TransformInfo]:
    """Torch's steps with the reductions planned by meshplan."""
    if OBSERVING.observer is not None:
        _note_policy(sys._getframe(1), device_mesh, src_placements, dst_placements)
    # Every redistribution pays for this function. So there is one look-up of the thread's state,
    # and no call of a Python function before the cached decision.
    state = THREAD.state
    if state.waiting is not None:
        check_last_plan(state)
    decision: _Decision | None = state.decisions.get(id(transform_infos))
    # While torch makes a graph, sizes may be symbols and the graph needs its guard: decide again.
    if (
        decision is not None
        and decision.token is FACTS.token
        and decision.override is _read_override()
        and TRACING.tracing_context is None
        and (
            not decision.moves
            or (
                decision.holds()
                and not find_other_length(sys._getframe(1), device_mesh, decision.moves)
            )
        )
    ):
        if decision.runs is None:
            # It depends on the steps alone: equal meshes share a list of torch's.
            COUNTERS.untouched += 1
            return transform_infos
        if (
            decision.mesh() is device_mesh
            and (decision.src is src_placements or decision.src == src_placements)
            and decision.dst == dst_placements
            and decision.holds()
        ):
            caller = sys._getframe(1)
            for event in decision.events:
                record(event)
            # Torch's executor gets the one tracked list. Another caller gets a list of its own.
            tracked = decision.tracked
            if (
                tracked is not None
                and caller.f_code is tracked.executor
                and (decision.unmerged is None or decision.unmerged == merging_is_disabled())
            ):
                state.waiting = (caller, tracked.asked)
                return tracked
            return track_steps(decision.steps(device_mesh), decision.carriers, caller)
    try:
        return _decide(transform_infos, device_mesh, src_placements, dst_placements)
    except Exception:
        layout = mesh_entry(device_mesh).layout
        # The error may be of this rank alone. Its peers then make these calls.
        for calls, lane in unplanned_calls(device_mesh, layout, src_placements, dst_placements):
            calls.take(lane)
        raise


def _note_policy(
    caller: FrameType, device_mesh: DeviceMesh, src: Placements, dst: Placements
) -> None:
    """Note, for who counts reductions, whether the policy leaves those of this caller to torch."""
    config, noted = current_config(), None
    if config is not None:
        pairs = enumerate(zip(src, dst, strict=True))
        pending = [i for i, (a, b) in pairs if a.is_partial() and not b.is_partial()]
        layout = mesh_entry(device_mesh).layout
        if config.policy_over(layout, pending) != "deterministic":
            noted = id(caller), caller.f_code
    THREAD.state.falls_through = noted


def _falls_through(caller: FrameType) -> bool:
    # A redistribution calls the seam before it reduces, so an old note is of another frame.
    return _active is not None and THREAD.state.falls_through == (
        id(caller),
        caller.f_code,
    )


OBSERVING.falls_through = _falls_through


def _decide(
    infos: list[TransformInfo],
    device_mesh: DeviceMesh,
    src: Placements,
    dst: Placements,
) -> list[TransformInfo]:
    # The token is read before the facts. If one changes meanwhile, the decision is cached under the
    # old token, which is never valid again.
    token, now, override = FACTS.token, _active, OVERRIDE.get()
    if now is None:
        # Another thread has uninstalled since torch looked this function up.
        function: Optimize = getattr(redistribute_module, SEAM)
        return function(infos, device_mesh, src, dst)
    # Whether torch makes a graph on this thread, whose guards can still be added to.
    traced = TracingContext.try_get() is not None
    if traced:
        _guard_graph()
    state, world = THREAD.state, dist.group.WORLD
    if not traced and (state.world is None or state.world() is not world):
        infos = own_steps(sys._getframe(2), infos, state)
    moves = find_moved_dims(infos)
    may_cache = not moves or check_moves(sys._getframe(2), device_mesh, infos)
    config, original = now
    if override is not None:
        config = replaced(config, policy=override)
    # The entry is removed when its mesh is freed.
    held = weakref.ref(device_mesh, partial(state.decisions.pop, id(infos)))
    decision = _Decision(infos, token, override, held, src, dst, original, moves=moves)
    decision.world = None if world is None else weakref.ref(world)
    steps = infos
    if _is_untouched(infos, config):
        COUNTERS.untouched += 1
        first = infos[0].src_dst_placements if infos else None
        # The latter: each rank keeps a part of its own tensor.
        if first and (any_by_coordinate() or (first[0].is_replicate() and first[1].is_shard())):
            mesh = mesh_entry(device_mesh)
            if mesh.descending:
                return watch_shards(mesh, infos, config.strict)
    else:
        mesh = mesh_entry(device_mesh)
        config = with_topology_for(config, device_mesh, src, dst)
        _plan(decision, mesh, config, device_mesh, traced)
        steps = decision.steps(device_mesh)
        for event in decision.events:
            record(event)
        if mesh.descending:
            steps = watch_shards(mesh, steps, config.strict)
        # Last: dynamo warns about the use of a frame, and no longer compiles this one by now.
        steps = track_steps(steps, decision.carriers, sys._getframe(2))
        if mesh.descending or not decision.cacheable:
            return steps
    if may_cache and not traced:
        _cache(decision, steps)
    return steps


def _plan(
    decision: _Decision,
    mesh: MeshEntry,
    config: Config,
    device_mesh: DeviceMesh,
    traced: bool,
) -> None:
    infos, src, dst = decision.infos, decision.src, decision.dst
    route = find_route(mesh, config, device_mesh, src, dst)
    simulated = local_tensor_mode() is not None
    events: list[Event] = []
    if route.whole is not None and infos:
        steps = [carrier_step(route.whole, infos[0].logical_shape, device_mesh)]
    else:
        if route.scatters and simulated:
            # One process simulates all ranks, and a reduction over one shard needs one rank.
            route = plan_route(mesh, config, src, dst, scatter=False)
        ordered = plan_order_steps(route, infos, device_mesh) if route.plan.ordered else None
        if ordered is None and route.plan.ordered:
            route = plan_route(mesh, config, src, dst, scatter=False)
            events.append(torch_event(str(route.plan.problem), KEPT_ORDER, KEPT_ORDER))
        steps = torch_order_steps(route, infos, device_mesh) if ordered is None else ordered
    carriers = [p for step in steps if isinstance(p := step.src_dst_placements[0], PlannedPartial)]
    flattened = bool(flattened_meshes_of(root_mesh_of(device_mesh)))
    runs, reasons = split_runs(steps, mesh.layout, this_rank(), flattened, traced)
    # Whether torch would merge wrongly depends on the meshes flattened by now.
    cacheable = not (traced or reasons or simulated)
    asked = f"({', '.join(map(str, src))}) -> ({', '.join(map(str, dst))}) on {mesh.layout}"
    events += [torch_event(asked, reason, reason) for reason in reasons if flattened]
    if route.whole is None or not infos:
        events += route.torch_events
    decision.runs, decision.events, decision.carriers = runs, events, carriers
    decision.scatters, decision.cacheable = route.scatters, cacheable


def _cache(made: _Decision, steps: list[Any]) -> None:
    """Cache a decision, unless it holds symbols or buffers of others, which would stay alive."""
    if isinstance(steps, TrackedSteps):
        made.tracked = steps
        if any(len(run) > 1 for run in made.runs or ()):
            made.unmerged = merging_is_disabled()
    shapes = (size for info in made.infos for size in info.logical_shape)
    if not (
        all(type(p) in PLAIN for p in (*made.src, *made.dst))
        and all(type(size) is int for size in shapes)
        and (made.tracked is not None or not made.carriers)
    ):
        return
    decisions = THREAD.state.decisions
    if len(decisions) >= MAX_DECISIONS_PER_THREAD:
        decisions.clear()
    decisions[id(made.infos)] = made


def _is_untouched(infos: list[TransformInfo], config: Config) -> bool:
    """Whether there is nothing to plan and no run to merge: torch's list is used unchanged."""
    if len(infos) > 1:
        return False
    return (
        not infos
        or not infos[0].src_dst_placements[0].is_partial()
        or (
            config.policy == "fast"
            # ``find_route`` checks the algorithm of a reduce-scatter.
            and not ("NCCL_ALGO" in os.environ and infos[0].src_dst_placements[1].is_shard())
        )
    )


# Torch's steps with planned reductions among them, in torch's order or in the plan's.
#
# Moves of single axes stay torch's; only their order is the plan's. Shapes come from torch's list,
# so nothing here depends on how torch computes them.

_REPLICATE = Replicate()


def carrier_step(
    carrier: PlannedPartial, logical_shape: Any, device_mesh: DeviceMesh
) -> TransformInfo:
    """The step in which torch's executor calls a planned reduction."""
    step: TransformInfo = flattened_step(
        mesh_dim=carrier.step.axes[0],
        src_dst_placements=(carrier, _REPLICATE),
        logical_shape=logical_shape,
        mesh=device_mesh,
        original_mesh_dims=carrier.axes,
    )
    return step


def torch_order_steps(
    route: Route, transform_infos: Sequence[TransformInfo], device_mesh: DeviceMesh
) -> list[TransformInfo]:
    """Put each reduction where torch's first step of its axes stood. Reductions commute with the
    moves of other axes, and the earliest place is never after a gather of unfinished values.
    """
    if not route.carriers:
        return list(transform_infos)
    steps: list[TransformInfo] = []
    placed: list[PlannedPartial] = []
    finished: set[int] = set()
    for info in transform_infos:
        carrier = route.carriers.get(info.mesh_dim)
        if carrier is None or info.mesh_dim in finished:
            steps.append(info)
            continue
        finished.add(info.mesh_dim)
        if carrier not in placed:
            placed.append(carrier)
            steps.append(carrier_step(carrier, info.logical_shape, device_mesh))
        target = info.src_dst_placements[1]
        if not target.is_replicate():
            steps.append(_step(info.mesh_dim, Replicate(), target, info))
    return steps


def plan_order_steps(
    route: Route, transform_infos: Sequence[TransformInfo], device_mesh: DeviceMesh
) -> list[TransformInfo] | None:
    """The plan's steps in its order; ``None`` if torch's shards are not nested in default order."""
    problem = route.plan.problem
    if not _in_default_order(problem, transform_infos):
        return None
    first = transform_infos[0]
    steps: list[TransformInfo] = []
    for step in route.plan.steps:
        if step.kind in ("all_reduce", "reduce_scatter"):
            carrier = route.carriers[step.axes[0]]
            steps.append(carrier_step(carrier, first.logical_shape, device_mesh))
            steps += [_step(i, Replicate(), ScatteredShard(dim), first) for i, dim in step.scatter]
        elif problem.layout.sizes[step.axes[0]] > 1:
            move = _move(step, transform_infos)
            if move is None:
                return None
            steps.append(move)
    return steps


def _in_default_order(problem: Problem, transform_infos: Sequence[TransformInfo]) -> bool:
    """Whether torch's steps nest the shards of each dim in DTensor's default order."""

    def dim(placement: Placement) -> int | None:
        return placement.dim if isinstance(placement, Shard) else None

    moves = [(info.mesh_dim, *map(dim, info.src_dst_placements)) for info in transform_infos]
    return follows_default_order(problem, moves)  # type: ignore[arg-type]


def _move(step: Step, transform_infos: Sequence[TransformInfo]) -> TransformInfo | None:
    (axis,) = step.axes
    assert step.src is not None
    assert step.dst is not None
    if step.kind == "slice":
        assert step.dst.dim is not None
        return _step(axis, Replicate(), Shard(step.dst.dim), transform_infos[0])
    for info in transform_infos:
        if info.mesh_dim == axis and str(info.src_dst_placements[0]) == step.src.text:
            if step.src.dim is None:
                return info
            target = Replicate() if step.dst.dim is None else Shard(step.dst.dim)
            return _step(axis, MovedShard(step.src.dim), target, info)
    return None


def _step(axis: int, src: Placement, dst: Placement, like: TransformInfo) -> TransformInfo:
    return TransformInfo(
        mesh_dim=axis, src_dst_placements=(src, dst), logical_shape=like.logical_shape
    )
