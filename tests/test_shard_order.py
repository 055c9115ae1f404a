"""Meshes with an axis whose ranks do not ascend: right, or an error, never a wrong tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import meshplan
from meshplan._chunks import chunk_sizes
from meshplan.definition import reduce_leaves
from meshplan.errors import FallbackRefusedError, ShardOrderError
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks
from tests.refusals import refusal

pytestmark = pytest.mark.processes

P, R = Partial(), Replicate()


def mesh_of(ranks: list[int]) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=("x",))


def summed(mesh: DeviceMesh, rows: int, *dst: Placement) -> DTensor:
    """A sum over all axes of ``mesh``, whose leaves are known, redistributed to ``dst``."""
    (position,) = (mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero().flatten().tolist()
    leaf = order_sensitive(rows, rank=position, world_size=mesh.mesh.numel())
    d = DTensor.from_local(leaf, mesh, [P] * mesh.ndim, run_check=False)
    return d.redistribute(mesh, dst)


def expected(mesh: DeviceMesh, rows: int) -> Tensor:
    count = mesh.mesh.numel()
    leaves = [order_sensitive(rows, rank=r, world_size=count) for r in range(count)]
    return reduce_leaves(leaves, "sum", tuple(mesh.mesh.shape))


def refused(
    function: Callable[[], object], error: type[meshplan.MeshplanError] = ShardOrderError
) -> str:
    return refusal(error, function)


class TestMessages(TestCase):
    def test_shards_by_coordinate_are_not_gathered_by_rank(self) -> None:
        def ranks(rank: int) -> list[str]:
            mesh = mesh_of([1, 0, 3, 2])
            messages = []
            with meshplan.installed():
                for rows in (4, 6, 3):
                    d = summed(mesh, rows, Shard(0))
                    (where,) = mesh.get_coordinate() or ()
                    lengths = chunk_sizes(rows, 4)
                    start = sum(lengths[:where])
                    wanted = expected(mesh, rows)[start : start + lengths[where]]
                    assert_bitwise_equal(d.to_local(), wanted)
                    messages.append(refused(d.full_tensor))
                # What torch itself slices lies by coordinate too.
                d = summed(mesh, 8, R).redistribute(mesh, (Shard(0),))
                messages.append(refused(d.full_tensor))
                assert_bitwise_equal(summed(mesh, 8, R).to_local(), expected(mesh, 8))
            return messages

        found = run_ranks(ranks, 4)
        assert all(set(messages) == {found[0][0]} for messages in found)
        self.assertExpectedInline(
            found[0][0],
            """MP403: torch would gather shards along axis x of (x=4; ranks 1, 0, 3, 2), whose ranks do not ascend, in the order of sorted ranks, but they were cut in the order of mesh coordinates; make a mesh whose ranks ascend along each axis, or go from Partial to Replicate""",
        )

    def test_gathering_shards_of_unknown_origin_warns(self) -> None:
        def ranks(rank: int) -> str:
            mesh = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("a", "b"))
            d = DTensor.from_local(torch.ones(2), mesh, (P, Shard(0)), run_check=False)
            with meshplan.installed():
                # Nothing is gathered: right.
                d.redistribute(mesh, (R, Shard(0)))
                return refused(lambda: d.redistribute(mesh, (R, R)))

        self.assertExpectedInline(
            run_ranks(ranks, 4)[0],
            """MP403: (P(sum), S(0)) -> (R, R) on (a=2, b=2; ranks 3, 2, 1, 0) moves shards along axis b, whose ranks do not ascend: torch would put them in the order of sorted ranks, not of mesh coordinates; make a mesh whose ranks ascend along each axis""",
        )

    def test_gathering_computed_shards_warns(self) -> None:
        def ranks(rank: int) -> tuple[str, str]:
            mesh = mesh_of([1, 0, 2])
            with meshplan.installed():
                d = summed(mesh, 6, Shard(0))
                with pytest.warns(UserWarning, match="meshplan") as caught:
                    (d * 2).full_tensor()
            with meshplan.installed(strict=True):
                message = refused((d * 2).full_tensor, FallbackRefusedError)
            (entry,) = meshplan.report().fallbacks
            assert (entry["ran"], entry["count"]) == ("torch", 1)
            return str(caught[0].message), message

        warning, message = run_ranks(ranks, 3)[0]
        self.assertExpectedInline(
            warning,
            """meshplan: torch gathers shards along axis x of (x=3; ranks 1, 0, 2), whose ranks do not ascend, in the order of sorted ranks; that is wrong for what was computed from shards cut in the order of mesh coordinates; make a mesh whose ranks ascend along each axis""",
        )
        self.assertExpectedInline(
            message,
            """MP701: torch would gather shards along axis x of (x=3; ranks 1, 0, 2), whose ranks do not ascend, in the order of sorted ranks, and other shards were cut there in the order of mesh coordinates; make a mesh whose ranks ascend along each axis, or write strict=False if torch has scattered these""",
        )


def test_shards_scattered_by_torch_are_gathered_by_torch() -> None:
    """Even shards that torch scattered by sorted rank, it gathers by sorted rank."""

    def ranks(rank: int) -> None:
        mesh = mesh_of([1, 0, 3, 2])
        whole = torch.arange(8.0)
        with meshplan.installed(strict=True):
            d = distribute_tensor(whole, mesh, (Shard(0),))
            assert_bitwise_equal(d.full_tensor(), whole)
            assert_bitwise_equal((d + 1).full_tensor(), whole + 1)

    run_ranks(ranks, 4)


def test_ascending_meshes_are_not_tracked() -> None:
    """Also one whose ranks ascend along each axis though not when flattened."""

    def ranks(rank: int) -> None:
        with meshplan.installed(strict=True), warnings.catch_warnings():
            warnings.simplefilter("error")
            # Another mesh has such shards.
            summed(mesh_of([1, 0, 3, 2]), 8, Shard(0))
            for mesh in (
                init_device_mesh("cpu", (2, 2)),
                DeviceMesh("cpu", [[0, 2], [1, 3]]),
            ):
                for dst in ((Shard(0), R), (R, Shard(0)), (Shard(0), Shard(0))):
                    d = summed(mesh, 5, *dst)
                    assert_bitwise_equal(d.full_tensor(), expected(mesh, 5))
                    assert_bitwise_equal((d * 1).full_tensor(), expected(mesh, 5))

    run_ranks(ranks, 4)
