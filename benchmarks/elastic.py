"""A training step of several micro-batches per rank: elastic, and FSDP2's own accumulation.

Both reduce in each round, over the backend meshplan, and take turns in the same processes. Shown is
CPU time, without clipping and optimizer, of the slowest rank. Memory is what a rank keeps between
rounds, at most, and the gradients of the round that comes next, in copies of its shards.

    python -m benchmarks.elastic
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshplan
from benchmarks.memory import status
from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_turn, on_ranks, slowest
from benchmarks.training import example
from meshplan.elastic import GradientAccumulator

ROUNDS = 4
# Axis sizes, the width of the model, and steps.
JOBS = (((1,), 64, 40), ((2,), 64, 30), ((2, 2), 64, 15), ((2,), 256, 10), ((3,), 64, 15))
SMOKE_JOBS = (((1,), 32, 2),)
MEMORY_ROUNDS = (2, 4, 16)


def build(mesh: DeviceMesh, width: int) -> nn.Module:
    """The sharded model."""
    torch.manual_seed(0)
    model = example.ByteTransformer(width, 4)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def elastic(model: nn.Module, mesh: DeviceMesh, batches: list[torch.Tensor]) -> Callable[[], None]:
    """A function that computes the gradients of one step."""
    ranks = dist.get_world_size()
    # On a number of ranks that is no power of two, the last one repeats a micro-batch.
    micro_batches = len(batches) * ranks - (ranks & (ranks - 1) != 0)
    accumulator = GradientAccumulator(model, micro_batches, mesh)

    def step() -> None:
        for batch in batches:
            with accumulator.round():
                model(batch).backward()
        accumulator.finish()

    return step


def plain(model: nn.Module, batches: list[torch.Tensor]) -> Callable[[], None]:
    """The same by FSDP2."""

    def step() -> None:
        for batch in batches:
            (model(batch) / len(batches)).backward()

    return step


def make_mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh over the backend."""
    names = ("ddp", "fsdp")[-len(sizes) :]
    groups = ("meshplan", meshplan.BackendOptions())
    return init_device_mesh(
        "cpu", sizes, mesh_dim_names=names, backend_override=dict.fromkeys(names, groups)
    )


def measure(sizes: tuple[int, ...], width: int, steps: int) -> Iterator[Case]:
    """On every rank of a job."""
    mesh = make_mesh(sizes)
    batches = [torch.randint(256, (2, 65)) for _ in range(ROUNDS)]
    models = [build(mesh, width) for _ in range(2)]

    def before() -> None:
        for model in models:
            model.zero_grad()
        dist.barrier()

    samples = in_turn(
        {"FSDP2": plain(models[0], batches), "elastic": elastic(models[1], mesh, batches)},
        steps,
        scale=1e3,
        before=before,
        warm_up=min(5, steps),
        clock=time.thread_time,
    )
    runs = slowest(samples)
    meshplan.shutdown()
    ranks = dist.get_world_size()
    yield Case(
        name=f"gradients of {ROUNDS} rounds, width {width}, mesh {'x'.join(map(str, sizes))}",
        unit="ms",
        runs=runs,
        peers=("FSDP2",),
        ranks=ranks,
        parameters={"world_size": ranks, "width": width},
        bars=(at_most(1.05 if ranks & (ranks - 1) == 0 else 1.1, "elastic", "FSDP2"),),
    )


def kept(smoke: bool) -> Iterator[Case]:
    """On one rank: gradients of 64 MiB, whose memory the system gets back as soon as it is free."""
    mesh, width = make_mesh((1,)), 64 if smoke else 4096
    shard = width * width / 2**18
    batch = torch.randn(1, width)

    def most(rounds: int, is_elastic: bool) -> float:
        model = fully_shard(nn.Linear(width, width, bias=False), mesh=mesh)
        accumulator = GradientAccumulator(model, rounds, mesh) if is_elastic else None
        found = [0.0]
        for step in range(2):  # Buffers that stay are there after the first.
            model.zero_grad()
            before = status("VmRSS")
            for _ in range(rounds):
                with accumulator.round() if accumulator else nullcontext():
                    model(batch).sum().backward()
                if step:
                    found.append(status("VmRSS") - before)
            if accumulator:
                accumulator.finish()
        return max(found) / shard + 1

    for rounds in MEMORY_ROUNDS[: 1 if smoke else None]:
        runs = {
            name: Figures.of([most(rounds, name == "elastic")]) for name in ("FSDP2", "elastic")
        }
        bars = () if smoke else (at_most(math.log2(rounds) + 1.05, "elastic"),)
        yield Case(
            name=f"gradient memory, {rounds} rounds",
            unit="copies",
            runs=runs,
            peers=("FSDP2",),
            parameters={"rounds": rounds},
            bars=bars,
        )
    meshplan.shutdown()


def cases(smoke: bool) -> Iterator[Case]:
    """One job after the other."""
    for sizes, width, steps in SMOKE_JOBS if smoke else JOBS:
        yield from on_ranks(math.prod(sizes), measure, sizes, width, steps)
    yield from on_ranks(1, kept, smoke)


SUITE = Suite(
    __doc__ or "",
    cases,
    lambda smoke: 2 if smoke else len(JOBS) + len(MEMORY_ROUNDS),
    reasons={"elastic / FSDP2": "on AMD, with another job running; 1.02 to 1.04 on Intel"},
)

if __name__ == "__main__":
    run(SUITE)
