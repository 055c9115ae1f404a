"""FSDP2 over all ranks: every parameter is sharded, and nothing is replicated."""

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print_digest(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
