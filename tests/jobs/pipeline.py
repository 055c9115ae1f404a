"""Two stages with two replicas each; the second stage takes two optimizer steps in each round."""

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage, replica = divmod(rank, 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(stage)
    model = DDP(nn.Linear(8, 8), process_group=groups[stage])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank)
    for _ in range(6):
        if stage == 0:
            output = model(torch.randn(4, 8))
            dist.send(output.detach(), replica + 2)
            gradient = torch.empty_like(output)
            dist.recv(gradient, replica + 2)
            output.backward(gradient)
        else:
            received = torch.empty(4, 8)
            dist.recv(received, replica)
            received.requires_grad_()
            model(received).square().mean().backward()
            dist.send(received.grad, replica)
        optimizer.step()
        if stage == 1:
            optimizer.step()
        optimizer.zero_grad()
    print_digest(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
