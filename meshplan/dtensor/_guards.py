"""Let torch merge consecutive collectives over a user's flattened mesh only if the result is right.

Torch merges a run of equal steps as soon as a flattened mesh of the right layout exists. Two of
these merges corrupt data silently:

* an all-gather whose nested chunks are not the chunks of the flat dimension;
* an all-gather or reduce-scatter over ranks that do not ascend with the mesh coordinate, because
  torch sorts the ranks of the flattened group.

A third merge is wrong for placements with arithmetic of their own: torch takes a norm for a sum.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from meshplan._calls import calls_of
from meshplan._chunks import chunk_size, chunk_sizes, nested_chunk_sizes
from meshplan._torch import (
    TransformInfo,
    cached_operators,
    cached_steps,
    collective_of,
    forget_operators,
    forget_planners,
    local_tensor_mode,
    new_steps,
    shard_order_of,
)
from meshplan._torch.placements import ShardHooks
from meshplan._uncompiled import never_compiled
from meshplan.dtensor._partial import ThreadState
from meshplan.dtensor._routes import MeshEntry, change_facts, mesh_entry
from meshplan.errors import (
    FallbackRefusedError,
    PlacementError,
    ShardOrderError,
)
from meshplan.execute import Event, record
from meshplan.layout import Layout

# Shards split by steps of a plan, and shards along an axis whose ranks do not ascend.
#
# Along an axis whose ranks do not ascend with the coordinate, torch scatters, reduce-scatters and
# gathers by sorted rank, but slices by coordinate, as meshplan always does. No tensor records its
# kind. So meshplan marks shards by coordinate, and refuses to let torch gather them. Results
# computed from them have no mark: once such shards exist, a gather of unmarked shards warns.

_MARK = "_meshplan_cut_by_coordinate"
_any_marked = False


def any_by_coordinate() -> bool:
    """Whether shards may exist that torch would gather in another order than their own."""
    return _any_marked


def watch_shards(mesh: MeshEntry, transform_infos: Iterable[Any], strict: bool) -> list[Any]:
    """Torch's steps, with checks on those that make or move shards along a descending axis."""
    steps = []
    for info in transform_infos:
        src, dst = info.src_dst_placements
        if info.mesh_dim in mesh.descending:
            if src.is_replicate() and type(dst) is Shard:
                watched = (src, _WatchedShard(dst.dim, mesh, strict))
                info = replace(info, src_dst_placements=watched)
            elif type(src) is Shard and info.mesh_dim in mesh.by_coordinate:
                watched = (_WatchedShard(src.dim, mesh, strict), dst)
                info = replace(info, src_dst_placements=watched)
        steps.append(info)
    return steps


def _mark(mesh: MeshEntry, axis: int, shard: Tensor) -> Tensor:
    global _any_marked
    if axis in mesh.descending:
        setattr(shard, _MARK, True)
        mesh.by_coordinate.add(axis)
        if not _any_marked:
            _any_marked = True
            change_facts()
    return shard


class ScatteredShard(ShardHooks):
    """A ``Shard`` that a planned reduction has already produced: torch's step to it does nothing,
    and keeps torch's own trace of placements correct.
    """

    @never_compiled
    def replicate_to_shard(
        self,
        tensor: Tensor,
        mesh: DeviceMesh,
        axis: int,
        shard_index: Any,
    ) -> Tensor:
        return _mark(mesh_entry(mesh), axis, tensor)


class MovedShard(ShardHooks):
    """A ``Shard`` that a step moves to another dim, at any place in the order of steps."""

    @never_compiled
    def to_new_shard_dim(
        self,
        tensor: Tensor,
        mesh: DeviceMesh,
        axis: int,
        logical_shape: Any,
        new_dim: int,
    ) -> Any:
        # This axis does not shard the new dim yet, so all its ranks have the local length.
        shape = list(logical_shape)
        shape[new_dim] = tensor.shape[new_dim]
        return super().to_new_shard_dim(tensor, mesh, axis, shape, new_dim)


