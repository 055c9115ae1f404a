"""Lightning over the backend: one argument of the strategy, and two checks.

    torchrun --nproc-per-node 2 examples/train_lightning.py

FSDP2 and tensor parallelism: ``ModelParallelStrategy(process_group_backend="meshplan")``.
"""

from __future__ import annotations

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshplan


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
        report = meshplan.verify_replicas(self.model, mesh)  # raises if a bit differs
        if self.global_rank == 0:
            print(f"{report.tensors} tensors have equal bits on all ranks")


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="meshplan"),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with meshplan.coverage(strict=True) as coverage:
        trainer.fit(Regression(), torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=4))
        coverage.end_step()
    if trainer.is_global_zero:
        print(coverage.steps[-1])


if __name__ == "__main__":
    main()
