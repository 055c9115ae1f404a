"""Axes and groups along which ranks hold other parameters, such as experts or pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshplan._message_text import suggest
from meshplan._torch import flattened_meshes_of, root_mesh_of
from meshplan.errors import AxisNameError, PolicyError
from meshplan.layout import Layout

DistinctAxis: TypeAlias = str | DeviceMesh | tuple[DeviceMesh, str | int] | ProcessGroup
"""The name of an axis, a mesh of one axis, a mesh and one of its axes, or a process group."""


class DistinctGroup(NamedTuple):
    """The ranks along a declared axis; ``coordinate`` is this rank's, -1 outside of them."""

    label: str
    group: ProcessGroup | None
    coordinate: int


def read_distinct(
    distinct: Iterable[DistinctAxis], meshes: Iterable[DeviceMesh]
) -> tuple[DistinctGroup, ...]:
    """The groups that ``distinct=`` declares: axes of ``meshes``, their roots or flattened meshes.
    Raises AxisNameError for an unknown axis, and PolicyError for an ambiguous or invalid one.
    """
    direct = list(dict.fromkeys(meshes))
    roots = list(dict.fromkeys(root_mesh_of(mesh) for mesh in direct))
    roots += [flat for root in roots for flat in flattened_meshes_of(root).values()]
    return tuple(_read(item, direct, roots) for item in list_distinct(distinct))


def list_distinct(
    distinct: Iterable[DistinctAxis] | DistinctAxis,
) -> list[DistinctAxis]:
    """The declarations, not checked yet; one may stand without a list."""
    items: Any = distinct
    return list(items) if isinstance(items, Iterable) and not isinstance(items, str) else [items]


def ranks_along(
    distinct: Iterable[DistinctAxis], meshes: Iterable[DeviceMesh]
) -> list[frozenset[int]]:
    """The ranks that differ from this one only along an axis that ``distinct=`` declares, for each
    axis of several ranks that include it. Raises as ``read_distinct``.
    """
    groups = [declared.group for declared in read_distinct(distinct, meshes)]
    ranks = [frozenset(dist.get_process_group_ranks(group)) for group in groups if group]
    return [along for along in ranks if len(along) > 1]


def _read(
    item: object,
    direct: Sequence[DeviceMesh],
    roots: Sequence[DeviceMesh],
) -> DistinctGroup:
    if isinstance(item, str):
        return _find_axis(item, direct, roots)
    if isinstance(item, ProcessGroup):
        return DistinctGroup("a process group", item, dist.get_rank(item))
    if item is dist.GroupMember.NON_GROUP_MEMBER:
        # What ``new_group`` returns on ranks outside of the new group.
        return DistinctGroup("a process group", None, -1)
    if isinstance(item, DeviceMesh) and item.ndim == 1:
        item = (item, 0)
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], DeviceMesh):
        layout = Layout.from_mesh(item[0])
        return _group_of(item[0], layout.axis_index(item[1]), layout)
    raise PolicyError(
        f"distinct has {item!r}; pass names of axes, (mesh, axis) pairs or process groups"
    )


def _find_axis(
    name: str,
    direct: Sequence[DeviceMesh],
    roots: Sequence[DeviceMesh],
) -> DistinctGroup:
    for meshes in (direct, roots):
        named = [mesh for mesh in meshes if name in (mesh.mesh_dim_names or ())]
        if not named:
            continue
        layouts = [Layout.from_mesh(mesh) for mesh in named]
        if len({layout.group_of(dist.get_rank(), name) for layout in layouts}) > 1:
            raise PolicyError(
                f"distinct has {name!r}, which is an axis of different ranks in the meshes "
                f"{' and '.join(map(str, layouts))}; pass (mesh, {name!r})"
            )
        return _group_of(named[0], layouts[0].axis_index(name), layouts[0])
    names = sorted({name for mesh in (*direct, *roots) for name in mesh.mesh_dim_names or ()})
    raise AxisNameError(
        f"distinct has {name!r}, and the meshes of the tensors have the axes "
        f"{', '.join(names) or '(none)'}{suggest(name, names)}; pass one of these, or "
        f"(mesh, {name!r}) with the mesh that has this axis"
    )


def _group_of(mesh: DeviceMesh, axis: int, layout: Layout) -> DistinctGroup:
    place = mesh.get_coordinate()
    if place is None:
        return DistinctGroup(layout.axes[axis], None, -1)
    return DistinctGroup(layout.axes[axis], mesh.get_group(axis), place[axis])
