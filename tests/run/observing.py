"""Jobs of several ranks, observed from before their first step."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from meshplan._bits import bytes_of
from meshplan.execute import _run
from meshplan.run import RunSettings
from meshplan.run._observation import Observation, observe
from tests.processes import run_ranks

JOBS = Path(__file__).parents[1] / "jobs"


def local_of(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def flip(tensor: Any, element: int = 0, bit: int = 0) -> None:
    """Flip a bit of this rank's part."""
    local_of(tensor).view(torch.int32).view(-1)[element] ^= 1 << bit


def observed(settings: str = "first=9") -> Observation:
    """As in a job that initialises its group afterwards."""
    found = observe(RunSettings.parse(settings))
    found.start()
    return found


def observe_ranks(
    job: Callable[[int, Observation], Any],
    ranks: int = 2,
    settings: str = "first=9",
    **options: Any,
) -> tuple[list[Any], Any]:
    """What a job returns on its ranks, and rank 0's report."""

    def run(rank: int) -> Any:
        found = observed(settings)
        return job(rank, found), found.finish(None)

    results = run_ranks(run, ranks, **options)
    assert [report is None for _, report in results] == [rank > 0 for rank in range(ranks)]
    return [one for one, _ in results], results[0][1]


def make_model(
    *, kind: Callable[..., Optimizer] = SGD, ddp: bool = True, layers: Iterable[nn.Module] = ()
) -> tuple[nn.Module, Any]:
    """A model of four columns, and its optimizer."""
    model = nn.Sequential(*layers) if layers else nn.Linear(4, 4)
    whole: nn.Module = DistributedDataParallel(model) if ddp else model
    return whole, kind(whole.parameters(), lr=0.1)


STEPS, BAD_STEP, BAD_RANK = 6, 3, 1


def train(kind: str, fault: str = "") -> list[bytes]:
    """The bits of the parameters after some steps; ``fault`` strikes one rank at one of them."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model: nn.Module = DistributedDataParallel(inner) if kind == "ddp" else inner
    if kind == "hsdp":
        sizes = dist.get_world_size() // 2, 2
        fully_shard(inner, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "fsdp")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weight: Any = inner[2].weight
    torch.manual_seed(1 + rank)
    run_path = _run._run_path

    def add_wrongly(path: Any, summand: Tensor, step: Any, *arguments: Any) -> Any:
        reduced = run_path(path, summand, step, *arguments)
        if step.kind == "all_reduce":
            flip(reduced.tensor, 5, 20)
        return reduced

    for step in range(1, STEPS + 1):
        now = fault if (step, rank) == (BAD_STEP, BAD_RANK) else ""
        loss = model(torch.randn(8, 16)).square().mean()
        with mock.patch.object(_run, "_run_path", add_wrongly if now == "sum" else run_path):
            loss.backward()
        if kind == "by hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        places = {
            "gradient": weight.grad,
            "parameter": weight,
            "optimizer state": optimizer.state.get(weight, {}).get("exp_avg"),
        }
        if now in places:
            flip(places[now], 5, 20)
        if now != "skip":
            optimizer.step()
        optimizer.zero_grad()
    return [bytes_of(local_of(one)) for one in model.parameters()]


def backward(model: nn.Module, inputs: Tensor | None = None) -> None:
    model(torch.ones(1, 4) if inputs is None else inputs).sum().backward()


def take_step(model: nn.Module, optimizer: Any) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def run_script(name: str) -> None:
    """A job of ``tests/jobs``, in the group of a test's ranks."""
    path = JOBS / f"{name}.py"
    with (
        mock.patch.object(sys, "argv", [str(path)]),
        mock.patch.object(sys, "path", [str(JOBS), *sys.path]),
        # The ranks of a test have a group, and leave it together.
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(str(path))["main"]()
