"""Two models with an optimizer each; the discriminator takes two steps for one of the generator."""

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group()
    torch.manual_seed(0)
    generator, discriminator = DDP(nn.Linear(4, 8)), DDP(nn.Linear(8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        for _ in range(2):
            of_discriminator.zero_grad()
            fake = generator(torch.randn(4, 4)).detach()
            score = discriminator(torch.cat((torch.randn(4, 8) + 1, fake)))
            (score[4:].mean() - score[:4].mean()).backward()
            of_discriminator.step()
        of_generator.zero_grad()
        discriminator.requires_grad_(False)
        (-discriminator.module(generator(torch.randn(4, 4))).mean()).backward()
        discriminator.requires_grad_(True)
        of_generator.step()
    print_digest([*generator.parameters(), *discriminator.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
