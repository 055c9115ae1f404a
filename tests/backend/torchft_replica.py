"""A rank of a replica group of torchft, over the backend; its orders come by standard input.

    python -m tests.backend.torchft_replica NUMBER LIGHTHOUSE RANK RANKS PORT

The ranks of a group share a TCP store at PORT, and FSDP2 shards the model over them.

``steps COUNT PARTICIPANTS`` trains until so many steps had so many participants; ``die`` ends rank 0
in the middle of a step. Each committed step is a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import meshplan

PATIENCE = timedelta(seconds=300)


def digest(state: Any) -> str:
    """Of the bits of all tensors in a nested state."""
    found = hashlib.sha256()
    for tensor in torch.utils._pytree.tree_leaves(state):
        if isinstance(tensor, torch.Tensor):
            tensor = local(tensor)
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this rank, where there are several."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(number: int, lighthouse: str, rank: int, ranks: int, port: int) -> None:
    warnings.simplefilter("ignore")
    import torchft

    from meshplan.integrations.torchft import ProcessGroupMeshplan

    store = dist.TCPStore("localhost", port, is_master=False)
    # A group of one rank reduces nothing itself.
    backend = "gloo" if ranks == 1 else "meshplan"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(30, 50), nn.GELU(), nn.Linear(50, 30))
    if ranks > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = torchft.Manager(
        pg=ProcessGroupMeshplan(PATIENCE),
        load_state_dict=lambda state: load(model, optimizer, state),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
        rank=rank,
        world_size=ranks,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{number}",
        hostname="localhost",
    )
    managed = torchft.Optimizer(manager, optimizer)

    def train(die: bool = False) -> int:
        """Train for a step; how many took part in it, or 0 if it was not committed."""
        step = manager.current_step()
        managed.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
        batch = torch.randn(8, 30, generator=generator) * 9.0**number
        with meshplan.coverage() as coverage:
            (model(batch) - batch.roll(1, 0)).square().mean().backward()
            if die and rank == 0:
                manager.wait_quorum()
                os.kill(os.getpid(), signal.SIGKILL)
            for parameter in model.parameters():
                manager.allreduce(local(parameter.grad)).wait()
        participants = manager.num_participants()
        managed.step()
        if manager.current_step() == step or manager.errored():
            return 0
        scalars = coverage.steps[-1].to_scalars()
        found = {
            "rank": rank,
            "step": manager.current_step(),
            "participants": participants,
            "digest": digest([model.state_dict(), optimizer.state_dict()]),
            "outside": scalars["meshplan/outside/count"],
            "contract": scalars["meshplan/contract/count"],
        }
        say(json.dumps(found))
        return participants

    say("ready")
    for line in sys.stdin:
        order, *numbers = line.split()
        if order == "die":
            while True:
                train(die=True)
        count, wanted = map(int, numbers)
        while count:
            count -= train() == wanted
        say("done")
    manager.shutdown(wait=False)
    dist.destroy_process_group()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
