"""Accelerate over the backend: one line, and two checks.

    torchrun --nproc-per-node 2 examples/train_accelerate.py

On GPUs, not yet run: ``Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="meshplan")])``
instead of the first line of ``main``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshplan


def main() -> None:
    dist.init_process_group("meshplan")  # Accelerate keeps the default group that it finds
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with meshplan.coverage(strict=True) as coverage:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        coverage.end_step()
    mesh = init_device_mesh("cpu", (accelerator.num_processes,), mesh_dim_names=("ddp",))
    report = meshplan.verify_replicas(model, mesh)  # raises if a bit differs
    accelerator.print(coverage.steps[-1])
    accelerator.print(f"{report.tensors} tensors have equal bits on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
