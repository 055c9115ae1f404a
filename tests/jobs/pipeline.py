"""Two stages with two replicas each; the second stage takes two optimizer steps in each round."""

import torch
import torch.distributed as dist
from digests import print_digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    torch.manual_seed(number)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(6):
        batch = torch.randn(4, 8)
        if number == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        optimizer.step()
        if number == 1:
            optimizer.step()
        optimizer.zero_grad()
    print_digest(model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
