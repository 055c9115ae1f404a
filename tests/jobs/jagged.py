"""Data parallelism by DTensor on a (2, 3) mesh, over a model of NCCL on hosts of two GPUs."""

import os

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from meshplan.testing import nccl_model


def main():
    # The hosts of the model, for those who observe where ranks are.
    os.environ["MESHPLAN_HOST"] = f"host{int(os.environ['RANK']) // 2}"
    nccl_model.register()
    nccl_model.configure(domain_size=2, algorithm="tree")
    dist.init_process_group("nccl_model")
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    weights = [
        nn.Parameter(distribute_tensor(torch.randn(16, 16) / 4, mesh, [Replicate(), Replicate()]))
        for _ in range(2)
    ]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        local = [w.to_local(grad_placements=[Partial("avg"), Partial("avg")]) for w in weights]
        torch.tanh(torch.randn(8, 16) @ local[0] @ local[1]).square().mean().backward()
        for w in weights:
            w.grad = w.grad.redistribute(mesh, [Replicate(), Replicate()])
            assert isinstance(w.grad, DTensor)
        optimizer.step()
        optimizer.zero_grad()
    print_digest(weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
