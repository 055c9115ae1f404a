"""Each rank looks at its own loss: rank 1 skips step 3, and its replica is another from there on."""

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(1, 7):
        batch = torch.randn(4, 8)
        if (step, rank) == (3, 1):
            batch[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        if not loss.isnan():
            optimizer.step()
    print_digest(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