class _WatchedShard(ShardHooks):
    """A ``Shard`` that marks the shards torch slices by coordinate, and refuses to move those."""

    _mesh: MeshEntry
    _strict: bool

    def __init__(self, dim: int, mesh: MeshEntry, strict: bool) -> None:
        super().__init__(dim)
        # Torch's placements are frozen dataclasses.
        object.__setattr__(self, "_mesh", mesh)
        object.__setattr__(self, "_strict", strict)

    @never_compiled
    def replicate_to_shard(self, tensor: Tensor, mesh: DeviceMesh, axis: int, *rest: Any) -> Tensor:
        return _mark(
            self._mesh,
            axis,
            super().replicate_to_shard(tensor, mesh, axis, *rest),
        )

    @never_compiled
    def to_replicate_tensor(self, tensor: Tensor, mesh: DeviceMesh, axis: int, *rest: Any) -> Any:
        self._check(tensor, axis)
        return super().to_replicate_tensor(tensor, mesh, axis, *rest)

    @never_compiled
    def to_new_shard_dim(self, tensor: Tensor, mesh: DeviceMesh, axis: int, *rest: Any) -> Any:
        self._check(tensor, axis)
        return super().to_new_shard_dim(tensor, mesh, axis, *rest)

    def _check(self, shard: Tensor, axis: int) -> None:
        layout = self._mesh.layout
        name = f"axis {layout.axes[axis]} of {layout}"
        where = f"shards along {name}, whose ranks do not ascend"
        fix = "make a mesh whose ranks ascend along each axis"
        if getattr(shard, _MARK, False):
            raise ShardOrderError(
                f"torch would gather {where}, in the order of sorted ranks, but they were cut in "
                f"the order of mesh coordinates; {fix}, or go from Partial to Replicate"
            )
        if self._strict:
            raise FallbackRefusedError(
                f"torch would gather {where}, in the order of sorted ranks, and other shards "
                f"were cut there in the order of mesh coordinates; {fix}, or write "
                "strict=False if torch has scattered these"
            )
        why = f"in the order of sorted ranks, perhaps not that of {where}"
        dtype = str(shard.dtype).removeprefix("torch.")
        record(
            Event(
                f"a gather along {name}",
                why,
                "torch",
                (),
                "",
                dtype,
                why,
                fallback=True,
            )
        )
        warnings.warn(
            f"meshplan: torch gathers {where}, in the order of sorted ranks; that is wrong for "
            f"what was computed from shards cut in the order of mesh coordinates; {fix}",
            stacklevel=2,
        )


# Torch moves shards as if they had the lengths of its chunks: it returns elements of no rank,
# or gloo ends ranks. No header travels with a move, so each rank checks its own shard before.

_any_refused = False


def find_moved_dims(infos: Iterable[TransformInfo]) -> set[int]:
    """The dims whose shards are moved, or come in place of those of another dim."""
    pairs = [info.src_dst_placements for info in infos if info.src_dst_placements[0].is_shard()]
    shards: list[Any] = [one for pair in pairs for one in pair if one.is_shard()]
    return {shard.dim for shard in shards}


def check_moves(executor: FrameType, mesh: DeviceMesh, infos: Sequence[TransformInfo]) -> bool:
    """Raise PlacementError if this rank's shard has another length. Its peers may be in this move,
    so no later call may reach them: the groups stop, and raise GroupStateError from then on.
    Returns whether no move was ever refused. Else no decision is cached: equal meshes, of which
    some have stopped groups, share it.
    """
    global _any_refused
    error = find_other_length(executor, mesh, find_moved_dims(infos))
    if not error and not _any_refused:
        return True
    calls = [calls_of(mesh.get_group(info.mesh_dim)) for info in infos]
    for one in calls:
        one.refuse_stopped()
    if error:
        _any_refused = True
        change_facts()
        for one in calls:
            one.stop(error)
        raise error
    return False


def find_other_length(
    executor: FrameType, mesh: DeviceMesh, dims: Container[int]
) -> PlacementError | None:
    """The error if the tensor that torch's ``executor`` moves lacks the lengths of its spec on
    ``dims``. Shapes of cached steps may be those of another rank, which this process has simulated.
    """
    values, place = executor.f_locals, mesh.get_coordinate()
    shard, spec = values.get("local_tensor"), values.get("current_spec")
    if shard is None or spec is None or place is None or local_tensor_mode() is not None:
        return None
    placements = spec.placements
    # Shards other than chunks have no order. Each move pays for this loop: it has no generator.
    for dim, axes in shard_order_of(spec) or ():
        length, own = (size := spec.shape[dim]), tuple(shard.shape[dim : dim + 1])
        is_int = {*map(type, (size, *own))} == {int}
        is_chunked = {*map(type, map(placements.__getitem__, axes))} == {Shard}
        if dim not in dims or not is_int or not is_chunked:
            continue
        for axis in axes:
            length = chunk_size(length, mesh.size(axis), place[axis])
        if own != (length,):
            return PlacementError(
                f"DTensor moves {length} elements on dim {dim} of this rank's shard, which has "
                f"shape {list(shard.shape)}: it splits {size} elements over the mesh as "
                "torch.chunk does. Pass such shards to DTensor.from_local, or gather others by "
                "meshplan.deterministic_all_gather(local, sizes=...). Ranks whose shards are right "
                "wait for this one until their timeout"
            )
    return None


_lock = threading.Lock()
_cached_world: Any = None


