"""Ranks exchange their placement, and plans use it."""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.dtensor import _routes, discovered_cluster
from meshplan.errors import GroupAgreementError, TopologyError, TopologyInputError
from meshplan.flatten import discover
from meshplan.testing import assert_replicas_equal, bits, order_sensitive
from meshplan.topology import Topology
from meshplan.topology._model import Cluster
from tests.processes import arrive, common_result, patience, run_ranks, wait_for
from tests.refusals import refusal

pytestmark = pytest.mark.processes

P, R = Partial(), Replicate()


def on_hosts(rank: int, each: int) -> None:
    os.environ["MESHPLAN_HOST"] = f"host{rank // each}"


def gather(rank: int, world_size: int, timeout: float = 200.0, **how: Any) -> Cluster:
    return discover(c10d._get_default_store(), rank, world_size, timeout, **how)


def reduce(mesh: DeviceMesh, numel: int = 1001) -> torch.Tensor:
    """Over all axes of the mesh."""
    mine = order_sensitive(numel, rank=dist.get_rank(), world_size=dist.get_world_size())
    d = DTensor.from_local(mine, mesh, (P,) * mesh.ndim, run_check=False)
    return d.redistribute(mesh, (R,) * mesh.ndim).to_local()


def groups_of_last() -> str:
    """Of the last reduction of another kind than those before it."""
    return str(meshplan.report().entries[-1]["group"])


class TestErrors(TestCase):
    def test_absent_rank_is_named(self) -> None:
        def ranks(rank: int) -> tuple[str, tuple[int, ...]]:
            if rank == 2:
                wait_for("the error", 3)
                return "", (2,)
            with patience(3), pytest.raises(GroupAgreementError) as caught:
                gather(rank, 4, 1.0)
            arrive("the error")
            return str(caught.value), caught.value.missing

        found = run_ranks(ranks, 4)
        assert {missing for _, missing in found} == {(2,)}
        assert found[0][0] == found[1][0] == found[3][0]
        self.assertExpectedInline(
            found[0][0],
            """MP501: rank 2 did not reach the exchange of rank locations over ranks 0, 1, 2, 3 within 1 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch""",
        )

    def test_rank_of_another_version_is_named(self) -> None:
        def ranks(rank: int) -> str:
            other = mock.Mock(to_json=lambda: {"site": "moon"})
            return refusal(
                TopologyInputError, gather, rank, 2, place=(lambda: other) if rank else None
            )

        self.assertExpectedInline(
            common_result(ranks, 2),
            """MP212: not a valid RankLocation of a rank: "{'site': 'moon'}"; do all ranks run one version of meshplan?""",
        )

    def test_unknown_topology_word_is_refused(self) -> None:
        self.assertExpectedInline(
            refusal(TopologyError, meshplan.install, topology="auto"),
            """MP211: topology='auto' is not a topology; pass topology=Topology.uniform(world_size, node_size=8), or "live\"""",
        )


def test_all_ranks_get_the_same_cluster() -> None:
    def ranks(rank: int) -> Cluster:
        on_hosts(rank, 2)
        return gather(rank, 5)

    found = run_ranks(ranks, 5)
    assert found == [found[0]] * 5
    assert found[0].topology == Topology.uniform(5, node_size=2)
    assert found[0].hosts == ("host0", "host0", "host1", "host1", "host2")


def test_discovery_is_repeatable_and_recovers() -> None:
    def ranks(rank: int) -> list[str]:
        found = []
        for number in range(3):
            os.environ["MESHPLAN_HOST"] = f"try{number}"
            found.append(gather(rank, 3).hosts[0])
        if rank == 1:
            wait_for("the error", 2)
        else:
            with patience(2), pytest.raises(GroupAgreementError):
                gather(rank, 3, 1.0)
            arrive("the error")
        os.environ["MESHPLAN_HOST"] = "again"
        # Rank 1 comes to the vote that failed without it, and goes on to the next.
        found.append(gather(rank, 3).hosts[0])
        return found

    assert run_ranks(ranks, 3) == [["try0", "try1", "try2", "again"]] * 3


def test_full_reduction_discovers_and_runs_intra_node_first() -> None:
    """The bits are those without a topology."""

    def ranks(rank: int) -> None:
        on_hosts(rank, 4)
        mesh = init_device_mesh("cpu", (2, 4))
        with meshplan.installed(topology=Topology.unknown(8)):
            flat = reduce(mesh)
            assert discovered_cluster() is None
        assert groups_of_last().startswith("default group")
        with meshplan.installed():
            near_first = reduce(mesh)
        cluster = discovered_cluster()
        assert cluster is not None
        assert cluster.topology == Topology.uniform(8, node_size=4)
        assert groups_of_last().startswith("inner ")
        assert torch.equal(bits(flat), bits(near_first))
        assert_replicas_equal(near_first)

    run_ranks(ranks, 8)


