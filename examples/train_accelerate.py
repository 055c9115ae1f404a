"""Accelerate over the backend: one line. Two placements, plain and under the contract.

    torchrun --nproc-per-node 3 examples/train_accelerate.py

The processes add in the order of a model of NCCL. The weights of two runs whose ranks are on other
hosts differ in plain torch, and are equal over the backend. On GPUs, not yet run:
``Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="meshplan")])`` instead of the line
that creates the group.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshplan
from meshplan.testing import nccl_model


def train(hosts: tuple[int, ...], strict: bool) -> str:
    """A digest of the trained weights; ``hosts`` has the host of each rank."""
    nccl_model.configure(node_of_rank=hosts, algorithm="tree")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.randn(96, 16), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with meshplan.coverage(strict=strict) as coverage:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        coverage.end_step()
    mesh = init_device_mesh("cpu", (accelerator.num_processes,), mesh_dim_names=("ddp",))
    meshplan.verify_replicas(model, mesh)  # raises if a bit differs
    accelerator.print(coverage.steps[-1])
    weights = nn.utils.parameters_to_vector(model.parameters())
    return meshplan.replicas.digest(weights.detach())


def main() -> None:
    nccl_model.register()
    # The modelled hosts are beneath the backend too, and do not share memory.
    os.environ |= {"MESHPLAN_INNER": "nccl_model", "MESHPLAN_PATH": "exchange"}
    for backend, expected in {"nccl_model": 2, "meshplan": 1}.items():
        dist.init_process_group(backend)  # Accelerate keeps the default group that it finds
        found = {train(hosts, backend == "meshplan") for hosts in ((0, 0, 1), (0, 1, 1))}
        assert len(found) == expected, f"{backend}: {len(found)} different result(s)"
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            print(f"{backend}: {len(found)} result(s) on two placements")


if __name__ == "__main__":
    main()
