"""A topology at work: near ranks first, the same bits, fewer bytes between nodes, the same errors."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan.errors import GroupAgreementError, TopologyError
from meshplan.flatten import registry
from meshplan.testing import order_sensitive
from meshplan.topology import Topology
from tests.processes import arrive, run_ranks, wait_for
from tests.refusals import refusal

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard
TWO_NODES = Topology.uniform(8, node_size=4, domain_size=4)


def summand(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    """One leaf per rank of the mesh, by its coordinate."""
    where = (mesh.mesh.flatten() == dist.get_rank()).nonzero().item()
    leaf = leaves(mesh, shape, dtype)[int(where)]
    return DTensor.from_local(leaf, mesh, [P] * mesh.ndim, run_check=False)


@cache
def leaves(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    count = mesh.mesh.numel()
    numel = math.prod(shape)
    return [
        order_sensitive(numel, rank=r, world_size=count, dtype=dtype).view(shape)
        for r in range(count)
    ]


def test_straddling_groups_have_no_intra_node_stage() -> None:
    """The issue's mesh in small: groups of 3 on nodes of 4."""

    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 3))
        with meshplan.installed(topology=Topology.uniform(6, node_size=4)):
            summand(mesh, (8,), torch.float32).full_tensor()
        (entry,) = meshplan.report().entries
        return entry["planned"]

    assert all("in blocks of" not in planned for planned in run_ranks(ranks, 6))


def test_prepare_creates_all_groups_of_plans() -> None:
    def ranks(rank: int) -> tuple[list[tuple[int, ...]], int, int]:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        with meshplan.installed(topology=TWO_NODES):
            groups = meshplan.prepare(mesh)
            before = len(registry()._table)
            summand(mesh, (8,), torch.float32).full_tensor()
            return [group.ranks for group in groups], before, len(registry()._table)

    for rank, (groups, before, after) in enumerate(run_ranks(ranks, 8)):
        first = rank // 4 * 4
        place = rank % 4
        assert groups == [
            tuple(range(8)),
            tuple(range(first, first + 4)),
            (place, place + 4),
        ]
        assert before == after == 3


class TestErrors(TestCase):
    def test_topology_of_another_job_is_refused(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2,))
            with (
                meshplan.installed(topology=TWO_NODES),
                pytest.raises(TopologyError) as caught,
            ):
                summand(mesh, (8,), torch.float32).full_tensor()
            return str(caught.value)

        self.assertExpectedInline(
            run_ranks(ranks, 2)[0],
            """MP211: the topology given to meshplan.install describes 8 ranks, the job has 2; install with a topology of all 2 ranks""",
        )

    def test_invalid_topology_is_refused(self) -> None:
        self.assertExpectedInline(
            refusal(TopologyError, meshplan.install, topology=8),
            """MP211: topology=8 is not a topology; pass topology=Topology.uniform(world_size, node_size=8), or "live\"""",
        )

    def test_different_topologies_are_refused(self) -> None:
        def ranks(rank: int) -> tuple[tuple[int, ...], str]:
            mesh = init_device_mesh("cpu", (2, 2))
            nodes = Topology.uniform(4, node_size=2 if rank < 3 else 4)
            with meshplan.installed(topology=nodes, timeout=20.0):
                with pytest.raises(GroupAgreementError) as caught:
                    summand(mesh, (8,), torch.float32).full_tensor()
                return caught.value.differing, str(caught.value)

        found = run_ranks(ranks, 4)
        # Rank 3 plans a flat reduction: it is found before anybody waits for a block.
        assert {differing for differing, _ in found} == {(3,)}
        self.assertExpectedInline(
            found[0][1],
            """MP501: rank 3 called the first reduction over ranks 0, 1, 2, 3 with other settings than the others. Different: topology 29b8d8bdd7c4 (ranks 0, 1, 2), 6980dfa9119b (rank 3); group in blocks (ranks 0, 1, 2), default (rank 3). No rank started it; pass the same arguments (to meshplan.install, or to the call) on every rank; after meshplan.install call meshplan.shutdown there""",
        )


@pytest.mark.full
def test_absent_rank_is_named_on_all_others() -> None:
    """Not the ranks of its block, which have given up as well."""

    def ranks(rank: int) -> tuple[int, ...] | None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        if rank == 5:
            wait_for("the error", 7)
            return None
        with (
            meshplan.installed(topology=TWO_NODES, timeout=3.0),
            pytest.raises(GroupAgreementError) as caught,
        ):
            summand(mesh, (8,), torch.float32).full_tensor()
        arrive("the error")
        return caught.value.missing

    found = [result for result in run_ranks(ranks, 8) if result is not None]
    assert found == [(5,)] * 7