def test_prepare_on_all_ranks_discovers() -> None:
    def ranks(rank: int) -> None:
        on_hosts(rank, 2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with meshplan.installed():
            meshplan.prepare(mesh)
            cluster = discovered_cluster()
            assert cluster is not None
            assert cluster.topology == Topology.uniform(4, node_size=2)
            # The prepared placement is used without another exchange.
            with mock.patch.object(_routes, "discover", side_effect=AssertionError):
                before = len(c10d._world.pg_map)
                reduce(mesh)
                assert len(c10d._world.pg_map) == before

    run_ranks(ranks, 4)


def test_sub_mesh_does_not_wait_for_other_ranks() -> None:
    """Rank 0 is in no mesh and never comes; then everybody does."""

    def ranks(rank: int) -> None:
        on_hosts(rank, 2)
        mesh = DeviceMesh("cpu", [[1, 2], [3, 4]], mesh_dim_names=("a", "b"))
        with meshplan.installed():
            if rank:
                meshplan.prepare(mesh)
                mine = torch.full((3,), float(rank))
                d = DTensor.from_local(mine, mesh, (P, P), run_check=False)
                assert d.redistribute(mesh, (R, R)).to_local().tolist() == [10.0] * 3
                d = DTensor.from_local(mine, mesh["a"], (P,), run_check=False)
                expected = [4.0] * 3 if rank in (1, 3) else [6.0] * 3
                assert d.redistribute(mesh["a"], (R,)).to_local().tolist() == expected
            assert discovered_cluster() is None
            dist.barrier()
            whole = init_device_mesh("cpu", (5,))
            reduce(whole)
            cluster = discovered_cluster()
            assert cluster is not None
            assert cluster.topology == Topology.uniform(5, node_size=2)
            if rank:
                # The same mesh as before, planned again.
                d = DTensor.from_local(torch.ones(3), mesh, (P, P), run_check=False)
                assert d.redistribute(mesh, (R, R)).to_local().tolist() == [4.0] * 3

    run_ranks(ranks, 5)


def test_install_live_discovers() -> None:
    def ranks(rank: int) -> list[str]:
        on_hosts(rank, 1)
        meshplan.install(topology="live")
        first = discovered_cluster()
        assert first is not None
        # Once for each default group.
        on_hosts(rank, 3)
        meshplan.install(topology="live", policy="consistent")
        assert discovered_cluster() is first
        return list(first.hosts)

    assert run_ranks(ranks, 3) == [["host0", "host1", "host2"]] * 3


def test_install_live_without_group_or_with_an_absent_rank_fails() -> None:
    def ranks(rank: int) -> str:
        meshplan.install(topology="live")  # no default group yet
        meshplan.uninstall()
        init_method = f"file://{os.environ['MESHPLAN_TEST_STORE']}"
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
        message = ""
        if rank == 0:
            message = refusal(GroupAgreementError, meshplan.install, topology="live", timeout=1.0)
            assert meshplan.dtensor.current_config() is None
        dist.barrier()
        dist.destroy_process_group()
        return message

    found = run_ranks(ranks, 2, init=False)
    assert 'rank 1 did not reach meshplan.install(topology="live")' in found[0]


def test_given_topology_is_not_discovered() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with (
            mock.patch.object(_routes, "discover", side_effect=AssertionError),
            meshplan.installed(topology=Topology.uniform(2, node_size=1)),
        ):
            meshplan.prepare(mesh)
            reduce(mesh)

    run_ranks(ranks, 2)


def test_topology_on_one_rank_only_is_an_error_on_all() -> None:
    def ranks(rank: int) -> str:
        mesh = init_device_mesh("cpu", (3,))
        mine = Topology.uniform(3, node_size=1) if rank == 1 else None
        with meshplan.installed(topology=mine, timeout=1.0):
            with patience(3), pytest.raises(GroupAgreementError) as caught:
                reduce(mesh)
            return str(caught.value)

    found = run_ranks(ranks, 3)
    assert all("rank 1" in found[rank] for rank in (0, 2))


def test_inconsistencies_are_logged_once() -> None:
    def ranks(rank: int) -> list[str]:
        os.environ["MESHPLAN_HOST"] = "small" if rank == 0 else "large"
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
            f"{record.levelname}: {record.getMessage()}"
        )
        logging.getLogger("meshplan").addHandler(handler)
        logging.getLogger("meshplan").setLevel(logging.INFO)
        meshplan.install(topology="live")
        return [line for line in lines if "ranks per node" in line]

    found = run_ranks(ranks, 3)
    assert found == [
        ["INFO: ranks per node differ: 2 on 1 node; 1 on small"],
        [],
        [],
    ]


def test_simulated_ranks_are_not_discovered() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with meshplan.installed(topology="live"):
            reduce(init_device_mesh("cpu", (2, 2)))
        assert discovered_cluster() is None
    finally:
        dist.destroy_process_group()
