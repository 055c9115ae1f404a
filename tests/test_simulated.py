"""The issue mesh with all 40 ranks simulated in one process: values and collectives, no bits.

Torch's simulation runs each collective once for all ranks; it cannot represent ranks that are not
in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan

P, R, S = Partial(), Replicate(), Shard(0)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=40, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (8, 5, 1), mesh_dim_names=("ddp", "fsdp", "tp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", ["exchange", "reference"])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ((P, P, R), (R, R, R)),
        ((P, R, R), (R, R, R)),
        ((R, P, R), (R, R, R)),
        ((P, P, P), (R, S, R)),
        ((Partial("avg"), P, P), (S, R, R)),
    ],
)
def test_all_ranks_of_the_issue_mesh(
    mesh: DeviceMesh, src: tuple[Placement, ...], dst: tuple[Placement, ...], path: str
) -> None:
    with LocalTensorMode(40) as ranks, meshplan.installed(path=path, strict=True):
        summand = ranks.rank_map(lambda r: torch.full((10, 3), float(r)))
        d = DTensor.from_local(summand, mesh, src, run_check=False)
        with CommDebugMode() as calls:
            found = d.redistribute(mesh, dst).to_local()
    assert isinstance(found, LocalTensor)
    assert sum(calls.get_comm_counts().values()) == (2 if path == "exchange" else 1)
    for rank, local in found._local_tensors.items():
        where = (rank // 5, rank % 5)
        members = [
            r
            for r in range(40)
            if all(src[i].is_partial() or (r // 5, r % 5)[i] == where[i] for i in range(2))
        ]
        total = float(sum(members)) / (8 if src[0] == Partial("avg") else 1)
        assert set(local.flatten().tolist()) <= {total}
        # Ten rows over five or over eight ranks are two each, while there are any.
        sharded = [i for i, p in enumerate(dst) if p == S]
        assert local.shape[0] == (10 if not sharded else 2 if where[sharded[0]] < 5 else 0)