def follow_world(state: ThreadState, again: bool = False) -> None:
    """Forget what torch has cached for the rank of this process in another default group, or in
    this one (``again``), which is to be destroyed. Torch caches steps, and for each thread what it
    calls operators with, such as the size of a view, by equal meshes.
    """
    global _cached_world
    world = dist.group.WORLD
    if world is None or (not again and state.world is not None and state.world() is world):
        return
    with _lock:
        if again or _cached_world is None or _cached_world() is not world:
            cached_steps.cache_clear()
            forget_planners()
            _cached_world = weakref.ref(world)
    cached_operators.cache_clear()
    forget_operators()
    state.world = None if again else _cached_world


def own_steps(
    executor: FrameType,
    infos: list[TransformInfo],
    state: ThreadState,
) -> list[TransformInfo]:
    """``infos``, made again in the first call of a thread in which this process may have another
    rank: they are torch's, with the shapes of the rank that it had.
    """
    values = executor.f_locals
    source, target = values.get("current_spec"), values.get("target_spec")
    if dist.group.WORLD is None or source is None or target is None:
        return infos
    follow_world(state)
    return new_steps(source, target, values.get("use_graph_based_transform"))


_MERGEABLE = ("all_gather", "all_reduce", "reduce_scatter")


def split_runs(
    infos: Sequence[TransformInfo],
    layout: Layout,
    rank: int,
    flattened: bool,  # whether a part of the mesh is: else torch merges nothing, and none is split
    traced: bool,
) -> tuple[list[list[TransformInfo]], list[str]]:
    """The runs that torch merges, without those that it would merge wrongly; and why it would."""
    runs: list[list[TransformInfo]] = []
    reasons: list[str] = []
    # While torch traces, a size may be a symbol. A question about it would become a guard of the
    # graph, so it is read only if the user has flattened a mesh.
    asks = flattened or not traced
    for run in _runs(infos):
        reason = _objection(run, layout, rank) if asks and len(run) > 1 else None
        if reason is not None:
            reasons.append(reason)
        runs += [run] if reason is None or not flattened else [[info] for info in run]
    return runs, reasons


def _runs(infos: Sequence[TransformInfo]) -> list[list[TransformInfo]]:
    runs: list[list[TransformInfo]] = []
    for info in infos:
        if runs and _may_join(runs[-1][0], info):
            runs[-1].append(info)
        else:
            runs.append([info])
    return runs


def _may_join(first: TransformInfo, info: TransformInfo) -> bool:
    """Whether one collective could do both steps."""
    kinds = collective_of(first), collective_of(info)
    if kinds[0] != kinds[1] or kinds[0] not in _MERGEABLE:
        return False
    (src, dst), (other_src, other_dst) = (
        first.src_dst_placements,
        info.src_dst_placements,
    )
    if type(src) is not type(other_src) or dst != other_dst:
        return False
    # Equal types are not enough: two norms of different degree have one type.
    return bool(src == other_src) or _is_linear(src, other_src)


def _is_linear(*placements: Placement) -> bool:
    """Whether these are plain sums and averages, which torch merges into one division."""
    return all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in placements)


def _objection(run: list[TransformInfo], layout: Layout, rank: int) -> str | None:
    """The reason why the merge of a run would be wrong, for the report."""
    kind = collective_of(run[0])
    if kind == "all_reduce":
        # It returns the same to all ranks, in whatever order the group has them.
        return None
    axes = tuple(sorted(info.mesh_dim for info in run))
    names = ", ".join(layout.axes[i] for i in axes)
    if not _ascends(layout, rank, axes):
        return f"{kind} over ({names}) is not merged: the ranks do not ascend with the coordinate"
    if kind == "all_gather":
        # Outer axes still shard a step's logical shape. The largest is the dim of the whole run.
        source: Any = run[0].src_dst_placements[0]
        dim = source.dim
        size = max(info.logical_shape[dim] for info in run)
        if not _may_nest(size, tuple(layout.sizes[i] for i in axes)):
            return f"{kind} over ({names}) is not merged: {size} does not split evenly on dim {dim}"
    return None


@lru_cache(maxsize=1024)
def _ascends(layout: Layout, rank: int, axes: tuple[int, ...]) -> bool:
    ranks = layout.group_of(rank, axes) or ()
    return list(ranks) == sorted(ranks)


def _may_nest(size: Any, sizes: tuple[int, ...]) -> bool:
    # While torch traces, a size may be a symbol. Divisibility suffices, and torch can guard it.
    if not isinstance(size, int):
        return bool(size % math.prod(sizes) == 0)
    return _nests_evenly(size, sizes)


@lru_cache(maxsize=4096)
def _nests_evenly(size: int, sizes: tuple[int, ...]) -> bool:
    return nested_chunk_sizes(size, sizes) == chunk_sizes(size, math.prod(sizes))
