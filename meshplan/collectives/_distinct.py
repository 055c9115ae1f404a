"""The declaration of the axes along which ranks hold other parameters: experts, pipeline stages.

The placements of a DTensor show its replicas along the axes of its own mesh. Along all other axes,
ranks may hold replicas or other parameters: the caller declares it by the argument ``distinct``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshplan._torch import flattened_meshes_of, root_mesh_of
from meshplan.collectives._reduction import GroupLike, read_group
from meshplan.errors import AxisNameError, GroupStateError

DistinctAxes = Sequence[str | GroupLike]
"""Axes along which ranks hold other parameters: names, ``(mesh, axis)``, or process groups. Along
all other axes ranks hold replicas. It does not apply to a DTensor whose own mesh has the axis."""


def ranks_along(distinct: DistinctAxes, meshes: Iterable[DeviceMesh]) -> list[frozenset[int]]:
    """For each axis of ``distinct``, the ranks that differ from this one only along it. A name is
    looked up in ``meshes``, in their root meshes and in flattened ones. Axes of meshes without this
    rank are left out. Raises AxisNameError for an unknown or ambiguous name, or an element that is
    not an axis.
    """
    if isinstance(distinct, str):
        raise AxisNameError(
            f"distinct={distinct!r} is one name; pass a list of axes, distinct=[{distinct!r}]"
        )
    meshes = list(meshes)
    ranks = [
        _ranks_of_name(axis, meshes) if isinstance(axis, str) else _ranks_of_group(axis)
        for axis in distinct
    ]
    return [each for each in ranks if each]


def _ranks_of_name(name: str, meshes: Sequence[DeviceMesh]) -> frozenset[int]:
    candidates = set()
    for mesh in meshes:
        root = root_mesh_of(mesh)
        candidates |= {
            _ranks_of_group((each, name))
            for each in (mesh, root)
            if name in (each.mesh_dim_names or ())
        }
        if name in flattened_meshes_of(root):
            candidates.add(_ranks_of_group(flattened_meshes_of(root)[name]))
    if len(candidates) == 1:
        return candidates.pop()
    problem = "which is an axis of several meshes" if candidates else "which no mesh here has"
    raise AxisNameError(
        f"distinct= names the axis {name!r}, {problem}; pass (mesh, {name!r}) or a process group"
    )


def _ranks_of_group(axis: GroupLike) -> frozenset[int]:
    mesh = axis[0] if isinstance(axis, tuple) else axis
    absent = isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None
    if absent or axis == dist.GroupMember.NON_GROUP_MEMBER:
        return frozenset()
    try:
        group = read_group(axis)
    except (AxisNameError, GroupStateError) as error:
        raise AxisNameError(
            f"distinct= has {axis!r}, which is not an axis; use a name, (mesh, axis) or a process "
            "group"
        ) from error
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))
