"""The axes along which a tensor is replicated; one rank of a fake process group is enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan.errors import PlacementError
from meshplan.layout import Layout
from meshplan.replicas._comparison import ReplicaAxes
from meshplan.replicas._tensors import named_tensors

R, P, S = Replicate(), Partial(), Shard(0)
RANK = 4


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=12, store=FakeStore())
    yield
    dist.destroy_process_group()


def root() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))


def of(mesh: DeviceMesh, on: DeviceMesh | None, placements: Sequence[Placement] = ()) -> str:
    layout = Layout.from_mesh(mesh)
    tensor = torch.ones(12, 2)
    if on is not None:
        tensor = DTensor.from_local(tensor, on, placements, run_check=False)
    (named,) = named_tensors({"w": tensor})
    axes = ReplicaAxes(mesh, layout, RANK)
    try:
        found = axes.find(named)
        assert axes.find(named) == found
    except PlacementError as error:
        return str(error)
    return " ".join(layout.axes[axis] for axis in found)


def test_axes_on_the_same_mesh() -> None:
    mesh = root()
    assert of(mesh, None) == "pp dp tp"
    assert of(mesh, mesh, (R, S, R)) == "pp tp"
    assert of(mesh, mesh, (S, S, S)) == ""
    assert of(mesh, mesh, (R, R, _StridedShard(0, split_factor=3))) == "pp dp"
    again = root()
    assert of(mesh, again, (S, R, R)) == "dp tp"


def test_axes_of_slices_of_one_mesh() -> None:
    mesh = root()
    plane = mesh["dp", "tp"]
    # Axes that its own mesh does not have hold replicas.
    assert of(plane, mesh["tp"], (S,)) == "dp"
    assert of(plane, mesh["tp"], (R,)) == "dp tp"
    assert of(mesh, plane, (R, S)) == "pp dp"
    # Axes outside the compared mesh do not matter.
    assert of(mesh["dp"], mesh, (S, R, P)) == "dp"
    assert of(mesh["dp"], mesh["tp"], (S,)) == "dp"
    assert of(mesh["tp"], mesh["tp"], (S,)) == ""


def test_axes_of_flattened_meshes() -> None:
    mesh = root()
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    assert of(mesh["dp", "tp"], flat, (S,)) == ""
    assert of(mesh["dp", "tp"], flat, (R,)) == "dp tp"
    assert of(flat, mesh["dp", "tp"], (R, R)) == "dp_tp"
    assert of(flat, mesh["dp", "tp"], (S, Shard(1))) == ""


def test_axes_of_permuted_and_unnamed_meshes() -> None:
    odd = DeviceMesh("cpu", [[7, 4, 0], [2, 9, 11]])
    assert of(odd, odd, (R, S)) == "axis0"
    assert of(odd, odd, (S, R)) == "axis1"
    assert of(odd, None) == "axis0 axis1"


def test_axes_of_size_one_hold_one_replica() -> None:
    mesh = DeviceMesh("cpu", [[[4], [0]]], mesh_dim_names=("a", "b", "c"))
    assert of(mesh, None) == "b"
    assert of(mesh, mesh, (P, R, P)) == "b"


def test_placements_without_replicas_are_errors() -> None:
    mesh = root()
    plane = mesh["dp", "tp"]
    flat = plane._flatten("flat")
    other = DeviceMesh("cpu", [[4, 5], [1, 0]], mesh_dim_names=("x", "y"))
    crossed = DeviceMesh("cpu", [[4, 5], [3, 2]], mesh_dim_names=("dp", "tp"))
    cases = [
        (plane, plane, (P, R)),
        (plane, plane, (Partial("max"), S)),
        (flat, plane, (R, S)),
        (other, plane, (R, S)),
        (plane, other, (R, S)),
        (DeviceMesh("cpu", [4, 7], mesh_dim_names=("z",)), mesh["tp"], (S,)),
        (crossed, DeviceMesh("cpu", [[4, 3], [2, 5]]), (R, S)),
        # Both axes run along replicas, and the rank across holds another shard.
        (DeviceMesh("cpu", [[4, 1], [3, 2]]), DeviceMesh("cpu", [[4, 0], [1, 2], [3, 5]]), (R, S)),
    ]
    assert_expected_inline(
        "\n".join(of(*case) for case in cases),
        """\
MP401: w: float32[12, 2] (Partial(sum), Replicate()) is a partial sum along dp, so its ranks hold summands and not replicas; redistribute it to Replicate first, or leave it out
MP401: w: float32[24, 2] (Partial(max), Shard(dim=0)) is a partial sum along dp, so its ranks hold summands and not replicas; redistribute it to Replicate first, or leave it out
MP401: w: float32[24, 2] (Replicate(), Shard(dim=0)) is replicated along some axes of its mesh (dp=3, tp=2) and sharded along others, and flat runs along both; compare on a mesh that has them as axes of their own
MP401: w: float32[24, 2] (Replicate(), Shard(dim=0)) is replicated along some axes of its mesh (dp=3, tp=2) and sharded along others, and x runs along both; compare on a mesh that has them as axes of their own
MP401: w: float32[24, 2] (Replicate(), Shard(dim=0)) is placed on mesh (x=2, y=2; ranks 4, 5, 1, 0), whose axes are not axes of the mesh (dp=3, tp=2); leave mesh out to compare each tensor on its own mesh, or pass one that both are slices of
MP401: w: float32[24, 2] (Shard(dim=0),) is placed on mesh (tp=2; ranks 4..5), whose axes are not axes of the mesh (z=2; ranks 4, 7); leave mesh out to compare each tensor on its own mesh, or pass one that both are slices of
MP401: w: float32[24, 2] (Replicate(), Shard(dim=0)) is replicated along some axes of its mesh (axis0=2, axis1=2; ranks 4, 3, 2, 5) and sharded along others, and tp runs along both; compare on a mesh that has them as axes of their own
MP401: w: float32[24, 2] (Replicate(), Shard(dim=0)) is placed on mesh (axis0=3, axis1=2; ranks 4, 0, 1, 2, 3, 5), whose axes are not axes of the mesh (axis0=2, axis1=2; ranks 4, 1, 3, 2); leave mesh out to compare each tensor on its own mesh, or pass one that both are slices of""",
    )
