"""What torch itself builds from reductions, in sibling groups that span nodes in different ways."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan.testing import nccl_model
from tests.backend.native_calls import count_native_reductions
from tests.marks import full
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

STEPS, WIDTH = 6, 36


def batch(mesh: DeviceMesh, step: int) -> Tensor:
    """Of a rank's place along ``fsdp``: the groups along it are replicas of each other."""
    place = mesh.get_local_rank("fsdp")
    generator = torch.Generator().manual_seed(100 * place + step)
    return torch.randn(8, WIDTH, generator=generator) * 7.0**place


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))


def read(model: nn.Module) -> list[Tensor]:
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [one.to_local() if isinstance(one, DTensor) else one for one in parameters]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> list[Tensor]:
    for step in range(STEPS):
        F.mse_loss(model(batch(mesh, step)), torch.zeros(8, WIDTH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return read(model)


def compress(mesh: DeviceMesh) -> list[Tensor]:
    """PowerSGD, whose hook reduces in the callbacks of reductions."""
    group = mesh.get_group("fsdp")
    # Several buckets: the hook of one reduces while others are issued.
    model = DistributedDataParallel(build(), process_group=group, bucket_cap_mb=0.004)
    state = power_sgd.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=1e-2), mesh)


def shard_optimizer(mesh: DeviceMesh) -> list[Tensor]:
    """ZeRO-1."""
    # Its package calls functions of torch that warn.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = mesh.get_group("fsdp")
    model = DistributedDataParallel(build(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2
    )
    return train(model, optimizer, mesh)


def clip(mesh: DeviceMesh) -> list[Tensor]:
    """The norm of shards."""
    model = build()
    fully_shard(model, mesh=mesh["fsdp"])
    norms = []
    for step in range(STEPS):
        F.mse_loss(model(batch(mesh, step)), torch.zeros(8, WIDTH)).backward()
        for some in (model.parameters(), *([one] for one in model.parameters())):
            norm = nn.utils.clip_grad_norm_(some, 0.1)
            assert isinstance(norm, DTensor)
            norms.append(norm.full_tensor())
        model.zero_grad()
    return norms


def parallel_loss(mesh: DeviceMesh) -> list[Tensor]:
    """Cross entropy over logits that are sharded over the vocabulary."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        head = nn.Linear(WIDTH, 60)
        tokens, labels = torch.randn(16, WIDTH) * 9, torch.randint(60, (16,))
        parallel = parallelize_module(
            head, mesh["fsdp"], ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        )
        x = tokens.requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(parallel(x), labels)
            loss.backward()
        assert isinstance(loss, DTensor)
        assert x.grad is not None
        found += [loss.full_tensor().detach(), x.grad]
    return found


def hybrid(mesh: DeviceMesh) -> list[Tensor]:
    """Shards and replicas of FSDP2: no line of meshplan but the backend's name."""
    model: Any = build()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Few norms differ: those of a step decide how much both replicas are clipped.
    return [train(model, optimizer, mesh) for _ in range(5)][-1]


RECIPES: dict[str, Callable[[DeviceMesh], list[Tensor]]] = {
    "PowerSGD": compress,
    "ZeRO-1": shard_optimizer,
    "clip_grad_norm_": clip,
    "loss_parallel": parallel_loss,
    "HSDP": hybrid,
}


def count_differing(recipe: str, rank: int) -> dict[str, Any]:
    """On mesh (2, 3) over nodes of 2 ranks: tensors that differ between replicas along ``ddp``."""
    nccl_model.register()
    nccl_model.configure(domain_size=2, algorithm="tree")
    # The name of the backend is the only difference.
    os.environ["MESHPLAN_INNER"] = "nccl_model"
    store = dist.FileStore(os.environ["MESHPLAN_TEST_STORE"], 6)
    results: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for name in ("nccl_model", "meshplan"):
        own = dist.PrefixStore(name, store)
        dist.init_process_group(name, store=own, rank=rank, world_size=6)
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("ddp", "fsdp"))
        with count_native_reductions() as counts, meshplan.coverage() as covered:
            tensors = RECIPES[recipe](mesh)
        results[name] = 0
        for mine in tensors:
            found = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(found, mine.contiguous(), group=mesh.get_group("ddp"))
            results[name] += not torch.equal(*(one.view(torch.int32) for one in found))
        if name == "meshplan":
            outside = covered.steps[0].to_scalars()["meshplan/outside/count"]
            results["native"] = dict(counts) | ({"outside": outside} if outside else {})
        dist.destroy_process_group()
    return results


@pytest.mark.parametrize(
    "recipe",
    ["clip_grad_norm_", "HSDP", *map(full, ("PowerSGD", "ZeRO-1", "loss_parallel"))],
)
def test_replicas_have_equal_bits_where_plain_ones_differ(recipe: str) -> None:
    found = run_ranks(partial(count_differing, recipe), 6, init=False)
    assert max(one["nccl_model"] for one in found) > 0
    assert all(one["meshplan"] == 0 for one in found), found
    assert all(one["native"] == {} for one in found), found
