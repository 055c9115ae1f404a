"""A training job over the backend: HSDP, saved with DCP. As a script, a rank of it dies once.

    python -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 1 \\
        -m tests.backend.training FOLDER

Rank 2 kills itself in step 3, if no attempt came so far before. Each rank writes its shards.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WORLD = 4
STEPS = 6


def summand(rank: int, seed: int = 0) -> Tensor:
    """Each rank's numbers have another magnitude: the order of additions shows."""
    generator = torch.Generator().manual_seed(17 * rank + seed)
    return torch.randn(12, 10, generator=generator) * 9.0**rank


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Replicated over ``ddp``, sharded over ``fsdp``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """With active clipping."""
    for step in steps:
        model(summand(dist.get_rank(), step)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def read_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's shards of the parameters and of the optimizer's state."""
    shards = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for whole in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            assert isinstance(whole, DTensor)
            shards.append(whole.to_local().detach().clone())
    return shards


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load what ``dcp.save`` has written."""
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )


def main(folder: Path) -> None:
    """One attempt of the job."""
    torch.set_num_threads(1)
    dist.init_process_group("meshplan")
    model, optimizer = build()
    saved = [step for step in range(STEPS) if (folder / f"step{step}" / ".metadata").exists()]
    if saved:
        resume(model, optimizer, folder / f"step{saved[-1]}")
    for step in range(saved[-1] + 1 if saved else 0, STEPS):
        if step == 3 and dist.get_rank() == 2 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, range(step, step + 1))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step{step}")
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    found = [attempt, saved, read_shards(model, optimizer)]
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
