"""FSDP2 on a mesh whose ranks and hosts are variables; data are dealt by place in the mesh."""

import os

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshplan.testing import nccl_model


def numbers(name):
    return [int(word) for word in os.environ.get(name, "").split()]


def main():
    rank = int(os.environ["RANK"])
    if hosts := numbers("JOB_HOSTS"):
        # The hosts of the model, for those who observe where ranks are.
        os.environ["MESHPLAN_HOST"] = f"host{hosts[rank]}"
        nccl_model.register()
        nccl_model.configure(node_of_rank=hosts)
    dist.init_process_group("nccl_model" if hosts else "gloo")
    ranks = torch.tensor(numbers("JOB_RANKS")).view(numbers("JOB_MESH"))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "fsdp")[-ranks.dim() :])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 5))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    number = 0
    for axis, size in enumerate(ranks.shape):
        number = number * size + mesh.get_local_rank(axis)
    torch.manual_seed(100 + number)
    for _ in range(4):
        model(torch.randn(4, 7)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    print_digest(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
