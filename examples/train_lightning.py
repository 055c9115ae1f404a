"""Lightning over the backend: one argument. Two placements, plain and under the contract.

    torchrun --nproc-per-node 3 examples/train_lightning.py

The processes add in the order of a model of NCCL. The weights of two runs whose ranks are on other
hosts differ in plain torch, and are equal over the backend. FSDP2 and tensor parallelism:
``ModelParallelStrategy(process_group_backend="meshplan")``.
"""

from __future__ import annotations

import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshplan
from meshplan.testing import nccl_model


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        mesh = init_device_mesh("cpu", (self.trainer.world_size,), mesh_dim_names=("ddp",))
        meshplan.verify_replicas(self.model, mesh)  # raises if a bit differs


def train(backend: str, hosts: tuple[int, ...]) -> str:
    """A digest of the trained weights; ``hosts`` has the host of each rank."""
    nccl_model.configure(node_of_rank=hosts, algorithm="tree")
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    with meshplan.coverage(strict=backend == "meshplan") as coverage:
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(96, 16), batch_size=4))
        coverage.end_step()
    if trainer.is_global_zero:
        print(coverage.steps[-1])
    weights = nn.utils.parameters_to_vector(model.parameters())
    return meshplan.replicas.digest(weights.detach())


def main() -> None:
    nccl_model.register()
    # The modelled hosts are beneath the backend too, and do not share memory.
    os.environ |= {"MESHPLAN_INNER": "nccl_model", "MESHPLAN_PATH": "exchange"}
    for backend, expected in {"nccl_model": 2, "meshplan": 1}.items():
        found = {train(backend, hosts) for hosts in ((0, 0, 1), (0, 1, 1))}
        assert len(found) == expected, f"{backend}: {len(found)} different result(s)"
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            print(f"{backend}: {len(found)} result(s) on two placements")


if __name__ == "__main__":
    main()
