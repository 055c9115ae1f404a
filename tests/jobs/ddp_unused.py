"""DDP with a branch that only some steps use, and workers that load its data."""

import os

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.even, self.odd = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, step):
        return (self.odd if step % 2 else self.even)(torch.relu(self.trunk(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))  # DDP broadcasts the parameters of rank 0
    model = DDP(Model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False), num_workers=1)
    for step, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        model(batch, step).square().mean().backward()
        optimizer.step()
    print_digest(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
