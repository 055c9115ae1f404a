"""Replica checks over real gloo processes: what is found, what is said, and what is refused."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshplan.errors import ReplicaDivergenceError
from meshplan.replicas import verify_replicas
from tests.processes import run_ranks


def test_x() -> None:
    def ranks(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ddp", "fsdp"))
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(500, 300), torch.nn.BatchNorm1d(300))
        print(verify_replicas(model, mesh))
        if rank == 5:
            with torch.no_grad():
                model[0].weight.view(torch.int32)[7, 3] ^= 1
                model[1].running_mean[3] = -0.0
        try:
            verify_replicas(model, mesh, step=12)
        except ReplicaDivergenceError as error:
            if rank == 3:
                print(error)
                print(error.divergences[0])
        verify_replicas([torch.ones(3)] * (2 if rank == 1 else 1), mesh)
    run_ranks(ranks, 8)
