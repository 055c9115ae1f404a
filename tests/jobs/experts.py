"""A dense layer that all ranks hold, and experts that two ranks each hold."""

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dense, head = nn.Linear(8, 8), nn.Linear(8, 8)
    # Ranks 0 and 2 hold one expert, ranks 1 and 3 the other.
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    mine = groups[rank % 2]
    torch.manual_seed(100 + rank % 2)
    expert = nn.Linear(8, 8)
    parameters = [*dense.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW([*parameters, *expert.parameters()], lr=1e-2)
    torch.manual_seed(1000 + rank)
    for _ in range(6):
        optimizer.zero_grad()
        head(expert(torch.relu(dense(torch.randn(4, 8))))).square().mean().backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        for parameter in expert.parameters():
            dist.all_reduce(parameter.grad, group=mine)
            parameter.grad /= 2
        optimizer.step()
    print_digest([*parameters, *expert.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
