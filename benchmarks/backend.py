"""The cost of a job over the backend `meshplan`, compared with gloo: no line of the job differs.

Groups of both backends live in the same processes and take turns. A call or a step is as slow as
its slowest rank. CPU time is that of all threads of a rank, of the rank that takes most: what else
the machine does changes it less.

    gloo       the groups of all ranks, of DDP, or of all axes of the mesh are of gloo
    meshplan   they are of the backend ``meshplan``, which reduces under the contract

DDP is torch's own, with its buckets and its overlap. A training step is FSDP2 (HSDP where there are
replicas), tensor parallel styles and clipping; see ``benchmarks.training``. Several hosts are
network namespaces with a network between them, or two agents on loopback where namespaces are not
allowed.

    python -m benchmarks.backend
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import Bar, Case, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import on_ranks, say_cases, slowest
from benchmarks.training import example, on_hosts_of_mesh, options_of, stepper

BACKENDS = ("gloo", "meshplan")
# A message's bytes; the ranks on one host.
SMALL = 1 << 10
WORLD_SIZES = (2, 4, 8)
# Ranks, width and layers of the model, rows of a batch.
DDP_JOBS = ((2, 512, 8, 64), (2, 1024, 8, 32), (4, 1024, 8, 32))
# Hosts and axis sizes (ddp, fsdp, tp).
STEP_JOBS = ((1, "1,2,1"), (1, "1,2,2"), (1, "2,2,1"), (2, "1,2,1"), (2, "1,2,2"))
SMALL_BAR, DDP_BAR, STEP_BARS = 0.35, 1.0, {1: 0.95, 2: 1.1}


def in_turns(
    functions: dict[str, Callable[[], object]], rounds: int, calls: int, scale: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time and CPU time of a call in seconds times ``scale``: the mean of ``calls`` in each round.

    Who is first changes from round to round. Two calls of each round do not count: ranks come from
    a barrier, or from the other backend.
    """
    wall: dict[str, list[float]] = {name: [] for name in functions}
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for number in range(rounds + 1):
        for name in order:
            function = functions[name]
            dist.barrier()
            if calls > 1:
                function()
                function()
            started, used = time.perf_counter(), time.process_time()
            for _ in range(calls):
                function()
            seconds, used = time.perf_counter() - started, time.process_time() - used
            if number:
                wall[name].append(seconds / calls * scale)
                cpu[name].append(used / calls * scale)
        order.reverse()
    return wall, cpu


def both_cases(
    name: str,
    functions: dict[str, Callable[[], object]],
    rounds: int,
    bar: float,
    *,
    calls: int = 1,
    unit: str = "ms",
    parameters: dict[str, int | str],
) -> Iterator[Case]:
    """The time, with the bar, and the CPU time."""
    wall, cpu = in_turns(functions, rounds, calls, {"ms": 1e3, "us": 1e6}[unit])
    bars: dict[str, tuple[Bar, ...]] = {name: (at_most(bar, "meshplan", "gloo"),)}
    for text, samples in ((name, wall), (f"CPU time of that: {name}", cpu)):
        yield Case(
            name=text,
            unit=unit,
            runs=slowest(samples),
            peers=("gloo",),
            ranks=dist.get_world_size(),
            parameters=parameters | {"world_size": dist.get_world_size()},
            bars=bars.get(text, ()),
        )


def measure_small(smoke: bool) -> Iterator[Case]:
    """A small all-reduce, on every rank of a job."""
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    tensor = torch.zeros(SMALL // 4)
    functions: dict[str, Callable[[], object]] = {
        name: lambda group=group: dist.all_reduce(tensor, group=group)  # type: ignore[misc]
        for name, group in groups.items()
    }
    rounds, calls = (2, 3) if smoke else (41, 50)
    yield from both_cases(
        f"dist.all_reduce of {SMALL >> 10} KiB",
        functions,
        rounds,
        SMALL_BAR,
        calls=calls,
        unit="us",
        parameters={"bytes": SMALL},
    )


def measure_ddp(width: int, layers: int, rows: int, smoke: bool) -> Iterator[Case]:
    """Forward and backward under DDP, on every rank of a job."""
    if smoke:
        width, layers = 32, 2
    inputs = torch.randn(rows, width)

    def forward_backward(backend: str) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        group = dist.new_group(backend=backend)
        model = DistributedDataParallel(nn.Sequential(*blocks), process_group=group)

        def step() -> Tensor:
            model.zero_grad()
            loss: Tensor = model(inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        # DDP builds its buckets again after the first step.
        for _ in range(2):
            step()
        return step

    parameters = layers * width * (width + 1)
    yield from both_cases(
        f"forward and backward of DDP, {parameters / 1e6:.2g} million parameters",
        {name: forward_backward(name) for name in BACKENDS},
        2 if smoke else 21,
        DDP_BAR,
        parameters={"parameters": parameters},
    )


def measure_step(options: argparse.Namespace, hosts: int) -> Iterator[Case]:
    """A training step, on every rank of a job."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    steps: dict[str, Callable[[], object]] = {}
    for name in BACKENDS:
        of_backend = dict.fromkeys(example.AXES, name)
        mesh = init_device_mesh(
            "cpu", options.sizes, mesh_dim_names=example.AXES, backend_override=of_backend
        )
        steps[name] = stepper("plain", mesh, options)
        for _ in range(min(3, options.steps)):
            steps[name]()
    yield from both_cases(
        f"a step on mesh (ddp, fsdp, tp) = ({options.mesh}), {hosts} host{'s' * (hosts > 1)}",
        steps,
        options.steps,
        STEP_BARS[hosts],
        parameters={"hosts": hosts},
    )


def cases(smoke: bool) -> Iterator[Case]:
    """One job after the other."""
    for world_size in WORLD_SIZES[:1] if smoke else WORLD_SIZES:
        yield from on_ranks(world_size, measure_small, smoke)
    for world_size, *model in DDP_JOBS[:1] if smoke else DDP_JOBS:
        yield from on_ranks(world_size, measure_ddp, *model, smoke)
    for hosts, mesh in STEP_JOBS[:1] if smoke else STEP_JOBS:
        if hosts > 1:
            yield from on_hosts_of_mesh(__file__, hosts, mesh)
        else:
            options = options_of(mesh, smoke)
            yield from on_ranks(math.prod(options.sizes), measure_step, options, hosts)


def total(smoke: bool) -> int:
    """With those of CPU time."""
    jobs = 3 if smoke else len(WORLD_SIZES) + len(DDP_JOBS) + len(STEP_JOBS)
    return 2 * jobs


SUITE = Suite(
    __doc__ or "",
    cases,
    total,
    reasons={
        "meshplan / gloo": "FSDP2 with TP: 4 ranks share 2 cores, and steps differ by 5 % between "
        "runs"
    },
)


def main() -> None:
    """The whole suite; or, under torchrun, the ranks of one training job."""
    if "RANK" not in os.environ:
        run(SUITE)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="1,2,1", help="axis sizes: ddp,fsdp,tp")
    parser.add_argument("--hosts", type=int, default=1)
    asked = parser.parse_args()
    say_cases(measure_step(options_of(asked.mesh), asked.hosts))


if __name__ == "__main__":
    main()
