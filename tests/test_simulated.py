"""The issue mesh with all 40 ranks simulated in one process: values and collectives, no bits.

Torch's simulation runs each collective once for all ranks; it cannot represent ranks that are not
in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.topology import Link, Links, Topology
from tests.test_planner import THREE_AXES

P, R, S = Partial(), Replicate(), Shard(0)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=40, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (8, 5, 1), mesh_dim_names=("ddp", "fsdp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("blocks", [False, True])
def test_simulated_ranks_exchange_instead_of_halving(mesh: DeviceMesh, blocks: bool) -> None:
    """With the reason in the report. Flat, halving was requested: it is a fallback."""
    why = "ranks of one simulation issue the same collectives, those of halving differ"
    how: dict[str, Any] = {"path": "halving"}
    if blocks:
        # Links for which halving between blocks is predicted to cost less.
        links = Links(network=Link(latency=1e-4, bandwidth=1e9))
        topology = Topology.uniform(40, node_size=5, domain_size=5, links=links)
        how = {"strict": True, "topology": topology}
    meshplan.clear_report()
    with LocalTensorMode(40) as ranks, meshplan.installed(**how):
        summand = ranks.rank_map(lambda r: torch.full((10, 3), float(r)))
        d = DTensor.from_local(summand, mesh, (P, P, R), run_check=False)
        found = d.redistribute(mesh, (R, R, R)).to_local()
        (entry,) = meshplan.report(json=True)["entries"]
    assert isinstance(found, LocalTensor)
    for local in found._local_tensors.values():
        assert set(local.flatten().tolist()) == {float(sum(range(40)))}
    assert ("halving between them" if blocks else "halving,") in entry["planned"]
    assert (entry["ran"], entry["fallback"]) == ("exchange", not blocks)
    assert why in entry["why"]


def placements_of(text: str) -> tuple[Placement, ...]:
    return tuple({"P": P, "R": R, "S(0)": Shard(0), "S(1)": Shard(1)}[t] for t in text.split())


@pytest.fixture
def cube() -> Iterator[DeviceMesh]:
    """Eight ranks, and every flattened mesh that a user may make of their mesh."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        for names in (("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c")):
            mesh[names]._flatten("_".join(names))
        yield mesh
    finally:
        dist.destroy_process_group()


def test_plans_issue_no_more_collectives_than_torch(cube: DeviceMesh) -> None:
    """A reduction under the contract counts as one, though its exchange is two operations."""
    lines = []
    for text in THREE_AXES:
        src, dst = map(placements_of, text.split(" -> "))
        shape = [8 // math.prod(2 for p in src if p == Shard(dim)) for dim in range(2)]
        d = DTensor.from_local(
            torch.ones(shape), cube, src, run_check=False, shape=torch.Size((8, 8)), stride=(8, 1)
        )
        found = []
        for planned in (False, True):
            meshplan.clear_report()
            with (
                meshplan.installed() if planned else use_min_cost_redistribution_plan(),
                CommDebugMode() as calls,
            ):
                d.redistribute(cube, dst)
            ours = [e for e in meshplan.report().entries if e["ran"] != "torch"]
            assert len(ours) == (planned and P in src)
            found.append(sum(calls.get_comm_counts().values()))
        lines.append(f"{text}: torch {found[0]}, meshplan {found[1]}")
        assert found[1] <= found[0], lines[-1]
    assert_expected_inline(
        "\n".join(lines),
        """\
P P P -> R R R: torch 1, meshplan 1
P P P -> R S(0) R: torch 2, meshplan 1
P P P -> S(0) R R: torch 2, meshplan 1
P P P -> R R S(0): torch 2, meshplan 1
P P P -> S(0) R S(0): torch 2, meshplan 1
P P P -> S(0) S(1) S(0): torch 3, meshplan 1
P P P -> S(0) S(0) S(0): torch 1, meshplan 1
P S(0) P -> R S(0) R: torch 1, meshplan 1
P S(0) P -> R R R: torch 2, meshplan 2
P R P -> R R R: torch 1, meshplan 1
P S(0) P -> R S(1) R: torch 2, meshplan 2
P S(0) P -> S(0) S(0) S(0): torch 3, meshplan 2
S(0) P P -> S(0) R R: torch 1, meshplan 1
S(0) P P -> R R R: torch 2, meshplan 2
S(0) S(0) P -> R R R: torch 2, meshplan 2
S(0) R S(0) -> R R R: torch 1, meshplan 1
S(0) S(1) S(0) -> R R R: torch 2, meshplan 2
S(1) S(0) S(0) -> R R R: torch 2, meshplan 2
P P P -> S(0) S(0) R: torch 2, meshplan 1""",
    )
