"""The axes of a mesh along which a tensor is replicated."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from meshplan._torch import root_mesh_of
from meshplan.errors import PlacementError
from meshplan.layout import Layout
from meshplan.replicas._tensors import NamedTensor

_Coordinates = dict[int, tuple[int, ...] | None]


class ReplicaAxes:
    """The axes of one mesh along which tensors of one rank are replicated, with a cache.

    Args:
        mesh: that replicas are compared on; this rank is in it.
        layout: of ``mesh``.
        rank: this process's global rank.
    """

    def __init__(self, mesh: DeviceMesh, layout: Layout, rank: int) -> None:
        self.mesh = mesh
        self.layout = layout
        self.rank = rank
        self.wide = tuple(i for i, size in enumerate(layout.sizes) if size > 1)
        self._cache: dict[tuple[DeviceMesh, tuple[Placement, ...]], tuple[int, ...]] = {}

    def find(self, tensor: NamedTensor) -> tuple[int, ...]:
        """The axes, ascending, along which ranks hold replicas of ``tensor``; none of size 1.

        A plain tensor has replicas everywhere. A DTensor has them along the axes of its own mesh
        where it is ``Replicate``, and along axes of the root mesh that its own mesh is a slice of.
        Its mesh need not be the one of the comparison: the coordinates of ranks in both count.

        Raises:
            PlacementError: the tensor is a partial sum along an axis; an axis runs along a
                replicated and a sharded axis of the tensor at once; or the axes of the tensor's
                mesh are not axes of this one.
        """
        if tensor.mesh is None:
            return self.wide
        key = (tensor.mesh, tensor.placements)
        if key not in self._cache:
            self._cache[key] = self._find(tensor, tensor.mesh)
        return self._cache[key]

    def _find(self, tensor: NamedTensor, mesh: DeviceMesh) -> tuple[int, ...]:
        # An axis of the comparison may run along several axes of the tensor's mesh, or leave that
        # mesh. The coordinates of the same ranks in both layouts show which.
        own = Layout.from_mesh(mesh)
        places = {rank: own.coordinate(rank) for rank in own.ranks} if own != self.layout else {}
        found = []
        for axis in self.wide:
            touched, outside = {axis}, False
            if own != self.layout:
                touched, outside = self._axes_along(tensor, own, places, axis)
            placements = [tensor.placements[i] for i in touched]
            label = self.layout.axes[axis]
            if any(placement.is_partial() for placement in placements):
                raise PlacementError(
                    f"{tensor} is a partial sum along {label}, so its ranks hold summands and not "
                    "replicas; redistribute it to Replicate first, or leave it out"
                )
            if len({placement.is_replicate() for placement in placements}) > 1:
                raise PlacementError(
                    f"{tensor} is replicated along some axes of its mesh {own} and sharded along "
                    f"others, and {label} runs along both; compare on a mesh that has them as "
                    "axes of their own"
                )
            # Ranks outside the tensor's mesh hold the same tensor on a sibling slice of one root.
            # Slices of another root may hold other tensors.
            if outside and root_mesh_of(mesh) != root_mesh_of(self.mesh):
                raise self._foreign(tensor, own)
            if all(placement.is_replicate() for placement in placements):
                found.append(axis)
        self._check_group(tensor, own, places, found)
        return tuple(found)

    def _axes_along(
        self, tensor: NamedTensor, own: Layout, places: _Coordinates, axis: int
    ) -> tuple[set[int], bool]:
        """The tensor's axes that this axis runs along, and whether it leaves the tensor's mesh."""
        mine = places.get(self.rank)
        line = [places.get(r) for r in self.layout.group_of(self.rank, axis) or ()]
        inside = [place for place in line if place is not None]
        # All ranks of the line are on the tensor's mesh, or this one alone: a part of them would be
        # compared with ranks of which nothing is known.
        if mine is None or 1 < len(inside) < len(line):
            raise self._foreign(tensor, own)
        touched = {i for place in inside for i, here in enumerate(place) if here != mine[i]}
        return touched, len(inside) < len(line)

    def _check_group(
        self, tensor: NamedTensor, own: Layout, places: _Coordinates, axes: list[int]
    ) -> None:
        """All ranks that hold a replica hold the same shard, diagonally too."""
        # Each axis alone was checked. Along two at once, ranks may still differ in a sharded axis,
        # if one mesh is not a grid of the other.
        mine = places.get(self.rank)
        if mine is None or not axes:
            return
        kinds = enumerate(tensor.placements)
        # A strided shard is no shard to torch's is_shard.
        sharded = [i for i, one in kinds if not (one.is_replicate() or one.is_partial())]
        for rank in self.layout.group_of(self.rank, axes) or ():
            place = places.get(rank) or mine
            if any(place[i] != mine[i] for i in sharded):
                raise self._foreign(tensor, own)

    def _foreign(self, tensor: NamedTensor, own: Layout) -> PlacementError:
        return PlacementError(
            f"{tensor} is placed on mesh {own}, whose axes are not axes of the mesh "
            f"{self.layout}; leave mesh out to compare each tensor on its own mesh, or pass one "
            "that both are slices of"
        )
